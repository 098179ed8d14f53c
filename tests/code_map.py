"""ARCHITECTURE.md's code map, made of the first paragraph of each folder's `__init__.py`.

`python -m tests.code_map` writes the map; `--check` exits 1 if the page's map is not current.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.parsing import parsed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
PACKAGES = (
    "timer",
    "replication",
    "cluster",
    "timerclient",
    "timerfake",
    "timerspark",
    "pyspark_timers",
    "pyspark_timerlog",
    "deploy",
    "chaos",
    "bench",
)
BLOCK = re.compile(r"(?<=<!-- code map -->\n```\n).*?(?=```)", re.DOTALL)


def folders() -> list[Path]:
    """Return the folders of all packages with Python files, in the tree's order."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {Path(name).parent for name in listed.stdout.split() if name.endswith(".py")}
    whole = {parent for each in found for parent in (each, *each.parents)} - {Path()}
    order = {name: at for at, name in enumerate(PACKAGES)}
    return sorted(
        (each for each in whole if each.name != "proto"),
        key=lambda each: (order[each.parts[0]], each.parts),
    )


def door(folder: Path) -> str:
    """Return the first paragraph of a folder's `__init__.py`, which describes its contents."""
    file = ROOT / folder / "__init__.py"
    text = ast.get_docstring(parsed(file.read_text())) if file.exists() else None
    return " ".join((text or "").split("\n\n")[0].split())


def code_map() -> str:
    """Return the map: one line per folder."""
    lines = []
    for folder in folders():
        name = "  " * (len(folder.parts) - 1) + folder.name + "/"
        lines.append(f"{name:18}{door(folder)}\n")
    return "".join(lines)


def main() -> None:
    """Write the map into ARCHITECTURE.md, or check it."""
    page = PAGE.read_text()
    current = BLOCK.sub(lambda _: code_map(), page)
    if "--check" not in sys.argv:
        PAGE.write_text(current)
    elif current != page:
        sys.exit("ARCHITECTURE.md's code map is not current: make fmt")


if __name__ == "__main__":
    main()
