"""The future of an ack, whose parts are made at the first wait of a thread."""

import asyncio
import concurrent.futures
import copy
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any

import pytest

from timerclient.rows import messages
from timerclient.rows.messages import Acking
from timerclient.values.errors import LeaseLost
from timerclient.values.results import AckResult

DEADLINE_S = 60.0


@pytest.fixture
def nervous() -> Iterator[None]:
    """Let threads change places after every few steps."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def acked() -> Acking[AckResult]:
    acking: Acking[AckResult] = Acking()
    acking.set_result(AckResult.ACKED)
    return acking


def failed() -> Acking[AckResult]:
    acking: Acking[AckResult] = Acking()
    acking.set_exception(LeaseLost.of([7], 1))
    return acking


def test_a_settled_future_has_no_parts_until_they_are_used() -> None:
    acking = acked()
    assert not vars(acking).keys() & {*messages._PARTS}
    assert acking.done()
    assert acking.result() is AckResult.ACKED
    assert acking.exception() is None
    assert not acking.cancelled()
    assert not acking.running()
    with pytest.raises(LeaseLost):
        failed().result()
    assert isinstance(failed().exception(), LeaseLost)
    with pytest.raises(AttributeError, match="no attribute colour"):
        _ = acking.colour


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [None, LeaseLost.of([7], 1)])
def test_failure_callback_is_called_once_for_a_failure_and_a_success_needs_no_parts(
    whole: bool, late: bool, error: LeaseLost | None
) -> None:
    acking, seen = Acking[AckResult](), list[BaseException | None]()

    def settle() -> None:
        if error is None:
            acking.set_result(AckResult.ACKED)
        else:
            acking.set_exception(error)

    def failed(future: "Future[Any]") -> None:
        seen.append(future.exception())
        raise RuntimeError("is logged")

    if whole:
        _ = acking._condition
    if late:
        settle()
    acking.add_failure_callback(failed)
    assert acking._has_parts == (whole or late)
    if not late:
        settle()
        with pytest.raises(InvalidStateError):
            settle()
    assert seen == ([] if error is None else [error])


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_future_is_settled_once(looked_at: bool) -> None:
    for made in (acked, failed):
        acking = made()
        if looked_at:
            acking.exception()
        with pytest.raises(InvalidStateError):
            acking.set_result(AckResult.EXPIRED)
        with pytest.raises(InvalidStateError):
            acking.set_exception(ValueError())


class EmptyCallback(list[Any]):
    """A callable that is false."""

    calls = 0

    def __call__(self, _: object) -> None:
        self.calls += 1


def test_many_futures_are_settled_as_each_alone() -> None:
    plain, whole, with_callback, with_failure_callback = ackings = [
        Acking[AckResult]() for _ in range(4)
    ]
    called, failed = EmptyCallback(), list[Future[Any]]()
    _ = whole._condition
    with_callback.add_done_callback(called)
    with_failure_callback.add_failure_callback(failed.append)
    Acking.settle_acked(ackings)
    assert [acking.result(0) for acking in ackings] == [AckResult.ACKED] * 4
    assert [acking._has_parts for acking in (plain, whole)] == [False, True]
    assert (called.calls, failed) == (1, [])
    with pytest.raises(InvalidStateError):
        Acking.settle_acked([plain])


def test_functions_of_concurrent_futures_take_it() -> None:
    pending: Acking[AckResult] = Acking()
    done, not_done = concurrent.futures.wait([acked(), failed(), pending], timeout=0)
    assert (len(done), not_done) == (2, {pending})
    with pytest.raises(TimeoutError):
        pending.result(timeout=0)
    called: list[Future[Any]] = []
    pending.add_done_callback(called.append)
    pending.add_done_callback(lambda _: called.append(pending))
    pending.set_result(AckResult.ACKED)
    late = acked()
    late.add_done_callback(called.append)
    assert called == [pending, pending, late]
    assert {*concurrent.futures.as_completed([pending, late], DEADLINE_S)} == {pending, late}


async def test_it_is_awaited_before_and_after_its_outcome() -> None:
    pending: Acking[AckResult] = Acking()
    waiting = asyncio.ensure_future(asyncio.wait_for(pending, DEADLINE_S))
    await asyncio.sleep(0)
    pending.set_result(AckResult.EXPIRED)
    assert await waiting is AckResult.EXPIRED
    assert await acked() is AckResult.ACKED
    with pytest.raises(LeaseLost):
        await failed()


async def test_outcomes_reach_those_who_await_them_already_and_need_no_parts() -> None:
    async def outcome(acking: Acking[AckResult]) -> AckResult:
        return await acking

    well, lost = Acking[AckResult](), Acking[AckResult]()
    waiting = [asyncio.ensure_future(outcome(each)) for each in (well, lost)]
    await asyncio.sleep(0)
    assert well._callback
    assert lost._callback
    well.set_result(AckResult.ACKED)
    lost.set_exception(LeaseLost.of([7], 1))
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[0] is AckResult.ACKED
    assert isinstance(results[1], LeaseLost)
    assert not well._has_parts


@pytest.mark.usefixtures("nervous")
async def test_outcome_from_another_thread_wakes_all_that_await_it() -> None:
    async def outcome(acking: Acking[AckResult]) -> AckResult:
        return await acking

    ackings = [Acking[AckResult]() for _ in range(500)]
    waiting = [asyncio.ensure_future(outcome(each)) for each in ackings for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()

    def settle() -> None:
        for acking in ackings:
            acking.set_result(AckResult.ACKED)

    thread = threading.Thread(target=settle)
    thread.start()
    async with asyncio.timeout(DEADLINE_S):
        cancelled, *others = await asyncio.gather(*waiting, return_exceptions=True)
    thread.join()
    assert isinstance(cancelled, asyncio.CancelledError)
    assert others == [AckResult.ACKED] * (len(waiting) - 1)


def test_outcome_after_the_end_of_the_loop_that_awaited_it_reaches_the_callbacks() -> None:
    acking, called = Acking[AckResult](), list[Future[Any]]()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(acking, 0.001))
    acking.add_done_callback(called.append)
    acking.set_result(AckResult.ACKED)
    assert called == [acking]


@pytest.mark.usefixtures("nervous")
@pytest.mark.parametrize(
    "look",
    [
        lambda acking: acking.result(DEADLINE_S),
        lambda acking: acking.exception(DEADLINE_S),
        lambda acking: concurrent.futures.wait([acking], DEADLINE_S).done.pop(),
        lambda acking: acking.add_done_callback(lambda _: None),
    ],
    ids=["result", "exception", "wait", "callback"],
)
@pytest.mark.parametrize("as_many", [False, True])
def test_a_look_meets_the_outcome_at_any_moment(
    look: Callable[[Acking[Any]], object], as_many: bool
) -> None:
    ackings = [Acking[AckResult]() for _ in range(2_000)]
    together = threading.Barrier(2)
    called: list[Future[Any]] = []
    errors: list[BaseException] = []

    def settle() -> None:
        for acking in ackings:
            together.wait(DEADLINE_S)
            if as_many:
                Acking.settle_acked([acking])
            else:
                acking.set_result(AckResult.ACKED)

    def look_at_all() -> None:
        try:
            for acking in ackings:
                together.wait(DEADLINE_S)
                acking.add_done_callback(called.append)
                look(acking)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=each) for each in (settle, look_at_all)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert {*called} == {*ackings}
    assert len(called) == len(ackings)


def test_a_signal_or_finalizer_may_look_at_a_future_while_its_thread_settles_one() -> None:
    def interrupted() -> None:
        with messages._outcome_lock:
            acked().exception()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_waits_for_an_outcome_that_it_never_gets(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="cannot copy or pickle Acking"):
        copied(Acking())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_while_a_future_is_settled_leaves_the_child_free() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with messages._outcome_lock:
            held.set()
            free.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(DEADLINE_S)
    child = os.fork()
    if child == 0:
        _ = acked()
        os._exit(7)
    free.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
