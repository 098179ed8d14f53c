"""Spark's format "timers": schedules tables and streams of timers, and reads fired messages.

Read `timers_format.py` first. Applications import it. It needs PySpark 4.2 or newer, and depends on
the client only.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Register the format "timers" in a session.

    Spark finds the format by itself if the distribution is installed for its Python. Then this
    call changes nothing.
    """
    from pyspark.errors import AnalysisException

    from timerspark.timers_format import TimersFormat

    try:
        spark.dataSource.register(TimersFormat)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
