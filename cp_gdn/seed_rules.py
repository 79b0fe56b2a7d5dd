"""The seed system's rules for P, in exact integers.

`P` = segments per fragment, one per rank. Worked example, rule "occ" on 132 SMs with 8 value heads: a rank with one
fragment of 200 chunks gets P = ceil(132 / 8) = 17, one with three such fragments 6, one without fragments 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_gdn.calibration import H200_MODEL, Calibration
from cp_gdn.makespan import Rows, ceil_div, lpt_makespan, makespan_bound

MAX_WALK_CHUNKS = 256
MAX_SEGMENTS = 64
MAX_FRAGMENTS = 3
"""Caps: chunks of one walk, segments of one fragment, fragments of a rank whose P is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What the rules weigh, in 10 ns: per chunk the walks for tape, transfer and offset, per segment the compose."""

    device: str
    tape: int
    xfer: int
    offset: int
    compose: int


def seed_costs(calibration: Calibration) -> Costs:
    """The calibrated stages that stand where the seed has its four: the walks for o, M and B where all SMs walk, and a
    fold hop."""
    times = calibration.times
    walk, summary, hop = times.stream_output // 10, times.stream_summary // 10, times.fold_hop // 10
    return Costs(device=calibration.device, tape=walk, xfer=summary, offset=summary, compose=hop)


GB300 = Costs(device="GB300", tape=285, xfer=350, offset=120, compose=2040)
"""The seed's own constants."""
H200 = seed_costs(H200_MODEL)


class RankCosts:
    """The seed's programs and cost of one rank's fragments; `rows` as `table_rows` gives them."""

    def __init__(self, rows: Rows, heads: int, sm_count: int, costs: Costs) -> None:
        self.rows, self.heads, self.sm_count, self.costs = rows, heads, sm_count, costs
        self.num_fragments = sum(row[3] for row in rows)
        self.longest = rows[0][0] if rows else 0
        self.p_chain = max(1, -(-self.longest // MAX_WALK_CHUNKS))
        self.p_max = max(1, min(MAX_SEGMENTS, self.longest))
        self._walks: dict[int, tuple[int, int]] = {}

    @cached_property
    def occ(self) -> int:
        """Fill the SMs once, with no walk beyond its cap."""
        if not self.rows:
            return 1
        fill = -(-self.sm_count // (self.num_fragments * self.heads))
        cap = min(MAX_SEGMENTS, self.longest, max(self.p_chain, MAX_SEGMENTS))
        return max(1, min(max(fill, self.p_chain), cap))

    @cached_property
    def wave_fill1(self) -> int:
        """One wave for a lone short fragment, the cheapest number of waves for few long ones, else `occ`."""
        fill = self.sm_count // self.heads
        if self.num_fragments == 1 and 0 < self.longest <= MAX_WALK_CHUNKS and fill >= 1:
            return max(self.p_chain, min(MAX_SEGMENTS, self.longest, fill))
        if not self.is_searched:
            return self.occ
        c, p = self.costs, self.candidates
        waves = ceil_div(self.num_fragments * p * self.heads, self.sm_count)
        cost = waves * ceil_div(np.array(self.longest), p) * (c.tape + c.xfer + c.offset) + (p - 1) * c.compose
        return int(p[cost.argmin()])

    @property
    def is_searched(self) -> bool:
        """Whether a rule may try all P of this rank."""
        return 1 <= self.num_fragments <= MAX_FRAGMENTS and self.longest > MAX_WALK_CHUNKS

    @property
    def candidates(self) -> np.ndarray:
        return np.arange(min(self.p_chain, self.p_max), self.p_max + 1)

    def walks(self, p: int) -> tuple[int, int]:
        """Chunks that the busiest SM walks at P = p: for summaries, for the tape."""
        if p not in self._walks:
            jobs = [(-(-nc // p), count * p * self.heads) for nc, _, _, count in self.rows]
            tape = lpt_makespan(jobs, self.sm_count)
            some = [job for job, row in zip(jobs, self.rows, strict=True) if row[1]]
            self._walks[p] = (tape if p > 1 else lpt_makespan(some, self.sm_count)), tape
        return self._walks[p]

    def cost(self, p: int) -> int:
        """10 ns; 0 for a rank without fragments."""
        if not self.rows:
            return 0
        summary, tape = self.walks(p)
        c = self.costs
        return summary * (c.offset + c.xfer) + tape * c.tape + (p - 1) * self._hop

    @cached_property
    def _hop(self) -> int:
        return 2 * self.costs.compose * -(-self.num_fragments * self.heads // self.sm_count)

    def steps(self, p: int) -> int:
        """Walk steps of the busiest SM, forward and backward."""
        summary, tape = self.walks(p) if self.rows else (0, 0)
        return 5 * summary + 3 * tape

    @cached_property
    def cheapest(self) -> int:
        """The smallest P that costs at most 2 % more than the least cost; costs are exact, bounds only skip some."""
        p = self.candidates
        bound = self._bounds(p)
        near = p[100 * bound <= 102 * self.cost(int(p[bound.argmin()]))].tolist()
        least = min(self.cost(q) for q in near)
        return next(q for q in near if 100 * self.cost(q) <= 102 * least)

    def _bounds(self, p: np.ndarray) -> np.ndarray:
        """Lower bounds of `cost` for P > 1, where every fragment is summarized."""
        c, (nc, _, _, count) = self.costs, np.array(self.rows).T
        walk = makespan_bound(ceil_div(nc, p[:, None]), p[:, None] * (count * self.heads), self.sm_count)
        return walk * (c.offset + c.xfer + c.tape) + (p - 1) * self._hop


# ---- rules of a whole row: one P per distinct rank content -----------------------------------------------------------

Vector = list[int]


def _row_cost_of(ranks: Sequence[RankCosts], vector: Vector) -> int:
    return max((rank.cost(p) for rank, p in zip(ranks, vector, strict=True)), default=0)


def _row_steps(ranks: Sequence[RankCosts], vector: Vector) -> int:
    return max((rank.steps(p) for rank, p in zip(ranks, vector, strict=True)), default=0)


def _one(ranks: Sequence[RankCosts]) -> Vector:
    return [1] * len(ranks)


def _occ(ranks: Sequence[RankCosts]) -> Vector:
    return [rank.occ for rank in ranks]


def _wave_fill1(ranks: Sequence[RankCosts]) -> Vector:
    return [rank.wave_fill1 for rank in ranks]


def _switched(ranks: Sequence[RankCosts], start: Vector) -> Vector:
    """`start`, or "occ" or "one" for the whole row where that is cheaper by its margin in percent."""
    best, cost = start, _row_cost_of(ranks, start)
    for other, margin in ((_occ(ranks), 2), (_one(ranks), 0)):
        other_cost = cost if other == start else _row_cost_of(ranks, other)
        if other_cost < cost and 100 * other_cost <= (100 - margin) * cost:
            best, cost = other, other_cost
    return best


def _row_cost(ranks: Sequence[RankCosts]) -> Vector:
    return _switched(ranks, _wave_fill1(ranks))


def _row_cost_lpt(ranks: Sequence[RankCosts]) -> Vector:
    start = _wave_fill1(ranks)
    today = _switched(ranks, start)
    searched = list(start)
    for i, rank in enumerate(ranks):
        if today[i] > 1 and rank.is_searched and rank.steps(rank.cheapest) <= rank.steps(start[i]):
            searched[i] = rank.cheapest
    new = _switched(ranks, searched)
    splits = any(was == 1 and p != 1 for was, p in zip(today, new, strict=True))
    gains = new == today or 100 * _row_steps(ranks, new) <= 96 * _row_steps(ranks, today)
    return today if splits or not gains else new


RULES: dict[str, Callable[[Sequence[RankCosts]], Vector]] = {
    "one": _one,
    "occ": _occ,
    "wave_fill1": _wave_fill1,
    "row_cost": _row_cost,
    "row_cost_lpt": _row_cost_lpt,
}
