"""The files in deploy/ for hosts and containers agree with the product."""

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import timerclient
from cluster.rpc.open_files import FILES_MIN
from cluster.settings.config import NodeConfig
from tests.distributions import CLIENT, SERVER, project_version, requirements
from timerclient.cli.timerctl import make_parser
from timerclient.worker.worker import CANCEL_S, CLOSE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/timerd.service"


def locked(name: str) -> set[str]:
    """Return the pinned requirements of a lock, with their markers."""
    return {*re.findall(r"^(\S+==[^\\\n]+?) *\\?$", (ROOT / name).read_text(), re.MULTILINE)}


def lasting_exit_codes() -> list[str]:
    """Return the exit statuses of `timerd` that return until an operator has acted."""
    table = (ROOT / "docs/runbook.md").read_text().partition("## Exit statuses of timerd")[2]
    return re.findall(r"^\| (\d+) \| .* \| no \|$", table, re.MULTILINE)


def unit_setting(name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def test_unit_agrees_with_the_settings_and_the_runbook() -> None:
    assert unit_setting("RestartPreventExitStatus").split() == lasting_exit_codes()
    assert "time-sync.target" in unit_setting("After").split(), "certificates have dates"
    defaults = NodeConfig(name="n", cluster_id="c", data=Path("d"), peers={"n": "127.0.0.1:1"})
    assert int(unit_setting("TimeoutStopSec")) * 1_000 >= 2 * defaults.timing.drain_timeout_ms
    assert int(unit_setting("LimitNOFILE")) >= max(
        FILES_MIN, defaults.limits.connections_max + 1_024
    )


def _commands(text: str) -> list[list[str]]:
    """Return the words after `timerctl` of each command of units or pods."""
    found = re.findall(r"^ExecStart\w*=\S+/timerctl (.*)$|args: \[(.*)\]", text, re.MULTILINE)
    return [re.findall(r"[^\s,\"]+", unit or pod) for unit, pod in found]


@pytest.mark.parametrize(
    "place", ["systemd/timerd-backup.service", "kubernetes/components/backup/cronjob.yaml"]
)
def test_commands_of_scheduled_backups_are_ones_that_timerctl_takes(place: str) -> None:
    text = (DEPLOY / place).read_text()
    if place.endswith(".service"):
        text += (DEPLOY / place.replace("backup.", "backup-verify.")).read_text()
    parsed = [make_parser().parse_args(words) for words in _commands(text)]
    assert [each.run.__name__ for each in parsed] == ["_backup", "_prune", "_verify"]
    assert parsed[0].into == parsed[1].store == parsed[2].store


@pytest.mark.parametrize(
    "place",
    ["systemd/timerd-backup-follow.service", "kubernetes/components/backup-follow/deployment.yaml"],
)
def test_command_of_continuous_backups_keeps_as_many_as_the_scheduled_ones(place: str) -> None:
    [words] = _commands((DEPLOY / place).read_text())
    scheduled = (DEPLOY / "systemd/timerd-backup.service").read_text()
    parsed, _, prune = (make_parser().parse_args(each) for each in (words, *_commands(scheduled)))
    assert (parsed.run.__name__, parsed.follow) == ("_backup", True)
    assert parsed.keep == prune.keep


def test_units_of_backups_never_run_beside_each_other_and_share_their_settings() -> None:
    scheduled, following = (
        (UNIT.parent / f"{name}.service").read_text()
        for name in ("timerd-backup", "timerd-backup-follow")
    )
    own = set(following.splitlines()) - set(scheduled.splitlines())
    assert "Conflicts=timerd-backup.service timerd-backup.timer" in own
    assert {"Restart=always", "TimeoutStopSec=300"} <= own, "two calls of --timeout, and the store"
    lacks = set(scheduled.splitlines()) - set(following.splitlines())
    kept = {line.partition("=")[0] for line in lacks if not line.startswith("#")}
    assert kept == {"Description", "After", "Type", "ExecStart", "ExecStartPost", "TimeoutStartSec"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_units_are_ones_that_systemd_reads(tmp_path: Path) -> None:
    for unit in UNIT.parent.iterdir():
        text = re.sub(r"^(Exec\w+)=\S+", r"\1=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    [worker] = re.findall(
        r"```ini\n(.*?)```", (ROOT / "docs/deploy-workers.md").read_text(), re.DOTALL
    )
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", worker, flags=re.MULTILINE)
    (tmp_path / "timerd-worker@.service").write_text(text)
    copies = sorted(map(str, tmp_path.iterdir()))
    assert len(copies) == 7
    done = subprocess.run(
        ["systemd-analyze", "verify", *copies], capture_output=True, text=True, check=False
    )
    told = (done.stdout + done.stderr).splitlines()
    assert [line for line in told if "timerd" in line] == [], "of other units the test says nothing"
    assert done.returncode == 0, told


def test_workers_have_time_to_drain() -> None:
    page = (ROOT / "docs/deploy-workers.md").read_text()
    commands = [
        *re.findall(r"^ExecStart=\S+/timerctl (.+)$", page, re.MULTILINE),
        *re.findall(r"command: \[timerctl, (.+)\]$", page, re.MULTILINE),
    ]
    stops = re.findall(r"(?:TimeoutStopSec=|terminationGracePeriodSeconds: )(\d+)", page)
    for command, stop in zip(commands, stops, strict=True):
        args = make_parser().parse_args(re.sub(r'[,"]', "", command).split())
        assert args.app == "myapp:app"
        assert int(stop) > args.drain.total_seconds() + CANCEL_S + CLOSE_S


def extras_of(project: str) -> set[str]:
    """Return the names of the extras that a distribution's pyproject.toml declares."""
    tool = tomllib.loads((ROOT / project).read_text())["tool"]["setuptools"]
    return {*tool["dynamic"]["optional-dependencies"]}


def test_both_distributions_have_one_version_and_locked_requirements() -> None:
    assert project_version() == timerclient.__version__ == importlib.metadata.version(SERVER.name)
    whole, client, server = (
        tomllib.loads((ROOT / name).read_text())["project"]
        for name in ("pyproject.toml", CLIENT.project, SERVER.project)
    )
    assert whole["scripts"] == client["scripts"] | server["scripts"]
    assert whole["entry-points"] == server["entry-points"]
    assert {"testing", *requirements(SERVER)} - {"dependencies"} == extras_of(SERVER.project)
    assert {*requirements(CLIENT)} - {"dependencies"} == extras_of(CLIENT.project)
    lock = locked("deploy/requirements-server.lock")
    assert lock <= locked("requirements.lock")
    names = {each.partition("==")[0] for each in lock}
    needed = {re.split(r"[<>=\[]", each)[0] for each in requirements(SERVER)["dependencies"]}
    assert needed - names == {CLIENT.name}
    assert {re.split(r"[<>=]", each)[0] for each in requirements(CLIENT)["dependencies"]} <= names


@pytest.mark.parametrize("page", ["deploy/container/Dockerfile", "docs/install.md"])
def test_the_packages_of_a_server_are_built_with_a_locked_setuptools(page: str) -> None:
    lock = locked("deploy/requirements-build.lock")
    assert lock <= locked("requirements.lock")
    assert {each.partition("==")[0] for each in lock} == {"setuptools"}
    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"pip install ([^&\n]*) -r \S+/requirements-(\w+)\.lock", text)
    assert [name for _, name in commands] == ["build", "server"]
    assert all("--require-hashes" in options for options, _ in commands)
    assert "--no-build-isolation" in commands[1][0]


@pytest.mark.parametrize("target", ["image", "deploy-hosts", "sbom"])
def test_targets_that_use_the_distributions_make_them_anew_if_a_source_changed(
    tmp_path: Path, target: str
) -> None:
    shutil.copy2(ROOT / "Makefile", tmp_path)
    sources = subprocess.run(
        ["make", "--eval=print:; @echo '$(SOURCES)'", "print"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    named = [word for word in sources.stdout.split() if (ROOT / word).exists()]
    assert {*SERVER.paths, *CLIENT.paths, "pyproject.toml"} <= {*named}
    for each in named:
        file = tmp_path / each / "__init__.py" if (ROOT / each).is_dir() else tmp_path / each
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    program = tmp_path / "venv/bin/python"
    server = tmp_path / "build/venvs/server/bin/timerd"
    for executable in (program, server, tmp_path / "venv/sbom/bin/cyclonedx-py"):
        executable.parent.mkdir(parents=True)
        executable.write_text('#!/bin/sh\n[ "$3" != build ] || { mkdir dist; echo >>built; }\n')
        executable.chmod(0o755)
    (tmp_path / "venv/.made-from-lock").touch()

    def builds() -> int:
        words = ("make", target, "VENV=venv", "ENGINE=true")
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
        return len((tmp_path / "built").read_text())

    assert [builds(), builds()] == [1, 1]
    (tmp_path / "timer/__init__.py").write_text("2")
    assert [builds(), builds()] == [2, 2]
    subprocess.run(
        ["git", "rm", "--quiet", "--force", "chaos/__init__.py"], cwd=tmp_path, check=True
    )
    assert [builds(), builds()] == [3, 3]
    (tmp_path / "pyproject.toml").write_text("2")
    (tmp_path / "venv/.made-from-lock").touch()
    assert [builds(), builds()] == [4, 4]


def test_commands_that_the_page_runs_in_pods_ask_no_question() -> None:
    """`kubectl exec` gives a command no terminal, so a question would end it."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    commands = re.findall(r"^kubectl .* exec .* -- timerctl (.*)$", page, re.MULTILINE)
    parsed = [make_parser().parse_args(command.split()) for command in commands]
    assert len(parsed) == 4
    assert all(getattr(each, "yes", True) for each in parsed)
