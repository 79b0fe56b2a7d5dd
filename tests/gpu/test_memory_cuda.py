"""Memory and synchronization of whole steps on a GPU: what the allocator counts is what the queries say, to the byte.

Counted are the bytes that were asked for (`requested_bytes`): what the allocator hands out is each rounded up to 512,
and of a block that is used again up to 1 MiB more.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, Context, Options, twin
from cp_gdn.workspace import Layout, workspace_layout
from tests.gpu.op_cases import NAMES, context, inputs
from tests.gpu.queued import behind_work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BACKENDS = ["torch", pytest.param("hopper", marks=hopper)]
LENGTHS = (1500, 0, 64, 5, 700)
BOUNDS = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
EARLY = ("offsets", "dropped")
"""Buffers that a backward has let go of when it takes its slab."""


def settled() -> None:
    """Wait for the device, and let autograd's thread have the interpreter, without which it cannot free a gradient that
    it held last."""
    torch.cuda.synchronize()
    time.sleep(0.01)


def requested() -> int:
    """Bytes of all live tensors, as they were asked for."""
    gc.collect()
    settled()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def during(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a call gives, the bytes that are left after it, and the most that were there while it ran."""
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    found = call()
    settled()
    stats = torch.cuda.memory_stats()
    return found, stats["requested_bytes.all.current"] - before, stats["requested_bytes.all.peak"] - before


def leaves_of(ctx: Context) -> tuple[list[Tensor], Tensor]:
    x = inputs(LENGTHS, "slow", 3)
    return [x[name][ctx.token_ids].requires_grad_() for name in NAMES], x["dout"][ctx.token_ids]


def context_of(comm: Comm, backend: str, **asked: Any) -> Context:
    return context(comm, inputs(LENGTHS, "slow", 3), BOUNDS, "contiguous", backend=backend, **asked)


def step_bytes(ctx: Context, **call: Any) -> dict[str, tuple[int, int]]:
    """Bytes left after, and at the peak of, a forward and a backward; the first step is not measured."""
    leaves, dout = leaves_of(ctx)

    def forward() -> Tensor:
        return cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx, **call)[0]

    torch.autograd.grad(forward(), leaves, dout)
    o, *after_forward = during(forward)
    grads, *after_backward = during(lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True))
    assert len(grads) == len(leaves)
    return {"forward": tuple(after_forward), "backward": tuple(after_backward)}  # type: ignore[dict-item]


def held(layout: Layout, phase: str) -> int:
    """Bytes of a phase's buffers that are there at its peak, where they are allocated one by one."""
    return sum(b.nbytes for b in layout.phase(phase) if phase == "forward" or b.name not in EARLY)


OPTIONS = [
    Options(),
    Options(save="light"),
    Options(save="full"),
    Options(save="light", save_transfer=False),
    Options(save="light", decay_cutoff=None),
    Options(boundary="recompute"),
    Options(boundary="recompute", save_transfer=False),
]


@hopper
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_on_the_kernels_takes_the_bytes_that_the_queries_say(
    options: Options, segments: int, l2norm: bool
) -> None:
    """Own memory: buffers one by one. The caller's: nothing but what is handed out."""
    ctx = context_of(Comm.alone(), "hopper", segments=segments, options=options)
    saved = cp_gdn.saved_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    handed = cp_gdn.handoff_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    form = "kept" if saved["tapes"] else "rerun"
    layout = workspace_layout(ctx, tapes=form, document_states=False)
    left = handed["o"] + sum(saved.values()) - saved["inputs"]
    own = step_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    assert own["forward"] == (left, left + held(layout, "forward"))
    assert own["backward"] == (handed["gradients"], handed["gradients"] + held(layout, "backward"))

    size = cp_gdn.workspace_bytes(ctx, document_states=False)
    room, taken, _ = during(lambda: cp_gdn.Workspace(size, "cuda"))
    assert taken == size
    given = step_bytes(ctx, use_qk_l2norm_in_kernel=l2norm, workspace=room)
    assert given == {"forward": (left, left), "backward": (handed["gradients"],) * 2}
    assert room.bound == {phase: layout.nbytes(phase) for phase in ("forward", "backward")}


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_forward_in_torch_leaves_the_bytes_that_the_queries_say(
    options: Options, segments: int, l2norm: bool
) -> None:
    ctx = context_of(Comm.alone(), "torch", segments=segments, options=options)
    saved = cp_gdn.saved_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    handed = cp_gdn.handoff_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    found = step_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
    assert found["forward"][0] == handed["o"] + sum(saved.values()) - saved["inputs"]
    assert found["backward"][0] == handed["gradients"]


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_stays_when_tensors_and_context_are_gone(backend: str, states: bool) -> None:
    def once() -> None:
        ctx = context_of(Comm.alone(), backend, segments=4, conv=(64, 4))
        leaves, dout = leaves_of(ctx)
        initial = torch.zeros(len(ctx.entry_docs), 6, 128, 128, device="cuda", requires_grad=True) if states else None
        o, end = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx, initial_state=initial, output_final_state=states)
        loss = (o * dout).sum() if end is None else (o * dout).sum() + end.sum()
        loss.backward()

    once()  # libraries and kernels take what they keep
    before = requested(), torch.cuda.memory_allocated()
    for _ in range(3):
        once()
    assert (requested(), torch.cuda.memory_allocated()) == before


def test_an_error_between_forward_and_backward_leaves_nothing() -> None:
    ctx = context_of(Comm.alone(), BACKENDS[0], segments=4)
    leaves, dout = leaves_of(ctx)
    torch.autograd.grad(cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0], leaves, dout)
    before = requested()
    o, _ = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(o, leaves, dout[:3])
    del o
    assert requested() == before


# ---- synchronization -------------------------------------------------------------------------------------------------


@contextmanager
def no_synchronizing() -> Iterator[None]:
    """A call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def whole_step(backend: str, bounds: list[int], layer: cp_gdn.GatedDeltaNet, x: Tensor) -> list[Tensor]:
    """A context of a pack, then forward and backward of a layer under it."""
    part = cp_gdn.partition(bounds, 1)
    asked = {"heads": layer.heads, "conv": layer.conv, "segments": 3, "backend": backend}
    ctx = cp_gdn.build_context(part, Comm.alone(), device="cuda", **asked)  # type: ignore[arg-type]
    x = x[:, : bounds[-1]].detach().requires_grad_()
    y = layer(x, ctx)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fresh_context_forward_and_backward_run_behind_queued_work_without_synchronizing(backend: str) -> None:
    torch.manual_seed(0)
    layer = cp_gdn.GatedDeltaNet(256, heads=(2, 6), head_dims=(128, 128)).cuda().bfloat16()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    x = torch.randn(1, 2300, 256, device="cuda").bfloat16()
    for tokens in (2300, 2200):  # what is made once, and memory of the sizes that follow
        whole_step(backend, [0, 1500, tokens], layer, x)
    want = whole_step(backend, [0, 64, 700, 2250], layer, x)

    def step() -> list[Tensor]:
        with no_synchronizing():
            return whole_step(backend, [0, 64, 700, 2250], layer, x)

    # the torch form has more launches than the driver queues, so that the host waits for room: no call synchronizes
    got = behind_work(step) if backend == "hopper" else step()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_call_synchronizes_nothing_and_leaves_the_mode_and_the_context_as_they_were(backend: str) -> None:
    ctx = context_of(Comm.alone(), backend, segments=2)
    leaves, dout = leaves_of(ctx)
    want = torch.autograd.grad(cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0], leaves, dout)
    with no_synchronizing():
        with pytest.raises(ValueError, match="v: got shape"):
            cp_gdn.chunk_gated_delta_rule(*leaves[:2], leaves[2][:3], *leaves[3:], ctx=ctx)
        with pytest.raises(RuntimeError, match="synchroniz"):
            leaves[3].sum().item()
        assert torch.cuda.get_sync_debug_mode() == 2
        got = torch.autograd.grad(cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0], leaves, dout)
    assert torch.cuda.get_sync_debug_mode() == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_ends_the_others_without_a_synchronizing_call(backend: str) -> None:
    seen, here = [], threading.Barrier(2)

    def rank(comm: Comm, fails: bool) -> None:
        part = cp_gdn.partition([0, 2000], comm.size, "zigzag")
        asked = {"heads": (2, 6), "segments": 2, "backend": backend}
        ctx = cp_gdn.build_context(part, comm, device="cuda", **asked)  # type: ignore[arg-type]
        x = inputs((2000,), "slow", 3)
        leaves = [x[name][ctx.token_ids].requires_grad_() for name in NAMES]
        if fails and here.wait() == 0:
            torch.cuda.set_sync_debug_mode("error")  # of the whole process
        o, _ = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)
        if fails and comm.rank == 1:
            raise ArithmeticError("rank 1 gives up")
        try:
            torch.autograd.grad(o, leaves, x["dout"][ctx.token_ids])
        except cp_gdn.CommFailed as error:
            seen.append(str(error))
            raise

    twin(2, lambda comm: rank(comm, False))
    try:
        with pytest.raises(ArithmeticError, match="rank 1 gives up"):
            twin(2, lambda comm: rank(comm, True))
        assert torch.cuda.get_sync_debug_mode() == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 1
    assert "rank 1 gives up" in seen[0]
    twin(2, lambda comm: rank(comm, False))
