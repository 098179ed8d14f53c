"""The model of a synthetic run: time in ticks, one producer, one consumer, one kill half-way.

    tick t   schedule R timers, due in the ticks t + 1 .. t + spread
             of the timers due in tick t + 1, about one in a thousand each:
                 cancel; reschedule by one tick; replace by key; schedule another timer with the
                 same key, which is rejected
             fire the timers due in tick t, sorted by (due, seq), at most 65,536 per entry
             deliver and acknowledge all of these messages before the next tick

No timer is late and no limit of bytes applies. The firing order is therefore one sort per tick, and
queue offsets are consecutive; none of a replay's cases arises. A planted defect changes one record
of a chosen timer: an entry, an answer or a delivery (PLANTS).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chaos.history.history import FaultTimeline, RunFolder
from tests.chaos.synthetic.synthetic_files import Client, Logs, ids_of, write_json
from timer.entries import payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import CreateGroup, Fire, GroupOp, GroupSettings, GroupStart, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.columns import I64, Binary, OnConflict, Part, encode_schedule
from timer.model.units import Epoch, GroupId, ProducerId, ReplicaId, TopicId, UnixMs

TOPIC: Final = "synthetic"
GROUP: Final = "readers"
TICK_MS: Final = 500
TTL_MS: Final = TICK_MS + 1
"""A message expires at the end of the tick after its due tick. The defect `expired_early` expires
it in its due tick."""
FIRE_ROWS: Final = payloads.FIRE_ROWS
GIVEN_ROWS: Final = 4096
CANCEL_EVERY: Final = 1009
MOVE_EVERY: Final = 1013
REPLACE_EVERY: Final = 1019
REJECT_EVERY: Final = 1021
CLOCK_ERROR_MS: Final = 100
MISDATED_MS: Final = CLOCK_ERROR_MS + 1_001  # beyond the clock error and one tick of a node
ANSWERED_MS: Final = 2
"""Time from a request's entry to its answer."""
NOWHERE: Final = 1 << 40
"""Queue offsets from this one on belong to messages that no queue holds."""
BEGIN_MS: Final = 1_700_000_000_000
PAUSE_MS: Final = 700
"""Time from the kill to the next leader's first entry."""
_T, _G = TopicId(1), GroupId(1)

Mask = npt.NDArray[np.bool_]

PLANTS: Final = {
    "lost": "lost",
    "never_given": "lost",
    "duplicate_fire": "duplicate_fire",
    "phantom": "phantom",
    "early": "early",
    "seen_early": "early",
    "misdated": "misdated",
    "acked_again": "acked_again",
    "unmarked_redelivery": "unmarked_redelivery",
    "cancelled_delivered": "cancelled_delivered",
    "cancel_untrue": "cancel_untrue",
    "key_doubled": "key_doubled",
    "replaced_delivered": "replaced_delivered",
    "rescheduled_delivered": "rescheduled_delivered",
    "conflict_untrue": "conflict_untrue",
    "reschedule_untrue": "reschedule_untrue",
    "ack_lost": "ack_lost",
    "expired_delivered": "expired_delivered",
    "expired_early": "expired_early",
    "diverged": "diverged",
    "unknown_fired_once": "unknown_fired_once",
    "unknown_not_fired": "unknown_not_fired",
    "refused": "refused",
    "expired": "expired",
}
"""Kind of defect -> the verdict that it must get. The last four verdicts are no violations."""
UNANSWERED: Final = ("phantom", "unknown_fired_once", "unknown_not_fired", "refused")
"""Kinds with no timer id in the answer to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticPlan:
    """Size and contents of a synthetic run."""

    timers: int
    nodes: int = 3
    rows_per_tick: int = 50_000
    batch: int = 2_000
    """Rows per SCHEDULE entry and per request."""
    spread: int = 100
    """A timer is due at most this many ticks after its request."""
    keyed: float = 0.0
    """Share of timers with a key that no later request uses, 0 to 1."""
    plant: dict[str, int] = field(default_factory=dict)
    """Kind (see PLANTS) -> number of timers to plant it at, at least 1."""
    diverged_entry: bool = False
    """The last node holds one SCHEDULE entry with other due times."""
    seed: int = 1

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: a kind of defect is unknown, or a number is out of range.
        """
        if unknown := self.plant.keys() - PLANTS.keys():
            raise ValueError(f"plant = {sorted(unknown)}: must be one of {sorted(PLANTS)}")
        if few := {kind: number for kind, number in self.plant.items() if number < 1}:
            raise ValueError(f"plant = {few}: must be 1 or more of each")
        if self.nodes < 1:
            raise ValueError(f"nodes = {self.nodes}: must be at least 1")
        if not 0 <= self.keyed <= 1:
            raise ValueError(f"keyed = {self.keyed:g}: must be a share, 0 to 1")
        if self.timers < 20 * sum(self.plant.values()) + 100:
            needed = 20 * sum(self.plant.values()) + 100
            raise ValueError(f"timers = {self.timers}: must be at least {needed} for these defects")


def key_texts(marks: I64, keyed: Mask) -> list[str | None] | None:
    """Return the keys of timers, None for a timer without a key. None if no timer has a key."""
    if not keyed.any():
        return None
    return [f"k{m}" if k else None for m, k in zip(marks.tolist(), keyed.tolist(), strict=True)]


def key_column(marks: I64, keyed: Mask) -> Binary | None:
    """Return the keys of timers as a column of an entry. None if no timer has a key."""
    texts = key_texts(marks, keyed)
    return None if texts is None else Binary.of([(text or "").encode() for text in texts])


@dataclass(slots=True)
class Rows:
    """Timers as columns of equal length."""

    mark: I64
    due_ms: I64
    seq: I64

    def where(self, mask: Mask) -> "Rows":
        """Return the rows that a mask, a slice or an array of positions selects."""
        return Rows(self.mark[mask], self.due_ms[mask], self.seq[mask])

    @classmethod
    def joined(cls, parts: list["Rows"]) -> "Rows":
        """Return the concatenation of several parts; no part gives no rows."""
        columns = ([getattr(p, name) for p in parts] for name in ("mark", "due_ms", "seq"))
        return cls(*(np.concatenate([np.zeros(0, np.int64), *each]) for each in columns))


class SyntheticWorld:
    """Writes one synthetic run."""

    def __init__(self, folder: Path, plan: SyntheticPlan) -> None:
        self.run = RunFolder(folder)
        names = [f"n{number}" for number in range(1, plan.nodes + 1)]
        self._plan = plan
        self._chance = np.random.default_rng(plan.seed)
        self._logs = Logs([folder / name / "log" for name in names])
        self._producer = Client(self.run, "producer")
        self._consumer = Client(self.run, "consumer")
        self._due: dict[int, list[Rows]] = {}
        self._over: I64 = np.zeros(0, np.int64)
        """Queue offsets of the messages that expire at the end of this tick."""
        self._fired_over: I64 = np.zeros(0, np.int64)
        """Queue offsets of the messages that expire at the end of the next tick."""
        self._planted = self._choose()
        self._known: list[dict[str, Any]] = []
        self._seq = self._offset = 0
        self._sequence = 0
        self._moved = np.zeros(0, np.int64)
        """Marks of the timers rescheduled in the last tick; a timer is rescheduled only once."""
        self._alter = plan.diverged_entry
        nodes = [{"name": name, "data": name} for name in names]
        write_json(folder / "cluster.json", {"nodes": nodes})
        write_json(self.run.about, {"clock_error_ms": CLOCK_ERROR_MS})

    def _choose(self) -> dict[int, str]:
        """Return the kind of defect by the mark of its timer, chosen at random."""
        plan = self._plan
        kinds = [kind for kind, count in sorted(plan.plant.items()) for _ in range(count)]
        marks = random.Random(plan.seed).sample(range(1, plan.timers + 1), len(kinds))
        return dict(zip(marks, kinds, strict=True))

    def write(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Write the whole run."""
        plan = self._plan
        self._begin_epoch(1, BEGIN_MS)
        self._logs.append(EntryKind.TOPIC, payloads.encode_topic(TOPIC), at_ms=BEGIN_MS)
        said = encode_policy(Scope("", _T), ScopePolicy(ttl_ms=TTL_MS))
        self._logs.append(EntryKind.POLICY, said, at_ms=BEGIN_MS)
        token = payloads.encode_producer(b"p" * 16, ProducerId(1))
        self._logs.append(EntryKind.PRODUCER, token, at_ms=BEGIN_MS)
        create = CreateGroup(_T, GROUP, GroupStart.EARLIEST, GroupSettings(lease_ms=1000))
        self._logs.append(EntryKind.GROUP, *payloads.encode_group([create]), at_ms=BEGIN_MS)
        self._consumer.line("open", topic=TOPIC, group=GROUP, start_ms=BEGIN_MS)
        ticks = -(-plan.timers // plan.rows_per_tick)
        with FaultTimeline(self.run) as faults:
            for tick in range(ticks + plan.spread + 1):
                at_ms = BEGIN_MS + tick * TICK_MS
                first = tick * plan.rows_per_tick + 1
                count = min(plan.rows_per_tick, plan.timers - first + 1)
                if count > 0:
                    self._schedule(tick, first, count, at_ms)
                self._change(tick, at_ms + TICK_MS // 2)
                self._fire(tick, at_ms + TICK_MS - 1)
                if tick % 10 == 9:
                    self._logs.append(EntryKind.CHECKPOINT, b"", at_ms=at_ms + TICK_MS - 1)
                    say(f"{max(0, min(first + count - 1, plan.timers)):,} timers")
                self._expire(at_ms + TICK_MS)
                if tick == ticks // 2:
                    self._kill(faults, at_ms + TICK_MS)
            self._expire(BEGIN_MS + (ticks + plan.spread + 2) * TICK_MS)
            faults.record("drained", at_ms=BEGIN_MS + (ticks + plan.spread + 30) * TICK_MS)
        for each in (self._producer, self._consumer, self._logs):
            each.close()
        write_json(self.run.root / "planted.json", self._known)

    def _begin_epoch(self, number: int, at_ms: int) -> None:
        self._logs.epoch = number
        voters = tuple(ReplicaId(n) for n in range(1, self._plan.nodes + 1))
        start = payloads.EpochStart(Epoch(number), ReplicaId(number), voters)
        self._logs.append(EntryKind.EPOCH, payloads.encode_epoch(start), at_ms=at_ms)

    def _kill(self, faults: FaultTimeline, at_ms: int) -> None:
        faults.record("kill", at_ms=at_ms, node="n1", role="leader", epoch=1)
        faults.record("restart", at_ms=at_ms + TICK_MS, node="n1")
        self._begin_epoch(2, at_ms)

    def _plants(self, marks: I64, *kinds: str) -> Mask:
        """Return a mask of the marks that have one of these defects."""
        chosen = [mark for mark, kind in self._planted.items() if kind in kinds]
        return np.isin(marks, chosen) if chosen else np.zeros(len(marks), np.bool_)

    def _every(self, marks: I64, nth: int) -> Mask:
        """Return a mask of every nth mark, without the marks that have a defect."""
        chosen: Mask = (marks % nth == 0) & ~np.isin(marks, [*self._planted])
        return chosen

    def _replaced(self, marks: I64) -> Mask:
        return self._every(marks, REPLACE_EVERY) | self._plants(marks, "replaced_delivered")

    def _rivalled(self, marks: I64) -> Mask:
        """Return a mask of the timers with a key that a second schedule request uses."""
        planted = self._plants(marks, "key_doubled", "conflict_untrue")
        return self._every(marks, REJECT_EVERY) | planted

    # ---- the events of a tick

    def _schedule(self, tick: int, first: int, count: int, at_ms: int) -> None:
        marks = np.arange(first, first + count)
        delay = self._chance.integers(TICK_MS, TICK_MS * self._plan.spread, count)
        delay[self._plants(marks, "misdated")] = 3 * TICK_MS  # more than MISDATED_MS
        for start in range(0, count, self._plan.batch):
            part = slice(start, start + self._plan.batch)
            at = at_ms + start * (TICK_MS // 4) // count
            self._request(tick, marks[part], at_ms + delay[part], at)

    def _request(self, tick: int, marks: I64, due_ms: I64, at_ms: int) -> None:
        """Write one request: its entry, its answer, and the defects planted in either."""
        in_log = ~self._plants(marks, "lost", "unknown_not_fired", "refused")
        twice = self._plants(marks, "duplicate_fire")
        log_marks = np.concatenate([marks[in_log], marks[twice]])
        log_due = np.concatenate([due_ms[in_log], due_ms[twice]])
        seqs = np.arange(self._seq + 1, self._seq + len(log_marks) + 1)
        self._seq += len(seqs)
        keyed = self._replaced(marks) | self._rivalled(marks)
        if self._plan.keyed:
            with_key = self._chance.random(len(marks)) < self._plan.keyed
            keyed |= with_key & ~np.isin(marks, [*self._planted])
        keys = key_column(log_marks, np.isin(log_marks, marks[keyed]))
        self._append_rows(log_marks, log_due, at_ms, keys=keys)
        rows = Rows(log_marks, log_due, seqs)
        number = (log_due - BEGIN_MS) // TICK_MS
        for due in np.unique(number).tolist():
            self._due.setdefault(due, []).append(rows.where(number == due))
        # The answer. A lost timer gets an id that no row has.
        answered = np.full(len(marks), 1 << 40, np.int64) + marks
        answered[in_log] = seqs[: int(np.count_nonzero(in_log))]
        ids = ids_of(due_ms + self._plants(marks, "diverged"), answered)
        asked = due_ms + self._plants(marks, "early")
        kinds = {mark: self._planted[mark] for mark in marks.tolist() if mark in self._planted}
        for at, mark in enumerate(marks.tolist()):
            if mark not in kinds:
                continue
            self._plant_known(kinds[mark], mark, ids[at].as_py())
        plain = ~self._plants(marks, "misdated", *UNANSWERED)
        self._answer(
            "ok", marks[plain], asked[plain], ids.filter(plain), at_ms,
            keys=key_texts(marks[plain], keyed[plain]),
        )  # fmt: skip
        for mark, kind in kinds.items():
            if kind.startswith("unknown") or kind == "refused":
                one = marks == mark
                outcome = "fail" if kind == "refused" else "unknown"
                self._answer(outcome, marks[one], asked[one], None, at_ms)
            elif kind == "misdated":
                one = marks == mark
                delay_ms = int(due_ms[one][0]) - at_ms - ANSWERED_MS - MISDATED_MS
                self._answer("ok", marks[one], None, ids.filter(one), at_ms, delay_ms=delay_ms)

    def _plant_known(self, kind: str, mark: int, timer_id: str) -> None:
        """Record a defect under the timer id of the answer. None if the answer has no id."""
        told: str | None = timer_id
        if kind in ("key_doubled", "conflict_untrue"):
            mark, told = mark + self._plan.timers, None  # of the second request with this key
        elif kind in UNANSWERED:
            told = None
        known = {"verdict": PLANTS[kind], "planted": kind, "mark": mark, "id": told}
        self._known.append(known)

    def _append_rows(self, marks: I64, due_ms: I64, at_ms: int, **more: Any) -> None:
        self._sequence += 1
        part = self._part(marks, due_ms, **more)
        third = self._seq > self._plan.timers // 3
        if self._alter and third and not np.isin(marks, [*self._planted]).any():
            self._alter = False
            other = encode_schedule([self._part(marks, due_ms + 1, **more)])
            self._logs.alter_next(self._plan.nodes - 1, EntryKind.SCHEDULE, *other, at_ms=at_ms)
            self._known += [
                {"verdict": "diverged", "planted": "diverged_entry", "mark": m, "id": None}
                for m in marks.tolist()
            ]
        self._logs.append(EntryKind.SCHEDULE, *encode_schedule([part]), at_ms=at_ms)

    def _part(
        self,
        marks: I64,
        due_ms: I64,
        *,
        keys: Binary | None = None,
        on_conflict: OnConflict = OnConflict.REJECT,
    ) -> Part:
        return Part(
            producer_id=ProducerId(1),
            sequence=self._sequence,
            due_ms=due_ms,
            requested_ms=due_ms,
            topic=np.full(len(marks), _T, np.uint32),
            payload=Binary(
                sizes=np.full(len(marks), 8, np.uint32), blob=marks.astype("<i8").tobytes()
            ),
            key=keys,
            on_conflict=on_conflict,
        )

    def _answer(
        self, outcome: str, marks: I64, due_ms: I64 | None, ids: Any, at_ms: int, **more: Any
    ) -> None:
        self._producer.line(
            "schedule", outcome=outcome, topic=TOPIC, start_ms=at_ms - 1,
            end_ms=at_ms + ANSWERED_MS, marks=marks, due_ms=due_ms,
            ids=ids if outcome == "ok" else None, **more,
        )  # fmt: skip

    def _change(self, tick: int, at_ms: int) -> None:
        """Cancel, reschedule, replace or compete with some timers that are due in the next tick."""
        rows = Rows.joined(self._due.get(tick + 1, []))
        first = (rows.mark <= self._plan.timers) & ~np.isin(rows.mark, self._moved)
        untrue = self._plants(rows.mark, "cancel_untrue")
        gone = self._every(rows.mark, CANCEL_EVERY) | untrue
        self._cancel(rows, gone & first, untrue, at_ms)
        planted = self._plants(rows.mark, "rescheduled_delivered", "reschedule_untrue")
        moved = (self._every(rows.mark, MOVE_EVERY) | planted) & first & ~gone
        replaced = self._replaced(rows.mark) & first & ~gone & ~moved
        rivalled = self._rivalled(rows.mark) & first & ~gone & ~moved & ~replaced
        self._moved = rows.mark[moved]
        self._due[tick + 1] = [rows.where(~gone & ~moved & ~replaced | ~first)]
        self._move(rows.where(moved), tick, at_ms)
        self._replace(rows.where(replaced), tick, at_ms)
        self._rival(rows.where(rivalled), at_ms)

    def _cancel(self, rows: Rows, gone: Mask, untrue: Mask, at_ms: int) -> None:
        """Cancel timers; the answer is false where `untrue` is set."""
        told = gone | self._plants(rows.mark, "cancelled_delivered")
        if gone.any():
            targets = payloads.Ids(rows.due_ms[gone], rows.seq[gone].astype(np.uint64))
            payload = payloads.encode_cancel(targets)
            self._logs.append(EntryKind.CANCEL, *payload, at_ms=at_ms)
        if told.any():
            results = np.where(untrue[told], "ALREADY_FIRED", "CANCELLED").tolist()
            ids = ids_of(rows.due_ms[told], rows.seq[told])
            self._producer.line(
                "cancel", outcome="ok", start_ms=at_ms - 1, end_ms=at_ms + 1, ids=ids,
                results=results,
            )  # fmt: skip

    def _successors(self, rows: Rows, marks: I64, tick: int) -> Rows:
        """Return the timers that replace these, due one tick later."""
        seqs = np.arange(self._seq + 1, self._seq + len(marks) + 1)
        self._seq += len(marks)
        new = Rows(marks, rows.due_ms + TICK_MS, seqs)
        self._due.setdefault(tick + 2, []).append(new)
        return new

    def _move(self, rows: Rows, tick: int, at_ms: int) -> None:
        if not len(rows.mark):
            return
        new = self._successors(rows, rows.mark, tick)
        targets = payloads.Ids(rows.due_ms, rows.seq.astype(np.uint64))
        order = payloads.Reschedule(targets, new.due_ms, new.due_ms)
        self._logs.append(EntryKind.RESCHEDULE, *payloads.encode_reschedule(order), at_ms=at_ms)
        untrue = self._plants(rows.mark, "reschedule_untrue")
        for which, told in ((~untrue, "RESCHEDULED"), (untrue, "ALREADY_FIRED")):
            if not (count := int(np.count_nonzero(which))):
                continue
            ids = ids_of(new.due_ms[which], new.seq[which])
            self._producer.line(
                "reschedule", outcome="ok", start_ms=at_ms - 1, end_ms=at_ms + 1,
                ids=ids_of(rows.due_ms[which], rows.seq[which]), results=[told] * count,
                due_ms=new.due_ms[which], new_ids=[None] * count if told != "RESCHEDULED" else ids,
            )  # fmt: skip
        offsets, planted = NOWHERE + rows.mark, self._plants(rows.mark, "rescheduled_delivered")
        self._deliver(rows, offsets, planted, 1, at_ms)

    def _replace(self, rows: Rows, tick: int, at_ms: int) -> None:
        if not len(rows.mark):
            return
        marks, all_ = rows.mark + self._plan.timers, np.ones(len(rows.mark), np.bool_)
        new = self._successors(rows, marks, tick)
        keys, mode = key_column(rows.mark, all_), OnConflict.REPLACE
        self._append_rows(marks, new.due_ms, at_ms, keys=keys, on_conflict=mode)
        self._answer(
            "ok", marks, new.due_ms, ids_of(new.due_ms, new.seq), at_ms,
            keys=key_texts(rows.mark, all_), on_conflict="replace",
            results=["REPLACED"] * len(marks), existing=ids_of(rows.due_ms, rows.seq),
        )  # fmt: skip
        offsets, planted = NOWHERE + rows.mark, self._plants(rows.mark, "replaced_delivered")
        self._deliver(rows, offsets, planted, 1, at_ms)

    def _rival(self, rows: Rows, at_ms: int) -> None:
        """Schedule timers with keys that are in use."""
        if not len(rows.mark):
            return
        marks, all_ = rows.mark + self._plan.timers, np.ones(len(rows.mark), np.bool_)
        seqs = np.arange(self._seq + 1, self._seq + len(marks) + 1)
        self._seq += len(marks)
        self._append_rows(marks, rows.due_ms, at_ms, keys=key_column(rows.mark, all_))
        keys, ids = key_texts(rows.mark, all_), ids_of(rows.due_ms, seqs).to_pylist()
        have = ids_of(rows.due_ms, rows.seq).to_pylist()
        doubled = self._plants(rows.mark, "key_doubled").tolist()
        untrue = self._plants(rows.mark, "conflict_untrue").tolist()
        self._answer(
            "ok", marks, rows.due_ms,
            [own if d else (other if u else None)
             for own, other, d, u in zip(ids, have, doubled, untrue, strict=True)],
            at_ms,
            keys=keys, on_conflict="reject",
            results=["SCHEDULED" if d else ("KEPT" if u else "REJECTED")
                     for d, u in zip(doubled, untrue, strict=True)],
            existing=[None if d else other for d, other in zip(doubled, have, strict=True)],
        )  # fmt: skip

    def _fire(self, tick: int, at_ms: int) -> None:
        rows = Rows.joined(self._due.pop(tick, []))
        rows = rows.where(np.lexsort((rows.seq, rows.due_ms)))  # type: ignore[arg-type]
        for start in range(0, len(rows.mark), FIRE_ROWS):
            fire = payloads.encode_fire(Fire(UnixMs(at_ms)))
            self._logs.append(EntryKind.FIRE, fire, at_ms=at_ms)
            part = slice(start, start + FIRE_ROWS)
            self._give(rows.where(part), at_ms)  # type: ignore[arg-type]

    def _give(self, rows: Rows, fired_ms: int) -> None:
        """Deliver and acknowledge the messages that one FIRE entry fired."""
        first = self._offset
        self._offset += len(rows.mark)
        self._group(Op.RESERVE, np.array([self._offset]), fired_ms)
        offsets = np.arange(first, self._offset)
        for start in range(0, len(offsets), GIVEN_ROWS):
            part = slice(start, start + GIVEN_ROWS)
            mine, at = rows.where(part), offsets[part]  # type: ignore[arg-type]
            early = self._plants(mine.mark, "expired_early")
            over = self._plants(mine.mark, "expired", "expired_delivered") | early
            given = ~(over | self._plants(mine.mark, "never_given"))
            seen_early = self._plants(mine.mark, "seen_early") & given
            self._deliver(mine, at, given & ~seen_early, 1, fired_ms)
            self._deliver(mine, at, seen_early, 1, fired_ms, after_ms=-TICK_MS - CLOCK_ERROR_MS)
            self._group(Op.ACK, at[~(over | self._plants(mine.mark, "ack_lost"))], fired_ms)
            if early.any():
                self._group(Op.EXPIRE, at[early], fired_ms)  # before the end of the time to live
            self._fired_over = np.append(self._fired_over, at[over & ~early])
            self._consumer.line(
                "ack", outcome="ok", topic=TOPIC, group=GROUP, start_ms=fired_ms + 4,
                end_ms=fired_ms + 9, epoch=self._logs.epoch, offsets=at[given],
                results=["ACKED"] * int(np.count_nonzero(given)),
            )  # fmt: skip
            self._deliver(mine, at, self._plants(mine.mark, "acked_again"), 2, fired_ms)
            self._deliver(mine, at, self._plants(mine.mark, "expired_delivered"), 3, fired_ms)
            self._deliver(mine, at, self._plants(mine.mark, "unmarked_redelivery"), 1, fired_ms)

    def _expire(self, at_ms: int) -> None:
        """Expire the undelivered messages that fired in the tick before the last one."""
        if len(self._over):
            self._group(Op.EXPIRE, self._over, at_ms)
        self._over, self._fired_over = self._fired_over, np.zeros(0, np.int64)

    def _deliver(
        self, rows: Rows, offsets: I64, which: Mask, attempt: int, fired_ms: int, after_ms: int = 3
    ) -> None:
        """Deliver the rows of a mask, received `after_ms` after they fired; it may be negative."""
        count = int(np.count_nonzero(which))
        if not count:
            return
        mine = rows.where(which)
        self._consumer.line(
            "deliver", topic=TOPIC, group=GROUP, epoch=self._logs.epoch,
            received_ms=fired_ms + after_ms, offsets=offsets[which],
            ids=ids_of(mine.due_ms, mine.seq), marks=mine.mark,
            attempts=np.full(count, attempt, np.int32), fired_at_ms=np.full(count, fired_ms),
            due_ms=mine.due_ms,
        )  # fmt: skip

    def _group(self, op: Op, offsets: I64, at_ms: int) -> None:
        ops = [GroupOp(op, _T, _G, offsets.astype(np.uint64))]
        self._logs.append(EntryKind.GROUP, *payloads.encode_group(ops), at_ms=at_ms)
