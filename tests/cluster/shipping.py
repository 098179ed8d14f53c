"""A node that ships its log, and the states that its copies give."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from chaos.sim.world.simdisk import SimDisk
from cluster.api.log_shipping import LogShipping
from cluster.backup.backup_store import BackupStore
from cluster.backup.catalogue import read_catalogues
from cluster.backup.log_parts import StoredLog
from cluster.backup.log_shipper import (
    LogShipper,
    ShipPlan,
)
from cluster.backup.restoration import receive
from cluster.backup.roll_forward import Until
from tests.cluster.backups import OneNode
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, state_of
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry
from timer.files.disk import RealDisk
from timer.files.log import Log as TimerLog
from timer.model.units import Epoch, LogIndex, MonoMs, UnixMs
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound, Unavailable

DISK = RealDisk()


class Shipped(OneNode):
    """A node with a log on this disk, of which the first `applied` entries are applied."""

    def __init__(self, directory: Path, applied: int, log: Log | None = None) -> None:
        self.applied = applied
        self.cluster_id = "c"
        self.mono_ms, self.wall_ms = 0, START_MS
        self.wall_ms = START_MS
        self.damages: list[Any] = []
        self.asked: list[tuple[str, int, int]] = []
        self.reachable = True
        self.committed = 0
        self.silent: set[str] = set()
        self.absent: set[str] = set()
        """Nodes that the others don't reach."""
        self.dropped: set[str] = set()
        """Nodes that have dropped their log."""
        super().__init__(directory, log)
        self.files = TimerLog.open(DISK, directory / "log", segment_size=1000)
        self.files.append([frame_of(entry) for entry in self.log.entries])
        self.files.sync()
        self.shipping = LogShipping(
            self.files,
            applied=lambda: LogIndex(self.applied),
            mono_ms=lambda: MonoMs(self.mono_ms),
            wall_ms=lambda: UnixMs(self.wall_ms),
            on_damage=self.damages.append,
        )

    def grow(self, rows: int = 0) -> Any:
        """Write a manifest of the applied entries."""
        assert not rows
        engine = engine_on(DISK, self.state)
        catch_up(engine, first(self.log, self.applied))
        if engine.manifest_index < self.applied:
            flush(engine)
        return engine

    def status(self) -> pb.GetStatusResponse:
        if not self.reachable:
            raise Unavailable("no node answers")
        nodes = [
            pb.NodeStatus(name="n1", reachable=True, role="follower", applied_index=self.applied),
            pb.NodeStatus(name="n2", reachable=True, role="leader", applied_index=self.applied + 1),
        ]
        for node in nodes:
            node.commit_index = self.committed
            leads = node.name == ("n1" if "n2" in self.absent else "n2")
            node.serving = self.serving and leads
            node.reachable = node.name not in self.absent
        return pb.GetStatusResponse(cluster_id=self.cluster_id, leader="n2", nodes=nodes)

    def fetch_log(
        self, node: str, after: int, *, stored: int, shipper_id: int
    ) -> pb.FetchLogResponse:
        assert shipper_id
        if not self.reachable or node in self.silent:
            raise Unavailable("no node answers")
        if node not in {"n1", "n2"}:
            raise NotFound(f"no such node: {node!r}")
        self.asked.append((node, after, stored))
        found = asyncio.run(self.shipping.fetch(LogIndex(after), LogIndex(stored), shipper_id))
        index, epoch = found.applied
        if node in self.dropped and after < index:
            found = replace(found, is_dropped=True, epoch=Epoch(0), frames=b"")
        return pb.FetchLogResponse(
            cluster_id=self.cluster_id,
            epoch=found.epoch,
            applied_index=index,
            applied_epoch=epoch,
            frames=found.frames,
            is_gone=found.is_dropped,
        )


def frame_of(entry: Entry) -> bytes:
    parts = [bytes(entry.payload)]
    return entry_frame.encode(entry.kind, entry.epoch, entry.index, entry.time_ms, parts)


def first(log: Log, count: int) -> Log:
    """Return a log of the first entries."""
    return Log(entries=log.entries[:count])


class Shipper:
    """A shipper of one node, with a clock of its own."""

    def __init__(self, of: Shipped, store: BackupStore, **plan: Any) -> None:
        self.now_s = START_MS / 1000
        self.told: list[str] = []
        self.done: list[int] = []
        self.store = store
        usual = {"log_every_s": 0.001, "backup_every_s": 100.0, "patience_s": 0.0}
        self.shipper = LogShipper(
            cast("TimerClient", of),
            store,
            ShipPlan(**usual | plan),
            wall_s=lambda: self.now_s,
            mono_s=lambda: self.now_s,
            on_backup=lambda found: self.done.append(found.index),
            on_progress=self.told.append,
        )

    def step(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.shipper.step()

    def back_up(self) -> None:
        """Let the next backup end. It begins now, if none runs."""
        if self.shipper._running is None:
            self.step(100)
        assert self.shipper._running is not None
        self.shipper._running.exception()
        self.step()
        if self.shipper._pruning is not None:
            self.shipper._pruning.exception()


def backed_up(
    directory: Path, store: BackupStore, applied: int = 10, log: Log | None = None
) -> tuple[Shipped, Shipper]:
    """Return a node with applied entries, and a shipper that has taken a backup of them."""
    node = Shipped(directory, applied, log)
    shipper = Shipper(node, store)
    shipper.step()
    shipper.back_up()
    return node, shipper


def stored(store: BackupStore) -> StoredLog:
    return StoredLog(store, "c")


def state_at(store: BackupStore, directory: Path, until: Until) -> dict[str, Any]:
    """Return the state of a restore from the newest backup that the wish allows."""
    found = [each for each in read_catalogues(store) if each.index <= (until.index or 1 << 40)]
    receive(DISK, store, found[-1], directory, until)
    return state_of(engine_on(DISK, directory).machine)


def at(log: Log, count: int) -> dict[str, Any]:
    """Return the state of a node that has applied the first entries."""
    engine = engine_on(SimDisk())
    catch_up(engine, first(log, count))
    return state_of(engine.machine)
