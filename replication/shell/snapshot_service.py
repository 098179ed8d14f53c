"""The sending side of snapshots: two methods beside the streams between the nodes.

    Open   returns the snapshot's index, files, sizes and checksums; pins the snapshot
    Fetch  returns one file from an offset on, in chunks with checksums

**Only a leader whose lease holds offers a snapshot.** A majority of sure voters elected that
leader, and no other leader has followed. A snapshot holds committed entries only, and is harmless
by itself. Installing it, however, discards the receiver's log. Suppose that a replica with a
damaged log took the snapshot of a stale one. Entries that the stale replica never had would be
gone. If a majority were damaged one after the other, the cluster would end at the stale replica's
state. A damaged replica therefore waits for a leader elected without its vote. If a majority is
damaged there is none. The damaged replicas then wait, report this, and stop. No data was discarded,
and an operator decides.

**Damage of the leader's own files is no reason to end at once.** The node that asks is not healed
yet, so the others may not be a majority without the leader. The damage goes to the node's scrubber,
which hands the leadership over and waits. The request is refused as not ready: the receiver asks
all nodes again, and finds the next leader.

The sender is paced, so that the load on clients and followers stays small. While a snapshot is
pinned, the log after it is kept.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from isal import isal_zlib

from replication.core.promise import Promise
from replication.proto import snapshot_pb2 as pb
from replication.shell.send_rate import SendRate
from replication.shell.tasks import failure_of
from replication.shell.transport import Identify
from timer.model.timer_errors import FileDamage, NotReadyError
from timer.model.units import LogIndex, MonoMs
from timer.recovery.snapshot import Snapshot, SnapshotPart
from timer.recovery.snapshot_source import OfferedSnapshot

VERSION: Final = 1
SERVICE: Final = "replication.v1.Snapshots"
OPEN: Final = f"/{SERVICE}/Open"
FETCH: Final = f"/{SERVICE}/Fetch"
CHUNK_SIZE: Final = 1 << 20

_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")


class Snapshots:
    """The snapshots of one node. For the event loop."""

    def __init__(  # noqa: PLR0913 - dependencies on the node
        self,
        outgoing: OfferedSnapshot,
        *,
        cluster_id: str,
        bytes_per_s: int,
        leads: Callable[[], Promise | None],
        flush: Callable[[], Awaitable[None]],
        mono_ms: Callable[[], MonoMs],
        identify: Identify | None = None,
        damaged: Callable[[FileDamage], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Args:
        bytes_per_s: Maximum rate over all receivers.
        leads: Returns the promise that this node leads under; None if its lease does not hold.
        flush: Writes a manifest.
        identify: See Transport.
        damaged: Called with damage of this node's own files, each time that a request meets it.
        fatal: Called with any other error.
        """
        self._offered_snapshot = outgoing
        self._cluster_id = cluster_id
        self._leads, self._flush = leads, flush
        self._mono_ms, self._on_damage, self._fatal = mono_ms, damaged, fatal
        self._identify = identify
        self._pace = SendRate(bytes_per_s)
        self._lock = asyncio.Lock()
        self._pinning = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers for the node's gRPC server."""
        open_: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._open)
        fetch: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
            self._fetch
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Open": open_, "Fetch": fetch})

    @property
    def kept_from(self) -> LogIndex | None:
        """The first log entry after the pinned snapshot. None: no snapshot is pinned.

        While a snapshot is being pinned its index is unknown, so every entry is kept (1).
        """
        if self._pinning:
            return LogIndex(1)
        pinned = self._offered_snapshot.pinned
        return LogIndex(pinned.index + 1) if pinned is not None else None

    async def expire(self) -> None:
        """Unpin a snapshot that is not fetched any more. Called periodically."""
        if self._offered_snapshot.pinned is not None:
            await self._alone(lambda: self._offered_snapshot.expire(self._mono_ms()))

    async def _open(self, data: bytes, context: _Context) -> bytes:
        try:
            request = pb.SnapshotOpen.FromString(data)
        except DecodeError:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "damaged Open request")
        for field, value, limit in (
            ("version", request.version, VERSION),
            ("cluster_id", request.cluster_id, self._cluster_id),
        ):
            if value != limit:
                why = f"{field} = {value!r} of {request.name!r}: here it is {limit!r}"
                await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, why)
        certified = request.name if self._identify is None else self._identify(context)
        if certified != request.name:
            why = f"name = {request.name!r}: the certificate is that of {certified!r}"
            await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, why)
        if self._leads() is None:
            why = "not the leader, or its lease does not hold"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        try:
            snapshot = await self._to_its_end(self._offer(request.suspect, LogIndex(request.known)))
        except NotReadyError as error:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
        under = self._leads()  # the leadership may have ended during the offer
        if under is None:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "not the leader any more")
        return encode_offer(snapshot, under).SerializeToString()

    async def _offer(self, suspect: str, known: LogIndex) -> Snapshot:
        offered = self._offered_snapshot
        async with self._lock:
            self._pinning = True
            try:
                if suspect:
                    await asyncio.to_thread(offered.check, suspect)
                try:
                    return await asyncio.to_thread(offered.offer, known)
                except NotReadyError:
                    await self._flush()
                    return await asyncio.to_thread(offered.offer, known)
            finally:
                self._pinning = False

    async def _alone(self, work: Callable[..., _T], *args: object) -> _T:
        """Run `work` in a thread, at most one at a time."""

        async def locked() -> _T:
            async with self._lock:
                return await asyncio.to_thread(work, *args)

        return await self._to_its_end(locked())

    async def _to_its_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`. It continues if the caller is cancelled, as threads can't be cancelled.

        Raises:
            NotReadyError: from `work`, or `work` found damage, which the node heals. Any other
                exception of `work` is fatal to the node.
        """

        async def to_end() -> _T:
            try:
                return await work
            except NotReadyError:
                raise
            except Exception as error:
                if isinstance(error, FileDamage):
                    self._on_damage(error)
                    raise NotReadyError(f"this node has damaged files: {error}") from error
                self._fatal(error)
                raise

        task = asyncio.create_task(to_end())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return await asyncio.shield(task)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure_of(task)  # `to_end` has processed it: asyncio logs an exception that no call takes

    async def _fetch(self, data: bytes, context: _Context) -> AsyncIterator[bytes]:
        try:
            request = pb.SnapshotFetch.FromString(data)
        except DecodeError:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "damaged Fetch request")
        part = SnapshotPart(request.part.path, request.part.size, request.part.crc32)
        offset = request.offset
        while offset < part.size:
            if not self._offered_snapshot.has_part(part):  # before it uses up the shared rate
                await _refuse(context, grpc.StatusCode.NOT_FOUND, f"{part.path} is not pinned here")
            await self._pace.spend(min(CHUNK_SIZE, part.size - offset))
            try:
                found = await self._alone(self._offered_snapshot.read, part, offset, CHUNK_SIZE)
            except NotReadyError as error:
                await _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
            if not found:
                await _refuse(context, grpc.StatusCode.NOT_FOUND, f"{part.path} is not pinned here")
            yield pb.SnapshotChunk(data=found, crc32=isal_zlib.crc32(found)).SerializeToString()
            offset += len(found)


def encode_offer(snapshot: Snapshot, under: Promise) -> pb.SnapshotOffer:
    """Return the offer as a protobuf message."""
    return pb.SnapshotOffer(
        leader_epoch=under.epoch,
        leader=under.leader,
        leader_nonce=under.nonce,
        index=snapshot.index,
        epoch=snapshot.epoch,
        voters=snapshot.voters,
        parts=[pb.SnapshotPart(path=p.path, size=p.size, crc32=p.crc32) for p in snapshot.parts],
    )


async def _refuse(context: _Context, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError(why)
