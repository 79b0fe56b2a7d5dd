"""What README.md shows is what happens: the picture of layouts, Accelerate's refusal, commands and paths."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import cp_gdn
from cp_gdn.cli import main

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")


def picture(name: str) -> str:
    (line,) = re.findall(rf"^{name} +([A-Z0-9]+)$", TEXT, re.MULTILINE)
    return str(line)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_picture_of_a_layout_is_the_partition(layout: str) -> None:
    documents = picture("documents")
    bounds = [0, *(documents.rindex(letter) + 1 for letter in dict.fromkeys(documents))]
    part = cp_gdn.partition(bounds, 4, layout=layout)
    owner = {int(token): str(rank) for rank in range(4) for token in part.token_ids(rank)}
    assert "".join(owner[token] for token in range(len(documents))) == picture(layout)


def test_the_refusal_that_is_shown_is_accelerates_own() -> None:
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    said = " ".join(re.findall(r"'?(ValueError: .*?|attention layers of type.*?) *\|", TEXT))
    assert said.startswith("ValueError: Context parallelism does not support attention layers of type")
    source = re.sub(r'"\s+f?"', "", inspect.getsource(big_modeling))
    assert "Context parallelism does not support attention layers of type" in source


def commands() -> list[list[str]]:
    lines = re.findall(r"^cp-gdn (.*?)(?:  +#.*)?$", TEXT, re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("argv", commands(), ids=[" ".join(argv[:3]) for argv in commands()])
def test_every_command_that_is_shown_can_be_parsed(argv: list[str]) -> None:
    assert main.build_parser().parse_args(argv).command == argv[0]


@pytest.mark.parametrize("name", ["README.md", "docs/launching.md"])
def test_every_path_that_is_named_is_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"(?:launch|examples|tests)/[\w/-]+(?:\.\w+)?", text)
    named += re.findall(r"\]\(([^)]+)\)", text)
    named += re.findall(r"`((?:cp_gdn|kernels|bench|docs|\.ci)/[^`]*)`", text)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
