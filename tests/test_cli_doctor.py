"""`cp-gdn doctor`: every trap provoked, the backends it names, its JSON and exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cp_gdn.backends import choice
from cp_gdn.cli import doctor_facts, doctor_traps, main
from cp_gdn.cli.doctor_facts import Facts, Gpu, Link

H200 = Gpu(name="NVIDIA H200", capability=(9, 0), memory_gib=139.8)
A100 = Gpu(name="NVIDIA A100", capability=(8, 0), memory_gib=79.2)
CLEAN = Facts(
    versions={"torch": "2.13.0", "accelerate": None, "transformers": None, "triton": None, "fla": None},
    gpus=(),
    links=(),
    has_compiler=True,
    compiler="13.0.88 at /usr/local/bin/nvcc",
    cache="~/.cache/cp_gdn/cubins",
    cached=(11, 11),
    environment={},
)


def facts(*, versions: dict[str, str] | None = None, **changes: Any) -> Facts:
    return dataclasses.replace(CLEAN, versions={**CLEAN.versions, **(versions or {})}, **changes)


def apart(*pairs: tuple[int, int]) -> tuple[Link, ...]:
    return tuple(Link(gpus=pair, name="", peer=False) for pair in pairs)


FLA = {"fla": "0.6.0", "triton": "3.6.0"}
TRAPS = {
    "old torch": (facts(versions={"torch": "2.7.1+cu128"}), "stops", "old torch", "2.7.1"),
    "fla and Triton 3.6 on Hopper": (
        facts(versions=FLA, gpus=(A100, H200)), "stops", "fla and Triton on Hopper", "#640",
    ),
    "the first broken Triton": (
        facts(versions={**FLA, "triton": "3.4.0"}, gpus=(H200,)), "stops", "fla and Triton on Hopper", "3.4.0",
    ),
    "an interface that is not there": (
        facts(environment={"NCCL_SOCKET_IFNAME": "nix0,nix1"}), "stops", "NCCL_SOCKET_IFNAME", "nix0,nix1",
    ),
    "an exact interface that is not there": (
        facts(environment={"NCCL_SOCKET_IFNAME": "=l"}), "stops", "NCCL_SOCKET_IFNAME", "this machine has only",
    ),
    "an interface of gloo by its first letter": (
        facts(environment={"GLOO_SOCKET_IFNAME": "l"}), "stops", "GLOO_SOCKET_IFNAME", "this machine has only",
    ),
    "no peer to peer": (facts(environment={"NCCL_P2P_DISABLE": "1"}), "warns", "NCCL_P2P_DISABLE", "host memory"),
    "no InfiniBand": (facts(environment={"NCCL_IB_DISABLE": "1"}), "warns", "NCCL_IB_DISABLE", "TCP"),
    "no shared memory": (facts(environment={"NCCL_SHM_DISABLE": "1"}), "warns", "NCCL_SHM_DISABLE", "network"),
    "lost ranks unseen": (
        facts(environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}), "warns", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "hang",
    ),
    "GPUs apart": (facts(gpus=(A100, A100), links=apart((0, 1))), "warns", "no peer access", "GPUs 0-1 do not"),
    "no compiler on Hopper": (
        facts(gpus=(H200,), has_compiler=False, compiler="nvcc: not on the PATH", cached=(3, 11)),
        "warns", "no compiler", "8 of 11 kernels",
    ),
    "a setting that nobody reads": (
        facts(environment={"CP_GDN_EXCHNGE": "ring"}), "warns", "unknown setting", "EXCHNGE",
    ),
    "a setting that cannot be read": (
        facts(environment={"CP_GDN_LAYOUT": "striped"}), "stops", "bad setting", "'striped'",
    ),
}  # fmt: skip
SAFE = {
    "nothing": CLEAN,
    "a mended Triton": facts(versions={**FLA, "triton": "3.7.1"}, gpus=(H200,)),
    "an older Triton": facts(versions={**FLA, "triton": "3.3.1"}, gpus=(H200,)),
    "no Triton": facts(versions={"fla": "0.6.0"}, gpus=(H200,)),
    "no Hopper": facts(versions=FLA, gpus=(A100,)),
    "interfaces by prefix, exactly, and but for one": facts(environment={"NCCL_SOCKET_IFNAME": "nix,l"}),
    "an exact interface": facts(environment={"NCCL_SOCKET_IFNAME": "=lo"}),
    "all interfaces but one": facts(environment={"NCCL_SOCKET_IFNAME": "^nix"}),
    "switches that are off": facts(environment={"NCCL_P2P_DISABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
    "no compiler, all cached": facts(gpus=(H200,), has_compiler=False),
    "no compiler, another GPU": facts(gpus=(A100,), has_compiler=False, cached=(0, 11)),
    "settings as they should be": facts(environment={"CP_GDN_EXCHANGE": "ring", "CP_GDN_LOG": "info"}),
}


@pytest.fixture(autouse=True)
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without packages, and no setting of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(doctor_facts.PREFIXES)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("found", "level", "name", "text"), TRAPS.values(), ids=TRAPS)
def test_each_trap_is_found_with_what_is_wrong_and_a_way_out(found: Facts, level: str, name: str, text: str) -> None:
    (finding,) = doctor_traps.findings(found)
    assert (finding.level, finding.name) == (level, name)
    assert text in finding.what
    assert finding.way_out


@pytest.mark.parametrize("found", SAFE.values(), ids=SAFE)
def test_what_only_looks_like_a_trap_is_not_found(found: Facts) -> None:
    assert doctor_traps.findings(found) == []


def test_findings_that_stop_a_run_come_first() -> None:
    both = facts(environment={"NCCL_P2P_DISABLE": "1", "CP_GDN_LAYOUT": "striped"}, versions={"torch": "2.7"})
    assert [finding.level for finding in doctor_traps.findings(both)] == ["stops", "stops", "warns"]


# ---- Packages that are not what they seem ----------------------------------------------------------------------------


def package(folder: Path, name: str, body: str = "", version: str = "") -> Path:
    """A package in a folder, as pip would have installed it if it has a version."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    if version:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return folder


def named(name: str, found: Facts = CLEAN) -> doctor_traps.Finding:
    return next(finding for finding in doctor_traps.findings(found) if finding.name == name)


def test_fla_and_triton_that_can_be_imported_without_a_gpu_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path / "site", "fla")))
    assert doctor_traps.findings(CLEAN) == []
    monkeypatch.syspath_prepend(str(package(tmp_path / "more", "triton")))
    finding = named("fla and Triton without a GPU")
    assert finding.level == "stops"
    assert "0 active drivers" in finding.what
    assert doctor_traps.findings(facts(gpus=(A100,))) == []


def test_a_package_named_kernels_in_front_of_the_installed_one_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path / "site", "kernels", version="0.18.5")))
    assert doctor_traps.findings(CLEAN) == []
    package(tmp_path, "kernels")  # in the current folder
    finding = named("a package named kernels")
    assert finding.level == "stops"
    assert "it hides kernels 0.18.5" in finding.what
    assert str(tmp_path / "kernels" / "__init__.py") in finding.what


def test_a_package_named_kernels_alone_warns_and_a_folder_of_sources_does_not(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "walk.cu").touch()
    assert doctor_traps.findings(CLEAN) == []
    (tmp_path / "kernels" / "__init__.py").touch()
    assert named("a package named kernels").level == "warns"


@pytest.mark.parametrize(
    ("body", "name", "text"),
    [
        ("raise ImportError('no such symbol')", "broken accelerate", "ImportError: no such symbol"),
        ("class Accelerator:\n    def _prepare_cp(self): ...", "another accelerate", "maybe_context_parallel"),
    ],
)
def test_an_accelerate_that_is_broken_or_has_no_seam_stops_a_run(
    body: str, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sys.modules.pop("accelerate", None)
    monkeypatch.syspath_prepend(str(package(tmp_path / "site", "accelerate", body)))
    try:
        finding = named(name, facts(versions={"accelerate": "1.16.0"}))
    finally:
        sys.modules.pop("accelerate", None)
        if before is not None:
            sys.modules["accelerate"] = before
    assert finding.level == "stops"
    assert text in finding.what


# ---- The command -----------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert main.main(["doctor", "--json", *argv]) == status
    return json.loads(capsys.readouterr().out)


def test_json_has_the_facts_the_backends_and_no_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "gather", lambda environ: CLEAN)
    got = printed(capsys)
    assert list(got) == [
        "ok", "versions", "gpus", "links", "environment", "compiler", "cache", "backends", "model", "findings",
    ]  # fmt: skip
    assert (got["ok"], got["model"], got["findings"]) == (True, None, [])
    assert got["compiler"] == {"found": True, "text": CLEAN.compiler}
    assert got["cache"] == {"folder": CLEAN.cache, "ready": 11, "kernels": 11}
    assert [row["heads"] for row in got["backends"]] == [[16, 16], [16, 32], [16, 48], [16, 64]]
    assert {row["backend"] for row in got["backends"]} == {"torch"}


def test_what_stops_a_run_is_exit_status_1_and_what_slows_it_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    got = printed(capsys)
    assert (got["ok"], [finding["name"] for finding in got["findings"]]) == (True, ["NCCL_P2P_DISABLE"])
    monkeypatch.setenv("CP_GDN_TIMEOUT", "soon")
    assert printed(capsys, status=1)["ok"] is False
    assert main.main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "STOPS  bad setting: cp_gdn: CP_GDN_TIMEOUT: got 'soon'" in shown
    assert "1 of 2 findings would stop a run" in shown


REASONS = {
    "heads": (["--heads", "16,80"], "5 value heads per query/key head"),
    "head dims": (["--heads", "16,48", "--head-dims", "64,64"], "head_dims (64, 64)"),
    "dtype": (["--heads", "16,48", "--dtype", "fp32"], "dtype torch.float32"),
    "device": (["--heads", "16,48"], "device cpu"),
}


@pytest.mark.parametrize(("argv", "text"), REASONS.values(), ids=REASONS)
def test_the_reason_for_a_backend_is_the_one_that_a_context_gives(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "find_gpus", lambda: ())
    (row,) = printed(capsys, *argv)["backends"]
    assert row["backend"] == "torch"
    assert text in row["reason"]


def test_with_a_gpu_the_kernels_are_asked_for_on_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "gather", lambda environ: facts(gpus=(H200, H200), links=apart((0, 1))))
    monkeypatch.setattr(choice, "unfit_machine", lambda device, heads: "" if device.type == "cuda" else "no")
    assert main.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "GPU 1        NVIDIA H200, sm_90, 140 GiB" in shown
    assert "links        1 x through the host" in shown
    assert "16,48     128,128    bfloat16  cuda    hopper   auto: every rank can run the kernels" in shown


def test_heads_that_no_layer_has_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--heads", "16,40"]) == 2
    assert "multiple of the query/key heads" in capsys.readouterr().err


def test_it_runs_without_any_optional_package(tmp_path: Path) -> None:
    hidden = ("rich", "matplotlib", "accelerate", "transformers", "triton", "cuda")
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden}))"
    run = "from cp_gdn.cli import main; sys.exit(main.main(['doctor']))"
    no_metadata = "from cp_gdn.cli import doctor_facts; doctor_facts.PACKAGES = {'torch': ('torch',)}"
    command = [sys.executable, "-c", f"{hide}; {no_metadata}; {run}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing found" in done.stdout
