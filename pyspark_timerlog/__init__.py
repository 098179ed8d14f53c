"""The name by which Spark finds the format "timerlog"; see `pyspark_timers/`."""

from timerspark.timerlog_format import TimerLogFormat as DefaultSource

__all__ = ["DefaultSource"]
