"""What the kernels look up and how their host side calls them, with doubles of the kernels on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_gdn import Comm, Options, build_context, chunk_gated_delta_rule, library, partition, twin
from cp_gdn.backends import hopper_items, hopper_slabs, hopper_tables
from cp_gdn.backends.hopper_hops import PackedHops, packed
from cp_gdn.chains import Hops
from cp_gdn.context import Context
from cp_gdn.plan import Segments
from cp_gdn.saved import InputGradients, Saved
from cp_gdn.tables import upload
from tests.kernel_double import doubles
from tests.spread import places_of_heads, steps_of, table

torch.set_num_threads(1)

LENGTHS = (130, 0, 1, 20, 0)
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
    made = hopper_tables.kernel_tables
    monkeypatch.setattr(
        hopper_tables, "kernel_tables", lambda *args: counts.append((found := made(*args)).counts) or found
    )
    with doubles():
        want = run(case)
        apart, counts[:] = counts[:], []
        monkeypatch.setattr(hopper_tables, "LONGER_THAN_EXCHANGE", 1)
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
def test_what_a_backward_finds_no_more_is_made_again_by_the_same_kernels(options: Options) -> None:
    case = (2, "zigzag", 2, "ring")
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


def segments_of(num_chunks: list[int]) -> Segments:
    """Segments of whole documents with so many chunks."""
    lengths = [64 * n for n in num_chunks]
    part = partition([0, *np.cumsum(lengths).tolist()], 1, "contiguous")
    return build_context(part, Comm.alone(), heads=HEADS, segments=1).plan.segments


@pytest.mark.parametrize(
    ("num_chunks", "ids", "want"),
    [
        ([24, 1, 1, 30, 2], None, [(3, 1), (0, 1), (1, 2), (4, 1)]),  # a long one is alone, its neighbours share
        ([10, 10, 10, 10], None, [(0, 3), (3, 1)]),  # as many as start below the limit
        ([1, 1, 1, 1], [0, 1, 3], [(0, 2), (3, 1)]),  # what lies between is another walk's
        ([1] * 50, None, [(0, 24), (24, 24), (48, 2)]),
        ([5], None, [(0, 1)]),
        ([5], [], []),
    ],
    ids=str,
)
def test_short_neighbours_share_a_block(num_chunks: list, ids: list | None, want: list) -> None:
    segments = segments_of(num_chunks)
    asked = np.arange(len(num_chunks)) if ids is None else np.array(ids, dtype=np.int64)
    items = hopper_items.run_items(segments, asked[::-1])
    assert [(segment, packed >> 16) for _, _, packed, segment in items.tolist()] == want
    counted = [sum(num_chunks[s : s + run]) for s, run in want]
    assert items[:, 1].tolist() == counted
    assert items[:, 0].tolist() == [int(segments.first_chunk[s]) for s, _ in want]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    heads=st.sampled_from([(1, 1), (2, 6), (4, 8), (3, 3)]),
    slab=st.integers(1, 40),
    blocks=st.integers(1, 20),
)
def test_every_chunk_and_head_has_one_step_and_every_tape_one_place(
    lengths: list[int], heads: tuple[int, int], slab: int, blocks: int
) -> None:
    first = np.cumsum(lengths) - lengths
    items = np.stack((first, lengths, np.full(len(lengths), 1 << 16), np.arange(len(lengths))), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_slabs, "BLOCKS", blocks)
        patch.setattr(hopper_slabs, "SLAB_BYTES", slab * hopper_slabs.CHUNK_BYTES)
        tables = hopper_slabs.slab_tables(items, heads)
    uploaded = upload(tables, torch.device("cpu"))
    steps = table(steps_of(uploaded, [[64 * c, 64] for c in range(sum(lengths))], {}), 4)
    group = heads[1] // heads[0]
    assert sorted(map(tuple, steps[:, [3, 2]].tolist())) == [
        (c, h) for c in range(sum(lengths)) for h in range(heads[0])
    ]
    assert torch.equal(steps[:, 0], 64 * steps[:, 3])
    places = places_of_heads(uploaded, group)
    assert len(places) == len(items) * heads[1]
    wave, count = max(1, blocks // group), len(items) * heads[0]
    waves = -(-count // wave)
    assert sum(-(-(each.end_pair - each.first_pair) // wave) for each in tables.slabs) == waves  # no wave more
    for each in tables.slabs:
        pairs = each.end_pair - each.first_pair
        assert pairs == -(-count // waves) or each.steps * group <= slab or each.end_pair == count
        for pair in range(each.first_pair, each.end_pair):
            item, head = divmod(pair, heads[0])
            for member in range(group):
                place, stride = places[item * heads[1] + head * group + member]
                for c in range(lengths[item]):
                    step, of_group = divmod(place + c * stride, group)
                    assert of_group == member
                    assert steps[each.first_step + step, [3, 2]].tolist() == [first[item] + c, head]
                    assert step < each.steps


def test_states_that_start_documents_take_no_memory_without_an_initial_state() -> None:
    part = partition([0, *range(64, 640, 64)], 1, "contiguous")
    with doubles():
        ctx = build_context(part, Comm.alone(), heads=HEADS)
    assert ctx.kernels is not None
    assert ctx.kernels.tables.num_rows == (0, 9)


def test_hops_that_depend_on_each_other_are_in_one_chain_in_order() -> None:
    columns = [(5, 0), (6, 3), (7, 5), (8, 6), (9, 7)]
    table = np.array([(dst, src, i, i) for i, (dst, src) in enumerate(columns)]).T
    hops = Hops(table=table, steps=((1, True), (1, False), (2, False), (1, False)))
    nothing = replace(hops, table=table[:, :0], steps=())
    again = replace(hops, table=table.copy())  # the same states of another buffer: other chains
    made = PackedHops(([hops, nothing], None), ([again], np.arange(10) + 100))
    found, renumbered = made[hops], made[again]
    rows = found.hops.view(np.int32).reshape(-1, 4).tolist()
    chains = found.chains.view(np.int32).tolist()
    wanted = [[5, 0, 0, -1], [7, 5, 2, 2], [9, 7, 4, 4], [6, 3, 1, 1], [8, 6, 3, 3]]
    assert rows == wanted + [[dst + 100, src + 100, offset, row] for dst, src, offset, row in wanted]
    assert chains[:5] == [0, 3, 5, 8, 10]
    assert [(x.first_chain, x.num_chains) for x in (found, renumbered)] == [(0, 2), (2, 2)]
    assert renumbered.hops is found.hops
    assert renumbered.chains is found.chains
    assert made[nothing].num_chains == 0


def test_packed_tables_hold_int32_with_an_odd_one_padded() -> None:
    assert packed([1, -2, 3]).view(np.int32).tolist() == [1, -2, 3, 0]
    assert packed(np.zeros((0, 4))).shape == (0,)


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
