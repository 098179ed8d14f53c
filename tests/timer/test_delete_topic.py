"""Deletion of a topic: its timers in memory and files, later entries, the leader's part."""

from dataclasses import replace

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.leading import LEASE_MS, Play, delivered
from tests.timer.machines import (
    START_MS,
    Log,
    answer_of,
    catch_up,
    engine_on,
    flush,
    ids_of,
    machine_on,
    part_of,
    queue_of,
    state_of,
)
from tests.timer.stores import read_ahead
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import (
    CreateGroup,
    DeleteTopic,
    GroupSettings,
    GroupStart,
    Op,
    decode_topic,
)
from timer.entries.policies import CLUSTER, Scope, ScopePolicy
from timer.leader.groups.group_leases import LEASE_LOST
from timer.leader.groups.lease_table import ConsumerStream
from timer.model import timer_errors
from timer.model.timer_id import TimerKey
from timer.model.units import DUE_MS_MAX, GroupId, ProducerId, Seq, TopicId, UnixMs
from timer.pending.memory.deleted_topics import NONE_DELETED, DeletedTopics
from timer.pending.read_view import Filter
from timer.state import firing_trace
from timer.state.apply_results import (
    ALREADY_FIRED,
    NOT_FOUND,
    Accepted,
    DeleteTopicApplied,
    Repeated,
)
from timer.state.timer_story import KnownTimer, StoryKind, StoryReader

DUE = START_MS + 1_000
HOUR = 3_600_000


def test_flags_tell_what_was_issued_and_is_not_there() -> None:
    gone = DeletedTopics.all_but([TopicId(2)], TopicId(4))
    assert [gone.has(topic) for topic in range(6)] == [False, True, False, True, False, False]
    assert gone.of(np.array([3, 0xFFFF_FFFF, 2], np.uint32)).tolist() == [True, False, False]
    more = gone.plus(TopicId(9))
    assert more.has(9)
    assert more.has(1)
    assert not gone.has(9), "a thread may look at the other"
    assert not NONE_DELETED
    assert not NONE_DELETED.has(1)


# ---- timers


@pytest.mark.parametrize(
    "where",
    ["memtable", "frozen memtable", "run", "merging run", "window", "restarted", "replayed"],
)
def test_timers_of_a_deleted_topic_are_gone_wherever_they_lie(where: str) -> None:
    disk, log = SimDisk(), Log()
    engine = engine_on(disk)
    log.topic("a")
    log.topic("b")
    log.schedule(
        part_of([(1, DUE, b"x"), (2, DUE, b"y"), (1, DUE + HOUR, b"z")], keys=[b"k", b"k", b"l"])
    )
    catch_up(engine, log)
    begun = merge = None
    if where == "frozen memtable":
        begun = engine.begin_flush()
    elif where != "memtable":
        flush(engine)
    if where == "window":
        read_ahead(engine.machine.store, DUE)
    if where == "merging run":
        for _ in range(7):
            log.schedule(part_of([(2, DUE + HOUR, b"more")]))
            catch_up(engine, log)
            flush(engine)
        merge = engine.begin_merge()
        assert merge is not None
    log.delete_topic(1)
    log.topic("a")
    if where == "replayed":  # the manifest is from before the deletion
        engine = engine_on(disk)
    catch_up(engine, log)
    if merge is not None:
        store = engine.machine.store
        store.install_merge(merge, store.write_merge(merge))
    if where == "frozen memtable":
        assert begun is not None
        begun.write()
        engine.end_flush(begun)
    if where == "restarted":
        flush(engine)
        engine = engine_on(disk)
    machine, store = engine.machine, engine.machine.store
    kept = machine.counts.scheduled - 2
    assert (machine.counts.dropped, machine.counts.pending, store.pending) == (2, kept, kept)
    assert answer_of(machine.apply(log.cancel([(DUE, 1), (DUE + HOUR, 3)])))[0] == [NOT_FOUND] * 2
    assert not store.topics(*_columns([(DUE, 1), (DUE + HOUR, 3)])).any()
    assert store.find(UnixMs(DUE), 1) is None
    assert answer_of(machine.apply(log.cancel_keys([(1, b"k"), (3, b"k")])))[0] == [NOT_FOUND] * 2
    what = Filter(topic=1, due_from_ms=0, due_to_ms=DUE_MS_MAX)
    assert not len(store.read_view().page(what, what.start, 10).timers.rows)
    assert store.read_view().count(1, [DUE_MS_MAX]) == [0]
    [fired] = machine.apply(log.fire(DUE + 2 * HOUR)).fired  # type: ignore[union-attr]
    assert fired[0] == 2
    assert queue_of(machine, 3) == []
    assert answer_of(machine.apply(log.cancel([(DUE, 1)])))[0] == [ALREADY_FIRED]  # by its time
    machine.apply(log.checkpoint())
    assert machine.digest() == machine.recomputed_digest()


def _columns(timers: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = ids_of(timers)
    return ids.due_ms, ids.seq


@pytest.mark.parametrize("rows_max", [1, 2, 16_384])
def test_what_a_fire_takes_does_not_depend_on_what_of_the_gone_is_still_in_files(
    rows_max: int,
) -> None:
    log, engines = Log(), [engine_on(SimDisk()), engine_on(SimDisk())]
    log.topic("a")
    log.topic("b")
    timers = [(1 + at % 2, DUE + at // 4, b"%d" % at) for at in range(40)]
    log.schedule(part_of(timers))
    for engine in engines:
        catch_up(engine, log)
        flush(engine)
    log.delete_topic(1)
    for engine in engines:
        catch_up(engine, log)
    store = engines[0].machine.store
    while (merge := store.begin_merge()) is not None:
        store.install_merge(merge, store.write_merge(merge))
    assert [sum(run.rows for run in e.machine.store.runs) for e in engines] == [20, 40]
    while engines[0].machine.counts.pending:
        fire = log.fire(DUE + 99, rows_max)
        one, other = (answer_of(engine.machine.apply(fire)) for engine in engines)
        assert one == other
    assert state_of(engines[0].machine) == state_of(engines[1].machine)


def test_disk_space_comes_back_though_nothing_of_it_is_due_for_years() -> None:
    disk, log = SimDisk(), Log()
    engine = engine_on(disk)
    log.topic("a")
    log.topic("b")
    far = START_MS + 10**11
    log.schedule(part_of([(1, far + at, b"x" * 1000) for at in range(500)]))
    catch_up(engine, log)
    flush(engine)
    log.schedule(part_of([(1 + at % 2, far + at, b"y" * 1000) for at in range(500)]))
    catch_up(engine, log)
    flush(engine)
    before = disk.used_bytes()
    log.delete_topic(1)
    store = engine.machine.store
    for _ in range(3):
        log.checkpoint()
        catch_up(engine, log)
        flush(engine)
        while (merge := store.begin_merge()) is not None:
            store.install_merge(merge, store.write_merge(merge))
    assert [run.rows for run in store.runs] == [250]
    assert disk.used_bytes() < before / 3
    assert not store.retired


# ---- other state of the topic


def test_deletion_tells_what_went_and_leaves_nothing_of_it() -> None:
    disk, log = SimDisk(), Log()
    engine = engine_on(disk)
    log.topic("a")
    log.topic("b")
    log.create_group(1, "g")
    log.create_group(1, "h")
    log.policy(Scope("", TopicId(1)), tick_ms=7)
    log.policy(CLUSTER, delay_ms_min=0)
    log.schedule(part_of([(1, START_MS, b"%d" % at) for at in range(4)]))
    log.fire(START_MS)
    log.op(Op.RESERVE, 1, 1, [4])
    log.op(Op.ACK, 1, 1, [0, 2, 3])
    log.schedule(part_of([(1, DUE, b"x")] * 3))
    catch_up(engine, log)
    begun = engine.begin_flush()  # has its blocks
    assert begun is not None
    machine = engine.machine
    applied = machine.apply(log.delete_topic(1))
    assert isinstance(applied, DeleteTopicApplied)
    assert (applied.dropped, applied.messages) == (3, 4)
    assert applied.groups == (("g", 1), ("h", 4))
    assert dict(machine.policies) == {CLUSTER: ScopePolicy(delay_ms_min=0)}
    assert [*machine.topics] == [2]
    assert [*machine.topic_by_name] == ["b"]
    assert machine.apply(log.delete_topic(1)) == DeleteTopicApplied(DeleteTopic(TopicId(1)), None)
    begun.write()
    engine.end_flush(begun)
    assert (machine.pages.unspilled_size, machine.pages.spilled_size) == (0, 0)
    machine.apply(log.checkpoint())
    flush(engine)
    assert disk.list_dir(begun.directory / "queues") == []
    again = engine_on(disk)
    assert state_of(again.machine) == state_of(machine)
    assert again.machine.store.deleted_topics.has(1)


def test_what_names_a_deleted_topic_later_finds_nobody_and_changes_nothing() -> None:
    machine, log = machine_on(SimDisk(), leads=True), Log()
    for entry in (log.producer(b"p"), log.topic("a"), log.topic("b"), log.create_group(1, "g")):
        machine.apply(entry)
    request = part_of([(1, DUE, b"x"), (2, DUE, b"y")], 1, 1)
    first = answer_of(machine.apply(log.schedule(request)))[0]
    machine.apply(log.delete_topic(1))
    before, seq = replace(machine.counts), machine.next_seq
    new = part_of([(2, DUE, b"kept"), (1, DUE, b"not")], 1, 2)
    results, ready = answer_of(machine.apply(log.schedule(request, new, part_of([(2, DUE, b"z")]))))
    assert results[0] == (*first[0][:-1], True), "answered as it was"
    assert results[1] is timer_errors.TopicDeletedError
    assert (results[2][1], ready) == (seq, []), "a refused one takes no seq"
    assert machine.counts.scheduled == before.scheduled + 1
    assert answer_of(machine.apply(log.schedule(part_of([(2, DUE, b"w")], 1, 2))))[0][0][0] == 2
    ops = [log.op(Op.ACK, 1, 1, [0]), log.alter(1, 1, lease_ms=5), log.create_group(1, "new")]
    ops += [log.op(op, 1, 1, [0]) for op in (Op.SEEK, Op.RESERVE, Op.ENDED, Op.RECALL)]
    for op in (*ops, log.op(Op.DELETE, 1, 1, []), log.nack(1, 1, [0], DUE)):
        assert answer_of(machine.apply(op)) == ["NoEffectApplied"]
    seq = machine.next_seq
    assert answer_of(machine.apply(log.move(1, 1, [0, 1], "dead", "g"))) == ["NoEffectApplied"]
    assert machine.next_seq == seq + 2, "what a seq is, the log alone tells"
    assert [*machine.topics] == [2]
    machine.apply(log.policy(Scope("", TopicId(1)), tick_ms=7))
    assert not [*machine.policies]
    machine.apply(log.checkpoint())
    assert machine.digest() == machine.recomputed_digest()


# ---- the leader


def deleting(play: Play) -> None:
    play.leader.delete_topic(play.topic_id, play.now, play.done("delete"))


def test_what_waits_goes_before_the_deletion_and_is_answered() -> None:
    play = Play()
    for name in ("first", "second", "waits"):
        play.schedule(name, 5_000)
        if name != "waits":
            play.step()
    deleting(play)
    assert play.appended == [EntryKind.SCHEDULE] * 3 + [EntryKind.TOPIC]
    play.settle()
    assert all(isinstance(play.answers[name], Accepted) for name in ("first", "second", "waits"))
    assert (play.answers["delete"].dropped, play.machine.store.pending) == (3, 0)


def test_nothing_is_taken_that_names_a_topic_whose_deletion_is_in_flight_or_done() -> None:
    play = Play()
    group, _ = delivered(play, 0)
    held = play.deliveries[-1]
    play.schedule("in flight", 9_000, producer=0)
    deleting(play)
    create = CreateGroup(play.topic_id, "h", GroupStart.EARLIEST, GroupSettings(lease_ms=LEASE_MS))
    scope, now = Scope("", play.topic_id), play.now
    asking = (
        lambda: play.schedule("s", 5),
        lambda: play.leader.set_policy(scope, ScopePolicy(tick_ms=7), (), now, play.done("policy")),
        lambda: play.leader.groups.create(create, play.done("create")),
        lambda: play.leader.groups.delete(group, play.done("group")),
        lambda: play.join(group),
        lambda: play.ack("ack", held),
        lambda: deleting(play),
    )
    appended = len(play.log.entries)
    for ask in asking:
        with pytest.raises(timer_errors.NotReadyError, match="being deleted"):
            ask()
    assert play.leader.topic_or_none("a") is None
    assert len(play.log.entries) == appended
    play.settle()
    for ask in asking:
        with pytest.raises(timer_errors.TopicDeletedError):
            ask()
    assert not play.leader.groups.deleting


def test_topic_asked_for_while_its_deletion_is_in_flight_is_made_behind_it() -> None:
    play = Play()
    deleting(play)
    play.leader.create_topic("a", play.now, play.done("topic"))
    play.settle()
    assert play.answers["topic"].topic_id == play.topic_id + 1
    assert play.machine.topic_by_name["a"] is play.answers["topic"]


def test_consumers_are_sent_away_and_their_acks_told_only_when_it_is_committed() -> None:
    play = Play()
    group, _ = delivered(play, 0, 0)
    sent_away: list[timer_errors.EngineError] = []
    consumer = ConsumerStream("c", LEASE_MS, lambda _: None, end=sent_away.append)
    play.leader.groups.join(group, consumer)
    play.ack("with it", play.deliveries[-1], [0])
    play.leader.groups.seek_time(group, UnixMs(START_MS + 10**7), play.done("seek"))
    deleting(play)
    play.step()
    assert not sent_away
    play.settle()
    assert str(sent_away[0]) == "topic 'a' was deleted"
    assert isinstance(play.answers["with it"], timer_errors.TopicDeletedError)
    assert isinstance(play.answers["seek"], timer_errors.NotReadyError), "it had no effect"
    play.leader.groups.leave(group, consumer)
    play.leader.groups.credit(group, consumer, 5)
    play.wait(10 * LEASE_MS)
    play.settle()  # leases that were out end nowhere
    assert [*play.leader.groups.all_lease_counts()] == []
    assert not len(play.leader.groups._turns)
    assert group.deleted


def test_alarms_of_a_topic_and_of_its_groups_go_with_it() -> None:
    play = Play()
    policy = ScopePolicy(ttl_ms=10**9)
    play.leader.set_policy(CLUSTER, policy, [], play.now, play.done("policy"))
    play.settle()
    group, _ = delivered(play, 0, 0)
    play.nack("later", play.deliveries[-1], [0], delay_ms=10**6)
    play.settle()
    groups = play.leader.groups
    of_group = [groups._ends, groups._returns]
    assert all(group.group_id in each for each in of_group)
    assert play.topic_id in groups.expiry._alarms
    deleting(play)
    play.settle()
    assert not any(group.group_id in each for each in of_group)
    assert play.topic_id not in groups.expiry._alarms


def test_topic_is_not_said_to_be_gone_before_its_deletion_is_committed() -> None:
    play = Play()
    assert play.leader.find_topic("a").topic_id == play.topic_id
    play.leader.delete_topic(play.topic_id, play.now, play.done("delete"))
    with pytest.raises(timer_errors.NotReadyError):
        play.leader.find_topic("a")
    play.settle()
    with pytest.raises(timer_errors.NotFoundError, match="'a'"):
        play.leader.find_topic("a")


def test_refused_deletion_changes_nothing() -> None:
    play = Play()
    play.full = timer_errors.OverloadedError("the log", retry_after_ms=1)
    deleting(play)
    assert isinstance(play.answers["delete"], timer_errors.OverloadedError)
    play.full = None
    play.schedule("s", 5_000)
    play.settle()
    assert play.machine.store.pending == 1


def test_repeated_request_is_taken_though_its_topic_is_gone() -> None:
    play = Play()
    play.leader.register(b"p", ProducerId(1), play.now, play.done("producer"))
    play.settle()
    play.schedule("first", 5_000, producer=1, sequence=1)
    deleting(play)
    play.schedule("while", 5_000, producer=1, sequence=1)
    play.settle()
    play.schedule("after", 5_000, producer=1, sequence=1)
    play.settle()
    first = play.answers["first"].answer
    for again in ("while", "after"):
        assert isinstance(play.answers[again], Repeated)
        assert play.answers[again].answer.first_seq == first.first_seq
    with pytest.raises(timer_errors.TopicDeletedError):
        play.schedule("new", 5_000, producer=1, sequence=2)
    play.settle()


def test_lease_of_the_deleted_topic_acks_nothing_of_the_one_made_after_it() -> None:
    play = Play()
    delivered(play, 0, 0)
    before = play.deliveries[-1]
    deleting(play)
    play.settle()
    play.topic_id = play.make_topic("a").topic_id
    group, _ = delivered(play, 0, 0)
    for restarted in (False, True):
        if restarted:
            play.restart()
        held = replace(before, group=group)  # by names it is the same
        play.ack(f"old {restarted}", held, epoch=before.epoch)
        assert play.verdict(f"old {restarted}") == [LEASE_LOST] * 2
    after = play.deliveries[-1]
    play.restart()
    assert group.since_epoch < play.log.epoch - 1, (
        "what is given later is acked after a failover, too"
    )
    play.join(group)
    play.settle()
    assert play.last()[0] == after.lease.offsets.tolist()


# ---- stories


@pytest.mark.parametrize("fires", [False, True])
def test_story_tells_what_ended_with_its_topic(fires: bool) -> None:
    machine, log = machine_on(SimDisk(), leads=True), Log()
    for entry in (log.topic("a"), log.schedule(part_of([(1, DUE, b"x")]))):
        machine.apply(entry)
    if fires:
        machine.apply(log.fire(DUE))
    machine.apply(log.delete_topic(1))
    machine.apply(log.fire(DUE + 1))
    [*firings] = machine.trace.firings
    place = firing_trace.find_firing(firings, Seq(1))
    known = KnownTimer(pending=False, ended=False, fired=place, topic=None, key=b"", deleted=fires)
    target = TimerKey(UnixMs(DUE), Seq(1))
    story = StoryReader(target, known, [*machine.trace.marks], frozenset[GroupId]())
    events = []
    while not story.over:
        events += story.feed(log.entries[story.next - 1])
    told = [event.kind for event in events]
    assert told == [StoryKind.SCHEDULED] + [StoryKind.FIRED] * fires + [StoryKind.TOPIC_DELETED]
    assert story.dropped is not fires
    assert decode_topic(log.entries[-2].payload) == DeleteTopic(TopicId(1))
