"""The state plane's decisions, with a shell whose turns and threads the test runs."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import pytest

from chaos.sim.world.simdisk import SimDisk
from cluster.state.state_plane import (
    EARLY_SHARE,
    HIGH_DELIVERY_MS,
    LOW_FLUSH_MS,
    READ_AHEAD_MS,
    SAMPLE_MS,
    TOPICS_AT_ONCE,
    WAKE_MS_MAX,
    FlushLimits,
    StatePlane,
    ThreadWork,
)
from tests.calls import calls_of
from tests.timer.lookups import flip
from tests.timer.machines import START_MS, STATE, Log, engine_on, log_of, part_of
from timer.entries.entry_frame import Entry, EntryKind
from timer.files.disk_reserve import DiskSpace
from timer.leader.groups.group_delivery import Delivery
from timer.leader.intake.cluster_clock import SETTLE_MS, ClockReport, ClusterClock, Sample
from timer.leader.leader import Leader
from timer.model.timer_errors import (
    CorruptFileError,
    FileDamage,
    NotLeaderError,
    NotReadyError,
    OverloadedError,
    ShuttingDownError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs
from timer.pending.runs import run_set
from timer.pending.runs.run_writer import unpaced
from timer.recovery.engine import FOLD_BYTES

NEVER = 1 << 40


class Turns:
    """A shell that delays all turns, threads and reads until the test runs them."""

    flush_pace = merge_pace = staticmethod(unpaced)

    def __init__(self, log: Log) -> None:
        self.log = log
        self.turns = deque[Callable[[], None]]()
        self.threads = deque[tuple[ThreadWork, Callable[[], Any], Callable[[Any], None]]]()
        self.syncs = deque[Callable[[], None]]()
        self.in_memory = True
        self.drops: list[tuple[int, bool]] = []
        self.folds = 0
        self.waits_ms: list[int] = []
        self.now_ms = 0
        self.damages: list[FileDamage] = []
        self.clock_reports: list[ClockReport] = []
        self.clock_set_ms = 0

    def mono_ms(self) -> MonoMs:
        return MonoMs(self.now_ms)

    def wall_ms(self) -> UnixMs:
        return UnixMs(START_MS + self.now_ms + self.clock_set_ms)

    def samples(self) -> Iterable[Sample]:
        return [Sample.at(ReplicaId(1), self.wall_ms(), self.mono_ms(), 0)]

    def make_clock(self, floor_ms: UnixMs, /) -> ClusterClock:
        now = self.mono_ms()
        return ClusterClock(
            {ReplicaId(1)}, self.samples(), floor_ms=floor_ms, floor_at_ms=now, boot_ms=now
        )

    def draw_share(self) -> float:
        return 1.0

    def soon(self, call: Callable[[], None]) -> None:
        self.turns.append(call)

    def wake_in(self, wait_ms: int) -> None:
        assert wait_ms >= 0
        self.waits_ms.append(wait_ms)

    def fold_in(self) -> None:
        self.folds += 1

    def run(self, kind: ThreadWork, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.threads.append((kind, work, done))

    def run_timed(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        self.log.now_ms = max(self.log.now_ms, time_ms)
        return self.log.append(kind, payload).index

    def last_time_ms(self) -> UnixMs:
        return self.log.entries[-1].time_ms

    def lease_held(self) -> bool:
        return True

    def cached(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        return self.log.entries[first - 1 : last] if self.in_memory else None

    def read(
        self, first: LogIndex, last: LogIndex, done: Callable[[Sequence[Entry]], None]
    ) -> None:
        self.turns.append(lambda: done(self.log.entries[first - 1 : last]))

    def when_synced(self, index: LogIndex, done: Callable[[], None]) -> None:
        assert index <= len(self.log.entries)
        self.syncs.append(done)

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        self.drops.append((index, keep))

    def leader_address(self) -> str | None:
        return "elsewhere:1"

    def on_delivery(self, delivery: Delivery, /) -> None:
        raise AssertionError("there are no consumers")

    def on_leading_changed(self) -> None:
        """Nothing to do."""

    def clocks_read(self, report: ClockReport, /) -> None:
        self.clock_reports.append(report)

    def on_damage(self, damage: FileDamage, /) -> None:
        self.damages.append(damage)

    # ---- for tests

    def turn(self) -> None:
        """Run the turns that are ordered, and those that they order."""
        while self.turns:
            self.turns.popleft()()

    def finish(self, kind: ThreadWork) -> None:
        """Let the thread do its oldest work, of this kind."""
        found, work, done = self.threads.popleft()
        assert found is kind
        done(work())


def plane_of(log: Log, disk: SimDisk | None = None, **limits: int) -> tuple[StatePlane, Turns]:
    io = Turns(log)
    given = dict.fromkeys((field.name for field in fields(FlushLimits)), NEVER)
    given["topics_at_once"] = TOPICS_AT_ONCE
    return StatePlane(engine_on(disk or SimDisk()), FlushLimits(**given | limits), io), io


def last_kind(log: Log) -> EntryKind:
    return log.entries[-1].kind


def serves(plane: StatePlane) -> bool:
    return plane.engine.leader is not None


def end(log: Log) -> LogIndex:
    return LogIndex(len(log.entries))


def test_follower_folds_after_its_interval_once_for_all_commits() -> None:
    log = log_of(3)
    plane, io = plane_of(log)
    for index in range(1, end(log) + 1):
        plane.on_commit(LogIndex(index))
    io.turn()
    assert (io.folds, plane.engine.machine.applied_index) == (1, 0)
    plane.fold_later()
    io.turn()
    assert plane.engine.machine.applied_index == end(log)


def test_promoted_replica_serves_when_its_fold_has_reached_the_end_of_the_log() -> None:
    log = log_of(1_500)
    plane, io = plane_of(log)
    io.in_memory = False
    plane.on_commit(end(log))
    with pytest.raises(NotLeaderError):
        plane.require_leader()
    plane.on_lead(Epoch(log.epoch))
    while not serves(plane):
        with pytest.raises(NotReadyError):
            plane.require_leader()
        io.turns.popleft()()
    assert plane.engine.machine.applied_index == end(log)
    plane.on_stepdown(Epoch(log.epoch))
    with pytest.raises(NotLeaderError):
        plane.require_leader()


def test_stepdown_before_the_end_of_the_fold_ends_the_promotion() -> None:
    log = log_of(1_500)
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    plane.on_stepdown(Epoch(log.epoch))
    io.turn()
    assert plane.engine.machine.applied_index == end(log)
    assert plane.engine.leader is None


def test_leader_reports_its_clock_at_once_and_after_each_reading_of_the_voters() -> None:
    log = log_of(1)
    plane, io = plane_of(log)
    assert plane.clock_report() == ClockReport()
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    io.turn()
    assert [each.jumped_ms for each in io.clock_reports] == [0]
    for io.now_ms, io.clock_set_ms in (
        (SAMPLE_MS, 60_000),
        (SAMPLE_MS + SETTLE_MS, 60_000),
        (2 * SAMPLE_MS + SETTLE_MS, 0),
    ):
        plane.kick()
        io.turn()
    before, jumped, back = io.clock_reports[1:]
    assert (before.jumped_ms, jumped.error_ms) == (0, 0)
    assert before.error_ms < -59_000
    assert jumped.jumped_ms == back.jumped_ms > 55_000
    assert back.error_ms == 59_999 - SAMPLE_MS // 2  # the reading's error is a millisecond
    assert plane.clock_report() == io.clock_reports[-1]


def test_leader_applies_no_entry_before_its_time_and_a_follower_does() -> None:
    log = log_of(1)
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    io.turn()
    before = plane.engine.machine.applied_index
    log.now_ms = START_MS + 5
    log.fire(START_MS + 5)
    log.schedule(part_of([(1, START_MS + 10**9, b"behind it")]))
    for io.now_ms, applied in ((0, before), (4, before), (5, end(log))):
        plane.on_commit(end(log))
        plane.kick()
        io.turn()
        assert plane.engine.machine.applied_index == applied, io.now_ms
        assert io.waits_ms[-1] <= 5 or applied == end(log)
    log.fire(START_MS + 9)
    plane.on_stepdown(Epoch(log.epoch))
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    assert plane.engine.machine.applied_index == end(log)


def test_step_at_the_time_of_a_held_entry_does_not_spin_while_the_fold_waits_for_a_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_of(1)
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    io.turn()
    log.now_ms = START_MS + 5
    log.fire(START_MS + 5)
    plane.on_commit(end(log))
    io.turn()
    io.now_ms = 5
    with monkeypatch.context() as patch:
        patch.setattr(StatePlane, "waits_for_flush", True)
        plane.kick()
        for _ in range(3):
            if io.turns:
                io.turns.popleft()()
        assert not io.turns
        assert io.waits_ms[-1] > 0
    plane.on_commit(end(log))
    io.turn()
    assert plane.engine.machine.applied_index == end(log)


def test_wait_until_the_next_step_counts_from_the_begin_of_this_one() -> None:
    plane, io = plane_of(log_of(1))
    plane.kick()
    io.turn()
    assert io.waits_ms == [WAKE_MS_MAX]
    keep_up = plane.engine.keep_up

    def slow() -> bool:
        io.now_ms += 7
        return keep_up()

    plane.engine.keep_up = slow  # type: ignore[method-assign]
    plane.kick()
    io.turn()
    assert io.waits_ms[-1] == WAKE_MS_MAX - 7


def fired_log() -> Log:
    log = log_of(20, size=1_000, delay_ms=1)
    log.fire(START_MS + 1)
    log.schedule(part_of([(1, START_MS + 10**9, b"after")]))
    return log


def test_fold_waits_for_a_flush_while_too_much_has_fired_and_goes_on_at_its_end() -> None:
    log = fired_log()
    plane, io = plane_of(log, memtable_bytes=30_000, unspilled_bytes=10_000)
    plane.on_commit(LogIndex(end(log) - 1))
    plane.fold_later()
    io.turn()
    assert plane.engine.flushing
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    assert (plane.waits_for_flush, plane.engine.is_behind) == (True, True)
    io.syncs.popleft()()
    io.finish(ThreadWork.FLUSH)
    io.turn()
    assert not plane.engine.is_behind
    assert io.drops == [(end(log), True)]


@pytest.mark.parametrize(
    ("in_memory", "due_at", "drains", "flushes"),
    [(True, 1, False, 2), (False, 4, False, 1), (True, 1, True, 1)],
)
def test_fold_waits_while_the_state_of_a_flush_is_captured_and_one_fire_always_passes(
    in_memory: bool, due_at: int, drains: bool, flushes: int
) -> None:
    log = Log()
    for number in range(3):
        log.topic(f"a{number}")
    log.schedule(part_of([(1, START_MS + each, bytes(FOLD_BYTES)) for each in (1, 2, 3)]))
    for each in (1, 2, 3):
        log.fire(START_MS + each)
    fires = [entry.index for entry in log.entries if entry.kind is EntryKind.FIRE]
    due_at *= FOLD_BYTES
    plane, io = plane_of(log, memtable_bytes=due_at, unspilled_bytes=1_000, topics_at_once=1)
    io.in_memory = in_memory
    plane.on_commit(end(log))
    plane.fold_later()
    while drains and not plane.engine.capture_begun:
        io.turns.popleft()()
    if drains:
        plane.drain()
    waits = []
    while plane.engine.is_behind:
        io.turn()
        if plane.engine.is_behind:
            assert plane.waits_for_flush
            waits.append(plane.engine.machine.applied_index)
            io.syncs.popleft()()
            io.finish(ThreadWork.FLUSH)
    assert waits == fires[:flushes]


def test_fold_goes_on_if_the_flush_that_it_waits_for_can_not_begin_within_an_entry() -> None:
    log = Log()
    for number in range(3):
        log.topic(f"a{number}")
    log.schedule(part_of([(1, START_MS + 1, bytes(2_000))]))
    plane, io = plane_of(log, memtable_bytes=1_000, unspilled_bytes=1_000, topics_at_once=1)
    plane.on_commit(end(log))
    plane.fold_later()
    while not plane.engine.capture_begun:
        io.turns.popleft()()
    log.fire(START_MS + 1)
    log.begin_epoch()
    plane.on_commit(end(log))
    plane.fold_later()
    assert plane.waits_for_flush
    io.turn()
    assert not plane.engine.is_behind


def test_fold_that_waits_for_a_flush_goes_on_once_the_disk_has_room_for_it() -> None:
    log = fired_log()
    plane, io = plane_of(log, memtable_bytes=2_500, unspilled_bytes=10_000)
    plane.use_disk_space(DiskSpace(free=0, reserve=0, low=False))
    plane.on_commit(LogIndex(end(log) - 1))
    plane.fold_later()
    io.turn()
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    assert (plane.engine.flushing, plane.waits_for_flush, plane.engine.is_behind) == (
        False,
        True,
        True,
    )
    plane.use_disk_space(DiskSpace.unmeasured())
    assert not plane.engine.is_behind


def test_disk_that_becomes_low_drops_log_that_others_may_need_and_flushes_once() -> None:
    log = log_of(1)
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    for _ in range(2):
        plane.use_disk_space(DiskSpace(free=1 << 40, reserve=1 << 41, low=True))
        io.turn()
    assert (io.drops, len(io.syncs)) == ([(1, False)], 1)


def test_memory_above_its_limit_is_freed_by_a_flush_at_most_every_twenty_seconds() -> None:
    log = log_of(2, size=1_000)
    plane, io = plane_of(log, memtable_bytes=EARLY_SHARE * 1_000)
    flushes = list[int]()
    for io.now_ms in (LOW_FLUSH_MS, LOW_FLUSH_MS + 1, 2 * LOW_FLUSH_MS):
        plane.on_commit(end(log))
        plane.fold_later()
        io.turn()
        assert not io.syncs
        plane.memory_high = True
        plane.kick()
        io.turn()
        flushes.append(len(io.syncs))
        if io.syncs:
            io.syncs.popleft()()
            io.finish(ThreadWork.FLUSH)
            io.turn()
        plane.memory_high = False
        log.schedule(part_of([(1, START_MS + 10**9, bytes(2_000))]))
    assert flushes == [1, 0, 1]
    log.entries.pop()
    log.schedule(part_of([(1, START_MS + 10**9, b"small")]))
    plane.memory_high = True
    io.now_ms += LOW_FLUSH_MS
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    assert not io.syncs, "little memory would be freed"


def test_steps_with_deliveries_have_pauses_while_memory_is_high(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane, io = plane_of(log := log_of(1))
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    io.turn()
    delivered = calls_of(monkeypatch, Leader, "deliver")
    for plane.memory_high in (False, True):
        for _ in range(3):
            io.now_ms += 1
            plane.kick()
            io.turn()
    assert len(delivered) == 3
    assert io.waits_ms[-1] == HIGH_DELIVERY_MS - 3
    io.now_ms += io.waits_ms[-1]
    plane.kick()
    io.turn()
    assert len(delivered) == 4


def test_no_manifest_is_written_before_the_log_beside_it_is_synced() -> None:
    log = log_of(1)
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.fold_later()
    done = list[bool]()
    plane.flush(lambda: done.append(True))
    io.turn()
    assert not io.threads
    io.syncs.popleft()()
    io.finish(ThreadWork.FLUSH)
    io.turn()
    assert done == [True]
    assert plane.engine.manifest_index == end(log)


def test_stop_ends_a_flush_whose_manifest_is_durable_and_folds_no_more() -> None:
    log = log_of(1)
    for number in range(3):
        log.topic(f"b{number}")
    log.fire(START_MS + 10**9)
    log.schedule(part_of([(topic, START_MS + 10**9 + 1, b"x") for topic in (1, 2, 3)]))
    log.fire(START_MS + 10**9 + 1)
    plane, io = plane_of(log, topics_at_once=1)
    plane.on_commit(end(log))
    plane.fold_later()
    done = list[bool]()
    plane.flush(lambda: done.append(True))
    io.turn()
    io.syncs.popleft()()
    io.finish(ThreadWork.FLUSH)
    assert plane.engine.flushing, "topics are settled one at a time"
    plane.stop()
    assert (done, plane.engine.flushing) == ([True], False)
    log.topic("more")
    plane.on_commit(end(log))
    plane.fold_later()
    io.turn()
    assert done == [True]
    assert plane.engine.is_behind
    assert not io.threads, "no merge begins"


def test_drain_is_over_when_all_requests_are_answered_and_a_checkpoint_is_committed() -> None:
    log, told = log_of(1), list[object]()
    plane, io = plane_of(log)
    plane.on_commit(end(log))
    plane.on_lead(Epoch(log.epoch))
    leader = plane.require_leader()
    leader.schedule(part_of([(1, START_MS + 10**9, b"x")]), told.append, plane.now())
    plane.drain()
    io.turn()
    with pytest.raises(ShuttingDownError):
        plane.require_leader()
    assert not plane.is_drained()
    assert last_kind(log) is EntryKind.SCHEDULE
    plane.on_commit(end(log))
    assert len(told) == 1
    assert not isinstance(told[0], OverloadedError)
    assert not plane.is_drained(), "the checkpoint is not committed"
    assert last_kind(log) is EntryKind.CHECKPOINT
    plane.on_commit(end(log))
    assert plane.is_drained()


class Runs:
    """A plane with a run for each of the timers; the first run is damaged."""

    def __init__(self, delays_ms: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
        disk = SimDisk()
        self.log = log_of(0)
        self.plane, self.io = plane_of(self.log, disk)
        self.store = self.plane.engine.machine.store
        monkeypatch.setattr(run_set, "plan", lambda *_: ())
        for delay_ms in delays_ms:
            self.write(delay_ms)
        path = STATE / "runs" / self.store.runs[0].name
        flip(disk, path, disk.read(path).index(b"p0p1p2"))

    def write(self, delay_ms: int) -> None:
        self.log.schedule(part_of([(1, START_MS + delay_ms, b"p0p1p2")]))
        self.plane.on_commit(end(self.log))
        self.plane.fold_later()
        self.plane.flush()
        self.io.turn()
        self.io.syncs.popleft()()
        self.io.finish(ThreadWork.FLUSH)
        self.io.turn()

    @property
    def numbers(self) -> list[int]:
        return [run.number for run in self.store.runs]

    def assert_told_once(self) -> None:
        on_damage = STATE / "runs" / self.store.runs[0].name
        assert [damage.path for damage in self.io.damages] == [on_damage]


def test_merge_that_meets_damage_is_given_up_and_other_runs_are_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs([10**9] * 2, monkeypatch)
    monkeypatch.setattr(run_set, "plan", lambda each, _: range(2 if len(each) > 1 else 0))
    runs.write(10**9)
    before = runs.numbers
    runs.io.finish(ThreadWork.MERGE)
    runs.assert_told_once()
    assert runs.numbers == before
    runs.io.finish(ThreadWork.MERGE)
    assert runs.numbers[0] == before[0]
    assert len(runs.numbers) == 2
    assert not {*runs.numbers[1:]} & {*before}
    assert not runs.io.threads
    runs.write(10**9)
    runs.io.finish(ThreadWork.MERGE)
    runs.assert_told_once()
    assert runs.store.pending == 4


def test_merge_that_meets_damage_in_none_of_its_runs_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs([10**9] * 2, monkeypatch)
    monkeypatch.setattr(run_set, "plan", lambda each, _: range(len(each)))
    merge = runs.store.begin_merge()
    runs.store.leave_out(CorruptFileError(STATE / "runs" / "a part", 0, "planted"), merge)
    assert runs.store.begin_merge() is None


def test_reading_ahead_that_meets_damage_goes_on_with_other_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs([8_000, 8_000, 10**9], monkeypatch)
    runs.io.now_ms = 7_500
    for _ in range(4):
        runs.io.now_ms += READ_AHEAD_MS
        runs.plane.kick()
        runs.io.turn()
        if runs.io.threads:
            runs.io.finish(ThreadWork.READ_AHEAD)
    runs.assert_told_once()
    assert [window.size > 0 for window in runs.store._runs._windows] == [False, True, False]
