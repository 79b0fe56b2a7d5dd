"""What the plugin refuses on two ranks: each function does one thing wrong and lets the error out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from tests.dist.accelerate_world import accelerator_of
from tests.dist.hybrid_models import LENGTH, Case, build, make_batch, make_optimizer

CASE = Case(rows=1)
FIRST = make_batch(CASE, 0, 0, 0)
PADDED = torch.arange(LENGTH)[None] >= 9
RESTARTING = torch.arange(LENGTH)[None] % 60


def prepared(accelerator: Any, *, enabled: bool = True, **options: Any) -> Any:
    """A prepared model; changes of its config beside the options of `enable`."""
    import cp_gdn.accelerate as plugin

    layer_types = options.pop("layer_types", None)
    if enabled:
        plugin.enable(accelerator, **options)
    model = build(CASE.family)
    if layer_types is not None:
        model.config.layer_types = layer_types
    return accelerator.prepare(model, make_optimizer(model))[0]


def sharded(accelerator: Any, batch: dict[str, Any], **options: Any) -> None:
    import cp_gdn.accelerate as plugin

    model = prepared(accelerator)
    with plugin.shard(accelerator, batch, **options):
        plugin.token_mean_loss(accelerator, model, batch)


def by_buffers(accelerator: Any, layout: str = "auto", length: int = LENGTH, **inputs: Any) -> None:
    """As scripts and Trainer do it."""
    model = prepared(accelerator, layout=layout)
    inputs = {"input_ids": torch.ones(1, length, dtype=torch.int64), **inputs}
    buffers = list(inputs.values())
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        model(**inputs)


def without_enable(accelerator: Any) -> None:
    prepared(accelerator, enabled=False)


def enabled_too_late(accelerator: Any) -> None:
    import cp_gdn.accelerate as plugin

    prepared(accelerator)
    plugin.disable(accelerator)
    plugin.enable(accelerator)


def enabled_twice_differently(accelerator: Any) -> None:
    import cp_gdn.accelerate as plugin

    plugin.enable(accelerator, exchange="ring")
    plugin.enable(accelerator, exchange="ring")
    plugin.enable(accelerator, exchange="a2a")


def sliding_layers(accelerator: Any) -> None:
    prepared(accelerator, layer_types=[*["linear_attention"] * 3, "sliding_attention"])


def odd_length(accelerator: Any) -> None:
    sharded(accelerator, {name: value[:, :94] for name, value in FIRST.items()})


def odd_length_of_buffers(accelerator: Any) -> None:
    by_buffers(accelerator, length=94)


def images(accelerator: Any) -> None:
    sharded(accelerator, {**FIRST, "pixel_values": torch.ones(1, 3)})


def left_padding(accelerator: Any) -> None:
    sharded(accelerator, {**FIRST, "attention_mask": PADDED})


def left_padding_of_buffers(accelerator: Any) -> None:
    by_buffers(accelerator, attention_mask=PADDED.clone())


def packing_unsaid(accelerator: Any) -> None:
    sharded(accelerator, {**FIRST, "position_ids": RESTARTING})


def packing_unsaid_in_buffers(accelerator: Any) -> None:
    by_buffers(accelerator, position_ids=RESTARTING.clone())


def layout_per_document_of_buffers(accelerator: Any) -> None:
    by_buffers(accelerator, layout="zigzag_per_document")


def forward_without_shard(accelerator: Any) -> None:
    prepared(accelerator)(input_ids=FIRST["input_ids"])


def other_packs(accelerator: Any) -> None:
    cut = 32 + 8 * accelerator.process_index
    sharded(accelerator, dict(FIRST), cu_seqlens=[0, cut, LENGTH])


def other_options(accelerator: Any) -> None:
    prepared(accelerator, exchange=("ring", "a2a")[accelerator.process_index])


def shard_before_prepare(accelerator: Any) -> None:
    import cp_gdn.accelerate as plugin

    plugin.enable(accelerator)
    with plugin.shard(accelerator, dict(FIRST)):
        pass


def shard_without_enable(accelerator: Any) -> None:
    import cp_gdn.accelerate as plugin

    with plugin.shard(accelerator, dict(FIRST)):
        pass


def accumulation_without_counts(accelerator: Any) -> None:
    accelerator.gradient_accumulation_steps = 3
    sharded(accelerator, dict(FIRST))


def torchs_attention_on_cpu(accelerator: Any) -> None:
    """No device but CUDA has it: the way there, up to torch's own refusal."""
    with mock.patch("cp_gdn.integrations.attention.torch_obstacle", return_value=None):
        sharded(accelerator, dict(FIRST))


REFUSALS: list[tuple[Callable[[Any], None], str, str]] = [
    (without_enable, "ValueError", "Context parallelism does not support attention layers of type"),
    (enabled_too_late, "RuntimeError", "enable came after accelerator.prepare"),
    (enabled_twice_differently, "RuntimeError", "enabled already with .*exchange=ring .*asked for .*exchange=a2a"),
    (sliding_layers, "ValueError", "layers of type sliding_attention; only Gated DeltaNet"),
    (odd_length, "ValueError", "got 94 tokens.*pad every row to 96 on the right .pad_to_multiple_of=4"),
    (odd_length_of_buffers, "ValueError", "got 94 tokens.*pad_to_multiple_of=4"),
    (images, "ValueError", "got pixel_values; images, video and audio cannot be split"),
    (left_padding, "ValueError", "padding before tokens, expected it on the right"),
    (left_padding_of_buffers, "ValueError", "padding before tokens, expected it on the right"),
    (packing_unsaid, "ValueError", "position 0 inside a row.*pass cu_seqlens="),
    (packing_unsaid_in_buffers, "ValueError", "position 0 inside a row.*cu_seq_lens_q"),
    (layout_per_document_of_buffers, "ValueError", 'layout: got "zigzag_per_document", but .*Trainer calls'),
    (forward_without_shard, "RuntimeError", "without a sharded batch.*cp_gdn.accelerate.shard"),
    (other_packs, "PlanDisagreement", "0, 32, 96(.|\n)*0, 40, 96"),
    (other_options, "PlanDisagreement", "ring(.|\n)*a2a"),
    (shard_before_prepare, "RuntimeError", "no model is prepared"),
    (shard_without_enable, "RuntimeError", "not enabled; call cp_gdn.accelerate.enable"),
    (torchs_attention_on_cpu, "NotImplementedError", "scaled_dot_product.*does not have a sharding strategy"),
    (accumulation_without_counts, "ValueError", "num_items: got None with gradient_accumulation_steps=3"),
]


def refused(rank: int, world: int) -> list[tuple[str, str]]:
    """Per refusal the type and the text of the error."""
    errors = []
    for function, _, _ in REFUSALS:
        with accelerator_of(replace(CASE, cp=world), rank) as accelerator:
            try:
                function(accelerator)
                errors.append(("nothing", ""))
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
    return errors
