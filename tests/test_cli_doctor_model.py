"""`cp-gdn doctor --model`: what it says of each kind of layer, with transformers by structure, without it by words."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from cp_gdn.cli import doctor_model, main
from cp_gdn.cli.doctor_model import Shape

QWEN = Shape(heads=(16, 32), head_dims=(128, 128), conv=(8192, 4))
OLMO = Shape(heads=(30, 30), head_dims=(96, 192), conv=(11520, 4))
QWEN_WORDS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
WORDS: dict[str, tuple[dict[str, Any], list[tuple[str, int, Shape | None]], list[str]]] = {
    "layers by an interval": (
        {"model_type": "qwen3_next", "num_hidden_layers": 12, **QWEN_WORDS},
        [("linear_attention", 9, QWEN), ("full_attention", 3, None)],
        [],
    ),
    "layers by name, below text_config": (
        {
            "model_type": "qwen3_5",
            "vision_config": {"depth": 2},
            "text_config": {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "full_attention"],
                **QWEN_WORDS,
            },
        },
        [("linear_attention", 1, QWEN), ("full_attention", 1, None), ("images", 0, None)],
        [],
    ),
    "flash-linear-attention": (
        {
            "model_type": "gated_deltanet",
            "num_hidden_layers": 4,
            "num_heads": 6,
            "head_dim": 256,
            "attn": {"layers": [1]},
        },
        [
            ("linear_attention", 3, Shape(heads=(6, 6), head_dims=(256, 512), conv=(6144, 4))),
            ("full_attention", 1, None),
        ],
        ["full_attention"],
    ),
    "flash-linear-attention without a convolution": (
        {"model_type": "gated_deltanet", "num_hidden_layers": 2, "use_short_conv": False},
        [("linear_attention", 2, None)],
        ["linear_attention"],
    ),
    "a sliding window": (
        {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "sliding_attention"], **QWEN_WORDS},
        [("linear_attention", 1, QWEN), ("sliding_attention", 1, None)],
        ["sliding_attention"],
    ),
    "another linear attention": (
        {"model_type": "kimi_linear", "layer_types": ["linear_attention", "full_attention"]},
        [("linear_attention", 1, None), ("full_attention", 1, None)],
        ["linear_attention"],
    ),
    "softmax attention alone": (
        {"model_type": "llama", "num_hidden_layers": 2},
        [("full_attention", 2, None), ("none", 0, None)],
        ["none"],
    ),
}  # fmt: skip
Examined = tuple[list[tuple[str, int, Shape | None]], list[str]]


def examined(name: str) -> Examined:
    _, kinds = doctor_model.examine(name)
    stops = [finding.name.split(" of ")[0] for finding in doctor_model.model_findings(name, kinds)]
    return [(kind.kind, kind.layers, kind.shape) for kind in kinds], stops


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize(("config", "kinds", "stops"), WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("as_file", [False, True])
def test_without_transformers_a_local_config_is_believed(
    config: dict[str, Any], kinds: Any, stops: list[str], as_file: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert examined(str(tmp_path / "config.json" if as_file else tmp_path)) == (kinds, stops)


def test_a_config_that_transformers_does_not_know_of_is_flash_linear_attentions_all_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gated_deltanet", "num_hidden_layers": 4, "num_heads": 6, "head_dim": 256, "expand_v": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape(heads=(6, 6), head_dims=(256, 512), conv=(6144, 4))
    assert examined(str(tmp_path)) == ([("linear_attention", 4, shape)], [])


BAD_CONFIGS = {
    "a name": (None, "names of models need transformers"),
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "holds a list"),
    "heads missing": ('{"model_type": "qwen3_next", "num_hidden_layers": 4}', "has no 'num_heads'"),
}


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize(("text", "said"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_cannot_be_read_ends_with_status_2(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main.main(["doctor", "--model", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


# ---- By structure ----------------------------------------------------------------------------------------------------

FOUR = {"num_hidden_layers": 4}
STRUCTURES: dict[str, tuple[str, dict[str, Any], list[tuple[str, int, Shape | None]], list[str]]] = {
    "qwen3_next": ("qwen3_next", FOUR, [("linear_attention", 3, QWEN), ("full_attention", 1, None)], []),
    "qwen3_5 with images": (
        "qwen3_5",
        {},
        [("linear_attention", 24, QWEN), ("full_attention", 8, None), ("images", 0, None)],
        [],
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        FOUR,
        [
            ("linear_attention", 3, OLMO),
            ("full_attention", 1, None),
        ],
        [],
    ),
    "a sliding window": (
        "olmo_hybrid",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "sliding_attention"]},
        [("linear_attention", 1, OLMO), ("sliding_attention", 1, None)],
        ["sliding_attention"],
    ),
    "another recurrence": (
        "kimi_linear",
        FOUR,
        [("recurrent", 0, None), ("recurrent", 0, None)],
        ["recurrent", "recurrent"],
    ),
    "softmax attention alone": ("llama", FOUR, [("full_attention", 4, None), ("none", 0, None)], ["none"]),
}


@pytest.mark.parametrize(("family", "changes", "kinds", "stops"), STRUCTURES.values(), ids=STRUCTURES)
def test_with_transformers_layers_are_told_by_their_structure(
    family: str, changes: dict[str, Any], kinds: Any, stops: list[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(family, **changes).save_pretrained(tmp_path)
    assert examined(str(tmp_path)) == (kinds, stops)


def test_a_model_that_stops_a_run_ends_with_status_1_and_its_head_shapes_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    transformers.AutoConfig.for_model("olmo_hybrid", **FOUR).save_pretrained("hybrid")
    transformers.AutoConfig.for_model("llama", **FOUR).save_pretrained("softmax")
    assert main.main(["doctor", "--json", "--model", "hybrid", "--heads", "16,48"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["model"]["name"], got["model"]["type"]) == ("hybrid", "olmo_hybrid")
    assert [row["layers"] for row in got["model"]["layers"]] == [3, 1]
    assert [row["heads"] for row in got["backends"]] == [[30, 30], [16, 48]]
    assert main.main(["doctor", "--model", "softmax"]) == 1
    shown = capsys.readouterr().out
    assert "    4 full_attention: softmax attention" in shown
    assert "STOPS  none of softmax: refused" in shown


def test_a_name_that_nobody_has_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    def unknown(name: str) -> None:
        raise OSError("there is no such model\nand much more text")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unknown)
    assert main.main(["doctor", "--model", "nobody/nothing"]) == 2
    said = capsys.readouterr().err
    assert "nobody/nothing: transformers cannot read its config: there is no such model" in said
    assert "much more" not in said
