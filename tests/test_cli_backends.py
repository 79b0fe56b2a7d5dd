"""`cp-gdn verify` and the demo on a GPU and on the kernels, as far as a machine without one can tell."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cp_gdn
from cp_gdn.backends.choice import TORCH, BackendChoice
from cp_gdn.cli import (
    demo_data,
    demo_model,
    demo_report,
    demo_worker,
    main,
    ranks,
    verify,
    verify_compare,
    verify_world,
)
from cp_gdn.cli.verify_case import TENSORS
from tests import kernel_host
from tests.kernel_host import host_kernels

VERIFY = ["verify", "--cu-seqlens", "0,37,88,128", "--heads", "1,2"]

CHOSEN = {  # arguments -> device, backend, dtype, head dims
    "": ("cpu", "auto", "fp32", (32, 32)),
    "--backend torch": ("cpu", "torch", "fp32", (32, 32)),
    "--backend hopper": ("cpu", "hopper", "bf16", (128, 128)),
    "--device cuda": ("cuda", "auto", "bf16", (128, 128)),
    "--device cuda --backend torch": ("cuda", "torch", "bf16", (128, 128)),
    "--device cuda --dtype fp32": ("cuda", "auto", "fp32", (128, 128)),
    "--device cuda --head-dims 64,32": ("cuda", "auto", "bf16", (64, 32)),
    "--dtype bf16 --head-dims 128,128": ("cpu", "auto", "bf16", (128, 128)),
}

REFUSED = {
    "--backend hopper": "device cpu: the kernels need a Hopper GPU",
    "--backend hopper --dtype fp32": "dtype torch.float32: the kernels take torch.bfloat16",
    "--backend hopper --head-dims 64,64": "head_dims (64, 64): the kernels take (128, 128)",
    "--device cuda": "--device: got cuda, but torch sees no GPU here; expected cpu",
}

GROUPS = {("cpu", 2): "gloo", ("cuda", 1): "nccl", ("cuda", 2): "nccl", ("cuda", 3): "gloo"}
"""(device, ranks) on a machine of two GPUs."""


def on_host_kernels(test: Any) -> Any:
    """The kernels' sources run on the CPU; one process compiles them."""
    test = pytest.mark.skipif(kernel_host.COMPILER is None, reason="needs g++")(test)
    return pytest.mark.xdist_group("host kernels")(test)


def parsed(extra: str) -> argparse.Namespace:
    return main.build_parser().parse_args([*VERIFY, *extra.split()])


@pytest.mark.parametrize("extra", CHOSEN)
def test_dtype_and_head_dims_fit_the_kernels_where_they_may_run_and_what_is_given_wins(extra: str) -> None:
    case = verify.make_case(parsed(extra))
    assert (case.device, case.backend, case.dtype, case.head_dims) == CHOSEN[extra]
    assert case.seed == 0


@pytest.mark.parametrize("extra", REFUSED)
def test_what_cannot_run_here_ends_with_status_2_before_any_process_starts(
    extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(verify_world, "run_processes", lambda case: pytest.fail("started processes"))
    assert main.main([*VERIFY, *extra.split()]) == 2
    assert REFUSED[extra] in capsys.readouterr().err


@pytest.mark.parametrize(("device", "world"), GROUPS)
def test_ranks_talk_by_nccl_only_where_each_has_a_gpu(device: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.group_backend(device, world) == GROUPS[device, world]


def test_ranks_share_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [ranks.device_of_rank("cuda", rank).index for rank in range(3)] == [0, 1, 0]
    assert [device.index for device in taken] == [0, 1, 0]
    assert ranks.device_of_rank("cpu", 1) == torch.device("cpu")
    assert len(taken) == 3


@on_host_kernels
@pytest.mark.parametrize(("segments", "kind"), [("1", "tolerance"), ("grid:1", "bits")])
def test_verify_passes_on_the_kernels_and_says_so(
    segments: str, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin stands for the processes."""
    monkeypatch.setattr(verify_world, "run_processes", verify_world.run_twin)
    with host_kernels():
        assert main.main([*VERIFY, "--backend", "hopper", "--segments", segments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["backend"], printed["backend_reason"], printed["passed"]) == ("hopper", "a test", True)
    assert [row["tensor"] for row in printed["rows"]] == list(TENSORS)
    found = [row["checks"]["one rank"] for row in printed["rows"]]
    assert {check["kind"] for check in found} == {kind}
    if kind == "tolerance":  # cuts in other places round other numbers
        assert any(0 < check["error"] < 5e-3 for check in found)


LIMITS = {
    ("fp32", "torch", "o"): 1e-5,
    ("fp32", "torch", "dg"): 1e-4,
    ("bf16", "torch", "dbeta"): 5e-3,
    ("bf16", "hopper", "o"): 1e-2,
    ("bf16", "hopper", "dinitial_state"): 1e-2,
    ("bf16", "hopper", "dbeta"): 1.6e-2,
    ("bf16", "hopper", "dg"): 1.6e-2,
    ("bf16", "hopper, torch", "o"): 1e-2,
}


@pytest.mark.parametrize(("dtype", "kind", "name"), LIMITS)
def test_two_runs_on_the_kernels_may_each_use_up_their_budget(dtype: str, kind: str, name: str) -> None:
    assert verify_compare.limit_of(dtype, kind, name) == pytest.approx(LIMITS[dtype, kind, name])


SAME_ON_ONE_RANK = {("cpu", "torch"): "bits", ("cuda", "hopper"): "bits", ("cuda", "torch"): "tolerance"}


@pytest.mark.parametrize(("device", "backend"), SAME_ON_ONE_RANK)
def test_on_a_grid_one_rank_has_the_same_bits_where_that_is_promised(device: str, backend: str) -> None:
    case = verify.make_case(parsed("--segments grid:1 --head-dims 16,16"))
    twin, one = verify_world.run_twin(case), verify_world.run_one_rank(case)
    taken = BackendChoice(kind=backend, reason="a test")
    twin = {name: [dataclasses.replace(each, taken=taken) for each in world] for name, world in twin.items()}
    one = dataclasses.replace(one, taken=taken)
    rows = verify_compare.compare(dataclasses.replace(case, device=device), twin, twin, one)
    assert {row.checks["one rank"].kind for row in rows} == {SAME_ON_ONE_RANK[device, backend]}
    assert {check.kind for row in rows for name, check in row.checks.items() if name != "one rank"} == {"bits"}


def test_ranks_on_different_backends_are_all_named() -> None:
    case = verify.make_case(parsed("--head-dims 16,16"))
    twin, one = verify_world.run_twin(case), verify_world.run_one_rank(case)
    other = {name: [dataclasses.replace(each, taken=TORCH) for each in world] for name, world in twin.items()}
    one = dataclasses.replace(one, taken=BackendChoice(kind="hopper", reason="a test"))
    assert verify_compare.backend_of(other, twin, one) == BackendChoice(kind="torch, hopper", reason="asked for")


# ---- the demo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "dims", "dtype"), [("cpu", 32, torch.float32), ("cuda", 128, torch.bfloat16)])
def test_the_demos_model_fits_the_kernels_on_a_gpu(
    device: str, dims: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model.ByteModel, "to", lambda self, device: self)
    model = demo_model.build_model(0, torch.device(device))
    assert (model.head_dims, model.dtype) == ((dims, dims), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@on_host_kernels
def test_the_model_of_a_gpu_runs_its_mixers_on_the_kernels_and_has_fp32_gradients() -> None:
    pack = next(demo_data.packs(0, 80))
    args = argparse.Namespace(layout="zigzag", exchange="auto")
    torch.manual_seed(0)
    made = demo_model.ByteModel(demo_model.GPU_HEAD_DIMS, torch.bfloat16)

    def rank(comm: cp_gdn.Comm) -> tuple[Any, float]:
        model = copy.deepcopy(made)
        ctx = demo_worker.make_context(pack, comm, model, args)
        share, loss = demo_worker.loss_of(model, pack, ctx)
        share.backward()
        assert (ctx.last_call["backend"], ctx.last_call["direction"]) == ("hopper", "backward")
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
        assert all(grad.isfinite().all() for grad in grads)
        return len(grads), loss.item()

    with host_kernels():
        (count, alone), *two = cp_gdn.twin(1, rank) + cp_gdn.twin(2, rank)
    assert two == [(count, pytest.approx(alone, abs=1e-3))] * 2


def row(step: int, loss: float, dtype: str, backend: str) -> dict[str, Any]:
    more = {"dtype": dtype, "backend": backend, "backend_reason": "a test"}
    return {"step": step, "loss": loss, "tokens_per_s": 1.0, **more}


@pytest.mark.parametrize(("dtype", "backend"), [("fp32", "torch"), ("bf16", "hopper")])
def test_the_summary_names_the_backend_and_claims_no_equal_losses_in_bf16(
    dtype: str, backend: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    columns = {"2 ranks": (5.0, 4.0), "1 rank": (5.001, 4.02)}
    rows = {name: [row(i, loss, dtype, backend) for i, loss in enumerate(each)] for name, each in columns.items()}
    demo_report.print_summary(rows, tmp_path)
    shown = capsys.readouterr().out
    assert "largest difference: 2.0e-02 (step 1)" in shown
    assert all(f"{name}: backend={backend} (a test)" in shown for name in columns)
    assert ("1.0e-03 at step 0" in shown) == ("close, not equal" in shown) == (dtype == "bf16")
