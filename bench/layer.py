"""Time the parts of a Gated DeltaNet layer around the op on one GPU, and a layer's step with what each part costs.

python bench/layer.py [--out FILE.json] [--commit HASH] [--kernels-only]

Parts: median of 30 calls through autograd beside their floor, the bytes that they must move at the speed of a copy on
the same card. Steps: median of 10 of forward and backward, and the kernels of one step by part, from a profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from record import document, record
from torch import Tensor

import cp_gdn
from cp_gdn import layer_ops
from cp_gdn.backends import hopper_conv, hopper_gates, hopper_norm

TOKENS, HIDDEN, DIM, WIDTH = 65536, 2048, 128, 4
HEADS = ((16, 48), (16, 32))
PARTS = {  # beginnings of kernel names
    "convolution": ("conv",),
    "norm": ("norm_",),
    "gates": ("gates",),
    "sums": ("sums",),
    "op": ("prepare", "walk", "adjoint", "grad", "fold"),
    "projections": ("nvjet", "gemm", "cutlass", "sm90_xmma", "ampere"),
}
Call = Callable[[], object]


def timed(call: Call, repeats: int) -> tuple[float, list[float]]:
    """Median, and least and largest milliseconds."""
    times = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(5_000_000)  # the host is ahead
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return round(statistics.median(times), 4), [round(min(times), 4), round(max(times), 4)]


def copy_speed() -> float:
    """Bytes per millisecond that a copy of 2 GiB reads and writes."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 30)[0]


def context(layer: cp_gdn.GatedDeltaNet) -> cp_gdn.Context:
    return cp_gdn.build_context(
        cp_gdn.partition([0, TOKENS], 1),
        cp_gdn.Comm.alone(),
        device="cuda",
        heads=layer.heads,
        head_dims=layer.head_dims,
        conv=layer.conv,
    )


def make_layer(heads: tuple[int, int]) -> cp_gdn.GatedDeltaNet:
    torch.manual_seed(0)
    layer = cp_gdn.GatedDeltaNet(HIDDEN, heads=heads, head_dims=(DIM, DIM), conv_width=WIDTH).cuda().bfloat16()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    return layer


@contextmanager
def torch_forms() -> Iterator[None]:
    """Everything around the op in its torch form."""
    with (
        mock.patch.object(hopper_conv, "form_for", return_value=hopper_conv.TORCH),
        mock.patch.object(hopper_norm, "kernels_for", return_value=None),
        mock.patch.object(hopper_gates, "kernels_for", return_value=None),
    ):
        yield


Part = tuple[list[Tensor], Callable[..., tuple[Tensor, ...]], tuple[int, int]]
"""Leaves, the call on them, bytes that its forward and its backward must move."""


def parts(layer: cp_gdn.GatedDeltaNet, ctx: cp_gdn.Context) -> dict[str, Part]:
    heads, values = layer.heads[1], layer.heads[1] * DIM
    qkvz = torch.randn(1, TOKENS, layer.conv_channels + values, device="cuda").bfloat16()
    qkv, z = (t.requires_grad_() for t in qkvz.split([layer.conv_channels, values], dim=-1))
    o = torch.randn(1, TOKENS, heads, DIM, device="cuda").bfloat16().requires_grad_()
    ba = torch.randn(1, TOKENS, 2 * heads, device="cuda").bfloat16().requires_grad_()
    row, value_row, head_row = (2 * TOKENS * n for n in (layer.conv_channels, values, 2 * heads))
    return {
        "convolution": (
            [qkv, layer.conv_weight],
            lambda x, w: (cp_gdn.causal_conv1d(x, w, None, ctx=ctx),),
            (2 * row, 3 * row),
        ),
        "norm": (
            [o, z, layer.norm_weight],
            lambda o, z, w: (layer_ops.gated_norm(o, z.unflatten(-1, o.shape[-2:]), w, 1e-6, ctx),),
            (3 * value_row, 5 * value_row),
        ),
        "gates": (
            [ba, layer.A_log, layer.dt_bias],
            lambda ba, a_log, dt_bias: layer_ops.gates(ba, a_log, dt_bias, 1.0, ctx),
            (3 * head_row, 4 * head_row),
        ),
    }


def part_rows(layer: cp_gdn.GatedDeltaNet, ctx: cp_gdn.Context, speed: float) -> Iterator[dict[str, object]]:
    """A row per part and direction."""
    for name, (leaves, call, moved) in parts(layer, ctx).items():
        outputs = call(*leaves)
        grads = [torch.randn_like(y) for y in outputs]
        calls = {
            "forward": lambda call=call, leaves=leaves: call(*leaves),
            "backward": lambda y=outputs, x=leaves, dy=grads: torch.autograd.grad(y, x, dy, retain_graph=True),
        }
        for (direction, run), nbytes in zip(calls.items(), moved, strict=True):
            median, spread = timed(run, 30)
            floor = nbytes / speed
            yield {
                "part": name,
                "direction": direction,
                "ms": median,
                "ms_spread": spread,
                "mib": nbytes >> 20,
                "floor_ms": round(floor, 4),
                "times_floor": round(median / floor, 2),
            }


def part_of(kernel: str) -> str:
    name = kernel.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return next((part for part, starts in PARTS.items() if name.startswith(starts)), "other: " + name[:50])


def shares(step: Call) -> dict[str, float]:
    """Milliseconds of kernels and copies of one step by part, the dearest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            found[part_of(event.key)] += event.self_device_time_total / 1e3
    return {part: round(ms, 3) for part, ms in found.most_common(16)}


def step_row(layer: cp_gdn.GatedDeltaNet, ctx: cp_gdn.Context, forms: str) -> dict[str, object]:
    x = torch.randn(1, TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn_like(x)

    def step() -> object:
        return torch.autograd.grad(layer(x, ctx), [x, *layer.parameters()], dy)

    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    median, spread = timed(step, 10)
    peak = (torch.cuda.max_memory_allocated() - base) >> 20
    return {"step": forms, "ms": median, "ms_spread": spread, "peak_mib": peak, "shares_ms": shares(step)}


def rows(heads: tuple[int, int], speed: float, with_torch: bool) -> Iterator[dict[str, object]]:
    layer = make_layer(heads)
    ctx = context(layer)
    yield from part_rows(layer, ctx, speed)
    yield step_row(layer, ctx, "kernels")
    if not with_torch:
        return
    with torch_forms():
        yield from ({**row, "form": "torch"} for row in part_rows(layer, ctx, speed))
        yield step_row(layer, ctx, "torch forms around the op")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    parser.add_argument("--kernels-only", action="store_true", help="leave the torch forms out, which take most time")
    args = parser.parse_args()
    speed, found = copy_speed(), []
    for heads in HEADS:
        for row in rows(heads, speed, not args.kernels_only):
            found.append({"heads": f"{heads[0]},{heads[1]}", **row})
            print(json.dumps(found[-1]), flush=True)
    record(args.out, document(found, args.commit, tokens=TOKENS, hidden=HIDDEN, copy_gb_per_s=round(speed / 1e6, 1)))


if __name__ == "__main__":
    main()
