"""Whose turn it is to take nodes away: one strike's at a time, first come, first served."""

import contextlib
import threading
from collections.abc import Iterator


class Turn:
    """`with turn:` waits for it, and ends it. For threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawn = self._served = 0
        self._holder: int | None = None

    def __enter__(self) -> None:
        """Wait until all who came before have had theirs: nobody who comes again passes by."""
        with self._changed:
            number = self._drawn
            self._drawn += 1
            self._changed.wait_for(lambda: self._served == number)
            self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Let the next begin."""
        with self._changed:
            self._holder = None
            self._served += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Others may have their turns meanwhile; a thread that has none lends none."""
        if self._holder != threading.get_ident():
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
