"""The number of timers of all topics in a run up to a position, from the run's indexes.

    batches   | b0 | b1 | b2 | b3 | b4 | ...      rows of each
    stripes   |    s0   |    s1   | ...           timers and tombstones of each, by topic
                              ^ position: s0 is complete, b2 too, b3 is read

A tombstone cancels a timer of another run that is due at the same time, so it counts -1. Complete
stripes are exact. In the stripe of the position, tombstones and rows of deleted topics are assumed
to be spread evenly. A stripe without such rows is exact, too. One head is read at most.
"""

import numpy as np

from timer.model.firing_order import Position, rank
from timer.pending.memory.deleted_topics import DeletedTopics
from timer.pending.runs.run import BATCH, TOPIC_ROWS, BatchColumns, Run


class RunTotals:
    """Counts the timers of existing topics in a run, less its tombstones. See the module."""

    def __init__(self, run: Run, deleted_topics: DeletedTopics) -> None:
        self._run = run
        self.exact = True
        """Whether all counts so far are exact."""
        table = np.frombuffer(run.meta.topics, TOPIC_ROWS)
        count = -(-len(run) // run.meta.stripe)
        stripe = table["stripe"].astype(np.intp)
        signed = table["timers"].astype(np.int64) - table["tombstones"]
        signed[deleted_topics.of(table["topic"])] = 0
        self._live = np.bincount(stripe, signed, count).astype(np.int64)
        self._before = np.concatenate([[0], np.cumsum(self._live)])
        rows = np.frombuffer(run.meta.batches, BATCH)["rows"].astype(np.int64)
        self._rows_before = np.concatenate([[0], np.cumsum(rows)])
        self._heads: dict[int, BatchColumns] = {}

    def upto(self, position: Position) -> int:
        """Return the number at or before `position`.

        Raises:
            CorruptFileError: the head of a batch doesn't verify.
            FileNotFoundError: the run was removed.
        """
        batch, size = self._run.batch_after(position), self._run.meta.stripe
        if batch == len(self._run):
            return int(self._before[-1])
        stripe = batch // size
        first, last = stripe * size, min((stripe + 1) * size, len(self._run))
        rows = int(self._rows_before[batch] - self._rows_before[first])
        rows += self._in_batch(batch, position)
        all_rows = int(self._rows_before[last] - self._rows_before[first])
        live = int(self._live[stripe])
        if live != all_rows and rows:
            self.exact = False
            rows = round(rows * live / all_rows)
        return int(self._before[stripe]) + rows

    def _in_batch(self, batch: int, position: Position) -> int:
        """Return the rows of a batch at or before `position`; its last row lies after it."""
        if self._run.first_due(batch) > position.due_ms:
            return 0
        if (head := self._heads.get(batch)) is None:
            head = self._heads[batch] = self._run.head(batch)
        return rank(head.due_ms, head.seq, position)
