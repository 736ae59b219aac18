"""The README's map of the sources is the tree, and the tree is the map."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evergrad"
TRIVIAL = {"__init__.py", "__main__.py", "py.typed"}
"""Files a map may leave out."""


def mapped_files() -> set[str]:
    """Paths under `src/evergrad/` named in the README's fenced blocks, one at the start of each line."""
    readme = ROOT / "README.md"
    assert readme.exists(), "README.md is missing"
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", readme.read_text(), flags=re.DOTALL | re.MULTILINE)
    files = {m for block in blocks for m in re.findall(r"^\s*(src/evergrad/\S+)", block, flags=re.MULTILINE)}
    assert files, "README.md has no file map: a fenced block with a path `src/evergrad/...` at the start of each line"
    return files


def test_every_file_on_the_map_is_in_the_tree() -> None:
    assert sorted(f for f in mapped_files() if not (ROOT / f).exists()) == []


def test_every_source_file_is_on_the_map_by_itself_or_by_its_folder() -> None:
    mapped = mapped_files()
    missing = [f for f in source_files() if f not in mapped and not has_mapped_folder(f, mapped)]
    assert missing == []


def source_files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py") if p.name not in TRIVIAL)


def has_mapped_folder(file: str, mapped: set[str]) -> bool:
    """A folder written with a slash at its end stands for all files in it."""
    return any(entry.endswith("/") and entry != "src/evergrad/" and file.startswith(entry) for entry in mapped)


def test_no_source_file_is_longer_than_a_reader_can_hold() -> None:
    long = {p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 600}
    assert long == {}


def test_every_test_and_source_that_the_guarantees_name_is_there() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    places = (ROOT / "tests", PACKAGE, ROOT)
    assert sorted({file for file in named if not any((place / file).exists() for place in places)}) == []
