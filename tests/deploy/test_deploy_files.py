"""The files in deploy/ for hosts and containers agree with the product."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.rpc.open_files import FILES_MIN
from cluster.settings.config import NodeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/timerd.service"


def lasting_exit_codes() -> list[str]:
    """Return the exit statuses of `timerd` that return until an operator has acted."""
    table = (ROOT / "docs/runbook.md").read_text().partition("## Exit statuses of timerd")[2]
    return re.findall(r"^\| (\d+) \| .* \| no \|$", table, re.MULTILINE)


def unit_setting(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_unit_agrees_with_the_settings_and_the_runbook() -> None:
    assert unit_setting("RestartPreventExitStatus").split() == lasting_exit_codes()
    defaults = NodeConfig(name="n", cluster_id="c", data=Path("d"), peers={"n": "127.0.0.1:1"})
    assert int(unit_setting("TimeoutStopSec")) * 1_000 >= 2 * defaults.timing.drain_timeout_ms
    assert int(unit_setting("LimitNOFILE")) >= max(
        FILES_MIN, defaults.limits.connections_max + 1_024
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.M))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
