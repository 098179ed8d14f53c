r"""The state plane of one replica: its machine, its leader while it leads, its manifests.

    commit index --> fold: apply committed entries in order --> machine
                                                            \-> leader answers, hands out
    now and then --> flush: freeze, write run, spills and manifest (elsewhere), install

Without clock, socket and thread, so that the simulator runs the same code as production. The
shell says when the commit index moved, when the time has come, and runs `Flush.write`, the only
slow part, in a thread of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from timer import manifest
from timer.disk import Disk
from timer.entry import HEADER_SIZE, Entry
from timer.errors import NotLeader, TimerError
from timer.leader import Append, Leader, LeaderConfig, Now
from timer.machine import (
    Applied,
    CancelApplied,
    Checkpoint,
    FireApplied,
    Machine,
    ScheduleApplied,
)
from timer.manifest import State
from timer.queues import Block
from timer.run import RunMeta
from timer.spill import write_spill
from timer.store import Frozen, Store
from timer.units import Epoch, LogIndex, TopicId

FOLD_BYTES: Final = 2 << 20
"""Payload applied in one go: a few milliseconds."""
CHECKPOINTS_KEPT: Final = 64
"""Three minutes of them, by default."""

# What an entry counts for besides its payload, measured as the time that it takes to apply.
_ENTRY_BYTES: Final = 4096
_PART_BYTES: Final = 1024
_FIRED_BYTES: Final = 64
_CANCEL_BYTES: Final = 1024  # in runs; in memory it is a tenth


@dataclass(slots=True)
class Flush:
    """A consistent cut on its way to the disk."""

    index: LogIndex
    state: State
    frozen: Frozen
    fresh: list[tuple[TopicId, Block]]
    disk: Disk
    directory: Path
    store: Store
    retired: list[RunMeta]
    """Runs that this manifest does not name any more."""
    run: RunMeta | None = None

    def write(self) -> None:
        """Write the run, the spill file and the manifest, durably. Slow; touches nothing shared.

        Raises:
            DiskFailed: the old manifest and its files are still whole.
        """
        self.run = self.store.write_run(self.frozen)
        if self.fresh:
            name = f"{self.index:016x}.spill"
            path = self.directory / manifest.SPILL_DIRECTORY / name
            refs = write_spill(self.disk, path, self.fresh)
            manifest.add_spills(self.state, self.fresh, refs)
            for (_, block), ref in zip(self.fresh, refs, strict=True):
                block.spill = ref
        if self.run is not None:
            self.state["runs"].append(self.run.pack())
        manifest.write(self.disk, self.directory, self.state)


def _work(entry: Entry, applied: Applied) -> int:
    """Return what applying the entry has cost, in bytes of payload that cost the same."""
    work = len(entry.payload) + _ENTRY_BYTES
    match applied:
        case ScheduleApplied(parts, _):
            work += _PART_BYTES * len(parts)
        case FireApplied(fired, _):
            work += _FIRED_BYTES * sum(len(rows) for _, rows in fired)
        case CancelApplied(results):
            work += _CANCEL_BYTES * len(results)
        case _:
            pass
    return work


class Engine:
    """State plane of one replica."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        config: LeaderConfig,
        observe: Callable[[Entry, Applied], None] | None = None,
    ) -> None:
        """Recover from the manifest in `directory`, or begin empty.

        `observe` hears of each entry as it was applied.

        Raises:
            CorruptFile: the manifest or a file that it names is damaged.
            UnknownVersion: they were written by another version.
        """
        self._disk, self._directory, self._config = disk, directory, config
        self._observe = observe
        disk.make_dir(directory)
        disk.make_dir(directory / manifest.SPILL_DIRECTORY)
        state = manifest.read(disk, directory)
        self.machine = Machine(manifest.recover_store(state, disk, directory))
        self.manifest_index = LogIndex(0)
        """Restart begins after this one; the log before it is not needed here."""
        if state is not None:
            manifest.restore(self.machine, state, disk, directory)
            self.manifest_index = self.machine.applied_index
        self._drop_spills(manifest.spill_files(state) if state else set())
        self.commit_index = self.machine.applied_index
        self.leader: Leader | None = None
        self.digests: dict[LogIndex, str] = {}
        """Of the last checkpoints, by index: what other replicas are compared with."""
        self._flushing = False
        self.log_bytes_since_flush = 0

    # ---- applying

    def committed(self, index: LogIndex) -> None:
        """Entries up to `index` may be applied."""
        self.commit_index = max(self.commit_index, index)

    @property
    def behind(self) -> bool:
        """Committed entries wait to be applied."""
        return self.machine.applied_index < self.commit_index

    def next_chunk(self) -> tuple[LogIndex, LogIndex]:
        """Return the entries [first, last] to fold next; fold at most so many at once."""
        first = LogIndex(self.machine.applied_index + 1)
        return first, LogIndex(min(self.commit_index, first + 255))

    def fold(self, entries: Sequence[Entry]) -> int:
        """Apply the next entries, up to about FOLD_BYTES; return how many were applied."""
        work = count = 0
        for entry in entries:
            if work >= FOLD_BYTES:
                break
            applied = self.machine.apply(entry)
            count += 1
            work += _work(entry, applied)
            self.log_bytes_since_flush += len(entry.payload) + HEADER_SIZE
            if isinstance(applied, Checkpoint):
                self._record(applied)
            if self._observe is not None:
                self._observe(entry, applied)
            if self.leader is not None:
                self.leader.applied(entry, applied)
        return count

    def _record(self, checkpoint: Checkpoint) -> None:
        self.digests[checkpoint.index] = checkpoint.digest
        while len(self.digests) > CHECKPOINTS_KEPT:
            del self.digests[next(iter(self.digests))]

    # ---- leading

    def lead(self, epoch: Epoch, append: Append, now: Now) -> Leader:
        """Everything committed is applied: load the wheel and serve `epoch`."""
        assert not self.behind, (self.machine.applied_index, self.commit_index)
        assert self.leader is None or self.leader.closed is not None
        self.machine.store.lead()
        self.leader = Leader(self.machine, epoch, append, self._config, now)
        return self.leader

    def step_down(self, why: TimerError | None = None) -> None:
        """Answer everybody, drop the wheel and follow."""
        if self.leader is not None:
            self.leader.close(why or NotLeader(None))
            self.leader = None
            self.machine.store.follow()

    # ---- flushing

    def wants_flush(self, *, memtable_bytes: int, log_bytes: int) -> bool:
        """Return whether enough has gathered for a flush, and none is under way."""
        full = self.machine.store.memtable_bytes >= memtable_bytes
        return not self._flushing and (full or self.log_bytes_since_flush >= log_bytes)

    def begin_flush(self) -> Flush | None:
        """Take a consistent cut at the applied index. None: one is under way, or nothing is new."""
        index = self.machine.applied_index
        if self._flushing or index == self.manifest_index:
            return None
        self._flushing = True
        self.log_bytes_since_flush = 0
        state, fresh = manifest.capture(self.machine)
        store = self.machine.store
        state["runs"] = [run.pack() for run in store.runs]
        disk, directory, retired = self._disk, self._directory, store.retired
        return Flush(index, state, store.freeze(), fresh, disk, directory, store, retired)

    def end_flush(self, flush: Flush) -> None:
        """The manifest is durable: use the new run, forget what it replaces."""
        self.machine.store.install(flush.frozen, flush.run)
        self.machine.store.remove(flush.retired)
        self.manifest_index = flush.index
        self._flushing = False
        self._drop_spills(manifest.spill_files(flush.state))

    def _drop_spills(self, named: set[str]) -> None:
        directory = self._directory / manifest.SPILL_DIRECTORY
        for name in self._disk.list_dir(directory):
            if name not in named:
                self._disk.remove(directory / name)
