"""Requests under an id, and the meaning of the ids in the log.

The book is independent of timer/state/request_ids.py. All rows that are sent under one remembered
id are one set of timers. The log tells when an id is forgotten, and its next sending is a new
request.
"""

from dataclasses import dataclass, field

from chaos.sim.checks.keybook import ToldRow
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.model.columns import decode_schedule
from timer.model.timer_errors import InvalidRequestError, TopicDeletedError
from timer.state.apply_results import Accepted, Repeated, ScheduleApplied


@dataclass(slots=True)
class NamedRequest:
    """One request under an id: a row for each of `rows`."""

    text: bytes
    body: int
    rows: list[tuple[str, int]]
    """(topic, delay in ms)."""
    window_ms: int
    sent_us: int = -(1 << 60)
    names: list[ToldRow] | None = None
    """As it was first answered."""

    @property
    def payloads(self) -> list[bytes]:
        """One per timer, like no other's in the world."""
        return [b"%s/%d/%d" % (self.text, self.body, at) for at in range(len(self.rows))]


@dataclass(slots=True)
class RequestBook:
    """See the module. `check` raises Broken if a request's id was not respected."""

    known: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    """Id -> (body, remembered until, first seq)."""
    repeated: int = 0
    refused: int = 0
    checked: int = 0

    def refusal(self, text: bytes, body: int) -> None:
        """A caller was told that its id is another request's."""
        self.refused += 1
        known = self.known.get(text)
        if known is None or known[0] == body:
            raise Broken("request", f"{text!r} of {body} was refused, known as {known}")

    def check(self, entry: Entry, applied: object) -> None:
        """P2 for ids, by the first replica that applies an entry."""
        if entry.index <= self.checked:
            return
        self.checked = entry.index
        if not isinstance(applied, ScheduleApplied):
            return
        requests = decode_schedule(entry.payload).requests
        for request, result in zip(requests, applied.parts, strict=True):
            if request is None:
                continue
            known = self.known.get(request.text)
            if known is None or known[1] < entry.time_ms:
                # A request to a deleted topic is not remembered.
                told = isinstance(result, Accepted | TopicDeletedError)
                if isinstance(result, Accepted):
                    first = result.answer.first_seq
                    self.known[request.text] = (request.body, request.until_ms, first)
            elif known[0] != request.body:
                told = isinstance(result, InvalidRequestError)
            else:
                told = isinstance(result, Repeated) and result.answer.first_seq == known[2]
                self.repeated += 1
            if not told:
                raise Broken("request", f"{entry.index}: {request} known as {known}: {result}")
