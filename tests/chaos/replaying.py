"""Logs that the replay reads."""

from pathlib import Path
from typing import Any

import numpy as np

from chaos.oracle.group_story import GroupStory
from chaos.oracle.story import (
    LogStory,
    StoryBook,
)
from tests.chaos.world import Log, write_log
from timer.model.units import LogIndex, TopicId
from timerspark.log import segment_files
from timerspark.log.segment_files import Piece, segments

EVERYTHING = LogIndex(1 << 40)


COLUMNS = ("seq", "mark", "topic", "due_ms", "other", "old_due_ms")


FATE = [(name, "<i8") for name in (*COLUMNS, "end", "ended_at_ms", "queue_offset")]


class Notes(StoryBook):
    """A book in memory."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray[Any, Any]] = []
        self.acked: dict[int, list[tuple[int, ...]]] = {}
        self.returned: dict[int, list[tuple[Any, ...]]] = {}
        self.over: dict[int, list[tuple[int, ...]]] = {}
        self.carries: list[tuple[int, ...]] = []

    def fates(self, rows: np.ndarray[Any, Any], **columns: Any) -> None:
        """Take timers."""
        table = np.zeros(len(rows), FATE)
        for name in COLUMNS:
            table[name] = rows[name]
        for name in ("end", "ended_at_ms", "queue_offset"):
            table[name] = columns[name]
        self.rows.append(table)

    def payloads(self, marks: Any, crcs: Any) -> None:
        """Take checksums of payloads."""

    def carried(
        self, group: GroupStory, rows: np.ndarray[Any, Any], offsets: Any, **columns: Any
    ) -> None:
        """Take messages that a MOVE took along."""
        to = columns["queue_offset"].tolist()
        seqs, marks = rows["seq"].tolist(), rows["mark"].tolist()
        for at, offset in enumerate(offsets.tolist()):
            self.carries.append((group.group_id, offset, seqs[at], marks[at], to[at]))

    def messages(self, what: str, group: GroupStory, rows: np.ndarray[Any, Any]) -> None:
        """Take acks, messages that came back, and expired ones."""
        into = {"acks": self.acked, "returns": self.returned, "expired": self.over}[what]
        into.setdefault(group.group_id, []).extend(rows.tolist())

    @property
    def table(self) -> np.ndarray[Any, Any]:
        """The timers, in the order of seq; every seq at most once."""
        table = np.sort(np.concatenate([np.zeros(0, FATE), *self.rows]), order="seq")
        assert (np.diff(table["seq"]) > 0).all()
        return table


T = TopicId(1)


def read(
    log: Log, tmp_path: Path, upto: int = EVERYTHING, *, pending_max: int = 1 << 20
) -> tuple[LogStory, Notes]:
    write_log(tmp_path, log.frames, frames_per_segment=3)
    notes = Notes()
    story = LogStory(notes, tmp_path / "spill", pending_max=pending_max)
    for item in segment_files.entries_of(Piece(segments(tmp_path), LogIndex(1), LogIndex(upto))):
        story.apply(item)
    story.end()
    return story, notes


def ends(told: tuple[LogStory, Notes]) -> list[int]:
    return [int(end) for end in told[1].table["end"]]
