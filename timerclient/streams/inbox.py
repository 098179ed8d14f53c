"""The inbox of a consumer: delivered messages that the application has not taken, and the credit.

An inbox has its own lock, so any thread may use it. It returns messages in their order of arrival,
and none after the end of its lease. While a nack in an ordered group is unanswered, later messages
of its key wait: the leader recalls them before it answers. Messages of other keys pass them
(timerclient/streams/key_lines.py). Whole batches wait for all nacks. When a lease ends while its
renewal is on its way, the batch waits for the answer. Later batches wait behind it.
"""

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

from timerclient.rows.messages import Batch, Message
from timerclient.streams.credit import FIRST_FETCH, Credit, WorkPace
from timerclient.streams.key_lines import GroupOrder, KeyLines, key_of

Part = tuple[Batch, Sequence[int]]
"""Some messages of a batch, by their queue offsets."""
CHECK_INTERVAL_S: Final = 0.001
"""Seconds between two checks of leases and pace. A check costs more than a message."""
SLOW_SHARE_MAX: Final = 1 / 16
"""Fraction of a lease for which an application may be too slow before messages go back: a pause of
its machine, or of the call that it waits for, is no pace."""
LEASE_S: Final = 30.0
"""Assumed length of a lease, in seconds, until the first batch arrives."""
QUEUE_KEY: Final = ""
"""Stands for all messages of a group that is ordered as a whole. No message has this key."""


class TakeMode(Enum):
    """The way in which the application empties an inbox."""

    MESSAGES = "single messages, or some of one batch"
    BATCHES = "whole batches"
    NOTHING = "nothing until its messages went back"


class Inbox:
    """See the module. `epoch` returns the highest epoch that the client has seen.

    `on_due` is called, on any thread, when credit should be granted or messages should go back.
    """

    def __init__(
        self,
        credit: Credit,
        epoch: Callable[[], int],
        now_s: Callable[[], float],
        on_due: Callable[[], None],
    ) -> None:
        self.dropped_count = 0
        """Messages whose leases ended before the application took them."""
        self.last_call_s = now_s()
        """When the application last requested messages."""
        self._epoch = epoch
        self._now_s = now_s
        self._on_due = on_due
        self._lock = threading.Lock()
        self._credit = credit
        self._credit.limit = min(credit.window, FIRST_FETCH)
        self._pace = WorkPace()
        self._take_mode = TakeMode.MESSAGES
        self._lease_s = LEASE_S
        self._stream_no = 0
        self._batches: deque[Batch] = deque()
        self._rest: deque[Message] = deque()
        """Messages not taken yet of the batch that the application reads."""
        self.order = GroupOrder.NONE
        """The order of the group."""
        self.takes_turns = False
        """The application takes one message of an ordering key at a time; see `end_turn`."""
        self._turns: dict[Message, str] = {}
        """The messages that it works on, and their keys."""
        self._lines = credit.in_lines = KeyLines()
        self._slow_since_s = math.inf
        """Since when more messages wait than the application will reach. Infinite: not now."""
        self._unchecked_until_s = 0.0
        """Until then the next message is returned without a check: its batch has lost none."""

    # ---- the application's side

    def next(self) -> Message | None:
        """Return the next message. None: the inbox is empty."""
        now_s = self._now_s()
        with self._lock:
            if now_s < self._unchecked_until_s and self._rest:
                self._pace.given_count += 1
                self._credit.waiting -= 1
                return self._rest.popleft()
            self._note_call(now_s)
            out = self._pop(1, now_s)
            message = out[0] if out else None
            if message is None:
                self._credit.wanted = 1
            else:
                self._note_delivery(1, now_s)
                hold = message.batch.hold
                is_free = not (hold.lost_offsets or hold.finished_offsets or self._may_queue_up)
                self._unchecked_until_s = (
                    min(now_s + CHECK_INTERVAL_S, hold.ends_s) if is_free else 0.0
                )
            due = self._is_due(now_s)
        if due:
            self._on_due()
        return message

    def receive(self, most: int) -> list[Message]:
        """Return up to `most` messages of one batch; an empty list if the inbox is empty."""
        now_s = self._now_s()
        with self._lock:
            self._note_call(now_s)
            out = self._pop(most, now_s)
            if out:
                self._note_delivery(len(out), now_s)
            else:
                self._credit.wanted = most
            due = self._is_due(now_s)
        if due:
            self._on_due()
        return out

    def take_batch(self) -> Batch | None:
        """Return the next batch as it came. None: none is here."""
        now_s = self._now_s()
        with self._lock:
            self._take_mode = TakeMode.BATCHES
            self._credit.limit = self._credit.window
            self.last_call_s = now_s
            batch = self._pop_batch(now_s)
            if batch is not None:
                self._credit.count_taken(len(batch))
                batch.hold.received_s = now_s
            due = self._is_due(now_s)
        if due:
            self._on_due()
        return batch

    def _note_call(self, now_s: float) -> None:
        self._take_mode = TakeMode.MESSAGES
        self.last_call_s = now_s
        self._pace.end_work(now_s)
        self._set_limit(now_s)

    def _note_delivery(self, n: int, now_s: float) -> None:
        self._credit.wanted = 0
        self._pace.begin_work(n, now_s)

    def _set_limit(self, now_s: float) -> None:
        enough = self._pace.messages_within(self._lease_s / 2, now_s)
        self._credit.limit = min(self._credit.window, FIRST_FETCH if enough is None else enough)

    def _pop(self, most: int, now_s: float) -> list[Message]:
        """Return up to `most` messages of one batch; an empty list if none may be taken."""
        while not self._is_paused:
            line_head = self._lines.first_free()
            if line_head is None and not self._rest:
                batch = self._pop_batch(now_s)
                if batch is None:
                    return []
                self._rest.extend(batch)
            batch = (line_head or self._rest[0]).batch
            if self._has_ended(batch, now_s):
                if not self._is_stale(batch) and batch.hold.awaits_extension:
                    return []
                self._drop(len(self._remove(batch)))
                continue
            out = self._take_from(batch, line_head, most)
            if out:
                self._credit.count_taken(len(out))
                batch.hold.received_s = now_s
                return out
        return []

    def _take_from(self, batch: Batch, line_head: Message | None, most: int) -> list[Message]:
        """Remove up to `most` messages of a batch; return those that may be taken now."""
        if line_head is None:
            took = [self._rest.popleft() for _ in range(min(most, len(self._rest)))]
        else:
            took = [line_head]
            self._lines.remove(line_head)
        if not (batch.hold.lost_offsets or batch.hold.finished_offsets or self._may_queue_up):
            return took
        out = list[Message]()
        for message in took:
            if batch.hold.has_ended(message.queue_offset):
                self._drop(1)
            elif not self._lines.append_if_blocked(message):
                out.append(message)
                self._begin_turn(message)
        return out

    def _begin_turn(self, message: Message) -> None:
        if self._has_turns and (key := key_of(message)):
            self._turns[message] = key
            self._lines.block([key])

    def _pop_batch(self, now_s: float) -> Batch | None:
        while self._batches and not self._is_paused:
            batch = self._batches[0]
            if self._has_ended(batch, now_s):
                if not self._is_stale(batch) and batch.hold.awaits_extension:
                    return None
            elif not (batch.hold.lost_offsets or batch.hold.is_over):
                return self._batches.popleft()
            # What is left of one that was lost in part ends with its lease, and comes again.
            self._drop(len(self._batches.popleft()))
        return None

    @property
    def _is_paused(self) -> bool:
        whole = self.order is GroupOrder.QUEUE or self._take_mode is TakeMode.BATCHES
        return whole and self._lines.is_blocked

    @property
    def _has_turns(self) -> bool:
        # In either order: the next leader may be of a release that reports it otherwise.
        return self.takes_turns and self.order is not GroupOrder.NONE

    @property
    def _may_queue_up(self) -> bool:
        """Whether a message may have to wait for others of its key."""
        return self._lines.is_active or self._has_turns

    def _has_ended(self, batch: Batch, now_s: float) -> bool:
        return now_s >= batch.hold.ends_s or self._is_stale(batch)

    def _is_stale(self, batch: Batch) -> bool:
        """Return whether the leases of a batch are known to be over: its messages come again."""
        return batch.stream_no != self._stream_no or batch.epoch < self._epoch()

    def _drop(self, n: int) -> None:
        self._credit.count_dropped(n)
        self.dropped_count += n

    # ---- the stream's side

    @property
    def stream_no(self) -> int:
        """Number of the present or the next stream; it rises when a stream breaks."""
        return self._stream_no

    @property
    def is_exhausted(self) -> bool:
        """Whether all requested messages have come and were taken."""
        return self._credit.is_exhausted

    def block(self, batch: Batch, offsets: Sequence[int]) -> set[str]:
        """Return no message of the keys of these until `release`; return the keys.

        In a group that is ordered as a whole, all messages wait; in one without an order, none.
        """
        if self.order is GroupOrder.NONE:
            return set()
        keys = {QUEUE_KEY}
        if self.order is GroupOrder.KEY:
            places = [bisect_left(batch.queue_offsets, offset) for offset in offsets]
            keys = {key for at in places if (key := key_of(batch[at]))}
        with self._lock:
            self._lines.block(keys)
            self._unchecked_until_s = 0.0
        return keys

    def release(self, keys: Iterable[str]) -> None:
        """See `block`."""
        with self._lock:
            self._lines.release(keys)

    def take_turns(self, at_work: Iterable[Message]) -> None:
        """Return one message of a key at a time, until `end_turn`; none of the keys `at_work`."""
        with self._lock:
            self.takes_turns = True
            for message in at_work:
                self._begin_turn(message)

    def end_turn(self, message: Message) -> bool:
        """Let the next message of a key follow: the application's work on this one is done.

        Return whether the message had a turn.
        """
        with self._lock:
            key = self._turns.pop(message, None)
            if key is not None:
                self._lines.release([key])
        return key is not None

    def recheck_leases(self, batch: Batch) -> None:
        """Check the leases of a batch before its messages are returned: some may have ended.

        Those that have, and that wait for earlier ones of their keys, are dropped at once.
        """
        with self._lock:
            self._unchecked_until_s = 0.0
            for message in self._lines.messages_of(batch):
                if batch.hold.has_ended(message.queue_offset):
                    self._lines.remove(message)
                    self._drop(1)

    def append(self, batch: Batch) -> None:
        """Append a batch."""
        with self._lock:
            self._lease_s = batch.lease_ms / 1000
            self._credit.count_arrived(len(batch), sum(batch.payload_sizes))
            self._batches.append(batch)

    def count_returned(self, batch: Batch) -> None:
        """Count a batch that arrives and goes back at once."""
        with self._lock:
            self._credit.count_arrived(len(batch))
            self._credit.count_dropped(len(batch))

    def opening_credit(self, *, none: bool) -> int:
        """Return the credit that a new stream opens with."""
        with self._lock:
            self._credit.revoke()
            return 0 if none else self._credit.grant()

    def grant(self) -> int:
        """Return the number of further messages to request; 0: too few for a request."""
        with self._lock:
            return self._credit.grant() if self._credit.is_due() else 0

    def on_credit_ended(self) -> None:
        """Take back the granted credit: the leader delivers nothing for it any more."""
        with self._lock:
            self._credit.revoke()

    def on_stream_broken(self) -> None:
        """Drop the messages that were not taken: their leases are over."""
        with self._lock:
            self._stream_no += 1
            # Before the messages go: an empty inbox means that all were taken.
            self._drop(sum(map(len, self._batches)) + len(self._rest) + len(self._lines))
            self._clear()

    def clear(self) -> None:
        """Empty the inbox for good."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._batches.clear()
        self._rest.clear()
        self._lines.clear()

    def waiting_offsets(self, batch: Batch) -> Sequence[int]:
        """Return the queue offsets of a batch that the application has not taken."""
        with self._lock:
            return _offsets(self._waiting_messages(batch))

    def awaited_work_began_s(self, batch: Batch) -> float:
        """Return when the work began that the waiting messages of a batch wait for, in seconds.

        If all of them wait for turns of their keys: the time at which the application received the
        last message that has one of these turns, or extended its lease. Otherwise: its last call.
        """
        with self._lock:
            in_lines = self._lines.messages_of(batch)
            if not in_lines or len(in_lines) < len(self._waiting_messages(batch)):
                return self.last_call_s
            turns = {key: message.batch.hold.received_s for message, key in self._turns.items()}
            return max(turns.get(key_of(message) or "", self.last_call_s) for message in in_lines)

    def waits_for_turn(self, batch: Batch) -> bool:
        """Return whether waiting messages of a batch wait for earlier ones to be done or return."""
        with self._lock:
            one_by_one = self.takes_turns and self.order is GroupOrder.QUEUE
            return one_by_one or bool(self._lines.messages_of(batch))

    def _waiting_messages(self, batch: Batch) -> Sequence[Message]:
        """Return the messages of a batch that the application has not taken."""
        rest = self._rest if self._rest and self._rest[0].batch is batch else ()
        return [*self._lines.messages_of(batch), *rest] or (batch if batch in self._batches else [])

    def _remove(self, batch: Batch) -> Sequence[Message]:
        """Remove and return the messages of a batch that the application has not taken."""
        waiting = self._waiting_messages(batch)
        if waiting is batch:
            self._batches.remove(batch)
        for message in self._lines.messages_of(batch):
            self._lines.remove(message)
        if self._rest and self._rest[0].batch is batch:
            self._rest.clear()
        return waiting

    # ---- going back unseen

    def shed(self, *, at_once: bool = False) -> list[Part]:
        """Remove and return the messages that the application will not reach in time, at its pace.

        These are the last ones, so that the remaining ones have no gap; in their order, in which
        they are then delivered again. Messages that wait for earlier ones of their keys stay.
        `at_once`: even if it may be a hiccup.
        """
        now_s, out = self._now_s(), list[Part]()
        with self._lock:
            if self._take_mode is TakeMode.MESSAGES:
                self._set_limit(now_s)
            excess = self._excess() if at_once or self._is_slow(now_s) else 0
            while self._batches and len(self._batches[-1]) <= excess:
                excess -= len(self._batches[-1])
                out.append(self._part_to_return(self._batches.pop()))
            if excess and self._rest and not self._batches:
                most = min(excess, len(self._rest))
                out.append(self._part_to_return([self._rest.pop() for _ in range(most)]))
        return out[::-1]

    def give_up(self, batch: Batch) -> list[Part]:
        """Remove and return the messages of a batch; request none until the next call."""
        with self._lock:
            self._take_mode = TakeMode.NOTHING
            self._credit.limit = self._credit.wanted = 0
            waiting = self._remove(batch)
            return [self._part_to_return(waiting)] if waiting else []

    def drain(self) -> list[Part]:
        """Remove and return all messages."""
        with self._lock:
            rest = (message.batch for message in self._rest)
            begun = dict.fromkeys([*self._lines.batches(), *rest])
            parts = [self._part_to_return(self._waiting_messages(batch)) for batch in begun]
            parts += [self._part_to_return(batch) for batch in self._batches]
            self._clear()
        return [part for part in parts if not self._is_stale(part[0])]

    def _is_due(self, now_s: float) -> bool:
        return self._is_slow(now_s) or self._credit.is_due()

    def _is_slow(self, now_s: float) -> bool:
        """Return whether messages should go back, and have had to for longer than a hiccup."""
        self._slow_since_s = min(self._slow_since_s, now_s) if self._excess() else math.inf
        return now_s - self._slow_since_s >= self._lease_s * SLOW_SHARE_MAX

    def _excess(self) -> int:
        """Return the number of messages to send back: 0, or more than remain."""
        reach, waiting = self._credit.reach, self._credit.waiting - len(self._lines)
        if self._take_mode is not TakeMode.MESSAGES or waiting <= 2 * reach:
            return 0
        return waiting - reach

    def _part_to_return(self, messages: Sequence[Message]) -> Part:
        self._credit.count_dropped(len(messages))
        return messages[0].batch, _offsets(messages)


def _offsets(messages: Sequence[Message]) -> Sequence[int]:
    if isinstance(messages, Batch):
        return messages.queue_offsets
    return sorted(message.queue_offset for message in messages)
