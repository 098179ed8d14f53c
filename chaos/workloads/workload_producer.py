"""A client that schedules and cancels timers, and records its requests and their answers."""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from chaos.history.history import History, OpOutcome, RunFolder, payload_of
from chaos.workloads.history_books import Books, headers_of
from timerclient import TimerClient
from timerclient.rows.rows import OnConflict
from timerclient.rows.scheduled_timers import Timers
from timerclient.values.errors import OutcomeForgotten, OutcomeUnknown, TimerError, Unavailable

NAMED_S: Final = 30.0
"""A request with an id is retried for at most this time."""


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def outcome_of(error: TimerError) -> OpOutcome:
    """Return the outcome of an operation that raised this error, as far as the client knows."""
    certain = error.outcome_known and not isinstance(error, OutcomeForgotten)
    return OpOutcome.FAIL if certain else OpOutcome.UNKNOWN


class RecordedRequest:
    """One request in a history: a line before it is sent, and a line when it has ended."""

    def __init__(self, history: History, op: str, **named: Any) -> None:
        """Record a request that is about to be sent. `named`: its fields."""
        self._history, self._op = history, op
        self._start_ms = now_ms()
        self._named = named | {"request": history.asks(op, start_ms=self._start_ms, **named)}

    def ended(self, error: BaseException | None = None, **answer: Any) -> OpOutcome:
        """Record the answer, or the error; return the outcome.

        Raises:
            BaseException: the error, if it is not the cluster's.
        """
        outcome = OpOutcome.OK
        if isinstance(error, TimerError):
            outcome = outcome_of(error)
            answer["detail"] = repr(error)
        elif error is not None:
            raise error
        self.ended_with(outcome, **answer)
        return outcome

    def ended_with(self, outcome: OpOutcome, **answer: Any) -> None:
        """Record an outcome."""
        span_ms, line = (self._start_ms, now_ms()), self._named | answer
        self._history.change(self._op, span_ms=span_ms, outcome=outcome, **line)


class RecordingProducer:
    """Schedules timers in one topic. Any thread may use it. `close` does not close the client."""

    def __init__(
        self, run: RunFolder, name: str, client: TimerClient, books: Books, *, topic: str
    ) -> None:
        self.client = client
        """May be replaced. Requests in flight stay with the old client."""
        self.last_due_ms = 0
        """Due time of the last timer that is expected within the run, in Unix milliseconds."""
        self._history = History(run, name)
        self._books = books
        self._topic = topic
        self._lock = threading.Lock()

    # ---- scheduling: each method returns the timers' ids; empty if no success is known

    def batch(
        self,
        marks: Sequence[int],
        due_ms: Sequence[int],
        *,
        expected: bool = True,
        timeout_s: float | None = None,
        traits: Sequence[tuple[str | None, int]] = (),
    ) -> list[str]:
        """Schedule timers in one request. `expected`: the timers are due within the run.

        `traits`: ordering key and priority of each timer; empty: none has them.
        """
        payloads = [*map(self._payload, marks)]
        more: dict[str, Any] = {}
        if traits:
            self._books.with_traits(marks, traits)
            names = ("ordering_keys", "priorities")
            more = dict(zip(names, map(list, zip(*traits, strict=True)), strict=True))

        def schedule() -> list[str]:
            timers = self.client.schedule_batch(
                self._topic, payloads, due_ms=due_ms, timeout=timeout_s, **more
            )
            return timers.ids

        if expected:
            self.will_be_due(max(due_ms))
        return self._called(marks, due_ms, schedule, **more)

    def upsert(
        self,
        marks: Sequence[int],
        due_ms: Sequence[int],
        keys: Sequence[str | None],
        on_conflict: OnConflict,
    ) -> list[str]:
        """Schedule timers with keys; return the ids of the new timers."""
        payloads = [*map(self._payload, marks)]
        self.will_be_due(max(due_ms))
        self._books.keyed(marks, keys)
        request = self._begun(marks, due_ms, keys=[*keys], on_conflict=on_conflict)
        try:
            timers = self.client.schedule_batch(
                self._topic, payloads, due_ms=due_ms, keys=keys, on_conflict=on_conflict,
                headers=[*map(headers_of, marks)],
            )  # fmt: skip
        except TimerError as error:
            self._ended(request, marks, error)
            return []
        results = [result.name for result in timers.results]
        none = ("REJECTED", "NOT_PENDING")
        ids = [None if r in none else i for i, r in zip(timers.ids, results, strict=True)]
        self._ended(request, marks, ids, results=results, existing=timers.existing)
        new = ("SCHEDULED", "REPLACED")
        return [i for i, result in zip(timers.ids, results, strict=True) if result in new]

    def named(
        self, marks: Sequence[int], due_ms: Sequence[int], request_id: str, *, patience_s: float
    ) -> list[str]:
        """Schedule timers in one request with an id, and retry it until it is answered.

        The first attempt has a timeout of `patience_s`, each later one twice as much. The answered
        request is sent once more and has to return the same ids. All attempts schedule one set of
        timers.

        Raises:
            AssertionError: the repetition returned other ids.
        """
        payloads = [*map(self._payload, marks)]
        give_up_s = time.monotonic() + NAMED_S

        def ask(timeout_s: float) -> list[str]:
            return self.client.schedule_batch(
                self._topic, payloads, due_ms=due_ms, request_id=request_id, timeout=timeout_s
            ).ids

        def schedule() -> list[str]:
            doubt: TimerError | None = None
            wait_s = patience_s
            while doubt is None or time.monotonic() < give_up_s:
                try:
                    ids = ask(wait_s)
                except (OutcomeUnknown, Unavailable) as error:
                    doubt, wait_s = error, 2 * wait_s
                    continue
                except TimerError as error:
                    raise OutcomeUnknown(
                        str(error)
                    ) from doubt  # an earlier attempt may have scheduled the timers
                with suppress(TimerError):  # an error does not change the first answer
                    assert ask(NAMED_S) == ids, (request_id, ids)
                return ids
            raise OutcomeUnknown(f"not answered within {NAMED_S:g} s") from doubt

        self.will_be_due(max(due_ms))
        return self._called(marks, due_ms, schedule)

    def single(self, mark: int, delay_s: float) -> list[str]:
        """Schedule one timer with a delay."""
        payload, delay = self._payload(mark), timedelta(seconds=delay_s)

        def schedule() -> list[str]:
            return [self.client.schedule(self._topic, payload, delay=delay).id]

        self.will_be_due(now_ms() + int(1000 * delay_s))
        return self._called([mark], None, schedule, delay_ms=round(1000 * delay_s))

    def submit(
        self,
        marks: Sequence[int],
        due_ms: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> "Future[Timers]":
        """Send one request without waiting; it is recorded when it ends."""
        payloads = [*map(self._payload, marks)]
        self.will_be_due(max(due_ms))
        request = self._begun(marks, due_ms)
        try:
            future = self.client.submit_batch(
                self._topic, payloads, due_ms=due_ms, timeout=timeout_s
            )
        except TimerError as error:
            future = Future()
            future.set_exception(error)

        def answered(future: "Future[Timers]") -> None:
            with self._books.noting_failure():
                error = future.exception()
                self._ended(request, marks, error if error is not None else future.result().ids)

        future.add_done_callback(answered)
        return future

    def _payload(self, mark: int) -> bytes:
        return payload_of(mark, self._books.payload_size)

    def will_be_due(self, due_ms: int) -> None:
        """Let the workload wait at least until this due time before its end."""
        with self._lock:
            self.last_due_ms = max(self.last_due_ms, due_ms)

    def _called(
        self, marks: Sequence[int], due_ms: Sequence[int] | None, call: Callable[[], list[str]],
        **more: Any,
    ) -> list[str]:  # fmt: skip
        request = self._begun(marks, due_ms, **more)
        try:
            ids = call()
        except TimerError as error:
            self._ended(request, marks, error)
            return []
        self._ended(request, marks, ids)
        return ids

    def _begun(
        self, marks: Sequence[int], due_ms: Sequence[int] | None, **more: Any
    ) -> RecordedRequest:
        named = {"topic": self._topic, "marks": [*marks], "due_ms": due_ms and [*due_ms]}
        return RecordedRequest(self._history, "schedule", **named, **more)

    def _ended(
        self, request: RecordedRequest, marks: Sequence[int],
        known: "Sequence[str | None] | BaseException", **told: Any,
    ) -> None:  # fmt: skip
        """Record the ids of a request's timers, or its error."""
        told["payload_crcs"] = [zlib.crc32(self._payload(mark)) for mark in marks]
        error = known if isinstance(known, BaseException) else None
        ids = None if isinstance(known, BaseException) else [*known]
        self._books.answered(marks, request.ended(error, ids=ids, **told))

    # ---- cancelling

    def cancel(self, ids: Sequence[str]) -> bool:
        """Cancel one timer singly, or several by a list.

        Returns:
            False if the request was refused and had no effect. True: it succeeded, or may have.
        """
        request = RecordedRequest(self._history, "cancel", ids=[*ids])
        try:
            if len(ids) == 1:
                results = [self.client.cancel(ids[0]).name]
            else:
                results = [result.name for result in self.client.cancel_batch(ids)]
        except TimerError as error:
            return request.ended(error, results=None) is not OpOutcome.FAIL
        request.ended(results=results)
        return True

    def close(self) -> None:
        """Close the history. Close the client first."""
        self._history.close()
