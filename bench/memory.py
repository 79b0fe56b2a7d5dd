"""Time and peak of checkpointed regions in every form, and of the op's forward and step, on one GPU.

python bench/memory.py [--tokens N] [--repeats N] [--out FILE.json]

Regions at 261,987 tokens of (2, 6) heads: the op, its projection and a SwiGLU (savers follow the op); a projection and
the op (which closes the region). The op alone at 65,536 tokens of (16, 48). A form's steps take turns with the others';
peaks are of one step in a fresh cache, in bytes asked for (`peak`) and handed out (`allocated`), above what was there.
Exits with 1 if a bar is missed: `auto` beside savers within 1 MiB and 1.02 x of the form that runs everything again,
at the end within 1.01 x of the kept form. Some 25 s.
"""

import argparse
import gc
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import document, record
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cp_gdn

HIDDEN, INNER = 768, 2048
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "rerun": {"reuse_recompute_tapes": False, "recompute_output": "always"},
    "rerun, o left out": {"reuse_recompute_tapes": False},
    "kept": {"reuse_recompute_tapes": True},
    "kept, o written": {"reuse_recompute_tapes": True, "recompute_output": "always"},
    "auto, o written": {"recompute_output": "always"},
    "nothing saved": {"boundary": "recompute"},
    "no checkpoint": {},
}
LIMIT_S = 40
"""Seconds that one part may take."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return scale * torch.randn(*shape, generator=gen, device="cuda")


def op_inputs(tokens: int, heads: tuple[int, int]) -> list[Tensor]:
    """q, k, v, g, beta as leaves; q and k normalised, model gates."""
    q, k = (F.normalize(normal(tokens, heads[0], 128, seed=seed), dim=-1).bfloat16() for seed in (0, 1))
    g = -F.softplus(normal(tokens, heads[1], seed=2) - 3)
    v, beta = normal(tokens, heads[1], 128, seed=3).bfloat16(), normal(tokens, heads[1], seed=4).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def context(tokens: int, heads: tuple[int, int], backend: str, **options: Any) -> cp_gdn.Context:
    part = cp_gdn.partition([0, tokens], 1)
    asked = {"device": "cuda", "heads": heads, "backend": backend, "options": cp_gdn.Options(**options)}
    return cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked)


def weight(rows: int, columns: int, seed: int) -> Tensor:
    return normal(rows, columns, seed=seed, scale=columns**-0.5).bfloat16().requires_grad_()


class Region:
    """A region's function, its leaves, and a step of it."""

    def __init__(self, name: str, tokens: int, heads: tuple[int, int]) -> None:
        self.name, self.tokens, self.heads = name, tokens, heads
        self.leaves, width = op_inputs(tokens, heads), heads[1] * 128
        sizes = [(HIDDEN, width), (2 * INNER, HIDDEN), (HIDDEN, INNER)] if self.savers_follow else [(width, width)]
        self.weights = [weight(*size, seed=9 + i) for i, size in enumerate(sizes)]
        self.dy = normal(tokens, HIDDEN if self.savers_follow else width, seed=8).bfloat16()

    @property
    def savers_follow(self) -> bool:
        return self.name == "gdn, projection, swiglu"

    def run(self, ctx: cp_gdn.Context) -> Tensor:
        q, k, v, g, beta = self.leaves
        if not self.savers_follow:
            v = F.linear(v.flatten(-2), self.weights[0]).view_as(v)
        o = cp_gdn.chunk_gated_delta_rule(q, k, v, g, beta, ctx=ctx)[0].flatten(-2)
        if not self.savers_follow:
            return o
        gate, up = F.linear(F.linear(o, self.weights[0]), self.weights[1]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.weights[2])

    def step(self, ctx: cp_gdn.Context, form: str) -> tuple[Tensor, ...]:
        y = self.run(ctx) if form == "no checkpoint" else checkpoint(self.run, ctx, use_reentrant=False)
        return torch.autograd.grad(y, [*self.leaves, *self.weights], self.dy)


def peak_of(call: Callable[[], object]) -> dict[str, float]:
    """MiB above what was there, of one call in a fresh cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    found = call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    del found
    names = {"peak_mib": "requested_bytes.all", "allocated_mib": "allocated_bytes.all"}
    return {name: round((after[f"{key}.peak"] - before[f"{key}.current"]) / 2**20, 2) for name, key in names.items()}


def milliseconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def timed_in_turn(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call, round by round, so that a slow moment meets all of them."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 3):
        for name, call in calls.items():
            took = milliseconds(call)
            if i >= 3:
                spent[name].append(took)
    return spent


def region_rows(region: Region, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per form; all forms must have the same bits."""
    contexts = {form: context(region.tokens, region.heads, args.backend, **asked) for form, asked in FORMS.items()}
    want = [x.clone() for x in region.step(contexts["rerun"], "rerun")]
    rows = []
    for form, ctx in contexts.items():
        same = all(torch.equal(a, b) for a, b in zip(region.step(ctx, form), want, strict=True))
        decided = {key: ctx.last_call[key] for key in ("tapes", "tapes_reason", "output", "output_reason")}
        row = {"region": region.name, "shape": f"1x{region.tokens}", "heads": ",".join(map(str, region.heads))}
        rows.append({**row, "gate": "model", "form": form, "same_bits": same, **decided, "segments": ctx.plan.p})
    del want
    for row, (form, ctx) in zip(rows, contexts.items(), strict=True):
        row |= {f"step_{name}": mib for name, mib in peak_of(lambda f=form, c=ctx: region.step(c, f)).items()}
    calls = {form: (lambda f=form, c=ctx: region.step(c, f)) for form, ctx in contexts.items()}
    for row, spent in zip(rows, timed_in_turn(calls, args.repeats).values(), strict=True):
        row |= {"step_ms": round(statistics.median(spent), 3), "repeats": args.repeats}
        row["step_ms_spread"] = [round(min(spent), 3), round(max(spent), 3)]
    return rows


def op_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and step of the op alone, light and full."""
    tokens, heads = args.op_tokens, (16, 48)
    leaves, dout = op_inputs(tokens, heads), normal(tokens, heads[1], 128, seed=8).bfloat16()
    rows = []
    for save in ("light", "full"):
        ctx = context(tokens, heads, args.backend, save=save)

        def forward(ctx: cp_gdn.Context = ctx) -> Tensor:
            return cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0]

        def step(forward: Callable[[], Tensor] = forward) -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), leaves, dout)

        row = {"region": "the op alone", "shape": f"1x{tokens}", "heads": "16,48", "gate": "model", "form": save}
        row |= {"segments": ctx.plan.p, "repeats": args.repeats}
        calls: dict[str, Callable[[], object]] = {"fwd": forward, "step": step}
        for name, spent in timed_in_turn(calls, args.repeats).items():
            row[f"{name}_ms"] = round(statistics.median(spent), 3)
            row |= {f"{name}_{key}": mib for key, mib in peak_of(calls[name]).items()}
        rows.append(row)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What is measured against the bars of the region: name, figure, bar."""
    by = {(row["region"], row["form"]): row for row in rows}

    def ratio(region: str, form: str, other: str) -> float:
        return by[region, form]["step_ms"] / by[region, other]["step_ms"]

    first, last = REGIONS
    more = by[first, "auto"]["step_peak_mib"] - by[first, "rerun"]["step_peak_mib"]
    found = [
        (f"{first}: auto's peak above rerun's, MiB", more, 1.0),
        (f"{first}: auto's time over rerun's", ratio(first, "auto", "rerun"), 1.02),
        (f"{last}: auto's time over the kept form's", ratio(last, "auto", "kept"), 1.01),
    ]
    for row in rows:
        if row["region"] == "the op alone":
            found.append((f"op, {row['form']}: forward's peak, MiB", row["fwd_peak_mib"], 1240.0))
            found.append((f"op, {row['form']}: step's peak, MiB", row["step_peak_mib"], 3600.0))
    return found


REGIONS = ("gdn, projection, swiglu", "projection, gdn")


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all parts; one that takes too long or fails leaves the others."""
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {"the op alone": lambda: op_rows(args)}
    for name in REGIONS:
        parts[name] = lambda name=name: region_rows(Region(name, args.tokens, (2, 6)), args)
    rows: list[dict[str, Any]] = []
    for name, part in parts.items():
        signal.alarm(LIMIT_S)
        try:
            rows += part()
        except (TimeoutError, RuntimeError) as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        signal.alarm(0)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def too_late(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def show(rows: list[dict[str, Any]]) -> bool:
    """Print the table and the bars; whether all are met."""
    for row in rows:
        figures = {key: row[key] for key in row if key.endswith(("_ms", "_mib"))}
        notes = [row["tapes"], row["output"], "" if row["same_bits"] else "OTHER BITS"] if "tapes" in row else []
        print(f"{row['region']:25} {row['form']:18} P={row['segments']:<3}", figures, *notes)
    done = {row["region"] for row in rows}
    if not {*REGIONS, "the op alone"} <= done:
        return False
    good = all(row.get("same_bits", True) for row in rows)
    for name, figure, bar in bars(rows):
        print(f"{'ok  ' if figure <= bar else 'MISS'} {name}: {figure:.3f}, bar {bar}")
        good &= figure <= bar
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=261_987, help="of the regions")
    parser.add_argument("--op-tokens", type=int, default=65_536)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, too_late)
    rows = measured(args)
    good = show(rows)
    record(args.out, document(rows, args.commit))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
