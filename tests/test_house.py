"""The house: names stand for one thing, folders have doors, the code map is made of these."""

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests import code_map

ROOT = Path(__file__).parent.parent


@cache
def product() -> list[Path]:
    """Return the Python files of the product and of its proof, without tests and generated code."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        ROOT / name
        for name in listed.stdout.split()
        if "_pb2" not in name and not name.startswith("tests/") and (ROOT / name).exists()
    ]


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
        for node in ast.parse(path.read_text()).body
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


def test_each_place_for_a_change_names_what_its_file_holds() -> None:
    page = code_map.PAGE.read_text()
    [table] = re.findall(r"\| to change \|.*?\n\n", page, re.DOTALL)
    places = re.findall(r"^\| .*?`([\w/]+\.py)`.*\| `([\w.]+)` \|$", table, re.MULTILINE)
    assert len(places) > 80
    absent = [
        f"{path}: {name}"
        for path, name in places
        if not re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / path).read_text())
    ]
    assert absent == []


def test_the_proof_grows_no_further() -> None:
    """The limit may only fall (docs/adr/0068-weight-of-the-proof.md)."""
    limit = 27_400
    proof = [path for path in product() if path.relative_to(ROOT).parts[0] == "chaos"]
    lines = sum(path.read_bytes().count(b"\n") for path in proof)
    assert lines <= limit
    assert lines > limit - 300, f"lower the limit: chaos/ has {lines} lines"
