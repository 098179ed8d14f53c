"""Small blocks of fired messages are joined: their number follows the size of the messages."""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.calls import calls_of
from tests.timer.machines import (
    START_MS,
    STATE,
    Log,
    catch_up,
    engine_on,
    flush,
    part_of,
    queue_of,
    state_of,
)
from tests.timer.node_files import SPILLS
from timer.entries.payloads import Op
from timer.entries.policies import Scope
from timer.files.disk_reserve import DiskSpace
from timer.leader.groups.expiry import expired_prefix
from timer.model.timer_errors import CorruptFileError
from timer.model.units import QueueOffset, TopicId, UnixMs
from timer.ready import spill as spill_module
from timer.ready.page_cache import Block, SpillRef
from timer.ready.queue import INTERVAL_MS, Queue
from timer.ready.spill import (
    BLOCK_ROWS_MAX,
    BLOCK_WORK,
    JOINED_MAX,
    JOINED_MIN,
    JOINED_TTL_SHARE,
    MOVED_SIZE_MAX,
    Spill,
    blocks_to_move,
    limit_joins,
    spills_of,
)
from timer.ready.topic import RETENTION_MS
from timer.recovery.engine import Engine

EVERY_MS = INTERVAL_MS // 4
TOPICS = 3
ROUNDS = 24
BLOCKS_MAX = 16
"""Blocks of a queue with few messages, at most: a tier has fewer than JOINED_MIN, and sizes grow
from tier to tier."""
WRITTEN_MAX = 16
"""Times that a message is written, at most."""
DAY_MS = 86_400_000


def begun(disk: SimDisk | None = None) -> tuple[Engine, Log]:
    """Return an engine with some topics, of which the second has a group."""
    engine, log = engine_on(disk or SimDisk()), Log()
    log.begin_epoch()
    for number in range(1, TOPICS + 1):
        log.topic(f"t{number}")
    log.create_group(2, "g")
    catch_up(engine, log)
    return engine, log


def fire(engine: Engine, log: Log, topics: int = TOPICS, payload: bytes = b"m") -> None:
    """Fire one message of each topic, later than the last ones. The payload has its number."""
    log.now_ms += EVERY_MS
    timers = [(1 + topic, log.now_ms, b"%s %d" % (payload, topic)) for topic in range(topics)]
    log.schedule(part_of(timers, keys=[b"k%d" % len(log.entries)] * topics))
    log.fire(log.now_ms)
    catch_up(engine, log)


def queue_at(engine: Engine, topic: int) -> Queue:
    return engine.machine.topics[TopicId(topic)].queue


def blocks_at(engine: Engine, topic: int = 1) -> list[tuple[int, int]]:
    return [(block.first, block.end) for block in queue_at(engine, topic).blocks]


def fired(times: int, disk: SimDisk | None = None) -> tuple[Engine, Log]:
    """Return an engine that has flushed after each message of each topic."""
    engine, log = begun(disk)
    for _ in range(times):
        fire(engine, log)
        flush(engine)
    return engine, log


def flush_without_room(engine: Engine) -> None:
    """Flush while the disk has no room to copy or join blocks."""
    engine.disk_space = DiskSpace(engine._flush_size, 0, low=True)
    flush(engine)
    engine.disk_space = DiskSpace.unmeasured()


def flush_again(engine: Engine, log: Log) -> None:
    """Flush without new messages."""
    log.checkpoint()
    catch_up(engine, log)
    flush(engine)


def burst(engine: Engine, log: Log, rows: int, payload: bytes = b"m", topic: int = 1) -> None:
    """Fire some messages of a topic."""
    log.now_ms += 1
    log.schedule(part_of([(topic, log.now_ms, payload)] * rows))
    log.fire(log.now_ms)
    catch_up(engine, log)


def fetch(engine: Engine, blocks: Iterable[Block]) -> None:
    """Request pages and read them."""
    for block in blocks:
        engine.machine.pages.request(block)
    begun = engine.begin_fetch()
    assert begun is not None
    begun.read()
    engine.end_fetch(begun)


def cold_queue(count: int, size: int) -> Queue:
    """Return a queue of blocks in one file, each of one message and `size` bytes."""
    queue = Queue()
    for at in range(count):
        ref = SpillRef("file", at * size, size)
        queue.restore(Block(QueueOffset(at), QueueOffset(at + 1), None, ref))
    return queue


def spans_of(spills: Iterable[Spill]) -> list[tuple[int, int]]:
    return [(spill.old[0].first, spill.old[-1].end) for spill in spills]


def test_one_message_in_each_flush_leaves_few_blocks() -> None:
    disk, rounds = SimDisk(), 400
    engine, log = begun(disk)
    most = written = 0
    for _ in range(rounds):
        fire(engine, log)
        before = {*disk.list_dir(SPILLS)}
        flush(engine)
        engine.machine.pages.evict(0)
        written += sum(disk.size(SPILLS / name) for name in {*disk.list_dir(SPILLS)} - before)
        most = max(most, *(len(blocks_at(engine, topic)) for topic in (1, 2, 3)))
    assert [queue_at(engine, topic).end for topic in (1, 2, 3)] == [rounds] * 3
    assert most <= BLOCKS_MAX
    assert len(disk.list_dir(SPILLS)) <= 2 * (spill_module.SMALL_FILES_MAX + 1)
    needed = sum(b.spill.size for t in (1, 2, 3) for b in queue_at(engine, t).blocks if b.spill)
    assert written < WRITTEN_MAX * needed, "a message is written again a few times"


def test_blocks_that_are_half_full_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "SMALL_BLOCK", 4 * spill_module.ROW_WEIGHT)
    engine, log = begun()
    for _ in range(40):
        for _ in range(4):
            fire(engine, log)
        flush(engine)
    assert blocks_at(engine) == [(4 * at, 4 * at + 4) for at in range(40)]


@pytest.mark.parametrize("cold", [False, True])
def test_joined_messages_are_read_back_also_after_a_restart(cold: bool) -> None:
    disk = SimDisk()
    engine, log = begun(disk)
    other = engine_on(SimDisk())  # flushes once: its blocks are others
    for _ in range(3 * JOINED_MIN):
        fire(engine, log)
        flush(engine)
        if cold:
            engine.machine.pages.evict(0)
    catch_up(other, log)
    flush(other)
    assert blocks_at(engine) != blocks_at(other)
    assert len(blocks_at(engine)) <= JOINED_MIN + 1
    pages = engine.machine.pages
    assert (pages.spilled_size == 0) == cold, "joined blocks stay in memory if all were there"
    disk.crash(random.Random(1))
    again = engine_on(disk)
    expected = state_of(other.machine)
    assert state_of(engine.machine) == state_of(again.machine) == expected
    for each in (engine, again, other):
        log_of_queue = queue_of(each.machine, 1)
        assert [payload for *_, payload in log_of_queue] == [b"m 0"] * 3 * JOINED_MIN


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine, Log]:
    """Return two engines with equal messages, of which the second never joins."""
    engine, log = fired(ROUNDS)
    monkeypatch.setattr(spill_module, "JOINED_MIN", ROUNDS + 1)
    plain, _ = fired(ROUNDS)
    assert len(blocks_at(plain)) == ROUNDS > len(blocks_at(engine))
    return engine, plain, log


def test_seek_backlog_and_expiry_do_not_depend_on_joins(
    engines: tuple[Engine, Engine, Log],
) -> None:
    engine, plain, _ = engines
    for topic in (1, 2, 3):
        ours, theirs = queue_at(engine, topic), queue_at(plain, topic)
        for offset in range(ROUNDS + 1):  # payloads of equal sizes: the proportion is exact
            at = QueueOffset(offset)
            assert ours.payload_bytes_from(at) == theirs.payload_bytes_from(at)
        for at_ms in range(START_MS, START_MS + (ROUNDS + 2) * EVERY_MS, EVERY_MS):
            for shift_ms in (-1, 0, 1):
                sought = UnixMs(at_ms + shift_ms)
                assert ours.offset_fired_from(sought) == theirs.offset_fired_from(sought)
                for expired in (expired_prefix(each, sought, ROUNDS) for each in (ours, theirs)):
                    assert expired[0] == min(ROUNDS, max(0, (sought - START_MS) // EVERY_MS))


def test_retention_does_not_depend_on_joins(engines: tuple[Engine, Engine, Log]) -> None:
    engine, plain, log = engines
    log.op(Op.RESERVE, 2, 1, [100])
    log.op(Op.ACK, 2, 1, range(ROUNDS // 2))
    log.now_ms += RETENTION_MS - EVERY_MS * ROUNDS // 2  # it is over for half of the messages
    log.checkpoint()
    for each in (engine, plain):
        catch_up(each, log)
        assert queue_at(each, 2).begin == ROUNDS // 2
        assert 0 < queue_at(each, 1).begin < ROUNDS
        flush(each)
    assert state_of(engine.machine) == state_of(plain.machine)


def test_age_of_a_message_on_disk_is_known_to_its_time_interval() -> None:
    rounds = 4 * JOINED_MIN
    engine, _ = fired(rounds)
    engine.machine.pages.evict(0)
    queue = queue_at(engine, 1)
    assert len(queue.blocks) < rounds // 2
    for offset in range(rounds):
        time_ms = START_MS + (1 + offset) * EVERY_MS
        assert time_ms - INTERVAL_MS < queue.fired_at_ms(offset) <= time_ms


@pytest.mark.parametrize("acked", [1, JOINED_MIN - 1, JOINED_MIN, JOINED_MIN + 1])
def test_messages_that_are_acked_while_their_blocks_are_joined(acked: int) -> None:
    disk = SimDisk()
    engine, log = fired(JOINED_MIN, disk)
    fire(engine, log)
    begun = engine.begin_flush()
    assert begun is not None
    begun.write()
    log.op(Op.RESERVE, 2, 1, [JOINED_MIN + 1])
    log.op(Op.ACK, 2, 1, range(acked))
    fire(engine, log)
    engine.end_flush(begun)
    blocks = [(0, JOINED_MIN), (JOINED_MIN, JOINED_MIN + 1), (JOINED_MIN + 1, JOINED_MIN + 2)]
    assert blocks_at(engine, 2) == [block for block in blocks if block[1] > acked]
    expected = state_of(engine.machine)
    flush(engine)
    disk.die()
    assert state_of(engine_on(disk).machine) == expected


@pytest.mark.parametrize("late", [False, True])
def test_page_that_is_requested_while_its_block_is_joined_is_fetched(late: bool) -> None:
    engine, log = fired(JOINED_MIN)
    machine, queue = engine.machine, queue_at(engine, 1)
    machine.pages.evict(0)
    offsets = np.arange(JOINED_MIN, dtype=np.uint64)
    assert queue.count_in_memory(offsets) == 0
    fetch = engine.begin_fetch()
    assert fetch is not None
    if not late:
        fetch.read()
    for _ in range(2):  # the second flush removes the files
        fire(engine, log)
        flush(engine)
    assert blocks_at(engine)[0] == (0, JOINED_MIN)
    if late:
        fetch.read()
    engine.end_fetch(fetch)
    again = engine.begin_fetch()
    assert again is not None, "the joined block is requested without another call"
    again.read()
    engine.end_fetch(again)
    assert queue.count_in_memory(offsets) == JOINED_MIN


def test_old_place_is_read_until_the_joined_blocks_are_installed() -> None:
    engine, log = fired(JOINED_MIN)
    engine.machine.pages.evict(0)
    queue = queue_at(engine, 1)
    offsets = np.arange(JOINED_MIN, dtype=np.uint64)
    fire(engine, log)
    cut = engine.begin_flush()
    assert cut is not None
    cut.write()
    while (count := queue.count_in_memory(offsets)) < JOINED_MIN:
        fetch = engine.begin_fetch()
        assert fetch is not None, f"{count} messages are in memory"
        fetch.read()
        engine.end_fetch(fetch)
    engine.end_flush(cut)
    assert blocks_at(engine)[0] == (0, JOINED_MIN)


def test_crash_before_the_manifest_leaves_the_small_blocks() -> None:
    disk = SimDisk()
    engine, log = fired(JOINED_MIN, disk)
    fire(engine, log)
    flush_, expected = engine.begin_flush(), state_of(engine.machine)
    assert flush_ is not None
    before = {name: disk.read(SPILLS / name) for name in disk.list_dir(SPILLS)}
    spill_module.write_spill(disk, SPILLS / "00ff.spill", limit_joins(flush_.new_spills, 1 << 20))
    assert before == {name: disk.read(SPILLS / name) for name in before}
    disk.crash(random.Random(1))
    again = engine_on(disk)
    assert [*disk.list_dir(SPILLS)] == [*before]
    catch_up(again, log)
    assert state_of(again.machine) == expected


def test_damaged_block_is_found_when_it_is_joined() -> None:
    disk = SimDisk()
    engine, log = fired(JOINED_MIN, disk)
    engine.machine.pages.evict(0)
    spill = queue_at(engine, 1).blocks[2].spill
    assert spill is not None
    disk.flip(STATE / Path("queues") / spill.file, spill.position + spill.size - 1, mask=1)
    fire(engine, log)
    with pytest.raises(CorruptFileError, match="checksum"):
        flush(engine)


def test_nothing_is_joined_without_room_and_all_is_later() -> None:
    engine, log = begun()
    for _ in range(5 * JOINED_MIN):
        fire(engine, log)
        flush_without_room(engine)
    assert len(blocks_at(engine)) == 5 * JOINED_MIN
    flush_again(engine, log)  # also a topic that fires no more
    assert blocks_at(engine) == [(0, 5 * JOINED_MIN)]


def test_joins_of_one_flush_are_limited_and_the_longest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, log = fired(JOINED_MIN - 1)
    for topic in (2, 2, 2, 1, 2):
        burst(engine, log, 1, b"%d" % topic, topic)
        flush_without_room(engine)
    fire(engine, log)
    cut = engine.begin_flush()
    assert cut is not None

    def joined(most: int, size_max: int = 1 << 20) -> list[tuple[int, int]]:
        monkeypatch.setattr(spill_module, "JOINED_MAX", most)
        found = limit_joins(cut.new_spills, size_max)
        assert [spill.topic for spill in found if not spill.is_join] == [1, 2, 3]
        return [(spill.topic, len(spill.old)) for spill in found if spill.is_join]

    longest = JOINED_MIN + 3
    assert joined(-6) == joined(-6 + JOINED_MIN - 1) == []
    assert joined(-6 + JOINED_MIN) == [(2, JOINED_MIN)]
    assert joined(-6 + longest) == joined(-6 + longest + 7) == [(2, longest)]
    assert joined(-6 + longest + JOINED_MIN) == [(2, longest), (1, JOINED_MIN)]
    assert joined(1 << 20) == [(2, longest), (1, JOINED_MIN)]
    sizes = [spill.old_size for spill in cut.new_spills if spill.topic == 2 and spill.is_join]
    assert joined(99, 0) == []
    assert joined(99, sizes[0] - 1) == [(2, longest - 1)]
    assert joined(99, sizes[0]) == [(2, longest)]


def test_a_newer_block_that_is_much_smaller_leaves_the_older_ones() -> None:
    rows = [400, *[1] * (JOINED_MIN - 1)]
    engine, log = begun()
    for count in rows:
        burst(engine, log, count)
        flush(engine)
    flush_again(engine, log)
    assert len(blocks_at(engine)) == JOINED_MIN, "a large block is not written for so little"
    fire(engine, log)
    flush(engine)
    fire(engine, log)
    flush(engine)
    assert blocks_at(engine)[:2] == [(0, 400), (400, 400 + JOINED_MIN)]


def test_joined_blocks_are_cut_at_the_usual_size() -> None:
    engine, log = begun()
    for _ in range(JOINED_MIN):
        burst(engine, log, 1_500)
        flush(engine)
    flush_again(engine, log)
    rows = JOINED_MIN * 1_500
    ends = [*range(BLOCK_ROWS_MAX, rows, BLOCK_ROWS_MAX), rows]
    assert [end for _, end in blocks_at(engine)] == ends


def test_joined_blocks_are_not_copied_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    engine, log = fired(JOINED_MIN, disk)
    monkeypatch.setattr(spill_module, "SMALL_FILES_MAX", 2)
    assert len(disk.list_dir(SPILLS)) == JOINED_MIN
    fire(engine, log)
    cut = engine.begin_flush()
    assert cut is not None
    kinds = [(spill.topic, spill.is_join, len(spill.old)) for spill in cut.new_spills]
    assert kinds == [(t, j, JOINED_MIN if j else 1) for t in (1, 2, 3) for j in (True, False)]
    cut.write()
    assert cut.moved == {}, "no other block is in these small files"


def test_first_blocks_that_fit_are_joined_if_not_all_do() -> None:
    queue = cold_queue(100, 300 << 10)
    spills = spills_of(TopicId(1), queue)
    assert spans_of(spills) == [(0, 100)]
    for fit in (JOINED_MIN, 85, 100, 200):
        assert spans_of(limit_joins(spills, fit * (300 << 10))) == [(0, min(fit, 100))]
    assert limit_joins(spills, JOINED_MIN * (300 << 10) - 1) == []
    large = queue.blocks[0].spill = SpillRef("file", 0, 500 << 10)
    assert spans_of(limit_joins(spills, large.size)) == []
    assert spans_of(limit_joins(spills, JOINED_MIN * (300 << 10))) == [(1, 1 + JOINED_MIN)]


def test_one_flush_joins_a_bounded_number_of_bytes_and_copies_the_less_for_it() -> None:
    spills = spills_of(TopicId(1), cold_queue(1_000, 500 << 10))
    chosen = limit_joins(spills, 1 << 40)
    size = chosen[0].old_size
    assert MOVED_SIZE_MAX - (500 << 10) < size <= MOVED_SIZE_MAX
    disk, refs = SimDisk(), [SpillRef("thin", 0, 10)]
    disk.make_dir(SPILLS)
    disk.write_atomic(SPILLS / "thin", bytes(1_000))
    assert blocks_to_move(disk, SPILLS, refs, 1 << 40, MOVED_SIZE_MAX - 1) == refs
    assert blocks_to_move(disk, SPILLS, refs, 1 << 40, MOVED_SIZE_MAX) == []


@pytest.mark.parametrize("spare", [-1, 0])
def test_joins_and_copies_share_the_room(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    monkeypatch.setattr(spill_module, "SMALL_FILES_MAX", 0)
    engine, log = begun()
    burst(engine, log, 1, topic=3)  # a block that is not joined, in a small file
    flush_without_room(engine)
    for _ in range(JOINED_MIN):
        fire(engine, log, topics=2)
        flush_without_room(engine)
    fire(engine, log, topics=2)
    cut = engine.begin_flush()
    assert cut is not None
    joined = sum(spill.old_size for spill in cut.new_spills if spill.is_join)
    copied = queue_at(engine, 3).blocks[0].spill
    assert joined > 0
    assert copied is not None
    cut.moved_size_max = joined + copied.size + spare
    cut.write()
    assert [*cut.moved] == ([copied] if spare == 0 else [])


def test_many_small_blocks_are_looked_at_in_part_and_the_oldest_are_joined_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = calls_of(monkeypatch, spill_module, "_weight")
    monkeypatch.setattr(spill_module, "JOINED_MAX", 2 * JOINED_MIN)
    queue = cold_queue(1_000, 100)
    assert spans_of(spills_of(TopicId(1), queue)) == [(0, 2 * JOINED_MIN)]
    assert len(looked) < 4 * JOINED_MIN + 20
    queue.blocks[3].spill = SpillRef("file", 0, spill_module.SMALL_BLOCK)
    assert spans_of(spills_of(TopicId(1), queue))[0][0] in (0, 4)
    for at in range(4, 1_000 - 2 * JOINED_MIN, 2):  # few small ones between large ones
        queue.blocks[at].spill = SpillRef("file", 0, spill_module.SMALL_BLOCK)
    assert spans_of(spills_of(TopicId(1), queue)) == [(1_000 - 2 * JOINED_MIN, 1_000)]


def test_many_small_blocks_are_all_joined_by_some_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "JOINED_MAX", 2 * JOINED_MIN)
    monkeypatch.setattr(spill_module, "SMALL_BLOCK", JOINED_MIN * spill_module.ROW_WEIGHT)
    engine, log = begun()
    for _ in range(100):
        fire(engine, log, topics=1)
        flush_without_room(engine)
    for _ in range(100 // JOINED_MIN):
        flush_again(engine, log)
    assert len(blocks_at(engine)) <= 100 // (2 * JOINED_MIN) + 2 * JOINED_MIN


def test_age_of_a_message_on_disk_is_not_less_than_it_is_after_a_shorter_retention() -> None:
    engine, log = begun()
    topic = engine.machine.topics[TopicId(1)]
    topic.set_retention(3_650 * DAY_MS, UnixMs(log.now_ms))
    log.now_ms = (log.now_ms // topic.queue.interval_ms + 1) * topic.queue.interval_ms
    fire(engine, log)
    flush(engine)
    engine.machine.pages.evict(0)
    assert topic.queue.fired_at_ms(0) == log.now_ms
    topic.set_retention(DAY_MS, UnixMs(log.now_ms + 3 * DAY_MS))
    assert topic.queue.fired_at_ms(0) == log.now_ms


def test_age_of_a_message_on_disk_does_not_count_dropped_messages() -> None:
    disk, rounds = SimDisk(), 4 * JOINED_MIN + 1
    engine, log = fired(rounds, disk)
    assert blocks_at(engine, 2)[0] > (0, 2 * JOINED_MIN)
    acked = 2 * JOINED_MIN - 1
    log.op(Op.RESERVE, 2, 1, [rounds])
    log.op(Op.ACK, 2, 1, range(acked))
    catch_up(engine, log)
    fired_ms = START_MS + (1 + acked) * EVERY_MS
    for _ in range(2):
        engine.machine.pages.evict(0)
        queue = queue_at(engine, 2)
        assert queue.begin == acked > queue.blocks[0].first
        assert fired_ms - INTERVAL_MS < queue.fired_at_ms(acked) <= fired_ms
        first = blocks_at(engine, 2)[0]
        while blocks_at(engine, 2)[0] == first:  # until it is joined
            fire(engine, log)
            flush(engine)
        restarted = engine_on(disk)  # from the manifest that joined the first block
        catch_up(restarted, log)
        restarted.machine.pages.evict(0)
        assert fired_ms - INTERVAL_MS < queue_at(restarted, 2).fired_at_ms(acked) <= fired_ms
        fire(engine, log)
        flush(engine)
        engine.machine.pages.evict(0)
        assert fired_ms - INTERVAL_MS < queue.fired_at_ms(acked) <= fired_ms
        engine = engine_on(disk)
        catch_up(engine, log)


def test_age_of_a_message_on_disk_is_known_where_messages_are_days_apart() -> None:
    engine, log = begun()
    days = range(2 * JOINED_MIN)
    for _ in days:
        log.now_ms += DAY_MS - EVERY_MS
        fire(engine, log)
        flush(engine)
    assert len(blocks_at(engine)) < len(days)
    engine.machine.pages.evict(0)
    for day in days:
        fired_ms = START_MS + (1 + day) * DAY_MS
        assert fired_ms - INTERVAL_MS <= queue_at(engine, 1).fired_at_ms(day) <= fired_ms


def test_joined_messages_of_a_topic_with_a_time_to_live_fired_within_a_part_of_it() -> None:
    engine, log = begun()
    ttl_ms = 12 * EVERY_MS * JOINED_TTL_SHARE
    log.policy(Scope("", TopicId(1)), ttl_ms=ttl_ms)
    log.policy(Scope("", TopicId(2)), ttl_ms=EVERY_MS * JOINED_TTL_SHARE)
    for _ in range(100):
        fire(engine, log)
        flush(engine)
    queue = queue_at(engine, 1)
    fired_ms = [
        [START_MS + (1 + at) * EVERY_MS for at in (b.first, b.end - 1)] for b in queue.blocks
    ]
    spans = [last - first for first, last in fired_ms]
    assert 0 < max(spans) <= ttl_ms // JOINED_TTL_SHARE
    assert len(spans) <= 100 // JOINED_MIN + 2 * JOINED_MIN
    assert len(blocks_at(engine, 2)) == 100, "so few are not joined"
    assert len(blocks_at(engine, 3)) <= BLOCKS_MAX


def test_joined_pages_are_evicted_before_those_that_were_fetched_for_a_consumer() -> None:
    engine, log = begun()
    for _ in range(JOINED_MIN):
        burst(engine, log, 1)
        flush(engine)
    burst(engine, log, 1, b"x" * 600_000, topic=3)
    flush_without_room(engine)
    pages, (block,) = engine.machine.pages, queue_at(engine, 3).blocks
    pages.remove(block)
    block.page = None
    fetch(engine, [block])
    burst(engine, log, 1)
    flush(engine)
    joined = queue_at(engine, 1).blocks[0]
    assert joined.end == JOINED_MIN
    pages.evict(pages.spilled_size - 1)
    assert joined.page is None
    assert block.page is not None


@pytest.mark.parametrize("fetched", [0, 1, JOINED_MIN - 1, JOINED_MIN])
def test_fetched_page_is_still_there_or_requested_after_a_join(fetched: int) -> None:
    engine, log = fired(JOINED_MIN)
    engine.machine.pages.evict(0)
    if fetched:
        fetch(engine, queue_at(engine, 1).blocks[:fetched])
    fire(engine, log)
    flush(engine)
    joined = queue_at(engine, 1).blocks[0]
    assert joined.end == JOINED_MIN
    assert (joined.page is not None) == (fetched == JOINED_MIN)
    assert engine.machine.pages.is_requested(joined) == (0 < fetched < JOINED_MIN)


def test_only_joined_blocks_with_requested_messages_are_requested() -> None:
    engine, log = begun()
    for _ in range(60):
        burst(engine, log, 1_500)
        flush_without_room(engine)
    pages, queue = engine.machine.pages, queue_at(engine, 1)
    pages.evict(0)
    pages.request(queue.blocks[30])
    flush_again(engine, log)
    wanted = [(block.first, block.end) for block in queue.blocks if pages.is_requested(block)]
    assert wanted == [each for each in blocks_at(engine) if each[0] < 46_500 and each[1] > 45_000]
    assert 0 < len(wanted) <= 2


class CountingDisk(SimDisk):
    """A disk that counts the files that are opened to read."""

    opened = 0

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        self.opened += 1
        return super().read(path, start, size)

    def read_parts(self, path: Path, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        opened = self.opened
        found = super().read_parts(path, parts)
        self.opened = opened + 1
        return found


def test_joins_of_tiny_blocks_are_paced_and_open_a_file_once() -> None:
    disk, count = CountingDisk(), 600
    disk.make_dir(SPILLS)
    queue = Queue()
    engine, log = begun()
    fire(engine, log, topics=1)
    page = queue_at(engine, 1).blocks[0].page
    assert page is not None
    for number in range(2):
        whole = Queue(queue.end, queue.end)
        for _ in range(count // 2):
            whole.append(page.rows, page.bufs, UnixMs(log.now_ms))
            whole.unspilled_blocks()  # so that each block stays as it is
        spills = [Spill(TopicId(1), whole, [block], []) for block in whole.blocks]
        spill_module.write_spill(disk, SPILLS / f"{number:02}.spill", spills)
        for spill in spills:
            spill.new[0].page = None
            queue.restore(spill.new[0])
    paced: list[int] = []
    (spill,) = spills_of(TopicId(1), queue)
    spill_module.write_spill(disk, SPILLS / "ff.spill", [spill], (), paced.append)
    assert len(spill.old) == count
    assert sum(paced) == spill.old_size + count * BLOCK_WORK
    assert max(paced) < spill_module.WRITE_SIZE + 2 * BLOCK_WORK
    assert disk.opened <= len(paced) + 1


def test_copied_blocks_are_synced_and_paced_a_megabyte_at_a_time() -> None:
    disk = SimDisk()
    engine, log = begun(disk)
    for _ in range(5):
        burst(engine, log, 1, b"x" * 600_000)
        flush_without_room(engine)
    refs = [block.spill for block in queue_at(engine, 1).blocks if block.spill is not None]
    paced: list[int] = []
    spill_module.write_spill(disk, SPILLS / "ff.spill", [], refs, paced.append)
    assert len(paced) == 2
    assert min(paced) >= spill_module.WRITE_SIZE > max(paced) // 2


def test_joins_are_as_many_as_the_blocks_that_are_looked_at() -> None:
    spills = spills_of(TopicId(1), cold_queue(2 * JOINED_MAX, 100))
    assert spans_of(limit_joins(spills, 1 << 40)) == [(0, JOINED_MAX)]
