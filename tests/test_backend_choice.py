"""Which backend a context takes, and why: arguments, machines, ranks that differ, compilers and cached cubins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_gdn import Comm, Options, PlanDisagreement, build_context, partition, twin
from cp_gdn.backends import choice, cubins
from cp_gdn.backends.choice import BackendChoice, choose_backend

ASKED: dict[str, Any] = {
    "device": "cuda",
    "heads": (2, 6),
    "head_dims": (128, 128),
    "dtype": torch.bfloat16,
    "backend": "auto",
    "options": Options(),
}
MISFITS = {
    "dtype": ({"dtype": torch.float32}, "dtype torch.float32: the kernels take torch.bfloat16"),
    "head dims": ({"head_dims": (128, 64)}, "head_dims (128, 64): the kernels take (128, 128)"),
    "group": ({"heads": (2, 10)}, "5 value heads per query/key head: the kernels take 1, 2, 3, 4, 8"),
    "device": ({"device": "cpu"}, "device cpu: the kernels need a Hopper GPU (sm_90)"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands against the kernels on the machine; empty: nothing."""
    found = {"against": ""}
    monkeypatch.setattr(choice, "unfit_machine", lambda device, heads: found["against"])
    choice._say_once.cache_clear()
    return found


@pytest.mark.parametrize("case", MISFITS)
def test_auto_takes_torch_where_the_kernels_do_not_fit_and_hopper_raises(case: str) -> None:
    changes, why = MISFITS[case]
    asked = {**ASKED, **changes}
    assert choose_backend(asked, Comm.alone()) == BackendChoice(kind="torch", reason=f"auto: {why}")
    with pytest.raises(RuntimeError) as caught:
        choose_backend({**asked, "backend": "hopper"}, Comm.alone())
    assert str(caught.value) == f'backend="hopper": {why}; {choice.WAY_OUT}'


def test_what_fits_takes_the_kernels_unless_torch_is_asked_for(machine: dict[str, str]) -> None:
    assert choose_backend(ASKED, Comm.alone()).kind == "hopper"
    assert choose_backend({**ASKED, "backend": "hopper"}, Comm.alone()).reason == "asked for"
    assert choose_backend({**ASKED, "backend": "torch"}, Comm.alone()) == choice.TORCH


def test_a_machine_that_cannot_is_logged_once_with_the_reason(
    machine: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    machine["against"] = "nvcc: not on the PATH"
    with caplog.at_level(logging.WARNING, "cp_gdn"):
        for _ in range(3):
            taken = choose_backend(ASKED, Comm.alone())
    assert taken == BackendChoice(kind="torch", reason="auto: nvcc: not on the PATH")
    assert [record.getMessage() for record in caplog.records] == [
        "cp_gdn: the torch backend instead of the Hopper kernels: nvcc: not on the PATH"
    ]


def test_one_rank_that_cannot_takes_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Comm) -> BackendChoice:
        return choose_backend({**ASKED, "heads": (comm.rank + 1, 3 * comm.rank + 3)}, comm)

    monkeypatch.setattr(choice, "unfit_machine", lambda device, heads: "an old driver" if heads[0] == 2 else "")
    taken = twin(3, run)
    assert taken == [BackendChoice(kind="torch", reason="auto: rank 1: an old driver")] * 3
    monkeypatch.setattr(choice, "unfit_machine", lambda device, heads: "")
    assert {each.kind for each in twin(3, run)} == {"hopper"}


def test_ranks_in_different_calls_are_told_so() -> None:
    def run(comm: Comm) -> None:
        if comm.rank:
            comm.agree("context", {"a": "b"})
        else:
            comm.share("backend", "")

    with pytest.raises(PlanDisagreement, match=r"different calls|did not give the same"):
        twin(2, run)


def test_last_call_and_digest_name_the_backend() -> None:
    ctx = build_context(partition([0, 8], 1), Comm.alone(), heads=(1, 1))
    ctx.note_call("eager", "forward")
    assert ctx.last_call["backend"] == ctx.taken.kind == "torch"
    assert ctx.last_call["backend_reason"] == ctx.taken.reason == f"auto: {MISFITS['device'][1]}"


# ---- cubins ----------------------------------------------------------------------------------------------------------


def test_without_a_compiler_a_cubin_of_any_compiler_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise cubins.NoCompiler("nvcc: a test hides it")

    monkeypatch.setattr(cubins, "find_nvcc", missing)
    with pytest.raises(cubins.NoCompiler, match="a test hides it"):
        cubins.cubin("fold", {}, tmp_path)
    kept = tmp_path / f"fold-{cubins.key_of('fold', {}, 'another compiler')}.cubin"
    kept.write_bytes(b"cubin")
    assert cubins.cubin("fold", {}, tmp_path) == kept
    with pytest.raises(cubins.NoCompiler):
        cubins.cubin("fold", {"OTHER": 1}, tmp_path)


def test_cubins_of_the_wheel_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / f"fold-{cubins.key_of('fold', {}, 'the wheel maker')}.cubin"
    kept.write_bytes(b"cubin")
    monkeypatch.setattr(cubins, "prebuilt_folder", lambda: tmp_path)
    monkeypatch.setattr(cubins, "find_nvcc", lambda: pytest.fail("asked for a compiler"))
    assert cubins.cubin("fold", {}) == kept
