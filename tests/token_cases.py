"""Packs, layouts and a bare context for what moves or mixes tokens: sharding, halo, convolution."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from cp_gdn.conv import causal_conv1d
from cp_gdn.halo import Halo, build_halo
from cp_gdn.layout import Partition, partition
from cp_gdn.page import Page

PACKS = {
    "ragged": (7, 1, 5, 11, 2),
    "long": (37, 51, 40),
    "five tokens": (5,),
    "six tokens": (6,),
    "as long as the history": (1, 3, 7, 3, 1, 7),
    "empty documents": (0, 4, 0, 3, 0),
    "no tokens": (0,),
}
WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "dealt")


def cut(lengths: Sequence[int], world: int, layout: str) -> Partition:
    """The named layout; "dealt" is explicit: tokens dealt out one by one, each rank's slots in falling order."""
    bounds = [0, *np.cumsum(lengths).tolist()]
    if layout != "dealt":
        return partition(bounds, world, layout)
    tokens = [(doc, offset, 1) for doc, length in enumerate(lengths) for offset in range(length)]
    return partition(bounds, world, fragments=[tokens[rank::world][::-1] for rank in range(world)])


def halo_of(part: Partition, rank: int, width: int) -> Halo:
    """The halo of one rank, on a CPU."""
    page = Page()
    halo = build_halo(part, rank, width, page)
    page.upload(torch.device("cpu"))
    return halo


def bare_context(part: Partition, comm: Any, conv: tuple[int, int] | None = None, dtype: Any = torch.float64) -> Any:
    """What sharding and convolution read of a context."""
    return SimpleNamespace(
        partition=part,
        comm=comm,
        rank=comm.rank,
        world_size=comm.size,
        num_tokens=part.local_tokens(comm.rank),
        token_ids=torch.tensor(part.token_ids(comm.rank)),
        positions=torch.tensor(part.positions(comm.rank)),
        halo=None if conv is None else halo_of(part, comm.rank, conv[1]),
        conv=conv,
        heads=(1, 1),
        head_dims=(16, 16),
        dtype=dtype,
        device=torch.device("cpu"),
    )


def conv_inputs(tokens: int, channels: int, width: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """x and dy [N, C], weight [C, w], bias [C]."""
    generator = torch.Generator().manual_seed(tokens * 100 + width)
    shapes = {"x": (tokens, channels), "dy": (tokens, channels), "weight": (channels, width), "bias": (channels,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def conv_on_rank(
    comm: Any, part: Partition, inputs: dict[str, torch.Tensor], bias: bool = True, activation: str | None = "silu"
) -> dict[str, torch.Tensor]:
    """y, dx (local rows), dweight, dbias (partial sums) of one rank."""
    ctx = bare_context(part, comm, tuple(inputs["weight"].shape), inputs["x"].dtype)  # type: ignore[arg-type]
    x = inputs["x"][ctx.token_ids].requires_grad_()
    weight = inputs["weight"].clone().requires_grad_()
    parameters = [weight, *([inputs["bias"].clone().requires_grad_()] if bias else [])]
    y = causal_conv1d(x[None], weight, parameters[1] if bias else None, ctx=ctx, activation=activation)[0]
    grads = torch.autograd.grad(y, [x, *parameters], inputs["dy"][ctx.token_ids])
    return {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=False))}


def in_global_order(part: Partition, per_rank: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(per_rank)[torch.tensor(part.gather_rows)]


def conv_of_documents(
    lengths: Sequence[int], inputs: dict[str, torch.Tensor], bias: bool, activation: str | None
) -> dict[str, torch.Tensor]:
    """The specification: torch's convolution of one document after the other in fp64."""
    x, weight, b = (inputs[name].double().clone().requires_grad_() for name in ("x", "weight", "bias"))
    channels, width = weight.shape
    ys = []
    for document in x.split(list(lengths)):
        padded = F.pad(document.T[None], (width - 1, 0))
        pre = (
            F.conv1d(padded, weight[:, None], b if bias else None, groups=channels)
            if len(document)
            else padded[..., :0]
        )
        ys.append((F.silu(pre) if activation == "silu" else pre)[0].T)
    y = torch.cat(ys)
    wanted = {"dx": x, "dweight": weight, **({"dbias": b} if bias else {})}
    grads = torch.autograd.grad(
        y, list(wanted.values()), inputs["dy"].double(), allow_unused=True, materialize_grads=True
    )
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
