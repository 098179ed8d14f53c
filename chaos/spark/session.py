"""The audit's Spark session: on this machine, quiet, or the one that spark-submit gives."""

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

from chaos.spark import timerlog, timerstate

JAVA_MIN: Final = 17
"""Of Spark 4."""


def spark_session(
    name: str,
    *,
    quick: bool = False,
    master: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> SparkSession:
    """Return a quiet session that knows nodes' files; on this machine unless told.

    Under spark-submit the master and every setting that it was given are left as they are.
    `quick` is for runs of a few million timers: what starts and compiles soonest wins there.
    `settings` are Spark's own, and win over those made here.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).config(map=_ALWAYS)
    if not _submitted():
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.master(master or "local[*]").config(map=_local(quick=quick))
    session = builder.config(map={**settings}).getOrCreate()
    timerlog.register(session)
    timerstate.register(session)
    return session


def why_no_java() -> str:
    """Return why Spark finds no Java that it can use; empty: it does, or spark-submit has one."""
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
    """Whether spark-submit started this program, and so has a JVM and a master for it."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


_ALWAYS: Final[dict[str, bool | float | int | str | None]] = {
    "spark.sql.execution.arrow.maxBytesPerBatch": "64m",  # a line may have thousands of rows
    "spark.sql.parquet.columnarReaderBatchSize": 256,  # so a batch of 4,096 of them is gigabytes
    "spark.sql.session.timeZone": "UTC",
}


def _local(*, quick: bool) -> dict[str, bool | float | int | str | None]:
    scratch = Path(tempfile.mkdtemp(prefix="audit-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "log4j2.properties").write_text(_LOGGING)
    options = f"-Dlog4j2.configurationFile={(scratch / 'log4j2.properties').as_uri()}"
    if quick:
        # the first compiler alone would have 48 MB for all that it compiles: a long session ends
        options += " -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
        options += " -XX:+UseSerialGC -Xmn512m"
    else:
        # the verdict's conditions are one method of more than 8,000 bytes: it would be interpreted
        options += " -XX:-DontCompileHugeMethods"
    return {
        **(_SMALL if quick else {}),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": options,
        "spark.driver.memory": "1g" if quick else "3g",
        "spark.local.dir": os.environ.get("SPARK_LOCAL_DIRS", str(scratch)),
        "spark.log.level": "ERROR",
        # Python's traceback names the line; to note it at each call is half of all calls to the JVM
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.dataFrameQueryContext.enabled": "false",
        "spark.python.authenticate.socketTimeout": "120s",  # a worker starts late on a busy machine
        "spark.sql.constraintPropagation.enabled": str(not quick).lower(),  # a tenth of planning
        "spark.sql.autoBroadcastJoinThreshold": "10m" if quick else "64m",
        "spark.sql.adaptive.enabled": str(not quick).lower(),  # plans anew after every exchange
        "spark.sql.shuffle.partitions": "2" if quick else "128",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


_SMALL: Final = {
    "spark.broadcast.blockSize": "64k",  # 4m by default, of which each broadcast clears one
    "spark.buffer.pageSize": "256k",  # megabytes by default, of which each hashed table clears one
    "spark.broadcast.compress": "false",
}
"""For tables of which most have some rows."""

_LOGGING: Final = """rootLogger.level = error
rootLogger.appenderRef.a.ref = a
appender.a.type = Console
appender.a.name = a
appender.a.target = SYSTEM_ERR
appender.a.layout.type = PatternLayout
appender.a.layout.pattern = %p %c{1}: %m%n
"""
