"""Plans of every rank of a pack, without ranks; and packs drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from cp_gdn.chains import Rows, build_rows, hop_columns
from cp_gdn.exchange import Routes, build_routes, choose_exchange
from cp_gdn.hops import HopLists, stepwise
from cp_gdn.layout import Partition, partition
from cp_gdn.page import Page
from cp_gdn.plan import Plan, build_plan
from cp_gdn.schedule import Schedule, build_schedule
from tests.cases import LAYOUTS


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A partition and how it is cut into segments."""

    part: Partition
    p_vector: tuple[int, ...]
    grid: int

    def plan(self, rank: int) -> Plan:
        return build_plan(self.part, rank, p_vector=self.p_vector, grid=self.grid)

    @property
    def segments(self) -> str | tuple[int, ...]:
        """As `build_context` takes it."""
        return f"grid:{self.grid}" if self.grid else self.p_vector


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What a context holds of a rank, both directions."""

    plan: Plan
    rows: Rows
    hops: HopLists
    routes: Routes
    schedule: Schedule


def plan_rank(drawn: Drawn, rank: int, exchange: str) -> RankPlan:
    plan = drawn.plan(rank)
    kind = choose_exchange(exchange, drawn.part, 8, (16, 16), grid=drawn.grid > 0, itemsize=4).kind
    rows, page = build_rows(plan), Page()
    hops = stepwise(hop_columns(plan, rows, steps_on=kind == "ring"), page)
    routes = build_routes(kind, drawn.part, plan, (rows, hops, page))
    schedule = build_schedule(drawn.part, plan, (rows, hops, page))
    page.upload(torch.device("cpu"))
    return RankPlan(plan=plan, rows=rows, hops=hops, routes=routes, schedule=schedule)


def plan_all(drawn: Drawn, exchange: str) -> list[RankPlan]:
    return [plan_rank(drawn, rank, exchange) for rank in range(drawn.part.world_size)]


def explicit_pieces(
    draw: st.DrawFn, lengths: Sequence[int], world: int, most_cuts: int
) -> list[list[tuple[int, int, int]]]:
    """Documents cut anywhere and dealt to any rank, in any order of slots, empty pieces included."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for doc, length in enumerate(lengths):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=most_cuts)))
        for a, b in zip([0, *cuts], [*cuts, length], strict=True):
            ranks[draw(st.integers(0, world - 1))].append((doc, a, b - a))
    return [draw(st.permutations(pieces)) for pieces in ranks]


@st.composite
def drawn_plans(
    draw: st.DrawFn, *, longest: int = 400, most_docs: int = 6, layouts: Sequence[str] = (*LAYOUTS, "explicit")
) -> Drawn:
    lengths = draw(st.lists(st.integers(0, longest), max_size=most_docs))
    bounds = [0, *np.cumsum(lengths).tolist()]
    world, layout = draw(st.integers(1, 8)), draw(st.sampled_from(layouts))
    grid = draw(st.sampled_from((0, 0, 1, 3)))
    align = 64 * grid if grid else 1
    if layout == "explicit":
        part = partition(bounds, world, align=align, fragments=explicit_pieces(draw, lengths, world, 4))
    else:
        part = partition(bounds, world, layout, align=align)
    p_vector = draw(st.lists(st.integers(1, 4), min_size=world, max_size=world))
    return Drawn(part=part, p_vector=tuple(p_vector), grid=grid)
