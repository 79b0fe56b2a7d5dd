"""What is known to go wrong: one function per trap, from the facts of a machine to findings."""

import importlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.version import InvalidVersion, Version

from cp_gdn.cli.doctor_facts import Facts

STOPS, WARNS = "stops", "warns"
TORCH_FLOOR = "2.8"
BROKEN_TRITON = ("3.4", "3.7.1")
"""Triton from the first up to, but not with, the second: wrong gated gradients on Hopper (flash-linear-attention
#640)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """level: "stops", a run of some kind ends with an error; "warns", it is slow or not what was meant."""

    level: str
    name: str
    what: str
    way_out: str


def findings(facts: Facts) -> list[Finding]:
    """All traps that this machine is in, those that stop a run first."""
    found = [finding for trap in TRAPS for finding in trap(facts)]
    return sorted(found, key=lambda finding: finding.level != STOPS)


def old_torch(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("torch")
    if below(version, TORCH_FLOOR):
        yield Finding(
            level=STOPS,
            name="old torch",
            what=f"torch {version} is older than {TORCH_FLOOR}",
            way_out=f"install torch>={TORCH_FLOOR}",
        )


def broken_packages(facts: Facts) -> Iterator[Finding]:
    """Packages that are installed, but cannot be imported, or have lost what the plugin holds on to."""
    for name, module in (("accelerate", "accelerate"), ("transformers", "transformers.modeling_utils")):
        if facts.versions.get(name) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            yield Finding(
                level=STOPS,
                name=f"broken {name}",
                what=f"{name} {facts.versions[name]} cannot be imported: {type(error).__name__}: {error}",
                way_out="see the error; a trap below may be its cause",
            )
    if facts.versions.get("accelerate") is not None and "accelerate" in sys.modules:
        yield from _lost_seam(facts)


def _lost_seam(facts: Facts) -> Iterator[Finding]:
    accelerator = getattr(sys.modules["accelerate"], "Accelerator", None)
    missing = [name for name in ("_prepare_cp", "maybe_context_parallel") if not hasattr(accelerator, name)]
    if missing:
        yield Finding(
            level=STOPS,
            name="another accelerate",
            what=f"accelerate {facts.versions['accelerate']} has no Accelerator.{missing[0]}, which the plugin needs",
            way_out="install accelerate 1.15, with which cp_gdn is tested",
        )


def fla_on_hopper(facts: Facts) -> Iterator[Finding]:
    fla, triton = facts.versions.get("fla"), facts.versions.get("triton")
    if fla is None or not facts.on_hopper or below(triton, BROKEN_TRITON[0]) or not below(triton, BROKEN_TRITON[1]):
        return
    yield Finding(
        level=STOPS,
        name="fla and Triton on Hopper",
        what=f"flash-linear-attention {fla} with Triton {triton}: the backward of gated layers is refused, or wrong in "
        f"old releases, on Hopper with Triton {BROKEN_TRITON[0]} to {BROKEN_TRITON[1]} (fla-org/"
        "flash-linear-attention#640); layers that cp_gdn takes over do not call it, training with cp_size 1 does",
        way_out=f"install triton>={BROKEN_TRITON[1]}",
    )


def fla_without_gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpus or any(importlib.util.find_spec(name) is None for name in ("fla", "triton")):
        return
    yield Finding(
        level=STOPS,
        name="fla and Triton without a GPU",
        what="transformers takes flash-linear-attention's kernels whenever fla and triton can be imported, also where "
        "torch sees no GPU, and then ends with '0 active drivers'; layers that cp_gdn takes over do not call them, "
        "runs with cp_size 1 and `unsharded` do",
        way_out="uninstall triton or flash-linear-attention on machines without a GPU",
    )


def shadowed_kernels(facts: Facts) -> Iterator[Finding]:
    """A package `kernels` of one's own in front of Hugging Face's. A folder without __init__.py hides nothing."""
    spec = PathFinder.find_spec("kernels", [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return
    try:
        distribution = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        where, hidden = None, "Hugging Face's package of that name would be hidden by it"
    else:
        where = Path(str(distribution.locate_file("kernels/__init__.py"))).resolve()
        hidden = f"it hides kernels {distribution.version}, from which transformers then fails to import"
    if where == Path(spec.origin).resolve():
        return
    yield Finding(
        level=STOPS if where else WARNS,
        name="a package named kernels",
        what=f"{spec.origin} is a package named kernels: {hidden}",
        way_out="rename it, or take its __init__.py away",
    )


def network_names(facts: Facts) -> Iterator[Finding]:
    """Interfaces that NCCL and gloo are told to use and that are not there."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        exact = value.startswith("=") or variable.startswith("GLOO")
        wanted = [] if value.startswith("^") else [name for name in value.lstrip("=").split(",") if name]
        if wanted and not any(has == name or (has.startswith(name) and not exact) for name in wanted for has in there):
            yield Finding(
                level=STOPS,
                name=variable,
                what=f"{variable}={value}, but this machine has only {', '.join(there)}",
                way_out="name the interface that reaches the other machines (ip -brief address), or unset it",
            )


SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of one machine exchange through host memory",
    "NCCL_SHM_DISABLE": "processes of one machine exchange through the network",
    "NCCL_IB_DISABLE": "machines exchange over TCP, not InfiniBand or RoCE",
}


def slow_settings(facts: Facts) -> Iterator[Finding]:
    for variable, effect in SLOW.items():
        if facts.environment.get(variable, "0") != "0":
            value = facts.environment[variable]
            yield Finding(
                level=WARNS, name=variable, what=f"{variable}={value}: {effect}", way_out="unset it unless you mean it"
            )
    if facts.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield Finding(
            level=WARNS,
            name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
            what="TORCH_NCCL_ASYNC_ERROR_HANDLING=0: collectives of FSDP that lose a rank hang for ever",
            way_out="unset it",
        )


def apart_gpus(facts: Facts) -> Iterator[Finding]:
    apart = [link.gpus for link in facts.links if not link.peer]
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (", .." if len(apart) > 4 else "")
        yield Finding(
            level=WARNS,
            name="no peer access",
            what=f"GPUs {pairs} do not reach each other's memory; their messages go through the host",
            way_out="keep a sequence on GPUs that do (CUDA_VISIBLE_DEVICES, parallelism_config_cp_size)",
        )


def no_compiler(facts: Facts) -> Iterator[Finding]:
    ready, wanted = facts.cached
    if facts.on_hopper and not facts.has_compiler and ready < wanted:
        yield Finding(
            level=WARNS,
            name="no compiler",
            what=f"{wanted - ready} of {wanted} kernels are not in {facts.cache} and cannot be compiled: "
            f"{facts.compiler}; the torch backend runs in place of those",
            way_out="pip install 'cp_gdn[cuda]', then cp-gdn build",
        )


def own_settings(facts: Facts) -> Iterator[Finding]:
    """CP_GDN_* that nobody reads, or that cannot be read."""
    from cp_gdn.integrations import accelerate_settings as settings

    own = {name: value for name, value in facts.environment.items() if name.startswith("CP_GDN_")}
    unknown = sorted(set(own) - known_variables())
    if unknown:
        yield Finding(
            level=WARNS,
            name="unknown setting",
            what=f"nobody reads {', '.join(unknown)}",
            way_out=f"known are {', '.join(sorted(known_variables()))}",
        )
    try:
        settings.resolve({}, own)
    except (ValueError, TypeError) as error:
        yield Finding(level=STOPS, name="bad setting", what=str(error), way_out="correct it or unset it")


def known_variables() -> set[str]:
    """CP_GDN_* that something in this package or its set-up reads."""
    from cp_gdn.integrations import accelerate_settings as settings

    options = {f"CP_GDN_{field.name.upper()}" for field in fields(settings.Settings)}
    return {*options, settings.LOG_VARIABLE, "CP_GDN_PYTHON", "CP_GDN_PREBUILD"}


def below(version: str | None, floor: str) -> bool:
    """Whether a version is below a floor; what is not installed counts as below."""
    try:
        return version is None or Version(version.split("+")[0]) < Version(floor)
    except InvalidVersion:
        return False


Trap = Callable[[Facts], Iterator[Finding]]
TRAPS: tuple[Trap, ...] = (
    old_torch,
    broken_packages,
    fla_on_hopper,
    fla_without_gpu,
    shadowed_kernels,
    network_names,
    slow_settings,
    apart_gpus,
    no_compiler,
    own_settings,
)
