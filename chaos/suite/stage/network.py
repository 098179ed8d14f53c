"""A network for one run: every node in a namespace of its own, a router between them.

    n1 [eth0 198.18.a.1] ──┐
    n2 [eth0 198.18.a.2] ──┤ router namespace ├── [198.18.a.254] this machine: clients, harness
    n3 [eth0 198.18.a.3] ──┘

All traffic is routed. So the router's policy rules control each direction of each link separately,
and plain iproute2 is enough (no iptables, no netem):

    cut    ip rule: from A to B blackhole       packets are dropped; no end is notified
    slow   ip rule: from A to B lookup SLOW     into a TUN device, whose reader (slow_link.py)
                                                delays packets, loses some, forwards the rest

The names contain the run, the harness's pid and the start time of that process. No other process
ever has the same pid and start time. So `remove_stale` finds the leftovers of crashed harnesses
and nothing else. Deleting the namespaces removes their links, addresses, routes and rules, and this
machine's end of the link as well.
"""

import contextlib
import ipaddress
import itertools
import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from deploy.local import NodeHost

CLIENTS: Final = "clients"
"""This machine as an end of links, with the clients and the harness."""
Pair = tuple[str, str]
"""(from, to): one direction of a link. Each is the name of a node, or CLIENTS."""

_NAME: Final = re.compile(r"tchaos-(?P<run>[0-9a-f]{6})-(?P<pid>\d+)-(?P<start>\d+)-(?P<part>\w+)")
_ROUTER: Final = "router"
_SLOW_TABLE: Final = 100
_SLOW_DEVICE: Final = "slow"
_BACK_PRIORITY: Final = 10
_CLIENTS_HOST: Final = 254
_NETNS: Final = Path("/run/netns")
_SUBNETS: Final = [*ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24)]
"""Addresses for tests of networks (RFC 2544). Each run has one of these subnets."""


class NetworkError(RuntimeError):
    """A command of the machine failed. The text has the first line of its output."""


def run(*words: str, stdin: str = "") -> str:
    """Run a program; return its standard output.

    Raises:
        NetworkError: it failed, or is not installed.
    """
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NetworkError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or str(done.returncode)).splitlines()[0]
        raise NetworkError(f"{' '.join(words)}: {said}")
    return done.stdout


def start_of(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot; empty: no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def probe() -> None:
    """Make a network with a cut and a slow link; NetworkError: this machine can't."""
    pairs = [("n1", CLIENTS)]
    with Network(["n1"]) as network, network.cut(pairs), network.slow(pairs, delay_ms=1):
        pass


class Network:
    """One run's network, from `__enter__` to `__exit__`."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Plan a network for these nodes."""
        pid = os.getpid()
        self._tag = f"tchaos-{secrets.token_hex(3)}-{pid}-{start_of(pid)}"
        self._nodes = [*nodes]
        self._subnet = _SUBNETS[0]
        # The lowest priority number is applied first, so a link that is both cut and slow is cut.
        self._cut_priorities = itertools.cycle(range(100, 10_000))
        self._slow_priorities = itertools.cycle(range(10_000, 20_000))
        self._link = f"tc{pid}"

    def __enter__(self) -> Self:
        """Make the namespaces and links; remove them again if that fails."""
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the namespaces and links. Processes that still run in them are killed."""
        self._remove()

    def host(self, name: str) -> NodeHost:
        """Return the address of a node and the command that runs a process in its namespace."""
        netns = f"--net={_NETNS / self._space(name)}"
        return NodeHost(address=self.address(name), inside=("nsenter", netns))

    def address(self, name: str) -> str:
        """Return the address of a node, or of this machine for CLIENTS."""
        number = _CLIENTS_HOST if name == CLIENTS else 1 + self._nodes.index(name)
        return str(self._subnet[number])

    # ---- faults

    @contextlib.contextmanager
    def cut(self, pairs: Iterable[Pair]) -> Iterator[None]:
        """Drop packets in these directions in the block."""
        with self._rule(pairs, "blackhole", self._cut_priorities):
            yield

    @contextlib.contextmanager
    def slow(
        self, pairs: Iterable[Pair], *, delay_ms: int, jitter_ms: int = 0, loss: float = 0.0
    ) -> Iterator[None]:
        """Delay packets in these directions in the block, and lose some.

        There is one device, so only one such block may be in effect at a time.

        Args:
            pairs: the directions.
            delay_ms: least delay of a packet.
            jitter_ms: greatest additional delay.
            loss: share of lost packets, 0 .. 1.

        Raises:
            NetworkError: the link could not be made. At the end: the reader had ended by itself, so
                the link was a cut.
        """
        inside = ("nsenter", f"--net={_NETNS / self._space(_ROUTER)}")
        figures = map(str, (delay_ms, jitter_ms, loss))
        reader = (sys.executable, "-m", "chaos.suite.stage.slow_link", _SLOW_DEVICE, *figures)
        with subprocess.Popen(
            [*inside, *reader], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        ) as box:
            try:
                assert box.stdout is not None
                if box.stdout.readline().strip() != b"up":
                    raise NetworkError("the slow link did not come up")
                with self._rule(pairs, f"lookup {_SLOW_TABLE}", self._slow_priorities):
                    yield
                    if (status := box.poll()) is not None:
                        why = f"status {status}: its packets were lost"
                        raise NetworkError(f"the slow link ended by itself, {why}")
            finally:
                box.kill()

    @contextlib.contextmanager
    def _rule(
        self, pairs: Iterable[Pair], action: str, priorities: Iterator[int]
    ) -> Iterator[None]:
        rules = [
            f"from {self.address(a)} to {self.address(b)} {action} priority {priority}"
            for (a, b), priority in zip(pairs, priorities, strict=False)
        ]

        try:
            self._ip(_ROUTER, *(f"rule add {rule}" for rule in rules))
            yield
        finally:  # some rules may not have been added
            self._ip(_ROUTER, *(f"rule del {rule}" for rule in rules), force=True)

    # ---- making and removing

    def _space(self, part: str) -> str:
        return f"{self._tag}-{part}"

    def _ip(self, part: str, *lines: str, force: bool = False) -> None:
        """Run `ip` commands in a namespace; with `force`, go on after one that fails."""
        words = ["-n", self._space(part), *["-force"] * force, "-batch", "-"]
        run("ip", *words, stdin="\n".join(lines) + "\n")

    def _make(self) -> None:
        parts = [_ROUTER, *self._nodes]
        for part in parts:
            run("ip", "netns", "add", self._space(part))
        router = self._space(_ROUTER)
        each = random.sample(_SUBNETS, len(_SUBNETS))
        self._subnet = next(net for net in each if not run("ip", "-4", "route", "show", str(net)))
        gateway = str(self._subnet[_CLIENTS_HOST - 1])
        for name in self._nodes:
            ends = f"{name} type veth peer name eth0 netns {self._space(name)}"
            run(*f"ip -n {router} link add {ends}".split())
            address = self.address(name)
            self._ip(_ROUTER, f"link set {name} up", f"addr add {gateway}/32 dev {name}")
            self._ip(
                name,
                "link set lo up",
                "link set eth0 up",
                f"addr add {address}/32 dev eth0",
                f"route add {gateway} dev eth0",
                f"route add default via {gateway} src {address}",
            )
            self._ip(_ROUTER, f"route add {address} dev {name}")
        # The TUN device and its route outlive the readers.
        self._ip(
            _ROUTER,
            f"tuntap add dev {_SLOW_DEVICE} mode tun",
            f"link set {_SLOW_DEVICE} up",
            f"route add default dev {_SLOW_DEVICE} table {_SLOW_TABLE}",
            f"rule add iif {_SLOW_DEVICE} lookup main priority {_BACK_PRIORITY}",
        )
        run(*f"ip link add {self._link} type veth peer name {CLIENTS} netns {router}".split())
        mine = self.address(CLIENTS)
        self._ip(
            _ROUTER,
            f"addr add {gateway}/32 dev {CLIENTS}",
            f"link set {CLIENTS} up",
            f"route add {mine} dev {CLIENTS}",
        )
        here = [
            f"addr add {mine}/32 dev {self._link}",
            f"link set {self._link} up",
            f"route add {gateway} dev {self._link}",
            f"route add {self._subnet} via {gateway} dev {self._link} src {mine}",
        ]
        run("ip", "-batch", "-", stdin="\n".join(here) + "\n")
        settings = "echo 1 > ip_forward; for c in conf/*/rp_filter; do echo 0 > $c; done"
        netns = f"--net={_NETNS / router}"
        run("nsenter", netns, "sh", "-c", f"cd /proc/sys/net/ipv4; {settings}")

    def _remove(self) -> None:
        spaces = {self._space(part) for part in [_ROUTER, *self._nodes]}
        for space in sorted(spaces.intersection(_spaces())):
            _delete(space)
        with contextlib.suppress(NetworkError):  # removed with the router's namespace
            run("ip", "link", "del", self._link)


# ---- leftovers of crashed harnesses


def remove_stale() -> None:
    """Remove the namespaces of dead harnesses, after a kill of the processes in them."""
    for space in _spaces():
        found = _NAME.fullmatch(space)
        if found and start_of(int(found["pid"])) != found["start"]:
            _delete(space)


def _spaces() -> list[str]:
    return sorted(path.name for path in _NETNS.iterdir()) if _NETNS.exists() else []


def _delete(space: str) -> None:
    """Delete a namespace, after the processes in it. No other process starts any there."""
    for pid in map(int, run("ip", "netns", "pids", space).split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run("ip", "netns", "del", space)
