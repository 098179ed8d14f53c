"""The effect of policies and quotas on the timers of simulated clients; a part of the book.

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
from timer.leader.leader import Leader
from timer.model.columns import Part, RequestId, RowArray, decode_schedule
from timer.model.units import TopicId
from timer.ready.topic import Topic
from timer.state.apply_results import RESCHEDULED, Accepted, RescheduleApplied, ScheduleApplied
from timer.state.machine import Machine

LEVELS_MS: Final = (1_000, 3_000, 7_000, 15_000)
"""The default delay levels; a world ends within minutes."""
PLAIN: Final[dict[str, Any]] = {
    "delayed_delivery": True,
    "tick_ms": 1,
    "delay_ms_min": 0,
    "delay_levels_ms": LEVELS_MS,
}


class Acceptance(NamedTuple):
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
    requests: dict[tuple[object, int], list[Acceptance]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Name of a producer's request -> its acceptances."""
    moves: dict[object, list[tuple[str, Acceptance]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Seq, or (topic, key) -> (topic, acceptance) of each reschedule."""

    def rules(self, index: int, topic: str) -> dict[str, Any]:
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
            rules = self.rules(entry.index, topic)
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
            if not any(_fits(self.rules(entry.index, topic), one, times) for topic, one in takings):
                said = self.rules(entry.index, takings[0][0])
                raise Broken("policy", f"{entry.index}: to {due_ms}, {said}, {takings}")

    def _target(self, targets: Targets, at: int) -> object:
        if isinstance(targets, Ids):
            return int(targets.seq[at])
        topic, key = targets.names()[at]
        return self.fates.story.topics[topic], key


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


def _fits(rules: dict[str, Any], taken: Acceptance, times: list[tuple[int, int]]) -> bool:
    """Return whether (requested, due) of each row follow from the policies."""
    spans = [_time(rules, taken, value) for value in taken.values]
    return len(spans) == len(times) and all(
        span is not None and requested == span[0] and span[1] <= due <= span[2]
        for span, (requested, due) in zip(spans, times, strict=True)
    )


def _time(rules: dict[str, Any], taken: Acceptance, value: int) -> tuple[int, int, int] | None:
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


@dataclass(slots=True)
class QuotaBook:
    """The limits that hold for accepted requests, from the log and from leaders' acceptances.

    It raises Broken if a request exceeded a quota. It is independent of
    timer/leader/intake/quotas.py.
    """

    policies: PolicyBook
    taken: set[tuple[int, object]] = field(default_factory=set)
    """(epoch, request) of requests that a leader accepted."""
    repeated: set[tuple[int, object]] = field(default_factory=set)
    """Those that repeated a known request. If its id is forgotten by the time of the entry, the
    request counts as new, though no quota was checked for it."""
    refused: int = 0
    """Requests that were rejected for a quota."""

    def took(self, leader: Leader, part: Part, *, repeated: bool) -> None:
        """Note a request that a leader accepted; `repeated`: it is applied or under way already."""
        request = name_of(part.producer_id, part.sequence, part.request)
        known = repeated or (leader.epoch, request) in self.taken
        self.taken.add((leader.epoch, request))
        if repeated:
            self.repeated.add((leader.epoch, request))
        for topic_id in {*part.topic.tolist()} if not known else ():
            topic = leader.machine.topics[topic_id]
            for name, there in zip(("ready_max", "ready_bytes_max"), _ready(topic), strict=True):
                limit = getattr(leader.admission.rules(topic_id).effective.policy, name)
                if limit is not None and there >= limit:
                    raise Broken("quota", f"{request} taken, {there} in {topic.name}: {name}")

    def check(self, entry: Entry, applied: object, machine: Machine) -> None:
        """Check that new timers fit the quotas of earlier entries, and that they were accepted."""
        if not isinstance(applied, ScheduleApplied):
            return
        fresh: set[int] = set()
        for name, rows in accepted_parts(entry, applied):
            if (entry.epoch, name) not in self.taken:
                raise Broken("quota", f"{entry.index}: {name} was not taken under {entry.epoch}")
            if (entry.epoch, name) not in self.repeated:
                fresh |= {*rows["topic"].tolist()}
        for topic_id in fresh:
            self._within(entry, machine.topics[topic_id], machine)  # type: ignore[index]

    def _within(self, entry: Entry, topic: Topic, machine: Machine) -> None:
        said: dict[str, Any] = self.policies.rules(entry.index, topic.name)
        views = machine.series.views(machine.series.ids_of([topic.topic_id], 0, 1 << 20))
        free = [len(each.spec.payload) for each in views if each.seq]  # no quota rejects these
        there = topic.counts.pending - len(free), topic.pending_bytes - sum(free)
        for name, amount in zip(("pending_max", "pending_bytes_max"), there, strict=True):
            limit = said.get(name)
            if limit is not None and amount > limit:
                raise Broken("quota", f"{entry.index}: {amount} in {topic.name}, {name} = {limit}")


def _ready(topic: Topic) -> tuple[int, int]:
    """Return the most unacked messages of a group, and about the bytes from the first one on."""
    first = min((group.cursor for group in topic.groups.values()), default=topic.queue.begin)
    counts = [len(g.first_unacked(topic.queue.end, 1 << 20)) for g in topic.groups.values()]
    whole = [block for block in topic.queue.blocks if block.first >= first]
    return max(counts, default=topic.queue.end - first), sum(block.payload_bytes for block in whole)
