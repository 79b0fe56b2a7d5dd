"""`cp-gdn doctor`: what is on this machine, what runs here, what is known to go wrong; 1 if something stops a run."""

import argparse
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cp_gdn.cli.arguments import BadInput, pair
from cp_gdn.cli.plan_input import dtype_name

if TYPE_CHECKING:
    from cp_gdn.cli.doctor_report import Taken

SUMMARY = "versions, GPUs, kernels, known traps of this machine, and what would happen to a model's layers"
SHAPES = ((16, 16), (16, 32), (16, 48), (16, 64))
"""Heads of the published models, one to four value heads per query/key head."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME_OR_PATH", help="a model's name, or the folder of its config.json")
    add("--heads", type=pair, action="append", help="q/k heads and value heads to ask for, such as 16,48; repeatable")
    add("--head-dims", type=pair, default=(128, 128), help="channels of a q/k and of a value head (default: 128,128)")
    add("--dtype", type=dtype_name, default="bfloat16", help="of q, k, v and o (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    from cp_gdn.cli import doctor_facts, doctor_model, doctor_report, doctor_traps

    facts = doctor_facts.gather(os.environ)
    found = doctor_traps.findings(facts)
    model_type, kinds = doctor_model.examine(args.model) if args.model else ("", [])
    shapes = [(kind.shape.heads, kind.shape.head_dims) for kind in kinds if kind.shape]
    if args.heads or not shapes:
        shapes += [(heads, args.head_dims) for heads in args.heads or SHAPES]
    report = doctor_report.Report(
        facts=facts,
        backends=tuple(taken(shapes, args.dtype, has_gpu=bool(facts.gpus))),
        model=(args.model or "", model_type),
        kinds=tuple(kinds),
        findings=(*found, *doctor_model.model_findings(args.model, kinds)),
    )
    print(doctor_report.as_json(report) if args.json else doctor_report.as_text(report))
    return int(report.stops > 0)


Shapes = Iterable[tuple[tuple[int, int], tuple[int, int]]]


def taken(shapes: Shapes, dtype: str, *, has_gpu: bool) -> Iterator["Taken"]:
    """Ask what `build_context` asks, for one rank on this machine; this compiles and loads the kernels that fit."""
    import torch

    from cp_gdn.backends.choice import choose_backend
    from cp_gdn.checks import check_heads
    from cp_gdn.cli.doctor_report import Taken
    from cp_gdn.comm import Comm
    from cp_gdn.options import Options

    device = "cuda" if has_gpu else "cpu"
    asked = {"backend": "auto", "device": device, "dtype": getattr(torch, dtype), "options": Options()}
    for heads, head_dims in dict.fromkeys(shapes):
        try:
            check_heads(heads, head_dims)
        except ValueError as error:
            raise BadInput(str(error)) from None
        choice = choose_backend({**asked, "heads": heads, "head_dims": head_dims}, Comm.alone())
        yield Taken(
            heads=heads, head_dims=head_dims, dtype=dtype, device=device, backend=choice.kind, reason=choice.reason
        )
