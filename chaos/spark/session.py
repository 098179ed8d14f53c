"""The audit's Spark session: a quiet one on this machine, or the one that spark-submit started."""

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pyspark.sql import SparkSession

import timerspark

JAVA_MIN: Final = 17
"""The oldest Java that Spark 4 runs on."""


def spark_session(
    name: str,
    *,
    quick: bool = False,
    master: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> SparkSession:
    """Return a quiet session that can read the format "timerlog".

    Under spark-submit its master and all settings that it received stay as they are.

    Args:
        name: the application's name.
        quick: settings for runs of at most a few million timers: start and compilation are short,
            long computations are slower.
        master: Spark's master URL; None: this machine, all cores.
        settings: Spark settings; they replace the ones made here.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).config(map=_ALWAYS)
    if not _submitted():
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.master(master or "local[*]").config(map=_local(quick=quick))
    session = builder.config(map={**settings}).getOrCreate()
    for each in _NAMED:
        setattr(session._jvm, each, getattr(session._jvm, each))  # noqa: SLF001
    timerspark.register(session)
    return session


def why_no_java() -> str:
    """Return the reason why Spark has no Java that it can use; empty: it has one.

    Under spark-submit it always has one.
    """
    if _submitted():
        return ""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    where = f"in JAVA_HOME = {home}" if home else "on the PATH"
    if java is None:
        return f"no java {where}: Spark needs Java {JAVA_MIN} or newer"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < JAVA_MIN:
        first = (said.splitlines() or ["silent"])[0]
        return f"java {where} is {first}: Spark needs Java {JAVA_MIN} or newer"
    return ""


def _submitted() -> bool:
    """Whether spark-submit started this program, and with it a JVM and a master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


_NAMED: Final = ("PythonUtils", "functions", "org.apache.spark.sql.functions")
"""Classes that pyspark requests by name for each column, and that Java then searches for again."""
_ALWAYS: Final[dict[str, bool | float | int | str | None]] = {
    # A line of a history may hold thousands of rows: Spark's 4,096 lines a batch are gigabytes.
    "spark.sql.execution.arrow.maxBytesPerBatch": "64m",
    "spark.sql.parquet.columnarReaderBatchSize": 256,
    "spark.sql.session.timeZone": "UTC",
}


def _local(*, quick: bool) -> dict[str, bool | float | int | str | None]:
    scratch = Path(tempfile.mkdtemp(prefix="audit-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "log4j2.properties").write_text(_LOGGING)
    options = f"-Dlog4j2.configurationFile={(scratch / 'log4j2.properties').as_uri()}"
    if quick:
        # With the first compiler alone the code cache is 48 MB: a long session fills it and ends.
        options += " -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
        options += " -XX:+UseSerialGC -Xmn512m"
    return {
        **(_SMALL if quick else {}),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": options,
        "spark.driver.memory": "1g" if quick else "3g",
        "spark.local.dir": os.environ.get("SPARK_LOCAL_DIRS", str(scratch)),
        "spark.log.level": "ERROR",
        # Recording the Python line of each call doubles the calls to the JVM. Python's own
        # traceback names the line already.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.dataFrameQueryContext.enabled": "false",
        # A Python worker starts slowly on a busy machine.
        "spark.python.authenticate.socketTimeout": "120s",
        # Constraint propagation takes a tenth of the planning time.
        "spark.sql.constraintPropagation.enabled": str(not quick).lower(),
        "spark.sql.autoBroadcastJoinThreshold": "10m" if quick else "64m",
        # The verdict's conditions make a method of more than 8,000 bytes, which Java only
        # interprets. Above this limit Spark makes several methods of it.
        "spark.sql.codegen.hugeMethodLimit": "8000",
        # Adaptive execution plans again after every exchange.
        "spark.sql.adaptive.enabled": str(not quick).lower(),
        "spark.sql.shuffle.partitions": "2" if quick else "128",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


_SMALL: Final = {
    # Each broadcast zeroes a block, 4 MB by default.
    "spark.broadcast.blockSize": "64k",
    # Each hashed table zeroes a page, megabytes by default.
    "spark.buffer.pageSize": "256k",
    "spark.broadcast.compress": "false",
}
"""Settings for tables that mostly have a few rows."""

_LOGGING: Final = """rootLogger.level = error
rootLogger.appenderRef.a.ref = a
appender.a.type = Console
appender.a.name = a
appender.a.target = SYSTEM_ERR
appender.a.layout.type = PatternLayout
appender.a.layout.pattern = %p %c{1}: %m%n
"""
