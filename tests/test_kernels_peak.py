"""The kernels' host side allocates what the queries say and nothing beside: a step's peak on the CPU, to the byte.

The kernels run from their own sources (`tests/kernel_host.py`), and torch's profiler lists every allocation.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.nn import functional as F

import cp_gdn
from cp_gdn import Comm, Context, Options, build_context, partition
from tests.kernel_host import host_kernels

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
torch.set_num_threads(1)

EARLY = ("offsets", "dropped")
"""Buffers that a backward has let go of when it takes its slab."""
CASES = [  # options, segments, l2norm
    (Options(), 3, True),
    (Options(save="light"), 3, False),
    (Options(save="light", save_transfer=False), 1, True),
    (Options(boundary="recompute"), 3, False),
    (Options(save="full"), 3, False),
]


def allocations(events: Any) -> list[tuple[int, int]]:
    """When, and how many bytes (less than none where they are freed)."""
    found = []
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            found.append((event.start_time_ns, event.typed[1].alloc_size))
        found += allocations(event.children)
    return found


def during(call: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """What a call gives; the bytes left after it, and the most that were there while it ran."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = call()
    now = most = 0
    for _, size in sorted(allocations(profile.profiler.kineto_results.experimental_event_tree())):
        now += size
        most = max(most, now)
    return found, (now, most)


def inputs(tokens: int) -> tuple[list[Tensor], Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(tokens, 1, 128, generator=gen), dim=-1).bfloat16() for _ in range(2))
    v, dout = (torch.randn(tokens, 2, 128, generator=gen).bfloat16() for _ in range(2))
    g, beta = -1e-3 * torch.rand(tokens, 2, generator=gen), torch.rand(tokens, 2, generator=gen)
    return [x.requires_grad_() for x in (q, k, v, g, beta)], dout


def test_a_forward_that_nobody_keeps_leaves_no_node() -> None:
    """No output is a tensor that the context holds, which autograd would tie to the node and all that it saved."""
    leaves, _ = inputs(130)
    with host_kernels():
        part = partition([0, 130], 1, "contiguous")
        ctx = build_context(part, Comm.alone(), heads=(1, 2), segments=2)
        cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "_GatedDeltaRuleBackward"]


def step(ctx: Context, l2norm: bool, workspace: cp_gdn.Workspace | None) -> list[tuple[int, int]]:
    leaves, dout = inputs(ctx.num_tokens)

    def forward() -> Tensor:
        how = {"use_qk_l2norm_in_kernel": l2norm, "workspace": workspace}
        return cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx, **how)[0]

    torch.autograd.grad(forward(), leaves, dout)  # takes what is made once, and lets go of a profiled graph before it
    o, of_forward = during(forward)
    _, of_backward = during(lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True))
    return [of_forward, of_backward]


@pytest.mark.parametrize(("options", "segments", "l2norm"), CASES, ids=str)
def test_a_step_allocates_what_the_queries_say_and_nothing_beside(
    options: Options, segments: int, l2norm: bool
) -> None:
    with host_kernels():
        part = partition([0, 130, 130, 194], 1, "contiguous")
        ctx = build_context(part, Comm.alone(), heads=(1, 2), segments=segments, options=options)
        saved = cp_gdn.saved_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
        handed = cp_gdn.handoff_bytes(ctx, use_qk_l2norm_in_kernel=l2norm)
        layout = cp_gdn.workspace_layout(ctx, tapes="kept" if saved["tapes"] else "rerun", document_states=False)
        after, gradients = handed["o"] + sum(saved.values()) - saved["inputs"], handed["gradients"]
        forward = sum(each.nbytes for each in layout.forward)
        backward = sum(each.nbytes for each in layout.backward if each.name not in EARLY)
        own = step(ctx, l2norm, None)
        assert own == [(after, after + forward), (gradients, gradients + backward)]
        room = cp_gdn.Workspace(cp_gdn.workspace_bytes(ctx, document_states=False))
        assert step(ctx, l2norm, room) == [(after, after), (gradients, gradients)]
