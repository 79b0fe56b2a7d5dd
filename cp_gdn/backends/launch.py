"""Launches through the CUDA driver: loaded kernels, tensor maps, the context of a thread. No mathematics, no shapes of
the model.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn.backends.cubins import cubin

TILE_TOKENS, TILE_CHANNELS = 64, 64
"""Box of a tensor map: 64 tokens of one head, 64 channels (128 bytes, the swizzle's width)."""
MAP_BYTES = 128

_HERE = threading.local()
_NOTHING = nullcontext()
_Pointers = ctypes.c_void_p * 1


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error."""
    value = _values(result)
    return value[0] if value else None


def _values(result: tuple[Any, ...]) -> list[Any]:
    """All values of a driver call, or its error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error!r}")
    return values


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def on_device(index: int) -> AbstractContextManager[None]:
    """The device is torch's current one inside, and its context the thread's: a thread that has made no runtime call
    yet has none."""
    if torch.cuda.current_device() == index and (getattr(_HERE, "bound", False) or _has_context()):
        _HERE.bound = True
        return _NOTHING
    return _bind(index)


def _has_context() -> bool:
    return int(check(_driver().cuCtxGetCurrent())) != 0


@contextmanager
def _bind(index: int) -> Iterator[None]:
    driver = _driver()
    with torch.cuda.device(index):
        if not getattr(_HERE, "bound", False):
            torch.cuda.current_stream()  # makes sure that there is a context
            check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(index))))))
            _HERE.bound = True
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A loaded kernel: the driver's handle, threads per block, bytes of shared memory."""

    handle: Any
    threads: int
    smem: int

    def launch(self, grid: Sequence[int], params: bytes) -> None:
        """Launch on torch's current stream; ``params`` is the kernel's one struct, copied by the driver."""
        buffer = ctypes.create_string_buffer(params, len(params))
        pointers = _Pointers(ctypes.addressof(buffer))  # a name: the driver reads it through a bare address
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        x, y, z = (*grid, 1, 1)[:3]
        where = ctypes.addressof(pointers)
        (error,) = _driver().cuLaunchKernel(self.handle, x, y, z, self.threads, 1, 1, self.smem, stream, where, 0)
        if error != 0:
            check((error,))


def load(name: str, defines: dict[str, int], threads: int, smem: int | None = None) -> Kernel:
    """Compile (or take from the cache) and load ``kernels/<name>.cu`` on torch's current device; a process loads it
    once per device. ``smem``: bytes of shared memory; None: what the kernel's ``shared_bytes`` says."""
    return _load(name, tuple(sorted(defines.items())), threads, smem, torch.cuda.current_device())


@functools.cache
def _load(name: str, defines: tuple[tuple[str, int], ...], threads: int, smem: int | None, device: int) -> Kernel:
    driver, path = _driver(), cubin(name, dict(defines))
    with on_device(device):
        module = check(driver.cuModuleLoad(str(path).encode()))
        handle = check(driver.cuModuleGetFunction(module, name.encode()))
        if smem is None:
            said = ctypes.c_int()
            address, size = _values(driver.cuModuleGetGlobal(module, b"shared_bytes"))
            check(driver.cuMemcpyDtoH(ctypes.addressof(said), address, size))
            smem = said.value
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(handle, limit, smem))
    return Kernel(handle=handle, threads=threads, smem=smem)


def tensor_map(x: Tensor) -> bytes:
    """The 128 bytes of a TMA map over x [T, heads, 128] bf16, made once per address, shape and strides; strided views
    pass."""
    return _tensor_map(x.data_ptr(), x.shape, x.stride())


@functools.lru_cache(maxsize=1024)
def _tensor_map(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    tokens, heads, dim = shape
    if not tokens:
        return bytes(MAP_BYTES)  # the driver makes no map of nothing, and no kernel reads it
    return _encoded(pointer, (dim, heads, tokens), (strides[1], strides[0]), (TILE_CHANNELS, 1, TILE_TOKENS), "256B")


def strip_map(pointer: int, rows: int, width: int) -> bytes:
    """A map over [rows, width] bf16, dense, of which boxes of 16 rows and 64 columns are copied: zeros beyond
    ``width``."""
    return _encoded(pointer, (width, rows), (width,), (TILE_CHANNELS, 16), "128B") if rows else bytes(MAP_BYTES)


def _encoded(pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], ahead: str) -> bytes:
    """A map over a bf16 tensor, the innermost dimension first; ``strides`` in elements, of the others."""
    driver = _driver()
    as_int64, as_int32 = driver.cuuint64_t, driver.cuuint32_t
    made = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            pointer,
            [as_int64(n) for n in sizes],
            [as_int64(2 * n) for n in strides],
            [as_int32(n) for n in box],
            [as_int32(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{ahead}"),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(made.getPtr()), MAP_BYTES)


def map_ready(x: Tensor) -> Tensor:
    """``x`` [T, heads, 128] bf16 itself where a tensor map can describe it, else a dense copy: rows dense, other
    strides multiples of 16 bytes and not 0 (an expanded tensor), address at a 16-byte border."""
    rows, heads, channels = x.stride()
    # a stride of a dim of size 1 is never followed, but a map checks it
    fits = channels == 1 and rows > 0 and heads > 0 and not (rows % 8 or heads % 8 or x.data_ptr() % 16)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
