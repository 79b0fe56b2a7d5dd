"""The Gated DeltaNet layers that others have written, told apart by what they are made of, not by class names.

A family says how the projections of a layer give q | k | v, z, b and a, and what comes after the rule. Submodules are
called, so that LoRA, fp8 and tensor-parallel linears work; of the convolution alone the weights are taken, in forward.
Legend: B rows, S local tokens of a row, H / HV heads, K / V head dims, C = 2 H K + HV V channels of the convolution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cp_gdn.integrations.pack import LayerShape

GATES = frozenset({"A_log", "dt_bias"})
SILU = ("silu", "swish")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projections:
    """What the input projections give. qkv: [B, S, C], before the convolution. z: [B, S, HV, V], None without an output
    gate. b, a: [B, S, HV].
    """

    qkv: Tensor
    z: Tensor | None
    b: Tensor
    a: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Layers of one structure.

    Attributes:
        name: for logs and errors. parts: submodules with parameters that a layer of the family has, exactly.
        optional: those that it may have. marks: attributes that tell it from other kinds made of the same parts.
        convs: the convolutions over q | k | v, in the order of their channels. norm, out: the norm of a value head and
            the output projection. project: the input projections.
        returns_tuple: forward returns (output, None, cache). drops_padding: the original takes padding out first.
        wide_beta: the original has beta in fp32, not in the dtype of b.
    """

    name: str
    parts: frozenset[str]
    optional: frozenset[str] = frozenset()
    marks: frozenset[str] = frozenset()
    convs: tuple[str, ...] = ("conv1d",)
    norm: str
    out: str
    project: Callable[[nn.Module, Tensor], Projections]
    returns_tuple: bool = False
    drops_padding: bool = False
    wide_beta: bool = False


def _project_qkvz(layer: Any, hidden: Tensor) -> Projections:
    """Qwen3-Next: q, k, v, z of one q/k head lie together, and b, a too; the layer knows how to take them apart."""
    split = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    q, k, v, z, b, a = split
    return Projections(qkv=torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1), z=z, b=b, a=a)


def _project_qkv(layer: Any, hidden: Tensor) -> Projections:
    """Qwen3.5 and its kin: q | k | v in one projection, flat; z, b and a apart."""
    z = layer.in_proj_z(hidden).unflatten(-1, (-1, layer.head_v_dim))
    return Projections(qkv=layer.in_proj_qkv(hidden), z=z, b=layer.in_proj_b(hidden), a=layer.in_proj_a(hidden))


def _project_apart(layer: Any, hidden: Tensor) -> Projections:
    """OLMo-hybrid and flash-linear-attention: every projection apart; the latter may have no output gate."""
    qkv = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], dim=-1)
    gate = layer.g_proj(hidden) if hasattr(layer, "g_proj") else None
    z = None if gate is None else gate.unflatten(-1, (-1, layer.head_v_dim))
    return Projections(qkv=qkv, z=z, b=layer.b_proj(hidden), a=layer.a_proj(hidden))


_APART = frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "o_norm", "o_proj"})
_THREE_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")
FAMILIES = (
    Family(
        name="qwen3_next",
        parts=frozenset({"in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj"}),
        norm="norm",
        out="out_proj",
        project=_project_qkvz,
    ),
    Family(
        name="qwen3_5",  # also its mixture of experts, lara_mini and qwen4_exp
        parts=frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"}),
        norm="norm",
        out="out_proj",
        project=_project_qkv,
    ),
    Family(
        name="olmo_hybrid",
        parts=_APART | {"g_proj", "conv1d"},
        norm="o_norm",
        out="o_proj",
        project=_project_apart,
    ),
    Family(
        name="fla",
        parts=_APART | set(_THREE_CONVS),
        optional=frozenset({"g_proj"}),
        marks=frozenset({"use_gate"}),  # its GatedDeltaProduct and Comba have use_output_gate
        convs=_THREE_CONVS,
        norm="o_norm",
        out="o_proj",
        project=_project_apart,
        returns_tuple=True,
        drops_padding=True,
        wide_beta=True,
    ),
)


def parts_of(layer: nn.Module) -> frozenset[str]:
    """Names of the submodules that hold numbers; activations and kernels that hang on a layer do not count."""
    # A quantised linear may have buffers only.
    held = ((name, chain(child.parameters(), child.buffers())) for name, child in layer.named_children())
    return frozenset(name for name, numbers in held if next(numbers, None) is not None)


def own_of(layer: nn.Module) -> frozenset[str]:
    """Names of a module's own parameters and buffers."""
    names = (*layer._parameters, *layer._buffers)
    return frozenset(name for name in names if getattr(layer, name) is not None)


def family_of(layer: Any) -> Family | None:
    """The family of a layer, None if it is no Gated DeltaNet layer that we know.

    Raises:
        NotImplementedError: it is one, with a setting that cp_gdn does not compute.
    """
    if own_of(layer) != GATES or layer.A_log.dim() != 1 or layer.A_log.shape != layer.dt_bias.shape:
        return None
    parts = parts_of(layer)
    for family in FAMILIES:
        if family.parts <= parts <= family.parts | family.optional and all(hasattr(layer, m) for m in family.marks):
            _check_settings(layer, family)
            return family
    return None


def layer_shape(layer: Any, family: Family, dtype: torch.dtype | None) -> LayerShape:
    """What a layer wants of a context, from its head counts and its convolution; dtype None: the convolution's."""
    weights = [getattr(layer, name).weight for name in family.convs]
    conv = (sum(weight.shape[0] for weight in weights), weights[0].shape[-1])
    return LayerShape(_heads(layer), (layer.head_k_dim, layer.head_v_dim), conv, dtype or weights[0].dtype)


def _heads(layer: Any) -> tuple[int, int]:
    """(H, HV); one name or the other says them."""
    num_heads = getattr(layer, "num_k_heads", None) or layer.num_heads
    return num_heads, getattr(layer, "num_v_heads", None) or num_heads


def conv_parameters(layer: Any, family: Family) -> tuple[Tensor, Tensor | None]:
    """Weight [C, width] and bias [C] of the convolution, in the order of the channels q | k | v."""
    convs = [getattr(layer, name) for name in family.convs]
    weights = [whole(conv.weight, "the convolution's weight").squeeze(1) for conv in convs]
    biases = [whole(conv.bias, "the convolution's bias") for conv in convs if getattr(conv, "bias", None) is not None]
    if len(convs) == 1:
        return weights[0], biases[0] if biases else None
    return torch.cat(weights), torch.cat(biases) if biases else None


def whole(parameter: Any, name: str) -> Tensor:
    """A parameter as a plain tensor; tensor parallelism may hold it as a DTensor with a replica on every rank."""
    if not hasattr(parameter, "to_local"):
        plain: Tensor = parameter
        return plain
    if any(not placement.is_replicate() for placement in parameter.placements):
        raise NotImplementedError(
            f"cp_gdn: {name} is a DTensor placed as {parameter.placements}; expected a replica on every rank: leave "
            "conv1d, A_log and dt_bias out of the tensor-parallel plan, and let FSDP gather the layer that holds them"
        )
    local: Tensor = parameter.to_local()
    return local


def _check_settings(layer: Any, family: Family) -> None:
    convs = [getattr(layer, name) for name in family.convs]
    activations = (
        {getattr(conv, "activation", None) for conv in convs}
        if len(convs) > 1
        else {getattr(layer, "activation", None)}
    )
    if not activations <= set(SILU):
        raise NotImplementedError(
            f"cp_gdn: {type(layer).__name__} has a convolution with activation {sorted(map(str, activations))}; "
            "expected silu"
        )
    widths = {conv.weight.shape[-1] for conv in convs}
    if len(widths) > 1:
        raise NotImplementedError(
            f"cp_gdn: {type(layer).__name__} has convolutions of widths {sorted(widths)}; expected one width"
        )
    (heads, value_heads), key_dim, value_dim = _heads(layer), layer.head_k_dim, layer.head_v_dim
    wanted = [heads * key_dim, heads * key_dim, value_heads * value_dim]
    channels = [conv.weight.shape[0] for conv in convs]
    if channels != (wanted if len(convs) > 1 else [sum(wanted)]):
        raise NotImplementedError(
            f"cp_gdn: {type(layer).__name__} has convolutions of {channels} channels; expected q | k | v of {wanted}"
        )
