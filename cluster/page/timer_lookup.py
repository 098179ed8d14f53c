"""One timer with its story, for the status page. A node that does not lead asks the leader.

The story is read from the log for STORY_S at most. Then its list of gaps says so.
"""

import asyncio
from contextlib import aclosing
from typing import Any, Final

from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.timer_change_forms import id_in
from timer.model import timer_id as ids
from timer.model.timer_errors import InvalidRequestError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name

STORY_S: Final = 3.0
"""Seconds for the reading of a story."""
EVENTS_MAX: Final = 1_000
"""Events in an answer."""

_STATES: Final = {
    pb.TIMER_STATE_PENDING: "pending",
    pb.TIMER_STATE_FIRED: "fired",
    pb.TIMER_STATE_CANCELLED: "cancelled",
    pb.TIMER_STATE_DROPPED: "dropped",
}
_WITH_OFFSET: Final = (
    pb.StoryEvent.WHAT_FIRED,
    pb.StoryEvent.WHAT_MOVED_FROM,
    pb.StoryEvent.WHAT_SOUGHT,
)
_PLAIN: Final = (
    *("topic", "group", "to_topic", "request_id"),
    *("requested_ms", "until_ms", "attempt", "number"),
)
"""Fields of an event that are shown as they are."""


class TimerLookup:
    """Finds one timer and reads its story."""

    def __init__(self, calls: LocalCalls, salt: int) -> None:
        self._calls, self._salt = calls, salt

    async def timer(
        self, timer_id: str, topic: str, key: str, context: HttpContext
    ) -> dict[str, Any]:
        """Return a timer and its story: see page_routes.py. Payload and headers are left out.

        Raises:
            InvalidRequestError: the id is malformed; or not exactly one of id, and topic with key.
            ProblemError: no such timer is known; no leader answers; or too many queries wait.
        """
        if bool(timer_id) == bool(topic and key):
            limit = "either id, or topic and key must be given"
            raise InvalidRequestError("id, topic, key", "both or none", limit)
        raw = id_in("id", timer_id) if timer_id else b""
        request = pb.GetTimerRequest(timer_id=raw, topic=topic, key=key)
        try:
            found = await self._calls.unary("GetTimer", request, context)
        except ProblemError as refused:
            if not raw or refused.error.reason != pb.REASON_NOT_FOUND:
                raise
            found = pb.GetTimerResponse()  # forgotten; the log may still tell its story
        timer, raw = found.timer, raw or found.timer.timer_ids
        due_ms, _, _ = ids.decode(raw, self._salt)
        pending = found.state == pb.TIMER_STATE_PENDING
        return {
            "timer_id": ids.to_text(raw),
            "state": _STATES.get(found.state, "unknown"),
            "topic": found.topic,
            "due_ms": int(due_ms[0]),
            "requested_ms": timer.due_ms[0] if pending else None,
            "key": timer.keys.decode(errors="replace") if pending else None,
            "payload_bytes": len(timer.payloads) if pending else None,
            "held": found.held,
            "successor_id": ids.to_text(found.successor_id) if found.successor_id else "",
            "story": await self._story(raw, context),
        }

    async def _story(self, raw: bytes, context: HttpContext) -> dict[str, Any]:
        events: list[dict[str, Any]] = []
        end = pb.StoryEnd()
        try:
            async with (
                asyncio.timeout(STORY_S),
                aclosing(self._story_answers(raw, context)) as answers,
            ):
                async for answer in answers:
                    events += map(_event, answer.events)
                    if answer.HasField("end"):
                        end = answer.end
                    if len(events) > EVENTS_MAX:
                        end.gaps.append(f"the events after the first {EVENTS_MAX}")
                        break
        except TimeoutError:
            end.gaps.append(f"the rest of the log: it was not read within {STORY_S:g} s")
        return {
            "events": events[:EVENTS_MAX],
            "log_first": end.log_first,
            "log_first_ms": end.log_first_ms,
            "log_last": end.log_last,
            "gaps": [*end.gaps],
        }

    def _story_answers(self, raw: bytes, context: HttpContext) -> Any:
        return self._calls.stream("TellStory", pb.TellStoryRequest(timer_id=raw), context)


def _event(event: pb.StoryEvent) -> dict[str, Any]:
    """Return an event; fields that do not apply are absent."""
    out: dict[str, Any] = {
        "what": short_name(pb.StoryEvent.What.DESCRIPTOR, event.what).lower(),
        "index": event.index,
        "time_ms": event.time_ms,
        "epoch": event.epoch,
    }
    out |= {name: value for name in _PLAIN if (value := getattr(event, name))}
    if event.what in _WITH_OFFSET:
        out["queue_offset"] = event.queue_offset
    if event.other_id:
        out["other_id"] = ids.to_text(event.other_id)
    if event.series:
        out["series"] = str(event.series)
    if event.producer:
        out |= {"producer": f"{event.producer:016x}", "sequence": event.sequence}
    return out
