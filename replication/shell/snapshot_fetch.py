"""The receiving side of snapshots: fetches one from the leader until it is whole and verified.

Peers are tried in turn. Only a leader whose lease holds offers a snapshot
(replication/shell/snapshot_service.py). Received data survives a broken stream, a change of leader,
and a restart of this node. At the end the state is opened as at a start, including its digest. Only
a state that opens may replace the old one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from isal import isal_zlib

from replication.proto import snapshot_pb2 as pb
from replication.shell.snapshot_service import FETCH, OPEN, VERSION
from replication.shell.transport import Dial
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.units import Epoch, LogIndex, Nonce, ReplicaId
from timer.recovery.snapshot import OfferLeadership, Snapshot, SnapshotPart, is_part_path
from timer.recovery.snapshot_receiver import IncomingSnapshot, SnapshotSpaceError

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S: Final = 120.0
"""The source may have to write a manifest first, and to compute missing checksums."""
CONNECT_TIMEOUT_S: Final = 2.0
CHUNK_TIMEOUT_S: Final = 30.0
RETRY_S: Final = 0.3
RETRY_S_MAX: Final = 5.0
"""Pauses between rounds of requests double from RETRY_S up to this one, until data arrives."""
UNFIT_S: Final = 5.0


class UnusableAnswer(Exception):
    """A peer's data can't be used."""


_REFUSALS: Final = (grpc.aio.AioRpcError, TimeoutError, UnusableAnswer, SnapshotSpaceError)
"""Errors after which the next peer is tried."""


async def _is_silent() -> None:
    """Do nothing. A damaged node has no running replica, so nothing acknowledges entries."""


class SnapshotFetch:
    """One node's fetch of a snapshot. For the event loop; `run` is called once."""

    def __init__(  # noqa: PLR0913 - dependencies on the node
        self,
        disk: Disk,
        directory: Path,
        *,
        cluster_id: str,
        name: str,
        dials: Mapping[str, Dial],
        check: Callable[[Path], None],
        known: Callable[[], LogIndex] = lambda: LogIndex(0),
        fall_silent: Callable[[], Awaitable[None]] = _is_silent,
    ) -> None:
        """Args:
        directory: Where received files are stored.
        name: This node's name.
        dials: Name of each other node -> its channel factory.
        check: Raises CorruptFileError if no process could start from the state in a directory.
        known: Returns the index up to which this node has the committed log. A snapshot at or
            below this index is of no use.
        fall_silent: Makes this process acknowledge nothing more. Called once the snapshot is
            complete, as the install may discard later entries.
        """
        assert dials, "there is no peer to fetch from"
        self._directory = directory
        self._incoming = IncomingSnapshot(disk, directory)
        self._cluster_id, self._name, self._dials = cluster_id, name, dials
        self._check, self._known_index, self._fall_silent = check, known, fall_silent
        self._suspects: dict[str, str] = {}
        """Name of a peer -> the part that arrived damaged from it."""
        self._refusals: dict[str, BaseException] = {}
        """Name of a peer -> its last refusal since a fetch began."""
        self._logged_offer: tuple[str, Snapshot] | None = None
        """Name of a peer and its snapshot, as last logged."""
        self._activity = ""
        self.moved_s = asyncio.get_running_loop().time()
        """Loop time of the last progress: data arrived, or a file was checked."""

    @property
    def status(self) -> str:
        """The present activity or obstacle, in words."""
        if self._activity:
            return self._activity
        if (error := self.room_error) is not None:
            return f"the disk has {error.free_bytes >> 20} MiB free; {error}"
        reasons = "; ".join(f"{name}: {_text(why)}" for name, why in sorted(self._refusals.items()))
        return f"no leader offers a snapshot ({reasons or 'no peer has answered yet'})"

    @property
    def room_error(self) -> SnapshotSpaceError | None:
        """The lack of room for the snapshot that is offered. None: there is room, or no offer."""
        errors = self._refusals.values()
        return next((error for error in errors if isinstance(error, SnapshotSpaceError)), None)

    async def run(self) -> Snapshot | None:
        """Return the snapshot that the next start installs. None: the log has caught up."""
        await self._check_received_files()
        pause_s, moved_s = RETRY_S, self.moved_s
        while True:
            for name, dial in self._dials.items():
                channel = dial()
                try:
                    snapshot = await self._from_peer(name, channel)
                except _REFUSALS as error:
                    self._note_refusal(name, error)
                    continue
                finally:
                    self._activity = ""
                    await channel.close()
                if snapshot.index > self._known_index():
                    await self._fall_silent()
                if snapshot.index > self._known_index():  # the log may have caught up until now
                    await asyncio.to_thread(self._incoming.finish)
                    return snapshot
                await asyncio.to_thread(self._incoming.forget)
                return None
            if self.moved_s > moved_s:
                pause_s, moved_s = RETRY_S, self.moved_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _check_received_files(self) -> None:
        """Check the files of an earlier process first: an offer could expire meanwhile."""
        self._activity = "files received earlier are being checked"
        for part in await asyncio.to_thread(self._incoming.planned_parts):
            await asyncio.to_thread(self._incoming.check_part, part)
            self.moved_s = asyncio.get_running_loop().time()
        self._activity = ""

    def _note_refusal(self, name: str, error: BaseException) -> None:
        before, why = self._refusals.get(name), _text(error)
        if before is None or _text(before) != why:
            logger.info("no snapshot from %s: %s", name, why)
        self._refusals[name] = error

    async def _from_peer(self, name: str, channel: grpc.aio.Channel) -> Snapshot:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await channel.channel_ready()
        request = pb.SnapshotOpen(
            version=VERSION,
            cluster_id=self._cluster_id,
            name=self._name,
            suspect=self._suspects.get(name, ""),
            known=self._known_index(),
        )
        open_: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(OPEN)
        answer = await open_(request.SerializeToString(), timeout=OPEN_TIMEOUT_S)
        self._suspects.pop(name, None)  # it has checked the part
        snapshot, under = decode_offer(answer)
        self._log_offer(name, snapshot)
        if snapshot.index <= self._known_index():
            return snapshot  # `run` discards it
        await asyncio.to_thread(self._incoming.begin, snapshot, under)
        self._refusals.clear()
        while (wanted := await asyncio.to_thread(self._incoming.next_missing)) is not None:
            if snapshot.index <= self._known_index():
                return snapshot  # the log has caught up
            self._activity = f"{name} sends {wanted[0].path} of the snapshot at {snapshot.index}"
            await self._fetch(name, channel, *wanted)
        self._activity = f"the snapshot at {snapshot.index} from {name} is being checked"
        try:
            await asyncio.to_thread(self._check, self._directory)
        except (CorruptFileError, UnknownVersionError) as error:
            await asyncio.to_thread(self._incoming.forget)
            await asyncio.sleep(UNFIT_S)
            raise UnusableAnswer(f"its snapshot can't be used: {error}") from error
        return snapshot

    def _log_offer(self, name: str, snapshot: Snapshot) -> None:
        """Log the offer of a peer, except if it is the one that was logged last."""
        if self._logged_offer != (name, snapshot):
            self._logged_offer = name, snapshot
            logger.info(
                "%s offers a snapshot at %d: %d files, %d bytes",
                name,
                snapshot.index,
                len(snapshot.parts),
                snapshot.size,
            )

    async def _fetch(
        self, name: str, channel: grpc.aio.Channel, part: SnapshotPart, offset: int
    ) -> None:
        """Fetch one file from `offset` to its end, from the peer with a name."""
        request = pb.SnapshotFetch(offset=offset)
        request.part.CopyFrom(pb.SnapshotPart(path=part.path, size=part.size, crc32=part.crc32))
        fetch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH)
        call = fetch(request.SerializeToString())
        try:
            while offset < part.size:
                async with asyncio.timeout(CHUNK_TIMEOUT_S):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    raise UnusableAnswer(f"{part.path} ended at {offset} of {part.size} bytes")
                assert isinstance(data, bytes), data
                chunk = _chunk(data, part.size - offset)
                if not await asyncio.to_thread(self._incoming.put, part, offset, chunk):
                    self._suspects[name] = part.path
                    raise UnusableAnswer(f"the checksum of {part.path} is wrong")
                offset += len(chunk)
                self.moved_s = asyncio.get_running_loop().time()
        finally:
            call.cancel()


def _text(error: BaseException) -> str:
    """Return the reason of a refusal."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__


def _chunk(data: bytes, size_max: int) -> bytes:
    try:
        chunk = pb.SnapshotChunk.FromString(data)
    except DecodeError as error:
        raise UnusableAnswer(f"damaged chunk: {error}") from None
    if isal_zlib.crc32(chunk.data) != chunk.crc32:
        raise UnusableAnswer("a chunk's checksum is wrong")
    if not 0 < len(chunk.data) <= size_max:
        raise UnusableAnswer(f"a chunk of {len(chunk.data)} bytes; at most {size_max} are left")
    return chunk.data


def decode_offer(data: bytes) -> tuple[Snapshot, OfferLeadership]:
    """Return the offered snapshot and the leadership of the peer that offers it.

    Raises:
        UnusableAnswer: the offer is damaged or describes no possible snapshot.
    """
    try:
        offer = pb.SnapshotOffer.FromString(data)
    except DecodeError as error:
        raise UnusableAnswer(f"damaged offer: {error}") from None
    parts = tuple(SnapshotPart(part.path, part.size, part.crc32) for part in offer.parts)
    for part in parts:
        if not is_part_path(part.path) or not part.size:
            raise UnusableAnswer(f"invalid part {part.path!r} of {part.size} bytes")
    if not (0 < offer.epoch <= offer.leader_epoch and offer.index and offer.voters):
        raise UnusableAnswer(
            f"invalid offer at {offer.epoch}:{offer.index}, epoch {offer.leader_epoch}"
        )
    snapshot = Snapshot(
        index=LogIndex(offer.index),
        epoch=Epoch(offer.epoch),
        voters=tuple(ReplicaId(voter) for voter in offer.voters),
        parts=parts,
    )
    leader = ReplicaId(offer.leader)
    return snapshot, OfferLeadership(Epoch(offer.leader_epoch), leader, Nonce(offer.leader_nonce))
