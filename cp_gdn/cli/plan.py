"""`cp-gdn plan`: on paper, per world size and layout: who holds what, which bytes travel, how long a step takes."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cp_gdn.cli.arguments import EXCHANGES, LAYOUTS, BadInput, integers, pair, positive, require_packages
from cp_gdn.cli.plan_input import dtype_name, read_lengths, segments, worlds

if TYPE_CHECKING:
    from cp_gdn.cli.plan_rows import PackPlan
    from cp_gdn.forecast import LayerSpec

SUMMARY = "bytes, segments and modelled step time of a pack per world size and layout; needs no GPU and no ranks"
CHUNK = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    pack = parser.add_mutually_exclusive_group(required=True)
    pack.add_argument("--cu-seqlens", type=integers, help="document boundaries of the pack, such as 0,4096,65536")
    pack.add_argument(
        "--lengths-file", type=Path, metavar="FILE", help="document lengths: text with integers in it, or a .npy"
    )
    add("--world", type=worlds, default=(1, 2, 4, 8), help="numbers of ranks (default: 1,2,4,8)")
    add("--layout", choices=("all", *LAYOUTS), default="all", help="default: %(default)s")
    add("--heads", type=pair, default=(16, 48), help="q/k heads and value heads (default: 16,48)")
    add("--head-dims", type=pair, default=(128, 128), help="channels of a q/k and of a value head (default: 128,128)")
    add("--conv", type=pair, metavar="CHANNELS,WIDTH", help="the layer's convolution (default: none)")
    add("--segments", type=segments, default="auto", help="P, one P per rank, grid:N, a rule or auto (default: auto)")
    add("--exchange", choices=EXCHANGES, default="auto", help="default: %(default)s")
    add("--align", type=positive, help="move cuts to multiples of this many tokens (default: 1; 64*N with grid:N)")
    add("--dtype", type=dtype_name, default="bfloat16", help="of q, k, v and o (default: %(default)s)")
    add("--png", type=Path, metavar="OUT.png", help="draw who holds what, and modelled time against ranks")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    require_packages("plan", *(() if args.json else ("rich",)), *(("matplotlib",) if args.png else ()))
    from cp_gdn.cli import plan_report

    planned = _planned(args)
    if args.png:
        _draw(planned, args.png)
    if args.json:
        plan_report.print_json(planned)
    else:
        plan_report.print_table(planned, args.png)
    return 0


def _planned(args: argparse.Namespace) -> "PackPlan":
    from cp_gdn.cli.plan_rows import plan_pack
    from cp_gdn.segments import parse_segments

    bounds = read_lengths(args.lengths_file) if args.lengths_file else args.cu_seqlens
    layouts = LAYOUTS if args.layout == "all" else (args.layout,)
    try:
        grid = max(parse_segments(args.segments, world).grid for world in args.world)
        # In grid mode a cut must lie on the grid, so the cuts move there unless the user says otherwise.
        align = args.align or (CHUNK * grid if grid else 1)
        return plan_pack(bounds, args.world, layouts, align, _layer(args))
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error


def _layer(args: argparse.Namespace) -> "LayerSpec":
    import torch

    from cp_gdn.checks import check_heads
    from cp_gdn.forecast import LayerSpec
    from cp_gdn.halo import MAX_WIDTH

    heads, head_dims = check_heads(args.heads, args.head_dims)
    if args.conv and args.conv[1] > MAX_WIDTH:
        raise BadInput(f"--conv: got width {args.conv[1]}, expected 1 to {MAX_WIDTH}")
    return LayerSpec(
        heads=heads,
        head_dims=head_dims,
        dtype=getattr(torch, args.dtype),
        conv=args.conv,
        segments=args.segments,
        exchange=args.exchange,
    )


def _draw(planned: "PackPlan", path: Path) -> None:
    from cp_gdn.cli.plan_figure import write_figure

    try:
        write_figure(planned, path)
    except OSError as error:
        raise BadInput(f"--png {path}: cannot be written ({error.strerror or error})") from None
    except ValueError as error:  # a file name whose ending matplotlib does not know
        raise BadInput(f"--png {path}: {error}") from None
