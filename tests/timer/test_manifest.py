"""Manifests: a restart from one gives the uninterrupted machine's state, or names the damage."""

import random
import zlib
from pathlib import Path
from unittest import mock

import msgpack
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    START_MS,
    STATE,
    Log,
    catch_up,
    engine_on,
    fetch_all,
    flush,
    part_of,
    queue_of,
    state_of,
)
from tests.timer.node_files import SPILLS, busy_log, flushed
from timer.entries.payloads import Op
from timer.entries.policies import Scope
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    EngineError,
    UnknownVersionError,
)
from timer.model.units import LogIndex, TopicId, UnixMs
from timer.ready.queue import INTERVAL_MS
from timer.recovery import manifest
from timer.recovery.manifest import NAME

PATH = STATE / NAME


@pytest.mark.parametrize("cut", range(1, 34))
def test_restart_from_a_manifest_of_any_index_is_the_uninterrupted_machine(cut: int) -> None:
    whole = busy_log()
    log = Log(entries=whole.entries[:cut])
    disk, engine = flushed(log)
    disk.crash(random.Random(cut))
    again = engine_on(disk)
    assert again.manifest_index == cut == again.commit_index
    assert state_of(again.machine) == state_of(engine.machine)
    uninterrupted = engine_on(SimDisk())
    for each in (again, uninterrupted):
        catch_up(each, whole)
    assert state_of(again.machine) == state_of(uninterrupted.machine)


def test_restart_knows_when_each_message_fired_as_far_as_retention_asks() -> None:
    log = Log()
    log.begin_epoch()
    log.topic("a")
    log.policy(Scope("", TopicId(1)), retention_ms=3 * INTERVAL_MS)
    for _ in range(3):
        log.schedule(part_of([(1, log.now_ms, b"x")] * 2))
        log.fire(log.now_ms)
        log.now_ms += INTERVAL_MS
    disk, engine = flushed(log)
    again = engine_on(disk)
    assert len(again.machine.topics[TopicId(1)].queue.intervals) == 3 + 2  # two gaps between
    assert state_of(again.machine) == state_of(engine.machine)
    log.now_ms += INTERVAL_MS
    log.checkpoint()
    for each in (again, engine):
        catch_up(each, log)
        assert [offset for offset, *_ in queue_of(each.machine, 1)] == [2, 3, 4, 5]


@pytest.mark.parametrize("start", range(1, 34, 4))
def test_cut_that_was_prepared_topic_by_topic_while_they_changed_is_the_cut(start: int) -> None:
    whole, log = busy_log(), Log()
    engine = engine_on(SimDisk())
    for at, entry in enumerate(whole.entries):
        log.entries.append(entry)
        catch_up(engine, log)
        if at >= start:
            engine.prepare_flush(1)
    for _ in range(2):  # and again, now that nothing was prepared
        state, fresh = manifest.capture(engine.machine, engine._ahead)
        anew, same = manifest.capture(engine.machine, manifest.FlushSources(engine.machine))
        for each in (state, anew):
            each["producers"].sort()
        assert manifest._encode(state) == manifest._encode(anew)
        assert [(s.topic, s.old) for s in fresh] == [(s.topic, s.old) for s in same]


def test_prepared_cut_and_a_checkpoint_cost_what_has_changed_and_not_what_is_there() -> None:
    log = Log()
    log.begin_epoch()
    for number in range(100):
        log.topic(f"t{number}")
    log.schedule(part_of([(topic, START_MS + topic, b"x") for topic in range(1, 101)]))
    log.fire(START_MS + 200)
    log.checkpoint()
    engine = engine_on(SimDisk())
    catch_up(engine, log)
    with mock.patch.object(manifest, "_topic_state", wraps=manifest._topic_state) as taken:
        steps = 1
        while not engine.prepare_flush(30):
            assert taken.call_count == 30 * steps
            steps += 1
        assert taken.call_count == 100
        log.schedule(part_of([(topic, START_MS + 300, b"y") for topic in (7, 60)]))
        log.topic("new")
        log.delete_topic(9)
        hashes = engine.machine._hashes
        with mock.patch.object(hashes, "_number", wraps=hashes._number) as hashed:
            log.checkpoint()
            catch_up(engine, log)
            begun = engine.begin_flush()
        assert (taken.call_count, hashed.call_count) == (103, 3)
    assert begun is not None
    begun.write()
    steps = 1
    while not engine.settle_flush(begun, 30):
        spilled = sum(not t.queue.unspilled_blocks() for t in engine.machine.topics.values())
        assert spilled == 30 * steps + 1, "the new one has fired nothing"
        steps += 1
    engine.end_flush(begun)
    assert steps == 4
    log.topic("newer")
    catch_up(engine, log)
    again = engine.begin_flush()
    assert again is not None
    assert again.new_spills == [], "what was spilled is not what was prepared before"


def test_flush_upon_flush_keeps_what_earlier_ones_spilled() -> None:
    log = busy_log()
    disk, engine = flushed(log)
    expected = queue_of(engine.machine, 1)
    for _ in range(3):
        log.schedule(part_of([(1, START_MS, b"more")]))
        catch_up(engine, log)
        flush(engine)
        expected.append((len(expected) + expected[0][0], log.entries[-1].index, b""))
    disk.die()
    again = engine_on(disk)
    assert state_of(again.machine) == state_of(engine.machine)
    assert [m[0] for m in queue_of(again.machine, 1)] == [m[0] for m in expected]
    assert queue_of(again.machine, 1)[-1][2] == b"more"


def test_spill_files_leave_with_the_last_block_that_a_group_needs() -> None:
    log = busy_log()
    disk, engine = flushed(log)
    first = disk.list_dir(SPILLS)
    assert len(first) == 1
    end = engine.machine.topics[TopicId(1)].queue.end
    for group in (1, 2):
        log.op(Op.RESERVE, 1, group, [end])
        log.op(Op.ACK, 1, group, range(end))
    log.op(Op.RESERVE, 3, 3, [1])
    log.op(Op.ACK, 3, 3, [0])
    catch_up(engine, log)
    assert disk.list_dir(SPILLS) == first
    flush(engine)
    assert disk.list_dir(SPILLS) == []
    assert engine_on(disk).machine.topics[TopicId(1)].queue.end == end


@pytest.mark.parametrize("after", range(6))
def test_flush_that_fails_leaves_the_old_manifest_whole(after: int) -> None:
    log = busy_log()
    disk, engine = flushed(log)
    log.schedule(part_of([(1, START_MS, b"more"), (1, START_MS + 10**6, b"far")]))
    catch_up(engine, log)
    begun = engine.begin_flush()
    assert begun is not None
    disk.fail_sync(random.Random(after), after=after)
    try:
        begun.write()
        written = True
    except DiskFailedError:
        written = False
    disk.crash(random.Random(after))
    again = engine_on(disk)
    assert again.manifest_index == (len(log.entries) if written else len(log.entries) - 1)
    catch_up(again, log)
    assert state_of(again.machine) == state_of(engine.machine)


def test_manifest_with_any_byte_flipped_is_corrupt_or_another_version() -> None:
    disk, _ = flushed(busy_log())
    for position in range(0, disk.size(PATH), 1):
        disk.flip(PATH, position, mask=0x21)
        with pytest.raises((CorruptFileError, UnknownVersionError)):
            manifest.read(disk, STATE)
        disk.flip(PATH, position, mask=0x21)
    assert manifest.read(disk, STATE)


def test_manifest_cut_at_every_byte_is_corrupt() -> None:
    disk, _ = flushed(busy_log())
    data = disk.read(PATH)
    for size in range(len(data)):
        disk.write_atomic(PATH, data[:size])
        with pytest.raises(CorruptFileError):
            manifest.read(disk, STATE)


@pytest.mark.parametrize("kind", ["spill", "run"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_file_of_a_manifest_stops_the_start_or_its_first_reading(
    kind: str, damage: str
) -> None:
    log = busy_log()
    disk, engine = flushed(log)
    if kind == "spill":
        path = SPILLS / disk.list_dir(SPILLS)[0]
    else:
        path = STATE / "runs" / engine.machine.store.runs[0].name
    if damage == "missing":
        disk.remove(path)
    elif damage == "cut":
        disk.write_atomic(path, disk.read(path)[:-1])
    else:
        disk.flip(path, disk.size(path) // 2)
    log.fire(START_MS + 10**9)
    with pytest.raises(CorruptFileError):
        read_everything(disk, log)


def read_everything(disk: SimDisk, log: Log) -> None:
    engine = engine_on(disk)
    catch_up(engine, log)
    fetch_all(engine.machine)


def test_state_that_does_not_match_its_digest_is_corrupt() -> None:
    disk, _ = flushed(busy_log())
    state = manifest.read(disk, STATE)
    assert state is not None
    state["topics"][0]["pending_sum"] += 1
    manifest.write(disk, STATE, state)
    with pytest.raises(CorruptFileError, match="digest"):
        engine_on(disk)


def test_capture_is_of_its_index_whatever_is_applied_while_it_is_written() -> None:
    log = busy_log()
    disk = SimDisk()
    engine = engine_on(disk)
    catch_up(engine, log)
    before = state_of(engine.machine)
    begun = engine.begin_flush()
    assert begun is not None
    index = LogIndex(len(log.entries))
    log.schedule(part_of([(1, START_MS + 50, b"later")], 1, 2))
    log.cancel([(START_MS + 15, 15), (START_MS + 10**6, 20)])
    log.fire(START_MS + 60)
    log.op(Op.ACK, 1, 1, [2, 3, 5, 6])
    log.op(Op.ENDED, 1, 2, [1, 2])
    log.now_ms += 10**6
    log.checkpoint()
    catch_up(engine, log)
    begun.write()
    disk.crash(random.Random(3))
    again = engine_on(disk)
    assert again.manifest_index == index
    assert state_of(again.machine) == before
    catch_up(again, log)
    engine.end_flush(begun)
    assert state_of(again.machine) == state_of(engine.machine)
    assert UnixMs(log.now_ms) == again.machine.applied_time_ms


def test_nothing_but_errors_of_ours_comes_from_a_damaged_directory() -> None:
    rng = random.Random(5)
    refused = 0
    for _ in range(100):
        disk, engine = flushed(busy_log())
        place = disk.synced_byte(rng, Path("/"))
        assert place is not None
        disk.flip(*place, mask=1 << rng.randrange(8))
        try:
            again = engine_on(disk).machine
            fetch_all(again)
            assert again.digest() == engine.machine.digest()
        except EngineError:
            refused += 1
    assert 30 < refused < 100  # batches and keys are looked at when they are first read


def at_level(level: int) -> SimDisk:
    log = busy_log()
    log.begin_epoch(level)
    disk, _ = flushed(log)
    return disk


def test_manifest_of_level_1_is_that_of_version_0_1() -> None:
    disk = at_level(1)
    data = disk.read(PATH)
    crc32, version = int.from_bytes(data[12:16], "little"), int.from_bytes(data[8:12], "little")
    assert (version, crc32) == (manifest.VERSION_OF_LEVEL_1, zlib.crc32(data[24:]))
    assert "level" not in msgpack.unpackb(data[24:], strict_map_key=False)
    assert engine_on(disk).machine.level == 1


def test_flipped_version_of_a_manifest_of_level_2_is_damage_and_not_another_version() -> None:
    disk = at_level(2)
    assert disk.read(PATH)[8] == manifest.VERSION
    for bit in range(32):
        disk.flip(PATH, 8 + bit // 8, mask=1 << bit % 8)
        with pytest.raises(CorruptFileError):
            manifest.read(disk, STATE)
        disk.flip(PATH, 8 + bit // 8, mask=1 << bit % 8)
    assert engine_on(disk).machine.level == 2
