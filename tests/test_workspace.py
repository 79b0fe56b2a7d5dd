"""Caller-held memory: what a call binds of it is what the queries say, to the byte, and nothing stays behind."""

from __future__ import annotations

import gc
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import cp_gdn
from cp_gdn import (
    Comm,
    Context,
    Options,
    RecomputeHandle,
    Workspace,
    recompute,
    twin,
    workspace_bytes,
    workspace_layout,
)
from cp_gdn.backends.torch_backend import TorchBackend
from cp_gdn.workspace import ALIGN, PHASES
from tests.cases import Content, Run, covering
from tests.pack import Pack, call, differences, local_inputs, make_context, make_pack
from tests.regions import once_more, region_step
from tests.test_entries import Watching

PACKS = {
    l2norm: make_pack(Content(pack="several chunks", heads=(1, 2), head_dims=(24, 16), l2norm=l2norm))
    for l2norm in (False, True)
}
PACK = PACKS[True]
MODES: dict[str, dict[str, Any]] = {
    "light": {},
    "without maps": {"save_transfer": False},
    "full": {"save": "full"},
    "nothing": {"boundary": "recompute"},
}
TABLE = {
    "mode": list(MODES),
    "form": ["rerun", "kept"],
    "l2norm": [False, True],
    "world": [1, 2, 4],
    "exchange": ["ring", "a2a"],
    "segments": [1, 3, "grid:1"],
}
CASES = covering(TABLE)


def context(comm: Comm | None = None, pack: Pack = PACK, run: Run | None = None, **options: Any) -> Context:
    run = run or Run(segments=2, dtype=torch.float32)
    return make_context(comm or Comm.alone(), run, pack, options=Options(**options))


def bound_in(comm: Comm, case: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that three steps bound, and those that the layout says."""
    run = Run(world=comm.size, exchange=case["exchange"], segments=case["segments"], dtype=torch.float32)
    pack = PACKS[case["l2norm"]]
    ctx = context(comm, pack, run, **MODES[case["mode"]])
    region = "the op alone" if case["form"] == "kept" else "no checkpoint"
    want = region_step(ctx, pack, region)
    # only the mode that keeps entry states and no tapes has tapes to hand on
    hands_on = case["form"] == "kept" and ctx.options.keeps_states and not ctx.options.keeps_tapes
    assert (ctx.last_call["tapes"] == "kept") == hands_on
    layout = workspace_layout(ctx, tapes="kept" if hands_on else "rerun")
    workspace = Workspace(workspace_bytes(ctx))
    for _ in range(3):
        workspace.memory.fill_(255)  # NaN in every dtype; what a call left behind is lost
        assert differences(region_step(ctx, pack, region, workspace=workspace), want) == []
    assert workspace.nbytes == max(workspace_layout(ctx).nbytes(phase) for phase in PHASES)
    return workspace.bound, {phase: layout.nbytes(phase) for phase in PHASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(map(str, case.values())))
def test_a_call_binds_what_the_layout_says_and_has_the_bits_of_one_with_its_own_memory(case: dict[str, Any]) -> None:
    for bound, said in twin(case["world"], lambda comm: bound_in(comm, case)):
        assert bound == said


def test_the_layout_lists_every_buffer_with_its_place_and_lifetime() -> None:
    ctx = context(run=Run(segments=2, save_transfer=False, dtype=torch.float32), save_transfer=False)
    layout = workspace_layout(ctx)
    names = {phase: [buffer.name for buffer in layout.phase(phase)] for phase in PHASES}
    assert names == {
        "forward": ["states", "offsets", "maps", "out"],
        "backward": ["maps", "adjoints", "adjoint offsets", "after", "values", "before", "residual"],
    }
    rows, states = (7, 2, 64, 16), (7, 2, 32, 16)  # 35 + 35 and 85 + 85 tokens: 1 + 2 and 2 + 2 chunks
    sides = dict(zip(("states", "adjoints"), ctx.schedule.num_states, strict=True))
    sides |= dict(zip(("offsets", "adjoint offsets"), ctx.schedule.num_offsets, strict=True))
    wanted = {name: (count, 2, 32, 16) for name, count in sides.items()}
    wanted |= dict.fromkeys(("out", "values", "residual"), rows) | dict.fromkeys(("after", "before"), states)
    wanted["maps"] = (ctx.schedule.num_maps, 2, 32, 32)
    assert {b.name: b.shape for phase in PHASES for b in layout.phase(phase)} == wanted
    for phase in PHASES:
        at = 0
        for buffer in layout.phase(phase):
            assert (buffer.offset, buffer.end % ALIGN, len(buffer.lifetime)) == (at, 0, 2)
            at = buffer.end
        assert layout.nbytes(phase) == at
    kept = [buffer.name for buffer in workspace_layout(ctx, tapes="kept").backward]
    assert kept == names["backward"][:-2]
    with pytest.raises(ValueError, match="tapes: got 'light', expected one of"):
        workspace_layout(ctx, tapes="light")


def test_explicit_calls_bind_a_phase_each() -> None:
    ctx = context(pack=PACKS[False])
    leaves = {name: x.detach() for name, x in local_inputs(ctx, PACKS[False]).items()}
    layout = workspace_layout(ctx)
    first, second = (Workspace(layout.nbytes(phase)) for phase in PHASES)
    o, _, saved = cp_gdn.forward(**leaves, ctx=ctx, workspace=first)
    got = cp_gdn.backward(o, None, saved, ctx=ctx, workspace=second)
    assert (first.bound, second.bound) == ({"forward": first.nbytes}, {"backward": second.nbytes})
    own, _, saved = cp_gdn.forward(**leaves, ctx=ctx)
    assert torch.equal(o, own)
    assert torch.equal(got.k, cp_gdn.backward(o, None, saved, ctx=ctx).k)


def nbytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("cutoff", [None, -17.0])
def test_what_a_call_hands_out_is_listed_apart(
    l2norm: bool, cutoff: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, leave = [], recompute.leave

    def watched(region: Any, node: Any, decision: Any, tapes: Any) -> Any:
        if tapes is not None:
            every = (getattr(each, f.name) for each in (tapes.tape, tapes.states) for f in fields(each))
            kept.append(nbytes(*every))
        return leave(region, node, decision, tapes)

    monkeypatch.setattr(recompute, "leave", watched)
    pack = PACKS[l2norm]
    ctx = context(pack=pack, decay_cutoff=cutoff)
    leaves = local_inputs(ctx, pack)
    o, final = once_more(lambda x: call(ctx, x, pack), leaves)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (o.detach(), final.detach()))
    assert cp_gdn.handoff_bytes(ctx, use_qk_l2norm_in_kernel=l2norm) == {
        "o": nbytes(o),
        "final_state": nbytes(final),
        "gradients": nbytes(*grads[:5]),
        "initial_state_gradient": nbytes(grads[5]),
        "kept_tapes": kept[0],
    }


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_workspace_that_is_too_small_is_refused_with_both_numbers_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = context()
    needed = workspace_bytes(ctx)
    monkeypatch.setattr(TorchBackend, "prepare", lambda *_: pytest.fail("it ran"))
    said = f"workspace: got {needed - 1} bytes, expected at least {needed} for forward and backward"
    with pytest.raises(ValueError, match=said):
        call(ctx, local_inputs(ctx, PACK), PACK, workspace=Workspace(needed - 1))


def test_a_call_without_gradients_asks_for_a_forward_only() -> None:
    ctx = context()
    forward = workspace_layout(ctx).nbytes("forward")
    assert forward < workspace_bytes(ctx)
    with torch.no_grad():
        call(ctx, local_inputs(ctx, PACK), PACK, workspace=Workspace(forward))
        with pytest.raises(ValueError, match=f"expected at least {forward} for forward under"):
            call(ctx, local_inputs(ctx, PACK), PACK, workspace=Workspace(forward - 1))


def test_a_workspace_that_another_call_is_using_is_refused() -> None:
    ctx = context()
    leaves, workspace = local_inputs(ctx, PACK), Workspace(workspace_bytes(ctx))
    o, _ = call(ctx, leaves, PACK, workspace=workspace)
    with workspace.bind("forward", ()):
        for work in (lambda: call(ctx, leaves, PACK, workspace=workspace), lambda: o.sum().backward(retain_graph=True)):
            with pytest.raises(RuntimeError, match="workspace: got one that another call is using"):
                work()
    o.sum().backward()
    assert leaves["q"].grad is not None


@pytest.mark.parametrize("wrong", ["a tensor", "elsewhere", "operator"])
def test_a_workspace_that_cannot_serve_is_refused(wrong: str) -> None:
    ctx = context()
    needed = workspace_bytes(ctx)
    leaves = local_inputs(ctx, PACK)
    if wrong == "a tensor":
        with pytest.raises(TypeError, match=r"workspace: got Tensor, expected a cp_gdn\.Workspace"):
            call(ctx, leaves, PACK, workspace=torch.empty(needed))
    elif wrong == "elsewhere":
        with pytest.raises(ValueError, match="workspace: got one on meta, expected cpu"):
            call(ctx, leaves, PACK, workspace=Workspace(needed, "meta"))
    else:
        with Watching(), pytest.raises(NotImplementedError, match=r"workspace: .* operators only.*; pass None"):
            call(ctx, leaves, PACK, workspace=Workspace(needed))
    with pytest.raises(ValueError, match=r"nbytes: got 1\.5, expected a number of bytes"):
        Workspace(1.5)


# ---- reuse, and what stays -------------------------------------------------------------------------------------------


def test_one_workspace_serves_layers_steps_and_packs_up_to_its_size() -> None:
    other = make_pack(Content(pack="ragged", heads=(2, 4), head_dims=(8, 40)))
    pairs = [(context(), PACK), (context(pack=other), other), (context(save_transfer=False), PACK)]
    workspace = Workspace(max(workspace_bytes(ctx) for ctx, _ in pairs))
    for _ in range(2):
        for ctx, pack in pairs:
            want = region_step(ctx, pack, "two in one")
            assert differences(region_step(ctx, pack, "two in one", workspace=workspace), want) == []


def storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process holds."""
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.device.type == "cpu":
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("form", ["own", "caller's", "checkpoint", "handle"])
def test_nothing_stays_after_the_last_reference(form: str) -> None:
    ctx = context()
    leaves = local_inputs(ctx, PACK)
    workspace = Workspace(workspace_bytes(ctx)) if form == "caller's" else None

    def step() -> None:
        handle = RecomputeHandle() if form == "handle" else None

        def rule(x: dict[str, Tensor]) -> Tensor:
            return cp_gdn.chunk_gated_delta_rule(**x, ctx=ctx, workspace=workspace, recompute=handle)[0]

        o = once_more(rule, leaves) if form in ("checkpoint", "handle") else rule(leaves)
        o.sum().backward()
        for x in leaves.values():
            x.grad = None

    step()  # tables that a context makes once
    gc.collect()
    before = storages()
    gc.disable()
    try:
        step()
        after = storages()
    finally:
        gc.enable()
    assert sum(after.values()) == sum(before.values())


def test_entry_states_of_a_layer_do_not_depend_on_the_number_of_ranks() -> None:
    """One document, one fragment a rank, the same P."""

    def saved(comm: Comm) -> tuple[int, int]:
        part = cp_gdn.partition([0, 64 * 8], comm.size, "contiguous")
        ctx = cp_gdn.build_context(part, comm, heads=(1, 2), head_dims=(16, 16), segments=2, exchange="ring")
        sizes = cp_gdn.saved_bytes(ctx)
        return sizes["states"], sizes["maps"]

    states = {world: {each[0] for each in twin(world, saved)} for world in (1, 2, 4)}
    assert states == {world: {2 * 2 * 16 * 16 * 4} for world in (1, 2, 4)}


def test_a_call_that_fails_gives_its_workspace_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context()
    leaves, workspace = local_inputs(ctx, PACK), Workspace(workspace_bytes(ctx))
    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "replay", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call(ctx, leaves, PACK, workspace=workspace)
    o, _ = call(ctx, leaves, PACK, workspace=workspace)
    assert torch.equal(o, call(ctx, leaves, PACK)[0])
