"""Deleted topics: one flag for each topic id that was issued.

Ids are never issued again. An id below the next one that belongs to no topic is therefore deleted,
and no list of deleted ids is needed. A deletion does not search for the topic's timers. Their rows,
mostly in runs, count as absent, and the next merge leaves them out.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, TOMBSTONE, U32, RowArray
from timer.model.units import TopicId

_NO_FLAGS: Final = np.zeros(1, np.bool_)


class DeletedTopics:
    """An immutable set of deleted topics, safe to share with threads. See the module."""

    __slots__ = ("_flags",)

    def __init__(self, flags: npt.NDArray[np.bool_] = _NO_FLAGS) -> None:
        """`flags`: by topic id. The last one stands for all higher ids, and is False."""
        assert not flags[-1]
        self._flags = flags

    @classmethod
    def all_but(cls, existing: Iterable[TopicId], next_id: TopicId) -> "DeletedTopics":
        """Return the deleted topics: all ids below `next_id` except those of existing topics."""
        flags = np.ones(next_id + 1, np.bool_)
        flags[[0, next_id, *existing]] = False
        return cls(flags)

    def plus(self, topic: TopicId) -> "DeletedTopics":
        """Return this set with one more topic."""
        flags = np.zeros(max(len(self._flags), topic + 2), np.bool_)
        flags[: len(self._flags)] = self._flags
        flags[topic] = True
        return DeletedTopics(flags)

    def covers(self, other: "DeletedTopics") -> bool:
        """Return whether this set includes the other."""
        if self is other:
            return True
        deleted = np.flatnonzero(other._flags)  # noqa: SLF001 -- same class
        return bool(self.of(deleted).all())

    def __bool__(self) -> bool:
        """Return whether topics may have been deleted."""
        return len(self._flags) > 1

    def has(self, topic: int) -> bool:
        """Return whether a topic is deleted."""
        return bool(self._flags[min(topic, len(self._flags) - 1)])

    def of(self, topics: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return which of the topics are deleted (n, bool)."""
        return self._flags.take(topics, mode="clip")

    def of_rows(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Return which rows are timers of deleted topics, or tombstones of such (n, bool)."""
        return self.of_columns(rows["topic"], rows["requested_ms"])

    def of_columns(self, topics: U32, requested_ms: I64) -> npt.NDArray[np.bool_]:
        """Return `of_rows` of rows with these columns."""
        are_tombstones = topics == TOMBSTONE
        return self.of(
            np.where(are_tombstones, requested_ms, topics) if are_tombstones.any() else topics
        )


NONE_DELETED: Final = DeletedTopics()
"""No deleted topic."""
