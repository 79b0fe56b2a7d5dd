"""The specification against its definition: matrices written out, numbers by hand, and finite differences."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from cp_gdn.reference import gate_floor, gated_delta_rule, l2norm
from tests.cases import Content
from tests.pack import TOKENS, make_pack

CONTENT = Content(pack="ragged", heads=(2, 6), head_dims=(5, 7))


def inputs(content: Content = CONTENT) -> tuple[list[Tensor], list[int], Tensor]:
    """q, k, v, g, beta; the boundaries; initial states."""
    pack = make_pack(content)
    assert pack.initial is not None
    return [getattr(pack, name) for name in TOKENS], pack.bounds, pack.initial


def test_two_tokens_by_hand() -> None:
    q, k, v = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0])
    g, beta = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.5, 1.0])
    o, final = gated_delta_rule(
        *(x.view(2, 1, 1) for x in (q, k, v)), *(x.view(2, 1) for x in (g, beta)), [0, 2], scale=1.0,
        initial_state=torch.full((1, 1, 1, 1), 2.0),
    )  # fmt: skip
    # decayed 2 -> 1, written 1 * 0.5 * (4 - 1): 2.5, read by 3; decayed to 0.625, written 2 * 1 * (1 - 1.25): 0.125
    assert torch.allclose(o.flatten(), torch.tensor([7.5, 0.625]))
    assert torch.allclose(final.flatten(), torch.tensor([0.125]))


def test_a_token_multiplies_the_state_by_a_decayed_reflection_and_adds_a_product() -> None:
    (q, k, v, g, beta), bounds, initial = inputs()
    o, final = gated_delta_rule(q, k, v, g, beta, bounds, initial_state=initial)
    for doc, (start, end) in enumerate(pairwise(bounds)):
        for head in range(6):
            state = initial[doc, head]
            for t in range(start, end):
                key = k[t, head // 3]
                step = torch.eye(5, dtype=key.dtype) - beta[t, head] * torch.outer(key, key)
                state = g[t, head].exp() * step @ state + beta[t, head] * torch.outer(key, v[t, head])
                assert torch.allclose(o[t, head], 5**-0.5 * state.T @ q[t, head // 3], rtol=1e-12, atol=1e-13)
            assert torch.allclose(final[doc, head], state, rtol=1e-12, atol=1e-13)


def test_documents_of_a_pack_are_runs_of_their_own() -> None:
    tensors, bounds, initial = inputs()
    o, final = gated_delta_rule(*tensors, bounds, initial_state=initial)
    for doc, (a, b) in enumerate(pairwise(bounds)):
        alone = gated_delta_rule(*(x[a:b] for x in tensors), [0, b - a], initial_state=initial[doc : doc + 1])
        assert torch.equal(o[a:b], alone[0])
        assert torch.equal(final[doc], alone[1][0])


def test_gradients_are_those_of_finite_differences() -> None:
    tensors, bounds, initial = inputs(dataclasses.replace(CONTENT, pack=(3, 0, 2), heads=(1, 2), head_dims=(2, 3)))
    leaves = [x.clone().requires_grad_() for x in (*tensors, initial)]
    for normalise in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, n=normalise: gated_delta_rule(*x[:5], bounds, initial_state=x[5], use_qk_l2norm=n),
            leaves,
            fast_mode=True,
        )


def test_no_initial_state_is_zeros_and_an_empty_document_returns_its_own() -> None:
    tensors, _, _ = inputs()
    tokens = len(tensors[0])
    bounds = [0, 0, tokens, tokens]
    initial = torch.zeros(3, 6, 5, 7, dtype=torch.float64)
    without, with_zeros = (gated_delta_rule(*tensors, bounds, initial_state=x) for x in (None, initial))
    assert all(torch.equal(a, b) for a, b in zip(without, with_zeros, strict=True))
    _, final = gated_delta_rule(*tensors, bounds, initial_state=initial + 1)
    assert torch.equal(final[[0, 2]], torch.ones(2, 6, 5, 7, dtype=torch.float64))
    nothing = gated_delta_rule(*(x[:0] for x in tensors), [0, 0], initial_state=initial[:1])
    assert [x.shape for x in nothing] == [(0, 6, 7), (1, 6, 5, 7)]


def test_a_gate_at_the_floor_or_below_forgets_everything_and_has_no_gradient() -> None:
    tensors, _, _ = inputs()
    tokens = len(tensors[0])
    for dtype in (torch.float32, torch.float64):
        *rest, g, beta = (x.to(dtype) for x in tensors)
        for value in (gate_floor(dtype) - 1, -1e4, -float("inf")):
            gates = g.clone()
            gates[4] = value
            gates.requires_grad_()
            o, final = gated_delta_rule(*rest, gates, beta, [0, tokens])
            fresh, _ = gated_delta_rule(*(x[4:] for x in (*rest, gates, beta)), [0, tokens - 4])
            assert torch.equal(o[4:], fresh)
            (dg,) = torch.autograd.grad(o.sum() + final.sum(), gates)
            assert torch.equal(dg[4], torch.zeros_like(dg[4]))
            assert dg.isfinite().all()


def test_nothing_written_and_nothing_forgotten_leaves_the_state_as_it_is() -> None:
    (q, k, v, g, beta), bounds, initial = inputs()
    _, final = gated_delta_rule(q, k, v, 0 * g, 0 * beta, bounds, initial_state=initial)
    assert torch.equal(final, initial)


def test_scale_multiplies_outputs_and_normalising_is_done_to_queries_and_keys() -> None:
    (q, k, v, g, beta), bounds, _ = inputs(dataclasses.replace(CONTENT, l2norm=True))
    o, _ = gated_delta_rule(q, k, v, g, beta, bounds, scale=3.0, use_qk_l2norm=True)
    same, _ = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta, bounds, scale=3.0)
    default, _ = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta, bounds)
    assert torch.equal(o, same)
    assert torch.allclose(o, 3.0 * 5**0.5 * default, rtol=1e-12)
    assert torch.allclose(l2norm(k).norm(dim=-1), torch.ones(len(k), 2, dtype=k.dtype), atol=1e-6)
