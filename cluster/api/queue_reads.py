"""Reads of a topic's queue by offsets, for readers that keep their own position.

Nothing is leased and nothing is written. The pages are found again after each wait for the disk,
because the queue may have dropped some meanwhile.
"""

import asyncio
from typing import Final

import numpy as np

from cluster.api import message_peek, wire_rows
from cluster.state.host import Host
from timer.leader.leader import Leader
from timer.model.timer_errors import InvalidRequestError
from timer.ready.queue import Queue
from timer.ready.topic import Topic
from timerclient.proto import timer_pb2 as pb

MESSAGES_MAX: Final = 16_384
"""Messages of one read, at most. The leader's event loop encodes them in some 10 ms."""
BYTES_MAX: Final = 4 << 20
"""Bytes of payloads, keys and headers of one read, at most."""
BYTES_DEFAULT: Final = 3 << 20
"""Of a read without `max_bytes`. gRPC clients accept 4 MiB by default, and the columns of numbers
of MESSAGES_MAX messages have nearly one more."""


async def read_messages(
    host: Host, request: pb.ReadMessagesRequest, salt: int
) -> pb.ReadMessagesResponse:
    """Return messages of the leader's applied state.

    Raises:
        InvalidRequestError: a field is beyond its limit.
        NotFoundError: the topic does not exist.
        NotLeaderError: this node does not lead.
        NotReadyError: the leader has no lease, or the messages were not read from disk in time.
    """
    _check(request)
    until_s = asyncio.get_running_loop().time() + message_peek.WAIT_S
    while True:
        leader = host.require_lease()
        topic = wire_rows.topic_of(leader.machine.topic_by_name, request.topic)
        start, stop = _range(topic.queue, request)
        if start >= stop:
            return _answer(leader, topic, start)
        offsets = np.arange(start, stop, dtype=np.uint64)
        if there := topic.queue.count_in_memory(offsets):
            bytes_max = request.max_bytes or BYTES_DEFAULT
            offsets = offsets[: topic.queue.count_fitting(offsets[:there], bytes_max)]
            answer = _answer(leader, topic, int(offsets[-1]) + 1)
            answer.messages.queue_offsets.extend(offsets.tolist())
            wire_rows.put_messages(answer.messages, topic.queue, offsets, salt)
            if request.omit_payloads:
                answer.messages.ClearField("payloads")
            return answer
        await message_peek.wait_for_disk(host, until_s)


def _check(request: pb.ReadMessagesRequest) -> None:
    for field, most in (("max_messages", MESSAGES_MAX), ("max_bytes", BYTES_MAX)):
        if (value := getattr(request, field)) > most:
            raise InvalidRequestError(field, value, f"must be at most {most}")
    if 0 < request.end_offset < request.from_offset:
        limit = f"must be 0 or at least from_offset = {request.from_offset}"
        raise InvalidRequestError("end_offset", request.end_offset, limit)


def _range(queue: Queue, request: pb.ReadMessagesRequest) -> tuple[int, int]:
    start = max(request.from_offset, queue.begin)
    stop = min(request.end_offset or queue.end, queue.end)
    return start, min(stop, start + (request.max_messages or MESSAGES_MAX))


def _answer(leader: Leader, topic: Topic, following: int) -> pb.ReadMessagesResponse:
    answer = pb.ReadMessagesResponse(
        next_offset=following,
        begin_offset=topic.queue.begin,
        end_offset=topic.queue.end,
        topic_id=topic.topic_id,
    )
    answer.messages.epoch = leader.epoch
    return answer
