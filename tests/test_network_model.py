"""The model of links and folds: worked examples, and the figures that the choice of an exchange names."""

import re

import numpy as np
import pytest
import torch

from cp_gdn.byte_counts import LayerOnPack
from cp_gdn.calibration import H200_MODEL
from cp_gdn.cost_model import quantities, step_ns
from cp_gdn.exchange import choose_exchange
from cp_gdn.forecast import LayerSpec, forecast
from cp_gdn.layout import partition
from cp_gdn.makespan import rank_tables
from cp_gdn.network_model import Network, exchange_time, halo_us

NETWORK = Network(
    node_size=2,
    near_hop_us=10.0,
    far_hop_us=100.0,
    collective_us=1000.0,
    far_peer_us=7.0,
    near_bytes_per_us=4096.0,
    far_bytes_per_us=1024.0,
)
STATE = 16 * 16 * 4
"""Bytes of one head's state; a map has as many."""


def layer(bounds: list[int], world: int, exchange: str, layout: str = "contiguous", heads: int = 4) -> LayerOnPack:
    return LayerOnPack(
        partition=partition(bounds, world, layout),
        heads=(1, heads),
        head_dims=(16, 16),
        dtype=torch.bfloat16,
        conv=(64, 3),
        exchange=exchange,
        p_vector=(1,) * world,
    )


def test_a_ring_pays_each_hop_at_its_links_latency_and_rate() -> None:
    # Ranks 0 1 | 2 3: hops 0-1 and 2-3 are near, 1-2 is far; each carries 4 heads.
    time = exchange_time(layer([0, 400], 4, "ring"), NETWORK, H200_MODEL)
    near, far = 10 + 4 * STATE / 4096, 100 + 4 * STATE / 1024
    assert (time.hops, time.message_us) == (3, 2 * near + far)
    # Ranks 1 and 2 apply their maps, rank 3 only receives.
    assert time.fold_us == pytest.approx(2 * H200_MODEL.times.fold_hop / 1000)
    assert time.total_us == time.message_us + time.fold_us


def test_hops_of_one_level_run_at_once_and_the_slowest_counts() -> None:
    # Documents of 200 and 200 on four ranks: hops 0-1 and 2-3 at once; of 300 and 100: 0-1, 1-2, nothing crosses to 3.
    near, far = 10 + 4 * STATE / 4096, 100 + 4 * STATE / 1024
    assert exchange_time(layer([0, 200, 400], 4, "ring"), NETWORK, H200_MODEL).message_us == near
    assert exchange_time(layer([0, 300, 400], 4, "ring"), NETWORK, H200_MODEL).message_us == near + far


def test_neighbouring_fragments_of_one_rank_fold_one_after_the_other() -> None:
    time = exchange_time(layer([0, 400], 2, "ring", "zigzag"), NETWORK, H200_MODEL)  # pieces on ranks 0, 1, 1, 0
    assert time.hops == 2
    assert time.fold_us == pytest.approx(2 * H200_MODEL.times.fold_hop / 1000)


def test_a_fold_of_more_heads_than_fit_at_once_takes_several_rounds() -> None:
    heads = H200_MODEL.sm_count * H200_MODEL.settings.fold_blocks // 8 * 2  # 8 thread blocks per head and state
    time = exchange_time(layer([0, 300], 3, "ring", heads=heads), NETWORK, H200_MODEL)
    assert time.fold_us == pytest.approx(2 * H200_MODEL.times.fold_hop / 1000)


def test_a_collective_takes_its_busiest_ranks_slower_level_of_links() -> None:
    left, right = np.array([8192, 0, 0, 0]), np.array([1, 1, 1, 0])
    # Rank 0 sends 8192 bytes to its neighbour (2 us) and at the same time as many to one far rank (8 us).
    assert NETWORK.collective_us_of(left, right) == 1000 + 7 + 8
    # Mirrored: the same bytes flow into rank 0.
    assert NETWORK.collective_us_of(right, left) == 1000 + 7 + 8
    assert NETWORK.collective_us_of(left, np.array([1, 1, 0, 0])) == 1000 + 2


def test_an_all_to_all_pays_two_collectives_and_a_walk_along_the_longest_chain() -> None:
    asked = layer([0, 400], 4, "a2a")
    time = exchange_time(asked, NETWORK, H200_MODEL)
    # Each rank owns one head. Rank 0 ships a state per owner, ranks 1 and 2 a state and a map, rank 3 nothing; every
    # owner sends each of ranks 1 to 3 an entry state. To both ranks of the other node at 1024 bytes per us:
    shipped = 2 * STATE * 2 / 1024 + 2 * 7
    home = 2 * STATE / 1024 + 2 * 7
    assert (time.hops, time.message_us) == (2, 2000 + shipped + home)
    assert time.fold_us == pytest.approx(3 * H200_MODEL.times.fold_hop / 1000)
    backward = exchange_time(asked, NETWORK, H200_MODEL, backward=True)  # the maps were kept: offsets alone
    assert backward.message_us == 2000 + 2 * (2 * STATE / 1024 + 2 * 7)


def test_the_halo_takes_its_slowest_message() -> None:
    asked = layer([0, 400], 4, "ring")
    assert halo_us(asked, NETWORK) == 100 + 2 * 64 * 2 / 1024  # two rows of 64 channels in bf16 over the far link
    assert halo_us(asked, NETWORK, backward=True) == 100 + 2 * 64 * 4 / 1024
    assert halo_us(layer([0, 100, 200], 2, "none"), NETWORK) == 0


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_inside_one_node_the_ring_costs_what_the_choice_of_an_exchange_says(layout: str) -> None:
    part = partition([0, 5000, 70_000, 200_000], 8, layout)
    choice = choose_exchange("auto", part, 48, (128, 128), grid=False, itemsize=4)
    found = forecast(part, LayerSpec(heads=(16, 48), exchange="ring", segments=1)).time
    assert found is not None
    named = re.search(r"ring (\d+)", choice.reason)
    assert named is not None
    assert int(named[1]) == round(found.forward.message_us)
    assert found.forward.message_us == found.backward.message_us


def test_a_pack_that_does_not_cross_has_no_messages_and_full_balance() -> None:
    found = forecast(partition([0, 640, 1280], 2, "contiguous"), LayerSpec(heads=(2, 4), conv=(64, 4))).time
    assert found is not None
    assert found.forward.total_us == found.backward.total_us == found.halo_us == 0
    assert found.balance == 1.0
    assert found.step_us == found.compute_us[0] == found.compute_us[1]


def test_compute_is_the_step_model_without_its_links() -> None:
    part = partition([0, 3000, 9000], 3, "zigzag")
    found = forecast(part, LayerSpec(heads=(2, 6), segments=2)).time
    assert found is not None
    for rank, table in enumerate(rank_tables(part)):
        counted, times = quantities(table, 2, 6, H200_MODEL), H200_MODEL.times
        links = counted["exchange"] * times.exchange + counted["link_mib"] * times.link_mib
        assert found.compute_us[rank] == (step_ns(table, 2, 6, H200_MODEL) - links) / 1000
