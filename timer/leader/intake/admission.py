"""Admission: the leader computes each timer's due time from the requested time and the policies.

    due_ms, delay_ms, delay_level --+-- requested -- off, fixed, minimum, jitter, tick -- effective
                                    |                                                         due
                                    +-- beyond the maximum: rejected

The entry holds both times, so no replica computes them again, and the jitter is drawn once. The
leader uses the policies at the end of its log: the applied ones, and those it has appended since.
The next entry lies after them. A timer's times therefore follow the policies in force at its entry.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from timer.entries.policies import (
    DEFAULTS,
    FIELDS,
    NAMESPACES_MAX,
    NEW_QUOTA_MAX,
    NO_POLICY,
    NODE_BOUNDS,
    QUOTAS,
    RATES,
    Effective,
    Policies,
    Scope,
    ScopePolicy,
    namespace_of,
)
from timer.model.columns import I64, U32
from timer.model.timer_errors import InvalidRequestError, NotReadyError
from timer.model.timer_id import mix, mix_one
from timer.model.units import DUE_MS_MAX, Now, TopicId, UnixMs

if TYPE_CHECKING:
    from timer.ready.topic import Topic
    from timer.state.machine import Machine

UINT64_MAX: Final = (1 << 64) - 1
WAYS: Final = ("due_ms", "delay_ms", "delay_level")


class WantedTimes(NamedTuple):
    """The requested times of timers, in the form in which they were given."""

    way: str
    """One of WAYS."""
    values: I64
    """(n,), or (1,) for one value that holds for all rows; milliseconds or a level."""

    def take(self, places: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> "WantedTimes":
        """Return the requested times of the rows at `places`."""
        return self if len(self.values) == 1 else WantedTimes(self.way, self.values[places])


class Times(NamedTuple):
    """Requested and effective due times, Unix milliseconds, each (n,)."""

    requested_ms: I64
    due_ms: I64


def wanted_times_of(given: Mapping[str, Sequence[int]], rows: int) -> WantedTimes:
    """Return the requested times of `rows` timers, from the values given for each of WAYS.

    Raises:
        InvalidRequestError: not exactly one way was given; or it has neither one value nor `rows`
        values; or a value is negative.
    """
    ways = [way for way in WAYS if len(given[way])]
    if len(ways) != 1:
        limit = "exactly one must be given"
        raise InvalidRequestError(", ".join(WAYS), ", ".join(ways) or "none", limit)
    [way] = ways
    if len(given[way]) not in (1, rows):
        raise InvalidRequestError(way, f"{len(given[way])} values", f"must have 1 or {rows} values")
    values = np.array(given[way], np.int64)
    if (low := int(values.min())) < 0:
        raise InvalidRequestError(way, low, "must be 0 or more")
    return WantedTimes(way, values)


class Draws:
    """Pseudo-random numbers from a seed. The core has no source of randomness of its own."""

    def __init__(self, seed: int) -> None:
        self._next = mix_one(seed & UINT64_MAX)

    def up_to(self, most: int, count: int) -> I64:
        """Return `count` numbers in 0 .. most, each as probable as any other, (count,)."""
        places = np.arange(count, dtype=np.uint64) + np.uint64(self._next)
        self._next = (self._next + count) & UINT64_MAX
        return (mix(places) % np.uint64(most + 1)).astype(np.int64)


class Quota(NamedTuple):
    """A topic's limit on one kind of usage (timer/leader/intake/quotas.py)."""

    field: str
    """One of QUOTAS."""
    limit: int
    source: str
    """The scope that sets the limit: cluster, namespace or topic."""


class Rules:
    """The policies of one topic, prepared for columns of rows."""

    def __init__(self, effective: Effective, draws: Draws | None = None) -> None:
        """`draws`: the source of jitter. None: the timers get none."""
        policy = effective.policy
        assert policy.tick_ms is not None, policy
        assert policy.payload_bytes_max is not None, policy
        assert policy.delay_ms_min is not None, policy
        assert policy.delay_ms_max is not None, policy
        assert policy.delay_levels_ms is not None, policy
        self.effective = effective
        self.payload_limit = policy.payload_bytes_max, self._source_note("payload_bytes_max")
        """Most bytes in a payload, and a note that names the scope of the limit."""
        limits = ((name, getattr(policy, name)) for name in QUOTAS)
        self.quotas = tuple(
            Quota(name, limit, effective.sources[name])
            for name, limit in limits
            if limit is not None
        )
        self._delayed = policy.delayed_delivery
        self._tick_ms = policy.tick_ms
        self._min_ms, self._max_ms = policy.delay_ms_min, policy.delay_ms_max
        self._fixed_ms = policy.fixed_delay_ms
        self._ttl_ms = policy.ttl_ms
        self._draws = draws
        self._jitter_ms = policy.jitter_ms if draws is not None and policy.delayed_delivery else 0
        self._levels_ms = np.array([0, *policy.delay_levels_ms], np.int64)

    def _source_note(self, field: str) -> str:
        return f" ({field} of the {self.effective.sources[field]})"

    def times(self, when: WantedTimes, rows: int, now: Now, floor_ms: UnixMs) -> Times:
        """Return the times of `rows` timers that are requested now.

        A due time that has passed is not rounded to the tick. It is raised to `floor_ms`, the time
        up to which everything has fired. Such rows enter their queue at apply.

        Raises:
            InvalidRequestError: a requested time is beyond the maximum, or the message would
            already have expired.
        """
        requested = self._requested(when, now)
        due = self._due(requested, rows, now, floor_ms)
        return Times(_for_each(requested, rows), _for_each(due, rows))

    def _requested(self, when: WantedTimes, now: Now) -> I64:
        values = when.values
        longest_ms = DUE_MS_MAX - now.clock_ms
        note = ""
        if self._delayed and self._fixed_ms is None and self._max_ms < longest_ms:
            longest_ms = self._max_ms
            note = self._source_note("delay_ms_max")
        if when.way == "due_ms":
            latest_ms = now.clock_ms + longest_ms
            if (high := int(values.max())) > latest_ms:
                limit = f"must be at most {latest_ms}{note}"
                raise InvalidRequestError(when.way, high, limit, row=_row(values, values.argmax()))
            return values
        if when.way == "delay_level":
            values = self._levels_ms[np.minimum(values, len(self._levels_ms) - 1)]
        if (high := int(values.max())) > longest_ms:
            shown, limit = high, f"must be at most {longest_ms}{note}"
            if when.way == "delay_level":
                shown = int(when.values[int(values.argmax())])
                limit = f"stands for {high} ms, which {limit}"
            raise InvalidRequestError(when.way, shown, limit, row=_row(values, values.argmax()))
        return values + now.clock_ms

    def _due(self, requested: I64, rows: int, now: Now, floor_ms: UnixMs) -> I64:
        """Return the effective due times: one for all rows, or with jitter one for each."""
        wanted, clock_ms = requested, now.clock_ms
        if not self._delayed:
            wanted = np.minimum(requested, clock_ms)
        elif self._fixed_ms is not None:
            wanted = np.full(len(requested), min(clock_ms + self._fixed_ms, DUE_MS_MAX), np.int64)
        elif self._min_ms:
            wanted = np.maximum(requested, min(clock_ms + self._min_ms, DUE_MS_MAX))
        oldest = int(wanted.min())
        if self._ttl_ms and oldest <= clock_ms - self._ttl_ms:
            limit = f"must be above {clock_ms - self._ttl_ms}{self._source_note('ttl_ms')}"
            raise InvalidRequestError("due_ms", oldest, limit, row=_row(wanted, wanted.argmin()))
        if self._jitter_ms and self._draws is not None:
            wanted = np.maximum(wanted, clock_ms) + self._draws.up_to(self._jitter_ms, rows)
        return self.rounded_to_tick(wanted, now, floor_ms)

    def rounded_to_tick(self, wanted: I64, now: Now, floor_ms: UnixMs) -> I64:
        """Return due times (n,): rounded up to the tick, and not before `floor_ms`.

        For occurrences of series no other policy holds: a fixed delay, or no delay at all, would
        let a series fire at once and without end.
        """
        tick = self._tick_ms
        rounded = np.minimum(-(-wanted // tick) * tick, DUE_MS_MAX)  # an id holds no more
        return np.where(wanted <= now.clock_ms, np.maximum(wanted, floor_ms), rounded)


def _row(values: I64, place: "np.intp") -> int | None:
    """Return the place of a value as a row; None: the one value holds for all rows."""
    return int(place) if len(values) > 1 else None


def _for_each(values: I64, rows: int) -> I64:
    """Return one value for each row, of as many or of one."""
    return values if len(values) == rows else np.full(rows, values[0])


UNBOUNDED: Final = Rules(Policies().effective(DEFAULTS))
"""Rules of rows whose times have no effect."""


class Admission:
    """The policies by which the leader computes its next entries."""

    def __init__(self, machine: "Machine", node: ScopePolicy, seed: int) -> None:
        """`node`: the node's settings, which hold where no policy sets a value.

        `seed`: of the jitter, another one for each epoch.
        """
        self._machine = machine
        self._draws = Draws(seed)
        self._node = node
        self.policies = machine.policies
        """Replaced by each change."""
        self._rules: dict[int | str, Rules] = {}
        """By topic id; by namespace those of new topics, if the namespace has a policy."""

    def rules(self, topic_id: int, new: str = "") -> Rules:
        """Return the rules of a topic; 0: those that hold without a namespace or topic policy.

        `new`: its name, if it does not exist yet.
        """
        rules = self._rules.get(topic_id)
        if rules is None:
            topic = self._machine.topics.get(TopicId(topic_id))
            name = topic.name if topic is not None else new
            namespace = namespace_of(name) if name else ""
            key: int | str = topic_id
            if topic is None and new:  # a request may have many of them
                key = 0 if self.policies.of(Scope(namespace)) is NO_POLICY else namespace
            rules = self._rules.get(key)
            if rules is None:
                effective = self.policies.effective(self._node, namespace, TopicId(topic_id))
                rules = self._rules[key] = Rules(effective, self._draws)
        return rules

    def ttl_ms(self, topic: "Topic") -> int:
        """Return a message's time to live after its due time, milliseconds; 0: no limit."""
        return self.policies.value_of("ttl_ms", topic.name, topic.topic_id) or 0

    def rates(self, topic: "Topic") -> tuple[int, int]:
        """Return a topic's most deliveries a second: of all groups, of each group. 0: no limit."""
        if not self.policies.has(*RATES):
            return 0, 0
        policies, name, topic_id = self.policies, topic.name, topic.topic_id
        of_topic, of_group = (policies.value_of(field, name, topic_id) or 0 for field in RATES)
        return of_topic, of_group

    @property
    def differs(self) -> bool:
        """Whether the rules differ between topics."""
        return self.policies.has_narrow_scopes

    @property
    def has_quotas(self) -> bool:
        """Whether some topic has a quota."""
        return self.policies.has(*QUOTAS)

    @property
    def has_ttl(self) -> bool:
        """Whether some topic has a time to live."""
        return self.policies.has("ttl_ms")

    def times(self, when: WantedTimes, rows: int, topics: U32 | None, now: Now) -> Times:
        """Return the times of `rows` timers. `topics`: their topic ids, (rows,).

        Topic id 0 stands for a timer that is not pending. `topics` is None if the caller looked up
        no topics because the rules did not differ.

        Raises:
            InvalidRequestError: a requested time is beyond its topic's maximum.
            NotReadyError: `topics` is None, and the rules differ by now.
        """
        floor_ms = self._machine.last_read_time_ms
        if topics is None:
            if self.differs:
                raise NotReadyError("a policy changed meanwhile; retry")
            return self.rules(0).times(when, rows, now, floor_ms)
        requested, due = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        for topic in np.unique(topics).tolist():
            mine = np.flatnonzero(topics == topic)
            rules = self.rules(topic) if topic else UNBOUNDED
            try:
                times = rules.times(when.take(mine), len(mine), now, floor_ms)
            except InvalidRequestError as error:
                raise (error if len(when.values) == 1 else error.at_rows(mine.tolist())) from None
            requested[mine], due[mine] = times
        return Times(requested, due)

    def policy_with(self, scope: Scope, fields: ScopePolicy, unset: Sequence[str]) -> ScopePolicy:
        """Return a scope's policy after some fields are set and others unset.

        Raises:
            InvalidRequestError: a field is unknown, out of range, both set and unset, or in
            conflict with another field or with the node's settings; or there are too many
            namespaces with policies.
        """
        for name in unset:
            if name not in FIELDS:
                raise InvalidRequestError("unset", name, f"must be one of {', '.join(FIELDS)}")
            if getattr(fields, name) is not None:
                raise InvalidRequestError(
                    name, getattr(fields, name), "must not be both set and unset"
                )
        fields.check()
        for name in QUOTAS:
            value = getattr(fields, name)
            if value is not None and value > NEW_QUOTA_MAX:
                raise InvalidRequestError(name, value, f"must be at most {NEW_QUOTA_MAX}")
        for name in NODE_BOUNDS:
            value, most = getattr(fields, name), getattr(self._node, name)
            if value is not None and value > most:
                raise InvalidRequestError(
                    name, value, f"must be at most {most}, the node's own limit"
                )
        before = self.policies.of(scope).pack()
        rest = {name: value for name, value in before.items() if name not in unset}
        policy = fields.over(ScopePolicy(**rest)).check()
        full = self.policies.namespaces >= NAMESPACES_MAX
        if scope.namespace and full and not before and policy.pack():
            limit = f"at most {NAMESPACES_MAX} namespaces have policies"
            raise InvalidRequestError("namespace", scope.namespace, limit)
        return policy

    def change(self, scope: Scope, policy: ScopePolicy) -> None:
        """Use a scope's new policy from now on: the leader has appended its entry."""
        self.policies = self.policies.with_policy(scope, policy)
        self._rules.clear()
