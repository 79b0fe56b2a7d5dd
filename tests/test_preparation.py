"""Preparation of a pack: token tables, one buffer, this rank's P alone, and a thousand ranks without a list of all."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_gdn import Comm, Options, context
from cp_gdn.calibration import H200_MODEL
from cp_gdn.context import Context, assemble_context, build_context, device_calibration, digest_fields
from cp_gdn.exchange import Sizes, choose
from cp_gdn.layout import KEPT_RANKS, Partition, partition
from cp_gdn.page import ALIGN, Page
from cp_gdn.plan import CHUNK, build_plan
from cp_gdn.schedule import shifted_runs
from cp_gdn.segments import RULES, resolve_segments
from tests.cases import LAYOUTS
from tests.plans import Drawn, drawn_plans, plan_rank

EXAMPLES = settings(max_examples=60, deadline=None)
MANY = np.concatenate([[0], np.cumsum(np.random.default_rng(0).integers(1, 13_000, 10_000))])
"""10,000 documents, some 65 M tokens."""


@dataclass(frozen=True)
class Seat:
    """What preparation asks a `Comm` for."""

    rank: int
    size: int


def planned(part: Partition, rank: int, **changes: Any) -> Context:
    """A rank's context without its group: everything but the agreement."""
    asked: dict[str, Any] = {"device": "cpu", "heads": (16, 48), "head_dims": (128, 128), "dtype": torch.bfloat16}
    asked |= {"conv": None, "backend": "auto", "options": Options(), **changes}
    calibration, note = device_calibration(torch.device("cpu"))
    picked = resolve_segments("auto", part, 48, calibration, note)
    choice = choose("auto", part, Sizes.of(48, (128, 128), 4), calibration.times, grid=False)
    plan = build_plan(part, rank, p_vector=picked.p_of(rank))
    return assemble_context(part, Seat(rank, part.world_size), plan, picked, choice, asked)  # type: ignore[arg-type]


# ---- token tables ----------------------------------------------------------------------------------------------------


@EXAMPLES
@given(drawn=drawn_plans())
def test_tables_with_an_entry_per_token_follow_from_those_of_chunks_and_fragments(drawn: Drawn) -> None:
    for rank in range(drawn.part.world_size):
        made = plan_rank(drawn, rank, "ring")
        schedule, chunks = made.schedule, made.plan.chunks
        own, of_chunks = schedule.tokens.fragments.data, schedule.tokens.chunks.data
        places = [c * CHUNK + i for c, n in enumerate(chunks.count) for i in range(n)]
        assert schedule.back.tolist() == places
        assert schedule.token_ids.tolist() == drawn.part.token_ids(rank).tolist()
        assert schedule.positions.tolist() == drawn.part.positions(rank).tolist()
        rows = torch.arange(made.plan.num_tokens)
        for host, shift, count in (
            (schedule.back, of_chunks[1], of_chunks[0]),
            (schedule.token_ids, own[1], own[0]),
            (schedule.positions, own[2], own[0]),
        ):
            on_device = shifted_runs(rows, shift, count)
            assert on_device.dtype == host.dtype == torch.int64
            assert torch.equal(on_device, host)


def test_a_token_table_that_is_first_read_by_a_compiler_or_under_a_mode_is_the_table() -> None:
    part = partition([0, 50, 120], 2)
    ids, positions = torch.from_numpy(part.token_ids(1)), torch.from_numpy(part.positions(1))
    x = torch.arange(120.0)

    def read(ctx: Context) -> torch.Tensor:
        return x.index_select(0, ctx.token_ids) + ctx.positions

    ctx = planned(part, 1)
    assert torch.equal(torch.compile(read, backend="eager", fullgraph=True)(ctx), x[ids] + positions)
    other = planned(part, 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _ = other.token_ids, other.positions
    for made in (ctx, other):
        assert type(made.token_ids) is type(made.positions) is torch.Tensor
        assert torch.equal(made.token_ids, ids)
        assert torch.equal(made.positions, positions)


def test_every_table_lies_at_a_256_byte_border_of_one_buffer_and_a_cpu_has_it_as_it_is() -> None:
    page = Page()
    arrays = np.arange(5), np.arange(40), np.arange(6).reshape(2, 3), np.zeros((4, 0), dtype=np.int64), np.arange(32)
    tables = [page.put(array) for array in arrays]
    lists = page.put_lists(np.arange(7)[None], [3, 0, 4])
    pieces, starts = page.laid_out()
    buffer = np.concatenate(pieces)
    assert starts == [0, 32, 96, 128, 128, 160, 192]
    assert (len(buffer), ALIGN * buffer.itemsize) == (192, 256)
    page.upload(torch.device("cpu"))
    for table, array, start in zip(tables, arrays, starts, strict=False):
        assert np.array_equal(buffer[start : start + array.size].reshape(array.shape), array)
        assert table.data.dtype == torch.int64
        assert np.array_equal(table.data.numpy(), array)
    assert [[row.tolist() for row in lists[i]] for i in range(len(lists))] == [[[0, 1, 2]], [[]], [[3, 4, 5, 6]]]


# ---- this rank's P alone ---------------------------------------------------------------------------------------------


@EXAMPLES
@given(lengths=st.lists(st.integers(0, 90_000), min_size=1, max_size=5), world=st.integers(1, 5))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ranks_own_p_is_its_entry_of_the_vector(layout: str, lengths: list[int], world: int) -> None:
    part = partition([0, *np.cumsum(lengths).tolist()], world, layout)
    for spec in ("auto", "row_cost_lpt", 3, list(range(1, world + 1)), "grid:2"):
        picked = resolve_segments(spec, part, 6)
        assert tuple(picked.p_of(rank) for rank in range(world)) == picked.p_vector


def test_ranks_agree_on_a_rule_and_its_constants_and_on_the_vector_that_a_caller_gave() -> None:
    part = partition([0, 40_000], 2, "contiguous")
    dear = replace(H200_MODEL, times=replace(H200_MODEL.times, fold_hop=10**6))
    texts = [resolve_segments(spec, part, 6, c).agreed for spec in ("auto", *RULES) for c in (H200_MODEL, dear)]
    assert len(set(texts)) == len(texts)
    assert texts[0].startswith("measured, H200 of 132 SMs, constants ")
    assert resolve_segments("auto", part, 6, H200_MODEL).agreed == texts[0]
    assert [resolve_segments(spec, part, 6).agreed for spec in (2, [2, 5], "grid:4")] == ["(2, 2)", "(2, 5)", "grid:4"]


def test_links_of_the_calibration_decide_the_exchange() -> None:
    part, sizes = partition([0, 4096], 4, "contiguous"), Sizes.of(8, (128, 16), 4)
    times = H200_MODEL.times
    dear = {name: replace(times, **{name: 10**9}) for name in ("exchange", "collective", "link_mib")}
    chosen = {name: choose("auto", part, sizes, changed, grid=False).kind for name, changed in dear.items()}
    assert chosen == {"exchange": "a2a", "collective": "ring", "link_mib": "ring"}


# ---- scale -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_of_a_thousand_plans_ten_thousand_documents_without_listing_anyone_elses(layout: str) -> None:
    part = partition(MANY, 1024, layout)
    tracemalloc.start()
    ctx = planned(part, 511, conv=(64, 4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ctx.exchange == "ring"
    assert "table" not in vars(part)
    assert "p_vector" not in vars(ctx.segments)
    assert peak < 64 << 20  # a list of all pieces is 64 bytes times 20 million
    digest_fields(ctx)
    assert "table" not in vars(part)


def test_a_partition_remembers_the_fragments_of_a_few_ranks_only() -> None:
    part = partition(MANY, 1024)
    for rank in range(3 * KEPT_RANKS):
        assert part.of_rank(rank) is part.of_rank(rank)
    assert len(part._known) <= KEPT_RANKS


def test_a_context_shows_the_p_of_its_rank_where_a_rule_chose_it() -> None:
    ctx = build_context(partition([0, 65_536], 1), Comm.alone(), heads=(2, 6), dtype=torch.float32)
    ctx.note_call("eager", "forward")
    assert ctx.last_call["segments"] == ctx.plan.p == ctx.segments.p_vector[0] > 1
    assert ctx.last_call["segments_note"] == "cpu: planned as one H200 of 132 SMs"


def test_what_a_pack_runs_is_logged_once_and_later_packs_only_for_those_who_debug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "_SAID", set())
    with caplog.at_level(logging.DEBUG, logger="cp_gdn"):
        for tokens in (64, 128):
            build_context(partition([0, tokens], 1), Comm.alone(), heads=(1, 1))
    levels = [each.levelno for each in caplog.records if "over 1 ranks, exchange none" in each.getMessage()]
    assert levels == [logging.INFO, logging.DEBUG]
