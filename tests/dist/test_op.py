"""The op over real process groups: the bits of the twin in every tensor of every rank, and its messages."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn import Comm, GatedDeltaNet, build_context, partition
from tests.cases import LAYOUTS, PACKS, Content, Run, pairs
from tests.dist import pool
from tests.pack import (
    GRADIENTS,
    Share,
    assemble,
    assert_same_bits,
    call,
    differences,
    local_gradients,
    local_inputs,
    make_context,
    make_pack,
    run_in_twin,
    run_on_rank,
)
from tests.test_layer import make_layer, make_rows
from tests.test_twin import assert_lists_match

pytestmark = pytest.mark.dist

WORLDS = (1, 2, 3, 4, 5, 8)
TABLE: dict[str, Any] = {
    "pack": ("ragged", "long", "five tokens", "empty documents", "no tokens", "several chunks"),
    "gate": ("slow", "model", "one -inf", "heads apart"),
    "layout": (*LAYOUTS, "explicit"),
    "exchange": ("ring", "a2a"),
    "segments": (1, 2, "vector", "grid:1", "auto"),
    "head_dims": ((24, 40), (5, 7)),
    "inputs": (torch.float32, torch.bfloat16),
    "save_transfer": (True, False),
    "dtype": (torch.float32, torch.float64),
}
CUT_PACK = Content(pack="300 documents", gate="slow", heads=(1, 1), head_dims=(16, 16))


def cases(world: int) -> list[tuple[Content, Run]]:
    """A third of a covering choice, another one for every next size; 16-bit inputs are passed in 16 bit."""
    found = []
    for content, run in pairs(TABLE)[WORLDS.index(world) % 3 :: 3]:
        narrow = content.inputs == torch.bfloat16
        found.append((content, replace(run, world=world, dtype=content.inputs if narrow else run.dtype)))
    return [*found, (CUT_PACK, Run(world=world, exchange="auto", dtype=torch.float32))]


def all_cases(comm: Comm) -> list[Share]:
    return [run_on_rank(comm, run, make_pack(content)) for content, run in cases(comm.size)]


def on_rank(_rank: int, _world: int) -> list[Share]:
    comm = Comm()
    try:
        return all_cases(comm)
    finally:
        comm.close()


@pytest.mark.parametrize("world", WORLDS)
def test_every_tensor_of_every_rank_is_the_twins_and_both_ends_list_the_same_messages(world: int) -> None:
    got = pool.run(world, on_rank)
    for index, (content, run) in enumerate(cases(world)):
        shares = [results[index] for results in got]
        want = run_in_twin(run, make_pack(content))
        assert_same_bits(shares, want)
        assert_lists_match(shares)  # type: ignore[arg-type]
        assert [share.messages for share in shares] == [share.messages for share in want]


# ---- repeats ---------------------------------------------------------------------------------------------------------

REPEATED = Content(pack="long", heads=(2, 6))


def repeats(_rank: int, world: int) -> list[Share]:
    comm, pack = Comm(), make_pack(REPEATED)
    found = []
    for exchange in ("ring", "a2a"):
        run = Run(world=world, exchange=exchange, segments=2, dtype=torch.float32)
        shares = [run_on_rank(comm, run, pack) for _ in range(25)]
        assert all(differences(share.tensors, shares[0].tensors) == [] for share in shares)
        found.append(shares[0])
    comm.close()
    return found


def test_50_repeats_in_other_processes_give_the_bits_of_this_one() -> None:
    want = run_in_twin(Run(world=2, segments=2, dtype=torch.float32), make_pack(REPEATED))
    for shares in zip(*pool.run(2, repeats), strict=True):
        assert_same_bits(shares, want)


# ---- grid mode -------------------------------------------------------------------------------------------------------

GRID = Content(pack=(300, 0, 65, 130), l2norm=True)


def in_grid_mode(_rank: int, world: int) -> list[Share]:
    comm, pack = Comm(), make_pack(GRID)
    runs = [
        Run(world=world, layout=layout, exchange=exchange, segments="grid:1", dtype=torch.float32)
        for layout in LAYOUTS
        for exchange in ("ring", "a2a")
    ]
    shares = [run_on_rank(comm, run, pack) for run in runs]
    comm.close()
    return shares


def test_grid_mode_gives_one_ranks_bits_over_any_number_of_processes_in_any_layout() -> None:
    run = Run(layout="contiguous", segments="grid:1", dtype=torch.float32)
    want = assemble(run_in_twin(run, make_pack(GRID)))
    for world in (2, 4):
        for shares in zip(*pool.run(world, in_grid_mode), strict=True):
            assert differences(assemble(shares), want) == [], world


# ---- threads, and a layer that trains --------------------------------------------------------------------------------


def backward_in_a_thread(_rank: int, world: int) -> list[str]:
    """Two calls whose backwards run in a thread of their own, as on a device, against plain steps."""
    comm, pack = Comm(), make_pack(REPEATED)
    wrong: list[str] = []
    for exchange in ("ring", "a2a"):
        run = Run(world=world, exchange=exchange, dtype=torch.float32)
        ctx = make_context(comm, run, pack)
        want = run_on_rank(comm, run, pack).tensors
        leaves = local_inputs(ctx, pack)
        outputs, found = call(ctx, leaves, pack), []
        thread = threading.Thread(
            target=lambda o=outputs, x=leaves, c=ctx, f=found: f.extend(  # type: ignore[misc]
                torch.autograd.grad(o, x.values(), local_gradients(c, pack))
            )
        )
        thread.start()
        thread.join()
        wrong += [n for n, grad in zip(GRADIENTS, found, strict=True) if not torch.equal(grad, want[n])]
    comm.close()
    return wrong


def test_the_backward_may_run_in_another_thread_than_the_forward() -> None:
    assert pool.run(3, backward_in_a_thread) == [[]] * 3


BOUNDS = (0, 37, 88, 128)


def two_steps(_rank: int, world: int) -> list[Tensor]:
    """Two steps of gradient descent of two layers: all parameters afterwards, gradients summed over the group."""
    comm = Comm() if world > 1 else Comm.alone()
    layers = [make_layer() for _ in range(2)]
    ctx = layer_context(comm, layers[0])
    x, dy = (rows[:, ctx.token_ids] for rows in make_rows(BOUNDS[-1]))
    parameters = [p for layer in layers for p in layer.parameters()]
    for _ in range(2):
        y = layers[1](layers[0](x, ctx), ctx)
        grads = torch.autograd.grad(y, parameters, dy)
        with torch.no_grad():
            for p, grad in zip(parameters, grads, strict=True):
                p -= 1e-2 * comm.all_reduce_sum("GRADIENT", grad)
    comm.close()
    return [p.detach() for p in parameters]


def layer_context(comm: Comm, layer: GatedDeltaNet) -> Any:
    conv = (layer.conv_channels, layer.conv_width)
    shape = {"heads": layer.heads, "head_dims": layer.head_dims, "dtype": torch.float64, "conv": conv}
    return build_context(partition(BOUNDS, comm.size), comm, **shape)


def test_two_layers_train_to_the_parameters_of_one_rank_and_alike_on_every_rank() -> None:
    want = two_steps(0, 1)
    for world in (2, 3):
        ranks = pool.run(world, two_steps)
        for parameters in ranks:
            assert all(torch.equal(a, b) for a, b in zip(parameters, ranks[0], strict=True))
            assert all((a - b).norm() <= 1e-11 * b.norm() for a, b in zip(parameters, want, strict=True))


def test_the_sizes_together_take_every_case_of_the_table() -> None:
    assert {content.pack for world in WORLDS for content, _ in cases(world)} == set(PACKS) - {"on the grid"}
    assert sum(len(cases(world)) - 1 for world in WORLDS[:3]) == len(pairs(TABLE))
