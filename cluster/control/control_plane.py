"""One node's control plane: Raft, its links, the controller, and the replicated object.

                 node (event loop)
     reports ^ |state, transfers      v checkpoints
       +-----------------------------------------+
       | ControlPlane: this shell                |
       |   Controller (pure)   ControlState      |
       +------+-----------------------^----------+
              | commands              | applied (tick thread -> loop)
       +------v-----------------------+----------+
       | Raft (tick thread)                      |
       +------^----------------------------------+
              | frames        RaftLink (event loop) <--> peers

The control plane says which node *should* lead the log. No node may lead on its word alone: the
promises of the log decide which node can. So a failure in here costs time and nothing else. The
outcome of a command is certain only if this node saw it applied.
"""

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeGuard

import grpc

from cluster.control import control_state, raft_files
from cluster.control.control_state import (
    AppliedCommand,
    Appoint,
    Command,
    ControlState,
    Members,
    SharedCheckpoint,
)
from cluster.control.controller import Controller, ControllerEffects
from cluster.control.controller_config import ControllerConfig
from cluster.control.controller_events import (
    Announced,
    ChangeRequest,
    ControllerRequest,
    ControllerTick,
    Event,
    LinkChanged,
    ProposalEnded,
    RaftLeadership,
    ReplicaReport,
    Reported,
    ReportedRole,
    StateApplied,
    TransferRequest,
)
from cluster.control.membership import Change
from cluster.control.raft import Raft, RaftView, next_nonce
from cluster.control.raft_link import FrameKind, RaftLink
from cluster.settings.exit_codes import ExitCode
from cluster.settings.rounds import next_round
from replication.core.message_check import ID_MAX
from replication.core.quorum import VOTERS_MAX, Voters
from replication.shell.peer_complaints import Complaints
from replication.shell.tasks import TaskSet
from replication.shell.tcp_stream import TcpEnds
from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import Epoch, LogIndex, MonoMs, QueueOffset, ReplicaId

logger = logging.getLogger(__name__)

COMMANDS_IN_FLIGHT_MAX: Final = 16
SETS_MAX: Final = 16
"""Voter sets of one report; two are in force during a change."""
COMMAND_DEADLINE_S: Final = 2.0
ELECTION_DEADLINE_S: Final = 2.0
"""Seconds that a request waits for a controller, whose election takes about one."""
SERVE_DEADLINE_S: Final = 2.0
"""Seconds that the answer to a transfer waits for the appointed leader to serve."""
ASK_SPARE_S: Final = 1.0
"""Seconds that a node waits for a controller's answer, beyond all the controller's own waits."""
REPORT_EVERY_MS: Final = 100
"""Interval of reports. They are made when Raft's messages leave, which is as often."""
TICK_S: Final = 0.25
"""Interval of the controller's ticks, and of reports while Raft sends no message."""
HURRY_S: Final = 0.05
"""Interval of the ticks while a link of the controller is down, or a transfer waits."""
SERVED_POLL_S: Final = 0.01


class CommandOutcome(enum.StrEnum):
    """The outcome of a command."""

    OK = "ok"
    """This node applied it."""
    REFUSED = "refused"
    """The command is not possible in the present state; it was not tried."""
    NOT_NOW = "not now"
    """The command was not tried, or another node than the requested one was appointed after it. It
    may become possible soon."""
    FAILED = "failed"
    """The command was tried without success, and certainly has none later."""
    UNKNOWN = "unknown"
    """The command may have been applied, or may be applied later."""


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """The answer to an operator's request for another leader or other voters."""

    outcome: CommandOutcome
    """OK: the requested leader serves, or the new voters are proposed."""
    why: str
    """The reason, in words."""
    changed: bool = True
    """False: there was nothing to change."""


class ControlPlane:
    """The control plane of one node. All methods are for the event loop."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        name: str,
        replica_id: ReplicaId,
        peers: Iterable[str],
        directory: Path,
        founding: bool,
        cluster_id: str,
        voters: Mapping[str, ReplicaId],
        channel_for: Callable[[str], grpc.aio.Channel],
        clock: Callable[[], MonoMs],
        report: Callable[[], ReplicaReport],
        on_state: Callable[[ControlState], None],
        raft_lost: bool,
        config: ControllerConfig,
        identify: Callable[[grpc.aio.ServicerContext[Any, Any]], str] | None = None,
        release: ProgramRelease = FIRST_RELEASE,
        tcp: TcpEnds,
        fail: Callable[[ExitCode, str], NoReturn],
    ) -> None:
        """Args:
        peers: Names of the other nodes.
        directory: The node's data directory; Raft keeps `raft/` and `raft-member` in it.
        founding: The directory was formatted as a founding voter's.
        voters: All configured voters, this node included if it is one.
        channel_for: Returns a new channel to a peer at its present address, with
            raft_link.CHANNEL_OPTIONS. The control plane closes it.
        report: Returns the report of this node's replica. Called ten times a second, and at
            `report_now`; it must be cheap.
        on_state: Called at each change of `state`.
        raft_lost: An operator has declared that the Raft files of all absent nodes are lost.
        identify, release, tcp: See RaftLink.
        """
        self.name, self._peers, self._directory = name, frozenset(peers), directory
        assert name not in self._peers, name
        assert voters.get(name, replica_id) == replica_id, f"{name} is {voters[name]} in voters"
        self._cluster_id, self._founding, self._raft_lost = cluster_id, founding, raft_lost
        self._clock, self._fail = clock, fail
        self._transfer_s, self._grace_s = config.transfer_ms / 1000, config.link_grace_ms / 1000
        self._controller = Controller(
            name=name,
            cluster_id=cluster_id,
            founders=dict(voters),
            config=config,
            release=release,
        )
        self._link = RaftLink(
            name=name,
            cluster_id=cluster_id,
            peers=self._peers,
            channel_for=channel_for,
            on_raft=self._on_raft_message,
            on_up=self._on_link,
            before_raft=self._report_in_time,
            on_frame=self._on_frame,
            on_release=self._on_announced,
            release=release,
            identify=identify,
            silence_s=2 * config.report_timeout_ms / 1000,
            tcp=tcp,
        )
        self._register = _Register(self._wake_loop)
        self._raft: Raft | None = None
        self._view, self._is_current, self._state = RaftView(), False, ControlState()
        self._on_state, self._report = on_state, report
        self._reported: ReplicaReport | None = None
        self._peer_sets: dict[str, tuple[Voters, ...]] = {}
        """Voter sets in the logs of the peers, as they sent them over their present links."""
        self._reported_at_ms, self._stopping = MonoMs(0), False
        self._pending: dict[int, asyncio.Future[CommandOutcome]] = {}
        self._failed: tuple[Command, CommandOutcome] | None = None
        """The last proposal and its outcome. None: it succeeded."""
        self._open_requests: dict[int, tuple[str, asyncio.Future[CommandAnswer]]] = {}
        """Open requests to controllers: id -> (controller, its answer)."""
        self._complaints, self._publishing = Complaints(logger), asyncio.Lock()
        self._published = LogIndex(0)
        """The last checkpoint that this node published in whole. 0: none, or one is incomplete."""
        self._tasks = TaskSet(self._on_task_failed)
        self._loop: asyncio.AbstractEventLoop | None = None

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers for the node's gRPC server."""
        return [self._link]

    async def start(self) -> None:
        """Start Raft and dial the peers.

        Raises:
            WrongDirectoryError, UnknownVersionError: see raft_files.py.
        """
        self._loop = asyncio.get_running_loop()
        files = raft_files.open_files(
            self._directory,
            cluster_id=self._cluster_id,
            name=self.name,
            founding=self._founding,
            alone=not self._peers,
        )
        self._raft = Raft(
            name=self.name,
            peers=self._peers,
            files=files,
            machine=self._register,
            on_change=self._wake_loop,
            others_lost=self._raft_lost,
            fail=self._fail,
        )
        self._view = self._raft.view
        self._raft.start(self._link)
        self._link.start()
        self._tasks.spawn(self._run())

    async def stop(self) -> None:
        """Stop links and Raft, and cancel all open commands and requests."""
        self._stopping = True
        await self._tasks.end()
        await self._link.stop()
        if self._raft is not None:
            await asyncio.to_thread(self._raft.stop)
        for settled in self._pending.values():
            settled.cancel()
        for _, answered in self._open_requests.values():
            answered.cancel()

    @property
    def state(self) -> ControlState:
        """The replicated object after the last command that this node applied."""
        return self._state

    @property
    def is_controller(self) -> bool:
        """Whether this node is the controller, which appoints leaders."""
        return self._view.leads

    @property
    def is_alone(self) -> bool:
        """Whether no link to another node is up."""
        return not any(self._link.is_up(peer) for peer in self._peers)

    @property
    def is_current(self) -> bool:
        """Whether `state` has all commands so far. After a start the journal is replayed first."""
        return self._is_current

    @property
    def raft_term(self) -> int:
        """Raft's own counter; for metrics only."""
        return self._view.term

    @property
    def withholds_votes(self) -> bool:
        """Whether this node made its Raft files again, and its Raft votes do not count yet."""
        return not self._view.may_vote

    @property
    def controller_name(self) -> str | None:
        """The name of the controller. None: this node knows none."""
        return self._view.leader

    async def publish_checkpoint(
        self,
        checkpoint: SharedCheckpoint,
        moved: Mapping[str, QueueOffset | None] = MappingProxyType({}),
        since: LogIndex = LogIndex(0),
    ) -> CommandOutcome:
        """Make `checkpoint` the shared checkpoint. A newer one stays.

        `moved`: the queue offsets that differ from those of the checkpoint at `since`.
        """
        async with self._publishing:
            last = self._state.checkpoint
            whole = last is None or not since or {last.index, since} != {self._published}
            self._published = LogIndex(0)
            for page in control_state.pages(self._state, checkpoint, None if whole else moved):
                outcome = await self._submit(page)
                if outcome is not CommandOutcome.OK:
                    return outcome
            self._published = checkpoint.index
        return CommandOutcome.OK

    async def publish_members(
        self, epoch: Epoch, voters: Mapping[str, ReplicaId]
    ) -> CommandOutcome:
        """Set the voters of the replicated object to those in the log of `epoch`."""
        return await self._submit(Members(epoch=epoch, voters=voters))

    async def request_transfer(self, target: ReplicaId | None) -> CommandAnswer:
        """Request the appointment of `target`; None: of the best voter except the present leader.

        The target catches up first, while the leader serves. The answer comes when the target
        serves; of None, when any other node than the present leader serves. It is NOT_NOW, and
        names the node that was appointed instead, if the target ended or was refused before.
        """
        return await self._request(TransferRequest(target), (target,))

    async def request_change(self, change: Change, name: str) -> CommandAnswer:
        """Request a change of the voters, which is proposed with the next appointment."""
        return await self._request(ChangeRequest(change, name), (str(change), name))

    async def _request(
        self, request: ControllerRequest, words: tuple[object, ...]
    ) -> CommandAnswer:
        assert self._loop is not None
        until_s = self._loop.time() + ELECTION_DEADLINE_S
        while (controller := self.reached_controller) is None:
            if self._loop.time() >= until_s:
                return CommandAnswer(CommandOutcome.NOT_NOW, "no controller is known")
            await asyncio.sleep(HURRY_S)
        if controller == self.name:
            return await self._carry_out(request)
        ask_id = next_nonce()
        answered: asyncio.Future[CommandAnswer] = self._loop.create_future()
        self._open_requests[ask_id] = controller, answered
        self._link.send(controller, FrameKind.ASK, (ask_id, *words))
        waits_s = self._transfer_s + COMMAND_DEADLINE_S + SERVE_DEADLINE_S
        try:
            async with asyncio.timeout(waits_s + ASK_SPARE_S):
                return await answered
        except TimeoutError:
            return CommandAnswer(CommandOutcome.UNKNOWN, f"{controller} did not answer")
        finally:
            del self._open_requests[ask_id]

    @property
    def reached_controller(self) -> str | None:
        """The name of the controller. None: this node knows none, or has no link to it."""
        if self.is_controller:
            return self.name
        name = self.controller_name
        return name if name and name != self.name and self._link.is_up(name) else None

    # The loop's own work

    async def _run(self) -> None:
        assert self._raft is not None
        ticked_at_ms = self._clock()
        while True:
            linked = all(self._link.is_up(peer) for peer in self._peers)
            if linked or not self._controller.leads:
                await next_round(TICK_S)
            else:
                await asyncio.sleep(HURRY_S)
            now_ms = self._clock()
            self._raft.check_ticking(now_ms - ticked_at_ms)
            ticked_at_ms = now_ms
            self._report_in_time()
            self._tick()

    def _report_in_time(self) -> None:
        """Make a report if one is due. Slightly early is better than a whole message late."""
        if self._clock() - self._reported_at_ms >= REPORT_EVERY_MS - 10:
            self.report_now()

    def report_now(self) -> None:
        """Send this node's report to the controller: it is due, or a change matters."""
        if self._stopping:
            return
        report = self._report()
        assert report.name == self.name, report
        urgent = report.is_urgent_after(self._reported)
        self._reported, self._reported_at_ms = report, self._clock()
        controller = self.controller_name
        if controller == self.name:
            self._step(Reported(report))
        elif controller is not None:
            # Sent with Raft's own answers, except if the report is urgent.
            if urgent:
                sets = [sorted(each) for each in report.sets]
                self._link.send(controller, FrameKind.VOTERS, sets)
            packed = astuple(report)[:-1]  # an earlier program knows no voters in a report
            self._link.send(controller, FrameKind.REPORT, packed, lazily=not urgent)

    def _tick(self) -> None:
        """Let the controller look at the time."""
        if self._controller.leads and not self._stopping:
            self._step(ControllerTick())

    def _decide(self, event: Event) -> ControllerEffects:
        """Return the controller's effects. An error of its step ends the process."""
        try:
            return self._controller.step(self._clock(), event)
        except Exception as error:  # noqa: BLE001
            self._fail(ExitCode.SHELL_FAILED, repr(error))

    def _step(self, event: Event) -> None:
        effects = self._decide(event)
        self._log(effects)
        if effects.propose is not None:
            self._tasks.spawn(self._propose(effects.propose))
        if effects.hand_over_to is not None and self._raft is not None:
            self._raft.hand_over(effects.hand_over_to)

    async def _propose(self, command: Command) -> CommandOutcome:
        outcome = await self._submit(command)
        if outcome is not CommandOutcome.OK and (command, outcome) != self._failed:
            logger.warning("command %s: %s; repetitions are not logged", command, outcome)
        self._failed = None if outcome is CommandOutcome.OK else (command, outcome)
        self._step(ProposalEnded(refused=outcome is CommandOutcome.FAILED))
        return outcome

    async def _carry_out(self, request: ControllerRequest) -> CommandAnswer:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._transfer_s
        effects = self._decide(request)
        while effects.refusal is not None and effects.refusal.soon and loop.time() < until_s:
            await asyncio.sleep(HURRY_S)
            effects = self._decide(request)
        self._log(effects)
        refusal = effects.refusal
        if refusal is not None and refusal.soon:
            why = f"{refusal.why}, and did not catch up within {self._transfer_s:g} s"
            return CommandAnswer(CommandOutcome.REFUSED, f"{why}; the leader stays")
        if refusal is not None:
            outcome = CommandOutcome.NOT_NOW if refusal.later else CommandOutcome.REFUSED
            return CommandAnswer(outcome, refusal.why)
        if effects.propose is None:
            return CommandAnswer(CommandOutcome.OK, effects.reason, changed=False)
        before = self._state.leader
        outcome = await self._propose(effects.propose)
        if outcome is not CommandOutcome.OK:
            return CommandAnswer(outcome, f"{effects.reason}: {outcome}")
        if not isinstance(request, TransferRequest):
            return CommandAnswer(outcome, effects.reason)

        def is_requested(leader: ReplicaId | None) -> bool:
            return leader != before if request.target is None else leader == request.target

        return await self._wait_until_served(effects, is_requested)

    async def _wait_until_served(
        self, effects: ControllerEffects, is_requested: Callable[[ReplicaId | None], bool]
    ) -> CommandAnswer:
        """Wait until a requested leader serves, SERVE_DEADLINE_S at most.

        The appointed one may end or be refused before it serves. A later appointment of a requested
        leader counts. One of another leader ends the wait.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SERVE_DEADLINE_S
        assert isinstance(effects.propose, Appoint), effects
        while is_requested(self._state.leader):
            if self._controller.served_epoch >= effects.propose.epoch:
                return CommandAnswer(CommandOutcome.OK, effects.reason)
            if loop.time() >= until_s:
                why = f"{effects.reason}: not seen serving within {SERVE_DEADLINE_S:g} s"
                return CommandAnswer(CommandOutcome.UNKNOWN, why)
            await asyncio.sleep(SERVED_POLL_S)
        name = self._state.name_of(self._state.leader) or "another replica"
        why = f" ({self._state.why})" if self._state.why else ""
        return CommandAnswer(CommandOutcome.NOT_NOW, f"{name} was appointed instead{why}")

    async def _submit(self, command: Command) -> CommandOutcome:
        """Return the outcome of `command`, after COMMAND_DEADLINE_S at most."""
        if len(self._pending) >= COMMANDS_IN_FLIGHT_MAX or self._raft is None or self._stopping:
            return CommandOutcome.FAILED
        loop = asyncio.get_running_loop()
        nonce = next_nonce()
        settled: asyncio.Future[CommandOutcome] = loop.create_future()
        self._pending[nonce] = settled

        def on_failure(certain: bool) -> None:  # noqa: FBT001
            outcome = CommandOutcome.FAILED if certain else CommandOutcome.UNKNOWN
            loop.call_soon_threadsafe(self._settle, nonce, outcome)

        self._raft.submit(control_state.encode_command(command, nonce=nonce), on_failure)
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                return await settled
        except TimeoutError:
            return CommandOutcome.UNKNOWN
        finally:
            del self._pending[nonce]

    def _settle(self, nonce: int, outcome: CommandOutcome) -> None:
        settled = self._pending.get(nonce)
        if settled is not None and not settled.done():
            settled.set_result(outcome)

    # Events of Raft

    def _wake_loop(self) -> None:
        """Run `_refresh` on the loop. Called on the tick thread."""
        assert self._loop is not None
        if self._register.wake_is_due():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._refresh)

    def _refresh(self) -> None:
        """Take over Raft's changes: first the state, then the leadership, then the outcomes."""
        assert self._raft is not None
        self._register.awake()  # first: a later change wakes the loop again
        view_before, self._view = self._view, self._raft.view
        state, applied = self._register.take_applied()
        if self._stopping:
            return
        if state is not self._state:
            self._state = state
            if state.cluster_id not in {None, self._cluster_id}:
                why = f"Raft's state is of cluster {state.cluster_id!r}"
                self._fail(ExitCode.RAFT_DIVERGED, why)
            self._step(StateApplied(state))
            self._publish_state(state)
        self._is_current |= self._view.caught_up
        if self._view.leads != view_before.leads:
            logger.info("%s the controller", "became" if self._view.leads else "is no longer")
            self._step(RaftLeadership(self._view.leads))
        if self._view.leader != view_before.leader or self._view.leads != view_before.leads:
            self._reported = None  # a new controller has no report of this node
            self.report_now()
        for entry in applied:
            self._settle(
                entry.nonce, CommandOutcome.OK if entry.accepted else CommandOutcome.FAILED
            )

    def _publish_state(self, state: ControlState) -> None:
        try:
            self._on_state(state)
        # The node would act on a part of the new state only.
        except Exception as error:  # noqa: BLE001
            self._fail(ExitCode.SHELL_FAILED, repr(error))

    # Events of the links

    def _on_raft_message(self, peer: str, message: dict[str, Any]) -> None:
        if self._raft is not None:
            self._raft.deliver(peer, message)

    def _on_link(self, peer: str, up: bool) -> None:  # noqa: FBT001
        if self._raft is not None:
            self._raft.set_connected(peer, up=up)
        self._step(LinkChanged(peer, up))
        if not up:
            asyncio.get_running_loop().call_later(self._grace_s + 0.001, self._tick)
            lost = f"the connection to {peer} was lost before it answered"
            for ask_id, (of, _) in [*self._open_requests.items()]:
                if of == peer:
                    self._on_answer(ask_id, CommandAnswer(CommandOutcome.UNKNOWN, lost))
        elif peer == self.controller_name:
            self._reported = None
            self.report_now()

    def _on_announced(self, peer: str, release: ProgramRelease) -> None:
        """Note a release. A new stream of a peer begins with it; voters come after it."""
        self._peer_sets.pop(peer, None)
        self._step(Announced(peer, release))

    def _on_frame(self, peer: str, kind: FrameKind, body: object) -> None:
        match kind, body:
            case FrameKind.REPORT, tuple():
                report = _parse_report(body, control_state.epoch_limit(self._state.epoch))
                if report is not None and report.name == peer:
                    sets = self._peer_sets.get(peer, ())
                    self._step(Reported(replace(report, sets=sets)))
            case FrameKind.VOTERS, tuple() as sets if _are_sets(sets):
                self._peer_sets[peer] = tuple(map(frozenset, sets))
            case FrameKind.ASK, (int(ask_id), (int() | None) as target):
                transfer = TransferRequest(None if target is None else ReplicaId(target))
                self._tasks.spawn(self._answer(peer, ask_id, transfer))
            case FrameKind.ASK, (int(ask_id), str(change), str(name)) if change in set(Change):
                self._tasks.spawn(self._answer(peer, ask_id, ChangeRequest(Change(change), name)))
            case FrameKind.ANSWER, (int(ask_id), str(outcome), str(why), bool(changed)):
                if ask_id in self._open_requests and outcome in set(CommandOutcome):
                    self._on_answer(ask_id, CommandAnswer(CommandOutcome(outcome), why, changed))
            case _:
                more = {"kind": kind.name, "body": f"{body!r:.80}"}
                self._complaints.log(peer, "unknown frame", peer_name=str(peer), **more)

    def _on_answer(self, ask_id: int, answer: CommandAnswer) -> None:
        _, answered = self._open_requests[ask_id]
        if not answered.done():
            answered.set_result(answer)

    async def _answer(self, peer: str, ask_id: int, request: ControllerRequest) -> None:
        answer = await self._carry_out(request)
        answer_fields = (ask_id, str(answer.outcome), answer.why, answer.changed)
        self._link.send(peer, FrameKind.ANSWER, answer_fields)

    # Tasks

    def _on_task_failed(self, error: BaseException) -> None:
        logger.critical("a task of the control plane failed", exc_info=error)
        self._fail(ExitCode.SHELL_FAILED, repr(error))

    def _log(self, effects: ControllerEffects) -> None:
        if effects.reason:
            logger.info("the controller decided", extra={"reason": effects.reason})


class _Register:
    """The replicated object on the tick thread, with the changes that the loop has yet to take."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._state = ControlState()
        self._applied: list[AppliedCommand] = []
        self._is_waking = False

    def apply(self, command: bytes) -> None:
        """Apply a committed command."""
        state, applied = control_state.apply(self._state, command)
        with self._lock:
            self._state = state
            if applied is not None:
                self._applied.append(applied)
        self._changed()

    def dump(self) -> bytes:
        """Return the state's bytes."""
        return control_state.dump(self._state)

    def check(self, state: bytes) -> None:
        """See RaftMachine."""
        control_state.load(state)

    def load(self, state: bytes) -> None:
        """Replace the state by that of a snapshot."""
        loaded = control_state.load(state)
        with self._lock:
            self._state = loaded
        self._changed()

    def wake_is_due(self) -> bool:
        """Return whether the loop must be woken: not if it was, and has not taken over since."""
        with self._lock:
            due, self._is_waking = not self._is_waking, True
        return due

    def awake(self) -> None:
        """Note that the loop takes over now."""
        with self._lock:
            self._is_waking = False

    def take_applied(self) -> tuple[ControlState, list[AppliedCommand]]:
        """Return the state, and the outcomes of the commands applied since the last call."""
        with self._lock:
            applied, self._applied = self._applied, []
            return self._state, applied


def _are_sets(sets: tuple[object, ...]) -> TypeGuard[tuple[tuple[ReplicaId, ...], ...]]:
    """Return whether these are sets of at most VOTERS_MAX ids of replicas."""
    return len(sets) <= SETS_MAX and all(
        isinstance(ids, tuple)
        and 0 < len(ids) <= VOTERS_MAX
        and all(type(each) is int and 0 < each <= ID_MAX for each in ids)
        for ids in sets
    )


def _parse_report(packed: tuple[object, ...], epoch_limit: int) -> ReplicaReport | None:
    """Return the report. None: it is malformed, or one of its epochs is too far above."""
    numbers = [each for each in packed if type(each) is int]
    if not all(0 <= number <= ID_MAX for number in numbers):
        return None
    match packed:
        case (
            int(replica_id),
            str(name),
            str(role),
            int(epoch),
            bool(serving),
            bool(lease_ok),
            int(last_epoch),
            int(last_index),
            int(applied_index),
            int(highest_promise),
            bool(unsure),
            int(refused_epoch),
            int(disk_ms),
            int(commit_ms),
            bool(accepts),
        ) if (
            role in set(ReportedRole)
            and max(epoch, last_epoch, highest_promise, refused_epoch) < epoch_limit
        ):
            return ReplicaReport(
                replica_id=ReplicaId(replica_id),
                name=name,
                role=ReportedRole(role),
                epoch=Epoch(epoch),
                serving=serving,
                lease_ok=lease_ok,
                last_epoch=Epoch(last_epoch),
                last_index=LogIndex(last_index),
                applied_index=LogIndex(applied_index),
                highest_promise=Epoch(highest_promise),
                unsure=unsure,
                refused_epoch=Epoch(refused_epoch),
                disk_ms=disk_ms,
                commit_ms=commit_ms,
                accepts=accepts,
            )
        case _:
            return None
