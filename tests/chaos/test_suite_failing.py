"""Failing disks, damaged files of voters, and changes of members, at real nodes.

As tests/chaos/test_suite_nemeses.py, on a stage of its own, and with a client that writes.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from chaos.history.history import RunFolder
from chaos.suite.nemeses import file_damage
from chaos.suite.nemeses.disk_failures import (
    bad_sector,
    disk_errors,
    hanging_disk,
    slow_disk,
    torn_write,
)
from chaos.suite.nemeses.file_damage import (
    CUT,
    FETCHED,
    FLIPPED,
    LOG,
    REMOVED,
    STATE,
    hurt_running,
)
from chaos.suite.nemeses.links import cut_clients, near_lease
from chaos.suite.nemeses.nemesis import ALL
from chaos.suite.nemeses.voter_damage import (
    RAFT,
    forget,
    hurt_raft,
    remove_cut_off,
    replace_cut_off,
)
from chaos.suite.stage.disk_faults import FOLDER, Calls, DiskFaults, Kind
from chaos.suite.stage.stage import MANY_SETTINGS, Stage, capabilities
from cluster.settings.exit_codes import ExitCode
from tests.chaos.blows import Blow, Undo, needs, recorded
from tests.cluster.running import Forking, kept_runs, until
from timer.files.data_directory import IDENTITY_NAME, PROMISE_NAME
from timerclient import TimerClient
from timerclient.values.errors import TimerError

WAIT_S = 120.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One stage for all: each undo leaves it whole. A client writes all the time."""
    folder = tmp_path_factory.mktemp("stage")
    settings = tuple(line for line in MANY_SETTINGS if "flush" not in line)
    settings = (*settings, "storage.log_entries_flush = 64")
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chaos.suite.stage.stage.LocalCluster", Forking)
        with Stage(RunFolder(folder), missing=capabilities(folder), settings=settings) as stage:

            def write() -> None:
                with TimerClient(stage.cluster.endpoints) as client:
                    while not stop.wait(0.02):
                        try:
                            client.schedule("t", b"payload", delay=timedelta(hours=1))
                        except TimerError:
                            stop.wait(0.1)

            writer = threading.Thread(target=write)
            writer.start()
            try:
                stage.wait_until_sure()  # before that, two founders elect no leader
                yield stage
            finally:
                stop.set()
                writer.join()
    assert stage.failures == []


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves it whole for the next one, too."""
    yield
    if "stage" in request.fixturenames:
        stage: Stage = request.getfixturevalue("stage")
        for fault in (stage.run.root / FOLDER).glob("*.json"):
            fault.unlink()
        for name in stage.away - stage.lost:
            stage.restart(name)
        stage.wait_until_sure()


@contextlib.contextmanager
def undone(undo: Undo) -> Iterator[None]:
    """Undo a strike, also after a failure: the next test needs the links."""
    try:
        yield
    finally:
        undo()


def schedules(stage: Stage) -> float:
    """Return how long a timer took to be scheduled."""
    began_s = time.monotonic()
    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        client.schedule("t", b"payload", delay=timedelta(hours=1))
    return time.monotonic() - began_s


def is_whole(stage: Stage) -> None:
    schedules(stage)
    assert not stage.away
    assert all(map(stage.cluster.is_running, stage.names))
    stage.wait_until_sure()
    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        assert sum(each.voter for each in client.members().members) == len(stage.names)


# ---- disks


def test_slow_disk_is_met_and_costs_no_answer(stage: Stage, chance: random.Random) -> None:
    undo = Blow(slow_disk, "leader", delay_ms=200).strike(stage, chance)
    schedules(stage)
    # The followers are a majority: the answer may come before the leader's own sync begins.
    until(lambda: any(stage.disk_faults.met(name) for name in stage.names))
    undo()
    assert recorded(stage, "disk-well")["met"]["call"] in {"fsync", "fdatasync"}
    is_whole(stage)


@pytest.mark.parametrize("calls", [Calls.SYNCS, Calls.ALL])
def test_cluster_serves_while_the_leaders_disk_hangs(
    stage: Stage, chance: random.Random, calls: Calls
) -> None:
    undo = Blow(hanging_disk, "leader", calls=calls).strike(stage, chance)
    schedules(stage)
    undo()
    is_whole(stage)


@pytest.mark.parametrize(
    "blow",
    [Blow(disk_errors, "leader", Calls.SYNCS), Blow(disk_errors, "follower", Calls.WRITES)],
)
def test_node_whose_disk_fails_ends_and_comes_back(
    stage: Stage, chance: random.Random, blow: Blow
) -> None:
    undo = blow.strike(stage, chance)
    assert recorded(stage, "disk-failed")["status"] == ExitCode.DISK
    schedules(stage)
    undo()
    is_whole(stage)


def test_file_that_cannot_be_read_is_fetched_anew(stage: Stage, chance: random.Random) -> None:
    log = stage.run.root / "logs"
    Blow(bad_sector, "follower", part="log").strike(stage, chance)()
    name = recorded(stage, "kill")["node"]
    assert "failed: EIO" in (log / f"{name}.log").read_text()
    assert stage.lost == set()
    is_whole(stage)


def test_torn_node_serves_beside_an_absent_one(stage: Stage, chance: random.Random) -> None:
    undo = Blow(torn_write, "leader").strike(stage, chance)
    torn = recorded(stage, "torn")
    assert 0 < torn["torn"]["written"] < torn["torn"]["wanted"]
    assert stage.away == {torn["absent"]}
    schedules(stage)
    undo()
    is_whole(stage)


@pytest.mark.parametrize(
    ("blow", "name"),
    [
        (Blow(hurt_running, part=LOG, how=CUT), ".log"),
        pytest.param(Blow(hurt_running, part=LOG, how=REMOVED), ".log", marks=pytest.mark.long),
        pytest.param(Blow(hurt_running, part=STATE, how=FLIPPED), ".arrow", marks=pytest.mark.long),
    ],
)
def test_leader_whose_files_are_damaged_while_it_leads_heals(
    stage: Stage,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    blow: Blow,
    name: str,
) -> None:
    monkeypatch.setattr(file_damage, "RUNS_ON_S", 0.5)
    monkeypatch.setitem(file_damage.VICTIM, STATE, lambda data, _: kept_runs(data)[0])
    until(lambda: all(kept_runs(stage.data(each)) for each in stage.names))
    before = {each: stage.output(each).read_text().count(FETCHED) for each in stage.names}
    blow.strike(stage, chance)()
    hurt = recorded(stage, "hurt-running")
    assert (hurt["role"], Path(hurt["file"]).suffix) == ("leader", name)
    assert stage.output(hurt["node"]).read_text().count(FETCHED) > before[hurt["node"]]
    assert stage.lost == set()
    is_whole(stage)


# ---- links


def test_cluster_recovers_from_round_trips_near_the_lease(
    stage: Stage, chance: random.Random
) -> None:
    needs(stage, near_lease)
    undo = Blow(near_lease, share=0.75).strike(stage, chance)
    assert schedules(stage) >= 0.75 * stage.lease_ms / 1000  # a commit takes a round trip
    undo()
    assert recorded(stage, "recovered")["leader"] in stage.names
    is_whole(stage)


def test_leader_that_clients_cannot_reach_is_seen_by_the_nodes(
    stage: Stage, chance: random.Random
) -> None:
    needs(stage, cut_clients)
    leader = stage.leader()
    undo = Blow(cut_clients, "leader").strike(stage, chance)
    until(lambda: stage.cluster.state(leader) is None or stage.leader() != leader)
    undo()
    until(lambda: stage.cluster.state(leader))
    is_whole(stage)


# ---- who votes


@pytest.mark.parametrize(
    "blow",
    [
        Blow(forget, "leader", PROMISE_NAME, FLIPPED),
        pytest.param(Blow(forget, "follower", PROMISE_NAME, REMOVED), marks=pytest.mark.long),
        pytest.param(Blow(forget, "follower", IDENTITY_NAME, CUT), marks=pytest.mark.long),
        pytest.param(
            Blow(forget, "leader", PROMISE_NAME, CUT, runs_on_s=0.5), marks=pytest.mark.long
        ),
    ],
)
def test_node_that_forgot_is_replaced(stage: Stage, chance: random.Random, blow: Blow) -> None:
    undo = blow.strike(stage, chance)
    name = recorded(stage, "replaceable")["node"]
    identity = stage.data(name) / IDENTITY_NAME
    before = identity.read_bytes()
    schedules(stage)
    undo()
    assert identity.read_bytes() != before
    is_whole(stage)


def made_anew(stage: Stage, name: str) -> int:
    """Return how often a node has made its Raft files anew."""
    return stage.output(name).read_text().count("created again")


@pytest.mark.parametrize(
    "blow",
    [
        Blow(hurt_raft, "leader", RAFT, REMOVED),
        pytest.param(Blow(hurt_raft, "follower", "raft/journal", REMOVED), marks=pytest.mark.long),
        pytest.param(Blow(hurt_raft, "follower", "raft/meta", FLIPPED), marks=pytest.mark.long),
        pytest.param(Blow(hurt_raft, "follower", "raft/snapshot", FLIPPED), marks=pytest.mark.long),
        pytest.param(Blow(hurt_raft, ALL, RAFT, REMOVED), marks=pytest.mark.long),
    ],
)
def test_rafts_files_are_made_anew(stage: Stage, chance: random.Random, blow: Blow) -> None:
    files = [stage.data(name) / blow.args["file"] for name in stage.names]
    until(lambda: all(path.exists() for path in files))  # a snapshot takes some commands
    before = {name: made_anew(stage, name) for name in stage.names}
    blow.strike(stage, chance)()
    voted = recorded(stage, "raft-votes")
    assert voted["file"] == blow.args["file"]
    hurt = stage.names if blow.args["who"] == ALL else [voted["node"]]
    assert all(made_anew(stage, name) > before[name] for name in hurt)
    is_whole(stage)


@pytest.mark.long  # two changes of members
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_voter_that_is_cut_off_is_removed_and_added_again(
    stage: Stage, chance: random.Random, who: str
) -> None:
    needs(stage, remove_cut_off)
    with undone(Blow(remove_cut_off, who).strike(stage, chance)):
        name = recorded(stage, "removed")["node"]
        with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
            members = client.members().members
        assert name not in {each.name for each in members if each.voter}
        schedules(stage)
    is_whole(stage)


@pytest.mark.long  # `make chaos-short` asks for such a replacement, too
def test_node_is_not_replaced_before_it_hears_the_leader(
    stage: Stage, chance: random.Random
) -> None:
    needs(stage, replace_cut_off)
    with undone(Blow(replace_cut_off).strike(stage, chance)):
        assert recorded(stage, "replace-asked")["answer"] != "made"
    is_whole(stage)


# ---- the calls themselves, without a node

CALLS = """
import os, sys
from pathlib import Path
from chaos.suite.stage.disk_faults import FaultyCalls
FaultyCalls(Path(sys.argv[1])).install()
fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT | os.O_APPEND)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@pytest.fixture
def calling(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process whose calls can be made to fail; its file is `data/00.log`."""
    (tmp_path / "data").mkdir()
    words = [str(tmp_path / "disk-faults/n1.json"), str(tmp_path / "data/00.log")]
    with subprocess.Popen(
        [sys.executable, "-c", CALLS, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def ask(process: "subprocess.Popen[str]", call: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{call}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_calls_fail_as_the_fault_says_and_no_other_does(
    tmp_path: Path, calling: "subprocess.Popen[str]"
) -> None:
    faults, data = DiskFaults(tmp_path), tmp_path / "data"
    assert ask(calling, "os.writev(fd, [b'ab', b'cd'])") == "4"
    with faults.on("n1", data, Kind.ERROR, calls=Calls.SYNCS):
        assert ask(calling, "os.write(fd, b'ef')") == "2"
        assert faults.met("n1") is None
        assert ask(calling, "os.fdatasync(fd)") == os.strerror(5)
        assert (faults.met("n1") or {})["call"] == "fdatasync"
    assert ask(calling, "os.fdatasync(fd)") == "None"
    with faults.on(
        "n1", data, Kind.ERROR, calls=Calls.READS, inode=(data / "00.log").stat().st_ino + 1
    ):
        assert ask(calling, "os.pread(fd, 2, 0)") == "b'ab'"
    with faults.on(
        "n1", data, Kind.ERROR, calls=Calls.READS, inode=(data / "00.log").stat().st_ino
    ):
        assert ask(calling, "os.pread(fd, 2, 0)") == os.strerror(5)
    with faults.on("n1", tmp_path / "other", Kind.ERROR, calls=Calls.ALL):
        assert ask(calling, "os.fsync(fd)") == "None"


def test_hanging_call_returns_when_the_disk_is_well(
    tmp_path: Path, calling: "subprocess.Popen[str]"
) -> None:
    faults = DiskFaults(tmp_path)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(ask(calling, "os.write(fd, b'ab')")))
    with faults.on("n1", tmp_path / "data", Kind.HANG, calls=Calls.ALL):
        asking.start()
        until(lambda: faults.met("n1"))
        assert answers == []
        assert (tmp_path / "data/00.log").read_bytes() == b""
    asking.join()
    assert answers == ["2"]


def test_torn_write_leaves_its_half_and_kills_the_process_once(
    tmp_path: Path, calling: "subprocess.Popen[str]"
) -> None:
    faults = DiskFaults(tmp_path)
    with faults.on("n1", tmp_path / "data", Kind.TEAR):
        assert ask(calling, "os.writev(fd, [b'abc', b'def'])") == ""
        assert calling.wait(WAIT_S) == -signal.SIGKILL
        assert (tmp_path / "data/00.log").read_bytes() == b"abc"
        assert not (tmp_path / "disk-faults/n1.json").exists()
    met = faults.met("n1") or {}
    assert (met["written"], met["wanted"]) == (3, 6)
