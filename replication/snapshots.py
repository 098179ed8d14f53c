"""The source of snapshots: two methods beside the streams between the nodes.

    Open   what there is: index, files, sizes, checksums; pins it
    Fetch  one file from some byte on, in chunks with checksums

**Who offers one.** Only a leader whose lease holds: one that a majority of sure voters elected, and
that no other has followed since. A snapshot holds nothing that was not committed, and would do no
harm by itself; but to install one is to give up one's log. Were a replica with a damaged log to
take the snapshot of a stale one, entries that the two had not shared would be gone, and a majority
damaged one after the other would in the end be led by what the stale one knew. So a damaged replica
waits until there is a leader without it. If a majority is damaged there is none: they wait, say so,
and stop. Nothing was thrown away, and people decide.

What is sent is paced, so that clients and followers hardly notice. While a snapshot is pinned the
log after it is kept.
"""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from replication.promise import Promise
from replication.proto import snapshot_pb2 as pb
from timer.errors import NotReady
from timer.outgoing import Outgoing
from timer.snapshot import Part, Snapshot
from timer.units import LogIndex, MonoMs

VERSION: Final = 1
SERVICE: Final = "replication.v1.Snapshots"
OPEN: Final = f"/{SERVICE}/Open"
FETCH: Final = f"/{SERVICE}/Fetch"
CHUNK_SIZE: Final = 1 << 20

_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")


class Snapshots:
    """What one node offers. For the event loop."""

    def __init__(  # noqa: PLR0913 - what the node lends it
        self,
        outgoing: Outgoing,
        *,
        cluster_id: str,
        bytes_per_s: int,
        leads: Callable[[], Promise | None],
        flush: Callable[[], Awaitable[None]],
        mono_ms: Callable[[], MonoMs],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Args:
        leads: Returns the promise that this node leads under, if its lease holds.
        flush: Writes a manifest.
        fatal: Hears that this node's own files are damaged.
        """
        self._outgoing = outgoing
        self._cluster_id = cluster_id
        self._leads, self._flush = leads, flush
        self._mono_ms, self._fatal = mono_ms, fatal
        self._pace = Pace(bytes_per_s)
        self._lock = asyncio.Lock()
        self._pinning = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what the node's gRPC server needs."""
        open_: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._open)
        fetch: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
            self._fetch
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Open": open_, "Fetch": fetch})

    @property
    def kept_from(self) -> LogIndex | None:
        """The first entry that whoever installs the pinned snapshot needs. None: none is pinned.

        While one is being pinned it is not known yet which: every entry, then.
        """
        if self._pinning:
            return LogIndex(1)
        pinned = self._outgoing.pinned
        return LogIndex(pinned.index + 1) if pinned is not None else None

    async def expire(self) -> None:
        """Unpin what nobody fetches any more; called now and then."""
        if self._outgoing.pinned is not None:
            await self._alone(lambda: self._outgoing.expire(self._mono_ms()))

    async def _open(self, data: bytes, context: _Context) -> bytes:
        try:
            asked = pb.SnapshotOpen.FromString(data)
        except DecodeError:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "not an Open")
        for field, said, limit in (
            ("version", asked.version, VERSION),
            ("cluster_id", asked.cluster_id, self._cluster_id),
        ):
            if said != limit:
                why = f"{field} = {said!r} of {asked.name!r}: here it is {limit!r}"
                await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, why)
        if self._leads() is None:
            why = "leads not, or its lease does not hold"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        try:
            snapshot = await self._to_its_end(self._offer(asked.suspect, LogIndex(asked.known)))
        except NotReady as error:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
        under = self._leads()  # still
        if under is None:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "leads no more")
        return encode_offer(snapshot, under).SerializeToString()

    async def _offer(self, suspect: str, known: LogIndex) -> Snapshot:
        outgoing = self._outgoing
        async with self._lock:
            self._pinning = True
            try:
                if suspect:
                    await asyncio.to_thread(outgoing.check, suspect)
                try:
                    return await asyncio.to_thread(outgoing.offer, known)
                except NotReady:
                    await self._flush()
                    return await asyncio.to_thread(outgoing.offer, known)
            finally:
                self._pinning = False

    async def _alone(self, work: Callable[..., _T], *args: object) -> _T:
        """Run it in a thread, one at a time."""

        async def locked() -> _T:
            async with self._lock:
                return await asyncio.to_thread(work, *args)

        return await self._to_its_end(locked())

    async def _to_its_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work`, which goes on if whoever asked goes away: threads can't be cancelled.

        Raises:
            NotReady: as `work` does. Every other error of it is fatal.
        """

        async def to_end() -> _T:
            try:
                return await work
            except NotReady:
                raise
            except Exception as error:
                self._fatal(error)
                raise

        task = asyncio.create_task(to_end())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _fetch(self, data: bytes, context: _Context) -> AsyncIterator[bytes]:
        try:
            asked = pb.SnapshotFetch.FromString(data)
        except DecodeError:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "not a Fetch")
        part = Part(asked.part.path, asked.part.size, asked.part.crc32)
        offset = asked.offset
        while offset < part.size:
            if not self._outgoing.holds(part):  # what is refused costs the others nothing
                await _refuse(context, grpc.StatusCode.NOT_FOUND, f"{part.path} is not pinned here")
            await self._pace.spend(min(CHUNK_SIZE, part.size - offset))
            found = await self._alone(self._outgoing.read, part, offset, CHUNK_SIZE)
            if not found:
                await _refuse(context, grpc.StatusCode.NOT_FOUND, f"{part.path} is not pinned here")
            yield pb.SnapshotChunk(data=found, crc32=zlib.crc32(found)).SerializeToString()
            offset += len(found)


class Pace:
    """Lets so many bytes a second pass, whoever sends them."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_s = 0.0

    async def spend(self, size: int) -> None:
        """Wait until `size` more bytes may pass."""
        now_s = self._clock()
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + size / self._bytes_per_s
        if start_s > now_s:
            try:
                await self._sleep(start_s - now_s)
            except asyncio.CancelledError:
                self._free_s -= size / self._bytes_per_s  # nothing passes for it
                raise


def encode_offer(snapshot: Snapshot, under: Promise) -> pb.SnapshotOffer:
    """Return an offer as it is on the wire."""
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
