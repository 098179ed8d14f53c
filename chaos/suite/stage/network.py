"""A network for one run: every node in a namespace of its own, a router between them.

    n1 [eth0 10.a.b.1] ──┐
    n2 [eth0 10.a.b.2] ──┤ router namespace ├── [10.a.b.254] this machine: clients, harness
    n3 [eth0 10.a.b.3] ──┘

All traffic is routed, so the router's policy rules decide about every direction of every link by
itself, and plain iproute2 is enough (no iptables, no netem):

    cut    ip rule: from A to B blackhole       forwarded packets vanish; nobody is told
    slow   ip rule: from A to B lookup SLOW     into a TUN device, whose reader (slow_link.py) holds
                                                packets for a while, loses some, sends the rest on

Names carry the run, the harness's pid and that process's start time, which together no other
process ever has: `remove_stale` finds what a crashed harness left, and nothing else. Deleting
the namespaces takes the links, addresses, routes and rules with them, also this machine's end.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from deploy.local import NodeHost

CLIENTS: Final = "clients"
"""This machine, as an end of links: clients, the harness."""
Pair = tuple[str, str]
"""(from, to): one direction of a link; names of nodes, or CLIENTS."""

_NAME: Final = re.compile(r"tchaos-(?P<run>[0-9a-f]{6})-(?P<pid>\d+)-(?P<start>\d+)-(?P<part>\w+)")
_ROUTER: Final = "router"
_SLOW_TABLE: Final = 100
_SLOW_DEVICE: Final = "slow"
_BACK_PRIORITY: Final = 10
_CLIENTS_HOST: Final = 254
_NETNS: Final = Path("/run/netns")


class NetworkError(RuntimeError):
    """The machine did not do what was asked; carries its words."""


def run(*words: str, stdin: str = "") -> str:
    """Run a program; return what it printed.

    Raises:
        NetworkError: it failed, or there is none.
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
    """Return when a process started, in ticks since boot; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def why_not() -> str | None:
    """Return why this machine gives a run no network of its own; None: it does."""
    if os.geteuid() != 0:
        return "not root"
    try:
        with Network(["n1"]) as network:
            undo = network.cut([("n1", CLIENTS)])
            undo()
            undo = network.slow([("n1", CLIENTS)], delay_ms=1)
            undo()
    except NetworkError as error:
        return str(error)
    return None


class Network:
    """One run's network, from `__enter__` to `__exit__`."""

    def __init__(self, nodes: Sequence[str], run_id: str = "") -> None:
        """Plan a network for these nodes. `run_id` is six hexadecimal digits; empty: any."""
        pid = os.getpid()
        self._tag = f"tchaos-{run_id or secrets.token_hex(3)}-{pid}-{start_of(pid)}"
        self._nodes = [*nodes]
        self._subnet = ipaddress.ip_network("0.0.0.0/24")
        # The lowest comes first: a link that is cut is cut, also where it is slow.
        self._cut_priorities = itertools.cycle(range(100, 10_000))
        self._slow_priorities = itertools.cycle(range(10_000, 20_000))
        self._link = f"tc{pid}"

    def __enter__(self) -> Self:
        """Make the namespaces and links."""
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything. Processes in the namespaces have ended."""
        self._remove()

    def host(self, name: str) -> NodeHost:
        """Return where a node lives."""
        netns = f"--net={_NETNS / self._space(name)}"
        return NodeHost(address=self.address(name), inside=("nsenter", netns))

    def address(self, name: str) -> str:
        """Return a node's address, or this machine's."""
        number = _CLIENTS_HOST if name == CLIENTS else 1 + self._nodes.index(name)
        return str(self._subnet[number])

    def ends(self) -> list[str]:
        """Return all ends of links: the nodes, and the clients."""
        return [*self._nodes, CLIENTS]

    # ---- faults

    def cut(self, pairs: Iterable[Pair]) -> Callable[[], None]:
        """Let packets vanish in these directions; return what lets them through again."""
        return self._ruled(pairs, "blackhole", self._cut_priorities)

    def slow(
        self, pairs: Iterable[Pair], *, delay_ms: int, jitter_ms: int = 0, loss: float = 0.0
    ) -> Callable[[], None]:
        """Delay packets in these directions, lose a share of them; return what undoes it.

        One at a time: there is one such device.
        """
        router = self._space(_ROUTER)
        figures = map(str, (delay_ms, jitter_ms, loss))
        reader = (sys.executable, "-m", "chaos.suite.stage.slow_link", _SLOW_DEVICE, *figures)
        box = subprocess.Popen(
            ["nsenter", f"--net={_NETNS / router}", *reader],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

        def end() -> None:
            box.kill()
            box.wait()
            assert box.stdout is not None
            box.stdout.close()

        assert box.stdout is not None
        if box.stdout.readline().strip() != b"up":
            end()
            raise NetworkError("the slow link did not come up")
        try:
            unrule = self._ruled(pairs, f"lookup {_SLOW_TABLE}", self._slow_priorities)
        except NetworkError:
            end()
            raise

        def undo() -> None:
            status = box.poll()
            try:
                unrule()
            finally:
                end()
            if status is not None:
                raise NetworkError(f"the slow link ended by itself, status {status}: it was a cut")

        return undo

    def _ruled(
        self, pairs: Iterable[Pair], action: str, priorities: Iterator[int]
    ) -> Callable[[], None]:
        rules = [
            f"from {self.address(a)} to {self.address(b)} {action} priority {priority}"
            for (a, b), priority in zip(pairs, priorities, strict=False)
        ]

        def heal() -> None:
            self._ip(_ROUTER, *(f"rule del {rule}" for rule in rules), force=True)

        try:
            self._ip(_ROUTER, *(f"rule add {rule}" for rule in rules))
        except NetworkError:
            with contextlib.suppress(NetworkError):  # some were never there
                heal()
            raise
        return heal

    # ---- making and removing

    def _space(self, part: str) -> str:
        return f"{self._tag}-{part}"

    def _ip(self, part: str, *lines: str, force: bool = False) -> None:
        """Carry out commands; with `force` all of them, though one may fail."""
        words = ["-n", self._space(part), *["-force"] * force, "-batch", "-"]
        run("ip", *words, stdin="\n".join(lines) + "\n")

    def _make(self) -> None:
        parts = [_ROUTER, *self._nodes]
        for part in parts:
            run("ip", "netns", "add", self._space(part))
        router = self._space(_ROUTER)
        self._subnet = _free_subnet()
        gateway = str(self._subnet[_CLIENTS_HOST - 1])
        for name in self._nodes:
            self._wire(name, gateway)
        # The TUN device outlives its readers, with its route.
        self._ip(
            _ROUTER,
            f"tuntap add dev {_SLOW_DEVICE} mode tun",
            f"link set {_SLOW_DEVICE} up",
            f"route add default dev {_SLOW_DEVICE} table {_SLOW_TABLE}",
            f"rule add iif {_SLOW_DEVICE} lookup main priority {_BACK_PRIORITY}",
        )
        run(
            "ip",
            "link",
            "add",
            self._link,
            "type",
            "veth",
            "peer",
            "name",
            CLIENTS,
            "netns",
            router,
        )
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

    def _wire(self, name: str, gateway: str) -> None:
        """Link a node with the router."""
        run("ip", "-n", self._space(_ROUTER), "link", "add", name, "type", "veth",
            "peer", "name", "eth0", "netns", self._space(name))  # fmt: skip
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

    def _remove(self) -> None:
        spaces = {self._space(part) for part in [_ROUTER, *self._nodes]}
        for space in sorted(spaces.intersection(_spaces())):
            _delete(space)
        with contextlib.suppress(NetworkError):  # it went with the router's namespace
            run("ip", "link", "del", self._link)


# ---- what others have, and what crashed harnesses left


def remove_stale() -> list[str]:
    """End the processes in namespaces whose harness is dead, remove those; return their names."""
    gone = []
    for space in _spaces():
        found = _NAME.fullmatch(space)
        if found and start_of(int(found["pid"])) != found["start"]:
            _delete(space)
            gone.append(space)
    return gone


def _spaces() -> list[str]:
    return sorted(path.name for path in _NETNS.iterdir()) if _NETNS.exists() else []


def _delete(space: str) -> None:
    """Delete one of our namespaces, after what still runs in it: nobody else starts any there."""
    for pid in map(int, run("ip", "netns", "pids", space).split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run("ip", "netns", "del", space)


def _free_subnet() -> ipaddress.IPv4Network:
    """Return a private /24 that this machine neither has an address in nor a route to."""
    taken = [*_taken()]
    for _ in range(1000):
        low = secrets.randbelow(64 * 256)
        subnet = ipaddress.IPv4Network((10 << 24 | (191 << 16) + (low << 8), 24))
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise NetworkError("no free /24 in 10.191.0.0 - 10.254.255.255")


def _taken() -> Iterator[ipaddress.IPv4Network]:
    for route in json.loads(run("ip", "-j", "-4", "route", "show", "table", "all")):
        if route["dst"] != "default":
            yield ipaddress.IPv4Network(route["dst"], strict=False)
    for link in json.loads(run("ip", "-j", "-4", "addr")):
        for each in link.get("addr_info", []):
            yield ipaddress.IPv4Network(f"{each['local']}/{each['prefixlen']}", strict=False)
