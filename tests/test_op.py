"""The op against the specification in fp64: every output and gradient of every rank and every head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cp_gdn import Comm, Context, chunk_gated_delta_rule, twin
from tests.cases import BETAS, CASES, GATES, LAYOUTS, TABLE, Content, Run, covering, name_of, pairs
from tests.pack import (
    LIMITS,
    OF_DOCUMENTS,
    assert_close,
    expected,
    head_sizes,
    local_inputs,
    make_context,
    make_pack,
    run_in_twin,
    step,
    worst_errors,
)


def test_every_two_values_of_two_columns_of_the_table_meet_in_a_case() -> None:
    rows = covering(TABLE)
    for a, b in combinations(TABLE, 2):
        met = {(str(row[a]), str(row[b])) for row in rows}
        assert met == {(str(x), str(y)) for x in TABLE[a] for y in TABLE[b]}
    assert len(rows) == len(CASES) < 70


@pytest.mark.parametrize(("content", "run"), CASES, ids=name_of)
def test_outputs_states_and_all_gradients_are_the_specifications(content: Content, run: Run) -> None:
    """In particular those of every rank but the last, with heads whose gates differ by orders of magnitude."""
    assert_close(run_in_twin(run, make_pack(content)), expected(content), LIMITS[run.dtype])


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize(
    ("world", "layout"), [(2, "contiguous"), (4, "zigzag"), (2, "zigzag_per_document"), (8, "zigzag_per_document")]
)
def test_300_documents_that_are_all_cut(world: int, layout: str, exchange: str) -> None:
    content = Content(pack="300 documents", gate="slow", beta=1.0, heads=(1, 1), head_dims=(16, 16))
    run = Run(world=world, layout=layout, exchange=exchange)
    assert_close(run_in_twin(run, make_pack(content)), expected(content), LIMITS[run.dtype])


@pytest.mark.parametrize("exchange", ["ring", "a2a"])
@pytest.mark.parametrize("pack", ["five tokens", "no tokens"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "explicit"])
def test_ranks_without_tokens_take_part(layout: str, pack: str, exchange: str) -> None:
    content, run = Content(pack=pack), Run(world=8, layout=layout, exchange=exchange)
    shares = run_in_twin(run, make_pack(content))
    assert min(len(share.token_ids) for share in shares) == 0
    assert_close(shares, expected(content), LIMITS[run.dtype])


@settings(max_examples=20, deadline=None)
@given(
    content=st.builds(
        Content,
        pack=st.lists(st.integers(0, 25), min_size=1, max_size=5).map(tuple),
        gate=st.sampled_from(list(GATES)),
        beta=st.sampled_from(BETAS),
        heads=st.just((1, 2)),
        head_dims=st.just((4, 3)),
        initial=st.booleans(),
    ),
    run=st.builds(
        Run,
        world=st.integers(1, 8),
        layout=st.sampled_from((*LAYOUTS, "explicit")),
        exchange=st.sampled_from(("ring", "a2a")),
        segments=st.sampled_from((1, 2)),
        save_transfer=st.booleans(),
    ),
)
def test_any_pack_in_any_layout_over_any_number_of_ranks(content: Content, run: Run) -> None:
    assert_close(run_in_twin(run, make_pack(content)), expected(content), LIMITS[run.dtype])


# ---- 16 bit ----------------------------------------------------------------------------------------------------------

ROUNDED = ("o", "dq", "dk", "dv")
TABLE_16_BIT: dict[str, Any] = {
    "pack": ("long", "several chunks"),
    "gate": ("slow", "model", "A = 16", "one reset"),
    "beta": ("sigmoid", 1.0, 2.0),
    "l2norm": (False, True),
    "inputs": (torch.bfloat16, torch.float16),
    "world": (1, 2, 4),
    "exchange": ("ring", "a2a"),
    "segments": (1, 2),
}


@pytest.mark.parametrize(("content", "run"), pairs(TABLE_16_BIT), ids=name_of)
def test_16_bit_results_are_the_exact_ones_rounded_once(content: Content, run: Run) -> None:
    """The budget is what an exact run loses in being rounded to 16 bit; states, dg and dbeta are fp32 here."""
    want, run = expected(content), replace(run, dtype=content.inputs)
    shares = run_in_twin(run, make_pack(content))
    assert {share.tensors[name].dtype for share in shares for name in ROUNDED} == {content.inputs}
    for rank, share in enumerate(shares):
        for name in ROUNDED:
            exact = want[name][share.rows(name)]
            budget = 1.05 * head_sizes(exact.to(content.inputs) - exact) + LIMITS[torch.float32][0] * head_sizes(exact)
            assert (head_sizes(share.tensors[name].double() - exact) <= budget).all(), (name, rank)
    wide = {name: value for name, value in want.items() if name not in ROUNDED}
    for share in shares:
        for name in ROUNDED:
            del share.tensors[name]
    assert_close(shares, wide, LIMITS[torch.float32])


def test_gates_may_come_in_16_bit_too_and_get_their_gradients_in_it() -> None:
    pack, run = make_pack(Content(pack="long", inputs=torch.bfloat16)), Run(world=2, dtype=torch.bfloat16)

    def on_rank(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ctx = make_context(comm, run, pack)
        narrow = local_inputs(ctx, pack)
        narrow |= {name: narrow[name].detach().bfloat16().requires_grad_() for name in ("g", "beta")}
        wide = narrow | {name: narrow[name].detach().float().requires_grad_() for name in ("g", "beta")}
        return step(ctx, pack, narrow), step(ctx, pack, wide)

    for narrow, wide in twin(2, on_rank):
        assert narrow["dg"].dtype == narrow["dbeta"].dtype == torch.bfloat16
        assert all(torch.equal(narrow[name], wide[name].to(narrow[name].dtype)) for name in wide)


# ---- arguments -------------------------------------------------------------------------------------------------------

PACK = make_pack(Content(pack="ragged", initial=True))


def alone(**changes: Any) -> Context:
    return make_context(Comm.alone(), Run(dtype=torch.float32), PACK, **changes)


def test_a_leading_1_changes_shapes_only() -> None:
    ctx = alone()
    plain = {name: x.detach() for name, x in local_inputs(ctx, PACK).items()}
    lead = {name: x if name == "initial_state" else x[None] for name, x in plain.items()}
    (o, final), (batched, same) = (
        chunk_gated_delta_rule(**tensors, ctx=ctx, output_final_state=True) for tensors in (plain, lead)
    )
    assert batched.shape == (1, *o.shape)
    assert torch.equal(batched[0], o)
    assert torch.equal(same, final)


def test_the_default_scale_is_one_over_the_root_of_the_key_dim() -> None:
    ctx = alone()
    tensors = local_inputs(ctx, PACK)
    o, final = chunk_gated_delta_rule(**tensors, ctx=ctx)
    assert final is None
    assert torch.equal(o, chunk_gated_delta_rule(**tensors, ctx=ctx, scale=24**-0.5)[0])
    assert torch.allclose(2.0 * o, chunk_gated_delta_rule(**tensors, ctx=ctx, scale=2 * 24**-0.5)[0], atol=1e-6)


def with_change(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: change(tensors[name])}


REFUSED = [
    (with_change("q", lambda x: x.double()), TypeError, "q: got dtype torch.float64, expected torch.float32"),
    (with_change("g", lambda x: x.half()), TypeError, "g: got dtype torch.float16"),
    (with_change("k", lambda x: x[:-1]), ValueError, r"k: got shape \(25, 2, 24\), expected \(26, 2, 24\)"),
    (with_change("v", lambda x: x[:, :3]), ValueError, r"v: got shape \(26, 3, 40\)"),
    (with_change("beta", lambda x: x[None]), ValueError, r"beta: got shape \(1, 26, 4\), expected \(26, 4\)"),
    (with_change("q", lambda x: x.to_sparse()), TypeError, "q: got layout torch.sparse_coo"),
    (with_change("v", lambda x: x.to("meta")), ValueError, "v: got device meta, expected cpu"),
    (with_change("k", lambda x: x.tolist()), TypeError, "k: got list, expected a tensor"),  # type: ignore[arg-type]
    (with_change("initial_state", lambda x: x[:4]), ValueError, r"initial_state: got shape \(4, 4, 24, 40\)"),
    (with_change("initial_state", lambda x: x.half()), TypeError, "initial_state: got dtype torch.float16"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_tensors_that_do_not_fit_the_context_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], error: type[Exception], text: str
) -> None:
    ctx = alone()
    with pytest.raises(error, match=text):
        chunk_gated_delta_rule(**change(local_inputs(ctx, PACK)), ctx=ctx)


def test_a_comparison_sees_one_wrong_number_of_one_head_of_one_rank() -> None:
    content, run = Content(pack="long"), Run(world=3)
    want = expected(content)
    for name in want:
        shares = run_in_twin(run, make_pack(content))
        rank = max(r for r, share in enumerate(shares) if len(share.tensors[name]))
        shares[rank].tensors[name][-1, 1] *= 1 + 1e-3
        with pytest.raises(AssertionError, match=f"{name}: rank {rank}, head 1"):
            assert_close(shares, want, LIMITS[run.dtype])
    assert set(OF_DOCUMENTS) < set(worst_errors(shares, want))
