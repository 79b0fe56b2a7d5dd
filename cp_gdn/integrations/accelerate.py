"""Context parallelism of Gated DeltaNet models in Hugging Face Accelerate: one call before `prepare`.

`enable` replaces methods of one accelerator: `_prepare_cp`, which `prepare` calls after tensor parallelism and before
FSDP2, `maybe_context_parallel`, which scripts and `Trainer` call around a step, and two that gather for metrics.
Accelerate's own versions run inside; its refusal of recurrent layers is for models that nobody takes over.
"""

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import accelerate

from cp_gdn.integrations import accelerate_batch as batches
from cp_gdn.integrations.accelerate_loss import count_tokens, token_mean_loss
from cp_gdn.integrations.accelerate_plugin import Plugin
from cp_gdn.integrations.accelerate_settings import resolve, set_log_level
from cp_gdn.integrations.seat import unsharded

__all__ = ["ParallelismConfig", "count_tokens", "disable", "enable", "shard", "token_mean_loss", "unsharded"]

log = logging.getLogger("cp_gdn")

REPLACED = ("_prepare_cp", "maybe_context_parallel", "prepare", "pad_across_processes", "gather_for_metrics")
"""Methods of an accelerator that `enable` replaces, some of them."""

PLUGIN = "_cp_gdn"
"""Attribute of an accelerator that holds what `enable` put there."""


def enable(accelerator: accelerate.Accelerator, **options: Any) -> None:
    """Let this accelerator prepare and train Gated DeltaNet models under context parallelism. Call before `prepare`.

    Does nothing, and says so, where cp_size is 1, unless on_one_rank=True: then layers run on cp_gdn's kernels there
    too, and packed rows need no other package. A second call with the same options does nothing.

    Args:
        options: layout, attention, on_one_rank, segments, exchange, backend, options, timeout: fields of
            `accelerate_settings.Settings`. What is not given comes from CP_GDN_LAYOUT, CP_GDN_EXCHANGE, .. if set.

    Raises:
        ValueError: an option is refused, or sequence parallelism (sp_size) is on. RuntimeError: a model is prepared
            already, this accelerator was enabled with other options, or this version of Accelerate has another seam.
    """
    set_log_level(os.environ)
    settings, said = resolve(options, os.environ)
    sizes = accelerator.parallelism_config
    _refuse_sequence_parallelism(sizes)
    alone = sizes is None or sizes.cp_size == 1
    if alone and not settings.on_one_rank:
        log.info("cp_gdn: cp_size is 1, nothing to do; models train as they are")
        return
    plugin = plugin_of(accelerator)
    if plugin is not None:
        if plugin.settings != settings:
            raise RuntimeError(
                f"cp_gdn: enabled already with {plugin.said}, and now asked for {said}; call disable first"
            )
        return
    _check_seam(accelerator)
    plugin = Plugin(accelerator, settings, said)
    setattr(accelerator, PLUGIN, plugin)
    if alone:
        accelerator.prepare = plugin.prepare_alone
        return
    accelerator._prepare_cp = plugin.prepare
    accelerator.maybe_context_parallel = plugin.context_parallel
    accelerator.pad_across_processes = plugin.metrics.pad_across_processes
    accelerator.gather_for_metrics = plugin.metrics.gather_for_metrics


def disable(accelerator: accelerate.Accelerator) -> None:
    """Take back what `enable` did: layers run their own forwards again, on whole sequences only."""
    plugin = plugin_of(accelerator)
    if plugin is None:
        return
    plugin.end()
    for name in (PLUGIN, *REPLACED):
        accelerator.__dict__.pop(name, None)


def plugin_of(accelerator: Any) -> "Plugin | None":
    """What `enable` put on an accelerator, None if it is not enabled."""
    return accelerator.__dict__.get(PLUGIN)


def _refuse_sequence_parallelism(sizes: accelerate.ParallelismConfig | None) -> None:
    if sizes is not None and sizes.sp_size > 1:
        raise ValueError(
            f"cp_gdn: sp_size: got {sizes.sp_size}; sequence parallelism (DeepSpeed Ulysses) gathers whole sequences "
            f"inside attention and leaves recurrent states alone; use cp_size={sizes.sp_size}, sp_size=1 with FSDP "
            "version 2 instead"
        )


def _check_seam(accelerator: accelerate.Accelerator) -> None:
    missing = [name for name in ("_prepare_cp", "maybe_context_parallel") if not hasattr(accelerator, name)]
    if missing:
        raise RuntimeError(
            f"cp_gdn: accelerate {accelerate.__version__} has no Accelerator.{missing[0]}; it is tested with 1.15"
        )
    # A ParallelismConfig comes here from the constructor, before there is a list of models.
    if getattr(accelerator, "_models", None):
        raise RuntimeError(
            "cp_gdn: enable came after accelerator.prepare, which has set up the model's layers already; call "
            "cp_gdn.accelerate.enable(accelerator) right after making the Accelerator"
        )


@dataclass
class ParallelismConfig(accelerate.ParallelismConfig):
    """Accelerate's ParallelismConfig that enables cp_gdn too: for `Trainer` and TRL, which make their own accelerator.

    Sizes left out come from the launcher's YAML, as ever. gdn: the options of `enable`.
    """

    gdn: dict[str, Any] = field(default_factory=dict)

    def _validate_accelerator(self, accelerator: accelerate.Accelerator) -> None:
        super()._validate_accelerator(accelerator)
        enable(accelerator, **self.gdn)


@contextmanager
def shard(
    accelerator: accelerate.Accelerator,
    batch: MutableMapping[str, Any],
    *,
    cu_seqlens: Any = None,
    token_dims: Mapping[str, int] | None = None,
) -> Iterator[MutableMapping[str, Any]]:
    """Inside, the batch holds this rank's tokens and the model's layers know which; forward and backward go there.

    The whole batch is [B, S], the same on every context-parallel rank: rows of one document each, padded on the right,
    S a multiple of 2 * cp_size; or one row of packed documents of any lengths. Labels are shifted first, then cut: the
    model must be given `shift_labels` too (`model(**batch)` or `token_mean_loss`). Entries are put back at the end.
    Where cp_size is 1, or inside `unsharded`, only labels are shifted.

    Args:
        batch: a mapping, changed in place. cu_seqlens: boundaries of the packed documents, if the collator gives no
            cu_seq_lens_q. token_dims: name and dim of entries over tokens that cp_gdn does not know.

    Raises:
        ValueError: the batch cannot be cut; nothing was sent. RuntimeError: `enable` or `prepare` did not come first.
    """
    shape = batches.read_shape(batch, cu_seqlens)
    sizes, plugin = accelerator.parallelism_config, plugin_of(accelerator)
    if sizes is None or sizes.cp_size == 1 or (plugin is not None and plugin.suspended):
        with _holding(batch, batches.whole_entries(batch, shape, given=cu_seqlens is not None)):
            yield batch
        return
    if plugin is None:
        raise RuntimeError(
            "cp_gdn: this accelerator is not enabled; call cp_gdn.accelerate.enable(accelerator) before prepare"
        )
    batches.check_media(batch)
    batches.check_padding(batch.get("attention_mask"), batch.get("position_ids"), shape)
    pack = plugin.pack_of(shape)
    entries = batches.with_shifted_labels(batch, shape)
    local = batches.local_entries(entries, pack, shape, token_dims or {})
    with _holding(batch, local), plugin.step(pack):
        yield batch


@contextmanager
def _holding(batch: MutableMapping[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """The batch with these entries instead of its own."""
    before = dict(batch)
    _replace(batch, entries)
    try:
        yield
    finally:
        _replace(batch, before)


def _replace(batch: MutableMapping[str, Any], entries: Mapping[str, Any]) -> None:
    for name in [name for name in batch if name not in entries]:
        del batch[name]
    batch.update(entries)
