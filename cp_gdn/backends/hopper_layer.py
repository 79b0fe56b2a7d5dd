"""Which form the parts of a layer around the op take, kernels or torch, and why; and the column sums of those parts."""

import functools
import importlib.util
import logging
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from cp_gdn.backends import cubins
from cp_gdn.backends.choice import CAPABILITY, WAY_OUT, unfit_call
from cp_gdn.backends.launch import Kernel, load

if TYPE_CHECKING:
    from cp_gdn.context import Context

T = TypeVar("T")
log = logging.getLogger("cp_gdn")
SLICES, SUM_COLUMNS = 32, 32
_SUMS = struct.Struct("<2Q2i")


def taken(ctx: "Context", what: str, unfit: str, load_on: Callable[[int], T | str]) -> T | None:
    """The kernels of one part of a layer, or None where it takes its torch form.

    Ranks agree without a message: ``unfit`` is a matter of the arguments, and where a rank cannot run the op's kernels
    all ranks have agreed on torch. Where the op's kernels do not fit the arguments nobody was asked, so each rank looks
    at its own machine.

    Args:
        what: the part, for messages. unfit: why the kernels do not fit the arguments, empty if they do.
        load_on: gives the kernels on a device's index, or why they cannot be had; called on every use.

    Raises:
        RuntimeError: ``backend="hopper"``, and they do not fit or cannot be had.
    """
    if ctx.device.type != "cuda" or ctx.asked["backend"] == "torch":
        return None
    against = unfit or _against_machine(ctx)
    if not against:
        found = load_on(torch.cuda.current_device() if ctx.device.index is None else ctx.device.index)
        if not isinstance(found, str):
            return found
        against = found
    if ctx.asked["backend"] == "hopper":
        raise RuntimeError(f'backend="hopper": {what}: {against}; {WAY_OUT}')
    if not unfit:
        _say_once(f"cp_gdn: the torch form of {what} instead of its kernels: {against}")
    return None


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)


def _against_machine(ctx: "Context") -> str:
    if ctx.taken.kind == "torch" and not unfit_call(ctx.asked):
        return ctx.taken.reason
    capability = torch.cuda.get_device_capability(ctx.device)
    return "" if capability == CAPABILITY else f"sm_{''.join(map(str, capability))}: the kernels need sm_90"


def loaded(variants: list[cubins.Variant], make: Callable[[], T]) -> T | str:
    """make(), which loads the ``variants`` that are compiled here side by side; or what stands against it."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed; pip install 'cp_gdn[cuda]'"
    try:
        cubins.cubins(variants)
        return make()
    except (cubins.NoCompiler, FileNotFoundError) as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # nvcc's words, or a driver that is too old for the cubin
        return f"they cannot be built or loaded: {error}"


def load_sums() -> Kernel:
    """`sums`."""
    return load("sums", {}, 32 * SLICES, 0)


def column_sums(kernel: Kernel, parts: Tensor) -> Tensor:
    """The sum over dim 0 of ``parts`` fp32, dense, in a fixed order; on the current device."""
    out = parts.new_empty(parts.shape[1:])
    if out.numel():
        params = (parts.data_ptr(), out.data_ptr(), len(parts), out.numel())
        kernel.launch((-(-out.numel() // SUM_COLUMNS),), _SUMS.pack(*params))
    return out
