"""Checkpointed regions around calls of the op, and what every call of the op in a step decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from cp_gdn import Comm, Context, Options, chunk_gated_delta_rule, recompute
from tests.cases import Content, Run
from tests.pack import Pack, local_gradients, local_inputs, make_context, make_pack

Leaves = Mapping[str, Tensor]
Rule = Callable[[Leaves], Tensor]
How = Callable[..., Tensor]
Around = Callable[[Rule, Leaves, How], Tensor]

once_more = partial(checkpoint, use_reentrant=False)


def save_the_operator(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.cp_gdn.forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(once_more, context_fn=partial(create_selective_checkpoint_contexts, save_the_operator))


def again(leaves: Leaves, v: Tensor) -> dict[str, Tensor]:
    """Leaves with other values, for a second call."""
    return {**leaves, "v": v}


def plainly(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    """In place of a checkpoint: the region as it is written."""
    return fn(*args)


def own_hooks(rule: Rule, leaves: Leaves) -> Tensor:
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        return rule(leaves)


def offloaded(rule: Rule, leaves: Leaves, how: How) -> Tensor:
    with save_on_cpu():
        return how(rule, leaves)


def gradient_inside(rule: Rule, leaves: Leaves) -> Tensor:
    """The region takes a gradient of its own, for which it is run again before its forward has ended."""
    o = rule(leaves)
    (dv,) = torch.autograd.grad(o.sum(), leaves["v"], retain_graph=True)
    return o + dv.detach()


def reentrant(rule: Rule, leaves: Leaves, _how: How) -> Tensor:
    names = list(leaves)
    return checkpoint(lambda *x: rule(dict(zip(names, x, strict=True))), *leaves.values(), use_reentrant=True)


AROUND: dict[str, Around] = {
    "no checkpoint": lambda rule, x, how: rule(x),
    "the op alone": lambda rule, x, how: how(rule, x),
    "a sum after it": lambda rule, x, how: how(lambda y: y["v"] + rule(y), x),
    "a projection before it": lambda rule, x, how: how(lambda y: rule(again(y, y["v"] * y["v"])), x),
    "a saver after it": lambda rule, x, how: how(lambda y: rule(y).sin(), x),
    "early stop off": lambda rule, x, how: how(rule, x),
    "hooks inside": lambda rule, x, how: how(partial(own_hooks, rule), x),
    "offload outside": offloaded,
    "reentrant": reentrant,
    "nested": lambda rule, x, how: how(lambda y: how(rule, y).sin(), x),
    "two in one": lambda rule, x, how: how(lambda y: rule(again(y, rule(y))), x),
    "three in one": lambda rule, x, how: how(lambda y: rule(again(y, rule(again(y, rule(y))))), x),
    "gradient inside": lambda rule, x, how: how(partial(gradient_inside, rule), x),
    "selective": lambda rule, x, how: selective(rule, x),
}
LIKE_THE_OP = ("the op alone", "early stop off", "hooks inside", "offload outside", "reentrant", "selective")
"""Regions that compute what the op alone does."""


def region_step(ctx: Context, pack: Pack, name: str, how: How = once_more, **call: Any) -> dict[str, Tensor]:
    """Forward and backward of a region, checkpointed as ``how`` does: o, and the gradient of every leaf."""
    leaves = local_inputs(ctx, pack)

    def rule(x: Leaves) -> Tensor:
        return chunk_gated_delta_rule(**x, ctx=ctx, use_qk_l2norm_in_kernel=pack.l2norm, **call)[0]

    stop = set_checkpoint_early_stop(False) if name == "early stop off" else nullcontext()
    with stop:
        o = AROUND[name](rule, leaves, how)
    o.backward(local_gradients(ctx, pack)[0])
    return {"o": o.detach(), **{name: x.grad for name, x in leaves.items()}}


def plain_step(ctx: Context, pack: Pack, name: str) -> dict[str, Tensor]:
    """The same function without a checkpoint."""
    return region_step(ctx, pack, "no checkpoint" if name in LIKE_THE_OP else name, plainly)


# ---- one pack, and what calls on it decided --------------------------------------------------------------------------

PACK = make_pack(Content(pack="several chunks", heads=(1, 2), head_dims=(16, 16), l2norm=True))
ONE = Run(segments=2, dtype=torch.float32)
DECIDED = ("tapes", "tapes_reason", "output", "output_reason")


KEPT = ("kept", recompute.PROVEN, "left out", recompute.PROVEN)


def rerun(why: str) -> tuple[str, str, str, str]:
    return "rerun", why, "written", why


def context(comm: Comm | None = None, run: Run = ONE, **options: Any) -> Context:
    return make_context(comm or Comm.alone(), run, PACK, options=Options(**options))


def watch_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`last_call` after every call of the op from now on."""
    seen: list[dict[str, Any]] = []
    note = Context.note_call

    def watched(self: Context, *args: Any, **decided: Any) -> None:
        note(self, *args, **decided)
        seen.append(dict(self.last_call))

    monkeypatch.setattr(Context, "note_call", watched)
    return seen


def backwards(calls: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [tuple(each[key] for key in DECIDED) for each in calls if each["direction"] == "backward"]


def recomputes(calls: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Decisions of the forwards that ran after the first backward or in it."""
    return [tuple(each[key] for key in DECIDED) for each in calls if each["direction"] == "forward"]
