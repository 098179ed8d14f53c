"""Quotas: how much of a topic may be pending, and how much may wait in its queue.

    a new request --> in the state + on its way to it + asked for <= quota?
                          no --> refused, all of it
                          yes -> on its way --> applied, refused by the log, or lost with the epoch

The leader judges what it takes, by the state that is applied here and by what it has taken since.
So what is taken once a quota was set never exceeds it. What is there already is never touched: a
quota is lowered by what fires, and is acked. Nothing of this is decided at apply.

A row counts as pending until it fires, and as ready as well if it is due when it is taken: also
until the FIRE behind it. Where a quota is reached nothing more is taken, of whatever size, due
whenever.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from timer.entries.policies import QUOTAS
from timer.leader.intake.admission import Admission, Quota
from timer.model.columns import U32, Part
from timer.model.timer_errors import EngineError, QuotaReachedError
from timer.model.units import QueueOffset, TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.machine import Machine

NOTHING: Final = (0,) * len(QUOTAS)


class Charge(NamedTuple):
    """What one request has of one topic."""

    topic: TopicId
    amounts: tuple[int, ...]
    """For each of QUOTAS."""
    due_ms: int
    """All that is ready of it has fired once everything up to there has."""


class Charged:
    """Who waits for a request that counts while it is on its way; `charges` may grow."""

    __slots__ = ("_done", "_quotas", "charges")

    def __init__(
        self, quotas: "Quotas", charges: list[Charge], done: Callable[[object], None]
    ) -> None:
        self._quotas, self.charges, self._done = quotas, charges, done

    def __call__(self, result: object) -> None:
        """Tell: it was applied, or has failed; it is not on its way any more."""
        self._quotas.give_back(self.charges, applied=not isinstance(result, EngineError))
        self._done(result)


class Quotas:
    """What of quotas is used; one leader's."""

    def __init__(self, machine: Machine, admission: Admission) -> None:
        self._machine = machine
        self._admission = admission
        self._on_the_way: dict[TopicId, list[int]] = {}
        self._firing: deque[Charge] = deque()
        """Applied, and perhaps still pending though it was due: the FIRE behind it will show."""

    def weigh(self, part: Part, clock_ms: UnixMs) -> list[Charge]:
        """Return what a request has of topics that have a quota."""
        return [*self._weigh(part, clock_ms)] if self._admission.limited else []

    def _weigh(self, part: Part, clock_ms: UnixMs) -> Iterator[Charge]:
        for first, mine in _by_topic(part.topic):
            topic = TopicId(first)
            if topic not in self._machine.topics or not self._admission.rules(topic).quotas:
                continue
            due_ms, sizes = part.due_ms[mine], part.payload.sizes[mine]
            rows, size = len(sizes), int(sizes.sum(dtype=np.int64))
            if int(due_ms.min()) > clock_ms:
                yield Charge(topic, (rows, size, 0, 0), 0)
                continue
            due = due_ms <= clock_ms
            ready = int(np.count_nonzero(due)), int(sizes[due].sum(dtype=np.int64))
            yield Charge(topic, (rows, size, *ready), int(due_ms[due].max()))

    def judge(self, charges: Sequence[Charge]) -> None:
        """Refuse what would exceed a quota.

        Raises:
            QuotaReachedError: names the topic, the quota, and what there is of it.
        """
        for charge in charges:
            topic = self._machine.topics[charge.topic]
            for quota in self._admission.rules(charge.topic).quotas:
                at = QUOTAS.index(quota.field)
                there = self.used(topic, quota) + self._taken(charge.topic)[at]
                asked = charge.amounts[at]
                if there >= quota.limit or there + asked > quota.limit:
                    limit = f"must be at most {quota.limit} ({quota.field} of the {quota.source})"
                    raise QuotaReachedError(
                        topic.name, quota.field, limit, there=there, asked=asked
                    )

    @staticmethod
    def used(topic: Topic, quota: Quota) -> int:
        """Return what there is of a topic by the state that is applied."""
        return USED[quota.field](topic)

    def _taken(self, topic: TopicId) -> Sequence[int]:
        """Return what is on its way to a topic, for each of QUOTAS."""
        fired_ms = self._machine.last_read_time_ms
        while self._firing and self._firing[0].due_ms <= fired_ms:
            self._add(self._firing.popleft(), -1)
        return self._on_the_way.get(topic, NOTHING)

    def charge(
        self, charges: list[Charge], done: Callable[[object], None]
    ) -> Callable[[object], None]:
        """Count a request that is taken; return who is to be told when it is over."""
        if not charges:
            return done
        for charge in charges:
            self._add(charge, 1)
        return Charged(self, charges, done)

    def also_charge(
        self, part: Part, done: Callable[[object], None], clock_ms: UnixMs
    ) -> Callable[[object], None]:
        """As `charge`, of a request on its way, for what has a quota only now."""
        counted = done.charges if isinstance(done, Charged) else []
        known = {charge.topic for charge in counted}
        new = [each for each in self.weigh(part, clock_ms) if each.topic not in known]
        if not isinstance(done, Charged):
            return self.charge(new, done)
        for charge in new:
            self._add(charge, 1)
        done.charges += new
        return done

    def give_back(self, charges: Sequence[Charge], *, applied: bool) -> None:
        """A request is not on its way any more."""
        for charge in charges:
            rows, size, ready, ready_size = charge.amounts
            if applied and ready and charge.due_ms > self._machine.last_read_time_ms:
                self._add(charge._replace(amounts=(rows, size, 0, 0)), -1)
                self._firing.append(charge._replace(amounts=(0, 0, ready, ready_size)))
            else:
                self._add(charge, -1)

    def _add(self, charge: Charge, sign: int) -> None:
        taken = self._on_the_way.setdefault(charge.topic, [*NOTHING])
        for at, amount in enumerate(charge.amounts):
            taken[at] += sign * amount
        if not any(taken):
            del self._on_the_way[charge.topic]

    @property
    def idle(self) -> bool:
        """Nothing is counted as on its way."""
        self._taken(TopicId(0))
        return not self._on_the_way


def _by_topic(topics: U32) -> Iterator[tuple[int, "slice | npt.NDArray[np.intp]"]]:
    """Return the rows of each topic."""
    first = int(topics[0])
    if (topics == first).all():
        yield first, slice(None)
        return
    order = np.argsort(topics, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(topics[order])) + 1):
        yield int(topics[mine[0]]), mine


def _ready(topic: Topic) -> int:
    return topic.ready


def _ready_bytes(topic: Topic) -> int:
    return topic.queue.payload_bytes_from(QueueOffset(topic.unacked_from))


USED: Final[dict[str, Callable[[Topic], int]]] = {
    "pending_max": lambda topic: topic.counts.pending,
    "pending_bytes_max": lambda topic: topic.pending_bytes,
    "ready_max": _ready,
    "ready_bytes_max": _ready_bytes,
}
"""What there is of a topic, for each of QUOTAS."""
assert tuple(USED) == QUOTAS
