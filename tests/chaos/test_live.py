"""The live audit as a Spark job: planted events, restarts, and a real cluster."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from chaos.live import export, exported_events, live, witness
from chaos.live.exported_events import WITNESS_GROUP, EventColumns, EventKind
from chaos.live.live import AlertFiles, LiveAudit, LiveSettings, Watch
from tests.chaos import world
from tests.chaos.test_judge import entry_events
from tests.chaos.told import EventFiles
from tests.cluster.running import Running, until
from timer.entries.entry_frame import EntryKind
from timer.model import timer_id
from timerclient import TimerClient

NOW = 1_700_000_000_000
SETTINGS = LiveSettings(overdue_ms=5000, trigger="100 milliseconds")
WAIT_S = 180.0


class Desk:
    """A job's folders, and the events that a test puts there."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.events, self.alerts, self.checkpoint = root / "events", root / "alerts", root / "cp"
        self.events.mkdir()
        self.said: list[str] = []
        self.log = world.Log()
        self._spark = spark
        self._files = self._exported = 0
        self.settings = SETTINGS
        self.audit: LiveAudit | None = None
        self.query: StreamingQuery | None = None

    def start(self) -> None:
        sink = AlertFiles(self.alerts, self.said.append)
        self.audit = LiveAudit(self.events, self.checkpoint / "spill", sink, self.settings)
        trigger = self.settings.trigger
        own = self.checkpoint / "spark"
        self.query = live.start(self._spark, self.events, own, self.audit, trigger)

    def kill(self) -> None:
        if self.query is not None:
            self.query.stop()

    def done(self) -> list[tuple[str, int]]:
        """Return the alerts, once all events are judged."""
        assert self.query is not None
        self.query.processAllAvailable()
        return self.raised()

    def raised(self) -> list[tuple[str, int]]:
        files = sorted(self.alerts.glob("*.jsonl"))
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return sorted((row["kind"], row["seq"]) for row in rows)

    def put(self, *told: EventColumns) -> None:
        """Write the log's new entries, and then the events of a witness."""
        new = self.log.frames[self._exported :]
        first, self._exported = self._exported + 1, len(self.log.frames)
        if new:
            name = f"{export.PREFIX}{first:016x}-{self._exported:016x}"
            exported_events.put(self.events, name, [entry_events(new, first)])
        self._files += 1
        exported_events.put(self.events, f"given-{self._files:06d}", told)


def given(seq: int, due_ms: int, offset: int, fired_ms: int | None = None) -> EventColumns:
    fired_at_ms = due_ms if fired_ms is None else fired_ms
    columns = {"seq": seq, "due_ms": due_ms, "topic": "t", "queue_offset": offset,
               "fired_at_ms": fired_at_ms, "handed_out_ms": fired_at_ms}  # fmt: skip
    return EventColumns(EventKind.GIVEN, 1, columns)


def reach(at_ms: int) -> EventColumns:
    return EventColumns(EventKind.REACH, 1, {"read_ms": at_ms, "topic": "t"})


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Iterator[Desk]:
    desk = Desk(tmp_path, spark)
    yield desk
    desk.kill()


@pytest.mark.spark
def test_planted_events_are_raised_once_over_restarts(desk: Desk) -> None:
    log = desk.log
    log.epoch(1, at_ms=NOW)
    topic = log.topic("t")
    log.group(topic, WITNESS_GROUP)
    log.schedule(topic, [(NOW + 100 * seq, seq) for seq in range(1, 50)])
    desk.put(reach(NOW))
    desk.start()
    assert desk.done() == []
    # Killed: another job judges the same files again.
    desk.kill()
    for seq in range(1, 50):
        log.fire(NOW + 100 * seq)
    come = [given(seq, NOW + 100 * seq, seq - 1) for seq in range(1, 50) if seq not in (7, 30)]
    desk.put(*come, given(11, NOW + 1100, 99), given(30, NOW + 3000, 29, NOW + 2999))
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=NOW + 5000)
    desk.put(reach(NOW + 5000))
    desk.start()
    expected = [("diverged", 30), ("duplicate_fire", 11), ("early", 30)]
    assert desk.done() == expected
    assert not [*desk.events.glob("*.parquet")]
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=NOW + 20_000)
    desk.put(reach(NOW + 20_000))
    expected = [*expected, ("lost", 7)]
    assert desk.done() == expected
    # Killed before the files of the last batch were put aside: it is judged twice, told once.
    desk.kill()
    for path in desk.events.glob("judged/*-000003.parquet"):
        path.rename(desk.events / path.name)
    desk.start()
    desk.put(given(7, NOW + 700, 6))
    assert desk.done() == sorted([*expected, ("delivered_late", 7)])
    assert len(desk.said) == 5
    lost = next(row for row in map(json.loads, desk.said) if row["kind"] == "lost")
    assert (lost["kind"], lost["topic"], lost["due_ms"]) == ("lost", "t", NOW + 700)


def test_silence_is_reported_once_each_time(tmp_path: Path) -> None:
    watch = Watch(tmp_path, stalled_ms=10_000)
    assert watch.look(NOW, 0) == []
    assert watch.look(NOW + 10_000, 0) == []
    assert watch.look(NOW + 10_001, 0) == [f"the export stands still since {NOW}"]
    assert watch.look(NOW + 10_002, 0) == []
    for name in (export.ALIVE, witness.ALIVE):
        (tmp_path / name).touch()
    assert watch.look(NOW + 20_000, NOW) == []
    said = watch.look(NOW + 60_000, NOW)
    assert [text.split(" stands")[0] for text in said] == [
        "the export", "the log's clock", "the witness",
    ]  # fmt: skip


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "run").cleaned() as running:
        yield running


@pytest.mark.long  # a cluster, two programs and a stream of Spark
@pytest.mark.spark
@pytest.mark.slow
def test_of_a_running_cluster_only_what_is_planted_is_raised(desk: Desk, running: Running) -> None:
    # A slow message is not lost; and each batch takes a second of processor time.
    desk.settings = LiveSettings(overdue_ms=30_000, trigger="2 seconds")
    with running.client() as client:
        client.create_topic("t")
        told = EventFiles(desk.events)
        into = ["--into", str(desk.events)]
        where = ["--cluster", ",".join(running.endpoints), "--topic", "t"]
        programs = [
            [sys.executable, "-m", "chaos.live.export", str(running.directory), *into],
            [sys.executable, "-m", "chaos.live.witness", *where, *into],
        ]
        beside = [subprocess.Popen(program) for program in programs]
        try:
            wait(lambda: bool(told.of(EventKind.REACH)))
            seqs = schedule(client, 300)
            wait(lambda: told.seqs() >= seqs)
            running.kill(running.wait_for_leader())
            running.up()
            seqs |= schedule(client, 300)
            wait(lambda: told.seqs() >= seqs)
            first = next(row for row in told.of(EventKind.GIVEN) if row["seq"] == min(seqs))
            desk.start()
            assert desk.audit is not None
            audit, end_ms = desk.audit, exported_events.now_ms()
            wait(lambda: audit.judge.clock_ms > end_ms)
            assert desk.raised() == []
            again = {name: first[name] for name in ("seq", "due_ms", "topic", "handed_out_ms")}
            again |= {"fired_at_ms": first["due_ms"], "queue_offset": first["queue_offset"] + 10**6}
            now_ms = exported_events.now_ms()
            exported_events.put(
                desk.events, "given-planted",
                [EventColumns(EventKind.GIVEN, 1, again), given(10**6, now_ms + 1, 10**7, now_ms)],
            )  # fmt: skip
            wanted = [("duplicate_fire", min(seqs)), ("early", 10**6)]
            wait(lambda: len(desk.raised()) >= len(wanted))
            assert desk.raised() == wanted
        finally:
            for process in beside:
                process.terminate()
            codes = [process.wait(WAIT_S) for process in beside]
    assert codes == [0, 0]


def wait(condition: Any) -> None:
    until(condition, timeout_s=WAIT_S)


def schedule(client: TimerClient, count: int) -> set[int]:
    """Schedule timers for the next second; return their seqs."""
    due_ms = [exported_events.now_ms() + 1000 * at // count for at in range(count)]
    ids = client.schedule_batch("t", [b"x"] * count, due_ms=due_ms).ids
    raw = b"".join(map(timer_id.from_text, ids))
    return {*timer_id.decode(raw, 0)[1].tolist()}
