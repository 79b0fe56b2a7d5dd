"""Puts the kernel sources into a wheel, and with ``CP_GDN_PREBUILD=1`` their cubins too (needs nvcc)."""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_cubins() -> ModuleType:
    """The module that compiles, without its package: a build environment has no torch."""
    spec = importlib.util.spec_from_file_location("cubins", ROOT / "cp_gdn" / "backends" / "cubins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "cp_gdn"
        folder = package / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted((ROOT / "kernels").glob("*.cu*")):
            shutil.copy2(source, folder / source.name)
        if os.environ.get("CP_GDN_PREBUILD") == "1":
            cubins = load_cubins()
            for built in cubins.cubins(cubins.VARIANTS, package / "cubins"):
                print(f"prebuilt {built.name}")
            for other in (*(package / "cubins").glob("*.lock"), *(package / "cubins").glob("*.log")):
                other.unlink()


setup(cmdclass={"build_py": BuildWithKernels})
