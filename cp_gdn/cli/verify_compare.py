"""Compares the results of a case tensor by tensor: bits where they are promised, else relative L2 per head."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn.backends.choice import BackendChoice
from cp_gdn.cli.verify_case import TENSORS, Case, RankResults, index_of, rows_of
from cp_gdn.cli.verify_world import WorldResults

LIMITS = {"fp64": (1e-10, 1e-8), "fp32": (1e-5, 1e-4), "bf16": (5e-3, 1e-2), "fp16": (1e-3, 2e-3)}
"""Relative L2 error per head that one rank may differ by from many in torch, per dtype: (every tensor but dg, dg)."""

KERNEL_BUDGETS = (5e-3, 8e-3)
"""What the kernels' own tests allow against fp64: (every tensor but dg and dbeta, those two). Another number of ranks
cuts chunks elsewhere and so rounds other operands to bf16: two runs may lie on either side of fp64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison of one tensor. `error` and `limit` are None where the bits are compared."""

    kind: str
    passed: bool
    error: float | None = None
    limit: float | None = None
    first_difference: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """All comparisons of one tensor."""

    tensor: str
    checks: dict[str, Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def backend_of(processes: WorldResults, twin: WorldResults, one_rank: RankResults) -> BackendChoice:
    """The backend that ran; more than one where ranks took others."""
    taken = [results.taken for world in (processes, twin) for ranks in world.values() for results in ranks]
    kinds = dict.fromkeys(choice.kind for choice in (*taken, one_rank.taken))
    return BackendChoice(kind=", ".join(kinds), reason=taken[0].reason)


def compare(case: Case, processes: WorldResults, twin: WorldResults, one_rank: RankResults) -> list[Row]:
    kind = backend_of(processes, twin, one_rank).kind
    # A row's bits in a library's product on a GPU depend on how many rows there are, and so on the number of ranks.
    same_on_one = case.is_grid and (kind == "hopper" or case.device == "cpu")
    rows = []
    for name in TENSORS:
        limit = None if same_on_one else limit_of(case.dtype, kind, name)
        checks = {
            "ring = twin": _same_bits(name, processes["ring"], twin["ring"]),
            "a2a = twin": _same_bits(name, processes["a2a"], twin["a2a"]),
            "ring = a2a": _same_bits(name, processes["ring"], processes["a2a"]),
            "one rank": _against_one_rank(name, processes["ring"], one_rank, limit),
        }
        rows.append(Row(tensor=name, checks=checks))
    return rows


def limit_of(dtype: str, kind: str, name: str) -> float:
    """By how much many ranks may differ from one on a ``kind`` of backend."""
    if "hopper" in kind:
        return 2 * KERNEL_BUDGETS[name in ("dg", "dbeta")]
    return LIMITS[dtype][name == "dg"]


def _same_bits(name: str, got: list[RankResults], want: list[RankResults]) -> Check:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        first = first_difference(rows_of(name, a), rows_of(name, b))
        if first is not None:
            return Check(kind="bits", passed=False, first_difference=f"rank {rank}, {first}")
    return Check(kind="bits", passed=True)


def _against_one_rank(name: str, ranks: list[RankResults], one: RankResults, limit: float | None) -> Check:
    got, want = assemble(name, ranks), assemble(name, [one])
    if limit is None:
        first = first_difference(got, want)
        return Check(kind="bits", passed=first is None, first_difference=first)
    error = worst_error(got, want)
    return Check(kind="tolerance", passed=error <= limit, error=error, limit=limit)


def assemble(name: str, ranks: list[RankResults]) -> Tensor:
    """The whole pack's tensor [tokens or documents, heads, ...] from every rank's rows."""
    order = torch.cat([index_of(name, results) for results in ranks])
    return torch.cat([rows_of(name, results) for results in ranks])[torch.argsort(order)]


def worst_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error of the worst head; infinite when either tensor is not finite."""
    diff, base = (x.double().movedim(1, 0).flatten(1).norm(dim=1) for x in (got.double() - want.double(), want))
    error = (diff / base.clamp_min(torch.finfo(torch.float64).tiny)).masked_fill(diff == 0, 0.0)
    return float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0


def first_difference(got: Tensor, want: Tensor) -> str | None:
    """Where two tensors first differ, with both values; None when they are equal."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {list(got.shape)} against {want.dtype} {list(want.shape)}"
    if torch.equal(got, want):
        return None
    place = tuple(int(index) for index in (got != want).nonzero()[0])
    return f"index {list(place)}: {got[place].item()!r} against {want[place].item()!r}"
