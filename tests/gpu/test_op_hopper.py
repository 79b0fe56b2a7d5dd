"""The op on the Hopper kernels: against fp64 per head, by bits over exchanges, world sizes and layouts."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn.backends import choice
from tests.gpu.op_cases import (
    NAMES,
    PACKS,
    assert_same,
    bounds_of,
    context,
    hopper,
    inputs,
    oracle,
    worst_head,
)
from tests.gpu.tile_emulator import FLOORS, drawn_errors, head_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

BUDGET, GRADIENT_BUDGET = 5e-3, 1e-2

CASES = [  # pack, world, layout, exchange, segments, gate, group, initial state
    ("mixed", 1, "contiguous", "auto", 1, "model", 3, True),
    ("mixed", 1, "contiguous", "auto", 3, "slow", 3, False),
    ("mixed", 2, "zigzag_per_document", "ring", 1, "slow", 2, True),
    ("mixed", 4, "zigzag", "a2a", 2, "model", 3, True),
    ("one document", 1, "zigzag", "auto", 5, "slow", 1, True),
    ("one document", 1, "contiguous", "auto", 8, "strong", 4, False),
    ("one document", 2, "contiguous", "a2a", 3, "slow", 8, False),
    ("one document", 4, "zigzag_per_document", "ring", 2, "reset", 3, True),
    ("one document", 4, "zigzag", "ring", "grid:2", "slow", 3, True),
    ("one document", 1, "contiguous", "auto", "auto", "model", 3, False),
    ("five tokens", 4, "zigzag", "ring", 1, "model", 3, True),
    ("many", 2, "zigzag", "a2a", 1, "model", 3, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_outputs_states_and_gradients_match_fp64_per_head(case: tuple) -> None:
    """Budget: see `Drawn`, the emulator's of the uncut pack, whatever the cuts."""
    pack, world, layout, exchange, segments, gate, group, initial = case
    bounds, x = bounds_of(pack), inputs(PACKS[pack], gate, group)
    got = hopper(x, bounds, world, layout, exchange=exchange, segments=segments, initial=initial, grads=True)
    want = oracle(x, bounds, initial=initial, grads=True)
    start = x["initial"] if initial else torch.zeros_like(x["initial"])
    renamed = {"end": "final", "dstart": "dinitial_state"}
    names = {name: renamed.get(name, name) for name in FLOORS if renamed.get(name, name) in want}
    wanted = {name: want[source] for name, source in names.items()}
    drawn = drawn_errors({**x, "start": start, "dend": x["dfinal"]}, PACKS[pack], wanted, names)
    for name, source in names.items():
        fault = drawn[name].fault(head_errors(got[source], want[source]), FLOORS[name])
        assert not fault, f"{name}: {fault}"


@pytest.mark.parametrize("segments", [1, 2, "grid:2"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_ring_and_all_to_all_have_the_same_bits(layout: str, segments: object) -> None:
    pack = (1500, 300, 0, 700)
    bounds, x = [0, 1500, 1800, 1800, 2500], inputs(pack, "slow", 3)
    asked = {"segments": segments, "initial": True, "grads": True}
    ring, a2a = (hopper(x, bounds, 4, layout, exchange=e, **asked) for e in ("ring", "a2a"))
    assert_same(ring, a2a)


def test_grid_mode_has_the_same_bits_for_every_world_size_and_layout() -> None:
    bounds, x = [0, 1500, 1800, 2500], inputs((1500, 300, 700), "slow", 3)
    asked = {"segments": "grid:2", "initial": True, "grads": True}
    alone = hopper(x, bounds, 1, "contiguous", **asked)
    for world in (1, 2, 4):
        for layout in ("contiguous", "zigzag", "zigzag_per_document"):
            assert_same(hopper(x, bounds, world, layout, **asked), alone)


def test_strided_views_expanded_tensors_and_odd_strides_have_the_bits_of_copies() -> None:
    x = inputs((130, 62), "model", 3)
    ctx = context(cp_gdn.Comm.alone(), x, [0, 130, 192], "contiguous", backend="hopper", segments=2)
    packed = torch.cat([x[n].flatten(1) for n in ("q", "k", "v")], 1)
    views = cp_gdn.packed_qkv_views(packed, (2, 6), (128, 128))
    odd = torch.zeros(192, 6, 131, dtype=torch.bfloat16, device="cuda")[..., :128].copy_(x["v"])
    one = x["k"][:, :1].expand(-1, 2, -1)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cp_gdn.chunk_gated_delta_rule(q, k, v, x["g"], x["beta"], ctx=ctx)[0]

    plain = forward(x["q"], x["k"], x["v"])
    assert torch.equal(plain, forward(*views))
    assert torch.equal(plain, forward(x["q"], x["k"], odd))
    assert torch.equal(forward(x["q"], one.contiguous(), x["v"]), forward(x["q"], one, x["v"]))


def test_raw_queries_and_keys_are_normalised_inside() -> None:
    bounds, x = bounds_of("mixed"), inputs(PACKS["mixed"], "slow", 3)
    gen = torch.Generator(device="cuda").manual_seed(1)
    for name in ("q", "k"):
        lengths = 4 ** (2 * torch.rand(*x[name].shape[:2], 1, generator=gen, device="cuda") - 1)
        x[name] = (x[name] * lengths).bfloat16()
    found = {}
    for backend, dtype in (("hopper", torch.bfloat16), ("torch", torch.float64)):
        wide = torch.float32 if backend == "hopper" else dtype
        ctx = context(cp_gdn.Comm.alone(), x, bounds, "contiguous", backend=backend, dtype=dtype, segments=3)
        leaves = [x[n].to(wide if n in ("g", "beta") else dtype).requires_grad_() for n in NAMES]
        o, _ = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx, use_qk_l2norm_in_kernel=True)
        found[backend] = [o.detach(), *torch.autograd.grad((o * x["dout"].to(dtype)).sum(), leaves)]
    for got, want in zip(found["hopper"], found["torch"], strict=True):
        assert worst_head(got, want) < (BUDGET if got is found["hopper"][0] else GRADIENT_BUDGET)


def test_no_tokens_and_empty_documents_pass_states_through() -> None:
    x = inputs((0, 0), "model", 3)
    ctx = context(cp_gdn.Comm.alone(), x, [0, 0, 0], "contiguous", backend="hopper")
    tensors = [x[n] for n in NAMES]
    o, final = cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx, initial_state=x["initial"], output_final_state=True)
    assert o.shape == (0, 6, 128)
    assert final is not None
    assert torch.equal(final, x["initial"])
    _, final = cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx, output_final_state=True)
    assert final is not None
    assert not final.any()


def test_5000_documents_of_1_to_4_tokens_take_no_state_memory() -> None:
    lengths = tuple(1 + i % 4 for i in range(5000))
    bounds, x = [0, *torch.tensor(lengths).cumsum(0).tolist()], inputs((sum(lengths),), "model", 3)
    ctx = context(cp_gdn.Comm.alone(), x, bounds, "contiguous", backend="hopper")
    tensors = [x[n].requires_grad_() for n in NAMES]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    wide = [t.detach().double() for t in tensors]
    exact = context(cp_gdn.Comm.alone(), x, bounds, "contiguous", backend="torch", dtype=torch.float64)
    with torch.no_grad():
        want, _ = cp_gdn.chunk_gated_delta_rule(*wide, ctx=exact)
    assert worst_head(o.detach(), want) < BUDGET


def test_what_is_not_asked_for_changes_no_bit() -> None:
    """No gradients, no final state, the explicit entry, 50 repeats beside a busy stream."""
    bounds, x = bounds_of("mixed"), inputs(PACKS["mixed"], "slow", 3)
    ctx = context(cp_gdn.Comm.alone(), x, bounds, "contiguous", backend="hopper", segments=3)
    tensors = [x[n] for n in NAMES]
    first, final = cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx, output_final_state=True)
    explicit, same, _ = cp_gdn.forward(*tensors, ctx=ctx, output_final_state=True)
    assert final is not None
    assert same is not None
    assert torch.equal(first, explicit)
    assert torch.equal(final, same)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        assert torch.equal(first, cp_gdn.chunk_gated_delta_rule(*tensors, ctx=ctx)[0])


def test_the_cutoff_moves_o_by_less_than_its_exponential() -> None:
    bounds, x = [0, 1500], inputs((1500,), "model", 3)
    kept, cut = (
        hopper(x, bounds, 1, "contiguous", segments=4, initial=True, options=cp_gdn.Options(decay_cutoff=c))
        for c in (None, -17.0)
    )
    assert worst_head(cut["o"], kept["o"]) < 1e-3
    assert worst_head(cut["final"], kept["final"]) < 1e-5


def test_auto_takes_the_kernels_and_says_why_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    x = inputs((64,), "model", 3)
    ctx = context(cp_gdn.Comm.alone(), x, [0, 64], "contiguous")
    assert ctx.taken.kind == "hopper"
    assert ctx.taken.reason.startswith("auto: ")
    wide = context(cp_gdn.Comm.alone(), x, [0, 64], "contiguous", dtype=torch.float32)
    assert (wide.taken.kind, wide.kernels) == ("torch", None)
    assert "float32" in wide.taken.reason
    with pytest.raises(RuntimeError, match=r'backend="hopper": dtype torch\.float32'):
        context(cp_gdn.Comm.alone(), x, [0, 64], "contiguous", dtype=torch.float32, backend="hopper")
    with caplog.at_level(logging.WARNING, "cp_gdn"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "unfit_machine", lambda device, heads: "nvcc: a test hides it")
        assert context(cp_gdn.Comm.alone(), x, [0, 64], "contiguous").taken.kind == "torch"
    assert "nvcc: a test hides it" in caplog.text
