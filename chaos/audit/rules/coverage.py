"""Gaps in the evidence of a run: with any of them, no verdict is OK.

Each line names a part that was not looked at, and the missing evidence. Without these lines, a
folder that lacks a witness would pass for one in which the witness found nothing.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from chaos.audit.rules.queries import Tables, ask
from chaos.audit.rules.verdict import Clocks

UNKNOWN_SHARE_MAX: Final = 0.2
"""Greatest share of schedules without a known outcome, on which P1 is silent. Also the greatest
share of late deliveries with an excuse, as the excuse may explain a part of the wait only, and of
answers ALREADY_FIRED that neither the log nor clocks can judge."""
SHOWN_MAX: Final = 5


def not_looked_at(
    tables: Tables, summary: Mapping[str, Any], clocks: Clocks, lost: Collection[str]
) -> list[str]:
    """Return a line for each part of the promises that the folder cannot show.

    `tables`: lines, groups. `lost`: nodes that lost their disks.
    """
    found, lines = [], tables["lines"]
    rows = ask("clients", "unread", tables).collect()
    if unread := [f"{row['group_name']} of {row['name']}" for row in rows]:
        named = ", ".join(unread[:SHOWN_MAX]) + (", …" if len(unread) > SHOWN_MAX else "")
        found.append(f"deliveries of {len(unread)} groups, which no history opened: {named}")
    sizes = F.size("marks"), F.when(F.col("outcome") == "unknown", F.size("marks"))
    [row] = lines.where("op = 'schedule'").agg(*map(F.sum, sizes)).collect()
    asked, unknown = (int(value or 0) for value in row)
    if unknown > UNKNOWN_SHARE_MAX * asked:
        found.append(f"{unknown:,} of {asked:,} schedules, whose outcome no client knows")
    unjudged = summary["waits"]["unjudged"]
    deliveries = summary["delivered"] + summary["redelivered"]
    if unjudged > UNKNOWN_SHARE_MAX * deliveries:
        found.append(
            f"whether {unjudged:,} of {deliveries:,} deliveries were late without a reason"
        )
    fired = summary["fired_answers"]
    if fired["unjudged"] > UNKNOWN_SHARE_MAX * fired["answers"]:
        found.append(
            f"whether {fired['unjudged']:,} of {fired['answers']:,} answers ALREADY_FIRED came"
            " after the firing"
        )
    if not summary["conservation"]["said"]["counts"]:
        found.append("nodes' own counts: states.jsonl has none")
    if not summary["conservation"]["said"]["digests"]:
        found.append("whether nodes hold the same state: states.jsonl has no digests")
    silent = {life["node"] for life in summary["nodes"]} - {
        each["node"] for each in summary["files"]
    }
    if missing := sorted(silent - {*lost}):
        found.append(f"files of {', '.join(missing)}: no manifest is in the folder")
    if not lines.where("payload_crcs IS NOT NULL").head(1):
        found.append("payloads beyond their marks: no history has payload_crcs")
    if clocks.error_ms is None:
        found.append("times on clients' clocks: run.json has no clock_error_ms")
    return found
