"""Against real processes: a backup under load, a second one, and a cluster restored from it."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.running import Running, in_time, nothing_comes, take, until
from timerclient import TimerClient
from timerclient.cli.timerctl import main as timerctl

pytestmark = pytest.mark.slow

COUNT = 2_000
LEAD_MS = 8_000
HOUR_S = 3_600


class Load:
    """Schedules timers until its end; notes the payloads that were acknowledged."""

    def __init__(self, client: TimerClient) -> None:
        self.acknowledged: list[bytes] = []
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            begin = len(self.acknowledged)
            batch = [b"load %d" % (begin + at) for at in range(20)]
            self._client.schedule_batch("load", batch, delay=HOUR_S)
            self.acknowledged += batch

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()


def ctl(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run timerctl; return its document."""
    capsys.readouterr()
    code = timerctl([*words, "-o", "json"])
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def test_cluster_restored_from_a_backup_under_load_fires_every_pending_timer_once(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("backups")
    store, nodes = str(folder / "store"), folder / "nodes"
    with Running(nodes).cleaned() as cluster:
        where = ["--endpoints", ",".join(cluster.endpoints)]
        due: list[bytes] = []
        with cluster.client() as client, cluster.client() as other:
            client.create_group("t", "g")
            client.schedule_batch("t", [b"acked %d" % at for at in range(10)])
            with client.consumer("t", "g") as consumer:
                take(consumer, 10)
            load = Load(other)
            with load.running():

                def backed_up(due_ms: int) -> tuple[Any, int]:
                    begin = len(due)
                    batch = [b"%d " % (begin + at) + bytes(1_000) for at in range(COUNT)]
                    client.schedule_batch("t", batch, due_ms=due_ms)
                    due.extend(batch)
                    required = len(load.acknowledged)
                    return ctl(capsys, "backup", "--into", store, *where), required

                first, _ = in_time(backed_up, LEAD_MS)
                client.schedule_batch("t", [b"late %d" % at for at in range(50)], delay=0)
                due.extend(b"late %d" % at for at in range(50))
                required = len(load.acknowledged)
                second = ctl(capsys, "backup", "--into", store, *where)
            client.schedule("t", b"after the backup", delay=HOUR_S)
        restored = check_restore(cluster, folder, store, second, capsys)
        assert first["sent_bytes"] > COUNT * 1_000
        assert second["sent_bytes"] < first["sent_bytes"] / 4
        assert second["index"] > first["index"]
        assert first["node"] == second["node"]
        with cluster.client() as client:
            assert client.status().epoch > second["epoch"] + (1 << 20)
            status = cluster.counts_add_up()
            assert status.scheduled >= restored["pending"]
            with client.consumer("t", "g") as consumer:
                got = Counter(message.payload for message in take(consumer, len(due)))
                assert got == Counter(due)
                nothing_comes(consumer, lambda: client.schedule("t", b"the next"))
            client.create_group("load", "g", start="earliest")
            moved = int(client.reschedule_where("load", {}, delay=0))
            assert moved >= required
            with client.consumer("load", "g") as consumer:
                got = Counter(message.payload for message in take(consumer, moved))
            assert {*got.values()} == {1}
            assert {*load.acknowledged[:required]} <= {*got}
        cluster.digests_agree()
        # The restored cluster is a cluster like any other.
        exported = ctl(capsys, "export", "--into", str(folder / "parquet"), *where)
        assert exported["pending"]["rows"] == cluster.counts_add_up().pending
        again = ctl(capsys, "backup", "--into", str(folder / "store2"), *where)
        assert again["index"] > second["index"]


def start_on(cluster: Running, new: Path) -> None:
    """Start the nodes, which have ended, on restored directories."""
    for name in cluster.nodes:
        data = cluster.directory / cluster.node(name).data
        shutil.rmtree(data)
        (new / name).rename(data)
    cluster.start()
    cluster.wait_for_leader()


def last_applied(client: TimerClient) -> int:
    return max(node.applied_index for node in client.status().nodes)


def test_continuous_backup_has_the_acks_and_timers_since_the_last_backup(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("followed")
    store = str(folder / "store")
    with Running(folder / "nodes").cleaned() as cluster:
        words = ["backup", "--into", store, "--follow", "--log-every", "100ms", "-o", "json"]
        where = ["--endpoints", ",".join(cluster.endpoints)]
        command = [sys.executable, "-m", "timerclient.cli.timerctl", *words, *where]
        with (
            (folder / "told").open("wb") as told,
            subprocess.Popen(command, stdout=told, stderr=told) as shipper,
            cluster.client() as client,
        ):
            try:

                def reached(index: int) -> Any:
                    if not (folder / "store" / "backups").exists():
                        return None
                    backups = ctl(capsys, "backup", "list", "--from", store)["backups"]
                    if not backups:  # its directory is there before its catalogue
                        return None
                    [backup] = backups
                    return backup if backup.get("log_index", 0) >= index else None

                client.create_group("t", "g")
                first = until(lambda: reached(0))
                client.schedule_batch("t", [b"due %d" % at for at in range(50)])
                with client.consumer("t", "g") as consumer:
                    take(consumer, 20)  # acked
                follower = first["node"]
                sent = last_applied(client)
                until(lambda: reached(sent))
                cluster.kill(follower)  # another node sends the log
                timers = client.schedule_batch("t", [b"late"] * 30, delay=HOUR_S)
                assert all(client.cancel_batch(timers[:10]))
                applied = last_applied(client)
                until(lambda: reached(applied))
            finally:
                shipper.terminate()
        assert shipper.returncode == 0, (folder / "told").read_text()
        cluster.kill_together(*cluster.nodes)
        new = folder / "new"
        restored = ctl(capsys, "restore", "--from", store, "--into", str(new))
        assert restored["index"] >= applied > first["index"]
        assert (restored["pending"], restored["overdue"]) == (20, {})
        start_on(cluster, new)
        with cluster.client() as client, client.consumer("t", "g") as consumer:
            got = Counter(message.payload for message in take(consumer, 30))
            assert {*got.values()} == {1}
            nothing_comes(consumer, lambda: client.schedule("t", b"the next"))
        cluster.digests_agree()


def check_restore(
    cluster: Running, folder: Path, store: str, backup: Any, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Replace the nodes' directories by those of a restore; start them."""
    for command in (["list"], ["verify"], ["prune", "--keep", "1"]):
        assert timerctl(["backup", *command, "--from", str(folder / "none")]) == 1
        assert "none: there is no such folder" in capsys.readouterr().err
    words = ["export", "--into", str(folder / "out"), "--from", str(folder / "none")]
    assert timerctl(words) == 1
    assert "none: there is no such folder" in capsys.readouterr().err
    (folder / "empty").mkdir()
    assert timerctl(["backup", "list", "--from", str(folder / "empty")]) == 0
    assert capsys.readouterr().out == f"no backups in {folder / 'empty'}\n"
    assert timerctl(["backup", "verify", "--from", str(folder / "empty")]) == 1
    assert "empty has no complete backup" in capsys.readouterr().err
    listed = ctl(capsys, "backup", "list", "--from", store)["backups"]
    assert listed[-1] == backup
    assert ctl(capsys, "backup", "verify", "--from", store)["damaged"] == []
    cluster.kill_together(*cluster.nodes)
    new = folder / "new"
    restored = ctl(capsys, "restore", "--from", store, "--into", str(new))
    assert restored["pending"] == backup["pending"]
    assert {*restored["directories"]} == {*cluster.nodes}
    start_on(cluster, new)
    return restored
