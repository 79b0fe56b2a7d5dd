"""`cp-gdn verify`: the same pack over real processes (ring and a2a), as the twin and on one rank, tensor by tensor."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cp_gdn.cli.arguments import LAYOUTS, BadInput, integers, pair, positive, require_gpu, require_packages

if TYPE_CHECKING:
    from cp_gdn.cli.verify_case import Case

SUMMARY = "compare ring, a2a, the twin and one rank on a pack of yours; exit status 1 on a difference"
CHUNK = 64
BACKENDS = ("auto", "torch", "hopper")
DTYPE_NAMES = ("fp64", "fp32", "bf16", "fp16")
GATE_NAMES = ("none", "mild", "model", "slow", "strong")
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"head_dims": (32, 32), "dtype": "fp32"},
    "cuda": {"head_dims": (128, 128), "dtype": "bf16"},
}
"""Of options that depend on the device: what the kernels take, where they are to run."""


def segments(text: str) -> int | str:
    """`"2"` -> 2, `"grid:8"` stays."""
    head, _, tail = text.rpartition(":")
    if head not in ("", "grid") or not tail.isdecimal() or int(tail) < 1 or text.startswith(":"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1 or grid:N")
    return text if head else int(tail)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cu-seqlens", type=integers, required=True, help="document boundaries of the pack, such as 0,37,88,128")
    add("--layout", choices=LAYOUTS, default="zigzag_per_document", help="default: %(default)s")
    add("--world", type=positive, default=2, help="ranks (default: %(default)s)")
    add("--heads", type=pair, default=(2, 4), help="q/k heads and value heads (default: 2,4)")
    add("--head-dims", type=pair, help="channels of a q/k head and of a value head (default: 32,32; on cuda 128,128)")
    add("--segments", type=segments, default=1, help="segments per fragment, or grid:N (default: %(default)s)")
    add("--align", type=positive, help="move cuts to multiples of this many tokens (default: 1; 64*N with grid:N)")
    add("--device", choices=tuple(DEFAULTS), default="cpu", help="ranks share the GPUs (default: %(default)s)")
    add("--backend", choices=BACKENDS, default="auto", help="of the op; hopper: the kernels (default: %(default)s)")
    add("--dtype", choices=DTYPE_NAMES, help="default: fp32; on cuda bf16")
    add("--gate", choices=GATE_NAMES, default="model", help="kind of decays (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    add("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.json:
        require_packages("verify without --json", "rich")
    from cp_gdn.cli import verify_report, verify_world
    from cp_gdn.cli.verify_compare import backend_of, compare

    if args.device == "cuda":
        require_gpu("cpu")
    case = make_case(args)
    with _one_thread():
        _refuse_bad_case(case)
        try:
            processes = verify_world.run_processes(case)
        except verify_world.WorldFailed as error:
            print(f"cp-gdn verify: {error}", file=sys.stderr)
            return 1
        worlds = (processes, verify_world.run_twin(case), verify_world.run_one_rank(case))
    backend, rows = backend_of(*worlds), compare(case, *worlds)
    (verify_report.print_json if args.json else verify_report.print_table)(case, backend, rows)
    return 0 if all(row.passed for row in rows) else 1


def make_case(args: argparse.Namespace) -> "Case":
    from cp_gdn.cli.verify_case import Case

    # In grid mode a cut must lie on the grid, so the cuts move there unless the user says otherwise.
    grid = int(args.segments.split(":")[1]) if isinstance(args.segments, str) else None
    # --backend hopper without --device is to fail for the want of a GPU, not for a dtype that nobody asked for.
    defaults = DEFAULTS["cuda" if args.backend == "hopper" else args.device]
    defaults = {**defaults, "align": CHUNK * grid if grid else 1}
    asked = {field: getattr(args, field) for field in Case.__dataclass_fields__}
    return Case(**{field: defaults[field] if value is None else value for field, value in asked.items()})


def _refuse_bad_case(case: "Case") -> None:
    from cp_gdn.cli.verify_world import check_case

    # A plan that is refused is the user's input here, not a failure of ranks to be logged.
    log = logging.getLogger("cp_gdn")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        check_case(case)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: the kernels do not fit or cannot run here
        raise BadInput(str(error)) from error
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Pin torch to one thread, as the spawned ranks are: bits are promised at a fixed thread count."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
