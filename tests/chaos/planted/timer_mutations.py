"""Planted bugs in the state plane (tests/chaos/planted/planted.py says what they are for)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from chaos.sim.timers.timers import TimerApp, TimerWorld
from chaos.sim.world.simdisk import SimDisk
from cluster.state.state_plane import StatePlane
from tests.chaos.planted.planted import ANY_WORLD, SLOW_LINKS, Planting, patch
from timer.entries.payloads import Fire, GroupOp, Op
from timer.leader import leader
from timer.leader.groups.group_dispatch import Serving
from timer.leader.groups.shared_leases import ACCEPT, Leases
from timer.leader.intake.cluster_clock import ClusterClock
from timer.leader.intake.disk_reserve import Rooms
from timer.leader.leader import Leader, Now
from timer.model.columns import I64, U32, U64, OnConflict, RowArray
from timer.model.firing_order import START, Position, annihilate
from timer.model.units import DUE_MS_MAX, UnixMs
from timer.pending.memory.memtable import Left, Memtable, Peek
from timer.pending.runs import merge, row_reader
from timer.pending.runs.read_window import ReadWindow
from timer.pending.runs.run import is_tombstone
from timer.pending.runs.run_set import Runs
from timer.pending.store import Store
from timer.ready.group import Group
from timer.recovery import manifest
from timer.recovery.manifest import FlushSources, TopicsAhead
from timer.state import machine
from timer.state.apply_results import CANCELLED, RESCHEDULED
from timer.state.key_conflicts import Decision, Verdict, Verdicts, decide
from timer.state.machine import Machine
from timer.state.producers import Producers, RequestAnswer

# ---- what is answered


def _repeated(self: Producers, producer_id: Any, sequence: int, body: int) -> RequestAnswer | None:
    """A retry is taken for a new request, as far as the table allows it."""
    del body
    producer = self._by_id[producer_id]
    producer.last_sequence = min(producer.last_sequence, sequence - 1)
    return None


_ack = Serving.ack


def _ack_at_once(
    self: Serving, group: Group, epoch: Any, lease_id: Any, offsets: Any, done: Any
) -> None:
    def answered(result: object) -> None:
        del result

    _ack(self, group, epoch, lease_id, offsets, answered)
    done(np.full(len(offsets), ACCEPT, np.uint8))


_gather = Serving._gather


def _gather_nothing_told(self: Serving, *args: Any) -> None:
    """A nack is told, and nobody proposes it."""
    group, verdict, offsets, not_before_ms, done = args
    if not_before_ms is None:
        _gather(self, group, verdict, offsets, None, done)
        return
    leases = self._leases[group.group_id]
    ended = offsets[verdict == ACCEPT]
    op = GroupOp(Op.ENDED, group.topic, group.group_id, ended)
    self._batch.add(op if len(ended) else None)
    assert leases.epoch == self.epoch
    done(verdict)


_free = Leases._free


def _free_at_once(self: Leases, clock_ms: Any, offsets: Any) -> Any:
    """What a new leader finds put off is handed out at once."""
    del clock_ms
    return _free(self, UnixMs(DUE_MS_MAX), offsets)


_move = Machine._move


def _move_a_copy(self: Machine, op: Any, group: Group) -> Any:
    """A dead letter is where it goes, and where it was."""
    with mock.patch.object(Group, "ack", lambda _, offsets: np.ones(len(offsets), np.bool_)):
        return _move(self, op, group)


_cancel = Leader.cancel


def _cancel_at_once(self: Leader, due_ms: I64, seq: U64, done: Any) -> None:
    """What is pending, and not about to fire, is told CANCELLED at once."""
    store = self.machine.store
    safe = due_ms.min() > self._time_ms + 500 and len(np.unique(seq)) == len(seq)
    open_ = {int(each) for _, waiting, _ in self._cancels for each in waiting}
    asked = zip(due_ms.tolist(), seq.tolist(), strict=True)
    if safe and not self._cancels_in_flight and not open_ & set(seq.tolist()):
        safe = all(store.find(due, number) is not None for due, number in asked)
        if safe:
            _cancel(self, due_ms, seq, lambda _: None)
            done(np.full(len(seq), CANCELLED, np.uint8))
            return
    _cancel(self, due_ms, seq, done)


# ---- time


def _fastest(self: ClusterClock, now: int, boot_ms: Any) -> int:
    """The clock that is ahead of all others is taken for the median."""
    offsets = self._offsets(boot_ms)
    return offsets[-1] + 2 * boot_ms - now if offsets else 0


_fire = Leader._fire


def _fire_from_checkpoint(self: Leader, now: Now) -> None:
    """The first FIRE of an epoch reads on from where the last checkpoint was."""
    checkpoint = self.machine.checkpoint
    first = checkpoint is not None and checkpoint.epoch < self.epoch
    if not first or checkpoint is None or self._read_time_ms > self.machine.last_read_time_ms:
        _fire(self, now)
        return
    stale = Fire(checkpoint.last_read_time_ms)
    with mock.patch.object(leader, "Fire", return_value=stale):
        _fire(self, now)


@contextlib.contextmanager
def _fire_by_its_own_clock() -> Iterator[None]:
    """What is due is told by the leader's clock, and stamped with the cluster's."""
    walls: dict[int, UnixMs] = {}
    now_of = StatePlane.now

    def now(self: StatePlane) -> Now:
        walls[id(self.engine.machine)] = self._io.wall_ms()
        return now_of(self)

    def fire(self: Leader, now: Now) -> None:
        self._read_time_ms = max(self._read_time_ms, walls[id(self.machine)])
        _fire(self, now)

    with mock.patch.object(StatePlane, "now", now), mock.patch.object(Leader, "_fire", fire):
        yield


# ---- what outlives a restart


def _no_graves(self: Left) -> Any:
    return np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint32)


_capture = manifest.capture


def _capture_without_producers(machine: Machine, ahead: FlushSources) -> Any:
    state, fresh = _capture(machine, ahead)
    kept, machine.producers = machine.producers, Producers()
    state["producers"], state["digest"] = [], machine.digest()
    machine.producers = kept
    return state, fresh


_finish = TopicsAhead.finish


def _finish_stale(self: TopicsAhead, machine: Machine) -> Any:
    """A topic is as it was when it was taken ahead."""
    self._changed.clear()
    return _finish(self, machine)


_group_state = manifest._group_state


def _group_without_acks(group: Group) -> Any:
    return {**_group_state(group), "acked": np.zeros(0, np.bool_)}


def _group_without_attempts(group: Group) -> Any:
    return {**_group_state(group), "ended": b"", "recalled": b""}


_kill = Memtable.kill
_freeze = Store.freeze


@contextlib.contextmanager
def _frozen_lives() -> Iterator[None]:
    """A row in the frozen memtable stays alive when it is cancelled."""
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
    """What is due at one time is taken for a row and its tombstone."""
    pair = rows["due_ms"][1:] == rows["due_ms"][:-1]
    left = np.ones(len(rows), np.bool_)
    left[1:] &= ~pair
    left[:-1] &= ~pair
    return left


def _without_tombstones(rows: RowArray) -> Any:
    """A tombstone goes with the merge, though its target is in a run outside."""
    return annihilate(rows) & ~is_tombstone(rows)


# ---- keys


def _no_holders(self: Store, topic: Any, keys: Any, hashes: Any = None) -> Any:
    """Nothing that lies in runs is found by its key."""
    runs, self._runs = self._runs, Runs(SimDisk(), Path("/none"))
    try:
        return _find_keys(self, topic, keys, hashes)
    finally:
        self._runs = runs


_find_keys = Store.find_keys


def _first_wins(*args: Any) -> Decision:
    """Rows of one entry don't know of each other."""
    decision = decide(*args)
    decision.undone[:] = False
    verdict = decision.verdicts.verdict
    verdict[verdict < Verdict.NOT_PENDING] = np.minimum(
        verdict[verdict < Verdict.NOT_PENDING], Verdict.REPLACED
    )
    return decision


def _update_schedules(rows: RowArray, modes: U32, *rest: Any) -> Decision:
    """An update is a replacement, which schedules without a pending timer, too."""
    return decide(rows, np.where(modes == OnConflict.UPDATE, OnConflict.REPLACE, modes), *rest)


def _end_nothing(self: Store, rows: Any) -> None:
    """What is replaced, or rescheduled, is counted as ended, and stays."""
    self._pending -= len(rows)


_reschedule = Machine._reschedule


def _reschedule_says_yes(self: Machine, entry: Any) -> Any:
    """A reschedule is told RESCHEDULED whatever became of the timer."""
    applied = _reschedule(self, entry)
    applied.results[:] = RESCHEDULED
    return applied


def _keep_own(self: Verdicts, start: int, stop: int) -> Verdicts | None:
    """A row that was kept back is told a wrong holder: the timer after it in seq."""
    part = _verdicts_part(self, start, stop)
    if part is not None:
        part.seq[part.verdict >= Verdict.KEPT] += np.uint64(1 << 20)
    return part


_verdicts_part = Verdicts.part


class _ShiftedPacker:
    """Whose rows lie in a run: their payloads begin one byte late."""

    def __init__(self, to: row_reader.Packer) -> None:
        self._to = to

    def put(self, at: int, row: Any, bufs: Any) -> None:
        row["payload_start"] += min(1, row["payload_size"])
        self._to.put(at, row, bufs)


_read_rows = row_reader.read_rows


def _read_shifted(*args: Any) -> None:
    *where, to, places = args
    _read_rows(*where, _ShiftedPacker(to), places)  # type: ignore[call-arg]


# ---- handing out


def _no_mark(self: Group, queue_end: Any) -> bool:
    del self, queue_end
    return False


# ---- room


def _takes_everything(self: Rooms, voters: Any, now_ms: Any) -> None:
    """Whatever the disks have left, what comes is taken."""


_refusal = Rooms.refusal


def _own_disk_alone(self: Rooms, voters: Any, now_ms: Any) -> Any:
    """A leader looks at nobody's disk but its own."""
    return _refusal(self, [self._me], now_ms)


_TIGHT: Final = {
    "faults": ("handover",),
    "mischief": (),
    "tight": True,
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

TIMER_MUTATIONS: Final = (
    _mutation(
        "keys_of_runs_are_missed",
        "keys are looked for in memory alone",
        {"key", "digest"},
        40,
        "a key that is taken by a timer in a run",
        patch(Store, "find_keys", _no_holders),
        **_RESTARTS,
    ),
    _mutation(
        "rows_of_an_entry_ignore_each_other",
        "keys are unique against what was pending before, not within an entry",
        {"key", "conservation", "list", "dropped"},
        20,
        f"{ANY_WORLD}: two rows of one key in one entry",
        patch(machine, "decide", _first_wins),
    ),
    _mutation(
        "update_schedules",
        "an update schedules a timer though no pending one has its key",
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
        patch(Store, "end", _end_nothing),
    ),
    _mutation(
        "reschedule_says_yes",
        "a reschedule is told RESCHEDULED whatever became of the timer",
        {"key", "lost", "dropped"},
        20,
        f"{ANY_WORLD}: a reschedule of what has ended",
        patch(Machine, "_reschedule", _reschedule_says_yes),
    ),
    _mutation(
        "kept_is_another",
        "a row that is not scheduled is told of another timer than the one with its key",
        {"key"},
        20,
        f"{ANY_WORLD}: a key that is taken",
        patch(Verdicts, "part", _keep_own),
    ),
    _mutation(
        "retry_is_new",
        "apply takes a repeated request for a new one",
        {"twice", "digest"},
        20,
        "an answer that is lost",
        patch(Producers, "repeated", _repeated),
    ),
    _mutation(
        "ack_before_commit",
        "an ack is confirmed before a majority has it",
        {"acked", "lost"},
        40,
        "a failover with the ack in flight",
        patch(Serving, "ack", _ack_at_once),
    ),
    _mutation(
        "nack_is_an_ended_lease",
        "a nack is told, but what goes to the log is that the lease ended",
        {"nack"},
        20,
        f"{ANY_WORLD}: a nack",
        patch(Serving, "_gather", _gather_nothing_told),
    ),
    _mutation(
        "failover_forgets_nacks",
        "a new leader hands out at once what was nacked with a delay",
        {"nack"},
        60,
        "a failover while a nacked message waits",
        patch(Leases, "_free", _free_at_once),
    ),
    _mutation(
        "dead_letter_is_a_copy",
        "a dead letter goes to its topic, and is not acked where it was",
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
        "fastest_clock",
        "the log's clock follows the clock that is ahead of all others",
        {"clock"},
        30,
        "a clock that is wrong",
        patch(ClusterClock, "_error", _fastest),
        faults=("clock",),
        nodes=5,
        fault_gap_ms=10_000,
    ),
    _mutation(
        "fires_by_its_own_clock",
        "a leader fires what is due by its own clock, which may be ahead of the log's",
        {"early"},
        20,
        "a leader whose clock is wrong",
        _fire_by_its_own_clock,
        faults=("clock", "drift"),
        fault_gap_ms=4_000,
    ),
    _mutation(
        "fire_from_checkpoint",
        "a new leader reads on from the last checkpoint instead of from the last FIRE",
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
        "a cancel of what was flushed, then another flush and a restart",
        patch(Left, "graves", property(_no_graves)),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_without_producers",
        "a restart forgets what producers had sent",
        {"digest", "twice"},
        40,
        "a restart from a manifest",
        patch(manifest, "capture", _capture_without_producers),
        **_RESTARTS,
    ),
    _mutation(
        "manifest_of_before",
        "a topic that changes after it was taken for a manifest is in it as it was",
        {"storage"},
        40,
        "a restart from a manifest that was taken topic by topic",
        patch(TopicsAhead, "finish", _finish_stale),
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
        "a restart forgets how often messages were nacked, or their leases ended",
        {"unmarked"},
        60,
        "a restart from a manifest with a message that came back, which then leads",
        patch(manifest, "_group_state", _group_without_attempts),
        **_RESTARTS,
    ),
    _mutation(
        "frozen_row_lives",
        "a timer in a memtable that is being written fires, though it was cancelled",
        {"cancel", "key", "digest", "conservation", "list", "twice"},
        80,
        "a cancel during a flush",
        _frozen_lives,
        **_RESTARTS,
    ),
    _mutation(
        "restart_fires_again",
        "a restart forgets how far its runs had fired",
        {"digest", "twice", "list", "dropped"},
        40,
        "a restart from a manifest whose runs have fired in part",
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
        "a merge leaves out tombstones whose targets are in runs outside",
        {"digest", "conservation", "cancel", "list", "twice", "key"},
        40,
        "a cancelled timer in a run that is not merged with its tombstone",
        patch(merge, "annihilate", _without_tombstones),
        **_RESTARTS,
    ),
    _mutation(
        "window_off_by_one",
        "what is due at the very read time stays in its run",
        {"digest", "conservation", "liveness", "list"},
        40,
        "a flush",
        patch(ReadWindow, "peek", _peek_short),
        **_RESTARTS,
    ),
    _mutation(
        "flushed_payload_is_shifted",
        "a reschedule of a timer in a run copies its payload from one byte further on",
        {"phantom"},
        40,
        "a reschedule of what was flushed",
        patch(row_reader, "read_rows", _read_shifted),
        **_RESTARTS,
    ),
    _mutation(
        "handout_without_lease",
        "a leader hands out messages without looking at its lease",
        {"handout"},
        20,
        "a leader that was cut off or stopped while another came to serve, and goes on",
        patch(TimerApp, "may_hand_out", lambda _: True),
        faults=("pause", "isolate"),
        mischief=(),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "unmarked_after_failover",
        "a new epoch forgets that the old leader had handed messages out",
        {"unmarked"},
        30,
        "a failover with messages handed out",
        patch(Group, "begin_epoch", _no_mark),
    ),
    _mutation(
        "takes_what_fills_the_disk",
        "a leader takes timers whatever room there is",
        {"space"},
        10,
        "small disks",
        patch(Rooms, "refusal", _takes_everything),
        **_TIGHT,
    ),
    _mutation(
        "own_disk_alone",
        "a leader with room takes timers while a majority has none",
        {"space"},
        20,
        "small disks, of the followers alone",
        patch(Rooms, "refusal", _own_disk_alone),
        **_TIGHT,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
