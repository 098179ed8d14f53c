"""A client that changes existing timers, by id, key and filter, and their topic and its groups.

It records the answers, and expects no fate of any single timer. A change without an answer may have
taken effect or not, and other clients change the same timers. The offsets of fired messages have no
gap in their queue; the audit checks the rest.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

from chaos.history.history import History, OpOutcome, RunFolder
from chaos.workloads.workload_producer import RecordedRequest, outcome_of
from timerclient import TimerClient
from timerclient.client.group_calls import Start
from timerclient.client.topic_calls import namespace_of
from timerclient.rows.pending_timers import Changed, Rescheduled, Where
from timerclient.rows.series_fields import SeriesOptions
from timerclient.values.errors import OutcomeUnknown, TimerError
from timerclient.values.policy_names import CatchUp, PolicyFields
from timerclient.values.results import CancelResult

TOPIC: Final = "topic"
NAMESPACE: Final = "namespace"
CLUSTER: Final = "cluster"


class Changer:
    """Cancels and reschedules timers of one topic. Any thread may use it."""

    def __init__(self, run: RunFolder, name: str, client: TimerClient, *, topic: str) -> None:
        self._client = client
        self._history = History(run, name)
        self._topic = topic

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel timers."""
        call = partial(self._client.cancel_batch, ids)
        self._change("cancel", lambda: _results(call()), ids=[*ids])

    def cancel_keys(self, keys: Sequence[str]) -> None:
        """Cancel the timers that have the keys."""
        call = partial(self._client.cancel_keys, self._topic, keys)
        self._change("cancel", lambda: _results(call()), topic=self._topic, keys=[*keys])

    def cancel_where(self, where: Where) -> None:
        """Cancel the timers that match a filter."""
        self._by_filter("cancel", where, lambda: self._client.cancel_where(self._topic, **where))

    def reschedule(self, ids: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """Change the due times of timers; return the new ids that are known."""
        return self._moved(
            lambda: self._client.reschedule_batch(ids, due_ms=due_ms),
            ids=[*ids],
            due_ms=[*due_ms],
        )

    def reschedule_keys(self, keys: Sequence[str], due_ms: Sequence[int]) -> list[str]:
        """As `reschedule`, for the timers that have the keys."""
        return self._moved(
            lambda: self._client.reschedule_keys(self._topic, keys, due_ms=due_ms),
            topic=self._topic,
            keys=[*keys],
            due_ms=[*due_ms],
        )

    def reschedule_where(self, where: Where, due_ms: int) -> None:
        """Give the timers that match a filter one other due time."""
        self._by_filter(
            "reschedule",
            where,
            lambda: self._client.reschedule_where(self._topic, where, due_ms=due_ms),
            due_ms=[due_ms],
        )

    # ---- the topic; each method returns whether the change certainly took effect

    def pause(self) -> bool:
        """Pause the topic."""
        return self._ruled({"paused": True}, lambda: self._client.pause_topic(self._topic))

    def resume(self, catch_up: CatchUp) -> bool:
        """Resume the topic."""
        said = {"paused": False, "catch_up": catch_up}
        return self._ruled(said, lambda: self._client.resume_topic(self._topic, catch_up=catch_up))

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
        return self._ruled(
            {**said, **dict.fromkeys(unset)},
            lambda: self._client.alter_policies(cast("PolicyFields", said), unset=unset, **where),
            name,
        )

    def delete(self) -> bool:
        """Delete the topic."""

        def delete() -> dict[str, Any]:
            gone = self._client.delete_topic(self._topic)
            return {"topic_id": gone.topic_id, "pending": gone.pending} if gone else {}

        return self._change("delete", delete, topic=self._topic) is not None

    # ---- groups and dead letters

    def seek(
        self, group: str, *, offset: int | None = None, time_ms: int | None = None,
        start: Start | None = None,
    ) -> bool:  # fmt: skip
        """Seek a group; return whether it certainly took effect."""
        time = None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)

        def seek() -> dict[str, Any]:
            told = self._client.seek_group(
                self._topic, group, offset=offset, time=time, start=start
            )
            return {"group_id": told.group_id}

        to = 0 if start == "earliest" else offset
        where: dict[str, Any] = {} if to is None else {"to_offset": to}
        return self._change("seek", seek, topic=self._topic, group=group, **where) is not None

    def delete_group(self, group: str) -> bool:
        """Delete a group; return whether it certainly took effect."""

        call = partial(self._client.delete_group, self._topic, group)
        return self._done("delete_group", call, topic=self._topic, group=group)

    def redrive(self, letters: str, most: int | None) -> None:
        """Redrive dead letters. If a part fails, the outcome of the whole is unknown."""
        self._change(
            "redrive", lambda: {"changed": int(self._client.redrive(letters, most))},
            certain=False, topic=letters,
        )  # fmt: skip

    # ---- series; each method returns whether the change certainly took effect

    def create_series(self, key: str, payload: bytes, options: SeriesOptions) -> bool:
        """Create a series."""
        return self._serial("create_series", key, options, payload)

    def alter_series(self, key: str, options: SeriesOptions) -> bool:
        """Change fields of a series."""
        return self._serial("alter_series", key, options)

    def pause_series(self, key: str, *, paused: bool) -> bool:
        """Pause or resume a series."""
        client = self._client
        call = partial(client.pause_series if paused else client.resume_series, self._topic, key)
        return self._recur("alter_series", key, call, {"paused": paused})

    def delete_series(self, key: str) -> bool:
        """Delete a series."""
        return self._recur(
            "delete_series", key, partial(self._client.delete_series, self._topic, key)
        )

    def _serial(self, op: str, key: str, options: SeriesOptions, *payload: bytes) -> bool:
        said: dict[str, Any] = dict(options)
        if "every" in said:
            said["every_ms"] = round(1000 * said.pop("every"))
        call = partial(getattr(self._client, op), self._topic, key, *payload, **options)
        return self._recur(op, key, call, said)

    def _recur(
        self, op: str, key: str, call: Callable[[], object], said: Mapping[str, Any] | None = None
    ) -> bool:
        more = {} if said is None else {"said": _text(said)}
        return self._done(op, call, topic=self._topic, key=key, **more)

    # ----

    def _ruled(self, said: Mapping[str, Any], call: Callable[[], object], name: str = "") -> bool:
        return self._done("policy", call, topic=name or self._topic, said=_text(said))

    # ----

    def close(self) -> None:
        """Close the history, after the client."""
        self._history.close()

    def _moved(self, call: Callable[[], list[Rescheduled]], **named: Any) -> list[str]:
        def move() -> dict[str, Any]:
            told = call()
            new = [one.timer.id if one.timer else None for one in told]
            return {"results": [one.result.name for one in told], "new_ids": new}

        answer = self._change("reschedule", move, **named) or {}
        return [each for each in answer.get("new_ids", []) if each is not None]

    def _by_filter(self, op: str, where: Where, call: Callable[[], Changed], **named: Any) -> None:
        """Change by filter. If a page fails after another, the outcome of the whole is unknown.

        It is unknown, too, if the number in the answer may be too low.
        """
        names = {"due_from": "due_from_ms", "due_to": "due_to_ms", "key_prefix": "key_prefix"}
        picked = {names[name]: value for name, value in where.items()}

        def change() -> dict[str, Any]:
            changed = call()
            if not changed.exact:
                raise OutcomeUnknown(f"{changed} timers or more: the answer of a page was lost")
            return {"changed": int(changed)}

        self._change(op, change, certain=False, topic=self._topic, **picked, **named)

    def _done(self, op: str, call: Callable[[], object], **named: Any) -> bool:
        """Send a change whose answer says no more than that it was done."""

        def change() -> dict[str, Any]:
            call()
            return {}

        return self._change(op, change, **named) is not None

    def _change(
        self, op: str, call: Callable[[], dict[str, Any]], *, certain: bool = True, **named: Any
    ) -> dict[str, Any] | None:
        """Send a change and record the answer; return it. None: no answer, or a rejection."""
        request = RecordedRequest(self._history, op, **named)
        try:
            answer = call()
        except TimerError as error:
            outcome = outcome_of(error) if certain else OpOutcome.UNKNOWN
            request.ended_with(outcome, detail=repr(error))
            return None
        request.ended(**answer)
        return answer


def _results(answers: Iterable[CancelResult]) -> dict[str, Any]:
    return {"results": [answer.name for answer in answers]}


def _text(said: Mapping[str, Any]) -> str:
    return json.dumps(said, sort_keys=True)
