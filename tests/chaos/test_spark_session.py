"""The Spark session of the audit and of these tests."""

import pytest
from py4j.java_gateway import JVMView
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

from tests.calls import calls_of

pytestmark = pytest.mark.spark


def test_columns_are_made_without_a_search_for_classes(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = calls_of(monkeypatch, JVMView, "__getattr__")
    made = F.greatest(F.col("id"), F.lit(7)).alias("most")
    assert [row["most"] for row in spark.range(1).select(made).collect()] == [7]
    found = {name for _, name in asked}
    assert {"PythonUtils", "functions", "org.apache.spark.sql.functions"}.isdisjoint(found)
