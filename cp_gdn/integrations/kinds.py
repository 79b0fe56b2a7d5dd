"""What else mixes tokens in a model: recurrent layers that cp_gdn does not know, and softmax attention.

A recurrent layer that is not taken over would run on a shard as if it were the whole sequence: finite, plausible and
wrong.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from cp_gdn.integrations.families import GATES, own_of, parts_of

_OWN = {
    "slope_rate": "lightning attention",
    "recurrent_param": "a linear recurrence (RG-LRU)",
    "time_decay": "an RWKV time mix",
}
"""Kinds told by a parameter or buffer of their own."""

_MIXING = ({"q_proj"}, {"k_proj"}, {"f_proj", "i_proj"})
"""Projections that attention and recurrences have and no layer of single tokens does."""

_LAYER_TYPES = ("mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding")
"""Entries of a config's layer_types that are recurrences, or hold one."""


def unknown_recurrences(model: nn.Module, taken: tuple[str, ...]) -> list[str]:
    """A sentence per kind of layer that carries tokens along the sequence in a way that cp_gdn does not know."""
    found: dict[tuple[str, str], str] = {}
    for name, module in _outside(model, taken):
        kind = _kind(module)
        if kind is not None:
            found.setdefault((type(module).__name__, kind), name)
    said = [f"{cls} at {name or 'the top'}: {kind}" for (cls, kind), name in found.items()]
    return said or _by_config(model, len(taken))


def attention_layers(model: nn.Module, taken: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the causal softmax attention layers."""
    outside = _outside(model, taken)
    return tuple(name for name, module in outside if getattr(module, "is_causal", None) is True and parts_of(module))


def _outside(model: nn.Module, taken: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are not in a taken-over layer."""
    inside = tuple(f"{name}." if name else "" for name in taken)
    for name, module in model.named_modules():
        if name not in taken and not name.startswith(inside):
            yield name, module


def _kind(module: nn.Module) -> str | None:
    own = own_of(module)
    if "A_log" in own:
        return _gated_kind(module, own)
    kinds = [kind for name, kind in _OWN.items() if name in own]
    if kinds:
        return kinds[0]
    if "dt_bias" in own:
        return f"a state space layer (Mamba) with {', '.join(sorted(own))}"
    children = dict(module.named_children())
    convs = [name for name, child in children.items() if _is_causal_depthwise(child)]
    if convs:
        return f"a short convolution ({', '.join(convs)})"
    if not hasattr(module, "is_causal") and any(names <= children.keys() for names in _MIXING):
        return (
            f"attention or a recurrence of {', '.join(sorted(name for name in children if name.endswith('_proj')))} "
            "(if it is causal softmax attention that runs on sharded sequences, set is_causal = True on it)"
        )
    return None


def _gated_kind(module: Any, own: frozenset[str]) -> str:
    if "dt_bias" in own and module.dt_bias.numel() != module.A_log.numel():
        return "Kimi Delta Attention (KDA), a gate per channel"
    if own == GATES and any(name.startswith(("in_proj_qkv", "q_proj")) for name in parts_of(module)):
        return (
            f"like Gated DeltaNet, but no such layer that cp_gdn knows, made of {', '.join(sorted(parts_of(module)))}"
        )
    return f"a state space layer (Mamba) or another gated recurrence, with {', '.join(sorted(own))}"


def _is_causal_depthwise(module: nn.Module) -> bool:
    """Whether a module is a depthwise convolution that does not look as far ahead as back."""
    if not isinstance(module, nn.Conv1d) or module.groups != module.in_channels or module.in_channels == 1:
        return False
    reach = module.dilation[0] * (module.kernel_size[0] - 1)
    return reach > 0 and module.padding != "same" and 2 * int(module.padding[0]) != reach


def _by_config(model: nn.Module, num_taken: int) -> list[str]:
    """What the config says where the structure says nothing."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = list(getattr(text, "layer_types", None) or ())
    known = sorted(set(types) & set(_LAYER_TYPES))
    if known:
        return [f"config.layer_types: {', '.join(known)}"]
    linear = types.count("linear_attention")
    if linear > num_taken:
        return [f"config.layer_types: {linear} of linear_attention, but {num_taken} Gated DeltaNet layers were found"]
    return []
