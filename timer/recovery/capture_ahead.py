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
        self._captured: dict[Id, Captured] = {}
        self._remaining: list[Id] | None = None
        """Ids still to capture, the lowest one last. None: `capture_some` was not called yet."""

    @property
    def has_begun(self) -> bool:
        """Whether some state is captured."""
        return self._remaining is not None

    def capture_some(self, count_max: int) -> bool:
        """Capture at most `count_max` more. Return whether each was captured at least once."""
        if self._remaining is None:
            self._remaining = sorted(self._ids(), reverse=True)
        for _ in range(min(count_max, len(self._remaining))):
            self._capture_one(each := self._remaining.pop())
            self._changed.discard(each)
        return not self._remaining

    def finish(self) -> list[Captured]:
        """Return the present states, those captured first at first, and begin again."""
        if not self.capture_some(0):
            self._changed.update(self._remaining or ())
        for each in sorted(self._changed):  # present ones keep their place, new ones come last
            self._capture_one(each)
        states = [*self._captured.values()]
        self.forget()
        return states

    def _capture_one(self, each: Id) -> None:
        state = self._capture(each)
        if state is None:
            self._captured.pop(each, None)
        else:
            self._captured[each] = state

    def forget(self) -> None:
        """Drop the captured states. The next `capture_some` begins again."""
        self._captured, self._remaining = {}, None
        self._changed.clear()
