"""Gates at the ends of their range: full resets, strong decay, the gate's own gradient, and the decay cutoff."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cp_gdn import Comm, Options, forward, partition, twin
from tests.cases import Content, Run
from tests.pack import (
    GRADIENTS,
    LIMITS,
    Pack,
    Share,
    assemble,
    assert_close,
    context_of,
    differences,
    head_sizes,
    local_inputs,
    make_context,
    make_pack,
    run_in_twin,
    specification,
    step,
)

LIMIT = LIMITS[torch.float32]
FP32 = Run(world=2, layout="contiguous", dtype=torch.float32)
RESET = -1e4
VALUES = (-1e-6, -6.0, -20.0, -88.0, RESET)


def pack_of(lengths: tuple[int, ...], g: Tensor | None = None, initial: bool = True, heads: int = 2) -> Pack:
    """Mild gates unless ``g`` [T, HV] says otherwise."""
    pack = make_pack(Content(pack=lengths, gate="slow", heads=(1, heads), head_dims=(16, 24), initial=initial))
    return pack if g is None else replace(pack, g=g)


def with_gate(pack: Pack, token: int, value: float) -> Pack:
    g = pack.g.clone()
    g[token] = value
    return replace(pack, g=g)


def assert_finite_and_right(run: Run, pack: Pack) -> list[Share]:
    shares = run_in_twin(run, pack)
    assert all(x.isfinite().all() for share in shares for x in share.tensors.values())
    assert_close(shares, specification(pack), LIMIT)
    return shares


# ---- overflow --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("value", VALUES)
def test_a_constant_gate_of_any_size_gives_finite_and_right_results(value: float, segments: int) -> None:
    """exp of a sum of gates overflowed once a chunk's sum passed 88, and 0 * inf made NaN."""
    pack = pack_of((300,))
    pack = replace(pack, g=torch.full_like(pack.g, value))
    run = replace(FP32, world=3, segments=segments)
    assert_finite_and_right(run, pack)

    def maps(comm: Comm) -> Tensor:
        ctx = make_context(comm, run, pack)
        return forward(**{name: x.detach() for name, x in local_inputs(ctx, pack).items()}, ctx=ctx)[2].maps

    found = torch.cat(twin(3, maps))
    assert len(found) >= segments
    assert found.isfinite().all()
    if value == RESET:
        assert not found.any()


@pytest.mark.parametrize("place", [0, 31, 63])
@pytest.mark.parametrize("value", [*VALUES, -float("inf")])
def test_one_strong_gate_among_mild_ones_at_any_place_of_a_chunk(value: float, place: int) -> None:
    """Differences of one cumulative sum would round the neighbours of a reset away."""
    # the first on rank 0, the second on rank 1
    assert_finite_and_right(FP32, with_gate(with_gate(pack_of((140,)), place, value), 64 + place, value))


def test_many_resets_in_a_chunk_leave_the_mild_gates_between_them_exact() -> None:
    """With differences of one cumulative sum each would be rounded like the sum of all resets before it."""
    pack = pack_of((140,))
    resets = (torch.arange(140) % 5 == 2)[:, None]
    assert_finite_and_right(FP32, replace(pack, g=torch.where(resets, RESET, 10 * pack.g)))


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("value", [RESET, -float("inf")])
def test_a_full_reset_hides_everything_before_it_from_the_ranks_below(value: float, exchange: str) -> None:
    run = replace(FP32, world=3, exchange=exchange, segments=2)
    pack = with_gate(pack_of((390,)), 200, value)
    assert pack.initial is not None
    part = [range(130), range(130, 260), range(260, 390)]
    changed = {name: getattr(pack, name).clone() for name in ("k", "v", "beta")}
    for x in changed.values():
        x[: len(part[0])] *= 0.5
    before, after = (run_in_twin(run, p) for p in (pack, replace(pack, initial=3 * pack.initial, **changed)))
    last, still = (shares[2].tensors for shares in (before, after))
    assert differences({n: last[n] for n in ("o", "final_state")}, {n: still[n] for n in ("o", "final_state")}) == []
    dout = pack.dout.clone()
    dout[: part[2].start] = 0
    above = run_in_twin(run, replace(pack, dout=dout))
    assert not any(x.any() for name, x in above[0].tensors.items() if name in GRADIENTS)
    assert above[1].tensors["dv"].any()


# ---- the gate's own gradient -----------------------------------------------------------------------------------------


def model_gates(tokens: int, heads: int, strong: bool) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias) [T, HV] of a fresh layer, A from 16 down; ``strong``: some -A per token."""
    gen = torch.Generator().manual_seed(8)
    a_log = torch.linspace(math.log(16.0), math.log(1e-2), heads)
    dt_bias = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1), generator=gen).exp().expm1().log()
    a = torch.randn(tokens, heads, generator=gen)
    return (-a_log.exp() * F.softplus(a + (1.0 if strong else dt_bias))).double()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("strong", [False, True])
def test_the_gates_gradient_is_right_per_head_also_where_decay_is_strong(strong: bool, world: int) -> None:
    """It was a difference of two large sums: noise for heads whose decay is strong, with a right forward."""
    pack = pack_of((37, 120, 43), g=model_gates(200, 6, strong), heads=6)
    want, shares = specification(pack), run_in_twin(replace(FP32, world=world), pack)
    sizes = head_sizes(want["dg"])
    assert sizes[0] < (1e-3 if strong else 0.1) * sizes[-1]
    assert_close(shares, want, LIMIT)
    da_log, exact = ((x.double() * pack.g).sum(0) for x in (assemble(shares)["dg"], want["dg"]))
    assert ((da_log - exact).abs() <= 1e-4 * (want["dg"] * pack.g).square().sum(0).sqrt()).all()


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_first_token_of_a_document_that_starts_from_nothing_has_no_gate_gradient(world: int, segments: int) -> None:
    lengths = (37, 1, 0, 90, 64)
    without = pack_of(lengths, initial=False)
    zeros = replace(without, initial=torch.zeros_like(without.dfinal))
    first = [start for start, n in zip(without.bounds, lengths, strict=False) if n]
    for dtype in (torch.float32, torch.bfloat16):
        run = Run(world=world, segments=segments, dtype=dtype)
        found = [assemble(run_in_twin(run, pack)) for pack in (without, zeros)]
        for tensors in found:
            assert not tensors["dg"][first].any()
            assert tensors["dg"].any()
        del found[1]["dinitial_state"]
        assert differences(*found) == []


# ---- the decay cutoff ------------------------------------------------------------------------------------------------


def test_the_cutoff_is_on_for_16_bit_inputs_and_off_for_wider_ones_unless_asked_for() -> None:
    narrow, wide = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
    assert {Options().cutoff(dtype) for dtype in narrow} == {-17.0}
    assert {Options().cutoff(dtype) for dtype in wide} == {None}
    assert {Options(decay_cutoff=None).cutoff(dtype) for dtype in (*narrow, *wide)} == {None}
    assert {Options(decay_cutoff=-9).cutoff(dtype) for dtype in (*narrow, *wide)} == {-9.0}
    for wrong in (0, 1.0, True, "never"):
        with pytest.raises(ValueError, match="decay_cutoff"):
            Options(decay_cutoff=wrong)


def entry_states(run: Run, pack: Pack, cutoff: float | None) -> Tensor:
    """Entry states of all segments of all ranks."""

    def states(comm: Comm) -> Tensor:
        ctx = make_context(comm, replace(run, decay_cutoff=cutoff), pack)
        return forward(**{name: x.detach() for name, x in local_inputs(ctx, pack).items()}, ctx=ctx)[2].states

    return torch.cat(twin(run.world, states))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("segments", [1, 2])
def test_the_cutoff_moves_a_state_by_at_most_its_exponential(segments: int, dtype: torch.dtype) -> None:
    """Chunks of exp(-16), exp(-19) and less of decay: some maps and writes are left out, none that count."""
    gen = torch.Generator().manual_seed(1)
    g = -torch.rand(1200, 2, generator=gen, dtype=torch.float64) * torch.tensor([0.5, 0.1], dtype=torch.float64)
    pack, run = pack_of((1200,), g=g), Run(world=3, layout="contiguous", segments=segments, dtype=dtype)
    exact, cut = (entry_states(run, pack, cutoff) for cutoff in (None, -17.0))
    assert not torch.equal(exact, cut) or dtype == torch.float32
    moved = torch.linalg.matrix_norm(exact - cut, ord=2)
    largest = torch.linalg.matrix_norm(exact, ord=2).amax(0)
    # a segment's map and each of its chunks may be left out once; fp32 adds the rounding of what is kept
    allowed = (1 + 7) * math.exp(-17) + (1e-6 if dtype == torch.float32 else 0.0)
    assert (moved <= allowed * largest).all()
    kept, left_out = (assemble(run_in_twin(replace(run, decay_cutoff=cutoff), pack)) for cutoff in (None, -17.0))
    for name in kept:
        error = (left_out[name].double() - kept[name].double()).norm() / kept[name].double().norm()
        assert error <= 3 * allowed, name
    assert differences(kept, assemble(run_in_twin(run, pack))) == []


@pytest.mark.parametrize("place", [0, 31, 63])
@pytest.mark.parametrize("chunk", [0, 1, 2, 3, 4, 5])
def test_a_reset_in_a_segments_first_chunk_does_not_lose_what_the_chunk_writes(chunk: int, place: int) -> None:
    """A bound that includes a chunk's own gates drops the chunk whose decay comes before its writes."""
    pack = with_gate(pack_of((384,)), 64 * chunk + place, RESET)
    run = Run(world=3, layout="contiguous", dtype=torch.float32)
    whole = {name: x.double() for name, x in assemble(run_in_twin(run, pack)).items()}
    assert_close(run_in_twin(replace(run, decay_cutoff=-17.0), pack), whole, LIMIT)


def test_a_document_of_one_fragment_is_not_touched_by_the_cutoff() -> None:
    pack, part = pack_of((300,)), partition([0, 300], 1, "contiguous")
    pack = replace(pack, g=torch.full_like(pack.g, -1.0))

    def both(comm: Comm) -> list[str]:
        runs = [Run(dtype=torch.float32, decay_cutoff=cutoff) for cutoff in (None, -1e-3)]
        return differences(*(step(context_of(part, comm, run, pack), pack) for run in runs))

    assert twin(1, both) == [[]]
