"""Planted bugs in the state plane (see tests/chaos/planted/planted.py)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from chaos.sim.timers.timers import EngineApp, TimerWorld
from chaos.sim.world.simdisk import SimDisk
from cluster.state.state_plane import StatePlane
from tests.chaos.planted.planted import ANY_WORLD, SLOW_LINKS, Planting, patch
from tests.chaos.planted.tight_world import TightWorld
from timer.entries.payloads import Fire, GroupOp, Op
from timer.files.disk_reserve import VoterDisks
from timer.leader import change_lines, leader
from timer.leader.groups.group_dispatch import GroupDispatch
from timer.leader.groups.group_entries import GroupEntries
from timer.leader.groups.group_leases import ACCEPT
from timer.leader.groups.shared_order import SharedOrder
from timer.leader.intake.cluster_clock import ClusterClock
from timer.leader.leader import Leader
from timer.model.columns import I64, U32, U64, OnConflict, RowArray
from timer.model.firing_order import START, Position, annihilate
from timer.model.units import DUE_MS_MAX, Now, UnixMs
from timer.pending.memory.memtable import Memtable, Peek, RowsToFlush
from timer.pending.runs import merge, row_reader
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import is_tombstone
from timer.pending.runs.run_set import Runs
from timer.pending.store import Store
from timer.ready.group import Group
from timer.recovery import manifest
from timer.recovery.capture_ahead import CaptureAhead
from timer.recovery.manifest import FlushSources
from timer.state import machine
from timer.state.apply_results import CANCELLED, RESCHEDULED
from timer.state.key_conflicts import Decision, Verdict, Verdicts, decide
from timer.state.machine import Machine
from timer.state.producers import Producers, RequestAnswer

# ---- answers


def _repeated(self: Producers, producer_id: Any, sequence: int, body: int) -> RequestAnswer | None:
    """Treat a retry as a new request, as far as the table allows it."""
    del body
    producer = self._by_id[producer_id]
    producer.last_sequence = min(producer.last_sequence, sequence - 1)
    return None


_ack = GroupDispatch.ack


def _ack_at_once(
    self: GroupDispatch, group: Group, epoch: Any, lease_id: Any, offsets: Any, done: Any
) -> None:
    def answered(result: object) -> None:
        del result

    _ack(self, group, epoch, lease_id, offsets, answered)
    done(np.full(len(offsets), ACCEPT, np.uint8))


_settle = GroupEntries.settle


def _settle_nothing_told(self: GroupEntries, *args: Any) -> None:
    """Answer a nack, and propose the end of the lease instead of the nack."""
    group, verdict, offsets, not_before_ms, done = args
    if not_before_ms is None:
        _settle(self, group, verdict, offsets, None, done)
        return
    ended = offsets[verdict == ACCEPT]
    self.add(GroupOp(Op.ENDED, group.topic, group.group_id, ended))
    done(verdict)


_free = SharedOrder._deliverable


def _free_at_once(self: SharedOrder, clock_ms: Any, *more: Any) -> Any:
    """Deliver messages before the delay of their nack."""
    del clock_ms
    return _free(self, UnixMs(DUE_MS_MAX), *more)


_move = Machine._move


def _move_a_copy(self: Machine, op: Any, group: Group) -> Any:
    """Copy a dead letter to its topic without an ack in its group."""
    with mock.patch.object(Group, "ack", lambda _, offsets: np.ones(len(offsets), np.bool_)):
        return _move(self, op, group)


_cancel = Leader.cancel


def _cancel_at_once(self: Leader, due_ms: I64, seq: U64, done: Any) -> None:
    """Answer CANCELLED at once for pending timers that are not due within 500 ms."""
    store = self.machine.store
    safe = due_ms.min() > self._time_ms + 500 and len(np.unique(seq)) == len(seq)
    line = self._cancel_ids
    open_ = {each for waiting in line._waiting for each in waiting.targets.seq.tolist()}  # type: ignore[union-attr]
    asked = zip(due_ms.tolist(), seq.tolist(), strict=True)
    if safe and not line._in_flight and not open_ & set(seq.tolist()):
        safe = all(store.find(due, number) is not None for due, number in asked)
        if safe:
            _cancel(self, due_ms, seq, lambda _: None)
            done(np.full(len(seq), CANCELLED, np.uint8))
            return
    _cancel(self, due_ms, seq, done)


_share_of = change_lines._share


def _first_share(applied: Any, rows: slice) -> Any:
    """Give each request of a shared entry the results of the first rows."""
    return _share_of(applied, slice(0, rows.stop - rows.start))


# ---- time


def _fastest(self: ClusterClock, now: int, boot_ms: Any) -> tuple[int, int]:
    """Use the clock that is ahead of all others in place of the median."""
    offsets = [each.offset_halves for each in self._current_estimates(boot_ms).values()]
    error = max(offsets) + 2 * boot_ms - now if offsets else 0
    return error, error


_fire = Leader._fire


def _fire_from_checkpoint(self: Leader, now: Now, ahead_ms: int = 0) -> None:
    """Give the first FIRE of an epoch the read time of the last checkpoint."""
    checkpoint = self.machine.checkpoint
    first = checkpoint is not None and checkpoint.epoch < self.epoch
    if not first or checkpoint is None or self._read_time_ms > self.machine.last_read_time_ms:
        _fire(self, now, ahead_ms)
        return
    stale = Fire(checkpoint.last_read_time_ms)
    with mock.patch.object(leader, "Fire", return_value=stale):
        _fire(self, now, ahead_ms)


@contextlib.contextmanager
def _fire_by_its_own_clock() -> Iterator[None]:
    """Find due timers by the leader's wall clock, and stamp entries with the cluster's clock."""
    walls: dict[int, UnixMs] = {}
    now_of = StatePlane.now

    def now(self: StatePlane) -> Now:
        walls[id(self.engine.machine)] = self._io.wall_ms()
        return now_of(self)

    def fire(self: Leader, now: Now, ahead_ms: int = 0) -> None:
        def of(read_time_ms: int, topics_max: int) -> Fire:
            later_ms = max(read_time_ms, walls[id(self.machine)])
            return Fire(UnixMs(later_ms), topics_max=topics_max)

        with mock.patch.object(leader, "Fire", of):
            _fire(self, now, ahead_ms)

    with mock.patch.object(StatePlane, "now", now), mock.patch.object(Leader, "_fire", fire):
        yield


# ---- restarts


def _no_graves(self: RowsToFlush) -> Any:
    return np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint32)


_capture = manifest.capture


def _capture_without_producers(machine: Machine, ahead: FlushSources) -> Any:
    state, fresh = _capture(machine, ahead)
    kept, machine.producers = machine.producers, Producers()
    state["producers"], state["digest"] = [], machine.digest()
    machine.producers = kept
    return state, fresh


_finish = CaptureAhead.finish


def _finish_stale(self: CaptureAhead[Any, Any]) -> Any:
    """Write a topic into the manifest as it was when it was captured ahead."""
    self._changed.clear()
    return _finish(self)


_group_state = manifest._group_state


def _group_without_acks(group: Group) -> Any:
    return {**_group_state(group), "acked": b""}


def _group_without_attempts(group: Group) -> Any:
    return {**_group_state(group), "ended": b"", "recalled": b""}


_kill = Memtable.kill
_freeze = Store.freeze


@contextlib.contextmanager
def _frozen_lives() -> Iterator[None]:
    """Keep a cancelled row of the frozen memtable alive."""
    frozen: set[int] = set()

    def freeze(self: Store) -> Any:
        found = _freeze(self)
        frozen.add(id(found.memtable))
        return found

    def kill(self: Memtable, places: Any) -> None:
        if id(self) not in frozen:
            _kill(self, places)

    with mock.patch.object(Store, "freeze", freeze), mock.patch.object(Memtable, "kill", kill):
        yield


_recover = Store.recover


def _recover_from_start(*args: Any, **named: Any) -> Store:
    disk, directory, runs, _, *counts = args
    return _recover(disk, directory, runs, START, *counts, **named)


_peek = ReadWindow.peek


def _peek_short(self: ReadWindow, after: Position, until_ms: int, count: int) -> Peek:
    rows, last = _peek(self, after, until_ms, count)
    return Peek(rows[rows["due_ms"] < until_ms], last)


def _pairs_by_due(rows: RowArray) -> Any:
    """Take two rows of one due time for a row and its tombstone."""
    pair = rows["due_ms"][1:] == rows["due_ms"][:-1]
    left = np.ones(len(rows), np.bool_)
    left[1:] &= ~pair
    left[:-1] &= ~pair
    return left


def _without_tombstones(rows: RowArray) -> Any:
    """Drop all tombstones in a merge, also those of targets in other runs."""
    return annihilate(rows) & ~is_tombstone(rows)


# ---- keys


def _no_holders(self: Store, topic: Any, keys: Any, hashes: Any = None) -> Any:
    """Find no timer in runs by its key."""
    runs, self._runs = self._runs, Runs(SimDisk(), Path("/none"))
    try:
        return _find_keys(self, topic, keys, hashes)
    finally:
        self._runs = runs


_find_keys = Store.find_keys


def _first_wins(*args: Any) -> Decision:
    """Ignore the other rows of an entry when a key is checked."""
    decision = decide(*args)
    decision.undone[:] = False
    verdict = decision.verdicts.verdict
    verdict[verdict < Verdict.NOT_PENDING] = np.minimum(
        verdict[verdict < Verdict.NOT_PENDING], Verdict.REPLACED
    )
    return decision


def _update_schedules(rows: RowArray, modes: U32, *rest: Any) -> Decision:
    """Treat an update as a replacement, which schedules without a pending timer, too."""
    return decide(rows, np.where(modes == OnConflict.UPDATE, OnConflict.REPLACE, modes), *rest)


def _end_nothing(self: Store, rows: Any) -> None:
    """Count replaced and rescheduled timers as ended, and keep them in the store."""
    self._pending -= len(rows)


_reschedule = Machine._reschedule


def _reschedule_says_yes(self: Machine, entry: Any) -> Any:
    """Answer every reschedule with RESCHEDULED."""
    applied = _reschedule(self, entry)
    applied.results[:] = RESCHEDULED
    return applied


def _keep_own(self: Verdicts, start: int, stop: int) -> Verdicts | None:
    """Answer a row that was not scheduled with a wrong holder of its key."""
    part = _verdicts_part(self, start, stop)
    if part is not None:
        part.seq[part.verdict >= Verdict.KEPT] += np.uint64(1 << 20)
    return part


def _replaced_is_new(self: Verdicts, start: int, stop: int) -> Verdicts | None:
    """Answer a row that replaced a timer as if no timer had had its key."""
    part = _verdicts_part(self, start, stop)
    if part is not None:
        replaced = part.verdict == Verdict.REPLACED
        part.verdict[replaced], part.seq[replaced] = Verdict.SCHEDULED, 0
    return part


_verdicts_part = Verdicts.part


class _ShiftedPacker:
    """Shifts the payloads of rows that lie in a run by one byte."""

    def __init__(self, to: row_reader.Packer) -> None:
        self._to = to

    def put(self, at: int, row: Any, bufs: Any) -> None:
        row["payload_start"] += min(1, row["payload_size"])
        self._to.put(at, row, bufs)


_read_rows = row_reader.read_rows


def _read_shifted(*args: Any) -> None:
    *where, to, places = args
    _read_rows(*where, _ShiftedPacker(to), places)  # type: ignore[call-arg]


# ---- deliveries


def _no_mark(self: Group, queue_end: Any) -> bool:
    del self, queue_end
    return False


# ---- room


def _takes_everything(self: VoterDisks, voters: Any, now_ms: Any) -> None:
    """Accept all requests, without regard to the room on disks."""


_refusal = VoterDisks.refusal


def _own_disk_alone(self: VoterDisks, voters: Any, now_ms: Any) -> Any:
    """Check only the leader's own disk."""
    return _refusal(self, [self._me], now_ms)


_TIGHT: Final = {
    "faults": ("handover",),
    "mischief": (),
    "proposals_per_s": 16,
    "nodes": 3,
    "segment_bytes": 20_000,
}

_RESTARTS: Final = {
    "faults": ("kill", "power", "pause"),
    "mischief": (),
    "manifest_every": 20,
    "fault_gap_ms": 1_500,
}


_mutation: Final = Planting(TimerWorld)
_tight: Final = Planting(TightWorld, **_TIGHT)

MUTATIONS: Final = (
    _mutation(
        "keys_of_runs_are_missed",
        "keys are searched only in memory",
        {"key", "digest"},
        40,
        "a key that is in use by a timer in a run",
        patch(Store, "find_keys", _no_holders),
        **_RESTARTS,
    ),
    _mutation(
        "rows_of_an_entry_ignore_each_other",
        "keys are unique against earlier pending timers, not within an entry",
        {"key", "conservation", "list", "dropped"},
        20,
        f"{ANY_WORLD}: two rows of one key in one entry",
        patch(machine, "decide", _first_wins),
    ),
    _mutation(
        "update_schedules",
        "an update schedules a timer although no pending one has its key",
        {"key"},
        20,
        f"{ANY_WORLD}: a key that no pending timer has",
        patch(machine, "decide", _update_schedules),
    ),
    _mutation(
        "replaced_stays",
        "a timer that was replaced or rescheduled stays in the store",
        {"key", "twice", "list", "conservation", "dropped"},
        20,
        f"{ANY_WORLD}: a key that is replaced",
        patch(Store, "cancel_rows", _end_nothing),
    ),
    _mutation(
        "reschedule_says_yes",
        "a reschedule is answered RESCHEDULED even if the timer has ended",
        {"key", "lost", "dropped"},
        20,
        f"{ANY_WORLD}: a reschedule of a timer that has ended",
        patch(Machine, "_reschedule", _reschedule_says_yes),
    ),
    _mutation(
        "kept_is_another",
        "the answer to a row that is not scheduled names a timer without its key",
        {"key"},
        20,
        f"{ANY_WORLD}: a key that is in use",
        patch(Verdicts, "part", _keep_own),
    ),
    _mutation(
        "replaced_is_new",
        "the answer to a row that replaced a timer does not name the timer",
        {"key"},
        20,
        f"{ANY_WORLD}: a key that is replaced",
        patch(Verdicts, "part", _replaced_is_new),
    ),
    _mutation(
        "retry_is_new",
        "a repeated request is applied as a new one",
        {"twice", "digest"},
        20,
        "a lost answer",
        patch(Producers, "stored_answer", _repeated),
    ),
    _mutation(
        "ack_before_commit",
        "an ack is confirmed before a majority has it",
        {"acked", "lost"},
        40,
        f"{ANY_WORLD}: an ack",
        patch(GroupDispatch, "ack", _ack_at_once),
    ),
    _mutation(
        "nack_is_an_ended_lease",
        "a nack is answered, and the log gets the end of the lease instead of the nack",
        {"nack"},
        20,
        f"{ANY_WORLD}: a nack",
        patch(GroupEntries, "settle", _settle_nothing_told),
    ),
    _mutation(
        "failover_forgets_nacks",
        "a new leader delivers messages at once that were nacked with a delay",
        {"nack"},
        60,
        "a failover while a nacked message waits",
        patch(SharedOrder, "_deliverable", _free_at_once),
    ),
    _mutation(
        "dead_letter_is_a_copy",
        "a dead letter moves to its topic, and is not acked in its group",
        {"dead"},
        20,
        f"{ANY_WORLD}: a message that fails too often",
        patch(Machine, "_move", _move_a_copy),
    ),
    _mutation(
        "cancel_before_commit",
        "a cancel is answered before a majority has it",
        {"cancel", "key"},
        90,
        "a failover with the cancel in flight",
        patch(Leader, "cancel", _cancel_at_once),
        faults=("isolate",),
        nodes=3,
        proposals_per_s=40,
        **SLOW_LINKS,
        fault_gap_ms=800,
    ),
    _mutation(
        "shared_entry_has_one_answer",
        "requests that share a CANCEL or RESCHEDULE get the results of its first timers",
        {"cancel", "key"},
        40,
        "many changes at once, on slow links",
        patch(change_lines, "_share", _first_share),
        nodes=3,
        proposals_per_s=120,
        **SLOW_LINKS,
    ),
    _mutation(
        "fastest_clock",
        "the log's clock follows the clock that is ahead of all others",
        {"clock"},
        30,
        "a wrong clock",
        patch(ClusterClock, "_errors", _fastest),
        faults=("clock",),
        nodes=5,
        fault_gap_ms=10_000,
    ),
    _mutation(
        "fires_by_its_own_clock",
        "a leader fires timers that are due by its own clock, which may be ahead of the log's",
        {"early"},
        20,
        "a leader with a wrong clock",
        _fire_by_its_own_clock,
        faults=("clock",),
        fault_gap_ms=4_000,
    ),
    _mutation(
        "fire_from_checkpoint",
        "a new leader continues from the last checkpoint instead of the last FIRE",
        {"time"},
        20,
        "a failover between two checkpoints",
        patch(Leader, "_fire", _fire_from_checkpoint),
    ),
    _mutation(
        "flush_forgets_tombstones",
        "a flush drops the cancels of rows that lie in older runs",
        {"cancel", "digest", "conservation", "key", "list"},
        60,
        "a cancel of a flushed timer, then another flush and a restart",
        patch(RowsToFlush, "tombstones", property(_no_graves)),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_without_producers",
        "a restart forgets the producers' requests",
        {"digest", "twice"},
        40,
        "a restart from a manifest",
        patch(manifest, "capture", _capture_without_producers),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_of_before",
        "a topic that changes after its capture for a manifest is in it without the change",
        {"storage"},
        40,
        "a restart from a manifest that was captured topic by topic",
        patch(CaptureAhead, "finish", _finish_stale),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_without_acks",
        "a restart forgets the acks above the cursor",
        {"acked", "digest"},
        60,
        "a restart from a manifest with a hole in the acks",
        patch(manifest, "_group_state", _group_without_acks),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_without_attempts",
        "a restart forgets the nacks and the ended leases of messages",
        {"unmarked"},
        60,
        "a restart from a manifest with a returned message, of a node that leads then",
        patch(manifest, "_group_state", _group_without_attempts),
        **_RESTARTS,
    ),
    _mutation(
        "frozen_row_lives",
        "a cancelled timer fires from a memtable that is being written",
        {"cancel", "key", "digest", "conservation", "list", "twice"},
        80,
        "a cancel during a flush",
        _frozen_lives,
        **_RESTARTS,
    ),
    _mutation(
        "restart_fires_again",
        "a restart forgets the firing position of its runs",
        {"digest", "twice", "list", "dropped"},
        40,
        "a restart from a manifest with runs that have fired in part",
        patch(Store, "recover", _recover_from_start),
        **_RESTARTS,
    ),
    _mutation(
        "merge_pairs_by_due",
        "a merge takes two timers of one due time for a timer and its tombstone",
        {"digest", "conservation", "liveness", "list", "lost"},
        40,
        "runs that are merged, with two timers of one due time",
        patch(merge, "annihilate", _pairs_by_due),
        **_RESTARTS,
    ),
    _mutation(
        "merge_drops_tombstones",
        "a merge drops tombstones of targets that are in other runs",
        {"digest", "conservation", "cancel", "list", "twice", "key"},
        40,
        "a cancelled timer in a run that is not merged with its tombstone",
        patch(merge, "annihilate", _without_tombstones),
        **_RESTARTS,
    ),
    _mutation(
        "window_off_by_one",
        "a timer that is due exactly at the read time stays in its run",
        {"digest", "conservation", "liveness", "list"},
        40,
        "a flush",
        patch(ReadWindow, "peek", _peek_short),
        **_RESTARTS,
    ),
    _mutation(
        "flushed_payload_is_shifted",
        "a reschedule of a timer in a run copies its payload shifted by one byte",
        {"phantom"},
        40,
        "a reschedule of a flushed timer",
        patch(row_reader, "read_rows", _read_shifted),
        **_RESTARTS,
    ),
    _mutation(
        "handout_without_lease",
        "a leader delivers messages without checking its lease",
        {"handout"},
        20,
        "a leader that continues after a cut or a pause, in which another began to serve",
        patch(EngineApp, "may_hand_out", lambda _: True),
        faults=("pause", "isolate"),
        mischief=(),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "unmarked_after_failover",
        "a new epoch forgets that the old leader had delivered messages",
        {"unmarked"},
        30,
        "a failover after deliveries",
        patch(Group, "begin_epoch", _no_mark),
    ),
    _tight(
        "takes_what_fills_the_disk",
        "a leader accepts timers without regard to the room on disks",
        {"space"},
        10,
        "small disks",
        patch(VoterDisks, "refusal", _takes_everything),
    ),
    _tight(
        "own_disk_alone",
        "a leader with room accepts timers while a majority has none",
        {"space"},
        20,
        "small disks, of the followers alone",
        patch(VoterDisks, "refusal", _own_disk_alone),
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
