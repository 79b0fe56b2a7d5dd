"""The package version; part of every plan digest."""

__version__ = "0.1.0"
