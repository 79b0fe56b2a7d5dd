"""Inputs of the kernel tests, one call of every kernel on them, and the fp64 oracle."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import cp_gdn
from cp_gdn.backends import hopper_prepare
from cp_gdn.backends.hopper_grad import KernelGradients, grad, load_grad
from cp_gdn.backends.hopper_hops import packed
from cp_gdn.backends.hopper_items import items_of, run_items
from cp_gdn.backends.hopper_prepare import Prepared, prepared_parts
from cp_gdn.backends.hopper_slabs import slab_tables
from cp_gdn.backends.hopper_strips import Chunks, partial_chunks, strips_of
from cp_gdn.backends.hopper_walk import (
    Ends,
    Items,
    SlabTapes,
    Summaries,
    WalkInputs,
    load_adjoint,
    load_walk,
    replay,
    slab_bytes,
    summarize,
)
from cp_gdn.page import Page
from tests.gpu.tile_emulator import head_errors
from tests.spread import items_of_heads, places_of_heads, ranks_of, steps_of, table

SCALE = 128**-0.5
PACKS = ([192], [64, 37, 200, 5, 130], [1, 64, 65, 63], [300])
GATES = ("none", "model", "A16", "reset")
CASES = [(lengths, gate, 3) for lengths, gate in itertools.product(PACKS, GATES)]
CASES += [([130, 70], "model", group) for group in (1, 2, 4, 8)]


def inputs(lengths: list[int], gate: str, group: int, seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    tokens, heads = sum(lengths), 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    def unit(*shape: int) -> Tensor:
        return F.normalize(normal(*shape), dim=-1).bfloat16()

    q, k, v = unit(tokens, heads, 128), unit(tokens, heads, 128), normal(tokens, heads * group, 128).bfloat16()
    g = {
        "none": lambda: torch.zeros(tokens, heads * group, device="cuda"),
        "model": lambda: -F.softplus(normal(tokens, heads * group) - 3),
        "A16": lambda: -16 * F.softplus(normal(tokens, heads * group) * 0.5 + 1),
        "reset": lambda: torch.full((tokens, heads * group), -1e-3, device="cuda"),
    }[gate]()
    if gate == "reset":
        g[tokens // 2] = -float("inf")
    states = (len(lengths), heads * group, 128, 128)
    found = {"q": q, "k": k, "v": v, "g": g, "beta": normal(tokens, heads * group).sigmoid()}
    found |= {"start": normal(*states) * 0.3, "dout": normal(*v.shape).bfloat16(), "dend": normal(*states) / 8}
    return found


@dataclass(frozen=True, kw_only=True)
class Work:
    """Documents of one segment each, as the kernels take them: chunks, packed segments, walk items [n, 4]
    per value head, ``shared`` by short neighbours or not, their places and the steps of `grad` in one slab."""

    chunks: Chunks
    segments: Tensor
    items: Tensor
    places: Tensor
    steps: Tensor
    count: int

    @classmethod
    def of(cls, lengths: list[int], heads: tuple[int, int], *, shared: bool = False) -> "Work":
        starts = np.cumsum([0, *lengths]).tolist()
        rows = [(a + c, min(64, n - c)) for a, n in zip(starts, lengths, strict=False) for c in range(0, n, 64)]
        num_chunks = np.array([-(-n // 64) for n in lengths])
        first, ids = num_chunks.cumsum() - num_chunks, np.arange(len(lengths))
        order = (-num_chunks).argsort(kind="stable")
        segments = SimpleNamespace(num_chunks=num_chunks, first_chunk=first, longest_first=order)
        runs = run_items(segments) if shared else np.array((order, num_chunks[order], 0 * order + 1))
        found = items_of(segments, runs)
        slabs, counts = slab_tables(found, heads, Page()), [n for _, n in rows]
        assert len(slabs.slabs) == 1
        kinds = strips_of(partial_chunks(np.array(counts)))
        return cls(
            chunks=Chunks(rows=table(rows, 2, "cuda"), ranks=table(ranks_of(counts), 4, "cuda"), kinds=kinds),
            segments=torch.from_numpy(packed(np.stack((segments.first_chunk, num_chunks, ids, 0 * ids), 1))).cuda(),
            items=table(items_of_heads(found.tolist(), heads[1]), 4, "cuda"),
            places=table(places_of_heads(slabs, heads[1] // heads[0]), 2, "cuda"),
            steps=table(steps_of(slabs, rows, {}), 4, "cuda"),
            count=len(lengths),
        )

    def blocks(self, *, run: int = 1) -> Items:
        """For one kind of walk; summaries take items of no run, or of `MAP`."""
        items = self.items.clone()
        if run < 1:
            items[:, 2] = (items[:, 2] & 0xFFFF) + run * 65536
        return Items(items=items, segments=self.segments, places=self.places)

    def ends(self, start: Tensor | None, end: Tensor | None) -> Ends:
        """Segment i from row i of ``start`` (zero if None) into row i of ``end``."""
        rows = torch.arange(self.count, dtype=torch.int32, device="cuda")[:, None].repeat(1, 2)
        if start is None:
            rows[:, 0] = -1
        if end is None:
            rows[:, 1] = -1
        return Ends(rows=rows, start=start, end=end)


def unswizzled(x: Tensor, chunks: Tensor) -> Tensor:
    """[heads, T, 64]: the 16-byte unit u of a chunk's row r is stored at u XOR r % 8."""
    rows = torch.cat([torch.arange(int(count), device=x.device) for _, count in chunks.tolist()])
    units = torch.arange(8, device=x.device)[None, :] ^ (rows % 8)[:, None]
    columns = (units[:, :, None] * 8 + torch.arange(8, device=x.device)).flatten(1)
    return x.gather(2, columns.expand(x.shape[0], -1, -1))


def heads_of(x: dict[str, Tensor]) -> tuple[int, int]:
    return x["q"].shape[1], x["v"].shape[1]


def prepared_by(x: dict[str, Tensor], chunks: Chunks, *, v: str = "v", l2norm: bool = False) -> WalkInputs:
    """What the walks take: `prepare` has run in memory full of NaN."""
    kernel = hopper_prepare.load_prepare(heads_of(x)[1] // heads_of(x)[0], l2norm=l2norm)
    out = torch.full(x["v"].shape, float("nan"), dtype=x["v"].dtype, device="cuda")
    size = prepared_parts(len(out), heads_of(x), chunks.kinds)[-1]
    made = Prepared.inside(torch.full((size,), 255, dtype=torch.uint8, device="cuda"), chunks, len(out), heads_of(x))
    hopper_prepare.prepare(kernel, (x["q"], x["k"]), (x["g"], x["beta"]), made)
    given = {name: x[name] for name in ("q", "k", "g", "beta")}
    return WalkInputs(**given, v=x[v], prepared=made, out=out, scale=SCALE, l2norm=l2norm)


def squares(given: WalkInputs) -> dict[str, Tensor]:
    """T and Q K^T of what `prepare` left, in rows."""
    made = given.prepared
    return {"t": made.t.transpose(0, 1).clone(), "qk": unswizzled(made.qk, made.chunks.rows)}


def summary(
    kernel: Any, given: WalkInputs, work: Work, start: Tensor | None, cutoff: float | None = None
) -> dict[str, Tensor]:
    """Offsets b (from ``start``), of a walk maps m and their flags, None without a cutoff."""
    states = torch.full((work.count, given.v.shape[1], 128, 128), float("nan"), device="cuda")
    maps = states.clone()
    dropped = None if cutoff is None else torch.full(maps.shape[:2], -1, dtype=torch.int32, device="cuda")
    found = Summaries(maps=maps, cutoff=cutoff, dropped=dropped)
    summarize(kernel, given, work.blocks(run=0), work.ends(start, states), found)
    summarize(kernel, given, work.blocks(run=-1), work.ends(None, None), found)
    return {"b": states, "m": maps} | ({} if dropped is None else {"dropped": dropped})


def run(x: dict[str, Tensor], lengths: list[int], *, l2norm: bool = False, shared: bool = False) -> dict[str, Tensor]:
    """o, end states, the summaries B and M, T and Q K^T, bounds."""
    work = Work.of(lengths, heads_of(x), shared=shared)
    given = prepared_by(x, work.chunks, l2norm=l2norm)
    found = squares(given) | {"bound": given.prepared.bound}
    if not shared:
        found |= {"end_without_o": summary(load_walk(), given, work, x["start"])["b"]}
        found |= summary(load_walk(), given, work, None)
    end = torch.full_like(x["start"], float("nan"))
    replay(load_walk(emit_o=True), given, work.blocks(), work.ends(x["start"], end))
    return {**found, "end": end, "o": given.out}


def run_backward(
    x: dict[str, Tensor], lengths: list[int], *, l2norm: bool = False, shared: bool = False
) -> dict[str, Tensor]:
    """Gradients of every input; outputs and tapes poisoned first."""
    work = Work.of(lengths, heads_of(x), shared=shared)
    given = prepared_by(x, work.chunks, l2norm=l2norm)
    mirrored = replace(given, v=x["dout"])
    names = ("q", "k", "g", "beta")
    out = replace(KernelGradients.empty(v=given.v, **{n: x[n] for n in names}), v=given.out)
    places = work.chunks.count * heads_of(x)[1]
    room = torch.full((slab_bytes(places),), 255, dtype=torch.uint8, device="cuda")
    tapes = SlabTapes(room=room, places=places, zero=0)
    for name in names:
        getattr(out, name).fill_(float("nan"))
    found = {} if shared else {"dstart_without_dv": torch.empty_like(x["start"])}
    if not shared:
        only_ends = Summaries(maps=None, cutoff=None, dropped=None)
        ends = work.ends(x["dend"], found["dstart_without_dv"])
        summarize(load_adjoint(emit=False), mirrored, work.blocks(run=0), ends, only_ends)
    end, dstart = torch.empty_like(x["start"]), torch.empty_like(x["start"])
    blocks = work.blocks()
    replay(load_walk(emit_s=True), given, blocks, work.ends(x["start"], end), (tapes.states, tapes.values))
    replay(load_adjoint(emit=True), mirrored, blocks, work.ends(x["dend"], dstart), (tapes.adjoints, 0))
    grad(load_grad(heads_of(x)[1] // heads_of(x)[0], l2norm=l2norm), mirrored, work.steps, tapes, out)
    found |= {"dq": out.q, "dk": out.k, "dv": out.v, "dg": out.g, "dbeta": out.beta, "dstart": dstart}
    return {**found, "end": end}


def oracle(x: dict[str, Tensor], lengths: list[int], *, l2norm: bool = False) -> dict[str, Tensor]:
    """o, end states and gradients in fp64."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shape = {"heads": (x["q"].shape[1], x["v"].shape[1]), "head_dims": (128, 128), "dtype": torch.float64}
    part = cp_gdn.partition(bounds, 1)
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), device="cuda", segments=1, backend="torch", **shape)
    leaves = {name: x[name].double().requires_grad_() for name in ("q", "k", "v", "g", "beta", "start")}
    given = {**leaves, "initial_state": leaves["start"]}
    del given["start"]
    o, end = cp_gdn.chunk_gated_delta_rule(**given, ctx=ctx, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
    torch.autograd.backward([o, end], [x["dout"].double(), x["dend"].double()])
    found = {"o": o.detach(), "end": end.detach()}
    return found | {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def worst_head(got: Tensor, want: Tensor) -> float:
    return float(head_errors(got, want).max())
