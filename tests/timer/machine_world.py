"""A machine and its naive model, which take the same random steps."""

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    START_MS,
    Log,
    Model,
    answer_of,
    catch_up,
    check_counts,
    engine_on,
    ids_of,
    keys_of,
    machine_on,
    pages,
    part_of,
    queue_of,
    state_of,
    tallied,
)
from tests.timer.stores import read_ahead
from timer.entries import payloads
from timer.entries.entry_frame import Entry
from timer.entries.payloads import (
    GroupStart,
    Op,
    Targets,
)
from timer.model.columns import (
    OnConflict,
    Part,
)
from timer.model.timer_errors import (
    OutcomeForgottenError,
    SequenceGapError,
    UnknownProducerError,
)
from timer.model.units import TopicId, UnixMs
from timer.pending.read_view import Filter
from timer.recovery.engine import Flush
from timer.state.machine import Machine


@dataclass
class World:
    """One log, three replicas and the model."""

    log: Log = field(default_factory=Log)
    model: Model = field(default_factory=Model)
    flush: Flush | None = None

    def __post_init__(self) -> None:
        self.leader = machine_on(SimDisk(), leads=True)
        self.follower = machine_on(SimDisk(), leads=False)
        self.disk = SimDisk()
        self.engine = engine_on(self.disk)
        self.apply(self.log.begin_epoch())
        for name in ("a", "b"):
            self.apply(self.log.topic(name))
        for number, token in enumerate((b"p", b"q"), start=1):
            assert self.apply(self.log.producer(token)) == number
            self.model.answers[number] = []

    def apply(self, entry: Entry) -> Any:
        """Apply an entry to leader and follower; check that their answers agree; return it."""
        answer = answer_of(self.leader.apply(entry))
        assert answer_of(self.follower.apply(entry)) == answer
        assert self.follower.digest() == self.leader.recomputed_digest()
        return answer

    def topic_ids(self) -> list[int]:
        """Ids of the existing topics, ascending."""
        return [1, 2]

    # ---- steps

    def schedule(self, requests: "list[Asked]") -> None:
        parts = [self.part(*request) for request in requests]
        expected = self.model.schedule(parts, self.log.now_ms)
        answers, _ = self.apply(self.log.schedule(*parts))
        for part, answer, expectation in zip(parts, answers, expected, strict=True):
            if expectation is not None:
                assert answer == expectation
            elif part.producer_id > 2:
                assert answer is UnknownProducerError
            else:
                assert answer is (OutcomeForgottenError if part.sequence == 0 else SequenceGapError)

    def part(
        self, producer: int, step: int, mode: OnConflict, timers: list[tuple[int, int, int, bytes]]
    ) -> Part:
        last = len(self.model.answers.get(producer, []))
        sequence = max(0, last + step) if producer else 0
        rows = [(topic, self.due(delta), b"x" * size) for topic, delta, size, _ in timers]
        keys = [key for *_, key in timers]
        return part_of(rows, producer, sequence, keys=keys if any(keys) else None, on_conflict=mode)

    def due(self, delta: int) -> int:
        return max(self.log.now_ms + delta, 0) // 10 * 10

    def picked(self, picks: list[int]) -> list[tuple[int, int]]:
        """Return (due, seq) of issued timers, and of some that are not issued yet."""
        issued = [(timer[1], seq) for seq, timer in self.model.timers.items()]
        known = [*issued, (START_MS + 50, self.model.next_seq), (5, self.model.next_seq + 1)]
        return [known[pick % len(known)] for pick in picks]

    def cancel(self, picks: list[int]) -> None:
        targets = self.picked(picks)
        expected = self.model.cancel(targets, self.log.now_ms)
        answers, pairs = self.apply(self.log.cancel(targets))
        assert pairs == targets
        for answer, true in zip(answers, expected, strict=True):
            assert answer in true

    def cancel_keys(self, names: list[tuple[int, bytes]]) -> None:
        targets = self.held(names)
        expected = self.model.cancel(targets, self.log.now_ms)
        answers, pairs = self.apply(self.log.cancel_keys(names))
        assert pairs == targets
        assert [{answer} for answer in answers] == expected

    def held(self, names: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
        """Return the timer with each key; (0, 0) for a key without a timer."""
        seqs = [self.model.holder(*name) for name in names]
        return [(0, 0) if seq is None else (self.model.timers[seq][1], seq) for seq in seqs]

    def reschedule(self, picks: list[int], deltas: list[int]) -> None:
        targets = self.picked(picks)
        self._reschedule(ids_of(targets), targets, deltas)

    def reschedule_keys(self, names: list[tuple[int, bytes]], deltas: list[int]) -> None:
        self._reschedule(keys_of(names), self.held(names), deltas)

    def _reschedule(
        self, asked: Targets, targets: list[tuple[int, int]], deltas: list[int]
    ) -> None:
        dues = [max(1, self.due(deltas[at % len(deltas)])) for at in range(len(targets))]
        first_seq = self.model.next_seq
        expected = self.model.reschedule(targets, dues, self.log.now_ms)
        answers, pairs, old, _ = self.apply(self.log.reschedule(asked, dues))
        assert old == targets
        assert pairs == [(due, first_seq + at) for at, due in enumerate(dues)]
        for answer, true in zip(answers, expected, strict=True):
            assert answer in true

    def look_for_keys(self) -> None:
        """Check that all replicas find the model's timer for every key."""
        catch_up(self.engine, self.log)
        names = [(topic, key) for topic in self.topic_ids() for key in KEYS]
        asked, expected = keys_of(names), self.held(names)
        for machine in (self.leader, self.follower, self.engine.machine):
            rows = machine.store.find_keys(asked.topic, asked.key)
            assert [(int(row["due_ms"]), int(row["seq"])) for row in rows] == expected

    def look_in(self, topic: int, prefix: bytes, ahead_ms: int, rows_max: int) -> None:
        """List in pages and count the pending timers, and compare with the model."""
        catch_up(self.engine, self.log)
        span = self.log.now_ms - 100, self.log.now_ms + ahead_ms
        model = self.model
        mine = sorted((model.timers[s][1], s) for s in model.pending if model.timers[s][0] == topic)
        listed = [
            (due, seq, model.timers[seq][2], model.keys[seq])
            for due, seq in mine
            if span[0] <= due < span[1] and model.keys[seq].startswith(prefix)
        ]
        what = Filter(topic=topic, due_from_ms=span[0], due_to_ms=span[1], key_prefix=prefix)
        for machine in (self.leader, self.follower, self.engine.machine):
            cut = machine.store.read_view()
            assert [row for page in pages(cut, what, rows_max) for row in page] == listed
            assert tallied(cut, what) == len(listed)
            until = [0, span[0], span[1] - 1, 10**14]
            check_counts(cut, topic, until, [model.timers[s][:2] for s in model.pending])
            assert machine.topics[TopicId(topic)].counts.pending == len(mine)
            late = sorted((model.timers[s][:2] for s in model.pending), reverse=True)
            firsts = {of: due for of, due in late if due < span[1]}
            assert cut.first_overdue(span[1] - 1, 1 << 20) == firsts

    def fire(self, ahead_ms: int, *limits: int) -> None:
        self.log.now_ms += ahead_ms
        fire = payloads.Fire(UnixMs(max(self.log.now_ms, self.model.last_read_ms)), *limits)
        fired, limited = self.model.fire(fire, self.log.now_ms)
        answer = self.apply(self.log.fire(*fire))
        timers = self.model.timers
        by_topic = {t: [s for s in fired if timers[s][0] == t] for t in self.topic_ids()}
        expected = [(topic, seqs) for topic, seqs in by_topic.items() if seqs]
        assert answer == (expected, limited)
        assert self.leader.last_read_time_ms == self.model.last_read_ms

    def group(self, topic: int, latest: bool) -> None:
        start = GroupStart.LATEST if latest else GroupStart.EARLIEST
        self.apply(self.log.create_group(topic, f"g{topic}{latest}", start))

    def op(self, op: Op, pick: int, offsets: list[int]) -> None:
        groups = [group for topic in self.leader.topics.values() for group in topic.groups.values()]
        if not groups:
            return
        group = groups[pick % len(groups)]
        values = [min(offsets[0], len(self.model.queues.get(group.topic, [])))]
        if op is not Op.RESERVE:
            end = self.leader.topics[group.topic].queue.end
            values = [offset for offset in offsets if offset < end]
        self.apply(self.log.op(op, group.topic, group.group_id, values))

    def nack(self, pick: int, offsets: list[int], delay: int) -> None:
        groups = [group for topic in self.leader.topics.values() for group in topic.groups.values()]
        if groups:
            group = groups[pick % len(groups)]
            end = self.leader.topics[group.topic].queue.end
            values = [offset for offset in offsets if offset < end]
            self.apply(self.log.nack(group.topic, group.group_id, values, self.log.now_ms + delay))

    def epoch(self) -> None:
        self.apply(self.log.begin_epoch())

    def checkpoint(self) -> None:
        self.apply(self.log.checkpoint())
        assert (checkpoint := self.leader.checkpoint) == self.follower.checkpoint
        assert checkpoint is not None
        ends = {topic.name: topic.queue.end for topic in self.leader.topics.values()}
        assert checkpoint.queue_offsets == ends
        counts = self.leader.counts
        assert counts.scheduled == counts.pending + counts.fired + counts.cancelled + counts.dropped
        assert counts.pending == len(self.model.pending)

    def advance_flush(self, stages: int) -> None:
        """Advance a flush by `stages` of its steps: prepare, begin, write, end."""
        for _ in range(stages):
            self._advance_flush()

    def _advance_flush(self) -> None:
        if self.flush is None:
            catch_up(self.engine, self.log)
            if self.engine.prepare_flush(1):
                self.flush = self.engine.begin_flush()
        elif not self.flush.state.get("written"):
            self.flush.write()
            self.flush.state["written"] = True
        elif self.engine.settle_flush(self.flush, 1):
            self.engine.end_flush(self.flush)
            self.flush = None
        store = self.engine.machine.store
        if self.flush is None and (merge := store.begin_merge()):
            store.install_merge(merge, store.write_merge(merge))

    def toggle_leading(self, lead: bool) -> None:
        store = self.engine.machine.store
        store.lead() if lead else store.follow()
        read_ahead(store, self.log.now_ms)

    def restart(self, seed: int) -> None:
        self.disk.crash(random.Random(seed))
        self.flush = None
        self.engine = engine_on(self.disk)
        self.compare()

    def compare(self) -> None:
        catch_up(self.engine, self.log)
        assert state_of(self.engine.machine) == state_of(self.leader)

    def check_end(self) -> None:
        """Compare all state; fire all remaining timers."""
        self.checkpoint()
        self.compare()
        self.look_for_keys()
        self.fire(1000, 1, 1 << 20, 1)
        self.fire(10**9, 16_384, 1 << 20, 16)
        self.checkpoint()
        self.compare()
        assert not self.model.pending
        for topic, seqs in self.model.queues.items():
            begin = self.leader.topics[TopicId(topic)].queue.begin
            expected = [(o, s, self.model.timers[s][2]) for o, s in enumerate(seqs)]
            assert queue_of(self.leader, topic) == expected[begin:]
        assert set(self.model.fired_at) | set(self.model.cancelled_at) == set(self.model.timers)
        assert not set(self.model.fired_at) & set(self.model.cancelled_at)


KEYS = [b"a", b"b", b"\0", "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel".encode() * 3]


Asked = tuple[int, int, OnConflict, list[tuple[int, int, int, bytes]]]
"""Producer, distance to its next sequence, mode, and (topic, delta, size, key) per timer."""


deltas = st.sampled_from([-(10**13), -1000, 0, 10, 10, 20, 50, 500, 60_000, 10**8])


names_of = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from(KEYS)), min_size=1, max_size=4, unique=True
)


timers_of = st.lists(
    st.tuples(
        st.integers(1, 2),
        deltas,
        st.integers(0, 3),
        st.sampled_from([b"", b"", *KEYS]),
    ),
    min_size=1,
    max_size=5,
)


requests_of = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 7]),
        st.sampled_from([1, 1, 1, 0, -1, -9, 2]),
        st.sampled_from(OnConflict),
        timers_of,
    ),
    min_size=1,
    max_size=3,
)


offsets_of = st.lists(st.integers(0, 30), min_size=1, max_size=8)


step_of = st.one_of(
    st.tuples(st.just(World.schedule), requests_of),
    st.tuples(st.just(World.schedule), requests_of),
    st.tuples(st.just(World.cancel), st.lists(st.integers(0, 200), min_size=1, max_size=5)),
    st.tuples(st.just(World.cancel_keys), names_of),
    st.tuples(
        st.just(World.reschedule),
        st.lists(st.integers(0, 200), min_size=1, max_size=5),
        st.lists(deltas, min_size=1, max_size=5),
    ),
    st.tuples(st.just(World.reschedule_keys), names_of, st.lists(deltas, min_size=1, max_size=4)),
    st.tuples(st.just(World.look_for_keys)),
    st.tuples(
        st.just(World.look_in),
        st.integers(1, 2),
        st.sampled_from([b"", b"", b"a", b"schl"]),
        st.sampled_from([10**9, 600, 30]),
        st.sampled_from([1, 3, 1000]),
    ),
    st.tuples(
        st.just(World.fire),
        st.sampled_from([0, 9, 10, 25, 600]),
        st.sampled_from([1, 2, 3, 16_384]),
        st.sampled_from([0, 3, 100]),
        st.sampled_from([1, 16]),
    ),
    st.tuples(st.just(World.group), st.integers(1, 2), st.booleans()),
    st.tuples(
        st.just(World.op),
        st.sampled_from([Op.ACK, Op.ENDED, Op.RESERVE]),
        st.integers(0, 3),
        offsets_of,
    ),
    st.tuples(st.just(World.nack), st.integers(0, 3), offsets_of, st.sampled_from([0, 1, 10**6])),
    st.tuples(st.just(World.epoch)),
    st.tuples(st.just(World.checkpoint)),
    st.tuples(st.just(World.advance_flush), st.sampled_from([9, 9, 1, 2, 3])),
    st.tuples(st.just(World.advance_flush), st.sampled_from([9, 9, 1, 2, 3])),
    st.tuples(st.just(World.toggle_leading), st.booleans()),
    st.tuples(st.just(World.restart), st.integers(0, 9)),
    st.tuples(st.just(World.compare)),
)


def begun(*topics: str, leads: bool = True) -> tuple[Machine, Log]:
    machine, log = machine_on(SimDisk(), leads=leads), Log()
    for name in topics or ("a",):
        machine.apply(log.topic(name))
    return machine, log


def schedule(machine: Machine, log: Log, *dues: int, topic: int = 1) -> list[tuple[int, int]]:
    """Schedule timers; return (due, seq) of each."""
    first = int(machine.next_seq)
    machine.apply(log.schedule(part_of([(topic, due, b"p%d" % due) for due in dues])))
    return [(due, first + at) for at, due in enumerate(dues)]


def cancel(machine: Machine, log: Log, *targets: tuple[int, int]) -> list[int]:
    answer: list[int] = answer_of(machine.apply(log.cancel(targets)))[0]
    return answer
