"""`timerctl trace TOPIC`: the hops of single calls through the nodes, with their times.

    schedule ──► leader: request, append, send ──► followers: receive, write, sync, answer
    caller   ◄── leader: apply, commit, answers read ◄──┘

Each node records the hops of its log's entries for a moment. A timer is scheduled for an hour later
and cancelled. Times of nodes on other machines are moved by the difference of the clocks, which a
round trip shows to within half of its own length.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from timerclient.cli import cli_args
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import OK
from timerclient.values.errors import InvalidRequest, NotFound, TimerError, Unavailable

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb

CALLS_MAX: Final = 100
"""Their stamps fit into the record of a node."""
WARM_UP: Final = 5
"""Calls before the first one that counts: they open the stream to the leader."""
DELAY: Final = timedelta(hours=1)
CALLER: Final = "caller"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HEADINGS: Final = ("AT US", "+ US", "NODE", "HOP")
_REQUEST, _APPLIED = "REQUEST", "APPLIED"
_OF_FOLLOWERS: Final = {
    "RECEIVED": "entry read from the leader",
    "WRITING": "writer begins",
    "DURABLE": "written and synced",
    "ANSWERING": "answer sent to the leader",
}
_OF_LEADER: Final = {
    "REQUEST": "request read",
    "APPENDED": "entry appended",
    "SENT": "entry sent to the followers",
    "WRITING": "writer begins",
    "DURABLE": "written and synced",
    "ANSWERED": "first answer of a follower read",
    "COMMITTED": "committed by a majority",
    "APPLIED": "applied, answer made",
}


class Span(NamedTuple):
    """One call at its caller, on CLOCK_MONOTONIC in nanoseconds."""

    began_ns: int
    ended_ns: int


class NodeStamps(NamedTuple):
    """The stamps of one node, as (hop, index, nanoseconds on the caller's clock)."""

    node: str
    stamps: Sequence[tuple[str, int, int]]


class HopTime(NamedTuple):
    """One hop of a call, or of the median of several calls."""

    node: str
    text: str
    at_us: float
    """Microseconds since the call began."""


def hops_of(span: Span, nodes: Iterable[NodeStamps]) -> list[HopTime]:
    """Return the hops of one call in the order of time; empty: its entry is not in the record.

    If other callers use the cluster, the first request that the leader read in the span counts.
    """
    nodes = list(nodes)
    found = [
        (at_ns, node.node, index)
        for node in nodes
        for hop, index, at_ns in node.stamps
        if hop == _REQUEST and at_ns >= span.began_ns
    ]
    if not found or min(found)[0] > span.ended_ns:
        return []
    _, leader, entry = min(found)
    hops = [HopTime(CALLER, "call made", 0.0)]
    for node in nodes:
        seen: set[str] = set()
        texts = _OF_LEADER if node.node == leader else _OF_FOLLOWERS
        for hop, index, at_ns in node.stamps:
            if hop in texts and hop not in seen and index >= entry:
                seen.add(hop)
                hops.append(HopTime(node.node, texts[hop], (at_ns - span.began_ns) / 1000))
    hops.append(HopTime(CALLER, "answer received", (span.ended_ns - span.began_ns) / 1000))
    return sorted(hops, key=lambda each: each.at_us)


def medians(calls: Iterable[list[HopTime]]) -> list[HopTime]:
    """Return the median time of each hop that more than half of the calls have."""
    times: dict[tuple[str, str], list[float]] = {}
    count = 0
    for call in calls:
        count += bool(call)
        for hop in call:
            times.setdefault((hop.node, hop.text), []).append(hop.at_us)
    found = [
        HopTime(*name, statistics.median(each))
        for name, each in times.items()
        if 2 * len(each) > count
    ]
    return sorted(found, key=lambda each: each.at_us)


class TraceCommands(Commands):
    """The command `trace`."""

    def register_trace(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `trace`."""
        parser.set_defaults(run=self.trace)
        parser.description = (
            f"{parser.description} A timer in TOPIC is scheduled for an hour later and cancelled. "
            "The tables show when each node had the calls' entries, in microseconds. With --calls: "
            "the median of each hop. Example: timerctl trace probe --calls 50"
        )
        parser.add_argument("topic", metavar="TOPIC")
        parser.add_argument(
            "--calls",
            metavar="N",
            type=int,
            default=1,
            help=f"timers, one after the other, 1 to {CALLS_MAX}; default: 1",
        )

    def trace(self, args: argparse.Namespace) -> int:
        """Time the hops of calls; see the module."""
        if not 1 <= args.calls <= CALLS_MAX:
            raise InvalidRequest.of("--calls", args.calls, f"must be 1 to {CALLS_MAX}")
        with self._connect(args) as client:
            names = sorted(node.name for node in client.status().nodes if node.reachable)
            _calls(client, args.topic, WARM_UP)
            for name in names:
                client.trace_hops(name, begin=True)
            scheduled, cancelled = _calls(client, args.topic, args.calls)
            nodes = [_stamps_of(client, name) for name in names]
        kinds = {"schedule": scheduled, "cancel": cancelled}
        found = {kind: medians(hops_of(s, nodes) for s in spans) for kind, spans in kinds.items()}
        if not all(found.values()):
            raise Unavailable("the leader changed meanwhile, or the cluster is too busy: try again")
        tables = [
            f"{kind}\n{cli_args.table(args, _HEADINGS, _rows(hops))}"
            for kind, hops in found.items()
        ]
        document = {kind: [hop._asdict() for hop in hops] for kind, hops in found.items()}
        self._put(args, document, "\n\n".join(tables))
        return OK


def _calls(client: TimerClient, topic: str, count: int) -> tuple[list[Span], list[Span]]:
    """Schedule and cancel timers one by one; return the spans of both kinds of calls.

    An interrupted call leaves no timer, or stderr names its key.
    """
    scheduled, cancelled = [], []
    for _ in range(count):
        key = f"trace-{secrets.token_hex(16)}"
        began_ns = time.monotonic_ns()
        try:
            timer = client.schedule(topic, b"trace", delay=DELAY, key=key)
            between_ns = time.monotonic_ns()
            client.cancel(timer)
        except BaseException:
            _cancel_leftover(client, topic, key)
            raise
        scheduled.append(Span(began_ns, between_ns))
        cancelled.append(Span(between_ns, time.monotonic_ns()))
    return scheduled, cancelled


def _cancel_leftover(client: TimerClient, topic: str, key: str) -> None:
    """Cancel the timer that an interrupted call may have scheduled, or name it on stderr."""
    try:
        client.cancel(topic=topic, key=key)
    except NotFound:
        pass
    except (TimerError, KeyboardInterrupt):
        remedy = shlex.join(["timerctl", "cancel", "--topic", topic, "--key", key])
        sys.stderr.write(f"a timer may be left, which fires in an hour: {remedy}\n")


def _stamps_of(client: TimerClient, name: str) -> NodeStamps:
    """End the record of one node; return its stamps on this process's clock."""
    request_ns = time.monotonic_ns()
    answer = client.trace_hops(name)
    middle_ns = (request_ns + time.monotonic_ns()) // 2
    ahead_ns = 0 if answer.boot_id == _own_boot_id() else answer.clock_ns - middle_ns
    return NodeStamps(name, [(_name_of(s), s.index, s.at_ns - ahead_ns) for s in answer.stamps])


def _name_of(stamp: pb.HopStamp) -> str:
    return type(stamp).Hop.Name(stamp.hop).removeprefix("HOP_")


def _own_boot_id() -> bytes | None:
    """Return the machine's boot id. None: unknown."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return None


def _rows(hops: Sequence[HopTime]) -> list[tuple[Any, ...]]:
    before = [0.0, *(hop.at_us for hop in hops)]
    return [
        (round(hop.at_us), round(hop.at_us - last), hop.node, hop.text)
        for hop, last in zip(hops, before, strict=False)
    ]
