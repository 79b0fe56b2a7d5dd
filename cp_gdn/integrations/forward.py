"""The forward of a taken-over layer, over this rank's tokens of the pack on its seat.

Gates and the output gate are rounded where the original rounds them, so that a model is the same model on every number
of ranks. Legend: B rows, S local tokens of a row, T = B S, HV value heads, V their channels.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_gdn.context import Context
from cp_gdn.conv import causal_conv1d
from cp_gdn.entries import chunk_gated_delta_rule
from cp_gdn.gates import sigmoid, softplus
from cp_gdn.handles import handle_here
from cp_gdn.integrations.families import Family, Projections, conv_parameters, layer_shape, whole
from cp_gdn.integrations.pack import Pack
from cp_gdn.integrations.seat import Seat
from cp_gdn.packing import packed_qkv_views

CACHES = ("cache", "cache_params", "past_key_values", "past_key_value")
BOUNDS = ("cu_seq_lens_q", "cu_seqlens")


def run_layer(layer: Any, family: Family, seat: Seat, call: dict[str, Any]) -> Any:
    """A layer's forward on ``call``, its arguments by name; returns what the original does.

    Raises:
        RuntimeError, ValueError, NotImplementedError: no batch is sharded, or the call does not fit it; nothing was
            sent.
    """
    hidden = call["hidden_states"]
    pack = seat.pack_for(hidden)
    with seat.comm.guard(f"{type(layer).__name__}.forward"):
        refuse_cache(call)
        mask = _checked_mask(call.get("attention_mask"), hidden)
        _check_bounds(call, pack)
        y = _mix(layer, family, seat, pack, _projected(layer, family, hidden, mask))
        if mask is not None and family.drops_padding:
            y = _masked(y, mask)
        return (y, None, None) if family.returns_tuple else y


def refuse_cache(call: dict[str, Any]) -> None:
    """Refuse to decode: a cache holds states of whole sequences."""
    given = [name for name in CACHES if call.get(name) is not None]
    if given or call.get("use_cache"):
        raise NotImplementedError(
            f"cp_gdn: got {given[0] if given else 'use_cache=True'}, but decoding with a cache does not run on sharded "
            "sequences; pass use_cache=False to train, or generate inside `with cp_gdn.unsharded(model)`"
        )


def _projected(layer: Any, family: Family, hidden: Tensor, mask: Tensor | None) -> Projections:
    """The projections of the hidden states [B, S, hidden] without their padding."""
    x = family.project(layer, hidden if mask is None else _masked(hidden, mask))
    if mask is None or not family.drops_padding:
        return x
    # Leave no trace where biases make something of zeros either: no history, and beta = 0 writes nothing to the state.
    return replace(x, qkv=_masked(x.qkv, mask), b=x.b.masked_fill(mask[:, :, None] == 0, -torch.inf))


def _mix(layer: Any, family: Family, seat: Seat, pack: Pack, x: Projections) -> Tensor:
    """From the projections to the output [B, S, hidden]."""
    ctx = seat.context_for(pack, layer_shape(layer, family, x.qkv.dtype))
    weight, bias = conv_parameters(layer, family)
    handle = handle_here(ctx)
    qkv = causal_conv1d(_packed(x.qkv), weight, bias, ctx=ctx, activation="silu", recompute=handle)
    q, k, v = packed_qkv_views(qkv, ctx.heads, ctx.head_dims)
    g, beta = _gates(layer, family, x, ctx)
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, ctx=ctx, use_qk_l2norm_in_kernel=True, recompute=handle)
    heads = o.flatten(0, 2)
    norm = getattr(layer, family.norm)
    normed = norm(heads) if x.z is None else norm(heads, x.z.reshape(heads.shape))
    y: Tensor = getattr(layer, family.out)(normed.view(*x.b.shape[:2], ctx.heads[1] * ctx.head_dims[1]))
    return _same_pack(y, pack)


def _gates(layer: Any, family: Family, x: Projections, ctx: Context) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), fp32 or fp64, and beta in the original's dtype; [1, T, HV]."""
    wide = ctx.state_dtype
    a_log, dt_bias = (whole(getattr(layer, name), name).to(wide) for name in ("A_log", "dt_bias"))
    g = -torch.exp(a_log) * softplus(x.a.to(wide) + dt_bias)
    beta = sigmoid(x.b.to(wide) if family.wide_beta else x.b)
    if getattr(layer, "allow_neg_eigval", False):
        beta = 2.0 * beta
    return _packed(g), _packed(beta if beta.dtype in (wide, ctx.dtype) else beta.to(wide))


def _packed(x: Tensor) -> Tensor:
    """[B, S, ..] as [1, T, ..]."""
    return x.flatten(0, 1).unsqueeze(0)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[:, :, None]).to(x.dtype)


def _checked_mask(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    if mask is not None and mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}, expected {list(hidden.shape[:2])}, the padding mask of "
            "this rank's tokens; shard it as input_ids are sharded"
        )
    return mask


def _check_bounds(call: dict[str, Any], pack: Pack) -> None:
    """Boundaries that a collator gave must be those that the pack was cut by."""
    given = next((call[name] for name in BOUNDS if call.get(name) is not None), None)
    # Once per tensor: reading it makes the host wait for the device.
    if given is None or torch.compiler.is_compiling() or any(given is seen for seen in pack.checked_bounds):
        return
    bounds = tuple(given.tolist())
    if bounds != pack.partition.doc_bounds[: len(bounds)]:
        raise ValueError(
            f"cu_seq_lens_q: got {_shown(bounds)}, expected the global boundaries that the batch was sharded by, "
            f"{_shown(pack.partition.doc_bounds)}; give the same ones to shard and to the model, or leave them out"
        )
    pack.checked_bounds[:] = [given]


def _shown(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:8]))}, .. {bounds[-1]}]"


# ---- recompute -------------------------------------------------------------------------------------------------------


def _same_pack(y: Tensor, pack: Pack) -> Tensor:
    if torch.compiler.is_compiling() or not y.requires_grad:
        return y
    checked: Tensor = _SamePack.apply(y, torch.tensor(id(pack)), pack)
    return checked


class _SamePack(torch.autograd.Function):
    """Identity whose backward refuses tensors that a checkpoint recomputed under another pack than the forward's.

    The stamp is saved as a tensor, so a recompute replaces it by its own; the pack is kept with the first forward.
    """

    @staticmethod
    def forward(fctx: Any, y: Tensor, stamp: Tensor, pack: Pack) -> Tensor:
        fctx.save_for_backward(stamp)
        fctx.pack = pack
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(fctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (stamp,) = fctx.saved_tensors
        if int(stamp) != id(fctx.pack):
            raise RuntimeError(
                "cp_gdn: an activation checkpoint recomputed its forward after another batch had been sharded; call "
                "backward on a batch before you shard the next one"
            )
        return dy, None, None
