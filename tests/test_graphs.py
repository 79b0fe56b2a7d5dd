"""Graphs per pack shape without a GPU: what is refused, and which graphs a cache keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, Context, GraphCache, GraphResults, Options, build_context, graphs, partition, twin

CUDA = torch.device("cuda")
HEADS = {"heads": (1, 2), "head_dims": (16, 16), "dtype": torch.float32}


def context(lengths: tuple[int, ...] = (40, 30), comm: Comm | None = None, **changes: Any) -> Context:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    comm = comm or Comm.alone()
    return build_context(partition(bounds, comm.size), comm, **{**HEADS, **changes})


def twice(ctx: Context, x: Tensor) -> Tensor:
    return 2 * x


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device is there as far as checks can tell, and no graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def on_cuda(ctx: Context) -> Context:
    return replace(ctx, device=CUDA)


def test_a_context_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="ctx: got one for cpu, expected a CUDA device that is there"):
        GraphCache(twice).forward(context(), torch.zeros(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_context_for_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="ctx: got one for cuda, expected a CUDA device that is there"):
        GraphCache(twice).forward(on_cuda(context()), torch.zeros(3))


def captured_by_a_twin(comm: Comm, lengths: tuple[int, ...]) -> GraphResults:
    return GraphCache(twice).forward(on_cuda(context(lengths, comm)), torch.zeros(3, device="meta"))


def test_messages_that_pass_through_the_host_are_refused_on_every_rank(cuda: None) -> None:
    why = "rank [01].*messages that go by copy, through the host|ctx: got messages that go by copy, through the host"
    with pytest.raises(RuntimeError, match=why):
        twin(2, lambda comm: captured_by_a_twin(comm, (400,)))


@pytest.mark.parametrize(
    ("kind", "size", "sends", "refused"),
    [
        ("gloo", 2, True, True),
        ("copy", 2, True, True),
        ("gloo", 2, False, False),
        ("gloo", 1, True, False),
        ("nccl", 2, True, False),
        ("gloo+nccl", 2, True, False),
    ],
)
def test_only_messages_decide_which_groups_are_refused(
    kind: str, size: int, sends: bool, refused: bool, cuda: None
) -> None:
    comm: Any = SimpleNamespace(kind=kind, size=size)
    if not refused:
        graphs._check_place(CUDA, comm, sends=sends)
        return
    with pytest.raises(RuntimeError, match=f"messages that go by {kind}, .*make the Comm of a nccl group, or call"):
        graphs._check_place(CUDA, comm, sends=sends)


def test_what_a_graph_cannot_keep_is_refused(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ctx = GraphCache(twice), on_cuda(context())
    reusing = on_cuda(context(options=Options(reuse_recompute_tapes=True)))
    with pytest.raises(ValueError, match=r"reuse_recompute_tapes=True\), which a graph cannot do.*use 'auto' or False"):
        cache.forward(reusing, torch.zeros(3))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    with pytest.raises(RuntimeError, match=r"autocast with its cache of weights.*cache_enabled=False"):
        cache.forward(ctx, torch.zeros(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is being captured; call the function itself"):
        cache.forward(ctx, torch.zeros(3))


def test_arguments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_check_place", lambda *args, **options: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cache, ctx, x = GraphCache(twice), context(), torch.zeros(3)
    with pytest.raises(TypeError, match=r"ctx: got int, expected the result of cp_gdn\.build_context"):
        cache.forward(3, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tensors\[1\]: got float, expected a tensor"):
        cache.forward(ctx, x, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tensors\[0\]: got device meta, expected cpu"):
        cache.forward(ctx, x.to("meta"))
    with pytest.raises(ValueError, match=r"output_gradients\[1\]: got device meta, expected cpu"):
        cache.step(ctx, [x], [None, x.to("meta")])
    with pytest.raises(ValueError, match=r"output_gradients: got none, expected the gradient of an output; or call"):
        cache.step(ctx, [x], [None])


@pytest.mark.parametrize("capacity", [0, -1, True, 2.0, "4"])
def test_a_capacity_that_is_no_count_is_refused(capacity: Any) -> None:
    with pytest.raises(ValueError, match=r"capacity: got .*, expected a number of graphs of at least 1"):
        GraphCache(twice, capacity=capacity)


def test_a_function_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="fn: got int, expected a function of a context and tensors"):
        GraphCache(3)  # type: ignore[arg-type]


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Place:
    """In place of captures on a GPU: the function itself, and a list of what was captured."""

    captures: list[tuple[Context, bool]]

    def __init__(self) -> None:
        self.captures = []

    def captured(self, call: Any, ctx: Context, tensors: Any, given: Any, *, fresh: bool) -> Any:
        self.captures.append((ctx, fresh))
        return SimpleNamespace(run=lambda tensors, given: call.run(ctx, tensors, given or None))

    def in_turn(self, run: Callable[[], GraphResults], device: torch.device) -> GraphResults:
        return run()


@pytest.fixture
def cache_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GraphCache, list[tuple[Context, bool]]]]:
    """Makes a cache whose graphs are not captured, and the list of what would have been."""
    monkeypatch.setattr(graphs, "_check", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)

    def make(fn: Any = twice, **options: Any) -> tuple[GraphCache, list[tuple[Context, bool]]]:
        cache = GraphCache(fn, **options)
        cache._place = Place()  # type: ignore[assignment]
        return cache, cache._place.captures  # type: ignore[attr-defined]

    return make


def test_packs_of_one_shape_share_a_graph_and_others_get_their_own(cache_of: Any) -> None:
    cache, captures = cache_of()
    x = torch.arange(70.0)
    first, alike, other = context((40, 30)), context((40, 30)), context((30, 40))
    for ctx in (first, alike, other, alike, first):
        assert torch.equal(cache.forward(ctx, x).outputs[0], 2 * x)
    assert [ctx for ctx, _ in captures] == [first, other]


@pytest.mark.parametrize(
    "change",
    [
        {"segments": 2},
        {"heads": (2, 2)},
        {"dtype": torch.float64},
        {"options": Options(save_transfer=False)},
    ],
    ids=str,
)
def test_whatever_the_digest_has_makes_another_graph(change: dict[str, Any], cache_of: Any) -> None:
    cache, captures = cache_of()
    for ctx in (context(), context(**change)):
        cache.forward(ctx, torch.zeros(3))
    assert len(captures) == len(cache) == 2


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(6)[::2],
        torch.zeros(3, requires_grad=True),
    ],
    ids=["shape", "dtype", "strides", "requires_grad"],
)
def test_tensors_of_another_kind_make_another_graph(other: Tensor, cache_of: Any) -> None:
    cache, captures = cache_of()
    ctx = context()
    for x in (torch.zeros(3), other, torch.ones(3)):
        cache.forward(ctx, x)
    assert len(captures) == 2


def test_a_forward_and_a_step_are_two_graphs_and_a_step_gives_every_gradient(cache_of: Any) -> None:
    weight, unused = torch.tensor(3.0, requires_grad=True), torch.zeros(2, requires_grad=True)
    cache, captures = cache_of(lambda ctx, x, y: (x * weight + y, None), parameters=(weight, unused))
    ctx, x = context(), torch.arange(3.0, requires_grad=True)
    y, dout = torch.ones(3), torch.full((3,), 2.0)
    forward, step = cache.forward(ctx, x, y), cache.step(ctx, (x, y), (dout, None))
    assert len(captures) == 2
    for results in (forward, step):
        assert torch.equal(results.outputs[0], torch.tensor([1.0, 4.0, 7.0]))
        assert results.outputs[1] is None
        assert not results.outputs[0].requires_grad
    assert (forward.gradients, forward.parameter_gradients) == ((), ())
    assert torch.equal(step.gradients[0], 3 * dout)
    assert step.gradients[1] is None
    assert step.parameter_gradients[0] == 6.0
    assert step.parameter_gradients[1] is None
    assert weight.grad is None


def test_a_step_is_captured_only_where_no_earlier_call_holds_a_parameter(cache_of: Any) -> None:
    used, fixed = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0)
    cache, captures = cache_of(lambda ctx, x: x * used + fixed, parameters=(fixed, used))
    ctx, x, dout = context(), torch.arange(3.0), torch.ones(3)
    earlier = 2 * used
    with pytest.raises(RuntimeError, match=r"parameters\[1\]: got one that an earlier call still holds, .*drop that"):
        cache.step(ctx, [x], [dout])
    assert not captures
    cache.forward(ctx, x)  # takes no gradient
    earlier.backward()
    del earlier
    cache.step(ctx, [x], [dout])
    later = 2 * used
    assert cache.step(ctx, [x], [dout]).parameter_gradients[1] == 3.0  # captured before
    assert later.requires_grad
    assert len(captures) == 2


def test_gradients_for_another_number_of_outputs_are_refused(cache_of: Any) -> None:
    cache, _ = cache_of()
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="output_gradients: got 2, expected one or None per output, 1"):
        cache.step(context(), (x,), (x.detach(), None))


def test_the_graph_that_was_used_longest_ago_goes_first(cache_of: Any) -> None:
    cache, captures = cache_of(capacity=2)
    one, two, three = context((40, 30)), context((30, 40)), context((70,))
    for ctx in (one, two, one, three, one, two):  # three takes the place of two, two that of three
        cache.forward(ctx, torch.zeros(3))
    assert [ctx for ctx, _ in captures] == [one, two, three, two]
    assert len(cache) == 2


def test_a_pool_is_new_where_no_graph_is_left_and_shared_otherwise(cache_of: Any) -> None:
    cache, captures = cache_of(capacity=1)
    cache.forward(context((40, 30)), torch.zeros(3))
    cache.forward(context((30, 40)), torch.zeros(3))
    cache.clear()
    assert len(cache) == 0
    cache.forward(context((70,)), torch.zeros(3))
    cache.capacity = 2
    cache.forward(context((30, 40)), torch.zeros(3))
    assert [fresh for _, fresh in captures] == [True, True, True, False]


def test_a_graph_keeps_the_context_that_it_reads(cache_of: Any) -> None:
    cache, captures = cache_of(lambda ctx, x: x + ctx.num_tokens)
    ctx = context()
    cache.forward(ctx, torch.zeros(3))
    gone = weakref.ref(ctx)
    captures.clear()
    del ctx
    gc.collect()
    assert gone() is not None
    cache.clear()
    gc.collect()
    assert gone() is None
