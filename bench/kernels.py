"""Time the Hopper kernels alone on one GPU: median of 30 launches per kernel and shape, whole documents, P as named.

python bench/kernels.py [--out FILE.json]
"""

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cp_gdn
from cp_gdn.backends import hopper_grad, hopper_prepare, hopper_walk
from cp_gdn.backends.launch import Kernel

SHAPES = (("8192x8", [8192] * 8, 1), ("1x65536", [65536], 11))
HEADS = (16, 48)


def timed(launch: Callable[[], object], repeats: int = 30) -> tuple[float, float, float]:
    """Median, least and largest milliseconds."""
    for _ in range(3):
        launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def tables(lengths: list[int], segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunk rows and walk items of documents cut into near-equal segments."""
    part = cp_gdn.partition([0, *torch.tensor(lengths).cumsum(0).tolist()], 1)
    asked = {"device": "cuda", "heads": HEADS, "head_dims": (128, 128), "segments": segments}
    plan = cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked).plan  # type: ignore[arg-type]
    rows = torch.stack([torch.as_tensor(plan.chunks.first_row), torch.as_tensor(plan.chunks.count)], 1)
    runs = zip(plan.segments.first_chunk.tolist(), plan.segments.num_chunks.tolist(), strict=True)
    items = [(first, count, head, s) for s, (first, count) in enumerate(runs) for head in range(HEADS[1])]
    items.sort(key=lambda item: -item[1])
    return rows.to("cuda", torch.int32), torch.tensor(items, dtype=torch.int32, device="cuda")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Inputs of all kernels on one shape: documents cut into near-equal segments, states from zero."""

    forward: hopper_walk.WalkInputs
    mirror: hopper_walk.WalkInputs
    where: tuple[torch.Tensor, torch.Tensor]
    ends: hopper_walk.Ends
    tapes: hopper_walk.Tapes
    adjoints: hopper_walk.Tapes
    out: hopper_grad.KernelGradients
    prepare: Callable[[], object]

    @classmethod
    def random(cls, lengths: list[int], segments: int) -> "Pack":
        gen = torch.Generator(device="cuda").manual_seed(0)
        tokens, (heads, value_heads) = sum(lengths), HEADS

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device="cuda")

        q, k = (torch.nn.functional.normalize(normal(tokens, heads, 128), dim=-1).bfloat16() for _ in range(2))
        v, dout = (normal(tokens, value_heads, 128).bfloat16() for _ in range(2))
        g, beta = -torch.nn.functional.softplus(normal(tokens, value_heads) - 3), normal(tokens, value_heads).sigmoid()
        where, kernel = tables(lengths, segments), hopper_prepare.load_prepare(value_heads // heads)
        shared = {"q": q, "k": k, "g": g, "beta": beta, "scale": 128**-0.5}
        shared["prepared"] = hopper_prepare.prepare(kernel, q, k, beta, g, where[0])
        count = len(where[1]) // value_heads
        rows = torch.arange(count, dtype=torch.int32, device="cuda")[:, None].repeat(1, 2)
        start, end = (torch.zeros(count, value_heads, 128, 128, device="cuda") for _ in range(2))
        mirror = hopper_walk.WalkInputs(v=dout, **shared)
        return cls(
            forward=hopper_walk.WalkInputs(v=v, **shared),
            mirror=mirror,
            where=where,
            ends=hopper_walk.Ends(rows=rows, start=start, end=end),
            tapes=room(where[0], v),
            adjoints=room(where[0], v),
            out=hopper_grad.KernelGradients.empty(mirror),
            prepare=lambda: hopper_prepare.prepare(kernel, q, k, beta, g, where[0]),
        )

    def launches(self) -> dict[str, Callable[[], object]]:
        """One launch of every kernel, in an order in which each finds what it reads."""
        o = torch.empty_like(self.forward.v)

        def walk(kernel: Kernel, x: hopper_walk.WalkInputs, *emitted: Any) -> Callable[[], object]:
            return lambda: hopper_walk.walk_rows(kernel, x, self.where, self.ends, *(emitted or (None,)))

        gradients = hopper_grad.load_grad(HEADS[1] // HEADS[0])
        return {
            "prepare": self.prepare,
            "walk_o": walk(hopper_walk.load_walk(emit_o=True), self.forward, o),
            "walk_b": walk(hopper_walk.load_walk(), self.forward),
            "walk_m": walk(hopper_walk.load_walk(has_v=False), self.forward),
            "walk_s": walk(hopper_walk.load_walk(emit_s=True), self.forward, None, self.tapes),
            "adjoint": walk(hopper_walk.load_adjoint(emit=True), self.mirror, self.out.v, self.adjoints),
            "adjoint_bt": walk(hopper_walk.load_adjoint(emit=False), self.mirror),
            "grad": lambda: hopper_grad.grad(
                gradients, self.mirror, self.where[0], self.tapes, self.adjoints.states, self.out
            ),
        }


def room(chunks: torch.Tensor, like: torch.Tensor) -> hopper_walk.Tapes:
    tokens, heads, _ = like.shape
    states, values = like.new_empty(len(chunks), heads, 2, 128, 64), like.new_empty(heads, 2, tokens, 64)
    return hopper_walk.Tapes(states=states, values=values, first_chunk=0, first_row=0)


def row(name: str, lengths: list[int], segments: int) -> dict[str, object]:
    found: dict[str, object] = {"shape": name, "heads": "16,48", "gate": "model", "segments": segments, "repeats": 30}
    for key, launch in Pack.random(lengths, segments).launches().items():
        median, least, largest = timed(launch)
        found |= {f"{key}_ms": round(median, 4), f"{key}_ms_spread": [round(least, 4), round(largest, 4)]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cp_gdn": cp_gdn.__version__},
        "commit": args.commit or git.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "rows": [row(*shape) for shape in SHAPES],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
