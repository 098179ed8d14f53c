"""The judge of the live audit: the log by the oracle, against the messages of a witness.

`apply` takes the entries that were committed since, and applies them to the oracle's story
(chaos/oracle/story.py). Then `judged` takes the messages that came since, and returns violations.
Their names are those of the audit (docs/audit.md). The judge has no clock and no file. Its time is
the log's.

    story ── fates, dead letters ──► queues: one row per fired message, by topic and offset
    witness ── messages ───────────►   each must lie in the story's queue, at its offset
    witness's group in the story ──►   each must come before it is acked, unless it expires

**Waits.** A message is lost if the witness did not receive it, though it received messages that
fired OVERDUE later, and the leader had as long. The log's clock must have passed the delivery of a
message before it is judged: all entries before it are known then.

**Memory.** The story holds pending timers (it spills those beyond four million), held ones, and
keys. A queue's row stays until its message came or ended, and `horizon_ms` has passed since then.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from chaos.live.follow import Divergence
from chaos.oracle.group_story import GroupStory
from chaos.oracle.held_story import RELEASE_MS
from chaos.oracle.pending_rows import I64, Rows
from chaos.oracle.story import CANCELLED, ENDS, FIRED, REPLACED, RESCHEDULED, LogStory, StoryBook
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind

HORIZON_MS: Final = 600_000
OVERDUE_MS: Final = 5_000
WITNESS_GROUP: Final = "live-audit"

MESSAGE: Final = np.dtype(
    [
        ("seq", "<i8"),
        ("due_ms", "<i8"),
        ("fired_ms", "<i8"),
        ("ended_ms", "<i8"),  # when the witness's group acked it, or it expired there; 0: neither
        ("came", "?"),  # the witness received it
        ("expired", "?"),
        ("lost", "?"),  # reported as lost
        ("excused", "?"),  # the witness need not receive it
    ]
)
ENDED: Final = np.dtype([("seq", "<i8"), ("end", "<i8")])
_DELIVERED: Final = {
    CANCELLED: "cancelled_delivered",
    REPLACED: "replaced_delivered",
    RESCHEDULED: "rescheduled_delivered",
}
_GIVEN: Final = ("seq", "due_ms", "queue_offset", "fired_at_ms", "handed_out_ms")
GIVEN: Final = np.dtype([(name, "<i8") for name in _GIVEN])
Given = npt.NDArray[np.void]
"""Messages that a witness received, of dtype GIVEN. All times are the cluster's."""


class Violation(NamedTuple):
    """One broken promise."""

    kind: str
    seq: int
    """0: it concerns no single timer."""
    topic: str
    due_ms: int
    clock_ms: int
    """The log's clock at the finding."""
    detail: str


@dataclass(slots=True)
class WatchedQueue:
    """The last messages of one topic, at consecutive offsets."""

    base: int = 0
    """The offset of the first row."""
    group: int = 0
    """The id of the witness's group at the last step; 0: none."""
    rows: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, MESSAGE))
    _new: list[npt.NDArray[np.void]] = field(default_factory=list)

    def add(self, fired: Rows, at_ms: int) -> None:
        """Add fired messages, at the next offsets."""
        rows = np.zeros(len(fired), MESSAGE)
        rows["seq"], rows["due_ms"], rows["fired_ms"] = fired["seq"], fired["due_ms"], at_ms
        self._new.append(rows)

    def settle(self) -> None:
        """Join the new rows to the others."""
        if self._new:
            self.rows, self._new = np.concatenate([self.rows, *self._new]), []

    def places(self, offsets: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Return the places of offsets in `rows`, and whether they are there."""
        at = offsets - self.base
        return at, (at >= 0) & (at < len(self.rows))

    def forget(self, before_ms: int) -> None:
        """Remove the first rows, as far as they are done."""
        rows = self.rows
        done = rows["came"] | rows["lost"] | rows["excused"] | rows["expired"]
        done &= np.maximum(rows["fired_ms"], rows["ended_ms"]) < before_ms
        count = len(rows) if done.all() else int(np.argmin(done))
        self.rows, self.base = rows[count:], self.base + count


class Judge(StoryBook):
    """Judges all timers of a cluster."""

    def __init__(
        self, spill: Path, *, overdue_ms: int = OVERDUE_MS, horizon_ms: int = HORIZON_MS
    ) -> None:
        """`spill`: a folder for pending timers beyond those that memory holds."""
        self.overdue_ms, self.horizon_ms = overdue_ms, horizon_ms
        self.clock_ms = 0
        """Time of the last entry."""
        self.story = LogStory(self, spill)
        self._epoch_ms: int | None = None
        """Time of its first entry after EPOCH, which has the last epoch's; None: there is none."""
        self._gaps: deque[tuple[int, int]] = deque(maxlen=100)
        """(begin, end) of the last pauses of the log for more than `overdue_ms`."""
        self._queues: dict[int, WatchedQueue] = {}
        self._ended_timers: deque[tuple[int, npt.NDArray[np.void]]] = deque()
        """(time, timers that ended without a firing) of the last while."""
        self._ended_messages: list[tuple[GroupStory, npt.NDArray[np.void], bool]] = []
        """Acked and expired messages of the witness's groups since the last step."""
        self._groups_ms: list[int] = []
        """When each group was made."""

    # ---- the story's book

    def fates(self, rows: Rows, **columns: I64 | int) -> None:
        """Note timers that fired, by their topics, or ended otherwise."""
        if isinstance(columns["end"], int) and columns["end"] == FIRED:
            at_ms = int(columns["ended_at_ms"])
            for topic in np.unique(rows["topic"]).tolist():
                self._queue(topic).add(rows[rows["topic"] == topic], at_ms)
            return
        ended = np.zeros(len(rows), ENDED)
        ended["seq"], ended["end"] = rows["seq"], columns["end"]
        self._ended_timers.append((self.clock_ms, ended))

    def carried(self, group: GroupStory, rows: Rows, offsets: I64, **columns: I64 | int) -> None:
        """Note messages of topics of dead letters, and redriven ones."""
        del group, offsets, columns
        self._queue(int(rows["topic"][0])).add(rows, self.clock_ms)

    def messages(self, table: str, group: GroupStory, rows: Any) -> None:
        """Note acks of the witness, and messages that expired before it acked them."""
        if group.name == WITNESS_GROUP and table != "returns" and len(rows):
            self._ended_messages.append((group, rows, table == "expired"))

    def _queue(self, topic: int) -> WatchedQueue:
        return self._queues.setdefault(topic, WatchedQueue())

    # ---- a step

    def apply(self, frames: Iterable[memoryview | bytes]) -> None:
        """Apply the next entries of the log.

        Raises:
            ValueError: an entry can't be replayed.
        """
        story = self.story
        for frame in frames:
            item = entry_frame.frame_at(memoryview(frame), 0)
            assert isinstance(item, Entry), item
            if item.kind is EntryKind.EPOCH:
                self._epoch_ms = None
            elif self._epoch_ms is None:
                self._epoch_ms = item.time_ms
            elif item.time_ms - self.clock_ms > self.overdue_ms:
                self._gaps.append((self.clock_ms, item.time_ms))
            self.clock_ms = max(self.clock_ms, item.time_ms)
            try:
                story.apply(item)
            except (AssertionError, KeyError, ValueError) as error:
                raise ValueError(f"entry {item.index} can't be replayed: {error!r}") from error
            made = len(story.groups) - len(self._groups_ms)
            self._groups_ms += [item.time_ms] * made
        for noted in (
            story.quotas.in_force, story.series.rows, story.series.changes, story.checkpoints,
        ):  # fmt: skip
            noted.clear()
        for queue in self._queues.values():
            queue.settle()

    def violations(
        self,
        given: Mapping[str, Given],
        reaches: Mapping[str, int],
        divergences: Iterable[Divergence] = (),
    ) -> list[Violation]:
        """Return the violations that are known now. Some were returned before.

        Args:
            given: topic -> messages that came since the last call.
            reaches: topic -> the due time up to which the witness has received all messages.
            divergences: entries in which a node differs.
        """
        found = [
            self._violation("diverged_entries", detail=f"{e.node} at {e.index}: {e.detail}")
            for e in divergences
        ]
        found += [*self._follow_groups(), *self._judge_messages(given)]
        if self._epoch_ms is not None:
            found += [*self._lost(reaches, self._epoch_ms), *self._late(self._epoch_ms)]
        for group, offset, failures, index in self.story.moved_early:
            detail = f"offset {offset} at {index} after {failures} failures"
            found.append(self._violation("moved_early", group.topic, detail=detail))
        self.story.moved_early.clear()
        self._forget()
        return found

    def _follow_groups(self) -> Iterator[Violation]:
        """Note the messages that the witness need not receive, or not any more."""
        groups = {
            group.topic: group
            for group in self.story.groups.values()
            if group.name == WITNESS_GROUP  # the last of a topic counts
        }
        for topic, queue in self._queues.items():
            group, rows = groups.get(topic), queue.rows
            if group is None:
                rows["excused"] = True
                continue
            if group.group_id != queue.group:  # another life of the group
                queue.group = group.group_id
                rows["ended_ms"], rows["expired"] = 0, False
            below = len(rows) if group.over else max(0, group.start - queue.base)
            rows["excused"][:below] = True
            rows["excused"][below:] = False
        for group, left, expired in self._ended_messages:
            queue = self._queue(group.topic)
            at, known = queue.places(left["queue_offset"])
            if group.group_id != queue.group or not known.any():
                continue
            queue.rows["ended_ms"][at[known]] = left["time_ms"][known]
            queue.rows["expired"][at[known]] = expired
            if expired:
                rows, gone = queue.rows[at[known]], left[known]
                early = gone["time_ms"] < rows["due_ms"] + gone["ttl_ms"]
                detail = "expired before its time to live was over"
                yield from self._each("expired_early", group.topic, rows[early], detail)
        self._ended_messages.clear()

    # ---- messages that came

    def _judge_messages(self, given: Mapping[str, Given]) -> Iterator[Violation]:
        for name, messages in given.items():
            mine = messages
            topics = [number for number, known in self.story.topics.items() if known == name]
            for topic in reversed(topics):
                queue = self._queue(topic)
                at, known = queue.places(mine["queue_offset"])
                known[known] = queue.rows["seq"][at[known]] == mine["seq"][known]
                yield from self._match(topic, queue, at[known], mine[known])
                mine = mine[~known]
            begin = max((self._queue(topic).base for topic in topics), default=0)
            for row in mine:
                yield from self._judge_astray(begin, name, row)

    def _match(self, topic: int, queue: WatchedQueue, at: I64, came: Given) -> Iterator[Violation]:
        """Judge messages at the offsets of the log."""
        rows, out_ms = queue.rows[at], came["handed_out_ms"]
        queue.rows["came"][at] = True
        late_ms = rows["ended_ms"] + self.overdue_ms  # a deposed leader may deliver for a while
        after = (rows["ended_ms"] > 0) & (out_ms > late_ms)
        _, deleted_ms = self.story.deleted.get(topic, (0, out_ms.max(initial=0)))
        differ = came["fired_at_ms"] != rows["fired_ms"]
        differ |= came["due_ms"] != rows["due_ms"]
        for kind, which, detail in (
            ("delivered_late", rows["lost"], "was reported as lost"),
            ("early", came["fired_at_ms"] < rows["due_ms"], "fired before its due time"),
            ("diverged", differ, "delivered with other times than in the log"),
            ("expired_delivered", after & rows["expired"], "delivered after it had expired"),
            ("acked_again", after & ~rows["expired"], "delivered after its ack"),
            ("deleted_delivered", out_ms > deleted_ms + self.overdue_ms, "its topic is deleted"),
            ("outlived", self._outlived(topic, rows, out_ms), "its time to live was over"),
        ):
            yield from self._each(kind, topic, rows[which], detail)

    def _outlived(self, topic: int, rows: Any, out_ms: I64) -> npt.NDArray[np.bool_]:
        """Return which deliveries came after every time to live that was in force (n, bool)."""
        ttls = np.array(self.story.ttls.get(topic) or [(0, 0)], np.int64)
        since, ttl_ms = ttls[:, 0], np.where(ttls[:, 1] > 0, ttls[:, 1], np.int64(1 << 60))
        until = np.append(since[1:], np.int64(1 << 62))
        over = np.zeros(len(rows), np.bool_)
        for at in np.flatnonzero(out_ms >= rows["due_ms"] + ttl_ms.min()).tolist():
            in_force = (until > out_ms[at] - self.overdue_ms) & (since <= out_ms[at])
            over[at] = out_ms[at] >= rows["due_ms"][at] + ttl_ms[in_force].max()
        return over

    def _judge_astray(self, begin: int, topic: str, message: np.void) -> Iterator[Violation]:
        """Yield the fault of a message that is not in the log's queue at its offset.

        A message of an offset below `begin` is forgotten.
        """
        seq, due_ms = int(message["seq"]), int(message["due_ms"])
        found = [
            queue.base + place
            for queue in self._queues.values()
            for place in np.flatnonzero(queue.rows["seq"] == seq).tolist()
        ]
        end = self.story.state_of(due_ms, seq)
        for _, ended in self._ended_timers:
            end = int(ended["end"][ended["seq"] == seq][0]) if seq in ended["seq"] else end
        if message["fired_at_ms"] < due_ms:
            yield self._violation("early", topic, seq, due_ms, "fired before its due time")
        elif found:
            detail = f"at queue offsets {found[0]} and {message['queue_offset']}"
            yield self._violation("duplicate_fire", topic, seq, due_ms, detail)
        elif end is not None:
            kind = _DELIVERED.get(end, "phantom")
            yield self._violation(kind, topic, seq, due_ms, f"by the log: {ENDS[end]}")
        elif message["queue_offset"] >= begin:
            yield self._violation("phantom", topic, seq, due_ms, "the log has no such timer")

    # ---- messages and timers that did not come

    def _lost(self, reaches: Mapping[str, int], epoch_ms: int) -> Iterator[Violation]:
        for topic, queue in self._queues.items():
            if any(any(rates) for _, *rates in self.story.rates[topic]):
                continue  # below its rate a topic has no bound on how long a message waits
            reach_ms = min(reaches.get(self.story.topics[topic], 0), self.clock_ms)
            rows = queue.rows
            lost = ~(rows["came"] | rows["lost"] | rows["excused"] | rows["expired"])
            since_ms = self._groups_ms[queue.group - 1] if queue.group else 0
            could_ms = np.maximum(rows["fired_ms"], max(epoch_ms, since_ms))
            lost &= could_ms <= min(reach_ms - self.overdue_ms, self._served_since(self.overdue_ms))
            rows["lost"] |= lost
            yield from self._each("lost", topic, rows[lost], "fired, and not delivered")

    def _late(self, epoch_ms: int) -> Iterator[Violation]:
        """Yield timers that no FIRE covers, though a leader had the time."""
        before_ms = self._served_since(self.overdue_ms)
        if epoch_ms > before_ms:
            return
        resumed_ms = self._served_since(self.overdue_ms + RELEASE_MS)
        held_ms = resumed_ms + RELEASE_MS if epoch_ms <= resumed_ms else 0
        rows = self.story.overdue(before_ms, held_ms)
        rows = rows[rows["time_ms"] <= before_ms]
        for topic in np.unique(rows["topic"]).tolist():
            yield from self._each("late", topic, rows[rows["topic"] == topic], "no FIRE covers it")

    def _served_since(self, for_ms: int) -> int:
        """Return the latest time since which the leader has served for `left_ms`.

        In a gap the log's clock may have jumped: half of `overdue_ms` counts, at the gap's begin.
        """
        at_ms = self.clock_ms
        for begin_ms, end_ms in reversed(self._gaps):
            if at_ms - end_ms >= for_ms:
                break
            for_ms -= at_ms - end_ms
            at_ms = begin_ms + self.overdue_ms // 2
        return at_ms - for_ms

    def _forget(self) -> None:
        before_ms = self.clock_ms - self.horizon_ms
        while self._ended_timers and self._ended_timers[0][0] < before_ms:
            self._ended_timers.popleft()
        for queue in self._queues.values():
            queue.forget(before_ms)

    # ---- violations

    def _each(self, kind: str, topic: int, rows: Any, detail: str) -> Iterator[Violation]:
        for row in rows:
            yield self._violation(kind, topic, int(row["seq"]), int(row["due_ms"]), detail)

    def _violation(
        self, kind: str, topic: int | str = "", seq: int = 0, due_ms: int = 0, detail: str = ""
    ) -> Violation:
        name = self.story.life(topic) if isinstance(topic, int) else topic
        return Violation(kind, seq, name, due_ms, self.clock_ms, detail)
