"""The model of one step's time on one rank, and the rule "measured" that picks P by it.

Step = forward + backward of one layer. Its time is a sum of constants (`calibration.Times`) times whole quantities, and
those follow from what the plan runs at P: which segments are walked, summarized, folded. Worked example: one uncut
document of 100 chunks at P = 2 has two segments of 50. The first is summarized (its offset; nobody is before it, so no
map), one hop folds, and both are walked at once, where at P = 1 one SM per head walks all 100.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from cp_gdn.calibration import Calibration
from cp_gdn.makespan import Row, Rows, Table, ceil_div, lpt_makespan, makespan_bound, table_rows

MAX_SEGMENTS = 64
"""Largest P that is tried."""
USEFUL = 16
"""A longest segment of a 16th of an SM's even share is short enough: more segments only add hops."""
FOLD_BLOCKS = 8
"""Thread blocks of a fold per fragment and head: 16 of the 128 state columns each."""
BATCH = 32
"""Distinct ranks that are planned in one go."""
MERGE_ABOVE = 32
"""Distinct rows of a table above which fragments of nearly equal length are taken as equal."""

Ints = np.ndarray
"""An int64 array."""
_LONGER_FIRST = np.array([1, 0])


def _kind(row: Row) -> tuple[int, ...]:
    """Chunks (at least 1) and number of such fragments, whether one holds its chain's end and its start, and the folds
    that pass it: entry states in both directions, composed offsets in either, composed maps."""
    nc, out, into, count = row
    return (nc, count, 1 - out, 1 - into, 2 + out + into + out * into) if nc else (1, 0, 1, 1, 0)


class StepModel:
    """Quantities of several ranks at several P at once.

    Legend of array shapes: R ranks, P tried values of P, J kinds of fragments of a rank (padded with count 0), 3 kinds
    of walks: over all segments, over those summarized (for B and for M), over those summarized in the adjoint.

    Attributes:
        lengths, jobs: chunks of an item [R, P, 2J], and how many such items the walks have [3, R, P, 2J].
        walks: lower bounds of the chunks that the busiest SM walks, [3, R, P].
        segments: how many per head, [3, R, P].
        even: chunks per SM if all were shared evenly, [R, 1].
    """

    def __init__(self, tables: Sequence[Rows], heads: int, calibration: Calibration, p: Ints) -> None:
        self.tables, self.heads, self.calibration, self.p = tables, heads, calibration, p
        width = max(1, *map(len, tables))
        kinds = np.array([[*map(_kind, rows), *[_kind((0, 0, 0, 0))] * (width - len(rows))] for rows in tables])
        self.nc, self.count, self.is_end, self.is_start, self.folds = kinds.transpose(2, 0, 1)[:, :, None]
        chunks = [sum(nc * count for nc, _, _, count in rows) for rows in tables]
        self.even = np.array([[-(-n * heads // calibration.sm_count)] for n in chunks])
        self.parts = np.minimum(p[:, None], self.nc)
        lengths, segments = self._segments()
        self.segments = segments.sum(axis=-1)
        run = np.minimum(ceil_div(self.item_target[:, :, None], lengths), segments[0])
        np.maximum(run, 1, out=run)
        self.lengths, self.jobs = lengths * run, ceil_div(segments, run) * heads
        self.walks = makespan_bound(self.lengths, self.jobs, calibration.sm_count)

    @property
    def item_target(self) -> Ints:
        """Chunks up to which short segments of a head are walked in one run [R, 1]; less where SMs would stay idle."""
        return np.minimum(self.even, self.calibration.settings.item_chunks)

    def _segments(self) -> tuple[Ints, Ints]:
        """Chunks [R, P, 2J] and number per head [3, R, P, 2J] of the segments; of each kind the longer ones first."""
        base, longer = np.divmod(self.nc, self.parts)
        lengths = base[..., None] + _LONGER_FIRST
        segments = np.empty((3, *lengths.shape), dtype=np.int64)
        segments[..., 0], segments[..., 1] = longer, self.parts - longer
        # Nobody needs the offset of a chain's last segment, the adjoint offset of its first, the map of either.
        first = np.empty_like(lengths)
        np.multiply(longer == 0, self.is_start, out=first[..., 1])
        np.subtract(self.is_start, first[..., 1], out=first[..., 0])
        segments[2] -= first
        segments[1, ..., 1] -= self.is_end
        maps = np.maximum(segments[1] - first, 0)
        if self.calibration.settings.decayed_permille:
            maps = ceil_div(maps * (1000 - self.calibration.settings.decayed_permille), 1000)
        segments[1] += maps
        segments *= self.count[..., None]
        return lengths.reshape(*longer.shape[:2], -1), segments.reshape(3, *longer.shape[:2], -1)

    @cached_property
    def varying(self) -> dict[str, Ints]:
        """Quantities that depend on P, [R, P], without the walks over all segments."""
        starts = ceil_div(self.segments * self.heads, self.calibration.sm_count)
        some = [[row for row in rows if row[0]] for rows in self.tables]
        crosses = np.array([[any(row[1] for row in rows) + any(row[2] for row in rows)] for rows in some])  # directions
        splits = self.parts[:, :, 0] > 1  # the first fragments have the most chunks
        return {
            # NOTE: summaries count at their bound. Exact makespans, at three times the host time, choose another P for
            # 16 of 270 ranks of bench/plan_census.py and gain at most 0.8 % of a modelled step.
            "walk_summary": self.walks[1],
            "adjoint_summary": self.walks[2],
            "segment": starts.sum(axis=0) + 2 * starts[0],
            "fold_hop": self._fold_hops() + crosses,
            # a summary and a fold each way, compositions
            "launch": np.where(splits, 4 + crosses, 2 * crosses),
        }

    def _fold_hops(self) -> Ints:
        """Hops in series [R, P]: entry states in both directions, composed offsets in either, composed maps."""
        slots = self.calibration.sm_count * self.calibration.settings.fold_blocks
        hops = (self.parts - 1) * self.folds
        even = ceil_div((hops * self.count).sum(axis=-1) * (self.heads * FOLD_BLOCKS), slots)
        serial: Ints = np.maximum(hops.max(axis=-1), even)
        return serial

    @cached_property
    def fixed(self) -> dict[str, Ints]:
        """Quantities that do not depend on P, [R, 1]."""
        crossing = np.array([[sum(count * (out + into) for nc, out, into, count in t if nc)] for t in self.tables])
        return {
            "prepare": 2 * self.even,
            "grad": self.even,
            "launch": 6 * (self.even > 0),  # prepare, walk; prepare, walk, adjoint, grad
            "exchange": 2 * (crossing > 0),
            "link_mib": ceil_div(crossing * self.heads, 16),  # a state of one head is 64 KiB
        }

    @cached_property
    def rest_ns(self) -> Ints:
        """Everything that depends on P but the walks over all segments, [R, P]."""
        rest: Ints = np.zeros_like(self.walks[0])
        for name, quantity in self.varying.items():
            rest += getattr(self.calibration.times, name) * quantity
        return rest

    @property
    def chunk_ns(self) -> int:
        """Of a chunk in all walks over all segments."""
        times = self.calibration.times
        return times.walk_output + times.walk_states + times.walk_adjoint

    def bounds(self) -> Ints:
        """Lower bounds of `varying_ns`, [R, P]."""
        return self.rest_ns + self.walks[0] * self.chunk_ns

    def walked(self, rank: int, i: int) -> int:
        """Chunks that the busiest SM walks in a walk over all segments, for the i-th P; exact."""
        jobs = zip(self.lengths[rank, i].tolist(), self.jobs[0, rank, i].tolist(), strict=True)
        return lpt_makespan(jobs, self.calibration.sm_count)

    def varying_ns(self, rank: int, i: int) -> int:
        """What the i-th P decides of a rank's step."""
        return int(self.rest_ns[rank, i]) + self.walked(rank, i) * self.chunk_ns

    def step_ns(self, rank: int, i: int) -> int:
        """Predicted nanoseconds of a rank's step at the i-th P."""
        times = self.calibration.times
        fixed = sum(getattr(times, name) * int(quantity[rank, 0]) for name, quantity in self.fixed.items())
        return fixed + self.varying_ns(rank, i)


def quantities(table: Table, p: int, heads: int, calibration: Calibration) -> dict[str, int]:
    """How often a step of a rank at P = `p` spends each of `calibration.Times`; what a fit of measured steps takes."""
    model = StepModel([table_rows(table)], heads, calibration, np.array([p]))
    walked = model.walked(0, 0)
    counts = {"walk_output": walked, "walk_states": walked, "walk_adjoint": walked}
    for name, quantity in (*model.varying.items(), *model.fixed.items()):
        counts[name] = counts.get(name, 0) + int(quantity[0, 0])
    return counts


def step_ns(table: Table, p: int, heads: int, calibration: Calibration) -> int:
    """Predicted nanoseconds of a rank's step."""
    return StepModel([table_rows(table)], heads, calibration, np.array([p])).step_ns(0, 0)


# ---- the rule --------------------------------------------------------------------------------------------------------


def measured_vector(tables: Sequence[Table], heads: int, calibration: Calibration) -> list[int]:
    """P of every rank, each from that rank's fragments alone; ranks of equal content are planned once."""
    rows = [_thinned(table_rows(table)) for table in tables]
    useful = {content: _largest_useful(content, heads, calibration) for content in rows}
    order = sorted(useful, key=lambda content: (useful[content], len(content)))
    best: dict[Rows, int] = {}
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        largest = np.array([useful[content] for content in batch])[:, None]
        model = StepModel(batch, heads, calibration, np.arange(1, largest[-1, 0] + 1))
        best |= zip(batch, _cheapest(model, largest), strict=True)
    return [best[content] for content in rows]


def may_run(p: Ints, longest: Ints, calibration: Calibration) -> Ints:
    """Whether the rule may pick P = `p` where the longest fragment has `longest` chunks; P = 1 always."""
    short: Ints = (ceil_div(longest, p) <= calibration.settings.max_chunks) | (p == MAX_SEGMENTS)
    return (p <= longest) & short | (p == 1)


def _cheapest(model: StepModel, largest: Ints) -> list[int]:
    """P of every rank of the model, at most `largest` [R, 1]: what else is in the model must not matter."""
    p, longest = model.p, model.nc[:, :, 0]
    allowed = may_run(p, longest, model.calibration) & (p <= largest)
    bounds = np.where(allowed, model.bounds(), np.iinfo(np.int64).max)
    order = bounds.argsort(axis=1, kind="stable")
    return [int(p[_first_best(model, rank, bounds[rank], order[rank])]) for rank in range(len(bounds))]


def _first_best(model: StepModel, rank: int, bounds: Ints, order: Ints) -> int:
    """Index of the cheapest, the smallest P on ties; exact times only until a bound is above the best."""
    best_ns, best = model.varying_ns(rank, int(order[0])), int(order[0])
    for i in order[1:].tolist():
        if bounds[i] > best_ns:
            break
        best_ns, best = min((best_ns, best), (model.varying_ns(rank, i), i))
    return best


def _largest_useful(rows: Rows, heads: int, calibration: Calibration) -> int:
    longest = rows[0][0] if rows else 0
    even = sum(nc * count for nc, _, _, count in rows) * heads // calibration.sm_count
    useful = max(1, USEFUL * longest // max(1, even), -(-longest // calibration.settings.max_chunks))
    return min(MAX_SEGMENTS, useful)


def _thinned(rows: Rows) -> Rows:
    """Fragments of nearly equal length (the same four leading bits) as so many of the longest's length."""
    if len(rows) <= MERGE_ABOVE:
        return rows
    merged: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    for nc, out, into, count in rows:
        bits = nc.bit_length()
        key = bits, nc >> max(0, bits - 4), out, into
        longest, chunks = merged.get(key, (nc, 0))
        merged[key] = longest, chunks + nc * count
    return Rows((nc, out, into, -(-chunks // max(1, nc))) for (_, _, out, into), (nc, chunks) in merged.items())
