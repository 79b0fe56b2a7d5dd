"""Whole packs against fp64 on one GPU: element by element, head by head, one rank and the ranks of a zigzag.

python bench/oracle.py [--only NAME ..] [--large] [--seconds 60] [--out FILE.json]   about 30 s for the packs of (2,6)

Reference: the torch backend in fp64, a query head at a time. Budgets, declared before measuring: no element beyond
atol = rtol = 1e-2; relative L2 per head of one rank at most 5e-3, of dg and dbeta 8e-3; of several ranks at most 1.10 x
one rank's. Exit status 1 where one is not kept.
"""

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from op import Shape, inputs
from record import document, record

import cp_gdn

Tensors = dict[str, torch.Tensor]
NAMES = ("q", "k", "v", "g", "beta")
RESULTS = ("o", *(f"d{name}" for name in NAMES))
TOLERANCE = 1e-2
BUDGETS = {name: 8e-3 if name in ("dg", "dbeta") else 5e-3 for name in RESULTS}
RANKS_FACTOR = 1.10
MIXED = (65_536, 131_072, 7, 20_000, 64, 1, 4_000, 30_001)
PACKS = (
    Shape(name="1x261987", lengths=(261_987,), heads=(2, 6)),
    Shape(name="8 mixed", lengths=MIXED, heads=(2, 6)),
    Shape(name="3000 documents", lengths=tuple(1 + (31 * i) % 160 for i in range(3_000)), heads=(2, 6)),
)
LARGE = Shape(name="1x245760", lengths=(245_760,), heads=(16, 48))


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Of one tensor: per head squares of the difference and of the reference; over all elements the rest."""

    difference: torch.Tensor
    reference: torch.Tensor
    elements: int
    mismatches: int
    largest: float

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> "Sums":
        far = (got.double() - want).abs_()
        return cls(
            difference=far.square().transpose(0, 1).flatten(1).sum(1).cpu(),
            reference=want.square().transpose(0, 1).flatten(1).sum(1).cpu(),
            elements=want.numel(),
            mismatches=int((~(far <= TOLERANCE + TOLERANCE * want.abs())).sum()),
            largest=float(far.max()),
        )

    @property
    def errors(self) -> torch.Tensor:
        return (self.difference / self.reference).sqrt()


Found = dict[int, dict[str, list[Sums]]]
"""By world size and tensor, a query head after the other."""


def bounds_of(pack: Shape) -> list[int]:
    return [0, *torch.tensor(pack.lengths).cumsum(0).tolist()]


def step(x: Tensors, ctx: cp_gdn.Context) -> Tensors:
    """o and gradients of this rank's rows."""
    wide = ctx.dtype == torch.float64
    leaves = {name: (x[name].double() if wide else x[name]).detach().requires_grad_() for name in NAMES}
    o, _ = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx)
    grads = torch.autograd.grad(o, list(leaves.values()), x["dout"].to(o.dtype))
    return dict(zip(RESULTS, (o.detach(), *grads), strict=True))


def on_kernels(pack: Shape, x: Tensors, world: int) -> Tensors:
    """Every rank's results where its tokens are in the pack."""
    part = cp_gdn.partition(bounds_of(pack), world, "contiguous" if world == 1 else "zigzag")

    def rank(comm: cp_gdn.Comm) -> tuple[torch.Tensor, Tensors]:
        ctx = cp_gdn.build_context(part, comm, device="cuda", heads=pack.heads, backend="hopper")
        return ctx.token_ids, step({name: t[ctx.token_ids] for name, t in x.items()}, ctx)

    ranks = cp_gdn.twin(world, rank)
    whole = {
        name: torch.empty((part.num_tokens, *t.shape[1:]), dtype=t.dtype, device="cuda")
        for name, t in ranks[0][1].items()
    }
    for rows, found in ranks:
        for name, t in found.items():
            whole[name][rows] = t
    return whole


def reference(pack: Shape, x: Tensors, head: int) -> tuple[Tensors, slice, slice]:
    """Of one query head, and its columns in tensors of query and of value heads."""
    group = pack.heads[1] // pack.heads[0]
    one, values = slice(head, head + 1), slice(head * group, (head + 1) * group)
    ctx = cp_gdn.build_context(
        cp_gdn.partition(bounds_of(pack), 1, "contiguous"),
        cp_gdn.Comm.alone(),
        device=x["v"].device,
        heads=(1, group),
        dtype=torch.float64,
        segments=16,
        backend="torch",
        options=cp_gdn.Options(decay_cutoff=None),
    )
    return step({name: t[:, one if name in ("q", "k") else values] for name, t in x.items()}, ctx), one, values


def compared(pack: Shape, heads: int, worlds: list[int]) -> Found:
    """Sums of the first ``heads`` query heads."""
    gen = torch.Generator(device="cuda").manual_seed(1)
    x = dict(zip(NAMES, inputs(pack), strict=True))
    x["dout"] = torch.randn(x["v"].shape, generator=gen, device="cuda").bfloat16()
    return sums_of(pack, x, {world: on_kernels(pack, x, world) for world in worlds}, range(heads))


def sums_of(pack: Shape, x: Tensors, got: dict[int, Tensors], heads: Iterable[int]) -> Found:
    """Sums of these query heads. ``got``: by world size what the ranks of it gave, in the pack's order."""
    found: Found = {world: {name: [] for name in RESULTS} for world in got}
    for head in heads:
        want, one, values = reference(pack, x, head)
        for world, name in ((world, name) for world in got for name in RESULTS):
            columns = one if name in ("dq", "dk") else values
            found[world][name].append(Sums.of(got[world][name][:, columns], want[name]))
        del want
    return found


def report(sums: list[Sums], budget: float) -> dict[str, object]:
    errors = torch.cat([each.errors for each in sums])
    elements, mismatches = sum(each.elements for each in sums), sum(each.mismatches for each in sums)
    rms = (sum(float(each.reference.sum()) for each in sums) / elements) ** 0.5
    worst = float(errors.max())
    return {
        "rms": float(f"{rms:.4g}"),
        "mismatches": mismatches,
        "elements": elements,
        "largest_difference": float(f"{max(each.largest for each in sums):.3g}"),
        "worst_head": float(f"{worst:.4g}"),
        "budget": float(f"{budget:.4g}"),
        "kept": mismatches == 0 and worst <= budget,
    }


def rows_of(pack: Shape, args: argparse.Namespace) -> list[dict[str, object]]:
    """A row per world size."""
    heads = pack.heads[0] if args.heads is None else min(args.heads, pack.heads[0])
    started = time.perf_counter()
    made = rows_from(pack, compared(pack, heads, args.worlds))
    made[0]["seconds"] = round(time.perf_counter() - started, 1)
    return made


def rows_from(pack: Shape, found: Found, layout: str = "zigzag") -> list[dict[str, object]]:
    """A row per world size; the errors of the first one are the base of the others' budgets."""
    made, (base, *_) = [], found.values()
    for world, tensors in found.items():
        row: dict[str, object] = {"shape": pack.name, "heads": ",".join(map(str, pack.heads)), "gate": pack.gate}
        row |= {"world": world, "layout": "contiguous" if world == 1 else layout}
        row["query_heads_compared"] = len(tensors["o"])
        for name, sums in tensors.items():
            alone = float(torch.cat([each.errors for each in base[name]]).max())
            row[name] = report(sums, BUDGETS[name] if tensors is base else RANKS_FACTOR * alone)
        made.append(row)
    return made


def kept(rows: list[dict[str, object]]) -> bool:
    return all(row[name]["kept"] for row in rows for name in RESULTS)  # type: ignore[index]


def show(row: dict[str, object]) -> None:
    for name in RESULTS:
        found = row[name]
        assert isinstance(found, dict)
        said = "" if found["kept"] else "  <- not kept"
        figures = f"rms {found['rms']:<9} mismatches {found['mismatches']:<8} of {found['elements']:<10}"
        errors = f"worst head {found['worst_head']:<9} budget {found['budget']}"
        print(f"{row['shape']:15} {row['heads']:6} world {row['world']:<2} {name:5} {figures} {errors}{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of packs")
    parser.add_argument("--large", action="store_true", help="one pack of (16,48) too")
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=[1, 4], help="the first one's errors are the budget's base"
    )
    parser.add_argument("--heads", type=int, help="compare the first so many query heads only")
    parser.add_argument("--seconds", type=float, default=60, help="begin no pack after so many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    for pack in (*PACKS, *([LARGE] if args.large else [])):
        if (args.only is None or pack.name in args.only) and time.perf_counter() - started < args.seconds:
            rows += rows_of(pack, args)
            torch.cuda.empty_cache()
    for row in rows:
        show(row)
    record(args.out, document(rows, args.commit))
    raise SystemExit(0 if kept(rows) else 1)


if __name__ == "__main__":
    main()
