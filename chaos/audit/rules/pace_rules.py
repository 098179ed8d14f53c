"""Priorities: messages that too many deliveries passed, by the leaders' times of delivery.

A message behind k earlier ready ones is among the next (k // 8 + 1) * 72 deliveries of its group
(docs/adr/0087-ordering-keys-and-priorities.md). k is at most the distance of its queue offset from
the lowest one that was delivered later than it fired. One round of 72 more is allowed, because the
leader looks at a message some time after it fired. First attempts are judged, by the deliveries of
their epoch that a history has.
"""

from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

ROUND: Final = 72
OLDEST: Final = 8
"""Messages of a round that are the oldest ones."""
_MS_BITS: Final = 44
"""Of a place in the order of deliveries: epoch, then time."""


def starved_messages(deliveries: DataFrame) -> DataFrame:
    """Return the messages that too many deliveries passed: topic, group, offset, passed, allowed.

    `deliveries`: from the query `shared_deliveries`.
    """
    schema = "topic STRING, `group` STRING, offset BIGINT, passed BIGINT, allowed BIGINT"
    return deliveries.groupBy("topic", "group").applyInArrow(_passed_counts, schema)


def _passed_counts(given: pa.Table) -> pa.Table:
    names = ("epoch", "handed_out_ms", "fired_at_ms", "offset", "attempt")
    epoch, at_ms, fired_ms, offset, attempt = (given[name].to_numpy() for name in names)
    epoch = epoch << _MS_BITS
    order = np.argsort(epoch | at_ms, kind="stable")
    place = (epoch | at_ms)[order]
    begin = np.searchsorted(place, epoch | fired_ms, "right")
    passed = np.searchsorted(place, epoch | at_ms, "left") - begin
    lowest = np.minimum.accumulate(offset[order][::-1])[::-1]
    earlier = np.maximum(offset - lowest[np.minimum(begin, len(offset) - 1)], 0)
    allowed = (earlier // OLDEST + 2) * ROUND
    found = given.select(["topic", "group", "offset"]).append_column("passed", pa.array(passed))
    found = found.append_column("allowed", pa.array(allowed))
    return found.filter(pa.array((attempt == 1) & (passed > allowed)))
