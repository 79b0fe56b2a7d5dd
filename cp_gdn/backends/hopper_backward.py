"""The backward of a context on the Hopper kernels.

prepare -> adjoint walk for Bt -> fold -> exchange -> fold -> per slab: walk for S and Vn, adjoint walk for dv and dS',
grad. After the folds segments are independent, so slabs change no bit. What `prepare` makes may come from the forward.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.backends import hopper_walk
from cp_gdn.backends.hopper import HopperBackend, Uploaded
from cp_gdn.backends.hopper_grad import KernelGradients, grad, load_grad
from cp_gdn.backends.hopper_items import ADJOINT_SUMMARY
from cp_gdn.backends.hopper_memory import MemorySizes, buffers_of
from cp_gdn.backends.hopper_prepare import prepared_parts
from cp_gdn.backends.hopper_slabs import NO_ADJOINT, NO_STATE
from cp_gdn.backends.hopper_spread import Spread
from cp_gdn.backends.hopper_tables import KernelTables, rows_index
from cp_gdn.backends.hopper_walk import (
    Ends,
    Items,
    SlabTapes,
    Summaries,
    WalkInputs,
    load_adjoint,
    load_walk,
)
from cp_gdn.backends.launch import Kernel, map_ready, on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.chains import COMPOSE, INNER_DEPENDENT, INNER_INDEPENDENT, LOCAL
from cp_gdn.comm import Comm
from cp_gdn.flow import Flow
from cp_gdn.options import Options
from cp_gdn.workspace import PHASES, Buffer, Room


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What crosses from a forward into its backward: entry states as the forward's buffer has them, whether initial
    states came in, maps, and the maps that this rank received as an owner."""

    states: Tensor
    initial: bool
    maps: Tensor
    owned: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardKernels:
    """Loaded kernels: of states and Vn, of Bt, of dv and dS', and `grad` for q and k as they are and for raw ones."""

    states: Kernel
    summary: Kernel
    replay: Kernel
    grad: tuple[Kernel, Kernel]

    @classmethod
    def load(cls, group: int) -> "BackwardKernels":
        """All of them, on torch's current device."""
        return cls(
            states=load_walk(emit_s=True),
            summary=load_adjoint(emit=False),
            replay=load_adjoint(emit=True),
            grad=(load_grad(group), load_grad(group, l2norm=True)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabWork:
    """A slab's blocks of both walks, and the steps of `grad`, [n, 4] int32."""

    items: Items
    steps: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A backward whose first slab has its states. ``entries``: where walks for states start."""

    x: WalkInputs
    boundary: Boundary
    dfinal: Tensor | None
    entries: Ends
    tapes: SlabTapes


@dataclass(frozen=True, kw_only=True)
class HopperKernels:
    """A context on the kernels: its forward's stages, and the backward.

    Attributes:
        summary: items of Bt. slabs: see `SlabWork`; ``places`` chunks and value heads are in the largest.
        sizes: of scratch memory.
    """

    forward: HopperBackend
    summary: Items
    slabs: Sequence[SlabWork]
    places: int
    kernels: BackwardKernels
    sizes: MemorySizes

    @classmethod
    def of(cls, uploaded: Uploaded, heads: tuple[int, int], cutoff: float | None, options: Options) -> "HopperKernels":
        """The kernels of a context whose tables are on the device; they are loaded already."""
        forward, group = HopperBackend.of(uploaded, heads, cutoff), heads[1] // heads[0]
        tables, schedule = uploaded.tables, uploaded.schedule
        with on_device(forward.device):
            kernels = BackwardKernels.load(group)
        summarized, replayed = forward.made.mirrored.split([heads[1] * n for n in tables.counts[ADJOINT_SUMMARY:]])
        places = max((slab.steps for slab in tables.slabs.slabs), default=0) * group
        return cls(
            forward=forward,
            summary=Items(items=summarized, segments=tables.segments.data),
            slabs=_slab_work(tables, forward.made, replayed, group),
            places=places,
            kernels=kernels,
            sizes=MemorySizes(
                value_heads=heads[1],
                prepared=prepared_parts(schedule.tokens.num_tokens, heads, tables.strips)[-1],
                places=places,
                states=tables.num_rows[0],
                adjoints=tables.num_rows[1],
                offsets=schedule.num_offsets[0],
                adjoint_offsets=schedule.num_offsets[1],
                maps=schedule.num_maps,
                free_rows=tables.free_rows[1],
                alone=forward.alone,
                cutoff=cutoff is not None,
                keeps_states=options.keeps_states,
                keeps_maps=options.keeps_maps,
            ),
        )

    def buffers(self, phase: str, *, kept: bool, document_states: bool) -> tuple[Buffer, ...]:
        """Scratch memory of a phase, see `workspace_layout`."""
        return self._buffers[phase, kept, document_states]

    @functools.cached_property
    def _buffers(self) -> dict[tuple[str, bool, bool], tuple[Buffer, ...]]:
        keys = itertools.product(PHASES, (False, True), (False, True))
        return {key: buffers_of(self.sizes, key[0], kept=key[1], document_states=key[2]) for key in keys}

    def kept_shapes(self, heads: int, state: tuple[int, int, int], *, l2norm: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of `kept_tensors`, by name; the arguments are those of any backend, known here."""
        return {"tape": (self.sizes.prepared,)}

    def kept_tensors(self, tape: Tensor, states: None) -> list[Tensor]:
        """What a forward keeps beside entry states and maps."""
        return [tape]

    def from_kept(self, tensors: Sequence[Tensor], x: Inputs) -> tuple[Tensor, None]:
        """The tape that `kept_tensors` listed."""
        return tensors[0], None

    def new_tape(self) -> Tensor:
        """Room for what `prepare` leaves of a call."""
        return torch.empty(self.sizes.prepared, dtype=torch.uint8, device=self.forward.nothing.device)

    def saved_rows(self, *, initial: bool) -> int:
        """Rows of the states that a forward keeps, by whether an initial state came in."""
        return self.forward.tables.num_rows[0][initial]

    def first_states(self, x: WalkInputs, boundary: Boundary, dfinal: Tensor | None, room: Room) -> Begun:
        """The states of the first slab, which need no adjoint: beside them an exchange is under way, and whatever takes
        time on the host."""
        rows = self._rows(reverse=False, replay=True, given=boundary.initial)
        zero = NO_STATE * (not boundary.initial) + NO_ADJOINT * (dfinal is None)
        begun = Begun(
            x=x,
            boundary=boundary,
            dfinal=dfinal,
            entries=Ends(rows=rows, start=_if_any(boundary.states), end=None),
            tapes=SlabTapes(room=room.take("slab"), places=self.places, zero=zero),
        )
        for slab in self.slabs[:1]:
            self._states(begun, slab)
        return begun

    def backward(self, comm: Comm, begun: Begun, given: tuple[Tensor | None, KernelGradients], room: Room) -> Tensor:
        """Fill the gradients of the inputs; those of the initial states [entry_docs, HV, 128, 128], no rows without
        one.

        Args:
            begun: what `first_states` gave. given: the gradient of o, None counts as zero, and where gradients go.
            room: scratch memory.
        """
        (dout, out), x, dfinal = given, begun.x, begun.dfinal
        initial, empty = begun.boundary.initial, self.forward.schedule.empty.data
        mirrored = x.mirrored(map_ready(torch.zeros_like(x.v) if dout is None else dout), out.v)
        states = self._adjoints(comm, mirrored, begun, room)
        dinitial = self.forward.new_states(self.forward.tables.num_entries if initial else 0)
        rows = self._rows(reverse=True, replay=True, given=dfinal is not None, wanted=initial)
        ends, kernel = Ends(rows=rows, start=_if_any(states), end=dinitial), self.kernels.grad[x.l2norm]
        for i, slab in enumerate(self.slabs):
            if i:
                self._states(begun, slab)
            hopper_walk.replay(self.kernels.replay, mirrored, slab.items, ends, (begun.tapes.adjoints, 0))
            grad(kernel, mirrored, slab.steps, begun.tapes, out)
        if initial and empty.numel():
            dinitial[empty[0]] = 0.0 if dfinal is None else dfinal[empty[1]]
        return dinitial

    def _rows(self, *, reverse: bool, replay: bool, given: bool, wanted: bool = False) -> Tensor:
        return self.forward.ends[rows_index(reverse=reverse, replay=replay, given=given, wanted=wanted)]

    def _states(self, begun: Begun, slab: SlabWork) -> None:
        tapes = begun.tapes
        hopper_walk.replay(self.kernels.states, begun.x, slab.items, begun.entries, (tapes.states, tapes.values))

    def _adjoints(self, comm: Comm, x: WalkInputs, begun: Begun, room: Room) -> Tensor:
        """Exit adjoints of all segments that are not zero: summaries, exchange and folds."""
        schedule, routes, maps, dfinal = self.forward.schedule, self.forward.routes, begun.boundary.maps, begun.dfinal
        states, hops = room.take("adjoints"), schedule.hops
        if dfinal is not None:
            starts, rows = schedule.starts[1]
            states[starts] = dfinal[rows]
        if self.forward.alone:
            return states
        own = room.holds("adjoint offsets")
        offsets = (
            room.take("adjoint offsets")
            if own
            else begun.tapes.before_adjoints(self.sizes.row(schedule.num_offsets[1]))
        )
        rows = self._rows(reverse=True, replay=False, given=dfinal is not None)
        dropped = None if self.forward.cutoff is None else room.take("adjoint dropped")
        found = Summaries(maps=None, cutoff=self.forward.cutoff, dropped=dropped)
        ends = Ends(rows=rows, start=_if_any(states), end=offsets)
        hopper_walk.summarize(self.kernels.summary, x, self.summary, ends, found)
        affine.run(hops.of(COMPOSE, True), offsets, maps, offsets, adjoint=True)
        affine.run(hops.of(LOCAL, True), states, maps, offsets, adjoint=True)
        if routes.kind == "none":
            affine.run(hops.of(INNER_INDEPENDENT, True), states, maps, offsets, adjoint=True, dropped=dropped)
            return states
        flow = Flow(
            states=states, maps=maps, offsets=offsets, adjoint=True, kept=begun.boundary.owned, purpose="ADJOINT"
        )
        exchange = routes.exchange(comm, flow)
        exchange.start()
        affine.run(hops.of(INNER_INDEPENDENT, True), states, maps, offsets, adjoint=True, dropped=dropped)
        exchange.wait()
        affine.run(hops.of(INNER_DEPENDENT, True), states, maps, offsets, adjoint=True, dropped=dropped)
        return states


def gradients_like(x: Inputs) -> KernelGradients:
    """Room for the gradients of a call."""
    return KernelGradients.empty(q=x.q, k=x.k, v=x.v, g=x.g.float(), beta=x.beta.float())


def _if_any(states: Tensor) -> Tensor | None:
    return states if states.shape[0] else None


def _slab_work(tables: KernelTables, made: Spread, replayed: Tensor, group: int) -> list[SlabWork]:
    """Of the items of the replay, of all heads."""
    found = []
    for slab in tables.slabs.slabs:
        own = slice(slab.first_pair * group, slab.end_pair * group)
        blocks = Items(items=replayed[own], segments=tables.segments.data, places=made.places[own])
        found.append(SlabWork(items=blocks, steps=made.steps[slab.first_step : slab.end_step]))
    return found
