"""The softmax layers of a hybrid model over a sharded batch: who computes them, chosen for each pack.

"torch": torch's own context-parallel SDPA, as Accelerate sets it up; CUDA, NCCL, unpacked zigzag batches. "gather":
keys and values of the whole batch on every rank (`gathered.py`); any device, layout and documents.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_gdn.integrations.gathered import Tables, attend, build_tables
from cp_gdn.integrations.kinds import attention_layers
from cp_gdn.integrations.pack import Pack
from cp_gdn.integrations.seat import Seat, seat_of

log = logging.getLogger("cp_gdn")

NAME = "cp_gdn"
"""Name of the attention function in transformers' registry."""

KINDS = ("auto", "gather", "torch")
SHARED = "_cp_gdn_attention"
"""Attribute of a softmax layer that holds its model's `SharedAttention`; in no state dict."""

REFUSED = ("softcap", "sliding_window", "position_bias", "s_aux")
"""Arguments of attention functions that change what a query sees or how it weighs it."""


class SharedAttention:
    """The softmax attention of one taken-over model: its seat, the kind asked for, the tables of the packs in use."""

    def __init__(self, seat: Seat, asked: str = "gather") -> None:
        if asked not in KINDS:
            raise ValueError(f"attention: got {asked!r}, expected one of {', '.join(KINDS)}")
        self.seat, self.asked = seat, asked
        self._tables: WeakKeyDictionary[Pack, Tables] = WeakKeyDictionary()
        self._said: set[str] = set()

    # As with a seat: a copy of the model attends in the same group; a file knows no group.
    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedAttention":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def kind(self, pack: Pack) -> str:
        """ "torch" or "gather": who computes this pack, the same on every rank. A reason is logged once.

        Raises:
            ValueError: "torch" was asked for and cannot take the pack.
        """
        obstacle = torch_obstacle(pack)
        if self.asked == "torch" and obstacle is not None:
            raise ValueError(f'attention: got "torch", but {obstacle}; use "auto", or "gather", which takes any batch')
        kind = "gather" if self.asked == "gather" or obstacle is not None else "torch"
        reason = "asked for" if self.asked == kind else obstacle or "CUDA, unpacked zigzag rows"
        if pack.comm.rank == 0 and reason not in self._said:
            self._said.add(reason)
            log.info("cp_gdn: softmax attention by %s (%s)", kind, reason)
        return kind

    def gathered(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """o [B, S, H, DV] of q [B, H, S, D], k [B, KV, S, D], v [B, KV, S, DV], the local tokens of the pack."""
        q, k, v = (x.transpose(1, 2) for x in _as_under_autocast(q, k, v))
        pack = self.seat.pack_for(q)
        if pack not in self._tables:
            self._tables[pack] = build_tables(pack)
        with torch.autocast(q.device.type, enabled=False):
            o = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), self._tables[pack], scale)
        return o.unflatten(0, pack.batch_shape)


def torch_obstacle(pack: Pack) -> str | None:
    """Why torch's context-parallel SDPA cannot take a pack; None if it can."""
    part, pieces = pack.partition, 2 * pack.partition.world_size
    lengths = set(np.diff(part.bounds).tolist())
    if part.world_size == 1:
        return "there is one rank"
    if pack.device.type != "cuda":
        return f"torch's SDPA context parallelism has no rule for {pack.device.type}"
    if "nccl" not in pack.comm.kind:
        return f"torch's SDPA context parallelism needs NCCL on CUDA, and this group is {pack.comm.kind}"
    if part.num_docs != pack.batch_shape[0] or len(lengths) != 1:
        return "packed documents need a mask, and torch's SDPA context parallelism takes none"
    if part.layout not in ("zigzag", "zigzag_per_document") or any(length % pieces for length in lengths):
        return f"torch's SDPA context parallelism takes zigzag rows of a multiple of {pieces} tokens"
    return None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls. What a query sees is read from the pack; `attention_mask`, of local size, is not used.

    Raises:
        NotImplementedError: a cache, dropout, or a kind of attention that shards cannot compute.
    """
    shared: SharedAttention = module.__dict__[SHARED]
    _check_call(module, query, key, dropout, kwargs)
    if shared.kind(shared.seat.pack_for(query.transpose(1, 2))) == "gather":
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return shared.gathered(query, key, value, scale), None
    if F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention:
        raise RuntimeError(
            "attention: torch's context parallelism is not active here; run forward and backward inside "
            "cp_gdn.accelerate.shard or accelerator.maybe_context_parallel"
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = {**kwargs, "is_causal": True, "scaling": scaling, "dropout": dropout}
    o, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **own)
    return o, weights


def _check_call(module: nn.Module, query: Tensor, key: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"attention: got {key.shape[2]} keys for {query.shape[2]} queries, a cache, while the sequence is split "
            "over ranks; pass use_cache=False, or decode inside `with cp_gdn.unsharded(model)`"
        )
    found = [name for name in REFUSED if kwargs.get(name) is not None]
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        found.append("is_causal=False")
    if found:
        raise NotImplementedError(
            f"attention: got {', '.join(found)} in {type(module).__name__}; only plain causal attention can be split"
        )
    if dropout:
        raise NotImplementedError(f"attention: got dropout={dropout}; set attention_dropout=0 in the model's config")


def _as_under_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Tensors in the dtype in which autocast would run attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


# ---- installing ------------------------------------------------------------------------------------------------------


def gather_attention(model: nn.Module) -> Callable[[], None]:
    """Let the softmax layers of a transformers model attend over the packs of its Gated DeltaNet layers' seat.

    For models whose Gated DeltaNet layers a `GDNContextParallel` took over; call it after that, and before
    checkpointing, compile and FSDP2. Every rank gathers keys and values; documents stay apart. `cp_gdn.accelerate` does
    it by itself.

    Returns:
        What gives the layers their own attention back.

    Raises:
        ValueError: no layer was taken over. NotImplementedError: a layer's attention is not in transformers' registry.
    """
    seat = seat_of(model)
    taken = tuple(name for name, module in model.named_modules() if module in seat.layers)
    _, undo = install(model, attention_layers(model, taken), seat)
    return undo


def install(
    model: nn.Module, names: Sequence[str], seat: Seat, asked: str = "gather"
) -> tuple[SharedAttention, Callable[[], None]]:
    """Let the softmax layers `names` of a transformers model attend over the seat's packs; also how to undo it.

    The modules inside the model get a view of its config that names our function while the seat is in use; the model's
    own config, which callers look at, stays as it is.

    Raises:
        NotImplementedError: a layer does not get its attention from transformers' registry.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shared = SharedAttention(seat, asked)
    # A compiler sees one call of ours per softmax layer, and breaks its graph there.
    ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(attention_forward))
    configs = {id(config): config for config in (_config_of(model, name) for name in names)}
    views = {key: config_view(config, seat) for key, config in configs.items()}
    viewers = [m for m in model.modules() if m is not model and id(getattr(m, "config", None)) in views]
    for module in viewers:
        module.config = views[id(module.config)]
    for name in names:
        model.get_submodule(name).__dict__[SHARED] = shared

    def undo() -> None:
        originals = {id(view): configs[key] for key, view in views.items()}
        for module in viewers:
            module.config = originals.get(id(module.config), module.config)
        for name in names:
            model.get_submodule(name).__dict__.pop(SHARED, None)

    return shared, undo


def config_view(config: Any, seat: Seat) -> Any:
    """A config that shares every value with `config`, but names our attention function unless layers run as before."""

    def implementation(self: Any) -> str | None:
        return self._attn_implementation_internal if seat.original else NAME

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        return _with_values(view_class, copy.deepcopy(self.__dict__, memo))

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _with_values, (base, dict(self.__dict__))

    base = type(config)
    members = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "_attn_implementation": property(implementation, base._attn_implementation.fset),
    }
    view_class = type(base.__name__, (base,), members)
    return _with_values(view_class, config.__dict__)


def _with_values(cls: type, values: dict[str, Any]) -> Any:
    made: Any = object.__new__(cls)
    made.__dict__ = values
    return made


def _config_of(model: nn.Module, name: str) -> Any:
    layer = model.get_submodule(name)
    config = getattr(layer, "config", None)
    if not hasattr(config, "_attn_implementation_internal"):
        raise NotImplementedError(
            f"attention: {type(layer).__name__} at {name} does not take its attention from transformers' registry; "
            "it would attend to this rank's tokens alone"
        )
    return config


def _nothing() -> None:
    return None
