"""Compiled models over many packs: at most two graphs whatever the packs are, with the bits of the eager entry."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from cp_gdn import Comm, Context, GatedDeltaNet, Options, build_context, chunk_gated_delta_rule, partition

torch.set_num_threads(1)

HEADS, DIMS, HIDDEN = (1, 2), (16, 24), 8
PACKS = [(100, 70, 200), (300, 10), (64, 128, 0, 5, 90), (400,), (33, 44, 55, 66, 77)]
"""Several documents, one, an empty one; lengths that are a multiple of 16 and others."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


class Model(nn.Module):
    """Two layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedDeltaNet(HIDDEN, heads=HEADS, head_dims=DIMS) for _ in range(2))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, ctx)
        return x


class Counting:
    """A compiler that keeps graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = {"forward": 0, "backward": 0}

    def __call__(self, which: str) -> Any:
        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.graphs[which] += 1
            return make_boxed_func(graph.forward)

        return keep

    def compile(self, fn: Any) -> Any:
        both = aot_autograd(fw_compiler=self("forward"), bw_compiler=self("backward"))
        return torch.compile(fn, backend=both, fullgraph=True)


def context(lengths: tuple[int, ...], segments: int, **options: Any) -> Context:
    part = partition([0, *accumulate(lengths)], 1)
    asked = {"heads": HEADS, "head_dims": DIMS, "dtype": torch.float32, "conv": (80, 4), "segments": segments}
    return build_context(part, Comm.alone(), **asked, options=Options(**options))  # type: ignore[arg-type]


def step(model: Any, parameters: list[Tensor], x: Tensor, ctx: Context) -> list[Tensor]:
    y = model(x, ctx)
    return [y.detach(), *torch.autograd.grad((y * y).sum(), [x, *parameters])]


@pytest.mark.parametrize(
    ("segments", "options"),
    [(1, {}), (2, {"save_transfer": False}), (2, {"save": "full"}), (2, {"boundary": "recompute"})],
    ids=str,
)
def test_five_packs_through_a_model_are_two_compilations_with_the_bits_of_the_eager_model(
    segments: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, counting = Model(), Counting()
    compiled, parameters = counting.compile(model), list(model.parameters())
    for lengths in PACKS:
        ctx = context(lengths, segments, **options)
        x = torch.randn(1, sum(lengths), HIDDEN, requires_grad=True)
        got = step(compiled, parameters, x, ctx)
        assert ctx.last_call["entry"] == "library"
        want = step(model, parameters, x, ctx)
        assert ctx.last_call["entry"] == "eager"
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), lengths
    assert counting.graphs == {"forward": 2, "backward": 2}


def test_states_of_documents_go_through_compiled_calls_of_several_packs() -> None:
    """Their number is a shape that the caller sees, so one document may cost a graph more."""
    counting, gen = Counting(), torch.Generator().manual_seed(0)

    def run(ctx: Context, tokens: list[Tensor], initial: Tensor) -> tuple[Tensor, Tensor]:
        o, final = chunk_gated_delta_rule(*tokens, ctx=ctx, initial_state=initial, output_final_state=True)
        assert final is not None
        return o, final

    compiled = counting.compile(run)
    for lengths in (PACKS[0], PACKS[2], PACKS[4]):
        ctx = context(lengths, 2)
        sizes = [(sum(lengths), h, d) for h, d in ((1, 16), (1, 16), (2, 24))]
        tokens = [torch.randn(size, generator=gen).requires_grad_() for size in sizes]
        tokens += [
            f(torch.randn(sum(lengths), 2, generator=gen)).requires_grad_() for f in (lambda x: -x.abs(), torch.sigmoid)
        ]
        initial = torch.randn(len(ctx.entry_docs), 2, *DIMS, generator=gen).requires_grad_()
        results = []
        for fn in (compiled, run):
            outputs = fn(ctx, tokens, initial)
            loss = sum((y * y).sum() for y in outputs)
            results.append([*(y.detach() for y in outputs), *torch.autograd.grad(loss, [*tokens, initial])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), lengths
    assert counting.graphs["forward"] <= 2


def test_a_graph_of_any_context_still_refuses_what_does_not_fit_its_own() -> None:
    compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    for lengths in PACKS[:3]:
        ctx = context(lengths, 1)
        compiled(torch.randn(1, sum(lengths), HIDDEN), ctx)
    with pytest.raises(Exception, match=r"got shape \(1, 280, 80\), expected \(1, 287, 80\)"):
        compiled(torch.randn(1, 280, HIDDEN), ctx)
