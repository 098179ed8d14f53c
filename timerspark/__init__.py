"""Spark's formats: "timers" schedules timers and reads fired ones; "timerlog" reads nodes' logs.

Read `timers_format.py` first, then `timerlog_format.py`. Applications import it. It needs PySpark
4.2 or newer. All but `log/` depends on the client only.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Register the formats "timers" and "timerlog" in a session.

    Spark finds them by itself if the distribution is installed for its Python. Then this call
    changes nothing.
    """
    from pyspark.errors import AnalysisException

    from timerspark.timerlog_format import TimerLogFormat
    from timerspark.timers_format import TimersFormat

    for source in (TimersFormat, TimerLogFormat):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
