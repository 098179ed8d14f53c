"""The house: names stand for one thing, folders have doors, the code map is made of these."""

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests import code_map
from tests.parsing import parsed
from tests.product_files import ROOT, product


def repeated(names: list[tuple[str, Path]]) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name, path in names:
        places[name].append(str(path.relative_to(ROOT)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_file_names_stand_for_one_thing() -> None:
    names = [(path.stem, path) for path in product() if not path.stem.startswith("__")]
    assert len(names) > 300
    assert repeated(names) == {}


def test_public_class_names_stand_for_one_thing() -> None:
    names = [
        (node.name, path)
        for path in product()
        for node in parsed(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(names) > 500
    assert repeated(names) == {}


def test_each_folder_has_a_door() -> None:
    without = [str(folder) for folder in code_map.folders() if not code_map.door(folder)]
    assert without == []


def test_the_code_map_is_made_of_the_doors() -> None:
    [written] = code_map.BLOCK.findall(code_map.PAGE.read_text())
    assert written == code_map.code_map(), "`make fmt` writes it"


@cache
def defined(path: Path) -> set[str]:
    """Return the names of a module's functions, classes and constants, and Class.member."""
    found = set()
    for node in parsed(path.read_text()).body:
        for name in bound_by(node):
            found.add(name)
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                found.update(f"{name}.{each}" for each in bound_by(member))
    return found


def bound_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def test_each_place_for_a_change_names_what_its_file_defines() -> None:
    page = code_map.PAGE.read_text()
    [table] = re.findall(r"\| to change \|.*?\n\n", page, re.DOTALL)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]
    places = [cells for cells in lines if not cells[0].startswith("**")]
    assert 200 < len(places) <= 280, "merge rows: a longer table is not read"
    subjects = [cells[0] for cells in places]
    assert len(set(subjects)) == len(subjects), "one line a subject"
    absent = []
    for _, see, begin in places:
        files = re.findall(r"`([\w/.-]+(?:\.\w+|/))`", see)
        first = ROOT / files[0]
        for each in files:
            if "limits." not in each and "storage." not in each:
                there = (ROOT / each).exists() or (first.parent / each).exists()
                absent += [] if there else [each]
        if not first.exists():
            continue
        name = begin.strip("`")
        known = defined(first) if first.suffix == ".py" else re.findall(r"\w+", first.read_text())
        absent += [] if name in known else [f"{files[0]}: {name}"]
    assert absent == []


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_bytes().count(b"\n") <= 150


@pytest.mark.parametrize(("suffix", "limit"), [("py", 19_999), ("sql", 1_681)])
def test_the_proof_grows_no_further(suffix: str, limit: int) -> None:
    """The limits may only fall, except for a new subject (docs/adr/0068, 0089, 0099, 0101)."""
    listed = subprocess.run(
        ["git", "ls-files", f"chaos/*.{suffix}"], cwd=ROOT, capture_output=True, check=True
    )
    proof = [ROOT / name for name in listed.stdout.decode().split()]
    lines = sum(path.read_bytes().count(b"\n") for path in proof if path.exists())
    assert lines <= limit
    assert lines > limit - 300, f"lower the limit: chaos/ has {lines} lines of {suffix}"
