"""What a layer would do on a pack at some world size and layout, on paper: no process group, no context, no device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from cp_gdn.backends.precision import state_dtype
from cp_gdn.byte_counts import AllTraffic, LayerOnPack, hop_ends, kept_by_rank, traffic_by_rank
from cp_gdn.calibration import Calibration, calibration_for
from cp_gdn.cost_model import quantities
from cp_gdn.exchange import Choice, choose_exchange
from cp_gdn.layout import Partition
from cp_gdn.makespan import rank_tables
from cp_gdn.network_model import ExchangeTime, Network, exchange_time, halo_us
from cp_gdn.options import Options
from cp_gdn.plan import Ints, check_grid
from cp_gdn.segments import SegmentChoice, resolve_segments

LINK_TIMES = ("exchange", "link_mib")
"""Terms of the step model that `network_model` replaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """A layer and what is asked for it, as for `build_context`."""

    heads: tuple[int, int]
    head_dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    conv: tuple[int, int] | None = None
    segments: int | Sequence[int] | str = "auto"
    exchange: str = "auto"
    save_transfer: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Modelled microseconds of one forward and backward of the layer.

    Attributes:
        compute_us: of every rank, [W], without messages. forward, backward: the exchange of states.
        halo_us: of the convolution, both directions.
    """

    compute_us: tuple[float, ...]
    forward: ExchangeTime
    backward: ExchangeTime
    halo_us: float

    @property
    def step_us(self) -> float:
        """The slowest rank's compute, then all messages: nothing overlaps."""
        return max(self.compute_us) + self.forward.total_us + self.backward.total_us + self.halo_us

    @property
    def balance(self) -> float:
        """Mean over the slowest rank of the compute, 1 when all are equal."""
        slowest = max(self.compute_us)
        return sum(self.compute_us) / len(self.compute_us) / slowest if slowest else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """One row of a plan on paper.

    Attributes:
        layer: with the P vector and exchange that were chosen. segments, choice: why.
        tokens: of every rank, int64 [W].
        crossing: fragments whose state goes on to another rank.
        kept, traffic: see `byte_counts`.
        time: None in grid mode, which the step model does not know.
    """

    layer: LayerOnPack
    segments: SegmentChoice
    choice: Choice
    tokens: Ints
    crossing: int
    kept: dict[str, Ints]
    traffic: dict[str, AllTraffic]
    time: StepTime | None


def forecast(
    part: Partition, spec: LayerSpec, network: Network | None = None, calibration: Calibration | None = None
) -> Forecast:
    """Plan `spec` on `part`. ValueError and TypeError as from `build_context`.

    Args:
        network: constants of the links, the default `Network` if None.
        calibration: constants of the device, what a context on a CPU takes if None.
    """
    network, note = network or Network(), ""
    if calibration is None:
        calibration, note = calibration_for("cpu")
    picked = resolve_segments(spec.segments, part, spec.heads[1], calibration, note)
    grid, itemsize = picked.grid, state_dtype(spec.dtype).itemsize
    if grid:
        check_grid(part, grid)
    choice = choose_exchange(spec.exchange, part, spec.heads[1], spec.head_dims, grid=grid > 0, itemsize=itemsize)
    layer = LayerOnPack(
        partition=part,
        heads=spec.heads,
        head_dims=spec.head_dims,
        dtype=spec.dtype,
        conv=spec.conv,
        exchange=choice.kind,
        p_vector=picked.p_vector,
        grid=grid,
        options=Options(save_transfer=spec.save_transfer),
    )
    return Forecast(
        layer=layer,
        segments=picked,
        choice=choice,
        tokens=layer.per_rank(part.table.length),
        crossing=len(hop_ends(part)[0]),
        kept=kept_by_rank(layer),
        traffic=traffic_by_rank(layer),
        time=None if grid else step_time(layer, network, calibration),
    )


def step_time(layer: LayerOnPack, network: Network, calibration: Calibration) -> StepTime:
    """Modelled time of a step at the layer's P vector."""
    ways = (False, True)
    forward, backward = (exchange_time(layer, network, calibration, backward=backward) for backward in ways)
    return StepTime(
        compute_us=compute_us(layer, calibration),
        forward=forward,
        backward=backward,
        halo_us=sum(halo_us(layer, network, backward=backward) for backward in ways),
    )


def compute_us(layer: LayerOnPack, calibration: Calibration) -> tuple[float, ...]:
    """Modelled compute of every rank; ranks of equal content are modelled once."""
    price = {f.name: getattr(calibration.times, f.name) for f in fields(calibration.times) if f.name not in LINK_TIMES}
    tables = rank_tables(layer.partition)
    pairs = list(zip(tables, layer.p_vector, strict=True))
    known: dict[object, float] = {}
    for table, p in dict.fromkeys(pairs):
        counted = quantities(table, p, layer.heads[1], calibration)
        known[table, p] = sum(ns * counted.get(name, 0) for name, ns in price.items()) / 1000
    return tuple(known[pair] for pair in pairs)
