"""Inputs of the op on one GPU, ranks of a twin on the kernels, and the fp64 oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cp_gdn

PACKS = {
    "mixed": (300, 0, 64, 5, 700, 37, 0),
    "one document": (1500,),
    "five tokens": (5,),
    "many": tuple(1 + i % 4 for i in range(300)),
}
NAMES = ("q", "k", "v", "g", "beta")


def bounds_of(pack: str) -> list[int]:
    return [0, *torch.tensor(PACKS[pack]).cumsum(0).tolist()]


def inputs(lengths: tuple[int, ...], gate: str, group: int, heads: int = 2, seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    tokens, docs, value_heads = sum(lengths), len(lengths), heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    soft, noise = torch.nn.functional.softplus, normal(tokens, value_heads)
    g = {"model": -soft(noise - 3), "slow": -1e-4 * soft(noise - 3), "strong": -16 * soft(noise * 0.5 + 1)}
    g["reset"] = torch.where(noise > 2.5, -float("inf"), -1e-3)
    q, k = (torch.nn.functional.normalize(normal(tokens, heads, 128), dim=-1).bfloat16() for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(tokens, value_heads, 128).bfloat16(),
        "g": g[gate],
        "beta": normal(tokens, value_heads).sigmoid(),
        "initial": normal(docs, value_heads, 128, 128) * 0.3,
        "dout": normal(tokens, value_heads, 128).bfloat16(),
        "dfinal": normal(docs, value_heads, 128, 128) * 0.3,
    }


def context(comm: cp_gdn.Comm, x: dict[str, Tensor], bounds: list[int], layout: str, **asked: Any) -> cp_gdn.Context:
    align = 64 * int(str(asked.get("segments")).partition(":")[2] or 0) or 1
    part = cp_gdn.partition(bounds, comm.size, layout, align=align)
    heads = (x["q"].shape[1], x["v"].shape[1])
    return cp_gdn.build_context(part, comm, device="cuda", heads=heads, **{"dtype": torch.bfloat16, **asked})


def run_rank(ctx: cp_gdn.Context, x: dict[str, Tensor], *, initial: bool, grads: bool) -> dict[str, Tensor]:
    """One rank's results, scattered into global tensors (zeros where another rank owns them)."""
    rows, entry, exits = ctx.token_ids, list(ctx.entry_docs), list(ctx.exit_docs)
    dtype = ctx.state_dtype
    leaves = {n: x[n][rows].to(dtype if n in ("g", "beta") else ctx.dtype).requires_grad_(grads) for n in NAMES}
    if initial:
        leaves["initial_state"] = x["initial"][entry].to(dtype).requires_grad_(grads)
    o, final = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True)
    assert final is not None
    places = {"o": (rows, o, "v"), "final": (exits, final, "dfinal")}
    if grads:
        loss = (o * x["dout"][rows].to(o.dtype)).sum() + (final * x["dfinal"][exits].to(dtype)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
        like = dict(zip(leaves, found, strict=True))
        places |= {f"d{n}": (entry if n == "initial_state" else rows, t, n) for n, t in like.items()}
    results = {}
    for name, (place, value, source) in places.items():
        shape = x["initial" if source == "initial_state" else source].shape
        results[name] = torch.zeros(shape, dtype=value.dtype, device="cuda")
        results[name][place] = value.detach()
    return results


def run(
    x: dict[str, Tensor],
    bounds: list[int],
    world: int,
    layout: str,
    *,
    initial: bool,
    grads: bool = False,
    **asked: Any,
) -> dict[str, Tensor]:
    def rank(comm: cp_gdn.Comm) -> dict[str, Tensor]:
        ctx = context(comm, x, bounds, layout, **asked)
        found = run_rank(ctx, x, initial=initial, grads=grads)
        if asked.get("backend") == "hopper":
            assert ctx.last_call["backend"] == "hopper"
        return found

    ranks = cp_gdn.twin(world, rank)
    return {name: sum(r[name] for r in ranks) for name in ranks[0]}  # type: ignore[misc]


def hopper(x: dict[str, Tensor], bounds: list[int], world: int, layout: str, **asked: Any) -> dict[str, Tensor]:
    return run(x, bounds, world, layout, backend="hopper", **asked)


def oracle(x: dict[str, Tensor], bounds: list[int], *, initial: bool, grads: bool = False) -> dict[str, Tensor]:
    options = cp_gdn.Options(decay_cutoff=None)
    asked = {"dtype": torch.float64, "backend": "torch", "segments": 1, "options": options}
    return run(x, bounds, 1, "contiguous", initial=initial, grads=grads, **asked)


def worst_head(got: Tensor, want: Tensor) -> float:
    got, want = (t.double().transpose(0, 1).flatten(1) for t in (got, want))
    return float(((got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-9)).max())


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, x in want.items():
        assert torch.equal(got[name], x), name
