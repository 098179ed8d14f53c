"""Dead letters: messages that failed too often, on their way to a topic of their own and back.

    topic ──MOVE──► dead-letter topic, group `dead-letters` ──MOVE (redrive)──► topic
            + headers that say what it was                    - those headers

A dead letter that dies again, in a group of its own topic, keeps the headers of its first death:
they are put off, `prior-dead-letter-…`, and those of one before that `prior-prior-…`. A redrive
takes the newest away and brings back those before, so that a letter goes home step by step.

A MOVE (timer/entries/payloads.py) acks a message in one place and makes it a new one in the other,
in one
op: it is in one of them, whatever fails. It carries the bytes: a replica may have them on disk
only, and applying reads no file. Pure functions; who calls them is the leader
(timer/leader/groups/group_dispatch.py).
"""

from collections.abc import Callable, Mapping
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

GROUP: Final = "dead-letters"
"""The group that every dead-letter topic has from its first message on: what it holds unacked is
what a redrive takes. So nothing is let go before somebody looked at it."""
REASON: Final = "dead-letter-reason"
TOPIC: Final = "dead-letter-topic"
FROM_GROUP: Final = "dead-letter-group"
TIMER_ID: Final = "dead-letter-timer-id"
OFFSET: Final = "dead-letter-offset"
ATTEMPTS: Final = "dead-letter-attempts"
HEADERS: Final = (REASON, TOPIC, FROM_GROUP, TIMER_ID, OFFSET, ATTEMPTS)
PRIOR: Final = "prior-"
"""Before the name of a header of an earlier death, once for each since."""
DEATHS_MAX: Final = 8
"""A letter tells of so many, the newest: one that goes in circles must not grow for ever."""
NACKED: Final = "nacked"
LEASE_ENDED: Final = "lease ended"

Edit = Callable[[dict[str, str], int], dict[str, str]]
"""A message's headers and its place among those that move -> its headers from then on."""


def topic_of(topic: str, group: str, wanted: str = "") -> str:
    """Return the name of the topic that a group's dead letters go to."""
    return wanted or f"{topic}.{group}.dead"


def bury(group: Group, topic: str, queue: Queue, offsets: U64, due_ms: UnixMs, salt: int) -> Move:
    """Return the op that makes dead letters of messages, which are at hand.

    `due_ms` is one that has been read: they fire as the op is applied.
    """
    rows, bufs = _rows(queue, offsets)
    raw = timer_id.encode(rows["due_ms"], rows["seq"], salt)
    attempts = group.failures(offsets).tolist()
    nacked = (group.not_before(offsets) > 0).tolist()

    def marked(headers: dict[str, str], at: int) -> dict[str, str]:
        return _put_off(headers) | {
            REASON: NACKED if nacked[at] else LEASE_ENDED,
            TOPIC: topic,
            FROM_GROUP: group.name,
            TIMER_ID: timer_id.to_text(raw[at * timer_id.SIZE : (at + 1) * timer_id.SIZE]),
            OFFSET: str(int(offsets[at])),
            ATTEMPTS: str(attempts[at]),
        }

    to = topic_of(topic, group.name, group.settings.dead_letter_topic)
    body = _encode(rows, bufs, due_ms, marked)
    return Move(Op.MOVE, group.topic, group.group_id, offsets, to, GROUP, body)


def redrive(
    group: Group, queue: Queue, offsets: U64, due_ms: UnixMs, goes: Callable[[str], bool]
) -> list[Move]:
    """Return the ops that send dead letters back, one for each topic that they came from.

    Anybody may write such headers: `goes` tells to which topic something may go. What says of no
    such topic that it came from there is in none of the ops.
    """
    rows, bufs = _rows(queue, offsets)
    places: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        source = _headers(row, bufs).get(TOPIC)
        if source and goes(source):
            places.setdefault(source, []).append(at)

    def restored(headers: dict[str, str], at: int) -> dict[str, str]:
        del at
        return _brought_back(headers)

    moves = []
    for to, mine in places.items():
        body = _encode(rows[mine], bufs, due_ms, restored)
        moves.append(Move(Op.MOVE, group.topic, group.group_id, offsets[mine], to, "", body))
    return moves


def _put_off(headers: dict[str, str]) -> dict[str, str]:
    """Return headers in which nothing is said of the newest death, but all of those before it."""
    return {
        PRIOR + name if deaths else name: value
        for name, value in headers.items()
        if (deaths := _deaths_at(name)) < DEATHS_MAX
    }


def _brought_back(headers: dict[str, str]) -> dict[str, str]:
    """Return headers without those of the newest death; undoes `_put_off`."""
    return {
        name.removeprefix(PRIOR) if _deaths_at(name) else name: value
        for name, value in headers.items()
        if name not in HEADERS
    }


def _deaths_at(name: str) -> int:
    """Return of which death a header tells: 1 is the newest; 0: of none."""
    of = name
    while of.startswith(PRIOR):
        of = of.removeprefix(PRIOR)
    return 1 + (len(name) - len(of)) // len(PRIOR) if of in HEADERS else 0


def _rows(queue: Queue, offsets: U64) -> tuple[RowArray, Buffers]:
    """Return messages that are at hand as rows with buffers of their own numbers."""
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
