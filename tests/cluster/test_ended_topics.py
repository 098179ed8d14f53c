"""The topic of an ended timer: from the notes, else from the log; little is read for a wrong id."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.api.ended_topics import topic_of_ended
from tests.timer.machines import ids_of, part_of
from tests.timer.story_logs import DUE, Told
from timer.entries.entry_frame import Entry
from timer.model.timer_id import TimerKey
from timer.model.units import LogIndex, Seq, UnixMs


class KeptLog:
    """The log of a node from `first_index` on; counts the entries that are read."""

    def __init__(self, entries: list[Entry], first: int = 1) -> None:
        self.first_index, self._entries, self.read = LogIndex(first), entries, 0

    def stored_entries(self, first: LogIndex, last: LogIndex, size: int) -> Iterator[Entry]:
        del size
        for entry in self._entries[first - 1 : last]:
            self.read += 1
            yield entry


async def in_thread(work: Callable[[], Any]) -> Any:
    return work()


@pytest.mark.parametrize(
    ("due_ms", "dropped", "topic"), [(DUE, 1, 1), (DUE + 1, 1, 1), (DUE, 200, None)]
)
async def test_log_is_read_up_to_the_place_where_the_timer_would_have_begun(
    due_ms: int, dropped: int, topic: int | None
) -> None:
    it = Told()
    it.do(it.log.schedule(part_of([(1, DUE, b"x")])))
    for _ in range(400):
        it.do(it.log.schedule(part_of([(2, DUE + 5_000, b"noise")])), it.log.checkpoint())
    it.do(it.log.fire(DUE))
    it.machine.trace.firings.clear()  # as after very many firings
    log: Any = KeptLog(it.log.entries, dropped)
    timer = ids_of([TimerKey(UnixMs(due_ms), Seq(1))])
    assert await topic_of_ended(it.machine, log, timer, in_thread) == topic
    assert log.read < 10
