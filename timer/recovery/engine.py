r"""The engine of one replica: its machine, its leader while it leads, its manifests.

    commit index --> fold: apply committed entries in order --> machine
                                                            \-> leader: results, deliveries
    now and then --> flush: freeze; write run, spills, manifest (in a thread); install

It has no clock, socket or thread, so that the simulator runs the same code as production. The
shell reports the commit index and the time. It runs `Flush.write`, the only slow part, in a thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from timer.entries.entry_check import bad_entry_text
from timer.entries.entry_frame import HEADER_SIZE, Entry, EntryKind
from timer.entries.payloads import decode_fire
from timer.entries.policies import ScopePolicy
from timer.files.disk import Disk
from timer.files.disk_reserve import DiskSpace
from timer.leader.leader import Append, Leader, LeaderConfig
from timer.model.columns import keyed_max
from timer.model.timer_errors import EngineError
from timer.model.units import Epoch, LogIndex, Now, TopicId
from timer.pending.prefetch import Prefetch
from timer.pending.runs.frozen_memtable import FrozenMemtable
from timer.pending.runs.merge import Merge
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import RunMeta
from timer.pending.runs.run_writer import Pace, unpaced
from timer.pending.store import Store
from timer.ready.page_cache import EVICTED_MAX, SpillRef
from timer.ready.spill import PageFetch, Spill, blocks_to_move, limit_joins, write_spill
from timer.recovery import manifest
from timer.recovery.manifest import ManifestBody
from timer.state.apply_results import (
    Applied,
    CancelApplied,
    Checkpoint,
    ExpireApplied,
    FireApplied,
    GroupApplied,
    OccurrencesApplied,
    RescheduleApplied,
    ScheduleApplied,
)
from timer.state.machine import Machine

FOLD_BYTES: Final = 2 << 20
"""Work of one `fold`, in bytes of payload that cost the same: a few milliseconds."""
FETCH_SIZE: Final = 8 << 20
"""Bytes of spilled messages that one read returns to memory."""
KEEP_UPS: Final = 8
"""Rounds of `Machine.keep_up` per entry, as many as the topics that an entry may touch. A
checkpoint has to do the rest."""
CHECKPOINTS_MAX: Final = 64
"""Checkpoints whose digests are remembered: three minutes by default."""

LOW_LOG_SHARE: Final = 8
"""If the disk is low, a flush begins after 1/8 of the reserve in log bytes."""
MOVED_SHARE: Final = 4
"""A flush joins and copies blocks of up to 1/4 of the free bytes that it leaves; a merge may use
half."""
FLUSH_OVERHEAD: Final = 64 << 10
"""Bytes of a flush besides rows and manifest, about, at most."""

# Work of an entry besides its payload, in bytes, measured as the time to apply it.
_ENTRY_BYTES: Final = 128 << 10  # 0.1 to 0.2 ms, and a GB a second are copied
_PART_BYTES: Final = 1024
_FIRED_BYTES: Final = 128
_TOPIC_BYTES: Final = 8192  # per topic with rows
_OP_BYTES: Final = 64 << 10  # of a group
_KEY_BYTES: Final = 2048  # if a timer in a run has the key; else a tenth
_CANCEL_BYTES: Final = 1024  # in runs; a tenth in memory
_MOVED_BYTES: Final = 64 << 10  # of a RESCHEDULE: two opens of a run's file
_EXPIRED_BYTES: Final = 8192  # a group's cursor moves over some ten thousand messages
_OCCURRENCE_BYTES: Final = 4096  # its payload and headers are copied one by one
_TARGET_SIZE: Final = 16


@dataclass(slots=True)
class Flush:
    """A consistent cut that is being written to the disk."""

    index: LogIndex
    state: ManifestBody
    frozen: FrozenMemtable
    new_spills: list[Spill]
    disk: Disk
    directory: Path
    store: Store
    retired: list[RunMeta]
    """Runs that this manifest does not name any more."""
    moved_size_max: int
    """Bytes of blocks in older spill files that may be joined or copied to the new one."""
    windows: list[ReadWindow] = field(default_factory=list)
    """Read windows of the new runs."""
    manifest_size: int = 0
    """Bytes. 0 until it is written."""
    moved: dict[SpillRef, SpillRef] = field(default_factory=dict)
    """Blocks that were copied: old place -> new place."""
    moved_topics: list[TopicId] = field(default_factory=list)
    """Topics of these blocks."""

    def write(self, pace: Pace = unpaced) -> None:
        """Write runs, spill file and manifest durably. Then remove files that none needs now.

        Slow. Changes no shared object.

        Raises:
            DiskFailedError: the old manifest and its files are intact.
            CorruptFileError: a block to copy or to join is damaged. The old manifest stays valid.
        """
        self.windows = self.store.write_run(self.frozen, pace)
        spills = self.directory / manifest.SPILL_DIRECTORY
        self.new_spills = limit_joins(self.new_spills, self.moved_size_max)
        joined = {ref for spill in self.new_spills for ref in spill.places}
        joined_size = sum(ref.size for ref in joined)
        refs = [ref for ref in manifest.spill_refs(self.state) if ref not in joined]
        thin = blocks_to_move(self.disk, spills, refs, self.moved_size_max, joined_size)
        if self.new_spills or thin:
            path = spills / f"{self.index:016x}.spill"
            self.moved = write_spill(self.disk, path, self.new_spills, thin, pace)
            self.moved_topics = manifest.move_spills(self.state, self.moved)
            manifest.add_spills(self.state, self.new_spills)
        self.state["runs"] += [window.run.meta.pack() for window in self.windows]
        self.manifest_size = manifest.write(self.disk, self.directory, self.state)
        self.store.remove(self.retired)
        # Old places of moved and joined blocks may be read until `end_flush`.
        still = {ref.file for ref in (*self.moved, *joined)}
        drop_spills(self.disk, self.directory, manifest.spill_files(self.state) | still)
        topics = self.state["topics"]
        while topics:  # one by one: freeing all at once would block all threads
            topics.pop()


def drop_spills(disk: Disk, directory: Path, named: set[str]) -> None:
    """Remove the spill files that the newest manifest does not name."""
    spills = directory / manifest.SPILL_DIRECTORY
    for name in disk.list_dir(spills):
        if name not in named:
            disk.remove(spills / name)


def _work(entry: Entry, applied: Applied) -> int:
    """Return the work of an applied entry, in bytes of payload that cost the same."""
    work = len(entry.payload) + _ENTRY_BYTES
    match applied:
        case ScheduleApplied(parts, _, keyed, topics):
            work += _PART_BYTES * len(parts) + _KEY_BYTES * keyed
            work += _TOPIC_BYTES * max(0, topics - 1)
        case FireApplied(fired, _, released, dropped):
            moved = (*fired, *released, *dropped)
            work += _FIRED_BYTES * sum(len(rows) for _, rows in moved) + _TOPIC_BYTES * len(moved)
        case CancelApplied(results):
            work += _CANCEL_BYTES * len(results)
        case RescheduleApplied(results):
            work += _MOVED_BYTES * len(results) + applied.moved_bytes
        case GroupApplied(ops):
            groups = sum(op.groups for op in ops if isinstance(op, ExpireApplied))
            work += _EXPIRED_BYTES * groups + _OP_BYTES * len(ops)
        case OccurrencesApplied(new):
            work += _OCCURRENCE_BYTES * len(new)
        case _:
            pass
    return work


def _known_work(entry: Entry) -> int:
    """Return the part of `_work` that is known before the entry is applied."""
    work = len(entry.payload) + _ENTRY_BYTES
    match entry.kind:
        case EntryKind.SCHEDULE:
            work += _KEY_BYTES * keyed_max(entry.payload)
        case EntryKind.CANCEL | EntryKind.RESCHEDULE:
            work += _CANCEL_BYTES * len(entry.payload) // _TARGET_SIZE
        case _:
            pass
    return work


class Engine:
    """The state plane of one replica. See the module."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        config: LeaderConfig,
        observe: Callable[[Entry, Applied], None] | None = None,
        key_secret: bytes = b"",
    ) -> None:
        """Recover from the manifest in `directory`, or begin empty.

        `observe` is called after each entry is applied. `key_secret`: for the hashes of keys
        (timer/pending/memory/key_index.py); if there is a manifest, its secret is used.

        Raises:
            CorruptFileError: the manifest or a file that it names is damaged.
            UnknownVersionError: another version wrote them.
        """
        self._disk, self._directory, self._config = disk, directory, config
        self._observe = observe
        disk.make_dir(directory)
        disk.make_dir(directory / manifest.SPILL_DIRECTORY)
        state = manifest.read(disk, directory)
        self.machine = Machine(manifest.recover_store(state, disk, directory, key_secret))
        self._ahead = manifest.FlushSources(self.machine)
        self.manifest_index = LogIndex(0)
        """Index of the newest manifest. A restart does not need the log up to here."""
        named = manifest.spill_files(state) if state is not None else set()
        if state is not None:
            manifest.restore(self.machine, state, disk, directory)
            self.manifest_index = self.machine.applied_index
        drop_spills(disk, directory, named)
        self.commit_index = self.machine.applied_index
        self.leader: Leader | None = None
        self.digests: dict[LogIndex, str] = {}
        """Digests of the last checkpoints, by index, for the comparison with other replicas."""
        self.flushing = False
        """Whether a manifest is being written."""
        self.disk_space = DiskSpace.unmeasured()
        """Free space on the disk, last measured by the shell."""
        self._manifest_size = disk.size(directory / manifest.NAME) if state is not None else 0
        self.applied_bytes = 0
        """Bytes of the log that were applied since the start."""
        self._flushed_bytes = 0
        self._flushed_index = self.manifest_index
        self._prefetched_to = LogIndex(0)
        """Last entry that `begin_prefetch` has seen. `fold` stops after it."""
        self._reread_sweep: tuple[LogIndex, list[RunMeta]] | None = None
        """(FIRE, runs) for which the held rows of its sweep were read a second time."""
        self._reread_fire: tuple[LogIndex, list[RunMeta]] | None = None
        """(FIRE, runs) that passes many dead rows, or rows that were not read ahead."""

    @property
    def node_policy(self) -> ScopePolicy:
        """The node's settings, which hold where no policy is set."""
        return self._config.policy

    # ---- applying

    def raise_commit_index(self, index: LogIndex) -> None:
        """Note that entries up to `index` may be applied."""
        self.commit_index = max(self.commit_index, index)

    @property
    def is_behind(self) -> bool:
        """Whether committed entries wait to be applied."""
        return self.machine.applied_index < self.commit_index

    def next_chunk(self) -> tuple[LogIndex, LogIndex]:
        """Return the entries [first, last] to apply next, at most 256."""
        first = LogIndex(self.machine.applied_index + 1)
        return first, LogIndex(min(self.commit_index, first + 255))

    def begin_prefetch(self, entries: Sequence[Entry]) -> Prefetch | None:
        """Return the reads that a thread does before these next entries are applied.

        It covers the entries of one `fold`, by an estimate of their work. Call it again for the
        rest. None: the reads are few, or these entries were covered before.
        """
        if self.machine.applied_index < self._prefetched_to:
            return None
        try:
            return self._begin_prefetch(entries)
        except Exception as error:
            error.add_note(bad_entry_text(entries))
            raise

    def _begin_prefetch(self, entries: Sequence[Entry]) -> Prefetch | None:
        work = count = 0
        for entry in entries:
            if work >= FOLD_BYTES:
                break
            work += FOLD_BYTES if self._moves_sweep(entry) else _known_work(entry)
            count += 1
        self._prefetched_to = entries[count - 1].index
        fires = entries[count - 1].kind is EntryKind.FIRE
        sweep = self.machine.pauses.next_portion() if fires else None
        first, fire = entries[0], None
        if self._reread_fire is not None and self._reread_fire[0] == first.index:
            fire = decode_fire(first.payload)
        return self.machine.store.begin_prefetch(entries[:count], sweep, fire)

    def _moves_sweep(self, entry: Entry) -> bool:
        """Return whether the entry must be applied before a sweep's next portion is known."""
        match entry.kind:
            case EntryKind.FIRE:
                return self.machine.sweep_position is not None
            case EntryKind.POLICY | EntryKind.TOPIC:
                return self.machine.store.held > 0
            case _:
                return False

    def _needs_second_prefetch(self, entry: Entry) -> bool:
        """Return whether a thread has to read first, because a FIRE passes many dead rows or reads.

        At most once for the same runs. Rows that the thread did not bring are then read by the
        FIRE, which raises the error if they can't be read.
        """
        if entry.kind is not EntryKind.FIRE:
            return False
        attempt = entry.index, [*self.machine.store.runs]
        if attempt != self._reread_fire and not self.machine.store.try_find_due(
            decode_fire(entry.payload)
        ):
            self._reread_fire = attempt
            self._prefetched_to = self.machine.applied_index
            self.machine.store.use_prefetch(None)
            return True
        portion = self.machine.pauses.next_portion()
        if portion is None or entry.index > self._prefetched_to:
            return False
        if self.machine.store.is_read_ahead(portion) or attempt == self._reread_sweep:
            return False
        self._reread_sweep = attempt
        self._prefetched_to = self.machine.applied_index
        self.machine.store.use_prefetch(None)
        return True

    def use_prefetch(self, prefetch: Prefetch) -> None:
        """Use these answers for the entries that are applied next."""
        self.machine.store.use_prefetch(prefetch)

    def fold(self, entries: Sequence[Entry]) -> int:
        """Apply the next entries, up to about FOLD_BYTES. Return how many were applied.

        The messages that fire count, too. So memory grows by FOLD_BYTES and one FIRE at most.
        It stops after the entries that the last `begin_prefetch` has seen. It may return 0: then
        another prefetch is needed, or the next entry is applied in portions.
        """
        work = count = 0
        try:
            for entry in entries:
                if work >= FOLD_BYTES or self._needs_second_prefetch(entry):
                    break
                if not self.machine.portions.do(entry):
                    break
                unspilled = self.machine.pages.unspilled_size
                applied = self.machine.apply(entry)
                fired = max(0, self.machine.pages.unspilled_size - unspilled)
                work += _work(entry, applied) + fired
                self.applied_bytes += len(entry.payload) + HEADER_SIZE
                if isinstance(applied, Checkpoint):
                    self._record(applied)
                if self._observe is not None:
                    self._observe(entry, applied)
                if self.leader is not None:
                    self.leader.on_applied(entry, applied)
                for _ in range(KEEP_UPS):
                    if not self.machine.keep_up():
                        break
                count += 1
                if entry.index == self._prefetched_to:
                    self.machine.store.use_prefetch(None)
                    break
        except Exception as error:
            error.add_note(bad_entry_text(entries[count : count + 1]))
            raise
        return count

    def keep_up(self) -> bool:
        """Do some work that would make a later step long. Return whether more is left."""
        more = self.machine.keep_up()
        return self.machine.store.keep_up() or more

    def _record(self, checkpoint: Checkpoint) -> None:
        self.digests[checkpoint.index] = checkpoint.digest
        while len(self.digests) > CHECKPOINTS_MAX:
            del self.digests[next(iter(self.digests))]

    # ---- leading

    def lead(self, epoch: Epoch, append: Append, now: Now) -> Leader:
        """Begin to lead `epoch`. All committed entries must have been applied."""
        assert not self.is_behind, (self.machine.applied_index, self.commit_index)
        assert self.leader is None or self.leader.closed is not None
        self.machine.store.lead()
        self.leader = Leader(self.machine, epoch, append, self._config, now)
        return self.leader

    def step_down(self, why: EngineError) -> None:
        """Fail all waiting requests and follow."""
        if self.leader is not None:
            self.leader.close(why)
            self.leader = None
            self.machine.store.follow()

    # ---- fired messages that left memory

    def begin_fetch(self) -> PageFetch | None:
        """Return the fired messages that a thread should read from spill files; None: none."""
        wanted = self.machine.pages.requested_blocks(FETCH_SIZE)
        if not wanted:
            return None
        return PageFetch(self._disk, self._directory / manifest.SPILL_DIRECTORY, wanted)

    def end_fetch(self, fetch: PageFetch) -> None:
        """Use the messages that were read. The leader delivers them at its next step.

        Raises:
            CorruptFileError: a spill file is missing.
        """
        pages = self.machine.pages
        pages.evict(max(0, pages.size_max - FETCH_SIZE))
        fetch.install(pages)
        if self.leader is not None:
            self.leader.groups.on_pages_read()

    # ---- flushing

    @property
    def log_bytes_since_flush(self) -> int:
        """Bytes of the log that a restart would apply again."""
        return self.applied_bytes - self._flushed_bytes

    @property
    def log_entries_since_flush(self) -> int:
        """Entries of the log that a restart would apply again."""
        return self.machine.applied_index - self._flushed_index

    def wants_flush(self, *, memtable_bytes: int, log_bytes: int, log_entries: int) -> bool:
        """Return whether a flush is due, fits on the disk, and none is under way."""
        if self.disk_space.low:  # a flush lets older log be dropped
            log_bytes = min(log_bytes, self.disk_space.reserve // LOW_LOG_SHARE)
        wanted = (
            self.unflushed_bytes >= memtable_bytes
            or self.log_bytes_since_flush >= log_bytes
            or self.log_entries_since_flush >= log_entries
        )
        return wanted and not self.flushing and self.flush_fits

    def is_mostly_dead(self, memory_bytes: int) -> bool:
        """Return whether the memtable has `memory_bytes` or more, and most of its rows are dead."""
        memtable = self.machine.store.memtable
        return memtable.is_mostly_dead and memtable.size >= memory_bytes

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of memory that a flush would write out."""
        return self.machine.store.memtable.size + self.machine.pages.unspilled_size

    @property
    def flush_fits(self) -> bool:
        """Whether the disk has room for a flush. A failed one only ends the process."""
        return self._flush_size <= self.disk_space.free

    @property
    def _flush_size(self) -> int:
        return self.unflushed_bytes + self._manifest_size + FLUSH_OVERHEAD

    @property
    def capture_begun(self) -> bool:
        """Whether part of the next flush's state is captured."""
        return self._ahead.has_begun

    def prepare_flush(self, topics_max: int) -> bool:
        """Capture some of the state for the next flush. Return whether enough is captured.

        Optional: `begin_flush` captures the rest, however long this takes.
        """
        return not self._may_flush or self._ahead.capture_some(topics_max)

    @property
    def _may_flush(self) -> bool:
        machine = self.machine
        new = machine.applied_index != self.manifest_index and not machine.portions.has_begun
        return new and not self.flushing and self.flush_fits

    def begin_flush(self) -> Flush | None:
        """Take a consistent cut at the applied index.

        None: a flush is under way, nothing is new, or the disk has no room.
        """
        if not self._may_flush:
            self._ahead.forget()
            return None
        self.flushing, index = True, self.machine.applied_index
        moved_size_max = (self.disk_space.free - self._flush_size) // MOVED_SHARE
        self._flushed_bytes, self._flushed_index = self.applied_bytes, index
        state, fresh = manifest.capture(self.machine, self._ahead)
        store = self.machine.store
        state["runs"] = [run.pack() for run in store.runs]
        disk, directory, retired = self._disk, self._directory, store.retired
        frozen = store.freeze()
        return Flush(index, state, frozen, fresh, disk, directory, store, retired, moved_size_max)

    def settle_flush(self, flush: Flush, topics_max: int) -> bool:
        """Let some queues use the spill file of a durable manifest, and evict some pages.

        Return whether all is done. Optional: `end_flush` does the rest.
        """
        for spill in flush.new_spills[:topics_max]:
            spill.install()
        del flush.new_spills[:topics_max]
        for topic_id in flush.moved_topics[:topics_max]:
            if (topic := self.machine.topics.get(topic_id)) is not None:
                topic.queue.move_blocks(flush.moved)
        del flush.moved_topics[:topics_max]
        if flush.new_spills or flush.moved_topics:
            return False
        return self.machine.pages.evict(self.machine.pages.size_max, EVICTED_MAX)

    def end_flush(self, flush: Flush) -> None:
        """Use the new run of a durable manifest. Drop the memory and files that it replaces."""
        self.machine.store.install(flush.frozen, flush.windows)
        self.machine.store.forget(flush.retired)
        self.settle_flush(flush, len(flush.new_spills) + len(flush.moved_topics))
        self.machine.pages.evict(self.machine.pages.size_max)
        self.manifest_index = flush.index
        self._manifest_size = flush.manifest_size
        self.flushing = False

    def begin_merge(self) -> Merge | None:
        """Return the merge to do now.

        None: one is under way, or none is needed that writes at most half of the free room.
        """
        return self.machine.store.begin_merge(self.disk_space.free // 2)
