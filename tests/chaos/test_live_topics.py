"""Pauses, time to live and deletions on a real cluster, as the live audit is told of them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.history.history import RunFolder
from chaos.live import export, exported_events, judge
from chaos.live.exported_events import RELEASE_MS, EventKind
from chaos.live.witness import witness
from tests.chaos.test_judge import Court
from tests.chaos.told import EventFiles
from tests.cluster.running import Running, now_ms, until
from timer.model import timer_id
from timerclient import TimerClient

pytestmark = pytest.mark.slow

ALL, DROP, LATEST, LIVES, AGAIN = TOPICS = ["all", "ns/drop", "latest", "lives", "again"]
PAUSED = (ALL, DROP, LATEST)
OVERDUE_MS = 30_000
"""More than any pause of a busy machine; the clock is moved on by the test."""
TTL_MS = 1_000
UNTIL_S = 120.0
"""For what takes seconds on an idle machine."""


class Scene:
    """A cluster, its export, and a witness that can be stopped."""

    def __init__(self, cluster: Running, client: TimerClient, into: Path) -> None:
        self.cluster, self.client, self.into = cluster, client, into
        self.told = EventFiles(into)
        self.failures: list[BaseException] = []
        self._threads: list[tuple[threading.Event, threading.Thread]] = []

    def export(self) -> None:
        exporter = export.open_exporter(RunFolder(self.cluster.directory).data(), self.into)

        def follow(over: threading.Event) -> None:
            while not over.is_set():
                exporter.step(time.monotonic())
                over.wait(0.05)

        self._start(follow)

    def watch(self) -> None:
        def consume(over: threading.Event) -> None:
            witness(self.cluster.endpoints, TOPICS, self.into, stopped=over.is_set)

        self._start(consume)

    def _start(self, work: Callable[[threading.Event], None]) -> None:
        over = threading.Event()

        def body() -> None:
            try:
                work(over)
            except BaseException as error:  # noqa: BLE001 - raised by `stop`
                self.failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        self._threads.append((over, thread))

    def stop(self, least: int = 0) -> None:
        """Stop what was started last, or all."""
        while len(self._threads) > least:
            over, thread = self._threads.pop()
            over.set()
            thread.join(60)
        assert not self.failures, self.failures

    def schedule(self, topic: str, delays_ms: list[int]) -> list[int]:
        """Return the seqs of new timers."""
        start_ms = now_ms()
        due_ms = [start_ms + delay_ms for delay_ms in delays_ms]
        ids = self.client.schedule_batch(topic, [b"x"] * len(due_ms), due_ms=due_ms).ids
        seqs: list[int] = timer_id.decode(b"".join(map(timer_id.from_text, ids)), 0)[1].tolist()
        return seqs

    def until(self, condition: Callable[[], object]) -> None:
        """Return when it is so, or something has failed, which `stop` raises."""
        until(lambda: self.failures or condition(), timeout_s=UNTIL_S)

    def until_given(self, seqs: list[int]) -> None:
        self.until(lambda: {*seqs} <= self.told.seqs(EventKind.GIVEN))


def play(scene: Scene) -> dict[str, list[int]]:
    """Let all of it happen; return the seqs by what became of them."""
    client = scene.client
    for topic in TOPICS:
        client.create_topic(topic)
    scene.export()
    scene.watch()
    scene.until(lambda: {row["topic"] for row in scene.told.of(EventKind.REACH)} == {*TOPICS})
    before = [seq for topic in PAUSED for seq in scene.schedule(topic, [0, 100])]
    scene.until_given(before)
    client.alter_policies({"paused": True, "catch_up": "drop"}, namespace="ns")
    client.alter_policies({"paused": True, "catch_up": "all"}, topic=ALL)
    client.alter_policies({"paused": True, "catch_up": "latest"}, topic=LATEST)
    held = {topic: scene.schedule(topic, [-500, 0, 100, 300, 700]) for topic in PAUSED}
    scene.until(lambda: min(client.describe_topic(topic).held for topic in PAUSED) == 5)

    dead = scene.schedule(AGAIN, [0, 3_600_000])
    scene.until_given(dead[:1])
    client.delete_topic(AGAIN)
    reborn = scene.schedule(AGAIN, [0])  # nobody reads it yet, perhaps
    scene.until(lambda: _groups(client, AGAIN) == ["live-audit"])
    anew = scene.schedule(AGAIN, [0, 100, 200])
    scene.until_given(anew)

    scene.stop(1)  # the witness
    expired = scene.schedule(LIVES, [0, 50])
    client.alter_policies({"ttl_ms": TTL_MS}, topic=LIVES)
    scene.until(lambda: client.describe_topic(LIVES).expired == len(expired))
    client.alter_policies({"ttl_ms": 600_000}, topic=LIVES)  # what comes now is to be given
    scene.watch()
    client.alter_policies({"paused": False}, namespace="ns")
    for topic in (ALL, LATEST):
        client.alter_policies({"paused": False}, topic=topic)
    scene.until_given(held[ALL])
    scene.until(lambda: client.describe_topic(LATEST).held == 0)
    after = {topic: scene.schedule(topic, [0, 100, 200]) for topic in (*PAUSED, LIVES)}
    scene.until_given([seq for seqs in after.values() for seq in seqs])
    end_ms = now_ms()
    scene.until(lambda: scene.told.clock_ms() >= end_ms)
    return {
        **{f"held {topic}": seqs for topic, seqs in held.items()},
        **{f"after {topic}": seqs for topic, seqs in after.items()},
        "dead": dead, "reborn": reborn, "anew": anew, "expired": expired,
    }  # fmt: skip


def _groups(client: TimerClient, topic: str) -> list[str]:
    statuses = [status for status in client.topics() if status.name == topic]
    return [group.name for status in statuses for group in status.groups]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[pa.Table], dict[str, list[int]]]:
    """The events, one table a file, in the order in which they came; and the seqs."""
    root = tmp_path_factory.mktemp("topics")
    with Running(root / "run").cleaned() as cluster, cluster.client() as client:
        scene = Scene(cluster, client, root / "events")
        try:
            seqs = play(scene)
        finally:
            scene.stop()
    paths = sorted(scene.into.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    return [pq.read_table(path, schema=exported_events.ARROW) for path in paths], seqs


def judged(tables: list[pa.Table], without: int = 0) -> list[judge.Alert]:
    """Return the alerts of a judge that is given the tables, and then time."""
    court = Court(OVERDUE_MS)
    alerts: list[judge.Alert] = []
    for table in tables:
        given = table["kind"].to_numpy() == int(EventKind.GIVEN)
        court.told.append(table.filter(pa.array(~(given & (table["seq"].to_numpy() == without)))))
        alerts += court.step()
    clocks = [
        row for table in tables for row in table.to_pylist() if row["kind"] == EventKind.CLOCK
    ]
    last = {name: value for name, value in clocks[-1].items() if name in exported_events.NUMBERS}
    del last["kind"]
    for later_ms in (OVERDUE_MS, OVERDUE_MS + RELEASE_MS, 3 * (OVERDUE_MS + RELEASE_MS)):
        at_ms = last["at_ms"] + 2 * later_ms
        for topic in TOPICS:
            court.tell(EventKind.REACH, topic=topic, read_ms=at_ms, at_ms=at_ms)
        court.tell(EventKind.CLOCK, **last | {"at_ms": at_ms, "read_ms": at_ms})
        alerts += court.step()
    return alerts


def test_pauses_expiry_and_deletions_raise_nothing(
    played: tuple[list[pa.Table], dict[str, list[int]]],
) -> None:
    tables, seqs = played
    assert judged(tables) == []
    told = pa.concat_tables(tables)
    given = {*told["seq"].to_numpy()[told["kind"].to_numpy() == int(EventKind.GIVEN)].tolist()}
    assert given.isdisjoint(seqs["expired"])
    assert given.isdisjoint(seqs[f"held {DROP}"])
    assert len(given.intersection(seqs[f"held {LATEST}"])) == 1
    assert given.isdisjoint(seqs["dead"][1:])
    kinds = np.concatenate([table["kind"].to_numpy() for table in tables])
    for kind in exported_events.OF_TOPICS:
        assert (kinds == kind).any(), kind


@pytest.mark.parametrize(
    ("what", "at"),
    [*((f"held {ALL}", at) for at in range(5)), ("anew", 1),
     *((f"after {topic}", 1) for topic in (*PAUSED, LIVES))],
)  # fmt: skip
def test_loss_is_raised(
    played: tuple[list[pa.Table], dict[str, list[int]]], what: str, at: int
) -> None:
    tables, seqs = played
    lost = seqs[what][at]
    assert [(alert.kind, alert.seq) for alert in judged(tables, lost)] == [("lost", lost)]
