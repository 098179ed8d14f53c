"""One node: its start, its stop, and its answers to the calls of its parts.

`build.py` makes the parts; the disk is open when that is done.

    start   ports, then the planes, then the periodic work
    drain   reject new work, commit a checkpoint, hand the leadership over, write a manifest
    stop    the planes, then the ports
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from cluster.control.control_plane import CommandAnswer, CommandOutcome, ControlPlane
from cluster.control.control_state import ControlState
from cluster.node.build import build
from cluster.settings.config import NodeConfig
from replication.core.core_events import Role
from replication.shell.tasks import TaskSet
from timer.entries.entry_check import check_entry
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import decode_epoch
from timer.leader.intake.cluster_clock import ClockReport
from timer.model.timer_errors import PromiseLostError
from timer.model.units import Epoch, LogIndex

logger = logging.getLogger(__name__)

DRAIN_POLL_S: Final = 0.005
GRPC_GRACE_S: Final = 0.5
"""After leadership is handed over, open RPCs may still take this long."""


class Node:
    """One running node. Call `start`, then `stop`, once each."""

    def __init__(
        self,
        config: NodeConfig,
        fatal: Callable[[BaseException], None],
        restart: Callable[[], None] = lambda: None,
        *,
        raft_lost: bool = False,
    ) -> None:
        """Open the disk. The state that it holds is in memory afterwards.

        `fatal`: called with an error that ends the process.
        `restart`: called when a snapshot waits to be installed by the next start.
        `raft_lost`: an operator has declared the Raft files of all absent nodes lost.

        Raises:
            Damaged: state and log have to be fetched from the others; see cluster/files/repair.py.
            WrongDirectoryError, CorruptFileError, UnknownVersionError, DiskFailedError: the data.
        """
        self.config = config
        self.fatal = fatal
        self._restart = restart
        self._tasks = TaskSet(fatal)
        self._fetching = False
        """A snapshot is being fetched while this node follows."""
        self._stopping = False
        """This node must not lead again: it has drained, or it restarts."""
        self._parts = build(config, self, raft_lost=raft_lost)

    async def start(self) -> str:
        """Open the ports and join the cluster. Return the addresses as a text for the log.

        Raises:
            ConfigError: a port is in use.
            WrongDirectoryError, CorruptFileError, UnknownVersionError: Raft's files.
        """
        parts = self._parts
        http_port = parts.view.http_port = await parts.ports.open()
        parts.loop_watch.start()
        await parts.ports.health.update()
        await parts.replica.start()
        parts.host.kick()
        await parts.control.start()
        self.spawn(parts.ports.run())
        self.spawn(parts.publisher.run())
        self.spawn(parts.space.run())
        for guard in parts.guards:
            self.spawn(guard.run())
        self.spawn(parts.backups.run())
        self.spawn(parts.scrubber.run())
        http_host = self.config.http.rpartition(":")[0]
        addresses = f"grpc {self.config.grpc}, http {http_host}:{http_port}"
        logger.info("started: %s", addresses)
        return addresses

    def reload(self) -> None:
        """Read again the files that a running node reads, except the settings."""
        self._parts.ports.reload()

    @property
    def is_flushing(self) -> bool:
        """Whether the state is being captured or written."""
        return self._parts.engine.capture_begun or self._parts.engine.flushing

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task until the node stops. An exception of it is fatal."""
        self._tasks.spawn(work)

    # ---- calls of the replica (Listener)

    def check(self, entry: Entry) -> None:
        """See Listener. The directory is marked before it has an entry of a higher level."""
        check_entry(entry)
        if entry.kind is EntryKind.EPOCH:
            self._parts.directory.raise_level(decode_epoch(entry.payload).level)

    def on_commit(self, commit_index: LogIndex) -> None:
        """Apply the log up to this index."""
        self._parts.host.on_commit(commit_index)

    def on_role(self, role: Role, epoch: Epoch) -> None:
        """Report to the controller at once."""
        logger.info("the role changed", extra={"role": role.value, "epoch": epoch})
        self._parts.control.report_now()

    def on_lead(self, epoch: Epoch) -> None:
        """Promote the state plane."""
        self._parts.host.on_lead(epoch)

    def on_drain(self) -> bool:
        """Append entries that the successor needs. Return whether more are left."""
        return self._parts.host.on_drain()

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving at once."""
        self._parts.host.on_stepdown(epoch)

    def on_behind(self) -> None:
        """Fetch a snapshot while this node follows. The next start installs it."""
        if not self._fetching and not self._stopping:
            self._fetching = True
            logger.warning("the leader's log no longer has the next entry: fetching a snapshot")
            self.spawn(self._fetch())

    def on_forgotten(self) -> None:
        """End the process: a node that lost its promises is replaced by another replica."""
        name, founders = self.config.name, self._parts.directory.identity.founding_voters
        self.fatal(
            PromiseLostError(
                f"{self.config.data}: founding voter {name!r} has no promise and no log, but the"
                " cluster has entries, which takes every founder's promise. Either its disk was"
                " lost, and was formatted as a founder's again: format it with `timerd init"
                f" --learner`, start it, then `timerctl members replace {name}` (docs/members.md)."
                " Or the cluster is new, and its founders were formatted with different --voters"
                f" (here {','.join(founders)}): format all of them again, with the same"
            )
        )

    async def _fetch(self) -> None:
        await self._parts.new_fetch().run()
        if self._parts.replica.silent:  # only the next process may acknowledge entries again
            self._stopping = True
            self._restart()
        self._fetching = False

    # ---- calls of the control plane and of the state plane

    def on_control_state(self, state: ControlState) -> None:
        """Pass the appointment on to the replica. Compare digests at the shared checkpoint."""
        replica = self._parts.replica
        mine = state.leader == replica.replica_id
        if state.leader is not None and not (self._stopping and mine):
            if mine:
                self._parts.promotions.on_appointed(state.epoch)
            voters = state.change_of(replica.voters)
            replica.on_appointment(state.epoch, state.leader, voters, state.level)
        self._parts.digests.compare(state.checkpoint)
        self._parts.view.note_leader(state)

    def on_leading(self) -> None:
        """The leadership began or ended: set the health, report, and end streams or count."""
        parts, leader = self._parts, self._parts.host.leader
        self.spawn(parts.ports.health.update())
        parts.control.report_now()
        if leader is None:
            parts.consumers.end_streams()
        else:
            parts.promotions.on_serves(leader.epoch)
            parts.view.on_lead()

    def on_clocks(self, report: ClockReport) -> None:
        """Log clocks that became wrong or right."""
        self._parts.view.clock_watch.update(report)

    # ---- the end

    async def stop(self) -> None:
        """Drain for a while, then stop every part and close the ports. The HTTP port is the last.

        From the first moment on the node is not ready (`/readyz`).
        """
        self._parts.view.is_stopping = True
        timeout_s = self.config.timing.drain_timeout_ms / 1000 * 0.7
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain()
        except TimeoutError:
            logger.warning("the drain took longer than %.1f s: stopping anyway", timeout_s)
        parts = self._parts
        await parts.ports.health.shut_down()
        parts.consumers.end_streams()
        parts.ports.end_waiting()
        self._tasks.cancel()
        parts.scrubber.stop()
        await parts.host.stop()
        await parts.control.stop()
        await parts.ports.close_grpc(GRPC_GRACE_S)
        await parts.replica.stop()
        await parts.ports.close()
        parts.loop_watch.stop()
        parts.directory.close()
        logger.info("stopped")

    async def _drain(self) -> None:
        host = self._parts.host
        led = host.leader is not None
        await host.drain(lambda: asyncio.sleep(DRAIN_POLL_S))
        self._stopping = True
        if led:
            await self._resign()
        if not self._parts.replica.silent:  # its log may end before the applied entries
            await host.flush()

    async def _resign(self) -> None:
        """Hand the leadership over if a node can take it, then release it.

        The wait ends when no other node is left, and at the timeout of the drain.
        """
        control, replica = self._parts.control, self._parts.replica
        transfer = asyncio.ensure_future(_transfer(control))
        try:
            while not transfer.done() and not control.is_alone:  # noqa: ASYNC110
                await asyncio.sleep(DRAIN_POLL_S)
            if not transfer.done():
                logger.warning("leadership not transferred: no other node is running")
            elif (answer := transfer.result()).outcome is CommandOutcome.OK:
                # The successor's fence makes this replica commit its tail and release the epoch.
                while replica.serving and not control.is_alone:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
            else:
                logger.warning("leadership not transferred: %s", answer.why)
        finally:
            transfer.cancel()
        await replica.release()


async def _transfer(control: ControlPlane) -> CommandAnswer:
    """Return the answer to a transfer, repeated while an appointed node ends before it serves."""
    while True:
        epoch = control.state.epoch
        answer = await control.request_transfer(None)
        if answer.outcome is not CommandOutcome.NOT_NOW or control.state.epoch == epoch:
            return answer
        logger.warning("retrying the transfer: %s", answer.why)
