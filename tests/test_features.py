"""The table of features names tests that are there, in every row."""

import ast
import re
from pathlib import Path

import pytest

from tests.parsing import parsed

DOCUMENT = Path(__file__).parents[1] / "docs/features.md"
SECTIONS = [
    section
    for section in DOCUMENT.read_text().split("\n## ")[1:]
    if re.search(r"^\|", section, re.M)
]
LINK = re.compile(r"\]\(([^)#]+\.py)\)")
NAME = re.compile(r"`(test_\w+)`")


def linked(section: str) -> set[str]:
    """Return the names of the tests in the files that a section links to."""
    trees = [parsed((DOCUMENT.parent / link).read_text()) for link in LINK.findall(section)]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for tree in trees for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_every_feature_is_shown_by_a_test_that_is_there(section: str) -> None:
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    without = [row for row in rows if not NAME.search(row.rstrip(" |").rpartition("|")[2])]
    assert rows
    assert without == []
    assert {*NAME.findall(section)} - linked(section) == set()


def test_every_conformance_test_is_told() -> None:
    """What is shown and not told is lost on who decides whether to migrate."""
    folder = DOCUMENT.parents[1] / "tests/conformance"
    names = {
        node.name
        for path in folder.glob("test_*.py")
        for node in parsed(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert names - {*NAME.findall(DOCUMENT.read_text())} == set()
