"""Gaps in the evidence of a run: with any of them, no verdict is OK.

Each line names a part that was not looked at, and the missing evidence. Without these lines, a
folder that lacks a witness would pass for one in which the witness found nothing.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.queries import Tables, query
from chaos.audit.rules.verdict import Clocks

UNKNOWN_SHARE_MAX: Final = 0.2
"""Greatest share of schedules without a known outcome, on which P1 is silent. Also the greatest
share of late deliveries with an excuse, as the excuse may explain a part of the wait only, and of
answers ALREADY_FIRED that neither the log nor clocks can judge."""
SHOWN_MAX: Final = 5
_RECORDED: Final = (
    ("payloads beyond their marks", "payload_crcs", "op = 'schedule' AND outcome = 'ok'"),
    ("times of deliveries", "handed_out_ms", "op = 'deliver'"),
    ("orders of deliveries", "lease_id", "op = 'deliver'"),
)
"""Parts of the promises, the column that shows each, and the lines that need it."""


def not_looked_at(
    tables: Tables, summary: Mapping[str, Any], clocks: Clocks, nodes: Collection[str]
) -> list[str]:
    """Return a line for each part of the promises that the folder cannot show.

    `tables`: lines, groups, states, fates. `nodes`: all that did not lose their disks.
    """
    found, lines = [], tables["lines"]
    rows = query("clients", "unread", tables).collect()
    if unread := [f"{row['group_name']} of {row['name']}" for row in rows]:
        found.append(f"deliveries of {len(unread)} groups, which no history opened: {_few(unread)}")
    if rows := query("clients", "unasked", tables).collect():
        timers, topics = sum(row["timers"] for row in rows), _few([row["name"] for row in rows])
        found.append(f"{timers:,} timers of topics in which no history requests any: {topics}")
    sizes = F.size("marks"), F.when(F.col("outcome") == "unknown", F.size("marks"))
    [row] = lines.where("op = 'schedule'").agg(*map(F.sum, sizes)).collect()
    asked, unknown = (int(value or 0) for value in row)
    deliveries, fired = summary["delivered"] + summary["redelivered"], summary["fired_answers"]
    late, unjudged = summary["waits"]["unjudged"], fired["unjudged"]
    for what, part, whole, why in (
        ("", unknown, asked, "schedules, whose outcome no client knows"),
        ("whether ", late, deliveries, "deliveries were late without a reason"),
        ("whether ", unjudged, fired["answers"], "answers ALREADY_FIRED came after the firing"),
    ):
        if part > UNKNOWN_SHARE_MAX * whole:
            found.append(f"{what}{part:,} of {whole:,} {why}")
    lasts = {life["node"]: life["last"] for life in summary["nodes"]}
    said = [_reporting_nodes(tables["states"], name, lasts) for name in ("scheduled", "digest")]
    for what, shown, why in (
        ("counts", said[0], "states.jsonl has none of the last fifth of the log"),
        ("digests", said[1], "states.jsonl has none of the last fifth of the log"),
        ("entries", {*lasts}, "no log has one"),
        ("files", {each["node"] for each in summary["files"]}, "no manifest is in the folder"),
    ):
        if missing := sorted({*nodes} - shown):
            found.append(f"{what} of {', '.join(missing)}: {why}")
    for what, column, needed in _RECORDED:
        if clients := sorted(_names(lines, "client", f"{needed} AND {column} IS NULL")):
            found.append(f"{what}: lines of {_few(clients)} have no {column}")
    if clocks.error_ms is None:
        found.append("times on clients' clocks: run.json has no clock_error_ms")
    return found


def _reporting_nodes(states: DataFrame, column: str, lasts: Mapping[str, int]) -> set[str]:
    """Return the nodes that reported a value near the end of their log. `lasts`: its last entry."""
    rows = states.where(f"{column} IS NOT NULL").groupBy("node").agg(F.max("index")).collect()
    return {node for node, index in rows if index >= 0.8 * lasts.get(node, 0)}


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_MAX]) + (", …" if len(names) > SHOWN_MAX else "")


def _names(rows: DataFrame, column: str, condition: str) -> set[str]:
    return {row[column] for row in rows.where(condition).select(column).distinct().collect()}
