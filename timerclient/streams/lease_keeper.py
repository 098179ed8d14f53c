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
from timerclient.streams.acks import Heard, QueuedAck, lost_of
from timerclient.streams.inbox import Inbox
from timerclient.streams.unseen_returns import UnseenReturns
from timerclient.values.lease_clock import LeaseClock

LOOK_S_MIN: Final = 0.01
"""Seconds between two checks of the leases, at least."""


class LeaseKeeper:
    """See the module.

    `say` sends a request soon. `lost` is called with the offsets of messages whose leases ended
    while the application had them. `arrived` is called when a batch in doubt may be taken.
    """

    def __init__(  # noqa: PLR0913 -- its neighbours, by keyword
        self,
        clock: LeaseClock,
        inbox: Inbox,
        returns: UnseenReturns,
        *,
        hold_max_s: float,
        say: Callable[[QueuedAck], bool],
        lost: Callable[[Sequence[int]], None],
        arrived: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._inbox = inbox
        self._returns = returns
        self._hold_max_s = hold_max_s
        self._say = say
        self._on_lost = lost
        self._arrived = arrived
        self._holds: dict[int, Hold] = {}
        """Leases of this stream with messages that are still held, by lease id."""
        self._transit = Transit()
        self._look = asyncio.Event()
        """Set: check the leases now."""
        self._look_at_s = 0.0
        """When the leases are checked next, at the latest."""

    @property
    def any(self) -> bool:
        """Whether a message of this stream is held. Its lease ends with the stream."""
        return bool(self._holds)

    def lease_of(self, batch: Batch) -> Hold:
        """Return the lease of a batch that arrives now. It is not kept yet."""
        now_s, lease_s = self._clock.now_s(), batch.lease_ms / 1000
        ends_s = now_s + lease_s - self._transit.late_s(batch.handed_out_ms, now_s)
        return Hold(batch, ends_s, lease_s)

    def keep(self, hold: Hold) -> None:
        """Extend a lease in time from now on."""
        self._holds[hold.batch.lease_id] = hold
        if hold.renew_at_s < self._look_at_s:
            self._look.set()

    def settle(self, entry: QueuedAck) -> None:
        """Mark messages that are acked or returned as no longer held."""
        hold = entry.batch.hold
        if entry.word.kind == "extend":
            return
        if entry.word.up_to:
            hold.settle_up_to(entry.offsets[0])
        else:
            hold.settle(entry.offsets)
        if entry.word.kind == "nack":
            hold.returned |= dict.fromkeys(entry.offsets, entry.word.unseen)
        if hold.over:
            self._let_go(hold)

    def note(self, entry: QueuedAck, results: Sequence[int], sent_s: float) -> None:
        """Update a lease by the answer to the application's request, which was sent at `sent_s`."""
        hold, word = entry.batch.hold, entry.word
        if word.own or word.unseen:
            return
        lost = [o for o in lost_of(entry.offsets, results) if o not in hold.returned]
        if lost:
            self._lost(hold, lost)
        elif word.kind == "extend" and word.ms is not None and pb.ACK_RESULT_EXTENDED in results:
            hold.extended(sent_s, word.ms / 1000)
            self._look.set()

    def recalled(self, offsets: Sequence[int]) -> None:
        """End the leases of messages that the leader took back; of all if there are no offsets."""
        for hold in [*self._holds.values()]:
            hold.finish(offsets)
            self._inbox.look_again(hold.batch)
            if hold.over:
                self._let_go(hold)
        self._arrived()  # the application drops what waits, and so requests more

    def stream_broke(self) -> None:
        """Forget all leases: they ended with their stream."""
        for hold in self._holds.values():
            hold.broken = True
        self._holds.clear()
        self._transit = Transit()

    async def run(self) -> None:
        """Extend leases in time, while the stream exists."""
        while True:
            self._look.clear()
            now_s = self._clock.now_s()
            next_s = min(
                (self._look_at(hold, now_s) for hold in [*self._holds.values()]), default=math.inf
            )
            self._look_at_s = next_s
            alarm = None
            if next_s < math.inf:
                alarm = self._clock.call_at(max(next_s, now_s + LOOK_S_MIN), self._look.set)
            try:
                await self._look.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()

    def _look_at(self, hold: Hold, now_s: float) -> float:
        """Extend, return or probe one lease if it is time; return when to check it again."""
        if hold.asked:
            return math.inf  # the answer triggers a check of all leases
        if now_s < hold.renew_at_s:
            return hold.renew_at_s
        waits = bool(self._inbox.waits(hold.batch))
        if waits:
            self._returns.shed(at_once=True)
            waits = bool(self._inbox.waits(hold.batch))
        since_s = hold.given_s
        if waits:
            since_s = max(since_s, self._inbox.waits_since_s(hold.batch))
        span_s = min(hold.lease_s, since_s + self._hold_max_s - now_s)
        if span_s >= SPAN_S_MIN and now_s + span_s > hold.ends_s + MARGIN_S:
            self._ask(hold, now_s, span_s)
            return math.inf
        # A lease that is not extended would end, and count as a failure, while its message waits.
        if waits and (self._hold_max_s or self._inbox.waits_for_turn(hold.batch)):
            self._returns.send(self._inbox.give_up(hold.batch))
            return now_s + LOOK_S_MIN
        if now_s < hold.probe_at_s:
            return hold.probe_at_s
        if waits or hold.probed:
            self._let_go(hold)
        else:
            hold.probed = True
            self._ask(hold, now_s, SPAN_S_MIN)
        return math.inf

    def _ask(self, hold: Hold, now_s: float, span_s: float) -> None:
        """Request an extension to `span_s` seconds from now."""
        hold.asked = True
        heard = Heard(
            partial(self._renewed, hold, now_s + span_s), partial(self._not_renewed, hold)
        )
        self._say(QueuedAck(hold.batch, hold.left, heard, renewal(span_s)))

    def _renewed(
        self, hold: Hold, until_s: float, offsets: Sequence[int], results: Sequence[int]
    ) -> None:
        lost = hold.answered(offsets, results, until_s)
        self._inbox.look_again(hold.batch)
        unseen = {*self._inbox.waits(hold.batch)} if lost else ()
        seen = [offset for offset in lost if offset not in unseen]
        if seen:
            self._lost(hold, seen)
        elif hold.over:
            self._let_go(hold)
        self._look.set()
        self._arrived()  # the application may take a batch whose lease was in doubt

    def _not_renewed(self, hold: Hold) -> None:
        hold.asked = False
        hold.retry_s = self._clock.now_s() + hold.lease_s * RETRY
        self._look.set()
        self._arrived()

    def _lost(self, hold: Hold, offsets: Sequence[int]) -> None:
        hold.lose(offsets)
        self._inbox.look_again(hold.batch)
        if hold.over:
            self._let_go(hold)
        self._on_lost(offsets)

    def _let_go(self, hold: Hold) -> None:
        if self._holds.get(hold.batch.lease_id) is hold:  # not a lease of another epoch
            del self._holds[hold.batch.lease_id]
