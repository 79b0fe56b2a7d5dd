"""Products in the dtype they are asked for: no autocast, no TF32, and the caller's settings restored."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_BACKENDS = (torch.backends.cuda, torch.backends.mkldnn)
_MATMULS = tuple(b.matmul for b in _BACKENDS if hasattr(getattr(b, "matmul", None), "fp32_precision"))
"""Where a release keeps the precision of fp32 products (CUDA and oneDNN)."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of g, beta, maps, states and messages for inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Matrix products inside run as written and without autograd, whatever autocast and the TF32 switches say
    outside."""
    saved = [m.fp32_precision for m in _MATMULS]
    with torch.no_grad(), torch.autocast(device_type=device.type, enabled=False):
        try:
            for m in _MATMULS:
                m.fp32_precision = "ieee"
            yield
        finally:
            for m, precision in zip(_MATMULS, saved, strict=True):
                m.fp32_precision = precision
