"""Request ids: one repeated request of a client without a producer is one set of timers.

    schedule, id "order-4711" --> applied: its answer is remembered until a time on the log's clock
    the same again            --> that answer, from whoever leads by then
    another with that id      --> refused
    after that time           --> a new request

Who sends a request once in a while, and may die before its answer comes, needs no number and no
stream; it names the request instead. How long an id is remembered the leader decides as it appends
(the entry says it), so every replica forgets it at the same entry. What does not fit is refused by
the leader rather than forgotten early: an id that was answered counts until its time.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from timer.model.columns import RequestId
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import UnixMs
from timer.state.producers import RequestAnswer

REQUESTS_MAX: Final = 131_072
"""Ids remembered at a time: 437 a second over five minutes; 600 bytes of memory each."""
REQUEST_ROWS_MAX: Final = 1 << 20
"""Rows in all remembered answers: eight megabytes of due times."""
EXPIRED_MAX: Final = 4096
"""So many are forgotten at one checkpoint: some seven milliseconds' work."""
_MASK: Final = (1 << 64) - 1
_HASHED: Final = struct.Struct("<QqQQ")


class RememberedRequest(NamedTuple):
    """A request that was applied, and what it was answered."""

    request: RequestId
    answer: RequestAnswer


@dataclass(slots=True)
class RequestIds:
    """All requests with an id that are remembered, in the order of the log."""

    sum: int = 0
    """Order-free sum of their hashes, modulo 2 ** 64: for the digest."""
    rows: int = 0
    """In all their answers."""
    _kept: dict[bytes, RememberedRequest] = field(default_factory=dict)

    def repeated(self, request: RequestId, now_ms: UnixMs) -> RequestAnswer | None:
        """Return the stored answer of a repeated request; None: it is new.

        Raises:
            InvalidRequestError: its id is remembered of another request.
        """
        kept = self._kept.get(request.text)
        if kept is None or kept.request.until_ms < now_ms:
            return None
        if kept.request.body != request.body:
            limit = f"was another request's, which is remembered until {kept.request.until_ms} ms"
            raise InvalidRequestError("request_id", request.text.decode(errors="replace"), limit)
        return kept.answer

    def accept(self, request: RequestId, answer: RequestAnswer, now_ms: UnixMs) -> None:
        """Remember the answer of a new request; forget some whose time is over."""
        self.expire(now_ms, 2)
        self._forget(request.text)  # its time was over
        self._keep(RememberedRequest(request, answer))

    def _keep(self, kept: RememberedRequest) -> None:
        self._kept[kept.request.text] = kept
        self.sum = (self.sum + _hash(kept)) & _MASK
        self.rows += len(kept.answer.due_ms)

    def expire(self, now_ms: UnixMs, most: int = EXPIRED_MAX) -> None:
        """Forget those whose time is over, among so many of the first."""
        first = [kept.request for kept in islice(self._kept.values(), most)]
        for request in first:
            if request.until_ms < now_ms:
                self._forget(request.text)

    def _forget(self, text: bytes) -> None:
        kept = self._kept.pop(text, None)
        if kept is not None:
            self.sum = (self.sum - _hash(kept)) & _MASK
            self.rows -= len(kept.answer.due_ms)

    def all(self) -> list[RememberedRequest]:
        """Return them in order; none of it changes later."""
        return list(self._kept.values())

    def restore(self, kept: Iterable[RememberedRequest]) -> None:
        """Put back what a manifest holds."""
        for each in kept:
            self._keep(each)

    def __len__(self) -> int:
        return len(self._kept)


def _hash(kept: RememberedRequest) -> int:
    (text, body, until_ms), answer = kept
    tail = _HASHED.pack(body, until_ms, answer.first_seq, len(answer.due_ms))
    return int.from_bytes(hashlib.blake2b(text + tail, digest_size=8).digest(), "little")
