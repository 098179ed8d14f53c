"""A column of marks by queue offset; its start follows the group's cursor."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from timer.model.columns import U64
from timer.ready.group_column import empty_column

_DTYPE = np.dtype(np.uint64)
_NOTHING = np.zeros(0, np.uint64)


class OffsetColumn:
    """One uint64 per offset; 0 if unset or below the column's base."""

    __slots__ = ("_base", "_column")

    def __init__(self, base: int) -> None:
        self._base, self._column = base, empty_column(_DTYPE)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the column's arrays."""
        return self._column.nbytes

    @property
    def used(self) -> int:
        """Return the number of offsets with a mark."""
        return self._column.value_count

    @property
    def wide(self) -> bool:
        """Whether the marks are far apart, so that the column is in chunks."""
        return self._column.is_chunked

    def of(self, offsets: U64) -> U64:
        """Return the marks of offsets, (n, uint64)."""
        return self._column.of(offsets)

    def set(self, offsets: U64, marks: U64 | np.uint64) -> None:
        """Mark offsets, all different; those below the base are ignored."""
        inside = offsets >= self._base
        if not inside.all():
            offsets, marks = (
                offsets[inside],
                marks[inside] if isinstance(marks, np.ndarray) else marks,
            )
        if len(offsets):
            self._column = self._column.put(offsets, marks, self._base)

    def replace_below(self, offset: int, mark: np.uint64) -> U64:
        """Replace the marks below `offset`; return the previous ones."""
        offsets = self._column.offsets(offset)
        before = self.of(offsets)
        self.set(offsets, mark)
        return before

    def drop(self, done: Callable[[U64], npt.NDArray[np.bool_]]) -> None:
        """Remove the marks of the offsets that are `done`."""
        offsets = self._column.offsets()
        self.set(offsets[done(offsets)], np.uint64(0))

    def forget_below(self, offset: int) -> U64:
        """Drop marks below `offset`, as `GroupColumn.drop_below` does; return them."""
        if not self._column.value_count:
            self._base = max(self._base, offset)
            return _NOTHING
        forgotten = self._column.drop_below(offset)
        self._base = self._column.base
        if not self._column.value_count:
            self._column = empty_column(_DTYPE)
        return forgotten
