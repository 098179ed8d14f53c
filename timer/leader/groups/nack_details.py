"""Texts of nacks, for the headers of dead letters.

nack, the last failure of a message --note--> text --take--> MOVE op (dead_letters.py)

A text is in the leader's memory until its message moves, and in no entry before. It is lost with
the leader. A pure core, a part of timer/leader/groups/group_dispatch.py.
"""

import itertools
from typing import Final

from timer.model.columns import U64
from timer.model.units import GroupId
from timer.ready.group import Group

DETAILS_MAX: Final = 16_384
"""Texts of up to 1,024 bytes that are kept, the newest: messages may wait long for disk space."""


class NackDetails:
    """See the module."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: dict[tuple[GroupId, int], bytes] = {}
        """By group id and queue offset. A seek assigns a new group id."""

    def note(self, group: Group, offsets: U64, detail: str) -> None:
        """Keep the text of an accepted nack for the messages that have no attempt left.

        The text of an earlier nack of a message is dropped.
        """
        if self._texts:
            self.take(group, offsets)
        most, text = group.settings.max_attempts, detail.encode()
        if not (most and text):
            return
        for offset in offsets[group.failures(offsets) + 1 >= most].tolist():
            self._texts[group.group_id, offset] = text
        surplus = max(0, len(self._texts) - DETAILS_MAX)
        for old in [*itertools.islice(self._texts, surplus)]:
            del self._texts[old]

    def take(self, group: Group, offsets: U64) -> list[str]:
        """Return the text of each message, and drop it. Empty: there is none."""
        return [
            self._texts.pop((group.group_id, offset), b"").decode() for offset in offsets.tolist()
        ]
