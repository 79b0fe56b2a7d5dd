"""Which backend a context takes, by what the kernels are made for and what this machine can run, and why."""

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch

from cp_gdn.backends import cubins
from cp_gdn.comm import Comm

HEAD_DIM = 128
CAPABILITY = (9, 0)
WAY_OUT = 'use backend="torch", or "auto" to take the kernels where they fit'

log = logging.getLogger("cp_gdn")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The backend of a context, the same on every rank, and why."""

    kind: str
    reason: str


TORCH = BackendChoice(kind="torch", reason="asked for")


def choose_backend(asked: dict[str, Any], comm: Comm) -> BackendChoice:
    """Resolve ``backend=`` of `build_context`'s arguments ``asked``; compiles and loads the kernels it chooses.

    ``"auto"`` on a GPU asks the other ranks through the store: if one cannot run the kernels, all take torch.

    Raises:
        RuntimeError: ``backend="hopper"``, and the kernels do not fit or cannot run here.
    """
    if asked["backend"] == "torch":
        return TORCH
    device = torch.device(asked["device"])
    against = unfit_call(asked) or unfit_machine(device, asked["heads"])
    if asked["backend"] == "hopper":
        if against:
            raise RuntimeError(f'backend="hopper": {against}; {WAY_OUT}')
        return BackendChoice(kind="hopper", reason="asked for")
    if device.type != "cuda" or unfit_call(asked):  # the same on every rank
        return BackendChoice(kind="torch", reason=f"auto: {against}")
    return _agreed(against, comm)


def _agreed(against: str, comm: Comm) -> BackendChoice:
    """The kernels if no rank has anything ``against`` them."""
    if comm.size > 1:
        reasons = enumerate(comm.share("backend", against))
        against = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons if reason)
    if not against:
        return BackendChoice(kind="hopper", reason="auto: every rank can run the kernels")
    _say_once(f"cp_gdn: the torch backend instead of the Hopper kernels: {against}")
    return BackendChoice(kind="torch", reason=f"auto: {against}")


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)


def unfit_call(asked: dict[str, Any]) -> str:
    """Why the kernels do not fit these arguments, whatever the machine; empty if they do."""
    heads, dims = asked["heads"], asked["head_dims"]
    if asked["dtype"] != torch.bfloat16:
        return f"dtype {asked['dtype']}: the kernels take torch.bfloat16"
    if tuple(dims) != (HEAD_DIM, HEAD_DIM):
        return f"head_dims {tuple(dims)}: the kernels take ({HEAD_DIM}, {HEAD_DIM})"
    if heads[1] // heads[0] not in cubins.GROUPS:
        groups = ", ".join(map(str, cubins.GROUPS))
        return f"{heads[1] // heads[0]} value heads per query/key head: the kernels take {groups}"
    return ""


def unfit_machine(device: torch.device, heads: tuple[int, int]) -> str:
    """Why this machine cannot run the kernels; empty once they are loaded."""
    if device.type != "cuda":
        return f"device {device.type}: the kernels need a Hopper GPU (sm_90)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is sm_{''.join(map(str, capability))}: the kernels need sm_90"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _unloadable(index, heads[1] // heads[0])


@functools.cache
def _unloadable(index: int, group: int) -> str:
    """What stands against loading the kernels on a device, tried once."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed; pip install 'cp_gdn[cuda]'"
    from cp_gdn.backends.hopper import load_kernels

    try:
        load_kernels(index, group)
    except (cubins.NoCompiler, FileNotFoundError) as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # nvcc's words, or a driver that is too old for the cubin
        return f"the kernels cannot be built or loaded: {error}"
    return ""
