"""The live audit with its files: planted messages, restarts, and a real cluster."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.history.archive import follow
from chaos.history.history import History, RunFolder, now_ms
from chaos.live.follow import LogDropped
from chaos.live.judge import WITNESS_GROUP
from chaos.live.live import AlertFiles, LiveAudit, LiveSettings, Watch
from chaos.live.recorded_messages import DRAINED, LIVE, RecordedMessages
from tests.chaos import told, world
from tests.chaos.world import id_of
from tests.cluster.running import Running, until
from timer.entries.entry_frame import EntryKind
from timerclient import TimerClient

NOW = 1_700_000_000_000
SETTINGS = LiveSettings(overdue_ms=5000)
WAIT_S = 180.0


def given(
    history: History, seq: int, due_ms: int, offset: int, fired_ms: int | None = None,
    topic: str = "t",
) -> None:  # fmt: skip
    fired_at_ms = due_ms if fired_ms is None else fired_ms
    history.deliver(
        topic, WITNESS_GROUP, received_ms=fired_at_ms, ids=[id_of(due_ms, seq)], offsets=[offset],
        fired_at_ms=[fired_at_ms], handed_out_ms=fired_at_ms,
    )  # fmt: skip


class Desk:
    """A run's folder, and the entries and messages that a test puts there."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root / "run")
        self.alerts = root / "alerts"
        self.history = History(RunFolder(self.run.root / LIVE), "witness-1")
        self.said: list[str] = []
        self.log = world.Log()
        self._written = 0
        nodes = [{"name": "n1", "data": "n1"}]
        self.run.cluster_file.write_text(json.dumps({"nodes": nodes}))

    def start(self) -> None:
        self.audit = LiveAudit(self.run, AlertFiles(self.alerts, self.said.append), SETTINGS)

    def done(self) -> list[tuple[str, int]]:
        """Return the alerts, once all is judged."""
        self.audit.step()
        return raised(self.alerts)

    def write(self) -> None:
        """Write the log's new entries."""
        new, log = self.log.frames[self._written :], self.run.root / "n1/log"
        if self._written:
            with (log / f"{1:016x}.log").open("ab") as file:
                file.write(b"".join(new))
        else:
            world.write_log(log, new)
        self._written = len(self.log.frames)

    def beat(self, at_ms: int, *drained: str) -> None:
        """Let the witness touch its file. It has acked all messages of the `drained` topics."""
        path = self.run.root / LIVE / DRAINED / "witness-1.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict.fromkeys(drained, at_ms)))
        path = self.run.root / LIVE / "histories/witness-1.jsonl"
        os.utime(path, ns=(at_ms * 1_000_000,) * 2)


def raised(alerts: Path) -> list[tuple[str, int]]:
    files = sorted(alerts.glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted((row["kind"], row["seq"]) for row in rows if row["kind"] != "stalled")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    with desk.history:
        yield desk


def plant(desk: Desk) -> None:
    """Write a log with a topic, and a witness that did not receive the message of timer 1."""
    desk.log.epoch(1, at_ms=NOW)
    topic = desk.log.topic("t")
    desk.log.group(topic, WITNESS_GROUP)
    desk.log.schedule(topic, [(NOW + 1000, 1)])
    desk.log.fire(NOW + 1000)
    desk.log.idle(NOW + 20_000)
    desk.write()
    desk.history.open("t", WITNESS_GROUP, start_ms=NOW)
    desk.beat(NOW + 20_000, "t")


def test_planted_messages_are_raised_once_over_restarts(desk: Desk) -> None:
    log = desk.log
    log.epoch(1, at_ms=NOW)
    topic = log.topic("t")
    log.group(topic, WITNESS_GROUP)
    log.schedule(topic, [(NOW + 100 * seq, seq) for seq in range(1, 50)])
    desk.write()
    desk.history.open("t", WITNESS_GROUP, start_ms=NOW)
    desk.start()
    assert desk.done() == []
    desk.start()  # killed, and started again
    for seq in range(1, 50):
        log.fire(NOW + 100 * seq)
    for seq in set(range(1, 50)) - {7, 30}:
        given(desk.history, seq, NOW + 100 * seq, seq - 1)
    given(desk.history, 11, NOW + 1100, 99)
    given(desk.history, 30, NOW + 3000, 29, NOW + 2999)
    desk.write()
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=NOW + 5000)
    desk.write()
    desk.beat(NOW + 5000, "t")
    expected = [("diverged", 30), ("duplicate_fire", 11), ("early", 30)]
    assert desk.done() == expected
    log.idle(NOW + 20_000)
    desk.write()
    desk.beat(NOW + 20_000, "t")
    expected = [*expected, ("lost", 7)]
    assert desk.done() == expected
    desk.start()
    assert desk.done() == expected
    given(desk.history, 7, NOW + 700, 6)
    assert desk.done() == sorted([*expected, ("delivered_late", 7)])
    rows = [row for row in map(json.loads, desk.said) if row["kind"] != "stalled"]
    assert len(rows) == 5
    lost = next(row for row in rows if row["kind"] == "lost")
    assert (lost["topic"], lost["due_ms"]) == ("t", NOW + 700)


def test_alert_of_another_timer_with_the_same_sequence_number_is_not_an_old_one(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    rows = [
        {"kind": "lost", "seq": 7, "topic": "t", "due_ms": due} for due in (1_000, 1_000, 2_000)
    ]
    for row in rows:  # by a process each
        AlertFiles(tmp_path, said.append).write([row])
    assert [json.loads(line)["due_ms"] for line in said] == [1_000, 2_000]


def test_command_raises_alerts_until_it_is_stopped(desk: Desk) -> None:
    plant(desk)
    words = ["timerclient.cli.timerctl", "audit", str(desk.run.root), "--live"]
    with subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        said = json.loads(command.stdout.readline())
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0
    assert (said["kind"], said["seq"], said["clock_ms"]) == ("lost", 1, NOW + 20_000)
    assert raised(desk.run.root / LIVE / "alerts") == [("lost", 1)]


def test_delivery_is_read_when_the_log_has_passed_it(desk: Desk) -> None:
    messages = RecordedMessages(desk.run.root / LIVE)
    desk.history.open("t", WITNESS_GROUP, start_ms=NOW)
    desk.history.open("idle", WITNESS_GROUP, start_ms=NOW)
    given(desk.history, 1, NOW + 1000, 0)
    given(desk.history, 2, NOW + 8000, 1)
    desk.beat(NOW + 9000, "idle")
    assert messages.read(NOW + 1000) == ({}, {"t": 0, "idle": NOW + 1000})
    found, reaches = messages.read(NOW + 1001)
    assert found["t"].tolist() == [(1, NOW + 1000, 0, NOW + 1000, NOW + 1000)]
    # All that was written before the second message is read.
    assert reaches == {"t": NOW + 1000, "idle": NOW + 8000}
    assert [*messages.read(NOW + 8001)[0]] == ["t"]
    assert messages.read(NOW + 9000) == ({}, {"t": NOW + 8000, "idle": NOW + 9000})


def test_witness_without_messages_has_all_after_a_time_that_a_suspension_begins_anew(
    desk: Desk,
) -> None:
    messages = RecordedMessages(desk.run.root / LIVE)
    desk.history.open("t", WITNESS_GROUP, start_ms=NOW)

    def reaches(begin_ms: int) -> list[int]:
        """Return the reach after each of 31 beats, a second apart."""
        found = []
        for at_ms in range(begin_ms, begin_ms + 31_000, 1000):
            desk.beat(at_ms)
            found.append(messages.read(at_ms)[1]["t"])
        return found

    assert reaches(NOW) == [*[0] * 30, NOW + 30_000]
    assert reaches(NOW + 55_000) == [*[0] * 30, NOW + 85_000]


def test_half_written_line_waits(desk: Desk) -> None:
    messages = RecordedMessages(desk.run.root / LIVE)
    given(desk.history, 1, NOW, 0)
    path = desk.run.root / LIVE / "histories/witness-1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert messages.read(NOW + 1)[0] == {}
    path.write_bytes(whole)
    assert len(messages.read(NOW + 1)[0]["t"]) == 1


def test_log_without_its_beginning_needs_its_archive(desk: Desk) -> None:
    plant(desk)
    log, other = desk.run.root / "n1/log", world.Log(desk.log)
    other.idle(NOW + 44_000)  # eight entries
    world.write_log(log, other.frames, frames_per_segment=4)
    follow(log, desk.run.archive_of("n1"))
    (log / f"{1:016x}.log").unlink()
    desk.start()
    assert desk.done() == [("lost", 1)]
    (desk.run.root / "nodes").rename(desk.run.root / "elsewhere")
    desk.start()
    with pytest.raises(LogDropped, match="begins with entry 5, not 1"):
        desk.done()


def test_log_of_one_node_needs_the_address_of_that_node(desk: Desk) -> None:
    plant(desk)
    sink = AlertFiles(desk.alerts, desk.said.append)
    with pytest.raises(ValueError, match="has the logs of n1: it must have those of all voters"):
        LiveAudit(desk.run, sink, SETTINGS, status="127.0.0.1:1")
    desk.run.cluster_file.unlink()
    with pytest.raises(ValueError, match="or that of one node, with --status HOST:PORT"):
        LiveAudit(desk.run, sink, SETTINGS)
    desk.audit = LiveAudit(desk.run, sink, SETTINGS, status="127.0.0.1:1")
    assert desk.done() == []  # the node does not answer: no entry counts as committed


def test_step_of_this_machines_clock_is_no_silence(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(desk)
    desk.start()
    desk.audit.step()
    hour_ahead_ms = now_ms() + 3_600_000
    monkeypatch.setattr("chaos.live.live.now_ms", lambda: hour_ahead_ms)
    desk.audit.step()
    assert not any("stands still" in line for line in desk.said)


def test_silence_is_reported_once_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.live.live.now_ms", lambda: NOW + 15_001)
    watch = Watch(stalled_ms=10_000)
    assert watch.observe(NOW, {"the log's clock": 0}) == []
    assert watch.observe(NOW + 10_000, {"the log's clock": 0}) == []
    stopped = [f"the log's clock stands still since {NOW + 5_000}"]  # of the wall clock
    assert watch.observe(NOW + 10_001, {"the log's clock": 0}) == stopped
    assert watch.observe(NOW + 10_002, {"the log's clock": 0}) == []
    readings = {"the log's clock": NOW, "the witness": NOW}
    assert watch.observe(NOW + 20_000, readings) == []
    said = watch.observe(NOW + 60_000, readings)
    assert [text.split(" stands")[0] for text in said] == [*readings]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "running").cleaned() as running:
        yield running


@pytest.mark.long  # a cluster and two programs
@pytest.mark.slow
def test_of_a_running_cluster_only_what_is_planted_is_raised(
    tmp_path: Path, running: Running
) -> None:
    run, alerts = running.directory, tmp_path / "alerts"
    with running.client() as client:
        client.create_topic("t")
        where = ["--cluster", ",".join(running.endpoints), "--topic", "t", "--into", str(run)]
        programs = [
            [sys.executable, "-m", "timerclient.cli.timerctl", "archive", str(run)],
            [sys.executable, "-m", "chaos.live.witness", *where],
        ]
        beside = [subprocess.Popen(program) for program in programs]
        try:
            wait(lambda: client.describe_topic("t").groups)
            seqs = schedule(client, 300)
            wait(lambda: told.seqs(run) >= seqs)
            running.kill(running.wait_for_leader())
            running.up()
            seqs |= schedule(client, 300)
            wait(lambda: told.seqs(run) >= seqs)
            first, end_ms = told.deliveries(run)[0], now_ms()
            said: list[str] = []
            settings = LiveSettings(overdue_ms=30_000)  # a slow message is not lost
            audit = LiveAudit(RunFolder(run), AlertFiles(alerts, said.append), settings)
            wait(lambda: audit.step() and audit.judge.clock_ms > end_ms)
            assert raised(alerts) == []
            [seq, *_], [offset, *_] = told.seqs_of(first["ids"]), first["offsets"]
            with History(RunFolder(run / LIVE), "planted") as planted:
                given(planted, seq, first["due_ms"][0], offset + 10**6)
                at_ms = now_ms()
                given(planted, 10**6, at_ms + 1, 10**7, at_ms)
            wanted = [("duplicate_fire", seq), ("early", 10**6)]
            wait(lambda: audit.step() and len(raised(alerts)) >= len(wanted))
            assert raised(alerts) == wanted
        finally:
            for process in beside:
                process.terminate()
            codes = [process.wait(WAIT_S) for process in beside]
    assert codes == [0, 0]


def wait(condition: Any) -> None:
    until(condition, timeout_s=WAIT_S)


def schedule(client: TimerClient, count: int) -> set[int]:
    """Schedule timers for the next second; return their seqs."""
    due_ms = [now_ms() + 1000 * at // count for at in range(count)]
    return {*told.seqs_of(client.schedule_batch("t", [b"x"] * count, due_ms=due_ms).ids)}
