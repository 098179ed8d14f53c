"""The format "timerlog": a node's timer log as a table.

    spark.read.format("timerlog").load(folder)      all events, in real columns: docs/spark.md
    ….option("view", "entries")                     frames of all nodes' logs, for the audit

View `entries` has one row per frame: node, life, index, epoch, kind, time_ms, crc32, rows. A log
that began again has several lives, 0, 1, …: two lives may hold the same frame. An entry that can't
be decoded has 0 rows: the comparison of the logs, or the replay, finds it.

One partition per segment file. Segments without an entry in the range of the options are not
opened. Filters that Spark would push down are not used (docs/adr/0036-filters-as-options.md).
"""

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from timerspark.format_options import columns_of
from timerspark.log.log_options import (
    ENTRIES,
    EVENT_COLUMNS,
    OPTIONS,
    VIEWS,
)


class TimerLogFormat(DataSource):
    """The format "timerlog"."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(…)`."""
        return "timerlog"

    def schema(self) -> str:
        """Return the columns of the view.

        Raises:
            ValueError: an option is unknown, or has a wrong value.
        """
        if unknown := {name.lower() for name in self.options} - OPTIONS:
            text = (
                f"{', '.join(sorted(unknown))}: no option; one of {', '.join(sorted(OPTIONS))} is"
            )
            raise ValueError(text)
        if self._view() == "entries":
            return ENTRIES
        names = columns_of(self.options.get("columns"), EVENT_COLUMNS)
        return ", ".join(f"`{name}` {EVENT_COLUMNS[name]}" for name in names)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the view.

        Raises:
            ValueError: an option has a wrong value, or no path is given.
            FileNotFoundError, LogGap: see `plan`.
        """
        from timerspark.log.log_readers import EntryFrames, LogEvents

        if not self.options.get("path"):
            raise ValueError('path: must be named, as in load("/var/lib/timer")')
        if self._view() == "entries":
            return EntryFrames(schema.names, self.options)
        return LogEvents(schema, self.options)

    def _view(self) -> str:
        view = self.options.get("view", "events")
        if view not in VIEWS:
            raise ValueError(f"view = {view!r}: must be one of {sorted(VIEWS)}")
        return view
