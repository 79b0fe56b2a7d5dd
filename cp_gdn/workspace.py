"""Memory of a call: one layout that sizes, lists and allocates every buffer of the op itself.

A workspace holds what the op allocates between its stages: states and adjoints on their way, offsets, maps that are not
saved, what the backend asks for per chunk. It does not hold what a call hands out (results, gradients, saved tensors),
temporaries inside of torch's products, nor messages in flight.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cp_gdn.context import Context

ALIGN = 256
"""Bytes: every buffer starts at a multiple of this, as CUDA allocations and tensor maps want it."""

PHASES = ("forward", "backward")
FORMS = ("rerun", "kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer: its place in a workspace, and the stages from which to which it is alive."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    lifetime: tuple[str, str]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next buffer may start."""
        return self.offset + -(-self.nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Buffers of both phases of a call; a workspace is as large as the larger phase."""

    forward: tuple[Buffer, ...]
    backward: tuple[Buffer, ...]

    def phase(self, name: str) -> tuple[Buffer, ...]:
        return self.forward if name == "forward" else self.backward

    def nbytes(self, name: str) -> int:
        """Bytes of one phase."""
        return max((buffer.end for buffer in self.phase(name)), default=0)


def workspace_layout(ctx: "Context", *, tapes: str = "rerun", document_states: bool = True) -> Layout:
    """Every buffer of a call's forward and backward under ``ctx`` on this rank.

    Args:
        tapes: "rerun", or "kept" for a call that saves its tapes or gets them from a recompute, which
            ``Options(save="full")`` always does.
        document_states: whether initial states come in or final ones are asked for, for which the kernels need room
            with many documents; the torch backend has it always.
    """
    if tapes not in FORMS:
        raise ValueError(f"tapes: got {tapes!r}, expected one of {FORMS}")
    kept = tapes == "kept" or ctx.options.keeps_tapes
    if ctx.kernels is not None:
        how = {"kept": kept, "document_states": document_states}
        return Layout(**{phase: ctx.kernels.buffers(phase, **how) for phase in PHASES})
    return Layout(forward=_forward(ctx), backward=_backward(ctx, kept=kept))


def workspace_bytes(ctx: "Context", *, tapes: str = "rerun", document_states: bool = True) -> int:
    """Bytes that a `Workspace` needs for calls under ``ctx`` on this rank: the larger of forward and backward; see
    `workspace_layout`.

    A workspace for the rerun form serves the kept form too, and one for states of documents also calls without.
    """
    layout = workspace_layout(ctx, tapes=tapes, document_states=document_states)
    return max(layout.nbytes(phase) for phase in PHASES)


def handoff_bytes(ctx: "Context", *, use_qk_l2norm_in_kernel: bool = False) -> dict[str, int]:
    """Bytes of the tensors that a call makes and hands out, which no workspace holds; for what is saved see
    `saved_bytes`.

    Returns:
        ``o`` and ``final_state`` of a forward (the torch backend makes the latter whether it is asked for or not, the
        kernels only if it is);
        ``gradients`` of q, k, v, g and beta (the last two counted in ``ctx.state_dtype``) and
        ``initial_state_gradient`` of a backward; ``kept_tapes`` of a call that saves its tapes or hands them on.
    """
    (heads, value_heads), (key_dim, value_dim), tokens = ctx.heads, ctx.head_dims, ctx.num_tokens
    wide, state = ctx.state_dtype.itemsize, math.prod((value_heads, key_dim, value_dim)) * ctx.state_dtype.itemsize
    row = 2 * heads * key_dim + value_heads * value_dim
    shapes = ctx.tape_store.kept_shapes(heads, ctx.state_shape, l2norm=use_qk_l2norm_in_kernel)
    kept = sum(map(math.prod, shapes.values())) * ctx.tape_dtype.itemsize
    if ctx.kernels is None:
        kept += math.prod(shapes["beta"])  # which gates live: one byte per row and head
    return {
        "o": tokens * value_heads * value_dim * ctx.dtype.itemsize,
        "final_state": len(ctx.exit_docs) * state,
        "gradients": tokens * (row * ctx.dtype.itemsize + 2 * value_heads * wide),
        "initial_state_gradient": len(ctx.entry_docs) * state,
        "kept_tapes": kept,
    }


class Workspace:
    """Caller-held memory for calls, one at a time: reuse it over layers, steps and packs of up to its size.

    Args:
        nbytes: as `workspace_bytes` says; for several contexts the largest of theirs.
        device: of the calls' tensors.

    Attributes:
        bound: bytes that calls took of it so far, the most in each phase.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"nbytes: got {nbytes!r}, expected a number of bytes, as workspace_bytes(ctx) gives it")
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.bound: dict[str, int] = {}
        self._busy = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @contextmanager
    def bind(self, phase: str, buffers: tuple[Buffer, ...]) -> "Iterator[Room]":
        """The buffers of one phase of one call; RuntimeError while another call is inside."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "workspace: got one that another call is using; calls that may overlap need a workspace each"
            )
        try:
            room = Room(buffers, self.memory)
            yield room
            self.bound[phase] = max(room.used, self.bound.get(phase, 0))
        finally:
            self._busy.release()


class Room:
    """Buffers of one phase, cut from one piece of memory as they are taken, or allocated one by one on a device; none
    is cleared."""

    def __init__(self, buffers: tuple[Buffer, ...], memory: Tensor | torch.device) -> None:
        self._memory, self._buffers, self.used = memory, {buffer.name: buffer for buffer in buffers}, 0

    def holds(self, name: str) -> bool:
        """Whether a buffer is left to be taken."""
        return name in self._buffers

    def take(self, name: str) -> Tensor:
        """A buffer; each can be taken once."""
        buffer = self._buffers.pop(name)
        if isinstance(self._memory, torch.device):
            return torch.empty(buffer.shape, dtype=buffer.dtype, device=self._memory)
        self.used += buffer.end - buffer.offset
        piece = self._memory[buffer.offset : buffer.offset + buffer.nbytes]
        return piece.view(buffer.dtype).view(buffer.shape)


def bind(
    ctx: "Context", phase: str, workspace: Workspace | None, *, kept: bool = False, document_states: bool = True
) -> AbstractContextManager[Room]:
    """Buffers of a phase from the caller's workspace, or from memory that is freed at the end."""
    if ctx.kernels is not None:
        buffers = ctx.kernels.buffers(phase, kept=kept, document_states=document_states)
        if workspace is None:
            return nullcontext(Room(buffers, ctx.device))
    else:
        buffers = workspace_layout(ctx, tapes="kept" if kept else "rerun").phase(phase)
    if workspace is None:
        workspace = Workspace(max((buffer.end for buffer in buffers), default=0), ctx.device)
    return workspace.bind(phase, buffers)


def check_workspace(
    workspace: object, ctx: "Context", phases: tuple[str, ...], *, document_states: bool
) -> Workspace | None:
    """``workspace`` if it can serve ``phases`` of calls under ``ctx``, see `workspace_layout`.

    Raises:
        TypeError, ValueError: it is no workspace, lies elsewhere, or is too small.
    """
    if workspace is None:
        return None
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace: got {type(workspace).__name__}, expected a cp_gdn.Workspace, or None")
    device = workspace.memory.device
    if device.type != ctx.device.type or (ctx.device.index is not None and device.index != ctx.device.index):
        raise ValueError(f"workspace: got one on {device}, expected {ctx.device}; make it on the context's device")
    layout = workspace_layout(ctx, document_states=document_states)
    needed = max(layout.nbytes(phase) for phase in phases)
    if workspace.nbytes < needed:
        raise ValueError(
            f"workspace: got {workspace.nbytes} bytes, expected at least {needed} for {' and '.join(phases)} under "
            "this context; ask cp_gdn.workspace_bytes(ctx)"
        )
    return workspace


# ---- layouts ---------------------------------------------------------------------------------------------------------

Wanted = tuple[str, tuple[int, ...], torch.dtype, tuple[str, str]]
"""Name, shape, dtype and lifetime of a buffer."""
Untyped = tuple[str, tuple[int, ...], tuple[str, str]]
"""The same of the torch backend, whose buffers all have the dtype of states."""


def _forward(ctx: "Context") -> tuple[Buffer, ...]:
    wanted = _exchange_buffers(ctx, maps=not ctx.options.keeps_maps)
    return _typed(ctx, [*wanted, *ctx.backend.buffers("forward", ctx.state_shape, kept=ctx.options.keeps_tapes)])


def _backward(ctx: "Context", *, kept: bool) -> tuple[Buffer, ...]:
    schedule, row, wanted = ctx.schedule, ctx.state_shape, []
    if not ctx.options.keeps_states:
        wanted += _exchange_buffers(ctx, maps=True)
    elif not ctx.options.keeps_maps:
        wanted += _maps_buffer(ctx)
    wanted += [
        ("adjoints", (schedule.num_states[1], *row), ("adjoint summarize", "adjoint replay")),
        ("adjoint offsets", (schedule.num_offsets[1], *row), ("adjoint summarize", "adjoint exchange")),
    ]
    return _typed(ctx, [*wanted, *ctx.backend.buffers("backward", row, kept=kept)])


def _exchange_buffers(ctx: "Context", *, maps: bool) -> list[Untyped]:
    schedule, row = ctx.schedule, ctx.state_shape
    wanted: list[Untyped] = [
        ("states", (schedule.num_states[0], *row), ("summarize", "replay")),
        ("offsets", (schedule.num_offsets[0], *row), ("summarize", "exchange")),
    ]
    return wanted + (_maps_buffer(ctx) if maps else [])


def _maps_buffer(ctx: "Context") -> list[Untyped]:
    value_heads, key_dim, _ = ctx.state_shape
    return [("maps", (ctx.schedule.num_maps, value_heads, key_dim, key_dim), ("summarize", "fold"))]


def _typed(ctx: "Context", wanted: list[Untyped]) -> tuple[Buffer, ...]:
    return placed([(name, shape, ctx.state_dtype, lifetime) for name, shape, lifetime in wanted])


def placed(wanted: list[Wanted]) -> tuple[Buffer, ...]:
    """Buffers one after the other."""
    found: list[Buffer] = []
    for name, shape, dtype, lifetime in wanted:
        offset = found[-1].end if found else 0
        found.append(Buffer(name=name, shape=shape, dtype=dtype, offset=offset, lifetime=lifetime))
    return tuple(found)
