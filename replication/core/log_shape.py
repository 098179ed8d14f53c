"""The shape of a log: the epoch of every index, the voters, the sizes of the last entries.

    index     1        41             97            120 = last_index
              E epoch 1 | E epoch 3    | E epoch 4   |
    starts    (1,1,{..})  (41,3,{..})    (97,4,{..})

The protocol needs no more of a log. The core decides on a `LogShape` and never reads a payload.
Entries up to and including `base_index` have been dropped.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from replication.core.peer_messages import ENTRIES_MAX, Conflict, LogStart
from replication.core.quorum import Voters
from timer.model.units import Epoch, LogIndex, MonoMs

ENTRY_SIZE: Final = 560
"""Bytes of memory per entry beyond its frame. With small entries this exceeds the frames."""
AGED_MAX: Final = 4096


class LogShape:
    """Epochs and voters of a log; only its owner changes it."""

    def __init__(
        self, base_index: LogIndex, base_epoch: Epoch, base_voters: Voters, last_index: LogIndex
    ) -> None:
        assert last_index >= base_index, (base_index, last_index)
        self.base_index = base_index
        self._base = LogStart(base_index, base_epoch, base_voters)
        self._starts: list[LogStart] = []
        self.last_index = last_index

    @property
    def last_epoch(self) -> Epoch:
        """Epoch of the last entry; the base's if the log is empty."""
        return (self._starts[-1] if self._starts else self._base).epoch

    @property
    def last_start(self) -> LogIndex:
        """Index of the last EPOCH entry; the base's start if there is none above it."""
        return (self._starts[-1] if self._starts else self._base).index

    @property
    def voters(self) -> Voters:
        """The newest voter set, committed or not."""
        return (self._starts[-1] if self._starts else self._base).voters

    def epoch_at(self, index: LogIndex) -> Epoch:
        """Return the epoch of the entry at `index`, which is in [base_index, last_index]."""
        return self._run(index).epoch

    def _run(self, index: LogIndex) -> LogStart:
        assert self.base_index <= index <= self.last_index, (
            self.base_index,
            index,
            self.last_index,
        )
        if not self._starts or index >= self._starts[-1].index:
            return self._starts[-1] if self._starts else self._base
        at = bisect_right(self._starts, index, key=_index) - 1
        return self._starts[at] if at >= 0 else self._base

    def sets_from(self, commit_index: LogIndex) -> tuple[LogStart, ...]:
        """Return the last start that is known to be committed, and every later one.

        A start is committed if it is at or below `commit_index`, or if an entry of its epoch
        follows: a leader appends none before its EPOCH entry is committed.
        """
        starts, last = self._starts, self.last_index
        place = len(starts)
        while place and commit_index < starts[place - 1].index == last:
            place, last = place - 1, LogIndex(last - 1)
        return (starts[place - 1] if place else self._base, *starts[place:])

    def starts_in(self, after: LogIndex, last: LogIndex) -> tuple[LogStart, ...]:
        """Return the EPOCH entries in (after, last]."""
        if not self._starts or self._starts[-1].index <= after:
            return ()
        low = bisect_right(self._starts, after, key=_index)
        return tuple(self._starts[low : bisect_right(self._starts, last, key=_index)])

    def extend(self, last_index: LogIndex, starts: Iterable[LogStart]) -> None:
        """Append entries up to `last_index`. Each of `starts` begins an epoch."""
        for start in starts:
            assert start.index > self.last_start or not self._starts, (start, self.last_start)
            assert start.epoch > self.last_epoch, f"epoch goes back: {start}, {self.last_epoch}"
            assert self.last_index < start.index <= last_index, (self.last_index, start)
            self._starts.append(start)
        assert last_index > self.last_index, (last_index, self.last_index)
        self.last_index = last_index

    def truncate_after(self, index: LogIndex) -> None:
        """Remove the entries above `index`."""
        assert self.base_index <= index < self.last_index, (index, self.last_index)
        self.last_index = index
        while self._starts and self._starts[-1].index > index:
            self._starts.pop()

    def drop_before(self, index: LogIndex) -> None:
        """Remove the entries below `index`. Their last epoch and voter set become the base's."""
        assert self.base_index < index <= self.last_index + 1, (self.base_index, index)
        self._base = self._run(LogIndex(index - 1))
        self.base_index = LogIndex(index - 1)
        del self._starts[: bisect_left(self._starts, index, key=_index)]

    def divergence_at(
        self, prev_index: LogIndex, starts: Sequence[LogStart], last: LogIndex
    ) -> LogIndex | None:
        """Return the first index in (prev_index, last] at which another log's epoch differs.

        The logs agree at `prev_index`. The other log continues in that epoch, and changes epoch at
        each of `starts`. None: no epoch differs up to the shorter log's end.
        """
        end = min(last, self.last_index)
        ours = {start.index: start.epoch for start in self.starts_in(prev_index, end)}
        theirs = {start.index: start.epoch for start in starts if prev_index < start.index <= end}
        if ours == theirs:
            return None
        return min(index for index, _ in ours.items() ^ theirs.items())

    def conflict_at(self, index: LogIndex) -> Conflict:
        """Return the answer for `index` if this log lacks the requested entry there."""
        last = min(index, self.last_index)
        run = self._run(last)
        return Conflict(run.epoch, max(run.index, self.base_index), last)

    def resume_at(self, conflict: Conflict) -> LogIndex:
        """Return the highest index at which this log may agree with the sender of `conflict`."""
        last = min(conflict.last_index, self.last_index)
        if last <= self.base_index:
            return self.base_index
        run = self._run(last)
        # Walk down this log's runs to the conflict's epoch. In an epoch that both hold they agree.
        while run.epoch > conflict.epoch and run.index > self.base_index:
            last = LogIndex(run.index - 1)
            run = self._run(last)
        if run.epoch == conflict.epoch:
            return last
        return max(self.base_index, min(last, LogIndex(conflict.first_index - 1)))


class EntrySizes:
    """Sizes in bytes of the last entries, which the shell holds in memory."""

    def __init__(self, first_index: LogIndex) -> None:
        self.first_index = first_index
        self._ends: list[int] = [0]
        # _ends[i]: bytes from a fixed point to the end of entry first_index - 1 + i.
        self._old_index = LogIndex(0)
        self._check_ms = MonoMs(0)
        """Until then `age` removes nothing. Entries up to `_old_index` existed when it was set."""

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def bytes(self) -> int:
        """Bytes of all entries held."""
        return self._ends[-1] - self._ends[0]

    def extend(self, sizes: Iterable[int]) -> None:
        """Append entries of these sizes in bytes."""
        end = self._ends[-1]
        for size in sizes:
            end += size
            self._ends.append(end)

    def truncate_after(self, index: LogIndex) -> None:
        """Remove the entries above `index`."""
        self._old_index = min(self._old_index, index)
        keep = index - self.first_index + 1
        if keep >= 0:
            del self._ends[keep + 1 :]
        else:
            self.first_index = LogIndex(index + 1)
            self._ends = [0]

    def size(self, after: LogIndex, last: LogIndex) -> int:
        """Return the bytes of the entries (after, last]; entries below `first_index` count 0."""
        low = max(after - self.first_index + 1, 0)
        return self._ends[last - self.first_index + 1] - self._ends[low]

    def span(self, first: LogIndex, limit_bytes: int) -> LogIndex:
        """Return the last index of a range from `first`, of ENTRIES_MAX and `limit_bytes` at most.

        The range has one entry at least, which may be larger.
        """
        at = first - self.first_index
        assert 0 <= at < len(self), (first, self.first_index, len(self))
        most = min(len(self._ends), at + 1 + ENTRIES_MAX)
        end = bisect_right(self._ends, self._ends[at] + limit_bytes, lo=at + 1, hi=most) - 1
        return LogIndex(self.first_index + max(end, at + 1) - 1)

    def trim(self, durable_index: LogIndex, keep_bytes: int) -> None:
        """Remove the oldest durable entries beyond `keep_bytes` if the excess is over 1/8 of it."""
        excess = self.bytes + ENTRY_SIZE * len(self) - keep_bytes
        if excess > keep_bytes >> 3:
            goal = self._ends[0] + excess
            count = bisect_left(
                range(len(self._ends)), goal, key=lambda at: self._ends[at] + ENTRY_SIZE * at
            )
            self._remove(min(LogIndex(self.first_index + count - 1), durable_index))

    def age(self, now_ms: MonoMs, durable_index: LogIndex, keep_ms: int) -> None:
        """Remove durable entries that have been in memory for `keep_ms`, at most twice as long.

        A call removes AGED_MAX of them at most: to free many entries takes a while.
        """
        if now_ms < self._check_ms:
            return
        last = min(self._old_index, durable_index)
        self._remove(min(last, LogIndex(self.first_index + AGED_MAX - 1)))
        if self.first_index > last or not len(self):
            self._old_index = LogIndex(self.first_index + len(self) - 1)
            self._check_ms = MonoMs(now_ms + keep_ms)

    def _remove(self, last: LogIndex) -> None:
        count = min(max(0, last - self.first_index + 1), len(self))
        del self._ends[:count]
        self.first_index = LogIndex(self.first_index + count)


def _index(start: LogStart) -> LogIndex:
    return start.index
