"""At length: no decay at all, keys that nearly coincide, write strengths up to 2; the error of a chain of maps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, forward, twin
from tests.cases import Content, Run, covering
from tests.pack import (
    LIMITS,
    Pack,
    assemble,
    assert_close,
    head_sizes,
    local_inputs,
    make_context,
    make_pack,
    run_in_twin,
    specification,
)

FP32 = Run(layout="contiguous", dtype=torch.float32)
SHAPE: dict[str, Any] = {"heads": (1, 2), "head_dims": (32, 32)}


def exact(pack: Pack) -> dict[str, Tensor]:
    """The op in fp64 on one rank: at these lengths the token recurrence takes minutes."""
    return assemble(run_in_twin(replace(FP32, dtype=torch.float64), pack))


# ---- decay of exactly 1 ----------------------------------------------------------------------------------------------

LONG = 4096
TABLE = {"open": (1.0, 0.5), "beta": (0.0, 1.0, 1.9, 2.0), "keys": (torch.float32, torch.bfloat16)}
ROWS = covering(TABLE)
EVERY_ROW = [dict(zip(TABLE, values, strict=True)) for values in product(*TABLE.values())]


def open_pack(tokens: int, share: float, beta: float, keys: torch.dtype) -> Pack:
    """g = 0 on a random share of the tokens; keys of unit length, or rounded to 16 bit and so slightly above it."""
    pack = make_pack(Content(pack=(tokens,), gate="model", beta=beta, inputs=keys, **SHAPE))
    is_open = torch.rand(tokens, generator=torch.Generator().manual_seed(2)) < share
    return replace(pack, g=torch.where(is_open[:, None], 0.0, pack.g))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_log_decay_of_zero_is_as_good_as_any(row: dict[str, Any]) -> None:
    """Unstable with gates of exactly 0 in log space, though it worked for random gates."""
    pack = open_pack(LONG, row["open"], row["beta"], row["keys"])
    shares = run_in_twin(replace(FP32, world=4, segments=2), pack)
    assert all(x.isfinite().all() for share in shares for x in share.tensors.values())
    assert_close(shares, exact(pack), LIMITS[torch.float32])


def maps_of(run: Run, pack: Pack) -> Tensor:
    """All segment maps and composed maps of all ranks, [m, HV, K, K]."""

    def on_rank(comm: Comm) -> Tensor:
        ctx = make_context(comm, run, pack)
        found = forward(**{name: x.detach() for name, x in local_inputs(ctx, pack).items()}, ctx=ctx)[2].maps
        assert found is not None
        return found

    return torch.cat(twin(run.world, on_rank))


@pytest.mark.parametrize("row", EVERY_ROW, ids=str)
def test_no_map_stretches_a_state(row: dict[str, Any]) -> None:
    pack = open_pack(LONG, row["open"], row["beta"], row["keys"])
    maps = maps_of(replace(FP32, world=4, segments=2), pack)
    assert len(maps) >= 8
    # a key longer than 1 may stretch: by nothing here for keys of unit length, by a few percent for rounded ones
    stretch = (1 - pack.beta * pack.k.square().sum(-1)).abs().clamp(min=1).log().unflatten(0, (4, -1)).sum(1).exp()
    assert torch.linalg.svdvals(maps.double()).amax() <= (1 + 1e-3) * stretch.amax()
    assert row["keys"] != torch.float32 or stretch.amax() < 1 + 1e-3


def test_nothing_written_and_nothing_forgotten_is_exactly_the_identity() -> None:
    pack = open_pack(1000, 1.0, 0.0, torch.float32)
    maps = maps_of(replace(FP32, world=4, segments=2), pack)
    assert torch.equal(maps, torch.eye(32).expand_as(maps))
    assert pack.initial is not None
    whole = assemble(run_in_twin(replace(FP32, world=4), pack))
    assert torch.equal(whole["final_state"], pack.initial.float())


def test_the_fp64_run_that_stands_for_the_specification_here_is_as_good() -> None:
    pack = open_pack(700, 0.5, 2.0, torch.float32)
    assert_close(run_in_twin(replace(FP32, dtype=torch.float64), pack), specification(pack), LIMITS[torch.float64])


# ---- the chain of maps -----------------------------------------------------------------------------------------------

WORLDS = (1, 2, 4, 8)
PER_RANK = 2048


@cache
def clustered() -> Pack:
    """Slow decay, write strengths near 1, keys of which each is the same one with a little noise."""
    pack = make_pack(Content(pack=(WORLDS[-1] * PER_RANK,), gate="slow", initial=True, **SHAPE))
    gen = torch.Generator().manual_seed(3)
    centre = torch.randn(1, 1, 32, generator=gen, dtype=torch.float64)
    keys = (centre / centre.norm() + 0.1 * pack.k).float().double()
    strength = (torch.randn(pack.beta.shape, generator=gen) + 4).sigmoid().double()
    return replace(pack, k=keys / keys.norm(dim=-1, keepdim=True), beta=strength, g=0.1 * pack.g)


@cache
def errors(world: int, exchange: str) -> dict[str, Tensor]:
    """Relative L2 per head of a run in fp32 against one in fp64."""
    want = fp64()
    got = assemble(run_in_twin(replace(FP32, world=world, exchange=exchange), clustered()))
    return {name: head_sizes(got[name].double() - want[name]) / head_sizes(want[name]) for name in want}


@cache
def fp64() -> dict[str, Tensor]:
    return exact(clustered())


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_the_error_does_not_grow_with_the_number_of_ranks(exchange: str) -> None:
    """Maps of ranks multiplied in reduced precision: the error grew with length and with ranks, not without them."""
    one = errors(1, "ring")
    for world in WORLDS[1:]:
        for name, error in errors(world, exchange).items():
            assert (error <= 2 * one[name]).all(), (name, world, error, one[name])
    for name, error in errors(WORLDS[-1], exchange).items():
        assert (error <= 1.25 * torch.maximum(errors(2, exchange)[name], one[name])).all(), name


def entry_states(run: Run) -> list[Tensor]:
    def on_rank(comm: Comm) -> Tensor:
        ctx = make_context(comm, run, clustered())
        return forward(**{name: x.detach() for name, x in local_inputs(ctx, clustered()).items()}, ctx=ctx)[2].states

    return twin(run.world, on_rank)


def test_every_rank_enters_with_a_state_as_exact_as_the_first_one() -> None:
    run = replace(FP32, world=WORLDS[-1])
    for got, want in zip(entry_states(run), entry_states(replace(run, dtype=torch.float64)), strict=True):
        assert (head_sizes(got.double() - want) <= 1e-5 * head_sizes(want)).all()
