"""Runs of real nodes, audited: one that ends, one whose harness dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from chaos.audit import job
from chaos.history.history import RunFolder, read
from chaos.suite.stage.network import run as run_program
from chaos.suite.stage.stage import end_run, owning, remove_stale
from chaos.suite.suite_run import SuiteRun, claimable, clear
from deploy.local import LaunchError, LocalCluster
from tests.cluster.running import Forking, until
from timerclient.cli import timerctl


@pytest.mark.long  # CI plays such a run as a step of its own: `make chaos-short`
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_short_run_without_root_is_ok(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def play(self: SuiteRun) -> int:
        self._audit = (sys.executable, "-c", "")
        return whole(self)

    whole = SuiteRun.execute
    monkeypatch.setattr(SuiteRun, "execute", play)
    monkeypatch.setattr("chaos.suite.stage.stage.LocalCluster", Forking)
    words = ["run", "short", "--minutes", str(20 / 60), "--seed", "3", "--plain"]
    words += ["--workloads", "uniform,cancels,groups", "--rate", "60", "--dir", str(folder)]
    assert timerctl.main(["chaos", *words]) == 0
    report = job.audit(spark, RunFolder(folder))
    assert report.ok, report.summary
    assert report.summary["kills"] >= 1
    assert report.summary["delivered"] > 100
    assert len(report.summary["files"]) == 3
    events = [line["event"] for line in read(RunFolder(folder).faults)]
    assert events.count("strike") == events.count("healed") >= 1
    assert events[-1] == "drained"
    of = [line["strike"] for line in read(RunFolder(folder).faults) if line["event"] == "kill"]
    assert set(of) <= {
        number for number, _ in enumerate(RunFolder(folder).read_about()["schedule"], 1)
    }
    told = RunFolder(folder).read_about()
    assert told["missing"].keys() == {"network", "disks"}
    assert told["failures"] == []
    assert (folder / "logs/n1.log").stat().st_size
    assert not any(map(LocalCluster(folder).is_running, ("n1", "n2", "n3")))


def scheduled(run: RunFolder) -> bool:
    """Return whether some client has been told that its timers are scheduled."""
    lines = (line for path in run.histories.iterdir() for line in read(path))
    return any((line["op"], line.get("outcome")) == ("schedule", "ok") for line in lines)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nothing_of_a_crashed_run_is_left_or_lost(tmp_path: Path, spark: SparkSession) -> None:
    folder = tmp_path / "run"
    # No node goes away in this one, however long it takes to get here.
    words = ["run", "clock-drift", "--minutes", "5", "--workloads", "uniform"]
    with subprocess.Popen(
        [sys.executable, "-m", "timerclient.cli.timerctl", "chaos", *words, "--dir", str(folder)],
        stdout=subprocess.PIPE, text=True,
    ) as harness:  # fmt: skip
        try:
            assert harness.stdout is not None
            assert any("nodes are up" in line for line in harness.stdout)
            until(lambda: [*folder.glob("histories/uniform-*")] and scheduled(RunFolder(folder)))
            cluster = LocalCluster(folder)
            with pytest.raises(LaunchError, match="another process runs there"):
                clear(claimable(folder))
            remove_stale()  # the next run does this first
            assert all(map(cluster.is_running, cluster.nodes))
        finally:
            harness.kill()
            harness.wait()
            if os.geteuid() == 0:
                remove_stale()
            else:
                end_run(RunFolder(folder))
    assert not any(map(cluster.is_running, cluster.nodes))
    with owning(RunFolder(folder)), pytest.raises(LaunchError, match="another process runs there"):
        clear(claimable(folder))
    assert not [*folder.glob("nodes/*.img")]
    assert all([*log.iterdir()] for log in RunFolder(folder).nodes().values())
    if os.geteuid() == 0:
        assert f"-{harness.pid}-" not in run_program("ip", "netns")
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert RunFolder(folder).read_about()["state"] == "running"
    report = job.audit(spark, RunFolder(folder))
    # What fired as the clients were dead and the nodes were not was given to nobody.
    assert report.summary["violations"].keys() <= {"lost"}, report.summary
    assert report.summary["scheduled"] > 0
    assert report.why_bad.startswith("the harness did not finish")
    clear(claimable(folder))
    assert not folder.exists()
