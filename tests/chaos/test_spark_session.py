"""The Spark session of the audit and of these tests."""

import pytest
from py4j.java_gateway import JVMView
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own idiom

pytestmark = pytest.mark.spark


def test_columns_are_made_without_a_search_for_classes(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, get = [], JVMView.__getattr__

    def noted(view: JVMView, name: str) -> object:
        asked.append(name)
        return get(view, name)

    monkeypatch.setattr(JVMView, "__getattr__", noted)
    made = F.greatest(F.col("id"), F.lit(7)).alias("most")
    assert [row["most"] for row in spark.range(1).select(made).collect()] == [7]
    assert {"PythonUtils", "functions", "org.apache.spark.sql.functions"}.isdisjoint(asked)
