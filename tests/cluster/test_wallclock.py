"""The wall clock of a test cluster's node follows its file; any other is the machine's."""

import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from cluster.settings import wall_clock as wallclock
from cluster.settings.config import build_config
from cluster.settings.wall_clock import machine_ms, wall_clock
from cluster.state.voter_clocks import VoterClocks
from replication.shell.replica import Replica
from tests.cluster.hosted import BASE
from timer.leader.intake.cluster_clock import Sample
from timer.model.units import MonoMs, ReplicaId, UnixMs


def put(path: Path, *, offset_ms: int = 0, drift_ppm: int = 0, from_ms: int = 0) -> None:
    said = {"offset_ms": offset_ms, "drift_ppm": drift_ppm, "from_ms": from_ms}
    other = path.with_suffix(".new")
    other.write_text(json.dumps(said))
    other.rename(path)


def test_without_a_file_it_is_the_machines() -> None:
    assert wall_clock("") is machine_ms


def test_clock_jumps_drifts_and_is_right_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [UnixMs(1_000_000)]
    monkeypatch.setattr(wallclock, "machine_ms", lambda: now[0])
    path = tmp_path / "clock.json"
    clock = wall_clock(str(path))
    assert clock() == 1_000_000
    put(path, offset_ms=-2500)
    assert clock() == 997_500
    put(path, drift_ppm=50_000, from_ms=1_000_000)
    now[0] = UnixMs(1_010_000)
    assert clock() == 1_010_500
    path.unlink()
    assert clock() == 1_010_000


def test_only_a_test_cluster_takes_it() -> None:
    config = build_config(BASE, {"cluster_id": "test-1", "test_clock": "clock.json"})
    assert config.test_clock == "clock.json"


def test_thread_that_loses_its_processor_between_two_clocks_makes_an_inexact_reading() -> None:
    replica = create_autospec(Replica, instance=True, replica_id=ReplicaId(1), clock_samples={})
    now_ms = 100

    def wall_ms() -> UnixMs:
        nonlocal now_ms
        now_ms += 5
        return UnixMs(now_ms + 1_000_000)

    clocks = VoterClocks(replica, lambda: MonoMs(now_ms), wall_ms)
    assert clocks.samples() == [
        Sample(
            voter=ReplicaId(1),
            wall_ms=UnixMs(1_000_105),
            sent_ms=MonoMs(100),
            received_ms=MonoMs(105),
        )
    ]
