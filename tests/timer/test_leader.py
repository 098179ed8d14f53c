"""The leader's core over a log in memory; the test commits the entries."""

import itertools
from collections.abc import Callable

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.calls import calls_of
from tests.timer.leading import LEASE_MS, Play, delivered
from tests.timer.machines import machine_on, part_of
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import (
    CreateGroup,
    Fire,
    GroupSettings,
    GroupStart,
    decode_cancel,
    decode_fire,
    decode_group,
)
from timer.leader import leader as leader_module
from timer.leader.fire_times import AHEAD_MS_MAX, GAP_MS_MAX, FireTimes
from timer.leader.groups import group_batch, group_dispatch, group_entries, turns
from timer.leader.groups.group_leases import ACCEPT, ALREADY_ACKED, LEASE_LOST, Leases
from timer.leader.leader import LeaderConfig
from timer.model.columns import decode_schedule
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    LeadershipLostError,
    NotLeaderError,
    OverloadedError,
    SequenceGapError,
    ShuttingDownError,
    UnknownProducerError,
)
from timer.model.units import LeaseId, LogIndex, MonoMs, ProducerId, TopicId
from timer.state.apply_results import CANCELLED, Accepted, Repeated


def test_request_is_answered_only_when_it_was_applied() -> None:
    play = Play()
    play.schedule("one", 100, 200)
    assert play.step() == [EntryKind.SCHEDULE]
    assert play.answers == {}
    play.commit()
    applied = play.answers["one"]
    assert isinstance(applied, Accepted)
    assert (applied.answer.first_seq, len(applied.answer.due_ms)) == (1, 2)


def test_requests_gather_while_two_entries_are_in_flight() -> None:
    play = Play()
    for at in range(10):
        play.schedule(f"s{at}", 100)
        play.step()
    assert play.appended == [EntryKind.SCHEDULE] * 2
    play.commit(1)
    assert list(play.answers) == ["s0"]
    assert play.step() == [EntryKind.SCHEDULE] * 2
    play.commit()
    assert list(play.answers) == [f"s{at}" for at in range(10)]
    assert [each.answer.first_seq for each in play.answers.values()] == list(range(1, 11))


def test_so_much_waiting_is_appended_whatever_is_in_flight() -> None:
    play = Play(LeaderConfig(gather_bytes=1000))
    for at in range(4):
        play.schedule(f"s{at}", 100, size=1000)
        play.step()
    assert play.appended == [EntryKind.SCHEDULE] * 4


@pytest.mark.parametrize(
    ("name", "limit", "entries"),
    [
        ("ENTRY_PARTS_MAX", 4, [4, 4, 2]),
        ("ENTRY_ROWS_MAX", 6, [3, 3, 3, 1]),
        ("ENTRY_BYTES_MAX", 250, [3, 3, 3, 1]),
    ],
)
def test_entry_is_bounded_in_requests_rows_and_bytes(
    name: str, limit: int, entries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, name, limit)
    play = Play(LeaderConfig(gather_bytes=0))
    for at in range(10):
        play.schedule(f"s{at}", 100, 100)
    play.step()
    parts = [
        len(decode_schedule(entry.payload).parts) for entry in play.log.entries[-len(entries) :]
    ]
    assert parts == entries
    play.commit()
    assert list(play.answers) == [f"s{at}" for at in range(10)]


def test_too_much_waiting_is_refused_until_it_was_applied() -> None:
    play = Play(LeaderConfig(waiting_bytes_max=1000))
    play.schedule("big", 100, size=5000)  # one is always taken
    with pytest.raises(OverloadedError):
        play.schedule("small", 100)
    play.step()
    with pytest.raises(OverloadedError):
        play.schedule("small", 100)
    play.commit()
    play.schedule("small", 100)
    play.settle()
    assert list(play.answers) == ["big", "small"]
    assert play.leader.bytes_in_flight == 0


@pytest.mark.parametrize("rows", [0, 65_537])
def test_request_without_a_row_or_with_too_many_is_refused(rows: int) -> None:
    play = Play()
    with pytest.raises(InvalidRequestError):
        play.schedule("s", *[100] * rows)
    with pytest.raises(InvalidRequestError):
        play.cancel("c", *[(1, 1)] * rows)
    assert play.leader.idle


def test_request_of_the_maximum_size_passes_and_a_larger_one_is_refused() -> None:
    # E.12
    play = Play(LeaderConfig(waiting_bytes_max=1 << 30))
    overhead = part_of([(1, 1, b"")]).size
    play.schedule("max", 100, size=leader_module.REQUEST_BYTES_MAX - overhead)
    with pytest.raises(InvalidRequestError):
        play.schedule("more", 100, size=leader_module.REQUEST_BYTES_MAX - overhead + 1)
    play.schedule("next", *[0] * 65_536)
    play.settle()
    assert list(play.answers) == ["max", "next"]


def test_refused_append_answers_its_schedules_and_cancels_with_the_reason() -> None:
    play = Play()
    play.full = OverloadedError("log", retry_after_ms=7)
    play.schedule("s", 100)
    play.cancel("c", (1, 1))
    play.step()
    assert play.answers == {"s": play.full, "c": play.full}
    assert play.leader.bytes_in_flight == 0
    play.full = None
    play.schedule("s2", 100)
    play.settle()
    assert "s2" in play.answers


def test_cancels_of_many_requests_go_in_one_entry_and_each_gets_its_own_results() -> None:
    play = Play()
    play.schedule("s", 100, 200, 300)
    play.settle()
    answer = play.answers["s"].answer
    timers = list(zip(answer.due_ms.tolist(), range(1, 4), strict=True))
    play.cancel("one", timers[0])
    play.cancel("two", timers[2], timers[1])
    assert play.step() == [EntryKind.CANCEL]
    assert "one" not in play.answers
    play.commit()
    assert [play.verdict(name) for name in ("one", "two")] == [[CANCELLED], [CANCELLED] * 2]


def test_cancels_are_bounded_in_an_entry_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "CANCEL_ROWS_MAX", 5)
    monkeypatch.setattr(leader_module, "CANCELS_WAITING_MAX", 9)
    play = Play()
    for name, count in (("one", 2), ("two", 1), ("three", 6)):
        play.cancel(name, *[(1, 1)] * count)
    with pytest.raises(OverloadedError):
        play.cancel("four", (1, 1))
    play.settle()
    rows = [len(decode_cancel(e.payload)) for e in play.log.entries if e.kind is EntryKind.CANCEL]
    assert rows == [3, 6]
    play.cancel("four", (1, 1))
    play.settle()
    assert len(play.answers) == 4


def test_producer_gaps_and_unknown_ids_are_refused_before_they_are_written() -> None:
    play = Play()
    play.leader.register(b"token", ProducerId(1), play.now, play.done("p"))
    play.commit()
    producer = play.answers["p"]
    with pytest.raises(UnknownProducerError):
        play.schedule("x", 100, producer=99, sequence=1)
    with pytest.raises(SequenceGapError):
        play.schedule("x", 100, producer=producer, sequence=2)
    play.schedule("one", 100, producer=producer, sequence=1)
    play.schedule("two", 100, producer=producer, sequence=2)  # before the first is committed
    play.schedule("one again", 100, producer=producer, sequence=1)
    play.schedule("three", 100, producer=producer, sequence=3)
    with pytest.raises(SequenceGapError):
        play.schedule("x", 100, producer=producer, sequence=5)
    play.settle()
    firsts = {name: play.answers[name].answer.first_seq for name in ("one", "two", "one again")}
    assert firsts == {"one": 1, "two": 2, "one again": 1}
    assert isinstance(play.answers["one again"], Repeated)
    assert isinstance(play.answers["two"], Accepted)
    play.schedule("one, late", 100, producer=producer, sequence=1)
    play.settle()
    assert isinstance(play.answers["one, late"], Repeated)
    assert play.leader._intake.empty, "a repeated request leaves nothing behind"


def test_sequence_after_a_refused_one_is_refused_until_that_one_has_come() -> None:
    play = Play()
    play.leader.register(b"token", ProducerId(1), play.now, play.done("p"))
    play.commit()
    play.full = OverloadedError("log", retry_after_ms=1)
    play.schedule("one", 100, producer=1, sequence=1)
    play.step()
    play.full = None
    with pytest.raises(SequenceGapError, match="the next of this producer is 1"):
        play.schedule("two", 100, producer=1, sequence=2)
    play.schedule("one again", 100, producer=1, sequence=1)
    play.schedule("two", 100, producer=1, sequence=2)
    play.settle()
    assert isinstance(play.answers["one again"], Accepted)
    assert isinstance(play.answers["two"], Accepted)
    assert play.leader._intake.empty, "it grows with the producers that were ever seen"


def test_topic_asked_for_twice_at_once_is_one_topic_and_later_is_answered_at_once() -> None:
    play = Play()
    play.leader.create_topic("b", play.now, play.done("one"))
    play.leader.create_topic("b", play.now, play.done("two"))
    assert play.appended == [EntryKind.TOPIC]
    play.commit()
    play.leader.create_topic("b", play.now, play.done("three"))
    assert play.answers["one"] is play.answers["two"] is play.answers["three"]


def test_group_asked_for_twice_at_once_is_one_group() -> None:
    play = Play()
    create = CreateGroup(play.topic_id, "g", GroupStart.EARLIEST, GroupSettings(lease_ms=LEASE_MS))
    for name in ("one", "two"):
        play.leader.groups.create(create, play.done(name))
    play.settle()
    play.leader.groups.create(create, play.done("three"))
    assert play.answers["one"] is play.answers["two"] is play.answers["three"]


# ---- due times


def test_what_is_due_at_once_fires_with_the_entry_behind_its_own() -> None:
    play = Play()
    play.schedule("s", 0, -1, -(10**9), 1)
    assert play.step() == [EntryKind.SCHEDULE, EntryKind.FIRE]
    play.commit()
    assert play.machine.counts.fired == 3
    play.schedule("later", 500)
    assert play.step() == [EntryKind.SCHEDULE]
    play.commit()


# ---- firing


def test_leader_sleeps_until_the_next_due_and_fires_then() -> None:
    play = Play(LeaderConfig(checkpoint_interval_ms=10**6))
    play.schedule("s", 5000)
    play.settle()
    wake = play.leader.wake_at_ms(play.now)
    assert 0 <= wake - (play.mono_ms + 5000) < 10
    play.mono_ms = wake - 1
    assert play.step() == []
    play.mono_ms = wake
    assert play.step() == [EntryKind.FIRE]
    play.commit()
    assert play.machine.counts.fired == 1
    assert play.leader.wake_at_ms(play.now) > play.mono_ms + 1000


def fire(play: Play, commit_ms: int) -> tuple[int, int]:
    """Fire at the next wake. Return the times of the append, monotonic, and of the reading."""
    play.mono_ms = at_ms = play.leader.wake_at_ms(play.now)
    assert play.step() == [EntryKind.FIRE]
    read_ms = decode_fire(play.log.entries[-1].payload).read_time_ms
    play.wait(commit_ms)
    play.leader.on_committed(play.leader.last_proposed, play.now.mono_ms)
    play.commit()
    return at_ms, read_ms


def accustomed(commit_ms: int) -> Play:
    """Return a leader whose mean commit takes `commit_ms`. It makes no checkpoint for a while."""
    play = Play(LeaderConfig(checkpoint_interval_ms=10**6))
    for turn in range(40):  # the mean needs some commits
        play.schedule(f"{turn}", 1000)
        play.settle()
        fire(play, commit_ms)
    return play


def test_fire_is_appended_ahead_of_its_time_by_the_time_of_a_commit() -> None:
    play = accustomed(7)
    play.schedule("last", 1000)
    play.settle()
    due_ms = play.machine.store.next_due()
    assert due_ms is not None
    play.mono_ms = play.leader.wake_at_ms(play.now)
    assert play.now.clock_ms == due_ms - 8  # the mean is just below 7, and 1.5 more
    assert play.step() == [EntryKind.FIRE]
    fire = play.log.entries[-1]
    assert fire.time_ms == decode_fire(fire.payload).read_time_ms == due_ms
    play.schedule("behind it", 1000)
    play.step()
    assert play.log.entries[-1].time_ms == due_ms


def test_slow_commits_are_hidden_up_to_a_limit_and_the_gap_has_one() -> None:
    times = FireTimes()
    for index in range(1, 40):
        times.on_appended(LogIndex(index), MonoMs(index))
        times.on_committed(LogIndex(index - 1), MonoMs(index))
        times.on_committed(LogIndex(index), MonoMs(index + 500))
    assert times.next(AHEAD_MS_MAX, MonoMs(40)) == (GAP_MS_MAX - 1, AHEAD_MS_MAX)
    assert times.next(AHEAD_MS_MAX, MonoMs(1000)) == (0, AHEAD_MS_MAX)
    assert times.next(2 * AHEAD_MS_MAX, MonoMs(39))[0] == GAP_MS_MAX


def test_fire_that_follows_none_is_appended_earlier_than_in_a_dense_stream() -> None:
    times = FireTimes()
    for index in range(1, 40):
        times.on_appended(LogIndex(index), MonoMs(100 * index))
        times.on_committed(LogIndex(index), MonoMs(100 * index + 3))
    assert times.next(1, MonoMs(3900))[0] == 5, "two mean times of a commit"
    assert times.next(10, MonoMs(3900))[0] == 8, "in the dense way, as the last FIRE is too near"
    assert times.next(13, MonoMs(3900))[0] == 10, "as soon as it follows none"
    assert times.next(20, MonoMs(3900))[0] == 16
    assert times.next(2, MonoMs(3909)) == (0, 2)
    assert times.next(4, MonoMs(3910)) == (0, 4)
    assert times.next(3, MonoMs(3910)) == (0, 3), "its read time is not behind the due time"
    assert times.next(-5, MonoMs(3910)) == (-5, 2)


def test_fire_is_not_ahead_where_commits_take_no_time() -> None:
    assert FireTimes().next(1, MonoMs(1000)) == (1, 0)
    assert FireTimes().next(0, MonoMs(1000)) == (0, 0)


def test_dense_timers_share_a_fire_and_a_timer_alone_fires_when_due() -> None:
    play = accustomed(3)
    alone_ms = play.now.clock_ms + 1000
    play.schedule("alone", 1000)
    play.settle()
    _, read_ms = fire(play, 3)
    assert read_ms == alone_ms
    play.schedule("dense", *range(1000, 1020))
    play.settle()
    fires = []
    while play.machine.store.next_due() is not None:
        fires.append(fire(play, 3)[0])
    gaps = {after - before for before, after in itertools.pairwise(fires)}
    assert set() < gaps <= {4, 5, 6}, fires  # two commits of 3 ms, rounded


def test_fire_that_continues_another_is_not_appended_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    play = accustomed(7)
    monkeypatch.setattr(leader_module, "Fire", lambda read_time_ms, **_: Fire(read_time_ms, 2))
    play.schedule("s", *[1000] * 3)
    play.settle()
    fire(play, 8)
    at_ms, read_ms = fire(play, 7)
    assert play.machine.counts.pending == 0
    assert read_ms == play.now.clock_ms - play.now.mono_ms + at_ms


def test_one_fire_is_in_flight_and_what_falls_due_meanwhile_goes_into_the_next() -> None:
    play = Play()
    play.schedule("s", 100, 200)
    play.settle()
    play.wait(110)
    assert play.step() == [EntryKind.FIRE]
    play.wait(100)
    assert play.step() == [EntryKind.FIRE]
    assert play.leader.wake_at_ms(play.now) > play.mono_ms
    play.commit()
    assert play.machine.counts.fired == 1
    assert play.leader.wake_at_ms(play.now) == play.mono_ms
    assert play.step() == [EntryKind.FIRE]
    play.commit()
    assert play.machine.counts.fired == 2


def test_limited_fire_is_followed_by_another_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "Fire", lambda read_time_ms, **_: Fire(read_time_ms, 2))
    play = Play()
    play.schedule("s", *[100] * 5)
    play.settle()
    play.wait(150)
    for left in (3, 1, 0):
        assert play.step() == [EntryKind.FIRE]
        play.commit()
        assert play.machine.counts.pending == left
        assert (play.leader.wake_at_ms(play.now) <= play.mono_ms) == bool(left)
    assert play.step() == []


def test_refused_fire_is_tried_again_without_a_busy_loop() -> None:
    play = Play()
    play.schedule("s", 100)
    play.settle()
    play.wait(150)
    play.full = OverloadedError("log", retry_after_ms=1)
    assert play.step() == []
    assert play.mono_ms < play.leader.wake_at_ms(play.now) <= play.mono_ms + 100
    play.full = None
    assert play.step() == [EntryKind.FIRE]


def test_read_time_never_goes_back_with_the_clock() -> None:
    play = Play()
    play.schedule("s", 100)
    play.settle()
    play.wait(500)
    play.settle()
    read = play.machine.last_read_time_ms
    play.wait(-400)
    play.leader.checkpoint(play.now)
    assert play.appended == [EntryKind.FIRE, EntryKind.CHECKPOINT]
    assert decode_fire(play.log.entries[-2].payload).read_time_ms == read
    play.commit()


def test_read_time_of_fires_in_flight_never_goes_back_either() -> None:
    play = Play()
    for name in ("one", "two"):
        play.schedule(name, 0)
        assert play.step()[-1] is EntryKind.FIRE
        play.wait(-300)
    play.settle()
    assert play.machine.counts.fired == 2


def test_checkpoint_comes_every_interval_after_a_fire_and_one_at_a_time() -> None:
    play = Play()
    play.wait(play.leader.wake_at_ms(play.now) - play.mono_ms)
    assert play.step() == [EntryKind.FIRE, EntryKind.CHECKPOINT]
    play.wait(10_000)
    assert play.step() == [EntryKind.FIRE, EntryKind.CHECKPOINT]
    assert play.leader.wake_at_ms(play.now) > play.mono_ms, "a commit comes first"
    play.commit()
    assert play.machine.checkpoint is not None
    assert play.machine.checkpoint.last_read_time_ms == play.machine.last_read_time_ms
    assert play.step() == [EntryKind.FIRE, EntryKind.CHECKPOINT]


# ---- consumers


def test_acks_of_many_requests_go_in_one_entry_and_each_is_judged() -> None:
    play = Play()
    delivered(play, 0, 0, 0)
    (delivery,) = play.deliveries
    play.ack("one", delivery, [0])
    play.ack("two", delivery, [0, 1])
    play.ack("three", delivery, [2])
    assert play.step() == [EntryKind.GROUP]
    assert len(list(decode_group(play.log.entries[-1].payload))) == 1
    play.commit()
    assert [play.verdict(n) for n in ("one", "two", "three")] == [
        [ACCEPT],
        [ALREADY_ACKED, ACCEPT],
        [ACCEPT],
    ]
    play.ack("late", delivery)
    assert play.verdict("late") == [ALREADY_ACKED] * 3


def test_expired_lease_is_delivered_again_marked_and_its_late_ack_judged() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    play.join(group)
    assert play.leader.wake_at_ms(play.now) <= play.mono_ms + LEASE_MS
    play.wait(LEASE_MS)
    assert play.step() == [EntryKind.GROUP]
    assert play.deliver() == []
    first = play.deliveries[0]
    play.ack("expired", first, [1])
    play.settle()
    assert play.verdict("expired") == [ACCEPT]
    again = play.deliveries[-1]
    assert (again.lease.offsets.tolist(), again.attempts.tolist()) == ([0], [2])
    play.ack("lost", first, [0])
    assert play.verdict("lost") == [LEASE_LOST]
    play.ack("won", again)
    play.settle()
    assert play.verdict("won") == [ACCEPT]


def test_leases_of_many_groups_end_each_at_its_own_deadline() -> None:
    play = Play()
    play.schedule("s", 0)
    for number in range(6):
        play.join(play.make_group(f"g{number}"), credit=2).lease_ms = LEASE_MS - 100 * number
    play.settle()
    assert len(play.deliveries) == 6
    for number in reversed(range(6)):
        play.wait(play.leader.wake_at_ms(play.now) - play.mono_ms)
        play.settle()
        assert play.deliveries[-1].group.name == f"g{number}"
    assert len(play.deliveries) == 12


def test_consumer_leaving_and_another_joining_gets_everything_at_once_and_nothing_twice() -> None:
    # E.7
    play = Play()
    group, consumer = delivered(play, 0, 0, 0, credit=2)
    play.ack("a", play.deliveries[0], [0])
    play.settle()
    play.leader.groups.leave(group, consumer)
    play.join(group)
    play.settle()
    rest = [(d.lease.offsets.tolist(), d.attempts.tolist()) for d in play.deliveries[1:]]
    assert sorted(rest) == [([1], [2]), ([2], [1])]


def test_ack_of_an_older_epoch_is_accepted_and_redeliveries_are_marked() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    old = play.deliveries[0]
    play.leader.close(NotLeaderError(None))
    play.machine.apply(play.log.begin_epoch())
    play.lead()
    play.join(group, credit=1)
    play.settle()
    again = play.deliveries[-1]
    assert (again.lease.offsets.tolist(), again.attempts.tolist()) == ([0], [2])
    play.ack("old", old, epoch=play.log.epoch - 1)
    play.settle()
    assert play.verdict("old") == [LEASE_LOST, ACCEPT]
    assert old.lease.lease_id == again.lease.lease_id == LeaseId(1), "the epoch tells them apart"


def test_refused_acks_and_ended_leases_are_tried_again() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    play.ack("a", play.deliveries[0], [0])
    play.wait(LEASE_MS)
    play.full = OverloadedError("log", retry_after_ms=1)
    create = CreateGroup(play.topic_id, "h", GroupStart.EARLIEST, GroupSettings(lease_ms=LEASE_MS))
    play.leader.groups.create(create, play.done("h"))
    play.step()
    play.step()
    assert play.answers == {"h": play.full}
    play.full = None
    play.settle()
    assert play.verdict("a") == [ACCEPT]
    assert play.deliveries[-1].lease.offsets.tolist() == [1]
    assert group.cursor == 1
    assert [*play.machine.topics[play.topic_id].groups] == ["g"], "what was answered is not"


def test_many_leases_that_end_at_once_go_in_bounded_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_batch, "ENDED_OFFSETS_MAX", 4)
    monkeypatch.setattr(group_batch, "NACK_WEIGHT", 1)
    monkeypatch.setattr(group_batch, "GROUP_OFFSETS_MAX", 10)
    monkeypatch.setattr(group_batch, "OP_WEIGHT", 2)
    play = Play()
    group, consumer = delivered(play, *[0] * 21)
    before = len(play.log.entries)
    play.leader.groups.leave(group, consumer)
    play.settle()
    entries = [list(decode_group(e.payload)) for e in play.log.entries[before:]]
    assert [[len(op.offsets) for op in ops] for ops in entries] == [[4], [4], [4], [4], [4, 1]]  # type: ignore[union-attr]
    play.join(group)
    play.settle()
    assert play.deliveries[-1].lease.offsets.tolist()
    assert play.leader.groups.lease_counts(group) == (21, 1)


def test_too_many_acks_waiting_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_entries, "WAITING_OFFSETS_MAX", 3)
    play = Play()
    delivered(play, 0, 0)
    (delivery,) = play.deliveries
    play.ack("one", delivery)
    with pytest.raises(OverloadedError):
        play.ack("again", delivery)
    play.settle()
    play.ack("again", delivery)
    assert play.verdict("again") == [ALREADY_ACKED] * 2


def test_hand_out_is_bounded_and_groups_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_dispatch, "DELIVERY_ROWS_MAX", 1)
    monkeypatch.setattr(turns, "WORK_MAX", 3 * turns.LEASE_WORK)
    play = Play()
    groups = [play.make_group(name) for name in ("g", "h", "i", "j")]
    for group in groups:
        play.join(group)
    play.settle()
    play.schedule("s", *[0] * 3)
    play.step()
    play.commit()
    counts = dict.fromkeys((group.name for group in groups), 0)
    for _ in range(4):
        assert len(play.deliver()) == 3
        assert play.leader.wake_at_ms(play.now) <= play.mono_ms + 1
        for delivery in play.deliveries[-3:]:
            counts[delivery.group.name] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    assert play.deliver() == []
    assert play.leader.wake_at_ms(play.now) > play.mono_ms + 1


def test_large_messages_take_the_turns_of_the_usual_deliveries_in_their_place() -> None:
    play = Play()
    for name in ("g", "h", "i"):
        play.join(play.make_group(name)).delivery_max = lambda: 100
    play.settle()
    play.schedule("s", 0, size=100 * turns.WORK_MAX // turns.LEASE_WORK)
    play.step()
    play.commit()
    assert [len(play.deliver()) for _ in range(4)] == [1, 1, 1, 0]
    assert {each.work for each in play.leader.groups._leases.values()} == {1}, "as of usual looks"


def test_groups_that_get_nothing_take_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WORK_MAX", 2)
    looked = calls_of(monkeypatch, Leases, "deliver")
    play = Play()
    groups = [play.make_group(name) for name in ("g", "h", "i", "j")]
    for group in groups:
        play.join(group)
    play.settle()
    looked.clear()
    play.leader.groups.feed([play.topic_id])
    assert play.deliver() == []
    assert len({leases.group.group_id for leases, *_ in looked}) == 2
    assert play.deliver() == []
    found = sorted(leases.group.group_id for leases, *_ in looked)
    assert found == sorted(group.group_id for group in groups)
    assert play.leader.wake_at_ms(play.now) > play.mono_ms + 1


# ---- the end


def everything(play: Play) -> tuple[list[str], list[str]]:
    """Leave requests of every kind in flight and waiting; return their names."""
    group, _ = delivered(play, 0, 0)
    flying: list[str] = []
    waiting: list[str] = []
    for names, tag in ((flying, "flying"), (flying, "flying too"), (waiting, "waiting")):
        play.schedule(f"schedule {tag}", 100)
        play.cancel(f"cancel {tag}", (1, 1))
        create = CreateGroup(
            play.topic_id, f"new {tag}", GroupStart.EARLIEST, GroupSettings(lease_ms=LEASE_MS)
        )
        play.leader.groups.create(create, play.done(f"group {tag}"))
        play.ack(f"ack {tag}", play.deliveries[0])
        names += [f"{kind} {tag}" for kind in ("schedule", "cancel", "group", "ack")]
        play.step()
    play.leader.create_topic("b", play.now, play.done("topic"))
    play.leader.create_topic("b", play.now, play.done("same topic"))
    play.leader.register(b"r", ProducerId(1), play.now, play.done("producer"))
    assert group.cursor == 0
    return [*flying, "topic", "same topic", "producer"], waiting


def test_close_answers_everybody_once_and_says_whose_outcome_is_unknown() -> None:
    play = Play()
    flying, waiting = everything(play)
    assert play.answers == {}
    why = NotLeaderError("elsewhere")
    play.leader.close(why)
    play.leader.close(NotLeaderError(None))
    assert set(play.answers) == {*flying, *waiting}
    assert all(isinstance(play.answers[name], LeadershipLostError) for name in flying)
    assert all(play.answers[name] is why for name in waiting)
    assert play.leader.closed is why
    assert play.leader.idle
    entries = len(play.log.entries)
    play.commit()  # later commits change nothing here
    play.wait(10**6)
    play.step()
    assert len(play.log.entries) == entries
    assert play.deliver() == []
    with pytest.raises(NotLeaderError):
        play.schedule("s", 100)


def test_refusing_leader_takes_nothing_new_and_drains() -> None:
    play = Play()
    flying, waiting = everything(play)
    play.leader.begin_drain(ShuttingDownError("bye"))
    refused: list[Callable[[], object]] = [
        lambda: play.schedule("s", 100),
        lambda: play.cancel("c", (1, 1)),
        lambda: play.leader.create_topic("t", play.now, play.done("t")),
        lambda: play.leader.register(b"q", ProducerId(1), play.now, play.done("q")),
    ]
    for request in refused:
        with pytest.raises(ShuttingDownError):
            request()
    busy = not play.leader.idle
    play.settle()
    assert busy
    assert play.leader.idle
    assert set(play.answers) == {*flying, *waiting}
    assert not any(isinstance(answer, EngineError) for answer in play.answers.values())


def test_drained_leader_appends_nothing_more() -> None:
    play = Play()
    play.leader.begin_drain(ShuttingDownError("bye"))
    play.leader.checkpoint(play.now)
    play.settle()
    count = len(play.log.entries)
    for _ in range(5):
        play.wait(10_000)
        play.settle()
    assert len(play.log.entries) == count
    assert play.leader.wake_at_ms(play.now) > play.now.mono_ms + 10_000


def test_error_raised_often_does_not_keep_every_frame() -> None:
    play = Play()
    why = ShuttingDownError("bye")
    play.leader.begin_drain(why)
    for _ in range(50):
        with pytest.raises(ShuttingDownError):
            play.schedule("s", 100)
    depth, frame = 0, why.__traceback__
    while frame is not None:
        depth, frame = depth + 1, frame.tb_next
    assert depth < 10


def test_followers_agree_with_what_the_leader_had_applied() -> None:
    # P6: a follower that applies the same log, without a wheel.
    play = Play()
    delivered(play, 0, 100, 5000, credit=2)
    play.ack("a", play.deliveries[0])
    for _ in range(30):
        play.wait(400)
        play.schedule(f"s{play.mono_ms}", 0, 300, 10_000)
        play.settle()
    follower = machine_on(SimDisk(), leads=False)
    for entry in play.log.entries:
        follower.apply(entry)
    assert follower.digest() == play.machine.digest()
    assert follower.checkpoint == play.machine.checkpoint
    assert play.machine.topics[TopicId(1)].counts == play.machine.counts
