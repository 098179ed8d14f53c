"""Follow: the committed entries of a running cluster, read from its nodes' log files as they grow.

    n1/log  ...........=====......        a tail reads on from the last entry that it has passed
    n2/log  ...........=====...           entries of a majority are committed and returned, once
    n3/log  ...........==                 a node with another entry is reported

The follower only reads files, so a node does not notice it. The last frame of a file may be half
written; then the tail waits. An uncommitted suffix may be cut and replaced; a tail passes committed
entries only, so it reads the new suffix. Old segments are removed; the tail finds a later one.

**Commitment.** In the files of all voters an entry (index, epoch) is committed if a majority holds
it, and every log with a later epoch holds it too. The next leader counts a majority and takes the
greatest (epoch, index) in it, so it finds the entry below (replication/core/core.py). The log of
one node does not show this. Then the node itself is asked (`applied`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from timer.entries.entry_frame import Damage
from timer.files import segment
from timer.files.disk import RealDisk
from timer.model.timer_errors import CorruptFileError
from timer.model.units import Epoch, LogIndex

WINDOW_SIZE: Final = 16 << 20
"""The most bytes that one look reads of one log, one frame more or less."""
COMPARED_MAX: Final = 1 << 18
"""The most entries by which a node may be behind and still be compared."""


@dataclass(frozen=True, slots=True)
class FollowedFrame:
    """One frame of one node's log."""

    index: LogIndex
    epoch: Epoch
    crc32: int
    path: Path
    end: int
    """Position in the file after it."""
    frame: memoryview


class FollowedWindow(NamedTuple):
    """The entries of one log after the passed ones."""

    frames: list[FollowedFrame]
    full: bool
    """The log has more entries."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A node holds another entry than the committed one."""

    node: str
    index: LogIndex
    detail: str


class LogDropped(Exception):
    """The segments with the next entry were removed from the log."""


class LogTail:
    """One node's log, read from a position that only moves forward."""

    def __init__(self, log: Path) -> None:
        self.next = LogIndex(1)
        """The first entry that is not passed yet."""
        self._log = log
        self._disk = RealDisk()
        self._at: tuple[Path, int] | None = None

    def window(self) -> FollowedWindow:
        """Return the whole frames from `next` on, about WINDOW_SIZE bytes of them.

        Raises:
            LogDropped: the log begins after `next`.
        """
        for _ in range(2):
            try:
                return self._window()
            except FileNotFoundError:  # the segment was removed meanwhile
                self._at = None
        return FollowedWindow([], full=False)

    def _window(self) -> FollowedWindow:
        frames: list[FollowedFrame] = []
        expected, size = self.next, WINDOW_SIZE
        path, position = self._at or (self._segment_of(expected), segment.HEADER_SIZE)
        while True:
            for found in segment.walk(self._disk, path, position, min(size, segment.SCAN_SIZE)):
                if isinstance(found, Damage):
                    return FollowedWindow(frames, full=False)  # half written
                start, epoch, index, frame = found
                if index > expected:
                    return FollowedWindow(frames, full=False)  # cut and written again meanwhile
                if index == expected:
                    crc32 = int.from_bytes(frame[:4], "little")
                    end = start + len(frame)
                    frames.append(FollowedFrame(index, epoch, crc32, path, end, frame))
                    expected = LogIndex(expected + 1)
                    size -= len(frame)
                    if size <= 0:
                        return FollowedWindow(frames, full=True)
            following = segment.path_of(self._log, expected)
            if following == path or not self._is_born(following):
                return FollowedWindow(frames, full=False)
            path, position = following, segment.HEADER_SIZE

    def _is_born(self, path: Path) -> bool:
        """Return whether a segment exists with a whole header."""
        try:
            segment.decode_header(path, self._disk.read(path, 0, segment.HEADER_SIZE))
        except (CorruptFileError, FileNotFoundError):
            return False
        return True

    def _segment_of(self, index: LogIndex) -> Path:
        firsts = self.firsts()
        before = [first for first in firsts if first <= index]
        if firsts and not before:
            raise LogDropped(f"{self._log} begins with entry {firsts[0]}, not {index}")
        return segment.path_of(self._log, max(before, default=LogIndex(1)))

    def firsts(self) -> list[LogIndex]:
        """Return the indexes of the first entries of the existing segments, in order."""
        names = self._disk.list_dir(self._log) if self._disk.exists(self._log) else []
        return sorted(first for name in names if (first := segment.first_of(name)) is not None)

    def continue_after(self, last: FollowedFrame) -> None:
        """Continue after `last`."""
        self.next, self._at = LogIndex(last.index + 1), (last.path, last.end)

    def skip_to(self, index: LogIndex) -> None:
        """Continue with entry `index`, in any segment."""
        self.next, self._at = index, None


def commit_end(windows: Sequence[FollowedWindow], majority: int) -> tuple[LogIndex, Epoch] | None:
    """Return the last entry in the windows that is certainly committed, or None.

    `windows` are those of all voters. A full one may know a later epoch beyond its end, so it must
    hold the entry.
    """
    lasts = [{each.epoch: each.index for each in window.frames} for window in windows]
    for epoch in sorted({epoch for last in lasts for epoch in last}, reverse=True):
        holds = sorted((last.get(epoch, LogIndex(0)) for last in lasts), reverse=True)
        knowing = [
            last.get(epoch, LogIndex(0))
            for last, window in zip(lasts, windows, strict=True)
            if window.full or max(last, default=Epoch(0)) > epoch
        ]
        index = min([holds[majority - 1], *knowing])
        if index:
            return index, epoch
    return None


class Follower:
    """The committed entries of a cluster, from the first on."""

    def __init__(
        self, logs: Mapping[str, Path], *, applied: Callable[[], LogIndex] | None = None
    ) -> None:
        """Follow logs, node -> the folder of its log: of all voters, or of one.

        `applied`: returns the index up to which that one node has applied the log.
        """
        assert (len(logs) == 1) or applied is None, "a node's word counts for its own log"
        self._tails = {node: LogTail(log) for node, log in logs.items()}
        self._applied = applied
        self._majority = len(logs) // 2 + 1
        self._returned: dict[LogIndex, tuple[Epoch, int]] = {}
        self.next = LogIndex(1)
        """The first entry that is not returned yet."""

    def poll(self) -> tuple[list[FollowedFrame], list[Divergence]]:
        """Return the entries committed since the last call, in order, and nodes that differ.

        Raises:
            LogDropped: no log has the next entry any more.
        """
        windows = {node: self._window(tail) for node, tail in self._tails.items()}
        frames = [*self._committed_since(windows)]
        found = [each for node in windows for each in self._compare(node, windows[node])]
        slowest = min(tail.next for tail in self._tails.values())
        keep = max(slowest, self.next - COMPARED_MAX)
        for index in [*takewhile(lambda index: index < keep, self._returned)]:
            del self._returned[index]
        return frames, found

    def _window(self, tail: LogTail) -> FollowedWindow:
        oldest = next(iter(self._returned), self.next)
        if tail.next < oldest:
            tail.skip_to(oldest)
        try:
            return tail.window()
        except LogDropped:
            tail.skip_to(tail.firsts()[0])
            if all(each.next > self.next for each in self._tails.values()):
                raise
            return FollowedWindow([], full=False)

    def _committed_since(self, windows: Mapping[str, FollowedWindow]) -> Iterator[FollowedFrame]:
        end = self._commit_end([*windows.values()])
        if end is None or end[0] < self.next:
            return
        for window in windows.values():
            have = [each for each in window.frames if each.index >= self.next]
            if any((each.index, each.epoch) == end for each in have) and (
                have[0].index == self.next
            ):
                for each in takewhile(lambda each: each.index <= end[0], have):
                    yield each
                    self._returned[each.index] = (each.epoch, each.crc32)
                    self.next = LogIndex(each.index + 1)
                return

    def _commit_end(self, windows: Sequence[FollowedWindow]) -> tuple[LogIndex, Epoch] | None:
        if self._applied is None:
            return commit_end(windows, self._majority)
        # Entries that were appended after the window was read wait for the next look.
        known = self._applied()
        mine = [(each.index, each.epoch) for each in windows[0].frames if each.index <= known]
        return mine[-1] if mine else None

    def _compare(self, node: str, window: FollowedWindow) -> Iterator[Divergence]:
        """Let a tail pass the committed entries; yield its differing ones."""
        tail = self._tails[node]
        last: FollowedFrame | None = None
        for each in takewhile(lambda each: each.index < self.next, window.frames):
            epoch, crc32 = self._returned.get(each.index, (each.epoch, each.crc32))
            if each.epoch < epoch:
                break  # a deposed leader appended it: the node will cut it
            if (each.epoch, each.crc32) != (epoch, crc32):
                detail = f"epoch {each.epoch} crc {each.crc32:08x}, not {epoch} {crc32:08x}"
                yield Divergence(node, each.index, detail)
            last = each
        if last is not None:
            tail.continue_after(last)
