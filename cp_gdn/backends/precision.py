"""Products in the dtype they are asked for: no autocast, no TF32, and the caller's settings restored."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_BACKENDS = (torch.backends.cuda, torch.backends.mkldnn)
_MATMULS = tuple(b.matmul for b in _BACKENDS if hasattr(getattr(b, "matmul", None), "fp32_precision"))
"""Where a release keeps the precision of fp32 products (CUDA and oneDNN)."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of g, beta, maps, states and messages for inputs of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Ieee:
    """The switches belong to the process, calls may overlap (the ranks of a twin are threads): the first call that
    enters turns them, the last that leaves puts them back."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._saved: list[str] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._saved = [m.fp32_precision for m in _MATMULS]
                for m in _MATMULS:
                    m.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for m, precision in zip(_MATMULS, self._saved, strict=True):
                    m.fp32_precision = precision


_IEEE = _Ieee()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Matrix products inside run as written and without autograd, whatever autocast and the TF32 switches say
    outside."""
    with torch.no_grad(), torch.autocast(device_type=device.type, enabled=False), _IEEE:
        yield
