"""A column of marks by queue offset; its start follows the group's cursor."""

import numpy as np

from timer.model.columns import U64

_SIZE_MIN = 32
_NOTHING = np.zeros(0, np.uint64)
"""Shared by all columns without marks: very many groups have few messages in flight."""


class Marks:
    """One uint64 per offset; 0 if unset or below the column's base."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._values = _NOTHING

    def __len__(self) -> int:
        """Return the number of offsets that have storage."""
        return len(self._values)

    def of(self, offsets: U64) -> U64:
        """Return the marks of offsets, (n, uint64)."""
        index = offsets.astype(np.int64) - self._base
        inside = (index >= 0) & (index < len(self._values))
        if inside.all():
            return self._values[index]
        marks = np.zeros(len(offsets), np.uint64)
        marks[inside] = self._values[index[inside]]
        return marks

    def set(self, offsets: U64, marks: U64 | np.uint64) -> None:
        """Mark offsets; those below the base are ignored."""
        index = offsets.astype(np.int64) - self._base
        inside = index >= 0
        if not inside.all():
            index, marks = index[inside], marks[inside] if isinstance(marks, np.ndarray) else marks
        if not len(index):
            return
        size = int(index.max()) + 1
        if size > len(self._values):
            grown = np.zeros(max(_SIZE_MIN, 2 * size), np.uint64)
            grown[: len(self._values)] = self._values
            self._values = grown
        self._values[index] = marks

    def take_below(self, offset: int, mark: np.uint64) -> U64:
        """Mark all stored offsets below `offset`; return their previous marks."""
        count = min(max(0, offset - self._base), len(self._values))
        before = self._values[:count].copy()
        self._values[:count] = mark
        return before

    def forget_below(self, offset: int) -> U64:
        """Drop the offsets below `offset` once they are more than half; return their marks."""
        skip = offset - self._base
        if skip <= len(self._values) // 2:
            return _NOTHING
        if skip >= len(self._values):
            forgotten, self._values = self._values, _NOTHING
            self._base = offset
            return forgotten
        forgotten = self._values[:skip]
        self._values = np.concatenate([self._values[skip:], np.zeros(len(forgotten), np.uint64)])
        self._base += skip
        return forgotten
