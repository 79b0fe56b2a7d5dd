"""`cp-gdn bench`: times the kernels of this machine's GPU and writes what the planner needs to know of them."""

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cp_gdn.cli.arguments import BadInput, positive

if TYPE_CHECKING:
    from cp_gdn.calibration import Calibration
    from cp_gdn.cli.bench_fit import Fitted

SUMMARY = "time the kernels on this GPU and write the constants that pick P; needs a GPU that runs the kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--calibrate", type=Path, required=True, metavar="FILE", help="write the constants of this GPU to FILE (JSON)")
    add("--device", default="cuda", help="the GPU (default: %(default)s)")
    add("--repeats", type=positive, default=3, help="profiled steps per pack and P (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    import torch

    from cp_gdn.cli.bench_fit import calibrated
    from cp_gdn.cli.bench_measure import CASES, measured

    if torch.device(args.device).type != "cuda" or not torch.cuda.is_available():
        raise BadInput(f"--device: got {args.device!r}, expected a CUDA GPU of this machine")
    try:
        samples = [sample for case in CASES for sample in measured(case, args.device, args.repeats)]
    except RuntimeError as error:  # the kernels do not run here; the message says why and what to do
        raise BadInput(str(error)) from None
    properties = torch.cuda.get_device_properties(args.device)
    source = f"cp-gdn bench --calibrate, {datetime.date.today().isoformat()}, {properties.name}, {versions()}"
    found = calibrated(samples, (properties.name, properties.multi_processor_count), source)
    found.calibration.save(args.calibrate)
    print("\n".join(table(found)))
    print(f"{len(samples)} timed kernels; wrote {args.calibrate}")
    return 0


def versions() -> str:
    """What the figures depend on."""
    import torch

    from cp_gdn import __version__

    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, cp_gdn {__version__}"


def table(found: "Fitted") -> Sequence[str]:
    """Lines of a table: every constant beside the one it replaces, then how well each kernel is predicted."""
    from cp_gdn.calibration import H200_MODEL

    lines = [f"{'constant':24} {'ns':>8} {'before':>8}"]
    before = _constants(H200_MODEL)
    lines += [f"{name:24} {value:8} {before[name]:8}" for name, value in _constants(found.calibration).items()]
    lines += ["", f"{'kernel':24} {'timed':>8} {'rms error':>10} {'largest':>8}"]
    for kernel, errors in found.errors.items():
        rms = (sum(e * e for e in errors) / len(errors)) ** 0.5
        lines.append(f"{kernel:24} {len(errors):8} {rms:10.1%} {max(map(abs, errors)):8.1%}")
    return lines


def _constants(calibration: "Calibration") -> dict[str, int]:
    return {**asdict(calibration.times), **asdict(calibration.settings)}
