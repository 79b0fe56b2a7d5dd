"""The Hopper backend of a context: the forward of the op on the kernels of ``kernels/``.

prepare -> walk for B and M -> fold -> exchange -> fold -> walk for o
States, offsets, maps and final states are read and written where they lie, by row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.backends.cubins import cubins, variants_of
from cp_gdn.backends.hopper_fold import load_fold
from cp_gdn.backends.hopper_items import ADJOINT_SUMMARY, DEPENDENT, INDEPENDENT, SUMMARY, TRANSFER
from cp_gdn.backends.hopper_prepare import Prepared, PrepareKernel, load_prepare, prepare
from cp_gdn.backends.hopper_spread import Spread, load_spread, spread
from cp_gdn.backends.hopper_strips import Chunks
from cp_gdn.backends.hopper_tables import TRANSFER_ROWS, KernelTables, rows_index
from cp_gdn.backends.hopper_walk import Ends, Items, Summaries, WalkInputs, load_walk, replay, summarize
from cp_gdn.backends.launch import Kernel, map_ready, on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.chains import COMPOSE, COMPOSE_MAPS, INNER_DEPENDENT, INNER_INDEPENDENT, LOCAL
from cp_gdn.comm import Comm
from cp_gdn.exchange import Routes
from cp_gdn.flow import Exchange, Flow
from cp_gdn.schedule import Schedule
from cp_gdn.workspace import Room


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Loaded kernels of one device and group size: `spread`, ``prepare`` for q and k as they are and for raw ones, the
    walks that make summaries and o."""

    spread: Kernel
    prepare: tuple[PrepareKernel, PrepareKernel]
    summary: Kernel
    output: Kernel


def load_kernels(index: int, group: int) -> Kernels:
    """Compile what the cache does not have, side by side, and load it on device ``index``."""
    cubins(variants_of(group))
    with on_device(index):
        load_fold(adjoint=False), load_fold(adjoint=True)
        prepares = (load_prepare(group), load_prepare(group, l2norm=True))
        walks = {"summary": load_walk(), "output": load_walk(emit_o=True)}
        return Kernels(spread=load_spread(), prepare=prepares, **walks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summarized:
    """Maps of the segments that need one, then the composed ones, and offsets.

    Attributes:
        dropped: [maps, HV] int32, which maps are zero; None without a cutoff.
    """

    maps: Tensor
    offsets: Tensor
    dropped: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A forward whose exchange has begun: ``states`` are complete once ``exchange`` has been waited for (at once if
    None). ``found``: None where the states were carried here."""

    states: Tensor
    found: Summarized | None
    exchange: Exchange | None

    @property
    def maps(self) -> Tensor | None:
        return None if self.found is None else self.found.maps


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded:
    """What a context has put on its device."""

    tables: KernelTables
    schedule: Schedule
    routes: Routes


@dataclass(frozen=True, kw_only=True)
class HopperBackend:
    """Stages of the forward of one context.

    Attributes:
        made: what is not in ``tables``. work: items of each walk. ends: see `rows_index`. nothing: no rows of states.
        alone: every segment is a whole document, so that nothing is summarized, folded or sent.
    """

    tables: KernelTables
    schedule: Schedule
    routes: Routes
    made: Spread
    work: Sequence[Items]
    ends: Sequence[Tensor]
    chunks: Chunks
    nothing: Tensor
    alone: bool
    kernels: Kernels
    cutoff: float | None
    device: int
    heads: tuple[int, int]

    @classmethod
    def of(cls, uploaded: Uploaded, heads: tuple[int, int], cutoff: float | None) -> "HopperBackend":
        """The backend of ``uploaded`` tables; the kernels are loaded already."""
        tables = uploaded.tables
        index, value_heads = tables.items.data.device.index, heads[1]
        kernels = load_kernels(index, value_heads // heads[0])
        with on_device(index):
            made = spread(kernels.spread, tables, heads)
        items = made.items.split([value_heads * n for n in tables.counts[:ADJOINT_SUMMARY]])
        return cls(
            tables=tables,
            schedule=uploaded.schedule,
            routes=uploaded.routes,
            made=made,
            work=[Items(items=x, segments=tables.segments.data) for x in items],
            ends=tables.rows.data.unbind(),
            chunks=Chunks(rows=tables.chunks.data.view(torch.int32).view(-1, 2), ranks=made.ranks, kinds=tables.strips),
            nothing=torch.empty((0, value_heads, 128, 128), device=tables.items.data.device),
            alone=not any(tables.counts[:INDEPENDENT]) and uploaded.routes.kind == "none",
            kernels=kernels,
            cutoff=cutoff,
            device=index,
            heads=heads,
        )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.heads[1], 128, 128)

    def new_states(self, rows: int) -> Tensor:
        """Room for states or maps."""
        if not rows:
            return self.nothing.detach()  # autograd marks outputs: each its own
        return torch.empty((rows, *self.state_shape), dtype=torch.float32, device=self.nothing.device)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def prepare(self, x: Inputs, out: Tensor | None, memory: Tensor, *, made: bool = False) -> WalkInputs:
        """Everything about a chunk that does not depend on a state, for walks whose output is ``out``.

        Args:
            out: None: memory of its own. memory: of `prepared_parts`. made: all of it is there already.
        """
        q, k, v = map_ready(x.q), map_ready(x.k), map_ready(x.v)
        g, beta = x.g.float().contiguous(), x.beta.float().contiguous()
        prepared = Prepared.inside(memory, self.chunks, v.shape[0], self.heads)
        if not made:
            prepare(self.kernels.prepare[x.l2norm], (q, k), (g, beta), prepared)
        if out is None:  # memory that the first launch does not need comes after it
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        return WalkInputs(q=q, k=k, v=v, g=g, beta=beta, prepared=prepared, out=out, scale=x.scale, l2norm=x.l2norm)

    def buffer(self, room: Room, name: str, count: int) -> Tensor:
        """Scratch of that name, or ``count`` rows of their own where they are saved."""
        return room.take(name) if room.holds(name) else self.new_states(count)

    def summarized(self, x: WalkInputs, states: Tensor | None, room: Room, *, initial: bool = False) -> Summarized:
        """Maps of all segments that need one, then the composed ones, and the offsets, from ``states``; None: maps
        alone."""
        walk = TRANSFER if states is None else SUMMARY
        if self.alone:
            return Summarized(maps=self.new_states(0), offsets=self.nothing, dropped=None)
        maps = self.buffer(room, "maps", self.schedule.num_maps)
        dropped = None if self.cutoff is None else room.take("dropped")
        offsets = self.nothing if states is None else self._offsets(x, room)
        rows = self.ends[TRANSFER_ROWS] if states is None else self._rows(replay=False, initial=initial)
        ends = Ends(rows=rows, start=states, end=offsets)
        summaries = Summaries(maps=maps, cutoff=self.cutoff, dropped=dropped)
        summarize(self.kernels.summary, x, self.work[walk], ends, summaries)
        affine.run(self.schedule.hops.of(COMPOSE_MAPS), maps, maps, None, dropped=dropped)
        return Summarized(maps=maps, offsets=offsets, dropped=dropped)

    def _offsets(self, x: WalkInputs, room: Room) -> Tensor:
        """Rows of their own, or in the memory of o: nobody needs them when it is written."""
        if room.holds("offsets"):
            return room.take("offsets")
        shape, first = (self.schedule.num_offsets[0], *self.state_shape), self.tables.free_rows[0]
        return x.out[first:].view(-1)[: 2 * math.prod(shape)].view(torch.float32).view(shape)

    def enter(self, comm: Comm, x: WalkInputs, initial: Tensor | None, purpose: str, room: Room) -> Entered:
        """Summarize, fold what needs no message, and begin the exchange."""
        has_initial, hops = initial is not None, self.schedule.hops
        states = self.buffer(room, "states", self.tables.num_rows[0][has_initial])
        if initial is not None:
            starts, rows = self.schedule.starts[0]
            states[starts] = initial[rows]
        found = self.summarized(x, states, room, initial=has_initial)
        if self.alone:
            return Entered(states=states, found=found, exchange=None)
        affine.run(hops.of(COMPOSE), found.offsets, found.maps, found.offsets, dropped=found.dropped)
        affine.run(hops.of(LOCAL), states, found.maps, found.offsets, dropped=found.dropped)
        exchange = None
        if self.routes.kind != "none":
            flow = {"states": states, "maps": found.maps, "offsets": found.offsets}
            exchange = self.routes.exchange(comm, Flow(**flow, adjoint=False, kept=None, purpose=purpose))
            exchange.start()
        affine.run(hops.of(INNER_INDEPENDENT), states, found.maps, found.offsets, dropped=found.dropped)
        return Entered(states=states, found=found, exchange=exchange)

    def settle(self, entered: Entered) -> None:
        """Take the messages, and fold inside the fragments that waited for them."""
        if entered.exchange is None:
            return
        found = entered.found
        assert found is not None
        entered.exchange.wait()
        hops = self.schedule.hops.of(INNER_DEPENDENT)
        affine.run(hops, entered.states, found.maps, found.offsets, dropped=found.dropped)

    def replay(self, x: WalkInputs, entered: Entered, final: Tensor | None, *, initial: bool) -> None:
        """O of every token in place of T, end states of documents into ``final``."""
        for part in (INDEPENDENT, DEPENDENT):
            if part == DEPENDENT:
                self.settle(entered)
            if self.tables.counts[part]:
                rows = self._rows(replay=True, initial=initial, final=final is not None)
                ends = Ends(rows=rows, start=entered.states if entered.states.shape[0] else None, end=final)
                replay(self.kernels.output, x, self.work[part], ends)

    def entry_states(self, saved: Tensor) -> Tensor:
        """[n, HV, K, V], the entry state of every segment, of a state buffer of `enter`."""
        row, states = self.tables.row_of_segment.data, self.new_states(self.tables.num_segments).zero_()
        if not len(saved):
            return states
        return torch.where((row < len(saved))[:, None, None, None], saved[row.clamp(max=len(saved) - 1)], states)

    def _rows(self, *, replay: bool, initial: bool = False, final: bool = False) -> Tensor:
        return self.ends[rows_index(reverse=False, replay=replay, given=initial, wanted=final)]
