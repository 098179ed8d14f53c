"""Facts of a run as lines of text, which the text and the page of a report share."""

from collections.abc import Iterator
from typing import Any

from chaos.audit.report.figures import PLANES
from chaos.history.history import leader_kills_told


def facts(s: dict[str, Any]) -> Iterator[str]:
    """Yield the facts of a summary: of the log, the nodes, faults and deliveries."""
    yield from _of_nodes(s)
    if kills := leader_kills_told(s["leader_kills"]):
        yield kills
    for gap in s["failover_gaps"]:
        text = f"leader {gap['node']} killed: the next firing, of epoch {gap['epoch']}"
        yield f"{text}, came {gap['fired_after_ms']:,} ms later"
    for fault in s["faults"]:
        gaps = [
            f"no {plane} for {fault[f'{plane}_gap_ms']:,} ms, to the end"
            for plane in PLANES
            if fault[f"{plane}_gap_open"]
        ]
        if gaps:
            at_s = (fault["start_ms"] - s["timeline"]["from_ms"]) / 1000
            yield f"not recovered from {fault['fault']} at {at_s:.1f} s: {'; '.join(gaps)}"
    yield from _of_deliveries(s)


def _of_nodes(s: dict[str, Any]) -> Iterator[str]:
    points, unbalanced = s["conservation"], s["violations"].get("unbalanced_checkpoints", 0)
    yield (
        f"{s['entries']:,} log entries on a majority, {s['stale_entries']} stale entries;"
        f" counts balanced at {points['checkpoints'] - unbalanced}"
        f" of {points['checkpoints']} checkpoints"
    )
    said = points["said"]
    if said["nodes"]:
        yield (
            f"{said['nodes']} nodes reported their counts {said['counts']:,} times, and"
            f" {said['digests']:,} digests of their states"
        )
    if s["files"]:
        told = (f"{e['node']} {e['pending']:,} after entry {e['index']:,}" for e in s["files"])
        unread = f"; not read: {', '.join(s['files_unread'])}" if s["files_unread"] else ""
        yield f"pending in nodes' files: {', '.join(told)}{unread}"
    for hole in s["holes"]:
        span = f"{hole['from']} .. {hole['to']}"
        yield f"{hole['node']}'s log never held entries {span}: it began later, or ended earlier"
    for part in s["thin"]:
        span = f"{part['from']} .. {part['to']}"
        yield f"entries {span} are on fewer than a majority: some logs began later"


def _of_deliveries(s: dict[str, Any]) -> Iterator[str]:
    if unjudged := s["waits"]["unjudged"]:
        deliveries = s["delivered"] + s["redelivered"]
        yield (
            f"{unjudged:,} of {deliveries:,} deliveries were late during a fault or to a busy"
            " consumer, and were not judged"
        )
    if late := s["arrived_after_ack"]:
        yield (
            f"{late:,} deliveries arrived after the ack was confirmed, by the clients' clocks;"
            " they may have been sent before"
        )
    if s["acks_unasked"] is None:
        yield "too many acks to look for acks that no history requested"
    elif s["acks_unasked"]:
        yield f"{s['acks_unasked']:,} messages are acked without a request in any history"
    if unjudged := s["fired_answers"]["unjudged"]:
        answers = s["fired_answers"]["answers"]
        yield f"{unjudged:,} of {answers:,} answers ALREADY_FIRED, close to the firing: not judged"
