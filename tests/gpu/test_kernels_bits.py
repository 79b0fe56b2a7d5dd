"""Bits of the kernels that must not move: strides, neighbours, repeats, forward and backward."""

from collections.abc import Callable

import pytest
import torch

import cp_gdn
from tests.gpu.kernel_cases import inputs, run, run_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

DIRECTIONS = {"forward": run, "backward": run_backward}
PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
PER_DOCUMENT = ("end", "dstart")

Run = Callable[..., dict[str, torch.Tensor]]
each_direction = pytest.mark.parametrize("run_all", DIRECTIONS.values(), ids=DIRECTIONS)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, value in want.items():
        assert torch.equal(got[name].nan_to_num(7), value.nan_to_num(7)), name  # rows that nobody writes hold NaN


@each_direction
def test_strided_views_of_a_packed_row_have_the_bits_of_copies(run_all: Run) -> None:
    lengths = [100, 28]
    x = inputs(lengths, "model", 3)
    packed = torch.cat([x[n].flatten(1) for n in ("q", "k", "v")], 1)
    views = dict(zip(("q", "k", "v"), cp_gdn.packed_qkv_views(packed, (2, 6), (128, 128)), strict=True))
    assert_same(run_all({**x, **views}, lengths), run_all(x, lengths))


@each_direction
def test_a_neighbour_full_of_nan_changes_no_bit(run_all: Run) -> None:
    lengths = [70, 58]
    x = inputs(lengths, "model", 3)
    clean = run_all(x, lengths)
    poisoned = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta", "dout"):
        poisoned[name][70:] = float("nan")
    got = run_all(poisoned, lengths)
    own = dict.fromkeys(PER_TOKEN, 70) | dict.fromkeys(PER_DOCUMENT, 1)
    seen = {name: rows for name, rows in own.items() if name in clean}
    assert seen
    for name, rows in seen.items():
        assert torch.equal(got[name][:rows], clean[name][:rows]), name


@each_direction
def test_fifty_repeats_beside_a_busy_stream_have_the_same_bits(run_all: Run) -> None:
    lengths = [700, 64, 333]
    x = inputs(lengths, "model", 3)
    first = run_all(x, lengths)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        assert_same(run_all(x, lengths), first)


@each_direction
def test_short_documents_that_share_a_block_have_the_bits_of_blocks_of_their_own(run_all: Run) -> None:
    lengths = [5, 64, 130, 1, 1, 1700, 70, 64, 3]
    x = inputs(lengths, "model", 3)
    alone, got = run_all(x, lengths), run_all(x, lengths, shared=True)
    assert_same(got, {name: alone[name] for name in got})
