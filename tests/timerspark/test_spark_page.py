"""docs/spark.md with Spark: its examples run in their order, and a repeated micro-batch."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deploy.local import LocalCluster
from tests.cluster.running import until
from tests.timerfake.doc_examples import examples
from timerclient import TimerClient

pytestmark = [pytest.mark.spark, pytest.mark.long]
CLUSTER = '"timers://10.0.0.1:7401,10.0.0.2:7401,10.0.0.3:7401"'


def test_examples_of_the_page_run(
    spark: SparkSession,
    one: LocalCluster,
    cluster: str,
    client: TimerClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {"spark": spark, "checkpoint": str(tmp_path / "checkpoint")}
    folder = repr(str(one.directory))
    write, lateness, reconcile, stream, log = (
        text.replace(CLUSTER, repr(cluster)).replace('"/var/lib/timer"', folder)
        for text in examples("docs/spark.md")
    )
    for _ in range(2):  # the job has a name, so it may be repeated
        exec(write, names)
    until(lambda: client.describe_topic("reminders").queue_end == 100)
    assert client.describe_topic("reminders").scheduled == 100
    exec(lateness, names)
    [row] = names["report"].collect()
    assert (row.fired, row.least_ms >= 0) == (100, True)
    capsys.readouterr()
    exec(reconcile, names)
    assert capsys.readouterr().out == "0 0 0\n"
    exec(stream, names)
    assert client.describe_topic("second-reminders").scheduled == 100
    commits = tmp_path / "checkpoint/commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for path in (commits / str(last), commits / f".{last}.crc"):
        path.unlink(missing_ok=True)  # as if the driver had died before it noted its last batch
    exec(stream, names)
    one.stop()
    one.start()
    one.wait_for_leader()
    [node] = (each.parent for each in one.directory.glob("*/log"))
    for text in (log, log.replace(folder, repr(node.as_uri()))):  # as from an object store
        exec(text, names)
        assert names["scheduled"].count() == 100  # the repeated rows are in the log, without ids
        assert names["history"].where("fired_at >= requested").count() == 100
    client.schedule("reminders", b"one more", delay=0)
    until(lambda: client.describe_topic("reminders").queue_end == 101)
    exec(stream, names)
    assert client.describe_topic("second-reminders").scheduled == 101
