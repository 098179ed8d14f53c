"""Stories over a host's log: portions, gaps, and a topic's lag behind a long backlog."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cluster.api.timer_queries import OVERDUE_ROWS_MAX, QUERIES_WAITING_MAX, TimerQueries
from cluster.api.timer_stories import Stories
from cluster.observe import topic_view
from cluster.observe.topic_view import LATE_AGE_MS_MAX, TopicView
from tests.cluster.hosted import Hosted
from tests.timer.machines import START_MS, catch_up, part_of
from timer.entries.entry_frame import Entry
from timer.entries.payloads import FIRE_ROWS_MAX, Op
from timer.model import timer_id
from timer.model.timer_errors import (
    CorruptFileError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
)
from timer.model.units import LogIndex, MonoMs, Now, TopicId, UnixMs
from timer.pending.read_view import ReadView
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name

SALT = 5
DUE = START_MS + 50
What = pb.StoryEvent.What


class Kept:
    """A replica's log from `first_index` on, read one entry at a time."""

    def __init__(self, host: Hosted) -> None:
        self._host = host
        self.first_index = LogIndex(1)
        self.reads = 0

    def stored_entries(self, first: LogIndex, last: LogIndex, size_max: int) -> Sequence[Entry]:
        assert size_max > 0
        self.reads += 1
        assert self.reads < 10_000
        entries = self._host.log.entries[first - 1 : last][:1]
        return entries if first >= self.first_index else []


class Teller:
    """A hosted leader and its stories."""

    def __init__(self) -> None:
        self.host: Any = Hosted()
        self.log = self.host.log
        self.kept = Kept(self.host)
        fields = {
            name: getattr(self.host, name) for name in ("require_lease", "now", "on_read_error")
        }
        host: Any = SimpleNamespace(**fields, log=self.kept)
        self.queries = TimerQueries(host, salt=SALT, key_bytes_max=100)
        self.stories = Stories(host, self.queries, salt=SALT)

    def applied(self) -> int:
        catch_up(self.host.engine, self.log)
        return self.log.entries[-1].index

    async def tell(self, due_ms: int, seq: int) -> tuple[list[tuple[str, int]], pb.StoryEnd]:
        raw = timer_id.encode(np.array([due_ms]), np.array([seq], np.uint64), SALT)
        events, end = [], pb.StoryEnd()
        async for answer in self.stories.tell(pb.TellStoryRequest(timer_id=raw)):
            assert not end.log_last, "nothing comes after the end"
            events += [
                (short_name(What.DESCRIPTOR, event.what), event.index) for event in answer.events
            ]
            if answer.HasField("end"):
                end = answer.end
        return events, end


async def test_story_names_what_the_log_and_the_machine_do_not_tell_any_more() -> None:
    it = Teller()
    log = it.log
    log.create_group(1, "g")
    log.schedule(part_of([(1, DUE, b"x"), (1, DUE + 999_000, b"y"), (1, DUE + 999_000, b"z")]))
    scheduled = it.applied()
    log.checkpoint()
    log.fire(DUE)
    fired = it.applied()
    log.op(Op.RESERVE, 1, 1, [9])
    log.cancel([(DUE + 999_000, 3)])
    cancelled = it.applied()
    log.op(Op.ACK, 1, 1, [0])
    acked = it.applied()
    whole = [("SCHEDULED", scheduled), ("FIRED", fired), ("ACKED", acked)]
    events, end = await it.tell(DUE, 1)
    assert (events, list(end.gaps), end.state) == (whole, [], pb.TIMER_STATE_FIRED)
    assert (end.log_first, end.log_last) == (1, acked)
    events, end = await it.tell(DUE + 999_000, 3)
    assert events == [("SCHEDULED", scheduled), ("CANCELLED", cancelled)]
    assert end.state == pb.TIMER_STATE_CANCELLED

    it.kept.first_index = LogIndex(fired)
    it.kept.reads = 0
    events, end = await it.tell(DUE, 1)
    assert events == whole[1:]
    [gap] = end.gaps
    assert f"log begins later, with entry {fired}" in gap
    events, end = await it.tell(DUE + 999_000, 2)
    assert (events, end.state, len(end.gaps)) == ([], pb.TIMER_STATE_PENDING, 1)

    it.kept.first_index = LogIndex(acked)
    events, end = await it.tell(DUE, 1)
    assert events == whole[2:]
    assert f"entry {fired}, to queue offset 0" in end.gaps[1]

    it.kept.first_index = LogIndex(1)
    it.host.engine.machine.trace.firings.clear()
    events, end = await it.tell(DUE, 1)
    assert events == whole[:2]
    assert "queue offset" in end.gaps[0]


async def test_timer_that_was_never_issued_has_no_story() -> None:
    it = Teller()
    it.applied()
    with pytest.raises(NotFoundError):
        await it.tell(DUE, 1)
    with pytest.raises(InvalidRequestError, match="timer_ids"):
        async for _ in it.stories.tell(pb.TellStoryRequest(timer_id=b"short")):
            pass


async def test_story_from_a_log_without_entries_fails() -> None:
    it = Teller()
    it.log.schedule(part_of([(1, DUE, b"")]))
    it.applied()
    it.kept.first_index = LogIndex(1_000)
    with pytest.raises(NotReadyError, match="no entries"):
        await it.tell(DUE, 1)


async def test_topic_behind_a_long_backlog_has_its_lag_when_it_is_asked_for() -> None:
    it = Teller()
    it.log.topic("u")
    many = part_of([(1, START_MS - 9, b"")] * OVERDUE_ROWS_MAX)
    it.log.schedule(many)
    it.log.schedule(part_of([(1, START_MS - 9, b""), (2, START_MS - 5, b"")]))
    it.applied()
    assert await it.queries.late_topics() == {1: 9, 2: 5}
    assert await it.queries.lag_ms(2) == 5  # type: ignore[arg-type]
    assert await it.queries.lag_ms(1) == 9  # type: ignore[arg-type]
    for _ in range(OVERDUE_ROWS_MAX // FIRE_ROWS_MAX + 1):
        it.log.fire(START_MS)
    it.applied()
    assert await it.queries.lag_ms(2) == 0  # type: ignore[arg-type]


async def test_lags_of_topics_are_found_in_a_thread_which_reports_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, threads, damages = Teller(), list[str](), list[Exception]()
    it.log.topic("u")
    it.log.schedule(part_of([(1, START_MS - 9, b""), (2, START_MS - 5, b""), (2, DUE, b"")]))
    it.applied()
    found = ReadView.first_overdue

    def noted(cut: ReadView, until_ms: int, rows_max: int) -> dict[int, int]:
        threads.append(threading.current_thread().name)
        return found(cut, until_ms, rows_max)

    def damaged(*_: object) -> dict[int, int]:
        raise CorruptFileError(Path("run"), 0, "checksum mismatch")

    monkeypatch.setattr(ReadView, "first_overdue", noted)
    assert await it.queries.late_topics() == {1: 9, 2: 5}
    assert threading.current_thread().name not in threads
    monkeypatch.setattr(ReadView, "first_overdue", damaged)
    monkeypatch.setattr(it.queries._host, "on_read_error", damages.append)
    with pytest.raises(CorruptFileError):
        await it.queries.late_topics()
    await asyncio.sleep(0)
    assert len(damages) == 1


async def test_topics_are_listed_with_the_last_lags_while_new_ones_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it, none = Teller(), cast("Any", None)
    it.log.schedule(part_of([(1, START_MS - 9, b"")]))
    it.applied()
    view = TopicView(it.host, none)
    view.late_topics = it.queries.late_topics

    async def lag() -> int:
        return int((await view.topics("", 0)).topics[0].lag_ms)

    with monkeypatch.context() as patched:
        patched.setattr(it.queries.places, "total", QUERIES_WAITING_MAX)
        assert await lag() == 0, "none was measured yet"
    assert await lag() == 9
    with monkeypatch.context() as patched:
        patched.setattr(it.queries.places, "total", QUERIES_WAITING_MAX)
        assert await lag() == 9

    def no_lease() -> None:
        raise NotReadyError("no lease")

    with monkeypatch.context() as patched:
        patched.setattr(it.queries._host, "require_lease", no_lease)
        assert await lag() == 9
        aged = Now(MonoMs(LATE_AGE_MS_MAX + 1), UnixMs(START_MS))
        patched.setattr(it.host, "now", lambda: aged)
        assert await lag() == 0
        patched.undo()
        assert await lag() == 9

    waiting, end = list[None](), asyncio.Event()

    async def slow() -> dict[TopicId, int]:
        waiting.append(None)
        await end.wait()
        return {TopicId(1): 7}

    monkeypatch.setattr(topic_view, "LATE_WAIT_S", 0.01)
    view.late_topics = slow
    assert [*await asyncio.gather(lag(), lag())] == [9, 9]
    assert len(waiting) == 1, "they share one query"
    end.set()
    assert await lag() == 7
    view.on_lead()
    assert view.last_late() == {}, "the lags of an earlier time as leader are not shown"
