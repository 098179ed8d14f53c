"""The turn to take nodes away: one strike has it at a time, first come, first served."""

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """A fair lock for threads: `with turn:` waits for the turn, and ends it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawn = self._served = 0
        self._holder: int | None = None

    def __enter__(self) -> None:
        """Wait until all earlier calls have had their turn."""
        with self._changed:
            number = self._drawn
            self._drawn += 1
            self._changed.wait_for(lambda: self._served == number)
            self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """End the turn; the next thread gets it."""
        with self._changed:
            self._holder = None
            self._served += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """End this thread's turn for the block and take a new one afterwards.

        Does nothing if the thread does not have the turn.
        """
        if mine := self._holder == threading.get_ident():
            self.__exit__()
        try:
            yield
        finally:
            if mine:
                self.__enter__()
