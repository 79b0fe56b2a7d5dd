"""Take over the Gated DeltaNet layers of a Hugging Face or flash-linear-attention model.

Nothing here imports transformers or fla: layers are told by their structure (families.py) and swapped in place
(swap.py).
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from cp_gdn.comm import Comm
from cp_gdn.integrations.families import Family, family_of
from cp_gdn.integrations.kinds import attention_layers, unknown_recurrences
from cp_gdn.integrations.seat import SEAT, Seat, seats_of
from cp_gdn.integrations.swap import restore, take_layer, take_model

log = logging.getLogger("cp_gdn")


@dataclass(frozen=True, kw_only=True, eq=False)
class Takeover:
    """What `take_over` found and did.

    Attributes:
        model: the model, changed in place. seat: where its layers find the pack of the running step.
        layers: names of the Gated DeltaNet layers. families: how many of each family.
        attention: names of the causal softmax attention layers, which cp_gdn leaves alone here.
    """

    model: nn.Module
    seat: Seat
    layers: tuple[str, ...]
    families: dict[str, int]
    attention: tuple[str, ...]

    def disable(self) -> None:
        """Give every layer its original class and forward back. Copies of the model go back to theirs, too."""
        self.seat.retired, self.seat.pack = True, None
        for module in list(self.model.modules()):
            if vars(module).get(SEAT) is self.seat:
                restore(module)


def take_over(model: nn.Module, comm: Comm, **options: Any) -> Takeover:
    """Make the model's Gated DeltaNet layers run on packs that are split over the ranks of ``comm``.

    Call it on every rank, before FSDP2, activation checkpointing and torch.compile are applied, after tensor
    parallelism. Calling it again with the same group and options changes nothing.

    Args:
        model: changed in place. comm: the context-parallel group.
        options: on_one_rank, and segments, exchange, backend, options of `build_context`; see `Seat`.

    Raises:
        ValueError: no Gated DeltaNet layer was found on a group of several ranks, or the model was taken over with
            another group or other options.
        NotImplementedError: another kind of recurrence is in the model, or a layer with settings that cp_gdn lacks.
    """
    found = find_layers(model)
    if comm.size > 1:
        refuse_others(model, found)
    seat = _same_seat(model, comm, options) or Seat(comm, **options)
    names = tuple(found)
    for name, family in found.items():
        take_layer(model.get_submodule(name), family, seat)
    for module in _models(model, names):
        take_model(module, seat)
    families = dict(Counter(family.name for family in found.values()))
    takeover = Takeover(
        model=model, seat=seat, layers=names, families=families, attention=attention_layers(model, names)
    )
    if comm.rank == 0:
        kinds = ", ".join(f"{count} {name}" for name, count in families.items()) or "none"
        log.info(
            "cp_gdn: %s: took over %d Gated DeltaNet layers (%s) beside %d softmax attention layers, cp=%d",
            type(model).__name__,
            len(names),
            kinds,
            len(takeover.attention),
            comm.size,
        )
    return takeover


def find_layers(model: nn.Module) -> dict[str, Family]:
    """The Gated DeltaNet layers of a model by name, taken over or not."""
    families = ((name, family_of(module)) for name, module in model.named_modules())
    return {name: family for name, family in families if family is not None}


def refuse_others(model: nn.Module, found: dict[str, Family]) -> None:
    """Raise as `take_over` does of a model that has recurrences beside the layers found, or no such layer."""
    unknown = unknown_recurrences(model, tuple(found))
    if unknown:
        raise NotImplementedError(
            f"cp_gdn: {type(model).__name__} has layers that carry tokens along the sequence and that cp_gdn does not "
            f"know: {'; '.join(unknown)}. On a part of the sequence they would compute something else; train this "
            "model without context parallelism"
        )
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no Gated DeltaNet layer that cp_gdn knows; for softmax attention alone "
            "use Accelerate's or torch's own context parallelism"
        )


def _same_seat(model: nn.Module, comm: Comm, options: dict[str, Any]) -> Seat | None:
    """The seat of an earlier take-over; raises ValueError if it was another one."""
    seats = [seat for seat in seats_of(model) if not seat.retired]
    if not seats:
        return None
    wanted = Seat(comm, **options)
    first = seats[0]
    same = first.comm is comm and first.on_one_rank == wanted.on_one_rank and first.options == wanted.options
    if len(seats) > 1 or not same:
        raise ValueError(
            f"model: its Gated DeltaNet layers were taken over before, by {first.comm!r} with options {first.options}; "
            f"now {comm!r} with {wanted.options}. Call disable() on the first take-over, or use it"
        )
    return first


def _models(model: nn.Module, layers: tuple[str, ...]) -> list[nn.Module]:
    """The Hugging Face models, the whole and its parts, that hold one of these layers."""
    holders = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        is_model = hasattr(type(module), "config_class") and hasattr(type(module), "save_pretrained")
        if is_model and any(layer.startswith(prefix) for layer in layers):
            holders.append(module)
    return holders
