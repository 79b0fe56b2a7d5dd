"""The faces that others use: Hugging Face and flash-linear-attention layers, torch styles, Accelerate. No core module
imports them.
"""
