"""`timerctl top`: live rates and lag of nodes, topics and groups.

    status and topics, twice --rates--> tables: nodes, busiest topics, groups that lag most

Rates come from the counters of two answers, over the time between them. A counter that fell (a node
restarted, a topic was deleted and created again) has no rate in that frame.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands, duration_text
from timerclient.cli.cli_errors import OK, as_typed
from timerclient.cli.cli_nodes import trouble_of_leader
from timerclient.cli.screen import Screen, interval, keys, redraws, wait_or_quit
from timerclient.values.errors import InvalidRequest, TimerError

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb

INTERVAL_DEFAULT: Final = timedelta(seconds=2)
ROWS_DEFAULT: Final = 10
Rate = float | None
"""Per second. None: unknown."""
_NODES: Final = (
    *("NODE", "ROLE", "PENDING", "READY", "SCHED/S", "FIRED/S", "ENTRIES/S", "BEHIND"),
    "NOTE",
)
_TOPICS: Final = ("TOPIC", "PENDING", "READY", "SCHED/S", "FIRED/S", "CANCEL/S", "LATE", "NOTE")
_GROUPS: Final = ("GROUP", "UNACKED", "LEASED", "CONSUMERS", "ACKED/S", "WAITS", "OLDEST")
_SPARE: Final = ("CANCEL/S", "LEASED", "CONSUMERS")
_AGES: Final = frozenset(("LATE", "WAITS", "OLDEST"))
"""Columns of ms."""


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The counters of a cluster at one time."""

    at_s: float
    """Of the monotonic clock, at the answer."""
    status: pb.GetStatusResponse
    topics: list[pb.TopicStatus]


def rate(old: int | None, new: int, seconds: float) -> Rate:
    """Return the rate of a counter. None: it fell, or its former value is unknown."""
    if old is None or new < old or seconds <= 0:
        return None
    return round((new - old) / seconds, 1)


def node_rows(old: ClusterSample | None, new: ClusterSample) -> list[tuple[Any, ...]]:
    """Return the rows of `_NODES`, in the cluster's order."""
    before = {n.replica_id: n for n in old.status.nodes if n.reachable} if old else {}
    seconds = new.at_s - old.at_s if old else 0.0
    end = max((n.log_end for n in new.status.nodes if n.reachable), default=0)
    rows: list[tuple[Any, ...]] = []
    for node in new.status.nodes:
        if not node.reachable:
            rows.append((node.name, *[None] * (len(_NODES) - 2), node.error or "does not answer"))
            continue
        was = before.get(node.replica_id)
        rows.append(
            (
                *(node.name, node.role, node.pending, node.ready),
                rate(was and was.scheduled, node.scheduled, seconds),
                rate(was and was.fired, node.fired, seconds),
                rate(was and was.applied_index, node.applied_index, seconds),
                *(end - node.applied_index, "disk low" if node.disk_low else node.damage),
            )
        )
    return rows


def topic_rows(old: ClusterSample | None, new: ClusterSample) -> list[tuple[Any, ...]]:
    """Return the rows of `_TOPICS`: the busiest first, then those with the greatest lag."""
    before = {topic.topic_id: topic for topic in old.topics} if old else {}
    seconds = new.at_s - old.at_s if old else 0.0
    rows = []
    for topic in new.topics:
        was = before.get(topic.topic_id)
        rates = [
            rate(was and getattr(was, name), getattr(topic, name), seconds)
            for name in ("scheduled", "fired", "cancelled")
        ]
        cells = (topic.name, topic.pending, topic.ready, *rates)
        order = (-sum(each or 0 for each in rates), -topic.lag_ms, -topic.pending, topic.name)
        rows.append((order, (*cells, topic.lag_ms, "paused" if topic.paused else "")))
    return [row for _, row in sorted(rows)]


def group_rows(old: ClusterSample | None, new: ClusterSample) -> list[tuple[Any, ...]]:
    """Return the rows of `_GROUPS`: those with the oldest unacked messages first."""
    before = {group.group_id: _acked(topic, group) for topic, group in _each(old)}
    seconds = new.at_s - old.at_s if old else 0.0
    rows = []
    for topic, group in _each(new):
        acked = rate(before.get(group.group_id), _acked(topic, group), seconds)
        order = (-group.unacked_lag_ms, -group.unacked, -(acked or 0), topic.name, group.name)
        row = (
            *(f"{topic.name}/{group.name}", group.unacked, group.leased, group.consumers, acked),
            *(group.undelivered_lag_ms, group.unacked_lag_ms),
        )
        rows.append((order, row))
    return [row for _, row in sorted(rows)]


def _each(sample: ClusterSample | None) -> list[tuple[pb.TopicStatus, pb.GroupStatus]]:
    topics = sample.topics if sample else []
    return [(topic, group) for topic in topics for group in topic.groups]


def _acked(topic: pb.TopicStatus, group: pb.GroupStatus) -> int:
    """Return a counter that grows with each ack, from a start of its own."""
    return topic.queue_end - group.unacked


def _age(ms: int) -> str:
    """Return an age in its largest unit; "-": none."""
    if ms < 10_000:
        return duration_text(timedelta(milliseconds=ms)) if ms else "-"
    minutes = ms // 60_000
    if minutes < 10:
        return f"{ms // 1000}s"
    return f"{minutes}m" if minutes < 600 else f"{minutes // 60}h"


class TopCommands(Commands):
    """The command `top`."""

    def register_top(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `top`."""
        parser.set_defaults(run=self.top)
        parser.description = (
            f"{parser.description} The key q ends it. Elsewhere than on a terminal frames are "
            "appended, with -o json a line each. Example: timerctl top --interval 5 --limit 20"
        )
        parser.set_defaults(is_repeated=True)
        parser.add_argument(
            "--interval",
            "--watch",  # as other commands name it; `args.watch` would run the command repeatedly
            dest="interval",
            metavar="SECONDS",
            nargs="?",
            type=interval,
            const=INTERVAL_DEFAULT,
            default=INTERVAL_DEFAULT,
            help=f"time between two frames; default: {duration_text(INTERVAL_DEFAULT)}",
        )
        parser.add_argument(
            "--frames",
            metavar="N",
            type=int,
            help="end after N frames; a first one without rates does not count",
        )
        parser.add_argument(
            "--limit",
            metavar="N",
            type=int,
            default=ROWS_DEFAULT,
            help=f"most topics and most groups; default: {ROWS_DEFAULT} each",
        )

    def top(self, args: argparse.Namespace) -> int:
        """Show frames until q, Ctrl-C or the last frame."""
        for name in ("frames", "limit"):
            value = vars(args)[name]
            if value is not None and value < 1:
                raise InvalidRequest.of(f"--{name}", value, "must be positive")
        screen = Screen(f"timerctl top, every {duration_text(args.interval)}")
        with self._connect(args) as client, keys():
            show = _Frames(args, screen, self._put)
            old = _sample(client)  # an error here ends the command
            if redraws() and args.output != "json":
                show.draw(None, old)
            at_s = time.monotonic()
            while args.frames is None or show.count < args.frames:
                at_s = max(at_s + args.interval.total_seconds(), time.monotonic())
                if wait_or_quit(at_s):
                    break
                try:
                    new = _sample(client)
                except TimerError as error:
                    if not error.retryable and error.outcome_known:
                        raise
                    show.draw_error(error)
                else:
                    show.draw(old, new)
                    old = new
        return OK


def _sample(client: TimerClient) -> ClusterSample:
    status, topics = client.status(), client.topics()
    return ClusterSample(time.monotonic(), status, topics)


class _Frames:
    """Draws samples, and counts the frames with rates."""

    def __init__(
        self,
        args: argparse.Namespace,
        screen: Screen,
        put: Callable[[argparse.Namespace, Any, str], None],
    ) -> None:
        self._args, self._screen, self._put = args, screen, put
        self.count = 0

    def draw(self, old: ClusterSample | None, new: ClusterSample) -> None:
        """Draw a sample. `old`: the one before; None: there are no rates yet."""
        limit = self._args.limit
        nodes = node_rows(old, new)
        topics, groups = topic_rows(old, new)[:limit], group_rows(old, new)[:limit]
        self.count += old is not None
        if self._args.output == "json":
            parts = {"nodes": (_NODES, nodes), "topics": (_TOPICS, topics)}
            parts["groups"] = (_GROUPS, groups)
            document = {
                name: [dict(zip(map(_key, heads), row, strict=True)) for row in rows]
                for name, (heads, rows) in parts.items()
            }
            self._put(self._args, {"leader": new.status.leader or None, **document}, "")
            return
        trouble = trouble_of_leader(new.status)
        leads = f"none: {trouble}" if trouble else new.status.leader
        head = f"epoch {new.status.epoch}  leader {leads}"
        text = "\n\n".join(
            [
                head,
                cli_args.table(self._args, _NODES, nodes),
                self._part(_TOPICS, topics, len(new.topics)),
                self._part(_GROUPS, groups, len(_each(new))),
            ]
        )
        self._screen.draw(text)

    def _part(self, headings: Sequence[str], rows: Sequence[Sequence[Any]], count: int) -> str:
        if not rows:
            return f"no {headings[0].lower()}s"
        cells = [
            [
                _age(cell) if head in _AGES else cell
                for head, cell in zip(headings, row, strict=True)
            ]
            for row in rows
        ]
        text = cli_args.table(self._args, headings, cells, spare=_SPARE)
        return text + (f"\n… of {count}: --limit" if count > len(rows) else "")

    def draw_error(self, error: TimerError) -> None:
        """Draw an error in place of a sample."""
        text = as_typed(error, self._args)
        if self._args.output == "json":
            self._put(self._args, {"error": text}, "")
        else:
            self._screen.draw(output.escape_controls(text))


def _key(heading: str) -> str:
    """Return the name of a column in JSON."""
    return heading.lower().replace("/s", "_per_s") + ("_ms" if heading in _AGES else "")
