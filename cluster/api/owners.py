"""Owners: with TLS, request ids and producers belong to an identity. Topics have a creator.

The state knows texts only, so the owner is mixed into them before the log. Without TLS they stay as
the client sent them.

    request id   -> a hash of identity and id: equal ids of two callers are two requests
    token        -> identity, a zero byte, token: the producer is of the identity that registered it
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from cluster.rpc.caller_usages import USAGES_MAX
from cluster.rpc.rpc_caller import CALLER
from cluster.security.access_rules import AccessRules, AccessTarget
from timer.entries.payloads import CreateGroup
from timer.leader.leader import Leader
from timer.model.feature_level import LEVEL_OF_CREATORS
from timer.model.recurrence import SeriesSpec
from timer.model.timer_errors import (
    CallerLimitError,
    EngineError,
    InvalidRequestError,
    LimitReachedError,
    UnknownProducerError,
)
from timer.model.units import Now, ProducerId, TopicId
from timer.state.machine import Machine
from timer.state.producers import owner_of

FULL_RETRY_MS: Final = 10_000
"""A producer is forgotten only after it was idle for long, or if it ends itself."""
Done: TypeAlias = Callable[[Any], None]
_HASH_SIZE: Final = 24
"""Bytes. Two requests of one hash would need 2 ** 96 tries."""


def _identity() -> str:
    """Return the identity of the present caller. Empty: there is no TLS."""
    caller = CALLER.get()
    return "" if caller is None else str(caller.identity)


def _owner() -> bytes:
    """Return the identity of the present caller and a zero byte. Empty: there is no TLS."""
    identity = _identity()
    return f"{identity}\0".encode() if identity else b""


def owned_request_id(text: str) -> bytes:
    """Return the id under which the state remembers a request of the present caller."""
    owner, plain = _owner(), text.encode()
    if not owner:
        return plain
    return hashlib.blake2b(owner + plain, digest_size=_HASH_SIZE).hexdigest().encode()


def as_sent(error: InvalidRequestError, request_id: str) -> InvalidRequestError:
    """Return an error about a request id with the id that the client sent."""
    if error.field != "request_id":
        return error
    return InvalidRequestError(error.field, request_id, error.limit)


def owned_token(token: bytes) -> bytes:
    """Return the token under which the state registers a producer of the present caller."""
    return _owner() + token


class _SeriesCount(NamedTuple):
    """The series of an identity at the last count; by default, in an empty table."""

    series: int = 0
    next_id: int = 1
    """Id of the next series of the cluster then."""
    topics: tuple[TopicId, ...] = ()
    """Topics of these series: all, or as many as prove that the limit was reached."""


class CreationLimits:
    """The limits of the rules of access on what there may be in the cluster; the leader counts.

    A topic or group counts for the identity that created it (timer/state/creators.py). A series has
    no creator: it counts for each identity that may produce to its topic.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], set[Any]] = {}
        """New objects that the log has not answered, by kind and owner; series by topic and key. A
        creation goes on when its call has ended."""
        self._rules: AccessRules | None = None
        self._counts: dict[str, _SeriesCount] = {}
        """The last count of each identity by these rules, at most USAGES_MAX."""

    def register(
        self, leader: Leader, token: bytes, drawn: ProducerId, now: Now, done: Done
    ) -> None:
        """Register a producer of the present caller; see Leader. A known token adds none.

        Raises:
            EngineError: see Leader; CallerLimitError: the caller has as many as it may have.
        """
        producers = leader.machine.producers
        propose = functools.partial(leader.register, token, drawn, now)
        new = None if producers.has_token(token) else token
        self._propose(
            "producers", new, lambda _: producers.count_of_owner(owner_of(token)), propose, done
        )

    def topic(self, leader: Leader, name: str, now: Now, done: Done) -> None:
        """Create a topic for the present caller, if it does not exist; see Leader.

        Raises:
            EngineError: see Leader; LimitReachedError: the caller created as many as it may.
        """
        creator = _creator(leader)
        propose = functools.partial(leader.create_topic, name, now, creator=creator)
        new = None if leader.topic_or_none(name) is not None else name
        there = leader.machine.creators.topics
        self._propose("topics", new, lambda _: there[creator], propose, done)

    def check_topics(self, leader: Leader, names: Collection[str]) -> None:
        """Check that the present caller may create topics, which do not exist, all together.

        Raises:
            LimitReachedError: see Leader; or it would have created more than it may.
        """
        leader.check_new_topics(names)
        creator, there = _creator(leader), leader.machine.creators.topics
        more = len({*names} - self._under_way.get(("topics", _identity()), set()))
        self._check("topics", lambda _: there[creator], more)

    def group(self, leader: Leader, create: CreateGroup, done: Done) -> None:
        """Create a group for the present caller, if it does not exist; see GroupDispatch.

        Raises:
            EngineError: see GroupDispatch; LimitReachedError: the caller created as many as it may.
        """
        creator, topic = _creator(leader), leader.machine.topics.get(create.topic)
        propose = functools.partial(leader.groups.create, replace(create, creator=creator))
        is_known = topic is None or create.name in topic.groups
        new = None if is_known else (create.topic, create.name)
        there = leader.machine.creators.groups
        self._propose("groups", new, lambda _: there[creator], propose, done)

    def check_group(self, leader: Leader) -> None:
        """Check that the present caller may create a group in a new topic.

        Raises:
            LimitReachedError: see Leader and `group`.
        """
        creator, there = _creator(leader), leader.machine.creators.groups
        leader.check_group_of_new_topic()
        self._check("groups", lambda _: there[creator])

    def series(
        self, leader: Leader, topic: TopicId, key: bytes, spec: SeriesSpec, now: Now, done: Done
    ) -> None:
        """Create a series for the present caller; see SeriesIntake.

        Raises:
            EngineError: see SeriesIntake; LimitReachedError: the topics to which the caller may
                produce have as many as it may create.
        """
        propose = functools.partial(leader.series.create, topic, key, spec, now)
        there, table = leader.machine.topics.get(topic), leader.machine.series
        new = None if there is None or table.find(topic, key) else (there.name, key)
        count = functools.partial(self._series_there, leader.machine)
        self._propose("series", new, count, propose, done)

    @contextmanager
    def reserve_series(self, leader: Leader, topic: str, key: bytes) -> Iterator[None]:
        """Reserve a place for a series in a new topic, until the end of the block.

        `series` is to be called at once after the block. Equal requests share a place.

        Raises:
            EngineError: see SeriesIntake.check_count; LimitReachedError: see `series`.
        """
        owner, new = ("series", _identity()), (topic, key)
        if new in self._under_way.get(owner, ()):
            yield
            return
        with leader.series.reserve():
            self._check("series", functools.partial(self._series_there, leader.machine))
            self._begin(owner, new)
            try:
                yield
            finally:
                self._end(owner, new)

    def _series_there(self, machine: Machine, below: int) -> int:
        """Return the number of the caller's series, with those that others create in its topics.

        It may be a bound of that number on the same side of `below`. The rules decide on the topics
        of the others only if the caller would have too many with all of them.
        """
        caller, own = CALLER.get(), ("series", _identity())
        assert caller is not None
        if (there := self._series_bound(machine, below)) >= below:
            return there
        under_way = self._under_way.items()
        others = [new for key, new in under_way if key[0] == "series" and key != own]
        number = sum(map(len, others))
        if there + number >= below:
            number = sum(caller.allows(AccessTarget(topic)) for new in others for topic, _ in new)
            there = self._series_bound(machine, below - number)
        return there + number

    def _series_bound(self, machine: Machine, below: int) -> int:
        """Return the number of the caller's series, or a bound of it on the same side of `below`.

        All series that were created since the last count, and those that are left in its topics,
        bound it. So another count follows only a deletion in one of these topics, or a creation
        with which the caller may have reached `below`.
        """
        caller, table = CALLER.get(), machine.series
        assert caller is not None
        if (rules := caller.rules()) is not self._rules:
            self._rules, self._counts = rules, {}
        identity = str(caller.identity)
        last = self._counts.get(identity, _SeriesCount())
        if (most := last.series + table.next_id - last.next_id) < below:
            return most
        if (least := sum(table.by_topic[topic] for topic in last.topics)) >= below:
            return least
        topics = _topics_of_caller(machine)
        found = sum(table.by_topic[topic] for topic in topics)
        self._counts.pop(identity, None)
        if len(self._counts) >= USAGES_MAX:
            del self._counts[next(iter(self._counts))]  # the oldest
        self._counts[identity] = _SeriesCount(found, table.next_id, tuple(topics[:below]))
        return found

    def _propose(
        self,
        kind: str,
        new: object,
        count: Callable[[int], int],
        propose: Callable[[Done], None],
        done: Done,
    ) -> None:
        """Propose an object of the present caller. `new`: None: it exists already."""
        key = kind, _identity()
        if new is None or new in self._under_way.get(key, ()):
            propose(done)
            return
        self._check(kind, count)

        def on_answer(result: object) -> None:
            self._end(key, new)
            done(result)

        self._begin(key, new)
        try:
            propose(on_answer)
        except EngineError:
            self._end(key, new)
            raise

    def _check(self, kind: str, count: Callable[[int], int], more: int = 1) -> None:
        """Check that the present caller may have `more` objects.

        `count` returns the number of its objects. It is called if the caller has a limit, with the
        number from which on the creation of one is refused.

        Raises:
            EngineError: see _limit_error.
        """
        if (caller := CALLER.get()) is None:
            return
        most: int | None = getattr(caller.usages.limits(caller.identity), kind)
        under_way = len(self._under_way.get((kind, _identity()), ()))
        if most is None:
            return
        if (there := count(most - under_way) + under_way) + more > most:
            raise _limit_error(kind, most, _identity(), there)

    def _begin(self, key: tuple[str, str], new: object) -> None:
        self._under_way.setdefault(key, set()).add(new)

    def _end(self, key: tuple[str, str], new: object) -> None:
        self._under_way[key].discard(new)
        if not self._under_way[key]:
            del self._under_way[key]


def _topics_of_caller(machine: Machine) -> list[TopicId]:
    """Return the topics with series for which the present caller may call its method.

    Topics of other prefixes are left out at once: the rules cost more.
    """
    caller = CALLER.get()
    assert caller is not None
    prefixes, found = caller.topic_prefixes(), list[TopicId]()
    for topic in map(TopicId, machine.series.by_topic):
        name = machine.topics[topic].name
        if name.startswith(prefixes) and caller.allows(AccessTarget(name)):
            found.append(topic)
    return found


def _creator(leader: Leader) -> str:
    """Return the creator in a new entry: the present caller, if the feature level has creators."""
    return _identity() if leader.machine.level >= LEVEL_OF_CREATORS else ""


def _limit_error(kind: str, most: int, identity: str, there: int) -> EngineError:
    """Return the error of a limit. Idle producers end by themselves, so a later try may succeed."""
    if kind != "producers":
        return LimitReachedError(f"most.{kind}", most, identity, there)
    limit = f"{there} are registered: must be at most {most}"
    return CallerLimitError(f"most.producers of {identity}", limit, FULL_RETRY_MS)


def owns_producer(leader: Leader, producer_id: ProducerId) -> bool:
    """Return whether the present caller may use a producer. False: as if there were none."""
    owner = _owner()
    found = leader.machine.producers.get(producer_id)
    return not owner or (found is not None and found.token.startswith(owner))


def check_producer_owner(leader: Leader, producer_id: ProducerId) -> None:
    """Check that the present caller registered a producer.

    Raises:
        UnknownProducerError: another identity did, or there is no such producer.
    """
    if producer_id and not owns_producer(leader, producer_id):
        raise UnknownProducerError(producer_id)
