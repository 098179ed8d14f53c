"""Producers against a naive model: a dict of all answers, and the rules of the module."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    OutcomeForgottenError,
    SequenceGapError,
    UnknownProducerError,
)
from timer.model.units import ProducerId, Seq, UnixMs
from timer.state import producers as producers_module
from timer.state.producers import (
    ANSWER_ROWS_MAX,
    ANSWERS_MAX,
    IDLE_MS_MAX,
    Producers,
    ProducerState,
    RequestAnswer,
    name_of,
)


def registered(producers: Producers, token: bytes, drawn: int = 1, at_ms: int = 1) -> ProducerId:
    producer_id = producers.register(token, ProducerId(drawn), UnixMs(at_ms))
    assert producer_id is not None
    return producer_id


def answer(sequence: int, rows: int = 1) -> RequestAnswer:
    return RequestAnswer(sequence, Seq(10 * sequence), np.full(rows, sequence, np.int64))


def expired(producers: Producers, now_ms: int, idle_ms: int = IDLE_MS_MAX) -> int:
    """Expire producers; return the number of portions except the last."""
    return sum(1 for _ in producers.expire(UnixMs(now_ms), idle_ms))


def refused(
    producers: Producers, producer_id: int, sequence: int, body: int = 0
) -> type[EngineError] | None:
    try:
        producers.stored_answer(ProducerId(producer_id), sequence, body)
    except EngineError as error:
        return type(error)
    return None


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=40))
def test_each_sequence_is_taken_once_in_order_and_repeated_ones_get_their_answer(
    sequences: list[int],
) -> None:
    producers = Producers()
    me = registered(producers, b"me")
    given_: dict[int, RequestAnswer] = {}
    for sequence in sequences:
        if sequence == len(given_) + 1:
            assert producers.stored_answer(me, sequence, 0) is None
            given_[sequence] = answer(sequence)
            producers.accept(me, given_[sequence], UnixMs(2))
        elif sequence > len(given_):
            assert refused(producers, me, sequence) is SequenceGapError
        elif sequence == 0:
            assert refused(producers, me, sequence) is OutcomeForgottenError
        else:
            assert producers.stored_answer(me, sequence, 0) is given_[sequence]
        assert producers.last_sequence(me) == len(given_)


def test_id_is_the_one_that_was_drawn_unless_the_token_has_one_or_another_has_the_id() -> None:
    producers = Producers()
    assert registered(producers, b"a", 1 << 62) == 1 << 62
    assert registered(producers, b"b", 5) == 5
    assert registered(producers, b"a", 6) == 1 << 62
    assert producers.register(b"c", ProducerId(5), UnixMs(1)) is None, "it is b's"
    assert [producer_id for producer_id, _ in producers] == [5, 1 << 62]
    names = sorted(name_of(ProducerId(each)) for each in (5, 1 << 62))
    assert [name for name, _ in producers.page(0, 9)] == names
    assert [name for name, _ in producers.page(names[0], 9)] == names[1:]
    assert producers.by_name(name_of(ProducerId(5))).token == b"b"
    with pytest.raises(UnknownProducerError):
        producers.by_name(5)


def test_sequence_with_another_body_is_no_repetition() -> None:
    producers = Producers()
    me = registered(producers, b"a")
    one = replace(answer(1), body=77)
    producers.accept(me, one, UnixMs(1))
    assert producers.stored_answer(me, 1, 77) is one
    with pytest.raises(InvalidRequestError, match="sequence = 1: was used by another request"):
        producers.stored_answer(me, 1, 78)


@pytest.mark.parametrize("producer_id", [0, 2])
def test_id_never_issued_is_unknown(producer_id: int) -> None:
    producers = Producers()
    registered(producers, b"a")
    assert refused(producers, producer_id, 1) is UnknownProducerError
    assert producers.last_sequence(ProducerId(producer_id)) is None


def test_last_1024_answers_are_kept_and_older_ones_forgotten() -> None:
    producers = Producers()
    me = registered(producers, b"a")
    last = ANSWERS_MAX + 2
    for sequence in range(1, last + 1):
        producers.accept(me, answer(sequence), UnixMs(1))
    assert [refused(producers, me, sequence) for sequence in (1, 2, 3)] == [
        OutcomeForgottenError,
        OutcomeForgottenError,
        None,
    ]
    oldest, newest = producers.stored_answer(me, 3, 0), producers.stored_answer(me, last, 0)
    assert (oldest, newest) != (None, None)
    assert oldest is not None
    assert oldest.sequence == 3
    assert refused(producers, me, last + 2) is SequenceGapError


def test_answers_are_bounded_by_rows_too_but_the_last_is_always_kept() -> None:
    producers = Producers()
    me = registered(producers, b"a")
    half = ANSWER_ROWS_MAX // 2
    for sequence, rows in enumerate((half, half, 1, ANSWER_ROWS_MAX + 1), start=1):
        producers.accept(me, answer(sequence, rows), UnixMs(1))
        kept = [s for s in range(1, sequence + 1) if refused(producers, me, s) is None]
        assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [4]}[sequence]
    ((_, producer),) = producers
    assert producer.answer_rows == ANSWER_ROWS_MAX + 1


def test_idle_producers_expire_used_and_registered_again_ones_do_not() -> None:
    producers = Producers()
    idle, used, again = (
        registered(producers, token, number, at_ms=0)
        for number, token in enumerate((b"i", b"u", b"r"), start=1)
    )
    producers.accept(used, answer(1), UnixMs(1))
    registered(producers, b"r", 4)
    expired(producers, IDLE_MS_MAX)
    assert len(producers) == 3
    expired(producers, IDLE_MS_MAX + 1)
    assert [producer_id for producer_id, _ in producers] == [used, again]
    assert refused(producers, idle, 1) is UnknownProducerError
    assert [name for name, _ in producers.page(0, 9)] == sorted(map(name_of, (used, again)))
    assert registered(producers, b"i", 4) == 4


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("racpe"), st.integers(1, 6)), max_size=60))
def test_digest_has_the_same_of_producers_whatever_changed_since_the_last(
    steps: list[tuple[str, int]],
) -> None:
    producers = Producers()
    for now, (step, which) in enumerate(steps):
        now_ms, token = UnixMs(now), b"%d" % which
        known = producers.last_sequence(ProducerId(which))
        if step == "r":
            _ = producers.register(token, ProducerId(which), now_ms)
        elif step == "a" and known is not None:
            producers.accept(ProducerId(which), answer(known + 1), now_ms)
        elif step == "p" and known is None:
            producers.restore(ProducerId(which), ProducerState(b"put back %d" % which, now_ms, 3))
        elif step == "e":
            expired(producers, now_ms, 4 * which)
        else:
            assert producers.sum() == producers.recomputed_sum()
    assert producers.sum() == producers.recomputed_sum()
    used = [producer.used_at_ms for producer in map(producers.get, producers.ids()) if producer]
    assert used == sorted(used)


def test_digest_hashes_the_producers_that_changed_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producers = Producers()
    for producer_id in range(1_000, 0, -1):
        producers.restore(ProducerId(producer_id), ProducerState(b"%d" % producer_id, UnixMs(1)))
    before = producers.sum()
    hashed = calls_of(monkeypatch, producers_module, "_hash")
    producers.accept(ProducerId(500), answer(1), UnixMs(2))
    registered(producers, b"7", 8, at_ms=2)
    assert producers.sum() == producers.sum() != before
    assert sorted(producer_id for producer_id, _ in hashed) == [7, 500]
    monkeypatch.undo()
    assert producers.sum() == producers.recomputed_sum()


def test_producer_that_ends_is_forgotten_with_its_token_and_its_name() -> None:
    producers = Producers()
    me, other = registered(producers, b"a", 7), registered(producers, b"b", 8)
    before = producers.sum()
    producers.accept(me, answer(1), UnixMs(1))
    producers.end(me)
    assert producers.end(ProducerId(99)) == 99
    assert [each for each, _ in producers.page(0, 9)] == [name_of(other)]
    assert refused(producers, me, 2) is UnknownProducerError
    assert producers.sum() == producers.recomputed_sum() != before
    assert registered(producers, b"a", 9) == 9, "another one"
