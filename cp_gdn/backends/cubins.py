"""Kernels from source to cubin: nvcc for sm_90a, once per machine, kept by the hash of everything that decides the
result."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCH = "sm_90a"
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin")
GROUPS = (1, 2, 3, 4, 8)
"""Value heads per query/key head that the kernels are made for."""
CONV_WIDTHS = range(2, 9)
"""Taps that the convolution's kernels are made for."""

Variant = tuple[str, Mapping[str, int]]

OP_VARIANTS: tuple[Variant, ...] = (
    *((name, {"GROUP": group, "L2NORM": norm}) for name in ("prepare", "grad") for group in GROUPS for norm in (0, 1)),
    ("walk", {"EMIT_O": 1, "EMIT_S": 0}),
    ("walk", {"EMIT_O": 0, "EMIT_S": 1}),
    ("walk", {"EMIT_O": 0, "EMIT_S": 0}),
    ("adjoint", {"EMIT": 0}),
    ("adjoint", {"EMIT": 1}),
    ("spread", {}),
    ("fold", {"TRANSPOSED": 0}),
    ("fold", {"TRANSPOSED": 1}),
)
"""Kernels of the op."""

LAYER_VARIANTS: tuple[Variant, ...] = (
    *((name, {"WIDTH": w, "BF16": bf16}) for name in ("conv", "conv_grad") for w in CONV_WIDTHS for bf16 in (0, 1)),
    ("norm_forward", {}),
    ("norm_grad", {}),
    ("gates", {"BACKWARD": 0}),
    ("gates", {"BACKWARD": 1}),
    ("sums", {}),
)
"""Kernels of a layer around the op: one that does not compile takes its torch form, and the op keeps its own."""

VARIANTS = (*OP_VARIANTS, *LAYER_VARIANTS)
"""Every kernel that some context may load."""


def variants_of(group: int) -> list[Variant]:
    """What the op of a context of ``group`` value heads per query/key head may load."""
    return [variant for variant in OP_VARIANTS if variant[1].get("GROUP", group) == group]


class NoCompiler(RuntimeError):
    """No CUDA compiler was found; the message says where it was looked for."""


def source_folder() -> Path:
    """The folder of the kernel sources: package data of an installed wheel, the repository's own in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "ptx.cuh").is_file():
            return folder
    raise FileNotFoundError(f"kernel sources: not in {package / 'kernels'} nor in {package.parent / 'kernels'}")


def prebuilt_folder() -> Path:
    """Where a wheel built with ``CP_GDN_PREBUILD=1`` has its cubins."""
    return Path(__file__).resolve().parents[1] / "cubins"


def default_cache() -> Path:
    """Where cubins are kept when the caller names no folder."""
    return Path.home() / ".cache" / "cp_gdn" / "cubins"


def find_nvcc() -> Path:
    """nvcc from the PATH, or from the compiler wheel of the extra ``cuda``."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for candidate in Path(root).glob("**/bin/nvcc"):
            return candidate
    raise NoCompiler("nvcc: not on the PATH and not in the package nvidia-cuda-nvcc; pip install 'cp_gdn[cuda]'")


@functools.cache
def compiler_version(nvcc: Path) -> str:
    """What the compiler says of itself."""
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def source_key(name: str, defines: Mapping[str, int]) -> str:
    """Hash of the sources, the defines and the flags."""
    digest = hashlib.sha256(repr((name, sorted(defines.items()), FLAGS)).encode())
    for file in (source_folder() / f"{name}.cu", *sorted(source_folder().glob("*.cuh"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def key_of(name: str, defines: Mapping[str, int], compiler: str) -> str:
    """`source_key` and a hash of the compiler's version text."""
    return f"{source_key(name, defines)}-{hashlib.sha256(compiler.encode()).hexdigest()[:8]}"


def _found(folder: Path, name: str, defines: Mapping[str, int]) -> Path | None:
    """The cubin of these sources in a folder, whatever compiler made it."""
    return next(iter(sorted(folder.glob(f"{name}-{source_key(name, defines)}-*.cubin"))), None)


def cubin(name: str, defines: Mapping[str, int], cache: Path | None = None) -> Path:
    """Path of the cubin of ``kernels/<name>.cu`` with ``defines``: from the wheel, from the cache, or compiled into it.

    Processes that ask for the same cubin at once compile it once: the others wait for the lock of its name. Without a
    compiler a cubin of another compiler serves.

    Raises:
        NoCompiler: nothing cached and no compiler.
        RuntimeError: the compiler failed; its output is in the message.
    """
    folder = default_cache() if cache is None else cache
    ready = _found(prebuilt_folder(), name, defines)
    if ready is not None and cache is None:
        return ready
    try:
        nvcc = find_nvcc()
    except NoCompiler:
        kept = _found(folder, name, defines)
        if kept is None:
            raise
        return kept
    target = folder / f"{name}-{key_of(name, defines, compiler_version(nvcc))}.cubin"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            own = folder / f"{target.stem}.{os.getpid()}"
            (folder / f"{target.stem}.log").write_text(compile_to(own, name, defines, nvcc))
            own.rename(target)
    return target


def cubins(variants: Iterable[Variant], cache: Path | None = None) -> list[Path]:
    """`cubin` of each, compiled side by side; a process looks for the same ones once."""
    return [*_cubins(tuple((name, tuple(defines.items())) for name, defines in variants), cache)]


@functools.cache
def _cubins(variants: tuple[tuple[str, tuple[tuple[str, int], ...]], ...], cache: Path | None) -> tuple[Path, ...]:
    # NOTE: hashing the sources takes tens of milliseconds, and every context of kernels asks.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(pool.map(lambda variant: cubin(variant[0], dict(variant[1]), cache), variants))


def compile_to(target: Path, name: str, defines: Mapping[str, int], nvcc: Path) -> str:
    """Compile into ``target``; returns what ptxas said of registers, spills and warnings."""
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    source = str(source_folder() / f"{name}.cu")
    command = [str(nvcc), *FLAGS, *macros, "-Xptxas", "-v", source, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {name}.cu with {dict(defines)}:\n{done.stderr}")
    return done.stderr
