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
MERGE_ABOVE = 32
"""Distinct rows of a table above which fragments of nearly equal length are taken as equal."""

Ints = np.ndarray
"""An int64 array."""
_NO_ROWS = ((0, 0, 0, 0),)


def _kind(row: Row) -> tuple[int, ...]:
    """Chunks (at least 1) and number of such fragments, whether one holds its chain's start, the folds that pass it
    (entry states in both directions, composed offsets in either, composed maps), and whether its longer and its shorter
    segments hold the chain's end: never, and where that is in the fragment."""
    nc, out, into, count = row
    return (nc, count, 1 - into, 2 + out + into + out * into, 0, 1 - out) if nc else (1, 0, 1, 0, 0, 1)


class RankModel:
    """Quantities of one rank at several P at once.

    Legend of array shapes: P tried values of P, J kinds of fragments, 3 kinds of walks: over all segments, over those
    summarized (for B and for M), over those summarized in the adjoint.

    Attributes:
        lengths, jobs: chunks of an item [P, 2J], and how many such items the walks have [3, P, 2J].
        walks: lower bounds of the chunks that the busiest SM walks, [3, P]. starts: segments that it starts, [3, P].
        hops: in series, [P]: entry states in both directions, composed offsets in either, composed maps.
        even: chunks per SM if all were shared evenly. crosses: directions in which some chain goes on.
    """

    def __init__(self, rows: Rows, heads: int, calibration: Calibration, p: Ints) -> None:
        self.rows, self.heads, self.calibration, self.p = rows, heads, calibration, p
        sm_count, settings = calibration.sm_count, calibration.settings
        self.even = -(-sum(nc * count for nc, _, _, count in rows) * heads // sm_count)
        filled = [row for row in rows if row[0]]
        self.crosses = any(row[1] for row in filled) + any(row[2] for row in filled)
        self.kinds = np.array([_kind(row) for row in rows or _NO_ROWS]).T
        self.parts = np.minimum(p[:, None], self.kinds[0])
        lengths, segments = self._segments()
        self.starts = ceil_div(np.add.reduce(segments, axis=-1) * heads, sm_count)
        # Short segments of a head are walked in runs of about `item_chunks`; shorter ones where SMs would stay idle.
        run = np.minimum(ceil_div(min(self.even, settings.item_chunks), lengths), segments[0])
        np.maximum(run, 1, out=run)
        self.lengths, self.jobs = lengths * run, (segments + (run - 1)) // run * heads
        self.walks = makespan_bound(self.lengths, self.jobs, sm_count)
        self.hops = self._fold_hops()

    def _segments(self) -> tuple[Ints, Ints]:
        """Chunks [P, 2J] and number per head [3, P, 2J] of the segments; of each kind the longer ones first."""
        (nc, count, is_start, _), last = self.kinds[:4], self.kinds[4:].T
        base, longer = np.divmod(nc, self.parts)
        shape = *base.shape, 2
        lengths, first, segments = (np.empty((*n, *shape), dtype=np.int64) for n in ((), (), (3,)))
        walked, summarized, adjoint = segments
        lengths[..., 0], lengths[..., 1] = base + 1, base
        walked[..., 0], walked[..., 1] = longer, self.parts - longer
        # Nobody needs the offset of a chain's last segment, the adjoint offset of its first, the map of either.
        np.multiply(longer > 0, is_start, out=first[..., 0])
        np.subtract(is_start, first[..., 0], out=first[..., 1])
        np.subtract(walked, first, out=adjoint)
        maps = np.maximum(adjoint - last, 0)
        if self.calibration.settings.decayed_permille:
            maps = ceil_div(maps * (1000 - self.calibration.settings.decayed_permille), 1000)
        np.subtract(walked, last, out=summarized)
        summarized += maps
        segments *= count[:, None]
        return lengths.reshape(len(base), -1), segments.reshape(3, len(base), -1)

    def _fold_hops(self) -> Ints:
        slots = self.calibration.sm_count * self.calibration.settings.fold_blocks
        hops = (self.parts - 1) * self.kinds[3]
        even = ceil_div(hops.dot(self.kinds[1]) * (self.heads * FOLD_BLOCKS), slots)
        serial: Ints = np.maximum(np.maximum.reduce(hops, axis=-1), even)
        return serial

    @property
    def varying(self) -> dict[str, Ints]:
        """Quantities that depend on P, [P], without the walks over all segments."""
        splits = self.parts[:, 0] > 1  # the first fragments have the most chunks
        walked, summarized, adjoint = self.starts
        return {
            # NOTE: summaries count at their bound. Exact makespans, at three times the host time, choose another P for
            # 16 of 270 ranks of bench/plan_census.py and gain at most 0.8 % of a modelled step.
            "walk_summary": self.walks[1],
            "adjoint_summary": self.walks[2],
            "segment": 3 * walked + summarized + adjoint,
            "fold_hop": self.hops + self.crosses,
            # a summary and a fold each way, compositions
            "launch": splits * (4 - self.crosses) + 2 * self.crosses,
        }

    @property
    def fixed(self) -> dict[str, int]:
        """Quantities that do not depend on P."""
        crossing = sum(count * (out + into) for nc, out, into, count in self.rows if nc)
        return {
            "prepare": 2 * self.even,
            "grad": self.even,
            "launch": 6 * (self.even > 0),  # prepare, walk; prepare, walk, adjoint, grad
            "exchange": 2 * (crossing > 0),
            "link_mib": -(-crossing * self.heads // 16),  # a state of one head is 64 KiB
        }

    @property
    def chunk_ns(self) -> int:
        """Of a chunk in all walks over all segments."""
        times = self.calibration.times
        return times.walk_output + times.walk_states + times.walk_adjoint

    @cached_property
    def bounds(self) -> Ints:
        """Lower bounds of `varying_ns`, [P]."""
        times, quantities = self.calibration.times, self.varying
        names = [*quantities]
        weights = [self.chunk_ns, *(getattr(times, name) for name in names)]
        bounds: Ints = np.array(weights).dot(np.array([self.walks[0], *quantities.values()]))
        return bounds

    def walked(self, i: int) -> int:
        """Chunks that the busiest SM walks in a walk over all segments, for the i-th P; exact."""
        jobs = zip(self.lengths[i].tolist(), self.jobs[0, i].tolist(), strict=True)
        return lpt_makespan(jobs, self.calibration.sm_count)

    def varying_ns(self, i: int) -> int:
        """What the i-th P decides of a step."""
        return self.bounds.item(i) + (self.walked(i) - self.walks.item(0, i)) * self.chunk_ns

    def step_ns(self, i: int) -> int:
        """Predicted nanoseconds of a step at the i-th P."""
        times = self.calibration.times
        return sum(getattr(times, name) * quantity for name, quantity in self.fixed.items()) + self.varying_ns(i)


class StepModel:
    """`RankModel` of several ranks; the i-th P of each."""

    def __init__(self, tables: Sequence[Rows], heads: int, calibration: Calibration, p: Ints) -> None:
        self.p, self.ranks = p, [RankModel(rows, heads, calibration, p) for rows in tables]

    def bounds(self) -> Ints:
        """Lower bounds of `varying_ns`, [ranks, P]."""
        return np.array([rank.bounds for rank in self.ranks])

    def varying_ns(self, rank: int, i: int) -> int:
        return self.ranks[rank].varying_ns(i)

    def step_ns(self, rank: int, i: int) -> int:
        return self.ranks[rank].step_ns(i)


def quantities(table: Table, p: int, heads: int, calibration: Calibration) -> dict[str, int]:
    """How often a step of a rank at P = `p` spends each of `calibration.Times`; what a fit of measured steps takes."""
    model = RankModel(table_rows(table), heads, calibration, np.array([p]))
    walked = model.walked(0)
    counts = {"walk_output": walked, "walk_states": walked, "walk_adjoint": walked}
    varying = {name: int(quantity[0]) for name, quantity in model.varying.items()}
    for name, quantity in (*varying.items(), *model.fixed.items()):
        counts[name] = counts.get(name, 0) + quantity
    return counts


def step_ns(table: Table, p: int, heads: int, calibration: Calibration) -> int:
    """Predicted nanoseconds of a rank's step."""
    return RankModel(table_rows(table), heads, calibration, np.array([p])).step_ns(0)


# ---- the rule --------------------------------------------------------------------------------------------------------


def measured_vector(tables: Sequence[Table], heads: int, calibration: Calibration) -> list[int]:
    """P of every rank, each from that rank's fragments alone; ranks of equal content are planned once."""
    rows = [table_rows(table) for table in tables]
    best = {content: measured_p(content, heads, calibration) for content in dict.fromkeys(rows)}
    return [best[content] for content in rows]


def measured_p(rows: Rows, heads: int, calibration: Calibration) -> int:
    """P of a rank: the cheapest by the model, the smallest on ties; times are exact only until a bound is above."""
    rows = _thinned(rows)
    longest = rows[0][0] if rows else 0
    largest = min(longest, _largest_useful(rows, heads, calibration))
    least = max(2, -(-longest // calibration.settings.max_chunks))
    tried = [1, *range(min(least, MAX_SEGMENTS), largest + 1)]
    if len(tried) == 1:
        return 1
    model = RankModel(rows, heads, calibration, np.array(tried))
    bounds, (best, *others) = model.bounds.tolist(), model.bounds.argsort(kind="stable").tolist()
    best_ns = model.varying_ns(best)
    for i in others:
        if bounds[i] > best_ns:
            break
        best_ns, best = min((best_ns, best), (model.varying_ns(i), i))
    return tried[best]


def may_run(p: Ints, longest: Ints, calibration: Calibration) -> Ints:
    """Whether the rule may pick P = `p` where the longest fragment has `longest` chunks; P = 1 always."""
    short: Ints = (ceil_div(longest, p) <= calibration.settings.max_chunks) | (p == MAX_SEGMENTS)
    return (p <= longest) & short | (p == 1)


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
