"""The promise file: what this replica must never forget, however it dies.

Its *promise* is the highest (epoch, leader, process) that it ever answered to a fence or took an
append from. A lower epoch, or another leader or process in the same epoch, is refused: so two
leaders can't both find a majority, whatever the control plane says. It is durable before anything
that depends on it leaves the process.

It is *unsure* when entries that it once acknowledged may be gone: a torn tail was cut, or the log
was fetched anew. Its promise then counts only together with every other voter's, until a leader
has brought it up to its commit index.

A directory is formatted with `NEVER_GIVEN`: no promise, and unsure. An absent file is therefore a
lost one, and the replica does not start (docs/adr/0038).

Format version 1, little-endian, replaced as a whole (temporary file, fsync, rename, fsync of the
directory):

    0   8  magic     b"TIMERPRM"
    8   2  version   1
    10  1  unsure    0 or 1
    11  5  reserved  0
    16  8  epoch     Epoch; 0: no promise was ever given
    24  8  leader    ReplicaId; 0 with epoch 0
    32  8  nonce     Nonce of the leader's process; 0 with epoch 0
    40  4  crc32     of bytes [0, 40)
"""

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from timer.disk import Disk
from timer.errors import CorruptFile, PromiseLost, UnknownVersion
from timer.units import Epoch, Nonce, ReplicaId

MAGIC: Final = b"TIMERPRM"
VERSION: Final = 1

_BODY: Final = struct.Struct("<8sHB5xQQQ")
_CRC: Final = struct.Struct("<I")
SIZE: Final = _BODY.size + _CRC.size
assert SIZE == 44


@dataclass(frozen=True, slots=True)
class Promise:
    """Whom this replica follows, and nobody before."""

    epoch: Epoch
    leader: ReplicaId
    nonce: Nonce


NO_PROMISE: Final = Promise(Epoch(0), ReplicaId(0), Nonce(0))


class PromiseFile:
    """The durable promise of one replica. Made by `load`; what it shows is on the disk."""

    def __init__(self, disk: Disk, path: Path, promise: Promise, *, unsure: bool) -> None:
        self._disk = disk
        self._path = path
        self._promise = promise
        self._unsure = unsure

    @classmethod
    def load(cls, disk: Disk, path: Path, *, last_epoch: Epoch = Epoch(0)) -> "PromiseFile":
        """Read the promise.

        `last_epoch` is that of the replica's last log entry. An epoch is promised before its first
        entry is written, so a lower promise means that the promise was lost.

        Raises:
            PromiseLost: the file is missing.
            CorruptFile: the promise is damaged, or older than the log.
            UnknownVersion: it is of another format version.
        """
        if not disk.exists(path):
            raise PromiseLost(
                f"{path} is missing. It was written when the directory was formatted, so the"
                " promises of this replica are lost. Replace it by a new replica: format an empty"
                " directory with `timerd init --learner`, start it, then `timerctl members replace`"
                " (docs/members.md)"
            )
        promise, unsure = _decode(path, disk.read(path))
        if promise.epoch < last_epoch:
            why = f"the promise is of epoch {promise.epoch}, the log of epoch {last_epoch}"
            raise CorruptFile(path, 16, why)
        return cls(disk, path, promise, unsure=unsure)

    @property
    def promise(self) -> Promise:
        """The highest promise ever given; NO_PROMISE if none."""
        return self._promise

    @property
    def unsure(self) -> bool:
        """Whether acknowledged entries may be gone."""
        return self._unsure

    def give(self, promise: Promise) -> None:
        """Promise, durably. Only a higher epoch, or what was promised already.

        Raises:
            DiskFailed: it may be durable or not; the process stops.
        """
        assert promise.leader > 0, promise
        assert promise.nonce > 0, promise
        if promise == self._promise:
            return
        assert promise.epoch > self._promise.epoch, f"{promise} after {self._promise}"
        self._store(promise, unsure=self._unsure)

    def take_back(self, promise: Promise) -> None:
        """Forget a promise that nobody can follow for a lower one, durably, and be unsure.

        Only an operator orders that, of a stopped replica (cluster/recover.py).

        Raises:
            DiskFailed: it may be durable or not.
        """
        assert promise.epoch < self._promise.epoch, f"{promise} after {self._promise}"
        self._store(promise, unsure=True)

    def set_unsure(self, *, unsure: bool) -> None:
        """Remember, durably, whether acknowledged entries may be gone.

        Raises:
            DiskFailed: it may be durable or not; the process stops.
        """
        if unsure != self._unsure:
            self._store(self._promise, unsure=unsure)

    def _store(self, promise: Promise, *, unsure: bool) -> None:
        self._disk.write_atomic(self._path, _encode(promise, unsure=unsure))
        self._promise, self._unsure = promise, unsure


def _encode(promise: Promise, *, unsure: bool) -> bytes:
    body = _BODY.pack(MAGIC, VERSION, unsure, promise.epoch, promise.leader, promise.nonce)
    return body + _CRC.pack(zlib.crc32(body))


NEVER_GIVEN: Final = _encode(NO_PROMISE, unsure=True)
"""The file of a replica that was just formatted."""


def _decode(path: Path, data: bytes) -> tuple[Promise, bool]:
    # Every version ends in its checksum, so that another version is told from damage.
    if len(data) < SIZE or data[:8] != MAGIC or data[-4:] != _CRC.pack(zlib.crc32(data[:-4])):
        raise CorruptFile(path, 0, "damaged promise")
    _, version, unsure, epoch, leader, nonce = _BODY.unpack_from(data)
    if version != VERSION:
        raise UnknownVersion(path, version, VERSION)
    return Promise(Epoch(epoch), ReplicaId(leader), Nonce(nonce)), bool(unsure)
