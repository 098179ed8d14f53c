"""One backup of a running cluster.

    status --> a node, and the newest committed index --> OpenBackup: the node pins its state there
    each file of the state:   in an earlier backup, and in the store still --> nothing to do
                              in the store, of an interrupted backup       --> read and verified
                              else       --> fetched, verified, and written under a name of its own
    catalogue written, and all parts in the store still --> the backup is complete

The node gives size and CRC-32 of each file, for a run as it wrote them into the manifest. The bytes
are compared with both on their way, so a backup never stores what the node did not mean to write.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from isal import isal_zlib

from cluster.backup.backup_store import (
    BackupError,
    BackupStore,
    StoreUnavailable,
    WrongStore,
)
from cluster.backup.catalogue import (
    PARTS,
    Catalogue,
    StoredPart,
    catalogue_name,
    part_name,
    readable_catalogues,
)
from cluster.backup.pin_keeper import keeping_pin
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.recovery import manifest
from timerclient import __version__
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound, TimerError, Unavailable

PAUSE_S: Final = 0.5
"""Pause between two attempts of one call."""

_T = TypeVar("_T")
_Parts = dict[tuple[int, str, int, int], StoredPart]


class PartDigest:
    """Size, CRC-32 and SHA-256 of bytes that pass through."""

    def __init__(self) -> None:
        self.size = self.crc32 = 0
        self._sha256 = hashlib.sha256()

    @classmethod
    def of(cls, data: Iterable[bytes]) -> Self:
        """Return the digest of all the bytes."""
        digest = cls()
        for _ in digest.through(data):
            pass
        return digest

    def through(self, data: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same bytes."""
        for piece in data:
            self.size += len(piece)
            self.crc32 = isal_zlib.crc32(piece, self.crc32)
            self._sha256.update(piece)
            yield piece

    @property
    def sha256(self) -> str:
        """Hexadecimal."""
        return self._sha256.hexdigest()


class BackupRun:
    """Takes one backup. See the module."""

    def __init__(
        self,
        client: TimerClient,
        store: BackupStore,
        *,
        node: str = "",
        patience_s: float = 60,
        stopped: Callable[[], bool] = lambda: False,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`node`: that sends its state; empty: chosen. `patience_s`: time for each call.

        `stopped`: returns whether to give up. `on_progress`: takes the reason of the first wait.
        """
        self._stopped, self._on_progress, self._waited = stopped, on_progress, False
        self._client, self._store = client, store
        self._node, self._patience_s = node, patience_s
        self._backup_id = secrets.randbits(64) or 1
        self._sent = 0

    def take(self, *, is_kept: bool = True) -> Catalogue:
        """Take the backup; return its catalogue.

        `is_kept`: whether the store stays, so that the node counts the backup as complete.

        Raises:
            BackupError: the store has backups of another cluster or no bucket, or bytes differ from
                the node's.
            StoreUnavailable: the store does not answer.
            TimerError: the cluster does not answer, or rejects the call.
        """
        begun_ms = _now_ms()
        before, _ = readable_catalogues(self._store)  # a damaged one must not stop new backups
        if not before:
            self._store.check_bucket()
        status, committed = self._patiently(self._read_status)
        check_cluster(self._store, before, status.cluster_id)
        self._node = self._node or chosen_node(status, before)
        complete = False
        try:
            opened = self._patiently(
                lambda: self._client.open_backup(self._node, self._backup_id, min_index=committed)
            )
            head = next(part for part in opened.parts if part.path == manifest.NAME)
            with keeping_pin(lambda: self._fetch_last(head)):
                catalogue = self._store_parts(opened, before, status, begun_ms)
            complete = is_kept
            return catalogue
        finally:
            with suppress(TimerError):  # the node closes it after a minute
                self._client.close_backup(self._node, self._backup_id, complete=complete)

    def _fetch_last(self, part: pb.OpenBackupResponse.Part) -> None:
        """Fetch the last byte of a part, so that the node keeps the backup open.

        Raises:
            TimerError: the node does not answer, or has closed the backup.
        """
        self._client.fetch_backup(self._node, self._backup_id, part.path, part.size - 1)

    def _read_status(self) -> tuple[pb.GetStatusResponse, int]:
        status = self._client.status()
        return status, committed_index(status.nodes)

    def _store_parts(
        self,
        opened: pb.OpenBackupResponse,
        before: list[Catalogue],
        status: pb.GetStatusResponse,
        begun_ms: int,
    ) -> Catalogue:
        known: _Parts = {
            (each.replica_id, part.path, part.size, part.crc32): part
            for each in before
            for part in each.parts
        }
        there = self._store.sizes(PARTS)
        named = {part.name for part in known.values()}
        unnamed = {name: size for name, size in there.items() if name not in named}
        replica_id = opened.replica_id
        parts = [self._part(replica_id, part, known, there, unnamed) for part in opened.parts]
        head = next(part for part in parts if part.path == manifest.NAME)
        state = self._manifest(head)
        begun = time.strftime("%Y%m%dT%H%M%S", time.gmtime(begun_ms // 1000))
        catalogue = Catalogue(
            backup=f"{begun}{begun_ms % 1000:03d}Z-{opened.index}",
            cluster_id=opened.cluster_id,
            nodes=tuple(sorted(node.name for node in status.nodes)),
            node=self._node,
            replica_id=opened.replica_id,
            index=opened.index,
            epoch=opened.epoch,
            time_ms=state["time_ms"],
            begun_ms=begun_ms,
            ended_ms=_now_ms(),
            program=__version__,
            manifest_version=manifest.version_of(state),
            pending=manifest.pending_of(state),
            messages=manifest.messages_of(state),
            sent_bytes=self._sent,
            parts=tuple(parts),
        )
        self._check_parts(parts)
        data, name = catalogue.encode(), catalogue_name(catalogue.backup)
        self._store.put(name, [data], len(data))
        try:
            self._check_parts(parts)  # a prune that began before the put does not know of the parts
        except BackupError:
            self._store.delete(name)
            raise
        return catalogue

    def _check_parts(self, parts: list[StoredPart]) -> None:
        """Check that the store has all parts of this backup.

        Raises:
            BackupError: a part is missing.
        """
        there = self._store.sizes(PARTS)
        if any(there.get(part.name) != part.size for part in parts):
            raise BackupError("a prune deleted parts of this backup meanwhile; take it again")

    def _part(
        self,
        replica_id: int,
        part: pb.OpenBackupResponse.Part,
        known: _Parts,
        there: dict[str, int],
        unnamed: dict[str, int],
    ) -> StoredPart:
        """Return one part, which is in the store then.

        `known`: of earlier backups. `there`: sizes of all files. `unnamed`: of those of no backup.
        """
        found = known.get((replica_id, part.path, part.size, part.crc32))
        if found is not None and there.get(found.name) == part.size:
            return found
        if found is not None:  # a lost part gets its old name, which mends the earlier backups
            return self._fetch_part(part, found.name)
        stem = part_name(replica_id, part.path, part.size, part.crc32)
        for name, size in unnamed.items():
            if size == part.size and name.startswith(stem):
                with suppress(StoreUnavailable, BackupError):
                    digest = PartDigest.of(self._store.read(name))
                    if (digest.size, digest.crc32) == (part.size, part.crc32):
                        return StoredPart(part.path, part.size, part.crc32, digest.sha256, name)
        return self._fetch_part(part, f"{stem}.{self._backup_id:016x}")

    def _fetch_part(self, part: pb.OpenBackupResponse.Part, name: str) -> StoredPart:
        """Copy a part from the node into the store's file `name`; return it."""
        digest = PartDigest()
        self._store.put(name, self._checked_bytes(part, digest), part.size)
        return StoredPart(part.path, part.size, part.crc32, digest.sha256, name)

    def _checked_bytes(
        self, part: pb.OpenBackupResponse.Part, digest: PartDigest
    ) -> Iterator[bytes]:
        """Yield the bytes of a part. The last ones only if the whole part is right.

        Raises:
            BackupError: size or CRC-32 differ from the node's.
        """
        held = b""
        for piece in digest.through(self._fetched_bytes(part)):
            if held:
                yield held
            held = piece
        if (digest.size, digest.crc32) != (part.size, part.crc32):
            raise BackupError(
                f"{part.path} of node {self._node}: {digest.size} bytes with CRC-32"
                f" {digest.crc32:08x} arrived; the node has {part.size} with {part.crc32:08x}"
            )
        yield held

    def _fetched_bytes(self, part: pb.OpenBackupResponse.Part) -> Iterator[bytes]:
        offset = 0
        while offset < part.size:
            piece = self._fetch(part.path, offset)
            if not piece:
                return
            offset += len(piece)
            self._sent += len(piece)
            yield piece

    def _fetch(self, path: str, offset: int) -> bytes:
        node, number = self._node, self._backup_id
        try:
            return self._patiently(lambda: self._client.fetch_backup(node, number, path, offset))
        except NotFound as error:
            raise BackupError(
                f"node {node} closed the backup: it restarted, or got no request for a minute"
                f" ({error}); run the command again"
            ) from None

    def _manifest(self, part: StoredPart) -> manifest.ManifestBody:
        try:
            return manifest.decode(b"".join(self._store.read(part.name)), Path(part.name))
        except (CorruptFileError, UnknownVersionError) as error:
            raise BackupError(f"the manifest of node {self._node}: {error}") from None

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Return a call's answer; repeat it while no node can serve it."""
        until_s = time.monotonic() + self._patience_s
        while True:
            if self._stopped():
                raise BackupError("the backup was stopped; the next one continues it")
            try:
                return call()
            except Unavailable as error:
                if time.monotonic() > until_s:
                    raise
                if not self._waited:
                    self._on_progress(f"waiting, up to {self._patience_s:g} s: {error}")
                    self._waited = True
                time.sleep(PAUSE_S)


def check_cluster(store: BackupStore, found: list[Catalogue], cluster_id: str) -> None:
    """Check that all backups of a store are of one cluster.

    Raises:
        WrongStore: one is of another cluster.
    """
    other = next((each for each in found if each.cluster_id != cluster_id), None)
    if other is not None:
        raise WrongStore(
            f"{store.root} has backups of cluster {other.cluster_id!r}, this is cluster"
            f" {cluster_id!r}: use a store for each cluster"
        )


def committed_index(nodes: Iterable[pb.NodeStatus]) -> int:
    """Return the index up to which the log has all that the cluster acknowledged so far.

    Raises:
        Unavailable: no leader with a lease answers. The other nodes may lack entries.
    """
    found = [node.commit_index for node in nodes if node.reachable and node.serving]
    if not found:
        raise Unavailable("no serving leader answers: acknowledged timers might be missing")
    return max(found)


def chosen_node(status: pb.GetStatusResponse, before: list[Catalogue]) -> str:
    """Return the node that sends a backup.

    That of the last backup if it answers: it has the same files still. Else a follower, by name.

    Raises:
        BackupError: no node answers.
    """
    nodes = {node.name: node for node in status.nodes if node.reachable}
    last = nodes.get(before[-1].node) if before else None
    if last is not None and last.replica_id == before[-1].replica_id:
        return str(last.name)
    if not nodes:
        raise BackupError("no node answers with a status")
    return str(min(nodes.values(), key=lambda node: (node.role == "leader", node.name)).name)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
