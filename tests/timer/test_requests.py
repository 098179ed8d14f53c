"""Request ids: the table, and its use by the machine and the leader, over restarts too."""

import itertools
from dataclasses import replace
from sys import getsizeof
from typing import Any

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.leading import Play
from tests.timer.machines import START_MS, STATE, Log, Timer, engine_on, machine_on, part_of
from timer.entries.entry_frame import EntryKind
from timer.entries.policies import Scope, ScopePolicy
from timer.leader.intake import request_shares
from timer.leader.intake.request_shares import Use
from timer.leader.leader import LeaderConfig
from timer.model.columns import OnConflict, Part, RequestId, encode_schedule
from timer.model.timer_errors import (
    DiskFullError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from timer.model.units import Seq, TopicId, UnixMs
from timer.state import request_ids
from timer.state.apply_results import Accepted, Repeated, ScheduleApplied
from timer.state.machine import Machine
from timer.state.producers import RequestAnswer
from timer.state.request_ids import RequestIds

DUE = START_MS + 5_000
NO_ROWS = np.zeros(0, np.int64)


def named(text: bytes, body: int = 1, until_ms: int = START_MS + 100) -> RequestId:
    return RequestId(text, body, UnixMs(until_ms))


def part(
    request: RequestId, *timers: Timer, keys: list[bytes] | None = None, replaces: bool = False
) -> Part:
    mode = OnConflict.REPLACE if replaces else OnConflict.REJECT
    made = part_of(timers or [(1, DUE, b"x")], keys=keys, on_conflict=mode)
    return replace(made, request=request)


class Applied:
    """A machine, its log, and the answers to requests."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.log = Log()
        self.machine: Machine = machine_on(self.disk, leads=False)
        self.machine.apply(self.log.begin_epoch())
        self.machine.apply(self.log.topic("a"))

    def schedule(self, *parts: Part) -> list[Any]:
        """Return (first seq, whether it was repeated) per request, or the class of its error."""
        applied = self.machine.apply(self.log.append(EntryKind.SCHEDULE, encode_schedule(parts)))
        assert isinstance(applied, ScheduleApplied)
        return [
            type(each)
            if isinstance(each, EngineError)
            else (each.answer.first_seq, isinstance(each, Repeated))
            for each in applied.parts
        ]

    def at(self, ms: int) -> None:
        self.log.now_ms = START_MS + ms


def test_repeated_request_gets_the_first_answer_until_its_time_is_over() -> None:
    it = Applied()
    assert it.schedule(part(named(b"r"), (1, DUE, b"x"), (1, DUE, b"y"))) == [(1, False)]
    it.at(100)
    assert it.schedule(part(named(b"r", until_ms=START_MS + 900))) == [(1, True)]
    assert it.machine.counts.scheduled == 2
    it.at(101)
    assert it.schedule(part(named(b"r", until_ms=START_MS + 500))) == [(3, False)], "a new one"
    it.at(500)
    assert it.schedule(part(named(b"r"))) == [(3, True)]
    assert (len(it.machine.requests), it.machine.requests.rows) == (1, 1)


def test_two_of_one_id_in_one_entry_are_one_and_get_the_verdicts_of_one() -> None:
    it = Applied()
    log, machine = it.log, it.machine
    machine.apply(log.schedule(part_of([(1, DUE, b"held")], keys=[b"k"])))
    twice = [part(named(b"r"), keys=[b"k"], replaces=True)] * 2
    applied = machine.apply(log.schedule(*twice))
    assert isinstance(applied, ScheduleApplied)
    first, again = applied.parts
    assert isinstance(first, Accepted)
    assert isinstance(again, Repeated)
    assert first.answer is again.answer
    assert first.answer.verdicts is not None
    assert first.answer.verdicts.seq.tolist() == [1]
    assert machine.counts.pending == 1


def test_another_request_under_an_id_is_refused_and_takes_no_seq() -> None:
    it = Applied()
    assert it.schedule(part(named(b"r")), part(named(b"r", body=2)), part(named(b"s", body=2))) == [
        (1, False),
        InvalidRequestError,
        (2, False),
    ]
    assert it.machine.next_seq == 3


def test_ids_survive_a_restart_and_digests_agree() -> None:
    log, engine = Log(), engine_on(SimDisk())
    other = machine_on(SimDisk(), leads=False)
    entries = [log.begin_epoch(), log.topic("a")]
    entries.append(log.schedule(part(named(b"old", until_ms=START_MS)), part(named(b"plain"))))
    keyed = part(named(b"keyed"), (1, DUE, b"x"), keys=[b"k"])
    entries += [log.schedule(keyed), log.schedule(part(named(b"held"), keys=[b"k"]))]
    for entry in entries:
        engine.raise_commit_index(entry.index)
        other.apply(entry)
    engine.fold(entries)
    flush = engine.begin_flush()
    assert flush is not None
    flush.write()
    again = engine_on(flush.disk, STATE).machine
    assert again.digest() == engine.machine.digest() == other.digest()
    log.now_ms += 50
    repeat = log.schedule(keyed, part(named(b"plain")), part(named(b"held"), keys=[b"k"]))
    answers = []
    for machine in (engine.machine, other, again):
        applied = machine.apply(repeat)
        assert isinstance(applied, ScheduleApplied)
        told = [each.answer for each in applied.parts if isinstance(each, Repeated)]
        assert len(told) == 3
        verdicts = [answer.verdicts for answer in told]
        answers.append([v.seq.tolist() if v is not None else None for v in verdicts])
        assert machine.counts.scheduled == 3
    assert answers == [[None, None, [3]]] * 3
    checkpoint = log.checkpoint()
    digests = {machine.apply(checkpoint).digest for machine in (engine.machine, other, again)}  # type: ignore[union-attr]
    assert len(digests) == 1
    assert len(again.requests) == 3, "the first, whose time was over, went at the checkpoint"


def test_digest_tells_tables_of_ids_apart() -> None:
    machines = []
    for body, until_ms in ((1, 100), (2, 100), (1, 200)):
        it = Applied()
        it.schedule(part(named(b"r", body, START_MS + until_ms)))
        machines.append(it.machine.digest())
    assert len({*machines}) == 3


def test_id_that_is_used_anew_is_remembered_for_its_new_time_alone() -> None:
    table = RequestIds()
    old = RequestAnswer(0, Seq(1), part_of([(1, 1, b"")] * 3).due_ms)
    new = RequestAnswer(0, Seq(9), part_of([(1, 1, b"")]).due_ms)
    for number in range(3):  # behind these nothing is forgotten by the way
        table.accept(named(b"%d" % number, until_ms=90), old, UnixMs(0))
    table.accept(named(b"again", until_ms=10), old, UnixMs(0))
    before = table.sum
    assert table.stored_answer(named(b"again"), UnixMs(10)) is old, "the entry is being applied"
    table.seal()
    again = table.stored_answer(named(b"again"), UnixMs(10))
    assert again is not None
    assert again.pack() == old.pack()
    assert table.stored_answer(named(b"again", until_ms=60), UnixMs(11)) is None
    table.accept(named(b"again", until_ms=60), new, UnixMs(11))
    assert (len(table), table.rows) == (4, 3 * 3 + 1), "it is there once"
    assert table.sum != before
    assert table.stored_answer(named(b"again"), UnixMs(60)) is new
    table.expire(UnixMs(61))
    assert (len(table), table.rows) == (3, 9)
    table.expire(UnixMs(91))
    assert (len(table), table.rows, table.sum) == (0, 0, 0)


def test_table_forgets_what_is_over_and_counts_what_it_holds() -> None:
    table = RequestIds()
    for number, until_ms in enumerate((10, 30, 20)):
        answer = RequestAnswer(0, Seq(number), part_of([(1, 1, b"")] * (number + 1)).due_ms)
        table.accept(named(b"%d" % number, until_ms=until_ms), answer, UnixMs(0))
    assert (len(table), table.rows) == (3, 6)
    table.expire(UnixMs(10))
    assert len(table) == 3
    table.expire(UnixMs(25))
    assert len(table) == 1, "one that is remembered for longer holds up nobody behind it"
    assert table.stored_answer(named(b"2"), UnixMs(25)) is None, "but counts no more"
    table.expire(UnixMs(31))
    assert (len(table), table.rows, table.sum) == (0, 0, 0)


def test_pages_of_a_table_are_found_forgotten_and_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ids, "PAGE_IDS", 3)
    table = RequestIds()

    def accept(number: int, until_ms: int, now_ms: int) -> None:
        answer = RequestAnswer(0, Seq(number), np.full(1, number))
        table.accept(named(b"%d" % number, until_ms=until_ms), answer, UnixMs(now_ms))
        table.seal()

    for number in range(8):
        accept(number, 40 if number == 2 else 10 + number, 0)
    for number in range(8):
        found = table.stored_answer(named(b"%d" % number), UnixMs(10))
        assert found is not None, number
        assert found.first_seq == number
    lent, packed = table.pack(), [*table.pack()]
    accept(1, 50, 12)  # the second id, over but still there, again; the first is forgotten
    table.expire(UnixMs(30))
    assert [fields[0][0] for fields in table.pack()] == [b"2", b"1"]
    assert (len(table), table.rows) == (2, 2)
    assert len(lent) == 8
    assert [*lent] == packed, "a manifest in the making does not change"
    again = RequestIds()
    again.restore(table.pack())
    assert (len(again), again.rows, again.sum) == (2, 2, table.sum)
    assert again.stored_answer(named(b"2"), UnixMs(40)) is not None


def test_pages_are_full_of_packed_records_and_none_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_ids, "PAGE_IDS", 3)
    it = Applied()
    for number in range(7):
        it.schedule(part(named(b"%d" % number)))
    table = it.machine.requests
    pages = table.pack().pages
    assert [len(page) for page in pages] == [3, 3, 1]
    answers = [table.stored_answer(named(b"6"), UnixMs(START_MS)) for _ in range(2)]
    assert answers[0] is not answers[1], "only packed records outlive their entry"
    table.expire(UnixMs(START_MS + 101), 4)
    assert [len(page) for page in table.pack().pages] == [2, 1], "four of them, over two pages"


def test_many_that_are_over_are_forgotten_in_portions() -> None:
    table, last = RequestIds(), request_ids.EXPIRED_MAX + 10
    for number in range(last):
        table.accept(
            named(b"%d" % number, until_ms=5), RequestAnswer(0, Seq(1), NO_ROWS), UnixMs(0)
        )
    table.expire(UnixMs(6))
    assert len(table) == 10
    table.accept(named(b"new", until_ms=50), RequestAnswer(0, Seq(1), NO_ROWS), UnixMs(6))
    assert len(table) == 9, "two less, one more"


def test_gaps_of_forgotten_ids_are_not_walked_over_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_ids, "PAGE_IDS", 4_000)
    table, answer = RequestIds(), RequestAnswer(0, Seq(1), NO_ROWS)
    for number in range(4_001):  # the last one begins a second page
        table.accept(named(b"%d" % number, until_ms=5), answer, UnixMs(0))
    table.seal()
    whole = getsizeof(table.pack().pages[0])
    for number in range(4_001, 5_901):
        table.accept(named(b"%d" % number, until_ms=50), answer, UnixMs(6))
    table.seal()
    oldest = table.pack().pages[0]
    assert [*oldest] == [b"%d" % number for number in range(3_800, 4_000)]
    assert getsizeof(oldest) < whole / 4, "the size of a dict shows its places"
    assert oldest.gaps <= request_ids.GAPS_MAX + 2


# ---- the leader


def ask(play: Play, name: str, request: RequestId) -> None:
    play.leader.schedule(part(request, (play.topic_id, DUE, b"x")), play.done(name))


def test_leader_takes_repetitions_where_it_takes_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play(LeaderConfig(request_window_ms=60_000))
    first = play.leader.request_id(b"r", 1, play.now)
    assert first.until_ms == play.now.clock_ms + 60_000
    ask(play, "first", first)
    play.settle()
    play.leader.disk_error = DiskFullError([], retry_after_ms=1)
    ask(play, "again", play.leader.request_id(b"r", 1, play.now))
    play.settle()
    assert [type(play.answers[name]) for name in ("first", "again")] == [Accepted, Repeated]
    assert play.answers["first"].answer.pack() == play.answers["again"].answer.pack()
    with pytest.raises(DiskFullError):
        ask(play, "new", play.leader.request_id(b"s", 1, play.now))
    play.leader.disk_error = None
    monkeypatch.setattr(request_shares, "WHOLE", Use(2, 100))
    with pytest.raises(OverloadedError, match="request_window_ms"):
        ask(play, "new", play.leader.request_id(b"s", 1, play.now))
    with pytest.raises(InvalidRequestError, match="request_id = 'r'"):
        ask(play, "other", play.leader.request_id(b"r", 2, play.now))
    play.wait(60_001)
    play.leader.checkpoint(play.now)
    play.settle()
    assert len(play.machine.requests) == 0
    ask(play, "new", play.leader.request_id(b"s", 1, play.now))
    play.settle()
    assert isinstance(play.answers["new"], Accepted)


def test_who_names_most_requests_leaves_as_much_room_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_shares, "WHOLE", Use(1_000, 40))
    play = Play(LeaderConfig(request_window_ms=60_000))
    numbers = itertools.count()

    def asks(whose: str, rows: int) -> None:
        request = play.leader.request_id(b"%d" % next(numbers), 1, play.now)
        asked = part(request, *[(play.topic_id, DUE, b"")] * rows)
        play.leader.schedule(asked, lambda _: None, play.now, whose)

    asks("flood", 10)
    asks("flood", 10)  # on its way: it counts
    with pytest.raises(OverloadedError) as why:
        asks("flood", 1)
    assert "the share of flood in the table of request ids (21 rows of 40," in str(why.value)
    play.settle()
    with pytest.raises(OverloadedError, match="the share of flood"):
        asks("flood", 1)
    asks("other", 10)
    play.settle()
    with pytest.raises(OverloadedError, match="the share of other"):
        asks("other", 1)
    asks("third", 5)
    play.settle()
    play.full = DiskFullError([], retry_after_ms=1)
    asks("fourth", 2)
    play.step()  # refused by the log: it has no share
    play.full = None
    asks("fourth", 2)
    play.settle()
    with pytest.raises(OverloadedError, match="the share of fifth"):
        asks("fifth", 2)
    with pytest.raises(OverloadedError, match=r"^the table of request ids \(41 of 40 rows"):
        asks("fifth", 4)
    play.wait(60_001)
    play.leader.checkpoint(play.now)
    play.settle()
    asks("fourth", 20)
    with pytest.raises(OverloadedError, match="the share of fourth"):
        asks("fourth", 1)  # its rejected request gives nothing back a second time
    asks("flood", 10)


def test_repetition_is_answered_whatever_has_become_policy() -> None:
    play = Play()
    first = play.leader.request_id(b"r", 1, play.now)
    ask(play, "first", first)
    play.settle()
    topic = TopicId(play.topic_id)
    strict = play.leader.rules(topic, 0, 0).payload_limit  # type: ignore[arg-type]
    play.leader.set_policy(
        Scope(), ScopePolicy(payload_bytes_max=1), (), play.now, play.done("alter")
    )
    play.settle()
    limits = [
        play.leader.rules(topic, 0, 0, each).payload_limit[0]  # type: ignore[arg-type]
        for each in (first, play.leader.request_id(b"s", 1, play.now))
    ]
    assert strict[0] > 1
    assert limits[0] > limits[1] == 1
    play.wait(300_001)  # and nothing is appended meanwhile
    late = play.leader.request_id(b"r", 1, play.now)
    assert play.leader.rules(topic, 0, 0, late).payload_limit[0] == 1  # type: ignore[arg-type]


def test_repetition_while_the_first_is_in_flight_is_one_timer() -> None:
    play = Play()
    request = play.leader.request_id(b"r", 1, play.now)
    ask(play, "first", request)
    play.step()
    ask(play, "again", request)
    play.settle()
    assert play.answers["first"].answer.pack() == play.answers["again"].answer.pack()
    assert play.machine.counts.scheduled == 1


def test_other_request_with_an_id_in_flight_is_refused_and_has_no_share() -> None:
    play = Play()
    for body in (1, 2):
        asked = part(play.leader.request_id(b"r", body, play.now), (play.topic_id, DUE, b""))
        play.leader.schedule(asked, play.done(f"{body}"), play.now, "s")
    play.settle()
    assert [type(play.answers[name]) for name in "12"] == [Accepted, InvalidRequestError]
    assert play.leader._intake._shares._by_sender == {"s": Use(1, 1)}
