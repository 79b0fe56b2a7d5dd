"""The halo plan and the causal convolution, all ranks in one process: against the specification, and by bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_gdn.comm import Comm, Message
from cp_gdn.conv import causal_conv1d
from cp_gdn.halo import HaloSide
from cp_gdn.layout import Partition, partition
from cp_gdn.twin import twin
from tests.token_cases import (
    LAYOUTS,
    PACKS,
    WORLDS,
    bare_context,
    conv_inputs,
    conv_of_documents,
    conv_on_rank,
    cut,
    halo_of,
    in_global_order,
)

WIDTHS = (1, 2, 4, 8)
FORMS = [(True, "silu"), (False, "silu"), (True, None), (False, None)]


def conv_in_twin(part: Partition, inputs: dict[str, torch.Tensor], *form: Any) -> dict[str, torch.Tensor]:
    """y and dx in global order, dweight and dbias summed over the ranks."""
    ranks = twin(part.world_size, lambda comm: conv_on_rank(comm, part, inputs, *form))
    tokens = {name: in_global_order(part, [r[name] for r in ranks]) for name in ("y", "dx")}
    return tokens | {name: sum(r[name] for r in ranks) for name in ranks[0] if name not in tokens}


# ---- the plan of the halo --------------------------------------------------------------------------------------------


@st.composite
def cut_packs(draw: st.DrawFn) -> Partition:
    lengths = draw(st.lists(st.integers(0, 20), max_size=6))
    return cut(lengths, draw(st.integers(1, 8)), draw(st.sampled_from(LAYOUTS)))


def sent_tokens(part: Partition, sides: list[HaloSide], sender: int, receiver: int) -> np.ndarray:
    side = sides[sender]
    ends = np.cumsum(side.send_counts)
    rows = side.send_rows.numpy()[ends[receiver] - side.send_counts[receiver] : ends[receiver]]
    return part.token_ids(sender)[rows]


def check_side(part: Partition, sides: list[HaloSide]) -> None:
    lengths = np.diff(part.doc_bounds)
    for rank, side in enumerate(sides):
        came = [sent_tokens(part, sides, sender, rank) for sender in range(part.world_size)]
        assert [len(tokens) for tokens in came] == list(side.recv_counts)
        halo = np.concatenate(came)
        assert len(came[rank]) == 0
        assert len(np.unique(halo)) == len(halo)
        ids, positions = part.token_ids(rank), part.positions(rank)
        taps = side.taps.numpy()
        steps = np.arange(side.width) * (1 if side.reverse else -1)
        reached = positions[:, None] + steps
        doc_lengths = lengths[np.searchsorted(part.doc_bounds, ids, side="right") - 1] if part.num_docs else positions
        inside = (reached >= 0) & (reached < doc_lengths[:, None])
        assert np.array_equal(np.concatenate((ids, halo, [-1]))[taps], np.where(inside, ids[:, None] + steps, -1))


@given(part=cut_packs(), width=st.integers(1, 8))
def test_taps_reach_the_right_tokens_and_both_ends_of_a_message_agree(part: Partition, width: int) -> None:
    plans = [halo_of(part, rank, width) for rank in range(part.world_size)]
    check_side(part, [plan.forward for plan in plans])
    check_side(part, [plan.adjoint for plan in plans])
    sent = sum(sum(plan.forward.send_counts) for plan in plans)
    assert [(plan.forward.reverse, plan.adjoint.reverse) for plan in plans] == [(False, True)] * len(plans)
    assert {plan.crosses for plan in plans} == {sent > 0}


def test_the_worked_example_of_the_halo_holds() -> None:
    part = partition([0, 6], 2, fragments=[[(0, 0, 2), (0, 5, 1)], [(0, 2, 2), (0, 4, 1)]])
    plan = halo_of(part, 1, 3)
    assert plan.forward.taps.tolist() == [[0, 4, 3], [1, 0, 4], [2, 1, 0]]
    assert plan.forward.send_rows.tolist() == [1, 2]


def test_history_comes_from_as_many_ranks_back_as_the_width_needs() -> None:
    part = partition([0, 5], 4, cut_points=[[0, 1, 2, 3, 5, 5, 5, 5, 5]])
    assert halo_of(part, 3, 4).forward.recv_counts == (1, 1, 1, 0)


def test_a_width_the_convolution_does_not_have_is_refused() -> None:
    for width in (0, 9):
        with pytest.raises(ValueError, match=f"conv: got width {width}"):
            halo_of(partition([0, 5], 2), 0, width)


def halo_messages(part: Partition, width: int) -> list[list[Message]]:
    """What each rank posts for a forward and a backward."""

    def posted(comm: Comm) -> list[Message]:
        with comm.record() as messages:
            conv_on_rank(comm, part, conv_inputs(part.num_tokens, 3, width))
        return messages

    return twin(part.world_size, posted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sent_and_received_messages_are_the_plans_and_agree_on_every_pair(layout: str) -> None:
    part = cut(PACKS["as long as the history"], 4, layout)
    messages = halo_messages(part, 4)
    for rank, of_rank in enumerate(messages):
        plan = halo_of(part, rank, 4)
        for peer in range(4):
            sent = [(m.purpose, m.numel, m.dtype) for m in of_rank if m.direction == "send" and m.peer == peer]
            counts = (plan.forward.send_counts[peer], plan.adjoint.send_counts[peer])
            planned = [(purpose, 3 * n) for purpose, n in zip(("HALO", "HALO_GRAD"), counts, strict=True) if n]
            assert [(purpose, numel) for purpose, numel, _ in sent] == planned
            received = [m for m in messages[peer] if m.direction == "recv" and m.peer == rank]
            assert [(m.purpose, m.numel, m.dtype) for m in received] == sent


def test_nothing_is_sent_when_no_document_is_cut_or_the_width_is_one() -> None:
    assert halo_messages(cut((6, 6, 6, 6), 4, "contiguous"), 4) == [[]] * 4
    assert halo_messages(cut((6, 6), 4, "zigzag"), 1) == [[]] * 4


# ---- the convolution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pack", PACKS)
def test_convolution_and_gradients_match_the_documents_one_by_one(pack: str, width: int) -> None:
    inputs = conv_inputs(sum(PACKS[pack]), 5, width)
    for form in FORMS:
        expected = conv_of_documents(PACKS[pack], inputs, *form)
        for world in WORLDS if form == FORMS[0] else (1, 3):
            for layout in LAYOUTS:
                got = conv_in_twin(cut(PACKS[pack], world, layout), inputs, *form)
                assert got.keys() == expected.keys()
                for name, value in expected.items():
                    torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=f"{name} {world} {layout}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pack", ["ragged", "long", "six tokens"])
def test_y_and_dx_have_the_same_bits_for_every_world_size_and_layout(pack: str, dtype: torch.dtype) -> None:
    for width in (4, 7):
        inputs = conv_inputs(sum(PACKS[pack]), 37, width, dtype)
        alone = conv_in_twin(cut(PACKS[pack], 1, "contiguous"), inputs)
        for world in WORLDS:
            for layout in LAYOUTS:
                got = conv_in_twin(cut(PACKS[pack], world, layout), inputs)
                assert got["y"].dtype == got["dx"].dtype == dtype
                assert torch.equal(got["y"], alone["y"])
                assert torch.equal(got["dx"], alone["dx"])


def test_parameter_gradients_keep_their_bits_when_a_plan_is_run_again() -> None:
    inputs = conv_inputs(128, 37, 4, torch.float32)
    part = cut(PACKS["long"], 3, "zigzag")
    first, second = (twin(3, lambda comm: conv_on_rank(comm, part, inputs)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_end_of_one_document_changes_nothing_in_the_others(layout: str) -> None:
    lengths, (second, third) = PACKS["long"], (37, 88)
    inputs = conv_inputs(sum(lengths), 6, 4, torch.float32)
    changed = inputs | {"x": inputs["x"].clone(), "dy": inputs["dy"].clone()}
    changed["x"][third - 3 : third] += 1.0
    changed["dy"][third - 3 : third] -= 1.0
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[second:third] = False
    for world in (1, 2, 4):
        part = cut(lengths, world, layout)
        before, after = conv_in_twin(part, inputs), conv_in_twin(part, changed)
        for name in ("y", "dx"):
            assert torch.equal(before[name][others], after[name][others])
            assert not torch.equal(before[name], after[name])
        of_third = inputs | {"dy": inputs["dy"].clone()}
        of_third["dy"][:third] = 0.0
        assert torch.equal(conv_in_twin(part, of_third)["dx"][:third], torch.zeros(third, 6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_appending_tokens_changes_nothing_before_them(layout: str) -> None:
    for length in (1, 3, 16, 17, 65):
        inputs = conv_inputs(length + 7, 37, 4, torch.float32)
        inputs["dy"][length:] = 0.0
        prefix = inputs | {name: inputs[name][:length] for name in ("x", "dy")}
        longer = conv_in_twin(cut((length + 7,), 3, layout), inputs)
        shorter = conv_in_twin(cut((length,), 3, layout), prefix)
        assert torch.equal(longer["y"][:length], shorter["y"])
        assert torch.equal(longer["dx"][:length], shorter["dx"])


def run_alone(fn: Any, dtype: torch.dtype = torch.float32) -> Any:
    """fn(ctx, inputs) on one rank, pack "long", conv (37, 4)."""
    inputs = conv_inputs(128, 37, 4, dtype)
    part = cut(PACKS["long"], 1, "contiguous")
    return twin(1, lambda comm: fn(bare_context(part, comm, (37, 4), dtype), inputs))[0]


def test_strided_inputs_and_gradients_give_the_bits_of_copied_ones() -> None:
    def strided(t: torch.Tensor, as_strided: bool) -> torch.Tensor:
        return torch.cat((t, t), dim=-1)[..., : t.shape[-1]] if as_strided else t

    def both(ctx: Any, inputs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        results = []
        for flag in (False, True):
            x, weight, bias = (strided(inputs[name], flag).requires_grad_() for name in ("x", "weight", "bias"))
            y = causal_conv1d(x, weight, bias, ctx=ctx)
            dy = inputs["dy"].T.contiguous().T if flag else inputs["dy"]
            results.append((y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)))
        return results

    copied, as_views = run_alone(both)
    assert all(torch.equal(a, b) for a, b in zip(copied, as_views, strict=True))


def test_autocast_and_modes_without_gradient_do_not_change_bits() -> None:
    def outputs(ctx: Any, inputs: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        results = []
        for enabled in (False, True):
            x, weight = inputs["x"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = causal_conv1d(x, weight, inputs["bias"], ctx=ctx)
                results.append([y.detach(), *torch.autograd.grad(y, (x, weight), inputs["dy"])])
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = causal_conv1d(inputs["x"].requires_grad_(), inputs["weight"], inputs["bias"], ctx=ctx)
            assert not y.requires_grad
            results.append([y, *results[0][1:]])
        return results

    results = run_alone(outputs)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_silu_neither_overflows_nor_loses_its_slope_far_from_zero() -> None:
    def far(ctx: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x = torch.linspace(-1e4, 1e4, inputs["x"].numel()).reshape(inputs["x"].shape).requires_grad_()
        weight = torch.zeros(37, 4)
        weight[:, 3] = 1.0
        y = causal_conv1d(x, weight, None, ctx=ctx)
        return x.detach(), y.detach(), torch.autograd.grad(y.sum(), x)[0]

    x, y, dx = run_alone(far)
    z = x.double().requires_grad_()
    silu = torch.nn.functional.silu(z)
    torch.testing.assert_close(y, silu.detach().float(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(dx, torch.autograd.grad(silu.sum(), z)[0].float(), rtol=1e-5, atol=1e-30)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x_l": torch.zeros(128, 37, dtype=torch.float64)}, TypeError, "x_l: got dtype torch.float64"),
    ({"x_l": torch.zeros(127, 37)}, ValueError, r"x_l: got shape \(127, 37\), expected \(128, 37\)"),
    ({"x_l": torch.zeros(2, 64, 37)}, ValueError, r"x_l: got shape \(2, 64, 37\), expected \(1, 128, 37\)"),
    ({"x_l": torch.zeros(128, 37, device="meta")}, ValueError, "x_l: got device meta"),
    ({"weight": torch.zeros(37, 3)}, ValueError, r"weight: got shape \(37, 3\), expected \(37, 4\).*conv="),
    ({"weight": torch.zeros(37, 1, 4)}, ValueError, r"weight: got shape \(37, 1, 4\)"),
    ({"weight": torch.zeros(37, 4, dtype=torch.int64)}, TypeError, "weight: got dtype torch.int64"),
    ({"bias": torch.zeros(36)}, ValueError, r"bias: got shape \(36,\), expected \(37,\)"),
    ({"activation": "relu"}, ValueError, "activation: got 'relu'"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    good = {"x_l": torch.zeros(128, 37), "weight": torch.zeros(37, 4), "bias": torch.zeros(37)}
    with pytest.raises(error, match=said):
        run_alone(lambda ctx, inputs: causal_conv1d(**{**good, **arguments}, ctx=ctx))


def test_a_context_without_convolution_says_how_to_build_one() -> None:
    part = cut(PACKS["ragged"], 1, "contiguous")
    with pytest.raises(ValueError, match=r"conv=\(channels, width\)"):
        twin(1, lambda comm: causal_conv1d(torch.zeros(26, 3), torch.zeros(3, 4), ctx=bare_context(part, comm)))
