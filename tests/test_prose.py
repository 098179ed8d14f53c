"""Prose is plain: documents and docstrings keep three measures, folder by folder.

A clause used as a noun ("what was promised", "who leads") makes a reader look for its subject.
Long sentences and nobody, somebody, anybody, everybody do so, too. The limits are ceilings that
only fall. A text can keep them and still be dark: reread it as a newcomer.
"""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.parsing import parsed, statements

ROOT = Path(__file__).parent.parent
CLAUSES = {"what", "whatever", "who", "whoever", "whom", "whose"}
BODIES = {"nobody", "somebody", "anybody", "everybody"}
WORDS_PER_SENTENCE = 30


@dataclass(frozen=True)
class Limit:
    """Highest values of the measures."""

    clauses: float
    """Per 1,000 words."""
    bodies: float = 0.0
    """Per 1,000 words."""
    long_percent: float = 5.0
    """Sentences of more than 30 words."""


LIMITS = {
    "documents": Limit(3, 0.1),
    "docs/adr": Limit(2),
    "timerclient": Limit(2),
    "timer": Limit(2),
    "replication": Limit(2),
    "cluster": Limit(2),
    "timerfake": Limit(2),
    "deploy": Limit(3),
    "bench": Limit(2),
    "chaos": Limit(5.3, 0.6),
}
"""Lower a limit when a group is better; never raise one."""


def docstrings(path: Path) -> str:
    """Return all docstrings of a module, those of attributes included."""
    return "\n\n".join(
        str(node.value.value)
        for node in statements(parsed(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def prose(path: Path) -> str:
    """Return the sentences of a file, without code and tables' rules."""
    text = path.read_text() if path.suffix == ".md" else docstrings(path)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|---"))


def measured(text: str) -> Limit:
    """Return the measures of a text."""
    words = [word.lower() for word in re.findall(r"[A-Za-z']+", text)]
    sentences = [
        len(re.findall(r"[A-Za-z']+", each))
        for each in re.split(r"(?<=[.!?])\s+|\n\s*\n|\|", text)
        if len(each.split()) > 2
    ]
    return Limit(
        clauses=1000 * sum(word in CLAUSES for word in words) / max(len(words), 1),
        bodies=1000 * sum(word in BODIES for word in words) / max(len(words), 1),
        long_percent=100
        * sum(length > WORDS_PER_SENTENCE for length in sentences)
        / max(len(sentences), 1),
    )


def texts() -> Iterator[tuple[str, Path]]:
    """Yield the group and the path of each text."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        if "_pb2" in name or name.startswith("tests/") or not (ROOT / name).exists():
            continue
        if name.endswith(".md"):
            yield ("docs/adr" if name.startswith("docs/adr/") else "documents"), ROOT / name
        elif (group := name.split("/")[0]) in LIMITS:
            yield group, ROOT / name


@cache
def groups() -> dict[str, str]:
    """Return the prose of each group."""
    found = defaultdict(list)
    for group, path in texts():
        found[group].append(prose(path))
    return {group: "\n\n".join(parts) for group, parts in found.items()}


@pytest.mark.parametrize("group", LIMITS)
def test_prose_is_plain(group: str) -> None:
    limit, is_ = LIMITS[group], measured(groups()[group])
    assert is_.clauses <= limit.clauses
    assert is_.bodies <= limit.bodies
    assert is_.long_percent <= limit.long_percent


def test_measures_tell_plain_from_dark() -> None:
    dark = "What was said of whom nobody knows. " + "Whoever asks is told so " * 9 + "."
    assert measured(dark).clauses > 100
    assert measured(dark).bodies > 10
    assert measured(dark).long_percent == 50
    assert measured("The leader appends an entry. Followers apply it.") == Limit(0, 0, 0)
