"""Owners of request ids and producers: with TLS, those of one identity are no other identity's.

The state knows texts only, so the owner is mixed into them before the log. Without TLS they stay as
the client sent them.

    request id   -> a hash of identity and id: equal ids of two callers are two requests
    token        -> identity, a zero byte, token: the producer is of the identity that registered it
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

from cluster.rpc.rpc_caller import CALLER
from timer.leader.leader import Leader
from timer.model.timer_errors import (
    CallerLimitError,
    EngineError,
    InvalidRequestError,
    UnknownProducerError,
)
from timer.model.units import Now, ProducerId
from timer.state.producers import owner_of

FULL_RETRY_MS: Final = 10_000
"""A producer is forgotten only after it was idle for long, or if it ends itself."""
_HASH_SIZE: Final = 24
"""Bytes. Two requests of one hash would need 2 ** 96 tries."""


def _owner() -> bytes:
    """Return the identity of the present caller and a zero byte. Empty: there is no TLS."""
    caller = CALLER.get()
    return b"" if caller is None else f"{caller.identity}\0".encode()


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


class RegistrationLimit:
    """The limit `most.producers` of the rules of access. The leader counts."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, set[bytes]] = {}
        """Tokens of registrations that the log has not answered, by owner. A registration goes on
        when its call has ended."""

    def register(
        self, leader: Leader, token: bytes, drawn: ProducerId, now: Now, done: Callable[[Any], None]
    ) -> None:
        """Register a producer of the present caller; see Leader. A known token adds none.

        Raises:
            EngineError: see Leader; CallerLimitError: the caller has as many as it may have.
        """
        caller, producers = CALLER.get(), leader.machine.producers
        most = None if caller is None else caller.usages.limits(caller.identity).producers
        owner = owner_of(token)
        under_way = self._under_way.get(owner, set())
        if caller is None or most is None or producers.knows(token) or token in under_way:
            leader.register(token, drawn, now, done)
            return
        there = producers.owned(owner) + len(under_way)
        if there >= most:
            limit = f"{there} are registered: must be at most {most}"
            raise CallerLimitError(f"most.producers of {caller.identity}", limit, FULL_RETRY_MS)

        def answered(result: object) -> None:
            self._end(owner, token)
            done(result)

        self._under_way.setdefault(owner, set()).add(token)
        try:
            leader.register(token, drawn, now, answered)
        except EngineError:
            self._end(owner, token)
            raise

    def _end(self, owner: bytes, token: bytes) -> None:
        self._under_way[owner].discard(token)
        if not self._under_way[owner]:
            del self._under_way[owner]


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
