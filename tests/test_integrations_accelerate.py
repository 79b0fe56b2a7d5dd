"""The Accelerate plugin without processes: options, batches, what `enable` refuses."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_gdn.comm import Comm
from cp_gdn.integrations import accelerate_batch as batches
from cp_gdn.integrations.accelerate_settings import Settings, resolve, set_log_level
from cp_gdn.integrations.seat import Seat
from cp_gdn.options import Options
from cp_gdn.twin import twin

# ---- options ---------------------------------------------------------------------------------------------------------


def test_an_option_comes_from_the_argument_then_from_the_environment_then_from_the_default() -> None:
    environ = {"CP_GDN_EXCHANGE": "ring", "CP_GDN_LAYOUT": "zigzag", "CP_GDN_TIMEOUT": "7", "CP_GDN_OTHER": "x"}
    settings, said = resolve({"layout": "contiguous", "backend": None}, environ)
    assert settings == Settings(layout="contiguous", exchange="ring", timeout=7.0)
    assert "layout=contiguous (argument), attention=auto" in said
    assert "exchange=ring (CP_GDN_EXCHANGE)" in said


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False)])
def test_a_flag_from_the_environment_is_0_or_1(text: str, value: bool) -> None:
    assert resolve({}, {"CP_GDN_ON_ONE_RANK": text})[0].on_one_rank is value


@pytest.mark.parametrize(
    ("text", "value"), [("grid:8", "grid:8"), ("4", 4), ("1, 2,4", [1, 2, 4]), ("makespan", "makespan")]
)
def test_segments_from_the_environment_are_a_rule_a_number_or_one_per_rank(text: str, value: Any) -> None:
    assert resolve({}, {"CP_GDN_SEGMENTS": text})[0].segments == value


def test_core_options_from_the_environment_are_fields_of_options() -> None:
    environ = {"CP_GDN_OPTIONS": "save_transfer=0, decay_cutoff=none, save=full, reuse_recompute_tapes=0"}
    assert resolve({}, environ)[0].options == Options(
        save="full", save_transfer=False, reuse_recompute_tapes=False, decay_cutoff=None
    )


REFUSED_OPTIONS = [
    ({"layuot": "zigzag"}, {}, "unknown option layuot"),
    ({"layout": "explicit"}, {}, "layout: got 'explicit', expected one of auto, zigzag"),
    ({"attention": "flash"}, {}, "attention: got 'flash'"),
    ({"options": "fast"}, {}, "options: got str"),
    ({}, {"CP_GDN_TIMEOUT": "soon"}, "CP_GDN_TIMEOUT: got 'soon'"),
    ({}, {"CP_GDN_ON_ONE_RANK": "yes"}, "CP_GDN_ON_ONE_RANK: got 'yes'; expected 0 or 1"),
    ({}, {"CP_GDN_OPTIONS": "save=all"}, r"CP_GDN_OPTIONS: got 'save=all'; Options\(save='all'\): expected one of"),
    ({}, {"CP_GDN_OPTIONS": "keep=light"}, "CP_GDN_OPTIONS: got 'keep=light'; 'keep=light' is none of save, boundary"),
]


@pytest.mark.parametrize(("given", "environ", "text"), REFUSED_OPTIONS)
def test_an_option_that_cannot_be_is_refused_by_name(given: dict[str, Any], environ: dict[str, str], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        resolve(given, environ)


def test_an_unknown_log_level_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="CP_GDN_LOG: got 'loud'"):
        set_log_level({"CP_GDN_LOG": "loud"})


# ---- batches ---------------------------------------------------------------------------------------------------------

IDS = torch.arange(24).view(2, 12)


def local_batches(batch: dict[str, Any], world: int, cu_seqlens: Any = None, **dims: int) -> list[dict[str, Tensor]]:
    """What each rank gets of a batch."""

    def of_rank(comm: Comm) -> dict[str, Tensor]:
        shape, seat = batches.read_shape(batch, cu_seqlens), Seat(comm)
        batches.check_padding(batch.get("attention_mask"), batch.get("position_ids"), shape)
        pack = seat.rows(shape.rows, shape.length) if shape.bounds is None else seat.packed(shape.bounds)
        return batches.local_entries(batches.with_shifted_labels(batch, shape), pack, shape, dims)

    return twin(world, of_rank)


def test_rows_are_cut_zigzag_each_and_labels_are_shifted_before() -> None:
    first, second = local_batches({"input_ids": IDS, "labels": IDS}, 2)
    assert first["input_ids"].tolist() == [[0, 1, 2, 9, 10, 11], [12, 13, 14, 21, 22, 23]]
    assert first["shift_labels"].tolist() == [[1, 2, 3, 10, 11, -100], [13, 14, 15, 22, 23, -100]]
    assert second["shift_labels"].tolist() == [[4, 5, 6, 7, 8, 9], [16, 17, 18, 19, 20, 21]]
    assert second["position_ids"].tolist() == [[3, 4, 5, 6, 7, 8]] * 2


def test_the_cut_of_rows_is_the_one_of_torchs_head_tail_balancer() -> None:
    balancing = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    for world in (2, 4):
        order = balancing._HeadTailLoadBalancer(48, world, "cpu")._generate_indices()[0].view(world, -1)
        ids = torch.arange(48)[None]
        for rank, local in enumerate(local_batches({"input_ids": ids}, world)):
            assert torch.equal(local["input_ids"][0], order[rank])


def test_packed_documents_are_shifted_and_counted_apart_and_their_boundaries_leave_the_batch() -> None:
    batch = {"input_ids": IDS[:1], "labels": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 5, 12]), "max_length_q": 7}
    whole: dict[int, int] = {}
    for local in local_batches(batch, 2):
        assert set(local) == {"input_ids", "labels", "shift_labels", "position_ids"}
        whole |= dict(zip(local["input_ids"][0].tolist(), local["shift_labels"][0].tolist(), strict=True))
        expected = [i - 5 if i >= 5 else i for i in local["input_ids"][0].tolist()]
        assert local["position_ids"][0].tolist() == expected
    assert [whole[i] for i in range(12)] == [1, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, -100]


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 12), (3, 2, 12), (4, 1, 12)])
def test_position_ids_are_cut_on_their_last_dim(shape: tuple[int, ...]) -> None:
    positions = torch.arange(12).expand(shape) if len(shape) > 1 else torch.arange(12)[None]
    for local in local_batches({"input_ids": IDS, "position_ids": positions}, 2):
        got = local["position_ids"]
        assert got.shape == (*shape[:-2], 2, 6)
        assert (got == local["input_ids"] % 12).all()


def test_entries_over_tokens_that_nobody_knows_need_a_dim() -> None:
    batch = {"input_ids": IDS, "weights": torch.ones(2, 12), "name": "a", "ratio": torch.ones(2)}
    with pytest.raises(ValueError, match=r"got 'weights' with shape \[2, 12\]"):
        local_batches(batch, 2)
    assert local_batches(batch, 2, weights=1)[0]["weights"].shape == (2, 6)


RIGHT = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
LEFT = RIGHT.flip(1)
RESTART = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
REFUSED_BATCHES: list[tuple[dict[str, Any], Any, str]] = [
    ({"labels": IDS}, None, "no input_ids or inputs_embeds"),
    ({"input_ids": IDS[:, :10]}, None, "length: got 10 tokens.*pad_to_multiple_of=4"),
    ({"input_ids": IDS, "attention_mask": LEFT}, None, "padding before tokens.*padding_side='right'"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 12, 12)}, None, r"attention_mask: got \[2, 1, 12, 12\]"),
    ({"input_ids": IDS[:1], "position_ids": RESTART}, None, "position 0 inside a row.*cu_seqlens="),
    ({"input_ids": IDS}, [0, 12], "got it with 2 rows"),
    ({"input_ids": IDS[:1]}, [0, 11], "ends at 11, expected 12"),
    ({"input_ids": IDS[:1]}, [0, 13], "ends at 13, expected 12"),
    ({"input_ids": IDS[:1]}, [0, 6], "boundaries are those of the whole row"),
    ({"input_ids": IDS[:1]}, [1, 12], "cu_seqlens: starts at 1, expected 0"),
    ({"input_ids": IDS[:1]}, [0, 8, 4, 12], "cu_seqlens: decreases from 8 to 4"),
    ({"input_ids": IDS[:1]}, torch.tensor([[0, 12], [0, 12]]), r"cu_seqlens: got shape \[2, 2\]"),
    ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 12]).short()}, None, "got dtype torch.int16"),
    ({"input_ids": IDS[:1]}, torch.tensor([0.0, 12.0]), "cu_seqlens: got dtype torch.float32"),
    ({"input_ids": IDS, "position_ids": torch.arange(11).expand(2, 11)}, None, r"position_ids: got shape \[2, 11\]"),
]


@pytest.mark.parametrize(("batch", "bounds", "text"), REFUSED_BATCHES)
def test_a_batch_that_cannot_be_cut_is_refused_with_a_way_out(batch: dict[str, Any], bounds: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        local_batches(batch, 2, bounds)


@pytest.mark.parametrize("make", [list, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)[None]])
def test_boundaries_of_any_kind_and_of_one_document_cut_alike(make: Any) -> None:
    batch = {"input_ids": IDS[:1], "labels": IDS[:1]}
    packed = local_batches({**batch, "cu_seq_lens_q": make([0, 12])}, 2)
    for got, want in zip(packed, local_batches(batch, 2), strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_right_padding_whose_positions_count_from_zero_again_is_no_packing() -> None:
    positions = torch.where(RIGHT.bool(), torch.arange(12), 0)
    padded = {"input_ids": IDS, "attention_mask": RIGHT}
    for got, want in zip(
        local_batches({**padded, "position_ids": positions}, 2), local_batches(padded, 2), strict=True
    ):
        assert torch.equal(got["input_ids"], want["input_ids"])


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"])
def test_images_and_videos_are_refused_by_name(name: str) -> None:
    batches.check_media({"input_ids": IDS, name: None})
    with pytest.raises(ValueError, match=f"got {name}; images, video and audio cannot be split"):
        batches.check_media({"input_ids": IDS, name: torch.ones(1)})


def test_on_one_rank_labels_are_shifted_and_boundaries_given_by_argument_reach_the_model() -> None:
    batch = {"input_ids": IDS[:1], "labels": IDS[:1]}
    entries = batches.whole_entries(batch, batches.read_shape(batch, [0, 5, 12]), given=True)
    assert entries["shift_labels"].tolist() == [[1, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, -100]]
    assert entries["cu_seq_lens_q"].tolist() == [0, 5, 12]
    assert entries["max_length_q"] == 7
    assert entries["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]


# ---- enabling --------------------------------------------------------------------------------------------------------


def fake_accelerator(**sizes: int) -> Any:
    return SimpleNamespace(parallelism_config=SimpleNamespace(**{"cp_size": 1, "sp_size": 1, **sizes}))


def test_sequence_parallelism_is_refused_with_a_pointer_to_context_parallelism() -> None:
    plugin = pytest.importorskip("cp_gdn.integrations.accelerate")
    with pytest.raises(ValueError, match=r"sp_size: got 4.*use cp_size=4, sp_size=1"):
        plugin.enable(fake_accelerator(sp_size=4))


def test_without_context_parallelism_enable_says_one_line_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plugin = pytest.importorskip("cp_gdn.integrations.accelerate")
    accelerator = fake_accelerator()
    before = dict(vars(accelerator))
    with caplog.at_level("INFO", logger="cp_gdn"):
        plugin.enable(accelerator)
    assert caplog.messages == ["cp_gdn: cp_size is 1, nothing to do; models train as they are"]
    assert vars(accelerator) == before


def test_an_accelerate_without_the_seam_is_refused_with_its_version() -> None:
    plugin = pytest.importorskip("cp_gdn.integrations.accelerate")
    with pytest.raises(RuntimeError, match=r"has no Accelerator\._prepare_cp"):
        plugin.enable(fake_accelerator(cp_size=2))


def test_the_config_class_copies_and_keeps_its_options_apart_from_accelerates_sizes() -> None:
    plugin = pytest.importorskip("cp_gdn.integrations.accelerate")
    config = plugin.ParallelismConfig(cp_size=2, gdn={"exchange": "ring"})
    twin_config = copy.deepcopy(config)
    assert (twin_config.cp_size, twin_config.gdn, twin_config.total_size) == (2, {"exchange": "ring"}, 2)


def test_a_batch_is_put_back_after_an_error_inside_shard() -> None:
    plugin = pytest.importorskip("cp_gdn.integrations.accelerate")
    batch, seen = {"input_ids": IDS, "labels": IDS}, []
    before = dict(batch)

    def step() -> None:
        with plugin.shard(fake_accelerator(), batch) as local:
            seen.extend(local)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        step()
    assert seen == ["input_ids", "labels", "shift_labels"]
    assert batch == before
