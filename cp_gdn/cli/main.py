"""Parses the command line and runs one command. Exit status: 0 good, 1 the command found a fault, 2 bad input."""

import argparse
import sys
from collections.abc import Sequence

from cp_gdn.cli import bench, build, demo, doctor, plan, verify
from cp_gdn.cli.arguments import BadInput


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cp-gdn", description="Context parallelism for Gated DeltaNet layers on torch.distributed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (bench, build, demo, doctor, plan, verify):
        name = command.__name__.rsplit(".", 1)[-1]
        sub = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BadInput as error:
        print(f"cp-gdn {args.command}: {error}", file=sys.stderr)
        return 2
