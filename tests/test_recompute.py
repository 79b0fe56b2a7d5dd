"""What a call decides in a checkpoint's recompute and why; whatever it decides, bits and messages are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from cp_gdn import Context, chunk_gated_delta_rule, recompute
from tests.pack import differences, local_inputs
from tests.regions import (
    AROUND,
    KEPT,
    PACK,
    Leaves,
    backwards,
    context,
    once_more,
    plain_step,
    recomputes,
    region_step,
    rerun,
    watch_calls,
)

THE_USERS = "saved-tensor hooks of the user's are on top"

# Per region what the backward of each call decided, the last call first.
BACKWARDS: dict[str, list[tuple[str, str, str, str]]] = {
    "no checkpoint": [rerun(recompute.NO_CHECKPOINT)],
    "the op alone": [KEPT],
    "a sum after it": [KEPT],
    "a projection before it": [KEPT],
    "a saver after it": [rerun("the region saves 1 tensors after this call")],
    "early stop off": [rerun("early stop is off, so the recompute runs on")],
    "hooks inside": [rerun(THE_USERS)],
    "offload outside": [KEPT],
    "reentrant": [rerun(recompute.NO_CHECKPOINT)],
    "nested": [KEPT],
    "two in one": [KEPT, rerun("the region saves 7 tensors after this call")],
    "three in one": [KEPT, *(rerun(f"the region saves {n} tensors after this call") for n in (7, 14))],
    "gradient inside": [rerun("a backward inside of the region"), KEPT],
    "selective": [rerun(recompute.OPERATOR)],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`last_call` after every call of the op."""
    return watch_calls(monkeypatch)


# ---- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AROUND)
def test_every_region_has_the_bits_of_a_plain_one_and_says_what_it_decided(
    name: str, calls: list[dict[str, Any]]
) -> None:
    ctx = context()
    want = plain_step(ctx, PACK, name)
    calls.clear()
    assert differences(region_step(ctx, PACK, name), want) == []
    assert backwards(calls) == BACKWARDS[name]


def test_a_recompute_says_what_it_decides_before_the_backward_does(calls: list[dict[str, Any]]) -> None:
    region_step(context(), PACK, "nested")
    made_anew = rerun(recompute.ORIGINAL)
    assert recomputes(calls) == [made_anew, made_anew, KEPT]


OPTIONS: dict[str, tuple[str, dict[str, Any], list[tuple[str, str, str, str]]]] = {
    "never": (
        "the op alone",
        {"reuse_recompute_tapes": False},
        [("rerun", "Options(reuse_recompute_tapes=False)", "left out", recompute.PROVEN)],
    ),
    "output always": (
        "the op alone",
        {"recompute_output": "always"},
        [("kept", recompute.PROVEN, "written", "Options(recompute_output='always')")],
    ),
    "full": ("the op alone", {"save": "full"}, [("saved", "Options(save='full')", "left out", recompute.PROVEN)]),
    "full, no checkpoint": (
        "no checkpoint",
        {"save": "full"},
        [("saved", "Options(save='full')", "written", recompute.NO_CHECKPOINT)],
    ),
    "full, operator": (
        "selective",
        {"save": "full"},
        [("saved", "Options(save='full')", "written", recompute.OPERATOR)],
    ),
    "nothing": (
        "the op alone",
        {"boundary": "recompute"},
        [("rerun", "Options(boundary='recompute')", "left out", recompute.PROVEN)],
    ),
    "nothing, operator": (
        "selective",
        {"boundary": "recompute"},
        [("rerun", "Options(boundary='recompute')", "written", recompute.OPERATOR)],
    ),
    "asked for, before a saver": (
        "a saver after it",
        {"reuse_recompute_tapes": True},
        [("kept", "Options(reuse_recompute_tapes=True)", "written", "the region saves 1 tensors after this call")],
    ),
    "asked for, without early stop": (
        "early stop off",
        {"reuse_recompute_tapes": True},
        [("kept", "Options(reuse_recompute_tapes=True)", "written", "early stop is off, so the recompute runs on")],
    ),
    "asked for, backward inside": (
        "gradient inside",
        {"reuse_recompute_tapes": True},
        [
            ("kept", "Options(reuse_recompute_tapes=True)", "written", "a backward inside of the region"),
            ("kept", "Options(reuse_recompute_tapes=True)", "left out", recompute.PROVEN),
        ],
    ),
    "asked for, reentrant": ("reentrant", {"reuse_recompute_tapes": True}, [rerun(recompute.NO_CHECKPOINT)]),
    "asked for, two": (
        "two in one",
        {"reuse_recompute_tapes": True},
        [
            ("kept", "Options(reuse_recompute_tapes=True)", "left out", recompute.PROVEN),
            ("rerun", recompute.ANOTHERS, "written", "the region saves 7 tensors after this call"),
        ],
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_has_the_same_bits_and_gives_its_reason(case: str, calls: list[dict[str, Any]]) -> None:
    name, options, expected = OPTIONS[case]
    want = plain_step(context(), PACK, name)
    calls.clear()
    assert differences(region_step(context(**options), PACK, name), want) == []
    assert backwards(calls) == expected


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives torch another version; it is read once."""

    def name(version: str) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        recompute.release.cache_clear()

    yield name
    monkeypatch.undo()
    recompute.release.cache_clear()


def test_a_release_that_was_not_verified_takes_the_safe_path(
    named: Callable[[str], None], calls: list[dict[str, Any]]
) -> None:
    named("2.13.0a0+cpu")
    region_step(context(reuse_recompute_tapes=True), PACK, "the op alone")
    why = f"torch 2.13.0a0 is none of the verified releases {', '.join(recompute.VERIFIED)}"
    assert backwards(calls) == [rerun(why)]


def test_this_release_is_verified_whatever_its_local_tag(named: Callable[[str], None]) -> None:
    assert recompute.release() in recompute.VERIFIED
    named(f"{recompute.release()}+cu999")
    assert recompute.find_region() == recompute.NO_CHECKPOINT


def test_a_capture_keeps_no_tapes_and_refuses_to_be_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(recompute, "is_capturing", lambda device: True)
    region_step(context(), PACK, "the op alone")
    assert backwards(calls) == [("rerun", recompute.CAPTURED, "left out", recompute.PROVEN)]
    with pytest.raises(RuntimeError, match=r"while a CUDA graph is being captured.*use 'auto' or False"):
        region_step(context(reuse_recompute_tapes=True), PACK, "the op alone")


def two_branches(ctx: Context, leaves: Leaves, x: Tensor) -> tuple[Tensor, Tensor]:
    """A region with the op on one branch and a sine of x on the other; the op saves last."""

    def region(x: Tensor, leaves: Leaves) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, chunk_gated_delta_rule(**leaves, ctx=ctx)[0]

    return once_more(region, x, leaves)


def test_a_backward_that_does_not_reach_the_call_keeps_nothing(calls: list[dict[str, Any]]) -> None:
    for options in ({}, {"reuse_recompute_tapes": True}):
        ctx = context(**options)
        x = torch.ones(3, requires_grad=True)
        y, _ = two_branches(ctx, local_inputs(ctx, PACK), x)
        calls.clear()
        y.sum().backward()
        why = "this backward does not reach the call"
        assert recomputes(calls) == [rerun(why)]


def test_backwards_that_share_one_recompute_keep_nothing(calls: list[dict[str, Any]]) -> None:
    ctx = context()
    leaves, x = local_inputs(ctx, PACK), torch.ones(3, requires_grad=True)
    y, o = two_branches(ctx, leaves, x)
    calls.clear()
    with GraphExecGroup():
        y.sum().backward()
        o.sum().backward()
    assert backwards(calls) == [rerun("the recompute belongs to no single backward")]
    want = local_inputs(ctx, PACK)
    chunk_gated_delta_rule(**want, ctx=ctx)[0].sum().backward()
    assert all(torch.equal(leaves[name].grad, want[name].grad) for name in want)


def test_a_call_without_gradients_decides_nothing(calls: list[dict[str, Any]]) -> None:
    ctx = context()
    leaves = {name: x.detach() for name, x in local_inputs(ctx, PACK).items()}
    x = torch.ones(3, requires_grad=True)
    y, _ = two_branches(ctx, leaves, x)
    y.sum().backward()
    assert recomputes(calls) == [rerun(recompute.NO_GRADIENT)] * len(calls)
