"""The fold on the GPU: accuracy and its negative controls, order, bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_gdn.affine import run
from cp_gdn.backends.hopper_hops import KernelHops, PackedHops
from cp_gdn.chains import Hops
from cp_gdn.tables import upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

HEADS, LENGTH, CHAINS = 6, 22, 3
BUDGET = 1e-5


def chains_of_hops() -> Hops:
    """Three chains of 22 hops, the second from a state that is there, side by side; maps 5 and 30 are zero (below)."""
    index = np.arange(LENGTH * CHAINS)
    step, chain = np.divmod(index, CHAINS)
    dst = chain * (LENGTH + 1) + step + 1
    table = np.array((dst, dst - 1, index, index))
    starts = (step == 0) & (chain != 1)
    order = np.lexsort((~starts, step))
    steps = ((CHAINS - 1, True), (1, False), *(((CHAINS, False),) * (LENGTH - 1)))
    return Hops(table=table[:, order], steps=steps)


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


def on_gpu(hops: Hops) -> KernelHops:
    return upload(PackedHops(([hops], None))[hops], torch.device("cuda"))


def in_torch(hops: Hops, states: Tensor, maps: Tensor, offsets: Tensor | None, *, adjoint: bool) -> Tensor:
    """The same hops, one after the other, by `torch.matmul` in the dtype of the tensors."""
    states, starts = states.clone(), [s for count, s in hops.steps for _ in range(count)]
    for (dst, src, offset, row), start in zip(hops.table.T.tolist(), starts, strict=True):
        m = maps[row].mT if adjoint else maps[row]
        product = torch.zeros_like(states[dst]) if start else m @ states[src]
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
    pairs = np.array([(66, 4, 5, 5), (67, 29, 30, 30), (68, 1, 2, 2)]).T
    buffer = torch.cat([maps, maps.new_full((3, HEADS, 128, 128), float("nan"))])
    flags = torch.cat([flags, flags.new_full((3, HEADS), 7)])
    run(on_gpu(Hops(table=pairs, steps=((3, False),))), buffer, buffer, None, dropped=flags)
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
        starts = [s for count, s in hops.steps for _ in range(count)]
        for i, start in enumerate(starts):
            run(on_gpu(Hops(table=hops.table[:, i : i + 1], steps=((1, start),))), own, m, b, adjoint=adjoint)
        assert torch.equal(own[:, 0], whole[:, head])


def test_maps_are_composed_in_place() -> None:
    _, maps, _ = case(2)
    count = 9
    maps = torch.cat([maps[7 : 7 + count], maps.new_full((1, HEADS, 128, 128), float("nan"))])
    src = np.array([0, *[count] * (count - 2)])
    table = np.array((np.full(count - 1, count), src, np.arange(1, count), np.arange(1, count)))
    hops = Hops(table=table, steps=((1, False),) * (count - 1))
    want = maps[0].double()
    for m in maps[1:count].double():
        want = m @ want
    run(on_gpu(hops), maps, maps, None)
    assert worst(maps[count:], want[None]) < BUDGET
