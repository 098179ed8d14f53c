"""The promise file: the replica's durable promise and whether its log may have lost entries.

The *promise* is the highest (epoch, leader, process) of which this replica answered a fence or
accepted an append. The replica refuses a lower epoch, and another leader or process of the same
epoch. Two leaders of one epoch therefore can't both win a majority, even if both are appointed.
The promise is durable before any message that depends on it leaves the process.

A replica is *unsure* when it may have lost entries that it acknowledged: a torn tail was cut, or
the log was fetched again. The promise of an unsure replica counts only if every other voter
promises too. A leader that has brought the replica up to its commit index ends this state.

Formatting a directory writes `NEVER_GIVEN`: no promise, and unsure. A missing file is therefore a
lost file, and the replica does not start (docs/adr/0038).

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isal import isal_zlib

from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, PromiseLostError, UnknownVersionError
from timer.model.units import Epoch, Nonce, ReplicaId

MAGIC: Final = b"TIMERPRM"
VERSION: Final = 1

_BODY: Final = struct.Struct("<8sHB5xQQQ")
_CRC: Final = struct.Struct("<I")
SIZE: Final = _BODY.size + _CRC.size
assert SIZE == 44


@dataclass(frozen=True, slots=True)
class Promise:
    """The leadership that a replica follows."""

    epoch: Epoch
    leader: ReplicaId
    nonce: Nonce


NO_PROMISE: Final = Promise(Epoch(0), ReplicaId(0), Nonce(0))


class PromiseFile:
    """The durable promise of one replica. Made by `load`; its properties show what is on disk."""

    def __init__(self, disk: Disk, path: Path, promise: Promise, *, unsure: bool) -> None:
        self._disk = disk
        self._path = path
        self._promise = promise
        self._unsure = unsure

    @classmethod
    def load(cls, disk: Disk, path: Path, *, last_epoch: Epoch = Epoch(0)) -> "PromiseFile":
        """Read the promise file.

        `last_epoch`: epoch of the replica's last log entry. An epoch is promised before its first
        entry is written. A lower promise therefore means that the promise was lost.

        Raises:
            PromiseLostError: the file is missing.
            CorruptFileError: the file is damaged, or its epoch is below `last_epoch`.
            UnknownVersionError: the file has another format version.
        """
        if not disk.exists(path):
            raise PromiseLostError(
                f"{path} is missing. It was written when the directory was formatted, so the"
                " promises of this replica are lost: `timerctl members replace` (docs/members.md)"
            )
        promise, unsure = _decode(path, disk.read(path))
        if promise.epoch < last_epoch:
            why = f"the promise is of epoch {promise.epoch}, the log of epoch {last_epoch}"
            raise CorruptFileError(path, 16, why)
        return cls(disk, path, promise, unsure=unsure)

    @property
    def promise(self) -> Promise:
        """The highest promise ever given; NO_PROMISE if none was."""
        return self._promise

    @property
    def is_given(self) -> bool:
        """Whether this replica has followed a leader. Its log existed then."""
        return self._promise != NO_PROMISE

    @property
    def unsure(self) -> bool:
        """Whether acknowledged entries may be gone."""
        return self._unsure

    def give(self, promise: Promise) -> None:
        """Make `promise` durable. Its epoch must be higher, or the promise unchanged.

        Raises:
            DiskFailedError: the promise may or may not be durable; the process stops.
        """
        assert promise.leader > 0, promise
        assert promise.nonce > 0, promise
        if promise == self._promise:
            return
        assert promise.epoch > self._promise.epoch, f"{promise} after {self._promise}"
        self._store(promise, unsure=self._unsure)

    def take_back(self, promise: Promise) -> None:
        """Replace a promise that no leader can fulfil by a lower one, durably, and be unsure.

        Only an operator orders this, for a stopped replica (cluster/files/recover.py).

        Raises:
            DiskFailedError: the lower promise may or may not be durable.
        """
        assert promise.epoch < self._promise.epoch, f"{promise} after {self._promise}"
        self._store(promise, unsure=True)

    def set_unsure(self, *, unsure: bool) -> None:
        """Record durably whether acknowledged entries may be gone.

        Raises:
            DiskFailedError: the new value may or may not be durable; the process stops.
        """
        if unsure != self._unsure:
            self._store(self._promise, unsure=unsure)

    def _store(self, promise: Promise, *, unsure: bool) -> None:
        self._disk.write_atomic(self._path, _encode(promise, unsure=unsure))
        self._promise, self._unsure = promise, unsure


def _encode(promise: Promise, *, unsure: bool) -> bytes:
    body = _BODY.pack(MAGIC, VERSION, unsure, promise.epoch, promise.leader, promise.nonce)
    return body + _CRC.pack(isal_zlib.crc32(body))


NEVER_GIVEN: Final = _encode(NO_PROMISE, unsure=True)
"""The file of a newly formatted replica."""


def _decode(path: Path, data: bytes) -> tuple[Promise, bool]:
    # Every version ends in its checksum. Another version can therefore be told from damage.
    if len(data) < SIZE or data[:8] != MAGIC or data[-4:] != _CRC.pack(isal_zlib.crc32(data[:-4])):
        raise CorruptFileError(path, 0, "damaged promise")
    _, version, unsure, epoch, leader, nonce = _BODY.unpack_from(data)
    if version != VERSION:
        raise UnknownVersionError(path, version, VERSION)
    return Promise(Epoch(epoch), ReplicaId(leader), Nonce(nonce)), bool(unsure)
