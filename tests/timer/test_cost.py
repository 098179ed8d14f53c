"""P9: what one entry costs is bounded, however many topics it meets and however much is dead."""

import pytest

from chaos.simdisk import SimDisk
from tests.timer.machines import START_MS, Log, catch_up, engine_on, part_of
from tests.timer.test_delete_topic import flushed
from timer import store as store_module
from timer.applied import FireApplied
from timer.engine import Engine
from timer.payloads import FIRE_TOPICS_MAX, Fire
from timer.units import LogIndex, UnixMs

DUE = START_MS + 10_000


def begun(topics: int) -> tuple[Engine, Log]:
    engine, log = engine_on(SimDisk()), Log()
    log.begin_epoch()
    for number in range(topics):
        log.topic(f"crowd/{number}")
    catch_up(engine, log)
    return engine, log


def test_one_fire_moves_timers_of_so_many_topics_and_the_next_one_those_of_others() -> None:
    topics = 3 * FIRE_TOPICS_MAX // 2
    engine, log = begun(topics)
    log.schedule(part_of([(1 + number % topics, DUE, b"") for number in range(2 * topics)]))
    catch_up(engine, log)
    counts = engine.machine.counts
    moved: list[int] = []
    while counts.pending:
        fire = log.fire(*Fire(UnixMs(DUE)))
        applied = engine.machine.apply(fire)
        assert isinstance(applied, FireApplied)
        assert applied.limited == (counts.pending > 0)
        moved.append(len(applied.fired))
    assert moved == [FIRE_TOPICS_MAX] * 3
    assert counts.fired == 2 * topics


@pytest.mark.parametrize("dead", ["cancelled", "cancelled in files", "deleted"])
def test_a_thread_passes_what_is_dead_before_a_fire(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "DEAD_MAX", 100)
    monkeypatch.setattr(store_module, "FIRE_CHUNK", 50)
    engine, log = begun(2)
    count = 1000
    log.schedule(part_of([(1, DUE + number, b"") for number in range(count)]))
    log.schedule(part_of([(2, DUE + count // 2, b"lives"), (2, DUE + count, b"lives")]))
    catch_up(engine, log)
    flushed(engine)
    if dead == "deleted":
        log.delete_topic(1)
    else:
        log.cancel([(DUE + number, 1 + number) for number in range(count)])
    catch_up(engine, log)
    if dead == "cancelled in files":
        flushed(engine)
    engine.machine.store.preload(UnixMs(DUE + count))  # all of it is in memory, dead as it is
    fire = log.fire(DUE + count)
    engine.committed(LogIndex(fire.index))
    assert engine.begin_lookup([fire]) is None
    assert engine.fold([fire]) == 0
    prepared = engine.begin_lookup([fire])
    assert prepared is not None
    prepared.read()
    engine.end_lookup(prepared)
    assert engine.fold([fire]) == 1
    assert engine.machine.counts.fired == 2
    assert engine.machine.store.passed <= 100
