"""Byte queries against counted messages and counted tensors."""

from collections import Counter

import pytest
import torch

import cp_gdn
from cp_gdn.byte_counts import comm_bytes, saved_bytes

PACK = [0, 200, 200, 264, 301, 900]
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
CASES = [
    (world, layout, exchange, save, segments)
    for world in (1, 2, 4)
    for layout in LAYOUTS
    for exchange in ("ring", "a2a")
    for save in (True, False)
    for segments in (2, "grid:1")
]


def step(comm: cp_gdn.Comm, layout: str, exchange: str, save: bool, segments: int | str) -> tuple:
    """One convolution and one op, forward and backward: counted bytes by purpose, the queries, and what was kept."""
    part = cp_gdn.partition(PACK, comm.size, layout, align=64 if segments == "grid:1" else 1)
    ctx = cp_gdn.build_context(
        part,
        comm,
        heads=(1, 3),
        head_dims=(16, 24),
        dtype=torch.float32,
        conv=(10, 4),
        exchange=exchange,
        segments=segments,
        options=cp_gdn.Options(save_transfer=save),
    )
    gen, tokens = torch.Generator().manual_seed(comm.rank), ctx.num_tokens
    shapes = ((1, 16), (1, 16), (3, 24), (3,), (3,))
    q, k, v, g, beta = (torch.rand(tokens, *s, generator=gen).sub_(0.5).requires_grad_() for s in shapes)
    gate = -g.abs()
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.data_ptr(), x)

    with comm.record() as log:
        y = cp_gdn.causal_conv1d(torch.zeros(tokens, 10, requires_grad=True), torch.ones(10, 4), ctx=ctx)
        y.sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o, _ = cp_gdn.chunk_gated_delta_rule(q, k, v, gate, beta, ctx=ctx)
        o.sum().backward()
    held = sum(x.numel() * x.element_size() for x in kept.values() if x.numel())
    counted: Counter[tuple[str, str]] = Counter()
    for message in log:
        counted[message.purpose, message.direction] += message.numel * message.dtype.itemsize
    asked = {r: comm_bytes(ctx, r) for r in range(comm.size)}
    return counted, asked, held, saved_bytes(ctx)


@pytest.mark.parametrize(("world", "layout", "exchange", "save", "segments"), CASES)
def test_queried_bytes_equal_the_counted_ones(
    world: int, layout: str, exchange: str, save: bool, segments: int | str
) -> None:
    ranks = cp_gdn.twin(world, lambda comm: step(comm, layout, exchange, save, segments))
    for rank, (counted, _, held, saved) in enumerate(ranks):
        for _, asked, _, _ in ranks:  # every rank knows every rank's
            for purpose, traffic in asked[rank].items():
                assert (traffic.sent, traffic.received) == (counted[purpose, "send"], counted[purpose, "recv"]), purpose
        assert {purpose for purpose, _ in counted} <= set(ranks[rank][1][rank])
        assert held == sum(saved.values())


def test_a_rank_outside_the_group_is_refused() -> None:
    part = cp_gdn.partition(PACK, 1)
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), heads=(1, 1), head_dims=(16, 16))
    with pytest.raises(ValueError, match="rank: got 1, expected 0 to 0"):
        comm_bytes(ctx, 1)
