"""What the kernels look up and how their host side calls them, with doubles of the kernels on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_gdn import Comm, Options, build_context, chunk_gated_delta_rule, library, partition, tables, twin
from cp_gdn.backends import hopper_items, hopper_slabs
from cp_gdn.context import Context
from cp_gdn.saved import InputGradients, Saved
from tests.kernel_double import doubles

torch.set_num_threads(1)

LENGTHS = (130, 0, 1, 20, 3, 0)
BOUNDS = [0, *np.cumsum(LENGTHS).tolist()]
HEADS = (1, 2)
CASES = [
    (1, "contiguous", 1, "auto"),
    (1, "contiguous", 2, "auto"),
    (2, "zigzag", 1, "ring"),
    (2, "zigzag_per_document", 2, "ring"),
    (2, "zigzag_per_document", 2, "a2a"),
    (3, "zigzag_per_document", 2, "a2a"),
    (2, "zigzag", "grid:1", "ring"),
    (2, "contiguous", "grid:1", "a2a"),
]
NAMES = ("q", "k", "v", "g", "beta")


def inputs(seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    tokens = BOUNDS[-1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    unit = torch.nn.functional.normalize
    return {
        "q": unit(normal(tokens, 1, 128), dim=-1).bfloat16(),
        "k": unit(normal(tokens, 1, 128), dim=-1).bfloat16(),
        "v": normal(tokens, 2, 128).bfloat16(),
        "g": -torch.nn.functional.softplus(normal(tokens, 2) - 3) / 8,
        "beta": normal(tokens, 2).sigmoid(),
        "initial": normal(len(LENGTHS), 2, 128, 128) * 0.1,
        "dout": normal(tokens, 2, 128).bfloat16(),
        "dfinal": normal(len(LENGTHS), 2, 128, 128) * 0.1,
    }


def run_rank(comm: Comm, x: dict[str, Tensor], case: tuple, initial: bool, final: bool, options: Options) -> dict:
    """One rank's results, scattered into global tensors."""
    _, layout, segments, exchange = case
    align = 64 if str(segments).startswith("grid") else 1
    part = partition(BOUNDS, comm.size, layout, align=align)
    asked = {"heads": HEADS, "segments": segments, "exchange": exchange, "options": options}
    ctx = build_context(part, comm, **asked)
    rows, entry, exits = ctx.token_ids, list(ctx.entry_docs), list(ctx.exit_docs)
    leaves = {name: x[name][rows].requires_grad_() for name in NAMES}
    if initial:
        leaves["initial_state"] = x["initial"][entry].requires_grad_()
    o, end = chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=final)
    loss = (o.float() * x["dout"][rows].float()).sum()
    if end is not None:
        loss = loss + (end * x["dfinal"][exits]).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    places = {"o": (rows, o.detach(), "v"), **{f"d{n}": (rows, grads[n], n) for n in NAMES}}
    if end is not None:
        places["final"] = (exits, end.detach(), "dfinal")
    if initial:
        places["dinitial"] = (entry, grads["initial_state"], "initial")
    found = {}
    for name, (place, value, like) in places.items():
        found[name] = torch.zeros(x[like].shape)
        found[name][place] = value.float()
    return {"backend": ctx.last_call["backend"], **found}


def run(case: tuple, *, initial: bool = True, final: bool = True, options: Options = Options()) -> dict:  # noqa: B008
    ranks = twin(case[0], lambda comm: run_rank(comm, inputs(), case, initial, final, options))
    return {name: ranks[0][name] if name == "backend" else sum(r[name] for r in ranks) for name in ranks[0]}


def assert_close(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name in got.keys() - {"backend"}:
        error = (got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-9)
        assert error < 5e-3, (name, float(error))


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=str)
def test_replays_that_fit_the_gpu_together_are_one_with_the_same_bits(
    case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, ...]] = []  # ranks of a twin are threads: in any order
    made = tables.kernel_tables
    monkeypatch.setattr(tables, "kernel_tables", lambda *args: counts.append((found := made(*args)).counts) or found)
    with doubles():
        want = run(case)
        apart, counts[:] = counts[:], []
        monkeypatch.setattr(hopper_items, "LONGER_THAN_EXCHANGE", 1)
        got = run(case)
    both = [each for each in apart if each[2] and each[3]]  # ranks with replays of either kind
    assert both
    assert not [each for each in counts if each[2] and each[3]]
    assert sum(each[3] > 0 for each in counts) == sum(each[3] > 0 for each in apart)
    for name in want.keys() - {"backend"}:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("initial", "final"), [(True, True), (False, False)])
def test_a_step_through_the_tables_equals_the_torch_backend(case: tuple, initial: bool, final: bool) -> None:
    with doubles():
        got = run(case, initial=initial, final=final)
    assert got["backend"] == "hopper"
    assert_close(got, run(case, initial=initial, final=final))


@pytest.mark.parametrize("options", [Options(save_transfer=False), Options(boundary="recompute")], ids=str)
@pytest.mark.parametrize("case", [(2, "zigzag", 2, "ring"), CASES[4]], ids=str)
def test_what_a_backward_finds_no_more_is_made_again_by_the_same_kernels(case: tuple, options: Options) -> None:
    with doubles():
        kept, again = run(case), run(case, options=options)
    for name in kept.keys() - {"backend"}:
        assert torch.equal(kept[name], again[name]), name


def test_slabs_of_segments_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = (1, "zigzag", 2, "auto")
    with doubles():
        whole = run(case)
        monkeypatch.setattr(hopper_slabs, "SLAB_BYTES", 1)
        monkeypatch.setattr(hopper_slabs, "BLOCKS", 1)
        slabs = run(case)
    for name in whole.keys() - {"backend"}:
        assert torch.equal(whole[name], slabs[name]), name


def test_states_that_start_documents_take_no_memory_without_an_initial_state() -> None:
    part = partition([0, *range(64, 640, 64)], 1, "contiguous")
    with doubles():
        ctx = build_context(part, Comm.alone(), heads=HEADS)
    assert ctx.kernels is not None
    assert ctx.kernels.forward.tables.num_rows == ((0, 9), (0, 9))


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("options", [Options(), Options(save_transfer=False), Options(boundary="recompute")])
def test_the_operator_has_the_shapes_that_a_compiler_was_told_and_its_backward_gets_what_is_kept(
    segments: int, initial: bool, options: Options
) -> None:
    x, got = inputs(), []

    def backward(ctx: Context, dout: Tensor, dfinal: Tensor, saved: Saved) -> InputGradients:
        got.append(saved)
        of_inputs = {name: torch.zeros_like(getattr(saved.inputs, name)) for name in NAMES}
        return InputGradients(**of_inputs, initial_state=torch.zeros_like(x["initial"]) if initial else None)

    with doubles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run_backward", backward)
        part = partition(BOUNDS, 1, "contiguous")
        ctx = build_context(part, Comm.alone(), heads=HEADS, segments=segments, options=options)
        leaves = [x[name].clone().requires_grad_() for name in NAMES]
        call = library.arguments(ctx, [*leaves, x["initial"] if initial else None], 128**-0.5, False)
        real = library.forward_op(*call)
        with FakeTensorMode() as mode:
            told = library.forward_op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in call))
        assert [a.shape for a in real] == [a.shape for a in told]
        torch.autograd.grad(real[0], leaves, x["dout"])
    assert (got[0].states is not None) == options.keeps_states  # also where there are no rows of them
    assert (got[0].maps is not None) == options.keeps_maps
