"""A plan as the stages read it: index tables of one rank, forward and mirrored, ready to be uploaded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_gdn.chains import Chains, Hops, Maps
from cp_gdn.layout import Partition
from cp_gdn.plan import CHUNK, Index, Ints, Plan, SegmentSet, runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A walk from known states. Where ``walk.segments[end_at]`` end their document, the end state is row ``end_row`` of
    the result."""

    walk: SegmentSet
    end_at: Index
    end_row: Index


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Everything one rank's stages look up.

    Attributes:
        rows: [N * 64] local row of each chunk row, T where it holds no token. back: [T] chunk row of each local row.
        everything: all segments as one walk, to run states again from saved entry states.
        transfer, transfer_row: segments whose map is needed, and its row. num_maps, compose_maps: see `chains.Maps`.
        empty_entry, empty_exit: rows of empty documents, whose states pass through.
        token_ids, positions: [T] global index, and offset in its document, of each local row.
    """

    rows: Index
    back: Index
    everything: SegmentSet
    transfer: SegmentSet
    transfer_row: Index
    num_maps: int
    compose_maps: Hops
    forward: Side
    adjoint: Side
    empty_entry: Index
    empty_exit: Index
    token_ids: Index
    positions: Index


def build_schedule(part: Partition, plan: Plan, maps: Maps, chains: Sequence[Chains]) -> Schedule:
    """Index tables of ``plan``; ``chains`` are the forward direction and its mirror."""
    slot, index = runs(plan.chunks.count)
    rows = np.full(len(plan.chunks) * CHUNK, plan.num_tokens, dtype=np.int64)
    back = slot * CHUNK + index
    rows[back] = plan.chunks.first_row[slot] + index
    transfer = plan.segment_set(maps.segments)
    empty = np.setdiff1d(plan.entry_docs, part.table.doc[part.rows(plan.rank)][np.diff(plan.segments.of_slot) > 0])
    empty = empty[np.diff(np.asarray(part.doc_bounds))[empty] == 0]
    return Schedule(
        rows=rows,
        back=back,
        everything=plan.segment_set(np.arange(len(plan.segments))),
        transfer=transfer,
        transfer_row=maps.of_segment[transfer.segments],
        num_maps=maps.size,
        compose_maps=maps.compose,
        forward=_side(part, plan, chains[0]),
        adjoint=_side(part, plan, chains[1]),
        empty_entry=np.searchsorted(plan.entry_docs, empty),
        empty_exit=np.searchsorted(plan.exit_docs, empty),
        token_ids=part.token_ids(plan.rank),
        positions=part.positions(plan.rank),
    )


def _side(part: Partition, plan: Plan, chains: Chains) -> Side:
    segments, reverse = plan.segments, chains.reverse
    doc = part.table.doc[chains.mine][segments.slot]
    first, last = ~segments.has_prev, ~segments.has_next
    docs_in, docs_out = plan.entry_docs, plan.exit_docs
    if reverse:
        first, last, docs_in, docs_out = last, first, docs_out, docs_in
    start = np.flatnonzero(first)
    summary = plan.segment_set(chains.summarized, reverse=reverse)

    def replay(ids: Ints) -> Replay:
        walk = plan.segment_set(ids, reverse=reverse)
        end_at = np.flatnonzero(last[walk.segments])
        return Replay(walk=walk, end_at=end_at, end_row=np.searchsorted(docs_out, doc[walk.segments[end_at]]))

    return Side(
        reverse=reverse,
        num_states=chains.num_states,
        num_offsets=chains.num_offsets,
        start_state=start,
        start_row=np.searchsorted(docs_in, doc[start]),
        summary=summary,
        summary_row=np.searchsorted(chains.summarized, summary.segments),
        compose=chains.compose,
        local=chains.local,
        inner_independent=chains.inner_independent,
        inner_dependent=chains.inner_dependent,
        independent=replay(chains.independent),
        dependent=replay(chains.dependent),
    )
