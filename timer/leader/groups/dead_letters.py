"""Dead letters: messages that failed too often, on their way to a topic of their own and back.

    topic ──MOVE──► dead-letter topic, group `dead-letters` ──MOVE (redrive)──► topic
            + headers that describe its death                 - those headers

A dead letter may die again, in a group of its own topic. The headers of its earlier death then get
the prefix `prior-`, and those of a death before that `prior-prior-`. A redrive removes the newest
headers and one prefix of the others. A letter thus returns step by step.

A MOVE (timer/entries/payloads.py) is one op that acks a message in one topic and makes it a new one
in the other. After any failure the message is in exactly one of them. The op carries the bytes,
because a replica may have them only on disk, and apply reads no file.

Pure functions, called by the leader (timer/leader/groups/group_dispatch.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from timer.entries.payloads import Move, Op
from timer.model import timer_id
from timer.model.columns import (
    ROW,
    U64,
    Binary,
    Buffers,
    Part,
    RowArray,
    decode_headers,
    encode_headers,
    encode_schedule,
    gather,
)
from timer.model.units import ProducerId, UnixMs
from timer.ready.group import Group
from timer.ready.queue import Queue
from timer.ready.topic import Topic

GROUP: Final = "dead-letters"
"""Group that every dead-letter topic has from its first message on. A redrive moves the messages
that the group has not acked. A dead letter is therefore kept until it is acked or redriven."""
REASON: Final = "dead-letter-reason"
TOPIC: Final = "dead-letter-topic"
FROM_GROUP: Final = "dead-letter-group"
TIMER_ID: Final = "dead-letter-timer-id"
OFFSET: Final = "dead-letter-offset"
ATTEMPTS: Final = "dead-letter-attempts"
DETAIL: Final = "dead-letter-detail"
"""Text of the nack that was the last failure, or of the rejection by a worker's handler."""
HEADERS: Final = (REASON, TOPIC, FROM_GROUP, TIMER_ID, OFFSET, ATTEMPTS, DETAIL)
"""A worker writes the same into its letters (timerclient/worker/rejected_letters.py)."""
PRIOR: Final = "prior-"
"""Prefix of a header of an earlier death, once for each death since."""
DEATHS_MAX: Final = 8
"""Deaths described in the headers, the newest ones: a letter in a loop must not grow for ever."""
NACKED: Final = "nacked"
LEASE_ENDED: Final = "lease ended"

Edit = Callable[[dict[str, str], int], dict[str, str]]
"""(A message's headers, its place among those that move) -> its new headers."""


def topic_of(topic: str, group: str, wanted: str = "") -> str:
    """Return the name of a group's dead-letter topic: `wanted`, or the default if it is empty."""
    return wanted or f"{topic}.{group}.dead"


def sends_to(source: Topic, group: str, letters: str) -> bool:
    """Return whether `source` has the group, and its dead letters go or went to `letters`.

    A name alone proves nothing: `a.b.c.dead` is the default of `c` of `a.b`, and of `b.c` of `a`.
    """
    there = source.groups.get(group)
    if there is None:
        return False
    wanted = there.settings.dead_letter_topic
    return letters in (wanted, topic_of(source.name, group))


def move_letters(  # noqa: PLR0913 -- the source of each header
    group: Group,
    topic: str,
    queue: Queue,
    offsets: U64,
    due_ms: UnixMs,
    salt: int,
    details: Sequence[str],
) -> Move:
    """Return the op that makes dead letters of messages, which must be in memory.

    `due_ms` must not be after the read time, so that they fire when the op is applied. `details`:
    of each message, see NackDetails.
    """
    rows, bufs = _rows(queue, offsets)
    raw = timer_id.encode(rows["due_ms"], rows["seq"], salt)
    attempts = group.failures(offsets).tolist()
    nacked = (group.not_before_ms(offsets) > 0).tolist()

    def with_death(headers: dict[str, str], at: int) -> dict[str, str]:
        death = {
            REASON: NACKED if nacked[at] else LEASE_ENDED,
            TOPIC: topic,
            FROM_GROUP: group.name,
            TIMER_ID: timer_id.to_text(raw[at * timer_id.SIZE : (at + 1) * timer_id.SIZE]),
            OFFSET: str(int(offsets[at])),
            ATTEMPTS: str(attempts[at]),
        }
        if nacked[at] and details[at]:
            death[DETAIL] = details[at]
        return _with_older_deaths(headers) | death

    to = topic_of(topic, group.name, group.settings.dead_letter_topic)
    body = _encode(rows, bufs, due_ms, with_death)
    return Move(Op.MOVE, group.topic, group.group_id, offsets, to, GROUP, body)


def redrive(
    group: Group, queue: Queue, offsets: U64, due_ms: UnixMs, is_allowed: Callable[[str, str], bool]
) -> list[Move]:
    """Return the ops that move dead letters back, one for each topic of origin.

    Any client may write such headers, so `is_allowed` decides whether a letter may go back to a
    topic and group. Letters whose headers name no allowed origin are left out.
    """
    rows, bufs = _rows(queue, offsets)
    places: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        headers = _headers(row, bufs)
        source = headers.get(TOPIC, "")
        if is_allowed(source, headers.get(FROM_GROUP, "")):
            places.setdefault(source, []).append(at)

    moves = []
    for to, mine in places.items():
        body = _encode(rows[mine], bufs, due_ms, lambda headers, _: _without_death(headers))
        moves.append(Move(Op.MOVE, group.topic, group.group_id, offsets[mine], to, "", body))
    return moves


def _with_older_deaths(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with one more prefix: the newest death becomes an earlier one."""
    return {
        PRIOR + name if deaths else name: value
        for name, value in headers.items()
        if (deaths := _deaths_at(name)) < DEATHS_MAX
    }


def _without_death(headers: dict[str, str]) -> dict[str, str]:
    """Return headers without those of the newest death; the inverse of `_with_older_deaths`."""
    return {
        name.removeprefix(PRIOR) if _deaths_at(name) else name: value
        for name, value in headers.items()
        if name not in HEADERS
    }


def _deaths_at(name: str) -> int:
    """Return the death that a header describes: 1 is the newest. 0: an ordinary header."""
    of = name
    while of.startswith(PRIOR):
        of = of.removeprefix(PRIOR)
    return 1 + (len(name) - len(of)) // len(PRIOR) if of in HEADERS else 0


def _rows(queue: Queue, offsets: U64) -> tuple[RowArray, Buffers]:
    """Return messages in memory as rows, with renumbered buffers."""
    rows, bufs = [np.empty(0, ROW)], dict[int, bytes | memoryview]()
    for page, at in queue.slices(offsets):
        mine = page.rows[at.astype(np.int64)]  # a copy
        numbers = np.unique(mine["buf"]).tolist()
        first = len(bufs)
        bufs |= {first + place: page.bufs[number] for place, number in enumerate(numbers)}
        mine["buf"] = first + np.searchsorted(numbers, mine["buf"])
        rows.append(mine)
    return np.concatenate(rows), bufs


def _headers(row: np.void, bufs: Mapping[int, bytes | memoryview]) -> dict[str, str]:
    start, size = int(row["headers_start"]), int(row["headers_size"])
    return decode_headers(bytes(bufs[int(row["buf"])][start : start + size])) if size else {}


def _encode(rows: RowArray, bufs: Buffers, due_ms: UnixMs, edit: Edit) -> bytes:
    headers = [encode_headers(edit(_headers(row, bufs), at)) for at, row in enumerate(rows)]
    part = Part(
        producer_id=ProducerId(0),
        sequence=0,
        due_ms=np.full(len(rows), due_ms, np.int64),
        requested_ms=rows["requested_ms"].astype(np.int64),
        topic=np.zeros(len(rows), np.uint32),
        payload=gather(rows, bufs, "payload"),
        key=gather(rows, bufs, "key") if rows["key_size"].any() else None,
        headers=Binary.of(headers) if any(headers) else None,
    )
    return b"".join(encode_schedule([part]))
