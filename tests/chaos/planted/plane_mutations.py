"""Planted bugs in the state plane's decisions: folds, flushes, merges, drains and promotions.

See tests/chaos/planted/planted.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

from chaos.sim.timers.timers import TimerWorld
from cluster.state.state_plane import StatePlane
from tests.chaos.planted.planted import ANY_WORLD, Planting, patch
from timer.entries.entry_frame import Entry
from timer.leader.leader import Leader
from timer.model.units import Epoch, LogIndex, Now
from timer.pending.prefetch import Prefetch
from timer.ready.spill import PageFetch
from timer.recovery.engine import Flush

_on_stepdown = StatePlane.on_stepdown
_end_flush = StatePlane._end_flush
_begin_flush = StatePlane._begin_flush
_is_flush_due = StatePlane._is_flush_due
_prefetch = StatePlane._prefetch
_serve = StatePlane._serve
_lead = StatePlane._lead


def _begin_flush_unsynced(self: StatePlane, done: Callable[[], None]) -> None:
    """Write a manifest at once, without waiting for the log to be durable."""
    flush = self.engine.begin_flush()
    if flush is None:
        done()
    else:
        self._write(flush, done)


def _begin_flush_and_drop(self: StatePlane, done: Callable[[], None]) -> None:
    """Drop the log up to a manifest before the manifest is written."""
    index = self.engine.machine.applied_index
    _begin_flush(self, done)
    if self.engine.flushing:
        self._io.drop_before(LogIndex(index + 1), keep=False)


def _end_flush_without_fold(self: StatePlane, flush: Flush, done: Callable[[], None]) -> None:
    """Do not start the fold that has waited for this flush."""
    waited = self.waits_for_flush
    folding, self._folding = self._folding, True
    _end_flush(self, flush, done)
    self._folding = folding or waited


def _stepdown_forgets_portion(self: StatePlane, epoch: Epoch) -> None:
    """Forget the entries that a thread prefetches for, and wait for them forever."""
    self._lost = self._folding  # type: ignore[attr-defined]
    _on_stepdown(self, epoch)


def _prefetch_if_wanted(self: StatePlane, entries: Sequence[Entry], prefetch: Prefetch) -> None:
    if not getattr(self, "_lost", False):
        _prefetch(self, entries, prefetch)


def _serve_from_here(self: StatePlane, epoch: Epoch) -> None:
    """Serve at once, from the applied index."""
    commit_index, self.engine.commit_index = (
        self.engine.commit_index,
        self.engine.machine.applied_index,
    )
    _serve(self, epoch)
    self.engine.commit_index = commit_index


def _is_drained_early(self: StatePlane) -> bool:
    """Report a drain as done while requests wait."""
    leader = self._retiring
    if leader is not None and leader.closed is None and not self._checkpointed:
        self._checkpointed = True
        leader.checkpoint(self.now())
    return True


def _is_flush_due_once(self: StatePlane, now: Now) -> bool:
    """Begin one flush and no more."""
    return not self.engine.manifest_index and _is_flush_due(self, now)


def _fetched_once(self: StatePlane, fetch: PageFetch, _: None) -> None:
    """Use the first read pages, and start no further read."""
    self.engine.end_fetch(fetch)
    self.kick()


def _lead_when_kicked(self: StatePlane, leader: Leader, now: Now) -> int:
    """Step again after a second, even if a timer is due before."""
    _lead(self, leader, now)
    return 1_000


def _ripe_at_once(self: StatePlane, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Apply entries of the leader as soon as they are committed."""
    del self
    return entries


_mutation: Final = Planting(TimerWorld, mischief=())
_FLUSHES: Final[dict[str, Any]] = {"manifest_every": 20, "proposals_per_s": 16}
_RESTARTS: Final[dict[str, Any]] = {"faults": ("kill", "power"), "fault_gap_ms": 1_500}
_FAILOVERS: Final[dict[str, Any]] = {"faults": ("handover", "isolate"), "fault_gap_ms": 1_500}

MUTATIONS: Final = (
    _mutation(
        "manifest_before_sync",
        "a manifest goes beyond the log on the same disk",
        {"storage"},
        20,
        "a power cut after the manifest and before the log's sync",
        patch(StatePlane, "_begin_flush", _begin_flush_unsynced),
        sync_us=8_000,
        nodes=3,
        **_FLUSHES,
        **_RESTARTS | {"faults": ("power", "slow_disk")},
    ),
    _mutation(
        "log_goes_before_manifest",
        "the log is dropped up to a manifest that is not durable yet",
        {"storage"},
        40,
        "the end of a process during a flush",
        patch(StatePlane, "_begin_flush", _begin_flush_and_drop),
        segment_bytes=2_000,
        log_kept_bytes=0,
        **_FLUSHES,
        **_RESTARTS,
    ),
    _mutation(
        "stepdown_forgets_portion",
        "a fold that waits for a prefetch at the end of a leadership waits forever",
        {"stuck"},
        20,
        "the end of a leadership while a thread prefetches",
        lambda: mock.patch.multiple(
            StatePlane, on_stepdown=_stepdown_forgets_portion, _prefetch=_prefetch_if_wanted
        ),
        **_FLUSHES | {"faults": ("handover",), "fault_gap_ms": 700, "proposals_per_s": 200},
    ),
    _mutation(
        "pressure_is_never_released",
        "a fold that waited for a flush waits forever",
        {"stuck"},
        20,
        "timers that fire so fast that folding waits for a flush",
        patch(StatePlane, "_end_flush", _end_flush_without_fold),
        pressed=True,
        payload_bytes=3_000,
        **_FLUSHES,
    ),
    _mutation(
        "flush_is_decided_once",
        "a replica flushes once and never again",
        {"stuck"},
        10,
        "more entries than the limit, twice",
        patch(StatePlane, "_is_flush_due", _is_flush_due_once),
        **_FLUSHES,
    ),
    _mutation(
        "serves_before_the_end",
        "a promoted replica serves before its fold has reached the log's end",
        {"unmarked", "acked"},
        20,
        "a follower that is behind when it is promoted",
        patch(StatePlane, "on_lead", _serve_from_here),
        again=True,
        **_FAILOVERS,
        proposals_per_s=16,
    ),
    _mutation(
        "fires_ahead_of_time",
        "the leader applies a FIRE as soon as it is committed",
        {"early"},
        20,
        "a commit that is quicker than those before",
        patch(StatePlane, "_foldable", _ripe_at_once),
    ),
    _mutation(
        "drain_forgets_waiting",
        "a drain is over while requests wait for their entries",
        {"drain"},
        20,
        "a drain while requests are in flight",
        patch(StatePlane, "is_drained", _is_drained_early),
        faults=("terminate",),
        fault_gap_ms=1_500,
        sync_us=8_000,
        proposals_per_s=16,
    ),
    _mutation(
        "fetches_once",
        "messages are read back from spill files once and never again",
        {"liveness"},
        20,
        "messages that leave memory before they are delivered, twice",
        patch(StatePlane, "_on_fetched", _fetched_once),
        **_FLUSHES,
        **_RESTARTS,
    ),
    _mutation(
        "wakes_every_second",
        "a leader steps once a second and not when a timer is due",
        {"late"},
        20,
        ANY_WORLD,
        patch(StatePlane, "_lead", _lead_when_kicked),
        faults=(),
        loss=0.0,
        nodes=3,
        proposals_per_s=1,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
