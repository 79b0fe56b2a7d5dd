"""flash-linear-attention's own layer and models, tiny and random; without a GPU their kernels run in Triton's
interpreter.

Nothing here imports fla or triton before it is called. The interpreter is chosen when triton is first imported, by
TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from builtins import range as plain_range
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.gdn_layers import HIDDEN, randomize

MISSING = [name for name in ("fla", "triton", "transformers") if importlib.util.find_spec(name) is None]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "value heads shared and wide": {"num_v_heads": 4, "expand_v": 1.5},
    "no output gate": {"use_gate": False},
    "beta up to 2, conv biases, sigmoid gate": {
        "allow_neg_eigval": True, "conv_bias": True, "output_gate_activation": "sigmoid", "conv_size": 3,
    },
}  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "head_dim": 16, "num_heads": 2, "expand_v": 1.0}
UNFUSED = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
"""So that a model's own kernels do not dominate the interpreter's time."""


class _Index(int):
    """What a Python loop counts with in an interpreted kernel; compiled, it would be a tensor."""

    def to(self, _dtype: Any) -> _Index:
        return self


def _indices(*bounds: Any) -> Iterator[_Index]:
    return (_Index(index) for index in plain_range(*map(int, bounds)))


def first_that_runs(self: Any, call: Any, quantiles: Any) -> list[float]:
    """In the place of an autotuner's `do_bench`: the first configuration that the device has room for is the best."""
    if not hasattr(self, "found"):
        call()  # raises what the autotuner takes for an unfit configuration
        self.found = True
        return [0.0] * len(quantiles)
    return [1.0] * len(quantiles)


_LAUNCHING = threading.RLock()


def one_at_a_time(call: Any) -> Any:
    """What is called by the threads of a twin and changes what it is called on: tuners, and the interpreter."""

    @functools.wraps(call)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _LAUNCHING:
            return call(*args, **kwargs)

    return locked


def tuned_one_at_a_time() -> dict[tuple[type, str], Any]:
    """By class and name the `run` of triton's and fla's autotuners, so that threads do not meet in it."""
    from triton.runtime.autotuner import Autotuner

    importlib.import_module("fla.layers")
    owners = [owner for owner in (Autotuner, *Autotuner.__subclasses__()) if "run" in vars(owner)]
    return {(owner, "run"): one_at_a_time(owner.run) for owner in owners}


def interpret() -> None:
    """Make fla's kernels run in the interpreter: one at a time, with the first of their configurations.

    Raises:
        RuntimeError: triton was imported without TRITON_INTERPRET=1.
    """
    from triton.runtime import autotuner, interpreter

    locked_tuners = tuned_one_at_a_time()
    kernel = sys.modules["fla.ops.common.gate"].fused_beta_sigmoid_fwd_kernel
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    if getattr(autotuner.Autotuner, "do_bench", None) is first_that_runs:
        return
    grid: Any = interpreter.GridExecutor
    for (owner, attribute), locked in {(grid, "__call__"): one_at_a_time(grid.__call__), **locked_tuners}.items():
        setattr(owner, attribute, locked)
    autotuner.Autotuner.do_bench = first_that_runs
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.range = _indices  # type: ignore[attr-defined]


def make_fla_layer(kind: str = "plain", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A GatedDeltaNet of fla with random weights and decays slow enough that a state lives through the sequence."""
    from fla.layers import GatedDeltaNet

    torch.manual_seed(3)
    layer: nn.Module = GatedDeltaNet(**SIZES | LAYERS[kind] | changes)
    randomize(layer)
    return layer.to(dtype)


def make_fla_model(*, fresh: bool = False, **changes: Any) -> Any:
    """A causal model of two layers; fresh: with the weights that its library gives it."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "num_v_heads": 4, "intermediate_size": 48}
    model: nn.Module = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**SIZES | sizes | UNFUSED | changes))
    if not fresh:
        randomize(model)
    return model.train()
