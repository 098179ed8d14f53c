"""Peek: messages of a topic or a group, shown without a delivery.

    offsets of unacked messages --in memory?--> rows, states --> answer
                     ^               | no: pages are read from disk
                     +---------------+

Nothing is leased and nothing is written. The offsets are found again after each wait, because the
queue may have dropped some meanwhile.
"""

import asyncio
from typing import Final

import numpy as np

from cluster.api import wire_rows
from cluster.state.host import Host
from timer.leader.leader import Leader
from timer.model.columns import U64
from timer.model.timer_errors import InvalidRequestError, NotFoundError, NotReadyError
from timer.model.units import UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timerclient.proto import timer_pb2 as pb

PEEK_MAX: Final = 100
PEEK_DEFAULT: Final = 10
BYTES_MAX: Final = 1 << 20
SPAN: Final = 65_536
"""Offsets of which one step finds the unacked ones."""
SPANS_MAX: Final = 16
WAIT_S: Final = 5.0
POLL_S: Final = 0.05


async def peek(host: Host, request: pb.PeekRequest, salt: int) -> pb.PeekResponse:
    """Return messages of the leader's applied state.

    Raises:
        InvalidRequestError: max_messages is beyond its limit.
        NotFoundError: the topic or the group does not exist.
        NotLeaderError: this node does not lead.
        NotReadyError: the leader has no lease, or the messages were not read from disk in time.
    """
    if request.max_messages > PEEK_MAX:
        limit = f"must be at most {PEEK_MAX}"
        raise InvalidRequestError("max_messages", request.max_messages, limit)
    until_s = asyncio.get_running_loop().time() + WAIT_S
    while True:
        leader = host.require_lease()
        topic, group = _find(leader, request)
        offsets, following = _offsets(topic, group, request)
        if not len(offsets):
            return pb.PeekResponse(
                messages=pb.Deliveries(epoch=leader.epoch), next_offset=following
            )
        if there := topic.queue.count_in_memory(offsets):
            fitting = topic.queue.count_fitting(offsets[:there], BYTES_MAX)
            if fitting < len(offsets):
                offsets, following = offsets[:fitting], int(offsets[fitting])
            answer = pb.PeekResponse(next_offset=following)
            answer.messages.epoch = leader.epoch
            answer.messages.queue_offsets.extend(offsets.tolist())
            wire_rows.put_messages(answer.messages, topic.queue, offsets, salt)
            _put_states(answer, leader, group, offsets, host.now().clock_ms)
            return answer
        await wait_for_disk(host, until_s)


async def wait_for_disk(host: Host, until_s: float) -> None:
    """Return when requested pages may have been read from disk.

    Raises:
        NotReadyError: the loop's time is past `until_s`.
    """
    if asyncio.get_running_loop().time() >= until_s:
        raise NotReadyError("the messages were not read from disk in time")
    host.kick()
    await asyncio.sleep(POLL_S)


def _find(leader: Leader, request: pb.PeekRequest) -> tuple[Topic, Group | None]:
    topic = wire_rows.topic_of(leader.machine.topic_by_name, request.topic)
    if not request.group:
        return topic, None
    group = topic.groups.get(request.group)
    if group is None:
        raise NotFoundError("group", request.group)
    return topic, group


def _offsets(topic: Topic, group: Group | None, request: pb.PeekRequest) -> tuple[U64, int]:
    """Return the offsets to show, and the first one of a further call; 0: none follows."""
    queue, count = topic.queue, request.max_messages or PEEK_DEFAULT
    at = max(request.from_offset, queue.begin, group.cursor if group else 0)
    found: list[U64] = [np.zeros(0, np.uint64)]
    left, spans = count, SPANS_MAX
    while at < queue.end and left and spans:
        span = np.arange(at, min(queue.end, at + SPAN), dtype=np.uint64)
        some = (span if group is None else span[~group.is_acked(span)])[:left]
        left, spans = left - len(some), spans - 1
        found.append(some)
        at = int(some[-1]) + 1 if not left else int(span[-1]) + 1
    return np.concatenate(found), at if at < queue.end else 0


def _put_states(
    answer: pb.PeekResponse, leader: Leader, group: Group | None, offsets: U64, clock_ms: UnixMs
) -> None:
    if group is None:
        answer.states.extend([pb.PEEK_STATE_UNSPECIFIED] * len(offsets))
        return
    answer.messages.group_id = group.group_id
    if (failures := group.failures(offsets)).any():
        answer.messages.failures.extend(failures.tolist())
    states = leader.groups.states(group, offsets)
    waits = states.free | states.waiting
    shown = np.where(states.leased, pb.PEEK_STATE_LEASED, pb.PEEK_STATE_ENDING)
    shown[waits] = pb.PEEK_STATE_READY
    shown[waits & (group.not_before_ms(offsets) > clock_ms)] = pb.PEEK_STATE_DELAYED
    answer.states.extend(shown.tolist())
