"""What quotas of what is pending and ready say where timers are scheduled: a part of the story.

The leader judges a request as it takes it, by what it has applied by then: some earlier entry, it
is not known which. Of what is pending it counts what is on its way, too, so what the log has taken
up to the SCHEDULE entry is exact. Of what is ready it does not know what will have fired, or be
acked, by then. But a leader begins with all of the log applied, so it has seen no state older than
that of its own EPOCH entry. If so much has been ready at every entry since, nothing may be taken.
Of bytes that are ready it has an estimate, of which the log says only that it is not below zero.

A topic without groups counts as one of which nothing is ready: it keeps messages for its own sake.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

PENDING: Final = ("pending_max", "pending_bytes_max")
READY: Final = ("ready_max", "ready_bytes_max")


class Noted(NamedTuple):
    """A quota that held where timers of its topic were scheduled."""

    topic: int
    entry: int
    quota: str
    most: int
    ready: int | None
    """So much of it was ready, at least, whenever the leader looked; None: it is one of pending."""


@dataclass(slots=True)
class QuotaStory:
    """`ready_of` counts what of a topic is ready by now."""

    ready_of: Callable[[int], int]
    noted: list[Noted] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    """Topics of which other messages may be ready since the last entry."""
    _ready: dict[int, int] = field(default_factory=dict)
    _least: dict[int, int] = field(default_factory=dict)
    """The least that was ready since the epoch began, if that has moved since."""

    def applied(self) -> None:
        """An entry is applied: note what is ready behind it."""
        for topic in self.touched:
            ready, before = self.ready_of(topic), self._ready.get(topic, 0)
            self._ready[topic] = ready
            self._least[topic] = min(self._least.get(topic, before), ready)
        self.touched.clear()

    def begin_epoch(self) -> None:
        """A new leader has applied all before this entry."""
        self._least.clear()

    def note(self, topics: Sequence[int], index: int, said_of: Callable[[int, str], Any]) -> None:
        """Timers of these topics are scheduled by this entry."""
        self.noted += (
            Noted(topic, index, name, most, ready)
            for topic in topics
            for name, ready in self._rules(topic)
            if (most := said_of(topic, name)) is not None
        )

    def _rules(self, topic: int) -> Iterator[tuple[str, int | None]]:
        yield from ((name, None) for name in PENDING)
        rows, size = READY
        yield rows, self._least.get(topic, self._ready.get(topic, 0))
        yield size, 0
