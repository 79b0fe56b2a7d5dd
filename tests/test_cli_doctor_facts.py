"""What `cp-gdn doctor` finds on a machine: links between GPUs, cached kernels, the variables that it lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cp_gdn.backends import cubins
from cp_gdn.cli import doctor_facts

TOPOLOGY = "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-63\nGPU1\tNV18\t X \tPIX\t0-63\n"


def test_links_are_read_from_nvidia_smi_unless_gpus_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{TOPOLOGY}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 2))
    links = doctor_facts.find_links(3, {})
    assert [(link.gpus, link.name, link.peer) for link in links] == [
        ((0, 1), "NV18", True),
        ((0, 2), "SYS", False),
        ((1, 2), "PIX", True),
    ]
    assert {link.name for link in doctor_facts.find_links(3, {"CUDA_VISIBLE_DEVICES": "4,5,6"})} == {""}


def test_ready_kernels_count_whatever_compiler_made_them_in_the_wheel_or_the_cache(tmp_path: Path) -> None:
    folders = [tmp_path / "wheel", tmp_path / "cache"]
    for folder in folders:
        folder.mkdir()
    assert doctor_facts.count_cached(*folders, tmp_path / "none") == (0, len(cubins.VARIANTS))
    for folder, (name, defines) in zip(folders, cubins.VARIANTS, strict=False):
        (folder / f"{name}-{cubins.source_key(name, defines)}-12345678.cubin").touch()
    assert doctor_facts.count_cached(*folders) == (2, len(cubins.VARIANTS))
    name, defines = cubins.VARIANTS[2]
    (folders[1] / f"{name}-{cubins.source_key(name, defines)}-12345678.lock").touch()  # its compiler failed
    assert doctor_facts.count_cached(*folders) == (2, len(cubins.VARIANTS))


def test_only_variables_that_matter_are_listed() -> None:
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "OMP_NUM_THREADS": "4", "PATH": "/bin", "CP_GDN_LOG": "info"}
    found = doctor_facts.gather(environ).environment
    assert found == {"CP_GDN_LOG": "info", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
