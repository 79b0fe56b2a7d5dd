"""The op on the Hopper kernels, forward and backward: forms of one call that have the same bits, and repeats."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import cp_gdn
from tests.gpu.fresh_process import digest
from tests.gpu.jitter import build, jittering
from tests.gpu.op_cases import NAMES, PACKS, assert_same, bounds_of, context, inputs, run_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

Grads = tuple[Tensor, ...]


class Call:
    """A forward of the pack "mixed" in three segments from initial states."""

    def __init__(self, seed: int = 0) -> None:
        self.x = inputs(PACKS["mixed"], "slow", 3, seed=seed)
        alone = cp_gdn.Comm.alone()
        self.ctx = context(alone, self.x, bounds_of("mixed"), "contiguous", backend="hopper", segments=3)
        self.leaves = {name: self.x[name].clone().requires_grad_() for name in NAMES}
        self.leaves["initial_state"] = self.x["initial"].clone().requires_grad_()
        self.o, self.final = cp_gdn.chunk_gated_delta_rule(**self.leaves, ctx=self.ctx, output_final_state=True)

    def grads(self, dout: Tensor | None, dfinal: Tensor | None) -> Grads:
        """Of all leaves; the graph is kept."""
        given = [(y, dy) for y, dy in ((self.o, dout), (self.final, dfinal)) if dy is not None]
        outputs, cotangents = zip(*given, strict=True)
        return torch.autograd.grad(outputs, list(self.leaves.values()), cotangents, retain_graph=True)

    def usual(self) -> Grads:
        return self.grads(self.x["dout"], self.x["dfinal"])


def assert_equal(got: Grads, want: Grads) -> None:
    for name, a, b in zip((*NAMES, "initial_state"), got, want, strict=True):
        assert torch.equal(a, b), name


def test_a_missing_gradient_of_an_output_is_one_of_zero() -> None:
    call, x = Call(), inputs(PACKS["mixed"], "slow", 3)
    assert_equal(call.grads(x["dout"], None), call.grads(x["dout"], torch.zeros_like(x["dfinal"])))
    assert_equal(call.grads(None, x["dfinal"]), call.grads(torch.zeros_like(x["dout"]), x["dfinal"]))


def test_gradients_of_o_may_be_expanded_transposed_or_of_odd_strides() -> None:
    call = Call()
    dout, dfinal = call.x["dout"], call.x["dfinal"]
    odd = torch.zeros(*dout.shape[:2], 131, dtype=dout.dtype, device="cuda")[..., :128].copy_(dout)
    turned = dout.transpose(0, 1).contiguous().transpose(0, 1)
    want = call.usual()
    for given in (odd, turned):
        assert not given.is_contiguous()
        assert_equal(call.grads(given, dfinal), want)
    for wide in (dout[:1].expand_as(dout), dout[:, :1].expand_as(dout), dout[:1, :1, :1].expand_as(dout)):
        assert_equal(call.grads(wide, dfinal), call.grads(wide.contiguous(), dfinal))


def test_a_kept_graph_gives_the_same_gradients_twice_and_repeats_beside_a_busy_stream_do() -> None:
    call = Call()
    o, final, want = call.o.detach().clone(), call.final.detach().clone(), call.usual()
    assert_equal(call.usual(), want)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp(-1, 1)
        again = Call()
        assert torch.equal(again.o, o)
        assert torch.equal(again.final, final)
        assert_equal(again.usual(), want)


@pytest.mark.parametrize("first", [0, 1])
def test_two_layers_in_flight_go_back_in_either_order(first: int) -> None:
    want = [Call(seed).usual() for seed in (1, 2)]
    calls = [Call(seed) for seed in (1, 2)]
    for i in (first, 1 - first):
        assert_equal(calls[i].usual(), want[i])


def test_without_tokens_gradients_of_states_pass_through() -> None:
    x = inputs((0, 0), "model", 3)
    ctx = context(cp_gdn.Comm.alone(), x, [0, 0, 0], "contiguous", backend="hopper")
    leaves = {name: x[name].requires_grad_() for name in NAMES} | {"initial_state": x["initial"].requires_grad_()}
    o, final = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True)
    grads = torch.autograd.grad([o, final], list(leaves.values()), [x["dout"], x["dfinal"]], retain_graph=True)
    assert torch.equal(grads[-1], x["dfinal"])
    assert all(grad.shape == leaf.shape for grad, leaf in zip(grads, leaves.values(), strict=True))
    assert not torch.autograd.grad(o, leaves["initial_state"], x["dout"])[0].any()


def test_fresh_processes_have_the_bits_of_this_one() -> None:
    command = [sys.executable, "-m", "tests.gpu.fresh_process"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    want = digest()
    for process in started:
        assert process.communicate(timeout=120)[0].strip() == want
        assert process.returncode == 0


def test_kernels_out_of_step_have_the_same_bits() -> None:
    build()
    x, bounds = inputs(PACKS["mixed"], "slow", 3), bounds_of("mixed")

    def results(**asked: Any) -> dict[str, Tensor]:
        ctx = context(cp_gdn.Comm.alone(), x, bounds, "contiguous", backend="hopper", **asked)
        return run_rank(ctx, x, initial=True, grads=True)

    for segments in (1, 3):
        want = results(segments=segments)
        for _ in range(3):  # they sleep at other places each time
            with jittering():
                assert_same(results(segments=segments), want)


TOKENS, OWN = 524_480, 192
"""TOKENS x 32 heads x 128 channels are more than 2^31 numbers; OWN of them come after the reset."""
FREE = 24 << 30
"""Bytes of the test below: v, dout, and o or dv, 4 GiB each; q, k, dq and dk, 1 GiB each; T, Q K^T, a slab."""


def last(x: dict[str, Tensor], tokens: int, segments: int | str) -> dict[str, Tensor]:
    """Results of the last OWN tokens of a document that is the last ``tokens`` of x."""
    heads = (x["q"].shape[1], x["v"].shape[1])
    part, options = cp_gdn.partition([0, tokens], 1, "contiguous"), cp_gdn.Options(save="light")
    asked = {"device": "cuda", "heads": heads, "backend": "hopper", "segments": segments, "options": options}
    ctx = cp_gdn.build_context(part, cp_gdn.Comm.alone(), **asked)
    leaves = {name: x[name][-tokens:].detach().requires_grad_() for name in NAMES}
    o, final = cp_gdn.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True)
    found = {"o": o[-OWN:].detach().clone(), "final": final.detach()}
    ends = [torch.autograd.graph.get_gradient_edge(t) for t in (o, final)]
    del o, final  # a backward reads none of it
    grads = torch.autograd.grad(ends, list(leaves.values()), [x["dout"][-tokens:], x["dfinal"]])
    return found | {f"d{name}": grad[-OWN:].clone() for name, grad in zip(NAMES, grads, strict=True)}


def long_inputs(heads: tuple[int, int]) -> dict[str, Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(0)

    def normal(count: int, *, unit: bool = False) -> Tensor:
        x = torch.empty(TOKENS, count, 128, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
        return x.mul_(128**-0.5) if unit else x  # of unit length but for 6 %

    x = {"q": normal(heads[0], unit=True), "k": normal(heads[0], unit=True), "v": normal(heads[1])}
    noise = torch.randn(2, TOKENS, heads[1], generator=gen, device="cuda")
    x |= {"dout": normal(heads[1]), "g": -torch.nn.functional.softplus(noise[0] - 3), "beta": noise[1].sigmoid()}
    x["g"][-OWN] = -float("inf")
    return x | {"dfinal": torch.randn(1, heads[1], 128, 128, generator=gen, device="cuda")}


def test_more_than_2_to_31_numbers_are_told_apart() -> None:
    """After a reset the last tokens have the bits of a run of their own, whatever lies before them."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of free device memory, {free >> 30} are there")
    x = long_inputs((8, 32))
    assert x["v"].numel() > 2**31
    want = last(x, OWN, 1)
    assert all(bool(t.any()) for t in want.values())
    torch.cuda.reset_peak_memory_stats()
    assert_same(last(x, TOKENS, "auto"), want)
    assert torch.cuda.max_memory_allocated() <= FREE
