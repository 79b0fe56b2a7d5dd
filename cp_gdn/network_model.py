"""How long the exchange of a plan takes on paper: messages over a network of two levels, and the owners' folds.

Every figure is modelled from the constants of `Network` and of a `Calibration`. Nothing overlaps in this model: neither
messages with work, nor the convolution's halo with the states. Legend: W ranks, F fragments of all ranks.
"""

from dataclasses import dataclass

import numpy as np

from cp_gdn.byte_counts import LayerOnPack, halo_ends, owner_sizes
from cp_gdn.calibration import Calibration
from cp_gdn.chains import ChainOrder, chain_order
from cp_gdn.cost_model import FOLD_BLOCKS
from cp_gdn.exchange import BYTES_PER_US, COLLECTIVE_US, HOP_US
from cp_gdn.plan import Ints

Floats = np.ndarray
"""A float64 array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Nodes of `node_size` consecutive ranks; "near" is inside a node, "far" between nodes.

    Attributes:
        near_hop_us, collective_us, near_bytes_per_us: measured between two H200s over NVLink (docs/design.md), the
            constants of `choose_exchange`.
        far_bytes_per_us: 50 GB/s per rank and direction, a 400 Gbit/s adapter per GPU.
        far_hop_us: assumed, not measured: a near hop and 10 us for two adapters and the switches between.
        far_peer_us: assumed, not measured: what a collective spends on each peer in another node.
    """

    node_size: int = 8
    near_hop_us: float = HOP_US
    far_hop_us: float = HOP_US + 10.0
    collective_us: float = COLLECTIVE_US
    far_peer_us: float = 1.0
    near_bytes_per_us: float = BYTES_PER_US
    far_bytes_per_us: float = 50_000.0

    def message_us(self, source: Ints, target: Ints, size: Ints) -> Floats:
        """Time of each message of `size` bytes between ranks."""
        far = source // self.node_size != target // self.node_size
        latency = np.where(far, self.far_hop_us, self.near_hop_us)
        us: Floats = latency + size / np.where(far, self.far_bytes_per_us, self.near_bytes_per_us)
        return us

    def collective_us_of(self, left: Ints, right: Ints) -> float:
        """An all-to-all in which rank r sends left[r] * right[j] bytes to rank j: its busiest rank, sending or
        receiving."""
        return self.collective_us + max(self._busiest_us(left, right), self._busiest_us(right, left))

    def _busiest_us(self, own: Ints, other: Ints) -> float:
        node = np.arange(len(own)) // self.node_size
        inside = np.bincount(node, other)[node]
        peers_inside = np.bincount(node, other > 0)[node]
        near, far = own * (inside - other), own * (other.sum() - inside)
        peers = (own > 0) * (np.count_nonzero(other) - peers_inside)
        # The links of both levels are different wires and run at once.
        wires = np.maximum(near / self.near_bytes_per_us, far / self.far_bytes_per_us)
        return float((peers * self.far_peer_us + wires).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTime:
    """One direction of a step: messages in series, their time, and the time of the folds between them."""

    hops: int
    message_us: float
    fold_us: float

    @property
    def total_us(self) -> float:
        return self.message_us + self.fold_us


def exchange_time(
    layer: LayerOnPack, network: Network, calibration: Calibration, *, backward: bool = False
) -> ExchangeTime:
    """Modelled time of the layer's exchange. Fold times are those of ordinary mode, one hop per fragment."""
    if layer.exchange == "none":
        return ExchangeTime(hops=0, message_us=0.0, fold_us=0.0)
    order = chain_order(layer.partition.table, reverse=backward)
    model = _ring if layer.exchange == "ring" else _a2a
    return model(layer, network, calibration, order, backward)


def halo_us(layer: LayerOnPack, network: Network, *, backward: bool = False) -> float:
    """Modelled time of the convolution's halo: its slowest message."""
    if layer.conv is None:
        return 0.0
    channels, width = layer.conv
    source, target = halo_ends(layer.partition, width, reverse=backward)
    pair, rows = np.unique(source * layer.world_size + target, return_counts=True)
    size = rows * channels * (layer.itemsize if backward else layer.dtype.itemsize)
    return float(network.message_us(pair // layer.world_size, pair % layer.world_size, size).max(initial=0.0))


def _ring(
    layer: LayerOnPack, network: Network, calibration: Calibration, order: ChainOrder, backward: bool
) -> ExchangeTime:
    """Level after level: its slowest message, then the folds of its busiest rank."""
    rank, world = layer.partition.table.rank, layer.world_size
    entering = np.flatnonzero((order.before >= 0) & (rank[order.before] != rank))
    key, states = np.unique(
        (order.level[entering] * world + rank[order.before[entering]]) * world + rank[entering], return_counts=True
    )
    level, pair = np.divmod(key, world * world)
    slowest = np.zeros(int(level.max()) + 1)
    size = states * layer.heads[1] * layer.state_bytes
    np.maximum.at(slowest, level, network.message_us(pair // world, pair % world, size))
    passing = np.flatnonzero((order.level > 0) & (order.before >= 0) & (order.after >= 0))
    key, owner, folds = np.unique(order.level[passing] * world + rank[passing], return_inverse=True, return_counts=True)
    serial = np.zeros(len(key), dtype=np.int64)
    np.maximum.at(serial, owner, order.wave[passing] + 1)
    steps = np.zeros(len(slowest), dtype=np.int64)
    np.maximum.at(steps, key // world, _fold_steps(serial, folds * layer.heads[1], calibration))
    fold_us = int(steps.sum()) * calibration.times.fold_hop / 1000
    return ExchangeTime(hops=len(slowest) - 1, message_us=float(slowest.sum()), fold_us=fold_us)


def _a2a(
    layer: LayerOnPack, network: Network, calibration: Calibration, order: ChainOrder, backward: bool
) -> ExchangeTime:
    """Two collectives, and the owners' walk along the longest chain."""
    purpose, sizes = "ADJOINT" if backward else "STATE", owner_sizes(layer)
    us = sum(network.collective_us_of(*sizes[name]) for name in (purpose, f"{purpose}_HOME"))
    asks = order.crosses & (order.before >= 0)
    folds = int(asks.sum()) * int(layer.owned_heads().max())
    steps = _fold_steps(order.position[asks].max(), np.asarray(folds), calibration)
    return ExchangeTime(hops=2, message_us=us, fold_us=int(steps) * calibration.times.fold_hop / 1000)


def _fold_steps(serial: Ints, folds: Ints, calibration: Calibration) -> Ints:
    """Fold hops in series: the chain's own, or as many rounds as the device needs for all (each is one head's)."""
    slots = calibration.sm_count * calibration.settings.fold_blocks
    steps: Ints = np.maximum(serial, -(-folds * FOLD_BLOCKS // slots))
    return steps
