"""Backups of one node, taken and restored."""

from pathlib import Path
from typing import Any, cast

from cluster.backup.backup_run import BackupRun
from cluster.backup.backup_store import BackupStore
from cluster.backup.catalogue import (
    Catalogue,
)
from cluster.backup.restoration import RestorePlan, restore
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of
from tests.timer.node_files import busy_log
from timer.files.disk import RealDisk
from timer.recovery.engine import Engine
from timer.recovery.snapshot_source import pin
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound

DISK = RealDisk()


class OneNode:
    """A node's answers to a backup, from an engine on this disk."""

    def __init__(self, directory: Path, log: Log | None = None) -> None:
        self.state, self.pinned = directory / "state", directory / "pinned"
        self.log = log or busy_log()
        self.fetched = 0
        self.serving = True
        self.left: int | None = None
        """Bytes until the node closes the backup. None: any."""
        self.grow()

    def grow(self, rows: int = 0) -> Engine:
        """Apply the log, with a few more timers, and write a manifest."""
        if rows:
            due = START_MS + 10**8
            self.log.schedule(part_of([(1, due + at, b"more") for at in range(rows)]))
        engine = engine_on(DISK, self.state)
        catch_up(engine, self.log)
        flush(engine)
        return engine

    def status(self) -> pb.GetStatusResponse:
        node = pb.NodeStatus(name="n1", reachable=True, replica_id=7, serving=self.serving)
        return pb.GetStatusResponse(cluster_id="c", nodes=[node])

    def open_backup(self, _: str, __: int, *, min_index: int) -> pb.OpenBackupResponse:
        found = pin(DISK, self.state, self.pinned)
        assert min_index <= found.index
        part = pb.OpenBackupResponse.Part
        parts = [part(path=p.path, size=p.size, crc32=p.crc32) for p in found.parts]
        return pb.OpenBackupResponse(
            cluster_id="c", replica_id=7, index=found.index, epoch=found.epoch, parts=parts
        )

    def fetch_backup(self, _: str, __: int, path: str, offset: int) -> bytes:
        data = DISK.read(self.pinned / path, offset, 1000)
        self.fetched += len(data)
        if self.left is not None and self.fetched > self.left:
            raise NotFound("no such open backup")
        return data

    def close_backup(self, _: str, __: int, *, complete: bool) -> None:
        self.complete = complete


def backed_up(node: OneNode, store: BackupStore) -> Catalogue:
    node.fetched = 0
    return BackupRun(cast("TimerClient", node), store, patience_s=0).take()


def plan_of(found: Catalogue, **changes: Any) -> RestorePlan:
    usual = {"cluster_id": "c", "voters": ("a", "b", "state"), "restore_id": "r"}
    return RestorePlan(catalogue=found, **usual | changes)


def restored(store: BackupStore, found: Catalogue, target: Path) -> dict[str, Path]:
    plan = plan_of(found)
    places = {name: target / name for name in plan.voters}
    restore(store, plan, places, target, START_MS)
    return places
