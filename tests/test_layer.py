"""The layer: against the specification, alone and split, its gradients as partial sums, and its bits in grid mode."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cp_gdn import Comm, Context, GatedDeltaNet, build_context, partition, shard, twin
from cp_gdn.layer import DT_RANGE
from cp_gdn.reference import gated_delta_rule

HIDDEN = 40
HEADS, HEAD_DIMS = (2, 4), (16, 24)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
PACKS = {"three documents": (0, 37, 88, 128), "one of five tokens": (0, 5), "empty documents": (0, 0, 3, 3, 70)}

Bounds = Sequence[int]
Outcome = dict[str, Tensor]
"""y and dx of some rows, and the partial gradient of every parameter by its name."""


def make_layer(dtype: torch.dtype = torch.float64, allow_neg_eigval: bool = False) -> GatedDeltaNet:
    torch.manual_seed(1)
    layer = GatedDeltaNet(HIDDEN, heads=HEADS, head_dims=HEAD_DIMS, allow_neg_eigval=allow_neg_eigval)
    with torch.no_grad():
        layer.norm_weight.uniform_(0.5, 1.5)
    return layer.to(dtype)


def make_rows(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """x and dy, [1, T, hidden]."""
    gen = torch.Generator().manual_seed(tokens)
    x, dy = torch.randn(2, 1, tokens, HIDDEN, generator=gen, dtype=torch.float64)
    return x.to(dtype), dy.to(dtype)


def specification(layer: GatedDeltaNet, x: Tensor, bounds: Bounds) -> Tensor:
    """The layer written with torch's own functions and the token recurrence, one document after the other."""
    documents = [_document(layer, x[0, start:end]) for start, end in pairwise(bounds) if start < end]
    return torch.cat(documents)[None]


def _document(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    (num_heads, num_values), (key_dim, value_dim) = layer.heads, layer.head_dims
    sizes = [num_heads * key_dim, num_heads * key_dim, num_values * value_dim, num_values * value_dim]
    mixed, z = layer.in_proj_qkvz(x).split([sum(sizes[:3]), sizes[3]], dim=-1)
    b, a = layer.in_proj_ba(x).chunk(2, dim=-1)
    history = F.pad(mixed.T, (layer.conv_width - 1, 0))
    mixed = F.silu(F.conv1d(history[None], layer.conv_weight[:, None], groups=len(layer.conv_weight))[0].T)
    q, k, v = mixed.split(sizes[:3], dim=-1)
    g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
    beta = b.sigmoid() * (2 if layer.allow_neg_eigval else 1)
    q, k = q.unflatten(-1, (num_heads, key_dim)), k.unflatten(-1, (num_heads, key_dim))
    v = v.unflatten(-1, (num_values, value_dim))
    o, _ = gated_delta_rule(q, k, v, g, beta, [0, len(x)], use_qk_l2norm=True)
    normed = F.rms_norm(o, (value_dim,), layer.norm_weight, layer.norm_eps)
    return layer.out_proj((normed * F.silu(z.unflatten(-1, (num_values, value_dim)))).flatten(-2))


def outcome(layer: GatedDeltaNet, x: Tensor, y: Tensor, dy: Tensor) -> Outcome:
    names = [name for name, _ in layer.named_parameters()]
    grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    return {"y": y.detach()} | dict(zip(["dx", *names], grads, strict=True))


def alone(layer: GatedDeltaNet, bounds: Bounds) -> Outcome:
    x, dy = (rows.requires_grad_() for rows in make_rows(bounds[-1], layer.conv_weight.dtype))
    return outcome(layer, x, layer(x, cu_seqlens=bounds), dy)


def make_context(layer: GatedDeltaNet, comm: Comm, bounds: Bounds, layout: str, grid: int | None = None) -> Context:
    part = partition(bounds, comm.size, layout=layout, align=64 * grid if grid else 1)
    return build_context(
        part,
        comm,
        heads=layer.heads,
        head_dims=layer.head_dims,
        dtype=layer.conv_weight.dtype,
        conv=layer.conv,
        segments=f"grid:{grid}" if grid else "auto",
    )


def split(layer: GatedDeltaNet, bounds: Bounds, world: int, layout: str, grid: int | None = None) -> Outcome:
    """The layer over `world` ranks: rows put together in global order, parameter gradients added up."""

    def on_rank(comm: Comm) -> tuple[Tensor, Outcome]:
        mine = copy.deepcopy(layer)
        ctx = make_context(mine, comm, bounds, layout, grid)
        x, dy = (shard(rows, ctx).requires_grad_() for rows in make_rows(bounds[-1], mine.conv_weight.dtype))
        return ctx.token_ids, outcome(mine, x, mine(x, ctx), dy)

    ranks = twin(world, on_rank)
    order = torch.argsort(torch.cat([token_ids for token_ids, _ in ranks]))
    results = [result for _, result in ranks]
    whole = {name: torch.cat([result[name] for result in results], dim=1)[:, order] for name in ("y", "dx")}
    sums = {name: sum(result[name] for result in results) for name in results[0] if name not in whole}
    return whole | sums


def assert_close(got: Outcome, want: Outcome, limit: float) -> None:
    """Relative L2 of every tensor."""
    assert got.keys() == want.keys()
    errors = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    assert {name: error for name, error in errors.items() if not error <= limit} == {}


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize("bounds", PACKS.values(), ids=PACKS)
def test_alone_it_computes_what_the_specification_says(bounds: Bounds, allow_neg_eigval: bool) -> None:
    layer = make_layer(allow_neg_eigval=allow_neg_eigval)
    x, dy = (rows.requires_grad_() for rows in make_rows(bounds[-1]))
    assert_close(alone(layer, bounds), outcome(layer, x, specification(layer, x, bounds), dy), 1e-10)


def test_the_rows_of_a_batch_are_documents() -> None:
    layer, (x, _) = make_layer(), make_rows(3 * 50)
    assert torch.equal(layer(x.view(3, 50, HIDDEN)).flatten(0, 1), layer(x, cu_seqlens=[0, 50, 100, 150])[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bounds", PACKS.values(), ids=PACKS)
def test_split_it_computes_the_same_and_parameter_gradients_add_up(bounds: Bounds, world: int, layout: str) -> None:
    layer = make_layer()
    assert_close(split(layer, bounds, world, layout), alone(layer, bounds), 1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_grid_mode_rows_have_the_same_bits_for_every_world_size(layout: str) -> None:
    layer, bounds = make_layer(torch.float32), (0, 1100, 1164, 1264)
    want = split(layer, bounds, 1, "contiguous", grid=1)
    for world in (2, 3, 4, 8):
        got = split(layer, bounds, world, layout, grid=1)
        assert torch.equal(got["y"], want["y"]), world
        assert torch.equal(got["dx"], want["dx"]), world


def test_a_16_bit_layer_keeps_its_dtype_and_comes_close_to_fp64() -> None:
    bounds = PACKS["three documents"]
    x, _ = make_rows(bounds[-1])
    want = make_layer()(x, cu_seqlens=bounds)
    got = make_layer(torch.bfloat16)(x.bfloat16(), cu_seqlens=bounds)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() < 3e-2 * want.norm()


def test_under_autocast_projections_are_16_bit_and_gradients_are_those_of_the_parameters() -> None:
    bounds = PACKS["three documents"]
    layer, (x, dy) = make_layer(torch.float32), make_rows(bounds[-1], torch.float32)
    want = alone(layer, bounds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x.requires_grad_(), cu_seqlens=bounds)
    assert y.dtype == torch.bfloat16
    got = outcome(layer, x, y.float(), dy)
    assert {name: grad.dtype for name, grad in got.items() if grad.dtype != torch.float32} == {}
    assert_close(got, want, 5e-2)


def test_the_gates_start_in_their_documented_ranges_and_in_fp32() -> None:
    torch.manual_seed(0)
    layer = GatedDeltaNet(8, heads=(1, 512), head_dims=(1, 1))
    dt = F.softplus(layer.dt_bias.detach())
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.A_log.isfinite().all()
    assert 14.0 < layer.A_log.exp().max() < 16.0
    assert DT_RANGE[0] * 0.99 <= dt.min() < 2 * DT_RANGE[0]
    assert DT_RANGE[1] / 2 < dt.max() <= DT_RANGE[1] * 1.01
    assert abs(float(dt.log().mean()) - math.log(1e-2)) < 0.2


def test_it_can_be_copied_and_its_state_dict_loads() -> None:
    layer, other = make_layer(), GatedDeltaNet(HIDDEN, heads=HEADS, head_dims=HEAD_DIMS).double()
    other.load_state_dict(copy.deepcopy(layer).state_dict())
    x, _ = make_rows(20)
    assert torch.equal(other(x), layer(x))


REFUSED = {
    "value heads not a multiple": ({"heads": (2, 3)}, "heads: got \\(2, 3\\)"),
    "no heads": ({"heads": (0, 4)}, "heads: got \\(0, 4\\)"),
    "three head dims": ({"head_dims": (8, 8, 8)}, "head_dims: got"),
    "no taps": ({"conv_width": 0}, "conv_width: got"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_make_no_layer_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedDeltaNet(HIDDEN, **{"heads": HEADS, "head_dims": HEAD_DIMS} | changes)


def test_boundaries_beside_a_context_or_a_batch_are_refused() -> None:
    layer, (x, _) = make_layer(), make_rows(20)
    ctx = make_context(layer, Comm(), [0, 20], "contiguous")
    with pytest.raises(ValueError, match="cu_seqlens: got it beside ctx"):
        layer(x, ctx, cu_seqlens=[0, 20])
    with pytest.raises(ValueError, match="x: got a batch of 2 rows beside ctx"):
        layer(x.view(2, 10, HIDDEN), ctx)
    with pytest.raises(ValueError, match="x: got a batch of 2 rows beside cu_seqlens"):
        layer(x.view(2, 10, HIDDEN), cu_seqlens=[0, 20])
    with pytest.raises(ValueError, match=r"x: got shape \[20, 40\], expected \[1, T, 40\]"):
        layer(x[0])
