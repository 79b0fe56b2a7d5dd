"""Class swap: an object becomes an instance of a subclass made for its class, and is itself again after `restore`.

The subclass keeps the class's name, and nothing is added to parameters, buffers or state dict keys; isinstance,
save_pretrained and FSDP2 see what they saw before. A copy stays taken over, by the same seat; a pickle is of the
original class, for another process knows no group.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from cp_gdn.integrations.families import Family, layer_shape
from cp_gdn.integrations.forward import refuse_cache, run_layer
from cp_gdn.integrations.seat import SEAT, Seat

BASE = "_cp_gdn_base"
"""Class attribute: the class that a taken-over class was made for."""

STASH = "_cp_gdn_instance_forward"
"""Instance attribute: the forward that an instance had of its own (hub kernels, dispatch hooks) before it was taken."""

MEDIA = ("pixel_values", "pixel_values_videos", "input_features")


def take_layer(layer: nn.Module, family: Family, seat: Seat) -> None:
    """Make ``layer`` run on the pack of ``seat``."""
    if not hasattr(type(layer), BASE):
        own = _forward_slot(layer)
        if own in vars(layer):
            vars(layer)[STASH] = vars(layer).pop(own)
        base: Any = type(layer)
        layer.__class__ = taken_layer_class(base, family)
        if own == "_old_forward":
            # Hooks call what they find under this name.
            vars(layer)[own] = MethodType(type(layer).forward, layer)
    vars(layer)[SEAT] = seat
    seat.layers[layer] = functools.partial(layer_shape, family=family)


def take_model(model: nn.Module, seat: Seat) -> None:
    """Make ``model`` say that it supports context parallelism, and refuse what it does not."""
    if not hasattr(type(model), BASE):
        base: Any = type(model)
        model.__class__ = taken_model_class(base)
    vars(model)[SEAT] = seat


def restore(module: nn.Module) -> None:
    """Undo the swap, unless another class (FSDP2) was put on top of it: its retired seat then says so to forward."""
    if BASE in vars(type(module)):
        seat = vars(module).pop(SEAT)
        seat.layers.pop(module, None)
        module.__class__ = getattr(type(module), BASE)
        if STASH in vars(module):
            vars(module)[_forward_slot(module)] = vars(module).pop(STASH)


@functools.cache
def taken_layer_class(base: Any, family: Family) -> type[nn.Module]:
    """The class that layers of class ``base`` get."""
    names = _parameter_names(base)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seat = vars(self).get(SEAT)
        if seat is None or seat.original:
            stashed = vars(self).get(STASH)
            return base.forward(self, *args, **kwargs) if stashed is None else stashed(*args, **kwargs)
        if len(args) > len(names):
            raise TypeError(f"{base.__name__}.forward: got {len(args)} arguments by position, expected {names} at most")
        return run_layer(self, family, seat, dict(zip(names, args, strict=False)) | kwargs)

    return _subclass(base, {"forward": forward})


@functools.cache
def taken_model_class(base: Any) -> type[nn.Module]:
    """The class that Hugging Face models of class ``base`` get."""
    names = _parameter_names(base)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seat = vars(self).get(SEAT)
        if seat is not None and not seat.original:
            given = dict(zip(names, args, strict=False))
            _check_inputs(given | kwargs)
            if hasattr(self, "criterion") and (given | kwargs).get("labels") is not None:
                return _with_loss(self, base, given | kwargs)
            if "use_cache" in names and given.get("use_cache") is None and kwargs.get("use_cache") is None:
                # Configs ask for a cache by default, in training too.
                kwargs["use_cache"] = False
                args = args[: names.index("use_cache")]
        return base.forward(self, *args, **kwargs)

    def supports_context_parallel(self: Any) -> bool:
        seat = vars(self).get(SEAT)
        if seat is None or seat.retired:
            return bool(getattr(super(taken, self), "supports_context_parallel", False))
        types = getattr(self.config.get_text_config(), "layer_types", None) or ()
        return bool(getattr(self, "_supports_context_parallel", True)) and set(types) <= seat.layer_types

    taken = _subclass(base, {"forward": forward, "supports_context_parallel": property(supports_context_parallel)})
    return taken


def _check_inputs(call: dict[str, Any]) -> None:
    media = [name for name in MEDIA if call.get(name) is not None]
    if media:
        raise NotImplementedError(
            f"cp_gdn: got {media[0]}, but images, videos and audio do not run on sharded sequences, where their tokens "
            "lie on several ranks; train on text, or without context parallelism"
        )
    refuse_cache(call)
    mask, ids = call.get("attention_mask"), call.get("input_ids")
    if mask is not None and ids is not None and getattr(mask, "ndim", 0) == 2 and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}, expected {list(ids.shape)} as input_ids; shard both"
        )


def _with_loss(model: Any, base: Any, call: dict[str, Any]) -> Any:
    """The output of a model that would shift its labels itself (flash-linear-attention's), on this rank's tokens alone.

    Its loss is that of transformers, which takes labels that were shifted on the whole batch.
    """
    if call.get("shift_labels") is None or model.criterion is not None or call.get("return_dict") is False:
        raise NotImplementedError(
            f"cp_gdn: {type(model).__name__} shifts labels itself, on this rank's tokens alone; give it shift_labels, "
            "which cp_gdn's shard makes, without a criterion and with return_dict, or compute the loss from its logits"
        )
    if getattr(model.config, "use_l2warp", False):
        raise NotImplementedError("cp_gdn: use_l2warp does not run on sharded sequences; set it to False")
    names = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep")
    shifted, num_items = call["shift_labels"], call.get("num_items_in_batch")
    rest = {name: value for name, value in call.items() if name not in names}
    out = base.forward(model, **rest | {"use_cache": False, "return_dict": True})
    out.loss = model.loss_function(
        out.logits, labels=None, vocab_size=out.logits.shape[-1], shift_labels=shifted, num_items_in_batch=num_items
    )
    return out


def _subclass(base: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    names = ("__module__", "__qualname__", "__doc__")
    own = {name: getattr(base, name) for name in names}
    return type(base.__name__, (base,), {**own, **members, **_COPYING, BASE: base})


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    twin = _bare(self)
    memo[id(self)] = twin
    vars(twin).update(copy.deepcopy(vars(self), memo))
    return twin


def _copy(self: nn.Module) -> nn.Module:
    twin = _bare(self)
    vars(twin).update(vars(self))
    return twin


def _reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    state = dict(vars(self))
    state.pop(SEAT, None)
    if STASH in state:
        state[_forward_slot(self)] = state.pop(STASH)
    return _bare_of, (getattr(type(self), BASE),), state


_COPYING: dict[str, Callable[..., Any]] = {
    "__deepcopy__": _deepcopy,
    "__copy__": _copy,
    "__reduce_ex__": _reduce_ex,
}


def _bare(module: nn.Module) -> nn.Module:
    return _bare_of(type(module))


def _bare_of(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _forward_slot(module: nn.Module) -> str:
    """Where an instance keeps a forward of its own; with Accelerate's hooks, the one behind them."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _parameter_names(base: type[nn.Module]) -> list[str]:
    """What a forward takes by position; a decorator of older transformers hides all but the first."""
    parameters = list(inspect.signature(base.forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return names or ["hidden_states"]
