"""The name by which Spark finds the format "timers": it loads modules named `pyspark_…` by itself.

Everything else is in timerspark/.
"""

from timerspark.timers_format import TimersFormat as DefaultSource

__all__ = ["DefaultSource"]
