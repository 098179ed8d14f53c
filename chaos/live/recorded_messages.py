"""The messages that a witness recorded, read from its histories as they grow.

A delivered message is returned when the log's clock has passed the time of its delivery.

The *reach* of a topic is a due time up to which every message has come. While messages come, it is
the greatest due time among them: a topic's messages come in the order of firing, and timers fire in
the order of their due times. It is also the last time at which the cluster had no message for the
witness, as the witness records in a file beside its history. A message that is never delivered
keeps this time from moving. So after IDLE_S without a message the reach is now, by the witness's
clock, if the witness wrote a beat at least every BEATS_S.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from chaos.history.history import RunFolder
from chaos.live.judge import GIVEN, Given
from timer.model import timer_id

LIVE: Final = "live"
"""The folder of the live audit in a run's folder."""
DRAINED: Final = "drained"
"""The folder in it with a file for each history: topic -> the time at which no message was left."""
IDLE_S: Final = 30.0
BEATS_S: Final = 2.0
"""A witness that wrote nothing for longer was suspended. Its messages may still be on their way."""


class RecordedFile:
    """The history of one witness."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self._read_ms = 0
        """All lines that were written by then were read."""
        self._progress: dict[str, tuple[int, int]] = {}
        """Topic -> (the greatest due time of its messages, the time of its last line)."""
        self.written_ms = 0
        """When the witness touched its file, by its clock."""
        self._resumed_ms = 0
        """When it did so first after a pause of more than BEATS_S."""

    def lines(self, clock_ms: int) -> Iterator[tuple[str, Given]]:
        """Yield the topic and the messages of each new line that `clock_ms` has passed."""
        before_ms, self.written_ms = self.written_ms, self._path.stat().st_mtime_ns // 1_000_000
        if self.written_ms - before_ms > 1000 * BEATS_S:
            self._resumed_ms = self.written_ms
        with self._path.open("rb") as file:
            file.seek(self._position)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # half written
                line = json.loads(raw)
                if line.get("handed_out_ms", -1) >= clock_ms:
                    self._read_ms = line["received_ms"]
                    return
                self._position += len(raw)
                given = _given(line)
                topic, at_ms = line["topic"], line.get("received_ms") or line["start_ms"]
                due_ms, last_ms = self._progress.get(topic, (0, 0))
                due_ms = max(due_ms, int(given["due_ms"].max(initial=0)))
                self._progress[topic] = due_ms, max(last_ms, at_ms)
                if len(given):
                    yield topic, given
        self._read_ms = self.written_ms

    def reaches(self) -> Iterator[tuple[str, int]]:
        """Yield the topics and their reaches."""
        path = self._path.parents[1] / DRAINED / f"{self._path.stem}.json"
        drained = json.loads(path.read_text()) if path.exists() else {}
        for topic, (due_ms, last_ms) in self._progress.items():
            idle = self._read_ms - max(last_ms, self._resumed_ms) >= 1000 * IDLE_S
            reach_ms = self._read_ms if idle else max(due_ms, drained.get(topic, 0))
            yield topic, min(reach_ms, self._read_ms)


class RecordedMessages:
    """The histories in a folder of the live audit. A witness makes another one at each start."""

    def __init__(self, folder: Path) -> None:
        self._run = RunFolder(folder)
        self._files: dict[Path, RecordedFile] = {}

    @property
    def written_ms(self) -> int:
        """When a witness last touched its file, Unix ms; 0: there is none."""
        return max((each.written_ms for each in self._files.values()), default=0)

    def read(self, clock_ms: int) -> tuple[dict[str, Given], dict[str, int]]:
        """Return the new messages and the reach of each topic. `clock_ms`: the log's clock."""
        for path in sorted(self._run.histories.glob("*.jsonl")):
            self._files.setdefault(path, RecordedFile(path))
        found: dict[str, list[Given]] = defaultdict(list)
        reaches: dict[str, int] = {}
        for file in self._files.values():
            for topic, given in file.lines(clock_ms):
                found[topic].append(given)
            for topic, reach_ms in file.reaches():
                reaches[topic] = max(reaches.get(topic, 0), reach_ms)
        return {topic: np.concatenate(parts) for topic, parts in found.items()}, reaches


def _given(line: dict[str, Any]) -> Given:
    """Return the messages of a line: of a `deliver`; an `open` has none."""
    ids = line.get("ids", ())
    given = np.zeros(len(ids), GIVEN)
    if ids:
        # The audit after the run judges the checksums of ids.
        raw = b"".join(map(timer_id.from_text, ids))
        given["due_ms"], given["seq"], _ = timer_id.decode(raw, 0)
        given["queue_offset"], given["fired_at_ms"] = line["offsets"], line["fired_at_ms"]
        given["handed_out_ms"] = line["handed_out_ms"]
    return given
