"""Files on a disk are bounded by the pending timers and unread messages, not by the history."""

from pathlib import Path

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    STATE,
    Log,
    catch_up,
    engine_on,
    fetch_all,
    flush,
    part_of,
    state_of,
)
from tests.timer.node_files import SPILLS
from timer.entries.payloads import Op
from timer.files.disk_reserve import DiskSpace
from timer.model.units import TopicId
from timer.ready.page_cache import SpillRef
from timer.ready.spill import SMALL_FILES_MAX, blocks_to_move
from timer.recovery import scrub
from timer.recovery.engine import Engine

PAYLOAD = 2_000
ROWS = 50
WAVES = 40
SMALL, BUSY = TopicId(1), TopicId(2)


def begun() -> tuple[SimDisk, Engine, Log]:
    """Return an engine with two topics, each with a group."""
    disk, log = SimDisk(), Log()
    engine = engine_on(disk)
    log.begin_epoch()
    for number, name in enumerate(("small", "busy"), start=1):
        log.topic(name)
        log.create_group(number, "g")
    catch_up(engine, log)
    return disk, engine, log


def wave(engine: Engine, log: Log) -> None:
    """Schedule into both topics and fire; ack the messages of the busy topic."""
    fire(engine, log)
    ack(engine, log)


def fire(engine: Engine, log: Log) -> None:
    due = log.now_ms + 1_000
    log.schedule(part_of([(SMALL, due, b"kept")]))
    log.schedule(part_of([(BUSY, due, bytes(PAYLOAD))] * ROWS))
    catch_up(engine, log)
    flush(engine)
    log.fire(due)
    catch_up(engine, log)
    flush(engine)


def ack(engine: Engine, log: Log) -> None:
    end = engine.machine.topics[BUSY].queue.end
    log.op(Op.RESERVE, BUSY, 2, [end])
    log.op(Op.ACK, BUSY, 2, range(end - ROWS, end))
    log.now_ms += 2_000
    log.checkpoint()
    catch_up(engine, log)
    flush(engine)


def test_disk_use_does_not_grow_with_what_has_fired_and_was_acked() -> None:
    disk, engine, log = begun()
    used = []
    for _ in range(WAVES):
        wave(engine, log)
        used.append(disk.used_bytes())
    one = ROWS * PAYLOAD
    assert WAVES * one > 20 * max(used)
    assert max(used[WAVES // 2 :]) < 2 * one
    # One message of each wave stays unread. It must not keep the file that it was spilled to.
    queue = engine.machine.topics[SMALL].queue
    assert queue.end - queue.begin == WAVES
    assert len(disk.list_dir(SPILLS)) <= 2 * (SMALL_FILES_MAX + 1)


def test_what_fits_is_copied_and_what_frees_most_goes_first() -> None:
    disk, refs = SimDisk(), list[SpillRef]()
    needed = {"most": (100, 9_000), "much": (200, 8_000), "less": (50, 1_000), "full": (900, 1_000)}
    for name, (size, file_size) in needed.items():
        disk.make_dir(SPILLS)
        disk.write_atomic(SPILLS / name, bytes(file_size))
        refs += [SpillRef(name, 0, size - 10), SpillRef(name, 500, 10)]

    def moved(size_max: int) -> list[str]:
        names = [ref.file for ref in blocks_to_move(disk, SPILLS, refs, size_max)]
        assert len(names) == 2 * len({*names}), "a file goes as a whole"
        return sorted({*names})

    assert [moved(size_max) for size_max in (-1, 49, 99, 149)] == [[], [], ["less"], ["most"]]
    assert moved(299) == ["less", "most"]
    assert moved(300) == moved(349) == ["most", "much"]
    assert moved(350) == ["less", "most", "much"]


def test_flush_copies_no_more_than_there_is_room_for() -> None:
    disk, engine, log = begun()
    fire(engine, log)
    fire(engine, log)
    files_before = {*disk.list_dir(SPILLS)}
    end = engine.machine.topics[BUSY].queue.end
    log.op(Op.RESERVE, BUSY, 2, [end])
    log.op(Op.ACK, BUSY, 2, range(end))
    log.now_ms += 2_000
    log.checkpoint()
    catch_up(engine, log)
    engine.disk_space = DiskSpace(engine._flush_size, 0, low=True)
    flush(engine)
    assert {*disk.list_dir(SPILLS)} == files_before, "nothing was copied, nothing is lost"
    engine.disk_space = DiskSpace.unmeasured()
    for _ in range(2):  # copied blocks may be read at their old place until the next flush
        log.checkpoint()
        catch_up(engine, log)
        flush(engine)
    assert not {*disk.list_dir(SPILLS)} & files_before
    assert state_of(engine_on(disk).machine) == state_of(engine.machine)


def test_message_that_moved_is_read_where_it_is_now() -> None:
    disk, engine, log = begun()
    for _ in range(3):
        wave(engine, log)
    assert not [c for c in scrub.scrub(disk, state=STATE, log=_empty(disk)) if c.damage]
    disk.die()
    again = engine_on(disk)
    for each in (engine, again):
        each.machine.pages.evict(0)
        fetch_all(each.machine)
    assert state_of(again.machine) == state_of(engine.machine)
    queue = again.machine.topics[SMALL].queue
    offsets = np.arange(queue.begin, queue.end, dtype=np.uint64)
    payloads = [
        bytes(page.bufs[0])[start : start + 4]
        for page, at in queue.slices(offsets)
        for start in page.rows["payload_start"][at.astype(np.int64)].tolist()
    ]
    assert payloads == [b"kept"] * 3


def _empty(disk: SimDisk) -> Path:
    disk.make_dir(Path("/log"))
    return Path("/log")


@pytest.mark.parametrize("late", [False, True])
def test_page_that_is_fetched_while_its_block_moves_is_found(late: bool) -> None:
    _, engine, log = begun()
    fire(engine, log)
    machine = engine.machine
    queue = machine.topics[SMALL].queue
    machine.pages.evict(0)
    assert queue.count_in_memory(np.arange(queue.begin, queue.end, dtype=np.uint64)) == 0
    fetch = engine.begin_fetch()
    assert fetch is not None
    refs = {block.spill for block in queue.blocks}
    if not late:
        fetch.read()
    ack(engine, log)  # it moves
    wave(engine, log)  # and the file is gone
    assert not refs & {block.spill for block in queue.blocks}
    if late:
        fetch.read()
    engine.end_fetch(fetch)
    again = engine.begin_fetch()
    assert (again is not None) == late
    if again is not None:
        again.read()
        engine.end_fetch(again)
    assert queue.count_in_memory(np.arange(queue.begin, queue.begin + 1, dtype=np.uint64)) == 1


def test_restart_between_the_manifest_and_the_move_finds_the_blocks() -> None:
    disk, engine, log = begun()
    fire(engine, log)
    log.op(Op.RESERVE, BUSY, 2, [ROWS])
    log.op(Op.ACK, BUSY, 2, range(ROWS))
    catch_up(engine, log)
    expected = engine.machine.digest()
    begun_ = engine.begin_flush()
    assert begun_ is not None
    names = disk.list_dir(SPILLS)
    begun_.write()
    assert begun_.moved
    assert {*names} < {*disk.list_dir(SPILLS)}, "who reads a block finds it until it has moved"
    disk.die()
    again = engine_on(disk)
    fetch_all(again.machine)
    assert again.machine.digest() == expected
    assert not {*names} & {*disk.list_dir(SPILLS)}


@pytest.mark.parametrize("runs", [1, 8])
@pytest.mark.parametrize("ending", ["cancelled", "deleted"])
def test_a_full_disk_gets_back_the_room_of_what_ended(ending: str, runs: int) -> None:
    """Also if a larger merge, of eight runs of one size, is due and has no room."""
    disk, engine, log = begun()
    due, rows = log.now_ms + 3_600_000, 2_000
    for first in range(0, rows, rows // runs):
        numbers = range(first, first + rows // runs)
        log.schedule(part_of([(BUSY, due + number, bytes(PAYLOAD)) for number in numbers]))
        catch_up(engine, log)
        flush(engine)
    taken = run_bytes(disk)
    assert taken > rows * PAYLOAD
    engine.disk_space = DiskSpace(free=taken // 4, reserve=taken, low=True)
    assert engine.begin_merge() is None
    if ending == "cancelled":
        log.cancel([(due + number, 1 + number) for number in range(rows)])
    else:
        log.delete_topic(BUSY)
    catch_up(engine, log)
    flush(engine)
    store = engine.machine.store
    while (merge := engine.begin_merge()) is not None:
        store.install_merge(merge, store.write_merge(merge))
    log.checkpoint()
    catch_up(engine, log)
    flush(engine)
    assert run_bytes(disk) < taken // 100


def run_bytes(disk: SimDisk) -> int:
    """Return the size of all run files in bytes."""
    return sum(disk.size(STATE / "runs" / name) for name in disk.list_dir(STATE / "runs"))
