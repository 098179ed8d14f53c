"""A continuous backup: a backup now and then, and the log between them all the time.

    this thread     FetchLog --frames--> parts in the store, each interval, until none is left
    another thread  BackupRun, when the last backup is old, and after a gap
    a third one     reports the store's last index to all nodes, even if the store does not answer
    at the end      all entries that are committed by then

    log      100 ======101..200====|====201..260==|=261..  shipped every few seconds
    backups        ^150                 ^220               each continues in the log after its index

The log is shipped from one node. Every node has the same applied entries, so any other one serves
when it does not answer, or has dropped the next entry. Each node regularly gets the store's last
index, and keeps the entries after it. If no node has the next entry, there is a gap: the shipper
continues after it, and takes a new backup there. No state within the gap can be restored.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from cluster.backup.backup_run import (
    PAUSE_S,
    BackupRun,
    check_cluster,
    chosen_node,
    committed_index,
)
from cluster.backup.backup_store import BackupError, BackupStore, StoreUnavailable, WrongStore
from cluster.backup.catalogue import Catalogue, readable_catalogues
from cluster.backup.log_parts import LogEnd, StoredLog, entries_after, folder_of, write_part
from cluster.backup.pin_keeper import keeping_pin
from cluster.backup.store_care import prune
from timer.entries.entry_frame import Entry, EntryKind
from timer.model.units import Epoch, LogIndex
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound, Overloaded, TimerError, Unavailable

PARTS_AT_ONCE: Final = 16
"""Parts that are written before a backup may begin or end."""
COMPARE_S: Final = 20.0
"""Interval in which the store is compared with the leader's log, if a node has less."""
GAP_S: Final = 60.0
"""Time for which a node that does not answer may still have the next entry."""
PART_BYTES: Final = 16 << 20
"""Frames of one part, about, in bytes. One entry alone may be larger."""
IDLE_PART_S: Final = 60.0
"""Entries without an effect are written together, once in this time."""
QUIET_S: Final = 30.0
"""A node that applies nothing for this time is left: a leader appends checkpoints all the time."""
RETRY_S: Final = 10.0
"""Pause after a backup that failed."""
CAUSES_MAX: Final = 10
"""Most causes of trouble that are logged: some messages have a number that changes each time."""
_BEHIND_ALL: Final = LogEnd(LogIndex((1 << 63) - 1), Epoch(0))


class MissingEntries(Exception):
    """The next entry of the log is not on the node any more, or the log is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipPlan:
    """Intervals of a continuous backup."""

    log_every_s: float
    backup_every_s: float
    keep: int | None = None
    """Newest backups to keep; older ones are deleted, with their log. None: all."""
    node: str = ""
    """The node that sends log and state; empty: chosen."""
    patience_s: float = 60.0
    """Time for each call of a backup."""


class LogShipper:
    """Takes a continuous backup until `stop`. See the module."""

    def __init__(  # noqa: PLR0913 - clocks and listeners
        self,
        client: TimerClient,
        store: BackupStore,
        plan: ShipPlan,
        *,
        wall_s: Callable[[], float],
        mono_s: Callable[[], float],
        on_backup: Callable[[Catalogue], None],
        on_progress: Callable[[str], None],
    ) -> None:
        """`wall_s`, `mono_s`: clocks. `on_backup` gets each backup, `on_progress` the news."""
        self._client, self._store, self._plan = client, store, plan
        self._wall_s, self._mono_s = wall_s, mono_s
        self._on_backup, self._on_progress = on_backup, on_progress
        self._id = secrets.randbits(63) + 1
        self._is_stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        """`stop` puts an item. A signal may interrupt a thread that holds the lock of an Event."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backup")
        self._running: Future[Catalogue] | None = None
        self._pruning: Future[object] | None = None
        self._backup_due_s = 0.0
        self._cluster_id = ""
        """Empty: the store is not read; no backup begins or goes on."""
        self._directory_id = 0, 0
        """Of the store that was read."""
        self._nodes: list[pb.NodeStatus] = []
        """The nodes that answered last."""
        self._node = ""
        """The node that sends the log; empty: to be chosen."""
        self._failed = ""
        """The node that did not answer last."""
        self._end: LogEnd | None = None
        """The last entry in the store. None: the log begins at the end of the node's."""
        self._begin = LogIndex(0)
        """The log in the store has all entries after this one, up to `_end`."""
        self._follows_backup = False
        """Whether that log continues a complete backup."""
        self._is_matched = False
        """Whether the node that was asked last has applied the entry after which it was asked."""
        self._is_last = False
        """Whether the last entries are shipped, after `stop`."""
        self._written_s = self._moved_s = mono_s()
        """When a part was written last, and when a node returned an entry last."""
        self._dropped_since_s: float | None = None
        """When the next entry was first missing on the nodes that answer."""
        self._compare_s = 0.0
        """When to compare the store with the leader's log next, if a node has less."""
        self._troubles: dict[str, set[str]] = {}
        """Kind of work -> the causes of trouble that were told since it succeeded last."""

    def stop(self) -> None:
        """End `run`, after the last entries. Safe in a signal handler."""
        self._is_stopped = True
        self._wake.put(None)

    def run(self) -> None:
        """Take the backup until `stop`. On return the store has all entries committed by then.

        Raises:
            WrongStore: the store has backups of another cluster.
            BackupError, Unavailable, Overloaded: after `stop`, the store lacks entries.
            TimerError: the cluster rejects a call.
        """
        with keeping_pin(self.keep_log):
            try:
                while not self._is_stopped:
                    if not self.step():
                        with suppress(Empty):
                            self._wake.get(timeout=self._plan.log_every_s)
            finally:
                self._is_stopped = True
                self._thread.shutdown(wait=True, cancel_futures=True)
            self._finish()

    def keep_log(self) -> None:
        """Let all nodes keep the log that the store lacks. Safe on any thread.

        Raises:
            TimerError: no node answers with a status.
        """
        end = self._end
        if end is None:
            return
        names = [node.name for node in self._client.status().nodes if node.reachable]
        for name in names:  # a silent one would delay the others
            with suppress(TimerError):
                self._client.fetch_log(
                    name, _BEHIND_ALL.index, stored=end.index, shipper_id=self._id
                )

    def _finish(self) -> None:
        """Ship the entries that are committed by now.

        Raises:
            BackupError: there is a gap, or no complete backup before the log.
            Unavailable, Overloaded: the node or the store does not answer, or lags.
        """
        self._is_last = True
        last = self._running
        if last is not None and not last.cancelled() and last.exception() is None:
            self._complete(last.result())
        self._start()
        self._choose(furthest=True)
        committed = self._commit_index()
        until_s = self._mono_s() + self._plan.patience_s
        try:
            while True:
                before, more = self._end, self._ship()
                if self._is_matched and self._end is not None and self._end.index >= committed:
                    break
                if self._end != before:
                    until_s = self._mono_s() + self._plan.patience_s
                elif self._mono_s() >= until_s:
                    wanted = max(committed, self._end.index if self._end is not None else 0)
                    raise Unavailable(f"node {self._node} lacks entries up to {wanted}")
                time.sleep(0 if more else PAUSE_S)
        except MissingEntries as gap:
            raise BackupError(f"gap in the log: {gap}") from None
        if not self._follows_backup:
            raise BackupError("the log in the store follows no complete backup")

    def _commit_index(self) -> int:
        """Return the last entry that the store needs; wait for a leader that serves.

        Raises:
            Unavailable: none did in time, or no node answers.
        """
        until_s = self._mono_s() + self._plan.patience_s
        while True:
            self._read_status()
            try:
                return committed_index(self._nodes)
            except Unavailable:
                if self._mono_s() >= until_s:
                    raise
                time.sleep(PAUSE_S)

    def step(self) -> bool:
        """Ship entries; begin and end backups. Return whether there are more entries."""
        more = self._attempt("log", self._ship)
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            self._attempt("backup", lambda: self._end_backup(running))
        if self._pruning is not None and self._pruning.done():
            pruning, self._pruning = self._pruning, None
            self._attempt("prune", lambda: pruning.result() is None)
        next_s = self._wall_s() + self._plan.backup_every_s
        self._backup_due_s = min(self._backup_due_s, next_s)  # a clock may have been ahead
        due = self._cluster_id and self._wall_s() >= self._backup_due_s
        if due and self._running is None and self._end is not None:  # the log begins before it
            self._backup_due_s = next_s
            run = BackupRun(
                self._client,
                self._store,
                node=self._plan.node,
                patience_s=self._plan.patience_s,
                stopped=lambda: self._is_stopped or not self._cluster_id,
            )
            self._running = self._thread.submit(run.take)
        return more

    def _attempt(self, kind: str, work: Callable[[], bool]) -> bool:
        """Return the result of some work; False after trouble.

        Each cause of trouble is told once until the work succeeds again, and CAUSES_MAX at most.

        Raises:
            WrongStore: see `run`.
            TimerError: see `run`.
        """
        try:
            found = work()
        except MissingEntries as gap:
            self._on_progress(f"gap in the log: {gap}; the next backup begins at once")
            self._end, self._backup_due_s, self._follows_backup = None, 0.0, False
        except WrongStore:
            raise
        except (Unavailable, Overloaded, BackupError) as error:
            self._node = "" if kind == "log" else self._node
            cause = error.cause if isinstance(error, StoreUnavailable) else str(error)
            causes = self._troubles.setdefault(kind, set())
            if cause not in causes and len(causes) < CAUSES_MAX:
                self._on_progress(f"{error}; trying again")
                causes.add(cause)
        else:
            if self._troubles.pop(kind, None):
                self._on_progress(f"the {kind} goes on")
            return found
        return False

    # ---- backups

    def _end_backup(self, running: "Future[Catalogue]") -> bool:
        try:
            found = running.result()
        except TimerError as error:  # such as a node that restarted meanwhile
            self._backup_due_s = self._wall_s() + RETRY_S
            if isinstance(error, NotFound) and not self._plan.node:
                raise Unavailable(str(error)) from None  # the chosen node left the cluster
            raise
        self._complete(found)
        if self._plan.keep is not None:
            store = self._store.interruptible_by(lambda: self._is_stopped)
            self._pruning = self._thread.submit(prune, store, self._plan.keep)
        return False

    def _complete(self, found: Catalogue) -> None:
        self._follows_backup |= self._end is not None and found.index >= self._begin
        self._on_backup(found)

    # ---- the log

    def _ship(self) -> bool:
        """Write entries that the node has applied. Return whether there are more.

        Raises:
            MissingEntries: the next entry is gone from all nodes, or is another one.
            Unavailable, Overloaded: the node or the store does not answer.
            WrongStore: see `run`.
        """
        self._start()
        if not self._node or self._mono_s() - self._moved_s >= QUIET_S:
            self._choose(furthest=self._node != "")
        if self._end is None:
            answer = self._fetch(self._node, _BEHIND_ALL)
            self._end = LogEnd(LogIndex(answer.applied_index), Epoch(answer.applied_epoch))
            self._begin = self._end.index
        more = True
        for _ in range(PARTS_AT_ONCE):
            more = more and self._goes_on() and self._ship_part(self._end)
        return more

    def _goes_on(self) -> bool:
        return self._is_last or not self._is_stopped

    def _start(self) -> None:
        """Continue the log of an earlier run, once, and if another directory has the store's name.

        A disk that is not mounted at the moment leaves an empty directory, where parts of the log
        would be lost.
        """
        before, self._directory_id = self._directory_id, self._store.directory_id()
        if self._cluster_id and before in ((0, 0), self._directory_id):
            return
        self._cluster_id = ""  # until the store is read
        status = self._client.status()
        found, _ = readable_catalogues(self._store)
        check_cluster(self._store, found, status.cluster_id)
        if found:
            log = StoredLog(self._store, status.cluster_id)
            reach = log.reach(found[-1].end)
            if reach is None and found[1:]:  # killed after that backup: the log ends before it
                reach = log.reach(found[-2].end)
            self._end = reach.end if reach is not None else found[-1].end
            self._follows_backup = True
            self._backup_due_s = found[-1].begun_ms / 1000 + self._plan.backup_every_s
        elif self._follows_backup:
            raise StoreUnavailable(
                f"{self._store.root}: it has no backup now: is its disk mounted?"
            )
        self._cluster_id = status.cluster_id
        with suppress(TimerError):  # at once: the last request may be almost a minute ago
            self.keep_log()

    def _choose(self, *, furthest: bool) -> None:
        """Choose the node that sends the log: a follower, or the one that has applied the most."""
        self._read_status()
        if not self._nodes:
            raise Unavailable("no node answers with a status")
        if furthest and not self._plan.node:
            self._node = max(self._nodes, key=lambda node: node.applied_index).name
        else:
            wanted = [node for node in self._nodes if node.name != self._failed] or self._nodes
            first = chosen_node(pb.GetStatusResponse(nodes=wanted), [])
            self._node = self._plan.node or first
        self._moved_s = self._mono_s()

    def _read_status(self) -> list[str]:
        """Find the nodes that answer; return the names of the others."""
        every = self._client.status().nodes
        self._nodes = [node for node in every if node.reachable]
        return [node.name for node in every if not node.reachable]

    def _ship_part(self, end: LogEnd) -> bool:
        """Write the next entries as one part. Return whether there may be more."""
        pieces: list[bytes] = []
        last: Entry | None = None
        at, size, idle = end, 0, True
        while size < PART_BYTES and self._goes_on():
            frames = self._next(at, stored=end.index)
            if not frames:
                break
            entries = entries_after(at, frames, f"the log of node {self._node}")
            last = entries[-1]
            at = LogEnd(last.index, last.epoch)
            idle = idle and all(entry.kind is EntryKind.CHECKPOINT for entry in entries)
            pieces.append(frames)
            size += len(frames)
        if last is None:
            return False
        now_s = self._moved_s = self._mono_s()
        if idle and not self._is_last and now_s - self._written_s < IDLE_PART_S:
            return False
        folder = folder_of(self._cluster_id)
        self._end = write_part(self._store, folder, end, last, b"".join(pieces)).end
        self._written_s = now_s
        return size >= PART_BYTES

    def _next(self, after: LogEnd, *, stored: LogIndex) -> bytes:
        """Return the next entries after one; empty: there are none yet.

        Raises:
            MissingEntries: no node has the next entry, or the log is another one.
        """
        answer = self._fetch(self._node, after, stored=stored)
        if answer.is_gone:
            answer = self._from_any(after, stored=stored)
        self._dropped_since_s = None
        self._is_matched = answer.applied_index >= after.index
        if self._is_matched:
            is_other = answer.epoch != after.epoch
        else:  # only a node of another log has a later epoch
            is_other = answer.applied_epoch > after.epoch or self._ends_before(after.index)
        if is_other:
            raise MissingEntries(
                f"entry {after.index} of epoch {after.epoch} is not in the cluster's log"
            )
        return answer.frames

    def _ends_before(self, index: LogIndex) -> bool:
        """Return whether the cluster's log certainly has no entry `index` yet.

        A leader that serves has committed all that was ever committed, such as the stored entries.
        """
        now_s = self._mono_s()
        if now_s < self._compare_s and not self._is_last:
            return False
        self._compare_s = now_s + COMPARE_S
        try:
            self._read_status()
        except (Unavailable, Overloaded):
            return False  # the last status may be older than the stored entries
        return any(node.serving and node.commit_index < index for node in self._nodes)

    def _from_any(self, after: LogEnd, *, stored: LogIndex) -> pb.FetchLogResponse:
        """Return the answer of a node that has the next entry.

        Raises:
            MissingEntries: no node has it.
            Unavailable: no node that answers has it. After a minute that is a gap, too.
        """
        silent = self._read_status()
        for node in () if self._plan.node else self._nodes:
            try:
                answer = self._fetch(node.name, after, stored=stored)
            except (Unavailable, Overloaded):
                silent.append(node.name)
                continue
            if not answer.is_gone:
                self._node = node.name
                return answer
        now_s = self._mono_s()
        self._dropped_since_s = now_s if self._dropped_since_s is None else self._dropped_since_s
        reason = f"no node that answers has entry {after.index + 1}"
        if silent and not self._plan.node and now_s - self._dropped_since_s < GAP_S:
            raise Unavailable(f"{reason}; {', '.join(sorted({*silent}))} may have it")
        self._node, self._dropped_since_s = "", None
        raise MissingEntries(reason)

    def _fetch(self, node: str, after: LogEnd, *, stored: int = 0) -> pb.FetchLogResponse:
        """Return a node's next entries after one.

        Raises:
            WrongStore: another cluster answers.
        """
        try:
            answer = self._client.fetch_log(node, after.index, stored=stored, shipper_id=self._id)
        except NotFound as error:
            if self._plan.node:
                raise
            raise Unavailable(str(error)) from None  # it left the cluster
        except (Unavailable, Overloaded):
            self._failed = node
            raise
        if answer.cluster_id != self._cluster_id:
            mismatch = f"cluster {answer.cluster_id!r} answers, not {self._cluster_id!r}"
            raise WrongStore(f"{mismatch}: use a store for each cluster")
        return answer
