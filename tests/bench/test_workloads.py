"""What measures make of deliveries: lateness, firings of the successor, confirmed acks."""

import asyncio
from collections.abc import Sequence

import pytest

from bench import delivery, failover
from bench.delivery import MeasuredLateness, Tally
from bench.failover import Firings
from bench.feed import PAYLOAD_SIZE, Feed
from timerclient import Batch, TimerError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import ACK, Acking


def make_batch(
    *, due_ms: Sequence[int], fired_at_ms: Sequence[int], epoch: int = 1
) -> tuple[Batch, list[Acking[int]]]:
    """Return a batch, and where its ack will be found."""
    ackings: list[Acking[int]] = []

    def send_ack(batch: Batch, offsets: Sequence[int], acking: object, word: object) -> None:
        assert word is ACK
        assert isinstance(acking, Acking)
        ackings.append(acking)

    columns = pb.Deliveries(
        epoch=epoch, queue_offsets=range(len(due_ms)), due_ms=due_ms, fired_at_ms=fired_at_ms
    )
    return Batch(columns, send_ack), ackings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wall clock, in milliseconds: its one element."""
    now_ms = [0]
    for module in (delivery, failover):
        monkeypatch.setattr(module.time, "time_ns", lambda: now_ms[0] * 1_000_000)
        monkeypatch.setattr(module.time, "time", lambda: now_ms[0] / 1000)
    return now_ms


def test_lateness_is_received_and_fired_minus_due(clock: list[int]) -> None:
    late = MeasuredLateness()
    clock[0] = 1_010
    late.note(make_batch(due_ms=[1_000, 1_004], fired_at_ms=[1_002, 1_003])[0])
    clock[0] = 1_100
    late.note(make_batch(due_ms=[1_098], fired_at_ms=[1_098])[0])
    series = late.series("x")
    assert series["p50_x"] == [6.0]  # of 10, 6, 2
    assert series["max_x"] == [10.0]
    assert series["fired_max_x"] == [2.0]
    assert series["early_x"] == [1.0]


async def test_the_first_firing_is_the_successors_not_a_redelivery(clock: list[int]) -> None:
    firings = Firings()
    first = asyncio.create_task(firings.first(above_epoch=4, after_ms=500))

    def note(received_ms: int, epoch: int, fired_at_ms: list[int]) -> None:
        clock[0] = received_ms
        due_ms = [0] * len(fired_at_ms)
        firings.note(make_batch(due_ms=due_ms, fired_at_ms=fired_at_ms, epoch=epoch)[0])

    note(505, 4, [501])  # the old leader's own
    note(990, 5, [450, 500])  # delivered again by the successor
    for _ in range(3):
        await asyncio.sleep(0)
    assert not first.done()
    note(995, 5, [499, 980])
    note(999, 5, [985])
    assert await first == (980, 995.0)


async def test_acks_count_when_they_are_confirmed(clock: list[int]) -> None:
    tally = Tally()
    batch, ackings = make_batch(due_ms=[0, 0, 0], fired_at_ms=[0, 0, 0])
    for at_ms, count in ((1_000, 3), (2_000, 2), (3_000, 1)):
        tally.ack(batch)
        clock[0] = at_ms
        ackings.pop().set_result(count)
    tally.ack(batch)
    assert tally.count == 6
    await tally.reach(6)
    assert tally.between(1.0, 3.0) == 5
    assert tally.last_at == 3.0


async def test_an_ack_that_fails_ends_the_wait() -> None:
    tally = Tally()
    batch, ackings = make_batch(due_ms=[0], fired_at_ms=[0])
    tally.ack(batch)
    waiting = asyncio.create_task(tally.reach(1))
    await asyncio.sleep(0)
    ackings[0].set_exception(TimerError("refused"))
    with pytest.raises(TimerError, match="refused"):
        await waiting


def test_the_feed_is_the_same_each_time_and_due_where_asked() -> None:
    feed, again = Feed(seed=3, size=50), Feed(seed=3, size=50)
    first = feed.payloads()
    assert first == again.payloads() != feed.payloads()
    assert {*map(len, first)} == {PAYLOAD_SIZE}
    assert len({*first}) == 50
    due_ms = feed.spread(1_000, 10)
    assert len(due_ms) == 50
    assert {*due_ms} <= {*range(1_000, 1_010)}
