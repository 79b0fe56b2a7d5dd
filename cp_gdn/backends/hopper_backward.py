"""The backward of a context on the Hopper kernels.

prepare -> adjoint walk for Bt -> fold -> exchange -> fold -> per slab: walk for S and Vn, adjoint walk for dv and dS',
grad. Slabs hold what a chunk's gradients are made of; after the folds segments are independent, so slabs change no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_gdn import affine
from cp_gdn.backends.hopper import INDEPENDENT, Chunked, HopperBackend
from cp_gdn.backends.hopper_grad import KernelGradients, grad, load_grad
from cp_gdn.backends.hopper_mirror import MirrorTables, mirror_index
from cp_gdn.backends.hopper_tables import KernelTables, items_of_heads, rows_index
from cp_gdn.backends.hopper_walk import Ends, Tapes, WalkInputs, load_adjoint, load_walk, walk_rows
from cp_gdn.backends.launch import Kernel, map_ready, on_device
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.comm import Comm
from cp_gdn.flow import Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What crosses from a forward into its backward: entry states as the forward's buffer has them, maps, and the maps
    that this rank received as an owner."""

    states: Tensor
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


@dataclass(frozen=True, kw_only=True)
class HopperKernels:
    """A context on the kernels: its forward's stages, and the backward. ``items``: of summaries and of each slab."""

    forward: HopperBackend
    tables: MirrorTables
    items: Sequence[Tensor]
    rows: Sequence[Tensor]
    kernels: BackwardKernels

    @classmethod
    def of(cls, uploaded: KernelTables, heads: tuple[int, int], cutoff: float | None) -> "HopperKernels":
        """The kernels of a context whose tables are on the device; they are loaded already."""
        forward, tables = HopperBackend.of(uploaded, heads, cutoff), uploaded.mirror
        with on_device(forward.device):
            kernels = BackwardKernels.load(heads[1] // heads[0])
        return cls(
            forward=forward,
            tables=tables,
            items=items_of_heads(tables.items, tables.counts, forward.value_heads),
            rows=tables.rows.unbind(),
            kernels=kernels,
        )

    def saved_rows(self, *, initial: bool) -> int:
        """Rows of the states that a forward keeps, by whether an initial state came in."""
        return self.forward.tables.num_rows[initial]

    def backward(
        self, comm: Comm, x: Inputs, given: tuple[Tensor | None, Tensor | None], boundary: Boundary, *, initial: bool
    ) -> tuple[KernelGradients, Tensor]:
        """Gradients of the inputs, and of the initial states [entry_docs, HV, 128, 128] (no rows without one).

        Args:
            given: gradients of o and of the final states; None counts as zero.
        """
        dout, dfinal = given
        chunked = self.forward.prepare(x)
        mirrored = replace(chunked.inputs, v=map_ready(torch.zeros_like(x.v) if dout is None else dout))
        states = self._adjoints(comm, chunked, mirrored, dfinal, boundary)
        dinitial = self.forward.new_states(self.forward.tables.num_entries if initial else 0)
        index = mirror_index(replay=True, final=dfinal is not None, initial=initial)
        ends = Ends(rows=self.rows[index], start=states, end=dinitial)
        out = KernelGradients.empty(mirrored)
        self._gradients(chunked.inputs, mirrored, (boundary.states, initial), ends, out)
        tables = self.forward.tables
        if initial and tables.empty_entry.numel():
            dinitial[tables.empty_entry] = 0.0 if dfinal is None else dfinal[tables.empty_exit]
        return out, dinitial

    def _adjoints(
        self, comm: Comm, chunked: Chunked, x: WalkInputs, dfinal: Tensor | None, boundary: Boundary
    ) -> Tensor:
        """Exit adjoints of all segments that are not zero: summaries, exchange and folds."""
        tables, side, maps = self.tables, self.tables.side, boundary.maps
        states = self.forward.new_states(tables.num_rows[dfinal is not None])
        if dfinal is not None:
            states[side.start_state] = dfinal[side.start_row]
        if self.forward.alone:
            return states
        offsets = self.forward.new_states(side.num_offsets)
        rows = self.rows[mirror_index(replay=False, final=dfinal is not None, initial=False)]
        skipped = None if chunked.limits is None else chunked.limits[1]
        ends = Ends(rows=rows, start=states, end=offsets, limits=skipped)
        walk_rows(self.kernels.summary, x, (self.forward.chunks, self.items[0]), ends, None)
        affine.run(side.compose, offsets, maps, offsets, adjoint=True)
        affine.run(side.local, states, maps, offsets, adjoint=True)
        if tables.routes.kind == "none":
            affine.run(side.inner_independent, states, maps, offsets, adjoint=True)
            return states
        flow = Flow(states=states, maps=maps, offsets=offsets, adjoint=True, kept=boundary.owned, purpose="ADJOINT")
        exchange = tables.routes.exchange(comm, flow)
        exchange.start()
        affine.run(side.inner_independent, states, maps, offsets, adjoint=True)
        exchange.wait()
        affine.run(side.inner_dependent, states, maps, offsets, adjoint=True)
        return states

    def _gradients(
        self, x: WalkInputs, mirrored: WalkInputs, entry: tuple[Tensor, bool], ends: Ends, out: KernelGradients
    ) -> None:
        """Slab by slab; ``entry``: the forward's states, and whether an initial state came in."""
        states, initial = entry
        rows = self.forward.rows[rows_index(INDEPENDENT, initial=initial, final=False)]
        entries, chunks = Ends(rows=rows, start=states, end=None), self.forward.chunks
        room = self._room(x.v)
        for slab, items in zip(self.tables.slabs, self.items[1:], strict=True):
            place = {"first_chunk": slab.first_chunk, "first_row": slab.first_row}
            before, after = (Tapes(states=r.states[: slab.num_chunks], values=r.values, **place) for r in room)
            walk_rows(self.kernels.states, x, (chunks, items), entries, None, before)
            walk_rows(self.kernels.replay, mirrored, (chunks, items), ends, out.v, after)
            grad(self.kernels.grad[x.prepared.rstd is not None], mirrored, chunks, before, after.states, out)

    def _room(self, like: Tensor) -> tuple[Tapes, Tapes]:
        """Memory of the largest slab: states and Vn, adjoints."""
        slabs, heads = self.tables.slabs, like.shape[1]
        chunks, rows = (max(sizes, default=0) for sizes in ([s.num_chunks for s in slabs], [s.num_rows for s in slabs]))
        values = like.new_empty(heads, 2, rows, 64)
        states = like.new_empty(2, chunks, heads, 2, 128, 64)
        before, after = (Tapes(states=s, values=values, first_chunk=0, first_row=0) for s in states)
        return before, after
