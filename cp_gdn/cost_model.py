"""The model of one step's time on one rank, and the rule "measured" that picks P by it.

Step = forward + backward of one layer. Its time is a sum of constants (`calibration.Times`) times whole quantities, and
those follow from what the plan runs at P: which segments are walked, summarized, folded. Worked example: one uncut
document of 100 chunks at P = 2 has two segments of 50. The first is summarized (its offset; nobody is before it, so no
map), one hop folds, and both are walked at once, where at P = 1 one SM per head walks all 100.

Gates decide what summaries cost, and a plan does not know them: where heads decay, the decay bound leaves a few chunks
of each. A step is therefore predicted twice, for gates that never decay and for `Settings.decayed_permille`, and the
rule takes the P whose larger loss against the best P of either is the least.
"""

import functools
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from cp_gdn.backends.hopper_items import RUN_CHUNKS
from cp_gdn.calibration import Calibration
from cp_gdn.layout import Partition
from cp_gdn.makespan import LONG, Rows, Table, ceil_div, rank_rows, table_rows

MAX_SEGMENTS = 64
"""Largest P that is tried."""
USEFUL = 8
"""A longest segment of an eighth of an SM's even share is short enough: more segments only add hops."""
BESIDE = 0.125
"""Share of a walk's smaller time (see `Times`) that is spent beside the larger one; a power of two, so that sums of
times are exact in float64."""
FOLD_BLOCKS = 8
"""Thread blocks of a fold per fragment and head: 16 of the 128 state columns each."""
FOR_MEMORY = 1.04
"""Largest time, over the best, of a P that is taken for the memory of a backward's tapes."""
MERGE_ABOVE = 32
"""Distinct rows of a table above which fragments of nearly equal length are taken as equal."""

Ints = np.ndarray
"""An int64 array."""
Numbers = np.ndarray
"""A float64 array: whole numbers, or times in ns, exact to an eighth."""

ALL, OFFSETS, ADJOINT_OFFSETS, SUMMARIES = range(4)
"""What blocks of a walk take: runs of short segments (`hopper_items`) of all; segments with tokens of their document
behind them, before them; and for B and M in one launch those behind them, then once more those on both sides."""
WALKS = {
    "output": ("walk_output", "stream_output", ALL),
    "states": ("walk_states", "stream_states", ALL),
    "adjoint": ("walk_adjoint", "stream_adjoint", ALL),
    "summaries": ("walk_summary", "stream_summary", SUMMARIES),
    "adjoint_offsets": ("adjoint_summary", "stream_adjoint_summary", ADJOINT_OFFSETS),
}
"""The walks of a step: their two `Times`, and what they take."""
_SETS = np.array([of for _, _, of in WALKS.values()])
_LEFT = np.where(_SETS == SUMMARIES, OFFSETS, _SETS)
"""Sets of which the decay bound leaves some chunks: no map is left, but the offsets."""
_STARTS = np.bincount(_SETS, minlength=4).astype(np.float64)[:, None]
"""Walks of each set."""


@functools.lru_cache
def _walk_prices(calibration: Calibration) -> Numbers:
    """Per walk of `WALKS` in ns: a chunk of its chain, a chunk of its bytes, and what the decay bound leaves of a
    segment; [3, walks, 1]."""
    times, most = asdict(calibration.times), calibration.settings.decayed_chunks
    prices = [
        (times[chain], times[stream], times[chain] * (LONG if of == ALL else most))
        for chain, stream, of in WALKS.values()
    ]
    return np.array(prices, dtype=np.float64).T[:, :, None]


class RankModel:
    """Quantities of one rank at several P at once, whole numbers in float64.

    Legend of array shapes: P tried values of P, J kinds of fragments, 4 sets of items (`ALL` .. `SUMMARIES`). Segments
    of a fragment count as equally long: on a chain as the longest, on an even share as their mean.

    Attributes:
        parts: segments of each kind of fragment, [J, P].
        even: chunks per SM if the walk of a set were shared evenly; chain: of the busiest SM at least; starts: items
            that it starts; [4, P] each.
        hops: of folds in series, in both directions, [P]: entry states, composed offsets and maps.
        share: chunks of all fragments per SM. crosses: directions in which some chain goes on.
    """

    def __init__(self, rows: Rows, heads: int, calibration: Calibration, p: Ints) -> None:
        self.rows, self.heads, self.calibration = [row for row in rows if row[0]], heads, calibration
        self.crosses = any(row[1] for row in self.rows) + any(row[2] for row in self.rows)
        sm_count, slots = calibration.sm_count, calibration.sm_count * calibration.settings.fold_blocks
        fragments = np.array(self.rows or [(1, 0, 0, 0)], dtype=np.float64)
        fragments[:, 3] *= heads
        chunks, out, into, count = fragments.T[..., None]
        self.parts = np.minimum(chunks, p)
        mean = chunks / self.parts
        # Nobody needs the offset of a chain's last segment, the adjoint offset of its first, the map of either.
        last, first = 1 - out, 1 - into
        counts = self.parts[:, None] - np.array((np.zeros_like(last), last, first, last + first)).swapaxes(0, 1)
        np.maximum(counts, 0, out=counts)
        counts[:, SUMMARIES] += counts[:, OFFSETS]
        counts *= count[:, None]
        self.even = np.ceil(np.add.reduce(counts * mean[:, None]) / sm_count)
        run = np.maximum(np.ceil(np.minimum(RUN_CHUNKS / mean, self.parts * (count / heads))), 1)
        counts[:, ALL] /= run
        longest = np.ceil(np.array((mean * run, mean, mean, mean))).swapaxes(0, 1)
        # Of the first k items, the longest, some SM starts at least k / SMs, none shorter than the last of them.
        waves = np.ceil(np.add.accumulate(counts) / sm_count)
        self.starts = waves[-1]
        self.chain = np.maximum(np.maximum.reduce(waves * longest), self.even)
        self.share = self.even.item(ALL, 0)
        # Folds that pass a fragment: entry states in both directions, composed offsets in either, composed maps.
        hops = (self.parts - 1) * (2 + out + into + out * into)
        spread = np.ceil(fragments[:, 3].dot(hops) * (FOLD_BLOCKS / slots))
        self.hops: Numbers = np.maximum(np.maximum.reduce(hops), spread)

    @property
    def launches(self) -> Numbers:
        """Of a step whose tapes are kept, [P]: prepare and walk; walk, adjoint, grad; a walk for summaries and a fold
        each way where fragments are split; a fold more, or the two of them alone, at either border that is crossed."""
        splits = self.parts[0] > 1  # the first fragments have the most chunks
        unsplit = 5 * bool(self.rows) + 2 * self.crosses
        launches: Numbers = unsplit + splits * (4 - self.crosses)
        return launches

    @property
    def links(self) -> dict[str, int]:
        """Quantities of messages."""
        crossing = sum(count * (out + into) for _, out, into, count in self.rows)
        return {"exchange": 2 * (crossing > 0), "link_mib": -(-crossing * self.heads // 16)}  # 64 KiB a state and head

    @property
    def _walks_ns(self) -> tuple[Numbers, Numbers]:
        """Every walk of `WALKS` without its starts, for gates that never decay and for those that do, [walks, P]."""
        chain, stream, left = _walk_prices(self.calibration)
        on_chain, on_all = self.chain.take(_SETS, axis=0) * chain, self.even.take(_SETS, axis=0) * stream
        ns = np.minimum(on_chain, on_all) * BESIDE
        ns += np.maximum(on_chain, on_all)
        return ns, np.minimum(ns, self.starts.take(_LEFT, axis=0) * left)

    @property
    def times_ns(self) -> Numbers:
        """Predicted times of a step whose gates never decay, and of one whose heads decay as `Settings` say, [2, P]."""
        times, share = self.calibration.times, self.calibration.settings.decayed_permille / 1000
        steady, decayed = (np.add.reduce(ns, axis=0) for ns in self._walks_ns)
        rest = np.add.reduce(_STARTS * self.starts) * times.segment + self.launches * times.launch + self._fixed_ns
        steady += self.hops * times.fold_hop
        decayed += self.hops * times.dropped_hop
        both: Numbers = np.array((steady, share * decayed + (1 - share) * steady))
        both += rest
        return both

    @property
    def _fixed_ns(self) -> float:
        times = self.calibration.times
        links = sum(getattr(times, name) * quantity for name, quantity in self.links.items())
        return self.share * (times.prepare + times.grad) + self.crosses * times.fold_hop + links

    def walk_ns(self, walk: str, *, decayed: bool) -> Numbers:
        """One walk without its starts, [P]."""
        ns: Numbers = self._walks_ns[decayed][[*WALKS].index(walk)]
        return ns

    def losses(self) -> Numbers:
        """Time at each P over that at the best one, the larger of those for both gates, [P]."""
        times = self.times_ns
        best = np.maximum(np.minimum.reduce(times, axis=1), 1)[:, None]  # 0 without tokens
        loss: Numbers = np.maximum.reduce(times / best)
        return loss


def quantities(table: Table, p: int, heads: int, calibration: Calibration) -> dict[str, float]:
    """How often a step of a rank at P = `p` spends each of `calibration.Times`, for gates that never decay. Of a walk's
    two times the smaller counts as the share `BESIDE` of it."""
    model = RankModel(table_rows(table), heads, calibration, np.array([p]))
    found: dict[str, float] = {"prepare": model.share, "grad": model.share, **model.links}
    found |= {"launch": model.launches.item(0), "fold_hop": model.hops.item(0) + model.crosses}
    for walk in WALKS:
        for name, quantity in walk_quantities(model, walk).items():
            found[name] = found.get(name, 0) + quantity
    return found


def walk_quantities(model: RankModel, walk: str) -> dict[str, float]:
    """The same of one walk, at the first P of the model."""
    chain, stream, of = WALKS[walk]
    times, on_chain, on_all = model.calibration.times, model.chain.item(of, 0), model.even.item(of, 0)
    is_chain = on_chain * getattr(times, chain) >= on_all * getattr(times, stream)
    on_chain, on_all = on_chain * (1 if is_chain else BESIDE), on_all * (BESIDE if is_chain else 1)
    return {chain: on_chain, stream: on_all, "segment": model.starts.item(of, 0)}


def step_ns(table: Table, p: int, heads: int, calibration: Calibration) -> float:
    """Predicted nanoseconds of a rank's step, for gates that never decay."""
    return RankModel(table_rows(table), heads, calibration, np.array([p])).times_ns.item(0)


# ---- the rule --------------------------------------------------------------------------------------------------------


def measured_vector(tables: Sequence[Table], heads: int, calibration: Calibration) -> list[int]:
    """P of every rank, each from that rank's fragments alone; ranks of equal content are planned once."""
    rows = [table_rows(table) for table in tables]
    best = {content: measured_p(content, heads, calibration) for content in dict.fromkeys(rows)}
    return [best[content] for content in rows]


def measured_p_of(part: Partition, rank: int, heads: int, calibration: Calibration) -> int:
    """P of one rank of a partition, see `measured_p`; its fragments are not counted where there is nothing to try."""
    own = part.of_rank(rank)
    longest, chunks = int(np.maximum.reduce(own.num_chunks, initial=0)), own.total_chunks
    tried = tried_p(longest, chunks, heads, calibration)
    return _best_p(rank_rows(part, rank), tried, heads, calibration) if len(tried) > 1 else 1


def measured_p(rows: Rows, heads: int, calibration: Calibration) -> int:
    """P of a rank: the one that loses the least (`RankModel.losses`), the smallest on ties; if it costs no more than
    `FOR_MEMORY`, one whose segments are short enough for a backward's memory (`short_chunks`).

    Walks count at a bound of their makespan; exact makespans chose the same P in every row that was measured.
    """
    tried = tried_p(rows[0][0] if rows else 0, _chunks(rows), heads, calibration)
    return _best_p(rows, tried, heads, calibration) if len(tried) > 1 else 1


def _best_p(rows: Rows, tried: list[int], heads: int, calibration: Calibration) -> int:
    """The one of ``tried`` that `measured_p` takes."""
    short, p = short_chunks(_chunks(rows), heads, calibration), np.array(tried)
    losses = RankModel(_thinned(rows), heads, calibration, p).losses()
    if short < LONG:
        lean = losses + np.where(_is_short(p, rows[0][0], short), 0, np.inf)
        if np.minimum.reduce(lean) <= FOR_MEMORY * np.minimum.reduce(losses):
            losses = lean
    return tried[int(losses.argmin())]


def may_run(p: Ints, longest: Ints, calibration: Calibration) -> Ints:
    """Whether the rule may pick P = `p` where the longest fragment has `longest` chunks; P = 1 always."""
    return (p <= longest) & _is_short(p, longest, calibration.settings.max_chunks) | (p == 1)


def short_chunks(chunks: int, heads: int, calibration: Calibration) -> int:
    """Chunks that a segment may have without costing a backward memory: any number unless the rank has more ``chunks``
    than a wave of the longest segments, see `Settings.wave_chunks`."""
    settings = calibration.settings
    return settings.wave_chunks if chunks * heads > settings.max_chunks * calibration.sm_count else LONG


def _chunks(rows: Rows) -> int:
    return sum([nc * count for nc, _, _, count in rows])


def _is_short(p: Ints, longest: int | Ints, most: int) -> Ints:
    """Whether segments of the longest fragment have `most` chunks at P = `p`, or as few as can be."""
    short: Ints = (ceil_div(longest, p) <= most) | (p == MAX_SEGMENTS)
    return short


def tried_p(longest: int, chunks: int, heads: int, calibration: Calibration) -> list[int]:
    """P = 1, and others that the rule may pick for a rank of so many chunks."""
    most, short = calibration.settings.max_chunks, short_chunks(chunks, heads, calibration)
    least, even = max(2, -(-longest // most)), chunks * heads // calibration.sm_count
    useful = max(1, USEFUL * longest // max(1, even), -(-longest // min(short, most)))
    return [1, *range(min(least, MAX_SEGMENTS), min(longest, MAX_SEGMENTS, useful) + 1)]


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
