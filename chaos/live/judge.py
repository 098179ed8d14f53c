"""The judge of the live audit: what is wrong with a share of the timers, from exported events.

Pure: no clock, no file, no Spark. `step` takes the events that came since
(chaos/live/exported_events.py) and returns the alerts that follow; a timer is alerted of once per
kind.

    lost        due, and longer than `overdue_ms` nothing came of it:
                  no FIRE covers it, though this epoch's leader had that long; or one does, and
                  the witness of its topic has been given what fired so much later
    late        was lost, and came after all
    duplicate   one timer, two queue offsets
    early       fired before its due time
    cancelled   given, although its cancel took effect
    diverged    given, but not in the log as such; or a node's log holds something else
    held, dropped, deleted, expired
                fired or given, although its topic, or its time to live, forbids it (standing.py)

**What a row waits for.** The log's promise (a FIRE whose read time covers it) counts from when it
was seen in the log's clock; the witness counts from there, by its own progress (REACH), so that
neither an outage nor a backlog looks like a loss. A topic that no witness reads is judged by the
log's promise alone. Cancels that may have come too late excuse both outcomes. What a paused topic
holds is not judged until it has gone on, and had the time to let go of it.

**State.** Rows lie in chunks by due time, on a shelf that the caller keeps; a step touches the
chunks of its events and those whose time has come. A row stays until it has ended and
`horizon_ms` has passed since its due time: the state holds what is pending or held, what was
cancelled and is not due yet, and the last minutes. A second firing later than that is told from a
redelivery of the first by its firing time.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from chaos.live.exported_events import OF_TOPICS, Columns, EventKind
from chaos.live.standing import NEVER, Standing, Standings

CHUNK_BITS: Final = 14
"""A chunk spans 2**14 ms of due time."""
HORIZON_MS: Final = 600_000

ROW: Final = np.dtype(
    [
        ("seq", "<i8"),
        ("due_ms", "<i8"),
        ("since_ms", "<i8"),  # when it could fire: its due time, or when it was scheduled
        ("ended_ms", "<i8"),  # of what was given: when it was handed out last
        ("queue_offset", "<i8"),
        ("fired_at_ms", "<i8"),
        ("topic", "<u4"),
        ("flags", "<u4"),
    ]
)
IN_LOG: Final = 1
CANCELLED: Final = 2
RACED: Final = 4
GIVEN: Final = 8
SETTLED: Final = 16
"""Fired by the log's promise, and no witness was there to be given it."""
EXCUSED: Final = 32
"""It was dropped or has expired, or may be; or its topic is gone."""
LOST: Final = 256
DUPLICATE: Final = 512
EARLY: Final = 1024
STRAY: Final = 2048
UNCANCELLED: Final = 4096
WRONG: Final = {"held": 8192, "dropped": 16384, "deleted": 32768, "expired": 65536}
_ENDED: Final = CANCELLED | RACED | GIVEN | SETTLED | EXCUSED

Rows = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
Stands = list[tuple[npt.NDArray[np.intp], Standing]]
"""Where the rows of one topic are, in order, and what is known of it."""


class Alert(NamedTuple):
    """Something is wrong."""

    kind: str
    seq: int
    topic: str
    due_ms: int
    clock_ms: int
    """The log's clock when it was found."""
    detail: str


class Shelf(Protocol):
    """Chunks of rows, by number."""

    def get(self, chunk: int) -> bytes | None:
        """Return a chunk; None: there is none."""

    def put(self, chunk: int, rows: bytes) -> None:
        """Keep a chunk in place of what there was."""

    def remove(self, chunk: int) -> None:
        """Forget a chunk."""


@dataclass(slots=True)
class WitnessReach:
    """How far the witness of a topic has come."""

    since_ms: int
    read_ms: int


@dataclass(slots=True)
class JudgeState:
    """What a judge remembers beside its rows."""

    clock_ms: int = 0
    read_ms: int = 0
    epoch_since_ms: int = 0
    first_seq: int = 0
    last_seq: int = 0
    topics: list[tuple[int, str]] = field(default_factory=list)
    """(number, name); the number is 0 where only the name is known."""
    standings: Standings = field(default_factory=Standings)
    reaches: dict[str, WitnessReach] = field(default_factory=dict)
    fires: list[tuple[int, int]] = field(default_factory=list)
    """(log's clock, read time covered then), the last while."""
    visits: dict[int, int] = field(default_factory=dict)
    """Chunk -> when to look at it again."""

    def dumps(self) -> bytes:
        """Return the head as bytes."""
        visits = np.array([*self.visits.items()], np.int64).reshape(-1, 2)
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        del fields["visits"]
        fields["standings"] = self.standings.dumps()
        fields["reaches"] = {topic: asdict(reach) for topic, reach in self.reaches.items()}
        text = json.dumps(fields).encode()
        return len(text).to_bytes(4, "little") + text + visits.tobytes()

    @classmethod
    def loads(cls, data: bytes) -> "JudgeState":
        """Return what `dumps` wrote."""
        end = 4 + int.from_bytes(data[:4], "little")
        fields = json.loads(data[4:end])
        fields["reaches"] = {k: WitnessReach(**v) for k, v in fields["reaches"].items()}
        fields["topics"] = [(number, name) for number, name in fields["topics"]]
        fields["standings"] = Standings.loads(fields["standings"])
        fields["fires"] = [(at, read) for at, read in fields["fires"]]
        visits = np.frombuffer(data, np.int64, offset=end).reshape(-1, 2)
        known = dict(zip(visits[:, 0].tolist(), visits[:, 1].tolist(), strict=True))
        return cls(**fields, visits=known)


class Judge:
    """Judges one share of the timers: all events of a seq go to the same judge, clocks to all."""

    def __init__(
        self, head: JudgeState, shelf: Shelf, *, overdue_ms: int, horizon_ms: int = HORIZON_MS
    ) -> None:
        self.head = head
        self._shelf = shelf
        self._overdue_ms = overdue_ms
        self._horizon_ms = horizon_ms

    def step(self, columns: Columns) -> list[Alert]:
        """Take in events, in any order; return what is wrong since."""
        kind = columns["kind"]
        self.head.standings.forget(self.head.clock_ms - self._horizon_ms)
        stirred = self.head.standings.take(_of(columns, np.isin(kind, OF_TOPICS)))
        self._clocks(_of(columns, kind == EventKind.CLOCK))
        self._reaches(_of(columns, kind == EventKind.REACH))
        alerts = [*self._diverged(_of(columns, kind == EventKind.DIVERGED))]
        told = _of(columns, np.isin(kind, [EventKind.SCHEDULED, EventKind.CANCELLED,
        EventKind.RACED,
                                           EventKind.GIVEN]))  # fmt: skip
        order = np.argsort(told["due_ms"], kind="stable")
        told = {name: column[order] for name, column in told.items()}
        chunks = told["due_ms"] >> CHUNK_BITS
        touched, starts = np.unique(chunks, return_index=True)
        ends = [*starts.tolist(), len(chunks)][1:]
        spans = dict(zip(touched.tolist(), zip(starts.tolist(), ends, strict=True), strict=True))
        now_ms = max([self.head.clock_ms, *(r.read_ms for r in self.head.reaches.values())])
        stirred_to = now_ms >> CHUNK_BITS if stirred else -1
        ripe = {
            chunk for chunk, at in self.head.visits.items() if at <= now_ms or chunk <= stirred_to
        }
        for chunk in sorted(ripe.union(spans)):
            start, end = spans.get(chunk, (0, 0))
            mine = {name: column[start:end] for name, column in told.items()}
            if chunk in ripe or not self._filled(chunk, mine, now_ms):
                alerts += self._chunk(chunk, mine)
        return alerts

    # ---- clocks

    def _clocks(self, clocks: Columns) -> None:
        head = self.head
        for at in np.lexsort((clocks["read_ms"], clocks["index"])).tolist():
            head.clock_ms = max(head.clock_ms, int(clocks["at_ms"][at]))
            head.read_ms = max(head.read_ms, int(clocks["read_ms"][at]))
            head.epoch_since_ms = max(head.epoch_since_ms, int(clocks["since_ms"][at]))
            head.last_seq = max(head.last_seq, int(clocks["seq"][at]))
            head.first_seq = int(clocks["first_seq"][at])
            if not head.fires or head.fires[-1][1] < head.read_ms:
                head.fires.append((head.clock_ms, head.read_ms))
        head.standings.new_epoch(head.epoch_since_ms)
        # Who was covered before all that is remembered is taken to be so since its first entry.
        oldest_ms = head.clock_ms - 4 * self._overdue_ms
        while len(head.fires) > 1 and head.fires[1][0] < oldest_ms:
            head.fires.pop(0)

    def _reaches(self, reaches: Columns) -> None:
        for at in np.argsort(reaches["at_ms"], kind="stable").tolist():
            topic, read_ms = str(reaches["topic"][at]), int(reaches["read_ms"][at])
            known = self.head.reaches.setdefault(topic, WitnessReach(int(reaches["at_ms"][at]), 0))
            known.read_ms = read_ms

    def _diverged(self, found: Columns) -> Iterator[Alert]:
        for node, index, detail in zip(found["node"], found["index"], found["detail"], strict=True):
            yield Alert("diverged", 0, "", 0, self.head.clock_ms, f"{node} at {index}: {detail}")

    # ---- rows

    def _filled(self, chunk: int, told: Columns, now_ms: int) -> bool:
        """Append new timers to a chunk that is not looked at yet; False: it has to be."""
        if (told["kind"] != EventKind.SCHEDULED).any():
            return False
        stored, new = self._shelf.get(chunk) or b"", self._new_rows(told)
        last = np.frombuffer(stored[-ROW.itemsize :], ROW)["seq"]
        visit_ms = int(new["since_ms"].min()) + self._overdue_ms
        if visit_ms <= now_ms or (last >= new["seq"][0]).any():
            return False
        self._shelf.put(chunk, stored + new.tobytes())
        self.head.visits[chunk] = min(visit_ms, self.head.visits.get(chunk, visit_ms))
        return True

    def _chunk(self, chunk: int, told: Columns) -> list[Alert]:
        stored = self._shelf.get(chunk)
        rows = np.frombuffer(stored, ROW).copy() if stored else np.zeros(0, ROW)
        kind = told["kind"]
        rows = self._schedule(rows, _of(told, kind == EventKind.SCHEDULED))
        for event, flag in ((EventKind.CANCELLED, CANCELLED), (EventKind.RACED, RACED)):
            self._cancel(rows, _of(told, kind == event), flag)
        rows, alerts = self._give(rows, _of(told, kind == EventKind.GIVEN))
        stands = self._stands(rows)
        alerts += self._settle(rows, stands)
        alerts += self._wrong(rows, stands)
        visits_ms = self._visits(rows, stands)
        kept = visits_ms > self.head.clock_ms
        kept |= (rows["flags"] & (_ENDED | STRAY)) == 0
        kept |= ((rows["flags"] & (IN_LOG | STRAY)) == 0) & (rows["seq"] >= self.head.first_seq)
        if kept.any():
            self._shelf.put(chunk, rows[kept].tobytes())
            self.head.visits[chunk] = int(visits_ms[kept].min())
        else:
            if stored:
                self._shelf.remove(chunk)
            self.head.visits.pop(chunk, None)
        return alerts

    def _new_rows(self, told: Columns) -> Rows:
        """Return rows for new timers, sorted by seq."""
        new = np.zeros(len(told["seq"]), ROW)
        new["seq"], new["due_ms"] = told["seq"], told["due_ms"]
        new["since_ms"] = np.maximum(told["due_ms"], told["at_ms"])
        new["topic"] = self._topics(told["topic_id"], told["topic"])
        new["flags"] = IN_LOG
        return new[np.argsort(new["seq"], kind="stable")]

    def _schedule(self, rows: Rows, told: Columns) -> Rows:
        new = self._new_rows(told)
        at, known = _find(rows, new["seq"])
        for name in ("since_ms", "topic"):
            rows[name][at[known]] = new[name][known]
        rows["flags"][at[known]] |= IN_LOG
        return _merged(rows, new[~known])

    def _cancel(self, rows: Rows, told: Columns, flag: int) -> None:
        at, known = _find(rows, told["seq"])
        at, told = at[known], _of(told, known)
        is_it = (rows["due_ms"][at] == told["due_ms"]) & (rows["flags"][at] & CANCELLED == 0)
        rows["flags"][at[is_it]] |= flag
        is_it &= rows["flags"][at] & GIVEN == 0
        rows["ended_ms"][at[is_it]] = told["at_ms"][is_it]

    def _give(self, rows: Rows, told: Columns) -> tuple[Rows, list[Alert]]:
        """Note what was given; return the rows, and the alerts of what was given twice."""
        told = _of(told, told["seq"] >= self.head.first_seq)
        unique, first = np.unique(told["seq"], return_index=True)
        at, known = _find(rows, unique)
        new = np.zeros(int((~known).sum()), ROW)
        mine = first[~known]
        for name in ("seq", "due_ms", "queue_offset", "fired_at_ms"):
            new[name] = told[name][mine]
        new["since_ms"] = new["due_ms"]
        names = told["topic"][mine]
        new["topic"] = self._topics(np.zeros(len(names), np.int64), names)
        new["flags"] = GIVEN
        # What ended so long ago that it was forgotten; if it also fired then, this is that firing.
        past_ms = self.head.clock_ms - self._horizon_ms
        forgotten = (new["seq"] <= self.head.last_seq) & (new["due_ms"] <= past_ms)
        again = forgotten & (new["fired_at_ms"] > past_ms)
        new["flags"][again] |= IN_LOG | DUPLICATE
        alerts = [*self._alerts("duplicate", new[again], "fired again after it had ended")]
        rows = _merged(rows, new[~forgotten | again])
        fresh = _of(told, first[known])
        at, known = _find(rows, fresh["seq"])
        assert known.all(), fresh["seq"][~known]
        unseen = rows["flags"][at] & GIVEN == 0
        at, fresh = at[unseen], _of(fresh, unseen)
        for name in ("queue_offset", "fired_at_ms"):
            rows[name][at] = fresh[name]
        rows["ended_ms"][at] = fresh["handed_out_ms"]
        rows["flags"][at] |= GIVEN
        late = rows[at[rows["flags"][at] & LOST != 0]]
        alerts += self._alerts("late", late, "was lost, and came after all")
        every, known = _find(rows, told["seq"])
        np.maximum.at(rows["ended_ms"], every[known], told["handed_out_ms"][known])
        return rows, [*alerts, *self._doubled(rows, told)]

    def _doubled(self, rows: Rows, told: Columns) -> Iterator[Alert]:
        at, known = _find(rows, told["seq"])
        at, offsets = at[known], told["queue_offset"][known]
        other = (rows["queue_offset"][at] != offsets) & (rows["flags"][at] & DUPLICATE == 0)
        at, first = np.unique(at[other], return_index=True)
        rows["flags"][at] |= DUPLICATE
        for row, offset in zip(rows[at], offsets[other][first].tolist(), strict=True):
            detail = f"at queue offsets {row['queue_offset']} and {offset}"
            yield from self._alerts("duplicate", row.reshape(1), detail)

    def _stands(self, rows: Rows) -> Stands:
        """Return where the rows of each topic are of which something is known."""
        known, order = self.head.standings.of, np.argsort(rows["topic"], kind="stable")
        topics, starts = np.unique(rows["topic"][order], return_index=True)
        parts = np.split(order, starts[1:])
        numbers = [self.head.topics[topic][0] for topic in topics.tolist()]
        return [(part, known[n]) for part, n in zip(parts, numbers, strict=False) if n in known]

    def _settle(self, rows: Rows, stands: Stands) -> list[Alert]:
        """Judge what is there by now."""
        flags, head = rows["flags"], self.head
        open_ = (flags & IN_LOG != 0) & (flags & _ENDED == 0)
        for mine, standing in (each for each in stands if each[1].forbids):
            excused = mine[open_[mine] & standing.excuses(rows[mine])]
            flags[excused] |= EXCUSED
            rows["ended_ms"][excused] = head.clock_ms
            open_[mine if standing.paused else excused] = False
        covered = rows["due_ms"] <= head.read_ms
        since_ms = self._could_ms(rows, stands)
        unfired = open_ & ~covered
        unfired &= np.maximum(since_ms, head.epoch_since_ms) + self._overdue_ms <= head.clock_ms
        covered_ms = np.maximum(rows["since_ms"], self._covered_ms(rows["due_ms"]))
        witnessed, reach_ms = self._witnessed(rows, covered_ms, stands)
        covered_ms = np.maximum(covered_ms, since_ms)
        settled = open_ & covered & ~witnessed
        # A leader had to be there to hand it out: the idle witness's clock goes on without one.
        led_ms = np.maximum(covered_ms, head.epoch_since_ms)
        ungiven = open_ & covered & witnessed
        ungiven &= led_ms + self._overdue_ms <= np.minimum(reach_ms, head.clock_ms)
        late = rows[settled & (flags & LOST != 0)]
        rows["ended_ms"][settled] = covered_ms[settled]
        flags[settled] |= SETTLED
        given, in_log = flags & GIVEN != 0, flags & IN_LOG != 0
        stray = given & ~in_log & (rows["seq"] >= head.first_seq) & (rows["seq"] <= head.last_seq)
        finds: tuple[tuple[str, int, Mask, str], ...] = (
            ("lost", LOST, unfired, f"no FIRE covers it; the log has fired up to {head.read_ms}"),
            ("lost", LOST, ungiven, "the log fired it; it was given to nobody"),
            ("early", EARLY, given & (rows["fired_at_ms"] < rows["due_ms"]), "fired before due"),
            ("cancelled", UNCANCELLED, given & (flags & CANCELLED != 0), "given after its cancel"),
            ("diverged", STRAY, stray, "given, but the log has no such timer"),
        )
        alerts = [*self._alerts("late", late, "was lost, and the log fired it after all")]
        for kind, flag, mask, detail in finds:
            new = mask & (flags & flag == 0)
            flags[new] |= flag
            alerts += self._alerts(kind, rows[new], detail)
        return alerts

    def _wrong(self, rows: Rows, stands: Stands) -> Iterator[Alert]:
        """Yield what fired, or was given, although its topic or its time to live forbids it."""
        flags = rows["flags"]
        given = (flags & GIVEN != 0) & (flags & IN_LOG != 0)
        for mine, standing in (each for each in stands if each[1].forbids):
            at = mine[given[mine]]
            own = at[flags[at] & RACED == 0]
            slack_ms, clock_ms = self._overdue_ms, self.head.clock_ms
            finds = [
                *((at, find) for find in standing.given_wrongly(rows[at], clock_ms, slack_ms)),
                *((own, find) for find in standing.fired_wrongly(rows[own], clock_ms)),
            ]
            for among, (kind, which, why) in finds:
                new = among[which & (flags[among] & WRONG[kind] == 0)]
                flags[new] |= WRONG[kind]
                yield from self._alerts(kind, rows[new], why)

    def _could_ms(self, rows: Rows, stands: Stands) -> npt.NDArray[np.int64]:
        """Return since when each row must have been able to fire."""
        since_ms = rows["since_ms"].astype(np.int64)
        for mine, standing in stands:
            since_ms[mine] = np.maximum(since_ms[mine], standing.release_ms)
        return since_ms

    def _covered_ms(self, due_ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return when the log was first seen to have fired up to there; now, if it has not."""
        clocks = np.array([*(at for at, _ in self.head.fires), self.head.clock_ms], np.int64)
        reads = np.array([read for _, read in self.head.fires], np.int64)
        return clocks[np.searchsorted(reads, due_ms)]

    def _witnessed(
        self,
        rows: Rows,
        covered_ms: npt.NDArray[np.int64],
        stands: Stands,
    ) -> tuple[Mask, npt.NDArray[np.int64]]:
        """Return whether a witness was there when each row fired, and how far it has come."""
        topics = rows["topic"]
        table = [
            self.head.reaches.get(name, WitnessReach(NEVER, 0)) for _, name in self.head.topics
        ]
        since = np.array([reach.since_ms for reach in table] or [NEVER], np.int64)[topics]
        reads = np.array([reach.read_ms for reach in table] or [0], np.int64)
        fired_ms, witnessed = covered_ms.copy(), np.ones(len(rows), np.bool_)
        for mine, standing in stands:
            fired_ms[mine] = np.maximum(fired_ms[mine], standing.resumed_ms)
            could_ms = np.maximum(rows["since_ms"][mine], standing.resumed_ms)
            witnessed[mine] = could_ms > standing.witnessed_ms
        return witnessed & (fired_ms > since), reads[topics]

    def _visits(self, rows: Rows, stands: Stands) -> npt.NDArray[np.int64]:
        """Return when each row has to be looked at again."""
        flags = rows["flags"]
        latest_ms = np.maximum(np.maximum(rows["since_ms"], rows["ended_ms"]), rows["fired_at_ms"])
        ended = flags & _ENDED != 0
        since_ms = self._could_ms(rows, stands)
        visits_ms = np.where(ended, latest_ms + self._horizon_ms, since_ms + self._overdue_ms)
        asked_again = (flags & LOST != 0) & ~ended
        visits_ms[asked_again] = self.head.clock_ms + self._overdue_ms
        for mine, standing in stands:
            if standing.paused:  # what is overdue is looked at when it goes on
                overdue = ~ended[mine] & (visits_ms[mine] <= self.head.clock_ms)
                visits_ms[mine[overdue]] = NEVER
            if standing.forbids:
                came_ms = np.maximum(rows["fired_at_ms"][mine], rows["ended_ms"][mine])
                open_ = (flags[mine] & GIVEN != 0) & (came_ms >= self.head.clock_ms)
                visits_ms[mine[open_]] = self.head.clock_ms + 1
        visits_ms[flags & (IN_LOG | STRAY) == 0] = 0
        return visits_ms

    def _topics(
        self, numbers: npt.NDArray[np.int64], names: npt.NDArray[np.object_]
    ) -> npt.NDArray[np.uint32]:
        """Return where each topic stands in the list of those that are known."""
        by = numbers if numbers.any() else names.astype(str)
        _, first, back = np.unique(by, return_index=True, return_inverse=True)
        pairs = [(int(numbers[at]), str(names[at])) for at in first.tolist()]
        self.head.topics += [pair for pair in pairs if pair not in self.head.topics]
        return np.array([self.head.topics.index(pair) for pair in pairs], np.uint32)[back]

    def _alerts(self, kind: str, rows: Rows, detail: str) -> Iterator[Alert]:
        for row in rows:
            _, topic = self.head.topics[int(row["topic"])]
            yield Alert(
                kind, int(row["seq"]), topic, int(row["due_ms"]), self.head.clock_ms, detail
            )


def _of(columns: Columns, which: npt.NDArray[np.generic]) -> Columns:
    return {name: column[which] for name, column in columns.items()}


def _find(rows: Rows, seq: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Return where each seq lies among rows sorted by seq, and whether it does."""
    at = np.searchsorted(rows["seq"], seq)
    known = at < len(rows)
    known[known] = rows["seq"][at[known]] == seq[known]
    return at.astype(np.int64), known


def _merged(rows: Rows, new: Rows) -> Rows:
    """Return both, sorted by seq."""
    if not len(new):
        return rows
    both = np.concatenate([rows, new])
    return both[np.argsort(both["seq"], kind="stable")]
