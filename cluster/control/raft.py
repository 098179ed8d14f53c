"""Raft for the control plane: the only module that imports pysyncobj.

pysyncobj 0.3.17 elects well and commits in a millisecond. Its files, its wire format and some rare
cases are not safe. This module replaces or guards them:

    files        raft_journal.py and raft_files.py: checksums, fsync, atomic replacement
    wire         raft_codec.py over raft_link.py: checked types, no pickle
    commands     bytes, passed to `machine` on the tick thread; an exception ends the process
    leadership   `view.leads` only after everything of earlier terms has been applied
    outcomes     a command has succeeded when this node itself has applied it; pysyncobj's SUCCESS
                 is ignored, its certain failures are not
    votes        withheld, with acknowledgements, while this node may have forgotten earlier ones
                 and the others can lead without it
    appends      records already held from the same leader are not dropped and written again

    event loop                          tick thread (ours: `doTick` in a loop)
    ----------                          --------------------------------------
    submit  ------------- queue --->    pysyncobj ---> machine.apply, machine.load
    link: deliver, up, down;  - pipe ->                  |
    hand_over, stop                                      |
    on_change  <------- call_soon_threadsafe ------------+--- frames ---> link

Only this module and its helpers use the word *term*. Elsewhere: epoch.
"""

import collections
import contextlib
import itertools
import logging
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf
from pysyncobj import syncobj as pysyncobj_core
from pysyncobj.monotonic import monotonic  # not Python's: another clock
from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from cluster.control import raft_files
from cluster.control.raft_codec import (
    NO_OP,
    REGULAR,
    BadRaftMessage,
    RaftMessage,
    check_term,
    encode,
)
from cluster.control.raft_files import RaftFiles, RaftSnapshot
from cluster.control.raft_journal import DISK, Record
from cluster.settings.exit_codes import ExitCode
from replication.shell.peer_complaints import Complaints
from timer.model.timer_errors import ConfigError, CorruptFileError, UnknownVersionError

logger = logging.getLogger(__name__)

PYSYNCOBJ_VERSION: Final = "0.3.17"
"""The only accepted version, because this module uses private names."""
REST_S_MIN: Final = 0.02
"""Seconds between ticks while the next deadline has passed, but its work cannot be done yet."""
REST_S_MAX: Final = 0.5
"""Seconds between ticks of an idle node, at most; messages and commands wake it earlier."""
BARRIER_EVERY_S: Final = 1.0
"""Interval of a node's barriers to one leader while the node withholds votes."""
REGRANT_S: Final = 10.0
"""A node that withholds its votes grants them again after this time without a leader, if all nodes
are linked: too many nodes lost their files. Earlier elections are over by then, and no absent node
has more records."""
REGRANT_DELAY_S: Final = 3.0
"""It then delays its candidacy by this, so that a node that has lost no file is first."""
UNCOVERED_SIZE_MAX: Final = 8 << 20
"""Bytes of the journal after its snapshot that start a compaction: a checkpoint of many topics has
many long records. Raft keeps the journal in memory, too."""
UNCOVERED_PARTS_MAX: Final = 8
"""The limit is this many times the state of the last snapshot if that is more, so snapshots add at
most an eighth to the bytes written."""
STALL_MS_MAX: Final = 10_000
"""A tick thread without a tick for this long is stuck, and the process ends."""

SETTINGS: Final[dict[str, Any]] = {
    "autoTick": False,  # a thread of this module ticks: it can be watched, stopped and joined
    "appendEntriesUseBatch": False,  # 0.5 ms a commit instead of 100
    "appendEntriesPeriod": 0.1,
    "raftMinTimeout": 0.4,  # 0.2 s was within 0.1 s of the stalls measured under load
    "raftMaxTimeout": 0.8,
    "leaderFallbackTimeout": 1.0,  # by default an isolated leader steps down only after 30 s
    "connectionTimeout": 2.0,
    "connectionRetryTime": 0.5,
    "dnsCacheTime": 30,
    "maxBindRetries": 10,
    "commandsWaitLeader": False,
    "commandsQueueSize": 1_000,
    "useFork": False,  # forked compaction loses acknowledged commands
    "logCompactionMinEntries": 50_000,
    "logCompactionMinTime": 21_600,
    "dynamicMembershipChange": False,  # not guarded against concurrent changes
}

_CERTAIN_FAILURES: Final = {
    FAIL_REASON.QUEUE_FULL,
    FAIL_REASON.MISSING_LEADER,
    FAIL_REASON.REQUEST_DENIED,
    FAIL_REASON.NOT_LEADER,
    FAIL_REASON.DISCARDED,
}
_BARRIER: Final = b"barrier"  # no msgpack map, so no command of the machine


class RaftMachine(Protocol):
    """The replicated object, as Raft calls it, on the tick thread."""

    def apply(self, command: bytes) -> None:
        """Apply a committed command. An exception ends the process."""

    def dump(self) -> bytes:
        """Return the state."""

    def check(self, state: bytes) -> None:
        """Check that `load` can take the state.

        Raises:
            ValueError: it cannot.
        """

    def load(self, state: bytes) -> None:
        """Replace the state."""


class Link(Protocol):
    """Sends to the peers. Called on the tick thread; returns at once."""

    def send_raft(self, peer: str, data: bytes) -> None:
        """Queue one encoded message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftView:
    """The state of Raft on this node."""

    leads: bool = False
    """This node is leader, and has applied all commands that earlier leaders committed."""
    leader: str | None = None
    """The leader that this node follows, or itself; may be out of date. None: unknown."""
    term: int = 0
    may_vote: bool = False
    applied_index: int = 0
    caught_up: bool = False
    """This process has applied all commands that its leader had committed when they met."""


def exit_process(code: ExitCode, why: str) -> NoReturn:
    """Log, and end the process without any clean-up that could write."""
    logger.critical("exit %d (%s): %s", code, code.name, why, exc_info=True)  # noqa: LOG014
    logging.shutdown()
    os._exit(code)


def checked_conf(files: RaftFiles, **hooks: Callable[..., object]) -> SyncObjConf:
    """Return pysyncobj's configuration. Each setting is read back under its name.

    Raises:
        ConfigError: pysyncobj has another version.
    """
    if VERSION != PYSYNCOBJ_VERSION:
        raise ConfigError("pysyncobj", VERSION, f"must be {PYSYNCOBJ_VERSION}")
    settings = {
        **SETTINGS,
        "journalFile": str(files.journal_path),
        "fullDumpFile": str(files.snapshot_path),
        **hooks,
    }
    conf = SyncObjConf(**settings)
    known = vars(SyncObjConf())
    # pysyncobj ignores unknown keywords: read every setting back.
    for key, value in settings.items():
        assert key in known, f"pysyncobj knows no setting {key}"
        assert getattr(conf, key) == value, f"{key} = {getattr(conf, key)!r}, not {value!r}"
    return conf


class Raft:
    """One node's Raft. The public methods may be called from any thread."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        name: str,
        peers: frozenset[str],
        files: RaftFiles,
        machine: RaftMachine,
        on_change: Callable[[], None],
        others_lost: bool = False,
        fail: Callable[[ExitCode, str], NoReturn],
    ) -> None:
        """`others_lost`: an operator has declared that all absent nodes lost their files, too."""
        assert name not in peers, name
        self._others_lost = others_lost
        self._name, self._peers, self._files = name, peers, files
        self._machine, self._on_change, self._fail = machine, on_change, fail
        self._core: _Core | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._hand_over_to: str | None = None
        self._ticks = 0
        self._ticks_seen = 0
        self._stalled_ms = 0
        self.view = RaftView(may_vote=files.journal.may_vote)
        """Replaced as a whole before each `on_change`."""

    def start(self, link: Link) -> None:
        """Start the tick thread, which elects, replicates and applies."""
        assert self._thread is None, "started twice"
        self._core = _Core(
            self._name, self._peers, self._files, self._machine, self._fail, self._count_tick, link
        )
        if self._others_lost:
            self._core.links_wanted = (len(self._peers) + 1) // 2  # and this node: a majority
        self._thread = threading.Thread(target=self._run, name="raft", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the tick thread and close the files. Waits for the present tick."""
        self._stopping.set()
        if self._thread is not None and self._core is not None:
            self._core.wake()
            self._thread.join()
            self._core.close()

    def deliver(self, peer: str, message: RaftMessage) -> None:
        """Pass a checked message from `peer` to the tick thread.

        Raises:
            BadRaftMessage: its term is out of range.
        """
        check_term(message, self.view.term)
        if self._core is not None:
            self._core.post((peer, message))

    def set_connected(self, peer: str, *, up: bool) -> None:
        """Note that the link to `peer` came up or broke."""
        if self._core is not None:
            self._core.post((peer, up))

    def submit(self, command: bytes, on_failure: Callable[[bool], None]) -> None:
        """Send `command` to the leader. If it is committed, the machine applies it.

        `on_failure(certain)` may be called, on the tick thread. True: the command will never be
        applied. Without a call the outcome is open.
        """
        assert self._core is not None, "not started"

        def on_end(_: object, error: int) -> None:
            if error != FAIL_REASON.SUCCESS:
                on_failure(error in _CERTAIN_FAILURES)

        self._core.submit(command, on_end)

    def hand_over(self, peer: str) -> None:
        """Hand leadership over to `peer` at the next tick, if this node leads. May fail."""
        self._hand_over_to = peer
        if self._core is not None:
            self._core.wake()

    def check_ticking(self, elapsed_ms: int) -> None:
        """End the process if ticks have stopped. Call it about every `elapsed_ms`.

        A pause of the whole process is not one of the thread: each call counts 1 s at most.
        """
        if self._ticks != self._ticks_seen or self._stopping.is_set():
            self._ticks_seen, self._stalled_ms = self._ticks, 0
            return
        self._stalled_ms += min(elapsed_ms, 1_000)
        if self._stalled_ms >= STALL_MS_MAX:
            self._fail(ExitCode.TICK_STALLED, f"no tick for {self._stalled_ms} ms")

    def _count_tick(self) -> None:
        self._ticks += 1

    def _run(self) -> None:
        core = self._core
        assert core is not None
        try:
            while not self._stopping.is_set():
                peer, self._hand_over_to = self._hand_over_to, None
                if peer is not None:
                    core.transferLeadership(Node(peer))
                core.doTick()
                self._count_tick()
                view = core.view()
                if view != self.view:
                    self.view = view
                    self._on_change()
        # A tick that failed half way leaves Raft in an unknown state.
        except BaseException as error:  # noqa: BLE001
            self._fail(ExitCode.TICK_FAILED, repr(error))


class _Core(SyncObj):  # type: ignore[misc]
    """pysyncobj with guards.

    Used on the tick thread, except for `submit`, `post` and `wake`. Names that begin with
    `_SyncObj__` are pysyncobj's private ones.
    """

    def __init__(  # noqa: PLR0913 - the parts of Raft
        self,
        name: str,
        peers: frozenset[str],
        files: RaftFiles,
        machine: RaftMachine,
        fail: Callable[[ExitCode, str], NoReturn],
        progressed: Callable[[], None],
        link: Link,
    ) -> None:
        self._journal, self._machine = files.journal, machine
        self._fail, self._count_tick = fail, progressed
        self._barrier = _BARRIER + secrets.token_bytes(16)
        """A command of this process. If others commit it, this node is up to date with a leader."""
        self._barrier_at = 0.0
        self._barrier_to: tuple[Node, int] | None = None
        """Leader and term of the last barrier. None: the leader was not linked."""
        self._complaints = Complaints(logger)
        self.links_wanted = len(peers)
        """Peers that must be linked before this node votes again without a leader."""
        self._leaderless_at = monotonic()
        self._snapshot_size = 0
        """Bytes of the state in the last snapshot that this process wrote or read."""
        conf = checked_conf(files, serializer=self._write_dump, deserializer=self._read_dump)
        with _using_journal(files.journal):
            super().__init__(
                Node(name),
                [Node(peer) for peer in sorted(peers)],
                conf=conf,
                nodeClass=Node,
                transportClass=lambda *args: _Transport(*args, core=self, link=link),
            )
        serializer = self._SyncObj__serializer
        taken = serializer.setTransmissionData
        serializer.setTransmissionData = lambda chunk: self._take_chunk(chunk) and taken(chunk)
        poll = self._poller.poll
        # A tick moves the deadlines and ends with the poll, so the time is computed in the poll.
        self._poller.poll = lambda _: poll(self.rest_s())

    @property
    def withholds(self) -> bool:
        """Whether this node withholds votes and acknowledgements."""
        return not self._journal.may_vote

    def flush(self) -> None:
        """Make the journal durable, before a message is sent or a command applied."""
        self._journal.flush()

    def post(self, item: tuple[str, RaftMessage | bool]) -> None:
        """Queue a message, or the state of a link, for the tick thread. From any thread."""
        self._transport.post(item)

    def wake(self) -> None:
        """Start the next tick at once. From any thread."""
        self._transport.wake()

    def rest_s(self) -> float:
        """Return the seconds that the tick thread may wait; messages and commands wake it earlier.

        Raft is nearly always idle, and each tick costs 0.15 ms of CPU.
        """
        if not self.otherNodes and self.raftCommitIndex < self._SyncObj__getCurrentLogIndex():
            return 0.0  # a node alone waits for no answer: the next tick commits
        left_s = self._due_in_s()
        return REST_S_MIN if left_s <= 0 else min(left_s, REST_S_MAX)

    def _due_in_s(self) -> float:
        leads = self._isLeader()
        due = self._SyncObj__newAppendEntriesTime if leads else self._SyncObj__raftElectionDeadline
        left_s: float = due - monotonic() + 0.001  # pysyncobj acts only after the deadline
        return left_s

    def submit(self, command: bytes, ended: Callable[[object, int], None]) -> None:
        """Queue a command. From any thread."""

        def on_end(result: object, error: int) -> None:
            # An exception in a callback makes pysyncobj apply the entry twice.
            try:
                ended(result, error)
            except Exception:
                logger.exception("callback of a command")

        self._applyCommand(REGULAR + command, on_end)

    def view(self) -> RaftView:
        """Return the present state of Raft on this node."""
        leader = self._getLeader()
        # A new leader's first record commits all older ones. Until that is applied the replicated
        # object may lack acknowledged commands.
        leads = self._isLeader() and self.raftLastApplied >= self._SyncObj__noopIDx
        return RaftView(
            leads=leads,
            leader=None if leader is None else leader.id,
            term=self.raftCurrentTerm,
            may_vote=self._journal.may_vote,
            applied_index=self.raftLastApplied,
            # A leader is ready, to pysyncobj, before it has committed the records of older ones.
            caught_up=leads or (self._isReady() and not self._isLeader()),
        )

    def close(self) -> None:
        """Close the files."""
        self._doDestroy()

    def message_for_raft(self, message: RaftMessage) -> RaftMessage | None:
        """Return the message to pass to Raft. None: drop it."""
        if message["type"] == "timeout_now" and self.withholds:
            return None
        if message["type"] == "append_entries":
            self._leaderless_at = monotonic()
        if message["type"] == "append_entries" and message.get("prevLogIdx") is not None:
            return self._without_known_records(message)
        return message

    def may_send(self, message: RaftMessage) -> bool:
        """Return whether this node may send the message.

        While it withholds votes, it also withholds acknowledgements. Records that it acknowledged
        before it lost its files may be committed, and it must not help to commit others instead.
        """
        if not self.withholds:
            return True
        kind = message["type"]
        return kind not in {"request_vote", "response_vote"} and not (
            kind == "next_node_idx" and message["success"]
        )

    def _without_known_records(self, message: RaftMessage) -> RaftMessage:
        """Return the message without records that this node already holds.

        pysyncobj drops everything behind `prevLogIdx` and writes the message's records, also if
        all of them match, acknowledged ones included. But if the last record is of the leader's own
        term, this whole journal is a prefix of the leader's (Raft's log matching).
        """
        _, last_index, last_term = self._journal.last
        previous_index = message["prevLogIdx"]
        if last_term != message["term"] or previous_index >= last_index:
            self._refuse_divergence(message)
            return message
        entries = tuple(entry for entry in message["entries"] if entry[1] > last_index)
        return {**message, "prevLogIdx": last_index, "prevLogTerm": last_term, "entries": entries}

    def _refuse_divergence(self, message: RaftMessage) -> None:
        """End the process before a command that was applied here is replaced by another.

        This cannot happen while every disk keeps its durable data. After a restart this node
        applies the leader's records from its snapshot on.
        """
        entries = message["entries"]
        if message["term"] < self.raftCurrentTerm or not entries:
            return
        first_index = self._journal[0][1]
        for _, index, term in entries:
            held = index - first_index
            if index > self.raftLastApplied or not 0 <= held < len(self._journal):
                continue
            if self._journal[held][2] != term:
                why = f"the leader has another command at index {index}"
                self._fail(ExitCode.RAFT_DIVERGED, why)

    # Overridden methods that pysyncobj calls

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803
        if self.withholds:
            # Never a candidate: its term would rise, and no leader's messages would be accepted.
            self._SyncObj__raftElectionDeadline = monotonic() + 1e6
            self._propose_barrier()
            self._regrant_votes()
        limit = max(UNCOVERED_SIZE_MAX, UNCOVERED_PARTS_MAX * self._snapshot_size)
        # A tick writes a snapshot, and the next one deletes the records before it.
        is_written = self._SyncObj__serializer._Serializer__pid != 0  # noqa: SLF001
        if self._journal.uncovered_size > limit and not is_written:
            self.forceLogCompaction()
        super()._onTick(timeToWait)

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:  # noqa: N802
        try:
            self.flush()  # a cluster of one commits without sending a message
            if command[:1] != REGULAR:
                assert command[:1] == NO_OP, command[:1]
            elif command.startswith(REGULAR + _BARRIER):
                self._pass_barrier(command[1:])
            else:
                self._machine.apply(command[1:])
            self._count_tick()  # a start may apply thousands of commands within one tick
        except BaseException as error:  # noqa: BLE001
            self._fail(ExitCode.APPLY_FAILED, repr(error))

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:  # noqa: N802, N803, FBT001
        super()._SyncObj__loadDumpFile(clearJournal)
        self.flush()

    def _write_dump(self, path: str, parts: tuple[Record, Record, object]) -> None:
        last, previous, _ = parts
        snapshot = RaftSnapshot(state=self._machine.dump(), last=last, previous=previous)
        self._snapshot_size = len(snapshot.state)
        try:
            raft_files.write_snapshot(Path(path), snapshot)
        except BaseException as error:  # noqa: BLE001
            self._fail(ExitCode.SNAPSHOT_FAILED, repr(error))

    def _take_chunk(self, chunk: tuple[bytes, bool, bool] | None) -> bool:
        """Return whether pysyncobj may take a part of a leader's snapshot: (bytes, first, last).

        The last part is empty. With it pysyncobj renames the received file over the present
        snapshot. The received file must be durable and valid by then, or this node would have none.
        """
        arriving = self._SyncObj__serializer._Serializer__incomingTransmissionFile  # noqa: SLF001
        if chunk is None or not chunk[2] or arriving is None:
            return True
        try:
            arriving.flush()
            os.fsync(arriving.fileno())
            arrived = raft_files.read_snapshot(Path(arriving.name))
            self._machine.check(arrived.state)
            check_term({"type": "snapshot", "term": arrived.last[2]}, self.raftCurrentTerm)
        except (CorruptFileError, UnknownVersionError, ValueError, BadRaftMessage) as error:
            self._complaints.log("", "rejected a snapshot from a leader", error=error)
            return False
        except BaseException as error:  # noqa: BLE001
            self._fail(ExitCode.SNAPSHOT_FAILED, repr(error))
        return True

    def _read_dump(self, path: str) -> tuple[Record, Record, set[Node]]:
        try:
            # A leader's snapshot was only renamed so far, and pysyncobj drops the journal next.
            DISK.sync_dir(Path(path).parent)
            snapshot = raft_files.read_snapshot(Path(path))
            self._snapshot_size = len(snapshot.state)
            self._machine.load(snapshot.state)
        except BaseException as error:  # noqa: BLE001
            self._fail(ExitCode.SNAPSHOT_FAILED, repr(error))
        return snapshot.last, snapshot.previous, self.otherNodes | {self.selfNode}

    # Voting again

    def _propose_barrier(self) -> None:
        """Propose this node's barrier: to each new leader at once, then again and again.

        A barrier is lost with its leader. Until one is committed this node helps no other leader.
        """
        now, leader = monotonic(), self._getLeader()
        linked = leader is not None and leader in self._SyncObj__connectedNodes
        to = (leader, self.raftCurrentTerm) if linked else None
        if to is not None and (to != self._barrier_to or now - self._barrier_at >= BARRIER_EVERY_S):
            self._barrier_at = now
            self.submit(self._barrier, lambda _result, _error: None)
        self._barrier_to = to

    def _regrant_votes(self) -> None:
        """Vote again if no node leads although all are linked: too many withhold votes."""
        now = monotonic()
        if len(self._SyncObj__connectedNodes) < self.links_wanted:
            self._leaderless_at = now
        if now - self._leaderless_at >= REGRANT_S:
            self._journal.allow_votes()
            later_s = REGRANT_DELAY_S + SETTINGS["raftMaxTimeout"] * random.random()  # noqa: S311
            self._SyncObj__raftElectionDeadline = now + later_s
            logger.warning("all nodes are linked without a leader: this node's votes count again")

    def _pass_barrier(self, barrier: bytes) -> None:
        if barrier != self._barrier or not self.withholds:
            return
        # Committed after this process started, by a majority without this node. So its leader is
        # the latest, and everything committed before has arrived here.
        self.flush()
        self._journal.allow_votes()
        self._SyncObj__raftElectionDeadline = monotonic() + SETTINGS["raftMaxTimeout"]
        logger.info("caught up with the leader: this node's votes count again")


class _Transport(Transport):  # type: ignore[misc]
    """The transport between pysyncobj's tick thread and the link."""

    def __init__(
        self, sync_obj: object, self_node: Node, others: object, *, core: _Core, link: Link
    ) -> None:
        super().__init__(sync_obj, self_node, others)
        core._transport = self  # noqa: SLF001
        self._core, self._link = core, link
        self._peers: dict[str, Node] = {node.id: node for node in others}  # type: ignore[attr-defined]
        self._up: set[str] = set()
        self._inbox: collections.deque[tuple[str, RaftMessage | bool]] = collections.deque()
        self._wake_read, self._wake_write = os.pipe()
        self._closing = threading.Lock()
        self._closed = False
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        core._poller.subscribe(self._wake_read, self._drain, POLL_EVENT_TYPE.READ)  # noqa: SLF001

    def post(self, item: tuple[str, RaftMessage | bool]) -> None:
        """Queue an item for the tick thread, and wake it."""
        self._inbox.append(item)
        self.wake()

    def wake(self) -> None:
        """Start the next tick at once."""
        with self._closing, contextlib.suppress(BlockingIOError):  # full: a wake-up waits already
            if not self._closed:
                os.write(self._wake_write, b"\0")

    def _drain(self, _fd: int, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4_096):
                pass
        for _ in range(len(self._inbox)):
            peer, item = self._inbox.popleft()
            node = self._peers.get(peer)
            if node is None:
                continue
            if isinstance(item, bool):
                self._set_up(node, up=item)
            elif (message := self._core.message_for_raft(item)) is not None:
                self._onMessageReceived(node, message)

    def _set_up(self, node: Node, *, up: bool) -> None:
        if node.id in self._up:
            self._up.discard(node.id)
            self._onNodeDisconnected(node)
        if up:
            self._up.add(node.id)
            self._onNodeConnected(node)

    def send(self, node: Node, message: RaftMessage) -> bool:
        """Queue a message, if the link is up. The journal is flushed first."""
        if node.id not in self._up or not self._core.may_send(message):
            return False
        self._core.flush()
        self._link.send_raft(node.id, encode(message))
        return True

    def addNode(self, node: Node) -> None:  # noqa: N802
        """Refuse: the members of Raft never change."""
        raise AssertionError(f"membership change: add {node.id}")

    def dropNode(self, node: Node) -> None:  # noqa: N802
        """Refuse: the members of Raft never change."""
        raise AssertionError(f"membership change: drop {node.id}")

    def destroy(self) -> None:
        """Close the pipe."""
        with self._closing:
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)


_construction = threading.Lock()


@contextlib.contextmanager
def _using_journal(journal: object) -> Iterator[None]:
    """Make pysyncobj use `journal` in this block; it has no parameter for that."""
    with _construction:
        original = pysyncobj_core.createJournal
        pysyncobj_core.createJournal = lambda _path: journal
        try:
            yield
        finally:
            pysyncobj_core.createJournal = original


_nonces = itertools.count(secrets.randbits(61) + 1)


def next_nonce() -> int:
    """Return a new number for a command, practically unique in the cluster."""
    return next(_nonces)
