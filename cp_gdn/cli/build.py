"""`cp-gdn build`: compile every kernel for Hopper into the cache, side by side, and list what the assembler made."""

import argparse
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cp_gdn.backends import cubins
from cp_gdn.cli.arguments import BadInput, positive

SUMMARY = "compile the Hopper kernels ahead of the first call; needs nvcc, no GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """One kernel: its cubin, seconds spent (close to 0 if it was there), registers per thread and spilled bytes."""

    name: str
    defines: str
    path: Path
    seconds: float
    registers: int
    spilled: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, help=f"folder of the cubins (default: {cubins.default_cache()})")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="compilers at once (default: cores)")


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    try:
        compiler = cubins.compiler_version(cubins.find_nvcc()).strip().splitlines()[-1]
        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(lambda variant: build(variant, args.cache), cubins.VARIANTS))
    except (cubins.NoCompiler, FileNotFoundError) as error:
        raise BadInput(str(error)) from error
    except RuntimeError as error:
        print(error)
        return 1
    print(f"{compiler}, {cubins.ARCH}, {rows[0].path.parent}")
    print("\n".join(table(rows)))
    print(f"{len(rows)} kernels in {time.perf_counter() - start:.1f} s")
    return 0


def build(variant: cubins.Variant, cache: Path | None) -> Built:
    """Compile one variant unless it is there."""
    name, defines = variant
    start = time.perf_counter()
    path = cubins.cubin(name, defines, cache)
    seconds = time.perf_counter() - start
    log = path.with_suffix(".log")
    said = log.read_text() if log.is_file() else ""
    return Built(
        name=name,
        defines=" ".join(f"{macro}={value}" for macro, value in defines.items()),
        path=path,
        seconds=seconds,
        registers=max(map(int, re.findall(r"Used (\d+) registers", said)), default=0),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
    )


def table(rows: Iterable[Built]) -> list[str]:
    """Lines of a table, its head first."""
    cells = [("kernel", "variant", "seconds", "registers", "spilled", "KiB")]
    cells += [
        (r.name, r.defines, f"{r.seconds:.1f}", f"{r.registers}", f"{r.spilled}", f"{r.path.stat().st_size / 1024:.0f}")
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
