"""Requests about messages that a consumer holds: acks, nacks and extensions, and their answers."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import ACK, AckAction, Acking, Batch
from timerclient.values.errors import ConnectionLost, LeaseLost, NotDelivered, TimerError
from timerclient.values.results import AckResult


class AnswerReceiver(Protocol):
    """The receiver of an answer."""

    def on_answer(self, offsets: Sequence[int], results: Sequence[int]) -> None:
        """Take the results, one per offset."""

    def on_failure(self, error: TimerError) -> None:
        """Take the reason why there are none."""


class QueuedAck(NamedTuple):
    """An ack, nack or extension that waits to be sent."""

    batch: Batch
    offsets: Sequence[int]
    receiver: AnswerReceiver
    action: AckAction


class AwaitedAck:
    """Settles the application's future with the answer."""

    __slots__ = ("_acking", "_action")

    def __init__(self, acking: "Acking[Any]", action: AckAction) -> None:
        self._acking = acking
        self._action = action

    def on_answer(self, offsets: Sequence[int], results: Sequence[int]) -> None:
        """Settle the future."""
        acking, action = self._acking, self._action
        if len(offsets) == 1 and not acking.counts and results[0] not in _REFUSED:
            acking.set_result(action.results(results[0]))
            return
        lost = lost_offsets(offsets, results)
        unknown = [
            o for o, r in zip(offsets, results, strict=True) if r == pb.ACK_RESULT_NOT_DELIVERED
        ]
        if lost:
            acking.set_exception(LeaseLost.of(lost, len(offsets)))
        elif unknown:
            acking.set_exception(NotDelivered(f"queue_offset = {unknown[0]}: was never delivered"))
        else:
            done = 0 if action.kind == "ack" else results.count(pb.ACK_RESULT_ALREADY_ACKED)
            done += results.count(pb.ACK_RESULT_EXPIRED) + results.count(
                pb.ACK_RESULT_DEAD_LETTERED
            )
            acking.set_result(len(offsets) - done)

    def on_failure(self, error: TimerError) -> None:
        """Let the future raise the error."""
        self._acking.set_exception(error)


class SingleAcks:
    """Settles the application's futures of acks of single messages of one batch."""

    __slots__ = ("_ackings", "offsets")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self._ackings: list[Acking[AckResult]] = []

    def add(self, offset: int, acking: Acking[AckResult]) -> None:
        """Add one more ack, which is not sent yet."""
        self.offsets.append(offset)
        self._ackings.append(acking)

    def on_answer(self, offsets: Sequence[int], results: Sequence[int]) -> None:
        """Settle the futures."""
        if results.count(pb.ACK_RESULT_ACKED) == len(self._ackings):
            Acking.settle_acked(self._ackings)
            return
        for acking, offset, result in zip(self._ackings, offsets, results, strict=True):
            AwaitedAck(acking, ACK).on_answer((offset,), (result,))

    def on_failure(self, error: TimerError) -> None:
        """Let the futures raise the error."""
        for acking in self._ackings:
            acking.set_exception(error)


class AnswerCallback:
    """Passes the answer to the consumer itself."""

    __slots__ = ("_on_answer", "_on_failure")

    def __init__(
        self,
        on_answer: Callable[[Sequence[int], Sequence[int]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._on_answer = on_answer
        self._on_failure = on_failure

    def on_answer(self, offsets: Sequence[int], results: Sequence[int]) -> None:
        """Pass the results on."""
        self._on_answer(offsets, results)

    def on_failure(self, error: TimerError) -> None:
        """Report that there are no results."""
        del error
        self._on_failure()


_REFUSED: Final = (pb.ACK_RESULT_LEASE_LOST, pb.ACK_RESULT_NOT_DELIVERED)
_REQUESTS: Final[dict[str, type[pb.AckRequest] | type[pb.NackRequest] | type[pb.ExtendRequest]]] = {
    "ack": pb.AckRequest,
    "nack": pb.NackRequest,
    "extend": pb.ExtendRequest,
}


def lost_offsets(offsets: Sequence[int], results: Sequence[int]) -> list[int]:
    """Return the offsets of messages whose leases had ended."""
    if pb.ACK_RESULT_LEASE_LOST not in results:
        return []
    return [o for o, r in zip(offsets, results, strict=True) if r == pb.ACK_RESULT_LEASE_LOST]


class AckCall:
    """One request: acks, nacks or extensions of one lease, and the receivers of the answer."""

    __slots__ = ("action", "entries", "request", "sent_s", "was_sent")

    def __init__(self, request_no: int, epoch: int, lease_id: int, action: AckAction) -> None:
        self.action = action
        kind = _REQUESTS[action.kind]
        self.request = kind(request_no=request_no, epoch=epoch, lease_id=lease_id)
        if isinstance(self.request, pb.AckRequest):
            self.request.cumulative = action.is_cumulative
        elif isinstance(self.request, pb.NackRequest):
            self.request.unseen = action.unseen
            self.request.ends_credit = action.unseen and action.own
            self.request.detail = action.detail
            if action.ms is not None:
                self.request.delay_ms = action.ms
        elif isinstance(self.request, pb.ExtendRequest):
            self.request.lease_ms = action.ms or 0
        self.entries: list[QueuedAck] = []
        self.was_sent = False
        """The request was sent at least once, and may have been applied."""
        self.sent_s = 0.0
        """When it was last sent, on this process's monotonic clock."""

    def fail(self, error: TimerError) -> None:
        """Pass `error` to every receiver."""
        for entry in self.entries:
            entry.receiver.on_failure(error)

    def check(self, results: Sequence[int]) -> None:
        """Check the number of results.

        Raises:
            ConnectionLost: It is not that of the offsets.
        """
        if len(results) != len(self.request.offsets):
            msg = f"{len(results)} results for {len(self.request.offsets)} acks"
            raise ConnectionLost(msg)

    def settle(self, results: Sequence[int]) -> list[tuple[QueuedAck, Sequence[int]]]:
        """Pass its results to every receiver; return them, each with its entry."""
        start, settled = 0, []
        for entry in self.entries:
            mine = results[start : start + len(entry.offsets)]
            start += len(entry.offsets)
            settled.append((entry, mine))
            entry.receiver.on_answer(entry.offsets, mine)
        return settled
