"""Planted bugs in policies (tests/chaos/planted/planted.py says what they are for)."""

from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import CONFIG, TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.entries.policies import Policies, ScopePolicy
from timer.leader.intake.admission import Admission
from timer.leader.leader import Leader, Now
from timer.model.columns import U32
from timer.pending.store import Store
from timer.recovery import manifest
from timer.recovery.manifest import FlushSources
from timer.state.machine import Machine

_flush = Leader._flush_schedules


def _flush_some(self: Leader, now: Now, *, all_of_them: bool = False) -> None:
    """What waits while a policy changes goes behind it, with the times that it has."""
    del all_of_them
    _flush(self, now)


_admission = Admission.__init__


def _begin_without(self: Admission, machine: Machine, node: ScopePolicy) -> None:
    """A new leader waits for the next change before it goes by policies."""
    _admission(self, machine, node)
    self._policies = Policies()


def _of_no_topic(self: Store, due_ms: Any, seq: Any) -> U32:
    """Whose timer is rescheduled is not asked."""
    del self, due_ms
    return np.zeros(len(seq), np.uint32)


def _narrower_alone(self: ScopePolicy, wider: ScopePolicy) -> ScopePolicy:
    """A scope that says something says it all: the wider one's other fields are lost."""
    whole = wider.tick_ms is not None  # else a record is put together
    return _over(self, CONFIG.policy if whole and self.pack() else wider)


_over = ScopePolicy.over

_capture = manifest.capture


def _capture_without_policies(machine: Machine, ahead: FlushSources) -> Any:
    kept, machine.policies = machine.policies, Policies()
    try:
        return _capture(machine, ahead)
    finally:
        machine.policies = kept


_mutation: Final = Planting(TimerWorld, policies=True, mischief=())

POLICY_MUTATIONS: Final = (
    _mutation(
        "policy_overtakes",
        "a policy is appended before timers whose times were decided without it",
        {"policy"},
        20,
        "a policy that changes while requests wait for the log",
        patch(Leader, "_flush_schedules", _flush_some),
        faults=("slow_disk",),
        nodes=3,
        proposals_per_s=16,
        sync_us=8_000,
        fault_gap_ms=1_500,
    ),
    _mutation(
        "successor_knows_no_policies",
        "a new leader decides by no policies until one changes",
        {"policy"},
        20,
        "a failover with policies",
        patch(Admission, "__init__", _begin_without),
        faults=("kill", "handover"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "moved_by_the_clusters_policy",
        "a reschedule by id goes by the cluster's policies, whatever the topic's are",
        {"policy"},
        20,
        "a reschedule where namespaces or topics have policies",
        patch(Store, "topics", _of_no_topic),
    ),
    _mutation(
        "scope_says_it_all",
        "what a namespace or topic doesn't say is the node's setting, not the wider scope's",
        {"policy"},
        20,
        "policies of two scopes that say different things",
        patch(ScopePolicy, "over", _narrower_alone),
    ),
    _mutation(
        "manifest_without_policies",
        "a restart forgets the policies",
        {"digest", "policy"},
        20,
        "a restart from a manifest, with policies",
        patch(manifest, "capture", _capture_without_policies),
        faults=("kill", "power"),
        manifest_every=20,
        fault_gap_ms=1_500,
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
