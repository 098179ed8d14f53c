"""Alarms: the times at which keys, such as groups or topics, must be looked at."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

STALE_MAX: Final = 64
"""Stale heap entries allowed beyond the number of keys; above that the heap is rebuilt. An entry is
stale if its alarm was forgotten, or replaced by an earlier one."""


class Alarms(Generic[Key]):
    """At most one alarm per key, at the earliest time that was set for it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []
        self._at_ms: dict[Key, int] = {}

    def set(self, key: Key, at_ms: int | None) -> None:
        """Set the key's alarm to `at_ms` if that is earlier; None: change nothing."""
        known = self._at_ms.get(key)
        if at_ms is not None and (known is None or at_ms < known):
            self._at_ms[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))
            self._bound_heap()

    def forget(self, key: Key) -> None:
        """Remove the key's alarm, if it has one."""
        if self._at_ms.pop(key, None) is not None:
            self._bound_heap()

    def _bound_heap(self) -> None:
        """Rebuild the heap if it has too many stale entries."""
        if len(self._heap) > 2 * len(self._at_ms) + STALE_MAX:
            self._heap = [(known_ms, each) for each, known_ms in self._at_ms.items()]
            heapq.heapify(self._heap)

    def __contains__(self, key: Key) -> bool:
        """Return whether `key` has an alarm."""
        return key in self._at_ms

    def take_due(self, now_ms: int, most: int) -> Iterator[Key]:
        """Remove and yield the keys with alarms that are due; they may be set again meanwhile.

        `most`: heap entries to remove at most. `next_ms` is in the past while due ones are left.
        """
        while most > 0 and self._heap and self._heap[0][0] <= now_ms:
            most -= 1
            at_ms, key = heapq.heappop(self._heap)
            if self._at_ms.get(key) == at_ms:  # otherwise the entry is stale
                del self._at_ms[key]
                yield key

    def next_ms(self) -> int | None:
        """Return the time of the next alarm, or of a stale entry before it; None: no alarm."""
        return self._heap[0][0] if self._heap else None
