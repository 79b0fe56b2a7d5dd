"""Memory of calls on the kernels, with their doubles on the CPU: what is bound and kept is what the queries say."""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn import Comm, Options, build_context, chunk_gated_delta_rule, partition, twin
from cp_gdn.backends.hopper_memory import MemorySizes
from tests.kernel_double import doubles
from tests.test_kernel_tables import BOUNDS, CASES, HEADS, NAMES, inputs

torch.set_num_threads(1)

MEMORY = [  # case, states of documents, options
    (CASES[0], True, Options()),
    (CASES[1], False, Options(decay_cutoff=None)),
    (CASES[1], True, Options(boundary="recompute")),
    (CASES[2], False, Options(save_transfer=False)),
    (CASES[4], True, Options()),
    (CASES[4], False, Options(boundary="recompute")),
    (CASES[6], False, Options(save_transfer=False)),
    (CASES[1], True, Options(save="light")),
    (CASES[4], False, Options(save="full", save_transfer=False)),
    (CASES[6], True, Options(save="full")),
]


def bound_by(comm: Comm, case: tuple, states: bool, options: Options) -> list[tuple[object, object]]:
    """Pairs of what was found and what the queries say: of a step in a workspace of the size they give, and of one
    whose saved tensors are counted."""
    x, align = inputs(), 64 if str(case[2]).startswith("grid") else 1
    part = partition(BOUNDS, comm.size, case[1], align=align)
    ctx = build_context(part, comm, heads=HEADS, segments=case[2], exchange=case[3], options=options)
    leaves = {name: x[name][ctx.token_ids].requires_grad_() for name in NAMES}
    if states:
        leaves["initial_state"] = x["initial"][list(ctx.entry_docs)].requires_grad_()
    tapes = "rerun" if options.save == "light" or options.boundary == "recompute" else "kept"
    layout = cp_gdn.workspace_layout(ctx, tapes=tapes, document_states=states)
    room, held = cp_gdn.Workspace(cp_gdn.workspace_bytes(ctx, document_states=states)), []
    counted = torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)

    def step(workspace: cp_gdn.Workspace | None, hooks: AbstractContextManager[None]) -> list[Tensor]:
        with hooks:
            o, end = chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=states, workspace=workspace)
        outputs = [o] if end is None else [o, end]
        dout = [x["dout"][ctx.token_ids], x["dfinal"][list(ctx.exit_docs)]][: len(outputs)]
        return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), dout)]

    want = step(None, counted)
    assert ctx.last_call["tapes"] == ("saved" if options.save == "full" else "rerun")  # hooks may mean a checkpoint
    kept = cp_gdn.saved_bytes(ctx, initial_state=states)
    others = held[5:] if options.keeps_states else []
    names = ("states", "maps", "owned_maps", *(["tapes"] if options.save == "full" else []))
    room.memory.fill_(255)
    return [
        (sum(t.numel() * t.element_size() for t in others), sum(kept[name] for name in names)),
        (sum(t.numel() * t.element_size() for t in held[:5]), kept["inputs"]),
        (
            [torch.equal(got, value) for got, value in zip(step(room, nullcontext()), want, strict=True)],
            [True] * len(want),
        ),
        (room.bound, {phase: layout.nbytes(phase) for phase in ("forward", "backward")}),
        (ctx.last_call["tapes"], "saved" if tapes == "kept" else "rerun"),
        (kept["tapes"] > 0, tapes == "kept" and ctx.num_tokens > 0),
    ]


@pytest.mark.parametrize(("case", "states", "options"), MEMORY, ids=str)
def test_a_call_binds_and_keeps_what_the_queries_say(case: tuple, states: bool, options: Options) -> None:
    with doubles():
        ranks = twin(case[0], lambda comm: bound_by(comm, case, states, options))
    for found, said in itertools.chain(*ranks):
        assert found == said


def test_a_workspace_without_room_for_states_of_documents_is_refused_where_they_come_in() -> None:
    part = partition([0, *range(64, 640, 64)], 1, "contiguous")
    with doubles():
        ctx = build_context(part, Comm.alone(), heads=HEADS, options=Options(boundary="recompute"))
        small, large = (cp_gdn.workspace_bytes(ctx, document_states=asked) for asked in (False, True))
        assert large - small == 2 * 9 * HEADS[1] * 128 * 128 * 4  # states and adjoints
        x = {"q": torch.zeros(576, 1, 128).bfloat16(), "g": torch.zeros(576, 2)}
        given = {"q": x["q"], "k": x["q"], "v": torch.zeros(576, 2, 128).bfloat16(), "g": x["g"], "beta": x["g"]}
        given = {name: t.requires_grad_() for name, t in given.items()}
        with pytest.raises(ValueError, match=f"got {small} bytes, expected at least {large} for forward and backward"):
            chunk_gated_delta_rule(**given, ctx=ctx, output_final_state=True, workspace=cp_gdn.Workspace(small))


def outlives_its_results(comm: Comm, final: bool) -> bool:
    """Whether the node of a call is there after its results are gone; rank 0 of two has no document's end."""
    ctx = build_context(partition([0, 128], comm.size, "contiguous"), comm, heads=HEADS, segments=1)
    keys, gates = (torch.zeros(ctx.num_tokens, *row) for row in ((HEADS[0], 128), (HEADS[1],)))
    values = torch.zeros(ctx.num_tokens, HEADS[1], 128).bfloat16()
    o, end = chunk_gated_delta_rule(
        keys.bfloat16(), keys.bfloat16(), values.requires_grad_(), gates, gates, ctx=ctx, output_final_state=final
    )
    assert (end is None) is not final
    node = weakref.ref(o.grad_fn)
    assert node() is not None
    del o, end
    return node() is not None


@pytest.mark.parametrize("final", [False, True], ids=["no final states", "final states"])
def test_a_context_holds_nothing_of_a_call_whose_results_are_gone(final: bool) -> None:
    with doubles():
        assert twin(2, lambda comm: outlives_its_results(comm, final)) == [False, False]


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
def test_offsets_in_the_memory_of_o_change_no_bit(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 walks its first fragment while messages are under way; offsets lie where it leaves nothing then."""
    gen, tokens = torch.Generator().manual_seed(0), 4400
    x = [torch.randn(tokens, heads, 128, generator=gen).bfloat16() / 8 for heads in (1, 1, 2)]
    x += [-torch.rand(tokens, 2, generator=gen) / 64, torch.rand(tokens, 2, generator=gen)]

    def forward(comm: Comm) -> tuple[Tensor, tuple[bool, tuple[int, int]]]:
        part = partition([0, tokens], comm.size, "zigzag")
        ctx = build_context(part, comm, heads=HEADS, segments=2, exchange=exchange)
        assert ctx.kernels is not None
        kernels, (o, _) = ctx.kernels, chunk_gated_delta_rule(*(t[ctx.token_ids] for t in x), ctx=ctx)
        return o, (kernels.sizes.output_lends, kernels.forward.tables.free_rows)

    with doubles():
        lent = twin(2, forward)
        monkeypatch.setattr(MemorySizes, "output_lends", False)
        own = twin(2, forward)
    assert [how for _, how in lent] == [(True, (1100, 1100)), (True, (0, 2200))]
    assert [lends for _, (lends, _) in own] == [False, False]
    for (got, _), (want, _) in zip(lent, own, strict=True):
        assert torch.equal(got, want)
