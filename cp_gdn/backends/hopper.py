"""Host side of the Hopper kernels: what each takes, as a named struct, and its launch. One function per file in
kernels/.

State of the work: `prepare` and `walk` (o; B; M) are here and tested on the GPU. They become a backend of the op when
    the
fold and the backward kernels are there; until then contexts run the torch backend.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn.backends.cubins import cubin
from cp_gdn.plan import CHUNK

HEAD_DIM = 128
GROUPS = (1, 2, 3, 4, 8)
WALK_THREADS = 384
TILE, SQUARE = CHUNK * HEAD_DIM * 2, CHUNK * CHUNK * 2
WALK_SMEM = 3 * (3 * TILE + 2 * SQUARE) + TILE + 4 * (3 * CHUNK * 4 + 16) + 2 * CHUNK * 4 + 128 + 1024
"""Tiles of three stages, two output halves, scalars of four stages, two gate scans, barriers, and slack to align to
1024."""


def prepare_smem(group: int) -> int:
    """K K^T, beta, and the larger of (q, k) and the N of each head."""
    return CHUNK * 68 * 4 + group * CHUNK * 4 + max(2 * CHUNK * 136 * 2, group * CHUNK * 68 * 4)


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or its error."""
    from cuda.bindings import driver

    error, *value = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {error}")
    return value[0] if value else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A loaded kernel: the driver's handle, threads per block, bytes of shared memory."""

    handle: Any
    threads: int
    smem: int

    def launch(self, grid: Sequence[int], params: bytes) -> None:
        """Launch on torch's current stream; ``params`` is the kernel's one struct, copied by the driver."""
        from cuda.bindings import driver

        buffer = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = torch.cuda.current_stream().cuda_stream
        shape = (*grid, 1, 1, 1)[:3]
        _check(
            driver.cuLaunchKernel(
                self.handle, *shape, self.threads, 1, 1, self.smem, stream, ctypes.addressof(pointers), 0
            )
        )


def load(name: str, defines: dict[str, int], threads: int, smem: int) -> Kernel:
    """Compile (or take from the cache) and load ``kernels/<name>.cu`` in torch's current CUDA context."""
    from cuda.bindings import driver

    torch.cuda.current_stream()  # makes sure that there is a context
    module = _check(driver.cuModuleLoad(str(cubin(name, defines)).encode()))
    handle = _check(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(handle, limit, smem))
    return Kernel(handle=handle, threads=threads, smem=smem)


def load_prepare(group: int) -> Kernel:
    """`prepare` for ``group`` value heads per q/k head."""
    return load("prepare", {"GROUP": group}, 64 * group, prepare_smem(group))


def load_walk(*, emit_o: bool, has_v: bool) -> Kernel:
    """`walk` emitting o, or summarizing: with v the end states are B, from the identity and without v they are M."""
    return load("walk", {"EMIT_O": int(emit_o), "HAS_V": int(has_v)}, WALK_THREADS, WALK_SMEM)


def tensor_map(x: Tensor) -> bytes:
    """The 128 bytes of a TMA map over x [T, heads, 128] bf16: boxes of 64 channels, 1 head, 64 tokens; strided views
    pass."""
    from cuda.bindings import driver

    tokens, heads, dim = x.shape
    as_int64, as_int32 = driver.cuuint64_t, driver.cuuint32_t
    made = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            x.data_ptr(),
            [as_int64(n) for n in (dim, heads, tokens)],
            [as_int64(2 * n) for n in (x.stride(1), x.stride(0))],
            [as_int32(n) for n in (64, 1, CHUNK)],
            [as_int32(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(made.getPtr()), 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `prepare` leaves: N [HV, T, 64] and Q K^T [H, T, 64] in fp16, each chunk as a swizzled image."""

    n: Tensor
    qk: Tensor


def prepare(kernel: Kernel, q: Tensor, k: Tensor, beta: Tensor, chunks: Tensor) -> Prepared:
    """q, k [T, H, 128] bf16 (head rows dense), beta [T, HV] fp32, chunks [N, 2] int32 (first row, count)."""
    tokens, heads, value_heads = q.shape[0], q.shape[1], beta.shape[1]
    n = torch.empty(value_heads, tokens, CHUNK, dtype=torch.float16, device=q.device)
    qk = torch.empty(heads, tokens, CHUNK, dtype=torch.float16, device=q.device)
    pointers = [t.data_ptr() for t in (q, k, beta, n, qk, chunks)]
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
    if len(chunks):
        kernel.launch((len(chunks), heads), struct.pack("<6Q4q2i", *pointers, *strides, tokens, value_heads))
    return Prepared(n=n, qk=qk)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkInputs:
    """One call's tensors: q, k [T, H, 128] and v [T, HV, 128] bf16, g and beta [T, HV] fp32, and what `prepare`
    made."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    prepared: Prepared
    scale: float


def walk(
    kernel: Kernel, x: WalkInputs, chunks: Tensor, items: Tensor, start: Tensor | None, o: Tensor | None
) -> Tensor:
    """Walk every item; returns the end states [segments, HV, 128, 128] fp32 and fills ``o`` [T, HV, 128] if it is
    given.

    Args:
        items: [n, 4] int32: first chunk, chunks, value head, segment; the longest first. start: entry states or None
            (zero).
    """
    value_heads, group = x.v.shape[1], x.v.shape[1] // x.q.shape[1]
    segments = len(items) // value_heads
    end = torch.empty(segments, value_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=x.v.device)
    maps = b"".join(tensor_map(t) for t in (x.k, x.q, x.v, x.v if o is None else o))
    tensors = (x.prepared.n, x.prepared.qk, x.g, x.beta, chunks, items, start, end, o)
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    tail = struct.pack("<9Qf3i", *pointers, x.scale, x.v.shape[0], value_heads, group)
    params = maps + tail
    if len(items):
        kernel.launch((len(items),), params + bytes(-len(params) % 64))
    return end
