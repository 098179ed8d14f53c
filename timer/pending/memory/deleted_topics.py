"""Which topics are gone: a flag for each topic id that was issued.

Ids are never issued again, so one below the next that is not there is gone: nobody keeps a list of
the dead. Nor does anybody look for a gone topic's timers. Where they lie, in runs above all, they
count as not there, and a merge that meets them leaves them out.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from timer.model.columns import I64, TOMBSTONE, U32, RowArray
from timer.model.units import TopicId

_NO_FLAGS: Final = np.zeros(1, np.bool_)


class DeletedTopics:
    """See the module. It never changes, so that a thread may have it; `plus` makes another."""

    __slots__ = ("_flags",)

    def __init__(self, flags: npt.NDArray[np.bool_] = _NO_FLAGS) -> None:
        """`flags`: by topic id; the last is that of all ids beyond, False."""
        assert not flags[-1]
        self._flags = flags

    @classmethod
    def all_but(cls, there: Iterable[TopicId], next_id: TopicId) -> "DeletedTopics":
        """Return what is gone if these are there, of the ids below the next."""
        flags = np.ones(next_id + 1, np.bool_)
        flags[[0, next_id, *there]] = False
        return cls(flags)

    def plus(self, topic: TopicId) -> "DeletedTopics":
        """Return what is gone with one more."""
        flags = np.zeros(max(len(self._flags), topic + 2), np.bool_)
        flags[: len(self._flags)] = self._flags
        flags[topic] = True
        return DeletedTopics(flags)

    def covers(self, other: "DeletedTopics") -> bool:
        """Return whether all is gone here that is gone there."""
        if self is other:
            return True
        gone = np.flatnonzero(other._flags)  # noqa: SLF001 -- another one of this class
        return bool(self.of(gone).all())

    def __bool__(self) -> bool:
        """Return whether any may be."""
        return len(self._flags) > 1

    def has(self, topic: int) -> bool:
        """Return whether a topic is gone."""
        return bool(self._flags[min(topic, len(self._flags) - 1)])

    def of(self, topics: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return which of the topics are gone (n, bool)."""
        return self._flags.take(topics, mode="clip")

    def rows(self, rows: RowArray) -> npt.NDArray[np.bool_]:
        """Return which rows are timers of topics that are gone, or tombstones of such (n, bool)."""
        return self.columns(rows["topic"], rows["requested_ms"])

    def columns(self, topics: U32, requested_ms: I64) -> npt.NDArray[np.bool_]:
        """Return the same of rows with these columns."""
        graves = topics == TOMBSTONE
        return self.of(np.where(graves, requested_ms, topics) if graves.any() else topics)


NONE: Final = DeletedTopics()
"""Nothing was ever deleted."""
