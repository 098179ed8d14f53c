"""A run of real nodes that is stopped by a signal. Apart from the files that need Spark."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.history.history import RunFolder, read
from chaos.suite.stage.stage import end_run
from deploy.local import LocalCluster
from timerclient.cli import cli_errors


@pytest.mark.slow
def test_run_that_is_told_to_end_again_and_again_takes_down_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["run", "clock-drift", "--minutes", "5", "--workloads", "uniform", "--plain"]
    with subprocess.Popen(
        [sys.executable, "-m", "timerclient.cli.timerctl", "chaos", *words, "--dir", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as harness:  # fmt: skip
        try:
            assert harness.stdout is not None
            assert any("nodes are up" in line for line in harness.stdout)
            while not any(RunFolder(folder).histories.glob("*")):  # until the workloads run
                assert harness.poll() is None
                time.sleep(0.05)
            harness.terminate()
            while harness.poll() is None:
                harness.send_signal(signal.SIGINT)
                time.sleep(0.05)
            _, said = harness.communicate()
            cluster = LocalCluster(folder)
            left = [*filter(cluster.is_running, cluster.nodes)]
        finally:
            harness.kill()
            harness.wait()
            end_run(RunFolder(folder))
    assert said == "timerctl chaos: stopped\n"
    assert harness.returncode == cli_errors.INTERRUPTED
    assert (len(cluster.nodes), left) == (3, [])
    events = [line["event"] for line in read(RunFolder(folder).faults)]
    assert "died" not in events
