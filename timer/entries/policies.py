"""Policies: settings of the cluster, a namespace or a topic for its timers.

    node's settings < cluster < namespace < topic        the narrower wins, field by field

The topic "ns/name" is in the namespace `ns`; one without a "/" is in `default`, and "default/name"
is another way to write "name". A namespace needs no making: it is there by its name.

One POLICY entry of the log holds the whole policy of one scope from there on, so that all replicas
change at one point. Most fields take effect when a timer is scheduled
(timer/leader/intake/admission.py): timers that are pending then keep their effective due. `ttl_ms`
(timer/leader/groups/expiry.py) and `retention_ms` (timer/ready/topic.py) of fired messages, and the
rates of delivery (timer/leader/groups/delivery_rates.py), are looked up each time. `paused` and
`catch_up` take effect at once, for all pending timers (timer/state/pauses.py). These two,
retention, the jitter and the rates are no settings of a node.

    POLICY, and each record of the manifest, as a msgpack map with exactly these keys:
        version    1
        namespace  str, empty unless it is a namespace's
        topic      TopicId, 0 unless it is a topic's
        policy     map with the fields of `ScopePolicy` that are set, and no others
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import msgpack

from timer.model.timer_errors import InvalidRequestError
from timer.model.units import DUE_MS_MAX, TopicId

VERSION: Final = 1
DEFAULT_NAMESPACE: Final = "default"
NAMESPACES_MAX: Final = 4_096
"""Namespaces with policies, at most: every replica has them all in memory."""
TICK_MS_MAX: Final = 3_600_000
LEVELS_MAX: Final = 256
PAYLOAD_BYTES_MAX: Final = 16 << 20
DELAY_LEVELS_MS: Final = tuple(
    1000 * seconds for seconds in (1, 5, 10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)
)
"""RocketMQ's: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h."""


CATCH_UP_ALL: Final = "all"
LATEST: Final = "latest"
DROP: Final = "drop"
CATCH_UPS: Final = (CATCH_UP_ALL, LATEST, DROP)


class Scope(NamedTuple):
    """The scope of a policy: the cluster, or one namespace, or one topic."""

    namespace: str = ""
    topic: TopicId = TopicId(0)


CLUSTER: Final = Scope()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopePolicy:
    """The policy of one scope. None in a field: the next wider scope decides."""

    delayed_delivery: bool | None = None
    """False: new messages are due at once."""
    tick_ms: int | None = None
    """Effective due times are rounded up to a multiple of this."""
    delay_ms_min: int | None = None
    """Shorter delays become this one."""
    delay_ms_max: int | None = None
    """Longer delays are rejected."""
    fixed_delay_ms: int | None = None
    """The delay of every new message, in place of the requested one."""
    payload_bytes_max: int | None = None
    delay_levels_ms: tuple[int, ...] | None = None
    """The delays of levels 1, 2, 3, …; higher levels have the last one's."""
    pending_max: int | None = None
    """Pending timers, at most. Quotas hold for each topic (timer/leader/intake/quotas.py)."""
    pending_bytes_max: int | None = None
    """Bytes of their payloads."""
    ready_max: int | None = None
    """Unacked messages of the group that has the most, at most."""
    ready_bytes_max: int | None = None
    """Bytes of their payloads."""
    ttl_ms: int | None = None
    """Time after the due time at which an unacked message expires. 0: it never expires."""
    retention_ms: int | None = None
    """Time for which fired messages are kept, even if all groups have acked them."""
    paused: bool | None = None
    """True: no timer fires. Timers that become due are held."""
    catch_up: str | None = None
    """The fate of held timers when the pause ends: one of CATCH_UPS."""
    jitter_ms: int | None = None
    """A new timer is due later than requested by a random time from 0 to this."""
    topic_rate_max: int | None = None
    """Deliveries of the topic's messages a second, at most, all groups together. 0: no limit."""
    group_rate_max: int | None = None
    """Deliveries a second to each group of the topic, at most. 0: no limit."""

    def check(self) -> "ScopePolicy":
        """Return itself.

        Raises:
            InvalidRequestError: a value is out of range, or two of them contradict each other.
        """
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(name, value, f"must be {low} to {high}")
        if self.catch_up is not None and self.catch_up not in CATCH_UPS:
            limit = f"must be one of {', '.join(CATCH_UPS)}"
            raise InvalidRequestError("catch_up", self.catch_up, limit)
        levels = self.delay_levels_ms
        if levels is not None:
            if not 1 <= len(levels) <= LEVELS_MAX:
                limit = f"must be 1 to {LEVELS_MAX} delays"
                raise InvalidRequestError("delay_levels_ms", f"{len(levels)} values", limit)
            if not all(1 <= level <= DUE_MS_MAX for level in levels):
                limit = f"each must be 1 to {DUE_MS_MAX}"
                raise InvalidRequestError("delay_levels_ms", [*levels], limit)
        least, most, fixed = self.delay_ms_min or 0, self.delay_ms_max, self.fixed_delay_ms
        if most is not None and most < least:
            raise InvalidRequestError(
                "delay_ms_min", least, f"must be at most delay_ms_max = {most}"
            )
        if fixed is not None and not least <= fixed <= (fixed if most is None else most):
            limit = f"must be at least delay_ms_min = {least}"
            if fixed > least:
                limit = f"must be at most delay_ms_max = {most}"
            raise InvalidRequestError("fixed_delay_ms", fixed, limit)
        return self

    def pack(self) -> dict[str, Any]:
        """Return the fields that are set."""
        values = ((name, getattr(self, name)) for name in FIELDS)
        return {name: value for name, value in values if value is not None}

    @classmethod
    def unpack(cls, packed: object) -> "ScopePolicy":
        """Return the policy of a map made by `pack` that went through msgpack.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(packed, dict) or not packed.keys() <= set(FIELDS):
            raise ValueError(f"policy = {packed!r}: must be a map with fields of {sorted(FIELDS)}")
        for name, value in packed.items():
            numbers = value if name == "delay_levels_ms" else [value]
            kind = int if name == "delay_levels_ms" else KINDS[name]
            if not isinstance(numbers, list) or any(type(each) is not kind for each in numbers):
                of = "a list of " if name == "delay_levels_ms" else ""
                raise ValueError(f"{name} = {value!r}: must be {of}{kind.__name__}")
        levels = packed.get("delay_levels_ms")
        return cls(**{**packed, "delay_levels_ms": levels and tuple(levels)})

    def over(self, wider: "ScopePolicy") -> "ScopePolicy":
        """Return `wider` with the fields that are set here."""
        return replace(wider, **self.pack())


NO_POLICY: Final = ScopePolicy()
FIELDS: Final = tuple(each.name for each in fields(ScopePolicy))
QUOTAS: Final = ("pending_max", "pending_bytes_max", "ready_max", "ready_bytes_max")
QUOTA_MAX: Final = (1 << 63) - 1
"""Greatest quota of an entry."""
NEW_QUOTA_MAX: Final = (1 << 53) - 1
"""Greatest quota that a request may set: the greatest number that every reader of JSON keeps."""
RATES: Final = ("topic_rate_max", "group_rate_max")
RATE_MAX: Final = 1_000_000_000
JITTER_MS_MAX: Final = 86_400_000
FIELDS_OF_LEVEL_2: Final = ("jitter_ms", *RATES)
"""Fields that programs without feature level 2 do not know (timer/model/feature_level.py)."""
KINDS: Final[dict[str, type]] = {each.name: get_args(each.type)[0] for each in fields(ScopePolicy)}
"""Type of each field's value."""
RANGES: Final = {
    "tick_ms": (1, TICK_MS_MAX),
    "delay_ms_min": (0, DUE_MS_MAX),
    "delay_ms_max": (0, DUE_MS_MAX),
    "fixed_delay_ms": (0, DUE_MS_MAX),
    "payload_bytes_max": (1, PAYLOAD_BYTES_MAX),
    **dict.fromkeys(QUOTAS, (0, QUOTA_MAX)),
    "ttl_ms": (0, DUE_MS_MAX),
    "retention_ms": (0, DUE_MS_MAX),
    "jitter_ms": (0, JITTER_MS_MAX),
    **dict.fromkeys(RATES, (0, RATE_MAX)),
}
DEFAULTS: Final = ScopePolicy(
    delayed_delivery=True,
    tick_ms=1,
    delay_ms_min=0,
    delay_ms_max=DUE_MS_MAX,
    payload_bytes_max=PAYLOAD_BYTES_MAX,
    delay_levels_ms=DELAY_LEVELS_MS,
    paused=False,
    catch_up=CATCH_UP_ALL,
)
"""The policy of a node with default settings."""
NODE_BOUNDS: Final = ("delay_ms_max", "payload_bytes_max")
"""Fields whose values never exceed the node's own setting."""


class Effective(NamedTuple):
    """The policy in force for a topic, or for new topics of a scope."""

    policy: ScopePolicy
    """Every field is set, except those without a default: quotas, ttl and others."""
    sources: Mapping[str, str]
    """Field -> its source: node, cluster, namespace or topic."""


class _Record(NamedTuple):
    policy: ScopePolicy
    packed: bytes
    """With its scope: see `encode_policy`."""


class Policies:
    """The policies of all scopes at one point of the log. Immutable; `with_policy` returns another.

    `changed` packs the changed policy and copies references to the others, as each topic may have
    one.
    """

    def __init__(self, records: Mapping[Scope, ScopePolicy] = MappingProxyType({})) -> None:
        self._records: dict[Scope, _Record] = {}
        self._order: list[Scope] = []
        """The scopes that have a policy, sorted."""
        self._counts: Counter[str] = Counter()
        """Field -> the number of scopes that set it."""
        for scope, policy in sorted(records.items()):
            self._put(scope, policy)

    def of(self, scope: Scope) -> ScopePolicy:
        """Return the policy of a scope itself."""
        record = self._records.get(scope)
        return NO_POLICY if record is None else record.policy

    def with_policy(self, scope: Scope, policy: ScopePolicy) -> "Policies":
        """Return the policies after that of `scope` is replaced by `policy`."""
        after = Policies()
        after._records, after._order = self._records.copy(), self._order.copy()
        after._counts = self._counts.copy()
        after._put(scope, policy)
        return after

    def _put(self, scope: Scope, policy: ScopePolicy) -> None:
        """Set the policy of a scope, before the object is shared."""
        before, values = self._records.get(scope), policy.pack()
        if before is not None:
            self._counts.subtract(before.policy.pack().keys())
        self._counts.update(values.keys())
        at = bisect_left(self._order, scope)
        if values:
            self._records[scope] = _Record(policy, encode_policy(scope, policy))
            if before is None:
                self._order.insert(at, scope)
        elif before is not None:
            del self._records[scope], self._order[at]

    def __iter__(self) -> Iterator[tuple[Scope, ScopePolicy]]:
        """Yield the scopes that have a policy: the cluster, topics by id, namespaces by name."""
        return ((scope, self._records[scope].policy) for scope in self._order)

    @property
    def namespaces(self) -> int:
        """Number of namespaces that have a policy."""
        first = Scope("\0")  # all others have an empty name
        return len(self._order) - bisect_left(self._order, first)

    @property
    def has_narrow_scopes(self) -> bool:
        """Whether a scope other than the cluster has a policy."""
        return len(self._records) > (CLUSTER in self._records)

    def has(self, *fields: str) -> bool:
        """Return whether a policy sets one of these fields."""
        return any(self._counts[name] for name in fields)

    def value_of(self, field: str, name: str, topic: TopicId) -> Any:
        """Return the value of a field for the topic of this name; None: no policy sets it.

        The node's settings do not count.
        """
        return self.value_and_source(field, name, topic)[0]

    def value_and_source(self, field: str, name: str, topic: TopicId) -> tuple[Any, str]:
        """Return the value that `value_of` returns, and its source: topic, namespace or cluster."""
        if self._counts[field]:
            for source, scope in (
                ("topic", Scope("", topic)),
                ("namespace", Scope(namespace_of(name))),
                ("cluster", CLUSTER),
            ):
                value = getattr(self.of(scope), field)
                if value is not None:
                    return value, source
        return None, ""

    def pause_of(self, namespace: str, topic: TopicId) -> tuple[bool, str]:
        """Return whether a topic is paused, and the fate of its overdue timers at the resume."""
        paused, catch_up = False, CATCH_UP_ALL
        for scope in (CLUSTER, Scope(namespace), Scope("", topic)):
            if scope in self._records:
                policy = self._records[scope].policy
                paused = paused if policy.paused is None else policy.paused
                catch_up = policy.catch_up or catch_up
        return paused, catch_up

    @cached_property
    def encoded(self) -> list[bytes]:
        """The POLICY payloads of all scopes, for the manifest. Do not change the list."""
        return [self._records[scope].packed for scope in self._order]

    @cached_property
    def packed(self) -> bytes:
        """All policies, for the digest: equal bytes if and only if they are equal."""
        return b"".join(self.encoded)

    def effective(
        self, node: ScopePolicy, namespace: str = "", topic: TopicId = TopicId(0)
    ) -> Effective:
        """Return the policy in force for a topic. 0: for new topics of the namespace."""
        policy = node
        sources = dict.fromkeys(node.pack(), "node")
        narrower = {"cluster": CLUSTER, "namespace": Scope(namespace), "topic": Scope("", topic)}
        for name, scope in narrower.items():
            if scope not in self._records or (name != "cluster" and scope == CLUSTER):
                continue
            own = self.of(scope)
            policy = own.over(policy)
            sources |= dict.fromkeys(own.pack(), name)
        for name in NODE_BOUNDS:
            if getattr(policy, name) > getattr(node, name):
                policy = replace(policy, **{name: getattr(node, name)})
                sources[name] = "node"
        return Effective(policy, sources)


def namespace_of(topic: str) -> str:
    """Return the namespace that a topic is in, by its name."""
    namespace, slash, _ = topic.partition("/")
    return namespace if slash else DEFAULT_NAMESPACE


def encode_policy(scope: Scope, policy: ScopePolicy) -> bytes:
    """Return the payload of a POLICY entry: the whole policy of `scope` from there on."""
    record = {"version": VERSION, **scope._asdict(), "policy": policy.pack()}
    return bytes(msgpack.packb(record))


def decode_policy(payload: bytes | memoryview) -> tuple[Scope, ScopePolicy]:
    """Return the scope and the policy of a POLICY entry.

    Raises:
        ValueError: the payload is malformed, or of another version.
    """
    record = msgpack.unpackb(payload)
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ValueError(f"POLICY of {record!r}: must be a map with version = {VERSION}")
    if record.keys() != {"version", "policy", *Scope._fields}:
        raise ValueError(f"POLICY of {record!r}: must have version, namespace, topic and policy")
    namespace, topic = record["namespace"], record["topic"]
    if type(namespace) is not str or type(topic) is not int or (namespace and topic):
        raise ValueError(
            f"POLICY of namespace {namespace!r} and topic {topic!r}: must be a string and an"
            " integer, at most one of them set"
        )
    return Scope(namespace, TopicId(topic)), ScopePolicy.unpack(record["policy"])
