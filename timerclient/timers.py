"""What scheduling returns: one timer, or a lazy sequence over the raw ids of many."""

from collections.abc import Sequence
from typing import overload

from timerclient import ids


class Timer:
    """A timer that a majority of the cluster has on disk."""

    __slots__ = ("duplicate", "raw")

    def __init__(self, raw: bytes, *, duplicate: bool = False) -> None:
        self.raw = raw
        """Its id, 15 bytes."""
        self.duplicate = duplicate
        """The request was a repetition: an earlier sending of it had been applied."""

    @property
    def id(self) -> str:
        """The id as text."""
        return ids.to_text(self.raw)

    @property
    def due_ms(self) -> int:
        """The effective due time, Unix milliseconds: never before what was asked for."""
        return ids.due_ms_of(self.raw)

    def __repr__(self) -> str:
        return f"Timer({self.id!r}, due_ms={self.due_ms})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timer) and other.raw == self.raw

    def __hash__(self) -> int:
        return hash(self.raw)


class Timers(Sequence[Timer]):
    """The timers of one batch, in the order of its payloads; each is made when asked for."""

    __slots__ = ("duplicate", "raw")

    def __init__(self, raw: bytes, *, duplicate: bool = False) -> None:
        self.raw = raw
        """The ids, n x 15 bytes."""
        self.duplicate = duplicate
        """The request was a repetition: an earlier sending of it had been applied."""

    @property
    def ids(self) -> list[str]:
        """All ids as text."""
        return [ids.to_text(raw) for raw in self._pieces()]

    @property
    def due_ms(self) -> list[int]:
        """All effective due times, Unix milliseconds."""
        return [ids.due_ms_of(raw) for raw in self._pieces()]

    def _pieces(self) -> list[bytes]:
        return [self.raw[i : i + ids.SIZE] for i in range(0, len(self.raw), ids.SIZE)]

    def __len__(self) -> int:
        return len(self.raw) // ids.SIZE

    @overload
    def __getitem__(self, index: int) -> Timer: ...
    @overload
    def __getitem__(self, index: slice) -> "Timers": ...
    def __getitem__(self, index: int | slice) -> "Timer | Timers":
        if isinstance(index, slice):
            return Timers(b"".join(self._pieces()[index]), duplicate=self.duplicate)
        at = range(len(self))[index] * ids.SIZE
        return Timer(self.raw[at : at + ids.SIZE], duplicate=self.duplicate)

    def __repr__(self) -> str:
        return f"Timers({len(self)})"
