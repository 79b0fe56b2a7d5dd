"""One small step of the op on the kernels, for compute-sanitizer: python -m tests.gpu.sanitize NAME"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import cp_gdn


@dataclass(frozen=True, kw_only=True)
class Step:
    """Lengths of documents, (H, HV), P, raw q and k, and whether they and v are views into packed rows."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    segments: int = 1
    raw: bool = False
    packed: bool = False


STEPS = {
    "ragged": Step(lengths=(70, 5, 64, 1, 130), heads=(2, 6)),
    "segments": Step(lengths=(330, 70), heads=(1, 3), segments=3),
    "packed": Step(lengths=(66, 130), heads=(1, 4), segments=2, raw=True, packed=True),
    "many": Step(lengths=tuple(1 + i % 4 for i in range(60)), heads=(1, 2)),
}


def run(step: Step) -> bool:
    """Forward and backward with initial and final states; whether every result is finite."""
    gen, tokens, (heads, value_heads) = torch.Generator().manual_seed(0), sum(step.lengths), step.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    keys, values = F.normalize(normal(tokens, 2 * heads, 128), dim=-1).flatten(1), normal(tokens, value_heads * 128)
    views = cp_gdn.packed_qkv_views(torch.cat([keys, values], 1).bfloat16().cuda(), step.heads, (128, 128))
    q, k, v = (view if step.packed else view.clone() for view in views)
    g, beta = (-F.softplus(normal(tokens, value_heads) - 3)).cuda(), normal(tokens, value_heads).sigmoid().cuda()
    states = [normal(len(step.lengths), value_heads, 128, 128).cuda() for _ in range(2)]
    part = cp_gdn.partition([0, *itertools.accumulate(step.lengths)], 1, "contiguous")
    asked = {"device": "cuda", "heads": step.heads, "backend": "hopper", "segments": step.segments}
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked)  # type: ignore[arg-type]
    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    how = {"initial_state": states[0].requires_grad_(), "output_final_state": True}
    o, final = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx, use_qk_l2norm_in_kernel=step.raw, **how)  # type: ignore
    grads = torch.autograd.grad([o, final], [*leaves, states[0]], [normal(*o.shape).bfloat16().cuda(), states[1]])
    return all(bool(t.cpu().isfinite().all()) for t in (o, final, *grads))  # torch's own kernels stay out of it


if __name__ == "__main__":
    finite = run(STEPS[sys.argv[1]])
    print(f"step done: {sys.argv[1]}, finite: {finite}")
    raise SystemExit(0 if finite else 1)
