"""What a call may do in a recompute of `torch.utils.checkpoint(use_reentrant=False)`, proven by the checkpoint's frame.

A frame is torch's Python object for one run of a checkpointed region: it counts the tensors that the region's forward
saved, and those that its recompute has saved so far. If the tensors that a call saves are the last ones and early stop
is on, torch ends the recompute with that call: nobody reads its output, and its own node comes first in the backward,
so tapes handed to it outlive nothing. The frame is torch's private matter, hence `VERIFIED`: releases with which
tests/test_recompute.py and test_recompute_tapes.py pass (launch/test_releases runs them). On any other release, and
wherever something is not as expected, tapes are run again.

What this module knows of a frame lies on the frame, and dies with it.
"""

import functools
import inspect
import weakref
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from cp_gdn.options import Options

VERIFIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Releases of torch whose frames are as this module reads them; compared without the local +tag."""

_NOTES = "_cp_gdn_notes"
_HOOKS = {
    "_checkpoint_hook.__init__.<locals>.pack_hook": ("frame",),
    "_recomputation_hook.__init__.<locals>.pack_hook": ("target_frame_ref", "gid"),
}
"""The hooks of a forward and of a recompute, and the names by which they hold their frame."""

NO_CHECKPOINT = "no checkpoint is active"
NO_GRADIENT = "no gradient is asked for"
OPERATOR = "the operator entry, for a compiler or a mode that looks on"
EXPLICIT = "the explicit entry"
ORIGINAL = "the original forward of a checkpoint"
CAPTURED = "a CUDA graph is being captured"
ANOTHERS = "the one kept set of the region is another call's"
PROVEN = "the last call of the region that saves anything, early stop is on"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided about a call, and why.

    Attributes:
        tapes: "saved" by the forward, "kept" from a recompute for its backward, or "rerun" in the backward.
        output: "written", or "left out" of a recompute.
    """

    tapes: str
    tapes_reason: str
    output: str
    output_reason: str


@dataclass(kw_only=True, slots=True)
class _Notes:
    """What calls left on a frame.

    Attributes:
        nodes: autograd nodes of the forward's calls, by how many tensors were saved before. handles: of layers, alike.
        kept: the one set of tapes that waits, for the node at ``kept_for`` (position, graph task).
        decisions: of the latest recompute, by position.
    """

    nodes: dict[int, "weakref.ref[Any]"] = field(default_factory=dict)
    handles: dict[int, Any] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    kept: Any = None
    kept_for: tuple[int, int] = (-1, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where a call stands in a checkpointed region. ``task``: that of the recompute, None in the forward."""

    frame: Any
    position: int
    task: Any

    @property
    def notes(self) -> _Notes:
        notes: _Notes = self.frame.__dict__.setdefault(_NOTES, _Notes())
        return notes


@functools.cache
def release() -> str:
    """Torch's release without the local +tag; the tag of a pre-release stays."""
    return str(torch.__version__).split("+")[0]


def find_region() -> Region | str:
    """The innermost checkpointed region that runs in this thread, or why there is none to be sure of."""
    if release() not in VERIFIED:
        return f"torch {release()} is none of the verified releases {', '.join(VERIFIED)}"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return NO_CHECKPOINT
    pack = inspect.unwrap(hooks[0])  # torch wraps it to keep its compiler out
    names = _HOOKS.get(getattr(pack, "__qualname__", ""))
    if names is None or getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return "saved-tensor hooks of the user's are on top"
    held = dict(zip(pack.__code__.co_freevars, (c.cell_contents for c in pack.__closure__), strict=True))
    if names[0] == "frame":
        return Region(frame=held["frame"], position=len(held["frame"].weak_holders), task=None)
    frame, gid = held["target_frame_ref"](), held["gid"]
    # NOTE: read as .get, the counter makes an entry for every key that it is asked for
    return Region(frame=frame, position=frame.recomp_counter.get(gid, 0), task=gid)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def saves_tapes(options: Options, region: Region | str, *, small: bool = False) -> str:
    """Why a forward in ``region`` saves its tapes; empty if it does not. ``small``: they are, beside the inputs."""
    if options.keeps_tapes:
        return "Options(save='full')"
    auto = options.save == "auto" and small and options.keeps_states and region in (NO_CHECKPOINT, EXPLICIT)
    return "Options(save='auto') outside of checkpoints" if auto else ""


def decide(options: Options, region: Region | str, count: int, *, small: bool = False, no_tapes: str = "") -> Decision:
    """What a call that saves ``count`` tensors does in ``region``.

    Args:
        small: see `saves_tapes`. no_tapes: why it cannot hand tapes on, or empty.
    """
    saves = saves_tapes(options, region, small=small)
    against = _against(region, count)
    output = "written" if options.recompute_output == "always" or against else "left out"
    asked = "Options(recompute_output='always')" if options.recompute_output == "always" else against
    tapes, why = ("saved", saves) if saves else _tapes(options, region, against, no_tapes)
    return Decision(tapes=tapes, tapes_reason=why, output=output, output_reason=asked or PROVEN)


@functools.lru_cache(maxsize=256)
def decide_outside(options: Options, reason: str, *, small: bool = False, no_tapes: str = "") -> Decision:
    """`decide` of a call that stands in no region for this ``reason``; it is the same for all of them."""
    return decide(options, reason, 0, small=small, no_tapes=no_tapes)


@functools.lru_cache(maxsize=64)
def named(decision: Decision) -> dict[str, Any]:
    """A decision as `Context.note_call` takes it."""
    return asdict(decision)


def _tapes(options: Options, region: Region | str, against: str, no_tapes: str) -> tuple[str, str]:
    reuse = options.reuse_recompute_tapes
    if not options.keeps_states:
        return "rerun", "Options(boundary='recompute')"
    if reuse is False:
        return "rerun", "Options(reuse_recompute_tapes=False)"
    if no_tapes:
        return "rerun", no_tapes
    if reuse is True and isinstance(region, Region) and region.task is not None:
        unsure = _unreachable(region)
        return ("rerun", unsure) if unsure else ("kept", "Options(reuse_recompute_tapes=True)")
    return ("rerun", against) if against else ("kept", PROVEN)


def _against(region: Region | str, count: int) -> str:
    """Why it is not proven that this call ends its recompute and that its node runs then; empty where it is."""
    if isinstance(region, str):
        return region
    if region.task is None:
        return ORIGINAL
    if not region.frame.early_stop:
        return "early stop is off, so the recompute runs on"
    if not region.frame.forward_completed:
        return "a backward inside of the region"
    later = len(region.frame.weak_holders) - region.position - count
    if later:
        return f"the region saves {later} tensors after this call"
    return _unreachable(region)


def _unreachable(region: Region) -> str:
    """Why the backward that runs might not come to this call's node; empty if it will."""
    if region.task != torch._C._current_graph_task_id():
        return "the recompute belongs to no single backward"
    node = region.notes.nodes.get(region.position, lambda: None)()
    if node is None:
        return "the forward made no such call"
    # the engine does not list the node that a backward starts from, but that one asked for the recompute itself
    runs = node is torch._C._current_autograd_node() or torch._C._will_engine_execute_node(node)
    return "" if runs else "this backward does not reach the call"


# ---- from a recompute to the node of its forward ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a node of a region's forward knows of it."""

    frame: "weakref.ref[Any]"
    position: int


def make_room(region: Region | str, decision: Decision) -> None:
    """Before a call of a recompute makes tapes to keep: those of an earlier call go, so that one set is alive."""
    if isinstance(region, Region) and decision.tapes == "kept":
        region.notes.kept, region.notes.kept_for = None, (-1, -1)


def leave(region: Region | str, node: Any, decision: Decision, tapes: object) -> Place | None:
    """In a forward: note the node. In a recompute: leave ``tapes`` for it."""
    if isinstance(region, str):
        return None
    notes, position = region.notes, region.position
    if region.task is None:
        notes.nodes[position] = weakref.ref(node)
        return Place(frame=weakref.ref(region.frame), position=position)
    notes.decisions[position] = decision
    if tapes is not None:
        notes.kept, notes.kept_for = tapes, (position, region.task)
    return None


def take(place: Place | None, decision: Decision) -> tuple[Decision, Any]:
    """For a node that read its saved tensors: what its recompute decided (``decision`` without one), and its tapes."""
    frame = None if place is None else place.frame()
    notes: _Notes | None = None if frame is None else frame.__dict__.get(_NOTES)
    tapes = None
    if place is not None and notes is not None:
        decision = notes.decisions.pop(place.position, decision)
        if notes.kept_for == (place.position, torch._C._current_graph_task_id()):
            tapes, notes.kept, notes.kept_for = notes.kept, None, (-1, -1)
    if decision.tapes == "kept" and tapes is None:
        decision = replace(decision, tapes="rerun", tapes_reason=ANOTHERS)
    return decision, tapes
