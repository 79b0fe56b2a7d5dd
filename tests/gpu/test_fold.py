"""The fold on the GPU: accuracy and its negative controls, order, bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_gdn.affine import run
from cp_gdn.backends.hopper_hops import KernelHops, chainwise
from cp_gdn.page import Page

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

HEADS, LENGTH, CHAINS = 6, 22, 3
BUDGET = 1e-5


def chains_of_hops() -> np.ndarray:
    """Columns of `cp_gdn.hops`: three chains of 22 hops, the second from a state that is there, step after step; maps 5
    and 30 are zero (below)."""
    index = np.arange(LENGTH * CHAINS)
    step, chain = np.divmod(index, CHAINS)
    dst, later = chain * (LENGTH + 1) + step + 1, (step > 0) | (chain == 1)
    return np.array((np.zeros_like(index), chain, step, later, dst, dst - 1, index, index))


def columns_of(hops: list[tuple[int, int, int, int]]) -> np.ndarray:
    """Of (dst, src, offset row, map row), each a chain of its own."""
    chain, zero = np.arange(len(hops)), np.zeros(len(hops), dtype=np.int64)
    return np.array((zero, chain, zero, zero + 1, *np.array(hops).T))


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """States, orthogonal maps that keep what they carry, offsets."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    rows = LENGTH * CHAINS

    def normal(n: int) -> Tensor:
        return torch.randn(n, HEADS, 128, 128, generator=gen, device="cuda")

    maps = torch.linalg.qr(normal(rows))[0].contiguous()
    maps[5] = 0
    maps[30, 2] = 0
    return normal((LENGTH + 1) * CHAINS), maps, normal(rows)


def on_gpu(columns: np.ndarray) -> KernelHops:
    page = Page()
    hops = chainwise(columns, page)
    page.upload(torch.device("cuda"))
    return hops.of(0)


def in_torch(columns: np.ndarray, states: Tensor, maps: Tensor, offsets: Tensor | None, *, adjoint: bool) -> Tensor:
    """The same hops, one after the other, by `torch.matmul` in the dtype of the tensors."""
    states = states.clone()
    for later, dst, src, offset, row in columns[3:].T.tolist():
        m = maps[row].mT if adjoint else maps[row]
        product = m @ states[src] if later else torch.zeros_like(states[dst])
        states[dst] = product if offsets is None else product + offsets[offset]
    return states


def worst(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want).flatten(2).norm(dim=2) / want.flatten(2).norm(dim=2)).max())


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_fold_is_within_1e5_of_fp64_and_rounded_maps_are_not(adjoint: bool) -> None:
    hops, (states, maps, offsets) = chains_of_hops(), case()
    want = in_torch(hops, states.double(), maps.double(), offsets.double(), adjoint=adjoint)
    got = states.clone()
    run(on_gpu(hops), got, maps, offsets, adjoint=adjoint)
    assert worst(got, want) < BUDGET
    rounded = in_torch(hops, states, maps.bfloat16().float(), offsets, adjoint=adjoint)
    assert worst(rounded, want) > BUDGET
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert worst(in_torch(hops, states, maps, offsets, adjoint=adjoint), want) > BUDGET
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_flags_of_zero_maps_change_no_bit_and_are_composed() -> None:
    hops, (states, maps, offsets) = chains_of_hops(), case(3)
    flags = (maps.flatten(2).abs().amax(2) == 0).int()
    known, looked = states.clone(), states.clone()
    run(on_gpu(hops), known, maps, offsets, dropped=flags)
    run(on_gpu(hops), looked, maps, offsets)
    assert torch.equal(known, looked)
    pairs = columns_of([(66, 4, 5, 5), (67, 29, 30, 30), (68, 1, 2, 2)])
    buffer = torch.cat([maps, maps.new_full((3, HEADS, 128, 128), float("nan"))])
    flags = torch.cat([flags, flags.new_full((3, HEADS), 7)])
    run(on_gpu(pairs), buffer, buffer, None, dropped=flags)
    assert torch.equal(flags[66:], (buffer[66:].flatten(2).abs().amax(2) == 0).int())
    assert flags[66].all()
    assert flags[67].sum() == 1
    assert worst(buffer[68:], (maps[2].double() @ maps[1].double())[None]) < BUDGET


@pytest.mark.parametrize("adjoint", [False, True])
def test_one_launch_has_the_bits_of_hop_by_hop_launches_of_single_heads(adjoint: bool) -> None:
    hops, (states, maps, offsets) = chains_of_hops(), case(1)
    whole = states.clone()
    run(on_gpu(hops), whole, maps, offsets, adjoint=adjoint)
    for head in (0, HEADS - 1):
        own, m, b = (x[:, head : head + 1].contiguous() for x in (states, maps, offsets))
        for i in range(hops.shape[1]):
            run(on_gpu(hops[:, i : i + 1]), own, m, b, adjoint=adjoint)
        assert torch.equal(own[:, 0], whole[:, head])


def test_maps_are_composed_in_place() -> None:
    _, maps, _ = case(2)
    count = 9
    maps = torch.cat([maps[7 : 7 + count], maps.new_full((1, HEADS, 128, 128), float("nan"))])
    hops = columns_of([(count, count if i > 1 else 0, i, i) for i in range(1, count)])
    hops[1:3] = np.array((np.zeros(count - 1), np.arange(count - 1)))  # one chain, step after step
    want = maps[0].double()
    for m in maps[1:count].double():
        want = m @ want
    run(on_gpu(hops), maps, maps, None)
    assert worst(maps[count:], want[None]) < BUDGET
