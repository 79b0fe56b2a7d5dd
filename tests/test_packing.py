"""Views of packed q|k|v rows: no copy, the right channels, and the same bits as separate tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, twin
from cp_gdn.comm import Message
from cp_gdn.packing import are_packed, split_heads
from tests.cases import Content, Run
from tests.pack import TOKENS, call, differences, local_gradients, local_inputs, make_context, make_pack

PACK = make_pack(Content(pack="long", heads=(2, 6), head_dims=(24, 40), initial=False))
HEADS, HEAD_DIMS = (2, 6), (24, 40)
CHANNELS = 2 * 2 * 24 + 6 * 40


@pytest.mark.parametrize("lead", [(), (1,), (3, 2)])
def test_each_channel_of_a_row_goes_to_its_head_without_a_copy(lead: tuple[int, ...]) -> None:
    rows = torch.arange(CHANNELS).expand(*lead, 7, CHANNELS).contiguous()
    q, k, v = cp_gdn.packed_qkv_views(rows, HEADS, HEAD_DIMS)
    assert (q.shape, k.shape, v.shape) == ((*lead, 7, 2, 24), (*lead, 7, 2, 24), (*lead, 7, 6, 40))
    for view, first in ((q, 0), (k, 2 * 24), (v, 2 * 2 * 24)):
        assert view.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        per_token = view.flatten(-2)
        assert torch.equal(per_token, torch.arange(first, first + per_token.shape[-1]).expand_as(per_token))


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qkv: got 335 channels, expected 2\*H\*K \+ HV\*V = 336"):
        cp_gdn.packed_qkv_views(torch.zeros(4, CHANNELS - 1), HEADS, HEAD_DIMS)


def results(comm: Comm, packed: bool) -> tuple[dict[str, Tensor], list[Message]]:
    """o, final states and gradients with respect to packed rows, through views of them or tensors of their own."""
    ctx = make_context(comm, Run(world=2, segments=2, dtype=torch.float32), PACK)
    leaves = local_inputs(ctx, PACK)
    rows = torch.cat([leaves[name].detach().flatten(1) for name in ("q", "k", "v")], dim=1)[None].requires_grad_()
    views = cp_gdn.packed_qkv_views(rows, HEADS, HEAD_DIMS)
    inputs = [x if packed else x.contiguous() for x in views] + [leaves[name][None] for name in TOKENS[3:]]
    with comm.record() as messages:
        o, final = call(ctx, dict(zip(TOKENS, inputs, strict=True)), PACK)
        dout, dfinal = local_gradients(ctx, PACK)
        grads = torch.autograd.grad((o, final), (rows, leaves["g"], leaves["beta"]), (dout[None], dfinal))
    tensors = dict(zip(("o", "final", "drows", "dg", "dbeta"), (o.detach(), final.detach(), *grads), strict=True))
    return tensors, messages


def test_views_have_the_bits_and_messages_of_tensors_of_their_own() -> None:
    packed, copied = (twin(2, lambda comm, p=p: results(comm, p)) for p in (True, False))
    for (ours, sent), (theirs, expected) in zip(packed, copied, strict=True):
        assert differences(ours, theirs) == []
        assert sent == expected
        assert sent


@pytest.mark.parametrize("lead", [(), (1,)])
def test_gradients_that_come_side_by_side_are_the_gradient_of_the_rows(lead: tuple[int, ...]) -> None:
    rows = torch.randn(*lead, 5, CHANNELS + 3)[..., :CHANNELS].requires_grad_()
    views = cp_gdn.packed_qkv_views(rows, HEADS, HEAD_DIMS)
    assert are_packed(*views)  # in the wider rows
    memory = torch.randn(*lead, 5, CHANNELS)
    (beside,) = torch.autograd.grad(views, rows, split_heads(memory, HEADS, HEAD_DIMS), retain_graph=True)
    assert beside.data_ptr() == memory.data_ptr()
    assert torch.equal(beside, memory)
    apart = [x.clone() for x in split_heads(memory, HEADS, HEAD_DIMS)]
    assert not are_packed(*apart)
    assert not are_packed(*split_heads(memory, HEADS, HEAD_DIMS)[:2], apart[2])
    assert not are_packed(views[1], views[0], views[2])
    (together,) = torch.autograd.grad(views, rows, apart)
    assert torch.equal(together, memory)
    assert together.data_ptr() != memory.data_ptr()
