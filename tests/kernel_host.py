"""The kernels' own sources on the CPU: compiled by g++ against `tests/host_kernels`, where the threads of a block are
fibres that take turns. Values, barriers, copies and registers are checked without a GPU; speed is not."""

from __future__ import annotations

import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cp_gdn import context, on_kernels
from cp_gdn.backends import (
    hopper,
    hopper_backward,
    hopper_fold,
    hopper_grad,
    hopper_prepare,
    hopper_spread,
    hopper_strips,
    hopper_walk,
)
from cp_gdn.backends.choice import TORCH, BackendChoice
from cp_gdn.backends.cubins import source_folder
from cp_gdn.comm import Comm

PARAMS = {
    "prepare": "PrepareParams",
    "walk": "WalkParams",
    "adjoint": "WalkParams",
    "grad": "GradParams",
    "fold": "FoldParams",
    "spread": "SpreadParams",
}
COMPILER = shutil.which("g++")
COMPILING = threading.Lock()
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC")


@functools.cache
def folder() -> Path:
    """Sources of the kernels beside the CPU's `ptx.cuh`; CUDA's own headers are empty there."""
    found = Path(tempfile.mkdtemp(prefix="cp_gdn_host_kernels_"))
    for source in (*source_folder().glob("*.cu"), *source_folder().glob("*.cuh")):
        text = source.read_text().replace("extern __shared__ ", "extern ").replace("__shared__ ", "static ")
        (found / source.name).write_text(text)
    for source in (Path(__file__).parent / "host_kernels").iterdir():
        shutil.copy(source, found)
    for header in ("cuda_fp16.h", "cuda_bf16.h"):
        (found / header).write_text("")
    return found


def library(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.PyDLL:
    """A kernel's variant, compiled once, whichever thread of a twin asks first."""
    with COMPILING:
        return loaded(name, defines)


@functools.cache
def loaded(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.PyDLL:
    """`library` of one thread."""
    found = ctypes.PyDLL(str(compiled(name, defines)))  # one launch at a time, whatever the threads of a twin do
    found.host_launch.restype = ctypes.c_char_p
    return found


def compiled(name: str, defines: tuple[tuple[str, int], ...]) -> Path:
    """The library of a kernel's variant."""
    target = folder() / ("-".join([name, *(f"{key}{value}" for key, value in defines)]) + ".so")
    names = (f'-DSOURCE="{name}.cu"', f"-DKERNEL={name}", f"-DPARAMS={PARAMS[name]}")
    asked = [f"-D{key}={value}" for key, value in defines]
    command = [str(COMPILER), *FLAGS, f"-I{folder()}", *names, *asked, str(folder() / "launch.cpp"), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@dataclass(frozen=True, kw_only=True)
class HostKernel:
    """Like `launch.Kernel`; ``seed`` decides in which order threads and copies come to their turn."""

    library: ctypes.PyDLL
    threads: int
    seed: int
    l2norm: bool = False

    @property
    def handle(self) -> Any:
        return self.library

    smem = 0

    def launch(self, grid: tuple[int, ...], params: bytes) -> None:
        assert len(params) == self.library.host_params()
        size = (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid)))
        failure = self.library.host_launch(params, size, self.threads, self.seed)
        if failure:
            raise RuntimeError(failure.decode())


def tensor_map(x: Tensor) -> bytes:
    """`launch.tensor_map` as the CPU's `ptx.cuh` reads it."""
    return struct.pack("<16Q", x.data_ptr(), *x.shape, 2 * x.stride(0), 2 * x.stride(1), *(0,) * 10)


def strip_map(pointer: int, rows: int, width: int) -> bytes:
    """`launch.strip_map` likewise."""
    return struct.pack("<16Q", pointer, rows, 1, width, 2 * width, *(0,) * 11)


def chosen(asked: dict[str, Any], comm: Comm) -> BackendChoice:
    """The kernels for everybody who does not ask for torch."""
    return TORCH if asked["backend"] == "torch" else BackendChoice(kind="hopper", reason="a test")


@contextmanager
def host_kernels(seed: int = 0) -> Iterator[None]:
    """Every context on the CPU takes the kernels inside."""

    def load(name: str, defines: dict[str, int], threads: int, smem: int | None = None) -> HostKernel:
        return HostKernel(library=library(name, tuple(sorted(defines.items()))), threads=threads, seed=seed)

    def load_prepare(group: int, *, l2norm: bool = False) -> HostKernel:
        kernel = load("prepare", {"GROUP": group, "L2NORM": int(l2norm)}, max(128, 64 * group))
        return HostKernel(library=kernel.library, threads=kernel.threads, seed=seed, l2norm=l2norm)

    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_walk, hopper_grad, hopper_fold, hopper_spread):
            patch.setattr(module, "load", load)
        for module in (hopper, hopper_prepare):
            patch.setattr(module, "load_prepare", load_prepare)
        for module in (hopper_walk, hopper_grad):
            patch.setattr(module, "tensor_map", tensor_map)
        patch.setattr(hopper_strips, "strip_map", strip_map)
        for module in (hopper, hopper_backward, hopper_fold, on_kernels):
            patch.setattr(module, "on_device", lambda index: nullcontext())
        patch.setattr(hopper, "cubins", lambda variants: None)
        patch.setattr(hopper_grad, "_multiprocessors", lambda device: 3)
        patch.setattr(context, "choose_backend", chosen)
        yield
