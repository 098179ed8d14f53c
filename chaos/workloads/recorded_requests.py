"""The requests of one workload: each is recorded before it is sent, and when it has ended.

A change of existing timers expects no fate of any of them. A request without an answer may have
taken effect or not, and other clients change the same timers. The audit judges all of them.
"""

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, cast

from chaos.history.history import History, OpOutcome, RunFolder, payload_of
from chaos.workloads.history_books import Books, headers_of
from timerclient import TimerClient
from timerclient.client.group_calls import Start
from timerclient.client.topic_calls import namespace_of
from timerclient.rows.pending_timers import Changed, Rescheduled, Where
from timerclient.rows.scheduled_timers import Timers
from timerclient.rows.series_fields import SeriesOptions
from timerclient.values.errors import OutcomeForgotten, OutcomeUnknown, TimerError, Unavailable
from timerclient.values.policy_names import CatchUp, PolicyFields
from timerclient.values.results import CancelResult

NAMED_S: Final = 30.0
"""A request with an id is retried for at most this time."""
TOPIC: Final = "topic"
NAMESPACE: Final = "namespace"
CLUSTER: Final = "cluster"
_NEW: Final = ("SCHEDULED", "REPLACED")
_WITHOUT_ID: Final = ("REJECTED", "NOT_PENDING")
"""Names of results: a timer was made; there is no id."""
_CONTENT: Final = {"keys": "key", "ordering_keys": "ordering_key", "priorities": "priority"}
"""Columns of a request -> fields of Content."""

Answer = dict[str, Any]
"""Fields of a line: the answer to a request."""


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def outcome_of(error: TimerError) -> OpOutcome:
    """Return the outcome of an operation that raised this error, as far as the client knows."""
    certain = error.outcome_known and not isinstance(error, OutcomeForgotten)
    return OpOutcome.FAIL if certain else OpOutcome.UNKNOWN


class Ended(NamedTuple):
    """The end of a request."""

    outcome: OpOutcome
    answer: Answer

    @property
    def ok(self) -> bool:
        """Whether the request certainly took effect."""
        return self.outcome is OpOutcome.OK


class RecordedRequests:
    """Sends requests about one topic. Any thread may use it. `close` does not close the client."""

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

    # ---- scheduling: each method returns the ids of the new timers; empty if none is known

    def batch(
        self, marks: Sequence[int], due_ms: Sequence[int], *, expected: bool = True,
        timeout_s: float | None = None, **columns: Any,
    ) -> list[str]:  # fmt: skip
        """Schedule timers in one request. Timers with keys have headers, too.

        `expected`: the timers are due within the run. `columns`: `keys`, `ordering_keys` and
        `priorities`, one for each timer; with keys also `on_conflict`.
        """
        content = {_CONTENT[name]: of for name, of in columns.items() if name in _CONTENT}
        more = {"headers": [*map(headers_of, marks)]} if "keys" in columns else {}
        self._books.expect(marks, **content, **more)
        if expected:
            self.will_be_due(max(due_ms))
        call = self._batched(marks, due_ms, timeout=timeout_s, **columns, **more)

        def answer() -> Answer:
            timers = call()
            if "keys" not in columns:
                return {"ids": timers.ids}
            results = [result.name for result in timers.results]
            made = zip(timers.ids, results, strict=True)
            ids = [None if result in _WITHOUT_ID else id_ for id_, result in made]
            return {"ids": ids, "results": results, "existing": timers.existing}

        return self._schedule(marks, answer, due_ms=due_ms, **columns)

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
        give_up_s = time.monotonic() + NAMED_S
        self.will_be_due(max(due_ms))

        def ask(timeout_s: float) -> list[str]:
            return self._batched(marks, due_ms, request_id=request_id, timeout=timeout_s)().ids

        def answer() -> Answer:
            doubt: TimerError | None = None
            wait_s = patience_s
            while doubt is None or time.monotonic() < give_up_s:
                try:
                    ids = ask(wait_s)
                except (OutcomeUnknown, Unavailable) as error:
                    doubt, wait_s = error, 2 * wait_s
                    continue
                except TimerError as error:  # an earlier attempt may have scheduled the timers
                    raise OutcomeUnknown(str(error)) from doubt
                with suppress(TimerError):  # an error does not change the first answer
                    assert ask(NAMED_S) == ids, (request_id, ids)
                return {"ids": ids}
            raise OutcomeUnknown(f"not answered within {NAMED_S:g} s") from doubt

        return self._schedule(marks, answer, due_ms=due_ms)

    def single(self, mark: int, delay_s: float) -> list[str]:
        """Schedule one timer with a delay."""
        [payload], delay = self._payloads([mark]), timedelta(seconds=delay_s)
        self.will_be_due(now_ms() + int(1000 * delay_s))

        def answer() -> Answer:
            return {"ids": [self.client.schedule(self._topic, payload, delay=delay).id]}

        return self._schedule([mark], answer, due_ms=None, delay_ms=round(1000 * delay_s))

    def submit(
        self, marks: Sequence[int], due_ms: Sequence[int], *, timeout_s: float | None = None
    ) -> "Future[Timers]":
        """Send one request without waiting; it is recorded when it ends."""
        payloads, end = self._payloads(marks), self._asked_for(marks, due_ms=due_ms)
        self.will_be_due(max(due_ms))
        try:
            future = self.client.submit_batch(
                self._topic, payloads, due_ms=due_ms, timeout=timeout_s
            )
        except TimerError as error:
            future = Future()
            future.set_exception(error)

        def answered(future: "Future[Timers]") -> None:
            with self._books.noting_failure():
                end(lambda: {"ids": future.result().ids})

        future.add_done_callback(answered)
        return future

    def will_be_due(self, due_ms: int) -> None:
        """Let the workload wait at least until this due time before its end."""
        with self._lock:
            self.last_due_ms = max(self.last_due_ms, due_ms)

    def _payloads(self, marks: Sequence[int]) -> list[bytes]:
        return [payload_of(mark, self._books.payload_size) for mark in marks]

    def _batched(
        self, marks: Sequence[int], due_ms: Sequence[int], **more: Any
    ) -> Callable[[], Timers]:
        payloads = self._payloads(marks)
        return partial(self.client.schedule_batch, self._topic, payloads, due_ms=due_ms, **more)

    def _schedule(
        self, marks: Sequence[int], call: Callable[[], Answer], **named: Any
    ) -> list[str]:
        answer = self._asked_for(marks, **named)(call).answer
        ids = answer.get("ids", [])
        results = answer.get("results", ["SCHEDULED"] * len(ids))
        return [id_ for id_, result in zip(ids, results, strict=True) if result in _NEW]

    def _asked_for(
        self, marks: Sequence[int], **named: Any
    ) -> Callable[[Callable[[], Answer]], Ended]:
        """As `_begin`, for a request for timers, which the books count when it ends."""
        end = self._begin("schedule", topic=self._topic, marks=[*marks], **named)
        crcs = [*map(zlib.crc32, self._payloads(marks))]

        def ended(call: Callable[[], Answer]) -> Ended:
            done = end(call, payload_crcs=crcs)
            self._books.answered(marks, done.outcome)
            return done

        return ended

    # ---- changes of timers

    def cancel(self, ids: Sequence[str]) -> bool:
        """Cancel one timer singly, or several by a list.

        Returns:
            False if the request was refused and had no effect. True: it succeeded, or may have.
        """

        def cancel() -> Answer:
            if len(ids) == 1:
                return _results([self.client.cancel(ids[0])])
            return _results(self.client.cancel_batch(ids))

        return self._send("cancel", cancel, ids=[*ids]).outcome is not OpOutcome.FAIL

    def cancel_keys(self, keys: Sequence[str]) -> None:
        """Cancel the timers that have the keys."""
        call = partial(self.client.cancel_keys, self._topic, keys)
        self._send("cancel", lambda: _results(call()), topic=self._topic, keys=[*keys])

    def cancel_where(self, where: Where) -> None:
        """Cancel the timers that match a filter."""
        self._by_filter("cancel", where, lambda: self.client.cancel_where(self._topic, **where))

    def reschedule(self, ids: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """Change the due times of timers; return the new ids that are known."""
        call = partial(self.client.reschedule_batch, ids, due_ms=due_ms)
        return self._moved(call, ids=[*ids], due_ms=[*due_ms])

    def reschedule_keys(self, keys: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """As `reschedule`, for the timers that have the keys."""
        call = partial(self.client.reschedule_keys, self._topic, keys, due_ms=due_ms)
        return self._moved(call, topic=self._topic, keys=[*keys], due_ms=[*due_ms])

    def reschedule_where(self, where: Where, due_ms: int) -> None:
        """Give the timers that match a filter one other due time."""
        call = partial(self.client.reschedule_where, self._topic, where, due_ms=due_ms)
        self._by_filter("reschedule", where, call, due_ms=[due_ms])

    def redrive(self, letters: str, most: int | None) -> None:
        """Redrive dead letters. If a part fails, the outcome of the whole is unknown."""
        call = partial(self.client.redrive, letters, most)
        self._send("redrive", lambda: {"changed": int(call())}, certain=False, topic=letters)

    # ---- the topic, its groups and its series; each returns whether it certainly took effect

    def pause(self) -> bool:
        """Pause the topic."""
        return self._ruled({"paused": True}, partial(self.client.pause_topic, self._topic))

    def resume(self, catch_up: CatchUp) -> bool:
        """Resume the topic."""
        call = partial(self.client.resume_topic, self._topic, catch_up=catch_up)
        return self._ruled({"paused": False, "catch_up": catch_up}, call)

    def rule(self, said: Mapping[str, int], *, among: Iterable[str], scope: str = TOPIC) -> bool:
        """Set a scope's policy to these values; unset the other fields of `among`.

        The history names a namespace NAME/, and the cluster /.
        """
        unset = sorted({*among} - said.keys())
        namespace = namespace_of(self._topic)
        scopes: dict[str, tuple[str, dict[str, Any]]] = {
            TOPIC: (self._topic, {"topic": self._topic}),
            NAMESPACE: (f"{namespace}/", {"namespace": namespace}),
            CLUSTER: ("/", {"cluster": True}),
        }
        name, where = scopes[scope]
        fields = cast("PolicyFields", said)
        call = partial(self.client.alter_policies, fields, unset=unset, **where)
        return self._ruled({**said, **dict.fromkeys(unset)}, call, name)

    def delete(self) -> bool:
        """Delete the topic."""

        def delete() -> Answer:
            gone = self.client.delete_topic(self._topic)
            return {"topic_id": gone.topic_id, "pending": gone.pending} if gone else {}

        return self._send("delete", delete, topic=self._topic).ok

    def seek(
        self, group: str, *, offset: int | None = None, time_ms: int | None = None,
        start: Start | None = None,
    ) -> bool:  # fmt: skip
        """Seek a group."""
        at = None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)
        call = partial(
            self.client.seek_group, self._topic, group, offset=offset, time=at, start=start
        )
        to = 0 if start == "earliest" else offset
        named: Answer = {"topic": self._topic, "group": group}
        if to is not None:
            named["to_offset"] = to
        return self._send("seek", lambda: {"group_id": call().group_id}, **named).ok

    def delete_group(self, group: str) -> bool:
        """Delete a group."""
        call = partial(self.client.delete_group, self._topic, group)
        return self._done("delete_group", call, group=group)

    def create_series(self, key: str, payload: bytes, options: SeriesOptions) -> bool:
        """Create a series."""
        call = partial(self.client.create_series, self._topic, key, payload, **options)
        return self._done("create_series", call, key=key, said=_text(options))

    def alter_series(self, key: str, options: SeriesOptions) -> bool:
        """Change fields of a series."""
        call = partial(self.client.alter_series, self._topic, key, **options)
        return self._done("alter_series", call, key=key, said=_text(options))

    def pause_series(self, key: str, *, paused: bool) -> bool:
        """Pause or resume a series."""
        change = self.client.pause_series if paused else self.client.resume_series
        call = partial(change, self._topic, key)
        return self._done("alter_series", call, key=key, said=_text({"paused": paused}))

    def delete_series(self, key: str) -> bool:
        """Delete a series."""
        call = partial(self.client.delete_series, self._topic, key)
        return self._done("delete_series", call, key=key)

    # ----

    def close(self) -> None:
        """Close the history. Close the client first."""
        self._history.close()

    def _moved(self, call: Callable[[], list[Rescheduled]], **named: Any) -> list[str]:
        def move() -> Answer:
            told = call()
            new = [one.timer.id if one.timer else None for one in told]
            return {"results": [one.result.name for one in told], "new_ids": new}

        answer = self._send("reschedule", move, **named).answer
        return [each for each in answer.get("new_ids", []) if each is not None]

    def _by_filter(self, op: str, where: Where, call: Callable[[], Changed], **named: Any) -> None:
        """Change by filter. If a page fails after another, the outcome of the whole is unknown.

        It is unknown, too, if the number in the answer may be too low.
        """
        names = {"due_from": "due_from_ms", "due_to": "due_to_ms", "key_prefix": "key_prefix"}
        picked = {names[name]: value for name, value in where.items()}

        def change() -> Answer:
            changed = call()
            if not changed.exact:
                raise OutcomeUnknown(f"{changed} timers or more: the answer of a page was lost")
            return {"changed": int(changed)}

        self._send(op, change, certain=False, topic=self._topic, **picked, **named)

    def _ruled(self, said: Mapping[str, Any], call: Callable[[], object], name: str = "") -> bool:
        return self._done("policy", call, topic=name or self._topic, said=_text(said))

    def _done(self, op: str, call: Callable[[], object], **named: Any) -> bool:
        """Send a change whose answer says no more than that it was done."""

        def change() -> Answer:
            call()
            return {}

        return self._send(op, change, **{"topic": self._topic} | named).ok

    def _send(
        self, op: str, call: Callable[[], Answer], *, certain: bool = True, **named: Any
    ) -> Ended:
        return self._begin(op, **named)(call, certain=certain)

    def _begin(self, op: str, **named: Any) -> Callable[..., Ended]:
        """Record a request that is about to be sent, with its fields.

        Returns:
            A function that calls its argument for the answer, records the end and returns it. The
            outcome of an error is unknown if not `certain`.
        """
        start_ms = now_ms()
        named["request"] = self._history.asks(op, start_ms=start_ms, **named)

        def end(call: Callable[[], Answer], *, certain: bool = True, **more: Any) -> Ended:
            try:
                outcome, answer = OpOutcome.OK, call()
            except TimerError as error:
                outcome = outcome_of(error) if certain else OpOutcome.UNKNOWN
                answer = {"detail": repr(error)}
            fields = {**named, **more, **answer}
            self._history.change(op, span_ms=(start_ms, now_ms()), outcome=outcome, **fields)
            return Ended(outcome, answer)

        return end


def _results(answers: Iterable[CancelResult]) -> Answer:
    return {"results": [answer.name for answer in answers]}


def _text(said: Mapping[str, Any]) -> str:
    """Return the fields of a policy or a series as the text that a history has."""
    fields = {**said}
    if "every" in fields:
        fields["every_ms"] = round(1000 * fields.pop("every"))
    return json.dumps(fields, sort_keys=True)
