"""`timerctl recover`: last means on the data directory of a stopped node (docs/recovery.md).

    majority   a majority is lost for good: one directory becomes a cluster of one voter
    epoch      a promise, or a Raft term, that no other node can follow is taken back
    entry      a committed entry that ends every node at apply becomes one without an effect

Each says what may be lost, asks, and appends what it did to `recovered.log`. Each takes the
directory's lock, as a node does. A crash on the way leaves a directory on which the same command
can be given again.
"""

import argparse
import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.control import raft_files
from replication.core.log_recovery import recover as shape_of
from replication.core.log_shape import LogShape
from replication.core.message_check import EPOCH_STEP_MAX
from replication.core.promise import Promise, PromiseFile
from replication.shell.snapshot_install import install_if_ready
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import EpochStart, decode_epoch, encode_epoch
from timer.files import segment
from timer.files.data_directory import (
    IDENTITY_NAME,
    DataDirectory,
    found_anew,
    open_directory,
    read_identity,
)
from timer.files.disk import Disk, RealDisk
from timer.files.log import Log
from timer.model.timer_errors import CorruptFileError, EngineError, WrongDirectoryError
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, Nonce, ReplicaId, UnixMs
from timer.recovery import manifest
from timerclient.cli.cli_args import agreed

FAILED: Final = 1
"""Exit code: nothing was done, or not all of it; the message says which."""
RECORD_NAME: Final = "recovered.log"
EPOCH_STEP: Final = 1 << 20
"""A cluster founded anew begins so far above what is known here: above what the lost nodes may have
promised each other since."""


class RecoveryRefused(EngineError):
    """The command does not fit the directory. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """A command that fits the directory; nothing was changed yet."""

    what: str
    losses: tuple[str, ...]
    """What to tell before it is carried out."""
    carry_out: Callable[[], str]
    """Do it; return what was done."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The files of a stopped node, locked and checked as at a start."""

    disk: Disk
    path: Path
    directory: DataDirectory
    promise: PromiseFile
    log: Log
    shape: LogShape
    last_time_ms: UnixMs
    """Of the last entry."""
    applied: LogIndex
    """The manifest's index: entries up to here are applied, hence committed. 0: no manifest."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.directory.identity.name

    @property
    def me(self) -> ReplicaId:
        """The replica's id."""
        return self.directory.identity.replica_id

    def record(self, text: str) -> None:
        """Append a line to `recovered.log`, durably."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        file = self.disk.open_append(self.path / RECORD_NAME)
        try:
            file.write([f"{at} {text}\n".encode()])
            file.sync()
        finally:
            file.close()
        self.disk.sync_dir(self.path)


@contextlib.contextmanager
def stopped(disk: Disk, path: Path) -> Iterator[Stopped]:
    """Open a stopped node's files as its start does: an ordered install is carried out.

    Raises:
        WrongDirectoryError: it is no data directory, or in use.
        CorruptFileError, UnknownVersion, PromiseLost, DiskFailed: the node would not start either.
    """
    if not disk.exists(path / IDENTITY_NAME):
        raise WrongDirectoryError(
            f"{path} has no {IDENTITY_NAME}: it is no timerd's data directory"
        )
    whose = read_identity(disk, path)
    directory = open_directory(disk, path, cluster_id=whose.cluster_id, name=whose.name)
    log = None
    try:
        install_if_ready(
            disk,
            directory.incoming,
            promise=directory.promise,
            state=directory.state,
            log=directory.log,
            damaged=directory.damaged,
        )
        if disk.exists(directory.damaged):
            why = f"noted by the node: {disk.read(directory.damaged).decode(errors='replace')}"
            raise CorruptFileError(directory.damaged, 0, why)
        state = manifest.read(disk, directory.state) or {}
        applied = LogIndex(state.get("index", 0))
        voters = state.get("voters") or whose.founding_voters.values()
        log = Log.open(disk, directory.log, committed_floor=applied)
        promise = PromiseFile.load(disk, directory.promise, last_epoch=log.last_epoch)
        time_ms = UnixMs(state.get("time_ms", 0))
        shape, last_ms = shape_of(log, frozenset(map(ReplicaId, voters)), time_ms)
        yield Stopped(disk, path, directory, promise, log, shape, last_ms, applied)
    finally:
        if log is not None:
            log.close()
        directory.close()


# ---- a majority is lost


def majority(node: Stopped, voters: list[str]) -> RecoveryPlan:
    """Plan to make a cluster of this directory alone.

    The log names its voters. So it goes on with an EPOCH entry that names this replica alone, and
    an entry of the same epoch behind it: from that on the voters before it count no more.
    """
    if voters != [node.name]:
        limit = f"must be {node.name}, the directory's node: others join afterwards, as learners"
        raise RecoveryRefused(f"--voters = {','.join(voters)}: {limit}")
    epoch = Epoch(max(node.promise.promise.epoch, node.shape.last_epoch) + EPOCH_STEP)
    if epoch > EPOCH_MAX:
        raise RecoveryRefused(
            f"epoch = {epoch}: must be at most {EPOCH_MAX}; `timerctl recover epoch` comes first"
        )
    last, identity = node.shape.last_index, node.directory.identity
    where = f"the log of {node.name} ends at entry {last} of epoch {node.shape.last_epoch}"
    losses = [f"{where}: entries that only the others had behind it are lost, acknowledged or not"]
    if node.promise.unsure or node.log.tail_was_cut:
        losses.append(f"{node.name} is unsure: entries that it had acknowledged may be gone")
    if last > node.applied:
        told = f"entries {node.applied + 1} to {last} count as committed from now on"
        losses.append(f"{told}: also those of which a client heard that they had no effect")
    losses.append("directories of the other nodes must never be started again")

    def carry_out() -> str:
        nonce = Nonce(secrets.randbits(62) + 1)
        node.promise.give(Promise(epoch, node.me, nonce))
        start = encode_epoch(EpochStart(epoch, node.me, (node.me,)))
        first, second = LogIndex(last + 1), LogIndex(last + 2)
        frames = [
            entry_frame.encode(EntryKind.EPOCH, epoch, first, node.last_time_ms, [start]),
            entry_frame.encode(EntryKind.CHECKPOINT, epoch, second, node.last_time_ms, []),
        ]
        node.log.append(frames)
        node.log.sync()
        found_anew(node.disk, node.path, identity)
        raft_files.remove(node.path, alone=True)
        return (
            f"majority: {node.name} ({node.me:016x}) is the only voter from entry {first} of epoch"
            f" {epoch} on; the voters were"
            f" {', '.join(f'{voter:016x}' for voter in sorted(node.shape.voters))}"
        )

    what = f"make {node.name} the only voter of cluster {identity.cluster_id}"
    return RecoveryPlan(what, tuple(losses), carry_out)


# ---- a promise out of reach


def epoch(node: Stopped) -> RecoveryPlan:
    """Plan to take a promise back that no other node can follow, and to make Raft's files anew.

    What else was promised is forgotten with it, so the replica is unsure.
    """
    promised, last = node.promise.promise, node.shape.last_epoch
    reach = last + EPOCH_STEP_MAX
    losses = ["raft/ is removed: this node's Raft votes count again when the others have filled it"]
    if promised.epoch <= reach:
        losses.insert(0, f"the promise, of epoch {promised.epoch}, is in reach, and is kept")
    elif not last:
        raise RecoveryRefused(
            f"the log is empty: nothing tells what {node.name} has promised. Replace it"
            f" by a new replica: `timerctl members replace {node.name}` (docs/members.md)"
        )
    else:
        told = (
            f"the promise, of epoch {promised.epoch}, becomes one of epoch {last}, the log's last"
        )
        losses = [
            f"{told}: whatever {node.name} promised above that is forgotten",
            "until a leader has matched its log, its vote counts only if every voter is there",
            *losses,
        ]

    def carry_out() -> str:
        if promised.epoch > reach:
            # The leader's process is not known: the last leadership is refused, the next is not.
            nonce = Nonce(secrets.randbits(62) + 1)
            node.promise.take_back(Promise(last, _leader(node), nonce))
        raft_files.remove(node.path, alone=False)
        return f"epoch: the promise of epoch {promised.epoch} is now {node.promise.promise}"

    return RecoveryPlan(f"take back what {node.name} has promised", tuple(losses), carry_out)


def _leader(node: Stopped) -> ReplicaId:
    """Return who leads the log's last epoch; any other voter if the log does not tell any more."""
    start = node.shape.last_start
    found = _entry(node, start) if start > node.shape.base_index else None
    if found is not None:
        return decode_epoch(found.payload).leader
    return min(node.shape.voters - {node.me}, default=node.me)


# ---- an entry that nobody can apply


def entry_of(node: Stopped, index: LogIndex, crc32: int) -> RecoveryPlan:
    """Plan to put an entry without an effect in the place of one that ends every node."""
    found = _entry(node, index)
    if found is None:
        first, last = node.log.first_index, node.log.last_index
        raise RecoveryRefused(
            f"--index = {index}: must be in {first} .. {last}, the log of {node.name}"
        )
    frame = node.log.read(index, 1)[0]
    held = int.from_bytes(frame[:4], "little")
    after = entry_frame.encode(EntryKind.CHECKPOINT, found.epoch, index, found.time_ms, [])
    if bytes(frame) == after:
        return RecoveryPlan(
            "", (f"entry {index} is without an effect already: nothing is done",), str
        )
    if held != crc32:
        raise RecoveryRefused(
            f"--crc32 = {crc32:08x}: must be {held:08x}, that of entry {index},"
            f" {found.kind.name} of epoch {found.epoch}"
        )
    if found.kind is EntryKind.EPOCH:
        raise RecoveryRefused(
            f"--index = {index}: an EPOCH entry names leader and voters, and must stay"
        )
    if index <= node.applied:
        raise RecoveryRefused(
            f"--index = {index}: must be above {node.applied}, up to which {node.name} has applied"
        )
    told = f"entry {index} ({found.kind.name}, {len(found.payload)} bytes, epoch {found.epoch})"
    losses = (
        f"{told} loses its effect: all that was asked for with it is lost, acknowledged or not",
        "a node that keeps the entry differs: give the same command on each before any starts",
    )

    def carry_out() -> str:
        segment.replace_frame(node.disk, node.directory.log, index, after)
        return (
            f"entry: {index} of epoch {found.epoch}, {found.kind.name} with crc32 {held:08x}, is a"
            " CHECKPOINT without an effect now"
        )

    return RecoveryPlan(f"replace entry {index} of {node.name}", losses, carry_out)


def _entry(node: Stopped, index: LogIndex) -> Entry | None:
    frames = node.log.read(index, 1)
    found = entry_frame.frame_at(frames[0], 0) if frames else None
    return found if isinstance(found, Entry) else None


# ---- timerctl


def run(args: argparse.Namespace) -> int:
    """Run a command of `timerctl recover`; return its exit code."""
    try:
        with stopped(RealDisk(), args.data) as node:
            return _carry_out(node, _plan(node, args), yes=args.yes)
    except EngineError as error:
        print(f"timerctl: {error}", file=sys.stderr)  # noqa: T201
        return FAILED


def _plan(node: Stopped, args: argparse.Namespace) -> RecoveryPlan:
    match args.recover:
        case "majority":
            return majority(node, [each.strip() for each in args.voters.split(",")])
        case "epoch":
            return epoch(node)
        case _:
            return entry_of(node, LogIndex(args.index), args.crc32)


def _carry_out(node: Stopped, plan: RecoveryPlan, *, yes: bool) -> int:
    for loss in plan.losses:
        print(loss)  # noqa: T201
    sys.stdout.flush()
    if not plan.what:
        return 0
    if not yes and not agreed(plan.what, "It can't be undone."):
        return FAILED
    done = plan.carry_out()
    node.record(done)
    print(done)  # noqa: T201
    return 0
