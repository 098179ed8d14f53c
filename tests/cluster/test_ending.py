"""A request to end `timerd` takes effect, even if the process is ending for another reason."""

import asyncio
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.node import process
from cluster.node.python_garbage import Sweeper
from cluster.settings.config import load_config
from cluster.settings.exit_codes import ExitCode
from tests.cluster.running import WAIT_S, full_pipe
from tests.timer.log_files import frames
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.model.timer_errors import CorruptFileError, DiskFailedError, UnreadableFileError

Act = Callable[["FakeNode"], Awaitable[None]]
Run = Callable[[Act, Act], int]


class FakeNode:
    """A node with a start and a stop that the test sets."""

    at_start: Act
    at_stop: Act
    flushing = False

    def __init__(
        self,
        _: object,
        fatal: Callable[[BaseException], None],
        restart: Callable[[], None],
        *,
        raft_lost: bool,
    ) -> None:
        assert not raft_lost
        self.fatal, self.restart = fatal, restart

    async def start(self) -> None:
        await type(self).at_start(self)

    async def stop(self) -> None:
        await type(self).at_stop(self)

    def reload(self) -> None:
        """Do nothing: no file is read again."""


async def nothing(_: FakeNode) -> None:
    pass


async def sigterm(_: FakeNode) -> None:
    """Send it; return when the loop has heard it: signals are heard in their order."""
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, heard.set)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    await heard.wait()


async def restart(node: FakeNode) -> None:
    node.restart()


async def damage(node: FakeNode) -> None:
    node.fatal(CorruptFileError(Path("run"), 7, "planted"))


async def fill(node: FakeNode) -> None:
    node.fatal(DiskFailedError("planted", errno=errno.ENOSPC))


class Replaced(Exception):
    """The process would be a new one now."""


class Exited(Exception):
    """The process would be gone now."""


class Waiting(logging.Handler):
    """A log whose records wait until it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def flush(self) -> None:
        self.records.clear()


SENDER = """
import os, signal, sys
from cluster.node.timerd import main

class Sender:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

sys.meta_path.insert(0, Sender())
sys.exit(main([]))
"""
"""A start that sends itself a signal while it imports a module."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    log = Waiting()

    def replaced(*_: object) -> None:
        assert not log.records
        raise Replaced

    def exited(status: int) -> None:
        assert not log.records
        raise Exited(status)

    def run(at_start: Act, at_stop: Act) -> int:
        monkeypatch.setattr(FakeNode, "at_start", staticmethod(at_start), raising=False)
        monkeypatch.setattr(FakeNode, "at_stop", staticmethod(at_stop), raising=False)
        return process.run(load_config(config, {}, {}))

    monkeypatch.setattr(process, "Node", FakeNode)
    monkeypatch.setattr(Sweeper, "start", lambda _: None)  # it is about this process
    monkeypatch.setattr(process, "setup_logs", lambda **_: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [log])
    monkeypatch.setattr(os, "execv", replaced)
    monkeypatch.setattr(os, "_exit", exited)
    config = tmp_path / "n1.toml"
    (tmp_path / "data").mkdir()
    config.write_text(
        'name = "n1"\ncluster_id = "c"\ngrpc = "127.0.0.1:1"\nhttp = "127.0.0.1:2"\n'
        f'data = "{tmp_path / "data"}"\n[peers]\nn1 = "127.0.0.1:1"\nn2 = "127.0.0.1:3"\n'
    )
    return run


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("module", ["cluster.settings.config", "cluster.node.process"])
def test_signal_during_the_imports_ends_the_start(tmp_path: Path, module: str, number: str) -> None:
    """With pid 1 a signal has an effect only if the process handles it."""
    config = tmp_path / "n1.toml"
    config.write_text(
        f'name = "n1"\ncluster_id = "c"\ndata = "{tmp_path}"\n[peers]\nn1 = "127.0.0.1:1"\n'
    )
    command = [sys.executable, "-c", SENDER, number, module]
    env = os.environ | {"TIMERD_CONFIG": str(config)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_error_of_the_start_has_its_exit_code_if_standard_error_is_full() -> None:
    command = [sys.executable, "-m", "cluster.node.timerd", "--config", "/absent"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # a buffer blocks those who share it
    with full_pipe() as (_, full):
        done = subprocess.run(command, env=env, stderr=full, timeout=WAIT_S, check=False)
    assert done.returncode == ExitCode.CONFIG


def test_node_with_a_snapshot_to_install_starts_again(run: Run) -> None:
    with pytest.raises(Replaced):
        run(restart, nothing)


def test_snapshot_that_arrives_while_the_node_stops_waits_for_the_next_start(run: Run) -> None:
    assert run(sigterm, restart) == 0


def test_signal_while_a_restart_drains_ends_the_node(run: Run) -> None:
    assert run(restart, sigterm) == 0


def test_full_disk_is_waited_for_unless_the_node_stops(run: Run) -> None:
    with pytest.raises(Replaced):
        run(fill, nothing)
    with pytest.raises(Exited, match="67"):
        run(sigterm, fill)


def test_damage_is_healed_by_a_new_process(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Replaced):
        run(damage, nothing)
    assert "planted" in (tmp_path / "data" / "damaged").read_text()


def test_node_whose_directory_is_gone_ends(run: Run, tmp_path: Path) -> None:
    async def remove(node: FakeNode) -> None:
        (tmp_path / "data").rmdir()
        node.fatal(FileNotFoundError(errno.ENOENT, "planted", str(tmp_path / "data")))

    with pytest.raises(Exited, match="66"):
        run(remove, nothing)


def test_append_after_the_removal_of_the_log_is_healed(run: Run, tmp_path: Path) -> None:
    """The disk works: the append creates the next segment, and its directory is gone."""

    async def append(node: FakeNode) -> None:
        log = Log.open(RealDisk(), tmp_path / "data" / "log", segment_size=60)
        log.append(frames(1, 1))
        shutil.rmtree(tmp_path / "data" / "log")
        with pytest.raises(DiskFailedError, match="append failed: ENOENT") as failed:
            log.append(frames(2, 2))
        node.fatal(failed.value)

    with pytest.raises(Replaced):
        run(append, nothing)
    assert "the file is missing" in (tmp_path / "data" / "damaged").read_text()


def test_damage_met_while_the_node_stops_is_noted_and_ends_it(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Exited, match="66"):
        run(sigterm, damage)
    assert "planted" in (tmp_path / "data" / "damaged").read_text()


def test_what_could_not_be_read_for_a_moment_is_not_noted_as_damage(
    run: Run, tmp_path: Path
) -> None:
    def unreadable(path: Path) -> Act:
        async def act(node: FakeNode) -> None:
            node.fatal(UnreadableFileError(path, 7, "planted"))

        return act

    (tmp_path / "run").write_bytes(b"it can be read again")
    with pytest.raises(Replaced):
        run(unreadable(tmp_path / "run"), nothing)
    assert not (tmp_path / "data" / "damaged").exists()
    for path in (Path("/proc/self/mem"), tmp_path / "gone"):
        with pytest.raises(Replaced):
            run(unreadable(path), nothing)
        noted = tmp_path / "data" / "damaged"
        assert "planted" in noted.read_text()
        noted.unlink()
