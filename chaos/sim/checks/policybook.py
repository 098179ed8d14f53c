"""The effect of policies on the timers of simulated clients, from the log; a part of the book.

The oracle has the policies of each entry (fatebook.py). The book adds each request with the times
at which leaders accepted it. Each row of the log must follow from one of these times by the
policies of the entries before its own. The rules are independent of
timer/leader/intake/admission.py.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from chaos.sim.checks.fatebook import FateBook
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.entries.payloads import Ids, Targets, decode_reschedule
from timer.entries.policies import Scope
from timer.model.columns import RequestId, RowArray, decode_schedule
from timer.model.units import TopicId
from timer.state.apply_results import RESCHEDULED, Accepted, RescheduleApplied, ScheduleApplied

LEVELS_MS: Final = (1_000, 3_000, 7_000, 15_000)
"""The default delay levels; a world ends within minutes."""
PLAIN: Final[dict[str, Any]] = {
    "delayed_delivery": True,
    "tick_ms": 1,
    "delay_ms_min": 0,
    "delay_levels_ms": LEVELS_MS,
}


class TakenRequest(NamedTuple):
    """One acceptance of a request by a leader."""

    way: str
    values: tuple[int, ...]
    clock_ms: int
    floor_ms: int
    """All timers due by this time had fired."""


@dataclass(slots=True)
class PolicyBook:
    """See the module. `check` raises Broken if a row does not follow from the policies."""

    fates: FateBook
    requests: dict[tuple[object, int], list[TakenRequest]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Name of a producer's request -> its acceptances."""
    moves: dict[object, list[tuple[str, TakenRequest]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Seq, or (topic, key) -> (topic, acceptance) of each reschedule."""

    def at(self, index: int, topic: str) -> dict[str, Any]:
        """Return the fields in force for a topic at an entry."""
        story = self.fates.story
        gone = {number: at for number, (at, _) in story.deleted.items()}
        names = story.topics.items()
        number = next((n for n, name in names if name == topic and gone.get(n, index) >= index), 0)
        said = {scope: fields for scope, since, fields in story.policies if since < index}
        namespace = topic.split("/")[0] if "/" in topic else "default"
        scopes = [Scope(), Scope(namespace)] + ([Scope("", TopicId(number))] if number else [])
        found = [json.loads(said[scope]).items() for scope in scopes if scope in said]
        return PLAIN | {name: value for each in found for name, value in each if value is not None}

    # ---- the checks, by the first replica that applies an entry

    def check(self, entry: Entry, applied: object) -> None:
        """Check P3: the times of new rows follow from the policies."""
        if isinstance(applied, ScheduleApplied):
            self._check_schedule(entry, applied)
        elif isinstance(applied, RescheduleApplied):
            self._check_moves(entry, applied)

    def _check_schedule(self, entry: Entry, applied: ScheduleApplied) -> None:
        for name, rows in accepted_parts(entry, applied):
            takings = self.requests[name]
            if not takings:
                continue  # it has an id, and no producer
            topic = self.fates.story.topics[int(rows["topic"][0])]
            rules = self.at(entry.index, topic)
            limit, most = rules.get("payload_bytes_max"), int(rows["payload_size"].max())
            if limit is not None and most > limit:
                raise Broken("policy", f"{entry.index}: {most} bytes in {topic}, {rules}")
            times = list(zip(rows["requested_ms"].tolist(), rows["due_ms"].tolist(), strict=True))
            if not any(_fits(rules, taken, times) for taken in takings):
                raise Broken("policy", f"{entry.index}: {times} in {topic}, {rules}, {takings}")

    def _check_moves(self, entry: Entry, applied: RescheduleApplied) -> None:
        order = decode_reschedule(entry.payload)
        pairs = zip(order.requested_ms.tolist(), order.due_ms.tolist(), strict=True)
        for at, (requested_ms, due_ms) in enumerate(pairs):
            takings = self.moves[self._target(order.targets, at)]
            if applied.results[at] != RESCHEDULED or not takings:
                continue
            times = [(requested_ms, due_ms)]
            if not any(_fits(self.at(entry.index, topic), one, times) for topic, one in takings):
                said = self.at(entry.index, takings[0][0])
                raise Broken("policy", f"{entry.index}: to {due_ms}, {said}, {takings}")

    def _target(self, targets: Targets, at: int) -> object:
        if isinstance(targets, Ids):
            return int(targets.seq[at])
        start, end = (int(targets.key.sizes[:stop].sum()) for stop in (at, at + 1))
        topic = self.fates.story.topics[int(targets.topic[at])]
        return topic, bytes(targets.key.blob[start:end])


def accepted_parts(
    entry: Entry, applied: ScheduleApplied
) -> Iterator[tuple[tuple[object, int], RowArray]]:
    """Return the name and the rows of each request that was neither rejected nor repeated."""
    schedule, start = decode_schedule(entry.payload), 0
    heads = zip(schedule.parts.tolist(), schedule.requests, applied.parts, strict=True)
    for (producer, sequence, size, *_), request, result in heads:
        if isinstance(result, Accepted):
            yield name_of(producer, sequence, request), schedule.rows[start : start + size]
        start += size


def name_of(producer: int, sequence: int, request: RequestId | None) -> tuple[object, int]:
    """Return the name of a request: its producer and number, or its id and body."""
    return (producer, sequence) if request is None else request[:2]


def _fits(rules: dict[str, Any], taken: TakenRequest, times: list[tuple[int, int]]) -> bool:
    """Return whether (requested, due) of each row follow from the policies."""
    spans = [_time(rules, taken, value) for value in taken.values]
    return len(spans) == len(times) and all(
        span is not None and requested == span[0] and span[1] <= due <= span[2]
        for span, (requested, due) in zip(spans, times, strict=True)
    )


def _time(rules: dict[str, Any], taken: TakenRequest, value: int) -> tuple[int, int, int] | None:
    """Return (requested, first due, last due) of a row. None: it had to be rejected."""
    now, delay = taken.clock_ms, value
    if taken.way == "due_ms":
        delay = value - now
    elif taken.way == "delay_level":
        levels = [0, *rules["delay_levels_ms"]]
        delay = levels[min(value, len(levels) - 1)]
    requested = now + delay
    fixed = rules.get("fixed_delay_ms")
    if not rules["delayed_delivery"]:
        delay = min(delay, 0)
    elif fixed is not None:
        delay = fixed
    elif delay > rules.get("delay_ms_max", delay):
        return None
    else:
        delay = max(delay, rules["delay_ms_min"] or delay)
    due, ttl_ms = now + delay, rules.get("ttl_ms")
    if ttl_ms and due + ttl_ms <= now:
        return None
    tick, jitter = rules["tick_ms"], rules.get("jitter_ms") or 0
    jitter = jitter if rules["delayed_delivery"] else 0
    last = max(due, now) + jitter
    last += -last % tick
    if delay > 0:
        return requested, due + -due % tick, last
    first = max(due, taken.floor_ms)
    return requested, first, max(first, last) if jitter else first
