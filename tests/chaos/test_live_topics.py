"""Pauses, time to live, deletions, keys, cancels and moves on a real cluster, judged live."""

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from chaos import workloads
from chaos.history.history import RunFolder
from chaos.live import export, exported_events
from chaos.live.exported_events import EventColumns, EventKind
from chaos.live.judge import Judge, Violation
from chaos.live.witness import witness
from chaos.workloads.workload_clients import Setting
from tests.chaos.told import EventFiles
from tests.cluster.running import Running, now_ms, until
from timer.model import timer_id
from timerclient import TimerClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # plays for ten seconds; test_live_sim.py judges simulated logs
]

ALL, DROP, LATEST, LIVES, AGAIN = TOPICS = ["all", "ns/drop", "latest", "lives", "again"]
PAUSED = (ALL, DROP, LATEST)
OVERDUE_MS = 30_000
"""More than any pause of a busy machine; the clock is moved on by the test."""
TTL_MS = 1_000
CHANGED = ["cancels", "keyed", "moved"]
SECONDS = 5.0
RATE_PER_S = 120
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
        exporter = export.Exporter(export.logs_of_run(RunFolder(self.cluster.directory)), self.into)

        def follow(over: threading.Event) -> None:
            while not over.is_set():
                exporter.step()
                over.wait(0.05)

        self._start(follow)

    def watch(self) -> None:
        def consume(over: threading.Event) -> None:
            witness(self.cluster.endpoints, [*TOPICS, *CHANGED], self.into, stopped=over.is_set)

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
        self.until(lambda: {*seqs} <= self.told.seqs())


def play(scene: Scene) -> dict[str, list[int]]:
    """Let all of it happen; return the seqs by what became of them."""
    client = scene.client
    for topic in [*TOPICS, *CHANGED]:
        client.create_topic(topic)
    scene.export()
    scene.watch()
    scene.until(
        lambda: {row["topic"] for row in scene.told.of(EventKind.REACH)} >= {*TOPICS, *CHANGED}
    )
    change(scene)
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


def change(scene: Scene) -> None:
    """Let clients cancel, take keys and move timers for some seconds."""
    setting = Setting(
        run=RunFolder(scene.cluster.directory), endpoints=lambda: scene.cluster.endpoints,
        seed=2, rate_per_s=RATE_PER_S, horizon_s=SECONDS,
    )  # fmt: skip
    works = workloads.make(CHANGED, setting)
    try:
        for work in works:
            work.start()
        end_ms = now_ms() + int(1000 * SECONDS)
        scene.until(lambda: now_ms() > end_ms)
        for work in works:
            work.stop_producing()
        for work in works:
            scene.until(work.drained)
    finally:
        for work in works:
            work.close()


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


def judged(tables: list[pa.Table], without: int = 0) -> list[Violation]:
    """Return the violations, if the witness had not received one message, and then time passes."""
    judge = Judge(Path(), overdue_ms=OVERDUE_MS)
    found: list[Violation] = []
    for table in tables:
        given = table["kind"].to_numpy() == int(EventKind.GIVEN)
        found += judge.step(table.filter(pa.array(~(given & (table["seq"].to_numpy() == without)))))
    judge.clock_ms += 10 * OVERDUE_MS
    told = [
        EventColumns(EventKind.REACH, 1, {"topic": topic, "read_ms": judge.clock_ms})
        for topic in [*TOPICS, *CHANGED]
    ]
    return found + judge.step(exported_events.table(told))


def test_pauses_expiry_deletions_and_changes_raise_nothing(
    played: tuple[list[pa.Table], dict[str, list[int]]],
) -> None:
    tables, seqs = played
    told = pa.concat_tables(tables)
    given = {*told["seq"].to_numpy()[told["kind"].to_numpy() == int(EventKind.GIVEN)].tolist()}
    # Time passes without a FIRE: the timers of an hour from now are not due, no others are left.
    assert judged(tables) == []
    assert given.isdisjoint(seqs["expired"])
    assert given.isdisjoint(seqs[f"held {DROP}"])
    assert len(given.intersection(seqs[f"held {LATEST}"])) == 1
    assert given.isdisjoint(seqs["dead"][1:])


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
    assert [(each.kind, each.seq) for each in judged(tables, lost)] == [("lost", lost)]


@pytest.mark.parametrize("topic", CHANGED)
def test_loss_of_a_changed_timer_is_raised(
    played: tuple[list[pa.Table], dict[str, list[int]]], topic: str
) -> None:
    tables, _ = played
    rows = pa.concat_tables(tables)
    mine = pc.and_(pc.equal(rows["kind"], int(EventKind.GIVEN)), pc.equal(rows["topic"], topic))
    seqs = rows.filter(mine)["seq"].to_pylist()
    lost = seqs[len(seqs) // 2]
    found = judged(tables, lost)
    assert [(each.kind, each.seq, each.topic) for each in found] == [("lost", lost, topic)]
