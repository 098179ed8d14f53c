"""Acks, nacks and extensions: from a consumer's request to the leader's verdicts, and the answer.

request with offsets --------------------------> one lease --> verdicts --> answer
request with leases --> a part for each lease --> ...      --> gathered --> answer

Each lease takes some 0.1 ms, so that a request with many is settled in portions. Between them the
event loop does other work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from cluster.api.group_admin import GroupDesk
from cluster.api.lease_ids import LeaseIds
from cluster.api.row_messages import lease_in
from cluster.rpc import grpc_errors
from timer.leader.groups.group_batch import OnResult
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.leader import Leader
from timer.model.columns import I64
from timer.model.timer_errors import EngineError, InvalidRequestError
from timer.model.units import Epoch, LeaseId, Now, QueueOffset
from timer.ready.group import Group
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import DETAIL_BYTES_MAX
from timerclient.rows.rows import PAUSE_MS_MAX
from timerclient.values.same_fields import as_type

ACK_OFFSETS_MAX: Final = 65_536
"""Offsets in one ack, at most."""
NACK_OFFSETS_MAX: Final = 16_384
"""Offsets in one nack or extension, at most."""
LEASES_MAX: Final = 1000
"""Leases of rows in one request, at most. Each may be another lease of the leader."""
PORTION_LEASES: Final = 64
"""Leases of the leader that are settled in one step of the event loop, some milliseconds."""

Settlement: TypeAlias = pb.AckRequest | pb.NackRequest | pb.ExtendRequest
"""A consumer's decision on delivered messages."""

_REFUSALS: Final = [
    *(
        pb.ACK_RESULT_ALREADY_ACKED,
        pb.ACK_RESULT_LEASE_LOST,
        pb.ACK_RESULT_NOT_DELIVERED,
        pb.ACK_RESULT_EXPIRED,
    ),
    pb.ACK_RESULT_DEAD_LETTERED,
]
_RESULTS: Final = {
    kind: np.array([pb.ACK_RESULT_UNSPECIFIED, accepted, *_REFUSALS])
    for kind, accepted in (
        (pb.AckRequest, pb.ACK_RESULT_ACKED),
        (pb.NackRequest, pb.ACK_RESULT_NACKED),
        (pb.ExtendRequest, pb.ACK_RESULT_EXTENDED),
    )
}
"""By request: index, a verdict of timer.leader.groups.group_leases; value, AckResult."""


@dataclass(frozen=True, slots=True)
class LeaseAsker:
    """The source of a request about leases: a stream of Consume, or a unary request."""

    leader: Leader
    group: Group
    ids: LeaseIds
    consumer: ConsumerStream | None
    """The consumer of the stream. None: a unary request; its lease then must be a Receive's."""
    desk: GroupDesk

    def lease_of(self, request: Settlement) -> LeaseId:
        """Return the number of the lease that a request names; 0: none, or another consumer's."""
        number = self.ids.number_of(request.lease_id)
        holder = self.leader.groups.holder(self.group, Epoch(request.epoch), number)
        if holder is not None and (None if holder.single_lease else holder) is not self.consumer:
            return LeaseId(0)
        return number


def settle_all(asker: LeaseAsker, request: Settlement, now: Now, done: OnResult) -> Iterator[None]:
    """Pass a consumer's request to the leader; `done` gets a verdict per offset or lease.

    Yields between two portions: the caller kicks the leader and gives the event loop a turn. The
    leader checks the leadership, the topic, the group and the lease again for each lease.

    Raises:
        InvalidRequestError: the number of messages, a lease, a time or a text is out of range.
        EngineError: the leader refused the request. After the first lease `done` gets the error.
    """
    if not request.leases:
        settle(asker, request, now, done)
        return
    _check_most("leases", len(request.leases), LEASES_MAX)
    verdicts = GatheredVerdicts(len(request.leases), done)
    for at, (positions, part) in enumerate(leases_in(request)):
        if at and at % PORTION_LEASES == 0:
            yield
        try:
            settle(asker, part, now, verdicts.of(positions))
        except EngineError as refused:
            if at == 0:
                raise
            verdicts.of(positions)(refused)


def _check_most(field: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidRequestError(field, count, f"1 to {most} in one request")


def settle(asker: LeaseAsker, request: Settlement, now: Now, done: OnResult) -> None:
    """Pass a request about one lease to the leader; `done` gets a verdict per offset.

    Raises:
        InvalidRequestError: the number of offsets, a time or a text is out of range.
        EngineError: the leader refused the request.
    """
    leader, group, desk = asker.leader, asker.group, asker.desk
    lease_id = asker.lease_of(request)
    most = ACK_OFFSETS_MAX if isinstance(request, pb.AckRequest) else NACK_OFFSETS_MAX
    _check_most("offsets", len(request.offsets), most)
    offsets = np.array(request.offsets, np.uint64)
    held = Epoch(request.epoch), lease_id, offsets
    match request:
        case pb.AckRequest() if request.cumulative:
            if len(offsets) > 1:
                raise InvalidRequestError("offsets", len(offsets), "one, in a cumulative ack")
            last = QueueOffset(int(offsets[0]))
            leader.groups.ack_up_to(group, held[0], held[1], last, done)
        case pb.AckRequest():
            leader.groups.ack(group, *held, done)
        case pb.NackRequest() if request.unseen:
            done(leader.groups.release(group, *held))
        case pb.NackRequest():
            delay_ms = request.delay_ms if request.HasField("delay_ms") else None
            if (delay_ms or 0) > PAUSE_MS_MAX:
                raise InvalidRequestError("delay_ms", delay_ms, f"must be at most {PAUSE_MS_MAX}")
            if (size := len(request.detail.encode())) > DETAIL_BYTES_MAX:
                limit = f"must have at most {DETAIL_BYTES_MAX} bytes"
                raise InvalidRequestError("detail", f"{size} bytes", limit)
            leader.groups.nack(group, *held, delay_ms, now, done, request.detail)
        case _:
            desk.check_lease(request.lease_ms)
            lease_ms = request.lease_ms or group.settings.lease_ms
            done(leader.groups.extend(group, *held, lease_ms, now))


def answer_to(request: Settlement, result: object) -> pb.AckResponse:
    """Return the answer to a request: the verdicts, or the error instead of them."""
    answer = pb.AckResponse(request_no=request.request_no)
    if isinstance(result, EngineError):
        answer.error.CopyFrom(grpc_errors.to_wire(result))
    else:
        assert isinstance(result, np.ndarray), result
        answer.results.extend(_RESULTS[type(request)][result].tolist())
    return answer


def leases_in(request: Settlement) -> Iterator[tuple[list[int], Settlement]]:
    """Yield a request for each lease of the leader that a request with `leases` names.

    Before each: the positions of its results in those of `request`.

    Raises:
        InvalidRequestError: a lease is malformed, or the request names messages in two ways.
    """
    for name in ("lease_id", "epoch", "offsets", "cumulative"):
        if getattr(request, name, None):
            raise InvalidRequestError(name, getattr(request, name), "must be absent with leases")
    parts: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for at, lease in enumerate(request.leases):
        epoch, lease_id, offset = lease_in(lease)
        positions, offsets = parts.setdefault((epoch, lease_id), ([], []))
        positions.append(at)
        offsets.append(offset)
    rest = as_type(type(request), request)
    rest.ClearField("leases")
    for (epoch, lease_id), (positions, offsets) in parts.items():
        part = as_type(type(request), rest)
        part.epoch, part.lease_id = epoch, lease_id
        part.offsets.extend(offsets)
        yield positions, part


class GatheredVerdicts:
    """Gathers the verdicts of the parts of one request, and passes them on when all are there."""

    def __init__(self, rows: int, done: Callable[[object], None]) -> None:
        """`rows`: results of the whole request."""
        self._verdicts: I64 = np.zeros(rows, np.int64)
        self._n_missing, self._done = rows, done
        self._error: EngineError | None = None

    def of(self, positions: list[int]) -> Callable[[object], None]:
        """Return the callback of one part. It takes the part's verdicts, or an EngineError."""

        def done(result: object) -> None:
            if isinstance(result, EngineError):
                self._error = self._error or result
            else:
                assert isinstance(result, np.ndarray), result
                self._verdicts[positions] = result
            self._n_missing -= len(positions)
            if not self._n_missing:
                self._done(self._verdicts if self._error is None else self._error)

        return done
