"""What a checkpoint's forward hands to its recompute: the same bits, and a recompute that sends nothing."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cp_gdn import Comm, Context, Options, RecomputeHandle, causal_conv1d, chunk_gated_delta_rule, twin
from cp_gdn.integrations.transformers import take_over
from tests.cases import Content, Run
from tests.gdn_layers import BATCHES, make_layer, output
from tests.pack import local_gradients, local_inputs, make_context, make_pack
from tests.regions import once_more
from tests.test_checkpointing import HIDDEN, LAYERS
from tests.test_entries import Watching

PACK = make_pack(Content(pack="several chunks", heads=(1, 2), head_dims=(16, 24)))
CONV = (6, 4)
FORWARD = ("STATE", "STATE_HOME", "HALO")


def context(comm: Comm | None = None, exchange: str = "ring", **options: Any) -> Context:
    comm = comm or Comm.alone()
    run = Run(world=comm.size, segments=2, exchange=exchange, dtype=torch.float32)
    return make_context(comm, run, PACK, conv=CONV, options=Options(**options))


def sent(log: list[Any]) -> Counter[str]:
    return Counter(m.purpose for m in log if m.direction == "send")


# ---- calls -----------------------------------------------------------------------------------------------------------

FORMS = {
    "none": None,
    "not reentrant": False,
    "reentrant": True,
}
CHOICES: dict[str, dict[str, Any]] = {
    "light": {},
    "without maps": {"save_transfer": False},
    "full": {"save": "full"},
    "asked for": {"reuse_recompute_tapes": True, "recompute_output": "always"},
}


def handed_step(comm: Comm, exchange: str, form: str, options: dict[str, Any]) -> tuple[list[Tensor], Counter[str]]:
    """A step of the convolution and the op under one handle; its tensors, and what was sent."""
    ctx = context(comm, exchange, **options)
    leaves = local_inputs(ctx, PACK)
    gen = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(ctx.num_tokens, CONV[0], generator=gen).requires_grad_()
    weight = torch.linspace(-1, 1, CONV[0] * CONV[1]).view(CONV).requires_grad_()
    handle = None if FORMS[form] is None else RecomputeHandle()

    def region(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        y = causal_conv1d(x, weight, ctx=ctx, recompute=handle)
        inputs = dict(zip(leaves, rest, strict=True))
        o, _ = chunk_gated_delta_rule(**inputs, ctx=ctx, recompute=handle)
        return o * (1 + y.mean(1)[:, None, None])

    every = (x, weight, *leaves.values())
    with comm.record() as log:
        o = region(*every) if handle is None else checkpoint(region, *every, use_reentrant=FORMS[form])
        o.backward(local_gradients(ctx, PACK)[0])
    return [o.detach(), *(t.grad for t in every)], sent(log)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("world", "exchange"), [(2, "a2a"), (4, "ring")])
def test_a_recompute_with_a_handle_sends_nothing_and_has_the_bits_of_no_checkpoint(
    world: int, exchange: str, choice: str
) -> None:
    found = {form: twin(world, lambda comm, f=form: handed_step(comm, exchange, f, CHOICES[choice])) for form in FORMS}
    for form in ("not reentrant", "reentrant"):
        for (tensors, messages), (plain, counted) in zip(found[form], found["none"], strict=True):
            assert all(map(torch.equal, tensors, plain))
            assert messages == counted
    assert all(counted["HALO"] for _, counted in found["none"])


def test_a_handle_may_be_taken_as_often_as_its_forward_is_recomputed() -> None:
    def twice(comm: Comm) -> tuple[list[Tensor], Counter[str]]:
        ctx, handle = context(comm), RecomputeHandle()
        leaves = local_inputs(ctx, PACK)
        with comm.record() as log:
            o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=ctx, recompute=handle)[0], leaves)
            grads = [torch.autograd.grad(o.sum(), leaves["q"], retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*grads)
        return sent(log)

    assert [each["STATE"] for each in twin(2, twice)] == [each["ADJOINT"] / 2 for each in twin(2, twice)]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["states", "halo"])
def test_one_handle_serves_one_layer_in_one_micro_step(what: str) -> None:
    ctx, handle = context(), RecomputeHandle()
    leaves, x = local_inputs(ctx, PACK), torch.zeros(240, CONV[0])

    def forward() -> None:
        if what == "states":
            chunk_gated_delta_rule(**leaves, ctx=ctx, recompute=handle)
        else:
            causal_conv1d(x, torch.ones(CONV), ctx=ctx, recompute=handle)

    forward()
    with pytest.raises(
        RuntimeError, match=rf"a handle that a forward has filled already \({what}\); one handle serves"
    ):
        forward()


def test_a_handle_is_not_for_another_context() -> None:
    first, second, handle = context(), context(), RecomputeHandle()
    leaves, contexts = local_inputs(first, PACK), [first, second]
    o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=contexts.pop(0), recompute=handle)[0], leaves)
    with pytest.raises(RuntimeError, match="filled under another context"):
        o.sum().backward()


def test_a_handle_that_cannot_serve_is_refused() -> None:
    leaves = local_inputs(context(), PACK)
    for rule in (chunk_gated_delta_rule, None):

        def run(ctx: Context, handle: Any, rule: Any = rule) -> None:
            if rule is None:
                causal_conv1d(torch.zeros(240, CONV[0]), torch.ones(CONV), ctx=ctx, recompute=handle)
            else:
                rule(**leaves, ctx=ctx, recompute=handle)

        with pytest.raises(TypeError, match=r"recompute: got int, expected a cp_gdn\.RecomputeHandle"):
            run(context(), 3)
        with pytest.raises(ValueError, match=r"boundary='recompute'\), which keeps nothing; pass None"):
            run(context(boundary="recompute"), RecomputeHandle())
        with Watching(), pytest.raises(NotImplementedError, match="operators only; pass None"):
            run(context(), RecomputeHandle())


# ---- layers ----------------------------------------------------------------------------------------------------------


def layer_messages(comm: Comm, options: dict[str, Any]) -> Counter[str]:
    """What a checkpointed step of three layers of which the first two need no gradient sends."""
    layers = [copy.deepcopy(LAYERS[i]) for i in (0, 1, 0)]
    ctx = make_context(
        comm,
        Run(world=2, segments=1, exchange="a2a", dtype=torch.float32),
        PACK,
        conv=layers[0].conv,
        heads=(1, 2),
        head_dims=(16, 16),
        options=Options(**options),
    )
    for frozen in layers[:2]:
        frozen.requires_grad_(False)
    x = torch.ones(1, ctx.num_tokens, HIDDEN)
    with comm.record() as log:
        y = checkpoint(lambda x: layers[2](layers[1](layers[0](x, ctx), ctx), ctx), x, use_reentrant=False)
        y.sum().backward()
    return sent(log)


# How often the exchange of the three layers ran in a step, together.
RUNS = {"saved": 5, "recompute": 6}


@pytest.mark.parametrize("boundary", RUNS)
def test_a_layer_makes_its_own_handle_where_it_keeps_gradients_and_states(boundary: str) -> None:
    """The first layer saves nothing, so the second stands where it stood, and neither may take the other's handle."""
    for counted in twin(2, lambda comm: layer_messages(comm, {"boundary": boundary})):
        assert counted["STATE"] == counted["HALO"] == RUNS[boundary]
        assert counted["STATE_AGAIN"] == (boundary == "recompute")


def taken_over_messages(comm: Comm, checkpointed: bool) -> tuple[list[Tensor], Counter[str]]:
    mine = nn.Sequential(copy.deepcopy(TAKEN))
    seat, (x, dy) = take_over(mine, comm).seat, BATCHES["packed"].tensors()

    def block(rows: Tensor) -> Tensor:
        return output(mine[0](hidden_states=rows)).tanh()

    with comm.record() as log, seat.hold(BATCHES["packed"].pack(seat)) as pack:
        rows = pack.local(x).requires_grad_()
        y = checkpoint(block, rows, use_reentrant=False) if checkpointed else block(rows)
        y.backward(pack.local(dy))
    return [y.detach(), rows.grad, *(p.grad for p in mine.parameters())], sent(log)


TAKEN = make_layer("fla")


def test_a_taken_over_layer_makes_its_own_handle() -> None:
    plain, got = (twin(2, lambda comm, c=c: taken_over_messages(comm, c)) for c in (False, True))
    for (want, counted), (have, messages) in zip(plain, got, strict=True):
        assert all(map(torch.equal, have, want))
        assert messages == counted
        assert counted["STATE"]
