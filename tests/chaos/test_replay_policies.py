"""What policies say of timers' times, as the audit's own reading of the log has it."""

from pathlib import Path

import pytest

from chaos.oracle import tables
from chaos.oracle.story import PENDING
from tests.chaos.replaying import T, ends, read
from tests.chaos.world import Log, write_log
from timer.entries.entry_frame import EntryKind
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece, segments


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        (ScopePolicy(), ""),
        (ScopePolicy(delayed_delivery=True, tick_ms=100, delay_ms_min=5, delay_ms_max=9), ""),
        (ScopePolicy(pending_max=0, pending_bytes_max=1, ready_max=0, ready_bytes_max=0), ""),
        (ScopePolicy(delayed_delivery=False), "delayed_delivery = False"),
        (ScopePolicy(fixed_delay_ms=0), "fixed_delay_ms = 0"),
    ],
)
def test_policy_that_makes_timers_due_before_they_were_asked_for_is_refused(
    policy: ScopePolicy, refused: str, log: Log, tmp_path: Path
) -> None:
    log.entry(EntryKind.POLICY, encode_policy(Scope("ns"), policy))
    log.schedule(T, [(100, 1)])
    if refused:
        write_log(tmp_path / "log", log.frames)
        piece = Piece(segments(tmp_path / "log"), LogIndex(1), LogIndex(1 << 62))
        told = rf"entry 3 \(POLICY\) can't be replayed: the audit does not know {refused}"
        with pytest.raises(ValueError, match=told):
            tables.replay([piece], tmp_path / "out", tmp_path / "spill")
    else:
        assert ends(read(log, tmp_path)) == [PENDING]


@pytest.mark.parametrize(
    ("said", "by_ms"),
    [
        (ScopePolicy(tick_ms=100), 100),
        (ScopePolicy(delay_ms_min=5), 5),
        (ScopePolicy(delay_ms_min=5, tick_ms=20), 25),
        (ScopePolicy(delay_ms_max=9), 0),
        (ScopePolicy(jitter_ms=40, tick_ms=20), 60),
    ],
)
def test_by_how_much_timers_were_ever_due_later_than_asked_for_is_known(
    said: ScopePolicy, by_ms: int, log: Log, tmp_path: Path
) -> None:
    log.topic("free/a")
    log.entry(EntryKind.POLICY, encode_policy(Scope("default"), ScopePolicy(tick_ms=3)))
    log.entry(EntryKind.POLICY, encode_policy(Scope("default"), said))
    log.topic("b")
    log.entry(EntryKind.POLICY, encode_policy(Scope("default"), ScopePolicy()))
    log.topic("c")
    story, _ = read(log, tmp_path)
    known = {story.topics[number]: each for number, each in story.postponed.items()}
    assert known == {"t": max(3, by_ms), "free/a": 0, "b": by_ms, "c": 0}


def test_times_to_live_are_known_from_when_they_hold(log: Log, tmp_path: Path) -> None:
    for at_ms, ttl_ms, scope in (
        (10, None, Scope()), (20, 50, Scope()), (30, 50, Scope("default")), (40, 60, Scope("", T)),
        (50, 0, Scope("", T)), (60, 70, Scope("", T)), (60, None, Scope("", T)),
    ):  # fmt: skip
        log.entry(EntryKind.POLICY, encode_policy(scope, ScopePolicy(ttl_ms=ttl_ms)), at_ms=at_ms)
    log.topic("made")
    story, _ = read(log, tmp_path)
    by_name = {story.topics[number]: ttls for number, ttls in story.ttls.items()}
    assert by_name == {"t": [(0, 0), (20, 50), (40, 60), (50, 0), (60, 50)], "made": [(0, 50)]}


def test_rates_of_delivery_are_known_from_when_they_hold(log: Log, tmp_path: Path) -> None:
    for at_ms, scope, said in (
        (10, Scope(), ScopePolicy(group_rate_max=7)), (20, Scope("", T), ScopePolicy(ttl_ms=9)),
        (30, Scope("", T), ScopePolicy(topic_rate_max=8, group_rate_max=6)),
        (40, Scope("", T), ScopePolicy(group_rate_max=0)),
    ):  # fmt: skip
        log.entry(EntryKind.POLICY, encode_policy(scope, said), at_ms=at_ms)
    story, _ = read(log, tmp_path)
    assert story.rates == {T: [(0, 0, 0), (10, 0, 7), (30, 8, 6), (40, 0, 0)]}
