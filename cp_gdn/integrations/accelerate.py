"""Context parallelism of Gated DeltaNet models in Hugging Face Accelerate: one call before `prepare`.

`enable` replaces two methods of one accelerator: `_prepare_cp`, which `prepare` calls after tensor parallelism and
before FSDP2, and `maybe_context_parallel`, which scripts and `Trainer` call around a step. Accelerate's own versions
run inside; its refusal of recurrent layers is for models that nobody takes over.
"""

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from cp_gdn.comm import Comm
from cp_gdn.integrations import accelerate_batch as batches
from cp_gdn.integrations.accelerate_loss import count_tokens, token_mean_loss
from cp_gdn.integrations.accelerate_settings import Settings, resolve, set_log_level
from cp_gdn.integrations.attention import SharedAttention, install
from cp_gdn.integrations.seat import Pack, Seat, unsharded
from cp_gdn.integrations.transformers import Takeover, take_over

__all__ = ["ParallelismConfig", "count_tokens", "disable", "enable", "shard", "token_mean_loss", "unsharded"]

log = logging.getLogger("cp_gdn")

PLUGIN = "_cp_gdn"
"""Attribute of an accelerator that holds what `enable` put there."""


def enable(accelerator: accelerate.Accelerator, **options: Any) -> None:
    """Let this accelerator prepare and train Gated DeltaNet models under context parallelism. Call before `prepare`.

    Does nothing, and says so, where cp_size is 1. A second call with the same options does nothing.

    Args:
        options: layout, attention, segments, exchange, backend, options, timeout: fields of
            `accelerate_settings.Settings`. What is not given comes from CP_GDN_LAYOUT, CP_GDN_EXCHANGE, .. if set.

    Raises:
        ValueError: an option is refused, or sequence parallelism (sp_size) is on. RuntimeError: a model is prepared
            already, this accelerator was enabled with other options, or this version of Accelerate has another seam.
    """
    set_log_level(os.environ)
    settings, said = resolve(options, os.environ)
    sizes = accelerator.parallelism_config
    if sizes is not None and sizes.sp_size > 1:
        raise ValueError(
            f"cp_gdn: sp_size: got {sizes.sp_size}; sequence parallelism (DeepSpeed Ulysses) gathers whole sequences "
            f"inside attention and leaves recurrent states alone; use cp_size={sizes.sp_size}, sp_size=1 with FSDP "
            "version 2 instead"
        )
    if sizes is None or sizes.cp_size == 1:
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
    accelerator._prepare_cp = plugin.prepare  # type: ignore[method-assign]
    accelerator.maybe_context_parallel = plugin.context_parallel  # type: ignore[method-assign]


def disable(accelerator: accelerate.Accelerator) -> None:
    """Take back what `enable` did: layers run their own forwards again, on whole sequences only."""
    plugin = plugin_of(accelerator)
    if plugin is None:
        return
    plugin.end()
    for name in (PLUGIN, "_prepare_cp", "maybe_context_parallel"):
        accelerator.__dict__.pop(name, None)


def plugin_of(accelerator: Any) -> "Plugin | None":
    """What `enable` put on an accelerator, None if it is not enabled."""
    return accelerator.__dict__.get(PLUGIN)


def _check_seam(accelerator: accelerate.Accelerator) -> None:
    missing = [n for n in ("_prepare_cp", "maybe_context_parallel", "_models") if not hasattr(accelerator, n)]
    if missing:
        raise RuntimeError(
            f"cp_gdn: accelerate {accelerate.__version__} has no Accelerator.{missing[0]}; it is tested with 1.15"
        )
    if accelerator._models:
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


class Plugin:
    """What `enable` puts on one accelerator: the group, the settings, the models taken over and the pack in use."""

    def __init__(self, accelerator: accelerate.Accelerator, settings: Settings, said: str) -> None:
        self.settings, self.said = settings, said
        self._accelerator = accelerator
        self._prepare, self._context_parallel = accelerator._prepare_cp, accelerator.maybe_context_parallel
        self._comm: Comm | None = None
        self._taken: list[_Taken] = []

    @property
    def comm(self) -> Comm:
        """The context-parallel group of this rank, made on all its ranks at the first `prepare`."""
        if self._comm is None:
            mesh = self._accelerator.torch_device_mesh["cp"]
            self._comm = Comm(mesh.get_group(), timeout=self.settings.timeout)
            self._comm.agree("cp_gdn.accelerate options", self.settings.described())
            if self._accelerator.is_main_process:
                log.info("cp_gdn: %s", self.said)
        return self._comm

    def prepare(self, *args: Any) -> tuple[Any, ...]:
        """In place of `_prepare_cp`: Accelerate's own for all but models, whose layers are taken over."""
        self._prepare(*(arg for arg in args if not isinstance(arg, nn.Module)))
        for model in args:
            if isinstance(model, nn.Module) and all(model is not taken.model for taken in self._taken):
                self._taken.append(self._take(model))
        return args

    def _take(self, model: nn.Module) -> "_Taken":
        takeover = take_over(model, self.comm, **self.settings.build)
        try:
            _check_layer_types(model, takeover.seat)
            shared, undo = install(model, takeover.attention, takeover.seat, self.settings.attention)
        except Exception:
            takeover.disable()
            raise
        if self._accelerator.is_main_process:
            layout = "zigzag" if self.settings.layout == "auto" else self.settings.layout
            log.info(
                "cp_gdn: %d GDN + %d SDPA layers, cp=%d (%s), exchange=%s, backend=%s",
                *(len(takeover.layers), len(takeover.attention), self.comm.size, layout),
                *(self.settings.exchange, "torch" if self.settings.backend == "auto" else self.settings.backend),
            )
        watch = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return _Taken(model=model, takeover=takeover, shared=shared, undo=(undo, watch.remove))

    def end(self) -> None:
        """Give models, layers and the group back."""
        for taken in self._taken:
            for undo in taken.undo:
                undo()
            taken.takeover.disable()
        if self._comm is not None:
            self._comm.close()
