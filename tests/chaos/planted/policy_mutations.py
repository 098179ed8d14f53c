"""Planted bugs in policies (see tests/chaos/planted/planted.py)."""

from typing import Any, Final

import numpy as np

from chaos.sim.timers.timers import CONFIG, TimerWorld
from tests.chaos.planted.planted import Planting, patch
from timer.entries.policies import Policies, ScopePolicy
from timer.leader.intake.admission import Admission
from timer.leader.leader import Leader
from timer.model.columns import U32
from timer.model.units import Now
from timer.pending.store import Store
from timer.recovery import manifest
from timer.recovery.manifest import FlushSources
from timer.state.machine import Machine

_flush = Leader._flush_schedules


def _flush_some(self: Leader, now: Now, *, all_of_them: bool = False) -> None:
    """Append waiting timers after a change of policy, with the due times from before it."""
    del all_of_them
    _flush(self, now)


_admission = Admission.__init__


def _begin_without(self: Admission, machine: Machine, node: ScopePolicy, salt: int) -> None:
    """Let a new leader ignore the policies until the next change."""
    _admission(self, machine, node, salt)
    self.policies = Policies()


def _of_no_topic(self: Store, due_ms: Any, seq: Any) -> U32:
    """Return topic 0 for every timer."""
    del self, due_ms
    return np.zeros(len(seq), np.uint32)


def _narrower_alone(self: ScopePolicy, wider: ScopePolicy) -> ScopePolicy:
    """Ignore the wider scope's fields if the narrower scope sets any field."""
    whole = wider.tick_ms is not None  # else two records of one scope are merged
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

MUTATIONS: Final = (
    _mutation(
        "policy_overtakes",
        "a policy is appended before timers with due times from before the policy",
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
        "a new leader ignores the policies until one changes",
        {"policy"},
        20,
        "a failover with policies",
        patch(Admission, "__init__", _begin_without),
        faults=("kill", "handover"),
        fault_gap_ms=1_500,
    ),
    _mutation(
        "moved_by_the_clusters_policy",
        "a reschedule by id uses the cluster's policy and ignores the topic's",
        {"policy"},
        20,
        "a reschedule where namespaces or topics have policies",
        patch(Store, "topics", _of_no_topic),
    ),
    _mutation(
        "scope_says_it_all",
        "an unset field of a namespace or topic has the node's value, not the wider scope's",
        {"policy"},
        20,
        "policies of two scopes with different fields",
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
