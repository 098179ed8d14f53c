"""Hook of mkdocs: adds pages from outside docs/, adapts lists, and links files of the site only."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[2]
OUTSIDE: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "chaos/TRACK_RECORD.md": "track-record.md",
}
"""Pages of the repository -> pages of the site."""
LINK: Final = re.compile(r"\[([^\]]*)\]\(([^)#\s:]*)(#[^)\s]*)?\)")
ITEM: Final = re.compile(r"(?:[-*]|\d\.) +")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def with_lists(markdown: str) -> str:
    """Return a page with lists as mkdocs reads them: a blank line before, four columns within."""
    lines: list[str] = []
    width, fenced, apart = 0, False, True
    for line in markdown.split("\n"):
        item = None if fenced else ITEM.match(line)
        within = bool(width) and line.startswith(" " * width)
        if item:
            lines += [""] if apart else []
            width, apart = len(item[0]), False
        elif not within:
            apart = True
            width = 0 if line else width
        fenced ^= line.lstrip().startswith("```")
        lines.append("    " + line[width:] if within else line)
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page with links to the site's files, and with the names of all other files."""
    where = page.file.src_uri
    source = next((each for each, named in OUTSIDE.items() if named == where), f"docs/{where}")

    def linked(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if not link:
            return match[0]
        target = normpath(str(PurePosixPath(source).parent / link))
        target = "docs/adr/README.md" if target == "docs/adr" else target
        if target in OUTSIDE:
            inside = OUTSIDE[target]
        elif target.startswith("docs/") and (ROOT / target).is_file():
            inside = target.removeprefix("docs/")
        else:
            return text if text.startswith("`") else f"`{text}`"
        return f"[{text}]({relpath(inside, str(PurePosixPath(where).parent))}{anchor})"

    return LINK.sub(linked, with_lists(markdown))
