"""Options of the format "timers", checked where the query is planned."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from timerclient.rows.rows import UINT64_MAX, conflict_mode
from timerclient.values.cluster_url import VARIABLE
from timerclient.values.errors import InvalidRequest

MESSAGE_COLUMNS: Final[Mapping[str, str]] = {
    "topic": "STRING",
    "offset": "BIGINT",
    "id": "STRING",
    "key": "STRING",
    "payload": "BINARY",
    "headers": "MAP<STRING, STRING>",
    "ordering_key": "STRING",
    "priority": "INT",
    "due": "TIMESTAMP",
    "requested": "TIMESTAMP",
    "fired_at": "TIMESTAMP",
}
"""Column of a reader -> its type in SQL."""
EARLIEST: Final = "earliest"
LATEST: Final = "latest"
PARTITION_ROWS: Final = 100_000
"""Messages of one task, by default."""
REQUEST_ROWS_MAX: Final = 16_384
"""Rows of one request. The cluster keeps the answers of all that may be on their way."""
REQUEST_BYTES_MAX: Final = 4 << 20
"""Bytes of the payloads and headers of one request, if a single row has no more."""
_KNOWN: Final = frozenset(
    {
        *("cluster", "topic", "path", "timeout", "columns", "job_id"),
        *("on_conflict", "fail_on_conflict", "rows_per_request", "bytes_per_request"),
        *("checkpointlocation", "queryname"),  # Spark's own, of streams
        *("start_offset", "end_offset", "rows_per_partition", "rows_per_batch", "fail_on_loss"),
    }
)


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """The options of one reader or writer."""

    cluster: str
    """A URL, or "host:port,host:port"."""
    topic: str
    """Empty: a writer's rows have the column `topic`."""
    timeout_s: float
    """Seconds of each call, failovers included."""
    columns: tuple[str, ...]
    start_offset: int | None
    """None: the oldest message that the topic keeps."""
    end_offset: int | None
    """None: the messages that have fired when the query is planned."""
    from_latest: bool
    """A new stream begins with messages that fire after its start."""
    rows_per_partition: int
    rows_per_batch: int | None
    """None: no limit."""
    fail_on_loss: bool
    """A query fails if messages in its range were deleted."""
    job_id: str
    """Name of a write that may be repeated; empty: each write is another one."""
    on_conflict: str
    fail_on_conflict: bool
    """A write fails at its end if rows were not scheduled for their keys."""
    rows_per_request: int
    bytes_per_request: int
    """Bytes of payloads and headers. A row with more is a request of its own."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "FormatOptions":
        """Return the options of a query.

        Raises:
            InvalidRequest: An option is unknown, or its value is out of range.
        """
        given = {name.lower(): text for name, text in options.items()}
        for name, text in given.items():
            if name not in _KNOWN:
                limit = f"is no option; one of {', '.join(sorted(_KNOWN))} is"
                raise InvalidRequest.of(name, text, limit)
        cluster = given.get("cluster") or os.environ.get(VARIABLE, "")
        if not cluster:
            limit = f"must be a URL or host:port,host:port; its default is ${VARIABLE}"
            raise InvalidRequest.of("cluster", cluster, limit)
        topic, path = (given.get(name, "") for name in ("topic", "path"))
        if topic and path and topic != path:
            raise InvalidRequest.of("topic", topic, f"must be the path {path!r}, or not be given")
        start, end = (given.get(f"{name}_offset") for name in ("start", "end"))
        batch = given.get("rows_per_batch")
        conflict_mode(conflict := given.get("on_conflict", "reject"))
        return cls(
            cluster=cluster,
            topic=topic or path,
            timeout_s=float(_whole("timeout", given.get("timeout", "60"), 1, 3_600)),
            columns=columns_of(given.get("columns"), MESSAGE_COLUMNS),
            start_offset=None if start in (None, EARLIEST, LATEST) else _offset("start", start),
            end_offset=None if end in (None, LATEST) else _offset("end", end),
            from_latest=start == LATEST,
            rows_per_partition=_whole(
                "rows_per_partition", given.get("rows_per_partition", str(PARTITION_ROWS)), 1
            ),
            rows_per_batch=None if batch is None else _whole("rows_per_batch", batch, 1),
            fail_on_loss=is_true("fail_on_loss", given.get("fail_on_loss", "true")),
            job_id=given.get("job_id", ""),
            on_conflict=conflict,
            fail_on_conflict=is_true("fail_on_conflict", given.get("fail_on_conflict", "true")),
            rows_per_request=_at_most("rows_per_request", given, REQUEST_ROWS_MAX),
            bytes_per_request=_at_most("bytes_per_request", given, REQUEST_BYTES_MAX),
        )

    def need_topic(self) -> str:
        """Return the topic that a reader reads.

        Raises:
            InvalidRequest: None is named.
        """
        if not self.topic:
            raise InvalidRequest.of("topic", self.topic, 'must be named, as in load("orders")')
        return self.topic


def _offset(name: str, text: str | None) -> int:
    return _whole(f"{name}_offset", text or "", 0)


def _at_most(name: str, given: Mapping[str, str], most: int) -> int:
    """Return the value of an option from 1 to `most`, which is its default."""
    return _whole(name, given.get(name, str(most)), 1, most)


def _whole(field: str, text: str, least: int, most: int = UINT64_MAX) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InvalidRequest.of(field, text, f"must be a whole number, {least} to {most}")
    return int(text)


def is_true(field: str, text: str) -> bool:
    """Return the value of an option that is true or false.

    Raises:
        InvalidRequest: It is neither.
    """
    if text.lower() not in ("true", "false"):
        raise InvalidRequest.of(field, text, "must be true or false")
    return text.lower() == "true"


def columns_of(text: str | None, known: Collection[str]) -> tuple[str, ...]:
    """Return the columns of the option `columns`; None: all known ones.

    Raises:
        InvalidRequest: A name is unknown, or occurs twice.
    """
    if text is None:
        return tuple(known)
    names = tuple(each.strip() for each in text.split(","))
    for name in names:
        if name not in known or names.count(name) > 1:
            limit = f"must be different columns of {', '.join(known)}"
            raise InvalidRequest.of("columns", text, limit)
    return names
