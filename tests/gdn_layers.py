"""Gated DeltaNet layers of other libraries, tiny and random, in fp64, and what they compute whole and split."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cp_gdn import Comm
from cp_gdn.integrations.seat import Pack, Seat
from cp_gdn.integrations.transformers import Takeover, take_over
from cp_gdn.reference import gated_delta_rule
from tests.in_double import InDouble

HIDDEN, HEADS, HEAD_DIMS = 32, (2, 4), (16, 24)
TRANSFORMERS = importlib.util.find_spec("transformers")
needs_transformers = pytest.mark.skipif(TRANSFORMERS is None, reason="transformers is not installed")

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "linear_num_key_heads": HEADS[0], "linear_num_value_heads": HEADS[1], "linear_key_head_dim": HEAD_DIMS[0],
    "linear_value_head_dim": HEAD_DIMS[1], "intermediate_size": 48, "vocab_size": 64,
    "layer_types": ["linear_attention", "linear_attention"],
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", {"num_experts": 0, "mlp_only_layers": [0, 1]}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeGatedDeltaNet", EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridGatedDeltaNet", HYBRID | {"linear_allow_neg_eigval": True}),
    "lara_mini": ("LaraMiniConfig", "LaraMiniGatedDeltaNet", EXPERTS),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", {"output_gate_type": "sigmoid"}),
}


def needs(kind: str) -> pytest.MarkDecorator:
    """Skip unless the installed transformers has this model."""
    folders = list(TRANSFORMERS.submodule_search_locations or ()) if TRANSFORMERS else []
    found = any((Path(folder) / "models" / kind).is_dir() for folder in folders)
    return pytest.mark.skipif(not found, reason=f"the installed transformers, if any, has no {kind}")


KINDS = [
    *(pytest.param(kind, marks=needs(kind)) for kind in CLASSES),
    "fla",
    "fla, biases and beta up to 2",
    "fla without an output gate",
]


class StandInConv(nn.Conv1d):
    """A depthwise causal convolution by the attributes of flash-linear-attention's."""

    def __init__(self, channels: int, bias: bool) -> None:
        super().__init__(channels, channels, 4, groups=channels, padding=3, bias=bias)
        self.activation = "silu"

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x.mT)[..., : x.shape[1]]).mT


class StandInNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEAD_DIMS[1]))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)
        return normed if gate is None else normed * F.silu(gate)


class StandIn(nn.Module):
    """Made of what flash-linear-attention's layer is made of; its rule is the token recurrence."""

    def __init__(self, *, gate: bool = True, bias: bool = False, allow_neg_eigval: bool = False) -> None:
        super().__init__()
        (self.num_heads, self.num_v_heads), (self.head_k_dim, self.head_v_dim) = HEADS, HEAD_DIMS
        self.use_gate, self.allow_neg_eigval = gate, allow_neg_eigval
        widths = {"q": HEADS[0] * HEAD_DIMS[0], "k": HEADS[0] * HEAD_DIMS[0], "v": HEADS[1] * HEAD_DIMS[1]}
        for name, width in (widths | {"a": HEADS[1], "b": HEADS[1]}).items():
            self.add_module(f"{name}_proj", nn.Linear(HIDDEN, width, bias=bias))
        for name, width in widths.items():
            self.add_module(f"{name}_conv1d", StandInConv(width, bias))
        if gate:
            self.g_proj = nn.Linear(HIDDEN, widths["v"], bias=False)
        self.o_norm, self.o_proj = StandInNorm(), nn.Linear(widths["v"], HIDDEN, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(HEADS[1])), nn.Parameter(torch.empty(HEADS[1]))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None, Any]:
        mask = hidden_states.new_ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        y = torch.zeros_like(hidden_states)
        for row, real in enumerate(mask.bool()):
            y = y.index_put((torch.tensor(row), real.nonzero()[:, 0]), self._document(hidden_states[row, real]))
        return y, None, past_key_values

    def _document(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, f"{n}_conv1d")(getattr(self, f"{n}_proj")(x[None]))[0] for n in "qkv")
        beta = self.b_proj(x).sigmoid() * (2.0 if self.allow_neg_eigval else 1.0)
        g = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        q, k = (part.unflatten(-1, (HEADS[0], -1)) for part in (q, k))
        o, _ = gated_delta_rule(q, k, v.unflatten(-1, (HEADS[1], -1)), g, beta, [0, len(x)], use_qk_l2norm=True)
        gate = (self.g_proj(x).unflatten(-1, (HEADS[1], -1)),) if hasattr(self, "g_proj") else ()
        return self.o_proj(self.o_norm(o, *gate).flatten(-2))


class Adapted(nn.Module):
    """A linear under a low-rank adapter; it offers no weight."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 3, bias=False), nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


STAND_INS: dict[str, dict[str, bool]] = {
    "fla": {},
    "fla, biases and beta up to 2": {"bias": True, "allow_neg_eigval": True},
    "fla without an output gate": {"gate": False},
}


def config_of(kind: str, **changes: Any) -> Any:
    """A tiny config of a Hugging Face model type."""
    name, _, more = CLASSES[kind]
    return getattr(importlib.import_module("transformers"), name)(**SIZES | more | changes)


def modeling(kind: str) -> Any:
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def make_layer(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer with random weights and decays slow enough that a state lives through the sequence."""
    torch.manual_seed(3)
    stand_in = STAND_INS.get(kind)
    layer = getattr(modeling(kind), CLASSES[kind][1])(config_of(kind), 0) if stand_in is None else StandIn(**stand_in)
    randomize(layer)
    return layer.to(dtype)


def randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            low, high = {"A_log": (-4.0, 0.0), "dt_bias": (-5.0, -1.0)}.get(name.rpartition(".")[2], (-0.4, 0.4))
            parameter.uniform_(low, high)
            if parameter.dim() == 1 and name.endswith("norm.weight"):
                parameter.add_(1.0)


# ---- batches and outcomes --------------------------------------------------------------------------------------------

Outcome = dict[str, Tensor]
"""y and dx of the whole batch, and the gradient of every trained parameter by its name."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of which the first (`left`: last) `real` tokens are no padding, or one row of the documents of `bounds`."""

    length: int = 0
    real: Sequence[int] = ()
    left: bool = False
    bounds: Sequence[int] = ()
    layout: str = "zigzag"
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (1, self.bounds[-1]) if self.bounds else (len(self.real), self.length))

    @property
    def mask(self) -> Tensor | None:
        """[B, S], None without padding."""
        if self.bounds or min(self.real) == self.length:
            return None
        mask = (torch.arange(self.length) < torch.tensor(self.real)[:, None]).long()
        return mask.flip(1) if self.left else mask

    def documents(self) -> list[tuple[int, int, int]]:
        """Row, first and last + 1 token of every document, without padding."""
        if self.bounds:
            return [(0, start, end) for start, end in pairwise(self.bounds) if start < end]
        starts = [self.length - real if self.left else 0 for real in self.real]
        return [(row, start, start + real) for row, (start, real) in enumerate(zip(starts, self.real, strict=True))]

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """x and dy, [B, S, hidden]; dy is zero on padding."""
        gen = torch.Generator().manual_seed(self.shape[1])
        x, dy = torch.randn(2, *self.shape, HIDDEN, generator=gen, dtype=torch.float64).to(dtype)
        return x, dy if self.mask is None else dy * self.mask[:, :, None]

    def pack(self, seat: Seat) -> Pack:
        return seat.packed(self.bounds, layout=self.layout) if self.bounds else seat.rows(*self.shape)


BATCHES = {
    "one row": Batch(length=64, real=(64,)),
    "three rows": Batch(length=48, real=(48, 48, 48)),
    "right padding": Batch(length=48, real=(48, 29, 2)),
    "left padding": Batch(length=48, real=(48, 29, 2), left=True),
    "packed": Batch(bounds=(0, 37, 88, 128)),
    "packed, per document": Batch(bounds=(0, 5, 5, 70, 131), layout="zigzag_per_document"),
    "packed, contiguous": Batch(bounds=(0, 37, 88, 129), layout="contiguous"),
}


def output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # flash-linear-attention's returns three things


def whole(layer: nn.Module, batch: Batch) -> Outcome:
    """The original layer on every document alone, without its padding."""
    x, dy = batch.tensors()
    x.requires_grad_()
    y = torch.zeros_like(x)
    with InDouble():
        for row, start, end in batch.documents():
            y = y.index_put(
                (torch.tensor(row), torch.arange(start, end)), output(layer(x[row : row + 1, start:end]))[0]
            )
    return outcome(layer, x, y, dy)


def outcome(layer: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Outcome:
    trained = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(y, [x, *trained.values()], dy)
    return {"y": y.detach()} | dict(zip(["dx", *trained], grads, strict=True))


def on_rank(comm: Comm, layer: nn.Module, batch: Batch, **options: Any) -> tuple[Tensor, Outcome]:
    """A copy of the layer on one rank's share: indices of its tokens, and its outcome."""
    mine = copy.deepcopy(layer)
    seat = take_over(mine, comm, **options).seat
    with seat.hold(batch.pack(seat)) as pack, InDouble():
        x, dy = (pack.local(tensor) for tensor in batch.tensors())
        mask = {} if batch.mask is None else {"attention_mask": pack.local(batch.mask)}
        x.requires_grad_()
        y = output(mine(hidden_states=x, **mask))
        return pack.token_ids, outcome(mine, x, y, dy)


def together(ranks: Sequence[tuple[Tensor, Outcome]], batch: Batch) -> Outcome:
    """Rows of all ranks in the order of the batch, zeros on padding, and the sums of parameter gradients."""
    order = torch.argsort(torch.cat([token_ids for token_ids, _ in ranks]))
    results = [result for _, result in ranks]
    sums = {name: sum(result[name] for result in results) for name in results[0] if name not in ("y", "dx")}
    rows = {}
    for name in ("y", "dx"):
        rows[name] = torch.cat([result[name].flatten(0, 1) for result in results])[order].view(*batch.shape, HIDDEN)
    if batch.mask is not None:
        rows["y"] = rows["y"] * batch.mask[:, :, None]
    return rows | sums


@torch.no_grad()
def errors_above(got: Outcome, want: Outcome, limit: float) -> dict[str, float]:
    """Relative L2 of the tensors that are further from `want` than the limit."""
    assert got.keys() == want.keys()
    errors = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
    return {name: error for name, error in errors.items() if not error <= limit}


# ---- on one rank, by cp_gdn's operators ------------------------------------------------------------------------------


def alone(model: nn.Module, **options: Any) -> Takeover:
    """Taken over on one rank, to run cp_gdn's operators."""
    return take_over(model, Comm.alone(), on_one_rank=True, **options)


def run(layer: nn.Module, seat: Seat, x: Tensor) -> Tensor:
    with seat.hold(seat.rows(*x.shape[:2])):
        return output(layer(hidden_states=x))


def some_rows() -> Tensor:
    """[3, 48, hidden]."""
    return BATCHES["three rows"].tensors()[0]


def tiny_model(**changes: Any) -> nn.Module:
    """A Qwen3-Next of two linear layers."""
    torch.manual_seed(7)
    model: nn.Module = modeling("qwen3_next").Qwen3NextForCausalLM(config_of("qwen3_next", **changes))
    return model
