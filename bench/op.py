"""Time the op on one GPU: forward and step through autograd, default options, medians with all launches included.

python bench/op.py [--only 1x65536 ..] [--no-step] [--no-errors] [--error-heads N] [--out FILE.json]

Every row carries the largest relative error per head of the o that was timed, against fp64, and the kernels of one
forward. "rank 1 of 4x65536" is one rank of a zigzag over four, whose messages are replayed from a run of all four.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from record import document, record
from replayed import Player, Recorder

import cp_gdn

Tensors = list[torch.Tensor]
MANY = tuple(1 + (7 * i) % 25 for i in range(4999))


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (16, 48)
    gate: str = "model"
    world: int = 1
    step: bool = True


SHAPES = (
    Shape(name="1x65536", lengths=(65536,)),
    Shape(name="1x65536", lengths=(65536,), gate="slow"),
    Shape(name="8192x8", lengths=(8192,) * 8),
    Shape(name="1x131072", lengths=(131072,)),
    Shape(name="1x32768", lengths=(32768,)),
    Shape(name="5000 documents", lengths=(*MANY, 65536 - sum(MANY))),
    Shape(name="1x32768", lengths=(32768,), heads=(16, 32)),
    Shape(name="1x261987", lengths=(261987,), heads=(2, 6)),
    Shape(name="1x65536", lengths=(65536,), heads=(2, 6)),
    Shape(name="1x32768", lengths=(32768,), heads=(2, 8)),
    Shape(name="rank 1 of 4x65536", lengths=(262144,), world=4, step=False),
    Shape(name="rank 1 of 4x65536", lengths=(262144,), gate="slow", world=4, step=False),
)


def inputs(shape: Shape) -> Tensors:
    """q, k, v, g, beta of the whole pack; q and k normalised, v N(0,1), beta sigmoid(N(0,1))."""
    gen, tokens, (heads, value_heads) = torch.Generator(device="cuda").manual_seed(0), sum(shape.lengths), shape.heads

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(tokens, *dims, generator=gen, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(heads, 128), dim=-1).bfloat16() for _ in range(2))
    g = -torch.nn.functional.softplus(normal(value_heads) - 3) * (1e-4 if shape.gate == "slow" else 1)
    return [q, k, normal(value_heads, 128).bfloat16(), g, normal(value_heads).sigmoid()]


def contexts(shape: Shape, backend: str) -> tuple[cp_gdn.Context, Callable[[], None]]:
    """The context whose calls are timed, and what rewinds its messages before each call."""
    bounds = [0, *torch.tensor(shape.lengths).cumsum(0).tolist()]
    part = cp_gdn.partition(bounds, shape.world, "contiguous" if shape.world == 1 else "zigzag")

    def build(comm: cp_gdn.Comm) -> cp_gdn.Context:
        return cp_gdn.build_context(part, comm, device="cuda", heads=shape.heads, backend=backend)

    if shape.world == 1:
        return build(cp_gdn.Comm.alone()), lambda: None
    tensors = inputs(shape)

    def step(comm: cp_gdn.Comm) -> tuple[cp_gdn.Context, Recorder]:
        recorder = Recorder(comm._link)
        comm._link = recorder
        ctx = build(comm)
        cp_gdn.forward(*(t[ctx.token_ids] for t in tensors), ctx=ctx)
        return ctx, recorder

    ctx, recorder = cp_gdn.twin(shape.world, step)[1]
    player = Player(recorder)
    return replace(ctx, comm=cp_gdn.Comm(player)), player.rewind


def timed(name: str, call: Callable[[], object], rewind: Callable[[], None], repeats: int) -> dict[str, object]:
    """Median, least and largest milliseconds, and the peak above what was there in MiB."""
    times, peaks = [], []
    for i in range(repeats + 3):
        rewind()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
            peaks.append((torch.cuda.max_memory_allocated() - base) / 2**20)
        del result
    return {
        f"{name}_ms": round(statistics.median(times), 4),
        f"{name}_ms_spread": [round(min(times), 4), round(max(times), 4)],
        f"{name}_peak_mib": round(max(peaks)),
    }


def kernels_of(call: Callable[[], object], rewind: Callable[[], None]) -> dict[str, list[float]]:
    """Kernels and copies on the device of one call: how many of each name, and microseconds in all."""
    rewind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    found = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = event.key.removeprefix("void ").split("<")[0].split("::")[-1]
            count, spent = found.get(name, (0, 0.0))
            found[name] = (count + event.count, spent + event.self_device_time_total)
    return {name: [count, round(spent, 1)] for name, (count, spent) in found.items()}


def worst_head(shape: Shape, ctx: cp_gdn.Context, o: torch.Tensor, whole: Tensors, query_heads: int) -> float:
    """Largest relative error over heads of this rank's o, against the torch backend in fp64, a query head at a time."""
    group, worst = shape.heads[1] // shape.heads[0], 0.0
    bounds = [0, *torch.tensor(shape.lengths).cumsum(0).tolist()]
    exact = cp_gdn.build_context(
        cp_gdn.partition(bounds, 1, "contiguous"),
        cp_gdn.Comm.alone(),
        device="cuda",
        heads=(1, group),
        dtype=torch.float64,
        segments=1,
        options=cp_gdn.Options(decay_cutoff=None),
    )
    for head in range(query_heads):
        values = slice(head * group, (head + 1) * group)
        own = [whole[0][:, head : head + 1], whole[1][:, head : head + 1], *(t[:, values] for t in whole[2:])]
        with torch.no_grad():
            want = cp_gdn.chunk_gated_delta_rule(*(t.double() for t in own), ctx=exact)[0][ctx.token_ids]
        difference = (o[:, values].double() - want).transpose(0, 1).flatten(1).norm(dim=1)
        worst = max(worst, float((difference / want.transpose(0, 1).flatten(1).norm(dim=1)).max()))
    return worst


def queued(call: Callable[[], object], rewind: Callable[[], None], calls: int = 10) -> float:
    """Milliseconds of a call where the host is ahead of the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)
    start.record()
    for _ in range(calls):
        rewind()
        call()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / calls, 4)


def row(shape: Shape, args: argparse.Namespace) -> dict[str, object]:
    """Timings of a shape."""
    ctx, rewind = contexts(shape, args.backend)
    leaves = [t[ctx.token_ids].requires_grad_() for t in inputs(shape)]

    def forward() -> torch.Tensor:
        return cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0]

    def step() -> None:
        forward().backward(dout)
        for leaf in leaves:
            leaf.grad = None

    found: dict[str, object] = {"shape": shape.name, "heads": ",".join(map(str, shape.heads)), "gate": shape.gate}
    found |= {"layout": ctx.partition.layout, "exchange": ctx.exchange, "world": shape.world}
    found |= {"backend": ctx.taken.kind, "segments": ctx.plan.p, "repeats": args.repeats}
    found |= timed("fwd", forward, rewind, args.repeats)
    found["fwd_queued_ms"] = queued(forward, rewind)
    if shape.step and not args.no_step:
        dout = torch.randn_like(leaves[2])
        found |= timed("step", step, rewind, args.repeats)
    return found


def examined(shape: Shape, args: argparse.Namespace) -> dict[str, object]:
    """Errors and kernels of a shape; after all timings, for a profiler leaves launches slower behind."""
    ctx, rewind = contexts(shape, args.backend)
    whole = inputs(shape)
    leaves = [t[ctx.token_ids].requires_grad_() for t in whole]

    def forward() -> torch.Tensor:
        return cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0]

    rewind()
    found: dict[str, object] = {}
    if not args.no_errors:
        query_heads = min(args.error_heads or shape.heads[0], shape.heads[0])
        found["worst_head_error"] = worst_head(shape, ctx, forward().detach(), whole, query_heads)
        found["value_heads_compared"] = query_heads * shape.heads[1] // shape.heads[0]
    return {**found, "kernels": kernels_of(forward, rewind)}


def host_time(calls: int = 200) -> dict[str, object]:
    """Microseconds of host time of a forward and of a backward at T = 64, the queue never full."""
    shape = Shape(name="1x64", lengths=(64,))
    ctx, _ = contexts(shape, "hopper")
    leaves = [t.requires_grad_() for t in inputs(shape)]
    dout, spent = torch.randn_like(leaves[2]), []
    for i in range(calls + 20):
        if i % 5 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        o = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0]
        between = time.perf_counter()
        torch.autograd.grad(o, leaves, dout)
        spent.append((1e6 * (between - start), 1e6 * (time.perf_counter() - between)))
        del o
    found: dict[str, object] = {"shape": shape.name, "heads": "16,48", "repeats": calls}
    for name, kept in zip(("host", "host_backward"), zip(*spent[20:], strict=True), strict=True):
        found |= {f"{name}_us": round(statistics.mean(kept), 1), f"{name}_us_median": round(statistics.median(kept), 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of shapes")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--error-heads", type=int, help="compare the first so many query heads only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if args.only is None or shape.name in args.only]
    rows = [host_time()]
    for shape in shapes:
        rows.append(row(shape, args))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    for shape, found in zip(shapes, rows[1:], strict=True):
        found |= examined(shape, args)
        print(json.dumps({name: found[name] for name in found if name not in ("layout", "backend")}), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(rows[0]), flush=True)
    record(args.out, document(rows, args.commit))


if __name__ == "__main__":
    main()
