"""Time the Hopper kernels alone on one GPU: median of 30 launches per kernel and shape, whole documents, P as named.

python bench/kernels.py [--out FILE.json]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from record import document, record

import cp_gdn
from cp_gdn.backends import hopper_grad, hopper_walk
from cp_gdn.backends.hopper_backward import HopperKernels, gradients_like
from cp_gdn.backends.launch import Kernel
from cp_gdn.backends.torch_chunked import Inputs
from cp_gdn.workspace import Room

SHAPES = (("8192x8", [8192] * 8, 1), ("1x65536", [65536], 11))
HEADS = (16, 48)


def timed(
    launch: Callable[[], object], before: Callable[[], object] = lambda: None, repeats: int = 30
) -> tuple[float, float, float]:
    """Median, least and largest milliseconds; ``before`` is run before every launch."""
    for _ in range(3):
        before(), launch()
    times = []
    for _ in range(repeats):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Random inputs of one shape on a context's tables: documents cut into near-equal segments, states from zero."""

    kernels: HopperKernels
    forward: hopper_walk.WalkInputs
    mirror: hopper_walk.WalkInputs
    out: hopper_grad.KernelGradients
    tapes: hopper_walk.SlabTapes
    states: torch.Tensor
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
        part = cp_gdn.partition([0, *torch.tensor(lengths).cumsum(0).tolist()], 1, "contiguous")
        asked = {"device": "cuda", "heads": HEADS, "head_dims": (128, 128), "segments": segments}
        kernels = cp_gdn.build_context(part, cp_gdn.Comm.alone(), backend="hopper", **asked).kernels  # type: ignore
        assert kernels is not None
        x = Inputs(q=q, k=k, v=v, g=g, beta=beta, scale=128**-0.5, l2norm=False)
        room, tape = Room(kernels.buffers("backward", kept=True, document_states=False), v.device), kernels.new_tape()
        out = gradients_like(x)
        forward = kernels.forward.prepare(x, out.v, tape)
        return cls(
            kernels=kernels,
            forward=forward,
            mirror=replace(forward, v=dout),
            out=out,
            tapes=hopper_walk.SlabTapes(room=room.take("slab"), places=kernels.places, zero=0),
            states=torch.zeros(kernels.forward.tables.num_segments, value_heads, 128, 128, device="cuda"),
            prepare=lambda: kernels.forward.prepare(x, out.v, tape),
        )

    def launches(self) -> dict[str, Callable[[], object]]:
        """One run of every kernel, over all slabs, in an order in which each finds what it reads."""
        every, tapes = self.kernels, self.tapes
        count = len(self.states)
        rows = torch.arange(count, dtype=torch.int32, device="cuda")[:, None].repeat(1, 2)
        ends = hopper_walk.Ends(rows=rows, start=None, end=self.states)
        no_maps = hopper_walk.Summaries(maps=None, cutoff=None, dropped=None)
        maps = hopper_walk.Summaries(maps=torch.empty_like(self.states), cutoff=None, dropped=None)
        rows_of_maps = torch.nn.functional.pad(rows, (2, 0))  # the third number of a segment is the row of its map
        replayed = [slab.items for slab in every.slabs]
        asked = torch.cat([items.items for items in replayed])

        def items(run: int) -> hopper_walk.Items:
            changed = asked.clone()
            changed[:, 2] = (changed[:, 2] & 0xFFFF) + run * 65536
            return replace(every.forward.work[0], items=changed, segments=rows_of_maps if run else replayed[0].segments)

        def per_slab(kernel: Kernel, x: hopper_walk.WalkInputs, emitted: tuple[int, int]) -> Callable[[], object]:
            return lambda: [hopper_walk.replay(kernel, x, each, ends, emitted) for each in replayed]

        def summary(kernel: Kernel, x: hopper_walk.WalkInputs, run: int = 0) -> Callable[[], object]:
            work, found = items(run), maps if run else no_maps
            return lambda: hopper_walk.summarize(kernel, x, work, ends, found)

        whole = replace(every.forward.work[0], items=asked, segments=replayed[0].segments)
        walks, adjoint = every.forward.kernels, every.kernels
        return {
            "prepare": self.prepare,
            "walk_b": summary(walks.summary, self.forward),
            "walk_m": summary(walks.summary, self.forward, -1),
            "adjoint_bt": summary(adjoint.summary, self.mirror),
            "walk_s": per_slab(adjoint.states, self.forward, (tapes.states, tapes.values)),
            "adjoint": per_slab(adjoint.replay, self.mirror, (tapes.adjoints, 0)),
            "grad": lambda: [
                hopper_grad.grad(adjoint.grad[0], self.mirror, each.steps, tapes, self.out) for each in every.slabs
            ],
            "walk_o": lambda: hopper_walk.replay(walks.output, self.forward, whole, ends),
        }


def row(name: str, lengths: list[int], segments: int) -> dict[str, object]:
    found: dict[str, object] = {"shape": name, "heads": "16,48", "gate": "model", "segments": segments, "repeats": 30}
    pack = Pack.random(lengths, segments)
    for key, launch in pack.launches().items():
        median, least, largest = timed(launch, pack.prepare)  # outputs overwrite T
        found |= {f"{key}_ms": round(median, 4), f"{key}_ms_spread": [round(least, 4), round(largest, 4)]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    made = document([row(*shape) for shape in SHAPES], args.commit)
    print(json.dumps(made, indent=1))
    record(args.out, made)


if __name__ == "__main__":
    main()
