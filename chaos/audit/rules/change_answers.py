"""Answers to changes: cancels and reschedules by id, key and filter (changes.sql).

A request or an answer with an id concerns one timer: `tried` and `moves`, by seq. An answer to a
key or a filter gives only a number of timers. The log shows the timers, and `flags` has for each
whether a client requested its change. An answer is untrue if it counts more or fewer timers than
the log has. So is NOT_FOUND for a key while a timer with the key was pending.
"""

from typing import NamedTuple

from pyspark.sql import DataFrame

from chaos.audit.rules.client_tables import Tables
from chaos.audit.rules.queries import ask


class ChangeTables(NamedTuple):
    """The three tables of changes: queries of changes.sql."""

    tried: DataFrame
    """A row per timer that was named by id: the numbers of its answers."""
    moves: DataFrame
    """A row per answer RESCHEDULED, with its request."""
    flags: DataFrame
    """A row per timer with a key, and per cancelled or rescheduled timer."""


def changes(tables: Tables, clock_error_ms: int | None = None) -> ChangeTables:
    """Return the three tables.

    Args:
        tables: `lines`; `asks`, from `client_tables.asked`; `log`, the fates; `fired_answers`, from
            the query.
        clock_error_ms: the clients' clocks and the cluster's differ by at most this; None: unknown.
    """
    tried, moves = (ask("changes", name, tables) for name in ("tried", "moves"))
    return ChangeTables(tried, moves, ask("changes", "flags", tables, error_ms=clock_error_ms))
