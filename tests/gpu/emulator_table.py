"""Errors of the tile emulator in every case of the budgets' table: gates x keys x beta x lengths, per head.

python -m tests.gpu.emulator_table [--device cpu] [--tokens 192 4096] [--out FILE.json]   about 60 s on an H200

A case has one query/key head and three value heads; cases of one gate and length are heads of one pack.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.tile_emulator import EXACT, FLOORS, Roundings, emulate, head_errors

TABLE = Path(__file__).resolve().parents[1] / "golden" / "emulator.json"
GATES = ("none", "model", "A16")
DRAWS = {192: 16, 4_096: 16, 65_536: 4}
"""Emulations by length: where few chunks decide an error they differ more."""
GROUP = 3
CASES = tuple(itertools.product((0.0, 0.9, 0.99), (None, 1.0, 1.99, 2.0)))
"""Correlation of the keys, and beta; None: sigmoid(N(0, 1))."""


def block(gate: str, tokens: int, device: torch.device | str) -> dict[str, Tensor]:
    """One document whose heads are `CASES`, `GROUP` value heads each, with initial states and gradients of the last."""
    gen, heads = torch.Generator(device=device).manual_seed(tokens), len(CASES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    noise = normal(tokens, heads * GROUP)
    g = {"none": 0 * noise, "model": -F.softplus(noise - 3), "A16": -16 * F.softplus(noise * 0.5 + 1)}[gate]
    pull = torch.tensor([(c / (1 - c)) ** 0.5 for c, _ in CASES], device=device)[:, None]
    keys = normal(tokens, heads, 128) * 128**-0.5 + pull * F.normalize(normal(heads, 128), dim=-1)
    beta = normal(tokens, heads, GROUP).sigmoid()
    for i, (_, value) in enumerate(CASES):
        beta[:, i] = beta[:, i] if value is None else value
    states = (1, heads * GROUP, 128, 128)
    x = {"q": F.normalize(normal(tokens, heads, 128), dim=-1).bfloat16(), "k": F.normalize(keys, dim=-1).bfloat16()}
    x |= {name: normal(tokens, heads * GROUP, 128).bfloat16() for name in ("v", "dout")}
    return x | {"g": g, "beta": beta.flatten(1), "start": normal(*states), "dend": normal(*states) / 8}


def emulated(gate: str, tokens: int, device: torch.device | str) -> dict[str, Tensor]:
    """Errors [draws, heads] of every tensor."""
    x = block(gate, tokens, device)
    want = emulate(x, [tokens], EXACT)
    found: dict[str, list[Tensor]] = {name: [] for name in FLOORS}
    for seed in range(DRAWS[tokens]):
        got = emulate(x, [tokens], Roundings.drawn(seed, device))
        for name, errors in found.items():
            errors.append(head_errors(got[name], want[name]).cpu())
    return {name: torch.stack(errors) for name, errors in found.items()}


def rounded(x: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in x.tolist()]


def row(gate: str, tokens: int, device: torch.device | str) -> dict[str, object]:
    """Of one gate and length, in the order of `CASES`: per tensor the usual error (root mean square of the draws) of
    every head, and how far a draw may lie above its head's usual one, by case."""
    errors = emulated(gate, tokens, device)
    usual = {name: each.square().mean(0).sqrt() for name, each in errors.items()}
    relative = {name: (each / usual[name]).unflatten(1, (len(CASES), -1)) for name, each in errors.items()}
    largest = {name: rounded(each.amax((0, 2))) for name, each in relative.items()}
    made = {"gate": gate, "tokens": tokens, "draws": DRAWS[tokens], "largest": largest}
    return made | {"usual": {name: rounded(each) for name, each in usual.items()}}


def table(tokens: Sequence[int], device: torch.device | str) -> dict[str, object]:
    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "cpu"
    return {
        "device": name,
        "versions": {"torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
        "cases": [{"keys": keys, "beta": "sigmoid" if beta is None else beta} for keys, beta in CASES],
        "rows": [row(gate, count, device) for count in tokens for gate in GATES],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted(DRAWS), choices=sorted(DRAWS))
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    made = table(args.tokens, args.device)
    rows = made.pop("rows")
    lines = ",\n".join(json.dumps(each) for each in rows)  # a row a line
    args.out.write_text(json.dumps(made)[:-1] + ', "rows": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
