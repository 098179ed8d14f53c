"""Request ids: repeats of one request, by a client without a producer, create one set of timers.

    schedule, id "order-4711" --> applied; the answer is remembered until a time on the log's clock
    the same request again    --> the same answer, also from a later leader
    another request, same id  --> rejected
    after that time           --> a new request

Such a client sends a request once in a while and may die before the answer comes. It needs no
producer number and no stream: the request has an id. The leader decides at append how long the id
is remembered, and the entry holds that time. Every replica therefore forgets the id at the same
entry. If the memory is full, the leader rejects new requests: an answered id is never forgotten
before its time.
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
"""Most ids remembered at a time: 437 a second over five minutes, 600 bytes of memory each."""
REQUEST_ROWS_MAX: Final = 1 << 20
"""Most rows in all remembered answers: eight megabytes of due times."""
EXPIRED_MAX: Final = 4096
"""Most ids forgotten at one checkpoint: about seven milliseconds of work."""
_MASK: Final = (1 << 64) - 1
_HASHED: Final = struct.Struct("<QqQQ")


class RememberedRequest(NamedTuple):
    """An applied request and its answer."""

    request: RequestId
    answer: RequestAnswer


@dataclass(slots=True)
class RequestIds:
    """All remembered requests that have an id, in log order."""

    sum: int = 0
    """Order-free sum of the requests' hashes, modulo 2 ** 64, for the digest."""
    rows: int = 0
    """Rows in all remembered answers."""
    _kept: dict[bytes, RememberedRequest] = field(default_factory=dict)

    def repeated(self, request: RequestId, now_ms: UnixMs) -> RequestAnswer | None:
        """Return the stored answer of a repeated request. None: the request is new.

        Raises:
            InvalidRequestError: the id belongs to another request that is still remembered.
        """
        kept = self._kept.get(request.text)
        if kept is None or kept.request.until_ms < now_ms:
            return None
        if kept.request.body != request.body:
            limit = f"belongs to another request, remembered until {kept.request.until_ms} ms"
            raise InvalidRequestError("request_id", request.text.decode(errors="replace"), limit)
        return kept.answer

    def accept(self, request: RequestId, answer: RequestAnswer, now_ms: UnixMs) -> None:
        """Store the answer of a new request; forget up to two expired ones."""
        self.expire(now_ms, 2)
        self._forget(request.text)  # an expired request with the same id
        self._keep(RememberedRequest(request, answer))

    def _keep(self, kept: RememberedRequest) -> None:
        self._kept[kept.request.text] = kept
        self.sum = (self.sum + _hash(kept)) & _MASK
        self.rows += len(kept.answer.due_ms)

    def expire(self, now_ms: UnixMs, most: int = EXPIRED_MAX) -> None:
        """Forget the expired requests among the oldest `most`."""
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
        """Return the remembered requests in log order; none of them changes later."""
        return list(self._kept.values())

    def restore(self, kept: Iterable[RememberedRequest]) -> None:
        """Put back the requests that a manifest holds."""
        for each in kept:
            self._keep(each)

    def __len__(self) -> int:
        return len(self._kept)


def _hash(kept: RememberedRequest) -> int:
    (text, body, until_ms), answer = kept
    tail = _HASHED.pack(body, until_ms, answer.first_seq, len(answer.due_ms))
    return int.from_bytes(hashlib.blake2b(text + tail, digest_size=8).digest(), "little")
