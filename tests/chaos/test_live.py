"""The live audit as a Spark job: planted events, a restart, and a real cluster."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from chaos.live import export, exported_events, live
from chaos.live.exported_events import EventColumns, EventKind, Outbox
from chaos.live.live import AlertFiles, LiveSettings, Watch
from tests.chaos.told import EventFiles
from tests.cluster.running import Running
from timer.model import timer_id
from timerclient import TimerClient

NOW = 1_700_000_000_000
SETTINGS = LiveSettings(overdue_ms=5000, shards=2, trigger="100 milliseconds")
WAIT_S = 180.0


class Desk:
    """A job's folders, and the events that a test puts there."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.events, self.alerts, self.checkpoint = root / "events", root / "alerts", root / "cp"
        self.said: list[str] = []
        self._spark = spark
        self._outbox = Outbox(self.events)
        self._files = 0
        self.settings = SETTINGS
        self.last_seq = 0
        self.query: StreamingQuery | None = None

    def start(self) -> None:
        sink = AlertFiles(self.alerts, self.said.append)
        self.query = live.start(self._spark, self.events, self.checkpoint, sink, self.settings)

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()

    def done(self) -> list[tuple[str, int]]:
        """Return the alerts, once all that was put there is judged; no more may come."""
        assert self.query is not None
        self.query.processAllAvailable()
        return self.raised()

    def judged(self) -> Callable[[], bool]:
        """Return whether what is there now is judged, though more keeps coming."""
        query = self.query
        assert query is not None

        done: list[int] = []

        def judged() -> bool:
            if last := query.lastProgress:
                done.append(last["batchId"])
            return bool(done) and done[-1] > done[0] + 1  # one was under way

        return judged

    def raised(self) -> list[tuple[str, int]]:
        files = sorted(self.alerts.glob("*.jsonl"))
        assert self.query is not None
        assert {path.name.split("-")[0] for path in files} <= {self.query.id[:8]}
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return sorted((row["kind"], row["seq"]) for row in rows)

    def put(self, *rows: tuple[EventKind, dict[str, Any]]) -> None:
        self._files += 1
        told = [EventColumns(kind, 1, columns) for kind, columns in rows]
        self._outbox.put(f"planted-{self._files:06d}", told)


def scheduled(seq: int, due_ms: int) -> tuple[EventKind, dict[str, Any]]:
    return EventKind.SCHEDULED, {"seq": seq, "due_ms": due_ms, "at_ms": NOW, "topic": "t"}


def given(
    seq: int, due_ms: int, offset: int, fired_ms: int | None = None
) -> tuple[EventKind, dict[str, Any]]:
    fired_at_ms = due_ms if fired_ms is None else fired_ms
    return EventKind.GIVEN, {
        "seq": seq, "due_ms": due_ms, "at_ms": fired_at_ms, "topic": "t",
        "queue_offset": offset, "fired_at_ms": fired_at_ms,
    }  # fmt: skip


def clock(at_ms: int, last_seq: int) -> tuple[EventKind, dict[str, Any]]:
    return EventKind.CLOCK, {
        "at_ms": at_ms, "seq": last_seq, "read_ms": at_ms, "index": at_ms - NOW + 1, "first_seq": 1,
    }  # fmt: skip


def reach(at_ms: int) -> tuple[EventKind, dict[str, Any]]:
    return EventKind.REACH, {"at_ms": at_ms, "read_ms": at_ms, "topic": "t"}


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Iterator[Desk]:
    desk = Desk(tmp_path, spark)
    yield desk
    desk.stop()


def _marked(*marks: pytest.MarkDecorator) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        for each in marks:
            test = each(test)
        return test

    return mark


@_marked(pytest.mark.spark)
def test_planted_events_are_raised_once_over_restarts(desk: Desk) -> None:
    honest = [scheduled(seq, NOW + 100 * seq) for seq in range(1, 50)]
    # Of one topic, in both shards: what is paused is not lost, what fires all the same is told.
    number = {"topic_id": 9, "topic": "t", "at_ms": NOW, "index": 1}
    held = [scheduled(seq, NOW + 150) for seq in (50, 51, 53)]
    held = [(kind, columns | {"topic_id": 9}) for kind, columns in held]
    desk.put(*honest, (EventKind.PAUSED, number), *held, reach(NOW), clock(NOW + 1, 53))
    desk.start()
    assert desk.done() == []
    # Restarted in the middle: what was scheduled before is still known.
    desk.stop()
    come = [given(seq, NOW + 100 * seq, seq) for seq in range(1, 50) if seq not in (7, 30)]
    desk.put(*come, given(11, NOW + 1100, 99), given(30, NOW + 3000, 30, NOW + 2999))
    desk.put(clock(NOW + 5000, 53), reach(NOW + 5000))
    desk.start()
    assert desk.done() == [("duplicate", 11), ("early", 30)]
    # Killed after the batch was judged and before Spark noted it: it is judged again.
    desk.put(given(53, NOW + 150, 53), clock(NOW + 20_000, 53), reach(NOW + 20_000))
    expected = [("duplicate", 11), ("early", 30), ("held", 53), ("lost", 7)]
    assert desk.done() == expected
    desk.stop()
    commits = sorted((desk.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    commits[-1].unlink()
    (desk.checkpoint / "commits" / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    desk.start()
    desk.put(given(7, NOW + 700, 7, NOW + 21_000), clock(NOW + 22_000, 53))
    assert desk.done() == sorted([*expected, ("late", 7)])
    assert len(desk.said) == 5
    lost = next(row for row in map(json.loads, desk.said) if row["kind"] == "lost")
    assert (lost["kind"], lost["topic"], lost["due_ms"]) == ("lost", "t", NOW + 700)


def test_silence_is_told_once_each_time(tmp_path: Path) -> None:
    watch = Watch(tmp_path, stalled_ms=10_000, began_ms=NOW)
    assert watch.look(NOW + 10_000) == []
    assert [text.split(" stands")[0] for text in watch.look(NOW + 10_001)] == ["the export"]
    assert watch.look(NOW + 10_002) == []
    outbox = Outbox(tmp_path)
    now_ms = exported_events.now_ms()
    outbox.put(f"{export.PREFIX}1", [EventColumns(EventKind.CLOCK, 1, {"at_ms": now_ms})])
    outbox.put("given-1", [EventColumns(EventKind.REACH, 1, {"at_ms": now_ms})])
    assert watch.look(now_ms + 5) == []
    said = watch.look(now_ms + 60_000)
    assert [text.split(" stands")[0] for text in said] == [
        "the export", "the log's clock", "the witness",
    ]  # fmt: skip
    sink = AlertFiles(tmp_path / "alerts", said.append)
    sink.stalled(NOW, said[:1])
    assert json.loads(said[-1])["kind"] == "stalled"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "run").cleaned() as running:
        yield running


@_marked(pytest.mark.spark, pytest.mark.slow)
def test_of_a_running_cluster_only_what_is_planted_is_raised(desk: Desk, running: Running) -> None:
    # What is slow is not lost; and each look costs a second of processor time.
    desk.settings = replace(SETTINGS, overdue_ms=30_000, trigger="2 seconds")
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
            desk.start()
            until(lambda: bool(told.of(EventKind.REACH)))
            seqs = schedule(client, 300)
            until(lambda: told.seqs(EventKind.GIVEN) >= seqs)
            running.kill(running.wait_for_leader())
            running.up()
            seqs |= schedule(client, 300)
            until(lambda: told.seqs(EventKind.GIVEN) >= seqs)
            desk.stop()  # and none of its looks while nothing is to be seen
            never_given = 10**6
            desk.put(scheduled(never_given, exported_events.now_ms()))
            seqs |= schedule(client, 1)  # the log fires on, and what it fires is given
            until(lambda: told.seqs(EventKind.GIVEN) >= seqs)
            end_ms = exported_events.now_ms() + desk.settings.overdue_ms
            until(lambda: told.clock_ms() > end_ms)
            desk.start()
            until(desk.judged())
            until(lambda: bool(desk.raised()))
            assert desk.raised() == [("lost", never_given)]
            first = next(row for row in told.of(EventKind.GIVEN) if row["seq"] == min(seqs))
            now_ms = exported_events.now_ms()
            desk.put(
                given(first["seq"], first["due_ms"], first["queue_offset"] + 10**6),
                scheduled(10**6 + 1, now_ms + 1), given(10**6 + 1, now_ms + 1, 10**7, now_ms),
            )  # fmt: skip
            wanted = {("lost", never_given), ("duplicate", min(seqs)), ("early", 10**6 + 1)}
            until(lambda: {*desk.raised()} >= wanted)
            assert {*desk.raised()} == wanted
        finally:
            for process in beside:
                process.terminate()
            codes = [process.wait(WAIT_S) for process in beside]
    assert codes == [0, 0]


def schedule(client: TimerClient, count: int) -> set[int]:
    """Schedule timers for the next second; return their seqs."""
    due_ms = [exported_events.now_ms() + 1000 * at // count for at in range(count)]
    ids = client.schedule_batch("t", [b"x"] * count, due_ms=due_ms).ids
    raw = b"".join(map(timer_id.from_text, ids))
    return {*timer_id.decode(raw, 0)[1].tolist()}


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
