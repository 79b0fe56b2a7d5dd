"""Time the torch backend beside the chunked torch implementation of transformers, one process, one document.

    python bench/torch_peer.py [--tokens 8192] [--heads 2,4] [--dim 64] [--threads 1] [--repeats 15] [--out FILE.json]

Both take the same fp32 inputs and normalise q and k inside; a step is forward and backward. The two alternate, so that
whatever else the machine does hits both alike. Writes one row in the format of bench/results.
"""

import argparse
import datetime
import importlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cp_gdn

Op = Callable[..., torch.Tensor]
PEER = "transformers.models.qwen3_next.modeling_qwen3_next"


def inputs(tokens: int, heads: tuple[int, int], dim: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=gen)

    gate = -torch.nn.functional.softplus(normal(heads[1]) - 3)
    qkv = [normal(heads[0], dim), normal(heads[0], dim), normal(heads[1], dim)]
    return [*qkv, gate, normal(heads[1]).sigmoid()], normal(heads[1], dim)


def timed(op: Op, tensors: list[torch.Tensor], dout: torch.Tensor) -> tuple[float, float, list[torch.Tensor]]:
    """Milliseconds of the forward and of the step, and the gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    start = time.perf_counter()
    o = op(*leaves)
    middle = time.perf_counter()
    o.backward(dout)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - start), [t.grad for t in leaves if t.grad is not None]


def ops(args: argparse.Namespace, heads: tuple[int, int]) -> tuple[Op, Op]:
    """Ours and the peer's, as functions of q, k, v, g, beta."""
    part = cp_gdn.partition([0, args.tokens], 1)
    asked = {"heads": heads, "head_dims": (args.dim, args.dim), "dtype": torch.float32, "segments": args.segments}
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked)
    peer = importlib.import_module(PEER).torch_chunk_gated_delta_rule
    return (
        lambda *x: cp_gdn.chunk_gated_delta_rule(*x, ctx=ctx, use_qk_l2norm_in_kernel=True)[0],
        lambda q, k, v, g, beta: peer(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0],
    )


def row(args: argparse.Namespace) -> dict[str, object]:
    heads = (args.heads[0], args.heads[1])
    tensors, dout = inputs(args.tokens, heads, args.dim)
    ours, theirs = ops(args, heads)
    mine, other = timed(ours, tensors, dout)[2], timed(theirs, tensors, dout)[2]
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, other, strict=True))
    assert apart < 1e-4, f"the two do not compute the same: relative difference {apart:.1e}"
    pairs = [(timed(ours, tensors, dout)[:2], timed(theirs, tensors, dout)[:2]) for _ in range(args.repeats)]
    found: dict[str, object] = {
        "shape": f"1x{args.tokens}",
        "heads": f"{heads[0]},{heads[1]}",
        "head_dims": f"{args.dim},{args.dim}",
        "gate": "model",
        "dtype": "float32",
        "threads": args.threads,
        "segments": args.segments,
        "repeats": args.repeats,
        "largest_relative_difference_of_gradients": apart,
    }
    for i, name in enumerate(("", "transformers_")):
        steps = [pair[i][1] for pair in pairs]
        found[f"{name}fwd_ms"] = statistics.median(pair[i][0] for pair in pairs)
        found[f"{name}step_ms"] = statistics.median(steps)
        found[f"{name}step_ms_spread"] = [min(steps), max(steps)]
    medians = [statistics.median(pair[i][1] for pair in pairs) for i in range(2)]
    return {**found, "step_ratio": medians[0] / medians[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--segments", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    peer_version = importlib.import_module("transformers").__version__
    result = {
        "device": f"{platform.machine()} CPU, {args.threads} thread(s)",
        "versions": {"torch": torch.__version__, "cp_gdn": cp_gdn.__version__, "transformers": peer_version},
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "rows": [row(args)],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
