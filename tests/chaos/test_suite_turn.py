"""Turns: one at a time, in the order in which they were asked for."""

import threading
from collections.abc import Callable

import pytest

from chaos.suite.stage.turn import Turn
from tests.chaos.turns import until_asked

WAIT_S = 60.0


def thread(work: Callable[[], object]) -> threading.Thread:
    started = threading.Thread(target=work, daemon=True)
    started.start()
    return started


def test_who_comes_again_does_not_pass_by_who_waits() -> None:
    turn, order = Turn(), list[str]()

    def once() -> None:
        with turn:
            order.append("who waited")

    with turn:
        other = thread(once)
        until_asked(turn, 2)
    with turn:
        order.append("who comes again")
    other.join(WAIT_S)
    assert order == ["who waited", "who comes again"]


def test_what_is_lent_is_anothers_meanwhile_and_comes_back() -> None:
    turn, order, inside = Turn(), list[str](), threading.Event()

    def once() -> None:
        with turn:
            inside.set()
            order.append("other")

    with turn:
        other = thread(once)
        until_asked(turn, 2)
        assert not inside.is_set()
        with turn.lent():
            assert inside.wait(WAIT_S)
        order.append("lender")
        late = thread(once)
        until_asked(turn, 4)
        assert order == ["other", "lender"]
    other.join(WAIT_S)
    late.join(WAIT_S)
    assert order == ["other", "lender", "other"]


def test_it_comes_back_to_a_lender_who_failed() -> None:
    turn = Turn()

    def fail() -> None:
        with turn.lent():
            raise ValueError("told to")

    with turn:
        with pytest.raises(ValueError, match="told to"):
            fail()
        assert turn._holder == threading.get_ident()
    with turn:
        pass


def test_who_has_none_lends_none() -> None:
    turn = Turn()
    with turn.lent(), turn:
        pass

    def lend() -> None:
        with turn.lent():
            pass

    with turn:
        other = thread(lend)
        other.join(WAIT_S)
        assert not other.is_alive()
        assert turn._holder == threading.get_ident()
