"""A whole cluster on this machine: plain processes, on loopback unless told, in one directory.

    D/cluster.json   {"nodes": [{"name", "pid", "grpc", "http", "data"}, ...]}; data relative to D
    D/n1.toml        the node's configuration
    D/n1/            its data directory (or where its `Host` says)
    D/logs/n1.log    what it printed
    D/LOCK           held (flock) while somebody starts or stops nodes

The processes are detached: they outlive who started them, and `timerctl local down` in another
terminal ends them. A node keeps its ports for good, so that a restarted one is found again. No
process is ever signalled by name or by a remembered pid alone: /proc has to say that the pid
still runs this very node, and the signal goes through a pidfd, which no other process can inherit.
"""

import contextlib
import fcntl
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import grpc

from replication.quorum import VOTERS_MAX
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc

PROGRAM: Final = (sys.executable, "-m", "cluster.timerd")
READY_TIMEOUT_S: Final = 120.0
"""Only nodes that hang take so long: one that ends is reported at once."""
STOP_TIMEOUT_S: Final = 60.0
"""Far more than a node takes to hand over and finish what it has in flight."""
PORT_MAX: Final = 65_535
HTTP_ABOVE: Final = 10
"""The HTTP ports of a cluster with a base port lie so far above its gRPC ports."""
LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.05
PROBE_S: Final = 1.0
PATIENCE_S_MAX: Final = 5.0
LOG_TAIL_LINES: Final = 15
_PORTS: Final = range(10_000, 32_768)
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Return what it ended with, negative: the signal. None: it runs."""


_CHILDREN: Final[dict[int, Process]] = {}
"""Nodes that this process started, by pid: it has to reap them when they end, if it still lives."""
_ENDED: Final[dict[int, int]] = {}
"""Exit status of those that it reaped, by pid; negative: the signal that ended it."""


class LaunchError(RuntimeError):
    """The nodes could not be brought where they were wanted; says why, with their last words."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a local cluster, as cluster.json has it."""

    name: str
    pid: int
    """Of the process that was started last; 0: none was. It may have ended since."""
    grpc: str
    http: str
    data: str


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a running node says of itself, and whom it takes for the controller."""

    role: str
    serving: bool
    epoch: int
    controller: str = ""
    disk_low: bool = False
    """Less room is left on its disk than it keeps in reserve."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a node lives."""

    address: str = LOOPBACK
    """Of both its ports. Beyond loopback the node is told `insecure = true`."""
    inside: tuple[str, ...] = ()
    """What its processes are started by, such as `nsenter --net=…`; it has to become them."""
    data: str = ""
    """Its data directory, relative to the cluster's; empty: its name."""
    settings: tuple[str, ...] = ()
    """More lines for its TOML file."""


class LocalCluster:
    """The nodes of one directory. Everything may be called again: it does what is left to do."""

    def __init__(  # noqa: PLR0913
        self,
        directory: Path,
        nodes: int = 3,
        *,
        base_port: int | None = None,
        settings: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        host: Callable[[str], Host] = lambda _: Host(),
        id_prefix: str = "local",
    ) -> None:
        """Use the cluster in `directory`, or one that `start` will make there.

        Args:
            directory: where everything of this cluster lies.
            nodes: how many, if it is new.
            base_port: the first gRPC port if it is new, the first HTTP port ten above; None: any.
            settings: more lines for the nodes' TOML files, before their tables.
            program: what runs as a node.
            host: a node's name -> where it lives.
            id_prefix: what the cluster id begins with, if it is new.
        """
        self.directory = directory.resolve()
        self._count = nodes
        self._base_port = base_port
        self._settings = settings
        self._program = program
        self._host = host
        self._id_prefix = id_prefix

    # ---- what there is

    @property
    def nodes(self) -> dict[str, Node]:
        """The nodes by name; none before the first `start`.

        Raises:
            LaunchError: what lists them was not written by `start`.
        """
        path = self.directory / "cluster.json"
        if not path.exists():
            return {}
        try:
            listed = [Node(**each) for each in json.loads(path.read_text())["nodes"]]
        except (ValueError, TypeError, LookupError) as error:
            raise LaunchError(f"{path} is no local cluster's: {error!r}") from error
        return {node.name: node for node in listed}

    @property
    def endpoints(self) -> list[str]:
        """The gRPC addresses of all nodes, running or not."""
        return [node.grpc for node in self.nodes.values()]

    def is_running(self, name: str) -> bool:
        """Return whether the node's process runs."""
        return self._runs(self._node(name))

    def exit_status(self, name: str) -> int | None:
        """Return what the node's last process ended with, negative: the signal.

        None: it runs, or it was not this process that started it.
        """
        node = self._node(name)
        return None if self._runs(node) else _ENDED.get(node.pid)

    def state(self, name: str, within_s: float = PROBE_S) -> NodeState | None:
        """Return what a node says of itself; None if it does not answer in time."""
        with grpc.insecure_channel(self._node(name).grpc) as channel:
            stub = timer_pb2_grpc.AdminServiceStub(channel)
            try:
                answer = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=within_s)
            except grpc.RpcError:
                return None
        if not answer.nodes:
            return None
        status = answer.nodes[0]
        return NodeState(
            status.role, status.serving, status.epoch, answer.controller, status.disk_low
        )

    def leader(self, above_epoch: int = 0, within_s: float = PROBE_S) -> str | None:
        """Return the name of the node that leads and serves, by its own word; None: nobody.

        Who leads in an epoch of `above_epoch` or lower does not count: it may not know better.
        """
        states = {n: self.state(n, within_s) for n in self.nodes if self.is_running(n)}
        leading = {n: s.epoch for n, s in states.items() if s and s.role == "leader" and s.serving}
        leading = {name: epoch for name, epoch in leading.items() if epoch > above_epoch}
        return max(leading, key=lambda name: leading[name], default=None)

    def wait_for_leader(self, timeout_s: float = READY_TIMEOUT_S, *, above_epoch: int = 0) -> str:
        """Return the name of the leader as soon as there is one, in an epoch above that.

        Raises:
            LaunchError: there is none in time.
        """
        found: list[str] = []
        began_s = time.monotonic()

        def has_leader() -> bool:
            patience_s = (time.monotonic() - began_s) / 4  # it may be too busy to say so at once
            leader = self.leader(above_epoch, max(PROBE_S, min(PATIENCE_S_MAX, patience_s)))
            found.extend(filter(None, [leader]))
            return bool(found)

        if not _wait(has_leader, timeout_s):
            raise LaunchError(f"no leader within {timeout_s:g} s\n{self._last_words(self.nodes)}")
        return found[0]

    # ---- up

    def start(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Bring the named nodes up, or all; they are ready for clients if a majority runs.

        Raises:
            LaunchError: a port is in use, a node ended, or is not ready in time. If a port is in
                use, no node was started and nothing was written.
        """
        with self._lock():
            known = self.nodes
            planned = known or self._plan()
            wanted = [*names] or [*planned]
            running = {name for name in known if self.is_running(name)}
            starting = [planned[name] for name in wanted if name in planned and name not in running]
            for node in starting:
                self._try_ports(node)
            if not known:
                self._found([*planned.values()])
            for name in wanted:
                if name not in running:
                    self._spawn(self._node(name))
        # Counted as started even if it has ended since: that is for the wait to report.
        if 2 * len(running.union(wanted)) > len(self.nodes):
            self._wait_ready(wanted, timeout_s)

    def restart(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Bring one node up again, on its ports; see `start`."""
        self.start(name, timeout_s=timeout_s)

    def _plan(self) -> dict[str, Node]:
        """Return the nodes of a new cluster by name: their ports and directories."""
        if self._count not in range(1, VOTERS_MAX + 1):
            raise LaunchError(f"nodes = {self._count}: must be 1 .. {VOTERS_MAX}")
        if self._base_port is None:
            ports = free_ports(2 * self._count)
        elif self._base_port in range(1, PORT_MAX - HTTP_ABOVE - self._count + 2):
            ports = [self._base_port + i for i in range(self._count)]
            ports += [self._base_port + HTTP_ABOVE + i for i in range(self._count)]
        else:
            most = PORT_MAX - HTTP_ABOVE - self._count + 1
            raise LaunchError(f"base port = {self._base_port}: must be 1 .. {most}")
        grpc_ports, http_ports = ports[: self._count], ports[self._count :]
        nodes = {}
        for at, (grpc_port, http_port) in enumerate(zip(grpc_ports, http_ports, strict=True)):
            name = f"n{at + 1}"
            host = self._host(name)
            grpc_at, http_at = (f"{host.address}:{port}" for port in (grpc_port, http_port))
            nodes[name] = Node(name, 0, grpc_at, http_at, host.data or name)
        return nodes

    def _try_ports(self, node: Node) -> None:
        """Bind both ports of a node that is about to start, and close them again.

        A node in a network namespace of its own is not tried: its ports are not this process's.

        Raises:
            LaunchError: a port is in use.
        """
        if self._host(node.name).inside:
            return
        for address in (node.grpc, node.http):
            host, _, port = address.rpartition(":")
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT
                try:
                    tried.bind((host, int(port)))
                except OSError as error:
                    raise LaunchError(
                        f"{node.name} can't listen at {address}: {error.strerror}. Another process "
                        "has that port: end it, or choose other ports for a new cluster "
                        "(--base-port). Nothing was started"
                    ) from error

    def _found(self, nodes: Sequence[Node]) -> None:
        """Write down a new cluster: its list of nodes and their configurations."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # Each cluster has an id of its own: timer ids of another one are not taken for its own.
        cluster_id = f"{self._id_prefix}-{secrets.token_hex(4)}"
        for node in nodes:
            self._config_path(node).write_text(self._config(cluster_id, node, nodes))
        self._write(nodes)

    def _config(self, cluster_id: str, node: Node, nodes: Sequence[Node]) -> str:
        host = self._host(node.name)
        lines = [
            f"name = {json.dumps(node.name)}",
            f"cluster_id = {json.dumps(cluster_id)}",
            f"data = {json.dumps(str(self.directory / node.data))}",
            f"grpc = {json.dumps(node.grpc)}",
            f"http = {json.dumps(node.http)}",
            *(["insecure = true"] if host.address != LOOPBACK else []),
            *self._settings,
            *host.settings,
            "\n[peers]",
            *(f"{peer.name} = {json.dumps(peer.grpc)}" for peer in nodes),
        ]
        return "\n".join(lines) + "\n"

    def _spawn(self, node: Node) -> None:
        log, config = self._log_path(node.name), self._config_path(node)
        log.parent.mkdir(exist_ok=True)
        data = self.directory / node.data
        if not (data / "identity.json").exists():
            self._format(node, *(["--learner"] if self._lost_its_disk(node) else []))
        with log.open("ab") as out:
            words = [*self._host(node.name).inside, *self._program, "--config", str(config)]
            child = self._launch(node.name, words, out)
        _CHILDREN[child.pid] = child
        started = replace(node, pid=child.pid)
        self._write([started if each.name == node.name else each for each in self.nodes.values()])

    def _lost_its_disk(self, node: Node) -> bool:
        """Return whether a node that was started before, beside others, has no data any more.

        A founding voter without its promise and its log is unsafe: it comes back as a learner.
        """
        others = [self.directory / each.data for each in self.nodes.values() if each != node]
        return node.pid != 0 and any((other / "identity.json").exists() for other in others)

    def _launch(self, _: str, words: Sequence[str], log: BinaryIO) -> Process:
        """Start the program of the node of that name; it survives this terminal, and its Ctrl-C."""
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def format_learner(self, name: str) -> None:
        """Make a data directory for who takes the place of a node whose disk is lost.

        Raises:
            LaunchError: there is one.
        """
        self._format(self._node(name), "--learner")

    def _format(self, node: Node, *words: str) -> None:
        """Make a data directory: once in a node's life."""
        data = str(self.directory / node.data)
        command = [*self._program, "init", "--data", data, "--name", node.name, *words]
        command += ["--cluster-id", self._cluster_id(node), "--voters", ",".join(self.nodes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LaunchError(f"timerd init of {node.name} failed:\n{done.stdout}{done.stderr}")

    def _cluster_id(self, node: Node) -> str:
        text: str = tomllib.loads(self._config_path(node).read_text())["cluster_id"]
        return text

    def _wait_ready(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait until the named nodes, and not others at their ports, are ready for clients."""
        waiting = [*names]

        def all_ready() -> bool:
            for name in [*waiting]:
                node = self._node(name)
                if _is_ready(node.http):
                    _check_identity(node, self._cluster_id(node))
                    waiting.remove(name)
                elif not self._runs(node):
                    raise LaunchError(f"{name} ended at its start\n{self._last_words([name])}")
            return not waiting

        if not _wait(all_ready, timeout_s):
            who = ", ".join(waiting)
            raise LaunchError(
                f"{who} not ready within {timeout_s:g} s\n{self._last_words(waiting)}"
            )

    # ---- down

    def kill(self, name: str, with_signal: int = signal.SIGKILL) -> None:
        """Send one node a signal; after SIGKILL or SIGTERM it has ended when this returns.

        Raises:
            LaunchError: it does not run, or does not end.
        """
        node = self._node(name)
        if not self._signal(node, with_signal):
            raise LaunchError(f"{name} does not run")
        if with_signal in (signal.SIGKILL, signal.SIGTERM):
            self._wait_ended([node], STOP_TIMEOUT_S)

    def kill_together(self, *names: str) -> None:
        """Send kill -9 to all of them before any has ended; those that don't run are passed over.

        Raises:
            LaunchError: one does not end.
        """
        nodes = [self._node(name) for name in names]
        for node in nodes:
            self._signal(node, signal.SIGKILL)
        self._wait_ended(nodes, STOP_TIMEOUT_S)

    def stop(self, *names: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Let the named nodes, or all, finish and end.

        Raises:
            LaunchError: one does not end in time; it is left as it is.
        """
        if not self.nodes:
            return
        with self._lock():
            wanted = [self._node(name) for name in names] or [*self.nodes.values()]
            for node in wanted:
                self._signal(node, signal.SIGTERM)
            self._wait_ended(wanted, timeout_s)

    def _wait_ended(self, nodes: Sequence[Node], timeout_s: float) -> None:
        if not _wait(lambda: not any(map(self._runs, nodes)), timeout_s):
            left = [node.name for node in nodes if self._runs(node)]
            who = ", ".join(f"{name} (pid {self._node(name).pid})" for name in left)
            raise LaunchError(f"{who} still runs after {timeout_s:g} s\n{self._last_words(left)}")

    def _signal(self, node: Node, number: int) -> bool:
        """Send a signal to a node's process, and to no other; return whether it runs."""
        try:
            pidfd = os.pidfd_open(node.pid) if node.pid else -1
        except ProcessLookupError:
            return False
        if pidfd < 0:
            return False
        try:
            # The pid can't be another's from here on: so look at whose it is only now.
            if not self._runs(node):
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def _runs(self, node: Node) -> bool:
        """Return whether the remembered pid runs this very node. A zombie does not run."""
        child = _CHILDREN.get(node.pid)
        if child is not None:  # nobody else has its pid until it was waited for
            status = child.poll()
            if status is None:
                return True  # its arguments may not be its own yet
            _ENDED[node.pid] = status
            _CHILDREN.pop(node.pid, None)
            return False
        try:
            arguments = Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return node.pid > 0 and os.fsencode(self._config_path(node)) in arguments

    # ---- files

    def _node(self, name: str) -> Node:
        nodes = self.nodes
        if name not in nodes:
            known = ", ".join(nodes) or "none: nothing was started there yet"
            raise LaunchError(f"{self.directory} has no node {name!r}; it has {known}")
        return nodes[name]

    def _config_path(self, node: Node) -> Path:
        return self.directory / f"{node.name}.toml"

    def _log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _last_words(self, names: Sequence[str] | dict[str, Node]) -> str:
        texts = []
        for name in names:
            path = self._log_path(name)
            said = path.read_text(errors="replace").splitlines() if path.exists() else []
            texts.append("\n".join([f"--- {path}", *said[-LOG_TAIL_LINES:]]))
        return "\n".join(texts)

    def _write(self, nodes: Sequence[Node]) -> None:
        """Replace cluster.json: whoever reads it finds the old one or the new one."""
        path = self.directory / "cluster.json"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"nodes": [asdict(node) for node in nodes]}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "LOCK").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens at.

    They lie below those that the system gives to outgoing connections: a node that is down must
    not find its port taken by a client when it comes back.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else _PORTS.stop
    below = [port for port in _PORTS if port < end]
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(below, min(len(below), 100 + count)):
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise LaunchError(f"no {count} free ports below {end}")


def _is_ready(address: str) -> bool:
    found = _get(address, "/readyz")
    return found is not None and found[0] == http.HTTPStatus.OK


def _check_identity(node: Node, cluster_id: str) -> None:
    """Compare which node answers at a node's HTTP port with the one that was started there.

    Raises:
        LaunchError: another one answers.
    """
    found = _get(node.http, "/v1/status")
    if found is None or found[0] != http.HTTPStatus.OK:
        return  # it has just ended, or is not ready any more
    try:
        status = json.loads(found[1])
        answers = status["nodes"][0]["name"], status["cluster_id"]
    except (ValueError, LookupError, TypeError):
        answers = ("another program", "none")
    if answers != (node.name, cluster_id):
        raise LaunchError(
            f"{node.http} is answered by {answers[0]} of cluster {answers[1]}, and not by "
            f"{node.name} of {cluster_id}"
        )


def _get(address: str, path: str) -> tuple[int, bytes] | None:
    """Return status and body of a page; None if there is no answer in time."""
    connection = http.client.HTTPConnection(address, timeout=PROBE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as the condition holds, False if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
