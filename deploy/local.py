"""A cluster on this machine: plain processes in one directory, on loopback by default.

    D/cluster.json   {"nodes": [{"name", "pid", "grpc", "http", "data"}, ...]}; data relative to D;
                     with TLS also "link"
    D/n1.toml        the node's configuration
    D/certs/         certificates, if the cluster has TLS (deploy/local_tls.py)
    D/n1/            the node's data directory, or another one that its `NodeHost` names
    D/logs/n1.log    the node's output
    D/LOCK           locked (flock) while nodes are being started or stopped

The processes are detached. They outlive their starter, and `timerctl local down` in another
terminal ends them. A node keeps its ports across restarts.

A remembered pid may belong to another process by now. Before each signal, /proc must show that the
pid runs this very node. The signal is sent through a pidfd, which no other process can inherit.
"""

import contextlib
import fcntl
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import grpc

from deploy import local_tls
from replication.core.quorum import VOTERS_MAX
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc
from timerclient.values.client_tls import ClientTls

PROGRAM: Final = (sys.executable, "-m", "cluster.node.timerd")
READY_TIMEOUT_S: Final = 120.0
"""Only a hanging node takes this long. A node that ends is reported at once."""
SILENT_S: Final = 5.0
"""A start that takes longer prints the reasons."""
STOP_TIMEOUT_S: Final = 60.0
"""Far more than a node needs to hand over and finish its work in flight."""
PORT_MAX: Final = 65_535
HTTP_ABOVE: Final = 10
"""Distance of the HTTP ports above the gRPC ports, in a cluster with a base port."""
LINKS_ABOVE: Final = 20
"""Distance of the ports for other nodes above the gRPC ports, with TLS."""
LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.05
PROBE_S: Final = 1.0
PATIENCE_S_MAX: Final = 5.0
LOG_TAIL_LINES: Final = 15
FILES: Final = ("cluster.json", "cluster.tmp", "LOCK")
IDENTITY: Final = "identity.json"
"""The file of a data directory that `timerd init` makes."""
FOLDERS: Final = ("logs", local_tls.FOLDER)
UNFIT: Final = b"waiting to be replaced"
"""State in /readyz of a node that takes no part until `timerctl members replace`."""
_PORTS: Final = range(10_000, 32_768)
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; negative: the signal. None: the child runs."""


_CHILDREN: Final[dict[int, Process]] = {}
"""Nodes started by this process, by pid. This process must reap them when they end."""
_ENDED: Final[dict[int, int]] = {}
"""Exit status of the reaped nodes, by pid; negative: the signal that ended the node."""


class LaunchError(RuntimeError):
    """The nodes could not be started or stopped. Gives the reason and the nodes' last output."""


class WrongPlanError(LaunchError):
    """A new cluster can't have this number of nodes or this base port, or the cluster exists."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One node of a local cluster, as listed in cluster.json."""

    name: str
    pid: int
    """Pid of the process that was started last, which may have ended since; 0: none was started."""
    grpc: str
    http: str
    data: str
    link: str = ""
    """The address for other nodes; empty: they use `grpc`."""


@dataclass(frozen=True, slots=True)
class ReportedState:
    """A running node's status, and the controller that it knows."""

    role: str
    serving: bool
    epoch: int
    controller: str = ""
    disk_low: bool = False
    """Whether less disk space is free than the node keeps in reserve."""


@dataclass(frozen=True, slots=True)
class NodeHost:
    """The environment of one node."""

    address: str = LOOPBACK
    """Address of all its ports. For any address except loopback the node gets `insecure = true`."""
    inside: tuple[str, ...] = ()
    """Command that starts the node's processes, such as `nsenter --net=…`. It must exec them."""
    data: str = ""
    """The data directory, relative to the cluster's directory; empty: the node's name."""
    settings: tuple[str, ...] = ()
    """Additional lines for the node's TOML file."""


def _node_of(*, pid: int, **texts: str) -> LocalNode:
    """Return a node of cluster.json.

    Raises:
        ValueError, TypeError: a field is of a wrong kind.
    """
    if type(pid) is not int or not all(isinstance(each, str) for each in texts.values()):
        raise TypeError("pid: must be a whole number; all other fields: texts")
    node = LocalNode(pid=pid, **texts)
    for address in filter(None, (node.grpc, node.http, node.link)):
        int(address.rpartition(":")[2])
    return node


class LocalCluster:
    """The nodes in one directory. Every method may be repeated; it does only the work left."""

    def __init__(  # noqa: PLR0913
        self,
        directory: Path,
        nodes: int = 3,
        *,
        base_port: int | None = None,
        settings: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        host: Callable[[str], NodeHost] = lambda _: NodeHost(),
        id_prefix: str = "local",
        tls: bool = False,
    ) -> None:
        """Use the cluster in `directory`, or one that `start` will create there.

        Args:
            directory: directory of all files of this cluster.
            nodes: number of nodes of a new cluster.
            base_port: first gRPC port of a new cluster; the first HTTP port is ten above. None:
                any free ports.
            settings: additional lines for the nodes' TOML files, before their tables.
            program: command line of a node.
            host: node name -> the node's environment.
            id_prefix: beginning of a new cluster's id.
            tls: make certificates for a new cluster; all its ports use TLS.
        """
        self.directory = directory.resolve()
        self._count = nodes
        self._base_port = base_port
        self._settings = settings
        self._program = program
        self._host = host
        self._id_prefix = id_prefix
        self._with_tls = tls

    # ---- state

    @property
    def nodes(self) -> dict[str, LocalNode]:
        """The nodes by name; empty before the first `start`.

        Raises:
            LaunchError: cluster.json was not written by `start`.
        """
        path = self.directory / "cluster.json"
        if not path.exists():
            return {}
        try:
            listed = [_node_of(**each) for each in json.loads(path.read_text())["nodes"]]
        except (ValueError, TypeError, LookupError) as error:
            raise LaunchError(f"{path} does not list a local cluster: {error!r}") from error
        return {node.name: node for node in listed}

    @property
    def endpoints(self) -> list[str]:
        """The gRPC addresses of all nodes, running or not."""
        return [node.grpc for node in self.nodes.values()]

    @property
    def tls(self) -> ClientTls | None:
        """The files of an administrator. None: the cluster has no TLS."""
        return local_tls.tls_of(self.directory)

    def is_running(self, name: str) -> bool:
        """Return whether the node's process runs."""
        return self._runs(self._node(name))

    def exit_status(self, name: str) -> int | None:
        """Return the exit status of the node's last process; negative: the signal.

        None: the node runs, or another process started it.
        """
        node = self._node(name)
        return None if self._runs(node) else _ENDED.get(node.pid)

    def state(self, name: str, within_s: float = PROBE_S) -> ReportedState | None:
        """Return a node's own status. None: no answer within `within_s` seconds."""
        with local_tls.open_channel(self._node(name).grpc, self.tls) as channel:
            stub = timer_pb2_grpc.AdminServiceStub(channel)
            try:
                answer = stub.GetStatus(pb.GetStatusRequest(local=True), timeout=within_s)
            except grpc.RpcError:
                return None
        if not answer.nodes:
            return None
        status = answer.nodes[0]
        return ReportedState(
            status.role, status.serving, status.epoch, answer.controller, status.disk_low
        )

    def leader(self, above_epoch: int = 0, within_s: float = PROBE_S) -> str | None:
        """Return the node that reports itself as the serving leader. None: there is none.

        Leaders of an epoch up to `above_epoch` are ignored, as they may be outdated.
        """
        states = {n: self.state(n, within_s) for n in self.nodes if self.is_running(n)}
        leading = {n: s.epoch for n, s in states.items() if s and s.role == "leader" and s.serving}
        leading = {name: epoch for name, epoch in leading.items() if epoch > above_epoch}
        return max(leading, key=lambda name: leading[name], default=None)

    def wait_for_leader(self, timeout_s: float = READY_TIMEOUT_S, *, above_epoch: int = 0) -> str:
        """Wait for a leader of an epoch above `above_epoch`, and return its name.

        Raises:
            LaunchError: there is none within `timeout_s` seconds.
        """
        found: list[str] = []
        began_s = time.monotonic()

        def has_leader() -> bool:
            patience_s = (time.monotonic() - began_s) / 4  # a busy leader may answer late
            leader = self.leader(above_epoch, max(PROBE_S, min(PATIENCE_S_MAX, patience_s)))
            found.extend(filter(None, [leader]))
            return bool(found)

        if not _wait(has_leader, timeout_s):
            raise LaunchError(f"no leader within {timeout_s:g} s\n{self._last_words(self.nodes)}")
        return found[0]

    # ---- up

    def start(
        self,
        *names: str,
        timeout_s: float = READY_TIMEOUT_S,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Start the named nodes, or all. Wait until they are ready if a majority runs.

        `tell`: takes the reason why a node is not ready yet, after SILENT_S seconds.

        Raises:
            LaunchError: a port is in use, a node ended, or a node is not ready in time. If a port
                is in use, no node was started and no file was written.
        """
        wanted, running = self.launch(*names)
        # A node that has ended since counts as started here; the wait reports it.
        if 2 * len({*running, *wanted}) > len(self.nodes):
            self._wait_ready(wanted, timeout_s, tell)

    def launch(self, *names: str) -> tuple[list[str], set[str]]:
        """Start the named nodes, or all, without waiting; return their names, and which ran before.

        Raises:
            LaunchError: a port is in use, or a name is unknown. No file was written. Or the first
                data directory of a new cluster can't be made. No file is left. Or cluster.json
                can't be written. Nodes before that one were started.
        """
        before = present(self.directory)
        planned: dict[str, LocalNode] = {}
        with self._lock(), contextlib.ExitStack() as failed:
            known = self.nodes
            if not known:
                failed.callback(self._remove_unformatted, planned, before)
            planned.update(known or self._plan())
            wanted = [*dict.fromkeys(names)] or [*planned]
            for name in wanted:
                self._check_name(name, planned)
            running = {name for name in known if self.is_running(name)}
            starting = [planned[name] for name in wanted if name not in running]
            for node in starting:
                self._try_ports(node)
            if not known:
                self._write_new([*planned.values()])
            for name in wanted:
                if name not in running:
                    self._spawn(self._node(name))
            failed.pop_all()
        return wanted, running

    def _remove_unformatted(
        self, planned: Mapping[str, LocalNode], before: Collection[Path]
    ) -> None:
        """Remove the new files of a cluster of which no node has a data directory yet.

        The next `start` then makes another cluster, with its own options. `before` stays.
        """
        nodes = [(node.name, node.data) for node in planned.values()]
        if not any((self.directory / data / IDENTITY).exists() for _, data in nodes):
            remove_files(self.directory, nodes, keep=before)

    def restart(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start one node again on its ports; see `start`."""
        self.start(name, timeout_s=timeout_s)

    def _plan(self) -> dict[str, LocalNode]:
        """Return the nodes of a new cluster by name, with their ports and directories."""
        if self._count not in range(1, VOTERS_MAX + 1):
            raise WrongPlanError(f"--nodes = {self._count}: must be 1 to {VOTERS_MAX}")
        steps = (0, HTTP_ABOVE, LINKS_ABOVE) if self._with_tls else (0, HTTP_ABOVE)
        if self._base_port is None:
            ports = free_ports(len(steps) * self._count)
        elif self._base_port in range(1, PORT_MAX - steps[-1] - self._count + 2):
            ports = [self._base_port + step + i for step in steps for i in range(self._count)]
        else:
            most = PORT_MAX - steps[-1] - self._count + 1
            raise WrongPlanError(f"--base-port = {self._base_port}: must be 1 to {most}")
        nodes = {}
        for at in range(self._count):
            name = f"n{at + 1}"
            host = self._host(name)
            grpc_at, http_at, *link_at = (f"{host.address}:{p}" for p in ports[at :: self._count])
            nodes[name] = LocalNode(name, 0, grpc_at, http_at, host.data or name, *link_at)
        return nodes

    def _try_ports(self, node: LocalNode) -> None:
        """Bind the ports of a node that is about to start, and close them again.

        A node in its own network namespace is skipped: its ports are invisible here.

        Raises:
            LaunchError: a port is in use.
        """
        if self._host(node.name).inside:
            return
        for address in filter(None, (node.grpc, node.http, node.link)):
            host, _, port = address.rpartition(":")
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT
                try:
                    tried.bind((host, int(port)))
                except OSError as error:
                    raise LaunchError(
                        f"{node.name} can't listen at {address}: {error.strerror}. Another process "
                        "uses that port: end it, or choose other ports for a new cluster "
                        "(--base-port). No node was started"
                    ) from error

    def _write_new(self, nodes: Sequence[LocalNode]) -> None:
        """Write a new cluster's list of nodes and their configurations."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # Each cluster has its own id, so that it refuses timer ids of another cluster.
        cluster_id = f"{self._id_prefix}-{secrets.token_hex(4)}"
        if self._with_tls:
            hosts = [(node.name, node.grpc.rpartition(":")[0]) for node in nodes]
            local_tls.make_certificates(self.directory, cluster_id, hosts)
        for node in nodes:
            self._config_path(node).write_text(self._config(cluster_id, node, nodes))
        self._write(nodes)

    def _config(self, cluster_id: str, node: LocalNode, nodes: Sequence[LocalNode]) -> str:
        host = self._host(node.name)
        lines = [
            f"name = {json.dumps(node.name)}",
            f"cluster_id = {json.dumps(cluster_id)}",
            f"data = {json.dumps(str(self.directory / node.data))}",
            f"grpc = {json.dumps(node.grpc)}",
            f"http = {json.dumps(node.http)}",
            f"replication = {json.dumps(f'{host.address}:0')}",
            *(["insecure = true"] if host.address != LOOPBACK and not node.link else []),
            *self._settings,
            *host.settings,
            "\n[peers]",
            *(f"{peer.name} = {json.dumps(peer.grpc)}" for peer in nodes),
        ]
        if node.link:
            lines += ["\n[links]", *(f"{peer.name} = {json.dumps(peer.link)}" for peer in nodes)]
            lines += local_tls.settings_of(self.directory, node.name)
        return "\n".join(lines) + "\n"

    def _spawn(self, node: LocalNode) -> None:
        log, config = self._log_path(node.name), self._config_path(node)
        log.parent.mkdir(exist_ok=True)
        data = self.directory / node.data
        if not (data / IDENTITY).exists():
            self._format(node, *(["--learner"] if self._has_lost_data(node) else []))
        with log.open("ab") as out:
            words = [*self._host(node.name).inside, *self._program, "--config", str(config)]
            child = self._launch(node.name, words, out)
        _CHILDREN[child.pid] = child
        started = replace(node, pid=child.pid)
        listed = [started if each.name == node.name else each for each in self.nodes.values()]
        try:
            self._write(listed)
        except OSError as error:
            os.kill(child.pid, signal.SIGKILL)  # `stop` ends listed nodes only
            path = self.directory / "cluster.json"
            raise LaunchError(f"{node.name} was not started: {path}: {error.strerror}") from error

    def _has_lost_data(self, node: LocalNode) -> bool:
        """Return whether a node that was started before, beside others, has no data any more.

        A founding voter without its promise and its log is unsafe: it restarts as a learner.
        """
        others = [self.directory / each.data for each in self.nodes.values() if each != node]
        return node.pid != 0 and any((other / IDENTITY).exists() for other in others)

    def _launch(self, name: str, words: Sequence[str], log: BinaryIO) -> Process:
        """Start a node's program in its own session: it survives this terminal and its Ctrl-C."""
        del name  # for subclasses
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def format_learner(self, name: str) -> None:
        """Create a data directory for the replacement of a node whose disk is lost.

        Raises:
            LaunchError: the directory exists, or could not be created.
        """
        self._format(self._node(name), "--learner")

    def _format(self, node: LocalNode, *words: str) -> None:
        """Create a data directory: once in a node's life."""
        data = str(self.directory / node.data)
        command = [*self._program, "init", "--data", data, "--name", node.name, *words]
        command += ["--cluster-id", self._cluster_id(node), "--voters", ",".join(self.nodes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LaunchError(f"timerd init of {node.name} failed:\n{done.stdout}{done.stderr}")

    def _cluster_id(self, node: LocalNode) -> str:
        text: str = tomllib.loads(self._config_path(node).read_text())["cluster_id"]
        return text

    def _wait_ready(
        self, names: Sequence[str], timeout_s: float, tell: Callable[[str], object]
    ) -> None:
        """Wait until the named nodes are ready, and check that they answer at their own ports."""
        waiting, told = [*names], set[str]()
        silent_until_s = time.monotonic() + SILENT_S

        def all_ready() -> bool:
            for name in [*waiting]:
                node = self._node(name)
                found = self._get(node.http, "/readyz")
                if found is not None and found[0] == http.HTTPStatus.OK:
                    self._check_identity(node, self._cluster_id(node))
                    waiting.remove(name)
                elif not self._runs(node):
                    raise LaunchError(f"{name} ended at its start\n{self._last_words([name])}")
                elif found is not None and UNFIT in found[1]:
                    raise LaunchError(f"{name} {found[1].decode(errors='replace').strip()}")
                elif found is not None and name not in told and time.monotonic() > silent_until_s:
                    told.add(name)
                    tell(f"{name} {found[1].decode(errors='replace').strip()}")
            return not waiting

        if not _wait(all_ready, timeout_s):
            who = ", ".join(waiting)
            raise LaunchError(
                f"{who} not ready within {timeout_s:g} s\n{self._last_words(waiting)}"
            )

    def _check_identity(self, node: LocalNode, cluster_id: str) -> None:
        """Check that the process at a node's HTTP port is the node that was started there.

        Raises:
            LaunchError: another node or program answers.
        """
        found = self._get(node.http, "/v1/status")
        if found is None or found[0] != http.HTTPStatus.OK:
            return  # the node has just ended, or is not ready any more
        try:
            status = json.loads(found[1])
            answers = status["nodes"][0]["name"], status["cluster_id"]
        except (ValueError, LookupError, TypeError):
            answers = ("another program", "none")
        if answers != (node.name, cluster_id):
            raise LaunchError(
                f"{answers[0]} of cluster {answers[1]} answers at {node.http} in place of "
                f"{node.name} of cluster {cluster_id}"
            )

    def _get(self, address: str, path: str) -> tuple[int, bytes] | None:
        """Return status and body of a page. None: no answer within PROBE_S seconds."""
        connection = local_tls.open_http(address, self.tls, PROBE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    # ---- down

    def kill(self, name: str, with_signal: int = signal.SIGKILL) -> None:
        """Send one node a signal. After SIGKILL and SIGTERM wait until it has ended.

        Raises:
            LaunchError: the node does not run, or does not end.
        """
        node = self._node(name)
        if not self._signal(node, with_signal):
            raise LaunchError(f"{name} does not run")
        if with_signal in (signal.SIGKILL, signal.SIGTERM):
            self._wait_for_exit([node], STOP_TIMEOUT_S)

    def kill_together(self, *names: str) -> None:
        """Send SIGKILL to all named nodes before any has ended. Nodes that don't run are skipped.

        Raises:
            LaunchError: a node does not end.
        """
        nodes = [self._node(name) for name in names]
        for node in nodes:
            self._signal(node, signal.SIGKILL)
        self._wait_for_exit(nodes, STOP_TIMEOUT_S)

    def stop(self, *names: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the named nodes, or all, in good order.

        Raises:
            LaunchError: a node does not end in time. It is left running.
        """
        if not self.nodes:
            return
        with self._lock():
            wanted = [self._node(name) for name in names] or [*self.nodes.values()]
            for node in wanted:
                self._signal(node, signal.SIGTERM)
            self._wait_for_exit(wanted, timeout_s)

    def destroy(self) -> list[Path]:
        """Kill all nodes, and remove the cluster's files; return the files that stay.

        Raises:
            LaunchError: a node does not end. No file is removed.
        """
        with self._lock():
            self.kill_together(*self.nodes)
            return remove_files(
                self.directory, [(node.name, node.data) for node in self.nodes.values()]
            )

    def _wait_for_exit(self, nodes: Sequence[LocalNode], timeout_s: float) -> None:
        if not _wait(lambda: not any(map(self._runs, nodes)), timeout_s):
            left = [node.name for node in nodes if self._runs(node)]
            who = ", ".join(f"{name} (pid {self._node(name).pid})" for name in left)
            kill = f"to end it at once: timerctl local kill {' '.join(left)}"
            raise LaunchError(
                f"{who} still runs after {timeout_s:g} s; {kill}\n{self._last_words(left)}"
            )

    def _signal(self, node: LocalNode, number: int) -> bool:
        """Send a signal to a node's own process only. Return whether it runs."""
        try:
            pidfd = os.pidfd_open(node.pid) if node.pid else -1
        except ProcessLookupError:
            return False
        if pidfd < 0:
            return False
        try:
            # The pidfd is bound to this process, so its identity is checked only now.
            if not self._runs(node):
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def _runs(self, node: LocalNode) -> bool:
        """Return whether the remembered pid runs this very node. A zombie does not run."""
        child = _CHILDREN.get(node.pid)
        if child is not None:  # the kernel keeps its pid until it is reaped
            status = child.poll()
            if status is None:
                return True  # before exec its command line is still the parent's
            _ENDED[node.pid] = status
            _CHILDREN.pop(node.pid, None)
            return False
        try:
            arguments = Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return node.pid > 0 and os.fsencode(self._config_path(node)) in arguments

    # ---- files

    def _node(self, name: str) -> LocalNode:
        nodes = self.nodes
        self._check_name(name, nodes)
        return nodes[name]

    def _check_name(self, name: str, nodes: Mapping[str, LocalNode]) -> None:
        if name not in nodes:
            known = ", ".join(nodes) or "none: no node was started there yet"
            raise LaunchError(f"{self.directory} has no node {name!r}; it has {known}")

    def _config_path(self, node: LocalNode) -> Path:
        return self.directory / f"{node.name}.toml"

    def log_path(self, name: str) -> Path:
        """Return the file of a node's output.

        Raises:
            LaunchError: there is no such node, or it was never started.
        """
        path = self._log_path(self._node(name).name)
        if not path.exists():
            raise LaunchError(f"{name} was never started: {path} does not exist")
        return path

    def _log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _last_words(self, names: Sequence[str] | dict[str, LocalNode]) -> str:
        texts = []
        for name in names:
            path = self._log_path(name)
            said = path.read_text(errors="replace").splitlines() if path.exists() else []
            texts.append("\n".join([f"--- {path}", *said[-LOG_TAIL_LINES:]]))
        return "\n".join(texts)

    def _write(self, nodes: Sequence[LocalNode]) -> None:
        """Replace cluster.json atomically: a reader finds the old list or the new one."""
        path = self.directory / "cluster.json"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            listed = [asdict(node) for node in nodes]
            for each in listed:
                if not each["link"]:
                    del each["link"]
            json.dump({"nodes": listed}, file, indent=2)
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
    """Return free loopback ports.

    They lie below the range for outgoing connections. A client can therefore not take the port of
    a node that is down.
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


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return True as soon as the condition holds, False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def remove_files(
    directory: Path, nodes: Iterable[tuple[str, str]], keep: Collection[Path] = ()
) -> list[Path]:
    """Remove the files of a cluster, then its directory if nothing else is in it.

    Args:
        directory: directory of the cluster.
        nodes: name and data directory of each node. A data directory that does not lie within
            `directory` stays.
        keep: files and directories in `directory` that stay, or `directory` itself.

    Returns:
        The other files of the directory, and the data directories that stay; empty: all is removed.
    """
    inside, stay = directory.resolve(), []
    known = [directory / name for name in FOLDERS]
    for name, data in nodes:
        known.append(directory / f"{Path(name).name}.toml")
        path = (directory / data).resolve()
        if inside in path.parents:
            known.append(directory / data)
        elif path.exists():
            stay.append(path)
    # cluster.json goes last: if an earlier file can't be removed, a further call finds the nodes.
    for path in [*known, *(directory / name for name in reversed(FILES))]:
        if directory / path.relative_to(directory).parts[0] in keep:
            continue
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    stay += sorted(directory.iterdir())
    if not stay and directory not in keep:
        directory.rmdir()
    return stay


def present(directory: Path) -> list[Path]:
    """Return a directory and the files in it; empty: it does not exist."""
    return [directory, *directory.iterdir()] if directory.is_dir() else []
