"""The stage: the nodes, network, disks and clocks of a run, made before it and removed after it.

If the machine does not allow namespaces or mounts, the stage does without, and `missing` has the
reason. The stage can be taken down in any state: with nodes that are stopped, dead or silent, and
with full disks.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import urlopen

from chaos.history.archive import Archive
from chaos.history.history import OWNER, FaultTimeline, RunFolder, now_ms
from chaos.suite.stage import disks, network
from chaos.suite.stage.disk_faults import DiskFaults
from chaos.suite.stage.disks import MountedDisk
from chaos.suite.stage.network import Network, NetworkError
from chaos.suite.stage.plan import Need
from chaos.suite.stage.states import StateRecorder
from chaos.suite.stage.turn import Turn
from cluster.settings.config import load_config
from cluster.settings.exit_codes import ExitCode
from deploy.local import LaunchError, LocalCluster, NodeHost
from timer.files.disk import RealDisk
from timer.model.timer_errors import StorageError
from timer.recovery.scrub import scrub
from timerclient import TimerClient
from timerclient.client.aio import Change
from timerclient.values.errors import TimerError

TEST_ID: Final = "test"
"""Prefix of the cluster's id. It permits `test_clock`, a file that moves a node's clock."""
MANY_SETTINGS: Final = (
    "storage.memtable_bytes_flush = 16_777_216",  # small: manifests and runs in minutes
    "storage.log_bytes_flush = 16_777_216",
    "storage.flush_interval_ms = 20_000",
    "storage.reserve_bytes = 134_217_728",
    "storage.scrub_bytes_per_s = 67_108_864",  # the first pass of a process ends soon
    "storage.scrub_interval_ms = 10_000",  # damage under a running node is found while it runs
    "storage.refetch_timeout_ms = 60_000",  # a node that can't heal ends within READY_S
    "limits.inflight_bytes_max = 33_619_968",  # near the minimum, so that a flood exceeds it
    "limits.request_bytes_max = 8_388_608",
    "limits.request_rows_max = 16_384",
)
"""Smaller than the defaults, so that events that take hours of normal use happen in minutes."""


READY_S: Final = 90.0
"""Time for a node to become ready, and for the cluster to have a leader. Both take a second or two
on an idle machine. Runs may last hours beside other work, and the audit reports the real times."""


NO_ROOM: Final = 'msg="the disk is full'
"""In the log line of a node whose disk is full, as a strike made it."""
DAMAGE: Final = re.compile("corrupt at byte")
"""In the log lines of a node with damaged files."""
EIO: Final = re.compile(r"failed: EIO ")
"""In the log lines of a node whose disk failed."""
PROGRAM: Final = (sys.executable, "-m", "chaos.suite.stage.faulty_timerd")
"""The program of a node: `timerd`, on a disk that can be made to fail."""
WORKING: Final = ("leader", "follower")
"""The roles of a voter that takes part in replication."""
UNREACHABLE: Final = "unreachable"
"""The role of a member that did not answer."""
LAG_MAX: Final = 100
"""Entries. A follower of a busy leader is always some entries behind."""
WHOLE_POLL_S: Final = 0.2
METRICS_S: Final = 5.0
REFUSED: Final = re.compile(r'timer_grpc_errors_total\{.*"OVERLOADED".*\} ')


def capabilities(folder: Path) -> dict[Need, str]:
    """Return the needs that this machine does not meet, each with the reason."""
    if os.geteuid() != 0:
        return dict.fromkeys(Need, "not root")
    missing = {}
    for need in Need:
        try:
            network.probe() if need is Need.NETWORK else disks.probe(folder / "nodes")
        except (NetworkError, OSError) as error:
            missing[need] = str(error)
    return missing


class Stage:
    """The nodes of one run with their network, disks and clocks, from `__enter__` to `__exit__`."""

    def __init__(
        self,
        run: RunFolder,
        nodes: int = 3,
        *,
        missing: Mapping[Need, str],
        say: Callable[[str], None] = print,
        settings: tuple[str, ...] = MANY_SETTINGS,
    ) -> None:
        """Plan a stage.

        Args:
            run: its folder.
            nodes: number of nodes, n1 to nN.
            missing: needs that the stage does without, each with the reason.
            say: prints a line for the user.
            settings: of the nodes, `key = value`.
        """
        self.run = run
        self.say = say
        self.missing = dict(missing)
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.network: Network
        """Only if the stage has one."""
        self.disks: dict[str, MountedDisk] = {}
        self.faults = FaultTimeline(run)
        self._struck_by = threading.local()
        self.turn = Turn()
        """A strike has it while it takes nodes away."""
        self.away: set[str] = set()
        """Nodes that a nemesis has taken away and not brought back. Their end is expected."""
        self.waited_for: set[str] = set()
        """Nodes that heal while their nemesis has lent its turn. They do not count for a majority
        yet, and no other strike restarts them."""
        self.lost: set[str] = set()
        """Damaged nodes that ended for good, because no leader offered them a snapshot in time."""
        self.damaged: set[str] = set()
        """Nodes with damage that they may find at any time, and then heal or end."""
        self.hurt: set[str] = set()
        """Nodes whose files a strike damaged at any time of this run."""
        self.failing: set[str] = set()
        """Nodes whose disk returned errors at any time of this run."""
        self.disk_faults = DiskFaults(run.root)
        self.failures: list[str] = []
        """Failures of the run that no strike explains."""
        self.cluster = LocalCluster(
            run.root, nodes, settings=settings, program=PROGRAM, host=self._host, id_prefix=TEST_ID
        )
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make network and disks, start the nodes, archive their logs and record their states.

        Raises:
            LaunchError, NetworkError, OSError: a step failed. The results of earlier steps are
                removed again.
        """
        with self._exits as exits:
            exits.enter_context(owning(self.run))
            exits.callback(self.faults.close)
            if Need.NETWORK not in self.missing:
                self.network = exits.enter_context(Network(self.names))
            for name in self.names:
                self._make_room(name, exits)
            logs = {n: (self.data(n) / "log", self.run.archive_of(n)) for n in self.names}
            self.archive = Archive(logs)
            exits.callback(self.archive.close)
            exits.callback(self._stop_nodes)
            self.cluster.start(timeout_s=READY_S)
            nodes = self.cluster.nodes.items()
            listener = StateRecorder(self.run, {name: node.grpc for name, node in nodes})
            exits.callback(listener.close)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the nodes, move their files out of the disks, remove network and disks."""
        self._exits.close()

    def _make_room(self, name: str, exits: contextlib.ExitStack) -> None:
        folder = self.run.root / "nodes" / name
        if Need.DISKS in self.missing:
            folder.mkdir(parents=True)
            return
        disk = self.disks[name] = MountedDisk(folder)
        disk.make()
        exits.callback(disk.move_out)

    def _host(self, name: str) -> NodeHost:
        at = NodeHost() if Need.NETWORK in self.missing else self.network.host(name)
        clock = json.dumps(str(self.clock(name)))
        return NodeHost(at.address, at.inside, f"nodes/{name}/data", (f"test_clock = {clock}",))

    def _stop_nodes(self) -> None:
        """End the nodes by SIGTERM; kill those that do not end, and record the failure."""
        if not self.cluster.nodes:
            return  # no node was started
        for name in self.names:
            self.resume(name)
        self.failures += [f"{name} ended by itself" for name in self.note_deaths()]
        running = [name for name in self.names if self.cluster.is_running(name)]
        try:
            self.cluster.stop()
        except LaunchError as error:
            self.failures.append(f"{error}")
            self.cluster.kill_together(*self.names)
        else:
            self.check_end(*running)
        for name in self.names:
            self.failures += [f"{name} logged {line}" for line in self.unexplained_errors(name)]

    def check_end(self, *names: str) -> None:
        """Record a failure for each node that got SIGTERM and ended with another status than 0."""
        for name in names:
            if status := self.cluster.exit_status(name):
                self.failures.append(f"{name} ended with status {status} after SIGTERM")

    def unexplained_errors(self, name: str) -> list[str]:
        """Return the errors in a node's log that no strike explains, even if the node healed."""
        log = self.output(name)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [
            line[:500]
            for line in lines
            if line.split(" ", 2)[1:2] in (["level=error"], ["level=critical"])
            if NO_ROOM not in line
            and not (name in self.hurt and DAMAGE.search(line))
            and not (name in self.failing | self.hurt and EIO.search(line))
        ]

    # ---- files and settings

    def data(self, name: str) -> Path:
        """Return a node's data directory."""
        return self.run.root / "nodes" / name / "data"

    def output(self, name: str) -> Path:
        """Return the file with a node's own log lines."""
        return self.run.root / "logs" / f"{name}.log"

    def clock(self, name: str) -> Path:
        """Return the file that moves a node's clock."""
        return self.run.root / "clocks" / f"{name}.json"

    @property
    def lease_ms(self) -> int:
        """Length of a leader's lease."""
        config = load_config(self.run.root / f"{self.names[0]}.toml", {}, {})
        return config.leadership.lease_ms

    @property
    def majority(self) -> int:
        """Number of nodes in a majority."""
        return len(self.names) // 2 + 1

    # ---- nodes

    def record(self, event: str, at_ms: int = 0, **more: Any) -> None:
        """Append an event to the timeline. `at_ms`: Unix milliseconds; 0: now."""
        strike = getattr(self._struck_by, "number", None)
        of = {} if strike is None else {"strike": strike}
        self.faults.record(event, at_ms=at_ms or now_ms(), **of, **more)

    @contextlib.contextmanager
    def struck_by(self, number: int) -> Iterator[None]:
        """Add the number of a strike to all events that this thread records in the block."""
        self._struck_by.number = number
        try:
            yield
        finally:
            del self._struck_by.number

    def word_of(self, name: str) -> dict[str, Any]:
        """Return `node`, and its own `role` and `epoch` if it answers, as fields of an event."""
        state = self.cluster.state(name)
        return {"node": name} | ({"role": state.role, "epoch": state.epoch} if state else {})

    def leader(self, above_epoch: int = 0) -> str:
        """Return the leader's name as soon as a node leads in an epoch above `above_epoch`.

        Raises:
            LaunchError: no node does within READY_S.
        """
        return self.cluster.wait_for_leader(READY_S, above_epoch=above_epoch)

    def controller(self) -> str | None:
        """Return the name of the controller, as the nodes report it; None: no node knows it."""
        for name in self.names:
            state = self.cluster.state(name) if self.cluster.is_running(name) else None
            if state and state.controller in self.names and state.controller not in self.lost:
                return state.controller
        return None

    def kill(self, *names: str, first: Callable[[], object] = lambda: None) -> None:
        """Call `first` and kill -9 nodes together."""
        words = [self.word_of(name) for name in names]
        self.away.update(names)
        at_ms = now_ms()
        first()
        self.cluster.kill_together(*names)
        for word in words:
            self.record("kill", at_ms, **word)

    def restart(self, *names: str) -> None:
        """Start nodes together and wait until they are ready.

        Raises:
            LaunchError: one is not ready within READY_S.
        """
        self.cluster.start(*names, timeout_s=READY_S)
        self.away.difference_update(names)
        for name in names:
            self.record("restart", node=name)

    def refusals(self) -> int:
        """Return the number of requests that running nodes refused as OVERLOADED since their start.

        The histories do not have this number, because clients retry such requests. A node that does
        not answer counts as 0.
        """
        count = 0
        for name, node in self.cluster.nodes.items():
            if not self.cluster.is_running(name):
                continue
            with (
                contextlib.suppress(OSError, HTTPException),
                urlopen(f"http://{node.http}/metrics", timeout=METRICS_S) as answer,
            ):
                lines = answer.read().decode().splitlines()
                count += sum(int(float(line.split()[-1])) for line in lines if REFUSED.match(line))
        return count

    def launch(self, *names: str) -> None:
        """Start nodes and do not wait, because they may never be ready. They stay `away`."""
        self.cluster.launch(*names)
        for name in names:
            self.record("launch", node=name)

    def change(self, change: Change, name: str) -> None:
        """Request a change of the voters again and again until it is made, as an operator does.

        `add` makes a learner a voter, `remove` a voter a learner. `replace` makes a node with a new
        disk, a learner, the voter in place of its earlier replica.

        Raises:
            LaunchError: the change is not made within READY_S.
        """

        def lacks(client: TimerClient) -> str:
            found = [m for m in client.members().members if m.name == name and m.voter]
            works = any(member.role in WORKING for member in found)
            if works if change != "remove" else not found:
                return ""
            client.change_members(change, name)  # it is refused until the node has caught up
            return "requested"

        self._until(lacks, f"{change} {name}: not made")

    def wait_until_whole(self, name: str) -> None:
        """Return once a damaged node has caught up with the leader and its files are sound.

        Raises:
            LaunchError: it does not reach that within READY_S, or has ended.
        """

        def lacks(client: TimerClient) -> str:
            members = {each.name: each for each in client.members().members}
            if (one := members.get(name)) is None:
                return "no member"  # a node just started does not know all names
            if one.role not in WORKING or one.unsure or one.lag_entries > LAG_MAX:
                return f"{one.role}, {one.lag_entries} entries behind, unsure: {one.unsure}"
            states = {each.name: each.damage for each in client.status().nodes}
            return states.get(name) or self.damage_of(name)

        self._until(lacks, f"{name} is not whole", while_running=name)

    def wait_until_sure(self) -> None:
        """Return once all voters answer and none is unsure; until then they count for no majority.

        Lost nodes are left out: as many voters may be silent.

        Raises:
            LaunchError: the voters do not reach that within READY_S.
        """

        def lacks(client: TimerClient) -> str:
            voters = [each for each in client.members().members if each.voter]
            unsure = [each.name for each in voters if each.unsure]
            silent = [each.name for each in voters if each.role == UNREACHABLE]
            fine = not unsure and len(silent) <= len(self.lost)
            return "" if fine else f"unsure or silent: {', '.join(unsure + silent)}"

        self._until(lacks, "the voters are not sure")

    def _until(
        self, lacks: Callable[[TimerClient], str], otherwise: str, while_running: str = ""
    ) -> None:
        """Return once `lacks` returns an empty text: the cluster lacks nothing more.

        Raises:
            LaunchError: it does not within READY_S, or the node `while_running` has ended.
        """
        deadline, why = time.monotonic() + READY_S, "no answer"
        with TimerClient(self.cluster.endpoints) as client:
            while time.monotonic() < deadline:
                if while_running and not self.cluster.is_running(while_running):
                    break
                try:
                    why = lacks(client)
                except TimerError as error:
                    why = str(error)
                if not why:
                    return
                time.sleep(WHOLE_POLL_S)
        raise LaunchError(f"{otherwise} within {READY_S:g} s: {why}")

    @contextlib.contextmanager
    def lend_turn(self, name: str) -> Iterator[None]:
        """Lend the turn for the block, in which a nemesis only waits until a node has healed.

        If the block succeeds, the node counts again at once. If it fails, the node stays in
        `waited_for` until the nemesis has its turn back.
        """
        self.waited_for.add(name)
        try:
            with self.turn.lent():
                yield
                self.waited_for.discard(name)
        finally:
            self.waited_for.discard(name)

    def damage_of(self, name: str) -> str:
        """Return the first damage in a running node's files, as a scrub finds it; empty: none."""
        data = self.data(name)
        try:
            found = [*scrub(RealDisk(), state=data / "state", log=data / "log")]
        except (StorageError, FileNotFoundError) as error:  # the node may be replacing its files
            return str(error)
        return next((str(each.damage) for each in found if each.damage is not None), "")

    def pause(self, name: str) -> None:
        """Stop a node by SIGSTOP."""
        word = self.word_of(name)
        self.away.add(name)
        self.cluster.kill(name, signal.SIGSTOP)
        self.record("pause", **word)

    def resume(self, name: str) -> None:
        """Continue a node by SIGCONT; a node that does not run is left as it is."""
        with contextlib.suppress(LaunchError):
            self.cluster.kill(name, signal.SIGCONT)
        if name in self.away:
            self.away.discard(name)
            self.record("resume", node=name)

    def note_deaths(self) -> list[str]:
        """Record the nodes that ended by themselves; return their names.

        Damaged nodes that gave up healing are recorded as lost instead, and not returned.
        """
        dead = [n for n in self.names if n not in self.away and not self.cluster.is_running(n)]
        healless = [name for name in self.damaged.intersection(dead) if self.is_given_up(name)]
        for name in healless:
            self.lose(name)
        dead = [name for name in dead if name not in healless]
        for name in dead:
            status = self.cluster.exit_status(name)
            self.record("died", node=name, status=status)
            self.say(f"{name} ended by itself, exit status {status}: see logs/{name}.log")
            self.away.add(name)
        return dead

    def is_given_up(self, name: str) -> bool:
        """Return whether a damaged node has ended because it found no leader to heal from."""
        return self.cluster.exit_status(name) == ExitCode.CORRUPT

    def lose(self, name: str) -> None:
        """Record that a damaged node has ended for good; once per node."""
        if name in self.lost:
            return
        status = self.cluster.exit_status(name)
        self.record("lost", node=name, status=status)
        self.say(f"{name} is damaged and ended with exit status {status}; it stays down")
        self.lost.add(name)
        self.away.add(name)

    def set_clock(self, name: str, *, offset_ms: int = 0, drift_ppm: int = 0) -> None:
        """Set the error of a node's clock, from now on: an offset, and a drift in ppm."""
        path = self.clock(name)
        path.parent.mkdir(exist_ok=True)
        line = {"offset_ms": offset_ms, "drift_ppm": drift_ppm, "from_ms": now_ms()}
        RealDisk().write_atomic(path, json.dumps(line).encode())

    def cut_power(self, *names: str) -> None:
        """Kill nodes, lose their unsynced bytes, and mount their disks again."""

        def shut_down() -> None:
            # A stopped process sends no answer about bytes that it writes now and that are lost.
            for name in names:
                self.cluster.kill(name, signal.SIGSTOP)
            for name in names:
                self.disks[name].shut_down()

        self.kill(*names, first=shut_down)
        with self.archive.suspended():
            for name in names:
                self.disks[name].cut_power()


# ---- owners of runs, and leftovers of crashed harnesses


@contextlib.contextmanager
def owning(run: RunFolder) -> Iterator[None]:
    """Own a run's folder for the block. While this process lives, no other process cleans it up.

    Raises:
        LaunchError: another process owns it.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    with (run.root / OWNER).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ends with the process
        except OSError:
            raise LaunchError(f"{run.root}: another process runs there") from None
        yield


def end_run(run: RunFolder) -> None:
    """Kill the nodes of a run whose harness is dead, and move their files out of the disks.

    Raises:
        LaunchError: a live process owns the run.
    """
    with owning(run):
        cluster = LocalCluster(run.root)
        cluster.kill_together(*cluster.nodes)
        for disk in disks.mounted():
            if disk.path.parent.parent == run.root:
                disk.move_out()


def remove_stale() -> None:
    """Remove the networks and disks of dead harnesses, and end their nodes there; only as root."""
    if os.geteuid() == 0:
        network.remove_stale()
        for root in {disk.path.parent.parent for disk in disks.mounted()}:
            if (root / OWNER).exists():
                with contextlib.suppress(LaunchError):
                    end_run(RunFolder(root))
