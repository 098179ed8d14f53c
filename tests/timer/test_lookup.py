"""Keys and whole rows are found in memory and files; damage is an error; changes are bounded."""

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.lookups import FAR, PLACES, filled, flip
from tests.timer.machines import (
    START_MS,
    STATE,
    Log,
    answer_of,
    catch_up,
    engine_on,
    flush,
    ids_of,
    keys_of,
    part_of,
    queue_of,
)
from timer.entries.payloads import Targets, decode_reschedule
from timer.entries.policies import Scope, ScopePolicy
from timer.leader.groups.group_batch import OnResult
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import (
    KEYED_ROWS_MAX,
    KEYS_MAX,
    MOVES_WAITING_MAX,
    RESCHEDULE_ROWS_MAX,
    Leader,
    LeaderConfig,
)
from timer.model.columns import I64, U32, Binary, OnConflict, Part, row_bytes
from timer.model.timer_errors import (
    CorruptFileError,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, Now, TopicId, UnixMs
from timer.pending.memory.key_index import KeyHasher
from timer.pending.read_view import Filter
from timer.pending.runs import run_writer
from timer.recovery.engine import Engine
from timer.state import machine as machine_module
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    CANCELLED,
    ENTRY_FULL,
    NOT_FOUND,
    RESCHEDULED,
    RescheduleApplied,
)
from timer.state.key_conflicts import Verdict


@pytest.mark.parametrize("where", PLACES)
def test_timer_is_rescheduled_replaced_and_cancelled_by_key_wherever_it_lies(where: str) -> None:
    log, _, engine = filled(where)
    machine, first = engine.machine, engine.machine.next_seq

    new = part_of([(1, FAR + 60, b"new")], keys=[b"b"], on_conflict=OnConflict.REPLACE)
    entries = (
        log.reschedule(keys_of([(1, b"a"), (1, b"z")]), [FAR + 50, FAR + 51]),
        log.schedule(new),
        log.cancel_keys([(1, b"c"), (1, b"c"), (2, b"a")]),
        log.cancel([(FAR, 1), (FAR + 1, 2), (FAR + 2, 3)]),
    )
    moved, replaced, cancelled, again = [answer_of(machine.apply(entry)) for entry in entries]
    assert moved[0] == [RESCHEDULED, NOT_FOUND]
    assert moved[1] == [(FAR + 50, first), (FAR + 51, first + 1)]
    assert replaced[0][0][3] == [(Verdict.REPLACED, FAR + 1, 2)]
    assert cancelled == ([CANCELLED, NOT_FOUND, NOT_FOUND], [(FAR + 2, 3), (0, 0), (0, 0)])
    assert again[0] == [ALREADY_CANCELLED] * 3
    machine.apply(log.fire(FAR + 100))
    assert {payload for _, _, payload in queue_of(machine, 1)} - {b""} == {b"p0", b"new"}
    assert machine.counts.cancelled == 3
    machine.apply(log.checkpoint())


@pytest.mark.parametrize("where", PLACES)
def test_page_of_names_carries_no_bytes_and_leaves_them_where_they_are(where: str) -> None:
    _, _, engine = filled(where)
    what = Filter(topic=1, due_from_ms=FAR, due_to_ms=FAR + 3)
    names = engine.machine.store.read_view().page(what, what.start, 10, with_bytes=False).timers
    assert names.rows["seq"].tolist() == [1, 2, 3]
    assert (names.blob, row_bytes(names.rows).tolist()) == (b"", [0, 0, 0])
    whole = engine.machine.store.read_view().page(what, what.start, 10).timers
    assert (whole.blob, row_bytes(whole.rows).tolist()) == (b"p0ap1bp2c", [3, 3, 3])


def test_cancelled_timer_is_not_overdue_although_its_tombstone_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_writer, "BATCH_ROWS_MAX", 2)
    log, engine = Log(), engine_on(SimDisk())
    log.begin_epoch()
    for name in ("kept", "cancelled"):
        log.topic(name)
    log.schedule(part_of([(1, FAR, b""), (1, FAR, b""), (1, FAR, b"")]))
    catch_up(engine, log)
    flush(engine)
    log.schedule(part_of([(2, FAR, b"")]))
    catch_up(engine, log)
    flush(engine)
    log.cancel([(FAR, 2), (FAR, 3), (FAR, 4)])  # the last tombstone is in a batch of its own
    catch_up(engine, log)
    flush(engine)
    assert len(engine.machine.store.runs) == 3
    for rows_max in (1, 2, 3, 1_000):
        assert engine.machine.store.read_view().first_overdue(FAR, rows_max) == {1: FAR}


@pytest.mark.parametrize("where", ["memtable", "run"])
def test_reschedule_leaves_what_is_beyond_its_bytes_but_never_all(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "RESCHEDULE_BYTES_MAX", 3)
    log, _, engine = filled(where)
    targets = [(FAR, 1), (FAR + 1, 2), (FAR + 2, 3)]
    for expected in (
        [RESCHEDULED, ENTRY_FULL, ENTRY_FULL],
        [ALREADY_CANCELLED, RESCHEDULED, ENTRY_FULL],
    ):
        entry = log.reschedule(ids_of(targets), [FAR + 50] * 3)
        assert answer_of(engine.machine.apply(entry))[0] == expected
    assert engine.machine.counts.pending == 3


def test_key_whose_bytes_were_damaged_is_told_not_missed() -> None:
    log, disk, engine = filled("run")
    [meta] = engine.machine.store.runs
    path = STATE / "runs" / meta.name
    data = disk.read(path)
    at = data.index(b"abc") + 1  # the keys lie side by side
    flip(disk, path, at)
    with pytest.raises(CorruptFileError, match="key"):
        engine.machine.apply(log.cancel_keys([(1, b"b")]))


def test_two_keys_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(self: object, topic: object, keys: Binary) -> object:
        del self, topic
        return np.full(len(keys.sizes), 7, np.uint64)

    monkeypatch.setattr(KeyHasher, "__call__", same)
    log, _, engine = filled("run")
    log.schedule(part_of([(1, FAR, b"")], keys=[b"d"]))
    catch_up(engine, log)
    asked = keys_of([(1, b"b"), (1, b"d"), (1, b"e"), (2, b"b")])
    rows = engine.machine.store.find_keys(asked.topic, asked.key)
    assert rows["seq"].tolist() == [2, 4, 0, 0]


def test_manifest_keeps_the_secret_that_its_files_were_hashed_with() -> None:
    log, disk, _ = filled("run")
    again = Engine(disk, STATE, LeaderConfig(), None, b"another")
    catch_up(again, log)
    asked = keys_of([(1, b"a"), (1, b"b"), (1, b"e")])
    assert again.machine.store.find_keys(asked.topic, asked.key)["seq"].tolist() == [1, 2, 0]
    assert again.machine.store.hasher.secret == b""
    fresh = Engine(SimDisk(), STATE, LeaderConfig(), None, b"another")
    assert fresh.machine.store.hasher.secret == fresh.machine.pages.hasher.secret == b"another"


# ---- the leader


def leading() -> tuple[Leader, Log, Engine]:
    log, engine = Log(), engine_on(SimDisk())
    log.begin_epoch()
    log.topic("t")
    catch_up(engine, log)

    def append(kind: object, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        log.now_ms = max(log.now_ms, time_ms)
        return log.append(kind, payload).index  # type: ignore[arg-type]

    now = Now(MonoMs(0), UnixMs(START_MS))
    return engine.lead(Epoch(log.epoch), append, now), log, engine


def keyed(n: int, first: int = 0) -> Part:
    rows = [(1, FAR, b"")] * n
    return part_of(rows, keys=[b"%d" % (first + at) for at in range(n)])


def reschedule(leader: Leader, targets: Targets, due: I64, now: Now, done: OnResult) -> None:
    """Reschedule timers of topic 1 to absolute times."""
    topics = np.ones(len(targets), np.uint32)
    leader.reschedule(targets, topics, WantedTimes("due_ms", due), now, done)


def test_entries_hold_a_bounded_number_of_keys() -> None:
    leader, log, _ = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), list[object]()
    with pytest.raises(InvalidRequestError, match="keys"):
        leader.schedule(keyed(KEYED_ROWS_MAX + 1), answers.append)
    for first in (0, 600, 1200):
        leader.schedule(keyed(600, first), answers.append)
    before = len(log.entries)
    leader.step(now)
    assert len([e for e in log.entries[before:] if e.kind.name == "SCHEDULE"]) == 2
    with pytest.raises(InvalidRequestError, match="keys"):
        leader.cancel_keys(keys_of([(1, b"k")] * (KEYS_MAX + 1)), answers.append)
    due = np.full(RESCHEDULE_ROWS_MAX + 1, FAR)
    with pytest.raises(InvalidRequestError, match="timer_ids"):
        reschedule(leader, ids_of([(FAR, 1)] * len(due)), due, now, answers.append)
    one = ids_of([(FAR, 1)])
    for _ in range(MOVES_WAITING_MAX):
        reschedule(leader, one, due[:1], now, answers.append)
    with pytest.raises(OverloadedError):
        reschedule(leader, one, due[:1], now, answers.append)
    assert not answers


def test_reschedule_to_now_is_followed_by_a_fire_and_answered_with_the_new_timer() -> None:
    leader, log, engine = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), list[object]()
    leader.schedule(keyed(1), answers.append)
    leader.step(now)
    catch_up(engine, log)
    reschedule(leader, keys_of([(1, b"0")]), np.array([START_MS]), now, answers.append)
    leader.step(now)
    assert [entry.kind.name for entry in log.entries[-2:]] == ["RESCHEDULE", "FIRE"]
    catch_up(engine, log)
    assert answer_of(answers[1])[0] == [RESCHEDULED]  # type: ignore[arg-type]
    assert len(queue_of(engine.machine, 1)) == 1
    assert leader.idle


def test_reschedule_of_a_deposed_leader_has_an_unknown_outcome() -> None:
    leader, _, engine = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), list[object]()
    reschedule(leader, ids_of([(FAR, 1)]), np.array([FAR]), now, answers.append)
    leader.step(now)
    engine.step_down(NotLeaderError(None))
    assert [type(answer).__name__ for answer in answers] == ["LeadershipLostError"]


@pytest.mark.parametrize("by", ["ids", "keys"])
def test_reschedules_that_wait_share_an_entry_and_each_gets_its_own_timers(by: str) -> None:
    leader, log, engine = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), dict[str, object]()
    leader.schedule(keyed(5), lambda _: None)
    leader.step(now)
    catch_up(engine, log)
    before = len(log.entries)

    def move(name: str, numbers: list[int], due: int) -> None:
        ids = ids_of([(FAR, 1 + at) for at in numbers])
        keys = keys_of([(1, b"%d" % at) for at in numbers])
        targets, times = ids if by == "ids" else keys, np.full(len(numbers), due)
        reschedule(leader, targets, times, now, lambda result: answers.update({name: result}))

    for at in range(2):  # from here on requests wait
        move(f"alone {at}", [at], FAR + 1)
        leader.step(now)
    move("one", [2], FAR + 2)
    move("two", [3, 4], FAR + 3)
    move("again", [2], FAR + 4)
    leader.step(now)
    assert len(log.entries) == before + 2
    catch_up(engine, log)
    leader.step(now)
    assert [len(decode_reschedule(e.payload).targets) for e in log.entries[before:]] == [1, 1, 3, 1]
    catch_up(engine, log)
    assert answer_of(answers["one"])[0] == [RESCHEDULED]  # type: ignore[arg-type]
    assert answer_of(answers["two"])[0] == [RESCHEDULED] * 2  # type: ignore[arg-type]
    later = [ALREADY_CANCELLED if by == "ids" else RESCHEDULED]
    assert answer_of(answers["again"])[0] == later  # type: ignore[arg-type]
    two = answers["two"]
    assert isinstance(two, RescheduleApplied)
    assert [*two.timers.due_ms] == [FAR + 3] * 2
    held = engine.machine.store.find_keys(*_columns([b"3", b"4"]))
    assert held["seq"].tolist() == [*two.timers.seq]
    assert leader.idle


def move_four(leader: Leader, log: Log, engine: Engine, now: Now, done: OnResult) -> None:
    """Reschedule four timers: two in entries of their own, while the other two wait."""
    leader.schedule(part_of([(1, FAR, b"two")] * 4), lambda _: None)
    leader.step(now)
    catch_up(engine, log)
    for seq in range(1, 5):
        reschedule(leader, ids_of([(FAR, seq)]), np.array([FAR + seq]), now, done)
        if seq < 3:
            leader.step(now)


def test_request_without_room_in_a_shared_entry_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "RESCHEDULE_BYTES_MAX", 3)
    leader, log, engine = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), list[object]()
    move_four(leader, log, engine, now, answers.append)
    for _ in range(3):
        catch_up(engine, log)
        leader.step(now)
    catch_up(engine, log)
    assert [answer_of(each)[0] for each in answers] == [[RESCHEDULED]] * 4  # type: ignore[arg-type]
    assert leader.idle


def test_request_without_room_is_rejected_if_a_policy_changed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "RESCHEDULE_BYTES_MAX", 3)
    leader, log, engine = leading()
    now, answers = Now(MonoMs(1), UnixMs(START_MS + 1)), list[object]()
    move_four(leader, log, engine, now, answers.append)
    catch_up(engine, log)
    leader.step(now)  # both are in flight, and none waits
    leader.set_policy(Scope("", TopicId(1)), ScopePolicy(tick_ms=5), (), now, lambda _: None)
    catch_up(engine, log)
    assert [type(each).__name__ for each in answers] == ["RescheduleApplied"] * 3 + [
        "NotReadyError"
    ]


def test_reschedules_that_wait_follow_the_policy_in_force_when_they_were_accepted() -> None:
    leader, log, engine = leading()
    now = Now(MonoMs(1), UnixMs(START_MS + 1))
    leader.schedule(keyed(3), lambda _: None)
    leader.step(now)
    catch_up(engine, log)
    for at in range(3):
        reschedule(leader, ids_of([(FAR, 1 + at)]), np.array([FAR]), now, lambda _: None)
        if at < 2:
            leader.step(now)
    leader.set_policy(Scope("", TopicId(1)), ScopePolicy(tick_ms=5), (), now, lambda _: None)
    assert [e.kind.name for e in log.entries[-2:]] == ["RESCHEDULE", "POLICY"]


def _columns(keys: list[bytes]) -> tuple[U32, Binary]:
    return np.ones(len(keys), np.uint32), Binary.of(keys)
