"""Every nemesis does what it says to real nodes, and its undo makes the cluster whole again."""

import contextlib
import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.history.history import RunFolder, read
from chaos.suite import scenarios
from chaos.suite.nemeses import crowd, file_damage, links
from chaos.suite.nemeses import nemesis as nemeses
from chaos.suite.nemeses.crowd import flood, kill_consumer
from chaos.suite.nemeses.file_damage import CUT, REMOVED, damage, fill, wipe
from chaos.suite.nemeses.links import bridge, flap, isolate, one_way, slow
from chaos.suite.nemeses.nemesis import NoEffect
from chaos.suite.nemeses.processes import (
    clock_jump,
    kill,
    kill_many,
    pause,
    power_cut,
    rolling_restart,
    transfers,
)
from chaos.suite.stage.stage import MANY_SETTINGS, Stage, capabilities
from cluster.files.standby_ports import WAITING
from tests.chaos.blows import Blow, needs, recorded
from tests.cluster.running import Forking, until
from timer.files.disk import RealDisk
from timer.model.units import LogIndex
from timer.recovery import manifest
from timerclient import CancelResult, TimerClient
from timerclient.values.errors import DiskFull, TimerError
from timerspark.log.segment_files import Piece, entries_of

WAIT_S = 120.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,  # 50 s of a core; CI strikes with drawn ones: `make chaos-short`
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One stage for all: each undo leaves it whole."""
    folder = tmp_path_factory.mktemp("stage")
    # One flood is enough to be one; manifests come soon, and logs stay whole all the same.
    settings = tuple(line for line in MANY_SETTINGS if "flush" not in line)
    settings = (*settings, "storage.log_entries_flush = 64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chaos.suite.stage.stage.LocalCluster", Forking)
        with Stage(RunFolder(folder), missing=capabilities(folder), settings=settings) as stage:
            with TimerClient(stage.cluster.endpoints) as client:
                client.consumer("unread", group="g").close()
                for at in range(64):  # as many entries: all nodes will have all kinds of files
                    client.schedule_batch("t", [b"payload"] * 16, delay=timedelta(hours=1))
                    client.schedule("t", b"payload", key=f"k{at}", delay=timedelta(hours=1))
                    client.schedule("unread", b"payload")
            yield stage


@pytest.fixture(autouse=True)
def whole(stage: Stage) -> Iterator[None]:
    """A test that fails leaves it whole for the next one, too."""
    yield
    for name in stage.away - stage.lost:
        stage.resume(name)
        stage.restart(name)


def pids(stage: Stage) -> dict[str, int]:
    return {name: node.pid for name, node in stage.cluster.nodes.items()}


def epoch(stage: Stage) -> int:
    epoch: int = until(lambda: stage.cluster.state(stage.leader())).epoch
    return epoch


def seen(stage: Stage, name: str, *, hidden: bool) -> bool:
    """Return whether the node answers, or does not, as it should; it may take its time."""
    state = stage.cluster.state(name)
    return (state is None) == hidden


def schedules(stage: Stage) -> None:
    """The cluster takes timers, on all nodes."""
    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        client.schedule("t", b"payload", delay=timedelta(hours=1))
    assert not stage.away
    assert all(map(stage.cluster.is_running, stage.names))


def metric(stage: Stage, name: str, metric: str) -> float:
    url = f"http://{stage.cluster.nodes[name].http}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = re.findall(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.M)
    return sum(map(float, found))


def test_kill_ends_the_leader_and_another_leads(stage: Stage, chance: random.Random) -> None:
    before = epoch(stage)
    undo = Blow(kill, "leader").strike(stage, chance)
    leader = recorded(stage, "kill")["node"]
    assert not stage.cluster.is_running(leader)
    assert stage.leader() != leader
    assert epoch(stage) > before
    assert recorded(stage, "kill")["role"] == "leader"
    undo()
    schedules(stage)


def test_kill_many_ends_a_majority_or_all(stage: Stage, chance: random.Random) -> None:
    before = pids(stage)
    undo = Blow(kill_many, 7).strike(stage, chance)
    assert not any(map(stage.cluster.is_running, stage.names))
    undo()
    assert not {*before.values()} & {*pids(stage).values()}
    schedules(stage)


def test_paused_leader_loses_its_leadership(stage: Stage, chance: random.Random) -> None:
    before = epoch(stage)
    undo = Blow(pause, "leader").strike(stage, chance)
    leader = recorded(stage, "pause")["node"]
    stat = Path(f"/proc/{pids(stage)[leader]}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    assert stage.leader(above_epoch=before) != leader
    undo()
    schedules(stage)


def test_rolling_restart_replaces_every_process(stage: Stage, chance: random.Random) -> None:
    before = pids(stage)
    Blow(rolling_restart).strike(stage, chance)()
    assert not {*before.values()} & {*pids(stage).values()}
    assert recorded(stage, "term")
    schedules(stage)


def test_transfers_move_the_leadership(stage: Stage, chance: random.Random) -> None:
    before = epoch(stage)
    Blow(transfers, times=2).strike(stage, chance)()
    assert epoch(stage) > before
    schedules(stage)


@pytest.mark.parametrize(
    "blow",
    [
        Blow(isolate, "leader", clients=True),
        Blow(isolate, "leader", clients=False),
        Blow(one_way, "leader"),
    ],
)
def test_leader_that_nobody_hears_is_replaced(
    stage: Stage,
    chance: random.Random,
    blow: Blow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(stage, blow.nemesis)
    before, struck = epoch(stage), list[str]()
    choose = nemeses.choose

    def chosen(stage: Stage, who: str, chance: random.Random) -> str:
        assert who == "leader"
        struck.append(choose(stage, who, chance))
        return struck[-1]

    monkeypatch.setattr(links, "choose", chosen)
    undo = blow.strike(stage, chance)
    [leader] = struck
    until(lambda: stage.leader(above_epoch=before) != leader)
    hidden = blow.args.get("clients", False)
    until(lambda: seen(stage, leader, hidden=hidden))
    undo()
    until(lambda: stage.cluster.state(leader))
    schedules(stage)


def test_bridged_halves_go_on(stage: Stage, chance: random.Random) -> None:
    needs(stage, bridge)
    undo = Blow(bridge).strike(stage, chance)
    with TimerClient(stage.cluster.endpoints) as client:
        client.schedule("t", b"payload", delay=timedelta(hours=1), timeout=WAIT_S)
    undo()
    schedules(stage)


def test_flapping_links_come_and_go(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(stage, flap)
    assert stage.network is not None
    cuts, heals, cut = threading.Semaphore(0), threading.Semaphore(0), stage.network.cut

    @contextlib.contextmanager
    def watched(pairs: Any) -> Iterator[None]:
        with cut(pairs):
            cuts.release()
            yield
        heals.release()

    monkeypatch.setattr(stage.network, "cut", watched)
    undo = Blow(flap, "follower", period_s=0.2).strike(stage, chance)
    for come_and_go in (cuts, heals, cuts, heals):
        assert come_and_go.acquire(timeout=WAIT_S)
    undo()
    schedules(stage)


def test_slow_links_answer_late(stage: Stage, chance: random.Random) -> None:
    needs(stage, slow)
    undo = Blow(slow, "follower", delay_ms=150, jitter_ms=0, loss=0).strike(stage, chance)
    assert stage.network is not None
    times = {}
    for name in stage.names:
        at = time.monotonic()
        until(partial(stage.cluster.state, name))
        times[name] = time.monotonic() - at
    assert max(times.values()) >= 0.3
    undo()
    schedules(stage)


def test_wrong_clock_is_seen_and_moves_nobody_elses(stage: Stage, chance: random.Random) -> None:
    for blow in (Blow(clock_jump, offset_ms=60_000), Blow(clock_jump, drift_ppm=900_000)):
        undo = blow.strike(stage, chance)
        skew_s = 59 if "offset_ms" in blow.args else 1

        def is_seen(skew_s: int = skew_s) -> bool:  # by whoever leads by then
            spreads = [metric(stage, n, "timer_clock_spread_seconds") for n in stage.names]
            return max(spreads) > skew_s

        until(is_seen)
        undo()
        schedules(stage)
    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        timer = client.schedule("t", b"payload", delay=timedelta(0))
    assert abs(timer.due_ms - time.time() * 1000) < 30_000


def test_power_cut_loses_unsynced_files(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(stage, power_cut)
    leader = stage.leader()
    monkeypatch.setattr(nemeses, "choose", lambda *_: leader)
    # A sync of any file takes along that another was made; so does the journal, each five seconds.
    stage.pause(leader)
    os.sync()
    (stage.data(leader) / "unsynced").write_text("in the page cache only")
    undo = Blow(power_cut, "leader").strike(stage, chance)
    assert not stage.cluster.is_running(leader)
    assert (stage.data(leader) / "identity.json").exists()
    assert not (stage.data(leader) / "unsynced").exists()
    undo()
    schedules(stage)


def test_killed_consumers_messages_come_again(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowd, "TAKE_S", WAIT_S)
    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        consumer = client.consumer("mortal", "g", window=1)
        client.schedule_batch("mortal", [bytes(8)] * 50, delay=timedelta(0))
        assert consumer.receive(1, timeout=WAIT_S)  # the rest is for others

        def killed() -> set[int]:
            """Return what died consumers held; one may find no group that is consumed just then."""
            with contextlib.suppress(NoEffect):
                Blow(kill_consumer, life_s=0.1).strike(stage, chance)()
            doomed = stage.run.histories.glob("doomed-*.jsonl")
            return {o for file in doomed for line in read(file) for o in line["offsets"]}

        held = until(killed)
        seen: dict[int, int] = {}
        while not held <= seen.keys():
            for message in consumer.receive(50, timeout=WAIT_S):
                seen[message.queue_offset] = message.attempt
                _ = message.ack()
        assert max(seen[offset] for offset in held) > 1
        consumer.close()


def test_flood_is_more_than_the_cluster_takes(stage: Stage, chance: random.Random) -> None:
    def refused() -> bool:
        Blow(flood, clients=6, size_mb=50).strike(stage, chance)()
        assert recorded(stage, "flood")["asked"] == 12
        return bool(recorded(stage, "flood")["refused"])

    until(refused)  # one may meet an election
    schedules(stage)


def test_full_disk_stops_the_node_and_room_brings_it_back(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(stage, fill)
    monkeypatch.setattr(file_damage, "NOTICE_S", WAIT_S)
    stop = threading.Event()

    def write() -> None:
        with TimerClient(stage.cluster.endpoints) as client:
            while not stop.is_set():
                try:
                    client.schedule_batch("t", [bytes(4096)] * 500, delay=timedelta(hours=1))
                except TimerError:
                    time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        undo = Blow(fill, "follower").strike(stage, chance)
    finally:
        stop.set()
        writer.join()
    assert recorded(stage, "full")["noticed"] == WAITING
    undo()
    assert not stage.note_deaths()
    schedules(stage)


def test_disks_nearly_full_refuse_what_is_new_until_there_is_room(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(stage, fill)
    monkeypatch.setattr(file_damage, "NOTICE_S", WAIT_S)

    def refusal() -> str:
        """Return why nothing is taken; empty: nobody leads, or whoever leads has not looked yet."""
        try:
            client.schedule("t", b"payload", delay=timedelta(hours=1), timeout=4)
        except DiskFull as refused:
            return str(refused)
        except TimerError:
            return ""
        return ""

    with TimerClient(stage.cluster.endpoints, timeout=WAIT_S) as client:
        timer = client.schedule("t", b"payload", delay=timedelta(hours=1))
        soon = client.schedule("nearly", b"payload", delay=timedelta(seconds=3))
        undo = Blow(fill, "all", leave=scenarios.NEARLY).strike(stage, chance)
        assert "free, below its storage.reserve_bytes = 134217728" in until(refusal)
        assert client.cancel(timer) is CancelResult.CANCELLED
        with client.consumer("nearly", group="g") as consumer:
            (message,) = consumer.receive(1, timeout=timedelta(seconds=WAIT_S))
            assert message.id == soon.id
            _ = message.ack()
        undo()
    schedules(stage)


def test_wiped_node_comes_back_with_what_it_lost_though_the_leader_dies_meanwhile(
    stage: Stage, chance: random.Random
) -> None:
    undo = Blow(wipe, "follower").strike(stage, chance)
    name = recorded(stage, "kill")["node"]
    assert not stage.data(name).exists()

    def heal() -> None:
        with stage.turn:
            undo()

    with ThreadPoolExecutor(1) as pool:
        healing = pool.submit(heal)
        until(lambda: stage.waited_for)
        with stage.turn:
            assert stage.waited_for == {name}
            Blow(kill, "leader").strike(stage, chance)()
        healing.result()
    assert recorded(stage, "kill")["role"] == "leader"
    assert recorded(stage, "kill")["node"] != name
    schedules(stage)
    until(lambda: len([*(stage.data(name) / "log").iterdir()]) >= 2)


def test_node_that_ends_by_itself_is_noticed(stage: Stage) -> None:
    assert stage.note_deaths() == []
    stage.cluster.kill("n2", signal.SIGKILL)
    assert stage.note_deaths() == ["n2"]
    assert recorded(stage, "died")["status"] == -9
    stage.restart("n2")
    schedules(stage)


@pytest.mark.parametrize(
    ("blow", "suffix"),
    [
        (Blow(damage, how=CUT), ".log"),
        (Blow(damage), ".log"),
        (Blow(damage, how=REMOVED), ".log"),
        (Blow(damage, part=file_damage.STATE, how=CUT), "manifest"),
        (Blow(damage, part=file_damage.STATE), ".arrow"),
        (Blow(damage, part=file_damage.STATE, how=CUT), ".keys"),
        (Blow(damage, part=file_damage.STATE, how=REMOVED), ".spill"),
    ],
)
def test_damaged_node_heals_and_its_log_is_kept_as_it_was(
    stage: Stage, chance: random.Random, monkeypatch: pytest.MonkeyPatch,
    blow: Blow, suffix: str,
) -> None:  # fmt: skip
    def needed(data: Path) -> list[str]:
        """Files of the manifest: one that a killed node has just begun nobody would miss."""
        said = manifest.read(RealDisk(), data / "state")
        return [manifest.NAME, *(name for name, _, _ in manifest.files(said))] if said else []

    def of_state(data: Path, _: random.Random) -> Path:
        return data / "state" / max(name for name in needed(data) if name.endswith(suffix))

    monkeypatch.setitem(file_damage.VICTIM, file_damage.STATE, of_state)
    schedules(stage)
    kinds = {"manifest", ".arrow", ".keys", ".spill"}
    until(
        lambda: all(
            kinds <= {Path(each).suffix or each for each in needed(stage.data(name))}
            for name in stage.names
        )
    )
    logs = {name: stage.run.root / "logs" / f"{name}.log" for name in stage.names}
    sizes = {name: path.stat().st_size for name, path in logs.items()}
    blow.strike(stage, chance)()
    name = recorded(stage, "kill")["node"]
    assert stage.lost == set()
    assert "; fetching state and log from the leader" in logs[name].read_text()[sizes[name] :]
    schedules(stage)
    until(lambda: stage.cluster.state(name) is not None)
    stage.archive.update()
    lives = stage.run.logs()[name]
    assert next(entries_of(Piece(lives[0], LogIndex(1), LogIndex(1)))).index == 1
    if blow.args.get("part", file_damage.LOG) == file_damage.LOG:
        assert lives[-1][0].first > 1


def test_nodes_are_listened_to_all_along(stage: Stage) -> None:
    schedules(stage)
    said = len([*read(stage.run.states)])
    wanted = {(name, what) for name in {*stage.names} - stage.lost for what in ("fired", "digest")}

    def heard() -> set[tuple[str, str]]:
        lines = [*read(stage.run.states)][said:]
        return {
            (line["node"], what) for line in lines for what in ("fired", "digest") if what in line
        }

    until(lambda: heard() >= wanted)
