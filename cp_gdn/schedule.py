"""A plan as the stages read it: index tables of one rank, forward and mirrored, ready to be uploaded."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cp_gdn.chains import COMPOSE, COMPOSE_MAPS, INNER_DEPENDENT, INNER_INDEPENDENT, LOCAL, Chains, Hops
from cp_gdn.fragments import Ints, unset
from cp_gdn.layout import Partition
from cp_gdn.plan import CHUNK, NO_WALK, NONE, Index, Plan, SegmentSet


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A walk from known states. Where ``walk.segments[end_at]`` end their document, the end state is row ``end_row`` of
    the result."""

    walk: SegmentSet
    end_at: Index
    end_row: Index


@dataclass(frozen=True, kw_only=True)
class Side:
    """One direction of a rank's work; the adjoint side mirrors the forward one field by field.

    Attributes:
        reverse: whether this is the adjoint side.
        num_states, num_offsets: rows of the state buffer and of the offset buffer.
        start_state, start_row: states that a document starts from, and their rows in the caller's tensor.
        summary, summary_row: the segments to summarize and the offset row of each.
        compose, local, inner_independent, inner_dependent: see `chains.Chains`.
        independent, dependent: replays of what needs no message, and of the rest.
    """

    reverse: bool
    num_states: int
    num_offsets: int
    start_state: Index
    start_row: Index
    summary: SegmentSet
    summary_row: Index
    compose: Hops
    local: Hops
    inner_independent: Hops
    inner_dependent: Hops
    independent: Replay
    dependent: Replay


@dataclass(frozen=True, kw_only=True)
class TokenTables:
    """Tables with an entry per token, made where they are used, when they are first used, from tables with an entry per
    chunk or fragment.

    Attributes:
        num_tokens: T. chunk_count, chunk_shift: [N] tokens of each chunk, and from their local row to their chunk row.
        fragment_length, id_shift, position_shift: [n] tokens of each fragment, and from their local row to their global
            index and to their offset in the document.
    """

    num_tokens: int
    chunk_count: Index
    chunk_shift: Index
    fragment_length: Index
    id_shift: Index
    position_shift: Index

    # NOTE: not cached_property, whose lock a compiler cannot trace.

    @property
    def rows(self) -> Tensor:
        """[N * 64] local row of each chunk row, T where it holds no token."""
        return self._made("rows", self._rows)

    @property
    def back(self) -> Tensor:
        """[T] chunk row of each local row."""
        return self._made("back", lambda: self._shifted(self.chunk_shift, self.chunk_count))

    @property
    def token_ids(self) -> Tensor:
        """[T] global index of each local row."""
        return self._made("token_ids", lambda: self._shifted(self.id_shift, self.fragment_length))

    @property
    def positions(self) -> Tensor:
        """[T] offset in its document of each local row."""
        return self._made("positions", lambda: self._shifted(self.position_shift, self.fragment_length))

    def make(self, *, rows: bool = True) -> None:
        """Make all of them now; ``rows``: those of chunks too, which only the torch backend reads."""
        _ = self.token_ids, self.positions
        if rows:
            _ = self.rows

    def _made(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        key = f"_{name}_made"
        table: Tensor | None = self.__dict__.get(key)
        if table is None:
            with nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
                table = make()  # a table of this context, not one of a mode that happens to look on
            self.__dict__[key] = table
        return table

    def _rows(self) -> Tensor:
        back = self.back
        rows = torch.full((len(self.chunk_count) * CHUNK,), self.num_tokens, dtype=torch.int64, device=back.device)
        return rows.scatter_(0, back, torch.arange(self.num_tokens, device=back.device))

    def _shifted(self, shift: Index, count: Index) -> Tensor:
        shift, count = torch.as_tensor(shift), torch.as_tensor(count)
        if shift.device.type != "cpu" or torch.compiler.is_compiling():
            return shifted_runs(torch.arange(self.num_tokens, device=shift.device), shift, count)
        shifted = shift.numpy().repeat(count.numpy())  # the same, some five times faster
        shifted += np.arange(self.num_tokens)
        return torch.from_numpy(shifted)


def shifted_runs(own: Tensor, shift: Tensor, count: Tensor) -> Tensor:
    """Local rows ``own`` plus the shift of the run that each is in; no synchronization, for the size is known."""
    return torch.repeat_interleave(shift, count, output_size=len(own)).add_(own)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything one rank's stages look up.

    Attributes:
        tokens: see there.
        transfer, transfer_row: segments whose map is needed, and its row. num_maps, compose_maps: see `chains`.
        empty_entry, empty_exit: rows of empty documents, whose states pass through.
    """

    tokens: TokenTables
    transfer: SegmentSet
    transfer_row: Index
    num_maps: int
    compose_maps: Hops
    forward: Side
    adjoint: Side
    empty_entry: Index
    empty_exit: Index

    @property
    def rows(self) -> Tensor:
        return self.tokens.rows

    @property
    def back(self) -> Tensor:
        return self.tokens.back

    @property
    def token_ids(self) -> Tensor:
        return self.tokens.token_ids

    @property
    def positions(self) -> Tensor:
        return self.tokens.positions


def build_schedule(part: Partition, plan: Plan, chains: Chains, *, lists_chunks: bool = True) -> Schedule:
    """Index tables of ``plan``. ``lists_chunks``: walks know their chunks, step by step, as the torch backend needs
    them."""
    segments, rows = plan.segments, chains.rows
    walk = plan.walk if lists_chunks else plan.chosen
    has_prev, has_next = segments.around
    doc = plan.fragments.doc[segments.slot]
    first, last = (~has_prev).nonzero()[0], (~has_next).nonzero()[0]
    starts = first, plan.entry_docs.searchsorted(doc[first])
    ends = last, plan.exit_docs.searchsorted(doc[last])
    transfer = walk(has_prev & has_next)
    return Schedule(
        tokens=_token_tables(part, plan),
        transfer=transfer,
        transfer_row=rows.map_of_segment[transfer.segments],
        num_maps=rows.num_maps,
        compose_maps=chains.of(COMPOSE_MAPS),
        forward=_side((plan, walk), chains, has_next, (starts, ends)),
        adjoint=_side((plan, walk), chains, has_prev, (ends, starts), reverse=True),
        empty_entry=plan.entry_docs.searchsorted(plan.empty_docs),
        empty_exit=plan.exit_docs.searchsorted(plan.empty_docs),
    )


def _token_tables(part: Partition, plan: Plan) -> TokenTables:
    own, chunks = plan.fragments, plan.chunks
    position_shift = own.offset + own.length - own.length.cumsum()
    return TokenTables(
        num_tokens=plan.num_tokens,
        chunk_count=chunks.count,
        chunk_shift=np.arange(0, len(chunks) * CHUNK, CHUNK) - chunks.first_row,
        fragment_length=own.length,
        id_shift=position_shift + part.bounds[own.doc],
        position_shift=position_shift,
    )


Edges = tuple[Ints, Ints]
"""Segments at an edge of their document, and the row of its state in the caller's tensor."""


def _side(
    planned: tuple[Plan, Callable[..., SegmentSet]],
    chains: Chains,
    has_after: Ints,
    edges: tuple[Edges, Edges],
    *,
    reverse: bool = False,
) -> Side:
    (plan, walked), (starts, ends) = planned, edges
    rows, num_segments, num_slots = chains.rows, len(plan.segments), len(plan.fragments.doc)
    summary = walked(has_after, reverse=reverse)
    dependent = rows.remote[reverse * num_slots :][plan.segments.slot]
    row_of = unset(num_segments)
    row_of[ends[0]] = ends[1]

    def replay(chosen: Ints) -> Replay:
        walk = walked(chosen, reverse=reverse)
        if walk is NO_WALK:
            return Replay(walk=walk, end_at=NONE, end_row=NONE)
        row = row_of[walk.segments]
        end_at = (row >= 0).nonzero()[0]
        return Replay(walk=walk, end_at=end_at, end_row=row[end_at])

    return Side(
        reverse=reverse,
        num_states=rows.num_states[reverse],
        num_offsets=rows.num_offsets[reverse],
        start_state=starts[0],
        start_row=starts[1],
        summary=summary,
        summary_row=rows.offset_of_segment[summary.segments + reverse * num_segments],
        compose=chains.of(COMPOSE, reverse),
        local=chains.of(LOCAL, reverse),
        inner_independent=chains.of(INNER_INDEPENDENT, reverse),
        inner_dependent=chains.of(INNER_DEPENDENT, reverse),
        independent=replay(~dependent),
        dependent=replay(dependent),
    )
