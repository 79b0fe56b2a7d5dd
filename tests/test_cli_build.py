"""`cp-gdn build`: one line per kernel, and what ends it with a status."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cp_gdn.backends import cubins
from cp_gdn.cli.main import main

LOG = "0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 77 registers\n"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that writes a KiB and says what `LOG` says; lists what it was asked for."""
    asked: list[str] = []

    def compile_to(target: Path, name: str, defines: Mapping[str, int], nvcc: Path) -> str:
        asked.append(f"{name} {dict(defines)}")
        target.write_bytes(bytes(1024))
        return LOG

    monkeypatch.setattr(cubins, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(cubins, "compiler_version", lambda nvcc: "one\nBuild 13\n")
    monkeypatch.setattr(cubins, "compile_to", compile_to)
    return asked


def test_every_kernel_is_compiled_once_and_listed(
    compiler: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["build", "--cache", str(tmp_path), "--jobs", "4"]) == 0
    assert sorted(compiler) == sorted(f"{name} {dict(defines)}" for name, defines in cubins.VARIANTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Build 13, sm_90a, {tmp_path}"
    assert lines[1].split() == ["kernel", "variant", "seconds", "registers", "spilled", "KiB"]
    fold = next(line for line in lines if line.startswith("fold")).split()
    assert (fold[0], fold[1], fold[-3:]) == ("fold", "TRANSPOSED=0", ["77", "12", "1"])
    assert len(list(tmp_path.glob("*.cubin"))) == len(cubins.VARIANTS)


def test_a_compiler_that_fails_ends_with_status_1_and_none_with_2(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> str:
        raise RuntimeError("nvcc failed on fold.cu")

    def missing() -> Path:
        raise cubins.NoCompiler("nvcc: not on the PATH")

    monkeypatch.setattr(cubins, "compile_to", failing)
    assert main(["build", "--cache", str(tmp_path)]) == 1
    assert "nvcc failed on fold.cu" in capsys.readouterr().out
    monkeypatch.setattr(cubins, "find_nvcc", missing)
    assert main(["build", "--cache", str(tmp_path)]) == 2
    assert "nvcc: not on the PATH" in capsys.readouterr().err
