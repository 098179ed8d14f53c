"""Many rows, scheduled and read back once each, through a kill of the leader."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import DoubleType, StringType, StructType

from deploy.local import LocalCluster
from tests.cluster.running import until
from tests.timerspark.conftest import started
from timerclient import TimerClient
from timerspark import timer_writers
from timerspark.timers_format import TimersFormat

LONG_ROWS = 1_000_000
SHORT_ROWS = 20_000


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalCluster]:
    with started(tmp_path / "three", 3) as cluster:
        yield cluster


def through_a_kill(
    three: LocalCluster,
    topic: str,
    rows: int,
    write: Callable[[], Any],
    kills: threading.Event | None = None,
) -> float:
    """Write, with the leader killed after a quarter of the rows; return the seconds.

    `kills`: set just before the kill.
    """
    killed: list[str] = []

    def kill() -> None:
        with TimerClient(",".join(three.endpoints), timeout=60) as client:
            until(lambda: client.describe_topic(topic).scheduled >= rows // 4)
        killed.append(three.wait_for_leader())
        if kills is not None:
            kills.set()
        three.kill(killed[0])

    with TimerClient(",".join(three.endpoints)) as client:
        client.create_topic(topic)
    killer = threading.Thread(target=kill)
    killer.start()
    began_s = time.monotonic()
    try:
        write()
    finally:
        took_s, met = time.monotonic() - began_s, bool(killed)
        killer.join()
    assert met, "all rows were written before the kill"
    three.restart(killed[0])
    with TimerClient(",".join(three.endpoints)) as client:
        until(lambda: client.describe_topic(topic).queue_end >= rows, timeout_s=300)
        assert client.describe_topic(topic).scheduled == rows
    return took_s


def test_rows_are_there_once_after_a_kill_of_the_leader(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_writers, "_task", type("Task", (), {"partitionId": lambda _: 0}))
    kills = threading.Event()
    payloads = [b"%d" % n for n in range(SHORT_ROWS)]

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, SHORT_ROWS, 500):
            if start == SHORT_ROWS // 2:
                kills.wait(60)  # so that requests are on their way at the kill
            some = payloads[start : start + 500]
            yield pa.RecordBatch.from_arrays(
                [pa.array(some), pa.array([0.0] * len(some))], names=["payload", "delay"]
            )

    options = {"cluster": ",".join(three.endpoints), "path": "t"}
    of = TimersFormat(CaseInsensitiveDict(options))
    schema = StructType().add("payload", StringType()).add("delay", DoubleType())
    writer: Any = of.writer(schema, False)
    through_a_kill(three, "t", SHORT_ROWS, lambda: writer.write(batches()), kills)
    reader: Any = TimersFormat(CaseInsensitiveDict({**options, "columns": "payload"})).reader(
        StructType().add("payload", "binary")
    )
    found = [
        payload
        for part in reader.partitions()
        for batch in reader.read(part)
        for payload in batch["payload"].to_pylist()
    ]
    assert sorted(found) == sorted(payloads)


@pytest.mark.spark
@pytest.mark.long  # a million rows: half a minute of both cores
def test_million_rows_are_there_once_after_a_kill_of_the_leader(
    spark: SparkSession, three: LocalCluster
) -> None:
    cluster = ",".join(three.endpoints)
    rows = spark.range(0, LONG_ROWS, 1, 4).selectExpr(
        "to_json(struct(id)) AS payload", "INTERVAL 1 SECOND AS delay"
    )

    def write() -> None:
        rows.write.format("timers").mode("append").option("cluster", cluster).save("t")

    took_s = through_a_kill(three, "t", LONG_ROWS, write)
    began_s = time.monotonic()
    [found] = (
        spark.read.format("timers")
        .option("cluster", cluster)
        .option("columns", "id, payload")
        .load("t")
        .selectExpr("id AS timer", "from_json(CAST(payload AS STRING), 'id BIGINT').id AS number")
        .selectExpr(
            *("count(*) AS rows", "count(DISTINCT timer) AS timers"),
            *("count(DISTINCT number) AS numbers", "max(number) AS last"),
        )
        .collect()
    )
    read_s = time.monotonic() - began_s
    assert found.asDict() == {
        "rows": LONG_ROWS,
        "timers": LONG_ROWS,
        "numbers": LONG_ROWS,
        "last": LONG_ROWS - 1,
    }
    rates = (f"{LONG_ROWS / took_s:,.0f} rows/s" for took_s in (took_s, read_s))
    print("written with {}, read and compared with {}".format(*rates))
