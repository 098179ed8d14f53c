"""The begin of a topic's queue, as far as the audit needs it.

Acks move the beginning to the least cursor, except if a policy retains fired messages. Then a
CHECKPOINT moves it, by the firing times. Firing times are kept per stretch of time. The length of a
stretch follows from the retention at the firing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

WEEK_MS: Final = 7 * 86_400_000
"""The retention of topics without groups and without a policy."""
_PLAIN_MS: Final = 600_000
_LEAST_MS: Final = 1_000
_PARTS: Final = 1_000


@dataclass(slots=True)
class QueueStory:
    """The queue of one topic."""

    begin: int = 0
    end: int = 0
    retention_ms: int | None = None
    """By the policies; None: none sets it."""
    stretches: list[tuple[int, int]] = field(default_factory=list)
    """(its end, the first offset that fired in it)."""

    def retain(self, retention_ms: int | None, at_ms: int) -> None:
        """Set the retention from now on."""
        self.retention_ms = retention_ms
        self._shorten(at_ms)

    def _shorten(self, at_ms: int) -> int:
        """Limit the ends of all stretches to the end of a stretch that begins now. Return it."""
        retained_ms = self.retention_ms
        long_ms = _PLAIN_MS if retained_ms is None else max(_LEAST_MS, retained_ms // _PARTS)
        end_ms = at_ms - at_ms % long_ms + long_ms
        self.stretches = [(min(each, end_ms), first) for each, first in self.stretches]
        return end_ms

    def fire(self, count: int, at_ms: int) -> int:
        """Add fired messages; return the offset of the first."""
        end_ms = self._shorten(at_ms)
        last_ms = self.stretches[-1][0] if self.stretches else 0
        if last_ms <= at_ms:
            self.stretches.append((end_ms, self.end))
        first = self.end
        self.end += count
        return first

    def drop_below(self, below: int) -> None:
        """Delete all messages before an offset."""
        self.begin = max(self.begin, below)
        while len(self.stretches) > 1 and self.stretches[1][1] <= self.begin:
            del self.stretches[0]

    def drop_acked(self, cursors: Sequence[int]) -> None:
        """Delete acked messages after cursors moved."""
        if cursors and not self.retention_ms:
            self.drop_below(min(cursors))

    def checkpoint(self, cursors: Sequence[int], at_ms: int) -> None:
        """Delete messages that are old enough, if the topic has a retention."""
        if cursors and not self.retention_ms:
            self.drop_acked(cursors)
            return
        retained_ms = WEEK_MS if self.retention_ms is None else self.retention_ms
        below, following = self.begin, [first for _, first in self.stretches[1:]]
        for (end_ms, _), first in zip(self.stretches, [*following, self.end], strict=False):
            if end_ms > at_ms - retained_ms:
                break
            below = first
        self.drop_below(min([below, *cursors]))
