"""What would happen to each kind of layer of a model, from its config: `cp-gdn doctor --model NAME_OR_PATH`.

With transformers the model is built without memory (on the meta device) and its layers are told by their structure, as
when a run takes them over. Without, a local config.json is read and its words are believed.
"""

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cp_gdn.cli.arguments import BadInput
from cp_gdn.cli.doctor_traps import STOPS, Finding

FLA = "gated_deltanet"
"""model_type of flash-linear-attention's, which transformers does not know by itself."""

FAMILIES = (
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini",
    "qwen4_exp", "qwen4_exp_text", FLA,
)  # fmt: skip
"""model_type of those whose linear_attention layers are Gated DeltaNet; only asked where transformers is not there."""

SOFTMAX = "softmax attention: torch's context parallelism over NCCL for unpacked rows, else gathered keys and values"
MEDIA = "text trains; batches with images, video or audio are refused"
ON_ONE_RANK = "train this model with cp_size 1"
OTHERS = "for softmax attention alone use Accelerate's or torch's own context parallelism"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Heads (H, HV), head dims (K, V) and the convolution's (channels, width) of a Gated DeltaNet layer."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    conv: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of layer. layers: how many, 0 if that is not told. shape: of Gated DeltaNet layers, None for others.
    way_out: what to do where a run with cp_size > 1 ends at this kind, else empty."""

    kind: str
    layers: int
    happens: str
    shape: Shape | None = None
    way_out: str = ""


def examine(name: str) -> tuple[str, list[Kind]]:
    """The model's type and its kinds of layers.

    Raises:
        BadInput: the config cannot be found or read.
    """
    if importlib.util.find_spec("transformers") is not None and not _for_words_alone(name):
        config = _config_of_transformers(name)
        values, kinds = config.to_dict(), by_structure(config)
    else:
        values, kinds = _config_of_file(name), None
    if kinds is None:
        kinds = by_words(values.get("text_config") or values)
    if values.get("vision_config") or values.get("audio_config"):
        kinds = [*kinds, Kind(kind="images", layers=0, happens=MEDIA)]
    return str(values.get("model_type")), kinds


def _for_words_alone(name: str) -> bool:
    """Whether a config is flash-linear-attention's, and the library is not there to tell transformers of it."""
    path = Path(name) if name.endswith(".json") else Path(name, "config.json")
    if not path.is_file() or _config_of_file(name).get("model_type") != FLA:
        return False
    try:
        importlib.import_module("fla.models")
    except Exception:  # it is not installed, or the compiler of its kernels is not
        return True
    return False


def _config_of_transformers(name: str) -> Any:
    from transformers import AutoConfig

    path = Path(name)
    try:
        return AutoConfig.from_pretrained(str(path.parent if path.suffix == ".json" else name))
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise BadInput(f"--model {name}: transformers cannot read its config: {first}") from None


def _config_of_file(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith(".json") else Path(name, "config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"--model {name}: {path} cannot be read ({error.strerror or error}); names of models need transformers: "
            "pip install 'cp_gdn[accelerate]'"
        ) from None
    except ValueError as error:
        raise BadInput(f"--model {name}: {path} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise BadInput(f"--model {name}: {path} holds a {type(values).__name__}, expected the fields of a config")
    return values


# ---- By structure ----------------------------------------------------------------------------------------------------


def by_structure(config: Any) -> list[Kind] | None:
    """Kinds of layers of the model that transformers makes of a config; None if it makes none."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config.get_text_config())
    except Exception:
        return None
    return kinds_of(model)


def kinds_of(model: Any) -> list[Kind]:
    """Kinds of layers of a model, told as `take_over` tells them."""
    from cp_gdn.integrations.kinds import attention_layers, unknown_recurrences
    from cp_gdn.integrations.transformers import find_layers

    try:
        found = find_layers(model)
    except NotImplementedError as error:
        return [Kind(kind="linear_attention", layers=0, happens=f"refused: {error}", way_out=ON_ONE_RANK)]
    names = tuple(found)
    counted = Counter((family.name, _shape_of(model.get_submodule(name), family)) for name, family in found.items())
    kinds = [_taken(family, count, shape) for (family, shape), count in counted.items()]
    types = Counter(getattr(model.config, "layer_types", None) or ())
    full = types.pop("full_attention", 0) if types else len(attention_layers(model, names))
    if full:
        kinds.append(Kind(kind="full_attention", layers=full, happens=SOFTMAX))
    types.pop("linear_attention", None)
    kinds += [_refused(kind, count) for kind, count in types.items()]
    unknown = unknown_recurrences(model, names)
    kinds += [Kind(kind="recurrent", layers=0, happens=f"refused: {what}", way_out=ON_ONE_RANK) for what in unknown]
    return kinds if found or unknown else [*kinds, _nothing()]


def _shape_of(layer: Any, family: Any) -> Shape:
    from cp_gdn.integrations.families import layer_shape

    shape = layer_shape(layer, family, None)
    assert shape.conv is not None
    return Shape(heads=shape.heads, head_dims=shape.head_dims, conv=shape.conv)


# ---- By words --------------------------------------------------------------------------------------------------------


def by_words(config: Mapping[str, Any]) -> list[Kind]:
    """Kinds of layers by what a config says of them."""
    model_type = str(config.get("model_type"))
    types = _layer_types(config, model_type)
    kinds = []
    for kind, count in types.items():
        if kind == "full_attention" and model_type != FLA:
            kinds.append(Kind(kind=kind, layers=count, happens=SOFTMAX))
        elif kind == "linear_attention" and model_type in FAMILIES and config.get("use_short_conv", True):
            kinds.append(_taken(model_type, count, _shape_by_words(config)))
        else:
            kinds.append(_refused(kind, count))
    return kinds if any(kind.shape or kind.way_out for kind in kinds) else [*kinds, _nothing()]


def _layer_types(config: Mapping[str, Any], model_type: str) -> Counter[str]:
    given = config.get("layer_types")
    if given:
        return Counter(map(str, given))
    layers = int(config.get("num_hidden_layers") or 0)
    if model_type == FLA:
        softmax = len((config.get("attn") or {}).get("layers", ()))
    elif model_type in FAMILIES:
        softmax = layers // int(config.get("full_attention_interval") or 4)
    else:
        softmax = layers
    return +Counter({"linear_attention": layers - softmax, "full_attention": softmax})


def _shape_by_words(config: Mapping[str, Any]) -> Shape:
    try:
        if "linear_num_key_heads" in config:
            heads = (int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"]))
            head_dims = (int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"]))
            width = int(config["linear_conv_kernel_dim"])
        else:
            heads = (int(config["num_heads"]), int(config.get("num_v_heads") or config["num_heads"]))
            head_dims = (int(config["head_dim"]), int(config["head_dim"] * config.get("expand_v", 2)))
            width = int(config.get("conv_size", 4))
    except KeyError as error:
        raise BadInput(f"--model: its config has no {error}, which Gated DeltaNet layers need") from None
    channels = 2 * heads[0] * head_dims[0] + heads[1] * head_dims[1]
    return Shape(heads=heads, head_dims=head_dims, conv=(channels, width))


# ---- What is said ----------------------------------------------------------------------------------------------------


def _taken(family: str, count: int, shape: Shape) -> Kind:
    return Kind(kind="linear_attention", layers=count, happens=f"Gated DeltaNet ({family}): taken over", shape=shape)


def _refused(kind: str, count: int) -> Kind:
    return Kind(kind=kind, layers=count, happens="refused: cp_gdn cannot split it over ranks", way_out=ON_ONE_RANK)


def _nothing() -> Kind:
    return Kind(kind="none", layers=0, happens="refused: no Gated DeltaNet layer that cp_gdn knows", way_out=OTHERS)


def model_findings(name: str, kinds: list[Kind]) -> list[Finding]:
    """What of a model would stop a run."""
    return [
        Finding(level=STOPS, name=f"{kind.kind} of {name}", what=kind.happens, way_out=kind.way_out)
        for kind in kinds
        if kind.way_out
    ]
