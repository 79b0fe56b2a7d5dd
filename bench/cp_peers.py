"""What else splits a sequence over ranks: heads instead of tokens by an all-to-all of activations, and FLA's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cp_gdn

Tensors = list[Tensor]
Forward = Callable[..., Tensor]


class ToHeads(torch.autograd.Function):
    """[T, H, D] of this rank's tokens -> [W * T, H / W, D] of this rank's heads; its backward is `ToTokens`."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return to_heads(x)

    @staticmethod
    def backward(_ctx: Any, dy: Tensor) -> Tensor:
        return to_tokens(dy)


class ToTokens(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return to_tokens(x)

    @staticmethod
    def backward(_ctx: Any, dy: Tensor) -> Tensor:
        return to_heads(dy)


def to_heads(x: Tensor) -> Tensor:
    world, (tokens, heads, dim) = dist.get_world_size(), x.shape
    sent = x.view(tokens, world, heads // world, dim).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return got.view(world * tokens, heads // world, dim)


def to_tokens(x: Tensor) -> Tensor:
    world = dist.get_world_size()
    tokens, heads, dim = x.shape[0] // world, *x.shape[1:]
    sent = x.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return got.view(world, tokens, heads, dim).transpose(0, 1).reshape(tokens, world * heads, dim)


def head_parallel(bounds: list[int], heads: tuple[int, int], asked: dict[str, Any]) -> Forward:
    """The op with the whole sequence of H / W and HV / W heads on every rank; takes and gives this rank's tokens, in
    the contiguous layout. One message for q | k | v, one for g | beta, one for o."""
    world = dist.get_world_size()
    own = (heads[0] // world, heads[1] // world)
    ctx = cp_gdn.build_context(cp_gdn.partition(bounds, 1), cp_gdn.Comm.alone(), heads=own, **asked)

    def interleave(rows: Tensors) -> Tensor:
        """Head by head what each rank gets, so that one message takes all."""
        parts = [x.view(len(x), world, x.shape[1] // world, -1).flatten(2) for x in rows]
        return torch.cat(parts, dim=2)

    def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        qkv = ToHeads.apply(interleave([q, k, v])).flatten(1)
        gates = ToHeads.apply(interleave([g, beta])).flatten(1)
        views = cp_gdn.packed_qkv_views(qkv, own, (q.shape[-1], v.shape[-1]))
        o, _ = cp_gdn.chunk_gated_delta_rule(*views, *gates.chunk(2, dim=-1), ctx=ctx)
        return ToTokens.apply(o)

    return forward


def fla(bounds: list[int], device: torch.device) -> Forward | str:
    """flash-linear-attention's own context parallelism on the contiguous layout, or why it is not run."""
    if device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return "not run: the package fla is not importable here, or there is no GPU"
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    whole = torch.tensor(bounds, dtype=torch.int32, device=device)
    context = build_cp_context(whole, group=dist.group.WORLD)

    def forward(*tensors: Tensor) -> Tensor:
        rows = [x[None] for x in tensors]
        o, _ = chunk_gated_delta_rule(*rows, cu_seqlens=context.cu_seqlens, cp_context=context)
        return o[0]

    return forward
