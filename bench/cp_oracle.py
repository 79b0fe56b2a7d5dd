"""Whole packs over the ranks of a run against fp64, element by element and head by head, under torchrun.

torchrun --standalone --nproc-per-node 4 bench/cp_oracle.py [--packs NAME ..] [--layout zigzag] [--out FILE.json]

Packs and values are those of bench/cp_records.py; reference, budgets and rows those of bench/oracle.py, with one rank's
results beside. Every rank gets all ranks' results and compares query heads of its own. Exit status 1 where a budget is
not kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cp import inputs, nccl_version, start
from cp_records import PACKS, RECORDS, Pack, packs_of
from oracle import NAMES, RESULTS, Found, Tensors, kept, rows_from, step, sums_of
from record import document, record

import cp_gdn
from cp_gdn.cli.arguments import pair


def on_ranks(comm: cp_gdn.Comm, pack: Pack, x: Tensors, args: argparse.Namespace) -> Tensors:
    """o and gradients of all ranks of the Comm, in the pack's order, on each of them."""
    part = cp_gdn.partition(pack.bounds, comm.size, args.layout)
    asked = {"device": x["v"].device, "heads": pack.heads, "head_dims": x["v"].shape[-1:] * 2}
    ctx = cp_gdn.build_context(part, comm, **asked, exchange=args.exchange, backend="torch" if args.cpu else "hopper")
    mine = step({name: t[ctx.token_ids] for name, t in x.items()}, ctx)
    if comm.size == 1:
        return mine
    whole = {}
    for name, rows in mine.items():
        whole[name] = rows.new_zeros((part.num_tokens, *rows.shape[1:]))
        whole[name][ctx.token_ids] = rows
        dist.all_reduce(whole[name])  # each row is one rank's; the others add zeros, which round nothing
    return whole


def gathered(found: Found) -> Found:
    """The heads of all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    return {
        world: {name: [sums for each in of_ranks for sums in each[world][name]] for name in RESULTS} for world in found
    }


def rows_of(comm: cp_gdn.Comm, pack: Pack, device: torch.device, args: argparse.Namespace) -> list[dict[str, Any]]:
    started = time.perf_counter()
    x = dict(zip((*NAMES, "dout"), inputs(sum(pack.lengths), pack.heads, pack.gate, device), strict=True))
    got = {each.size: on_ranks(each, pack, x, args) for each in (cp_gdn.Comm.alone(), comm)}
    found = gathered(sums_of(pack, x, got, range(comm.rank, pack.heads[0], comm.size)))
    rows = [{**pack.described, **row} for row in rows_from(pack, found, args.layout)]
    rows[0]["seconds"] = round(time.perf_counter() - started, 1)
    return rows


def show(row: dict[str, Any]) -> None:
    errors = " ".join(f"{name} {row[name]['worst_head']:.2e}/{row[name]['budget']:.2e}" for name in RESULTS)
    missed = sum(row[name]["mismatches"] for name in RESULTS), sum(row[name]["elements"] for name in RESULTS)
    said = "kept" if kept([row]) else "NOT KEPT"
    print(f"{row['shape']}, gates {row['gate']}, world {row['world']}: {said}; mismatches {missed[0]} of {missed[1]}")
    print(f"  worst head / budget: {errors}")
    if row["world"] == 1:
        print("  rms:", " ".join(f"{name} {row[name]['rms']:.3g}" for name in RESULTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", nargs="+", choices=PACKS, default=list(RECORDS))
    parser.add_argument("--gates", nargs="+", choices=("model", "slow"), default=["model"])
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--heads", type=pair, default=(16, 48))
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, to try this file")
    parser.add_argument("--cpu", action="store_true", help="gloo and torch, to try this file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    device = start(args.cpu)
    comm, rows = cp_gdn.Comm(), []
    for pack in packs_of(args):
        rows += rows_of(comm, pack, device, args)
        if comm.rank == 0:
            record(args.out, document(rows, args.commit, nccl_version(device)))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if comm.rank == 0:
        for row in rows:
            show(row)
    comm.close()
    dist.destroy_process_group()
    raise SystemExit(0 if kept(rows) else 1)


if __name__ == "__main__":
    main()
