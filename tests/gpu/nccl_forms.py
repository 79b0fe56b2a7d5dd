"""Save forms and checkpoint forms on several ranks: each against the plain step of the same rank, bits and messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cp_gdn
from cp_gdn import Comm, Context, RecomputeHandle
from tests.gpu.nccl_cases import (
    DIMS,
    EXCHANGES,
    INPUTS,
    Case,
    Tensors,
    comms,
    context,
    differences,
    inputs,
    local,
    outputs,
    place,
)

once_more = partial(checkpoint, use_reentrant=False)
Form = Callable[[Context, Tensors], Tensors]
Log = list[tuple[str, str, int, int]]


def finish(mine: Tensors, results: tuple[Tensor, Tensor]) -> Tensors:
    """Gradients by `backward`, which reentrant checkpoints need."""
    for name in INPUTS:
        mine[name].grad = None
    torch.autograd.backward(results, (mine["dout"], mine["dfinal"]))
    o, final = results
    return {"o": o.detach(), "final": final.detach(), **{f"d{n}": mine[n].grad for n in INPUTS}}


def plain(ctx: Context, mine: Tensors) -> Tensors:
    return finish(mine, outputs(ctx, mine))


def checkpointed(ctx: Context, mine: Tensors) -> Tensors:
    return finish(mine, once_more(lambda: outputs(ctx, mine)))


def with_a_handle(ctx: Context, mine: Tensors, *, reentrant: bool) -> Tensors:
    handle = RecomputeHandle()

    def region(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return outputs(ctx, dict(zip(INPUTS, leaves, strict=True)), handle)

    return finish(mine, checkpoint(region, *(mine[n] for n in INPUTS), use_reentrant=reentrant))


def explicit(ctx: Context, mine: Tensors) -> Tensors:
    """The op by `forward` and `backward`, the latter twice; the convolution by autograd."""
    y = cp_gdn.causal_conv1d(mine["x"], mine["weight"], None, ctx=ctx, activation="silu")
    rows = y.detach()
    more = {"initial_state": mine["initial"].detach(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    qkv, gates = cp_gdn.packed_qkv_views(rows, ctx.heads, DIMS), [mine[n].detach() for n in ("g", "beta")]
    o, final, saved = cp_gdn.forward(*qkv, *gates, ctx=ctx, **more)
    first, grads = (cp_gdn.backward(mine["dout"], mine["dfinal"], saved, ctx=ctx) for _ in range(2))
    assert torch.equal(first.q, grads.q)
    dy = torch.cat([x.flatten(1) for x in (grads.q, grads.k, grads.v)], dim=1)
    dx, dweight = torch.autograd.grad(y, [mine["x"], mine["weight"]], dy)
    found = {"o": o, "final": final, "dx": dx, "dweight": dweight}
    return {**found, "dg": grads.g, "dbeta": grads.beta, "dinitial": grads.initial_state}


def own_workspace(ctx: Context, mine: Tensors) -> Tensors:
    room = cp_gdn.Workspace(cp_gdn.workspace_bytes(ctx), ctx.device)
    return finish(mine, outputs(ctx, mine, workspace=room))


SAME, MORE = "as many messages", "the forward's once more"

FORMS: dict[str, tuple[Form, dict[str, Any], str]] = {
    "twice": (plain, {}, SAME),
    "maps not saved": (plain, {"save_transfer": False}, ""),
    "boundary recomputed": (plain, {"boundary": "recompute"}, ""),
    "nothing saved": (plain, {"boundary": "recompute", "save_transfer": False}, ""),
    "explicit": (explicit, {}, ""),
    "own workspace": (own_workspace, {}, SAME),
    "checkpoint": (checkpointed, {}, MORE),
    "checkpoint, tapes asked for": (checkpointed, {"reuse_recompute_tapes": True}, MORE),
    "checkpoint, tapes run again": (checkpointed, {"reuse_recompute_tapes": False}, MORE),
    "checkpoint, o written": (checkpointed, {"recompute_output": "always"}, MORE),
    "checkpoint, boundary recomputed": (checkpointed, {"boundary": "recompute"}, ""),
    "checkpoint, maps not saved": (checkpointed, {"save_transfer": False}, ""),
    "handle": (partial(with_a_handle, reentrant=False), {}, SAME),
    "handle, reentrant": (partial(with_a_handle, reentrant=True), {}, SAME),
    "handle, tapes asked for": (partial(with_a_handle, reentrant=False), {"reuse_recompute_tapes": True}, SAME),
    "full": (plain, {"save": "full"}, SAME),
    "checkpoint, full": (checkpointed, {"save": "full"}, MORE),
}
"""Per name: how, with which options, and what is asserted of its messages."""
TORCH_ONLY = ("full", "checkpoint, full")
"""The kernels keep no tapes."""


def listed(comm: Comm, form: Form, ctx: Context, mine: Tensors) -> tuple[Tensors, Log]:
    with comm.record() as log:
        found = form(ctx, mine)
    return found, [(m.direction, m.purpose, m.peer, m.numel) for m in log]


def compare_forms(rank: int, _world: int, kind: str, case: Case) -> dict[str, list[str]]:
    """Per form and exchange the tensors that differ from the plain step, and "messages" if those do."""
    device, found = place(rank, kind), {}
    whole = inputs(case, device)
    with comms() as (comm,):
        for exchange in EXCHANGES:
            asked = Case(**{**vars(case), "exchange": exchange})
            ctx = context(comm, asked, device)
            want, messages = listed(comm, plain, ctx, local(ctx, whole))
            forward = [m for m in messages if not m[1].startswith(("ADJOINT", "HALO_GRAD"))]
            lists = {SAME: sorted(messages), MORE: sorted(messages + forward)}
            for name, (form, options, says) in FORMS.items():
                if name in TORCH_ONLY and case.backend == "hopper":
                    continue
                ctx = context(comm, asked, device, **options)
                got, log = listed(comm, form, ctx, local(ctx, whole))
                wrong = differences(got, want)
                found[f"{name}, {exchange}"] = wrong + ["messages"] * (bool(says) and sorted(log) != lists[says])
    return found


# ---- a layer, whose checkpoint makes its own handle ------------------------------------------------------------------

HIDDEN = 256


def layer_form(
    layer: Any, rows: tuple[Tensor, Tensor], call: Callable[..., Tensor], ctx: Context, _mine: Tensors
) -> Tensors:
    x, dy = rows[0].detach().requires_grad_(), rows[1]
    y = call(layer, x, ctx)
    named = dict(layer.named_parameters())
    dx, *grads = torch.autograd.grad(y, [x, *named.values()], dy)
    return {"y": y.detach(), "dx": dx, **dict(zip(named, grads, strict=True))}


def compare_layers(rank: int, _world: int, kind: str, case: Case) -> dict[str, list[str]]:
    """A layer in a checkpoint, and two in one, against the same without: bits, and as many messages."""
    device, found = place(rank, kind), {}
    torch.manual_seed(0)
    layer = cp_gdn.GatedDeltaNet(HIDDEN, heads=case.heads, head_dims=DIMS).to(device, case.dtype)
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    gen = torch.Generator(device).manual_seed(1)
    x, dy = torch.randn(2, 1, sum(case.lengths), HIDDEN, generator=gen, device=device).to(case.dtype)
    regions: dict[str, Callable[..., Tensor]] = {
        "one": lambda layer, x, ctx: layer(x, ctx),
        "two": lambda layer, x, ctx: layer(layer(x, ctx), ctx),
    }
    with comms() as (comm,):
        for exchange in EXCHANGES:
            ctx = context(comm, Case(**{**vars(case), "exchange": exchange}), device)
            mine = x[:, ctx.token_ids], dy[:, ctx.token_ids]
            for name, region in regions.items():
                calls = region, partial(once_more, region)
                steps = [partial(layer_form, layer, mine, call) for call in calls]
                (want, messages), (got, log) = (listed(comm, step, ctx, {}) for step in steps)
                found[f"{name}, {exchange}"] = differences(got, want) + ["messages"] * (messages != log)
    return found
