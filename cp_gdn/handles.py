"""What a checkpoint's original forward hands to its recompute, so that the recompute sends nothing."""

from typing import TYPE_CHECKING, Any

import torch

from cp_gdn import recompute
from cp_gdn.library import is_wanted

if TYPE_CHECKING:
    from cp_gdn.context import Context


class RecomputeHandle:
    """Carries entry states and the convolution's halo from a checkpointed forward to its recompute.

    Make one per layer and micro-step, outside of the checkpointed function, and pass it inside as ``recompute=`` of
    `causal_conv1d` and of `chunk_gated_delta_rule` (or of a `GatedDeltaNet`). The first run fills it, runs inside of a
    backward take from it and send nothing; with reentrant checkpoints too. It holds the states until it is dropped.

    Layers that are checkpointed with ``use_reentrant=False`` make their own: see `handle_here`.
    """

    __slots__ = ("_carried", "_of_region")

    def __init__(self) -> None:
        self._carried: dict[str, tuple[int, Any]] = {}
        self._of_region = False

    def take(self, what: str, ctx: "Context") -> Any:
        """What the original forward carried under the name ``what``; None if this is that forward.

        Raises:
            RuntimeError: another layer or micro-step has used this handle.
        """
        if what not in self._carried:
            return None
        if not self._of_region and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"recompute: got a handle that a forward has filled already ({what}); one handle serves one layer in "
                "one micro-step, so make a new RecomputeHandle() for every checkpointed call"
            )
        owner, carried = self._carried[what]
        if owner != ctx.handle:
            raise RuntimeError(
                "recompute: got a handle that was filled under another context; make one handle per layer and "
                "micro-step, and call backward on a batch under the context of its forward"
            )
        return carried

    def fill(self, what: str, ctx: "Context", carried: object) -> None:
        """Keep what the original forward brought."""
        self._carried.setdefault(what, (ctx.handle, carried))


def handle_here(ctx: "Context", given: RecomputeHandle | None = None) -> RecomputeHandle | None:
    """The handle of the layer that runs now: ``given``, or the one that lies on the checkpoint's frame.

    None where nothing crosses ranks, outside of a checkpoint of the kind that `recompute` can read, where a compiler or
    a mode looks on, and with ``boundary="recompute"``, which keeps nothing. Ranks agree on it: it is a matter of the
    program and of torch's release, which is in the digest.
    """
    if given is not None or ctx.exchange == "none" or is_wanted() or not ctx.options.keeps_states:
        return given
    region = recompute.find_region() if torch.is_grad_enabled() else recompute.NO_GRADIENT
    if isinstance(region, str):
        return None
    handles = region.notes.handles
    if region.task is None:  # a layer without gradients saves nothing, and the next one stands where it stood
        handles[region.position] = RecomputeHandle() if region.position not in handles else None
    handle: RecomputeHandle | None = handles.get(region.position)
    if handle is not None:
        handle._of_region = True
    return handle


def check_handle(handle: object, ctx: "Context") -> RecomputeHandle | None:
    """``handle`` if it fits this call.

    Raises:
        TypeError, ValueError, NotImplementedError: it does not.
    """
    if handle is None:
        return None
    if not isinstance(handle, RecomputeHandle):
        raise TypeError(f"recompute: got {type(handle).__name__}, expected a cp_gdn.RecomputeHandle, or None")
    if not ctx.options.keeps_states:
        raise ValueError("recompute: got a handle under Options(boundary='recompute'), which keeps nothing; pass None")
    if is_wanted():
        raise NotImplementedError(
            "recompute: got a handle where a compiler or a mode sees operators only; pass None, and save the operators "
            "cp_gdn::forward and cp_gdn::conv_forward by the checkpoint's policy instead"
        )
    return handle
