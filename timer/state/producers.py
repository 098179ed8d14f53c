"""Idempotent producers: one retried request is one set of timers.

A producer numbers its requests 1, 2, 3, … Apply accepts the number after the last one, and returns
the stored answer for a recent one. It rejects gaps, older numbers, unknown ids, and a number that
another request used. The log alone decides, so every replica agrees, also after a failover.

A producer's id is 63 random bits drawn by the leader. Only the client that registered knows it.
Others see the producer's `name`, a hash of its id.
"""

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final

import numpy as np
from sortedcontainers import SortedDict

from timer.model.columns import I64
from timer.model.timer_errors import (
    InvalidRequestError,
    OutcomeForgottenError,
    SequenceGapError,
    UnknownProducerError,
)
from timer.model.units import ProducerId, Seq, UnixMs
from timer.state.dirty_topics import MANY, DirtyIds, take_all, take_some
from timer.state.key_conflicts import Verdicts

ANSWERS_MAX: Final = 1024
ANSWER_ROWS_MAX: Final = 262_144
"""Rows in all stored answers of one producer: two megabytes of due times."""
IDLE_MS_MAX: Final = 7 * 24 * 3_600_000
"""Idle time after which a producer is forgotten, if the leader's settings give no other."""

ID_BITS: Final = 63
"""Bits of a producer id."""

_MASK: Final = (1 << 64) - 1
_PACKED: Final = struct.Struct("<4Q")
"""Id, last sequence, number of answers, time of last use."""


def name_of(producer_id: ProducerId) -> int:
    """Return a producer's public name, 64 bits, from which its id cannot be computed."""
    data = producer_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def owner_of(token: bytes) -> bytes:
    """Return the identity before the zero byte of a token. Empty: the token has no zero byte."""
    owner, zero, _ = token.partition(b"\0")
    return owner if zero else b""


@dataclass(slots=True)
class RequestAnswer:
    """The answer to an applied request. Its rows have the seqs first_seq, first_seq + 1, …"""

    sequence: int
    first_seq: Seq
    due_ms: I64
    """Effective due times, (n, int64)."""
    body: int = 0
    """Checksum of the request (Part.body)."""
    verdicts: Verdicts | None = None
    """Set when the whole entry is decided. None: every row is SCHEDULED."""

    def pack(self) -> list[Any]:
        """Return the fields for a manifest: columns as bytes, the verdicts' last and if present."""
        verdicts = self.verdicts
        columns = () if verdicts is None else (verdicts.verdict, verdicts.due_ms, verdicts.seq)
        tail = [column.tobytes() for column in columns]
        return [self.sequence, self.first_seq, self.due_ms.tobytes(), self.body, *tail]

    @classmethod
    def unpack(
        cls, sequence: int, first_seq: int, due_ms: bytes, body: int, *verdicts: bytes
    ) -> "RequestAnswer":
        """Return the answer that `pack` returned the fields of."""
        answer = cls(sequence, Seq(first_seq), np.frombuffer(due_ms, np.int64), body)
        if verdicts:
            verdict, other_due_ms, other_seq = verdicts
            answer.verdicts = Verdicts(
                np.frombuffer(verdict, np.uint8),
                np.frombuffer(other_due_ms, np.int64),
                np.frombuffer(other_seq, np.uint64),
            )
        return answer


@dataclass(slots=True)
class ProducerState:
    """One producer's recent requests."""

    token: bytes
    used_at_ms: UnixMs
    last_sequence: int = 0
    answers: deque[RequestAnswer] = field(default_factory=deque[RequestAnswer])
    """Answers to the requests up to last_sequence, without gaps; the oldest may be dropped."""
    answer_rows: int = 0


class Producers:
    """All producers that were issued an id and have not expired."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[ProducerId, ProducerState] = OrderedDict()
        """In the order of last use. An OrderedDict finds its first item at once."""
        self._by_name = SortedDict()
        """Producer id by public name."""
        self._by_token: dict[bytes, ProducerId] = {}
        self._by_owner: Counter[bytes] = Counter()
        """Number of producers by the part of their tokens before the first zero byte."""
        self.changes = DirtyIds[ProducerId]()
        self._hash_by_id: dict[ProducerId, int] = {}
        self._changed = self.changes.reader()
        """Producers that changed since `_hash_by_id` was computed."""
        self._sum = 0

    def _use(self, producer_id: ProducerId, now_ms: UnixMs) -> ProducerState:
        """Return a producer that is used now; it becomes the last to expire."""
        producer = self._by_id[producer_id]
        self._by_id.move_to_end(producer_id)
        producer.used_at_ms = now_ms
        self.changes.note(producer_id)
        return producer

    def has_token(self, token: bytes) -> bool:
        """Return whether a producer with that token is registered."""
        return token in self._by_token

    def count_of_owner(self, owner: bytes) -> int:
        """Return the number of producers of an owner; see `owner_of`."""
        return self._by_owner[owner]

    def register(self, token: bytes, producer_id: ProducerId, now_ms: UnixMs) -> ProducerId | None:
        """Register a producer; return its id.

        The id is the one that the token has already, or `producer_id`. None: another producer has
        `producer_id`.
        """
        known = self._by_token.get(token)
        if known is not None:
            self._use(known, now_ms)
            return known
        if producer_id in self._by_id:
            return None
        self.restore(producer_id, ProducerState(token, now_ms))
        return producer_id

    def restore(self, producer_id: ProducerId, producer: ProducerState) -> None:
        """Put back a producer that a manifest holds; call in the order of last use."""
        self._by_id[producer_id] = producer
        self._by_token[producer.token] = producer_id
        self._by_owner[owner_of(producer.token)] += 1
        self._by_name[name_of(producer_id)] = producer_id
        self.changes.note(producer_id)

    def stored_answer(
        self, producer_id: ProducerId, sequence: int, body: int
    ) -> RequestAnswer | None:
        """Return the stored answer of a repeated request. None: it is the next one.

        Raises:
            UnknownProducerError: the id was never issued or has expired.
            SequenceGapError: a request before this one is missing.
            OutcomeForgottenError: it was applied so long ago that its answer was dropped.
            InvalidRequestError: another request used the sequence.
        """
        producer = self._by_id.get(producer_id)
        if producer is None:
            raise UnknownProducerError(producer_id)
        if sequence == producer.last_sequence + 1:
            return None
        if sequence > producer.last_sequence:
            raise SequenceGapError(expected=producer.last_sequence + 1, got=sequence)
        back = producer.last_sequence - sequence
        if sequence < 1 or back >= len(producer.answers):
            raise OutcomeForgottenError(sequence)
        answer = producer.answers[-1 - back]
        if answer.body != body:
            limit = "was used by another request of this producer"
            raise InvalidRequestError("sequence", sequence, limit)
        return answer

    def accept(self, producer_id: ProducerId, answer: RequestAnswer, now_ms: UnixMs) -> None:
        """Store the answer of the next request."""
        producer = self._use(producer_id, now_ms)
        assert answer.sequence == producer.last_sequence + 1, (answer.sequence, producer)
        producer.last_sequence = answer.sequence
        producer.answers.append(answer)
        producer.answer_rows += len(answer.due_ms)
        while len(producer.answers) > 1 and (
            len(producer.answers) > ANSWERS_MAX or producer.answer_rows > ANSWER_ROWS_MAX
        ):
            producer.answer_rows -= len(producer.answers.popleft().due_ms)

    def expire(self, now_ms: UnixMs, idle_ms: int = IDLE_MS_MAX) -> Iterator[None]:
        """Forget producers idle for more than `idle_ms` on the log's clock; yield at times."""
        for number in count(1):
            first = next(iter(self._by_id.items()), None)
            if first is None or now_ms - first[1].used_at_ms <= idle_ms:
                break
            self.end(first[0])
            if number % MANY == 0:
                self.keep_up()
                yield

    def end(self, producer_id: ProducerId) -> ProducerId:
        """Forget a producer if it exists; return its id."""
        producer = self._by_id.pop(producer_id, None)
        if producer is not None:
            del self._by_token[producer.token], self._by_name[name_of(producer_id)]
            owner = owner_of(producer.token)
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]
            self.changes.note(producer_id)
        return producer_id

    def sum(self) -> int:
        """Return the sum of all hashes, modulo 2 ** 64; changed producers are hashed first."""
        for producer_id in take_all(self._changed):
            self._hash(producer_id)
        return self._sum

    def keep_up(self) -> bool:
        """Hash some producers if many have changed; return whether many changed ones remain."""
        for producer_id in take_some(self._changed):
            self._hash(producer_id)
        return len(self._changed) > MANY

    def _hash(self, producer_id: ProducerId) -> None:
        old, producer = self._hash_by_id.pop(producer_id, 0), self._by_id.get(producer_id)
        if producer is not None:
            self._hash_by_id[producer_id] = new = _hash(producer_id, producer)
            old -= new
        self._sum = (self._sum - old) & _MASK

    def recomputed_sum(self) -> int:
        """Return the sum recomputed from all producers, for checkers."""
        return sum(_hash(*each) for each in self._by_id.items()) & _MASK

    def get(self, producer_id: ProducerId) -> ProducerState | None:
        """Return a producer; None: the id is unknown."""
        return self._by_id.get(producer_id)

    def ids(self) -> list[ProducerId]:
        """Return all ids."""
        return [*self._by_id]

    def last_sequence(self, producer_id: ProducerId) -> int | None:
        """Return the last applied sequence of a producer. None: the id is unknown."""
        producer = self._by_id.get(producer_id)
        return None if producer is None else producer.last_sequence

    def page(self, after: int, count: int) -> list[tuple[int, ProducerState]]:
        """Return (name, producer) of the next producers after a name, in the order of names."""
        names = islice(self._by_name.irange(after, inclusive=(False, True)), count)
        return [(name, self._by_id[self._by_name[name]]) for name in names]

    def by_name(self, name: int) -> ProducerState:
        """Return the producer of a name.

        Raises:
            UnknownProducerError: no producer has the name, or it has expired.
        """
        if name not in self._by_name:
            raise UnknownProducerError(name)
        return self._by_id[self._by_name[name]]

    def __iter__(self) -> Iterator[tuple[ProducerId, ProducerState]]:
        """Yield (id, producer) in the order of ids."""
        return iter(sorted(self._by_id.items()))

    def __len__(self) -> int:
        return len(self._by_id)


def _hash(producer_id: ProducerId, producer: ProducerState) -> int:
    past = producer.last_sequence, len(producer.answers), producer.used_at_ms
    packed = _PACKED.pack(*(number & _MASK for number in (producer_id, *past)))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
