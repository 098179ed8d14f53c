"""Snapshots: one state, received whole, and installed even if installs are cut short."""

import copy
import errno
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from chaos.sim.world.simdisk import SimDisk
from replication.core.promise import Promise, PromiseFile
from replication.shell.snapshot_install import install_if_ready
from tests.replication.promises import matched
from tests.timer.machines import START_MS, STATE, Log, catch_up, engine_on, flush, part_of, state_of
from tests.timer.node_files import (
    INCOMING,
    PINNED,
    UNDER,
    busy_log,
    flushed,
    frame_of,
    receive,
    taken,
)
from timer.entries.payloads import Op
from timer.files import log as timer_log
from timer.files.disk import RealDisk
from timer.model.timer_errors import CorruptFileError, DiskFailedError, NotReadyError
from timer.model.units import Epoch, LogIndex, Nonce, ReplicaId
from timer.recovery import manifest
from timer.recovery import snapshot_receiver as incoming_module
from timer.recovery.snapshot import Snapshot, files, remove_files, remove_unnamed
from timer.recovery.snapshot_receiver import (
    SPARE_BYTES,
    IncomingSnapshot,
    SnapshotSpaceError,
    snapshot_to_install,
)
from timer.recovery.snapshot_receiver import install as install_now
from timer.recovery.snapshot_source import pin

LOG = Path("/log")
PROMISE = Path("/promise")
DAMAGED = Path("/damaged")
OLD = Promise(Epoch(4), ReplicaId(1), Nonce(5))


def install(disk: SimDisk) -> Snapshot | None:
    matched(disk, PROMISE)
    return install_if_ready(disk, INCOMING, promise=PROMISE, state=STATE, log=LOG, damaged=DAMAGED)


def old_replica(disk: SimDisk) -> None:
    """Write another replica's files to the disk: a state, a log, a promise, a note of damage."""
    other = Log()
    other.begin_epoch()
    other.topic("old")
    other.schedule(part_of([(1, START_MS + 50, b"old")]))
    engine = engine_on(disk)
    catch_up(engine, other)
    flush(engine)
    kept = timer_log.Log.open(disk, LOG, segment_size=200)
    kept.append([frame_of(other, index) for index in range(len(other.entries))])
    kept.close()
    matched(disk, PROMISE).give(OLD)
    disk.write_atomic(DAMAGED, b"byte 7")


def check_installed(disk: SimDisk, log: Log, there: Snapshot) -> None:
    engine = engine_on(disk)
    assert engine.manifest_index == there.index
    whole = engine_on(SimDisk())
    catch_up(whole, log)
    catch_up(engine, log)
    assert state_of(engine.machine) == state_of(whole.machine)
    opened = timer_log.Log.open(disk, LOG, committed_floor=there.index)
    assert (opened.first_index, opened.end) == (there.index + 1, (there.epoch, there.index))
    assert not opened.tail_was_cut
    opened.close()
    assert not disk.exists(DAMAGED)
    assert install(disk) is None
    assert [name for name in disk.list_dir(INCOMING) if name not in manifest.DIRECTORIES] == []


def test_taken_snapshot_outlives_the_flushes_after_it() -> None:
    disk, there, log = taken()
    engine = engine_on(disk)
    for step in range(3):
        log.schedule(part_of([(1, START_MS + 10**7 + step, b"more")]))
        log.fire(START_MS + 30 + step)
        catch_up(engine, log)
        flush(engine)
    for part in there.parts:
        assert disk.size(PINNED / part.path) == part.size
    receive(disk, there, disk2 := SimDisk()).finish()
    install(disk2)
    check_installed(disk2, log, there)


def test_take_begins_again_when_what_it_pins_is_gone() -> None:
    log = busy_log()

    class Racing(SimDisk):
        raced = False

        def link(self, path: Path, name: Path) -> None:
            super().link(path, name)
            if path.name == manifest.NAME and not self.raced:
                self.raced = True
                for group in (1, 2):
                    log.op(Op.RESERVE, 1, group, [100])
                    log.op(Op.ACK, 1, group, [*range(11)])
                log.op(Op.RESERVE, 3, 3, [1])  # the dead letter
                log.op(Op.ACK, 3, 3, [0])
                catch_up(engine, log)
                flush(engine)  # nothing needs the old spill file any more

    disk = Racing()
    engine = engine_on(disk)
    catch_up(engine, log)
    flush(engine)
    before = {*disk.list_dir(STATE / manifest.SPILL_DIRECTORY)}
    there = pin(disk, STATE, PINNED)
    assert disk.raced
    assert before - {*disk.list_dir(STATE / manifest.SPILL_DIRECTORY)}
    assert there.index == engine.manifest_index
    receive(disk, there, disk2 := SimDisk()).finish()
    install(disk2)
    check_installed(disk2, log, there)


def test_take_names_the_file_that_is_lost() -> None:
    source, there, _ = taken()
    part = there.parts[-1]
    source.remove(STATE / part.path)
    with pytest.raises(NotReadyError, match=f"{STATE / part.path} is missing"):
        pin(source, STATE, PINNED)


def test_take_without_a_manifest_is_not_ready() -> None:
    disk = SimDisk()
    engine_on(disk)
    with pytest.raises(NotReadyError):
        pin(disk, STATE, PINNED)


def test_take_refuses_a_run_of_another_size() -> None:
    disk, there, _ = taken()
    run = next(part for part in there.parts if part.path.startswith(manifest.RUN_DIRECTORY))
    file = disk.open_append(STATE / run.path)
    file.truncate(run.size - 1)
    with pytest.raises(CorruptFileError, match="the manifest needs"):
        pin(disk, STATE, PINNED)


def test_take_names_the_damaged_file_of_the_state_not_its_link(tmp_path: Path) -> None:
    # The path decides how the damage is healed.
    disk, log, state = RealDisk(), busy_log(), tmp_path / "state"
    source = engine_on(disk, state)
    catch_up(source, log)
    flush(source)
    [spill] = (state / manifest.SPILL_DIRECTORY).iterdir()
    data = bytearray(spill.read_bytes())
    data[len(data) // 2] ^= 1
    spill.write_bytes(data)
    with pytest.raises(CorruptFileError) as caught:
        pin(disk, state, tmp_path / "pinned")
    assert caught.value.path == spill


def test_real_disk_takes_and_installs(tmp_path: Path) -> None:
    disk = RealDisk()
    log = busy_log()
    source = engine_on(disk, tmp_path / "a")
    catch_up(source, log)
    flush(source)
    there = pin(disk, tmp_path / "a", tmp_path / "pinned")
    incoming = IncomingSnapshot(disk, tmp_path / "incoming")
    incoming.begin(there, UNDER)
    while (wanted := incoming.next_missing()) is not None:
        part, offset = wanted
        incoming.put(part, offset, disk.read(tmp_path / "pinned" / part.path, offset, 1000))
    incoming.finish()
    install_now(
        disk,
        tmp_path / "incoming",
        state=tmp_path / "b",
        log=tmp_path / "log",
        damaged=tmp_path / "damaged",
        keep_log=False,
    )
    engine = engine_on(disk, tmp_path / "b")
    assert state_of(engine.machine) == state_of(source.machine)
    remove_files(disk, tmp_path / "pinned")
    assert state_of(engine_on(disk, tmp_path / "b").machine) == state_of(source.machine)


@pytest.mark.parametrize("chunks", range(0, 60, 7))
def test_reception_goes_on_where_a_crash_ended_it(chunks: int) -> None:
    source, there, log = taken()
    disk = SimDisk()
    receive(source, there, disk, limit=chunks)
    before = {part for part in there.parts if disk.exists(INCOMING / part.path)}
    disk.crash(random.Random(chunks))
    incoming = receive(source, there, disk)
    assert incoming.next_missing() is None
    assert before or chunks == 0
    incoming.finish()
    install(disk)
    check_installed(disk, log, there)


def test_reception_of_another_offer_keeps_only_equal_parts() -> None:
    source, there, log = taken()
    disk = SimDisk()
    receive(source, there, disk)
    log.schedule(part_of([(1, START_MS + 10**7, b"more")]))
    engine = engine_on(source)
    catch_up(engine, log)
    flush(engine)
    later = pin(source, STATE, PINNED)
    incoming = IncomingSnapshot(disk, INCOMING)
    incoming.begin(later, UNDER)
    left = {part for part in later.parts if disk.exists(INCOMING / part.path)}
    assert left == {*there.parts} & {*later.parts}
    assert left
    receive(source, later, disk).finish()
    install(disk)
    check_installed(disk, log, later)


def test_whole_parts_of_an_earlier_process_are_read_once_and_before_anybody_offers() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    receive(source, there, disk, limit=50)
    whole = {
        part
        for part in there.parts
        if disk.exists(INCOMING / part.path) and disk.size(INCOMING / part.path) == part.size
    }
    assert 0 < len(whole) < len(there.parts)
    spoilt = max(whole)
    disk.spoil(INCOMING / spoilt.path, spoilt.size - 1)
    incoming = IncomingSnapshot(disk, INCOMING)
    assert incoming.planned_parts() == there.parts
    for part in incoming.planned_parts():
        incoming.check_part(part)
    for part in whole - {spoilt}:
        disk.spoil(INCOMING / part.path, 0)  # a second read would report damage
    incoming.begin(there, UNDER)
    assert {*incoming._waiting} == {*there.parts} - whole | {spoilt}


def test_snapshot_leaves_room_to_start_with() -> None:
    source, there, log = taken()
    disk = SimDisk()
    incoming = IncomingSnapshot(disk, INCOMING)
    disk.capacity_bytes = there.size + SPARE_BYTES - 1
    with pytest.raises(SnapshotSpaceError, match="needs 33 MiB"):
        incoming.begin(there, UNDER)
    disk.capacity_bytes += 10_000  # the plan takes some
    incoming.begin(there, UNDER)
    receive(source, there, disk).finish()
    install(disk)
    check_installed(disk, log, there)


def test_order_to_install_is_durable_before_anything_goes() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    old_replica(disk)
    incoming = receive(source, there, disk)
    sync_dir = disk.sync_dir

    def fails_at_the_last(path: Path) -> None:
        if disk.exists(INCOMING / "ready"):
            raise DiskFailedError(f"{path}: planted")
        sync_dir(path)

    with mock.patch.object(disk, "sync_dir", fails_at_the_last), pytest.raises(DiskFailedError):
        incoming.finish()
    disk.die()
    # The next process sees the order, which is not durable, and dies early in the install.
    with (
        mock.patch.object(incoming_module, "remove_files", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        install(disk)
    for seed in range(20):
        crashed = copy.deepcopy(disk)
        crashed.crash(random.Random(seed))
        assert crashed.exists(INCOMING / "ready")


def test_what_no_manifest_names_goes_and_the_rest_starts() -> None:
    log = busy_log()
    disk, engine = flushed(log)
    named = {*files(disk, STATE)}
    for name in ("manifest.tmp", "runs/unnamed.arrow", "queues/unnamed.spill"):
        assert (STATE / name).parent in {STATE, *(STATE / each for each in manifest.DIRECTORIES)}
        disk.write_atomic(STATE / name, b"left behind")
    remove_unnamed(disk, STATE)
    assert {*files(disk, STATE)} == named
    assert state_of(engine_on(disk).machine) == state_of(engine.machine)
    disk.remove(STATE / manifest.NAME)
    remove_unnamed(disk, STATE)
    assert not {*files(disk, STATE)}


def test_directories_that_a_file_system_makes_in_a_state_stay(tmp_path: Path) -> None:
    disk, state = RealDisk(), tmp_path / "state"
    catch_up(engine := engine_on(disk, state), busy_log())
    flush(engine)
    made = [state / "lost+found", *(state / name / "lost+found" for name in manifest.DIRECTORIES)]
    for each in made:
        disk.make_dir(each)
    remove_unnamed(disk, state)
    assert (state / manifest.NAME).exists()
    failed = DiskFailedError("remove", errno=errno.EIO)
    with mock.patch.object(RealDisk, "remove", side_effect=failed), pytest.raises(DiskFailedError):
        remove_files(disk, state)
    remove_files(disk, state)
    assert {*files(disk, state)} == {*made}


def test_part_that_arrives_damaged_begins_anew() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    incoming = IncomingSnapshot(disk, INCOMING)
    incoming.begin(there, UNDER)
    part, _ = incoming.next_missing() or pytest.fail("nothing wanted")
    data = bytearray(source.read(PINNED / part.path))
    data[len(data) // 2] ^= 1
    incoming.put(part, 0, data)
    assert incoming.next_missing() == (part, 0)
    incoming.put(part, 0, source.read(PINNED / part.path))
    assert incoming.next_missing() != (part, 0)


class Dying(SimDisk):
    """A disk whose process dies after a number of changes and syncs."""

    left: int | None = None

    def _count(self) -> None:
        if self.left is not None:
            if not self.left:
                raise KeyboardInterrupt  # no handler of ours takes it for an error of the disk
            self.left -= 1

    def _change(self, operation: object) -> None:
        self._count()
        super()._change(operation)  # type: ignore[arg-type]

    def _sync(self, file: object) -> None:
        self._count()
        super()._sync(file)  # type: ignore[arg-type]

    def sync_dir(self, path: Path) -> None:
        self._count()
        super().sync_dir(path)


def deaths_of(work: Callable[[Dying], None], make: Callable[[], Dying]) -> int:
    """Return the number of changes and syncs that `work` makes."""
    disk = make()
    disk.left = 1 << 30
    work(disk)
    return (1 << 30) - disk.left


@pytest.mark.parametrize("seed", range(2))
def test_install_cut_short_anywhere_is_carried_out_by_the_next_start(seed: int) -> None:
    source, there, log = taken()

    def prepared() -> Dying:
        disk = Dying()
        old_replica(disk)
        receive(source, there, disk, size=1 << 20).finish()
        return disk

    count = deaths_of(lambda disk: [install(disk)].clear(), prepared)
    assert count > 20
    rng = random.Random(seed)
    for at in range(count):
        disk = prepared()
        disk.left = at
        with pytest.raises(KeyboardInterrupt):
            install(disk)
        disk.left = None
        disk.crash(rng)
        kept = PromiseFile.load(disk, PROMISE)
        begun = not engine_is_old(disk) or not old_log_is_whole(disk)
        assert kept.unsure or not begun, at
        disk.left = rng.choice((None, rng.randrange(count)))
        try:
            install(disk)
        except KeyboardInterrupt:
            disk.left = None
            disk.crash(rng)
            install(disk)
        disk.left = None
        check_installed(disk, log, there)
        kept = PromiseFile.load(disk, PROMISE, last_epoch=there.epoch)
        assert kept.unsure
        assert kept.promise == Promise(*UNDER)


def engine_is_old(disk: SimDisk) -> bool:
    try:
        return "old" in engine_on(disk).machine.topic_by_name
    except CorruptFileError:
        return False


def old_log_is_whole(disk: SimDisk) -> bool:
    try:
        return timer_log.Log.open(disk, LOG, segment_size=200).last_index == 3
    except CorruptFileError:
        return False


def test_reception_cut_short_anywhere_installs_nothing_or_all() -> None:
    source, there, log = taken()

    def work(disk: Dying) -> None:
        receive(source, there, disk, size=500).finish()

    count = deaths_of(work, Dying)
    rng = random.Random(1)
    for at in range(0, count, 3):
        disk = Dying()
        old_replica(disk)
        disk.left = at
        with pytest.raises(KeyboardInterrupt):
            work(disk)
        disk.left = None
        disk.crash(rng)
        if snapshot_to_install(disk, INCOMING) is None:
            assert engine_is_old(disk)
            work(disk)
        install(disk)
        check_installed(disk, log, there)


def test_install_lowers_no_promise_and_ends_no_doubt() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    higher = Promise(Epoch(12), ReplicaId(2), Nonce(8))
    matched(disk, PROMISE).give(higher)
    receive(source, there, disk).finish()
    assert install(disk) == there
    assert install(disk) is None
    kept = PromiseFile.load(disk, PROMISE)
    assert (kept.promise, kept.unsure) == (higher, True)


def follower(log: Log) -> Dying:
    """Return the disk of a follower with `log` as its synced log, a promise, and no state."""
    disk = Dying()
    kept = timer_log.Log.open(disk, LOG, segment_size=300)
    kept.append([frame_of(log, at) for at in range(len(log.entries))])
    kept.close()
    matched(disk, PROMISE).give(OLD)
    disk.write_atomic(DAMAGED, b"a run")
    return disk


def with_more() -> tuple[SimDisk, Snapshot, Log]:
    """Return a source, its snapshot, and a log that continues after the snapshot."""
    source, there, log = taken()
    for number in range(3):
        log.schedule(part_of([(1, START_MS + 10**7 + number, b"more")]))
    assert log.entries[-1].index > there.index
    return source, there, log


def test_log_that_holds_the_snapshots_entry_is_kept_whole_and_nothing_is_in_doubt() -> None:
    source, there, log = with_more()
    disk = follower(log)
    receive(source, there, disk).finish()
    assert install(disk) == there
    opened = timer_log.Log.open(disk, LOG, committed_floor=there.index)
    assert (opened.first_index, opened.last_index) == (1, log.entries[-1].index)
    assert engine_on(disk).manifest_index == there.index
    assert not disk.exists(DAMAGED)
    kept = PromiseFile.load(disk, PROMISE, last_epoch=opened.last_epoch)
    assert (kept.promise, kept.unsure) == (Promise(*UNDER), False)


def test_install_cut_short_anywhere_keeps_the_log_that_holds_its_entry() -> None:
    source, there, log = with_more()

    def prepared() -> Dying:
        disk = follower(log)
        receive(source, there, disk, size=1 << 20).finish()
        return disk

    for at in range(deaths_of(lambda disk: [install(disk)].clear(), prepared)):
        disk = prepared()
        disk.left = at
        with pytest.raises(KeyboardInterrupt):
            install(disk)
        disk.left = None
        disk.crash(random.Random(at))
        install(disk)
        assert not PromiseFile.load(disk, PROMISE).unsure
        assert timer_log.Log.open(disk, LOG).last_index == log.entries[-1].index
        assert engine_on(disk).manifest_index == there.index


def test_log_that_ends_with_the_snapshots_entry_is_kept() -> None:
    source, there, log = with_more()
    del log.entries[there.index :]
    disk = follower(log)
    receive(source, there, disk).finish()
    install(disk)
    assert not PromiseFile.load(disk, PROMISE).unsure
    assert timer_log.Log.open(disk, LOG).last_index == there.index


@pytest.mark.parametrize("what", ["too short", "another epoch", "damaged"])
def test_log_that_does_not_hold_the_snapshots_entry_begins_anew_and_is_in_doubt(what: str) -> None:
    source, there, log = with_more()
    its = Log(entries=[*log.entries])
    if what == "too short":
        del its.entries[there.index - 1 :]
    if what == "another epoch":
        its.entries[there.index - 1 :] = [
            replace(entry, epoch=Epoch(entry.epoch + 1)) for entry in its.entries[there.index - 1 :]
        ]
    disk = follower(its)
    if what == "damaged":  # below the snapshot, where a start alone would not look
        disk.flip(LOG / disk.list_dir(LOG)[0], 100)
    receive(source, there, disk).finish()
    install(disk)
    check_installed(disk, log, there)
    assert PromiseFile.load(disk, PROMISE).unsure


def test_damaged_order_to_install_is_corrupt() -> None:
    source, there, _ = taken()
    disk = SimDisk()
    receive(source, there, disk).finish()
    disk.flip(INCOMING / "ready", 5)
    with pytest.raises(CorruptFileError, match="ready"):
        install(disk)


def test_log_goes_on_after_the_snapshot() -> None:
    disk = SimDisk()
    timer_log.replace_by_empty(disk, LOG, LogIndex(7), Epoch(2))
    log = timer_log.Log.open(disk, LOG, committed_floor=LogIndex(7))
    assert log.epoch_at(LogIndex(7)) == 2
    assert log.read(LogIndex(7), 100) == []
    assert log.first_within(0) == 8


def test_directory_that_a_file_system_makes_in_a_log_stays_when_the_log_begins_anew(
    tmp_path: Path,
) -> None:
    disk, log = RealDisk(), tmp_path / "log"
    timer_log.Log.open(disk, log).close()
    disk.make_dir(log / "lost+found")
    rests = [log / f"{timer_log.MARK_NAME}.tmp", log / f"{1:016x}.log.tmp"]
    for path in rests:
        disk.open_append(path).close()
    timer_log.replace_by_empty(disk, log, LogIndex(7), Epoch(2))
    there = [f"{8:016x}.log", timer_log.MARK_NAME, "lost+found"]
    assert disk.list_dir(log) == there
