"""What `cp-gdn doctor` finds on a machine: packages, GPUs and links, compiler and kernel cache, the environment."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from cp_gdn._version import __version__
from cp_gdn.backends import cubins

PACKAGES = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "triton": ("triton", "pytorch-triton"),
    "fla": ("flash-linear-attention", "fla-core"),
    "kernels": ("kernels",),
    "cuda-bindings": ("cuda-bindings",),
}
"""Name in the report -> distributions that bring it, the first that is installed counts."""

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CP_GDN_")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
    "OMP_NUM_THREADS",
)
HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Two GPUs: how nvidia-smi names what is between them ("" if it does not say), and whether they reach each other's
    memory."""

    gpus: tuple[int, int]
    name: str
    peer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """compiler: nvcc's version, or why there is none, as ``has_compiler`` says. cached: kernels that are ready to load,
    of all. environment: what torch, NCCL, gloo and cp_gdn will read."""

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    has_compiler: bool
    compiler: str
    cache: str
    cached: tuple[int, int]
    environment: dict[str, str]

    @property
    def on_hopper(self) -> bool:
        return any(gpu.capability == HOPPER for gpu in self.gpus)


def gather(environ: Mapping[str, str]) -> Facts:
    """Look at this machine; nothing is compiled and no process group made."""
    has_compiler, compiler = find_compiler()
    gpus = find_gpus()
    return Facts(
        versions=find_versions(),
        gpus=gpus,
        links=find_links(len(gpus), environ),
        has_compiler=has_compiler,
        compiler=compiler,
        cache=str(cubins.default_cache()),
        cached=count_cached(cubins.prebuilt_folder(), cubins.default_cache()),
        environment={name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES) or name in VARIABLES},
    )


def find_versions() -> dict[str, str | None]:
    """Versions by name, None for what is not installed."""
    found: dict[str, str | None] = {
        "cp_gdn": __version__,
        "python": platform.python_version(),
        "CUDA of torch": torch.version.cuda,
        "NCCL of torch": _nccl_version(),
    }
    for name, distributions in PACKAGES.items():
        versions = (_version(distribution) for distribution in distributions)
        found[name] = next((version for version in versions if version is not None), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch sees."""
    if not torch.cuda.is_available():
        return ()
    each = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(Gpu(name=p.name, capability=(p.major, p.minor), memory_gib=p.total_memory / 2**30) for p in each)


def find_links(count: int, environ: Mapping[str, str]) -> tuple[Link, ...]:
    """Every pair of GPUs."""
    # nvidia-smi counts all GPUs, torch only the visible ones.
    names = _topology() if count > 1 and "CUDA_VISIBLE_DEVICES" not in environ else {}
    return tuple(
        Link(gpus=pair, name=names.get(pair, ""), peer=torch.cuda.can_device_access_peer(*pair))
        for pair in combinations(range(count), 2)
    )


def _topology() -> dict[tuple[int, int], str]:
    """Link names such as NV18, PIX, SYS by pair of GPUs, from `nvidia-smi topo -m`; empty if it cannot be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, check=False)
    found: dict[tuple[int, int], str] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines():
        row = re.match(r"GPU(\d+)\t(.*)", line)
        if row:
            cells = [cell.strip() for cell in row.group(2).split("\t")]
            found |= {(int(row.group(1)), column): name for column, name in enumerate(cells)}
    return found


def find_compiler() -> tuple[bool, str]:
    """Whether there is an nvcc, and its version with its path, or why there is none."""
    try:
        nvcc = cubins.find_nvcc()
    except cubins.NoCompiler as error:
        return False, str(error)
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release \S+ V(\S+)", done.stdout)
    return done.returncode == 0, f"{release.group(1) if release else 'version not known'} at {nvcc}"


def count_cached(*folders: Path) -> tuple[int, int]:
    """How many kernels are ready in the wheel or the cache, of how many there are, whatever compiler made them."""
    names = [f"{name}-{cubins.source_key(name, defines)}-*.cubin" for name, defines in cubins.VARIANTS]
    return sum(any(any(folder.glob(name)) for folder in folders) for name in names), len(names)
