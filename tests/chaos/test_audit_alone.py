"""The audit without this project's other packages: as docs/audit.md has spark-submit use it."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
RECIPE: Final = re.compile(r"python -m zipfile -c audit\.zip (.+)\n")
NEEDS: Final = re.compile(r"\*\*Python\*\* on .+ needs (.+?);", re.DOTALL)
OURS: Final = "timer-cluster"
BROUGHT: Final = {
    "py4j",
    "python-dateutil",
    "pytz",
    "setuptools",
    "six",
    "typing_extensions",
    "tzdata",
}
"""What these need in turn."""
IMPORTS: Final = """
import importlib, json, pkgutil, sys

OURS = {"bench", "cluster", "deploy", "replication", "tests", "timerclient", "timerfake"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"{name} is in no archive")

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import chaos.audit.command
import chaos.audit as audit, chaos.oracle as oracle
for package in (audit, oracle):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(json.dumps([audit.__file__, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.mark.parametrize("project", ["pyproject.toml", "deploy/packages/server.toml"])
def test_wheels_have_the_queries_and_pages_of_the_audit(project: str) -> None:
    patterns = tomllib.loads((ROOT / project).read_text())["tool"]["setuptools"]["package-data"][
        "*"
    ]
    read = [
        *ROOT.glob("chaos/**/*.sql"),
        *ROOT.glob("chaos/**/*.html"),
        *ROOT.glob("chaos/**/*.css"),
    ]
    assert read
    assert [path for path in read if not any(path.match(each) for each in patterns)] == []


def test_archive_of_the_recipe_needs_what_the_recipe_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/audit.md").read_text()
    recipe, needs = RECIPE.search(text), NEEDS.search(text)
    assert recipe is not None
    assert needs is not None
    with zipfile.ZipFile(tmp_path / "audit.zip", "w") as archive:
        for folder in recipe[1].split():
            for path in (ROOT / folder).rglob("*"):
                if path.suffix not in (".pyc", ".md"):
                    archive.write(path, path.relative_to(ROOT))
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "audit.zip")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    where, modules = json.loads(done.stdout)
    assert where.startswith(str(tmp_path)), "of the archive"
    distributions = packages_distributions()
    needed = {name for module in modules for name in distributions.get(module, [])} - {OURS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    audit = {re.split(r"[<>=]", each)[0] for each in project["optional-dependencies"]["audit"]}
    assert audit <= needed
    said = {*re.findall(r"`([\w-]+)`", needs[1])}
    assert said == audit - {"pyspark"}, "pyspark is Spark's own there"
    assert needed - audit <= BROUGHT
