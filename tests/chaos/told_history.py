"""A history that tests write line by line."""

from collections.abc import Sequence
from typing import Any

from chaos.history.history import History, OpOutcome


class ToldHistory(History):
    """A history with a method for each kind of line that many tests write."""

    def schedule(
        self,
        marks: Sequence[int],
        *,
        ids: Sequence[str | None] | None,
        due_ms: Sequence[int] | None,
        outcome: OpOutcome,
        **more: Any,
    ) -> None:
        """Record one request to schedule timers."""
        assert (outcome is OpOutcome.OK) == (ids is not None), (outcome, ids)
        more |= {"marks": [*marks], "ids": ids and [*ids], "due_ms": due_ms and [*due_ms]}
        self.change("schedule", outcome=outcome, **more)

    def ack(
        self,
        topic: str,
        group: str,
        offsets: Sequence[int],
        *,
        results: Sequence[str] | None,
        **more: Any,
    ) -> None:
        """Record one acknowledgement; `results` are names of the API's AckResult."""
        more |= {"offsets": [*offsets], "results": results and [*results]}
        self.change("ack", topic=topic, group=group, **more)
