"""Every kernel variant compiles for sm_90a without spills and without a warning of the assembler; needs nvcc, no
GPU."""

import re
from pathlib import Path

import pytest

from cp_gdn.backends import cubins

VARIANTS = [
    (name, defines)
    for name, defines in cubins.VARIANTS
    if defines.get("GROUP", 3) in (1, 3, 8) and (defines.get("GROUP") == 3 or not defines.get("L2NORM"))
    if defines.get("WIDTH", 4) in (2, 4, 8)
]
SPILLED = {"grad": 76}
"""Bytes that a kernel may spill; `grad` keeps counters and row sums of a step there, beside 112 KB of tiles."""


def has_compiler() -> bool:
    try:
        cubins.find_nvcc()
    except cubins.NoCompiler:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_compiler(), reason="needs nvcc (on the PATH or from nvidia-cuda-nvcc)")


@needs_nvcc
@pytest.mark.parametrize(("name", "defines"), VARIANTS)
def test_a_variant_compiles_without_spills_or_serialized_products(
    name: str, defines: dict[str, int], tmp_path: Path
) -> None:
    log = cubins.compile_to(tmp_path / "out.cubin", name, defines, cubins.find_nvcc())
    assert (tmp_path / "out.cubin").stat().st_size > 0
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert spills
    assert max(map(int, spills)) <= SPILLED.get(name, 0), log
    assert not re.search(r"C75\d\d", log), log  # wgmma serialized, setmaxnreg ignored


@needs_nvcc
def test_the_cache_compiles_once_and_its_key_follows_the_defines(tmp_path: Path) -> None:
    first = cubins.cubin("prepare", {"GROUP": 1}, tmp_path)
    written = first.stat().st_mtime_ns
    assert cubins.cubin("prepare", {"GROUP": 1}, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert cubins.key_of("prepare", {"GROUP": 1}, "v") != cubins.key_of("prepare", {"GROUP": 2}, "v")
    assert cubins.key_of("prepare", {"GROUP": 1}, "v") != cubins.key_of("prepare", {"GROUP": 1}, "w")


def test_a_process_looks_for_the_same_cubins_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def found(name: str, defines: dict[str, int], cache: Path) -> Path:
        asked.append((name, defines))
        return cache / name

    monkeypatch.setattr(cubins, "cubin", found)
    variants = [("walk", {"EMIT_O": 1}), ("walk", {"EMIT_O": 0}), ("fold", {})]
    for _ in range(2):
        assert cubins.cubins(variants, tmp_path) == [tmp_path / name for name, _ in variants]
    assert sorted(asked, key=str) == sorted(variants, key=str)


@needs_nvcc
def test_a_compiler_error_carries_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nvcc failed on prepare\.cu"):
        cubins.compile_to(tmp_path / "out.cubin", "prepare", {"GROUP": -1}, cubins.find_nvcc())
