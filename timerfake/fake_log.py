"""The ground under a fake node: a manual clock, a log in memory, no disk.

The log takes the place of the replica (cluster/state/host.py) in a cluster that never loses a node.
An entry is committed in the next turn of the event loop after its append.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Final, NoReturn

from timer.entries.entry_frame import HEADER_SIZE, Entry, EntryKind, encode, frame_at
from timer.entries.payloads import EpochStart, encode_epoch
from timer.files.disk import UNKNOWN_BOOT, AppendFile, Bytes, Disk, FileLock, MarkFile
from timer.model.feature_level import LEVEL_MAX
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs

REPLICA = ReplicaId(1)
NEVER: Final = 1 << 62
"""Milliseconds, bytes, entries."""
LOG_BYTES_MAX: Final = 16 << 20
"""Bytes of applied entries that the log keeps for stories."""


class FakeAlarm:
    """A callback at one time of the clock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Prevent the callback."""
        self.callback = None


class FakeClock:
    """The wall clock and the monotonic clock of a node and its clients. Only `advance` moves it."""

    def __init__(self, wall_ms: int) -> None:
        self._wall_ms = wall_ms
        self._mono_ms = 0
        self._alarms: list[tuple[int, int, FakeAlarm]] = []
        self._alarm_count = 0
        self.now_s: Callable[[], float] = lambda: self._mono_ms / 1000
        self.settle: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Consumers for threads await this before and after each attempt to receive."""

    def call_at(self, when_s: float, callback: Callable[[], object]) -> FakeAlarm:
        """Schedule `callback` for `when_s`; see timerclient/values/lease_clock.py."""
        alarm = FakeAlarm(callback)
        self._alarm_count += 1
        heapq.heappush(self._alarms, (math.ceil(when_s * 1000), self._alarm_count, alarm))
        return alarm

    def alarm_ms(self) -> MonoMs:
        """Return the time of the next alarm; NEVER: there is none."""
        while self._alarms and self._alarms[0][2].callback is None:
            heapq.heappop(self._alarms)
        return MonoMs(self._alarms[0][0] if self._alarms else NEVER)

    def run_due_alarms(self) -> None:
        """Call the callbacks of all alarms that are due."""
        while self.alarm_ms() <= self._mono_ms:
            _, _, alarm = heapq.heappop(self._alarms)
            callback, alarm.callback = alarm.callback, None
            assert callback is not None
            callback()

    def wall_ms(self) -> UnixMs:
        """Return Unix milliseconds."""
        return UnixMs(self._wall_ms)

    def mono_ms(self) -> MonoMs:
        """Return milliseconds since the clock was made."""
        return MonoMs(self._mono_ms)

    def advance(self, ms: int) -> None:
        """Advance both clocks."""
        self._wall_ms += ms
        self._mono_ms += ms


class MemoryLog:
    """The log of a cluster with one voter, which always leads."""

    def __init__(self) -> None:
        self.on_commit: Callable[[LogIndex], None] = lambda _: None
        """Called with the commit index when it rises."""
        self._entries: dict[LogIndex, Entry] = {}
        """Entries that are not applied yet, and applied ones that stories are read from."""
        self.first_index = LogIndex(1)
        self._size = 0
        self._is_commit_free = True
        self.epoch = Epoch(0)
        self.last_index = LogIndex(0)
        self._last_time_ms = UnixMs(0)

    def begin_epoch(self) -> Epoch:
        """Begin the next epoch: append its first entry, and return it."""
        self.epoch = Epoch(self.epoch + 1)
        start = EpochStart(self.epoch, REPLICA, (REPLICA,), LEVEL_MAX)
        self.propose(EntryKind.EPOCH, [encode_epoch(start)], self._last_time_ms)
        return self.epoch

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry and return its index. The next turn of the event loop commits it."""
        self.last_index = LogIndex(self.last_index + 1)
        self._last_time_ms = time_ms
        frame = encode(kind, self.epoch, self.last_index, time_ms, payload)
        entry = frame_at(memoryview(frame), 0)  # an applied entry has passed through the codec
        assert isinstance(entry, Entry), entry
        self._entries[entry.index] = entry
        self._size += len(frame)
        if self._is_commit_free:
            self._is_commit_free = False
            asyncio.get_running_loop().call_soon(self._commit)
        return entry.index

    def _commit(self) -> None:
        self._is_commit_free = True
        self.on_commit(self.last_index)

    def cached_entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        """Return entries `first` to `last`. Entries before `first` are applied: drop most."""
        while self._size > LOG_BYTES_MAX and self.first_index < first:
            self._size -= HEADER_SIZE + len(self._entries.pop(self.first_index).payload)
            self.first_index = LogIndex(self.first_index + 1)
        return [self._entries[LogIndex(index)] for index in range(first, last + 1)]

    async def entries(self, first: LogIndex, last: LogIndex) -> Sequence[Entry]:
        """Return entries `first` to `last`, as `cached_entries`."""
        return self.cached_entries(first, last)

    def stored_entries(self, first: LogIndex, last: LogIndex, size_max: int) -> Sequence[Entry]:
        """Return entries from `first` on, about `size_max` bytes. Empty: `first` was dropped."""
        found: list[Entry] = []
        while size_max > 0 and first <= last and (entry := self._entries.get(first)) is not None:
            found.append(entry)
            size_max -= len(entry.payload)
            first = LogIndex(first + 1)
        return found

    @property
    def last_time_ms(self) -> UnixMs:
        """Header time of the last entry."""
        return self._last_time_ms

    def holds_lease(self) -> bool:
        """Return True: no other node can lead."""
        return True

    async def wait_until_synced(self, index: LogIndex) -> bool:
        """Return True at once: there is no disk."""
        del index
        return True

    def drop_before(self, index: LogIndex, *, keep: bool) -> None:
        """Drop nothing: `cached_entries` bounds the log."""


class NoDisk(Disk):
    """An empty disk that is never written to: pending timers and messages stay in memory."""

    def exists(self, path: Path) -> bool:
        """Return False."""
        del path
        return False

    def list_dir(self, path: Path) -> list[str]:
        """Return an empty list."""
        del path
        return []

    def make_dir(self, path: Path) -> None:
        """Do nothing: every directory counts as made."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Raise FileNotFoundError."""
        del start, size
        raise FileNotFoundError(path)

    def size(self, path: Path) -> int:
        """Raise FileNotFoundError."""
        raise FileNotFoundError(path)

    def remove(self, path: Path) -> None:
        """Raise FileNotFoundError."""
        raise FileNotFoundError(path)

    def link(self, path: Path, name: Path) -> None:
        """Raise FileNotFoundError."""
        del name
        raise FileNotFoundError(path)

    def open_append(self, path: Path) -> AppendFile:
        """Fail: this is never called."""
        self._fail(path)

    def open_mark(self, path: Path) -> MarkFile:
        """Fail: this is never called."""
        self._fail(path)

    def write_atomic(self, path: Path, data: Bytes) -> None:
        """Fail: this is never called."""
        del data
        self._fail(path)

    def sync_dir(self, path: Path) -> None:
        """Fail: this is never called."""
        self._fail(path)

    def free_bytes(self, path: Path) -> int:
        """Fail: this is never called."""
        self._fail(path)

    def boot_id(self) -> bytes:
        """Return UNKNOWN_BOOT."""
        return UNKNOWN_BOOT

    def lock(self, path: Path) -> FileLock:
        """Fail: this is never called."""
        self._fail(path)

    @staticmethod
    def _fail(path: Path) -> NoReturn:
        raise AssertionError(f"a fake node writes nothing: {path}")


class InlineExecutor(Executor):
    """An executor without threads: `submit` runs the call at once, on the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a call and return its future, which is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised at the future's result()
            future.set_exception(error)
        return future
