"""The parts of SCHEDULE entries that become timers, for chaos/oracle/story.py.

A part is one request of a client. It becomes timers by these rules:

1. A part with a row of a deleted topic changes nothing.
2. A part with a request id counts if the id is not remembered.
3. A part of a producer counts if its sequence is the next one.
4. Any other part counts.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from timer.entries import payloads
from timer.entries.entry_frame import Entry
from timer.model.columns import RequestId, Schedule
from timer.state.producers import IDLE_MS_MAX

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class IntakeStory:
    """Producers and remembered requests after the last entry."""

    tokens: dict[bytes, int] = field(default_factory=dict)
    last_sequence: dict[int, int] = field(default_factory=dict)
    used_at_ms: dict[int, int] = field(default_factory=dict)
    """Time of the last use of each producer that has not expired."""
    requests: dict[bytes, RequestId] = field(default_factory=dict)
    """The text of an id -> the request that it is remembered for."""
    repeats: list[bool] = field(default_factory=list)
    """For each part of the last SCHEDULE: whether it repeats a remembered request."""

    def producer(self, item: Entry) -> None:
        """Apply a PRODUCER entry."""
        said = payloads.decode_producer(item.payload)
        if isinstance(said, payloads.EndProducer):
            self._end(said.producer_id)
            return
        token, drawn = said
        producer = self.tokens.get(token, 0)
        if producer not in self.last_sequence:
            if drawn in self.last_sequence:
                return  # the id belongs to another producer
            self.tokens[token] = producer = drawn
            self.last_sequence[producer] = 0
        self.used_at_ms[producer] = item.time_ms

    def _end(self, producer: int) -> None:
        self.used_at_ms.pop(producer, None)
        self.last_sequence.pop(producer, None)
        self.tokens = {token: each for token, each in self.tokens.items() if each != producer}

    def checkpoint(self, item: Entry) -> None:
        """Forget idle producers and old requests."""
        idle_ms = payloads.decode_checkpoint(item.payload) or IDLE_MS_MAX
        for producer, used_at_ms in [*self.used_at_ms.items()]:
            if item.time_ms - used_at_ms > idle_ms:
                del self.used_at_ms[producer], self.last_sequence[producer]
        if len(self.tokens) > len(self.last_sequence):
            tokens = self.tokens.items()
            self.tokens = {token: number for token, number in tokens if number in self.used_at_ms}
        over = [text for text in self.requests if self.known_request(text, item.time_ms) is None]
        for text in over:
            del self.requests[text]

    def known_request(self, text: bytes, now_ms: int) -> RequestId | None:
        """Return the request for which an id is remembered. None: it is not."""
        known = self.requests.get(text)
        return None if known is None or known.until_ms < now_ms else known

    def timer_rows(self, item: Entry, schedule: Schedule, nowhere: Mask) -> Mask:
        """Return a mask of the rows of a SCHEDULE that become timers.

        `nowhere`: a mask of the rows of deleted topics.
        """
        taken = np.ones(len(schedule.rows), np.bool_)
        start = 0
        lost = nowhere.any()
        self.repeats = []
        for head, request in zip(schedule.parts.tolist(), schedule.requests, strict=True):
            known = self.known_request(request.text, item.time_ms) if request else None
            self.repeats.append(bool(known and request and known.body == request.body))
            producer, sequence, size, *_ = head
            part = slice(start, start + size)
            start += size
            if lost and nowhere[part].any():
                taken[part] = False
            elif request is not None:
                if known is not None:
                    taken[part] = False  # repeated, or another request under its id
                else:
                    self.requests[request.text] = request
            elif self.last_sequence.get(producer, -2) + 1 == sequence:
                self.last_sequence[producer] = sequence
                self.used_at_ms[producer] = item.time_ms
            elif producer:
                taken[part] = False
        return taken
