"""Snapshots over gRPC: offered by leaders alone, resumed, checked, refused when wrong."""

import asyncio
import gc
import logging
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from replication.core.promise import Promise
from replication.proto import snapshot_pb2 as pb
from replication.shell import snapshot_fetch as receiving
from replication.shell.send_rate import SendRate
from replication.shell.snapshot_fetch import SnapshotFetch, UnusableAnswer, decode_offer
from replication.shell.snapshot_service import FETCH, Snapshots, encode_offer
from tests.calls import calls_of
from tests.timer.machines import START_MS, catch_up, engine_on, flush, part_of, state_of
from tests.timer.node_files import busy_log
from tests.waiting import until
from timer.files.disk import Disk, RealDisk
from timer.model.timer_errors import (
    CorruptFileError,
    FileDamage,
    NotReadyError,
    UnreadableFileError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId
from timer.recovery import snapshot_receiver, snapshot_source
from timer.recovery.engine import Engine
from timer.recovery.snapshot import OfferLeadership, Snapshot, SnapshotPart
from timer.recovery.snapshot_source import PINNED_MS, OfferedSnapshot

UNDER = Promise(Epoch(9), ReplicaId(3), Nonce(77))
DISK = RealDisk()


def nothing() -> LogIndex:
    return LogIndex(0)


class Source:
    """A node that leads, if it `leads`."""

    def __init__(self, directory: Path, *, flushed: bool = True) -> None:
        self.log = busy_log()
        for number in range(40):
            row = (1, START_MS + 10**7 + number, bytes(3000))
            self.log.schedule(part_of([row]))
        self.engine = engine_on(DISK, directory / "state")
        catch_up(self.engine, self.log)
        if flushed:
            flush(self.engine)
        self.directory = directory
        self.leads = True
        self.flushes = 0
        self.may_flush = asyncio.Event()
        self.may_flush.set()
        self.damages: list[FileDamage] = []
        self.fatal: list[BaseException] = []
        self.port = 0
        self.outgoing = OfferedSnapshot(DISK, directory / "state", directory / "outgoing")
        self.now_ms = 0

    async def _flush(self) -> None:
        self.flushes += 1
        await self.may_flush.wait()
        flush(self.engine)

    @asynccontextmanager
    async def served(self) -> AsyncIterator["Source"]:
        self.snapshots = Snapshots(
            self.outgoing,
            cluster_id="c",
            bytes_per_s=1 << 40,
            leads=lambda: UNDER if self.leads else None,
            flush=self._flush,
            mono_ms=lambda: MonoMs(self.now_ms),
            damaged=self.damages.append,
            fatal=self.fatal.append,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.snapshots.handler(),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)

    def dial(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")


def fetch_from(
    source: Source,
    into: Path,
    cluster_id: str = "c",
    known: Callable[[], LogIndex] = nothing,
    disk: Disk = DISK,
) -> SnapshotFetch:
    def check(directory: Path) -> None:
        engine_on(DISK, directory)

    dials = {"n1": source.dial}
    return SnapshotFetch(
        disk, into, cluster_id=cluster_id, name="n2", dials=dials, check=check, known=known
    )


def installed(arrived: Path, directory: Path) -> Engine:
    places = {name: directory / name for name in ("state", "log", "damaged")}
    snapshot_receiver.install(DISK, arrived, **places, keep_log=False)
    return engine_on(DISK, directory / "state")


async def test_snapshot_arrives_and_is_the_state_that_was_sent(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        found = await fetch_from(source, tmp_path / "in").run()
    assert found is not None
    assert source.snapshots.kept_from == found.index + 1
    engine = installed(tmp_path / "in", tmp_path / "b")
    assert state_of(engine.machine) == state_of(source.engine.machine)


async def test_leader_without_a_manifest_writes_one(tmp_path: Path) -> None:
    async with Source(tmp_path / "a", flushed=False).served() as source:
        found = await fetch_from(source, tmp_path / "in").run()
    assert found is not None
    assert (source.flushes, found.index) == (1, source.engine.manifest_index)


async def test_who_does_not_lead_offers_nothing_until_it_does(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        source.leads = False
        refetch = fetch_from(source, tmp_path / "in")
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: "lease does not hold" in refetch.status)
        assert not work.done()
        source.leads = True
        assert await work is not None


async def test_fetches_of_what_is_not_there_take_nothing_from_those_of_what_is(
    tmp_path: Path,
) -> None:
    async with Source(tmp_path / "a").served() as source, source.dial() as channel:
        source.snapshots._pace = SendRate(64 << 20)  # a MiB each would take these 600 ten seconds
        fetch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH)
        asked = pb.SnapshotFetch(part=pb.SnapshotPart(path="state.msgpack", size=1 << 40))
        for _ in range(600):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await fetch(asked.SerializeToString()).read()
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        now_s = asyncio.get_running_loop().time()
        assert source.snapshots._pace._free_s <= now_s, "nothing was charged"


class _SmallDisk(RealDisk):
    """A disk with the free space that the test sets."""

    free = 0

    def free_bytes(self, path: Path) -> int:
        del path
        return self.free


async def test_receiver_without_room_asks_ever_less_often_and_logs_an_offer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, receiving.__name__)
    pauses: list[float] = []
    loop, disk = asyncio.get_running_loop(), _SmallDisk()
    call_later = loop.call_later

    def at_once(delay: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        if delay >= receiving.RETRY_S:
            pauses.append(delay)
            delay = 0
        return call_later(delay, *args, **more)

    monkeypatch.setattr(loop, "call_later", at_once)
    async with Source(tmp_path / "a").served() as source:
        refetch = fetch_from(source, tmp_path / "in", disk=disk)
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: len(pauses) >= 7)
        assert pauses[:7] == [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0]
        assert refetch.status.startswith("the disk has 0 MiB free; the snapshot needs 33 MiB")
        seen, refetch.moved_s = len(pauses), loop.time()  # as if data had arrived
        await until(lambda: len(pauses) > seen)
        assert pauses[seen] == 0.3
        lack = refetch.room_error
        assert lack is not None
        disk.free = lack.needed_bytes
        assert await work is not None
    assert refetch.room_error is None
    assert sum("offers a snapshot" in line for line in caplog.messages) == 1
    assert sum("no snapshot from" in line for line in caplog.messages) == 1


async def test_other_cluster_is_refused(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        refetch = fetch_from(source, tmp_path / "in", cluster_id="other")
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: "cluster_id = 'other'" in refetch.status)
        work.cancel()
        await asyncio.wait({work})


async def test_fetch_goes_on_after_the_source_forgot_and_flushed(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        there = source.outgoing.offer()
        arriving = snapshot_receiver.IncomingSnapshot(DISK, tmp_path / "in")
        arriving.begin(there, OfferLeadership(*_fields(UNDER)))
        part, _ = arriving.next_missing() or pytest.fail("nothing wanted")
        while (wanted := arriving.next_missing()) is not None and wanted[0].path.startswith(
            "manifest"
        ):
            data = DISK.read(source.directory / "outgoing" / part.path)
            arriving.put(*wanted, data)
        for now_ms in (10**9, 10**9 + PINNED_MS - 1, 10**9 + PINNED_MS):  # however long it took
            assert source.snapshots.kept_from == there.index + 1
            source.now_ms = now_ms
            await source.snapshots.expire()
        assert source.snapshots.kept_from is None
        source.log.schedule(part_of([(1, START_MS + 10**8, b"later")]))
        catch_up(source.engine, source.log)
        flush(source.engine)
        found = await fetch_from(source, tmp_path / "in").run()
    assert found is not None
    assert found.index > there.index
    engine = installed(tmp_path / "in", tmp_path / "b")
    assert state_of(engine.machine) == state_of(source.engine.machine)


async def test_links_that_another_program_removes_are_made_again(tmp_path: Path) -> None:
    """They are no damage: the files of the state are there."""
    async with Source(tmp_path / "a").served() as source:
        there = source.outgoing.offer()
        shutil.rmtree(tmp_path / "a" / "outgoing")
        source.outgoing.check(there.parts[-1].path)
        assert await fetch_from(source, tmp_path / "in").run() == there
        assert not source.fatal


async def test_what_is_asked_for_and_never_read_is_let_go_of(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        source.outgoing.offer()
        for now_ms in range(10**9, 10**9 + PINNED_MS + 1, PINNED_MS // 4):
            source.now_ms = now_ms
            await source.snapshots.expire()
            if now_ms < 10**9 + PINNED_MS:
                source.outgoing.offer()  # by one that has no room for it
        assert source.snapshots.kept_from is None


async def test_what_is_here_is_checked_before_anybody_has_to_wait_for_it(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        stopped = fetch_from(source, tmp_path / "in")
        stopped._incoming.finish = _never  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            await stopped.run()
        source.leads = False
        refetch = fetch_from(source, tmp_path / "in")
        refetch.moved_s = 0.0
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: "lease does not hold" in refetch.status)
        assert refetch._incoming._verified == {*source.outgoing.offer().parts}
        assert refetch.moved_s > 0
        work.cancel()
        await asyncio.wait({work})


def _never() -> None:
    raise KeyError


async def test_source_that_finds_its_own_damage_heals_and_does_not_send_the_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the source would leave no majority: the node that asks is not healed yet.

    The source learns of the damaged part, although the receiver asks another node first.
    """
    monkeypatch.setattr(receiving, "RETRY_S", 0.01)
    async with Source(tmp_path / "a").served() as source, Source(tmp_path / "b").served() as other:
        other.leads = False
        reads = calls_of(monkeypatch, source.outgoing, "read")
        there = source.outgoing.offer()
        run = next(part for part in there.parts if part.path.startswith("runs/"))
        path = source.directory / "state" / run.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)  # the same file as the pinned one
        refetch = fetch_from(source, tmp_path / "in")
        refetch._dials = {"n0": other.dial, "n1": source.dial}
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: len(source.damages) == 3)  # the receiver asks again
        assert refetch.status.endswith(f"this node has damaged files: {source.damages[0]})")
        work.cancel()
        await asyncio.wait({work})
        assert not source.outgoing.has_part(run)
    assert {str(found) for found in source.damages} == {
        f"{path}: corrupt at byte 0: checksum mismatch"
    }
    assert ([part.path for part, *_ in reads].count(run.path), source.fatal) == (1, [])


async def test_refused_request_does_not_end_the_suspicion_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "RETRY_S", 0.01)

    def reading(*_: object) -> None:
        raise AssertionError("a part that is known as damaged")

    async with Source(tmp_path / "a").served() as source:
        there = source.outgoing.offer()
        run = next(part for part in there.parts if part.path.startswith("runs/"))
        path = source.directory / "state" / run.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        source.leads = False
        monkeypatch.setattr(source.outgoing, "read", reading)
        refetch = fetch_from(source, tmp_path / "in")
        refetch._suspects["n1"] = run.path
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: "lease does not hold" in refetch.status)
        source.leads = True
        await until(lambda: source.damages or source.fatal)
        work.cancel()
        await asyncio.wait({work})
        assert source.fatal == []


async def test_damage_found_by_an_offer_or_a_read_is_refused_and_another_error_is_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "RETRY_S", 0.01)

    async def met(error: Exception, method: str, reason: str) -> None:
        def failing(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(source.outgoing, method, failing)
            refetch = fetch_from(source, tmp_path / "in")
            work = asyncio.ensure_future(refetch.run())
            await until(lambda: reason in refetch.status)
            work.cancel()
            await asyncio.wait({work})

    async with Source(tmp_path / "a").served() as source:
        for damage, method in (
            (CorruptFileError("m", 7, "b"), "offer"),
            (UnreadableFileError("r", 9, "EIO"), "read"),
        ):
            await met(damage, method, f"this node has damaged files: {damage}")
            assert damage in source.damages
        assert source.fatal == []
        await met(OSError("planted"), "offer", "planted")
        assert str(source.fatal[0]) == "planted"
        assert await fetch_from(source, tmp_path / "in").run() is not None


async def test_damaged_snapshot_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "UNFIT_S", 0.0)
    async with Source(tmp_path / "a").served() as source:
        refetch = fetch_from(source, tmp_path / "in")

        def unfit(directory: Path) -> None:
            raise CorruptFileError(directory, 0, "planted")

        refetch._check = unfit
        work = asyncio.ensure_future(refetch.run())
        await until(lambda: "can't be used" in refetch.status)
        work.cancel()
        await asyncio.wait({work})
    assert snapshot_receiver.snapshot_to_install(DISK, tmp_path / "in") is None


async def test_work_that_an_asker_began_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads can't be cancelled: another's work in the same directory must wait for them.
    took: list[Path] = []
    going, may_go = threading.Event(), threading.Event()
    take = snapshot_source.pin

    def slow_take(disk: Disk, state: Path, into: Path) -> Snapshot:
        if not took:
            going.set()
            assert may_go.wait(120)
        took.append(into)
        return take(disk, state, into)

    monkeypatch.setattr(snapshot_source, "pin", slow_take)
    async with Source(tmp_path / "a").served() as source:
        first = asyncio.ensure_future(fetch_from(source, tmp_path / "in").run())
        await until(going.is_set)
        assert source.snapshots.kept_from == 1  # which entries it will need is not known yet
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.ensure_future(fetch_from(source, tmp_path / "in2").run())
        may_go.set()
        found = await second
    assert found is not None
    assert (len(took), source.fatal) == (1, [])


async def test_manifest_that_an_asker_wanted_is_written_without_it(tmp_path: Path) -> None:
    async with Source(tmp_path / "a", flushed=False).served() as source:
        source.may_flush.clear()
        first = asyncio.ensure_future(fetch_from(source, tmp_path / "in").run())
        await until(lambda: source.flushes)
        first.cancel()
        await asyncio.wait({first})
        source.may_flush.set()
        await until(lambda: source.outgoing.pinned)
    assert source.flushes == 1


async def test_refusal_of_an_offer_whose_asker_has_gone_is_not_logged_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: LogIndex) -> Snapshot:
        raise NotReadyError("no manifest yet")

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    async with Source(tmp_path / "a", flushed=False).served() as source:
        monkeypatch.setattr(source.outgoing, "offer", refuse)
        source.may_flush.clear()
        asked, context = pb.SnapshotOpen(version=1, cluster_id="c", name="n2"), AsyncMock()
        opening = asyncio.ensure_future(source.snapshots._open(asked.SerializeToString(), context))
        await until(lambda: source.flushes)
        opening.cancel()
        await asyncio.wait({opening})
        del opening
        source.may_flush.set()
        await until(lambda: not source.snapshots._tasks)
        gc.collect()  # a task tells then that its exception was never retrieved
    assert (complaints, source.fatal) == ([], [])


async def test_only_a_snapshot_beyond_what_is_known_is_fetched(tmp_path: Path) -> None:
    async with Source(tmp_path / "a").served() as source:
        old = source.outgoing.offer()
        source.log.schedule(part_of([(1, START_MS + 10**8, b"later")]))
        catch_up(source.engine, source.log)
        flush(source.engine)
        found = await fetch_from(source, tmp_path / "in", known=lambda: old.index).run()
        assert found is not None
        assert found.index == source.engine.manifest_index > old.index
        fetch = fetch_from(source, tmp_path / "in2", known=lambda: found.index)
        assert await fetch.run() is None
    assert not (tmp_path / "in2" / "manifest").exists()


async def test_nothing_more_is_fetched_once_the_log_has_brought_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Source(tmp_path / "a").served() as source:
        read, known, parts = source.outgoing.read, LogIndex(0), set[str]()

        def reading(part: SnapshotPart, offset: int, size: int) -> bytes | None:
            nonlocal known
            known = source.engine.manifest_index
            parts.add(part.path)
            return read(part, offset, size)

        monkeypatch.setattr(source.outgoing, "read", reading)
        assert await fetch_from(source, tmp_path / "in", known=lambda: known).run() is None
        assert len(parts) == 1 < len(source.outgoing.offer().parts)


async def test_receiver_falls_silent_before_the_install_is_ordered(tmp_path: Path) -> None:
    silent: list[object] = []

    async def fall_silent() -> None:
        silent.append(snapshot_receiver.snapshot_to_install(DISK, tmp_path / "in"))

    async with Source(tmp_path / "a").served() as source:
        refetch = fetch_from(source, tmp_path / "in")
        refetch._fall_silent = fall_silent
        found = await refetch.run()
    assert silent == [None]
    assert found is not None
    assert snapshot_receiver.snapshot_to_install(DISK, tmp_path / "in") == (found, _fields(UNDER))


async def test_what_the_log_has_brought_until_the_receiver_is_silent_is_not_installed(
    tmp_path: Path,
) -> None:
    known = LogIndex(0)

    async def fall_silent() -> None:
        nonlocal known
        known = source.engine.manifest_index

    async with Source(tmp_path / "a").served() as source:
        refetch = fetch_from(source, tmp_path / "in", known=lambda: known)
        refetch._fall_silent = fall_silent
        assert await refetch.run() is None
    assert known
    assert snapshot_receiver.snapshot_to_install(DISK, tmp_path / "in") is None
    assert not (tmp_path / "in" / "manifest").exists()


async def test_every_byte_that_is_sent_is_paced(tmp_path: Path) -> None:
    spent: list[int] = []

    async def spend(size: int) -> None:
        spent.append(size)

    async with Source(tmp_path / "a").served() as source:
        source.snapshots._pace.spend = spend  # type: ignore[method-assign]
        found = await fetch_from(source, tmp_path / "in").run()
    assert found is not None
    assert sum(spent) == found.size


async def test_bytes_pass_at_the_rate_and_a_pause_is_not_made_up_for() -> None:
    now_s = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    pace = SendRate(1000, clock=lambda: now_s, sleep=sleep)
    for passed in range(5):  # each waits for the one before it
        await pace.spend(500)
        assert now_s == pytest.approx(100 + passed / 2)
    now_s += 3600
    await pace.spend(500)
    assert now_s == pytest.approx(100 + 2 + 3600)
    await pace.spend(1)
    assert now_s == pytest.approx(100 + 2 + 3600 + 0.5)


@pytest.mark.parametrize(
    "path", ["../x", "runs/../../x", "runs/", "log/1.log", "", "/manifest", "runs/a\0b", "runs/.."]
)
def test_part_that_lies_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(UnusableAnswer, match="part"):
        decode_offer(offer(parts=(SnapshotPart(path, 5, 1),)).SerializeToString())


@pytest.mark.parametrize("field", ["index", "epoch", "leader_epoch"])
def test_offer_that_no_leader_would_make_is_refused(field: str) -> None:
    said = offer()
    setattr(said, field, 0)
    with pytest.raises(UnusableAnswer, match="invalid offer"):
        decode_offer(said.SerializeToString())
    with pytest.raises(UnusableAnswer, match="damaged offer"):
        decode_offer(b"\xff\xff")


def offer(parts: tuple[SnapshotPart, ...] = (SnapshotPart("manifest", 9, 1),)) -> pb.SnapshotOffer:
    there = Snapshot(index=LogIndex(7), epoch=Epoch(2), voters=(ReplicaId(1),), parts=parts)
    assert decode_offer(encode_offer(replace_parts(there), UNDER).SerializeToString())[0].index == 7
    return encode_offer(there, UNDER)


def replace_parts(there: Snapshot) -> Snapshot:
    return Snapshot(
        index=there.index,
        epoch=there.epoch,
        voters=there.voters,
        parts=(SnapshotPart("manifest", 9, 1),),
    )


def _fields(promise: Promise) -> tuple[Epoch, ReplicaId, Nonce]:
    return promise.epoch, promise.leader, promise.nonce
