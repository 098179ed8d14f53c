"""Against real processes: nodes that lack dropped entries, and nodes with damaged files."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.load import loaded
from tests.cluster.running import (
    SOON_DROPPED,
    Rotting,
    Running,
    flip,
    installs,
    kept_runs,
    until,
)

pytestmark = pytest.mark.slow

WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Rotting(tmp_path_factory.mktemp("healing"), SOON_DROPPED).cleaned() as cluster:
        yield cluster


def rot(path: Path) -> None:
    """Damage the very file that a process reads, if it is still there."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        whole = bytearray(file.read())
        for at in range(0, len(whole), 256):
            whole[at] ^= 0x10
        file.seek(0)
        file.write(whole)


def first_kept(cluster: Running, name: str) -> int:
    """Return the first entry that the files of a node's log hold."""
    log = cluster.directory / name / "log"
    return min(int(path.stem, 16) for path in log.glob("*.log"))


def outgrow(cluster: Running, leader: str) -> None:
    """Schedule until the leader has dropped all entries that its log holds now."""
    last = cluster.log_end(leader)
    with cluster.client() as client:

        def outgrown() -> bool:
            for _ in range(10):
                client.schedule_batch("far", [b"x" * 20_000] * 20, delay=[3600.0] * 20)
            return first_kept(cluster, leader) > last

        until(outgrown, WAIT_S)


# The first two have nodes of their own: none of the others run beside them.


@pytest.mark.long  # all nodes start twice
def test_damage_on_a_majority_stops_them_and_throws_nothing_away(tmp_path: Path) -> None:
    cluster = Running(tmp_path, (*SOON_DROPPED, "storage.refetch_timeout_ms = 3000"))
    try:
        cluster.start()
        with cluster.client() as client:
            client.schedule("far", b"kept", delay=3600)
        cluster.digests_agree()
        paths = [tmp_path / name / "state" / "manifest" for name in ("n1", "n2")]
        until(lambda: all(path.exists() for path in paths), WAIT_S)
        cluster.stop()
        manifests = {}
        for manifest in paths:
            manifests[manifest] = manifest.read_bytes()
            flip(manifest)
        for name in cluster.nodes:
            cluster._spawn(cluster.node(name))
        until(lambda: not (cluster.is_running("n1") or cluster.is_running("n2")), WAIT_S)
        for name in ("n1", "n2"):
            *_, last = cluster.log(name).splitlines()
            assert "manifest: corrupt at byte" in last
            assert "not healed within 3 s: no leader offers a snapshot" in last
        assert cluster.leader() is None
        # An operator repairs the files by hand.
        for manifest, whole in manifests.items():
            manifest.write_bytes(whole)
        cluster.up()
        cluster.digests_agree()
        cluster.stop()
    finally:
        cluster.kill_together(*cluster.nodes)


def test_leader_that_meets_damage_while_a_follower_is_being_healed_hands_over_first(
    tmp_path: Path,
) -> None:
    """If the leader ended, one whole node of three would be left, and no node could lead."""
    with Rotting(tmp_path, SOON_DROPPED).cleaned() as cluster:  # no older snapshot is pinned
        leader = cluster.up()
        healing, _ = cluster.followers()
        data = cluster.directory / leader
        pid = cluster.node(leader).pid
        with cluster.client() as client:
            client.schedule_batch("far", [b"x" * 20_000] * 10, delay=86_400)
            (run, *_) = until(lambda: kept_runs(data), WAIT_S)
            until(lambda: kept_runs(cluster.directory / healing), WAIT_S)
            cluster.kill(healing)
            flip(cluster.directory / healing / "state" / "manifest")
            flip(run, run.stat().st_size // 2)
            before = {name: installs(cluster, name) for name in (leader, healing)}
            cluster.start(healing, timeout_s=WAIT_S)
            until(
                lambda: all(installs(cluster, each) > was for each, was in before.items()), WAIT_S
            )
            assert f"{run}: corrupt at byte" in cluster.log(leader)
            assert "a file is damaged, to be repaired" in cluster.log(leader)
            assert "the leadership is over" in cluster.log(leader)
            assert cluster.node(leader).pid == pid
            cluster.start(timeout_s=WAIT_S)  # waits until it is ready
            client.schedule("far", b"after", delay=3600)
        cluster.digests_agree()


def test_query_that_meets_damage_is_answered_by_the_next_leader(cluster: Running) -> None:
    leader = cluster.up()
    data = cluster.directory / leader
    with cluster.client() as client:
        ids = {timer.id for timer in client.schedule_batch("asked", [b"x" * 20_000] * 9, delay=9e4)}
        until(lambda: kept_runs(data), WAIT_S)
        before = installs(cluster, leader)
        for run in kept_runs(data):
            flip(run, run.stat().st_size // 2)
        assert {timer.id for timer in client.list_timers("asked")} == ids
        until(lambda: installs(cluster, leader) > before, WAIT_S)
    cluster.digests_agree()
    assert "corrupt at byte" in cluster.log(leader)
    assert "the leadership is over" in cluster.log(leader)


@pytest.mark.long  # outgrows a segment of 64 MiB under load; damaged nodes fetch snapshots, too
def test_node_that_fell_behind_the_kept_log_gets_a_snapshot_while_load_goes_on(
    cluster: Running,
) -> None:
    with loaded(cluster, "lagging") as load:
        lagging, _ = cluster.followers()
        leader = cluster.wait_for_leader()
        cluster.kill(lagging)
        outgrow(cluster, leader)
        before = installs(cluster, lagging)
        cluster.start(lagging, timeout_s=WAIT_S)
        until(lambda: installs(cluster, lagging) > before, WAIT_S)
        load.wait_for_acks(50)
    cluster.digests_agree()


@pytest.mark.parametrize("what", ["log", "run", "manifest"])
def test_damaged_node_heals_by_itself(cluster: Running, what: str) -> None:
    cluster.up()
    damaged, _ = cluster.followers()
    data = cluster.directory / damaged
    with cluster.client() as client:
        client.schedule("far", b"x" * 20_000, delay=3600)
        until(lambda: kept_runs(data), WAIT_S)
        cluster.kill(damaged)
        path = {
            "log": lambda: min((data / "log").glob("*.log")),
            "run": lambda: kept_runs(data)[-1],
            "manifest": lambda: data / "state" / "manifest",
        }[what]()
        flip(path, 60 if what == "log" else -1)
        before, began_s = installs(cluster, damaged), int(time.time())
        cluster.start(damaged, timeout_s=WAIT_S)
        until(lambda: installs(cluster, damaged) > before, WAIT_S)
        assert f"{path.name}: corrupt at byte" in cluster.log(damaged)
        client.schedule("far", b"after", delay=3600)
        until(lambda: cluster.metric(damaged, "timer_last_repair_seconds") >= began_s)
        until(lambda: f"{path.name}: corrupt at byte" in str(client.status()))
    cluster.digests_agree()
    until(lambda: not (data / "damaged").exists())


@pytest.mark.parametrize("what", ["log", "segment"])
def test_node_whose_log_is_removed_while_it_runs_heals_by_itself(
    cluster: Running, what: str
) -> None:
    cluster.up()
    robbed, _ = cluster.followers()
    data = cluster.directory / robbed
    with cluster.client() as client:
        client.schedule("far", b"before", delay=3600)
        before = installs(cluster, robbed)
        if what == "segment":
            max((data / "log").glob("*.log")).unlink()  # appends to it go on
        else:
            shutil.rmtree(data / "log")
        until(lambda: installs(cluster, robbed) > before, WAIT_S)
        client.schedule("far", b"after", delay=3600)
    cluster.digests_agree()
    until(lambda: not (data / "damaged").exists())


@pytest.mark.long  # damages a node's runs until it fetches them again
def test_damage_met_while_running_is_healed_by_a_new_process(cluster: Running) -> None:
    cluster.up()
    damaged, _ = cluster.followers()
    data = cluster.directory / damaged
    pid = cluster.node(damaged).pid
    with cluster.client() as client:
        ids = [client.schedule("far", b"x" * 30_000, delay=3600).id for _ in range(60)]
        until(lambda: [*(data / "state" / "runs").glob("*.arrow")], WAIT_S)
        cluster.digests_agree()
        before = installs(cluster, damaged)
        rotten = set[str]()

        def healed() -> bool:
            for path in (data / "state" / "runs").glob("*.arrow"):
                if path.name not in rotten:
                    rotten.add(path.name)
                    rot(path)
            if ids:
                client.cancel(ids.pop())  # its row has to be found
            return installs(cluster, damaged) > before

        until(healed, WAIT_S)
    assert cluster.node(damaged).pid == pid
    cluster.digests_agree()
