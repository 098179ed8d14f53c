"""Plain timers of a part of a run, found by columns with numpy, without Spark.

A timer is plain if all of this holds:

    asked    requested once, and answered SCHEDULED with an id. It has no key, or a key that no
             other request names
    log      there once, with that id and as answered. It fired, and not before it was due. No node
             disputes its entries. No cancel or reschedule names it
    given    delivered as the log has it, once to each group that must receive it, and surely before
             its ack. Its acks are in the log, and it expired in no group

By the rules of verdict.py a plain timer is `ok`. Any other timer is *doubtful*, and is judged by
those rules. This test may doubt a correct timer, and never passes a wrong one. So it has few cases,
and a timer costs a microsecond.

A part holds all rows of some marks. One join of the rules is not by mark: a delivery may name the
seq of a plain timer with another mark. Such seqs are returned beside the doubtful marks. The caller
then judges again, with these seqs added to `Facts.named`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timer.model.columns import I64

STRETCH_BITS: Final = 12
"""Acks are summed up per stretch of 2^12 queue offsets."""
TICK_MS_MAX: Final = 1_000
"""The longest tick of a node. Due times are rounded up to it (timing.tick_ms); it is not logged."""
_NULL: Final = -(1 << 63)
_MAX: Final = (1 << 63) - 1

ASKED: Final = (
    *("mark", "topic", "outcome", "asked_due_ms", "id", "key", "told", "existing_seq"),
    *("answered_due_ms", "answered_seq", "least_due_ms", "most_due_ms"),
)
LOG: Final = (
    *("mark", "seq", "topic", "due_ms", "schedule_index", "scheduled_at_ms", "end", "end_index"),
    *("end_epoch", "ended_at_ms", "queue_offset", "other_seq", "old_due_ms"),
)
GIVEN: Final = (
    *("mark", "seq", "topic", "group", "queue_offset", "epoch", "attempt", "due_ms"),
    *("fired_at_ms", "received_ms"),
)
VERDICTS: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("verdict", "id")),
        *((name, pa.int64()) for name in ("mark", "seq")),
        ("topic", pa.string()),
        *((name, pa.int64()) for name in ("due_ms", "asked_due_ms")),
        ("outcome", pa.string()),
        ("copies", pa.int64()),
        *((name, pa.string()) for name in ("end", "key", "told")),
        *((name, pa.int64()) for name in ("other_seq", "old_due_ms", "scheduled_at_ms")),
        *((name, pa.int64()) for name in ("ended_at_ms", "end_epoch", "queue_offset")),
        *((name, pa.int64()) for name in ("deliveries", "groups", "received_ms")),
        ("from_topic", pa.string()),
    ]
)
"""The columns of the verdict table."""
DOUBTS: Final = pa.schema([("mark", pa.int64()), ("seq", pa.int64())])
"""A row has either a doubtful mark, or a seq that was delivered with a mark of another timer."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the whole run, the same for all parts."""

    starts: Mapping[str, I64]
    """Topic -> the first queue offset of each group that was read, in ascending order. A timer of
    another topic is doubtful."""
    acked: pa.Table
    """The lowest epoch and attempts of the acks of a stretch: topic group stretch ack_epoch
    attempts."""
    named: I64
    """Seqs that a client named, or received in another answer than a schedule's."""
    doubted: pa.Table
    """Messages that expired, or with a confirmed ack that is not in the log: topic queue_offset."""
    disputed: I64
    """Indexes of entries that differ between nodes."""
    clock_error_ms: int | None
    """The greatest difference between the clients' clocks and the cluster's; None: unknown."""


class Sifted(NamedTuple):
    """The verdicts of the plain timers (VERDICTS), and the doubtful ones (DOUBTS)."""

    plain: pa.Table
    doubts: pa.Table


class _Table:
    """A part's rows of one table. A column of integers is made contiguous once, and kept."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._ints: dict[str, I64] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def ints(self, name: str) -> I64:
        """Return a column of integers; _NULL in place of null."""
        if name not in self._ints:
            column = self._table[name].cast(pa.int64())
            column = pc.fill_null(column, _NULL) if column.null_count else column
            self._ints[name] = column.to_numpy()
        return self._ints[name]

    def codes(self, name: str, values: pa.Array) -> I64:
        """Return the position of each text in `values`; -1: it is not in `values`, or null."""
        codes = np.full(len(self), -1, np.int64)
        start = 0
        for chunk in self._table[name].chunks:
            texts = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            place = pc.fill_null(pc.index_in(texts.dictionary, values, skip_nulls=True), -1)
            known = np.append(place.to_numpy(), -1)  # the last one is for nulls
            at = pc.fill_null(texts.indices, len(known) - 1).to_numpy()
            codes[start : start + len(at)] = known[at]
            start += len(at)
        return codes

    def equals(self, name: str, value: str) -> Mask:
        """Return a mask: whether the text equals `value`."""
        mask: Mask = self.codes(name, pa.array([value])) == 0
        return mask

    def none(self, name: str) -> Mask:
        """Return a mask: whether the value is null."""
        column = self._table[name]
        if column.null_count == len(column):
            return np.ones(len(column), np.bool_)
        mask: Mask = pc.is_null(column).to_numpy()
        return mask

    def texts(self, name: str) -> pa.Array:
        """Return the distinct texts of a column."""
        return pc.unique(self._table[name]).cast(pa.string())

    def take(self, name: str, rows: I64) -> pa.Array:
        """Return the values of a column at some rows."""
        return self._table[name].combine_chunks().take(pa.array(rows))


def sifted(asks: pa.Table, log: pa.Table, given: pa.Table, crowded: I64, facts: Facts) -> Sifted:
    """Judge a part: all rows of some marks, with the columns ASKED, LOG and GIVEN.

    Text columns may be dictionaries. `crowded`: marks whose keys another request names, too.
    """
    asked, fates, told = tables = _Table(asks), _Table(log), _Table(given)
    topics = pa.array([*facts.starts], pa.string())
    lonely = ~np.isin(asked.ints("mark"), crowded)
    ask, fate = _asked_and_fired(asked, lonely, fates, facts, topics)
    order = np.argsort(told.ints("mark"), kind="stable")
    owner, mine = _owners(told.ints("mark")[order], asked.ints("mark")[ask])
    order, owner = order[mine], owner[mine]
    same = _as_logged(told, order, fates, fate[owner], facts, topics)
    count = np.bincount(owner, minlength=len(ask))
    wrong = np.bincount(owner[~same], minlength=len(ask)) > 0
    wrong |= _twice_to_one(told, order, owner, len(ask))
    fine = (count == _expected(fates, fate, facts, topics)) & ~wrong
    received_ms = np.full(len(ask), _MAX)
    np.minimum.at(received_ms, owner, told.ints("received_ms")[order])
    plain = _verdicts(asked, fates, ask[fine], fate[fine], count[fine], received_ms[fine])
    left = [np.ones(len(each), np.bool_) for each in tables]
    left[0][ask[fine]] = False
    left[1][fate[fine]] = False
    left[2][order] = ~fine[owner]
    foreign = np.setdiff1d(told.ints("seq")[left[2]], fates.ints("seq")[left[1]])
    marks = [each.ints("mark")[of] for each, of in zip(tables, left, strict=True)]
    return Sifted(plain, _doubts(np.unique(np.concatenate(marks)), foreign))


def _asked_and_fired(
    asked: _Table, lonely: Mask, log: _Table, facts: Facts, topics: pa.Array
) -> tuple[I64, I64]:
    """Return the rows of `asked` and of `log` that agree about a fired timer, in order of marks."""
    ask = _once(asked.ints("mark"), lonely & _scheduled(asked))
    fate = _once(log.ints("mark"), _fired(log, facts, topics))
    at, found = _owners(asked.ints("mark")[ask], log.ints("mark")[fate])
    ask, fate = ask[found], fate[at[found]]
    due_ms, taken_ms = log.ints("due_ms")[fate], log.ints("scheduled_at_ms")[fate]
    wanted_ms = asked.ints("asked_due_ms")[ask]
    same = (
        (asked.ints("answered_seq")[ask] == log.ints("seq")[fate])
        & (asked.ints("answered_due_ms")[ask] == due_ms)
        & (asked.ints("asked_due_ms")[ask] <= due_ms)
        & ((wanted_ms == _NULL) | (due_ms - TICK_MS_MAX <= np.maximum(wanted_ms, taken_ms)))
        & (asked.codes("topic", topics)[ask] == log.codes("topic", topics)[fate])
    )
    if (error_ms := facts.clock_error_ms) is not None:
        most_ms = asked.ints("most_due_ms")[ask]
        same &= asked.ints("least_due_ms")[ask] <= due_ms + error_ms
        same &= (most_ms == _NULL) | (due_ms - error_ms <= most_ms)
    return ask[same], fate[same]


def _scheduled(asked: _Table) -> Mask:
    return (
        (asked.ints("mark") >= 0)
        & asked.equals("outcome", "ok")
        & asked.equals("told", "SCHEDULED")
        & asked.none("existing_seq")
    )


def _fired(log: _Table, facts: Facts, topics: pa.Array) -> Mask:
    doubted = _Table(facts.doubted)
    slots = _pairs(doubted.codes("topic", topics), doubted.ints("queue_offset"))
    topic = log.codes("topic", topics)
    fine: Mask = (
        (log.ints("mark") >= 0)
        & (topic >= 0)
        & log.equals("end", "fired")
        & log.none("other_seq")
        & log.none("old_due_ms")
        & (log.ints("ended_at_ms") >= log.ints("due_ms"))
        & ~np.isin(_pairs(topic, log.ints("queue_offset")), slots)
        & ~np.isin(log.ints("seq"), facts.named)
    )
    for name in ("schedule_index", "end_index"):
        fine &= ~np.isin(log.ints(name), facts.disputed)
    return fine


def _as_logged(
    given: _Table, rows: I64, log: _Table, fate: I64, facts: Facts, topics: pa.Array
) -> Mask:
    """Return a mask of the deliveries `rows`: equal to the log's row, and surely before the ack."""
    topic = given.codes("topic", topics)[rows]
    same: Mask = topic == log.codes("topic", topics)[fate]
    of_log = {"fired_at_ms": "ended_at_ms"}
    for name in ("seq", "queue_offset", "due_ms", "fired_at_ms"):
        same &= given.ints(name)[rows] == log.ints(of_log.get(name, name))[fate]
    groups, acked = given.texts("group"), _Table(facts.acked)
    group = given.codes("group", groups)[rows]
    of_acked = acked.codes("topic", topics), acked.codes("group", groups)
    keys = _pairs(_pairs(*of_acked, len(groups)), acked.ints("stretch"))
    at = np.argsort(keys, kind="stable")
    stretch = given.ints("queue_offset")[rows] >> STRETCH_BITS
    place, known = _owners(_pairs(_pairs(topic, group, len(groups)), stretch), keys[at])
    for name, least in (("epoch", "ack_epoch"), ("attempt", "attempts")):
        limit = np.append(acked.ints(least)[at], _MAX)[np.where(known, place, -1)]
        value = given.ints(name)[rows]
        same &= (value >= 0) & (value <= limit)
    if facts.clock_error_ms is not None:
        same &= given.ints("received_ms")[rows] + facts.clock_error_ms >= given.ints("due_ms")[rows]
    return same & (group >= 0) & (given.ints("received_ms")[rows] >= 0)


def _expected(log: _Table, fate: I64, facts: Facts, topics: pa.Array) -> I64:
    """Return the number of groups that must receive each timer."""
    topic, offset = log.codes("topic", topics)[fate], log.ints("queue_offset")[fate]
    expected = np.zeros(len(fate), np.int64)
    every = [*facts.starts.values()]
    order = np.argsort(topic, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(topic[order])) + 1):
        if len(mine):
            expected[mine] = np.searchsorted(every[topic[mine[0]]], offset[mine], "right")
    return expected


def _twice_to_one(given: _Table, rows: I64, owner: I64, count: int) -> Mask:
    """Return a mask of `count` timers: delivered to one group more than once."""
    twice = np.zeros(count, np.bool_)
    groups = given.texts("group")
    pairs = np.sort(_pairs(owner, given.codes("group", groups)[rows], len(groups)))
    again = pairs[1:][(pairs[1:] == pairs[:-1]) & (pairs[1:] >= 0)]
    twice[again // max(1, len(groups))] = True
    return twice


def _verdicts(
    asked: _Table, log: _Table, ask: I64, fate: I64, count: I64, received_ms: I64
) -> pa.Table:
    size, nobody = len(ask), count == 0
    always = {"verdict": "ok", "outcome": "ok", "end": "fired", "told": "SCHEDULED", "copies": 1}
    columns = {name: pa.repeat(value, size) for name, value in always.items()}
    columns |= {name: asked.take(name, ask) for name in ("id", "asked_due_ms", "key")}
    columns |= {
        name: log.take(name, fate)
        for name in ("mark", "seq", "topic", "due_ms", "scheduled_at_ms", "ended_at_ms")
    }
    columns |= {name: log.take(name, fate) for name in ("end_epoch", "queue_offset")}
    counted = {"deliveries": count, "groups": count, "received_ms": received_ms}
    columns |= {name: pa.array(value, mask=nobody) for name, value in counted.items()}
    columns |= {f.name: pa.nulls(size, f.type) for f in VERDICTS if f.name not in columns}
    return pa.table([columns[f.name].cast(f.type) for f in VERDICTS], schema=VERDICTS)


def _doubts(marks: I64, seqs: I64) -> pa.Table:
    marks, seqs = marks[marks != _NULL], seqs[seqs != _NULL]
    none = [pa.nulls(len(each), pa.int64()) for each in (marks, seqs)]
    columns = [[pa.array(marks), none[1]], [none[0], pa.array(seqs)]]
    return pa.table([*map(pa.concat_arrays, columns)], schema=DOUBTS)


def _pairs(high: I64, low: I64, size: int = 1 << 46) -> I64:
    """Return `high * size + low`; -1 if either is negative or `low` is not below `size`."""
    both: I64 = np.where((high < 0) | (low < 0) | (low >= size), -1, high * size + low)
    return both


def _once(marks: I64, fine: Mask) -> I64:
    """Return the fine rows whose mark occurs once, in order of marks."""
    order = np.argsort(marks, kind="stable")
    other = np.ones(len(marks) + 1, np.bool_)
    other[1:-1] = np.diff(marks[order]) != 0
    alone: I64 = order[other[:-1] & other[1:]]
    return alone[fine[alone]]


def _owners(values: I64, among: I64) -> tuple[I64, Mask]:
    """Return the position of each value in `among`, which ascends; and whether it is there."""
    place = np.searchsorted(among, values)
    there = np.append(among, _NULL)[place] == values
    return place, there & (place < len(among))


def numbers(table: pa.Table, name: str) -> I64:
    """Return the distinct values of a column of integers, in ascending order."""
    return np.unique(_Table(table).ints(name))
