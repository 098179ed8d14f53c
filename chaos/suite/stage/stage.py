"""The stage: everything that a run's nemeses can reach, made before it and taken down after it.

What the machine does not allow (namespaces, mounts) is missing, and `missing` says why. Taking
down works from any state: nodes that are asleep, dead or don't listen, disks that are full.
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
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final, Self

from chaos.history.archive import Archive
from chaos.history.history import OWNER, FaultTimeline, RunFolder
from chaos.suite.stage import disks, network
from chaos.suite.stage.disk_faults import DiskFaults
from chaos.suite.stage.disks import MountedDisk
from chaos.suite.stage.network import Network
from chaos.suite.stage.plan import Need
from chaos.suite.stage.states import StateRecorder
from chaos.suite.stage.turn import Turn
from cluster.settings.config import load_config
from cluster.settings.exit_codes import EXIT_CORRUPT
from deploy.local import LaunchError, LocalCluster, NodeHost
from timer.files.disk import RealDisk
from timer.model.timer_errors import StorageError
from timer.recovery.scrub import scrub
from timerclient import TimerClient
from timerclient.client.aio import Change
from timerclient.values.errors import TimerError

TEST_ID: Final = "test"
"""What the cluster's id begins with: its nodes take a clock that a file moves."""
MANY_SETTINGS: Final = (
    "storage.memtable_bytes_flush = 16_777_216",  # small: manifests and runs in minutes
    "storage.log_bytes_flush = 16_777_216",
    "storage.flush_interval_ms = 20_000",
    "storage.reserve_bytes = 134_217_728",
    "storage.scrub_bytes_per_s = 67_108_864",  # the pass with which a process begins is soon over
    "storage.refetch_timeout_ms = 60_000",  # who can't be healed says so while it is waited for
    "limits.inflight_bytes_max = 33_619_968",  # hardly more than the least: a flood is soon one
    "limits.request_bytes_max = 8_388_608",
    "limits.request_rows_max = 16_384",
)
"""Far from the defaults, so that what takes hours of use happens in minutes of chaos."""


READY_S: Final = 90.0
"""A node has to be up, somebody has to lead, within this: a second or two on an idle machine. Runs
go on for hours beside other work, and how fast it was is the audit's to tell."""


NO_ROOM: Final = 'msg="no room, to be waited for'
"""What a node logs whose disk is full, and that is so by a strike."""
DAMAGE: Final = re.compile(r"corrupt at byte|msg=.gave up after ")
"""What a node logs that was damaged."""
EIO: Final = re.compile(r"failed: EIO ")
"""What a node logs whose disk failed."""
PROGRAM: Final = (sys.executable, "-m", "chaos.suite.stage.faulty_timerd")
"""What runs as a node: `timerd`, on a disk that can be made to fail."""
WORKING: Final = ("leader", "follower")
"""The roles of a voter that takes part."""
UNREACHABLE: Final = "unreachable"
"""The role of a member that did not answer."""
LAG_MAX: Final = 100
"""Entries that a follower of a busy leader is behind."""
WHOLE_POLL_S: Final = 0.2
METRICS_S: Final = 5.0
REFUSED: Final = re.compile(r'timer_grpc_errors_total\{.*"OVERLOADED".*\} ')


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def capabilities(folder: Path) -> dict[Need, str]:
    """Return why this machine can't meet a need; what is not in it is met."""
    reasons = {Need.NETWORK: network.why_not(), Need.DISKS: disks.why_not(folder)}
    return {need: why for need, why in reasons.items() if why}


class Stage:
    """One run's nodes and what surrounds them, from `__enter__` to `__exit__`."""

    def __init__(
        self,
        run: RunFolder,
        nodes: int = 3,
        *,
        missing: Mapping[Need, str],
        say: Callable[[str], None] = print,
        settings: tuple[str, ...] = MANY_SETTINGS,
    ) -> None:
        """Plan a stage in the run's folder. `missing`: needs that it does without, and why."""
        self.run = run
        self.say = say
        self.missing = dict(missing)
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.network: Network | None = None
        self.disks: dict[str, MountedDisk] = {}
        self.faults = FaultTimeline(run)
        self._struck_by = threading.local()
        self.turn = Turn()
        """Of whoever takes nodes away."""
        self.away: set[str] = set()
        """Nodes that a nemesis has taken away and not given back: their death is no surprise."""
        self.waited_for: set[str] = set()
        """Nodes whose nemesis has lent its turn: they count for nobody yet, and are its own."""
        self.lost: set[str] = set()
        """Nodes that were damaged and ended, for no leader offered them a snapshot in time."""
        self.damaged: set[str] = set()
        """Nodes that may find damage, and heal or end, at any time."""
        self.hurt: set[str] = set()
        """Nodes that were damaged at any time of this run."""
        self.failing: set[str] = set()
        """Nodes whose disk gave errors at any time of this run."""
        self.disk_faults = DiskFaults(run.root)
        self.failures: list[str] = []
        """What went wrong that no strike explains."""
        self.cluster = LocalCluster(
            run.root, nodes, settings=settings, program=PROGRAM, host=self._host, id_prefix=TEST_ID
        )
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make network and disks, start the nodes, archive their logs, note what they say.

        Raises:
            LaunchError, NetworkError, OSError: it can't be; what was made is removed again.
        """
        with self._exits as exits:
            exits.enter_context(owning(self.run))
            exits.callback(self.faults.close)
            if Need.NETWORK not in self.missing:
                self.network = exits.enter_context(Network(self.names))
            for name in self.names:
                self._make_room(name, exits)
            self.archive = Archive(
                {name: (self.data(name) / "log", self.run.kept(name)) for name in self.names}
            )
            exits.callback(self.archive.close)
            exits.callback(self._stop_nodes)
            self.cluster.start(timeout_s=READY_S)
            nodes = self.cluster.nodes.items()
            listener = StateRecorder(self.run, {name: node.grpc for name, node in nodes})
            exits.callback(listener.close)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the nodes, bring their files together, remove network and disks."""
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
        at = self.network.host(name) if self.network else NodeHost()
        clock = json.dumps(str(self.clock(name)))
        return NodeHost(at.address, at.inside, f"nodes/{name}/data", (f"test_clock = {clock}",))

    def _stop_nodes(self) -> None:
        """Let the nodes end well; kill those that don't, and say so."""
        if not self.cluster.nodes:
            return  # none was started
        self.disk_faults.end_all()
        for name in self.names:
            self.resume(name)
        self.failures += [f"{name} ended by itself" for name in self.died()]
        running = [name for name in self.names if self.cluster.is_running(name)]
        try:
            self.cluster.stop()
        except LaunchError as error:
            self.failures.append(f"{error}")
            self.cluster.kill_together(*self.names)
        else:
            self.check_end(*running)
        for name in self.names:
            self.failures += [f"{name} logged {line}" for line in self.unexplained(name)]

    def check_end(self, *names: str) -> None:
        """Note who was asked to end and did not end well."""
        for name in names:
            if status := self.cluster.exit_status(name):
                self.failures.append(f"{name} was asked to end, and ended with status {status}")

    def unexplained(self, name: str) -> list[str]:
        """Return the errors in a node's log that no strike explains: it may have healed of them."""
        log = self.run.root / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [
            line[:500]
            for line in lines
            if line.split(" ", 2)[1:2] in (["level=error"], ["level=critical"])
            if NO_ROOM not in line
            and not (name in self.hurt and DAMAGE.search(line))
            and not (name in self.failing | self.hurt and EIO.search(line))
        ]

    # ---- where things are

    def data(self, name: str) -> Path:
        """Return a node's data directory."""
        return self.run.root / "nodes" / name / "data"

    def clock(self, name: str) -> Path:
        """Return the file that moves a node's clock."""
        return self.run.root / "clocks" / f"{name}.json"

    @property
    def lease_ms(self) -> int:
        """How long a leader's lease is."""
        config = load_config(self.run.root / f"{self.names[0]}.toml", {}, {})
        return config.leadership.lease_ms

    @property
    def majority(self) -> int:
        """How many nodes have to be there."""
        return len(self.names) // 2 + 1

    # ---- nodes

    def record(self, event: str, at_ms: int = 0, **more: Any) -> None:
        """Write a line of the timeline; 0: now."""
        strike = getattr(self._struck_by, "number", None)
        of = {} if strike is None else {"strike": strike}
        self.faults.record(event, at_ms=at_ms or now_ms(), **of, **more)

    @contextlib.contextmanager
    def struck_by(self, number: int) -> Iterator[None]:
        """What this thread records meanwhile belongs to the strike of that number."""
        self._struck_by.number = number
        try:
            yield
        finally:
            del self._struck_by.number

    def word_of(self, name: str) -> dict[str, Any]:
        """Return role and epoch of a node, by its own word, as the timeline has them."""
        state = self.cluster.state(name)
        return {"node": name} | ({"role": state.role, "epoch": state.epoch} if state else {})

    def leader(self, above_epoch: int = 0) -> str:
        """Return the leader's name as soon as there is one, in an epoch above that.

        Raises:
            LaunchError: there is none in time.
        """
        return self.cluster.wait_for_leader(READY_S, above_epoch=above_epoch)

    def controller(self) -> str | None:
        """Return the name of the controller, as the nodes know it; None: nobody does."""
        for name in self.names:
            state = self.cluster.state(name) if self.cluster.is_running(name) else None
            if state and state.controller in self.names and state.controller not in self.lost:
                return state.controller
        return None

    def kill(self, *names: str, whole: bool = False) -> None:
        """Kill -9 nodes, together; `whole`: in the middle of no write."""
        words = [self.word_of(name) for name in names]
        self.away.update(names)
        if whole:
            for name in names:
                self.cluster.kill(name, signal.SIGSTOP)
                deadline = time.monotonic() + READY_S
                while not _stands_still(self.cluster.nodes[name].pid):
                    if time.monotonic() > deadline:
                        raise LaunchError(f"{name} does not stop")
                    time.sleep(0.001)
        at_ms = now_ms()
        self.cluster.kill_together(*names)
        for word in words:
            self.record("kill", at_ms, **word)

    def restart(self, *names: str) -> None:
        """Bring nodes up again, together.

        Raises:
            LaunchError: one does not come.
        """
        self.cluster.start(*names, timeout_s=READY_S)
        self.away.difference_update(names)
        for name in names:
            self.record("restart", node=name)

    def refusals(self) -> int:
        """Return how many requests the nodes that run refused as too much, since they started.

        Clients try again, and tell of it only if they give up. Who does not answer counts nothing.
        """
        count = 0
        for name, node in self.cluster.nodes.items():
            if not self.cluster.is_running(name):
                continue
            with (
                contextlib.closing(HTTPConnection(node.http, timeout=METRICS_S)) as connection,
                contextlib.suppress(OSError, HTTPException),
            ):
                connection.request("GET", "/metrics")
                lines = connection.getresponse().read().decode().splitlines()
                count += sum(int(float(line.split()[-1])) for line in lines if REFUSED.match(line))
        return count

    def launch(self, *names: str) -> None:
        """Start nodes that may not become ready; they stay `away`."""
        self.cluster.launch(*names)
        for name in names:
            self.record("launch", node=name)

    def replace(self, name: str) -> None:
        """Let a node with a new disk, a learner, vote in the place of the voter that it was.

        Raises:
            LaunchError: that is not possible in time.
        """
        self._change("replace", name, lambda votes, works: votes and works)

    def add(self, name: str) -> None:
        """Let a learner vote; see `replace`."""
        self._change("add", name, lambda votes, works: votes and works)

    def remove(self, name: str) -> None:
        """Let a voter be a learner; see `replace`."""
        self._change("remove", name, lambda votes, _: not votes)

    def _change(self, change: Change, name: str, is_done: Callable[[bool, bool], bool]) -> None:
        """Ask for a change until it is made, as an operator would.

        `is_done` is told whether the node votes, and whether its replica that votes works.
        """
        deadline = time.monotonic() + READY_S
        why = "no answer"
        with TimerClient(self.cluster.endpoints) as client:
            while time.monotonic() < deadline:
                try:  # it may have to catch up first
                    found = [m for m in client.members().members if m.name == name and m.voter]
                    if is_done(bool(found), any(m.role in WORKING for m in found)):
                        return
                    client.change_members(change, name)
                except TimerError as error:
                    why = str(error)
                time.sleep(WHOLE_POLL_S)
        raise LaunchError(f"{change} {name}: not made within {READY_S:g} s: {why}")

    def wait_until_whole(self, name: str) -> None:
        """Return once a node that lost something has all that the leader has, in sound files.

        Raises:
            LaunchError: it does not come to that in time, or ended.
        """
        deadline = time.monotonic() + READY_S
        said = "no answer"
        with TimerClient(self.cluster.endpoints) as client:
            while time.monotonic() < deadline and self.cluster.is_running(name):
                with contextlib.suppress(TimerError):
                    for one in client.members().members:
                        if one.name != name:  # who has just started knows some by number alone
                            continue
                        said = f"{one.role}, {one.lag_entries} entries behind, unsure: {one.unsure}"
                        whole = one.role in ("leader", "follower") and not one.unsure
                        if whole and one.lag_entries <= LAG_MAX:
                            states = {each.name: each.damage for each in client.status().nodes}
                            if not (damage := states.get(name) or self.damage_of(name)):
                                return
                            said = damage
                time.sleep(WHOLE_POLL_S)
        raise LaunchError(f"{name} is not whole within {READY_S:g} s: {said}")

    def wait_until_sure(self) -> None:
        """Return once all voters answer and none is unsure: who does not counts for nobody, yet.

        Those that are `lost` are not waited for.

        Raises:
            LaunchError: it does not come to that in time.
        """
        deadline = time.monotonic() + READY_S
        said = "no answer"
        with TimerClient(self.cluster.endpoints) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(TimerError):
                    voters = [each for each in client.members().members if each.voter]
                    unsure = [each.name for each in voters if each.unsure]
                    silent = [each.name for each in voters if each.role == UNREACHABLE]
                    if not unsure and len(silent) <= len(self.lost):
                        return
                    said = ", ".join(unsure + silent)
                time.sleep(WHOLE_POLL_S)
        raise LaunchError(f"unsure or silent for longer than {READY_S:g} s: {said}")

    @contextlib.contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        """Others may strike while a nemesis only waits for what a node does by itself.

        Once it has done so it counts again; if it fails to, it is the nemesis's own until that has
        its turn back.
        """
        self.waited_for.add(name)
        try:
            with self.turn.lent():
                yield
                self.waited_for.discard(name)
        finally:
            self.waited_for.discard(name)

    def damage_of(self, name: str) -> str:
        """Return what is damaged of a running node's files, as its own scrub would; or nothing."""
        data = self.data(name)
        try:
            found = [
                each.damage for each in scrub(RealDisk(), state=data / "state", log=data / "log")
            ]
        except (StorageError, FileNotFoundError) as error:  # they may just be replaced
            return str(error)
        return next((str(damage) for damage in found if damage is not None), "")

    def await_ready(self, *names: str) -> None:
        """Wait until nodes that run are ready.

        Raises:
            LaunchError: one is not, in time.
        """
        self.cluster.start(*names, timeout_s=READY_S)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        word = self.word_of(name)
        self.away.add(name)
        self.cluster.kill(name, signal.SIGSTOP)
        self.record("pause", **word)

    def resume(self, name: str) -> None:
        """SIGCONT; nothing if it does not run."""
        with contextlib.suppress(LaunchError):
            self.cluster.kill(name, signal.SIGCONT)
        if name in self.away:
            self.away.discard(name)
            self.record("resume", node=name)

    def died(self) -> list[str]:
        """Note the nodes that ended though nobody had asked them to; return their names."""
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
        """Return whether a damaged node has ended for want of somebody to heal it."""
        return self.cluster.exit_status(name) == EXIT_CORRUPT

    def lose(self, name: str) -> None:
        """Note that a damaged node has ended, for good; nothing if that is known."""
        if name in self.lost:
            return
        status = self.cluster.exit_status(name)
        self.record("lost", node=name, status=status)
        self.say(f"{name} finds itself damaged, exit status {status}; the others go on")
        self.lost.add(name)
        self.away.add(name)

    def set_clock(self, name: str, *, offset_ms: int = 0, drift_ppm: int = 0) -> None:
        """Move a node's clock, from now on."""
        path = self.clock(name)
        path.parent.mkdir(exist_ok=True)
        other = path.with_suffix(".new")
        line = {"offset_ms": offset_ms, "drift_ppm": drift_ppm, "from_ms": now_ms()}
        other.write_text(json.dumps(line))
        other.rename(path)

    def cut_power(self, *names: str) -> None:
        """Kill nodes and lose what they had not synced; their disks are mounted again."""
        words = [self.word_of(name) for name in names]
        self.away.update(names)
        at_ms = now_ms()
        # Nothing more leaves the process before its disk is gone.
        for name in names:
            self.cluster.kill(name, signal.SIGSTOP)
        for name in names:
            self.disks[name].shut_down()
        self.cluster.kill_together(*names)
        with self.archive.held():
            for name in names:
                self.disks[name].cut_power()
        for word in words:
            self.record("kill", at_ms, **word)


def _stands_still(pid: int) -> bool:
    """Return whether no thread of a process runs, not even in the kernel."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            if path.read_text().rpartition(")")[2].split()[0] not in "TZX":
                return False
    return True


# ---- whose run it is, and what a crashed harness left


@contextlib.contextmanager
def owning(run: RunFolder) -> Iterator[None]:
    """Own a run's folder: while this process lives, nobody takes anything of it down.

    Raises:
        LaunchError: another process does.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    with (run.root / OWNER).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process
        except OSError:
            raise LaunchError(f"{run.root}: a run is being played there") from None
        yield


def end_run(run: RunFolder) -> list[str]:
    """End the nodes of a run that nobody owns any more and bring its files together.

    Returns what was found, in words. Raises LaunchError: somebody owns it.
    """
    if not (run.root / OWNER).exists():
        return []
    with owning(run):
        cluster = LocalCluster(run.root)
        gone = [f"{name} of {run.root}" for name in cluster.nodes if cluster.is_running(name)]
        cluster.kill_together(*cluster.nodes)
        for disk in disks.mounted():
            if disk.path.parent.parent == run.root:
                disk.move_out()
                gone.append(f"the disk {disk.path}")
    return gone


def remove_stale() -> list[str]:
    """Take down the stages of harnesses that are dead; return what was found, in words."""
    if os.geteuid() != 0:
        return []
    gone = network.remove_stale()
    for root in {disk.path.parent.parent for disk in disks.mounted()}:
        with contextlib.suppress(LaunchError):
            gone += end_run(RunFolder(root))
    return gone
