"""The record of hops: bounded in time and in stamps."""

import pytest

from replication.shell import hop_recorder
from replication.shell.hop_recorder import Hop, HopRecorder
from timer.model.units import LogIndex


def test_a_record_ends_by_itself_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 5
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    hops = HopRecorder()
    hops.begin()
    hops.stamp(Hop.SENT, LogIndex(1))
    now_ns += hop_recorder.RECORD_S * 1_000_000_000 + 1
    hops.stamp(Hop.SENT, LogIndex(2))
    assert not hops.on
    assert hops.end() == [(Hop.SENT, 1, 5)]
    assert hops.end() == []


def test_an_ended_record_is_off_and_a_new_one_begins_empty() -> None:
    hops = HopRecorder()
    hops.begin()
    hops.stamp(Hop.SENT, LogIndex(1), at_ns=7)
    hops.begin()
    hops.stamp(Hop.REQUEST, LogIndex(2), at_ns=8)
    assert hops.end() == [(Hop.REQUEST, 2, 8)]
    assert not hops.on


def test_a_record_has_a_most_number_of_stamps() -> None:
    hops = HopRecorder()
    hops.begin()
    for index in range(hop_recorder.STAMPS_MAX + 2):
        hops.stamp(Hop.SENT, LogIndex(index))
    assert not hops.on
    assert len(hops.end()) == hop_recorder.STAMPS_MAX
