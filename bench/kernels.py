"""Time the Hopper kernels alone on one GPU: median of 30 launches per kernel and shape, whole documents, P as named.

python bench/kernels.py [--out FILE.json]
"""

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

import cp_gdn
from cp_gdn.backends import hopper

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


def row(name: str, lengths: list[int], segments: int) -> dict[str, object]:
    gen = torch.Generator(device="cuda").manual_seed(0)
    tokens, (heads, value_heads) = sum(lengths), HEADS
    q, k, v = (torch.randn(tokens, n, 128, generator=gen, device="cuda") for n in (heads, heads, value_heads))
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    g = -torch.nn.functional.softplus(torch.randn(tokens, value_heads, generator=gen, device="cuda") - 3)
    beta = torch.randn(tokens, value_heads, generator=gen, device="cuda").sigmoid()
    chunks, items = tables(lengths, segments)
    kernel = hopper.load_prepare(value_heads // heads)
    prepared = hopper.prepare(kernel, q, k, beta, chunks)
    x = hopper.WalkInputs(q=q, k=k, v=v.bfloat16(), g=g, beta=beta, prepared=prepared, scale=128**-0.5)
    o = torch.empty_like(x.v)
    walks = {"o": (True, True), "b": (False, True), "m": (False, False)}
    times = {"prepare": timed(lambda: hopper.prepare(kernel, q, k, beta, chunks))}
    for key, (emit_o, has_v) in walks.items():
        walk = hopper.load_walk(emit_o=emit_o, has_v=has_v)
        times[f"walk_{key}"] = timed(
            lambda walk=walk, emit_o=emit_o: hopper.walk(walk, x, chunks, items, None, o if emit_o else None)  # type: ignore[misc]
        )
    found: dict[str, object] = {"shape": name, "heads": "16,48", "gate": "model", "segments": segments, "repeats": 30}
    for key, (median, least, largest) in times.items():
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
