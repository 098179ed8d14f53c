"""Options of the format "timerlog", and the columns of its views."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from timer.entries.entry_frame import Entry, EntryKind
from timer.model.units import UnixMs
from timerspark.log.segment_files import Segment

EVENT_COLUMNS: Final[Mapping[str, str]] = {
    "event": "STRING",
    "index": "BIGINT",
    "position": "INT",
    "epoch": "BIGINT",
    "time": "TIMESTAMP",
    "topic": "STRING",
    "topic_id": "BIGINT",
    "group": "STRING",
    "id": "STRING",
    "new_id": "STRING",
    "key": "STRING",
    "due": "TIMESTAMP",
    "requested": "TIMESTAMP",
    "payload": "BINARY",
    "headers": "MAP<STRING, STRING>",
    "ordering_key": "STRING",
    "priority": "INT",
    "offset": "BIGINT",
    "until": "TIMESTAMP",
    "to_topic": "STRING",
    "on_conflict": "STRING",
    "producer": "STRING",
    "sequence": "BIGINT",
    "request_id": "STRING",
    "series": "BIGINT",
    "details": "STRING",
}
"""Column of the view `events` -> its type in SQL."""
ENTRIES: Final = (
    "node STRING, life INT, index BIGINT, epoch BIGINT, kind STRING, time_ms BIGINT, crc32 BIGINT,"
    " rows INT"
)
VIEWS: Final = ("events", "entries")
OPTIONS: Final = frozenset(
    {
        *("path", "view", "columns", "node", "kind", "fail_on_loss"),
        *("index_min", "index_max", "time_min", "time_max"),
    }
)
"""In lower case, as Spark passes them on."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The filter of a reader's options; None in a field: no limit."""

    nodes: frozenset[str] | None = None
    kinds: frozenset[str] | None = None
    index_min: int = 0
    index_max: int | None = None
    time_min_ms: int = 0
    time_max_ms: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "LogFilter":
        """Return the filter of the options.

        Raises:
            ValueError: a kind is unknown, an index is not a number, or a time is not one of ISO
                8601 with a zone.
        """
        nodes, kinds = (_names(options.get(name)) for name in ("node", "kind"))
        known = {kind.name for kind in EntryKind}
        if kinds is not None and (unknown := kinds - known):
            raise ValueError(f"kind = {', '.join(sorted(unknown))}: must be of {sorted(known)}")
        bounds = {}
        for name in ("index_min", "index_max"):
            if (text := options.get(name)) is not None:
                if not text.isdecimal():
                    raise ValueError(f"{name} = {text!r}: must be an entry's index")
                bounds[name] = int(text)
        for name in ("time_min", "time_max"):
            if (text := options.get(name)) is not None:
                bounds[f"{name}_ms"] = _unix_ms(name, text)
        return cls(nodes, kinds, **bounds)

    def check_nodes(self, nodes: Collection[str]) -> None:
        """Return if all nodes of the options exist.

        Raises:
            ValueError: a node does not exist.
        """
        if self.nodes is not None and (unknown := self.nodes - {*nodes}):
            raise ValueError(f"node = {', '.join(sorted(unknown))}: must be of {sorted(nodes)}")

    def accepts_file(self, node: str, part: Segment) -> bool:
        """Whether a segment may hold an entry that the filter accepts."""
        return (self.nodes is None or node in self.nodes) and self.accepts_span(
            part.first, part.end
        )

    def accepts_span(self, first: int, end: int | None) -> bool:
        """Whether entries from `first` on, and before `end`, may have an index in the filter.

        None: the end is not known.
        """
        return (end is None or end > self.index_min) and (
            self.index_max is None or first <= self.index_max
        )

    def accepts_times(self, first: UnixMs, last: UnixMs | None) -> bool:
        """Whether entries from one time to another may have a time in the filter.

        None: the last time is not known.
        """
        return (last is None or last >= self.time_min_ms) and (
            self.time_max_ms is None or first <= self.time_max_ms
        )

    def accepts_entry(self, item: Entry) -> bool:
        """Whether the filter accepts an entry, whose node it has accepted."""
        return (
            (self.kinds is None or item.kind.name in self.kinds)
            and self.accepts_span(item.index, item.index + 1)
            and self.accepts_times(item.time_ms, item.time_ms)
        )


def _names(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(each.strip() for each in text.split(","))


def _unix_ms(name: str, text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.utcoffset() is None:
        raise ValueError(f"{name} = {text!r}: must be a time such as 2026-11-01T12:00:00Z")
    return (found - _EPOCH) // timedelta(milliseconds=1)
