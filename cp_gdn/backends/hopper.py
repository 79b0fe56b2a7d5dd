"""The Hopper backend of a context: the forward of the op on the kernels of ``kernels/``.

prepare -> limits -> walk for B, for M -> fold -> exchange -> fold -> walk for o
States, offsets, maps and final states are read and written where they lie, by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.backends.cubins import cubins, variants_of
from cp_gdn.backends.hopper_fold import limits, load_fold, load_limits
from cp_gdn.backends.hopper_prepare import PrepareKernel, load_prepare, prepare
from cp_gdn.backends.hopper_tables import WALKS, KernelTables, items_of_heads, rows_index
from cp_gdn.backends.hopper_walk import Ends, WalkInputs, load_walk, walk_rows
from cp_gdn.backends.launch import Kernel, map_ready, on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.comm import Comm
from cp_gdn.flow import Carried, Exchange, Flow

SUMMARY, TRANSFER, INDEPENDENT, DEPENDENT = range(len(WALKS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Loaded kernels of one device and group size: ``prepare`` for q and k as they are and for raw ones, ``walks`` that
    emit B, M and o."""

    prepare: tuple[PrepareKernel, PrepareKernel]
    limits: Kernel
    walks: tuple[Kernel, Kernel, Kernel]


def load_kernels(index: int, group: int) -> Kernels:
    """Compile what the cache does not have, side by side, and load it on device ``index``."""
    cubins(variants_of(group))
    with on_device(index):
        load_fold(adjoint=False), load_fold(adjoint=True)
        walks = (load_walk(), load_walk(has_v=False), load_walk(emit_o=True))
        prepares = (load_prepare(group), load_prepare(group, l2norm=True))
        return Kernels(prepare=prepares, limits=load_limits(), walks=walks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """A forward whose exchange has begun: ``states`` are complete once ``exchange`` has been waited for (at once if
    None)."""

    states: Tensor
    maps: Tensor | None
    offsets: Tensor | None
    exchange: Exchange | None
    dropped: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """One call's tensors as the walks read them, and what the decay bound leaves out (`limits`), None without a cutoff.

    Attributes:
        limits: three of [n, HV] int32: of summaries, adjoint summaries and maps.
        dropped: [maps, HV] int32, which maps are zero; composed ones once they are there.
    """

    inputs: WalkInputs
    limits: Sequence[Tensor] | None
    dropped: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What a forward gives: o [T, HV, 128], final states [exit_docs, HV, 128, 128] (no rows if not asked for), and what
    a backward may want."""

    o: Tensor
    final: Tensor
    chunked: Chunked
    entered: Entered


@dataclass(frozen=True, kw_only=True)
class HopperBackend:
    """Stages of the forward of one context.

    Attributes:
        items: of each walk, [segments * HV, 4] int32. rows: see `rows_index`. chunks: [N, 2] int32, of the tables.
        alone: every segment is a whole document, so that nothing is summarized, folded or sent.
    """

    tables: KernelTables
    items: Sequence[Tensor]
    rows: Sequence[Tensor]
    chunks: Tensor
    alone: bool
    kernels: Kernels
    cutoff: float | None
    device: int
    value_heads: int

    @classmethod
    def of(cls, tables: KernelTables, heads: tuple[int, int], cutoff: float | None) -> "HopperBackend":
        """The backend of uploaded ``tables``; the kernels are loaded already."""
        index = tables.items.device.index
        return cls(
            tables=tables,
            items=items_of_heads(tables.items, tables.counts, heads[1]),
            rows=tables.rows.unbind(),
            chunks=tables.chunks.view(torch.int32).view(-1, 2),
            alone=not any(tables.counts[:INDEPENDENT]) and tables.routes.kind == "none",
            kernels=load_kernels(index, heads[1] // heads[0]),
            cutoff=cutoff,
            device=index,
            value_heads=heads[1],
        )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, 128, 128)

    def new_states(self, rows: int) -> Tensor:
        """Room for states or maps."""
        return torch.empty((rows, *self.state_shape), dtype=torch.float32, device=self.tables.items.device)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def prepare(self, x: Inputs) -> Chunked:
        """Everything about a chunk that does not depend on a state."""
        q, k, v = map_ready(x.q), map_ready(x.k), map_ready(x.v)
        g, beta, tables = x.g.float().contiguous(), x.beta.float().contiguous(), self.tables
        prepared = prepare(self.kernels.prepare[x.l2norm], q, k, beta, g, self.chunks)
        found = dropped = None
        if self.cutoff is not None and not self.alone:
            rows = (*(tables.num_segments,) * 3, tables.num_maps)
            flags = torch.empty((sum(rows), self.value_heads), dtype=torch.int32, device=q.device)
            *found, dropped = flags.split_with_sizes(rows)
            limits(self.kernels.limits, prepared.bound, tables.segments, (*found, dropped), self.cutoff)
        inputs = WalkInputs(q=q, k=k, v=v, g=g, beta=beta, prepared=prepared, scale=x.scale)
        return Chunked(inputs=inputs, limits=found, dropped=dropped)

    def maps(self, x: Chunked) -> Tensor:
        """Maps of all segments that need one, then the composed ones."""
        maps = self.new_states(self.tables.num_maps)
        skipped = None if x.limits is None else x.limits[2]
        self._walk(TRANSFER, x, Ends(rows=self._rows(TRANSFER), start=None, end=maps, limits=skipped))
        affine.run(self.tables.compose_maps, maps, maps, None, dropped=x.dropped)
        return maps

    def enter(self, comm: Comm, x: Chunked, initial: Tensor | None, purpose: str) -> Entered:
        """Summarize, fold what needs no message, and begin the exchange."""
        tables, side, has_initial = self.tables, self.tables.side, initial is not None
        states = self.new_states(tables.num_rows[has_initial])
        if initial is not None:
            states[side.start_state] = initial[side.start_row]
        if self.alone:
            return Entered(states=states, maps=self.new_states(0), offsets=None, exchange=None)
        maps = self.maps(x)
        offsets = self.new_states(side.num_offsets)
        skipped = None if x.limits is None else x.limits[0]
        rows = self._rows(SUMMARY, initial=has_initial)
        self._walk(SUMMARY, x, Ends(rows=rows, start=states, end=offsets, limits=skipped))
        affine.run(side.compose, offsets, maps, offsets, dropped=x.dropped)
        affine.run(side.local, states, maps, offsets, dropped=x.dropped)
        if tables.routes.kind == "none":
            affine.run(side.inner_independent, states, maps, offsets, dropped=x.dropped)
            return Entered(states=states, maps=maps, offsets=offsets, exchange=None)
        flow = Flow(states=states, maps=maps, offsets=offsets, adjoint=False, kept=None, purpose=purpose)
        exchange = tables.routes.exchange(comm, flow)
        exchange.start()
        affine.run(side.inner_independent, states, maps, offsets, dropped=x.dropped)
        return Entered(states=states, maps=maps, offsets=offsets, exchange=exchange, dropped=x.dropped)

    def settle(self, entered: Entered) -> None:
        """Take the messages, and fold inside the fragments that waited for them."""
        if entered.exchange is None:
            return
        assert entered.maps is not None
        entered.exchange.wait()
        hops = self.tables.side.inner_dependent
        affine.run(hops, entered.states, entered.maps, entered.offsets, dropped=entered.dropped)

    def replay(self, x: Chunked, entered: Entered, o: Tensor, final: Tensor | None, *, initial: bool) -> None:
        """O of every token into ``o`` [T, HV, 128], end states of documents into ``final``."""
        for part in (INDEPENDENT, DEPENDENT):
            if part == DEPENDENT:
                self.settle(entered)
            if not self.tables.counts[part]:
                continue
            rows = self._rows(part, initial=initial, final=final is not None)
            self._walk(part, x, Ends(rows=rows, start=entered.states, end=final), o)

    def forward(
        self, comm: Comm, x: Inputs, initial: Tensor | None, carried: Carried | None, *, output: bool, final: bool
    ) -> "Ran":
        """A whole forward.

        Args:
            carried: what the original forward of a recompute brought: no message is sent.
            output: write o and the final states; without it they are left undefined. final: give final states.
        """
        tables, shape = self.tables, x.v.shape
        chunked = self.prepare(x)
        if carried is None:
            entered = self.enter(comm, chunked, initial, "STATE")
        else:
            entered = Entered(states=carried.states, maps=None, offsets=None, exchange=None)
        o = torch.empty(shape, dtype=x.v.dtype, device=x.v.device)
        ends = self.new_states(tables.num_exits if final else 0)
        if output:
            self.replay(chunked, entered, o, ends if final else None, initial=initial is not None)
        else:
            self.settle(entered)
        if final and tables.empty_exit.numel():
            ends[tables.empty_exit] = 0.0 if initial is None else initial[tables.empty_entry]
        return Ran(o=o, final=ends, chunked=chunked, entered=entered)

    def entry_states(self, saved: Tensor) -> Tensor:
        """[n, HV, K, V], the entry state of every segment, of a state buffer of `enter`."""
        row, states = self.tables.row_of_segment, self.new_states(self.tables.num_segments).zero_()
        if not len(saved):
            return states
        return torch.where((row < len(saved))[:, None, None, None], saved[row.clamp(max=len(saved) - 1)], states)

    def _rows(self, walk: int, *, initial: bool = False, final: bool = True) -> Tensor:
        return self.rows[rows_index(walk, initial=initial, final=final)]

    def _walk(self, which: int, x: Chunked, ends: Ends, o: Tensor | None = None) -> None:
        kernel = self.kernels.walks[min(which, INDEPENDENT)]
        walk_rows(kernel, x.inputs, (self.chunks, self.items[which]), ends, o)
