"""The format "timers": its columns, and the readers and writers of its four uses.

    df.write.format("timers").mode("append").save("orders")         timer_writers.py
    df.writeStream.format("timers").option("topic", "orders")       timer_writers.py
    spark.read.format("timers").load("orders")                      message_readers.py
    spark.readStream.format("timers").load("orders")                message_readers.py

docs/spark.md describes the options. The modules that connect are loaded by tasks only.
"""

import uuid
from typing import Any, Final

import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from timerspark.format_options import MESSAGE_COLUMNS, FormatOptions

PYSPARK_MIN: Final = (4, 2)
"""The first version with limits of a stream's reads, and writers of Arrow batches."""


class TimersFormat(DataSource):
    """The format "timers".

    Raises:
        ImportError: PySpark is older than PYSPARK_MIN.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        major, minor, *_ = pyspark.__version__.split(".")
        if (int(major), int(minor)) < PYSPARK_MIN:
            oldest = ".".join(map(str, PYSPARK_MIN))
            text = f"the format timers needs PySpark {oldest} or newer, not {pyspark.__version__}"
            raise ImportError(text)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(…)`."""
        return "timers"

    def schema(self) -> str:
        """Return the columns that a reader has: all, or those of the option `columns`."""
        columns = FormatOptions.of(self.options).columns
        return ", ".join(f"{name} {MESSAGE_COLUMNS[name]}" for name in columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a range of queue offsets."""
        from timerspark.message_readers import MessageReader

        return MessageReader(schema, FormatOptions.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader of a stream of messages."""
        from timerspark.message_readers import MessageStreamReader

        return MessageStreamReader(schema, FormatOptions.of(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Return the writer of one table."""
        from timerspark.timer_writers import TableWriter

        options = FormatOptions.of(self.options)
        return TableWriter(schema, options, options.job_id or uuid.uuid4().hex, overwrite=overwrite)

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        """Return the writer of a streaming query."""
        from timerspark.timer_writers import MicroBatchWriter

        return MicroBatchWriter(schema, FormatOptions.of(self.options), overwrite=overwrite)
