"""The wrapper around pysyncobj: its settings, its fail-stops, and a cluster of one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from cluster.control import raft, raft_files, raft_journal
from cluster.control.raft import STALL_MS_MAX, Raft, checked_conf
from cluster.control.raft_codec import RaftMessage
from cluster.control.raft_files import RaftFiles, open_files
from cluster.settings.exit_codes import ExitCode
from tests.calls import calls_of
from tests.cluster.running import until
from timer.model.timer_errors import ConfigError

DEADLINE_S = 60.0


class Machine:
    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def apply(self, command: bytes) -> None:
        self.entered.set()
        self.gate.wait(DEADLINE_S)
        if command == b"raise":
            raise ValueError("a bug")
        self.applied.append(command)

    def dump(self) -> bytes:
        return b"\n".join(self.applied)

    def check(self, state: bytes) -> None:
        """Any will do."""

    def load(self, state: bytes) -> None:
        self.applied = state.split(b"\n")


class Wire:
    def send_raft(self, peer: str, data: bytes) -> None:
        raise AssertionError("a cluster of one sends nothing")


def files_in(path: Path) -> RaftFiles:
    return open_files(path, cluster_id="test", name="a", founding=True)


@contextmanager
def running(path: Path) -> Iterator[tuple[Raft, Machine, list[ExitCode]]]:
    failures: list[ExitCode] = []

    def fail(code: ExitCode, _why: str) -> NoReturn:
        failures.append(code)
        raise SystemExit(code)

    machine = Machine()
    node = Raft(
        name="a",
        peers=frozenset(),
        files=files_in(path),
        machine=machine,
        on_change=lambda: None,
        fail=fail,
    )
    node.start(Wire())
    try:
        until(lambda: node.view.leads or bool(failures))
        yield node, machine, failures
    finally:
        machine.gate.set()
        node.stop()


def no_failure(_certain: bool) -> None:
    raise AssertionError("certain failure of a command")


def test_commands_survive_a_restart_with_and_without_compaction(tmp_path: Path) -> None:
    commands = [b"one", b"two", b"three"]
    with running(tmp_path) as (node, machine, _):
        for command in commands:
            node.submit(command, no_failure)
        until(lambda: machine.applied == commands)
    for _ in range(2):
        with running(tmp_path) as (node, machine, _):
            until(lambda machine=machine: machine.applied == commands)  # type: ignore[misc]
            assert node._core is not None
            node._core.forceLogCompaction()
            until((tmp_path / "raft" / "snapshot").exists)


@pytest.mark.parametrize(("state_size", "snapshots"), [(10, range(6, 10)), (30_000, range(2, 4))])
def test_journal_of_large_commands_is_compacted_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_size: int, snapshots: range
) -> None:
    size, command, trailing = 100_000, bytes(10_000), 20
    monkeypatch.setattr(raft, "UNCOVERED_SIZE_MAX", size)
    monkeypatch.setattr(raft_journal, "TRAILING_RECORDS", trailing)
    written = calls_of(monkeypatch, raft_files, "write_snapshot")
    with running(tmp_path) as (node, machine, _):
        machine.dump = lambda: bytes(state_size)  # type: ignore[method-assign]
        for number in range(1, 70):
            node.submit(command, no_failure)
            until(lambda number=number: len(machine.applied) == number)  # type: ignore[misc]
        assert len(written) in snapshots, "a tenth of the commands; less if the state is larger"
        most = max(size, raft.UNCOVERED_PARTS_MAX * state_size) + (trailing + 5) * len(command)
        until(lambda: (tmp_path / "raft" / "journal").stat().st_size < most)


def test_damaged_snapshot_from_a_leader_replaces_nothing(tmp_path: Path) -> None:
    last, previous = (b"\0two", 9, 3), (b"\0one", 8, 3)
    data = tmp_path / "theirs"
    theirs = raft_files.RaftSnapshot(state=b"state", last=last, previous=previous)
    raft_files.write_snapshot(data, theirs)
    whole = data.read_bytes()
    ours = tmp_path / "raft" / "snapshot"
    with running(tmp_path) as (node, _, failures):
        assert node._core is not None
        node._core.forceLogCompaction()
        until(ours.exists)
    with running(tmp_path) as (node, _, failures):
        assert node._core is not None
        before, taking = ours.read_bytes(), node._core._SyncObj__serializer
        for at, taken in ((None, False), (len(whole) // 2, False), (None, True)):
            arrived = whole if taken else whole[:-1]
            if at is not None:
                arrived = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            assert not taking.setTransmissionData((arrived[:10], True, False))
            assert not taking.setTransmissionData((arrived[10:], False, False))
            assert taking.setTransmissionData((b"", False, True)) == taken
            assert ours.read_bytes() == (whole if taken else before)
        assert failures == []


# The stand-in for the end of the process ends the thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exception_in_apply_ends_the_process(tmp_path: Path) -> None:
    with running(tmp_path) as (node, _, failures):
        node.submit(b"raise", no_failure)
        until(lambda: bool(failures))
        assert failures[0] is ExitCode.APPLY_FAILED


def test_stalled_tick_thread_ends_the_process(tmp_path: Path) -> None:
    with running(tmp_path) as (node, machine, failures):
        machine.gate.clear()
        node.submit(b"slow", no_failure)
        assert machine.entered.wait(DEADLINE_S)  # the thread hangs in apply
        node.check_ticking(100)
        for _ in range(STALL_MS_MAX // 1_000 - 1):
            node.check_ticking(1_000_000)  # one long pause counts little
        assert failures == []
        with pytest.raises(SystemExit):
            node.check_ticking(1_000)
        assert failures == [ExitCode.TICK_STALLED]
        machine.gate.set()
        until(lambda: machine.applied == [b"slow"])


def test_misspelt_setting_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    conf = checked_conf(files)
    assert (conf.raftMinTimeout, conf.raftMaxTimeout, conf.leaderFallbackTimeout) == (0.4, 0.8, 1.0)
    assert (conf.useFork, conf.appendEntriesUseBatch) == (False, False)
    assert conf.journalFile == str(tmp_path / "raft" / "journal")
    monkeypatch.setitem(raft.SETTINGS, "raftMinTimeuot", 0.4)
    with pytest.raises(AssertionError, match="raftMinTimeuot"):
        checked_conf(files)


def test_another_version_of_pysyncobj_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(tmp_path)
    monkeypatch.setattr(raft, "VERSION", "0.3.18")
    with pytest.raises(ConfigError, match=r"0\.3\.17"):
        checked_conf(files)


class Silence:
    def send_raft(self, peer: str, data: bytes) -> None:
        """Nobody hears it."""


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[tuple[raft._Core, list[ExitCode]]]:
    """A node without peers in reach, whose journal ends with records of term 4."""
    files = files_in(tmp_path)
    for record in ((b"\1", 1, 0), (b"\1", 2, 4), (b"\0x", 3, 4), (b"\0y", 4, 4)):
        files.journal.add(*record)
    failures: list[ExitCode] = []

    def fail(code: ExitCode, _why: str) -> NoReturn:
        failures.append(code)
        raise SystemExit(code)

    core = raft._Core("a", frozenset({"b", "c"}), files, Machine(), fail, lambda: None, Silence())
    yield core, failures
    core.close()


def test_tick_thread_rests_until_something_is_due(
    follower: tuple[raft._Core, list[ExitCode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = follower
    monkeypatch.setattr(raft, "monotonic", lambda: 100.0)

    def rests_s(due_s: float) -> float:
        core._SyncObj__raftElectionDeadline = due_s
        return core.rest_s()

    assert rests_s(100.05) == pytest.approx(0.051)
    assert rests_s(99.0) == raft.REST_S_MIN, "it can't be elected by nobody, and must not spin"
    assert rests_s(110.0) == raft.REST_S_MAX
    core._isLeader = lambda: True
    core._SyncObj__newAppendEntriesTime = 100.05
    assert core.rest_s() == pytest.approx(0.051)


def test_what_is_applied_within_one_tick_is_a_sign_of_life(tmp_path: Path) -> None:
    with running(tmp_path) as (node, _, _):
        core = node._core
        assert core is not None
        counted = list[None]()
        core._count_tick, progressed = lambda: counted.append(None), core._count_tick
        for command in (b"x", b"y", b"z"):
            core._SyncObj__doApplyCommand(b"\0" + command)
        core._count_tick = progressed
        assert len(counted) >= 3
        before = node._ticks
        progressed()
        assert node._ticks > before


def test_idle_leader_ticks_as_often_as_it_appends(tmp_path: Path) -> None:
    with running(tmp_path) as (node, _, _):
        ticks, began_s = node._ticks, time.monotonic()
        until(lambda: time.monotonic() > began_s + 2)
        each_s = (time.monotonic() - began_s) / (node._ticks - ticks)
    assert each_s > 0.07, "it appends every 0.1 s; a machine that is slow only ticks less often"


def test_resting_tick_thread_is_woken_by_a_command_and_by_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as (node, machine, _):
        monkeypatch.setattr(raft, "REST_S_MAX", 2 * DEADLINE_S)
        monkeypatch.setattr(raft._Core, "_due_in_s", lambda _: 2 * DEADLINE_S)
        for command in (b"one", b"two"):
            node.submit(command, no_failure)
            until(lambda command=command: command in machine.applied)  # type: ignore[misc]
        ticks = node._ticks
        node.hand_over("nobody")
        until(lambda: node._ticks > ticks)
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < DEADLINE_S


def append(term: int, previous: tuple[int, int], *entries: tuple[bytes, int, int]) -> RaftMessage:
    return {
        "type": "append_entries",
        "term": term,
        "commit_index": 1,
        "prevLogIdx": previous[0],
        "prevLogTerm": previous[1],
        "entries": entries,
    }


X, Y, Z = (b"\0x", 3, 4), (b"\0y", 4, 4), (b"\0z", 5, 4)


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        (append(4, (2, 4), X, Y), append(4, (4, 4))),
        (append(4, (2, 4)), append(4, (4, 4))),
        (append(4, (2, 4), X, Y, Z), append(4, (4, 4), Z)),
        (append(4, (4, 4), Z), append(4, (4, 4), Z)),
        (append(5, (2, 4), (b"\1", 3, 5)), append(5, (2, 4), (b"\1", 3, 5))),
    ],
    ids=["all held", "old heartbeat", "some held", "new", "of a later leader"],
)
def test_records_held_from_the_same_leader_are_not_written_again(
    follower: tuple[raft._Core, list[ExitCode]], message: RaftMessage, seen: RaftMessage
) -> None:
    core, _ = follower
    assert core.message_for_raft(message) == seen


def test_node_that_forgot_stands_for_nothing(
    follower: tuple[raft._Core, list[ExitCode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = follower
    said: list[RaftMessage] = [
        {"type": "request_vote", "term": 5, "last_log_index": 4, "last_log_term": 4},
        {"type": "response_vote", "term": 5},
        {"type": "next_node_idx", "next_node_idx": 5, "reset": False, "success": True},
        {"type": "next_node_idx", "next_node_idx": 5, "reset": True, "success": False},
        {"type": "apply_command", "command": b"\0"},
    ]
    assert [core.may_send(message) for message in said] == [True] * 5
    monkeypatch.setattr(core._journal, "_may_vote", False)
    assert [core.may_send(message) for message in said] == [False, False, False, True, True]
    assert core.message_for_raft({"type": "timeout_now", "term": 5}) is None


def test_node_that_forgot_proposes_its_barrier_to_each_new_leader_at_once(
    follower: tuple[raft._Core, list[ExitCode]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _ = follower
    monkeypatch.setattr(core._journal, "_may_vote", False)
    proposed: list[int] = []
    monkeypatch.setattr(core, "submit", lambda *_: proposed.append(core.raftCurrentTerm))

    def look() -> list[int]:
        core._onTick()
        return proposed

    b, c = sorted(core.otherNodes, key=lambda node: str(node.id))
    core._SyncObj__connectedNodes.update((b, c))
    assert look() == []
    core._SyncObj__onMessageReceived(b, append(5, (4, 4)))
    assert look() == [5]
    assert look() == [5], "it may still be committed"
    core._SyncObj__onMessageReceived(c, append(6, (4, 4)))
    assert look() == [5, 6]
    core._SyncObj__onNodeDisconnected(c)
    assert look() == [5, 6]
    core._SyncObj__onNodeConnected(c)
    assert look() == [5, 6, 6], "the last one may be lost with the link"


def test_command_that_was_applied_is_never_replaced(
    follower: tuple[raft._Core, list[ExitCode]],
) -> None:
    core, failures = follower
    core._SyncObj__raftLastApplied = 3
    core.message_for_raft(append(5, (3, 4), (b"\1", 4, 5)))
    with pytest.raises(SystemExit):
        core.message_for_raft(append(5, (2, 4), (b"\1", 3, 5)))
    assert failures == [ExitCode.RAFT_DIVERGED]
