"""Pauses, time to live, deletions, keys, cancels and moves on a real cluster, judged live."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.history.archive import Archive, places
from chaos.history.history import RunFolder
from chaos.live.follow import Follower
from chaos.live.judge import Judge, Violation
from chaos.live.recorded_messages import LIVE, RecordedMessages
from chaos.live.witness import witness
from chaos.workloads import Workloads
from chaos.workloads.workload_clients import Setting
from tests.chaos import told
from tests.cluster.running import Running, now_ms, until
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry
from timerclient import TimerClient
from timerspark.log.segment_files import lives

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
STEP = 100
"""Entries of one step of the judge."""
SECONDS = 5.0
RATE_PER_S = 120
UNTIL_S = 120.0
"""For what takes seconds on an idle machine."""


class Scene:
    """A cluster, the archive of its logs, and a witness that can be stopped."""

    def __init__(self, cluster: Running, client: TimerClient) -> None:
        self.cluster, self.client = cluster, client
        self.run = RunFolder(cluster.directory)
        self.failures: list[BaseException] = []
        self.frames: list[memoryview] = []
        logs = places(self.run.root, None, None)
        self.archive = Archive(logs)
        self.archive.update()
        self._follower = Follower({node: lives(kept)[-1] for node, (_, kept) in logs.items()})
        self._threads: list[tuple[threading.Event, threading.Thread]] = []

    def clock_ms(self) -> int:
        """Return the time of the last committed entry."""
        self.frames += [each.frame for each in self._follower.poll()[0]]
        last = entry_frame.frame_at(self.frames[-1], 0)
        assert isinstance(last, Entry)
        return last.time_ms

    def watch(self) -> None:
        def consume(over: threading.Event) -> None:
            topics = [*TOPICS, *CHANGED]
            witness(self.cluster.endpoints, topics, self.run.root, stopped=over.is_set)

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

    def stop(self) -> None:
        """Stop the witness."""
        while self._threads:
            over, thread = self._threads.pop()
            over.set()
            thread.join(60)
        assert not self.failures, self.failures

    def schedule(self, topic: str, delays_ms: list[int]) -> list[int]:
        """Return the seqs of new timers."""
        start_ms = now_ms()
        due_ms = [start_ms + delay_ms for delay_ms in delays_ms]
        ids = self.client.schedule_batch(topic, [b"x"] * len(due_ms), due_ms=due_ms).ids
        return told.seqs_of(ids)

    def until(self, condition: Callable[[], object]) -> None:
        """Return when it is so, or something has failed, which `stop` raises."""
        until(lambda: self.failures or condition(), timeout_s=UNTIL_S)

    def until_given(self, seqs: list[int]) -> None:
        self.until(lambda: {*seqs} <= told.seqs(self.run.root))


def play(scene: Scene) -> dict[str, list[int]]:
    """Let all of it happen; return the seqs by what became of them."""
    client = scene.client
    for topic in [*TOPICS, *CHANGED]:
        client.create_topic(topic)
    scene.watch()
    scene.until(lambda: all(_groups(client, topic) for topic in [*TOPICS, *CHANGED]))
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

    scene.stop()
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
    scene.until(lambda: scene.clock_ms() >= end_ms)
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
    works = Workloads(CHANGED, setting)
    try:
        works.start()
        end_ms = now_ms() + int(1000 * SECONDS)
        scene.until(lambda: now_ms() > end_ms)
        works.stop_producing()
        scene.until(lambda: not works.waiting())
    finally:
        works.close()


def _groups(client: TimerClient, topic: str) -> list[str]:
    statuses = [status for status in client.topics() if status.name == topic]
    return [group.name for status in statuses for group in status.groups]


Played = tuple[RunFolder, list[memoryview], dict[str, list[int]]]
"""The run, the frames of its log, and the seqs."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    root = tmp_path_factory.mktemp("topics")
    with Running(root / "run").cleaned() as cluster, cluster.client() as client:
        scene = Scene(cluster, client)
        try:
            seqs = play(scene)
        finally:
            scene.stop()
            scene.archive.close()
    return scene.run, scene.frames, seqs


def judged(played: Played, without: int = 0) -> set[tuple[str, int, str]]:
    """Return the violations, if the witness had not received one message, and then time passes."""
    run, frames, _ = played
    judge = Judge(Path(), overdue_ms=OVERDUE_MS)
    messages = RecordedMessages(run.root / LIVE)
    found: list[Violation] = []
    for start in range(0, len(frames), STEP):
        judge.apply(frames[start : start + STEP])
        given, reaches = messages.read(judge.clock_ms)
        given = {topic: rows[rows["seq"] != without] for topic, rows in given.items()}
        found += judge.violations(given, reaches)
    judge.clock_ms += 10 * OVERDUE_MS
    found += judge.violations({}, dict.fromkeys([*TOPICS, *CHANGED], judge.clock_ms))
    return {(each.kind, each.seq, each.topic) for each in found}


def test_pauses_expiry_deletions_and_changes_raise_nothing(played: Played) -> None:
    run, _, seqs = played
    given = told.seqs(run.root)
    # Time passes without a FIRE: the timers of an hour from now are not due, no others are left.
    assert judged(played) == set()
    assert given.isdisjoint(seqs["expired"])
    assert given.isdisjoint(seqs[f"held {DROP}"])
    assert len(given.intersection(seqs[f"held {LATEST}"])) == 1
    assert given.isdisjoint(seqs["dead"][1:])


@pytest.mark.parametrize(
    ("what", "at"),
    [*((f"held {ALL}", at) for at in range(5)), ("anew", 1),
     *((f"after {topic}", 1) for topic in (*PAUSED, LIVES))],
)  # fmt: skip
def test_loss_is_raised(played: Played, what: str, at: int) -> None:
    lost = played[2][what][at]
    assert [each[:2] for each in judged(played, lost)] == [("lost", lost)]


@pytest.mark.parametrize("topic", CHANGED)
def test_loss_of_a_changed_timer_is_raised(played: Played, topic: str) -> None:
    lines = [line for line in told.deliveries(played[0].root) if line["topic"] == topic]
    [lost, *_] = told.seqs_of(lines[len(lines) // 2]["ids"])
    assert judged(played, lost) == {("lost", lost, topic)}
