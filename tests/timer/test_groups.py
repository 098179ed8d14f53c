"""Groups against a naive model: sets of acked offsets and a dict of attempts."""

import zlib
from dataclasses import dataclass, field
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import Log, machine_on, part_of
from timer.entries.payloads import GroupSettings, Op
from timer.model.columns import gather
from timer.model.units import GroupId, QueueOffset, TopicId
from timer.ready.group import Group
from timer.ready.group_column import FrozenColumn, GroupColumn
from timer.recovery import manifest
from timer.state.apply_results import GroupApplied, MoveApplied
from timer.state.digest import _group_hash

write_of_columns = GroupColumn._write
quick = settings(derandomize=True, deadline=None)


def group_at(cursor: int = 0, reserved: int | None = None) -> Group:
    reserved = cursor if reserved is None else reserved
    return Group(
        group_id=GroupId(1),
        topic=TopicId(1),
        name="g",
        settings=GroupSettings(lease_ms=1000),
        cursor=QueueOffset(cursor),
        reserved=QueueOffset(reserved),
    )


def u64(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@dataclass
class Model:
    """The documented behaviour, implemented one offset at a time."""

    start: int
    ahead: int
    """End of the offsets that this epoch reserved."""
    delivered_to: int = 0
    acked: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    recalled: dict[int, int] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    later: dict[int, int] = field(default_factory=dict)

    @property
    def cursor(self) -> int:
        at = self.start
        while at in self.acked:
            at += 1
        return at

    @property
    def reserved(self) -> int:
        return max(self.ahead, self.cursor)

    @property
    def reach(self) -> int:
        return max(self.reserved, self.delivered_to)

    def ack(self, offsets: list[int]) -> list[bool]:
        new = []
        for offset in offsets:
            new.append(self.start <= offset < self.reach and offset not in self.acked)
            if new[-1]:
                self.acked.add(offset)
                self.later.pop(offset, None)
        return new

    def nack(self, offsets: list[int]) -> list[bool]:
        """Nack; the time is a hundred times the offset."""
        new = []
        for at, offset in enumerate(offsets):
            live = self.start <= offset < self.reach and offset not in self.acked
            new.append(live and offset not in offsets[:at])
        self.end(offsets)
        self.later |= {o: 100 * o + 1 for o, n in zip(offsets, new, strict=True) if n}
        return new

    def end(self, offsets: list[int]) -> None:
        for offset in set(offsets):
            if self.start <= offset < self.reach and offset not in self.acked:
                self.ended[offset] = self.ended.get(offset, 0) + 1
                self.later.pop(offset, None)

    def recall(self, offsets: set[int]) -> None:
        for offset in offsets:
            if self.start <= offset < self.reach and offset not in self.acked:
                self.recalled[offset] = self.recalled.get(offset, 0) + 1

    def epoch(self, queue_end: int) -> None:
        self.marks.append(min(self.reserved, queue_end))
        self.hand_over(self.marks[-1])

    def hand_over(self, offset: int) -> None:
        self.delivered_to = max(self.delivered_to, offset)
        self.ahead = self.cursor

    def attempts(self, offset: int) -> int:
        times = self.ended.get(offset, 0) + self.recalled.get(offset, 0)
        return 1 + times + sum(offset < mark for mark in self.marks)


offsets_of = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 3000, 2**63, 2**64 - 1])),
    max_size=8,
)
steps_of = st.lists(
    st.one_of(
        st.tuples(st.just("ack"), offsets_of),
        st.tuples(st.just("ack"), st.integers(0, 30).map(lambda n: list(range(n)))),
        st.tuples(st.just("end"), offsets_of),
        st.tuples(st.just("nack"), offsets_of),
        st.tuples(st.just("recall"), offsets_of),
        st.tuples(st.just("reserve"), st.lists(st.integers(0, 4000), min_size=1, max_size=1)),
        st.tuples(st.just("epoch"), st.lists(st.integers(0, 4000), min_size=1, max_size=1)),
        st.tuples(st.just("hand over"), st.lists(st.integers(0, 4000), min_size=1, max_size=1)),
    ),
    max_size=20,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.sampled_from([0, 5, 20]), steps_of)
def test_group_agrees_with_the_model(start: int, steps: list[tuple[str, list[int]]]) -> None:
    group, model = group_at(start, start + 10), Model(start, start + 10)
    for what, values in steps:
        if what == "ack":
            assert group.ack(u64(values)).tolist() == model.ack(values)
        elif what == "end":
            group.end_leases(u64(values))
            model.end(values)
        elif what == "nack":
            times = (u64(values) * np.uint64(100) + np.uint64(1)).astype(np.int64)
            assert group.nack(u64(values), times).tolist() == model.nack(values)
        elif what == "recall":
            group.recall(u64(sorted({*values})))
            model.recall({*values})
        elif what == "reserve":
            group.reserve(QueueOffset(values[0]))
            model.ahead = max(model.ahead, values[0])
        elif what == "hand over":
            group.hand_over(QueueOffset(values[0]))
            model.hand_over(values[0])
        else:
            group.begin_epoch(QueueOffset(values[0]))
            model.epoch(values[0])
        assert (group.cursor, group.reserved) == (model.cursor, model.reserved)
        live = [o for o in [*range(start, 45), 1023, 1024, 2999] if o not in model.acked]
        assert group.attempts(u64(live)).tolist() == [model.attempts(o) for o in live]
        assert group.failures(u64(live)).tolist() == [model.ended.get(o, 0) for o in live]
        assert group.not_before_ms(u64(live)).tolist() == [model.later.get(o, 0) for o in live]
        assert group.later_sum == group.recomputed_later_sum()
        assert bool(group.later_sum) == bool(model.later)
        some = [*range(45), 1023, 1024, 1025, 3000, 2**63, 2**64 - 1]
        done = [o < start or o in model.acked for o in some]
        assert group.is_acked(u64(some)).tolist() == done
        assert group.acked_count == len(model.acked)
        end = max([model.reach, *model.acked])
        assert group.unacked_count(QueueOffset(end)) == end - start - len(model.acked)


@quick
@given(st.permutations(list(range(12))), st.permutations(list(range(12))), st.data())
def test_sums_depend_on_what_was_acked_and_ended_not_on_the_order(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    one, two = group_at(0, 12), group_at(0, 12)
    cut = data.draw(st.integers(0, 12))
    for group, order in ((one, first), (two, second)):
        group.end_leases(u64(order))
    for part in (first[:cut], first[cut:]):
        one.ack(u64(part))
    two.ack(u64(second))
    assert (one.ack_sum, one.ended_sum, one.cursor) == (two.ack_sum, two.ended_sum, two.cursor)
    assert one.ack_sum
    assert one.ended_sum


def test_more_than_ten_thousand_holes_are_kept_and_closed() -> None:
    group = group_at(0, 100_000)
    odd = np.arange(1, 50_001, 2, dtype=np.uint64)
    assert group.ack(odd).all()
    assert group.cursor == 0
    assert not group.ack(odd).any()
    assert group.unacked_count(QueueOffset(50_001)) == 25_001
    group.ack(np.arange(0, 50_001, 2, dtype=np.uint64))
    assert group.cursor == 50_001


def test_attempts_never_wrap_back_to_the_first() -> None:
    group = group_at(0, 10)
    group.end_leases(u64([3]))
    group.ended = group.ended.put(u64([3]), 65_533, 0)
    for _ in range(5):
        group.end_leases(u64([3]))
    assert group.attempts(u64([3, 4])).tolist() == [65_536, 1]


def test_backoff_doubles_from_its_minimum_to_its_maximum() -> None:
    group = group_at(0, 4)
    assert group.backoff_ms(u64([0])).tolist() == [0]
    group.settings = GroupSettings(lease_ms=1000, backoff_ms_min=100, backoff_ms_max=1500)
    waits = []
    for _ in range(7):
        waits += group.backoff_ms(u64([0])).tolist()
        group.nack(u64([0]), np.array([5]))
    assert waits == [100, 200, 400, 800, 1500, 1500, 1500]
    group.settings = GroupSettings(lease_ms=1000, backoff_ms_min=2**40, backoff_ms_max=2**41)
    for _ in range(100):
        group.nack(u64([0]), np.array([5]))
    assert group.backoff_ms(u64([0, 1])).tolist() == [2**41, 2**40]


def test_failover_marks_a_redelivery_and_makes_no_dead_letter() -> None:
    group = group_at(0, 4)
    group.settings = GroupSettings(lease_ms=1000, max_attempts=1)
    group.begin_epoch(QueueOffset(4))
    assert group.attempts(u64([0, 1])).tolist() == [2, 2]
    assert not group.are_exhausted(u64([0, 1])).any()
    group.nack(u64([1]), np.array([5]))
    assert group.are_exhausted(u64([0, 1])).tolist() == [False, True]
    group.settings = GroupSettings(lease_ms=1000, max_attempts=0)
    assert not group.are_exhausted(u64([0, 1])).any()


def test_times_take_no_memory_once_nothing_is_nacked() -> None:
    group = group_at(0, 100_000)
    group.nack(u64([1, 2]), np.array([5, 6]))
    assert group.later.nbytes
    group.ack(u64([0, 1, 2]))
    assert group.later.nbytes == group.ended.nbytes == group.later_sum == 0


def test_epoch_marks_what_may_have_been_handed_out_and_nothing_after_it() -> None:
    group = group_at(0, 8)
    group.begin_epoch(QueueOffset(5))  # 5, 6, 7 were reserved, but had not fired
    assert group.attempts(u64(list(range(7)))).tolist() == [2, 2, 2, 2, 2, 1, 1]
    group.ack(u64([0, 1, 2, 3, 4]))
    assert group.delivered_ends == []


def test_arrays_follow_the_cursor_and_do_not_grow_with_what_is_done() -> None:
    group = group_at()
    for start in range(0, 1_000_000, 1000):
        group.reserve(QueueOffset(start + 1000))
        group.ack(np.arange(start, start + 1000, dtype=np.uint64))
    assert group.cursor == 1_000_000
    assert group.acked.nbytes <= 4096


def test_message_that_is_stuck_before_millions_of_acked_ones_costs_little() -> None:
    group, many, step = group_at(0, 4_000_000), 2_000_000, 50_000
    group.nack(u64([0, many]), np.array([10**13, 10**13]))
    columns = "acked", "ended", "later", "recalled"
    with mock.patch.object(GroupColumn, "_write", autospec=True) as write:
        write.side_effect = write_of_columns
        for start in range(1, many, step):
            before = write.call_count
            group.ack(np.arange(start, min(start + step, many), dtype=np.uint64))
            assert write.call_count <= before + 2, "chunks that are changed in a step"
            assert sum(getattr(group, name).nbytes for name in columns) < 2_000_000
    assert (group.cursor, group.unacked_count(QueueOffset(many))) == (0, 1)
    assert group.first_unacked(many + 2, 9).tolist() == [0, many, many + 1]
    with mock.patch.object(FrozenColumn, "pack", side_effect=AssertionError("by its thread")):
        state = manifest._group_state(group)
    again = manifest._group(msgpack.unpackb(msgpack.packb(state, default=manifest._pack)))
    for each in (group, again):
        assert sum(getattr(each, name).nbytes for name in columns) < 2_000_000
        each.ack(u64([0]))
        assert (each.cursor, each.failures(u64([many])).tolist()) == (many, [1])
    assert _group_hash(group) == _group_hash(again)


def test_stuck_messages_of_replicas_with_different_pasts_have_the_same_digest() -> None:
    rng = np.random.default_rng(5)
    one, two = group_at(0, 200), group_at(0, 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupColumn, "bits", 3)
        for step in range(300):
            offsets = rng.choice(np.arange(0, 200, dtype=np.uint64), rng.integers(1, 9), False)
            for group in (one, two):
                match step % 5:
                    case 0:
                        group.nack(offsets, offsets.astype(np.int64) * 100 + step)
                    case 1:
                        group.recall(offsets)
                    case 2:
                        group.end_leases(offsets)
                    case _:
                        group.ack(offsets[offsets % 13 > 0])
            if step % 7 == 0:  # a restart
                packed = msgpack.packb(manifest._group_state(two), default=manifest._pack)
                two = manifest._group(msgpack.unpackb(packed))
            assert _group_hash(one) == _group_hash(two)
            every = u64([*range(200)])
            assert one.attempts(every).tolist() == two.attempts(every).tolist()
            assert one.not_before_ms(every).tolist() == two.not_before_ms(every).tolist()
            assert one.is_acked(every).tolist() == two.is_acked(every).tolist()
            assert not one.failures(every)[one.is_acked(every)].any()
    assert one.acked.value_count > 100


def test_manifest_of_an_older_program_with_failures_of_acked_messages_is_read() -> None:
    group = group_at(0, 9)
    group.nack(u64([1, 2]), np.array([5, 6]))
    state = manifest._group_state(group)
    fields = msgpack.unpackb(msgpack.packb(state, default=manifest._pack))
    acked, ended = np.array([0, 1], np.bool_), np.array([0, 1, 1], np.uint16)
    fields["acked"], fields["ended"] = (zlib.compress(each.tobytes(), 1) for each in (acked, ended))
    fields["later"] = zlib.compress(np.array([0, 0, 6], np.int64).tobytes(), 1)
    fields["recalled"] = zlib.compress(np.array([3, 4], np.uint16).tobytes(), 1)
    again = manifest._group(fields)
    assert again.failures(u64([0, 1, 2])).tolist() == [0, 0, 1]
    assert again.attempts(u64([0, 1, 2])).tolist() == [4, 1, 2]
    assert again.not_before_ms(u64([0, 1, 2])).tolist() == [0, 0, 6]
    assert manifest._pack(manifest._group_state(again)["acked"]) == fields["acked"]
    assert manifest._pack(manifest._group_state(again)["later"]) == fields["later"]


def test_move_leaves_out_what_was_acked_and_makes_the_rest_messages_elsewhere_once() -> None:
    machine, log = machine_on(SimDisk(), leads=True), Log()
    machine.apply(log.topic("a"))
    machine.apply(log.schedule(part_of([(1, due, b"%d" % due) for due in (1, 2, 3)])))
    machine.apply(log.fire(5))
    machine.apply(log.create_group(1, "g"))
    machine.apply(log.op(Op.RESERVE, 1, 1, [3]))
    machine.apply(log.op(Op.ACK, 1, 1, [1]))
    first_seq = machine.next_seq
    for expected in ([True, False], [False, False]):
        applied = machine.apply(log.move(1, 1, [0, 1], "dead", "d"))
        assert isinstance(applied, GroupApplied)
        [moved] = applied.results
        assert isinstance(moved, MoveApplied)
        assert moved.new.tolist() == expected
    dead = machine.topic_by_name["dead"]
    assert (dead.queue.end, dead.groups["d"].cursor) == (1, 0)
    [(page, _)] = dead.queue.slices(u64([0]))
    assert bytes(gather(page.rows, page.bufs, "payload").blob) == b"moved 0"
    assert page.rows["seq"].tolist() == [first_seq]
    assert machine.next_seq == first_seq + 4, "a seq for each offset that is named"
    assert machine.group(TopicId(1), GroupId(1)).cursor == 2
    counts = machine.counts
    assert (counts.scheduled, counts.fired, counts.pending, dead.counts.fired) == (4, 4, 0, 1)
    machine.apply(log.checkpoint())


@given(st.lists(st.sets(st.integers(0, 59)), max_size=5), st.integers(0, 70), st.integers(0, 30))
def test_first_unacked_ones_are_found_in_however_many_looks(
    acks: list[set[int]], end: int, count: int
) -> None:
    group = group_at(reserved=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupColumn, "bits", 2)
        for offsets in acks:
            group.ack(np.array(sorted(offsets), np.uint64))
        unacked = [o for o in range(group.cursor, end) if not group.is_acked(u64([o]))[0]]
        assert group.first_unacked(end, count).tolist() == unacked[:count]
