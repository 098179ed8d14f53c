"""Room on the disks: a cluster that has too little, and a node that waits for it.

The disk of this machine is what the nodes see. Their reserve ends a little below what is free, so
that a file of a few GB, made without writing it, is too much. Disks that are really full: the chaos
suite (chaos/suite/nemeses/file_damage.py).
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from cluster.files import repair
from cluster.files.disk_room import used_bytes, wait_for_disk_space
from cluster.files.standby_ports import WAITING
from cluster.files.storage import Damaged
from cluster.settings.config import NodeConfig, build_config
from deploy.local import free_ports
from replication.core.promise import NEVER_GIVEN
from tests.cluster.running import (
    CALL_S,
    RPC_S,
    Running,
    code_of,
    columns,
    error_of,
    schedule,
    take,
    until,
)
from timer.files.data_directory import format_directory
from timer.files.disk import RealDisk
from timer.files.disk_reserve import START_BYTES
from timer.model.timer_errors import CorruptFileError
from timer.model.units import ReplicaId
from timer.recovery.snapshot_receiver import SnapshotSpaceError
from timerclient import CancelResult, DiskFull
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.errors import OutcomeUnknown, Unavailable

GIB = 1 << 30
MARGIN = 4 * GIB
"""Bytes that other processes of this machine may write or free meanwhile."""


def test_hard_links_take_their_bytes_once(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run").write_bytes(bytes(1_000))
    (tmp_path / "log").write_bytes(bytes(10))
    for name in ("backup", "snapshot"):
        (tmp_path / name).hardlink_to(tmp_path / "state" / "run")
    assert used_bytes(tmp_path) == 1_010


class Nearly:
    """A cluster whose disks can be made nearly full."""

    def __init__(self, cluster: Running, ballast: Path, reserve: int) -> None:
        self.cluster, self._ballast, self.reserve = cluster, ballast, reserve

    def lapses(self) -> tuple[int, int]:
        """Return the epoch, and how often the leaders have accepted timers again.

        A new leader accepts timers until it has heard of the others' disks. So does one that
        misses their status, on a busy machine.
        """
        epoch = self.cluster.admin().GetStatus(pb.GetStatusRequest()).epoch
        logs = (self.cluster.log(name) for name in self.cluster.nodes)
        return epoch, sum(log.count("has free space again: timers are accepted") for log in logs)

    def lapses_of_refusing(self) -> tuple[int, int]:
        """Wait until the leader rejects timers, and return the lapses of then."""

        def steady() -> tuple[int, int] | None:
            before = self.lapses()
            return before if sum(self.refusing()) == 1 and self.lapses() == before else None

        return until(steady)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Every node knows that its disk has too little room, and the leader of all."""
        with self._ballast.open("wb") as file:
            free = shutil.disk_usage(self._ballast.parent).free
            os.posix_fallocate(file.fileno(), 0, free - self.reserve + MARGIN)
        try:
            until(lambda: self.low() == 3)
            until(lambda: sum(self.refusing()) == 1)
            yield
        finally:
            self._ballast.unlink()

    def low(self) -> int:
        status = self.cluster.admin().GetStatus(pb.GetStatusRequest())
        return sum(node.disk_low for node in status.nodes)

    def refusing(self) -> list[float]:
        return [self.cluster.metric(name, "timer_refusing") for name in self.cluster.nodes]


@pytest.fixture(scope="module")
def nearly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nearly]:
    folder = tmp_path_factory.mktemp("space")
    free = shutil.disk_usage(folder).free
    if free < 4 * MARGIN:
        pytest.skip(
            f"FULL DISKS WERE NOT TESTED: {free >> 30} GiB are free, not {4 * MARGIN >> 30}"
        )
    reserve = (free - MARGIN) * 8 // 9  # an eighth more, and there is room again
    with Running(folder, [f"storage.reserve_bytes = {reserve}"]).cleaned() as cluster:
        yield Nearly(cluster, folder / "ballast", reserve)


def refused_for_room(nearly: Nearly, before: tuple[int, int], call: Callable[[], object]) -> bool:
    """Return whether the leader rejected calls until the deadline.

    `before`: the lapses before the call. False: there was no leader, or it accepted in a lapse.
    """
    try:
        call()
    except DiskFull:
        return True
    except (Unavailable, OutcomeUnknown):
        return False
    assert nearly.lapses() != before
    return False


def refusal_of(cluster: Running) -> pb.Error | None:
    """Return the error with which the leader rejects a schedule. None: accepted, or no leader."""
    try:
        cluster.timers().Schedule(schedule(columns("far", [b"z"])), timeout=RPC_S)
    except grpc.RpcError as refused:
        if code_of(refused) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
            return None
        return error_of(refused)
    return None


@pytest.mark.long  # fills a disk
def test_refused_schedule_says_what_is_free_and_what_is_kept(nearly: Nearly) -> None:
    cluster = nearly.cluster
    with cluster.client(timeout=20) as client, client.consumer("soon", group="g") as consumer:
        pending = client.schedule_batch("far", [b"x"] * 3, delay=3600)
        client.schedule_batch("soon", [b"y"] * 10, delay=1)
        with nearly.full():
            error = until(lambda: refusal_of(cluster))
            assert error.reason == pb.REASON_DISK_FULL
            assert (error.retryable, error.outcome_known) == (True, True)
            assert f"free, below its storage.reserve_bytes = {nearly.reserve}" in error.message
            until(
                lambda: refused_for_room(
                    nearly,
                    nearly.lapses_of_refusing(),
                    lambda: client.schedule("far", b"z", timeout=4),
                )
            )
            until(
                lambda: refused_for_room(
                    nearly,
                    nearly.lapses_of_refusing(),
                    lambda: client.reschedule(pending[1].id, delay=7200, timeout=4),
                )
            )

            assert client.cancel(pending[0].id) is CancelResult.CANCELLED
            assert len(take(consumer, 10)) == 10
            cluster.change_leader(client)
            until(lambda: sum(nearly.refusing()) == 1)
            assert client.cancel(pending[1].id) is CancelResult.CANCELLED
            cluster.digests_agree()
        # The client sends it again and again: it is taken as soon as there is room.
        client.schedule("far", b"z", delay=3600)
        assert client.reschedule(pending[2].id, delay=7200).id
        until(lambda: not nearly.low())
    cluster.counts_add_up()
    assert cluster.json("n1", "/v1/status")["nodes"][0]["disk_reserve_bytes"] == nearly.reserve


def test_pipelined_batches_name_the_full_disk_and_are_taken_once_there_is_room(
    nearly: Nearly,
) -> None:
    with nearly.cluster.client() as client:
        client.schedule_batch("far", [b"first"], delay=3600)

        def all_refused() -> bool:
            before = nearly.lapses_of_refusing()
            batches = [client.submit_batch("far", [b"r"], delay=60, timeout=4) for _ in range(5)]
            refused = [
                refused_for_room(nearly, before, partial(each.result, CALL_S)) for each in batches
            ]
            return all(refused)

        with nearly.full():
            until(all_refused)
            waiting = [client.submit_batch("far", [b"w"], delay=3600) for _ in range(5)]
        due_ms = [batch.result(CALL_S)[0].due_ms for batch in waiting]
    assert due_ms == sorted(due_ms)


class _SmallDisk(RealDisk):
    """A disk with the free space that the test sets."""

    free = 0

    def free_bytes(self, path: Path) -> int:
        del path
        return self.free


def _config(data: Path) -> NodeConfig:
    grpc_port, http_port = free_ports(2)
    return build_config(
        {
            "name": "n1",
            "cluster_id": "test",
            "data": str(data),
            "peers.n1": f"127.0.0.1:{grpc_port}",
            "http": f"127.0.0.1:{http_port}",
        }
    )


async def _status_of(config: NodeConfig) -> pb.NodeStatus:
    async with grpc.aio.insecure_channel(config.peers[config.name]) as channel:
        stub = rpc.AdminServiceStub(channel)
        answer = await stub.GetStatus(pb.GetStatusRequest(), wait_for_ready=True, timeout=60)
    return answer.nodes[0]


async def test_node_without_room_waits_for_it_and_says_so(tmp_path: Path) -> None:
    config, disk = _config(tmp_path), _SmallDisk()
    disk.free = START_BYTES - 1
    waiting = asyncio.ensure_future(wait_for_disk_space(disk, config))
    status = await _status_of(config)
    assert not waiting.done()
    disk.free = START_BYTES
    await asyncio.wait_for(waiting, 60)
    await asyncio.wait_for(wait_for_disk_space(disk, config), 60)  # at once
    assert (status.role, status.disk_low, status.reachable) == (WAITING, True, False)
    assert "the disk has 15 MiB free; 16 MiB are needed" in status.error


class _StuckFetch:
    """A fetch whose last progress was long ago."""

    moved_s = -1e9
    status = "the last obstacle"

    def __init__(self, *_: object, **__: object) -> None:
        self.error: SnapshotSpaceError | None = SnapshotSpaceError(free_bytes=7, needed_bytes=9)
        self.looks = 0

    @property
    def room_error(self) -> SnapshotSpaceError | None:
        self.looks += 1
        return self.error

    async def run(self) -> None:
        await asyncio.Event().wait()


async def test_damaged_node_waits_for_the_room_of_a_snapshot_without_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, fetch = _config(tmp_path), _StuckFetch()
    monkeypatch.setattr(repair, "SnapshotFetch", lambda *_, **__: fetch)
    monkeypatch.setattr(repair, "CHECK_INTERVAL_S", 0.01)
    format_directory(
        RealDisk(),
        tmp_path,
        cluster_id="test",
        name="n1",
        replica_id=ReplicaId(1),
        founding_voters={"n1": ReplicaId(1)},
        promise=NEVER_GIVEN,
    )
    damaged = Damaged(CorruptFileError("manifest", 5, "checksum mismatch"))
    healing = asyncio.ensure_future(repair.repair(RealDisk(), config, damaged))
    status = await _status_of(config)
    async with asyncio.timeout(60):
        while fetch.looks < 20 and not healing.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not healing.done()
    fetch.error = None
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + 301)
    with pytest.raises(CorruptFileError, match=r"not healed within 300 s: the last obstacle$"):
        await asyncio.wait_for(healing, 60)
    assert (status.role, status.disk_low, status.disk_free_bytes) == (WAITING, True, 7)
    assert status.error == f"{damaged}: the last obstacle"
    assert caplog.messages.count(f"{WAITING}: {status.error}") == 1
