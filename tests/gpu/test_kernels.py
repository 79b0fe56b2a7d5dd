"""The Hopper kernels against fp64 on one GPU: values, partial chunks, poisoned neighbours, bits that do not move."""

import itertools

import pytest
import torch

import cp_gdn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

PACKS = ([192], [64, 37, 200, 5, 130], [1, 64, 65, 63], [300])
GATES = ("none", "model", "A16", "reset")
CASES = [(lengths, gate, 3) for lengths, gate in itertools.product(PACKS, GATES)]
CASES += [([130, 70], "model", group) for group in (1, 2, 4, 8)]
OUTPUT_BUDGET, INVERSE_BUDGET = 5e-3, 5e-4
"""docs/design.md, kernels: bf16 operands cost 2.4e-3 to 4.9e-3 of o and S; storing N in fp16 costs 2**-12 of it."""


def inputs(lengths: list[int], gate: str, group: int, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    tokens, heads = sum(lengths), 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16()

    q, k, v = unit(tokens, heads, 128), unit(tokens, heads, 128), normal(tokens, heads * group, 128).bfloat16()
    soft = torch.nn.functional.softplus
    g = {
        "none": lambda: torch.zeros(tokens, heads * group, device="cuda"),
        "model": lambda: -soft(normal(tokens, heads * group) - 3),
        "A16": lambda: -16 * soft(normal(tokens, heads * group) * 0.5 + 1),
        "reset": lambda: torch.full((tokens, heads * group), -1e-3, device="cuda"),
    }[gate]()
    if gate == "reset":
        g[tokens // 2] = -float("inf")
    states = normal(len(lengths), heads * group, 128, 128) * 0.3
    return {"q": q, "k": k, "v": v, "g": g, "beta": normal(tokens, heads * group).sigmoid(), "start": states}


def tables(lengths: list[int], value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def run(x: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    """o, end states, the summaries B and M, and N in rows (unswizzled)."""
    from cp_gdn.backends import hopper

    group = x["v"].shape[1] // x["q"].shape[1]
    chunks, items = tables(lengths, x["v"].shape[1])
    prepared = hopper.prepare(hopper.load_prepare(group), x["q"], x["k"], x["beta"], chunks)
    given = hopper.WalkInputs(
        q=x["q"], k=x["k"], v=x["v"], g=x["g"], beta=x["beta"], prepared=prepared, scale=128**-0.5
    )
    o = torch.full_like(x["v"], float("nan"))
    kernels = {
        "end": hopper.load_walk(emit_o=True, has_v=True),
        "b": hopper.load_walk(emit_o=False, has_v=True),
        "m": hopper.load_walk(emit_o=False, has_v=False),
    }
    eye = torch.eye(128, device="cuda").expand_as(x["start"]).contiguous()
    found = {
        "end": hopper.walk(kernels["end"], given, chunks, items, x["start"], o),
        "end_without_o": hopper.walk(kernels["b"], given, chunks, items, x["start"], None),
        "b": hopper.walk(kernels["b"], given, chunks, items, None, None),
        "m": hopper.walk(kernels["m"], given, chunks, items, eye, None),
    }
    return {**found, "o": o, "n": unswizzled(prepared.n, chunks), "qk": unswizzled(prepared.qk, chunks)}


def unswizzled(x: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """[heads, T, 64]: the 16-byte unit u of a chunk's row r is stored at u XOR r % 8."""
    rows = torch.cat([torch.arange(int(count), device=x.device) for _, count in chunks.tolist()])
    units = torch.arange(8, device=x.device)[None, :] ^ (rows % 8)[:, None]
    columns = (units[:, :, None] * 8 + torch.arange(8, device=x.device)).flatten(1)
    return x.gather(2, columns.expand(x.shape[0], -1, -1))


def oracle(x: dict[str, torch.Tensor], lengths: list[int]) -> dict[str, torch.Tensor]:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    ctx = cp_gdn.build_context(
        cp_gdn.partition(bounds, 1),
        cp_gdn.Comm.alone(),
        device="cuda",
        heads=(x["q"].shape[1], x["v"].shape[1]),
        head_dims=(128, 128),
        dtype=torch.float64,
        segments=1,
    )
    tokens = [x[name].double() for name in ("q", "k", "v", "g", "beta")]
    o, end, _ = cp_gdn.forward(*tokens, ctx=ctx, initial_state=x["start"].double(), output_final_state=True)
    assert end is not None
    return {"o": o, "end": end}


def worst_head(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = (t.double().transpose(0, 1).flatten(1) for t in (got, want))
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).max())


@pytest.mark.parametrize(("lengths", "gate", "group"), CASES)
def test_outputs_states_and_summaries_match_fp64_per_head(lengths: list[int], gate: str, group: int) -> None:
    x = inputs(lengths, gate, group)
    got, want = run(x, lengths), oracle(x, lengths)
    assert worst_head(got["o"], want["o"]) < OUTPUT_BUDGET
    assert worst_head(got["end"], want["end"]) < OUTPUT_BUDGET
    assert worst_head(got["m"] @ x["start"] + got["b"], want["end"]) < OUTPUT_BUDGET
    assert torch.equal(got["end"], got["end_without_o"])


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 1.99, 2.0])
def test_the_stored_inverse_matches_fp64(beta: float | None) -> None:
    """Keys of correlation 0.9, the hard case for the merges."""
    x = inputs([64, 37], "none", 3)
    base = x["k"][:1].double()
    k = torch.nn.functional.normalize(x["k"].double() + 3 * base, dim=-1).bfloat16()
    x["k"] = k
    if beta is not None:
        x["beta"].fill_(beta)
    got = run(x, [64, 37])["n"].double()
    for head, (first, count) in itertools.product(range(6), ((0, 64), (64, 37))):
        rows = slice(first, first + count)
        kk = torch.tril(k[rows, head // 3].double() @ k[rows, head // 3].double().T, -1)
        left = torch.eye(count, device="cuda", dtype=torch.float64) + kk * x["beta"][rows, head].double()
        want = torch.linalg.solve_triangular(left, kk, upper=False)
        assert float((got[head, rows, :count] - want).norm() / want.norm()) < INVERSE_BUDGET


def test_strided_views_of_a_packed_row_have_the_bits_of_copies() -> None:
    lengths = [100, 28]
    x = inputs(lengths, "model", 3)
    packed = torch.cat([x[n].flatten(1) for n in ("q", "k", "v")], 1)
    views = cp_gdn.packed_qkv_views(packed, (2, 6), (128, 128))
    plain, strided = run(x, lengths), run({**x, **dict(zip(("q", "k", "v"), views, strict=True))}, lengths)
    for name in plain:
        assert torch.equal(plain[name].nan_to_num(7), strided[name].nan_to_num(7)), name


def test_a_neighbour_full_of_nan_changes_no_bit() -> None:
    lengths = [70, 58]
    x = inputs(lengths, "model", 3)
    clean = run(x, lengths)
    poisoned = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][70:] = float("nan")
    got = run(poisoned, lengths)
    assert torch.equal(got["o"][:70], clean["o"][:70])
    assert torch.equal(got["end"][0], clean["end"][0])


def test_fifty_repeats_beside_a_busy_stream_have_the_same_bits() -> None:
    lengths = [700, 64, 333]
    x = inputs(lengths, "model", 3)
    first = run(x, lengths)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        again = run(x, lengths)
        for name in ("o", "end", "b", "m"):
            assert torch.equal(first[name], again[name]), name
