"""Alarms: when to look at what."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

STALE_MAX: Final = 64
"""Far times that nearer ones replaced, beside as many as there are keys: then they are dropped."""


class Alarms(Generic[Key]):
    """When to look at what: the earliest time asked for counts, once."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Key]] = []
        self._known: dict[Key, int] = {}

    def set(self, key: Key, at_ms: int | None) -> None:
        """Look at `key` no later than at a time."""
        known = self._known.get(key)
        if at_ms is not None and (known is None or at_ms < known):
            self._known[key] = at_ms
            heapq.heappush(self._heap, (at_ms, key))
            if len(self._heap) > 2 * len(self._known) + STALE_MAX:
                self._heap = [(known_ms, each) for each, known_ms in self._known.items()]
                heapq.heapify(self._heap)

    def __contains__(self, key: Key) -> bool:
        """Return whether `key` is to be looked at some time."""
        return key in self._known

    def due(self, now_ms: int) -> Iterator[Key]:
        """Yield what is to be looked at by now; it may be set again meanwhile."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, key = heapq.heappop(self._heap)
            if self._known.get(key) == at_ms:  # else it was looked at earlier
                del self._known[key]
                yield key

    def next_ms(self) -> int | None:
        """Return when something is to be looked at."""
        return self._heap[0][0] if self._heap else None
