"""Every rank of a pack, one after the other on one GPU, messages replayed as copies: slowest rank, balance, efficiency.

python bench/rows.py [--quick] [--only NAME ..] [--worlds 2 4 8 16] [--layout zigzag] [--seconds 60] [--out FILE.json]

About 40 s; --quick: worlds of 4, few repeats, about 10 s. Forward and step (forward and backward) through autograd,
default options. "queued": the host ahead of the device, so that only the device's time counts; a rank of a real group
has a host of its own. Balance: mean rank / slowest rank. Efficiency: one GPU's time of the whole pack / W / slowest
rank; messages cost a copy here.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from op import Shape, Tensors, inputs, queued, timed
from record import document, record
from replayed import Player, Recorder

import cp_gdn

MIXED = (65_536, 131_072, 7, 20_000, 64, 1, 4_000, 30_001)
SHAPES = (
    Shape(name="1x262144", lengths=(262_144,)),
    Shape(name="1x262144", lengths=(262_144,), gate="slow"),
    Shape(name="8 mixed", lengths=MIXED),
    Shape(name="1x261987", lengths=(261_987,), heads=(2, 6)),
    Shape(name="8 mixed", lengths=MIXED, heads=(2, 6)),
)
KINDS = ("fwd", "step", "fwd_queued", "step_queued")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank with its own rows of the pack, and what rewinds its messages."""

    ctx: cp_gdn.Context
    leaves: Tensors
    dout: torch.Tensor
    rewind: Callable[[], None]

    def forward(self) -> torch.Tensor:
        return cp_gdn.chunk_gated_delta_rule(*self.leaves, ctx=self.ctx)[0]

    def step(self) -> None:
        torch.autograd.grad(self.forward(), self.leaves, self.dout)


def seats(shape: Shape, world: int, layout: str, tensors: Tensors) -> list[Seat]:
    """All ranks, their messages recorded in one step of all of them."""
    bounds = [0, *torch.tensor(shape.lengths).cumsum(0).tolist()]
    part = cp_gdn.partition(bounds, world, "contiguous" if world == 1 else layout)

    def step(comm: cp_gdn.Comm) -> Seat:
        recorder = Recorder(comm._link)
        comm._link = recorder
        ctx = cp_gdn.build_context(part, comm, device="cuda", heads=shape.heads, backend="hopper")
        leaves = [t[ctx.token_ids].requires_grad_() for t in tensors]
        seat = Seat(ctx=ctx, leaves=leaves, dout=torch.randn_like(leaves[2]), rewind=lambda: None)
        seat.step()
        player = Player(recorder)
        return replace(seat, ctx=replace(ctx, comm=cp_gdn.Comm(player)), rewind=player.rewind)

    return cp_gdn.twin(world, step)


def measured(seat: Seat, repeats: int) -> dict[str, float]:
    """Milliseconds of a rank, by `KINDS`, and peaks in MiB."""
    found = timed("fwd", seat.forward, seat.rewind, repeats) | timed(
        "step", seat.step, seat.rewind, max(3, repeats // 2)
    )
    made = {name: found[f"{name}_ms"] for name in ("fwd", "step")}
    made |= {"fwd_queued": queued(seat.forward, seat.rewind, 5), "step_queued": queued(seat.step, seat.rewind, 3)}
    return made | {"step_peak_mib": found["step_peak_mib"]}  # type: ignore[return-value]


def summary(ranks: list[dict[str, float]], alone: dict[str, float]) -> dict[str, object]:
    """What the ranks of one world amount to beside one GPU."""
    made: dict[str, object] = {}
    for kind in KINDS:
        times = [rank[kind] for rank in ranks]
        slowest = max(times)
        made[f"{kind}_ms"] = round(slowest, 4)
        made[f"{kind}_slowest_rank"] = times.index(slowest)
        made[f"{kind}_balance_pct"] = round(100 * statistics.mean(times) / slowest, 1)
        made[f"{kind}_efficiency_pct"] = round(100 * alone[kind] / len(ranks) / slowest, 1)
    return made | {"step_peak_mib": max(rank["step_peak_mib"] for rank in ranks)}


def rows_of(shape: Shape, args: argparse.Namespace, deadline: float) -> list[dict[str, object]]:
    """One GPU alone, then every world."""
    tensors, alone, rows = inputs(shape), {}, []
    for world in (1, *args.worlds):
        if time.perf_counter() > deadline:
            break
        found = [measured(seat, args.repeats) for seat in seats(shape, world, args.layout, tensors)]
        alone = alone or found[0]
        row: dict[str, object] = {"shape": shape.name, "heads": ",".join(map(str, shape.heads)), "gate": shape.gate}
        row |= {"layout": "contiguous" if world == 1 else args.layout, "world": world, "repeats": args.repeats}
        rows.append(row | summary(found, alone) | {"ranks": found})
        torch.cuda.empty_cache()
    return rows


def show(row: dict[str, object]) -> None:
    said = [f"{row['shape']:10} {row['heads']:6} {row['gate']:5} world {row['world']:<2}"]
    for kind in ("fwd_queued", "step_queued"):
        shares = f"balance {row[f'{kind}_balance_pct']}% efficiency {row[f'{kind}_efficiency_pct']}%"
        said.append(f"{kind} {row[f'{kind}_ms']} ms {shares}")
    said.append(f"with host: fwd {row['fwd_ms']} step {row['step_ms']} ({row['step_efficiency_pct']}%)")
    print("; ".join(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of packs")
    parser.add_argument("--worlds", type=int, nargs="+")
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float, default=60, help="begin no world after so many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the tree is no checkout")
    args = parser.parse_args()
    args.worlds = args.worlds or ([4] if args.quick else [2, 4, 8, 16])
    args.repeats = args.repeats or (3 if args.quick else 10)
    deadline, rows = time.perf_counter() + args.seconds, []
    for shape in SHAPES:
        if args.only is None or shape.name in args.only:
            rows += rows_of(shape, args, deadline)
    for row in rows:
        show(row)
    record(args.out, document(rows, args.commit))


if __name__ == "__main__":
    main()
