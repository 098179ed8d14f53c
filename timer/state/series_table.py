"""The series of recurring timers, in columns: one row for each series.

    create --> waits --OCCURRENCES--> has a pending occurrence --it ends--> waits, number + 1
                 |                         |
                 |  planned_ms = -1        | pause, change: the occurrence is cancelled,
                 v                         v its number stays free
               finished                  paused, or waits

An occurrence ends when it fires, is cancelled or is dropped. A series that waits has no occurrence
and needs one. The leader looks at the series that wait, also at the start of its epoch. So no
occurrence can be missed, and none is doubled: an occurrence takes effect only if its series waits
for its number.

Memory: some 450 bytes for each series, besides key and payload.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import compress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, U64
from timer.model.recurrence import Misfire, SeriesSpec
from timer.model.timer_id import mix
from timer.model.units import Seq, TopicId, UnixMs

SERIES: Final = np.dtype(
    [
        ("id", "<u8"),  # 0: it was deleted
        ("topic", "<u4"),
        ("flags", "<u4"),
        ("number", "<u8"),  # occurrences that have ended
        ("last_ms", "<i8"),  # planned time of the last one
        ("seq", "<u8"),  # of the pending occurrence; 0: none
        ("due_ms", "<i8"),
        ("planned_ms", "<i8"),
        ("every_ms", "<i8"),
        ("start_ms", "<i8"),
        ("end_ms", "<i8"),
        ("max_count", "<u8"),
        ("key_size", "<u4"),
        ("payload_size", "<u4"),
        ("headers_size", "<u4"),
        ("cron_size", "<u4"),
        ("body", "<u8"),  # hash of key, payload, headers, cron and zone
    ]
)
_WORDS: Final = SERIES.itemsize // 8
assert SERIES.itemsize % 8 == 0
_RAW: Final = np.dtype((np.void, SERIES.itemsize))
"""A row without its fields: numpy copies it ten times as fast."""
MISFIRE: Final = 3
"""The bits of `flags` with the policy. The next two are flags of their own."""
PAUSED: Final = 4
FINISHED: Final = 8
CHUNK: Final = 1_024
"""Series in one element of the packed form, and in a portion of a topic's deletion."""
_KEY: Final = struct.Struct("<I")
_MASK: Final = (1 << 64) - 1
_CAPACITY: Final = 16


class SeriesView(NamedTuple):
    """One series, as it is at one moment."""

    series_id: int
    topic: TopicId
    key: bytes
    spec: SeriesSpec
    number: int
    """Occurrences that have ended: fired, cancelled or dropped."""
    last_ms: UnixMs
    """Planned time of the last one, or the time after which the series began."""
    seq: Seq
    """Of the pending occurrence. 0: none."""
    due_ms: UnixMs
    planned_ms: UnixMs
    finished: bool


class SeriesTable:
    """All series of a replica; see the module."""

    def __init__(self) -> None:
        self.next_id = 1
        self.waiting: dict[int, None] = {}
        """Ids of series that need an occurrence, in no particular order. Derived."""
        self.deferred: dict[int, None] = {}
        """Ids of those that this node cannot plan, so they are not in `waiting`. Derived: `defer`
        adds them, and they leave with the next change of the series."""
        self.by_topic: Counter[int] = Counter()
        """Number of series of each topic that has some. Derived."""
        self._rows = np.zeros(_CAPACITY, SERIES)
        self._ids = np.zeros(_CAPACITY, np.uint64)
        """The ids, ascending; those of deleted series stay until `_compact`."""
        self._hashes = np.zeros(_CAPACITY, np.uint64)
        self._changed = np.zeros(_CAPACITY, np.bool_)
        self._bodies: list[bytes] = []
        """Key, payload, headers, cron and zone, one after the other."""
        self._by_key: dict[bytes, int] = {}
        self._by_seq: dict[int, int] = {}
        self._live = 0
        self._sum = 0

    def __len__(self) -> int:
        return self._live

    @property
    def used(self) -> bool:
        """Whether there ever was a series."""
        return self.next_id > 1

    @property
    def idle(self) -> bool:
        """Whether every series has reached its end or its count."""
        rows = self._rows[: len(self._bodies)]
        return bool(((rows["id"] == 0) | (rows["flags"] & FINISHED > 0)).all())

    def behind_ms(self, now_ms: int) -> int:
        """Return the age of the oldest missed time that still has to occur; 0: there is none.

        Only series with FIRE_ALL fire more than one missed time. Left out are paused and finished
        ones, a pending occurrence that is due later, and one of a cron expression that is not
        planned yet.
        """
        rows = self._rows[: len(self._bodies)]  # by columns: a mask of whole rows copies them
        mine = rows["flags"] & (MISFIRE | PAUSED | FINISHED) == Misfire.FIRE_ALL
        pending = rows["seq"] > 0
        due = mine & pending & (rows["due_ms"] <= now_ms)
        oldest_ms = int(rows["planned_ms"].min(initial=now_ms, where=due))
        waits = np.flatnonzero(mine & ~pending)
        every, last, end, number, count = (
            rows[name][waits] for name in ("every_ms", "last_ms", "end_ms", "number", "max_count")
        )
        following = last + every
        known = (every > 0) & ((end == 0) | (following <= end)) & ((count == 0) | (number < count))
        return now_ms - int(following.min(initial=oldest_ms, where=known))

    # ---- look-ups

    def find(self, topic: int, key: bytes) -> int:
        """Return the id of the series of a topic and key; 0: there is none."""
        return self._by_key.get(_KEY.pack(topic) + key, 0)

    def view(self, series_id: int) -> SeriesView | None:
        """Return one series; None: it was deleted, or never existed."""
        place = self._place(series_id)
        return None if place < 0 else self._view(place)

    def views(self, series: Iterable[int]) -> list[SeriesView]:
        """Return those of these series that exist."""
        found = (self.view(series_id) for series_id in series)
        return [each for each in found if each is not None]

    def topics(self) -> list[int]:
        """Return the ids of the topics that have series, ascending."""
        return sorted(self.by_topic)

    def ids_of(self, topics: Sequence[int] | None, after: int, count: int) -> list[int]:
        """Return ids above `after`, ascending, at most `count`. `topics`: None for all topics."""
        first = int(self._ids[: len(self._bodies)].searchsorted(np.uint64(after), "right"))
        rows = self._rows[first : len(self._bodies)]
        there = rows["id"] > 0
        if topics is not None:
            there &= np.isin(rows["topic"], np.array(topics, np.uint32))
        ids: list[int] = rows["id"][np.flatnonzero(there)[:count]].tolist()
        return ids

    def rows_of(self, series: U64) -> tuple[npt.NDArray[np.void], npt.NDArray[np.intp]]:
        """Return copies of the rows of these series, (n,), and their places. id = 0: none."""
        n = len(self._bodies)
        if not n:
            return np.zeros(len(series), SERIES), np.zeros(len(series), np.intp)
        places = np.minimum(self._ids[:n].searchsorted(series), n - 1)
        rows = self._rows[places]
        rows["id"][rows["id"] != series] = 0
        return rows, places

    def body(self, place: int) -> bytes:
        """Return key, payload, headers, cron and zone of the series at a place."""
        return self._bodies[place]

    def _place(self, series_id: int) -> int:
        n = len(self._bodies)
        place = int(self._ids[:n].searchsorted(np.uint64(series_id)))
        return place if place < n and int(self._rows["id"][place]) == series_id > 0 else -1

    def _view(self, place: int) -> SeriesView:
        row, body = self._rows[place], self._bodies[place]
        key_end = int(row["key_size"])
        payload_end = key_end + int(row["payload_size"])
        headers_end = payload_end + int(row["headers_size"])
        cron_end = headers_end + int(row["cron_size"])
        flags = int(row["flags"])
        spec = SeriesSpec(
            every_ms=int(row["every_ms"]),
            cron=body[headers_end:cron_end].decode(),
            zone=body[cron_end:].decode(),
            start_ms=int(row["start_ms"]),
            end_ms=int(row["end_ms"]),
            max_count=int(row["max_count"]),
            misfire=Misfire(flags & MISFIRE),
            paused=bool(flags & PAUSED),
            payload=body[key_end:payload_end],
            headers=body[payload_end:headers_end],
        )
        return SeriesView(
            int(row["id"]),
            TopicId(int(row["topic"])),
            body[:key_end],
            spec,
            int(row["number"]),
            UnixMs(int(row["last_ms"])),
            Seq(int(row["seq"])),
            UnixMs(int(row["due_ms"])),
            UnixMs(int(row["planned_ms"])),
            bool(flags & FINISHED),
        )

    # ---- changes

    def add(self, topic: TopicId, key: bytes, spec: SeriesSpec, last_ms: int) -> int:
        """Add a series of a key that has none; return its id."""
        series_id, place = self.next_id, len(self._bodies)
        assert not self.find(topic, key), (topic, key)
        self._reserve(place + 1)
        self.next_id += 1
        self._live += 1
        self.by_topic[topic] += 1
        self._bodies.append(b"")
        self._ids[place] = series_id
        row = np.zeros(1, SERIES)
        row["id"], row["topic"], row["last_ms"] = series_id, topic, last_ms
        self._rows[place : place + 1] = row
        self._hashes[place] = 0
        self._by_key[_KEY.pack(topic) + key] = series_id
        self._define(place, key, spec)
        return series_id

    def alter(self, series_id: int, spec: SeriesSpec, last_ms: int) -> None:
        """Give a series without a pending occurrence another definition. `last_ms`: 0: the same."""
        place = self._place(series_id)
        assert place >= 0, series_id
        assert not self._rows["seq"][place], self._view(place)
        if last_ms:
            self._rows["last_ms"][place] = last_ms
        self._define(place, self._view(place).key, spec)

    def _define(self, place: int, key: bytes, spec: SeriesSpec) -> None:
        cron = spec.cron.encode()
        body = b"".join((key, spec.payload, spec.headers, cron, spec.zone.encode()))
        self._bodies[place] = body
        row = self._rows[place]
        row["flags"] = int(spec.misfire) | (PAUSED if spec.paused else 0)
        row["every_ms"], row["start_ms"], row["end_ms"] = spec.every_ms, spec.start_ms, spec.end_ms
        row["max_count"], row["key_size"] = spec.max_count, len(key)
        row["payload_size"], row["headers_size"] = len(spec.payload), len(spec.headers)
        row["cron_size"] = len(cron)
        row["body"] = int.from_bytes(blake2b(body, digest_size=8).digest(), "little")
        self._rows[place] = row
        self._changed[place] = True
        self._set_waiting([int(row["id"])], waits=not spec.paused)

    def defer(self, series_id: int) -> None:
        """Take a series out of `waiting` that this node cannot plan."""
        del self.waiting[series_id]
        self.deferred[series_id] = None

    def resume(self) -> None:
        """Return all deferred series to `waiting`."""
        self.waiting |= self.deferred
        self.deferred.clear()

    def _set_waiting(self, series: Sequence[int], *, waits: bool) -> None:
        """Note whether these series need an occurrence."""
        for series_id in series:
            self.deferred.pop(series_id, None)
            if waits:
                self.waiting[series_id] = None
            else:
                self.waiting.pop(series_id, None)

    def revoke(self, series_id: int) -> tuple[UnixMs, Seq] | None:
        """Forget the pending occurrence, whose number stays free; return its due time and seq."""
        place = self._place(series_id)
        seq = int(self._rows["seq"][place])
        if not seq:
            return None
        due_ms = UnixMs(int(self._rows["due_ms"][place]))
        del self._by_seq[seq]
        for name in ("seq", "due_ms", "planned_ms"):
            self._rows[name][place] = 0
        self._changed[place] = True
        self._set_waiting([series_id], waits=True)
        return due_ms, Seq(seq)

    def remove(self, series_id: int) -> None:
        """Remove a series without a pending occurrence."""
        view = self.view(series_id)
        assert view is not None, series_id
        assert not view.seq, view
        self._remove(np.array([self._place(series_id)]))

    def drop_topic(self, topic: TopicId) -> Iterator[None]:
        """Remove the series of a topic, in portions, and forget their pending occurrences."""
        rows = self._rows[: len(self._bodies)]
        ids = rows["id"][rows["topic"] == topic]
        for start in range(0, len(ids), CHUNK):
            places = self._ids[: len(self._bodies)].searchsorted(ids[start : start + CHUNK])
            self._remove(places)
            yield

    def _remove(self, places: npt.NDArray[np.intp]) -> None:
        """Remove the series at these places, and free places once most are of removed series."""
        rows = self._rows[places]
        seqs, topics, sizes = (rows[name].tolist() for name in ("seq", "topic", "key_size"))
        each = zip(places.tolist(), rows["id"].tolist(), seqs, topics, sizes, strict=True)
        for place, series_id, seq, topic, size in each:
            self.waiting.pop(series_id, None)
            self.deferred.pop(series_id, None)
            self._by_seq.pop(seq, None)
            del self._by_key[_KEY.pack(topic) + self._bodies[place][:size]]
            self.by_topic[topic] -= 1
            if not self.by_topic[topic]:
                del self.by_topic[topic]
            self._bodies[place] = b""
        self._sum = self._sum - int(np.add.reduce(self._hashes[places])) & _MASK
        self._hashes[places] = 0
        self._changed[places] = False
        self._rows[places] = np.zeros((), SERIES)
        self._live -= len(rows)
        if 2 * self._live + _CAPACITY < len(self._bodies):
            self._compact()

    def begin_occurrences(
        self, places: npt.NDArray[np.intp], seq: U64, due_ms: I64, planned_ms: I64
    ) -> None:
        """Note the new pending occurrences of the series at these places, (n,) each."""
        self._rows["seq"][places] = seq
        self._rows["due_ms"][places] = due_ms
        self._rows["planned_ms"][places] = planned_ms
        self._changed[places] = True
        ids = self._ids[places].tolist()
        self._by_seq.update(zip(seq.tolist(), ids, strict=True))
        self._set_waiting(ids, waits=False)

    def finish(self, places: npt.NDArray[np.intp]) -> None:
        """Note that the series at these places have no further occurrence."""
        self._rows["flags"][places] |= np.uint32(FINISHED)
        self._changed[places] = True
        self._set_waiting(self._ids[places].tolist(), waits=False)

    def on_ended(self, seq: U64) -> None:
        """Note timers that fired, were cancelled or were dropped: some may be occurrences."""
        if not self._by_seq:
            return
        mine = [each for each in seq.tolist() if each in self._by_seq]
        if not mine:
            return
        ids = sorted(self._by_seq.pop(each) for each in mine)
        places = self._ids[: len(self._bodies)].searchsorted(np.array(ids, np.uint64))
        rows = self._rows
        rows["number"][places] += np.uint64(1)
        rows["last_ms"][places] = rows["planned_ms"][places]
        for name in ("seq", "due_ms", "planned_ms"):
            rows[name][places] = 0
        self._changed[places] = True
        self._set_waiting(ids, waits=True)

    def on_rescheduled(self, old: U64, due_ms: I64, seq: U64) -> None:
        """Note that timers were rescheduled: the occurrence `old` is now `seq`, (n,) each."""
        if not self._by_seq:
            return
        for before, due, after in zip(old.tolist(), due_ms.tolist(), seq.tolist(), strict=True):
            if (series_id := self._by_seq.pop(before, 0)) != 0:
                self._by_seq[after] = series_id
                place = self._place(series_id)
                self._rows["seq"][place], self._rows["due_ms"][place] = after, due
                self._changed[place] = True

    # ---- digest and manifest

    def sum(self) -> int:
        """Return the order-free sum of the series' hashes, modulo 2 ** 64."""
        places = np.flatnonzero(self._changed[: len(self._bodies)])
        if len(places):
            hashes = self._hashes_of(self._rows[places])
            gain = int(np.add.reduce(hashes - self._hashes[places], dtype=np.uint64))
            self._hashes[places] = hashes
            self._changed[places] = False
            self._sum = self._sum + gain & _MASK
        return self._sum

    def recomputed_sum(self) -> int:
        """Return the same, of all series, for checkers."""
        hashes = self._hashes_of(self._rows[: len(self._bodies)])
        return int(np.add.reduce(hashes, dtype=np.uint64))

    @staticmethod
    def _hashes_of(rows: npt.NDArray[np.void]) -> U64:
        words = np.ascontiguousarray(rows).view(np.uint64).reshape(len(rows), _WORDS)
        hashes = np.zeros(len(rows), np.uint64)
        for column in words.T:
            hashes = mix(hashes ^ column)
        hashes[rows["id"] == 0] = 0
        return hashes

    def pack(self) -> list[Any]:
        """Return the fields for a manifest; nothing in them changes later."""
        n = len(self._bodies)
        chunks = [self._bodies[start : start + CHUNK] for start in range(0, n, CHUNK)]
        return [self.next_id, self._rows.view(_RAW)[:n].copy().view(np.uint64), *chunks]

    def restore(self, packed: Sequence[Any]) -> None:
        """Put back the fields that a manifest holds, into an empty table."""
        self.next_id, rows, *chunks = packed
        self._bodies = [body for chunk in chunks for body in chunk]
        n = len(self._bodies)
        self._reserve(n)
        self._rows[:n] = np.frombuffer(rows, SERIES)
        self._ids[:n] = self._rows["id"][:n]
        self._changed[:n] = True
        self._compact()
        self._live = n = len(self._bodies)
        rows = self._rows[:n]
        topics, sizes = rows["topic"].tolist(), rows["key_size"].tolist()
        ids, seqs, flags = rows["id"].tolist(), rows["seq"].tolist(), rows["flags"].tolist()
        named = zip(topics, self._bodies, sizes, strict=True)
        keys = [_KEY.pack(topic) + body[:size] for topic, body, size in named]
        self._by_key = dict(zip(keys, ids, strict=True))
        self.by_topic = Counter(topics)
        self._by_seq = {seq: each for seq, each in zip(seqs, ids, strict=True) if seq}
        state = zip(ids, seqs, flags, strict=True)
        self.waiting = {
            each: None for each, seq, flag in state if not seq and not flag & (PAUSED | FINISHED)
        }

    def _compact(self) -> None:
        """Free the places of removed series. The indexes hold ids, so they stay."""
        lives = self._rows["id"][: len(self._bodies)] > 0
        self._bodies = [*compress(self._bodies, lives.tolist())]
        n = len(self._bodies)
        for column in (self._rows.view(_RAW), self._ids, self._hashes, self._changed):
            column[:n] = column[: len(lives)][lives]

    def _reserve(self, size: int) -> None:
        if size <= len(self._rows):
            return
        old, size = len(self._rows), max(size, 2 * len(self._rows))
        rows, self._rows = self._rows.view(_RAW), np.zeros(size, SERIES)
        self._rows.view(_RAW)[:old] = rows
        self._ids = np.concatenate([self._ids, np.zeros(size - old, np.uint64)])
        self._hashes = np.concatenate([self._hashes, np.zeros(size - old, np.uint64)])
        self._changed = np.concatenate([self._changed, np.zeros(size - old, np.bool_)])
