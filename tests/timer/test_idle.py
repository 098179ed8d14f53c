"""Idle topics and groups add no cost to entries, checkpoints and cuts, in any number."""

import gc
import sys
import tracemalloc
from unittest import mock

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.leading import Play
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of
from timer.entries.payloads import Op
from timer.model.units import ProducerId
from timer.recovery import engine as engine_module
from timer.recovery import manifest
from timer.recovery.engine import Engine
from timer.state import digest
from timer.state.dirty_topics import MANY

TOPICS = 3 * MANY


def crowd(topics: int, groups: int = 1) -> tuple[Engine, Log]:
    """Return an engine with topics 1, 2, 3, … with groups each, after a checkpoint."""
    engine, log = engine_on(SimDisk()), Log()
    log.begin_epoch()
    for number in range(1, topics + 1):
        log.topic(f"t{number}")
        for group in range(groups):
            log.create_group(number, f"g{group}")
    log.checkpoint()
    catch_up(engine, log)
    return engine, log


def hashes_at_checkpoint(engine: Engine, log: Log) -> tuple[int, int]:
    """Take a checkpoint; return the number of topics and of groups that it hashed."""
    topics = engine.machine._hashes
    with (
        mock.patch.object(topics, "_number", wraps=topics._number) as of_topic,
        mock.patch.object(digest, "_group_hash", wraps=digest._group_hash) as of_group,
    ):
        log.checkpoint()
        catch_up(engine, log)
    assert engine.machine.digest() == engine.machine.recomputed_digest()
    return of_topic.call_count, of_group.call_count


def test_epoch_changes_those_groups_alone_that_have_been_handed_something() -> None:
    engine, log = crowd(TOPICS)
    log.schedule(part_of([(topic, START_MS, b"x") for topic in (5, 6)]))
    log.fire(START_MS + 1)
    log.op(Op.RESERVE, 5, 5, [4096])
    catch_up(engine, log)
    assert hashes_at_checkpoint(engine, log) == (2, 1)
    log.begin_epoch()
    catch_up(engine, log)
    assert hashes_at_checkpoint(engine, log) == (1, 1)


def test_checkpoint_hashes_of_a_topic_the_groups_that_changed() -> None:
    engine, log = crowd(1, groups=50)
    log.op(Op.RESERVE, 1, 7, [10])
    log.alter(1, 8, max_attempts=3)
    catch_up(engine, log)
    assert hashes_at_checkpoint(engine, log) == (1, 2)


def test_readers_of_changes_keep_no_memory_of_a_crowd_that_changed_once() -> None:
    engine, _ = crowd(8 * MANY)
    machine = engine.machine
    for changed in (machine._hashes.changed, machine._retention._changed, machine._changed_topics):
        assert sys.getsizeof(changed) == sys.getsizeof(set())


def test_what_changed_in_very_many_topics_is_worked_off_before_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "KEEP_UPS", 0)  # not with each entry, but between them
    engine, log = crowd(TOPICS)
    log.schedule(part_of([(topic, START_MS, b"x") for topic in range(1, TOPICS + 1)]))
    log.fire(START_MS + 1)
    catch_up(engine, log)
    steps = 1
    while engine.keep_up():
        steps += 1
    assert steps == (TOPICS - MANY) // 128
    assert hashes_at_checkpoint(engine, log) == (MANY, 0)
    assert not engine.keep_up()


def test_checkpoint_says_which_queues_moved_since_the_one_before() -> None:
    engine, log = crowd(4)
    first = engine.machine.checkpoint
    assert first is not None
    assert first.moved == dict.fromkeys(("t1", "t2", "t3", "t4"), 0)
    log.schedule(part_of([(2, START_MS, b"x")]))
    log.fire(START_MS + 1)
    log.delete_topic(3)
    catch_up(engine, log)
    flush(engine)
    again = engine_on(engine._disk)  # which has no other checkpoint than the first
    for each in (engine, again):
        with mock.patch.object(log, "entries", [*log.entries]):
            log.checkpoint()
            catch_up(each, log)
        found = each.machine.checkpoint
        assert found is not None
        assert (found.since, found.moved) == (first.index, {"t2": 1, "t3": None})
        assert dict(found.queue_offsets) == {"t1": 0, "t2": 1, "t4": 0}


def test_cut_takes_the_producers_that_were_used_since_they_were_taken() -> None:
    engine, log = crowd(1)
    for number in range(100):
        log.producer(b"%d" % number)
    catch_up(engine, log)
    with mock.patch.object(manifest, "_producer_state", wraps=manifest._producer_state) as taken:
        steps = 1
        while not engine.prepare_flush(30):
            assert taken.call_count == 30 * steps
            steps += 1
        log.schedule(part_of([(1, START_MS, b"x")], 7, 1))
        log.producer(b"new")
        catch_up(engine, log)
        begun = engine.begin_flush()
        assert taken.call_count == 102
    assert begun is not None
    begun.write()
    engine.end_flush(begun)
    again = engine_on(engine._disk)
    assert sorted(again.machine.producers.ids()) == [*range(1, 102)]
    assert again.machine.producers.last_sequence(ProducerId(7)) == 1


@pytest.mark.parametrize("type_", ["shared", "key_shared"])
def test_group_with_a_consumer_and_a_message_that_was_acked_takes_few_kilobytes(type_: str) -> None:
    play, count = Play(), 20
    groups = [play.make_group(f"g{number}", type=type_) for number in range(count)]
    play.make_group("first", type=type_)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for group in groups:
        play.join(group)
    play.settle()
    play.schedule("s", 0)
    play.settle()
    for number, delivery in enumerate(play.deliveries):
        play.ack(f"ack {number}", delivery)
    play.settle()
    assert len(play.deliveries) == count
    play.deliveries.clear()
    play.answers.clear()
    play.log.entries.clear()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / count < 5_000
