"""Quotas: limits on a topic's pending timers and on the messages in its queue.

    a new request --> used in the state + in flight + requested <= quota?
                          no --> rejected as a whole
                          yes -> in flight --> applied, rejected by the log, or lost with the epoch

The leader checks a request against the state applied here plus the requests it has accepted since.
Accepted requests alone therefore never exceed a quota that was set before them. Occurrences of
series are never rejected, so a topic may still exceed it. A quota never removes existing timers or
messages. Usage falls only as timers fire or are cancelled and as messages are acknowledged.
Replicas check no quota at apply.

A row counts as pending until it fires. A row that is due when it is accepted counts as ready, too,
and counts as both until the FIRE entry after it. A topic that has reached one of its quotas accepts
no request, whatever the request's size or due time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from timer.entries.policies import QUOTAS
from timer.leader.intake.admission import Admission, Quota
from timer.model.columns import TOMBSTONE, U32, Part
from timer.model.timer_errors import EngineError, QuotaReachedError
from timer.model.units import TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.machine import Machine

NO_USAGE: Final = (0,) * len(QUOTAS)
NewTopics: TypeAlias = Mapping[TopicId, str]
"""Names of topics that are created for a request, by ids that stand for theirs until then."""
NO_TOPICS: Final[NewTopics] = {}
NEW_TOPIC: Final = TopicId(TOMBSTONE - 1)
"""Stands for the id of a topic that is created for a request; the ids below, for further ones."""


class Charge(NamedTuple):
    """The usage that one request adds to one topic."""

    topic: TopicId
    amounts: tuple[int, ...]
    """Rows or bytes, one for each of QUOTAS."""
    due_ms: int
    """Latest due time of the ready rows, Unix milliseconds: all have fired once the log has fired
    up to it. 0 if no row is ready."""


class Charged:
    """The completion callback of a request counted as in flight. `charges` may grow."""

    __slots__ = ("_done", "_quotas", "charges")

    def __init__(
        self, quotas: "Quotas", charges: list[Charge], done: Callable[[object], None]
    ) -> None:
        self._quotas, self.charges, self._done = quotas, charges, done

    def __call__(self, result: object) -> None:
        """Release the request's charges, then pass its result on."""
        self._quotas.release(self.charges, applied=not isinstance(result, EngineError))
        self._done(result)


class Quotas:
    """The usage of quotas, as one leader counts it."""

    def __init__(self, machine: Machine, admission: Admission) -> None:
        self._machine = machine
        self._admission = admission
        self._in_flight: dict[TopicId, list[int]] = {}
        self._firing: deque[Charge] = deque()
        """Applied charges of due rows that may still be pending until the next FIRE entry."""

    def weigh(self, part: Part, clock_ms: UnixMs, new: NewTopics = NO_TOPICS) -> list[Charge]:
        """Return the charges of a request for topics that have a quota."""
        return [*self._weigh(part, clock_ms, new)] if self._admission.has_quotas else []

    def _weigh(self, part: Part, clock_ms: UnixMs, new: NewTopics) -> Iterator[Charge]:
        for first, mine in _by_topic(part.topic):
            topic, name = TopicId(first), new.get(TopicId(first), "")
            exists = bool(name) or topic in self._machine.topics
            if not exists or not self._admission.rules(topic, name).quotas:
                continue
            due_ms, sizes = part.due_ms[mine], part.payload.sizes[mine]
            rows, size = len(sizes), int(sizes.sum(dtype=np.int64))
            if int(due_ms.min()) > clock_ms:
                yield Charge(topic, (rows, size, 0, 0), 0)
                continue
            due = due_ms <= clock_ms
            ready = int(np.count_nonzero(due)), int(sizes[due].sum(dtype=np.int64))
            yield Charge(topic, (rows, size, *ready), int(due_ms[due].max()))

    def check(self, charges: Sequence[Charge], new: NewTopics = NO_TOPICS) -> None:
        """Reject a request that would exceed a quota.

        Raises:
            QuotaReachedError: names the topic, the quota and its present usage.
        """
        for charge in charges:
            name = new.get(charge.topic, "")
            topic = self._machine.topics[charge.topic] if not name else None
            for quota in self._admission.rules(charge.topic, name).quotas:
                at = QUOTAS.index(quota.field)
                used = self._usage_in_flight(charge.topic)[at]
                used += self.usage(topic, quota) if topic is not None else 0
                requested = charge.amounts[at]
                if used >= quota.limit or used + requested > quota.limit:
                    raise QuotaReachedError(
                        topic.name if topic is not None else name,
                        quota.field,
                        quota.limit,
                        quota.source,
                        used=used,
                        requested=requested,
                    )

    @staticmethod
    def usage(topic: Topic, quota: Quota) -> int:
        """Return a topic's usage of one quota in the applied state."""
        return USAGE[quota.field](topic)

    def _usage_in_flight(self, topic: TopicId) -> Sequence[int]:
        """Return a topic's usage in flight, for each of QUOTAS."""
        fired_ms = self._machine.last_read_time_ms
        while self._firing and self._firing[0].due_ms <= fired_ms:
            self._add(self._firing.popleft(), -1)
        return self._in_flight.get(topic, NO_USAGE)

    def charge(
        self, charges: list[Charge], done: Callable[[object], None]
    ) -> Callable[[object], None]:
        """Count an accepted request; return the callback that takes its result."""
        if not charges:
            return done
        for charge in charges:
            self._add(charge, 1)
        return Charged(self, charges, done)

    def charge_new_quotas(
        self, part: Part, done: Callable[[object], None], clock_ms: UnixMs
    ) -> Callable[[object], None]:
        """Count a request in flight for topics that had no quota when it was accepted.

        Returns the callback that takes its result, as `charge` does.
        """
        charges = self.weigh(part, clock_ms)
        if not isinstance(done, Charged):
            return self.charge(charges, done)
        known = {charge.topic for charge in done.charges}
        new = [charge for charge in charges if charge.topic not in known]
        for charge in new:
            self._add(charge, 1)
        done.charges += new
        return done

    def release(self, charges: Sequence[Charge], *, applied: bool) -> None:
        """Stop counting a request as in flight.

        Ready rows of an applied request stay counted until the FIRE entry that includes them.
        """
        for charge in charges:
            rows, size, ready, ready_size = charge.amounts
            if applied and ready and charge.due_ms > self._machine.last_read_time_ms:
                self._add(charge._replace(amounts=(rows, size, 0, 0)), -1)
                self._firing.append(charge._replace(amounts=(0, 0, ready, ready_size)))
            else:
                self._add(charge, -1)

    def _add(self, charge: Charge, sign: int) -> None:
        usage = self._in_flight.setdefault(charge.topic, [*NO_USAGE])
        for at, amount in enumerate(charge.amounts):
            usage[at] += sign * amount
        if not any(usage):
            del self._in_flight[charge.topic]

    @property
    def idle(self) -> bool:
        """Whether no request and no ready row is counted."""
        self._usage_in_flight(TopicId(0))
        return not self._in_flight


def _by_topic(topics: U32) -> Iterator[tuple[int, "slice | npt.NDArray[np.intp]"]]:
    """Yield each topic id and the places of its rows."""
    first = int(topics[0])
    if (topics == first).all():
        yield first, slice(None)
        return
    order = np.argsort(topics, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(topics[order])) + 1):
        yield int(topics[mine[0]]), mine


USAGE: Final[dict[str, Callable[[Topic], int]]] = {
    "pending_max": lambda topic: topic.counts.pending,
    "pending_bytes_max": lambda topic: topic.pending_bytes,
    "ready_max": lambda topic: topic.ready,
    "ready_bytes_max": lambda topic: topic.queue.payload_bytes_from(topic.unacked_from),
}
"""A topic's usage in the applied state, for each of QUOTAS."""
assert tuple(USAGE) == QUOTAS
