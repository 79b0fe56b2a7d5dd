"""The causal convolution over real process groups: the bits of the twin on every rank."""

from __future__ import annotations

import pytest
import torch

from cp_gdn.comm import Comm
from cp_gdn.conv import causal_conv1d
from cp_gdn.twin import twin
from tests.dist import pool
from tests.token_cases import LAYOUTS, PACKS, bare_context, conv_inputs, conv_on_rank, cut

pytestmark = pytest.mark.dist

CASES = [(pack, layout) for pack in PACKS for layout in LAYOUTS]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def all_cases(comm: Comm, width: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    results = []
    for pack, layout in CASES:
        inputs = conv_inputs(sum(PACKS[pack]), 5, width, dtype)
        results.append(conv_on_rank(comm, cut(PACKS[pack], comm.size, layout), inputs))
    return results


def on_rank(_rank: int, _world_size: int, width: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    comm = Comm()
    try:
        return all_cases(comm, width, dtype)
    finally:
        comm.close()


@pytest.mark.parametrize(("width", "dtype"), [(4, dtype) for dtype in DTYPES] + [(1, DTYPES[1]), (8, DTYPES[1])])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_output_and_gradient_on_every_rank_is_the_twins(world: int, width: int, dtype: torch.dtype) -> None:
    expected = twin(world, lambda comm: all_cases(comm, width, dtype))
    got = pool.run(world, on_rank, width, dtype)
    for rank in range(world):
        for case, ours, theirs in zip(CASES, got[rank], expected[rank], strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), f"{name} of {case} on rank {rank}"


def one_rank_has_another_dtype(rank: int, world_size: int) -> None:
    ctx = bare_context(cut(PACKS["long"], world_size, "contiguous"), Comm(), (5, 4), torch.float32)
    x = torch.zeros(ctx.num_tokens, 5, dtype=torch.float64 if rank == 1 else torch.float32)
    causal_conv1d(x, torch.zeros(5, 4), ctx=ctx)


def test_a_rank_with_another_dtype_fails_every_rank_with_its_number_and_reason() -> None:
    outcomes = pool.run_failing(3, one_rank_has_another_dtype)
    assert [outcome.name for outcome in outcomes] == ["CommFailed", "TypeError", "CommFailed"]
    for outcome in outcomes:
        assert "x_l: got dtype torch.float64" in outcome.text
    assert all("rank 1" in outcomes[rank].text for rank in (0, 2))
