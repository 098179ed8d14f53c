"""The leases of one consumer on one stream after the other: extended in time, and known to be lost.

A lease is extended when half of it is over. This ends `hold_max_s` after the application received
the message; for waiting messages, `hold_max_s` after its last call for one, or after it received
the message of their key that they wait for. Then waiting messages are returned, and the leases of
received messages end. A lease that should be over is checked once.
See timerclient/rows/holds.py. All of it belongs to the event loop's thread.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.holds import MARGIN_S, RETRY, SPAN_S_MIN, Hold, Transit
from timerclient.rows.messages import Batch, renewal
from timerclient.streams.acks import AnswerCallback, QueuedAck, lost_offsets
from timerclient.streams.inbox import Inbox
from timerclient.streams.unseen_returns import UnseenReturns
from timerclient.values.lease_clock import LeaseClock

CHECK_INTERVAL_S_MIN: Final = 0.01
"""Seconds between two checks of the leases, at least."""


class LeaseKeeper:
    """See the module.

    `send_own` sends a request soon. `on_lost` is called with the offsets of messages whose leases
    ended while the application had them. `on_arrival` is called when a batch in doubt may be taken.
    """

    def __init__(  # noqa: PLR0913 -- its neighbours, by keyword
        self,
        clock: LeaseClock,
        inbox: Inbox,
        returns: UnseenReturns,
        *,
        hold_max_s: float,
        send_own: Callable[[QueuedAck], bool],
        on_lost: Callable[[Sequence[int]], None],
        on_arrival: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._inbox = inbox
        self._returns = returns
        self._hold_max_s = hold_max_s
        self._send_own = send_own
        self._on_lost = on_lost
        self._on_arrival = on_arrival
        self._holds: dict[int, Hold] = {}
        """Leases of this stream with messages that are still held, by lease id."""
        self._transit = Transit()
        self._check_now = asyncio.Event()
        """Set: check the leases now."""
        self._next_check_s = 0.0
        """When the leases are checked next, at the latest."""

    @property
    def has_leases(self) -> bool:
        """Whether a message of this stream is held. Its lease ends with the stream."""
        return bool(self._holds)

    def lease_of(self, batch: Batch) -> Hold:
        """Return the lease of a batch that arrives now. It is not extended yet."""
        now_s, lease_s = self._clock.now_s(), batch.lease_ms / 1000
        ends_s = now_s + lease_s - self._transit.late_s(batch.handed_out_mono_ms, now_s)
        return Hold(batch, ends_s, lease_s)

    def add(self, hold: Hold) -> None:
        """Extend a lease in time from now on."""
        self._holds[hold.batch.lease_id] = hold
        if hold.renew_at_s < self._next_check_s:
            self._check_now.set()

    def settle(self, entry: QueuedAck) -> None:
        """Mark messages that are acked or returned as no longer held."""
        hold = entry.batch.hold
        if entry.action.kind == "extend":
            return
        if entry.action.is_cumulative:
            hold.settle_up_to(entry.offsets[0])
        else:
            hold.settle(entry.offsets)
        if entry.action.kind == "nack":
            hold.returned_offsets |= dict.fromkeys(entry.offsets, entry.action.unseen)
        if hold.is_over:
            self._release(hold)

    def apply_answer(self, entry: QueuedAck, results: Sequence[int], sent_s: float) -> None:
        """Update a lease by the answer to the application's request, which was sent at `sent_s`."""
        hold, action = entry.batch.hold, entry.action
        if action.own or action.unseen:
            return
        lost = [o for o in lost_offsets(entry.offsets, results) if o not in hold.returned_offsets]
        if lost:
            self._end_leases(hold, lost)
        elif (
            action.kind == "extend" and action.ms is not None and pb.ACK_RESULT_EXTENDED in results
        ):
            hold.extend(sent_s, action.ms / 1000)
            self._check_now.set()

    def on_recall(self, offsets: Sequence[int]) -> None:
        """End the leases of messages that the leader took back; of all if there are no offsets."""
        for hold in [*self._holds.values()]:
            hold.mark_recalled(offsets)
            self._inbox.recheck_leases(hold.batch)
            if hold.is_over:
                self._release(hold)
        self._on_arrival()  # the application drops what waits, and so requests more

    def on_stream_broken(self) -> None:
        """Forget all leases: they ended with their stream."""
        for hold in self._holds.values():
            hold.stream_broken = True
        self._holds.clear()
        self._transit = Transit()

    async def run(self) -> None:
        """Extend leases in time, while the stream exists."""
        while True:
            self._check_now.clear()
            now_s = self._clock.now_s()
            next_s = min(
                (self._check_hold(hold, now_s) for hold in [*self._holds.values()]),
                default=math.inf,
            )
            self._next_check_s = next_s
            alarm = None
            if next_s < math.inf:
                alarm = self._clock.call_at(
                    max(next_s, now_s + CHECK_INTERVAL_S_MIN), self._check_now.set
                )
            try:
                await self._check_now.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def _check_hold(self, hold: Hold, now_s: float) -> float:
        """Extend, return or probe one lease if it is time; return when to check it again."""
        if hold.awaits_extension:
            return math.inf  # the answer triggers a check of all leases
        if now_s < hold.renew_at_s:
            return hold.renew_at_s
        waits = bool(self._inbox.waiting_offsets(hold.batch))
        if waits:
            self._returns.shed(at_once=True)
            waits = bool(self._inbox.waiting_offsets(hold.batch))
        since_s = hold.received_s
        if waits:
            since_s = max(since_s, self._inbox.awaited_work_began_s(hold.batch))
        span_s = min(hold.lease_s, since_s + self._hold_max_s - now_s)
        if span_s >= SPAN_S_MIN and now_s + span_s > hold.ends_s + MARGIN_S:
            self._request_extension(hold, now_s, span_s)
            return math.inf
        # A lease that is not extended would end, and count as a failure, while its message waits.
        if waits and (self._hold_max_s or self._inbox.waits_for_turn(hold.batch)):
            self._returns.send(self._inbox.give_up(hold.batch))
            return now_s + CHECK_INTERVAL_S_MIN
        if now_s < hold.probe_at_s:
            return hold.probe_at_s
        if waits or hold.probed:
            self._release(hold)
        else:
            hold.probed = True
            self._request_extension(hold, now_s, SPAN_S_MIN)
        return math.inf

    def _request_extension(self, hold: Hold, now_s: float, span_s: float) -> None:
        """Request an extension to `span_s` seconds from now."""
        hold.awaits_extension = True
        receiver = AnswerCallback(
            partial(self._on_extension, hold, now_s + span_s),
            partial(self._on_extension_failure, hold),
        )
        self._send_own(QueuedAck(hold.batch, hold.unsettled_offsets, receiver, renewal(span_s)))

    def _on_extension(
        self, hold: Hold, until_s: float, offsets: Sequence[int], results: Sequence[int]
    ) -> None:
        lost = hold.apply_answer(offsets, results, until_s)
        self._inbox.recheck_leases(hold.batch)
        unseen = {*self._inbox.waiting_offsets(hold.batch)} if lost else ()
        seen = [offset for offset in lost if offset not in unseen]
        if seen:
            self._end_leases(hold, seen)
        elif hold.is_over:
            self._release(hold)
        self._check_now.set()
        self._on_arrival()  # the application may take a batch whose lease was in doubt

    def _on_extension_failure(self, hold: Hold) -> None:
        hold.awaits_extension = False
        hold.retry_s = self._clock.now_s() + hold.lease_s * RETRY
        self._check_now.set()
        self._on_arrival()

    def _end_leases(self, hold: Hold, offsets: Sequence[int]) -> None:
        hold.lose(offsets)
        self._inbox.recheck_leases(hold.batch)
        if hold.is_over:
            self._release(hold)
        self._on_lost(offsets)

    def _release(self, hold: Hold) -> None:
        if self._holds.get(hold.batch.lease_id) is hold:  # not a lease of another epoch
            del self._holds[hold.batch.lease_id]
