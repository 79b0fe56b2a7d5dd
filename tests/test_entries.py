"""Two entries to one pair of functions: the operators that compilers and modes see have the bits of the eager entry."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cp_gdn
from cp_gdn import Comm, Context, Options, conv, library, recompute, twin
from tests.cases import Content, Run
from tests.dist import pool
from tests.pack import call, differences, local_gradients, local_inputs, make_context, make_pack, step

PACK = make_pack(Content(pack="several chunks", heads=(1, 2), head_dims=(16, 24), l2norm=True))
ONE = Run(segments=2, dtype=torch.float32)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


class Watching(TorchDispatchMode):
    """A mode that only looks on, as selective checkpointing does before it saves something."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def context(comm: Comm | None = None, run: Run = ONE, **changes: Any) -> Context:
    return make_context(comm or Comm.alone(), run, PACK, **changes)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert differences(got, want) == []


# ---- the operators ---------------------------------------------------------------------------------------------------


def forward_arguments(ctx: Context) -> tuple[Any, ...]:
    return library.arguments(ctx, [*local_inputs(ctx, PACK).values()], 0.25, True)


def backward_arguments(ctx: Context) -> tuple[Any, ...]:
    args = forward_arguments(ctx)
    o, final, *saved = (x.detach() for x in library.forward_op(*args))
    again = [] if ctx.options.keeps_states else [args[5].detach()]
    tensors = [*(t.detach() for t in args[:5]), *saved, *again]
    return (o, final, tensors, ctx.handle, 0.25, True, list(args[5].shape))


def conv_arguments(ctx: Context) -> tuple[Any, ...]:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((ctx.num_tokens, 6), (6, 4), (6,)))
    return (x, weight, bias, ctx.handle, ctx.traced.halo, "silu")


def conv_backward_arguments(ctx: Context) -> tuple[Any, ...]:
    x, weight, bias = (t.detach() for t in conv_arguments(ctx)[:3])
    return (x, [x, x.new_empty(ctx.traced.halo), weight, bias], ctx.handle, "silu")


OPERATORS: dict[str, tuple[Any, Callable[[Context], tuple[Any, ...]]]] = {
    "forward": (library.forward_op, forward_arguments),
    "backward": (library.backward_op, backward_arguments),
    "conv_forward": (conv.forward_op, conv_arguments),
    "conv_backward": (conv.backward_op, conv_backward_arguments),
}


KEEPING: dict[str, Options] = {
    "states and maps": Options(),
    "states": Options(save_transfer=False),
    "tapes": Options(save="full", decay_cutoff=-17.0),
    "nothing": Options(boundary="recompute"),
}


@pytest.mark.parametrize("kept", KEEPING)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_operators_keep_the_rules_of_torch(name: str, kept: str) -> None:
    operator, arguments = OPERATORS[name]
    ctx = context(conv=(6, 4), options=KEEPING[kept])
    torch.library.opcheck(operator, arguments(ctx))


@pytest.mark.parametrize("name", ["conv_forward", "conv_backward"])
def test_the_operators_of_the_convolution_keep_the_rules_of_torch(name: str) -> None:
    operator, arguments = OPERATORS[name]
    ctx = context(conv=(6, 4))
    torch.library.opcheck(operator, arguments(ctx))


# ---- compilers -------------------------------------------------------------------------------------------------------

BACKENDS = (
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")),
)


def compiled_step(ctx: Context, backend: str) -> dict[str, Tensor]:
    """A step of which the op and a product before it are one graph; a break of it would raise."""

    def around(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return call(ctx, {**leaves, "q": leaves["q"] * 1.0}, PACK)

    leaves = local_inputs(ctx, PACK)
    outputs = torch.compile(around, backend=backend, fullgraph=True)(leaves)
    grads = torch.autograd.grad(outputs, list(leaves.values()), local_gradients(ctx, PACK))
    names = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
    return dict(zip(names, (*(x.detach() for x in outputs), *grads), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_is_one_graph_with_the_bits_of_the_eager_one(backend: str) -> None:
    ctx = context()
    assert_same(compiled_step(ctx, backend), step(ctx, PACK))
    assert ctx.last_call["entry"] == "eager"


def checkpointed_on_rank(rank: int, world: int) -> list[tuple[list[Tensor], list[str]]]:
    """A step of a layer under checkpointing, eager and compiled as one graph: tensors, and what was sent."""
    comm = Comm(timeout=60.0)
    torch.manual_seed(0)
    layer, x = cp_gdn.GatedDeltaNet(8, heads=(1, 2), head_dims=(16, 24)), torch.randn(1, 380, 8)
    ctx = context(comm, Run(world=2, exchange="a2a", segments=2, dtype=torch.float32), conv=layer.conv)

    def step_of(x: Tensor) -> Tensor:
        return x + checkpoint(layer, x, ctx, use_reentrant=False)

    results = []
    for run in (step_of, torch.compile(step_of, backend="aot_eager_decomp_partition", fullgraph=True)):
        with comm.record() as messages:
            y = run(x[:, ctx.token_ids])
            grads = torch.autograd.grad((y * y).sum(), list(layer.parameters()))
        results.append(([y.detach(), *grads], [m.purpose for m in messages if m.direction == "send"]))
    comm.close()
    return results


@pytest.mark.dist
def test_compiled_ranks_under_checkpointing_have_the_bits_of_eager_ones() -> None:
    """An eager recompute has the layer's own handle, a compiled one exchanges again."""
    for (eager, sent), (compiled, also_sent) in pool.run(2, checkpointed_on_rank, timeout=120.0):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
        counts = [(log.count("STATE"), log.count("HALO"), log.count("ADJOINT")) for log in (sent, also_sent)]
        assert counts == [(1, 1, 1), (2, 2, 1)]


def test_a_compiled_layer_is_one_graph_with_the_bits_of_the_eager_one() -> None:
    layer = cp_gdn.GatedDeltaNet(8, heads=(1, 2), head_dims=(16, 24))
    ctx = context(conv=layer.conv)
    x = torch.randn(1, ctx.num_tokens, 8)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ctx), layer(x, ctx))


def test_a_compiled_function_takes_the_context_of_the_call_also_after_another_one_is_gone() -> None:
    compiled = torch.compile(lambda leaves, ctx: call(ctx, leaves, PACK)[0], backend="aot_eager", fullgraph=True)
    used = set()
    for segments in (1, 2, 3):
        ctx = context(segments=segments)
        assert torch.equal(compiled(local_inputs(ctx, PACK), ctx), step(ctx, PACK)["o"])
        used.add(ctx.handle)
        del ctx
        gc.collect()
    assert len(used) == 3


def test_a_compiler_passes_on_why_an_argument_was_refused() -> None:
    ctx = context()
    leaves = {**local_inputs(ctx, PACK), "v": torch.zeros(7, 2, 24)}
    with pytest.raises(Exception, match=r"v: got shape \(7, 2, 24\), expected \(240, 2, 24\): this rank holds 240"):
        torch.compile(lambda: call(ctx, leaves, PACK), backend="aot_eager", fullgraph=True)()


# ---- what else looks at a call ---------------------------------------------------------------------------------------

ENTRIES: dict[str, Callable[[], Any]] = {"eager": nullcontext, "library": Watching}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_second_derivative_is_refused(entry: str) -> None:
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    with ENTRIES[entry]():
        (dq,) = torch.autograd.grad(call(ctx, leaves, PACK)[0].sum(), leaves["q"], create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only; drop create_graph"):
            dq.sum().backward()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype: torch.dtype, entry: str) -> None:
    ctx = context(run=Run(segments=2, dtype=dtype))
    want = step(ctx, PACK)
    leaves = local_inputs(ctx, PACK)
    with ENTRIES[entry](), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = call(ctx, leaves, PACK)
        inside = torch.autograd.grad(outputs, list(leaves.values()), local_gradients(ctx, PACK), retain_graph=True)
    outside = torch.autograd.grad(outputs, list(leaves.values()), local_gradients(ctx, PACK))
    for grads in (inside, outside):
        got = dict(zip(want, (*(x.detach() for x in outputs), *grads), strict=True))
        assert_same(got, want)


def test_a_graph_that_outlives_its_context_says_so() -> None:
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    with Watching():
        o, _ = call(ctx, leaves, PACK)
    del ctx
    gc.collect()
    others = [context() for _ in range(20)]  # one of them may well lie where the lost one was
    with pytest.raises(RuntimeError, match="the context of this call is gone; keep the context alive"):
        o.sum().backward()
    assert len(others) == 20


def test_the_eager_graph_keeps_its_context() -> None:
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    o, _ = call(ctx, leaves, PACK)
    del ctx
    gc.collect()
    o.sum().backward()
    assert leaves["q"].grad is not None


# ---- last_call -------------------------------------------------------------------------------------------------------


def calls(comm: Comm) -> list[dict[str, Any]]:
    """`last_call` after calls of all kinds."""
    ctx = context(comm, Run(world=2, segments=2, exchange="ring", dtype=torch.float32))
    leaves = local_inputs(ctx, PACK)
    assert ctx.last_call == {}
    with torch.no_grad():
        call(ctx, leaves, PACK)
    seen = [dict(ctx.last_call)]
    o, _ = call(ctx, leaves, PACK)
    seen.append(dict(ctx.last_call))
    o.sum().backward()
    seen.append(dict(ctx.last_call))
    with Watching():
        call(ctx, leaves, PACK)
    seen.append(dict(ctx.last_call))
    _, _, saved = cp_gdn.forward(**leaves, ctx=ctx)
    cp_gdn.backward(None, None, saved, ctx=ctx)
    seen.append(dict(ctx.last_call))
    return seen


def test_last_call_says_what_ran_and_why() -> None:
    why = {
        "exchange": "ring",
        "exchange_reason": "asked for",
        "segments": (2, 2),
        "segments_rule": "fixed",
        "segments_note": "",
        "backend": "torch",
        "backend_reason": "auto: dtype torch.float32: the kernels take torch.bfloat16",
        "maps": "saved",
    }
    expected = [
        ("eager", "forward", "nothing", recompute.NO_GRADIENT),
        ("eager", "forward", "light", recompute.NO_CHECKPOINT),
        ("eager", "backward", "light", recompute.NO_CHECKPOINT),
        ("library", "forward", "light", recompute.OPERATOR),
        ("explicit", "backward", "light", recompute.EXPLICIT),
    ]
    wanted = [{"entry": e, "direction": d, "saved": s, **why, **decided(reason)} for e, d, s, reason in expected]
    for each in wanted[:2]:
        each["states"] = "exchanged"
    assert twin(2, calls) == [wanted, wanted]


def decided(reason: str) -> dict[str, str]:
    """What a call decides that no checkpoint recomputes."""
    return {"tapes": "rerun", "tapes_reason": reason, "output": "written", "output_reason": reason}


def test_last_call_knows_the_grid_and_maps_that_are_not_kept() -> None:
    run = Run(segments="grid:1", save_transfer=False, dtype=torch.float32)
    ctx = context(run=run, backend="torch")
    step(ctx, PACK)
    last = ctx.last_call
    assert (last["segments"], last["segments_rule"], last["maps"]) == ("grid:1", "grid", "recomputed")
    assert (last["exchange"], last["exchange_reason"]) == ("none", "no document crosses ranks, nothing is sent")
    assert last["backend_reason"] == "asked for"
