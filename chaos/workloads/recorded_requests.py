"""The requests of one workload: each is recorded before it is sent, and when it has ended.

A change of existing timers expects no fate of any of them. A request without an answer may have
taken effect or not, and other clients change the same timers. The audit judges all of them.
"""

import json
import time
import zlib
from asyncio import gather
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from chaos.history.history import History, OpOutcome, RunFolder, now_ms, payload_of
from chaos.workloads.history_books import Books, headers_of
from timerclient import AsyncTimerClient
from timerclient.client.group_calls import Start
from timerclient.client.topic_calls import namespace_of
from timerclient.rows.pending_timers import Changed, Rescheduled, Where
from timerclient.values.errors import OutcomeForgotten, OutcomeUnknown, TimerError, Unavailable
from timerclient.values.policy_names import CatchUp, PolicyFields

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


def outcome_of(error: TimerError) -> OpOutcome:
    """Return the outcome of an operation that raised this error, as far as the client knows."""
    certain = error.outcome_known and not isinstance(error, OutcomeForgotten)
    return OpOutcome.FAIL if certain else OpOutcome.UNKNOWN


@dataclass(slots=True)
class RequestEnd:
    """The end of a request."""

    outcome: OpOutcome = OpOutcome.OK
    error: TimerError | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the line: those of the answer, or `detail`, the error."""

    @property
    def ok(self) -> bool:
        """Whether the request certainly took effect."""
        return self.outcome is OpOutcome.OK

    @property
    def ids(self) -> list[str]:
        """The ids of the new timers; empty if none is known."""
        ids = self.fields.get("ids", [])
        results = self.fields.get("results", ["SCHEDULED"] * len(ids))
        return [id_ for id_, result in zip(ids, results, strict=True) if result in _NEW]


class RecordedRequests:
    """Sends requests about one topic, several at once. `close` does not close the client."""

    def __init__(
        self, run: RunFolder, name: str, client: AsyncTimerClient, books: Books, *, topic: str
    ) -> None:
        self.client = client
        """May be replaced. Requests in flight stay with the old client."""
        self.last_due_ms = 0
        """Due time of the last timer that is expected within the run, in Unix milliseconds."""
        self._history = History(run, name)
        self._books = books
        self._topic = topic

    # ---- scheduling

    async def batch(
        self, marks: Sequence[int], due_ms: Sequence[int], *, expected: bool = True,
        timeout_s: float | None = None, **columns: Any,
    ) -> RequestEnd:  # fmt: skip
        """Schedule timers in one request. Timers with keys have headers, too.

        `expected`: the timers are due within the run. `columns`: `keys`, `ordering_keys` and
        `priorities`, one for each timer; with keys also `on_conflict`.
        """
        content = {_CONTENT[name]: of for name, of in columns.items() if name in _CONTENT}
        more: dict[str, Any] = {}
        if "keys" in columns:
            more["headers"] = [*map(headers_of, marks)]
        self._books.expect(marks, **content, **more)
        if expected:
            self.will_be_due(max(due_ms))
        with self._schedules(marks, due_ms=due_ms, **columns) as ended:
            timers = await self.client.schedule_batch(
                self._topic, self._payloads(marks), due_ms=due_ms, timeout=timeout_s,
                **columns, **more,
            )  # fmt: skip
            ended.fields["ids"] = timers.ids
            if "keys" in columns:
                results = [result.name for result in timers.results]
                made = zip(timers.ids, results, strict=True)
                ids = [None if result in _WITHOUT_ID else id_ for id_, result in made]
                ended.fields |= {"ids": ids, "results": results, "existing": timers.existing}
        return ended

    async def send_named(
        self, marks: Sequence[int], due_ms: Sequence[int], request_id: str, *, patience_s: float
    ) -> RequestEnd:
        """Schedule timers in one request with an id, and retry it until it is answered.

        The first attempt has a timeout of `patience_s`, each later one twice as much. The answered
        request is sent once more and has to return the same ids. All attempts schedule one set of
        timers.

        Raises:
            AssertionError: the repetition returned other ids.
        """
        give_up_s = time.monotonic() + NAMED_S
        self.will_be_due(max(due_ms))

        async def ask(within_s: float) -> list[str]:
            timers = await self.client.schedule_batch(
                self._topic, self._payloads(marks), due_ms=due_ms, request_id=request_id,
                timeout=within_s,
            )  # fmt: skip
            return timers.ids

        with self._schedules(marks, due_ms=due_ms) as ended:
            doubt: TimerError | None = None
            while "ids" not in ended.fields:
                if doubt is not None and time.monotonic() >= give_up_s:
                    raise OutcomeUnknown(f"not answered within {NAMED_S:g} s") from doubt
                try:
                    ended.fields["ids"] = await ask(patience_s)
                except (OutcomeUnknown, Unavailable) as error:
                    doubt, patience_s = error, 2 * patience_s
                except TimerError as error:  # an earlier attempt may have scheduled the timers
                    raise OutcomeUnknown(str(error)) from doubt
            with suppress(TimerError):  # an error does not change the first answer
                again = await ask(NAMED_S)
                assert again == ended.fields["ids"], (request_id, again)
        return ended

    async def single(self, mark: int, delay_s: float) -> RequestEnd:
        """Schedule one timer with a delay."""
        [payload], delay = self._payloads([mark]), timedelta(seconds=delay_s)
        self.will_be_due(now_ms() + int(1000 * delay_s))
        with self._schedules([mark], due_ms=None, delay_ms=round(1000 * delay_s)) as ended:
            timer = await self.client.schedule(self._topic, payload, delay=delay)
            ended.fields["ids"] = [timer.id]
        return ended

    def will_be_due(self, due_ms: int) -> None:
        """Let the workload wait at least until this due time before its end."""
        self.last_due_ms = max(self.last_due_ms, due_ms)

    def _payloads(self, marks: Sequence[int]) -> list[bytes]:
        return [payload_of(mark, self._books.payload_size) for mark in marks]

    @contextmanager
    def _schedules(self, marks: Sequence[int], **named: Any) -> Iterator[RequestEnd]:
        """As `_records`, for a request for timers, which the books count when it ends."""
        with self._records("schedule", topic=self._topic, marks=[*marks], **named) as ended:
            ended.fields["payload_crcs"] = [*map(zlib.crc32, self._payloads(marks))]
            yield ended
        self._books.count_end(marks, ended.outcome)

    # ---- changes of timers

    async def cancel(self, ids: Sequence[str]) -> bool:
        """Cancel one timer singly, or several by a list.

        Returns:
            False if the request was refused and had no effect. True: it succeeded, or may have.
        """
        with self._records("cancel", ids=[*ids]) as ended:
            one = len(ids) == 1
            call = gather(self.client.cancel(ids[0])) if one else self.client.cancel_batch(ids)
            ended.fields["results"] = [result.name for result in await call]
        return ended.outcome is not OpOutcome.FAIL

    async def cancel_keys(self, keys: Sequence[str]) -> None:
        """Cancel the timers that have the keys."""
        with self._records("cancel", topic=self._topic, keys=[*keys]) as ended:
            results = await self.client.cancel_keys(self._topic, keys)
            ended.fields["results"] = [result.name for result in results]

    async def cancel_where(self, where: Where) -> None:
        """Cancel the timers that match a filter."""
        await self._by_filter("cancel", where, self.client.cancel_where(self._topic, **where))

    async def reschedule(self, ids: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """Change the due times of timers; return the new ids that are known."""
        call = self.client.reschedule_batch(ids, due_ms=due_ms)
        return await self._reschedule(call, ids=[*ids], due_ms=[*due_ms])

    async def reschedule_keys(self, keys: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """As `reschedule`, for the timers that have the keys."""
        call = self.client.reschedule_keys(self._topic, keys, due_ms=due_ms)
        return await self._reschedule(call, topic=self._topic, keys=[*keys], due_ms=[*due_ms])

    async def reschedule_where(self, where: Where, due_ms: int) -> None:
        """Give the timers that match a filter one other due time."""
        call = self.client.reschedule_where(self._topic, where, due_ms=due_ms)
        await self._by_filter("reschedule", where, call, due_ms=[due_ms])

    async def redrive(self, letters: str, most: int | None) -> None:
        """Redrive dead letters. If a part fails, the outcome of the whole is unknown."""
        with self._records("redrive", certain=False, topic=letters) as ended:
            ended.fields["changed"] = int(await self.client.redrive(letters, most))

    # ---- the topic, its groups and its series; each returns whether it certainly took effect

    async def pause(self) -> bool:
        """Pause the topic."""
        call = self.client.pause_topic(self._topic)
        return await self.change("policy", call, said={"paused": True})

    async def resume(self, catch_up: CatchUp) -> bool:
        """Resume the topic."""
        call = self.client.resume_topic(self._topic, catch_up=catch_up)
        return await self.change("policy", call, said={"paused": False, "catch_up": catch_up})

    async def rule(
        self, values: Mapping[str, int], *, among: Iterable[str], scope: str = TOPIC
    ) -> bool:
        """Set a scope's policy to these values; unset the other fields of `among`.

        The history names a namespace NAME/, and the cluster /.
        """
        unset = sorted({*among} - values.keys())
        namespace = namespace_of(self._topic)
        scopes: dict[str, tuple[str, dict[str, Any]]] = {
            TOPIC: (self._topic, {"topic": self._topic}),
            NAMESPACE: (f"{namespace}/", {"namespace": namespace}),
            CLUSTER: ("/", {"cluster": True}),
        }
        name, where = scopes[scope]
        call = self.client.alter_policies(cast("PolicyFields", values), unset=unset, **where)
        said = {**values, **dict.fromkeys(unset)}
        return await self.change("policy", call, topic=name, said=said)

    async def delete(self) -> bool:
        """Delete the topic."""
        with self._records("delete", topic=self._topic) as ended:
            if gone := await self.client.delete_topic(self._topic):
                ended.fields |= {"topic_id": gone.topic_id, "pending": gone.pending}
        return ended.ok

    async def seek(
        self, group: str, *, offset: int | None = None, time_ms: int | None = None,
        start: Start | None = None,
    ) -> bool:  # fmt: skip
        """Seek a group."""
        at = None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)
        to = 0 if start == "earliest" else offset
        named: dict[str, Any] = {} if to is None else {"to_offset": to}
        with self._records("seek", topic=self._topic, group=group, **named) as ended:
            sought = await self.client.seek_group(
                self._topic, group, offset=offset, time=at, start=start
            )
            ended.fields["group_id"] = sought.group_id
        return ended.ok

    async def change(self, op: str, call: Awaitable[object], **named: Any) -> bool:
        """Send a change whose answer says no more than that it was done.

        `named`: fields of the line, as docs/history-format.md has them. `said` is a mapping.
        """
        if "said" in named:
            named["said"] = _text(named["said"])
        with self._records(op, **{"topic": self._topic} | named) as ended:
            await call
        return ended.ok

    # ----

    def close(self) -> None:
        """Close the history. Close the client first."""
        self._history.close()

    async def _reschedule(self, call: Awaitable[list[Rescheduled]], **named: Any) -> list[str]:
        with self._records("reschedule", **named) as ended:
            results = await call
            ended.fields["results"] = [one.result.name for one in results]
            ended.fields["new_ids"] = [one.timer.id if one.timer else None for one in results]
        return [each for each in ended.fields.get("new_ids", []) if each is not None]

    async def _by_filter(
        self, op: str, where: Where, call: Awaitable[Changed], **named: Any
    ) -> None:
        """Change by filter. If a page fails after another, the outcome of the whole is unknown.

        It is unknown, too, if the number in the answer may be too low.
        """
        names = {"due_from": "due_from_ms", "due_to": "due_to_ms", "key_prefix": "key_prefix"}
        named |= {names[name]: value for name, value in where.items()}
        with self._records(op, certain=False, topic=self._topic, **named) as ended:
            changed = await call
            if not changed.exact:
                raise OutcomeUnknown(f"{changed} timers or more: the answer of a page was lost")
            ended.fields["changed"] = int(changed)

    @contextmanager
    def _records(self, op: str, *, certain: bool = True, **named: Any) -> Iterator[RequestEnd]:
        """Record a request that the block sends, with its fields, and its end.

        The block adds the fields of the answer. A TimerError ends the block, not its caller; the
        outcome is unknown then if not `certain`.
        """
        ended, start_ms = RequestEnd(), now_ms()
        named["request"] = self._history.asks(op, start_ms=start_ms, **named)
        try:
            yield ended
        except TimerError as error:
            ended.outcome = outcome_of(error) if certain else OpOutcome.UNKNOWN
            ended.error, ended.fields["detail"] = error, repr(error)
        self._history.change(
            op, span_ms=(start_ms, now_ms()), outcome=ended.outcome, **named, **ended.fields
        )


def _text(said: Mapping[str, Any]) -> str:
    """Return the fields of a policy or a series as the text that a history has."""
    fields = {**said}
    if "every" in fields:
        fields["every_ms"] = round(1000 * fields.pop("every"))
    return json.dumps(fields, sort_keys=True)
