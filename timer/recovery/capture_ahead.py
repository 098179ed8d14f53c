"""States for the next flush, captured a few at a time.

A topic or producer that changes before the cut is captured again. So a cut captures only these.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Id = TypeVar("Id", bound=int)
Captured = TypeVar("Captured")


class CaptureAhead(Generic[Id, Captured]):
    """The states of all topics, or of all producers."""

    def __init__(
        self,
        changed: set[Id],
        ids: Callable[[], Iterable[Id]],
        capture: Callable[[Id], Captured | None],
    ) -> None:
        """Args:
        changed: The ids that changed since the last capture.
        ids: Returns all ids.
        capture: Returns a state that does not change later. None: the id was deleted.
        """
        self._changed, self._ids, self._capture = changed, ids, capture
        self._taken: dict[Id, Captured] = {}
        self._left: list[Id] | None = None
        """Ids still to capture, the lowest one last. None: `take` was not called yet."""

    @property
    def begun(self) -> bool:
        """Whether some state is captured."""
        return self._left is not None

    def take(self, most: int) -> bool:
        """Capture at most `most` more. Return whether each was captured at least once."""
        if self._left is None:
            self._left = sorted(self._ids(), reverse=True)
        for _ in range(min(most, len(self._left))):
            self._take(each := self._left.pop())
            self._changed.discard(each)
        return not self._left

    def finish(self) -> list[Captured]:
        """Return the present states, those captured first at first, and begin again."""
        if not self.take(0):
            self._changed.update(self._left or ())
        for each in sorted(self._changed):  # present ones keep their place, new ones come last
            self._take(each)
        states = [*self._taken.values()]
        self.forget()
        return states

    def _take(self, each: Id) -> None:
        state = self._capture(each)
        if state is None:
            self._taken.pop(each, None)
        else:
            self._taken[each] = state

    def forget(self) -> None:
        """Drop the captured states. The next `take` begins again."""
        self._taken, self._left = {}, None
        self._changed.clear()
