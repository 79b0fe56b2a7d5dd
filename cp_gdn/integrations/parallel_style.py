"""The torch-native face: a ParallelStyle for Gated DeltaNet layers on the context-parallel axis of a device mesh.

    plan = parallelize_plan(model)
    parallelize_module(model, mesh["cp"], plan)
    gather_attention(model)
    seat = seat_of(model)
    with seat.hold(seat.rows(batch, length)) as pack:
        model(pack.local(input_ids), ...)

Activations and parameters stay plain local tensors, so tensor parallelism goes before it, and activation
checkpointing, compilation and FSDP2 after it.
"""

import logging
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cp_gdn import lifesigns
from cp_gdn.comm import Comm
from cp_gdn.integrations.families import family_of
from cp_gdn.integrations.kinds import attention_layers
from cp_gdn.integrations.seat import SEAT, Seat
from cp_gdn.integrations.swap import take_layer
from cp_gdn.integrations.transformers import find_layers, refuse_others

log = logging.getLogger("cp_gdn")


class GDNContextParallel(ParallelStyle):
    """Split the sequence of a Gated DeltaNet layer over the ranks of a one-dimensional mesh.

    One style serves all layers of a model: they share its seat, which is there once the style was applied.

    Args:
        timeout: seconds that a rank may keep another one waiting, as in `Comm`.
        options: on_one_rank, and segments, exchange, backend, options of `build_context`; see `Seat`.
    """

    def __init__(self, *, timeout: float = 25.0, **options: Any) -> None:
        super().__init__()
        Seat(Comm.alone(), **options)  # refuses unknown options before any layer is touched
        self.timeout, self.options = timeout, options
        self._mesh: DeviceMesh | None = None
        self._seat: Seat | None = None

    @property
    def seat(self) -> Seat:
        """The seat of the layers that this style was applied to."""
        if self._seat is None:
            raise RuntimeError("GDNContextParallel: no seat yet; apply the style first, with parallelize_module")
        return self._seat

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh: got {device_mesh.ndim} axes, expected one; pass the context-parallel one, mesh['cp']"
            )
        family = family_of(module)
        if family is None:
            raise ValueError(
                f"module: {type(module).__name__} is no Gated DeltaNet layer that cp_gdn knows; "
                "cp_gdn.parallelize_plan(model) names those of a model"
            )
        taken = vars(module).get(SEAT)
        if taken is not None and not taken.retired and taken is not self._seat:
            raise ValueError(f"module: this {type(module).__name__} was taken over before, by another style or model")
        take_layer(module, family, self._seat_on(device_mesh))
        return module

    def _seat_on(self, device_mesh: DeviceMesh) -> Seat:
        if self._seat is None:
            # One duplicate of the group for all layers; every rank comes here at its first layer.
            self._mesh = device_mesh
            self._seat = Seat(Comm(device_mesh.get_group(), timeout=self.timeout), **self.options)
            lifesigns.start()
        elif self._mesh != device_mesh:
            raise ValueError(f"device_mesh: got {device_mesh}, but this style serves {self._mesh}; make one per mesh")
        return self._seat


def parallelize_plan(model: nn.Module, style: GDNContextParallel | None = None) -> dict[str, ParallelStyle]:
    """A plan for `parallelize_module(model, mesh["cp"], plan)`: exact names of the Gated DeltaNet layers, one style.

    Softmax layers are no part of it: see `gather_attention`.

    Raises:
        ValueError: the model has none that cp_gdn knows. NotImplementedError: it has another kind of recurrence.
    """
    layers = find_layers(model)
    refuse_others(model, layers)
    softmax = attention_layers(model, tuple(layers))
    if softmax and not (dist.is_initialized() and dist.get_rank()):
        log.warning(
            "cp_gdn: %s has %d softmax attention layers, which this plan leaves alone: on a part of the sequence they "
            "need context parallelism, too; cp_gdn.gather_attention(model) after parallelize_module is one",
            type(model).__name__,
            len(softmax),
        )
    style = style or GDNContextParallel()
    return dict.fromkeys(layers, style)
