"""Leaders that limp are relieved by better ones, once, and by none that would limp as well."""

import os
import resource
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.control.control_state import Appoint
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    RaftLeadership,
    ReplicaReport,
    ReportedRole,
    TransferRequest,
)
from cluster.control.leader_fitness import UNFIT_MS, DiskRecord
from cluster.rpc import open_files
from tests.cluster.controlling import CONFIG, STEP_MS, VOTERS, Play, follower, in_service
from timer.model.units import LogIndex, MonoMs

Limps = Callable[[str, ReplicaReport, int], ReplicaReport]
"""Returns a leader's report, from its name, a healthy leader's report and the time."""
A_WHILE_MS = 60_000
"""Longer than anything is remembered, unfit nodes apart."""


def never(name: str, report: ReplicaReport, now: int) -> ReplicaReport:
    del name, now
    return report


class Limping(Play):
    """Each appointed node leads at once and reports by `limps`; other disks take `disk_ms`."""

    limps: Limps
    disk_ms: dict[str, int]

    def live(self, ms: int) -> int | None:
        """Return the milliseconds until another leader was appointed. None: not within `ms`."""
        before = len(self.appointed)
        for passed in range(STEP_MS, ms + STEP_MS, STEP_MS):
            epoch = self.state.epoch
            for name in VOTERS:
                report = replace(follower(name, epoch=epoch), disk_ms=self.disk_ms.get(name, 1))
                if VOTERS[name] == self.state.leader:
                    leads = replace(report, role=ReportedRole.LEADER, serving=True, lease_ok=True)
                    report = self.limps(name, leads, self.now_ms)
                self.reports[name] = report
            self.run(STEP_MS)
            if len(self.appointed) > before:
                return passed
        return None


def limping(limps: Limps = never, **disk_ms: int) -> Limping:
    healthy = in_service()
    play = Limping(dict(healthy.reports), healthy.state)
    play.limps, play.disk_ms = limps, disk_ms
    play.lead()
    return play


def leaseless(names: str, bad_ms: int, of_ms: int) -> Limps:
    """They hold no lease for `bad_ms` of every `of_ms`, if they lead."""

    def limps(name: str, report: ReplicaReport, now: int) -> ReplicaReport:
        return replace(report, lease_ok=not (name in names and now % of_ms < bad_ms))

    return limps


@pytest.mark.parametrize(("bad_ms", "of_ms"), [(500, 1_000), (760, 1_000), (350, 700)])
def test_leader_that_holds_its_lease_half_of_the_time_is_relieved_within_ten_seconds(
    bad_ms: int, of_ms: int
) -> None:
    play = limping(leaseless("b", bad_ms, of_ms))
    took_ms = play.live(10_000)
    assert took_ms is not None
    assert play.appointed == [(6, "c")]
    assert "b: it has no lease for" in play.reason
    assert play.live(A_WHILE_MS) is None  # b, alone, would limp again


def test_lease_that_is_lost_for_a_moment_now_and_then_changes_nothing() -> None:
    assert limping(leaseless("b", 900, 10_000)).live(A_WHILE_MS) is None


@pytest.mark.parametrize("disk_ms", [120, 1_000, 3_900])
def test_leader_with_a_slow_disk_is_relieved_by_one_with_a_fast_one_and_for_good(
    disk_ms: int,
) -> None:
    play = limping(b=disk_ms, c=disk_ms)
    took_ms = play.live(10_000)
    assert took_ms is not None
    assert play.appointed == [(6, "a")]
    assert f"its log takes {disk_ms} ms to become durable, another disk 1 ms" in play.reason
    assert play.live(A_WHILE_MS) is None


def test_node_whose_disk_is_slow_for_seconds_names_figure_limit_and_remedy() -> None:
    record, now_ms, durable = DiskRecord(), MonoMs(0), LogIndex(0)

    def complaints(
        disk_ms: int, for_ms: int, *, idle: bool = False, hangs: bool = False, lease_ms: int = 500
    ) -> list[str]:
        nonlocal now_ms, durable
        for _ in range(0, for_ms, STEP_MS):
            durable = LogIndex(durable + (not idle and not hangs))
            record.note(now_ms, disk_ms=disk_ms, durable=durable, lease_ms=lease_ms)
            now_ms, disk_ms = MonoMs(now_ms + STEP_MS), disk_ms + STEP_MS * hangs
        return record.complaints()

    assert not complaints(99, A_WHILE_MS)
    assert not complaints(49, A_WHILE_MS, lease_ms=50)
    assert not complaints(3_000, 3_000)
    for for_ms in range(1_000, 20_000, 1_000):
        assert not complaints(120, for_ms, idle=True), "a single sync, and no entry follows"
        assert not complaints(1, 20_000)
    [text] = complaints(240, 10_000)
    assert text == (
        "slow disk: the log takes 240 ms to become durable; 100 ms or more are slow: "
        "check the disk and the load of this machine"
    )
    assert not complaints(1, 3_000)
    assert complaints(0, 10_000, hangs=True)


class _Noted:
    """A record of a disk, noted at each step."""

    def __init__(self) -> None:
        self.record, self.now_ms = DiskRecord(), 0
        self.complains: list[bool] = []
        self.durable = 0

    def until(self, end_ms: int, disk_ms: int, every_ms: int, *, pairs: bool = False) -> None:
        """Note a sync of `disk_ms` each `every_ms`, or two of them in a row."""
        while self.now_ms < end_ms:
            self.durable += (self.now_ms + STEP_MS) % every_ms in ((0, STEP_MS) if pairs else (0,))
            self.note(disk_ms)

    def note(self, disk_ms: int) -> None:
        self.now_ms += STEP_MS
        self.record.note(
            MonoMs(self.now_ms),
            disk_ms=disk_ms,
            durable=LogIndex(self.durable),
            lease_ms=500,
        )
        self.complains.append(bool(self.record.complaints()))


@pytest.mark.parametrize("interval_ms", [3_000, 8_000, 60_000])
@pytest.mark.parametrize("pairs", [False, True])
def test_slow_disk_of_an_idle_node_is_named_without_a_pause(interval_ms: int, pairs: bool) -> None:
    # A checkpoint is late by half of its interval.
    disk, every_ms = _Noted(), interval_ms * 3 // 2
    disk.until(20 * every_ms, 1, every_ms)
    disk.until(21 * every_ms, 3_000, every_ms)
    disk.until(40 * every_ms, 1, every_ms)
    assert not any(disk.complains), "a single sync was slow"
    disk.until(60 * every_ms, 3_000, every_ms, pairs=pairs)
    assert all(disk.complains[-16 * every_ms // STEP_MS :])


@pytest.mark.parametrize("interval_ms", [1_000, 3_000, 60_000])
def test_slow_or_hanging_disk_is_named_in_seconds_however_rare_checkpoints_are(
    interval_ms: int,
) -> None:
    disk = _Noted()
    disk.until(A_WHILE_MS, 1, interval_ms)
    disk.until(A_WHILE_MS + 10_000, 300, 300)
    assert disk.complains[-1]
    disk.until(2 * A_WHILE_MS, 1, STEP_MS)
    disk.until(2 * A_WHILE_MS + 6_500, 300, 300)
    assert disk.complains[-1]
    disk = _Noted()
    disk.until(3 * A_WHILE_MS, 1, interval_ms)
    for hangs_ms in range(0, 3_000, STEP_MS):
        disk.note(hangs_ms)
    disk.until(disk.now_ms + 9_000, 3_000, A_WHILE_MS)
    assert not any(disk.complains[-9_000 // STEP_MS :]), "a single sync, and no entry follows"
    disk.until(disk.now_ms + A_WHILE_MS, 1, STEP_MS)
    for hangs_ms in range(0, 11_000, STEP_MS):
        disk.note(hangs_ms)
    assert disk.complains[-1]


@pytest.mark.parametrize(
    ("every_ms", "work_ms"), [(60_000, 3_000), (30_000, 5_000), (10_000, 2_000)]
)
def test_slow_disk_is_named_between_bursts_too_until_syncs_are_fast(
    every_ms: int, work_ms: int
) -> None:
    disk = _Noted()
    for began_ms in range(0, 10 * every_ms, every_ms):
        disk.until(began_ms + work_ms, 300, 300)
        disk.until(began_ms + every_ms, 300, 10 * every_ms)
    assert all(disk.complains[2 * every_ms // STEP_MS :])
    disk.until(disk.now_ms + 3_000, 1, 300)
    assert not disk.complains[-1]


def test_leader_whose_commits_are_slow_on_fast_disks_is_relieved() -> None:
    def far_off(name: str, report: ReplicaReport, _: int) -> ReplicaReport:
        return replace(report, commit_ms=600 if name == "b" else 2)

    play = limping(far_off)
    assert play.live(10_000) is not None
    assert play.appointed == [(6, "c")]
    assert play.live(A_WHILE_MS) is None


def test_leader_that_can_take_no_connections_is_relieved_by_a_node_that_can() -> None:
    def deaf(name: str, report: ReplicaReport, _: int) -> ReplicaReport:
        return replace(report, accepts=name != "b")

    play = limping(deaf)
    took_ms = play.live(10_000)
    assert took_ms is not None
    assert took_ms <= 2_000
    assert "b: it can't take connections" in play.reason
    everywhere = in_service()
    for name, report in everywhere.reports.items():
        everywhere.reports[name] = replace(report, accepts=False)
    everywhere.run(A_WHILE_MS)
    assert everywhere.appointed == [], "the others could not take any, either"


def test_leader_that_still_applies_entries_gives_way_to_a_node_that_has_applied_them() -> None:
    def applying(name: str, report: ReplicaReport, now: int) -> ReplicaReport:
        left = max(0, 60 - (now - 1_000_000) // 100)  # it would be done after six seconds
        return replace(report, applied_index=LogIndex(report.last_index - left))

    play = limping(applying)
    took_ms = play.live(10_000)
    assert took_ms is not None
    assert took_ms <= CONFIG.late_ms + STEP_MS
    assert play.appointed == [(6, "c")]
    assert "b: it does not serve yet: it has 51 entries to apply" in play.reason
    (appoint,) = play.proposed
    assert isinstance(appoint, Appoint)
    assert appoint.unfit == (), "it was late, and served no worse than the others"


def test_leader_that_still_applies_entries_stays_while_the_others_apply_them_too() -> None:
    healthy = in_service()
    play = Play(dict(healthy.reports), healthy.state)
    for name, applied in ({"a": 30, "b": 40, "c": 50}).items():
        play.reports[name] = replace(play.reports[name], applied_index=LogIndex(applied))
    play.lead()
    play.run(A_WHILE_MS)
    assert play.appointed == []
    play.reports["c"] = follower("c", epoch=5)
    play.run(STEP_MS)
    assert play.appointed == [(6, "c")]


def test_successor_that_still_applies_entries_gives_way_as_the_first_leader_does() -> None:
    play = in_service()
    play.do(TransferRequest(VOTERS["c"]))
    late = replace(follower("c", epoch=6, index=200), applied_index=LogIndex(140))
    late = replace(late, role=ReportedRole.LEADER, serving=True, lease_ok=True)
    play.reports |= {name: follower(name, epoch=6, index=200) for name in "ab"} | {"c": late}
    play.run(CONFIG.late_ms + STEP_MS)
    assert play.appointed == [(6, "c"), (7, "b")]


def test_leader_that_has_only_the_entry_of_its_epoch_to_apply_stays() -> None:
    # Each leader waits two seconds for the end of the last lease, and reports before it applies.
    def waiting(name: str, report: ReplicaReport, now: int) -> ReplicaReport:
        del name
        waited_ms = now - play.core._watched_since_ms
        if waited_ms < 2_000:
            return replace(report, role=ReportedRole.PROMOTING, serving=False, lease_ok=False)
        end = LogIndex(report.last_index + 1)
        applied = report.last_index if waited_ms < 2_200 else end
        return replace(report, last_index=end, applied_index=applied)

    play = limping(waiting)
    assert play.live(A_WHILE_MS) is None, play.reason


def test_process_at_its_limit_of_open_files_has_no_spare_one() -> None:
    assert open_files.has_spare()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
        assert not open_files.has_spare()
        held = os.open("/dev/null", os.O_RDONLY)  # what it took to find out was given back
        os.close(held)
        assert not open_files.has_spare()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files.has_spare()


def test_leader_whose_disk_is_as_slow_as_the_others_stays() -> None:
    assert limping(a=900, b=1_500, c=600).live(A_WHILE_MS) is None
    assert limping(b=90).live(A_WHILE_MS) is None  # slower by far, but not slow


def test_one_slow_sync_is_no_slow_disk() -> None:
    def hiccup(name: str, report: ReplicaReport, now: int) -> ReplicaReport:
        return replace(report, disk_ms=2_000 if name == "b" and now % 30_000 < 2_000 else 1)

    assert limping(hiccup).live(A_WHILE_MS) is None


def test_where_all_limp_each_leads_once_and_then_none_for_ten_minutes() -> None:
    play = limping(leaseless("abc", 500, 1_000))
    until_ms = play.now_ms + UNFIT_MS
    while play.now_ms < until_ms:
        play.live(MonoMs(until_ms - play.now_ms))
    assert [name for _, name in play.appointed] == ["c", "a"]


def test_next_controller_knows_which_leaders_limped() -> None:
    play = limping(leaseless("ab", 500, 1_000))
    assert play.live(10_000) is not None
    (appoint,) = play.proposed
    assert isinstance(appoint, Appoint)
    assert appoint.unfit == (VOTERS["b"],)
    heir = Limping(dict(play.reports), replace(play.state, unfit=appoint.unfit))
    heir.limps, heir.disk_ms = leaseless("abc", 500, 1_000), {}
    heir.lead()
    assert heir.live(10_000) is not None
    assert heir.appointed == [(7, "a")]
    assert heir.live(UNFIT_MS - 20_000) is None


def test_unfit_node_leads_if_there_is_no_other_and_whenever_an_operator_asks() -> None:
    play = limping(leaseless("b", 500, 1_000))
    assert play.live(10_000) is not None
    play.limps = never
    assert play.live(1_000) is None
    play.do(TransferRequest(VOTERS["b"]))
    assert play.appointed[-1] == (7, "b")
    assert isinstance(play.proposed[-1], Appoint)
    assert play.proposed[-1].unfit == ()


def test_new_controller_counts_nothing_that_it_has_not_seen_itself() -> None:
    play = limping(leaseless("b", 500, 1_000))
    assert play.live(4_000) is None
    play.do(RaftLeadership(leads=False))
    play.do(RaftLeadership(leads=True))
    assert play.live(4_000) is None


def test_what_is_slow_grows_with_the_lease() -> None:
    config = ControllerConfig.of_lease(3_000)
    assert (CONFIG.lease_ms, config.lease_ms) == (500, 3_000)
    play = limping(b=500)
    play.core.config = config
    assert play.live(A_WHILE_MS) is None


def loaded(play: Play, entries: int, **unapplied: int) -> None:
    """Let b append this many entries; the others hold them, except those that they don't apply."""
    for name, report in play.reports.items():
        end = LogIndex(play.reports["b"].last_index + entries)
        applied = LogIndex(end - unapplied.get(name, 0))
        play.reports[name] = replace(report, last_index=end, applied_index=applied)
    play.run(STEP_MS)


def test_transfer_under_load_needs_a_target_that_applied_the_log_of_a_moment_ago() -> None:
    play = in_service()
    for _ in range(CONFIG.caught_up_ms // STEP_MS + 2):
        loaded(play, 50, c=100)
    play.do(TransferRequest(VOTERS["c"]))
    assert (play.refusal, play.appointed) == (None, [(6, "c")])


def test_lag_below_a_second_of_the_leaders_load_is_better_than_a_slow_disk() -> None:
    play = in_service()
    play.reports["a"] = replace(play.reports["a"], disk_ms=CONFIG.lease_ms)
    for _ in range(CONFIG.caught_up_ms // STEP_MS + 2):
        loaded(play, 50, c=100)
    play.lose("b")
    play.run(1_000)
    assert play.appointed == [(6, "c")]
