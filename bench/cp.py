"""Time the op over the ranks of a run against the same tokens on one GPU, and against peers, under torchrun.

torchrun --standalone --nproc-per-node 2 bench/cp.py [--quick] [--out FILE.json] [--commit HASH] [--trace FOLDER]

Efficiency: time on one GPU with all tokens / (ranks x time of the slowest rank). One GPU's time is that of the fastest
of the run's GPUs, all of which run it at once. "queued": the host ahead of the device, as in training; efficiencies are
of these. Other figures include a call's launches. A row of "independent documents" says how much of the messages' time
is waited for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cp_clock import Clock, timings
from cp_exposed import exposed, profiled, watch
from cp_peers import fla, head_parallel
from record import document, record

import cp_gdn
from cp_gdn.cli.arguments import pair

DIM = 128
EXCHANGES = ("ring", "a2a")
LAYOUTS = {"contiguous": "one document", "zigzag": "one document", "zigzag_per_document": "7 documents"}
"""What each layout is timed on; one document is cut alike by both zigzags."""
SHARES = {
    "one document": (1.0,),
    "7 documents": (0.3, 0.02, 0.25, 0.13, 0.01, 0.2, 0.09),
    "independent documents": (0.25, 0.125, 0.25, 0.125, 0.25),
}
"""Lengths as parts of the pack. Of the last, cut in two by contiguous, only the middle document crosses ranks."""
Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A pack of ``tokens`` per rank."""

    tokens: int
    heads: tuple[int, int]
    gate: str
    pack: str = "one document"

    def bounds(self, world: int) -> list[int]:
        total = self.tokens * world
        ends = torch.tensor(SHARES[self.pack], dtype=torch.float64).cumsum(0) * total
        return [0, *ends.round().long().tolist()[:-1], total]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how everything is timed."""

    comm: cp_gdn.Comm
    clock: Clock
    backend: str
    repeats: int

    @property
    def asked(self) -> dict[str, Any]:
        return {"device": self.clock.device, "head_dims": (DIM, DIM), "backend": self.backend}

    def context(self, shape: Shape, layout: str, exchange: str, comm: cp_gdn.Comm | None = None) -> cp_gdn.Context:
        comm = comm or self.comm
        part = cp_gdn.partition(shape.bounds(self.comm.size), comm.size, layout)
        return cp_gdn.build_context(part, comm, heads=shape.heads, exchange=exchange, **self.asked)


def inputs(tokens: int, heads_of: tuple[int, int], gate: str, device: torch.device) -> Tensors:
    """q, k, v, g, beta and the gradient of o of a whole pack, the same on every rank: q and k normalised, the others
    N(0, 1), beta sigmoid(N(0, 1))."""
    gen, (heads, value_heads) = torch.Generator(device).manual_seed(0), heads_of

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(tokens, *dims, generator=gen, device=device)

    q, k = (torch.nn.functional.normalize(normal(heads, DIM), dim=-1).bfloat16() for _ in range(2))
    v, dout = (normal(value_heads, DIM).bfloat16() for _ in range(2))
    g = -torch.nn.functional.softplus(normal(value_heads) - 3) * (1e-4 if gate == "slow" else 1)
    return [q, k, v, g, normal(value_heads).sigmoid(), dout]


def calls(forward: Callable[..., torch.Tensor], rows: Tensors) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A forward that saves for a backward, and both."""
    *leaves, dout = rows
    for leaf in leaves:
        leaf.requires_grad_()

    def step() -> None:
        torch.autograd.grad(forward(*leaves), leaves, dout)

    return lambda: forward(*leaves), step


def both(bench: Bench, forward: Callable[..., torch.Tensor], rows: Tensors, *, largest: bool = True) -> dict[str, Any]:
    fwd, step = calls(forward, rows)
    found = timings(bench.clock, "fwd", fwd, bench.repeats, largest=largest)
    return found | timings(bench.clock, "step", step, max(3, bench.repeats // 2), largest=largest)


def of_context(ctx: cp_gdn.Context) -> Callable[..., torch.Tensor]:
    return lambda *tensors: cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx)[0]


def efficiencies(found: dict[str, Any], one: dict[str, Any], world: int, name: str = "") -> dict[str, float]:
    kinds = {"efficiency_pct": "step_queued_ms", "fwd_efficiency_pct": "fwd_queued_ms"}
    return {f"{name}{key}": round(100 * one[ms] / (world * found[ms]), 1) for key, ms in kinds.items()}


def described(shape: Shape, world: int) -> dict[str, Any]:
    heads = ",".join(map(str, shape.heads))
    return {"shape": f"{world}x{shape.tokens}", "heads": heads, "gate": shape.gate, "pack": shape.pack, "world": world}


def scaling_rows(bench: Bench, shape: Shape) -> Iterator[dict[str, Any]]:
    """The layouts that are timed on the pack, over both exchanges; on one document also the peers."""
    world, device = bench.comm.size, bench.clock.device
    whole = inputs(shape.tokens * world, shape.heads, shape.gate, device)
    alone = bench.context(shape, "contiguous", "auto", cp_gdn.Comm.alone())
    one = both(bench, of_context(alone), [x.detach() for x in whole], largest=False)
    beside = {f"one_gpu_{name}": value for name, value in one.items()}
    for layout in (name for name, pack in LAYOUTS.items() if pack == shape.pack):
        for exchange in EXCHANGES:
            ctx = bench.context(shape, layout, exchange)
            found = both(bench, of_context(ctx), [x[ctx.token_ids] for x in whole])
            row = {**described(shape, world), "layout": layout, "exchange": exchange, "backend": ctx.taken.kind}
            row |= {"segments": ctx.plan.p, "one_gpu_segments": alone.plan.p, "repeats": bench.repeats}
            yield row | efficiencies(found, one, world) | found | beside
    if shape.pack == "one document":
        mine = slice(bench.comm.rank * shape.tokens, (bench.comm.rank + 1) * shape.tokens)
        with torch.no_grad():
            want = of_context(alone)(*whole[:5])[mine].clone()
        found = peers(bench, shape, ([x[mine] for x in whole], want), one)
        yield {**described(shape, world), "layout": "contiguous", "peers": True, **found, **beside}


def peers(bench: Bench, shape: Shape, given: tuple[Tensors, torch.Tensor], one: dict[str, Any]) -> dict[str, Any]:
    """Times of the peers on this rank's contiguous tokens, or why there are none. ``given``: those, and what o is."""
    rows, want = given
    world, bounds = bench.comm.size, shape.bounds(bench.comm.size)
    ways = {
        "head_parallel": lambda: head_parallel(bounds, shape.heads, bench.asked),
        "fla_cp": lambda: fla(bounds, bench.clock.device),
    }
    result: dict[str, Any] = {}
    for name, make in ways.items():
        forward = make()
        if isinstance(forward, str):
            result[name] = forward
            continue
        rows = [x.detach().clone() for x in rows]
        with torch.no_grad():
            off = float((forward(*rows[:5]).double() - want.double()).norm() / want.double().norm())
        result[f"{name}_error"] = max(bench.clock.over_ranks([off]))
        found = both(bench, forward, rows)
        result |= {f"{name}_{key}": value for key, value in found.items()}
        result |= efficiencies(found, one, world, f"{name}_")
    if importlib.util.find_spec("flash_qla") is None:
        result["flash_qla_cp"] = "not run: the package is not importable here"
    return result


def exposed_rows(bench: Bench, shape: Shape, trace: Path | None) -> Iterator[dict[str, Any]]:
    """What is waited for in the messages of a pack whose documents are mostly whole."""
    world, shape = bench.comm.size, replace(shape, pack="independent documents")
    whole = inputs(shape.tokens * world, shape.heads, shape.gate, bench.clock.device)
    for exchange in EXCHANGES:
        ctx = bench.context(shape, "contiguous", exchange)
        fwd, step = calls(of_context(ctx), [x[ctx.token_ids] for x in whole])
        watched = watch(bench.comm, bench.clock)
        try:
            found = {"fwd": exposed(watched, fwd, bench.repeats), "step": exposed(watched, step, bench.repeats)}
        finally:
            bench.comm._link = watched.link
        for name, call in (("fwd", fwd), ("step", step)):
            path = trace and trace / f"{exchange}-{name}-{bench.comm.rank}.json.gz"
            found[name] |= profiled(bench.clock, call, path)
        row = {**described(shape, world), "layout": "contiguous", "exchange": exchange, "repeats": bench.repeats}
        yield row | {f"{name}_{key}": value for name, each in found.items() for key, value in each.items()}


def all_rows(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for tokens in args.tokens:
        for heads in args.heads:
            yield from exposed_rows(bench, Shape(tokens=tokens, heads=heads, gate="model"), args.trace)
    for tokens in args.tokens:
        for heads in args.heads:
            for gate in ("model", "slow"):
                for pack in dict.fromkeys(LAYOUTS.values()):
                    yield from scaling_rows(bench, Shape(tokens=tokens, heads=heads, gate=gate, pack=pack))


def start(on_cpu: bool) -> torch.device:
    if on_cpu:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def nccl_version(device: torch.device) -> dict[str, object]:
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[65536, 131072], help="per rank")
    parser.add_argument("--heads", type=pair, nargs="*", default=[(16, 48), (2, 6)], help="16,48 2,6")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="the smaller size, few repeats")
    parser.add_argument("--cpu", action="store_true", help="gloo and torch, to try this file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    parser.add_argument("--trace", type=Path, help="folder of Chrome traces of the exposed exchange")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.repeats = args.tokens[:1], min(args.repeats, 4)
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    device = start(args.cpu)
    bench = Bench(
        comm=cp_gdn.Comm(),
        clock=Clock(device),
        backend="torch" if args.cpu else args.backend,
        repeats=args.repeats,
    )
    rows: list[dict[str, Any]] = []
    for row in all_rows(bench, args):
        rows.append(row)
        if bench.comm.rank == 0:
            print(json.dumps(row), flush=True)
            # after every row: a run that is cut short leaves what it has
            record(args.out, document(rows, args.commit, nccl_version(device)))
    bench.comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
