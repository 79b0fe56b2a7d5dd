"""The kernels out of step: every thread that comes to a barrier sleeps for a while that nobody can foresee, and whoever
takes a buffer that others released overwrites it with NaN first. Bits may not move: what is read before it is there, or
after it was given back, would show.

`python -m tests.gpu.jitter` compiles them into the cache, for machines without a compiler.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cp_gdn.backends import cubins, hopper, hopper_fold, hopper_grad, hopper_prepare, hopper_walk, launch

GROUP = 3
JITTER = {"JITTER": 1}

SLEEP = """
__device__ __forceinline__ void jitter() {  // a quarter of all calls sleep up to 2 us
    u32 clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    u32 x = (clock ^ (blockIdx.x * 37 + threadIdx.x / 32) * 0x9e3779b9u) * 0x85ebca6bu;
    x ^= x >> 13;
    __nanosleep(x >> 30 ? 0 : x & 2047);
}
"""
POISON = """
__device__ __forceinline__ void poison(void* buffer, u32 bytes) {  // by one thread, which then asks for copies
    uint4* units = static_cast<uint4*>(buffer);
    for (u32 i = 0; i < bytes / 16; i++) units[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    fence_async();
}
"""
STAGE = """
    poison(sm.k[s], TILE), poison(sm.v[s], TILE), poison(sm.t[s], SQUARE), poison(&signals.scalars[s], 3 * C * 4);
#if HAS_Q
    poison(sm.q[s], TILE), poison(sm.p[s], SQUARE);
#endif
"""
BUFFERS = """
    if (buffer == QK) poison(sm.q, TILE), poison(sm.k, TILE);
    if (buffer == DOUT) poison(sm.dout, TILE);
    if (buffer == DV) poison(sm.dv, TILE);
    if (buffer == DS) poison(sm.ds, IMAGE);
    if (buffer == S0 || buffer == S1) poison(sm.s[buffer - S0], IMAGE);
    if (buffer == VN0 || buffer == VN1) poison(sm.vn[buffer - VN0], TILE);
"""
SLEEPERS = (
    "void barrier_arrive(u64* bar) {",
    "void barrier_expect(u64* bar, u32 bytes) {",
    "void barrier_wait(u64* bar, u32 parity) {",
    "void named_barrier() {",
    "void pair_barrier(int id) {",
)
POISONED = (  # file, what precedes, what is put there
    ("ptx.cuh", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }', POISON),
    ("tiles.cuh", "    barrier_wait(&signals.free[s], (c / STAGES & 1) ^ 1);", STAGE),
    ("grad_steps.cuh", "    barrier_wait(&sm.freed[buffer], (uses & 1) ^ 1);", BUFFERS),
)


def put(text: str, after: str, what: str) -> str:
    """``what`` behind the one place that reads ``after``."""
    assert text.count(after) == 1, after
    return text.replace(after, after + what)


@functools.cache
def folder() -> Path:
    """The sources of this build."""
    found = Path(tempfile.mkdtemp(prefix="cp_gdn_jitter_"))
    for source in (*cubins.source_folder().glob("*.cu"), *cubins.source_folder().glob("*.cuh")):
        shutil.copy(source, found)
    edits = [("ptx.cuh", "using u64 = unsigned long long;", SLEEP), *POISONED]
    edits += [("ptx.cuh", sleeper, "\n    jitter();\n") for sleeper in SLEEPERS]
    for name, after, what in edits:
        (found / name).write_text(put((found / name).read_text(), after, what))
    return found


def variants() -> list[cubins.Variant]:
    """Of the op."""
    return [(name, {**defines, **JITTER}) for name, defines in cubins.variants_of(GROUP)]


@contextmanager
def jittering() -> Iterator[None]:
    """Kernels and contexts that are made inside are of this build."""

    def load(name: str, defines: dict[str, int], threads: int, smem: int | None = None) -> launch.Kernel:
        return launch.load(name, {**defines, **JITTER}, threads, smem)

    where = folder()
    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_walk, hopper_grad, hopper_prepare, hopper_fold):
            patch.setattr(module, "load", load)
        patch.setattr(hopper, "cubins", lambda variants: None)
        patch.setattr(cubins, "source_folder", lambda: where)
        yield


def build(cache: Path | None = None) -> list[Any]:
    """Cubins of the build, side by side."""
    with jittering():
        return cubins.cubins(variants(), cache)


if __name__ == "__main__":
    for path in build():
        print(path)
