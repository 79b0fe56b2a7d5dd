"""Kernels from source to cubin: nvcc for sm_90a, once per machine, kept by the hash of everything that decides the
result."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ARCH = "sm_90a"
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin")
HEADERS = ("ptx.cuh",)


class NoCompiler(RuntimeError):
    """No CUDA compiler was found; the message says where it was looked for."""


def source_folder() -> Path:
    """The folder of the kernel sources: package data of an installed wheel, the repository's own in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / HEADERS[0]).is_file():
            return folder
    raise FileNotFoundError(f"kernel sources: not in {package / 'kernels'} nor in {package.parent / 'kernels'}")


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


def key_of(name: str, defines: Mapping[str, int], compiler: str) -> str:
    """Hash of the sources, the defines, the flags and the compiler's version text."""
    digest = hashlib.sha256(compiler.encode())
    for file in (f"{name}.cu", *HEADERS):
        digest.update((source_folder() / file).read_bytes())
    digest.update(repr((sorted(defines.items()), FLAGS)).encode())
    return digest.hexdigest()[:24]


def cubin(name: str, defines: Mapping[str, int], cache: Path | None = None) -> Path:
    """Path of the cubin of ``kernels/<name>.cu`` with ``defines``; compiles it unless the cache has it.

    Processes that ask for the same cubin at once compile it once: the others wait for the lock of its name.

    Raises:
        NoCompiler: nothing cached and no compiler.
        RuntimeError: the compiler failed; its output is in the message.
    """
    nvcc = find_nvcc()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    folder = default_cache() if cache is None else cache
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{key_of(name, defines, version)}.cubin"
    with (folder / f"{target.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            log = compile_to(target.with_suffix(f".{os.getpid()}"), name, defines, nvcc)
            target.with_suffix(".log").write_text(log)
            target.with_suffix(f".{os.getpid()}").rename(target)
    return target


def compile_to(target: Path, name: str, defines: Mapping[str, int], nvcc: Path) -> str:
    """Compile into ``target``; returns what ptxas said of registers, spills and warnings."""
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    source = str(source_folder() / f"{name}.cu")
    command = [str(nvcc), *FLAGS, *macros, "-Xptxas", "-v", source, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on {name}.cu with {dict(defines)}:\n{done.stderr}")
    return done.stderr
