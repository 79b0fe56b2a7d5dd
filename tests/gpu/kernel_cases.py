"""Inputs of the kernel tests, one call of every kernel on them, and the fp64 oracle."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cp_gdn
from tests.gpu.tile_emulator import head_errors

SCALE = 128**-0.5


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


def tables(lengths: list[int], value_heads: int) -> tuple[Tensor, Tensor]:
    """Chunk rows and walk items of whole documents, one segment each."""
    rows: list[tuple[int, int]] = []
    segments, start = [], 0
    for length in lengths:
        first = len(rows)
        rows += [(start + c, min(64, length - c)) for c in range(0, length, 64)]
        segments.append((first, len(rows) - first))
        start += length
    items = [(first, count, head, s) for s, (first, count) in enumerate(segments) for head in range(value_heads)]
    items.sort(key=lambda item: -item[1])
    return torch.tensor(rows, dtype=torch.int32, device="cuda"), torch.tensor(items, dtype=torch.int32, device="cuda")


def unswizzled(x: Tensor, chunks: Tensor) -> Tensor:
    """[heads, T, 64]: the 16-byte unit u of a chunk's row r is stored at u XOR r % 8."""
    rows = torch.cat([torch.arange(int(count), device=x.device) for _, count in chunks.tolist()])
    units = torch.arange(8, device=x.device)[None, :] ^ (rows % 8)[:, None]
    columns = (units[:, :, None] * 8 + torch.arange(8, device=x.device)).flatten(1)
    return x.gather(2, columns.expand(x.shape[0], -1, -1))


def prepared_by(x: dict[str, Tensor], chunks: Tensor, *, l2norm: bool = False) -> Any:
    """What `prepare` leaves."""
    from cp_gdn.backends import hopper_prepare

    kernel = hopper_prepare.load_prepare(x["beta"].shape[1] // x["q"].shape[1], l2norm=l2norm)
    return hopper_prepare.prepare(kernel, x["q"], x["k"], x["beta"], x["g"], chunks)


def walk_inputs(x: dict[str, Tensor], prepared: Any, v: str = "v") -> Any:
    from cp_gdn.backends.hopper_walk import WalkInputs

    return WalkInputs(q=x["q"], k=x["k"], v=x[v], g=x["g"], beta=x["beta"], prepared=prepared, scale=SCALE)


def walk(kernel: Any, x: Any, where: tuple[Tensor, Tensor], start: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Whole documents, segment i from row i of ``start`` (zero if None); the end states [segments, HV, 128, 128]."""
    from cp_gdn.backends.hopper_walk import Ends, walk_rows

    segments = len(where[1]) // x.v.shape[1]
    rows = torch.arange(segments, dtype=torch.int32, device="cuda")[:, None].repeat(1, 2)
    end = torch.empty(segments, x.v.shape[1], 128, 128, device="cuda")
    if start is None:
        rows[:, 0] = -1
    walk_rows(kernel, x, where, Ends(rows=rows, start=start, end=end), out)
    return end


def run(x: dict[str, Tensor], lengths: list[int], *, l2norm: bool = False) -> dict[str, Tensor]:
    """o, end states, the summaries B and M, and T and Q K^T in rows (unswizzled)."""
    from cp_gdn.backends.hopper_walk import load_walk

    where = tables(lengths, x["v"].shape[1])
    chunks = where[0]
    prepared = prepared_by(x, chunks, l2norm=l2norm)
    given, o = walk_inputs(x, prepared), torch.full_like(x["v"], float("nan"))
    found = {
        "end": walk(load_walk(emit_o=True), given, where, x["start"], o),
        "end_without_o": walk(load_walk(), given, where, x["start"]),
        "b": walk(load_walk(), given, where, None),
        "m": walk(load_walk(has_v=False), given, where, None),
    }
    squares = {"t": unswizzled(prepared.t, chunks), "qk": unswizzled(prepared.qk, chunks)}
    return {**found, **squares, "o": o, "bound": prepared.bound}


def empty_tapes(chunks: int, like: Tensor) -> Any:
    from cp_gdn.backends.hopper_walk import Tapes

    tokens, heads, _ = like.shape
    states, values = like.new_empty(chunks, heads, 2, 128, 64), like.new_empty(heads, 2, tokens, 64)
    return Tapes(states=states, values=values, first_chunk=0, first_row=0)


def run_backward(x: dict[str, Tensor], lengths: list[int], *, l2norm: bool = False) -> dict[str, Tensor]:
    """Gradients of every input; outputs and tapes poisoned first."""
    from cp_gdn.backends import hopper_grad
    from cp_gdn.backends.hopper_walk import Ends, load_adjoint, load_walk, walk_rows

    where = tables(lengths, x["v"].shape[1])
    chunks = where[0]
    prepared = prepared_by(x, chunks, l2norm=l2norm)
    segments = torch.arange(len(lengths), dtype=torch.int32, device="cuda")[:, None].repeat(1, 2)
    tapes, adjoints = (empty_tapes(len(chunks), x["v"]) for _ in range(2))
    mirrored = walk_inputs(x, prepared, "dout")
    out = hopper_grad.KernelGradients.empty(mirrored)
    for t in (tapes.states, tapes.values, adjoints.states, out.q, out.k, out.v, out.g, out.beta):
        t.fill_(float("nan"))
    end, dstart = torch.empty_like(x["start"]), torch.empty_like(x["start"])
    forward_ends = Ends(rows=segments, start=x["start"], end=end)
    walk_rows(load_walk(emit_s=True), walk_inputs(x, prepared), where, forward_ends, None, tapes)
    mirrored_ends = Ends(rows=segments, start=x["dend"], end=dstart)
    walk_rows(load_adjoint(emit=True), mirrored, where, mirrored_ends, out.v, adjoints)
    group = x["v"].shape[1] // x["q"].shape[1]
    hopper_grad.grad(hopper_grad.load_grad(group, l2norm=l2norm), mirrored, chunks, tapes, adjoints.states, out)
    summary = walk(load_adjoint(emit=False), mirrored, where, x["dend"])
    found = {"dq": out.q, "dk": out.k, "dv": out.v, "dg": out.g, "dbeta": out.beta, "dstart": dstart}
    return {**found, "dstart_without_dv": summary, "end": end}


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
