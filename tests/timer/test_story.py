"""Stories of timers, read from logs with the help of the machine's state."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import STATE, Log, engine_on, ids_of, keys_of, part_of
from tests.timer.story_logs import DUE, Told
from timer.entries.payloads import Op
from timer.model.columns import OnConflict, RequestId
from timer.model.units import LogIndex, Seq, TopicId, UnixMs
from timer.state import firing_trace
from timer.state.firing_trace import FiringPlace, Trace
from timer.state.timer_story import KnownTimer, StoryEvent, StoryKind


def lines(events: Sequence[StoryEvent]) -> list[tuple[StoryKind, int]]:
    return [(event.kind, event.entry.index) for event in events]


def test_story_from_schedule_to_the_acks_of_all_groups() -> None:
    it = Told()
    log = it.log
    it.do(log.producer(b"p"), log.create_group(1, "g"), log.create_group(1, "h"))
    it.do(
        log.schedule(part_of([(1, DUE, b"other")]), part_of([(2, DUE, b"x"), (1, DUE, b"y")], 1, 1))
    )
    scheduled = log.entries[-1].index
    for _ in range(50):
        it.do(log.schedule(part_of([(1, DUE + 5_000, b"noise")])), log.checkpoint())
    fired = it.do(log.fire(DUE))
    it.do(log.op(Op.RESERVE, 1, 1, [9]), log.op(Op.RESERVE, 1, 2, [9]))
    nacked = it.do(log.nack(1, 1, [0, 1], DUE + 77))
    ended = it.do(log.op(Op.ENDED, 1, 1, [1]))
    epoch = it.do(log.begin_epoch())
    acked = it.do(log.op(Op.ACK, 1, 1, [1]))
    moved = it.do(log.move(1, 2, [0, 1], "dead"))
    it.do(log.op(Op.ACK, 1, 1, [0]), log.op(Op.ENDED, 1, 1, [1]))
    events = it.story(DUE, 3)
    assert lines(events) == [
        (StoryKind.SCHEDULED, scheduled),
        (StoryKind.FIRED, fired),
        (StoryKind.NACKED, nacked),
        (StoryKind.LEASE_ENDED, ended),
        (StoryKind.NEW_LEADER, epoch),
        (StoryKind.ACKED, acked),
        (StoryKind.MOVED, moved),
    ]
    assert (events[0].producer, events[0].sequence, events[0].topic) == (1, 1, 1)
    assert events[0].requested_ms == DUE - 1
    assert events[1].offset == 1
    assert (events[2].until_ms, events[2].attempt, events[2].group) == (DUE + 77, 1, 1)
    assert events[3].attempt == 2
    assert (events[6].group, events[6].to) == (2, "dead")
    assert it.read < 20, "what lies between its schedule and its firing is not read"
    dead = it.machine.trace.firings[-1]
    [began, fired_there] = it.story(int(it.machine.last_read_time_ms), int(dead.seqs[1]))[:2]
    assert (began.kind, began.topic, began.group, began.offset) == (StoryKind.MOVED_FROM, 1, 2, 1)
    assert (fired_there.kind, fired_there.topic) == (StoryKind.FIRED, dead.topic)


def test_repeated_and_refused_parts_issue_no_seq_in_a_story_either() -> None:
    it = Told()
    log = it.log
    it.do(log.producer(b"p"))
    named = RequestId(b"req", 5, UnixMs(DUE))
    first = part_of([(1, DUE, b"1"), (1, DUE, b"2")], 1, 1)
    request = replace(part_of([(1, DUE, b"r")]), request=named)
    it.do(log.schedule(first))
    both = it.do(log.schedule(first, request, part_of([(1, DUE, b"gap")], 1, 9), first, request))
    it.do(log.schedule(first))
    last = it.do(log.schedule(part_of([(1, DUE, b"3")], 1, 2)))
    it.do(log.checkpoint())
    [event] = it.story(DUE, 3)
    assert (event.entry.index, event.request, event.producer) == (both, b"req", 0)
    [event] = it.story(DUE, 4)
    assert (event.entry.index, event.producer, event.sequence) == (last, 1, 2)


@pytest.mark.parametrize("mode", [OnConflict.REPLACE, OnConflict.UPDATE])
@pytest.mark.parametrize("by_key", [False, True])
def test_timers_that_ended_say_by_what_and_what_goes_on(by_key: bool, mode: OnConflict) -> None:
    it = Told()
    log = it.log
    keyed = part_of([(1, DUE, b"x"), (2, DUE, b"x")], keys=[b"k", b"k"])
    begun = it.do(log.schedule(keyed))
    other = part_of([(1, DUE + 5, b"n"), (1, DUE + 9, b"new")], keys=[b"q", b"k"], on_conflict=mode)
    replaced = it.do(log.schedule(part_of([(2, DUE, b"n")]), other))
    targets = keys_of([(1, b"k")]) if by_key else ids_of([(DUE + 9, 5)])
    rescheduled = it.do(log.reschedule(targets, [DUE + 50]))
    cancel = log.cancel_keys([(2, b"k"), (1, b"k")]) if by_key else log.cancel([(DUE + 50, 6)])
    cancelled = it.do(cancel)
    events = it.story(DUE, 1)
    assert lines(events) == [(StoryKind.SCHEDULED, begun), (StoryKind.REPLACED, replaced)]
    assert events[1].other == (DUE + 9, 5)
    events = it.story(DUE + 9, 5)
    assert lines(events) == [(StoryKind.SCHEDULED, replaced), (StoryKind.RESCHEDULED, rescheduled)]
    assert events[1].other == (DUE + 50, 6)
    events = it.story(DUE + 50, 6)
    assert events[0].kind is StoryKind.RESCHEDULED_FROM
    assert events[0].other == (None if by_key else (DUE + 9, 5))
    assert lines(events)[1:] == [(StoryKind.CANCELLED, cancelled)]
    if by_key:
        assert lines(it.story(DUE, 2)) == [
            (StoryKind.SCHEDULED, begun),
            (StoryKind.CANCELLED, cancelled),
        ]
    else:
        assert lines(it.story(DUE, 2)) == [(StoryKind.SCHEDULED, begun)]


def test_timer_due_at_once_fires_at_the_entry_that_schedules_it() -> None:
    it = Told()
    it.do(it.log.fire(DUE))
    index = it.do(it.log.schedule(part_of([(1, DUE, b"x"), (1, DUE + 9, b"y")])))
    assert lines(it.story(DUE, 1)) == [(StoryKind.SCHEDULED, index), (StoryKind.FIRED, index)]
    assert lines(it.story(DUE + 9, 2)) == [(StoryKind.SCHEDULED, index)], "it is pending"


def test_story_whose_beginning_the_log_has_dropped_is_told_from_there() -> None:
    it = Told()
    log = it.log
    it.do(log.schedule(part_of([(1, DUE, b"x")])), log.checkpoint())
    first = it.do(log.checkpoint())
    fired = it.do(log.fire(DUE))
    assert lines(it.story(DUE, 1, first=first)) == [(StoryKind.FIRED, fired)]
    assert it.read == 1, "its beginning is not there, so the entry that fired it is the next"
    unknown = KnownTimer(pending=False, ended=False, fired=None, topic=None, key=b"")
    events = it.story(DUE, 1, first=first, known=unknown)
    assert [(event.kind, event.offset) for event in events] == [(StoryKind.FIRED, None)]
    it.do(log.schedule(part_of([(1, DUE + 9, b"y")])), log.checkpoint())
    later = it.do(log.checkpoint())
    assert it.story(DUE + 9, 2, first=later) == []
    assert it.read == 0, "it is pending: nothing has happened to it since"
    assert it.story(DUE, 1, first=later) == []
    it.do(log.create_group(1, "g"), log.op(Op.RESERVE, 1, 1, [9]))
    acked = it.do(log.op(Op.ACK, 1, 1, [0]))
    assert lines(it.story(DUE, 1, first=later)) == [(StoryKind.ACKED, acked)]


def test_story_is_whole_if_the_log_begins_after_the_last_mark_and_before_the_timer() -> None:
    it = Told()
    log = it.log
    it.do(log.schedule(part_of([(1, DUE, b"x")])), log.checkpoint())
    first = it.do(log.checkpoint())
    begun = it.do(log.schedule(part_of([(1, DUE + 9, b"y")])))
    assert lines(it.story(DUE + 9, 2, first=first)) == [(StoryKind.SCHEDULED, begun)]
    fired = it.do(log.checkpoint(), log.fire(DUE + 9))
    both = [(StoryKind.SCHEDULED, begun), (StoryKind.FIRED, fired)]
    assert lines(it.story(DUE + 9, 2, first=first)) == both
    assert lines(it.story(DUE, 1, first=first)) == [(StoryKind.FIRED, fired)]


# ---- notes of apply


def test_trace_survives_a_restart_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    log, engine = Log(), engine_on(SimDisk())
    entries = [log.begin_epoch(), log.topic("a"), log.producer(b"p")]
    again = part_of([(1, DUE, b"x")], 1, 1)
    entries += [log.schedule(again), log.schedule(again, part_of([(1, DUE, b"z")]))]
    entries += [log.checkpoint(), log.fire(DUE), log.checkpoint()]
    engine.raise_commit_index(entries[-1].index)
    engine.fold(entries)
    flush = engine.begin_flush()
    assert flush is not None
    flush.write()
    kept, there = engine.machine.trace, engine_on(flush.disk, STATE).machine.trace
    assert there.marks == kept.marks
    assert [mark[:2] for mark in there.marks] == [(1, 1), (5, 2), (6, 3)]
    assert [there.marks[1].is_refused(part) for part in (0, 1, 7, 8)] == [True, False, False, False]
    for each in (kept, there):
        fired = FiringPlace(LogIndex(7), TopicId(1), 1)  # type: ignore[arg-type]
        assert firing_trace.find_firing(each.firings, Seq(2)) == fired
        assert firing_trace.find_firing(each.firings, Seq(3)) is None
    monkeypatch.setattr(firing_trace, "FIRED_ROWS_MAX", 5)
    small = Trace()
    rows = engine.machine.store.read(ids_of([(DUE, 1)] * 2).due_ms, ids_of([(DUE, 1)] * 2).seq, 0)[
        0
    ].rows
    for number in range(4):
        small.add_fired(LogIndex(number), TopicId(1), number * 2, rows)  # type: ignore[arg-type]
    assert [firing.entry for firing in small.firings] == [2, 3]


def test_story_tells_in_which_group_a_message_expired_and_that_it_did_in_all_others() -> None:
    it = Told()
    log = it.log
    it.do(log.create_group(1, "g"), log.create_group(1, "h"))
    it.do(log.schedule(part_of([(1, DUE, b"x"), (1, DUE, b"y")])), log.fire(DUE))
    it.do(log.op(Op.EXPIRE_BELOW, 1, 0, [1]))
    single = it.do(log.op(Op.EXPIRE, 1, 1, [1]))
    below = it.do(log.op(Op.EXPIRE_BELOW, 1, 0, [2]))
    it.do(log.op(Op.ACK, 1, 2, [1]))
    events = [
        each for each in it.story(DUE, 2) if each.kind not in (StoryKind.SCHEDULED, StoryKind.FIRED)
    ]
    assert [(each.kind, each.entry.index, each.group) for each in events] == [
        (StoryKind.EXPIRED, single, 1),
        (StoryKind.EXPIRED, below, 0),
    ]
