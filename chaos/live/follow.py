"""Follow: the committed entries of a running cluster, read from its nodes' log files as they grow.

    n1/log  ...........=====......        each tail reads from the last entry that it has passed;
    n2/log  ...........=====...           what a majority holds is committed and handed on, once;
    n3/log  ...........==                 what a node holds otherwise is told

Reading only, from outside: nothing of the product runs here, and a node never notices. The last
frame of a file may be half written (wait), an uncommitted suffix may be cut and replaced (read
anew: a tail never passes what is not committed), old segments are removed (a later one is found).

**What is committed.** Seen from the files of all voters, entry (index, epoch) is, when a majority
holds it and every log that knows a later epoch holds it too: whoever leads next counts a majority,
takes the greatest (epoch, index) in it, and finds the entry below (replication/core/core.py). With
one node's log alone that can't be seen; then the node's own word is asked for (`applied`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from timer.entries import entry_frame
from timer.entries.entry_frame import Damage, Entry
from timer.files import segment
from timer.files.disk import Disk, RealDisk
from timer.model.timer_errors import CorruptFileError
from timer.model.units import Epoch, LogIndex

WINDOW_SIZE: Final = 16 << 20
"""Bytes that one look at one log reads at most, one frame more or less."""
COMPARED_MAX: Final = 1 << 18
"""Entries that a node may be behind and still be compared; what is further back is skipped."""


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
    """What one log holds after what was passed."""

    held: list[FollowedFrame]
    full: bool
    """There is more of it."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A node holds something else than what was committed."""

    node: str
    index: LogIndex
    detail: str


class LogGone(Exception):
    """The log no longer has the entry that comes next: its segments were removed."""


class LogTail:
    """One node's log, read from a position that only moves forward."""

    def __init__(self, log: Path, first: LogIndex, disk: Disk) -> None:
        self.next = first
        """The first entry that was not passed."""
        self._log = log
        self._disk = disk
        self._at: tuple[Path, int] | None = None

    def window(self, size: int = WINDOW_SIZE) -> FollowedWindow:
        """Return the whole frames from `next` on, about `size` bytes of them.

        Raises:
            LogGone: the log begins after `next`.
        """
        for _ in range(2):
            try:
                return self._window(size)
            except FileNotFoundError:  # removed since: it is in no file, or in a later one
                self._at = None
        return FollowedWindow([], full=False)

    def _window(self, size: int) -> FollowedWindow:
        held: list[FollowedFrame] = []
        expected = self.next
        path, position = self._at or (self._segment_of(expected), segment.HEADER_SIZE)
        while True:
            for found in segment.walk(self._disk, path, position, min(size, segment.SCAN_SIZE)):
                if isinstance(found, Damage):
                    return FollowedWindow(held, full=False)  # half written
                start, epoch, index, frame = found
                if index > expected:
                    return FollowedWindow(held, full=False)  # cut and written anew meanwhile
                if index == expected:
                    crc32 = int.from_bytes(frame[:4], "little")
                    held.append(FollowedFrame(index, epoch, crc32, path, start + len(frame), frame))
                    expected = LogIndex(expected + 1)
                    size -= len(frame)
                    if size <= 0:
                        return FollowedWindow(held, full=True)
            following = segment.path_of(self._log, expected)
            if following == path or not self._is_born(following):
                return FollowedWindow(held, full=False)
            path, position = following, segment.HEADER_SIZE

    def _is_born(self, path: Path) -> bool:
        """Return whether there is such a segment, its header written."""
        try:
            segment.decode_header(path, self._disk.read(path, 0, segment.HEADER_SIZE))
        except (CorruptFileError, FileNotFoundError):
            return False
        return True

    def _segment_of(self, index: LogIndex) -> Path:
        firsts = self.firsts()
        before = [first for first in firsts if first <= index]
        if firsts and not before:
            raise LogGone(f"{self._log} begins with entry {firsts[0]}, not {index}")
        return segment.path_of(self._log, max(before, default=LogIndex(1)))

    def firsts(self) -> list[LogIndex]:
        """Return the first entries of the segments that there are, in order."""
        names = self._disk.list_dir(self._log) if self._disk.exists(self._log) else []
        return sorted(first for name in names if (first := segment.first_of(name)) is not None)

    def has_passed(self, last: FollowedFrame) -> None:
        """Go on after `last`."""
        self.next, self._at = LogIndex(last.index + 1), (last.path, last.end)

    def skip_to(self, index: LogIndex) -> None:
        """Go on with entry `index`, wherever it lies."""
        self.next, self._at = index, None


def committed(windows: Sequence[FollowedWindow], majority: int) -> tuple[LogIndex, Epoch] | None:
    """Return the last entry that is certainly committed; None: none of those in the windows.

    `windows` are those of all voters. One that is full knows of no epoch beyond it, so that it is
    taken to know a later one: the entry has to be in it.
    """
    lasts = [{each.epoch: each.index for each in window.held} for window in windows]
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
    """The committed entries of the cluster whose logs these are, from one entry on."""

    def __init__(
        self,
        logs: Mapping[str, Path],
        first: LogIndex,
        *,
        applied: Callable[[], LogIndex] | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Begin with entry `first`.

        Args:
            logs: node -> its log's folder: of all voters, or of one.
            first: the first entry to hand on.
            applied: what that one node says that it has applied.
            disk: where the logs lie.
        """
        assert (len(logs) == 1) or applied is None, "a node's word counts for its own log"
        self._tails = {node: LogTail(log, first, disk or RealDisk()) for node, log in logs.items()}
        self._applied = applied
        self._majority = len(logs) // 2 + 1
        self._passed: dict[LogIndex, tuple[Epoch, int]] = {}
        self.next = first
        """The first entry that was not handed on."""

    def poll(self) -> tuple[list[Entry], list[Divergence]]:
        """Return the entries that are committed since, in order, and what contradicts them.

        Raises:
            LogGone: no log has the next entry any more.
            UnknownVersion: a frame of another version.
        """
        windows = {node: self._window(tail) for node, tail in self._tails.items()}
        entries = [*self._hand_on(windows)]
        found = [each for node in windows for each in self._compare(node, windows[node])]
        slowest = min(tail.next for tail in self._tails.values())
        keep = max(slowest, self.next - COMPARED_MAX)
        for index in [*takewhile(lambda index: index < keep, self._passed)]:
            del self._passed[index]
        return entries, found

    def _window(self, tail: LogTail) -> FollowedWindow:
        oldest = next(iter(self._passed), self.next)
        if tail.next < oldest:
            tail.skip_to(oldest)
        try:
            return tail.window()
        except LogGone:
            tail.skip_to(tail.firsts()[0])
            if all(each.next > self.next for each in self._tails.values()):
                raise
            return FollowedWindow([], full=False)

    def _hand_on(self, windows: Mapping[str, FollowedWindow]) -> Iterator[Entry]:
        end = self._committed([*windows.values()])
        if end is None or end[0] < self.next:
            return
        for window in windows.values():
            have = [each for each in window.held if each.index >= self.next]
            if any((each.index, each.epoch) == end for each in have) and (
                have[0].index == self.next
            ):
                for each in takewhile(lambda each: each.index <= end[0], have):
                    parsed = entry_frame.frame_at(each.frame, 0)
                    assert isinstance(parsed, Entry), parsed
                    yield parsed
                    self._passed[each.index] = (each.epoch, each.crc32)
                    self.next = LogIndex(each.index + 1)
                return

    def _committed(self, windows: Sequence[FollowedWindow]) -> tuple[LogIndex, Epoch] | None:
        if self._applied is None:
            return committed(windows, self._majority)
        # Asked after the log was read: what it names and the window lacks waits for the next look.
        known = self._applied()
        mine = [(each.index, each.epoch) for each in windows[0].held if each.index <= known]
        return mine[-1] if mine else None

    def _compare(self, node: str, window: FollowedWindow) -> Iterator[Divergence]:
        """Let a tail pass what is committed; tell what is not the same."""
        tail = self._tails[node]
        last: FollowedFrame | None = None
        for each in takewhile(lambda each: each.index < self.next, window.held):
            epoch, crc32 = self._passed.get(each.index, (each.epoch, each.crc32))
            if each.epoch < epoch:
                break  # what a deposed leader appended: the node cuts it when it is back
            if (each.epoch, each.crc32) != (epoch, crc32):
                detail = f"epoch {each.epoch} crc {each.crc32:08x}, not {epoch} {crc32:08x}"
                yield Divergence(node, each.index, detail)
            last = each
        if last is not None:
            tail.has_passed(last)
