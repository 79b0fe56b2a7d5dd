"""How many segments P every rank cuts its fragments into, and what `segments=` of a context may say.

A rule is a pure function of every rank's fragments, the number of value heads and the SM count, in exact integers, so
that every rank comes to the same P vector without a message.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cp_gdn.calibration import H200_MODEL, Calibration, calibration_for
from cp_gdn.cost_model import measured_p_of, measured_vector
from cp_gdn.layout import Partition
from cp_gdn.makespan import Table, rank_tables, table_rows
from cp_gdn.seed_rules import GB300, H200, RULES, Costs, RankCosts, seed_costs

__all__ = [
    "GB300",
    "H200",
    "RULES",
    "Costs",
    "SegmentChoice",
    "SegmentSpec",
    "p_vector",
    "parse_segments",
    "resolve_segments",
    "row_cost",
]

ACCEPTED = f'an int >= 1, one int >= 1 per rank, "grid:N", "auto", or a rule: {", ".join((*RULES, "measured"))}'


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSpec:
    """What a caller asked for. `kind` says which field holds it: "fixed" p (one per rank), "grid" grid, "rule" rule."""

    kind: str
    p: tuple[int, ...] = ()
    grid: int = 0
    rule: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentChoice:
    """What a context runs, and why.

    Attributes:
        asked: what the caller asked for. part, value_heads, calibration: what a rule decides by.
        note: what a rule had to assume about the device, "" if nothing.
    """

    asked: SegmentSpec
    part: Partition
    value_heads: int
    calibration: Calibration
    note: str

    @property
    def grid(self) -> int:
        """N of "grid:N", or 0."""
        return self.asked.grid

    @property
    def rule(self) -> str:
        """Which rule chose; "fixed" or "grid" if the caller did."""
        return self.asked.rule or self.asked.kind

    def p_of(self, rank: int) -> int:
        """Segments per fragment of one rank; 1 in grid mode, where it is of no effect.

        The rule "measured" looks at this rank's fragments alone, others at all ranks'.
        """
        if self.rule == "measured":
            return measured_p_of(self.part, rank, self.value_heads, self.calibration)
        return self.p_vector[rank]

    @cached_property
    def p_vector(self) -> tuple[int, ...]:
        """Segments per fragment of every rank."""
        if self.asked.kind != "rule":
            return self.asked.p or (1,) * self.part.world_size
        tables = rank_tables(self.part, grid="document" if self.rule == "measured" else "fragment")
        return tuple(p_vector(self.rule, tables, self.value_heads, self.calibration.sm_count, self.calibration))

    @property
    def agreed(self) -> str:
        """What must be equal on every rank, readable: the grid, the P vector that was asked for, or the rule and its
        constants."""
        if self.grid:
            return f"grid:{self.grid}"
        if self.asked.kind == "fixed":
            return str(self.p_vector)
        constants = hashlib.sha256(repr(self.calibration).encode()).hexdigest()[:16]
        return f"{self.rule}, {self.calibration.device} of {self.calibration.sm_count} SMs, constants {constants}"


def parse_segments(spec: Any, world_size: int) -> SegmentSpec:
    """Read `segments=`. TypeError for a wrong type, ValueError for a wrong value."""
    if isinstance(spec, str):
        if spec.startswith("grid:"):
            return SegmentSpec(kind="grid", grid=_grid(spec))
        rule = "measured" if spec == "auto" else spec
        if rule not in RULES and rule != "measured":
            raise ValueError(f"segments: got {spec!r}, expected {ACCEPTED}")
        return SegmentSpec(kind="rule", rule=rule)
    if not hasattr(spec, "__len__"):
        return SegmentSpec(kind="fixed", p=(_count(spec, spec),) * world_size)
    if len(spec) != world_size:
        raise ValueError(
            f"segments: got {len(spec)} numbers, expected one per rank, {world_size}; or one int for all ranks"
        )
    return SegmentSpec(kind="fixed", p=tuple(_count(p, spec) for p in spec))


def _grid(spec: str) -> int:
    digits = spec.removeprefix("grid:")
    if not (digits.isascii() and digits.isdigit() and int(digits)):
        raise ValueError(f'segments: got {spec!r}, expected "grid:N" with N >= 1 chunks of 64 tokens between borders')
    return int(digits)


def _count(value: Any, spec: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"segments: got {spec!r}, expected {ACCEPTED}")
    if count < 1:
        raise ValueError(f"segments: got {spec!r}, expected {ACCEPTED}")
    return count


def resolve_segments(
    spec: Any, part: Partition, value_heads: int, calibration: Calibration | None = None, note: str = ""
) -> SegmentChoice:
    """What `segments=` means for a partition; a rule runs when its P is asked for.

    Args:
        spec: see `parse_segments`.
        calibration, note: constants of the device that will run it and what was assumed about it, from
            `calibration_for`; without them those for a CPU.
    """
    asked = parse_segments(spec, part.world_size)
    if calibration is None:
        calibration, note = calibration_for("cpu")
    return SegmentChoice(
        asked=asked,
        part=part,
        value_heads=value_heads,
        calibration=calibration,
        note=note if asked.kind == "rule" else "",
    )


def p_vector(
    rule: str, tables: Sequence[Table], value_heads: int, sm_count: int, costs: Costs | Calibration = GB300
) -> list[int]:
    """Segments per fragment of every rank.

    Args:
        rule: one of `RULES`, or "measured".
        tables: per rank its fragments. The seed's rules count chunks from the fragment's first token, "measured" from
            the document's: `rank_tables(part, grid=...)`. Only "measured" reads whether a fragment crosses in.
        costs: for "measured" a `Calibration`, else the H200's is taken.
    """
    if rule != "measured" and rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, expected one of {', '.join((*RULES, 'measured'))}")
    if min(value_heads, sm_count) < 1:
        raise ValueError(f"value_heads, sm_count: got {value_heads} and {sm_count}, expected at least 1 of each")
    if rule == "measured":
        calibration = costs if isinstance(costs, Calibration) else H200_MODEL
        return measured_vector(tables, value_heads, replace(calibration, sm_count=sm_count))
    costs = seed_costs(costs) if isinstance(costs, Calibration) else costs
    rows = [table_rows(table) for table in tables]
    distinct = {content: i for i, content in enumerate(dict.fromkeys(rows))}
    vector = RULES[rule]([RankCosts(content, value_heads, sm_count, costs) for content in distinct])
    return [vector[distinct[content]] for content in rows]


def row_cost(
    tables: Sequence[Table], vector: Sequence[int], value_heads: int, sm_count: int, costs: Costs = GB300
) -> int:
    """What the seed's rules weigh a P vector with: the slowest rank's cost, in units of 10 ns."""
    pairs = {(table_rows(table), p) for table, p in zip(tables, vector, strict=True)}
    return max((RankCosts(rows, value_heads, sm_count, costs).cost(p) for rows, p in pairs), default=0)
