"""The engine: folds, flushes, and the beginning and end of a leadership."""

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.calls import calls_of
from tests.timer.machines import START_MS, STATE, Log, catch_up, engine_on, flush, part_of, state_of
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Ids
from timer.files.disk_reserve import DiskSpace
from timer.leader.leader import LeaderConfig
from timer.model.timer_errors import NotLeaderError
from timer.model.units import Epoch, LogIndex, MonoMs, Now, UnixMs
from timer.pending.prefetch import Prefetch
from timer.pending.runs.run import Finder
from timer.recovery import engine as engine_module
from timer.recovery.engine import CHECKPOINTS_MAX, FLUSH_OVERHEAD, FOLD_BYTES, Engine


class View(Log):
    """A log as the engine sees it."""

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        self.now_ms = max(self.now_ms, time_ms)
        return self.append(kind, payload).index

    def cached(self, first: LogIndex, last: LogIndex) -> list[Entry]:
        return self.entries[first - 1 : last]

    @property
    def last_time_ms(self) -> UnixMs:
        return self.entries[-1].time_ms


NOW = Now(MonoMs(1000), UnixMs(START_MS))
NEVER = 1 << 40


def begun() -> tuple[Engine, View]:
    engine, log = engine_on(SimDisk()), View()
    log.begin_epoch()
    log.topic("a")
    catch_up(engine, log)
    return engine, log


def test_only_what_is_committed_is_applied() -> None:
    engine, log = begun()
    applied = engine.machine.applied_index
    log.topic("b")
    log.topic("c")
    seen = [engine.is_behind]
    engine.raise_commit_index(LogIndex(applied + 1))
    seen.append(engine.is_behind)
    assert seen == [False, True]
    assert engine.next_chunk() == (applied + 1, applied + 1)
    engine.raise_commit_index(LogIndex(1))  # never goes back
    assert engine.commit_index == applied + 1


def test_fold_stops_after_about_its_share_of_bytes_and_goes_on_from_there() -> None:
    engine, log = begun()
    for _ in range(5):
        log.schedule(part_of([(1, START_MS, bytes(FOLD_BYTES // 2))]))
    first = engine.machine.applied_index
    engine.raise_commit_index(LogIndex(len(log.entries)))
    sizes = []
    while engine.is_behind:
        start, end = engine.next_chunk()
        sizes.append(engine.fold(log.cached(start, end)))
    assert sizes == [2, 2, 1]
    assert engine.machine.applied_index == first + 5


def test_fold_stops_after_some_entries_however_small_they_are() -> None:
    # P9: even a nearly empty entry takes some time.
    engine, log = begun()
    for _ in range(200):
        log.schedule(part_of([(1, START_MS, b"")]))
    engine.raise_commit_index(LogIndex(len(log.entries)))
    assert 16 <= engine.fold(log.cached(*engine.next_chunk())) <= 64


def test_fold_stops_after_a_fire_of_much_payload() -> None:
    engine, log = begun()
    for _ in range(6):
        log.schedule(part_of([(1, START_MS + 10, bytes(FOLD_BYTES // 2))]))
    catch_up(engine, log)
    for _ in range(6):
        log.fire(START_MS + 10, rows_max=1)
    engine.raise_commit_index(LogIndex(len(log.entries)))
    sizes = []
    while engine.is_behind:
        sizes.append(engine.fold(log.cached(*engine.next_chunk())))
    assert sizes == [2, 2, 2]


def test_fold_stops_after_reschedules_of_large_timers() -> None:
    # P9: a RESCHEDULE has a few dozen bytes, for any payload.
    engine, log = begun()
    for _ in range(4):
        log.schedule(part_of([(1, START_MS + 10, bytes(FOLD_BYTES // 2))]))
    catch_up(engine, log)
    flush(engine)
    for seq in range(1, 5):
        log.reschedule(Ids(np.array([START_MS + 10]), np.array([seq], np.uint64)), [START_MS + 20])
    engine.raise_commit_index(LogIndex(len(log.entries)))
    sizes = []
    while engine.is_behind:
        sizes.append(engine.fold(log.cached(*engine.next_chunk())))
    assert sizes == [2, 2]


def test_fold_stops_after_reschedules_of_many_timers() -> None:
    # P9: each timer is read from a run.
    engine, log = begun()
    log.schedule(part_of([(1, START_MS + 10, b"")] * 96))
    catch_up(engine, log)
    flush(engine)
    for seq in (1, 33, 65):
        ids = Ids(np.full(32, START_MS + 10), np.arange(seq, seq + 32, dtype=np.uint64))
        log.reschedule(ids, [START_MS + 20] * 32)
    engine.raise_commit_index(LogIndex(len(log.entries)))
    sizes = []
    while engine.is_behind:
        sizes.append(engine.fold(log.cached(*engine.next_chunk())))
    assert sizes == [1, 1, 1]


def test_pages_are_evicted_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # P9: to free hundreds of megabytes takes tens of milliseconds.
    engine, log = begun()
    engine.machine.pages.size_max = 0
    for name in ("b", "c"):
        log.topic(name)
    log.schedule(part_of([(topic, START_MS + 10, bytes(1_000)) for topic in (1, 2, 3)]))
    log.fire(START_MS + 10)
    catch_up(engine, log)
    size = engine.machine.pages.unspilled_size // 3
    monkeypatch.setattr(engine_module, "EVICTED_MAX", size)
    begun_flush = engine.begin_flush()
    assert begun_flush is not None
    begun_flush.write()
    left = []
    while not engine.settle_flush(begun_flush, 100):
        left.append(engine.machine.pages.spilled_size // size)
    assert left == [2, 1]


def test_fold_stops_after_a_fire_of_many_rows() -> None:
    # P9: a FIRE has a few dozen bytes, for any number of timers.
    engine, log = begun()
    rows = 2 * FOLD_BYTES // engine_module._FIRED_BYTES
    for start in range(0, rows, 30_000):
        count = min(30_000, rows - start)
        log.schedule(part_of([(1, START_MS + 10, b"")] * count))
    catch_up(engine, log)
    for _ in range(4):
        log.fire(START_MS + 10, rows_max=rows // 2)
    engine.raise_commit_index(LogIndex(len(log.entries)))
    sizes = []
    while engine.is_behind:
        sizes.append(engine.fold(log.cached(*engine.next_chunk())))
    assert sizes == [1, 1, 2]


@pytest.mark.parametrize("what", ["requests", "cancels"])
def test_fold_stops_after_an_entry_of_many_small_things(what: str) -> None:
    # P9
    engine, log = begun()
    for _ in range(4):
        if what == "requests":
            log.schedule(*[part_of([(1, START_MS, b"")])] * 1500)
        else:
            log.cancel([(START_MS, 1)] * 1500)
    engine.raise_commit_index(LogIndex(len(log.entries)))
    assert engine.fold(log.cached(*engine.next_chunk())) == 2


def test_what_is_folded_later_is_not_looked_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # P9: a node that is behind looks each key up once, not all waiting keys at each turn.
    engine, log = begun()
    log.schedule(part_of([(1, START_MS + 1, b"")], keys=[b"only"]))
    catch_up(engine, log)
    flush(engine)  # one run has one key: what comes may have it
    entries, keys = 40, 1000
    for entry in range(entries):
        names = [f"{entry}-{key}".encode() for key in range(keys)]
        log.schedule(part_of([(1, START_MS + 1, b"")] * keys, keys=names))
    engine.raise_commit_index(LogIndex(len(log.entries)))
    asked = calls_of(monkeypatch, Prefetch, "_find_keys")
    while engine.is_behind:
        chunk = log.cached(*engine.next_chunk())
        prefetch = engine.begin_prefetch(chunk)
        if prefetch is not None:
            prefetch.read()
            engine.use_prefetch(prefetch)
        assert engine.fold(chunk) < entries
    assert sum(len(names) for _, names in asked) == entries * keys
    assert engine.machine.store.pending == entries * keys + 1


def test_taken_keys_are_found_without_the_rows_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A follower that restarts applies them again, and can't lead before.
    engine, log = begun()
    names = [b"%d" % key for key in range(200)]
    rows = [(1, START_MS + 60_000, b"")] * len(names)
    log.schedule(part_of(rows, keys=names))
    catch_up(engine, log)
    flush(engine)
    asked = calls_of(monkeypatch, Finder, "find")
    for dead, expected in ((0, 0), (50, 1)):
        if dead:
            log.cancel_keys([(1, name) for name in names[:dead]])
            catch_up(engine, log)
            flush(engine)
            asked.clear()
        log.schedule(part_of(rows, keys=names))
        engine.raise_commit_index(LogIndex(len(log.entries)))
        chunk = log.cached(*engine.next_chunk())
        prefetch = engine.begin_prefetch(chunk)
        assert prefetch is not None
        prefetch.read()
        assert len(asked) == expected  # the run with tombstones
        engine.use_prefetch(prefetch)
        engine.fold(chunk)
        assert len(asked) == expected
        assert engine.machine.store.pending == len(names)
    assert [len(seq) for *_, seq in asked] == [len(names)]


def test_timers_that_are_cancelled_in_the_chunk_that_has_their_keys_are_read_by_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, log = begun()
    names = [b"%d" % key for key in range(200)]
    rows = [(1, START_MS + 60_000, b"")] * len(names)
    log.schedule(part_of(rows, keys=names))
    catch_up(engine, log)
    flush(engine)
    log.schedule(part_of(rows, keys=names))  # its rows are not needed, those of the next are
    log.cancel_keys([(1, name) for name in names])
    engine.raise_commit_index(LogIndex(len(log.entries)))
    chunk = log.cached(*engine.next_chunk())
    prefetch = engine.begin_prefetch(chunk)
    assert prefetch is not None
    prefetch.read()
    engine.use_prefetch(prefetch)
    monkeypatch.setattr(Finder, "find", None)  # a call would hold the event loop
    engine.fold(chunk)
    assert engine.machine.store.pending == 0


def test_log_bytes_count_towards_a_flush_however_they_were_folded() -> None:
    engine, log = begun()
    begun_at = engine.log_bytes_since_flush
    for _ in range(4):
        log.schedule(part_of([(1, START_MS, bytes(FOLD_BYTES))]))
    catch_up(engine, log)
    grown = engine.log_bytes_since_flush - begun_at
    assert 4 * FOLD_BYTES <= grown <= 4 * FOLD_BYTES + 1000
    assert engine.wants_flush(memtable_bytes=NEVER, log_bytes=4 * FOLD_BYTES, log_entries=NEVER)
    assert not engine.wants_flush(memtable_bytes=NEVER, log_bytes=5 * FOLD_BYTES, log_entries=NEVER)
    flush = engine.begin_flush()
    assert flush is not None
    assert engine.begin_flush() is None
    assert not engine.wants_flush(memtable_bytes=0, log_bytes=0, log_entries=0)
    flush.write()
    engine.end_flush(flush)
    assert engine.log_bytes_since_flush == 0
    assert engine.begin_flush() is None, "nothing is new"


def test_entries_count_towards_a_flush_however_small_they_are() -> None:
    engine, log = begun()

    def wanted() -> bool:
        return engine.wants_flush(memtable_bytes=NEVER, log_bytes=NEVER, log_entries=100)

    for _ in range(99 - engine.machine.applied_index):
        log.cancel([(START_MS, 1)])
    catch_up(engine, log)
    assert not wanted()
    log.cancel([(START_MS, 1)])
    catch_up(engine, log)
    assert wanted()
    flush = engine.begin_flush()
    assert flush is not None
    log.cancel([(START_MS, 1)])
    catch_up(engine, log)
    flush.write()
    engine.end_flush(flush)
    assert engine.log_entries_since_flush == 1
    assert not wanted()


def test_restart_counts_what_it_replays_towards_a_flush() -> None:
    engine, log = begun()
    flush(engine)
    log.cancel([(START_MS, 1)])
    again = engine_on(engine._disk)
    catch_up(again, log)
    assert again.log_entries_since_flush == 1


def test_memtable_that_is_full_wants_a_flush_and_is_empty_after_it() -> None:
    engine, log = begun()
    log.schedule(part_of([(1, START_MS + 10**6, bytes(10_000))] * 10))
    catch_up(engine, log)
    assert engine.wants_flush(memtable_bytes=100_000, log_bytes=NEVER, log_entries=NEVER)
    flush(engine)
    assert not engine.wants_flush(memtable_bytes=1000, log_bytes=NEVER, log_entries=NEVER)
    assert engine.machine.store.pending == 10


def test_flush_that_does_not_fit_waits_for_room() -> None:
    engine, log = begun()
    log.schedule(part_of([(1, START_MS + 10**6, bytes(10_000))] * 10))
    catch_up(engine, log)
    needed = engine.unflushed_bytes + FLUSH_OVERHEAD
    engine.disk_space = DiskSpace(needed - 1, 0, low=True)
    assert not engine.wants_flush(memtable_bytes=1, log_bytes=1, log_entries=1)
    assert engine.begin_flush() is None
    engine.disk_space = DiskSpace(needed, 0, low=True)
    assert engine.wants_flush(memtable_bytes=1, log_bytes=1, log_entries=1)
    flush(engine)
    engine.disk_space = DiskSpace(FLUSH_OVERHEAD, 0, low=True)
    assert not engine.flush_fits, "there is a manifest to be written again"


def test_what_was_prepared_for_a_flush_that_is_none_is_let_go() -> None:
    engine, log = begun()
    log.topic("b")
    log.topic("c")
    catch_up(engine, log)
    cutting = [engine.capture_begun, engine.prepare_flush(1), engine.capture_begun]
    assert cutting == [False, False, True]
    engine.disk_space = DiskSpace(0, 0, low=True)
    assert engine.prepare_flush(1), "there is nothing to prepare"
    assert (engine.begin_flush(), engine.capture_begun) == (None, False)
    engine.disk_space = DiskSpace.unmeasured()
    while not engine.prepare_flush(1):
        pass
    flush = engine.begin_flush()
    assert flush is not None
    assert (engine.prepare_flush(1), engine.capture_begun) == (True, False), "one is under way"
    flush.write()
    engine.end_flush(flush)
    assert (engine.prepare_flush(1), engine.capture_begun) == (True, False), "nothing is new"


def test_low_disk_is_flushed_sooner_to_let_the_log_go() -> None:
    engine, log = begun()
    log.schedule(part_of([(1, START_MS + 10**6, bytes(10_000))]))
    catch_up(engine, log)
    assert not engine.wants_flush(memtable_bytes=NEVER, log_bytes=NEVER, log_entries=NEVER)
    engine.disk_space = DiskSpace(10**6, 80_000, low=True)
    assert engine.wants_flush(memtable_bytes=NEVER, log_bytes=NEVER, log_entries=NEVER)
    engine.disk_space = DiskSpace(10**6, 160_000, low=True)
    assert not engine.wants_flush(memtable_bytes=NEVER, log_bytes=NEVER, log_entries=NEVER)


def test_merge_takes_at_most_half_of_what_is_free() -> None:
    engine, log = begun()
    for number in range(8):
        log.schedule(part_of([(1, START_MS + 10**6 + number, bytes(1_000))]))
        catch_up(engine, log)
        flush(engine)
    engine.disk_space = DiskSpace(10_000, 0, low=True)
    assert engine.begin_merge() is None
    engine.disk_space = DiskSpace(100_000, 0, low=True)
    assert engine.begin_merge() is not None


def test_last_checkpoints_are_kept() -> None:
    engine, log = begun()
    for _ in range(CHECKPOINTS_MAX + 5):
        log.checkpoint()
    catch_up(engine, log)
    last = len(log.entries)
    assert list(engine.digests) == list(range(last - CHECKPOINTS_MAX + 1, last + 1))
    checkpoint = engine.machine.checkpoint
    assert checkpoint is not None
    assert engine.digests[LogIndex(last)] == checkpoint.digest


def test_observer_hears_of_each_entry_once_in_order() -> None:
    heard: list[int] = []
    engine = Engine(SimDisk(), STATE, LeaderConfig(), lambda entry, _: heard.append(entry.index))
    log = View()
    for name in ("a", "b", "c"):
        log.topic(name)
    catch_up(engine, log)
    assert heard == [1, 2, 3]


def test_leader_serves_until_it_steps_down_and_the_next_epoch_may_be_led_again() -> None:
    engine, log = begun()
    answers: list[object] = []
    for epoch in (2, 3):
        leader = engine.lead(Epoch(epoch), log.propose, NOW)
        leader.create_topic(f"t{epoch}", NOW, answers.append)
        leader.schedule(part_of([(1, START_MS + 10, b"x")]), answers.append)
        leader.step(NOW)
        catch_up(engine, log)
        assert len(answers) == 2 * (epoch - 1)
        engine.step_down(NotLeaderError(None))
        engine.step_down(NotLeaderError(None))
        assert engine.leader is None
        assert isinstance(leader.closed, NotLeaderError)
        log.begin_epoch()
        catch_up(engine, log)
    assert engine.machine.counts.scheduled == 2


def test_engine_that_is_behind_does_not_lead() -> None:
    engine, log = begun()
    log.topic("b")
    engine.raise_commit_index(LogIndex(len(log.entries)))
    with pytest.raises(AssertionError):
        engine.lead(Epoch(2), log.propose, NOW)


def test_leader_follower_leader_within_a_second_fires_what_is_due_in_it_once() -> None:
    # E.13
    engine, log = begun()
    other = engine_on(SimDisk())
    log.schedule(part_of([(1, START_MS + at, b"x") for at in range(0, 1000, 5)]))
    for at in range(100, 1100, 100):
        leads, follows = (engine, other) if at // 100 % 2 else (other, engine)
        log.begin_epoch()
        catch_up(leads, log)
        now = Now(MonoMs(1000 + at), UnixMs(START_MS + at))
        leader = leads.lead(Epoch(log.epoch), log.propose, now)
        leader.step(now)
        catch_up(leads, log)
        leads.step_down(NotLeaderError(None))
        catch_up(follows, log)
        assert state_of(engine.machine) == state_of(other.machine)
        assert engine.machine.counts.fired == np.sum(np.arange(0, 1000, 5) <= at)
    assert engine.machine.counts.fired == 200
