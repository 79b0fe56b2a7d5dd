"""What tapes that a recompute hands on cost, and that over ranks nothing a call decides changes a bit or a message."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, Options, backward, chunk_gated_delta_rule, forward, recompute, twin
from cp_gdn.backends.torch_backend import TorchBackend
from tests.cases import Content, Run
from tests.dist import pool
from tests.pack import differences, local_gradients, local_inputs, make_context, make_pack
from tests.regions import KEPT, ONE, PACK, Leaves, backwards, context, once_more, plain_step, region_step, watch_calls

# ---- what kept tapes cost --------------------------------------------------------------------------------------------


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Weak references to the tapes that recomputes left, none of them among the tensors that the frame saves."""
    found: list[weakref.ref[Any]] = []
    leave = recompute.leave

    def watched(region: Any, node: Any, decision: Any, tapes: Any) -> Any:
        place = leave(region, node, decision, tapes)
        if tapes is not None:
            assert not tensors_of(tapes) & {id(x) for x in region.frame.recomputed[region.task].values()}
            found.append(weakref.ref(tapes.tape.u))
        return place

    monkeypatch.setattr(recompute, "leave", watched)
    return found


def tensors_of(tapes: Any) -> set[int]:
    return {id(tapes.tape.u), id(tapes.tape.nd), id(tapes.states.before)}


def alive(sets: list[weakref.ref[Any]]) -> int:
    return sum(each() is not None for each in sets)


def test_a_region_of_several_calls_has_one_set_of_tapes_at_a_time_kept_or_being_made(
    sets: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    prepare = TorchBackend.prepare
    monkeypatch.setattr(TorchBackend, "prepare", lambda self, x: most.append(alive(sets)) or prepare(self, x))
    region_step(context(reuse_recompute_tapes=True), PACK, "three in one")
    assert (len(sets), max(most), alive(sets)) == (3, 0, 0)


def test_kept_tapes_go_with_their_backward_though_the_graph_stays(sets: list[weakref.ref[Any]]) -> None:
    ctx = context()
    o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=ctx)[0], local_inputs(ctx, PACK))
    o.sum().backward(retain_graph=True)
    assert (len(sets), alive(sets)) == (1, 0)


def test_a_node_keeps_no_frame_alive_after_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, leave = [], recompute.leave

    def watched(region: Any, *args: Any) -> Any:
        frames.append(weakref.ref(region.frame))
        return leave(region, *args)

    monkeypatch.setattr(recompute, "leave", watched)
    ctx = context()
    o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=ctx)[0], local_inputs(ctx, PACK))
    assert frames[0]() is not None
    o.sum().backward()
    assert [frame() for frame in frames] == [None, None]
    assert o.grad_fn is not None


def stop(_: Any) -> None:
    raise ArithmeticError("stopped")


def test_kept_tapes_die_with_their_frame_when_no_backward_comes(sets: list[weakref.ref[Any]]) -> None:
    ctx = context(reuse_recompute_tapes=True)
    leaves, runs = local_inputs(ctx, PACK), []

    def region(x: Leaves) -> Tensor:
        o = chunk_gated_delta_rule(**x, ctx=ctx)[0]
        if not runs:
            o.grad_fn.register_prehook(stop)
        runs.append(1)
        return o.sin()

    gc.collect()
    gc.disable()
    try:
        y = once_more(region, leaves)
        with pytest.raises(ArithmeticError):
            y.sum().backward()
        assert (len(runs), alive(sets)) == (2, 1)
        del y
        assert alive(sets) == 0
    finally:
        gc.enable()


def test_a_kept_set_spares_the_backward_its_chunks_and_the_recompute_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        real = getattr(TorchBackend, name)
        monkeypatch.setattr(TorchBackend, name, lambda self, *args: counts.update([name]) or real(self, *args))

    for name in ("prepare", "outputs", "states"):
        count(name)
    region_step(context(), PACK, "the op alone")
    assert counts == {"prepare": 2, "outputs": 1}
    counts.clear()
    region_step(context(reuse_recompute_tapes=False, recompute_output="always"), PACK, "the op alone")
    assert counts == {"prepare": 3, "outputs": 2, "states": 1}


def test_a_backward_taken_twice_recomputes_twice_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_calls(monkeypatch)
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=ctx, use_qk_l2norm_in_kernel=True)[0], leaves)
    dout = local_gradients(ctx, PACK)[0]
    first, second = (torch.autograd.grad(o, list(leaves.values()), dout, retain_graph=True) for _ in range(2))
    want = plain_step(ctx, PACK, "the op alone")
    for grads in (first, second):
        assert differences(dict(zip(leaves, grads, strict=True)), {name: want[name] for name in leaves}) == []
    assert backwards(calls)[:2] == [KEPT, KEPT]


def test_a_second_derivative_through_a_checkpoint_is_refused() -> None:
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    o = once_more(lambda x: chunk_gated_delta_rule(**x, ctx=ctx)[0], leaves)
    (dq,) = torch.autograd.grad(o.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only; drop create_graph"):
        dq.sum().backward()


def test_saved_tapes_know_which_gates_were_below_their_floor() -> None:
    pack = make_pack(Content(pack="several chunks", heads=(1, 2), head_dims=(16, 16), gate="one -inf"))
    light, full = (
        region_step(make_context(Comm.alone(), ONE, pack, options=Options(save=save)), pack, "no checkpoint")
        for save in ("light", "full")
    )
    assert differences(full, light) == []
    assert (light["g"][light["g"].isfinite()] == 0).any()


# ---- over ranks ------------------------------------------------------------------------------------------------------

CHOICES: dict[str, dict[str, Any]] = {
    "auto": {},
    "never": {"reuse_recompute_tapes": False, "recompute_output": "always"},
    "asked for": {"reuse_recompute_tapes": True},
    "without maps": {"save_transfer": False},
    "full": {"save": "full"},
    "nothing": {"boundary": "recompute"},
    "nothing, without maps": {"boundary": "recompute", "save_transfer": False},
}


def steps(comm: Comm, exchange: str, choices: Iterable[str] = CHOICES) -> dict[str, tuple[Any, list[Any]]]:
    """Per region and choice what it gave, and its messages."""
    run = Run(world=comm.size, exchange=exchange, segments=2, dtype=torch.float32)
    found = {}
    for choice in choices:
        ctx = context(comm, run, **CHOICES[choice])
        for name in ("no checkpoint", "the op alone", "two in one"):
            with comm.record() as log:
                step = region_step(ctx, PACK, name)
            found[f"{name}, {choice}"] = step, [(m.direction, m.purpose, m.peer, m.numel) for m in log]
    found["two in one, plain"] = plain_step(context(comm, run), PACK, "two in one"), []
    return found


def on_rank(rank: int, world: int, exchange: str) -> Any:
    comm = Comm()
    try:
        return steps(comm, exchange, ("auto", "asked for", "nothing"))
    finally:
        comm.close()


def assert_alike(ranks: list[Any]) -> None:
    for found in ranks:
        plain = {"two in one": found["two in one, plain"][0]}
        for key, (step, messages) in found.items():
            name, choice = key.split(", ", 1)
            assert differences(step, plain.get(name, found["no checkpoint, auto"][0])) == [], key
            if choice in ("never", "asked for", "full"):
                assert messages == found[f"{name}, auto"][1], key


@pytest.mark.parametrize(("world", "exchange"), [(1, "ring"), (2, "a2a"), (4, "ring"), (4, "a2a")])
def test_no_choice_changes_a_bit_and_no_decision_a_message(world: int, exchange: str) -> None:
    assert_alike(twin(world, lambda comm: steps(comm, exchange)))


@pytest.mark.dist
def test_no_choice_changes_a_bit_over_a_process_group() -> None:
    assert_alike(pool.run(2, on_rank, "ring", timeout=120.0))


@pytest.mark.parametrize("choice", CHOICES)
def test_explicit_calls_have_the_bits_of_autograd_and_a_backward_can_be_taken_again(choice: str) -> None:
    ctx = context(**CHOICES[choice])
    want = region_step(ctx, PACK, "no checkpoint")
    leaves = {name: x.detach() for name, x in local_inputs(ctx, PACK).items()}
    o, _, saved = forward(**leaves, ctx=ctx, use_qk_l2norm_in_kernel=True)
    for _ in range(2):
        grads = backward(local_gradients(ctx, PACK)[0], None, saved, ctx=ctx)
        assert differences({"o": o, **{name: getattr(grads, name) for name in leaves}}, want) == []
