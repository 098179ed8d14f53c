"""The state plane on the event loop: a cancelled caller must not undo the work of others."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.rpc.rpc_caller import CALLER
from cluster.state.host import Host
from cluster.state.loop_io import LoopIo
from cluster.state.state_plane import LOW_FLUSH_MS, TOPICS_AT_ONCE, FlushLimits, ThreadWork
from tests.calls import calls_of
from tests.timer.machines import START_MS, Log, engine_on, log_of, part_of
from tests.waiting import until
from timer.entries.entry_frame import Entry, EntryKind
from timer.files.disk import RealDisk
from timer.files.disk_reserve import DiskSpace
from timer.leader.intake.cluster_clock import ClusterClock
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    EngineError,
    NotReadyError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, UnixMs
from timer.pending.runs.run_writer import Pace, unpaced
from timer.recovery import manifest
from timer.recovery.engine import Flush


class Follower:
    """A follower's log, all of it in memory."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.dropped_before = LogIndex(0)
        self.plenty = True
        self.cached_from = 1
        self.reads: list[tuple[int, int]] = []
        self.on_disk = asyncio.Event()
        self.on_disk.set()

    @property
    def last_time_ms(self) -> UnixMs:
        return self.log.entries[-1].time_ms

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        raise AssertionError("a follower proposes nothing")

    def cached_entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry] | None:
        return self.log.entries[first - 1 : last] if first >= self.cached_from else None

    async def entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        self.reads.append((first, last))
        return self.log.entries[first - 1 : last]

    @property
    def first_index(self) -> LogIndex:
        return LogIndex(1)

    def stored_entries(self, first: LogIndex, last: LogIndex, size_max: int) -> Sequence[Entry]:
        del size_max
        return self.log.entries[first - 1 : last]

    def holds_lease(self) -> bool:
        return False

    async def wait_until_synced(self, index: LogIndex) -> bool:
        assert index <= len(self.log.entries)
        return await self.on_disk.wait()

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        assert keep == self.plenty
        self.dropped_before = index


def make_clock(now_ms: UnixMs) -> ClusterClock:
    raise AssertionError("a follower needs none")


NO_FLUSH = FlushLimits(1 << 30, 1 << 30, 1 << 30, 1 << 30, 1 << 30)


def host_on(directory: Path, follower: Follower, errors: list[BaseException], **other: Any) -> Host:
    given: dict[str, Any] = {
        "make_clock": make_clock,
        "samples": list,
        "mono_ms": lambda: MonoMs(0),
        "wall_ms": lambda: UnixMs(START_MS),
        "fold_interval_ms": 1,
        "on_delivery": lambda delivery: None,
    }
    own = {name: other.pop(name) for name in ("hops", "on_damage") if name in other}
    limits, engine = other.pop("limits", NO_FLUSH), engine_on(RealDisk(), directory)
    return Host(engine, LoopIo(follower, **given | other), limits, fatal=errors.append, **own)


async def flushed(host: Host, index: int) -> None:
    await until(lambda: host.engine.manifest_index >= index and not host.engine.flushing)


async def folded(host: Host) -> None:
    await until(lambda: not host.engine.is_behind)


async def test_log_on_the_disk_is_read_once_however_many_portions_it_is_folded_in(
    tmp_path: Path,
) -> None:
    log, errors = log_of(1_500), list[BaseException]()  # a portion is some 30
    follower = Follower(log)
    follower.cached_from = len(log.entries) + 1
    host = host_on(tmp_path, follower, errors)
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    await host.stop()
    assert follower.reads == [(1, len(log.entries))]
    assert host.engine.machine.store.pending == 1_500
    assert errors == []


async def test_what_a_leader_appends_is_timed_until_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, errors, told = log_of(1), list[BaseException](), list[tuple[EntryKind, float]]()
    follower = Follower(log)
    host = host_on(
        tmp_path,
        follower,
        errors,
        on_committed=lambda kind, seconds: told.append((kind, seconds)),
    )
    for index in (2, 3):
        monkeypatch.setattr(follower, "propose", lambda *_, at=index: LogIndex(at))
        host._io.append(EntryKind.TOPIC, [], UnixMs(START_MS))
    host.on_commit(LogIndex(1))
    assert told == []
    host.on_commit(LogIndex(2))
    [(kind, seconds)] = told
    assert kind is EntryKind.TOPIC
    assert seconds > 0
    host.on_stepdown(Epoch(1))
    host.on_commit(LogIndex(3))
    assert len(told) == 1, "whoever leads now may have put something else there"
    await host.stop()
    assert errors == []


async def test_entry_of_a_change_is_known_though_its_answer_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_on(tmp_path, Follower(Log()), [])
    monkeypatch.setattr(host, "kick", lambda: None)
    noted: list[tuple[int, int]] = []
    late: list[tuple[int, object]] = []
    caller: Any = SimpleNamespace(
        note=lambda *entry: noted.append(entry),
        on_late=lambda _, error: late.append((noted[-1][1], error)),
    )
    gathered: list[Callable[[object], None]] = []
    leader: Any = SimpleNamespace(last_proposed=4, answering_index=0, epoch=3)

    async def ask(appended: int, error: EngineError | None = None) -> None:
        CALLER.set(caller)

        def start(done: Callable[[object], None]) -> None:
            leader.last_proposed = appended
            gathered.append(done)
            if error is not None:
                done(error)

        async with asyncio.timeout(0):
            await host.ask(start)

    monkeypatch.setattr(host.engine, "leader", leader)
    for error in (NotReadyError("full"), None):
        with pytest.raises((NotReadyError, TimeoutError)):
            await ask(5, error)
        assert not any(index for _, index in noted), "others' entries only"
    with pytest.raises(TimeoutError):
        await ask(6)
    assert noted[-1] == (3, 6)
    leader.answering_index = 7  # an entry that the requests of several callers waited for
    for each in gathered:
        each(None)
    assert late == [(7, None)] * 2, "the first call had its answer"
    monkeypatch.undo()
    await host.stop()


async def test_flush_ends_though_whoever_asked_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, errors = log_of(1), list[BaseException]()
    follower, going, may_go = Follower(log), threading.Event(), threading.Event()
    write = Flush.write

    def slow(self: Flush, pace: Pace = unpaced) -> None:
        going.set()
        assert may_go.wait(120)
        write(self, pace)

    monkeypatch.setattr(Flush, "write", slow)
    host = host_on(tmp_path, follower, errors)
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    async with asyncio.timeout(120):
        asking = asyncio.ensure_future(host.flush())
        await asyncio.to_thread(going.wait)
        asking.cancel()
        await asyncio.wait({asking})
        may_go.set()
        await until(lambda: not host.engine.flushing)
        await host.stop()
    assert follower.dropped_before == host.engine.manifest_index + 1 == len(log.entries) + 1
    assert errors == []


async def test_flush_that_fails_ends_the_process_and_its_caller_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, errors = log_of(0), list[BaseException]()

    def fail(self: Flush, pace: Pace = unpaced) -> None:
        raise DiskFailedError("broken")

    monkeypatch.setattr(Flush, "write", fail)
    host = host_on(tmp_path, Follower(log), errors)
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    await asyncio.wait_for(host.flush(), 60)
    [error] = errors
    assert isinstance(error, DiskFailedError)
    await host.stop()


async def test_no_manifest_goes_beyond_the_log_on_the_same_disk(tmp_path: Path) -> None:
    log, errors = log_of(1), list[BaseException]()
    follower = Follower(log)
    follower.on_disk.clear()  # the others have committed it, and this disk is slow
    host = host_on(tmp_path, follower, errors)
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    flushed = asyncio.ensure_future(host.flush())
    await until(lambda: host.engine.flushing)
    assert not host._io.in_threads, "a thread writes"
    assert manifest.read(RealDisk(), tmp_path) is None
    follower.on_disk.set()
    await asyncio.wait_for(flushed, 60)
    state = manifest.read(RealDisk(), tmp_path)
    assert state is not None
    assert state["index"] == len(log.entries)
    await host.stop()
    assert errors == []


async def test_flush_comes_at_the_drawn_share_and_takes_a_few_topics_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, errors, shares = Log(), list[BaseException](), [0.5, 1.0]
    log.begin_epoch()
    for number in range(3 * TOPICS_AT_ONCE):
        log.topic(f"t{number}")
    entries = len(log.entries)
    follower = Follower(log)
    draw = iter(shares).__next__
    limits = replace(NO_FLUSH, log_entries=2 * entries)
    host = host_on(tmp_path, follower, errors, limits=limits, draw_share=draw)
    steps = calls_of(monkeypatch, host.engine, "prepare_flush")
    host.on_commit(LogIndex(entries - 1))
    await folded(host)
    host.kick()
    await asyncio.sleep(0)
    assert steps == [], "half of the limit lacks an entry"
    host.on_commit(LogIndex(entries))
    await until(lambda: host.engine.manifest_index and not host.engine.flushing)
    assert host.engine.manifest_index == entries
    assert steps == [(TOPICS_AT_ONCE,)] * 3
    for _ in range(entries):
        log.cancel([(START_MS, 1)])
    host.on_commit(LogIndex(2 * entries))
    await folded(host)
    await host.stop()
    assert len(steps) == 3, "the next one is at all of the limit"
    assert errors == []
    assert engine_on(RealDisk(), tmp_path).machine.applied_index == entries


async def test_disk_with_little_room_is_flushed_often_to_give_back_what_is_of_no_use(
    tmp_path: Path,
) -> None:
    log, errors, clock = log_of(1), list[BaseException](), [0]
    follower = Follower(log)
    follower.plenty = False
    host = host_on(
        tmp_path, follower, errors, mono_ms=lambda: MonoMs(clock[0]), draw_share=lambda: 1.0
    )
    host.on_commit(LogIndex(3))
    await folded(host)
    host.use_disk_space(DiskSpace(1 << 20, 1 << 30, low=True))
    await flushed(host, 3)
    log.cancel([(START_MS + 10**9, 1)])
    host.on_commit(LogIndex(4))
    await folded(host)
    clock[0] += LOW_FLUSH_MS - 1
    host.kick()
    await asyncio.sleep(0)
    assert not host.engine.capture_begun
    assert not host.engine.flushing
    clock[0] += 1
    host.kick()
    await flushed(host, 4)
    await host.stop()
    assert errors == []


async def test_memtable_whose_rows_are_mostly_dead_is_flushed_soon(tmp_path: Path) -> None:
    log, errors, clock, count = log_of(0), list[BaseException](), [0], 100
    dues = [START_MS + 10**9 + number for number in range(count)]
    log.schedule(part_of([(1, due, bytes(100)) for due in dues]))
    host = host_on(
        tmp_path,
        Follower(log),
        errors,
        limits=replace(NO_FLUSH, memtable_bytes=8 * 20_000),
        mono_ms=lambda: MonoMs(clock[0]),
        draw_share=lambda: 1.0,
    )
    ids = [(due, 1 + number) for number, due in enumerate(dues)]
    log.cancel(ids[: count // 2])
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    assert host.engine.machine.store.memtable.size > 20_000
    clock[0] += LOW_FLUSH_MS
    host.kick()
    await asyncio.sleep(0)
    assert not host.engine.flushing, "half of the rows live"
    log.cancel(ids[count // 2 : -1])
    host.on_commit(LogIndex(len(log.entries)))
    await folded(host)
    host.kick()
    await flushed(host, len(log.entries))
    assert host.engine.machine.store.memtable.count == 0
    assert host.engine.machine.store.pending == 1
    await host.stop()
    assert errors == []


async def test_damage_that_a_query_meets_does_not_end_the_node(tmp_path: Path) -> None:
    errors, passed_on = list[BaseException](), list[BaseException]()
    host = host_on(tmp_path, Follower(Log()), errors, on_damage=passed_on.append)
    alone = host_on(tmp_path / "alone", Follower(Log()), errors)
    damage, failed = CorruptFileError("runs/1", 0, "planted"), DiskFailedError("planted")
    host._io.on_damage(damage)  # as a merge and reading ahead do
    assert (errors, passed_on) == ([], [damage])
    host.on_read_error(failed)
    alone.on_read_error(damage)
    assert (errors, passed_on) == ([failed, damage], [damage])


@pytest.mark.parametrize("kind", ThreadWork)
async def test_error_of_a_thread_ends_the_node(tmp_path: Path, kind: ThreadWork) -> None:
    errors = list[BaseException]()
    host = host_on(tmp_path, Follower(Log()), errors, on_damage=errors.clear)
    damage = CorruptFileError("runs/1", 0, "planted")

    def meet() -> None:
        raise damage

    def done(result: None) -> None:
        raise AssertionError("it is not done")

    host._io.run(kind, meet, done)
    while host._io._tasks:
        await asyncio.wait(host._io._tasks)
    assert errors == [damage]
