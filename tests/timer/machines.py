"""Helpers for tests of the machine: a log in memory, and a naive model of the machine."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from chaos.sim.world.simdisk import SimDisk
from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind, encode, frame_at
from timer.entries.payloads import (
    FIRE_ROWS_MAX,
    AlterGroup,
    AnyOp,
    CreateGroup,
    EpochStart,
    Fire,
    GroupOp,
    GroupSettings,
    GroupStart,
    Ids,
    Keys,
    Move,
    Nack,
    Op,
    Reschedule,
    Targets,
)
from timer.entries.policies import Policies, Scope, ScopePolicy, encode_policy
from timer.entries.series_payloads import Planned, SeriesOp, encode_occurrences, encode_series
from timer.files.disk import Disk
from timer.leader.groups.group_leases import Leases
from timer.leader.intake.count_limits import CountLimits
from timer.leader.leader import LeaderConfig
from timer.model.columns import (
    Binary,
    OnConflict,
    Part,
    encode_schedule,
    gather,
)
from timer.model.firing_order import Position
from timer.model.recurrence import (
    SeriesSpec,
)
from timer.model.timer_errors import (
    EngineError,
)
from timer.model.units import Epoch, GroupId, LogIndex, ProducerId, ReplicaId, TopicId, UnixMs
from timer.pending.memory.held_rows import held_position
from timer.pending.prefetch import Prefetch, PrefetchTargets
from timer.pending.read_view import Filter, ReadView
from timer.pending.runs.held_scan import HELD_END, HeldReader, Portion
from timer.pending.store import Store
from timer.ready.group import Group
from timer.ready.page_cache import Pages
from timer.ready.spill import read_page
from timer.ready.topic import Topic
from timer.recovery.engine import Engine
from timer.recovery.manifest import SPILL_DIRECTORY
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    NOT_FOUND,
    AcksApplied,
    Applied,
    CancelApplied,
    DeleteTopicApplied,
    FireApplied,
    GroupApplied,
    Repeated,
    RescheduleApplied,
    ScheduleApplied,
)
from timer.state.cancel_outcomes import HORIZON_MS
from timer.state.key_conflicts import Verdict
from timer.state.machine import Machine
from timer.state.producers import RequestAnswer

START_MS = 1_700_000_000_000
STATE = Path("/state")
Timer = tuple[int, int, bytes]
"""Topic id, due, payload."""


_DISKS: WeakKeyDictionary[Pages, tuple[Disk, Path]] = WeakKeyDictionary()
"""Disk and folder of the spill files of an engine's pages."""


def u64(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([*values], np.uint64)


def part_of(
    timers: Sequence[Timer],
    producer_id: int = 0,
    sequence: int = 0,
    *,
    keys: Sequence[bytes] | None = None,
    on_conflict: OnConflict = OnConflict.REJECT,
) -> Part:
    due = np.array([due for _, due, _ in timers], np.int64)
    return Part(
        producer_id=ProducerId(producer_id),
        sequence=sequence,
        due_ms=due,
        requested_ms=due - 1,
        topic=np.array([topic for topic, _, _ in timers], np.uint32),
        payload=Binary.of([payload for _, _, payload in timers]),
        key=None if keys is None else Binary.of(keys),
        on_conflict=on_conflict,
    )


def ids_of(timers: Sequence[tuple[int, int]]) -> Ids:
    """Return targets by (due, seq)."""
    return Ids(np.array([due for due, _ in timers], np.int64), u64(seq for _, seq in timers))


def keys_of(names: Sequence[tuple[int, bytes]]) -> Keys:
    """Return targets by (topic, key)."""
    topics = np.array([topic for topic, _ in names], np.uint32)
    return Keys(topics, Binary.of([key for _, key in names]))


@dataclass
class Log:
    """Entries as a log holds them: framed, parsed and numbered, with times that never go back."""

    now_ms: int = START_MS
    epoch: int = 1
    entries: list[Entry] = field(default_factory=list)
    tokens: dict[bytes, int] = field(default_factory=dict)
    """Token of a producer -> its id: 1, 2, 3, …"""

    def append(self, kind: EntryKind, payload: list[bytes]) -> Entry:
        index = LogIndex(len(self.entries) + 1)
        frame = encode(kind, Epoch(self.epoch), index, UnixMs(self.now_ms), payload)
        entry = frame_at(memoryview(frame), 0)
        assert isinstance(entry, Entry)
        self.entries.append(entry)
        return entry

    def schedule(self, *parts: Part) -> Entry:
        return self.append(EntryKind.SCHEDULE, encode_schedule(parts))

    def cancel(self, timers: Sequence[tuple[int, int]]) -> Entry:
        return self.append(EntryKind.CANCEL, payloads.encode_cancel(ids_of(timers)))

    def cancel_keys(self, names: Sequence[tuple[int, bytes]]) -> Entry:
        return self.append(EntryKind.CANCEL, payloads.encode_cancel(keys_of(names)))

    def reschedule(self, targets: Targets, dues: Sequence[int]) -> Entry:
        due = np.array(dues, np.int64)
        order = Reschedule(targets, due, due - 1)
        return self.append(EntryKind.RESCHEDULE, payloads.encode_reschedule(order))

    def fire(
        self,
        read_time_ms: int,
        rows_max: int = FIRE_ROWS_MAX,
        bytes_max: int = 1 << 24,
        topics_max: int = 1 << 16,
    ) -> Entry:
        fire = Fire(UnixMs(read_time_ms), rows_max, bytes_max, topics_max)
        return self.append(EntryKind.FIRE, [payloads.encode_fire(fire)])

    def group(self, *ops: AnyOp) -> Entry:
        return self.append(EntryKind.GROUP, payloads.encode_group(ops))

    def create_group(
        self,
        topic: int,
        name: str,
        start: GroupStart = GroupStart.EARLIEST,
        creator: str = "",
        **settings: Any,
    ) -> Entry:
        how = GroupSettings(lease_ms=1000, **settings)
        return self.group(CreateGroup(TopicId(topic), name, start, how, creator))

    def op(self, op: Op, topic: int, group: int, offsets: Iterable[int]) -> Entry:
        return self.group(GroupOp(op, TopicId(topic), GroupId(group), u64(offsets)))

    def nack(self, topic: int, group: int, offsets: Sequence[int], not_before_ms: int) -> Entry:
        times = np.full(len(offsets), not_before_ms, np.int64)
        return self.group(Nack(Op.NACK, TopicId(topic), GroupId(group), u64(offsets), times))

    def alter(self, topic: int, group: int, **changes: int | str) -> Entry:
        return self.group(AlterGroup(TopicId(topic), GroupId(group), changes))

    def move(
        self, topic: int, group: int, offsets: Sequence[int], to: str, to_group: str = ""
    ) -> Entry:
        """Move messages to another topic, with the payload `moved` and their offset."""
        timers = [(0, 1, b"moved %d" % offset) for offset in offsets]
        rows = b"".join(encode_schedule([part_of(timers)]))
        ids = TopicId(topic), GroupId(group)
        return self.group(Move(Op.MOVE, *ids, u64(offsets), to, to_group, rows))

    def topic(self, name: str, creator: str = "") -> Entry:
        return self.append(EntryKind.TOPIC, [payloads.encode_topic(name, creator)])

    def delete_topic(self, topic: int) -> Entry:
        return self.append(EntryKind.TOPIC, [payloads.encode_delete_topic(TopicId(topic))])

    def policy(self, scope: Scope, **said: Any) -> Entry:
        return self.append(EntryKind.POLICY, [encode_policy(scope, ScopePolicy(**said))])

    def producer(self, token: bytes) -> Entry:
        drawn = ProducerId(self.tokens.setdefault(token, len(self.tokens) + 1))
        return self.append(EntryKind.PRODUCER, [payloads.encode_producer(token, drawn)])

    def series(self, op: SeriesOp) -> Entry:
        return self.append(EntryKind.SERIES, [encode_series(op)])

    def occur(self, rows: Sequence[tuple[int, int, int, int]]) -> Entry:
        """Append occurrences: (series, number, planned, due), by ascending series."""
        series, number, planned, due = zip(*rows, strict=True)
        times = np.array(planned, np.int64), np.array(due, np.int64)
        payload = encode_occurrences(Planned(u64(series), u64(number), *times))
        return self.append(EntryKind.OCCURRENCES, payload)

    def checkpoint(self) -> Entry:
        return self.append(EntryKind.CHECKPOINT, [])

    def begin_epoch(self, level: int = 1) -> Entry:
        self.epoch += 1
        voters = (ReplicaId(1), ReplicaId(2), ReplicaId(3))
        start = EpochStart(Epoch(self.epoch), ReplicaId(1), voters, level)
        return self.append(EntryKind.EPOCH, [payloads.encode_epoch(start)])


def log_of(timers: int, size: int = 1, delay_ms: int = 10**9) -> Log:
    """Return the log of a leader with the topic `a`, and an entry for each of so many timers."""
    log = Log()
    log.begin_epoch()
    log.topic("a")
    for _ in range(timers):
        log.schedule(part_of([(1, START_MS + delay_ms, bytes(size))]))
    return log


def machine_on(disk: SimDisk, *, leads: bool) -> Machine:
    store = Store(disk, STATE)
    if leads:
        store.lead()
    return Machine(store)


def engine_on(disk: Disk, directory: Path = STATE) -> Engine:
    engine = Engine(disk, directory, LeaderConfig())
    _DISKS[engine.machine.pages] = disk, directory
    return engine


def leases_of(group: Group, epoch: int) -> Leases:
    """Return the leases of the only group of an epoch."""
    return Leases(group, Epoch(epoch), itertools.count(), CountLimits().group_leases_max)


def catch_up(engine: Engine, log: Log) -> None:
    """Apply the log's entries after the engine's applied index."""
    engine.raise_commit_index(LogIndex(len(log.entries)))
    while engine.is_behind:
        first, last = engine.next_chunk()
        entries = log.entries[first - 1 : last]
        if first % 2:  # else the fold itself reads the runs
            store = engine.machine.store
            asked = PrefetchTargets(entries, store._stored_dues, keys=True)
            readers = readers_of(store, engine.machine.pauses.next_portion(), entries)
            prefetch = Prefetch(store._runs.runs, asked, readers)
            prefetch.read()
            engine.use_prefetch(prefetch)
        engine.fold(entries)
        engine.machine.store.use_prefetch(None)


def flush(engine: Engine) -> None:
    """Write a manifest, at once and whole."""
    begun = engine.begin_flush()
    assert begun is not None
    begun.write()
    engine.end_flush(begun)


def readers_of(store: Store, portion: Portion | None, entries: list[Entry]) -> list[HeldReader]:
    """Return readers of the held rows for the sweep and of the due rows for the first FIRE."""
    readers: list[HeldReader] = []
    if portion is not None:
        held = store._runs.begin_held(held_position(portion.seen), portion.sweep_topics)
        readers += store._reader(held, portion.rows_max, portion.bytes_max, HELD_END)
    for entry in [entry for entry in entries if entry.kind is EntryKind.FIRE][:1]:
        fire = payloads.decode_fire(entry.payload)
        due = store._runs.begin_due(store.position)
        readers += store._reader(due, fire.rows_max, fire.bytes_max, fire.read_time_ms)
    return readers


# ---- values to compare


def answer_of(applied: Applied) -> Any:
    """Return an applied entry's results as plain values that `==` compares."""
    match applied:
        case ScheduleApplied(parts, ready):
            return [
                type(part)
                if isinstance(part, EngineError)
                else (*plain_answer(part.answer), isinstance(part, Repeated))
                for part in parts
            ], sorted(ready)
        case CancelApplied(results, targets):
            return results.tolist(), pairs_of(targets)
        case RescheduleApplied(results, targets, timers, ready):
            return results.tolist(), pairs_of(timers), pairs_of(targets), sorted(ready)
        case FireApplied(fired, limited, released, dropped):
            went, *others = [
                [(topic, rows["seq"].tolist()) for topic, rows in moved]
                for moved in (fired, released, dropped)
            ]
            return (went, limited, *others) if any(others) else (went, limited)
        case GroupApplied(results):
            return [
                each.new.tolist() if isinstance(each, AcksApplied) else type(each).__name__
                for each in results
            ]
        case Topic():
            return applied.topic_id
        case DeleteTopicApplied():
            return applied.dropped, applied.messages, applied.groups
        case Policies():
            return dict(applied)
        case _:
            return applied


def pairs_of(targets: Ids) -> list[tuple[int, int]]:
    """Return (due, seq) of each target."""
    return list(zip(targets.due_ms.tolist(), targets.seq.tolist(), strict=True))


def plain_answer(answer: RequestAnswer) -> "PlainAnswer":
    """Return the answer to a request as plain values."""
    verdicts = None
    if answer.verdicts is not None:
        v = answer.verdicts
        columns = (v.verdict.tolist(), v.due_ms.tolist(), v.seq.tolist())
        verdicts = list(zip(*columns, strict=True))
    return answer.sequence, answer.first_seq, answer.due_ms.tolist(), verdicts


PlainAnswer = tuple[int, int, list[int], list[tuple[int, int, int]] | None]
"""Sequence, first seq, dues, and (verdict, due, seq) per row. None: all rows are SCHEDULED."""
Message = tuple[int, int, bytes]
"""Queue offset, seq, payload."""


def queue_of(machine: Machine, topic_id: int) -> list[Message]:
    """Return all messages of a topic's queue."""
    fetch_all(machine)
    queue = machine.topics[TopicId(topic_id)].queue
    found: list[Message] = []
    offset = int(queue.begin)
    for page, places in queue.slices(np.arange(queue.begin, queue.end, dtype=np.uint64)):
        rows = page.rows[places]
        for row, payload in zip(rows, gather(rows, page.bufs, "payload").values(), strict=True):
            found.append((offset, int(row["seq"]), payload))
            offset += 1
    return found


def fetch_all(machine: Machine) -> None:
    """Read all spilled pages back into memory."""
    pages = machine.pages
    for topic in machine.topics.values():
        for block in topic.queue.blocks:
            pages.request(block)
    for block in pages.requested_blocks(1 << 60):
        assert block.spill is not None
        disk, directory = _DISKS[pages]
        page = read_page(disk, directory / SPILL_DIRECTORY, block.spill)
        pages.install_page(block, page)


def state_of(machine: Machine) -> dict[str, Any]:
    """Return all state that any answer can depend on, as plain values."""
    return {
        "digest": machine.digest(),
        "applied": (machine.applied_index, machine.applied_epoch, machine.applied_time_ms),
        "counts": astuple(machine.counts),
        "pending": machine.store.pending,
        "position": tuple(machine.store.position),
        "voters": machine.voters,
        "queues": {topic: queue_of(machine, topic) for topic in machine.topics},
        "retention marks": {
            topic.name: [*topic.queue.intervals] for topic in machine.topics.values()
        },
        "groups": [
            (
                group.group_id,
                group.name,
                group.cursor,
                group.reserved,
                group.delivered_ends,
                group.delivered_to,
                group.moved.tolist(),
                group.is_acked(u64(range(200))).tolist(),
                [a for o, a in enumerate(group.attempts(u64(range(200)))) if o >= group.cursor],
                [
                    t
                    for o, t in enumerate(group.not_before_ms(u64(range(200))))
                    if o >= group.cursor
                ],
                group.settings,
            )
            for topic in machine.topics.values()
            for group in topic.groups.values()
        ],
        "policies": dict(machine.policies),
        "successors": [[column.tolist() for column in each] for each in machine.successors.links],
        "held": (machine.store.held, machine.sweep_position),
        "producers": [
            (
                producer_id,
                producer.token,
                producer.used_at_ms,
                producer.last_sequence,
                producer.answer_rows,
                [plain_answer(answer) for answer in producer.answers],
            )
            for producer_id, producer in machine.producers
        ],
        "series": (
            machine.series.next_id,
            machine.series.views(machine.series.ids_of(None, 0, 1 << 30)),
            sorted(machine.series.waiting),
        ),
        "outcomes": machine.outcomes.pack(),
        "fire marks": list(machine.fire_marks),
        "checkpoint": machine.checkpoint,
    }


# ---- the model


@dataclass
class Model:
    """The promises, implemented for one timer at a time, without columns and files."""

    last_read_ms: int = 0
    next_seq: int = 1
    timers: dict[int, Timer] = field(default_factory=dict)
    """Seq -> its timer, for every seq issued."""
    weights: dict[int, int] = field(default_factory=dict)
    """Seq -> bytes of payload and key."""
    pending: set[int] = field(default_factory=set)
    queues: dict[int, list[int]] = field(default_factory=dict)
    """Topic -> seqs in the order of their offsets."""
    cancelled_at: dict[int, int] = field(default_factory=dict)
    fired_at: dict[int, int] = field(default_factory=dict)
    answers: dict[int, list[PlainAnswer]] = field(default_factory=dict)
    """Producer -> the answers to all its requests."""
    keys: dict[int, bytes] = field(default_factory=dict)
    """Seq -> its key."""

    def schedule(self, parts: Sequence[Part], now_ms: int) -> list[tuple[Any, ...] | None]:
        """Return the answer to each part; None for a rejected part."""
        results: list[tuple[Any, ...] | None] = []
        for part in parts:
            known = self.answers.get(part.producer_id)
            if part.producer_id and known is None:
                results.append(None)
                continue
            if known is not None and 1 <= part.sequence <= len(known):
                results.append((*known[part.sequence - 1], True))
                continue
            if known is not None and part.sequence != len(known) + 1:
                results.append(None)
                continue
            first_seq = self.next_seq
            verdicts = self._take(part, now_ms)
            kept = None if all(v[0] == Verdict.SCHEDULED for v in verdicts) else verdicts
            answer = (part.sequence, first_seq, part.due_ms.tolist(), kept)
            if known is not None:
                known.append(answer)
            results.append((*answer, False))
        return results

    def _take(self, part: Part, now_ms: int) -> list[tuple[int, int, int]]:
        payload = part.payload.values()
        keys = [b""] * len(payload) if part.key is None else part.key.values()
        verdicts = []
        rows = zip(part.topic.tolist(), part.due_ms.tolist(), payload, keys, strict=True)
        for topic, due, body, key in rows:
            seq = self.next_seq
            self.next_seq += 1
            held = self.holder(topic, key)
            if held is None and key and part.on_conflict is OnConflict.UPDATE:
                verdicts.append((int(Verdict.NOT_PENDING), 0, 0))
                continue
            if held is None:
                verdicts.append((int(Verdict.SCHEDULED), 0, 0))
            else:
                replace = part.on_conflict in (OnConflict.REPLACE, OnConflict.UPDATE)
                keep = part.on_conflict is OnConflict.KEEP
                verdict = Verdict.KEPT if keep else Verdict.REJECTED
                verdict = Verdict.REPLACED if replace else verdict
                verdicts.append((int(verdict), self.timers[held][1], held))
                if not replace:
                    continue
                self._cancel(held, now_ms)
            self._begin(seq, (topic, due, body), key, now_ms)
        return verdicts

    def holder(self, topic: int, key: bytes) -> int | None:
        """Return the seq of the pending timer with a key in a topic. None: there is none."""
        if not key:
            return None
        having = [s for s in self.pending if self.timers[s][0] == topic and self.keys[s] == key]
        assert len(having) <= 1
        return having[0] if having else None

    def _begin(self, seq: int, timer: Timer, key: bytes, now_ms: int) -> None:
        self.timers[seq], self.keys[seq] = timer, key
        self.weights[seq] = len(timer[2]) + len(key)
        if timer[1] <= self.last_read_ms:
            self._fire(seq, now_ms)
        else:
            self.pending.add(seq)

    def _cancel(self, seq: int, now_ms: int) -> None:
        self.pending.discard(seq)
        self.cancelled_at[seq] = now_ms

    def reschedule(
        self, targets: Sequence[tuple[int, int]], dues: Sequence[int], now_ms: int
    ) -> list[set[int]]:
        """Return per target the answers that are true."""
        results = []
        first_seq, self.next_seq = self.next_seq, self.next_seq + len(targets)
        moved: list[tuple[int, Timer, bytes]] = []
        for number, ((due, seq), new_due) in enumerate(zip(targets, dues, strict=True)):
            [result] = self.cancel([(due, seq)], now_ms)
            results.append(result)
            if result == {CANCELLED}:
                topic, _, body = self.timers[seq]
                moved.append((first_seq + number, (topic, new_due, body), self.keys[seq]))
        for row in moved:
            self._begin(*row, now_ms)
        return results

    def _fire(self, seq: int, now_ms: int) -> None:
        self.pending.discard(seq)
        assert seq not in self.fired_at
        self.fired_at[seq] = now_ms
        self.queues.setdefault(self.timers[seq][0], []).append(seq)

    def fire(self, fire: Fire, now_ms: int) -> tuple[list[int], bool]:
        """Return the seqs that fire, in order, and whether the limit was reached."""
        due = sorted(
            (self.timers[s][1], s) for s in self.pending if self.timers[s][1] <= fire.read_time_ms
        )
        fired: list[int] = []
        topics: set[int] = set()
        size = 0
        for _, seq in due:
            weight = self.weights[seq]
            if len(fired) == fire.rows_max or (fired and size + weight > fire.bytes_max):
                break
            topics.add(self.timers[seq][0])
            if len(topics) > fire.topics_max:
                break
            fired.append(seq)
            size += weight
        limited = len(fired) < len(due)
        self.last_read_ms = self.timers[fired[-1]][1] if limited else fire.read_time_ms
        for seq in fired:
            self._fire(seq, now_ms)
        return fired, limited

    def cancel(self, targets: Sequence[tuple[int, int]], now_ms: int) -> list[set[int]]:
        """Return per target the answers that are true."""
        results: list[set[int]] = []
        for due, seq in targets:
            if seq in self.pending and self.timers[seq][1] == due:
                self._cancel(seq, now_ms)
                results.append({CANCELLED})
            elif seq in self.cancelled_at:
                results.append(_within_horizon(ALREADY_CANCELLED, now_ms - self.cancelled_at[seq]))
            elif seq in self.fired_at:
                results.append(_within_horizon(ALREADY_FIRED, now_ms - self.fired_at[seq]))
            else:
                results.append({NOT_FOUND})
        return results


def _within_horizon(result: int, age_ms: int) -> set[int]:
    return {result} if age_ms <= HORIZON_MS else {result, NOT_FOUND}


def pages(
    cut: ReadView, what: Filter, rows_max: int
) -> Iterator[list[tuple[int, int, bytes, bytes]]]:
    """Yield (due, seq, payload, key) of the timers of each page."""
    seen: Position | None = what.start
    while seen is not None:
        page = cut.page(what, seen, rows_max)
        rows, blob = page.timers
        payload, key = (gather(rows, {0: blob}, name).values() for name in ("payload", "key"))
        assert len(rows) <= rows_max
        yield [*zip(rows["due_ms"].tolist(), rows["seq"].tolist(), payload, key, strict=True)]
        assert page.next is None or page.next > seen
        seen = page.next


def tallied(cut: ReadView, what: Filter) -> int:
    """Return the number of a filter's timers, part by part."""
    count, seen = 0, what.start
    while True:
        part = cut.tally(what, seen)
        count += part.timers
        if part.next is None:
            return count
        assert part.next > seen
        seen = part.next


def check_counts(
    cut: ReadView, topic: int, until: list[int], pending: list[tuple[int, int]]
) -> None:
    """Compare the counts of a topic, and of all, with the (topic, due) of the pending timers."""
    ends = sorted(until)
    mine = [due for of, due in pending if of == topic]
    assert cut.count(topic, ends) == [sum(due <= end for due in mine) for end in ends]
    counts, exact = cut.count_all(ends)
    assert not exact or counts == [sum(due <= end for _, due in pending) for end in ends]


EVERY = SeriesSpec(every_ms=1_000, start_ms=START_MS + 1_000, payload=b"p")
