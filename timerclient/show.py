"""How timerctl prints: messages of the contract as JSON with plain numbers, rows as a table."""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """Return every field of a message by its name in the contract; absent messages are None.

    Unlike the standard JSON mapping, 64-bit numbers stay numbers: scripts compare them.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is None:
        return list(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [as_dict(one) for one in value]
    return as_dict(value) if message.HasField(field.name) else None


def payload(data: bytes) -> dict[str, str]:
    """Return a payload for JSON: as text if it is UTF-8, else as base64."""
    try:
        return {"payload": data.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Return one JSON document, in letters that standard output has."""
    utf8 = (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "") == "utf8"
    return json.dumps(value, indent=indent, ensure_ascii=not utf8)


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows under headings, in aligned columns; numbers to the right."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *texts, strict=True)]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headings))]
    lines = []
    for line in [list(headings), *texts]:
        cells = [
            cell.rjust(width) if r else cell.ljust(width)
            for cell, width, r in zip(line, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return a text that stays on its line and tells the terminal nothing: escaped where needed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def instant(ms: int) -> str:
    """Return Unix milliseconds as UTC text; "-" for 0, the number for what no calendar holds."""
    try:
        moment = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if ms else "-"


def pairs(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as name=value, …; "-" if it is empty."""
    return plain(", ".join(f"{name}={value}" for name, value in sorted(mapping.items()))) or "-"


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return "-" if cell in ("", None) else plain(str(cell))
