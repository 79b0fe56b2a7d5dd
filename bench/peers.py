"""Time the op beside public peers on one GPU, in turns, on the same tensors: FlashQLA (TileLang) and FLA (Triton).

python bench/peers.py [--only 1x65536 ..] [--peers flashqla,fla] [--repeats 30] [--out FILE.json] [--commit HASH]

A peer's first call of a head shape compiles for minutes; `--warm` does nothing else, so that it can run beside other
work. Forward and step through autograd as `bench/op.py` times them, the largest relative error per head of every o
against fp64. A peer that is not installed or fails is a row that says so.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from op import SHAPES, Shape, Tensors, contexts, inputs, timed, worst_head
from record import document, record

import cp_gdn

Op = Callable[[Tensors, torch.Tensor], torch.Tensor]
NAMES = ("1x65536", "8192x8", "1x131072", "1x32768")
PACKAGES = ("flash-qla", "tilelang", "fla-core", "triton")
ERROR_HEADS = 2


def flashqla() -> Op:
    from flash_qla import chunk_gated_delta_rule as rule

    def run(x: Tensors, bounds: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = x
        o: torch.Tensor = rule(q=q, k=k, v=v, g=g, beta=beta, scale=128**-0.5, cu_seqlens=bounds)[0]
        return o

    return run


def fla() -> Op:
    os.environ["FLA_FLASH_QLA"] = "0"  # its own kernels; else it hands over to FlashQLA where that is installed
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    def run(x: Tensors, bounds: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = rule(*x, cu_seqlens=bounds)[0]
        return o

    return run


PEERS = {"flashqla": flashqla, "fla": fla}


def measure(name: str, run: Callable[[], torch.Tensor], leaves: Tensors, repeats: int) -> dict[str, object]:
    """First call in seconds; forward and step in milliseconds, peaks in MiB above the inputs."""
    dout = torch.randn_like(leaves[2])

    def step() -> None:
        run().backward(dout.view(leaves[2].shape))
        for leaf in leaves:
            leaf.grad = None

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    found: dict[str, object] = {"op": name, "first_s": round(time.perf_counter() - start, 1), "repeats": repeats}
    found |= timed("fwd", run, lambda: None, repeats)
    return found | timed("step", step, lambda: None, repeats)


def rows_of(shape: Shape, args: argparse.Namespace) -> list[dict[str, object]]:
    """A row of each op on one shape."""
    ctx, _ = contexts(shape, "hopper")
    whole = inputs(shape)
    bounds = torch.tensor([0, *torch.tensor(shape.lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    leaves = [t[None].requires_grad_() for t in whole]
    runs: dict[str, Callable[[], torch.Tensor]] = {"cp_gdn": lambda: cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)[0]}
    found = []
    for name in args.peers:
        try:
            runs[name] = functools.partial(PEERS[name](), leaves, bounds)
        except (ImportError, RuntimeError, ValueError) as error:
            found.append({"op": name, "failed": f"{type(error).__name__}: {error}"[:300]})
    for name, run in runs.items():
        try:
            found.append(measure(name, run, leaves, args.repeats))
            with torch.no_grad():
                error = worst_head(shape, ctx, run().detach().view(whole[2].shape), whole, ERROR_HEADS)
            found[-1]["worst_head_error"] = error
        except Exception as error:  # a peer may fail in any way, the other rows are still wanted
            found.append({"op": name, "failed": f"{type(error).__name__}: {error}"[:300]})
        torch.cuda.empty_cache()
    about = {"shape": shape.name, "heads": ",".join(map(str, shape.heads)), "gate": shape.gate}
    return [about | row for row in found]


def warm(args: argparse.Namespace) -> None:
    """Compile what the peers need for the head shape of the rows."""
    shape = Shape(name="warm", lengths=(4096,))
    bounds = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")
    for name in args.peers:
        leaves, start = [t[None].requires_grad_() for t in inputs(shape)], time.perf_counter()
        try:
            o = PEERS[name]()(leaves, bounds)
            o.backward(torch.ones_like(o))
        except Exception as error:  # as above
            print(f"{name}: {type(error).__name__}: {error}"[:500], flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=NAMES, help="names of shapes")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[*PEERS])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    if args.warm:
        return warm(args)
    rows = []
    for shape in SHAPES:
        if shape.heads == (16, 48) and shape.name in args.only:
            rows += rows_of(shape, args)
            print("\n".join(map(json.dumps, rows[-1 - len(args.peers) :])), flush=True)
    record(args.out, document(rows, args.commit, versions()))


if __name__ == "__main__":
    main()
