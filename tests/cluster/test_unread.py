"""Answers that a leader owes a consumer: few, if it does not read; all, before its stream ends."""

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.api import consume_service, settlements, wire_rows
from cluster.api.consume_service import (
    ANSWER_OFFSETS,
    UNREAD_ACKS_MAX,
    ConsumeService,
    _Outgoing,
    _Stream,
)
from cluster.api.lease_ids import LeaseIds
from cluster.rpc.outboxes import Outboxes
from timer.entries.payloads import KEY_SHARED, SHARED
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.timer_errors import GroupDeletedError, InvalidRequestError, NotLeaderError
from timer.model.units import Epoch, LeaseId
from timerclient.proto import timer_pb2 as pb

IDS = LeaseIds(b"secret", Epoch(1))
ASKED = 3 * UNREAD_ACKS_MAX // ANSWER_OFFSETS


def stream_of(
    consumer: Any = None, kick: Callable[[], None] = lambda: None, **calls: Callable[..., None]
) -> _Stream:
    """Return the stream of a consumer. `calls`: those that the leader's groups answer."""
    host: Any = SimpleNamespace(kick=kick, now=lambda: None)
    groups = SimpleNamespace(**calls)
    leader: Any = SimpleNamespace(groups=groups)
    nothing: Any = None
    stream = _Stream(host, leader, nothing, nothing, 0, IDS, Outboxes(1 << 30), "")
    stream._consumer = consumer
    return stream


def answered(*arguments: Any) -> Iterator[None]:
    done: Callable[[object], None] = arguments[-1]
    done(np.zeros(0, np.int64))
    yield from ()


@pytest.mark.parametrize(
    "request_",
    [pb.ConsumeRequest(ack=pb.AckRequest(request_no=1)), pb.ConsumeRequest(leaving=True)],
    ids=["acks of nothing", "leaving"],
)
async def test_answers_that_nobody_reads_hold_up_the_requests(
    request_: pb.ConsumeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consume_service, "settle_all", answered)
    monkeypatch.setattr(_Stream, "_report_presence", lambda _: None)
    read = 0

    async def requests() -> AsyncIterator[pb.ConsumeRequest]:
        nonlocal read
        for _ in range(ASKED):
            read += 1
            yield request_

    stream = stream_of(ConsumerStream("c", 1_000, lambda _: None))
    reading = asyncio.ensure_future(stream.read(requests()))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not reading.done()
    held_up_at = read
    assert held_up_at <= UNREAD_ACKS_MAX / ANSWER_OFFSETS + 2
    answers = 0
    while await stream.next() is not None:
        answers += 1
    await reading
    assert (read, answers) == (ASKED, ASKED)


async def test_stream_of_a_deleted_group_ends_behind_the_answers_to_its_acks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Callable[[object], None]] = []

    def waits(*given: Any) -> Iterator[None]:
        waiting.append(given[-1])
        yield from ()

    monkeypatch.setattr(consume_service, "settle_all", waits)

    async def requests() -> AsyncIterator[pb.ConsumeRequest]:
        for request_no in (1, 2):
            yield pb.ConsumeRequest(ack=pb.AckRequest(request_no=request_no))
        await asyncio.Event().wait()

    stream = stream_of()
    reading = asyncio.ensure_future(stream.read(requests()))
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(waiting) == 2
    gone = GroupDeletedError("orders", "g")
    stream.end(gone)
    for done in waiting:
        done(gone)
    for request_no in (1, 2):
        answer = await stream.next()
        assert answer is not None
        assert answer.acked.request_no == request_no
        assert answer.acked.error.reason == pb.REASON_NOT_FOUND
    assert await stream.next() is None
    assert stream.ended is gone
    reading.cancel()


async def test_stream_of_a_deposed_leader_waits_for_no_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consume_service, "settle_all", lambda *_: ())

    stream = stream_of()
    await stream._settle(pb.AckRequest(request_no=1))
    stream.end(NotLeaderError("n2:7401"))
    assert await stream.next() is None


async def test_request_with_many_leases_lets_the_loop_do_other_work_between_its_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settlements, "PORTION_LEASES", 2)
    settled, kicks, credit_ends = list[int](), list[int](), list[int]()

    def settle(_: object, part: pb.NackRequest, __: object, done: Any) -> None:
        settled.append(part.lease_id)
        if part.lease_id == 3:
            raise GroupDeletedError("orders", "g")  # between two portions
        done(np.array([1]))

    monkeypatch.setattr(settlements, "settle", settle)
    monkeypatch.setattr(ConsumerStream, "end_credit", lambda _: credit_ends.append(len(settled)))

    stream = stream_of(
        ConsumerStream("c", 1_000, lambda _: None, credit=9),
        kick=lambda: kicks.append(len(settled)),
    )
    leases = [struct.pack("<QQQ", 1, lease_id, 0) for lease_id in range(1, 6)]
    request = pb.NackRequest(leases=leases, request_no=7, ends_credit=True)
    settling = asyncio.ensure_future(stream._settle(request))
    turns = set[int]()
    while not settling.done():
        await asyncio.sleep(0)
        turns.add(len(settled))
    assert turns == {2, 4, 5}
    assert kicks == credit_ends == [2, 4, 5]
    answer = await stream.next()
    assert answer is not None
    assert (answer.acked.request_no, answer.acked.error.reason) == (7, pb.REASON_NOT_FOUND)
    assert not stream._outbox


async def test_stream_that_ends_takes_back_the_deliveries_that_it_did_not_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire_rows, "put_delivery", lambda *_: None)
    took_back: list[LeaseId] = []

    def leave(_: object, __: object, unsent: Iterable[LeaseId]) -> None:
        took_back.extend(unsent)

    def delivery(lease_id: int) -> Any:
        return SimpleNamespace(lease=SimpleNamespace(lease_id=LeaseId(lease_id), offsets=[0]))

    stream = stream_of(ConsumerStream("c", 1_000, lambda _: None), leave=leave)
    stream._begin_leaving()
    for lease_id in (1, 2, 3):
        stream._deliver(delivery(lease_id))
    for _ in range(2):
        assert await stream.next() is not None
    stream.close()
    assert took_back == [2, 3]


async def test_deliveries_whose_lease_ends_before_sending_are_dropped_until_the_consumer_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        wire_rows,
        "put_delivery",
        lambda out, d, *_: setattr(out, "payloads", bytes(d.number)),
    )
    looks: list[int] = []

    def delivery(number: int) -> Any:
        lease = SimpleNamespace(lease_id=LeaseId(number), offsets=[0] * number)
        return SimpleNamespace(lease=lease, number=number)

    consumer = ConsumerStream("c", 1_000, lambda _: None)
    stream = stream_of(consumer, credit=lambda _, __, messages: looks.append(messages))
    for number in (1, 2):
        stream._deliver(delivery(number))
    stream.note_window(pb.ConsumeRequest(window_bytes=6))
    assert await stream.next() is not None
    stream._begin_leaving()  # the credit of lease 2 is over
    for number in (3, 4):
        stream._deliver(delivery(number))
    assert stream._withdraw(LeaseId(1)) == [], "it was sent"
    assert stream._withdraw(LeaseId(2)) == [2, 3, 4]
    assert (consumer.credit, consumer.paused, looks) == (3 + 4, True, [])
    answer = await stream.next()
    assert answer is not None
    assert answer.leaving
    assert (consumer.paused, looks, stream._outboxes.total) == (False, [0], 0)
    assert consumer.bytes_left == 6, "nothing is on its way"
    consumer.bytes_left = 0  # the leader counts more bytes: it has no message ready for the rest
    stream._deliver(delivery(5))
    assert (consumer.bytes_left, looks) == (1, [0, 0])
    stream.note_window(pb.ConsumeRequest(window_bytes=4))
    with pytest.raises(InvalidRequestError, match="received = 2: must be at most 1, the number of"):
        stream.note_window(pb.ConsumeRequest(received=2))  # delivery 5 waits in the outbox
    assert await stream.next() is not None
    for received, room, asked in ((1, -1, 2), (2, 4, 3)):  # of deliveries 1 and 5
        stream.note_window(pb.ConsumeRequest(received=received))
        assert (consumer.bytes_left, len(looks)) == (room, asked)


async def test_consumer_that_reads_again_gets_messages_again_though_its_outbox_is_empty() -> None:
    consumer = ConsumerStream("c", 1_000, lambda _: None, paused=True)
    stream = stream_of(consumer, credit=lambda *_: None)
    reading = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not consumer.paused
    reading.cancel()


async def test_stream_gets_nothing_behind_a_response_that_is_not_written_while_all_hold_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        wire_rows, "put_delivery", lambda out, *_: setattr(out, "payloads", bytes(100))
    )
    consumer = ConsumerStream("c", 1_000, lambda _: None)
    stream = stream_of(consumer, credit=lambda *_: None)
    stream._outboxes.add("other", "other", 1 << 30)
    delivery: Any = SimpleNamespace(lease=SimpleNamespace(lease_id=LeaseId(1), offsets=[0]))
    stream._deliver(delivery)
    assert await stream.next() is not None
    paused = [consumer.paused]  # gRPC holds the response
    reading = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert [*paused, consumer.paused] == [True, False]
    reading.cancel()


async def test_service_keeps_no_response_while_grpc_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    service = ConsumeService(nothing, nothing, Outboxes(1 << 30), salt=0)
    stream = stream_of()
    stream._enqueue(_Outgoing(pb.ConsumeResponse(leaving=True)))

    async def opened(*_: object) -> _Stream:
        return stream

    async def requests() -> AsyncIterator[pb.ConsumeRequest]:
        await asyncio.Event().wait()
        yield pb.ConsumeRequest()

    monkeypatch.setattr(service, "_open", opened)
    context: Any = SimpleNamespace(peer=lambda: "peer")
    answers: Any = service.Consume(requests(), context)
    response = await anext(answers)
    assert sys.getrefcount(response) == 2, "this variable and the argument"
    await answers.aclose()


async def test_recalls_count_as_unread_until_the_client_has_read_them() -> None:
    stream = stream_of(ConsumerStream("c", 1_000, lambda _: None))
    stream._recall(np.array([4, 7], np.uint64))
    stream._recall(None)
    assert stream._unread_acks == 2 * ANSWER_OFFSETS + 2
    responses = [await stream.next() for _ in range(2)]
    assert [[*each.recalled.offsets] for each in responses if each is not None] == [[4, 7], []]
    assert not stream._unread_acks


@pytest.mark.parametrize("recalls", [False, True])
@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_only_clients_that_ask_get_recalls_and_all_learn_whether_the_group_is_ordered(
    kind: str, recalls: bool
) -> None:
    joined: list[ConsumerStream] = []
    stream = stream_of(join=lambda _, consumer: joined.append(consumer))
    leader: Any = stream._leader
    leader.epoch = 1
    group: Any = SimpleNamespace(topic=1, group_id=2, settings=SimpleNamespace(type=kind))
    stream._group, stream.takes_recalls = group, recalls
    stream.join("c", 1_000)
    response = await stream.next()
    assert response is not None
    keyed = kind == KEY_SHARED
    assert (response.opened.ordered, response.opened.by_key) == (keyed, keyed)
    assert (joined[0].recall == stream._recall) == recalls
