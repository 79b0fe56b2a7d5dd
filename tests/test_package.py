"""The repository's own rules: sizes, purity, imports. Each rule is one walk over the sources."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("cp_gdn", "tests", "bench", "launch", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".cu", ".cuh", ".json", ""}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6
REPEAT_LINES = 6
WIDE_BY_DESIGN = {"build_context"}
"""Everything that decides a plan is named where the plan is made: the one public call with more parameters."""
DOORS = {"__init__.py", "__main__.py", "accelerate.py", "run.py"}
"""Files beside the core that only hand on names of the command line and the integrations."""


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts) + ([ROOT / "setup.py"] if folders else [])


def text_files() -> Iterator[Path]:
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.suffix in TEXT_SUFFIXES and not path.name.startswith(".coverage"):
            yield path
    for folder in (*SOURCE_FOLDERS, "docs", "kernels"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
                yield path


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which is a contract and not code."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    contract = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - contract


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def counted_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of the parameters beyond self, cls and the tensors of the call."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    typed = {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "" for arg in every}
    return [name for name, kind in typed.items() if name not in ("self", "cls") and "Tensor" not in kind]


def test_no_python_file_is_longer_than_300_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*SOURCE_FOLDERS)}
    assert [f"{where(path, n)}" for path, n in lengths.items() if n > MAX_FILE_LINES] == []


def test_no_function_is_longer_than_40_lines() -> None:
    long = [
        f"{where(path, node.lineno)} {node.name}"
        for path in python_files(*SOURCE_FOLDERS)
        for node in functions(path)
        if body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_function_takes_more_than_six_parameters_beyond_its_tensors() -> None:
    many = [
        f"{where(path, node.lineno)} {node.name}"
        for path in python_files("cp_gdn", "bench")
        for node in functions(path)
        if len(counted_parameters(node)) > MAX_PARAMETERS and node.name not in WIDE_BY_DESIGN
    ]
    assert many == []


def test_every_function_of_the_package_has_full_type_hints() -> None:
    bare = [
        f"{where(path, node.lineno)} {node.name}"
        for path in python_files("cp_gdn")
        for node in functions(path)
        if node.returns is None
    ]
    assert bare == []


def test_every_file_is_ascii() -> None:
    offenders = [str(path.relative_to(ROOT)) for path in text_files() if not path.read_bytes().isascii()]
    assert offenders == []


def test_the_core_reads_no_environment() -> None:
    core = [path for path in python_files("cp_gdn") if not {"cli", "integrations", "setup.py"} & set(path.parts)]
    pattern = re.compile(r"\b(environ|getenv|putenv)\b")
    assert [str(path.relative_to(ROOT)) for path in core if pattern.search(path.read_text(encoding="utf-8"))] == []


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("name", ["layout.py", "plan.py", "segments.py"])
def test_planning_imports_no_process_groups(name: str) -> None:
    assert [module for module in imported_modules(ROOT / "cp_gdn" / name) if "distributed" in module] == []


def test_the_core_imports_neither_the_command_line_nor_the_integrations() -> None:
    core = [path for path in python_files("cp_gdn") if not {"cli", "integrations", "setup.py"} & set(path.parts)]
    outer = re.compile(r"cp_gdn\.(cli|integrations)\b")
    inner = [path for path in core if path.name not in DOORS]
    assert [path.name for path in inner for module in imported_modules(path) if outer.match(module)] == []


def test_importing_the_package_needs_none_of_the_optional_packages() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "check_import.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_root_folder_kernels_shadows_no_installed_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "kernels")


def test_no_six_lines_of_the_package_occur_twice() -> None:
    seen: dict[tuple[str, ...], str] = {}
    repeats = []
    for path in python_files("cp_gdn"):
        lines = code_lines(path)
        for start in range(len(lines) - REPEAT_LINES + 1):
            window = tuple(text for _, text in lines[start : start + REPEAT_LINES])
            first = seen.setdefault(window, where(path, lines[start][0]))
            if first != where(path, lines[start][0]):
                repeats.append(f"{first} and {where(path, lines[start][0])}")
    assert repeats == []


def code_lines(path: Path) -> list[tuple[int, str]]:
    """(number, stripped text) of the lines that are no signature, blank, comment, import or lone bracket."""
    skipped = re.compile(r"$|#|import |from |[\[\](){},]+$")
    signatures = {line for node in functions(path) for line in range(node.lineno, node.body[0].lineno)}
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return [(n, line.strip()) for n, line in lines if n not in signatures and not skipped.match(line.strip())]
