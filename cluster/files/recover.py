"""`timerctl recover`: last resorts on the data directory of a stopped node (docs/recovery.md).

    majority   a majority is lost for good: one directory becomes a cluster of one voter
    epoch      a promise, or a Raft term, that no other node can follow is taken back
    entry      a committed entry that ends every node at apply is replaced by one without an effect

Each command prints the possible losses, asks for consent, and appends its changes to
`recovered.log`. Each takes the directory's lock, as a node does. After a crash in the middle the
same command can be run again.
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
from cluster.files.storage import install_ready
from cluster.files.verify import raise_noted_damage
from replication.core.log_recovery import recover as shape_of
from replication.core.log_shape import LogShape
from replication.core.message_check import EPOCH_STEP_MAX
from replication.core.promise import Promise, PromiseFile
from timer.entries import entry_frame
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import EpochStart, decode_epoch, encode_epoch
from timer.files import segment
from timer.files.data_directory import (
    DataDirectory,
    check_formatted,
    make_sole_founder,
    open_directory,
    read_identity,
)
from timer.files.disk import Disk, RealDisk
from timer.files.log import Log
from timer.model.timer_errors import EngineError
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, Nonce, ReplicaId, UnixMs
from timer.recovery import manifest
from timerclient.cli.cli_args import confirm

FAILED: Final = 1
"""Exit code: nothing was done, or a part; the message has the reason."""
RECORD_NAME: Final = "recovered.log"
EPOCH_STEP: Final = 1 << 20
"""Distance of a refounded cluster's first epoch from the known ones, so that it is above the
epochs that the lost nodes may have promised since."""
EPOCH_BITS: Final = 31
"""Random bits above that: two clusters that leave the same log differ in their epochs."""


class RecoveryRefused(Exception):
    """The command does not fit the directory. No file was changed."""


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """A command that fits the directory. No file is changed yet."""

    question: str
    """The change, for the question; empty: there is nothing to do."""
    losses: tuple[str, ...]
    """Lines to print before the change."""
    carry_out: Callable[[], str]
    """Make the change; return its description."""


@dataclass(frozen=True, slots=True)
class StoppedNode:
    """The files of a stopped node, locked and checked as at a start."""

    disk: Disk
    path: Path
    directory: DataDirectory
    promise: PromiseFile
    log: Log
    shape: LogShape
    last_time_ms: UnixMs
    """Time of the last entry."""
    applied: LogIndex
    """The manifest's index. Entries up to here are applied, hence committed. 0: no manifest."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.directory.identity.name

    @property
    def me(self) -> ReplicaId:
        """The replica's id."""
        return self.directory.identity.replica_id

    def record(self, text: str) -> None:
        """Append a line to `recovered.log`; it is durable on return."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        file = self.disk.open_append(self.path / RECORD_NAME)
        try:
            file.write([f"{at} {text}\n".encode()])
            file.sync()
        finally:
            file.close()
        self.disk.sync_dir(self.path)


@contextlib.contextmanager
def open_stopped_node(disk: Disk, path: Path) -> Iterator[StoppedNode]:
    """Open a stopped node's files. A snapshot that is ready is installed, as at the node's start.

    Raises:
        WrongDirectoryError: it is not a data directory, or a process has locked it.
        CorruptFileError, UnknownVersionError, PromiseLostError, DiskFailedError: the node would
            not start either.
    """
    check_formatted(disk, path)
    whose = read_identity(disk, path)
    directory = open_directory(disk, path, cluster_id=whose.cluster_id, name=whose.name)
    log = None
    try:
        install_ready(disk, directory)
        if disk.exists(directory.damaged):
            raise_noted_damage(disk, directory.damaged)
        state = manifest.read(disk, directory.state) or {}
        applied = LogIndex(state.get("index", 0))
        voters = state.get("voters") or whose.founding_voters.values()
        is_used = PromiseFile.load(disk, directory.promise).is_given
        log = Log.open(disk, directory.log, committed_floor=applied, is_used=is_used)
        promise = PromiseFile.load(disk, directory.promise, last_epoch=log.last_epoch)
        time_ms = UnixMs(state.get("time_ms", 0))
        shape, last_ms, _ = shape_of(log, frozenset(map(ReplicaId, voters)), time_ms)
        yield StoppedNode(disk, path, directory, promise, log, shape, last_ms, applied)
    finally:
        if log is not None:
            log.close()
        directory.close()


# ---- a majority is lost


def plan_majority(node: StoppedNode, voters: list[str]) -> RecoveryPlan:
    """Plan to make this directory a cluster of its own.

    The log names its voters. So an EPOCH entry is appended that names this replica as the only
    voter, and a second entry of the same epoch. With that the earlier voters no longer count.
    """
    if voters != [node.name]:
        limit = f"must be {node.name}, the directory's node; others join later as learners"
        raise RecoveryRefused(f"--voters = {','.join(voters)}: {limit}")
    last, identity = node.shape.last_index, node.directory.identity
    if not last:
        remedy = "take the directory of another node, or format a new cluster with `timerd init`"
        raise RecoveryRefused(f"the log of {node.name} is empty, so it has no timer: {remedy}")
    known = max(node.promise.promise.epoch, node.shape.last_epoch)
    epoch = Epoch(known + EPOCH_STEP + secrets.randbits(EPOCH_BITS))
    if epoch > EPOCH_MAX:
        raise RecoveryRefused(
            f"epoch = {epoch}: must be at most {EPOCH_MAX}; run `timerctl recover epoch` first"
        )
    where = f"the log of {node.name} ends at entry {last} of epoch {node.shape.last_epoch}"
    losses = [f"{where}: later entries of other nodes will be lost, acknowledged or not"]
    if node.me not in node.shape.voters:
        losses.insert(0, f"{node.name} is not among the voters of its log: it may lack any entry")
    if node.promise.unsure or node.log.tail_was_cut:
        losses.append(f"{node.name} is unsure: entries that it had acknowledged may be lost")
    if last > node.applied:
        gained = f"entries {node.applied + 1} to {last} will count as committed"
        losses.append(f"{gained}, even if a client was told that its request had no effect")
    losses.append("never start the directories of the other nodes again")

    def carry_out() -> str:
        nonce = Nonce(secrets.randbits(62) + 1)
        node.promise.give(Promise(epoch, node.me, nonce))
        start = encode_epoch(EpochStart(epoch, node.me, (node.me,), identity.level))
        first, second = LogIndex(last + 1), LogIndex(last + 2)
        frames = [
            entry_frame.encode(EntryKind.EPOCH, epoch, first, node.last_time_ms, [start]),
            entry_frame.encode(EntryKind.CHECKPOINT, epoch, second, node.last_time_ms, []),
        ]
        node.log.append(frames)
        node.log.sync()
        make_sole_founder(node.disk, node.path, identity)
        raft_files.remove(node.path, alone=True)
        return (
            f"majority: {node.name} ({node.me:016x}) is the only voter from entry {first} of epoch"
            f" {epoch} on; the voters were"
            f" {', '.join(f'{voter:016x}' for voter in sorted(node.shape.voters))}"
        )

    question = f"make {node.name} the only voter of cluster {identity.cluster_id}"
    return RecoveryPlan(question, tuple(losses), carry_out)


# ---- a promise out of reach


def plan_epoch(node: StoppedNode) -> RecoveryPlan:
    """Plan to lower a promise that no other node can follow, and to found Raft again.

    Other promises are forgotten with it, so the replica becomes unsure.
    """
    promised, last = node.promise.promise, node.shape.last_epoch
    reach = last + EPOCH_STEP_MAX
    losses = [
        "raft/ will be deleted: this node's Raft vote counts again when the others have filled it"
    ]
    if promised.epoch <= reach:
        losses.insert(0, f"the promise of epoch {promised.epoch} is within reach and is kept")
    elif not last:
        raise RecoveryRefused(
            f"the log is empty: the promises of {node.name} are unknown. Replace the node"
            f" by a new replica: `timerctl members replace {node.name}` (docs/members.md)"
        )
    else:
        change = f"the promise of epoch {promised.epoch} will be of epoch {last}, the log's last"
        losses = [
            f"{change}: all promises of {node.name} above that will be forgotten",
            "its vote will count only with all voters present, until a leader has matched its log",
            *losses,
        ]

    def carry_out() -> str:
        if promised.epoch > reach:
            # The leader's process is unknown: the last epoch is refused, the next is not.
            nonce = Nonce(secrets.randbits(62) + 1)
            node.promise.take_back(Promise(last, _leader(node), nonce))
        raft_files.remove(node.path, alone=False)
        now = node.promise.promise.epoch
        return f"epoch: the promise was of epoch {promised.epoch}, and is of epoch {now}"

    return RecoveryPlan(f"take back the promise of {node.name}", tuple(losses), carry_out)


def _leader(node: StoppedNode) -> ReplicaId:
    """Return the leader of the log's last epoch; any other voter if its EPOCH entry is gone."""
    start = node.shape.last_start
    found = _entry(node, start) if start > node.shape.base_index else None
    if found is not None:
        return decode_epoch(found.payload).leader
    return min(node.shape.voters - {node.me}, default=node.me)


# ---- an entry that no node can apply


def plan_entry(node: StoppedNode, index: LogIndex, crc32: int) -> RecoveryPlan:
    """Plan to replace an entry that ends every node by one without an effect."""
    found = _entry(node, index)
    if found is None:
        first, last = node.log.first_index, node.log.last_index
        raise RecoveryRefused(
            f"--index = {index}: must be {first} to {last}, the entries in the log of {node.name}"
        )
    frame = node.log.read(index, 1)[0]
    held = int.from_bytes(frame[:4], "little")
    after = entry_frame.encode(EntryKind.CHECKPOINT, found.epoch, index, found.time_ms, [])
    if bytes(frame) == after:
        return RecoveryPlan("", (f"entry {index} already has no effect: nothing to do",), str)
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
            f"--index = {index}: must be above {node.applied}, the last entry that {node.name}"
            " applied"
        )
    entry = f"entry {index} ({found.kind.name}, {len(found.payload)} bytes, epoch {found.epoch})"
    losses = (
        f"{entry} will lose its effect: all its requests will be lost, acknowledged or not",
        "run the same command on every node that has the entry, before any node starts",
    )

    def carry_out() -> str:
        segment.replace_frame(node.disk, node.directory.log, index, after)
        return (
            f"entry: {index} of epoch {found.epoch}, {found.kind.name} with crc32 {held:08x}, is"
            " now a CHECKPOINT without an effect"
        )

    return RecoveryPlan(f"replace entry {index} of {node.name}", losses, carry_out)


def _entry(node: StoppedNode, index: LogIndex) -> Entry | None:
    frames = node.log.read(index, 1)
    found = entry_frame.frame_at(frames[0], 0) if frames else None
    return found if isinstance(found, Entry) else None


# ---- timerctl


def run(args: argparse.Namespace) -> int:
    """Run a command of `timerctl recover`; return its exit code."""
    try:
        with open_stopped_node(RealDisk(), args.data) as node:
            return _carry_out(node, _plan(node, args), args)
    except (EngineError, RecoveryRefused) as error:
        print(f"timerctl: {error}", file=sys.stderr)  # noqa: T201
        return FAILED


def _plan(node: StoppedNode, args: argparse.Namespace) -> RecoveryPlan:
    match args.recover:
        case "majority":
            return plan_majority(node, [each.strip() for each in args.voters.split(",")])
        case "epoch":
            return plan_epoch(node)
        case _:
            return plan_entry(node, LogIndex(args.index), args.crc32)


def _carry_out(node: StoppedNode, plan: RecoveryPlan, args: argparse.Namespace) -> int:
    for loss in plan.losses:
        print(loss)  # noqa: T201
    sys.stdout.flush()
    if not plan.question:
        return 0
    if not confirm(args, plan.question, "It can't be undone."):
        return FAILED
    done = plan.carry_out()
    print(done)  # noqa: T201 - first, because a full disk may refuse the record
    node.record(done)
    return 0
