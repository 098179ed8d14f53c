"""What has come for a consumer and waits to be taken, and how much more may come.

Any thread may use it: its lock is inside. Its messages go out in the order in which they came, and
never beyond the end of their lease. A batch whose renewal is on its way as its lease ends waits for
the answer, and what came later waits behind it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from timerclient.credit import FIRST, Credit, Pace
from timerclient.messages import Batch, Message

Part = tuple[Batch, Sequence[int]]
"""Some messages of a batch, by their queue offsets."""
QUICK_S: Final = 0.001
"""What has to do with time is looked at only so often; a look costs more than a message."""
LEASE_S: Final = 30.0
"""Until the first batch says how long its lease is."""


class Inbox:
    """See the module; `epoch`: the highest one that was seen.

    `due` is called, on whatever thread, when credit should be granted, or messages go back.
    """

    def __init__(
        self,
        credit: Credit,
        epoch: Callable[[], int],
        now_s: Callable[[], float],
        due: Callable[[], None],
    ) -> None:
        self.dropped = 0
        """Messages whose leases were over before anybody saw them."""
        self.asked_s = now_s()
        """When the application last asked for messages."""
        self._epoch = epoch
        self._now_s = now_s
        self._due = due
        self._lock = threading.Lock()
        self._credit = credit
        self._credit.limit = min(credit.window, FIRST)
        self._pace = Pace()
        self._one_by_one = True
        self._idle = False
        """The application has not asked for so long that what came for it went back."""
        self._lease_s = LEASE_S
        self._stream_no = 0
        self._batches: deque[Batch] = deque()
        self._rest: list[Message] = []
        """What the application has not come to of the batch that it reads, in reverse."""
        self._quick_s = 0.0
        """Until then its next message is given without a further look."""

    # ---- the application's side

    def next(self) -> Message | None:
        """Return the next message. None: none is here."""
        now_s = self._now_s()
        with self._lock:
            if now_s < self._quick_s and self._rest:
                self._pace.given += 1
                self._credit.waiting -= 1
                return self._rest.pop()
            self._asked(now_s)
            out = self._pop(1, now_s)
            message = out[0] if out else None
            if message is None:
                self._credit.wanted = 1
            else:
                self._given(1, now_s)
                self._quick_s = min(now_s + QUICK_S, message.batch.hold.ends_s)
            due = self._is_due()
        if due:
            self._due()
        return message

    def receive(self, most: int) -> list[Message]:
        """Return up to so many messages of one batch; none: none is here."""
        now_s = self._now_s()
        with self._lock:
            self._asked(now_s)
            out = self._pop(most, now_s)
            if out:
                self._given(len(out), now_s)
            else:
                self._credit.wanted = most
            due = self._is_due()
        if due:
            self._due()
        return out

    def take(self) -> Batch | None:
        """Return the next batch as it came. None: none is here."""
        now_s = self._now_s()
        with self._lock:
            self._one_by_one = self._idle = False
            self._credit.limit = self._credit.window
            self.asked_s = now_s
            batch = self._pop_batch(now_s)
            if batch is not None:
                self._credit.taken(len(batch))
                batch.hold.given_s = now_s
            due = self._is_due()
        if due:
            self._due()
        return batch

    def _asked(self, now_s: float) -> None:
        self._one_by_one, self._idle = True, False
        self.asked_s = now_s
        self._pace.asked(now_s)
        self._set_limit(now_s)

    def _given(self, n: int, now_s: float) -> None:
        self._credit.wanted = 0
        self._pace.begins(n, now_s)

    def _set_limit(self, now_s: float) -> None:
        enough = self._pace.within(self._lease_s / 2, now_s)
        self._credit.limit = min(self._credit.window, FIRST if enough is None else enough)

    def _pop(self, most: int, now_s: float) -> list[Message]:
        """Return up to so many messages of one batch; none: none is here."""
        while True:
            if not self._rest:
                batch = self._pop_batch(now_s)
                if batch is None:
                    return []
                self._rest = [*batch][::-1]
            batch = self._rest[-1].batch
            if self._over(batch, now_s):
                if not self._stale(batch) and batch.hold.asked:
                    return []
                self._drop(len(self._rest))
                self._rest = []
                continue
            out = self._rest[: -most - 1 : -1]
            del self._rest[len(self._rest) - len(out) :]
            if lost := batch.hold.lost:
                came, out = len(out), [each for each in out if each.queue_offset not in lost]
                self._drop(came - len(out))
            if out:
                self._credit.taken(len(out))
                batch.hold.given_s = now_s
                return out

    def _pop_batch(self, now_s: float) -> Batch | None:
        while self._batches:
            batch = self._batches[0]
            if self._over(batch, now_s):
                if not self._stale(batch) and batch.hold.asked:
                    return None
            elif not batch.hold.lost:
                return self._batches.popleft()
            # What is left of one that was lost in part ends with its lease, and comes again.
            self._drop(len(self._batches.popleft()))
        return None

    def _over(self, batch: Batch, now_s: float) -> bool:
        return now_s >= batch.hold.ends_s or self._stale(batch)

    def _stale(self, batch: Batch) -> bool:
        """Return whether its leases are known to be over: the group gets its messages again."""
        return batch.stream_no != self._stream_no or batch.epoch < self._epoch()

    def _drop(self, n: int) -> None:
        self._credit.dropped(n)
        self.dropped += n

    # ---- the stream's side

    @property
    def stream_no(self) -> int:
        """Of the stream that is, or comes next; counted when one breaks."""
        return self._stream_no

    @property
    def ended(self) -> bool:
        """Whether all that was asked for has come, and was taken."""
        return self._credit.exhausted

    def look_again(self) -> None:
        """Let the next message be looked at before it is given: some may be lost."""
        self._quick_s = 0.0

    def arrived(self, batch: Batch) -> None:
        """Put a batch behind what waits."""
        with self._lock:
            self._lease_s = batch.lease_ms / 1000
            self._credit.arrived(len(batch))
            self._batches.append(batch)

    def refused(self, batch: Batch) -> None:
        """Count a batch that arrives, and goes back at once."""
        with self._lock:
            self._credit.arrived(len(batch))
            self._credit.dropped(len(batch))

    def opening(self, *, nothing: bool) -> int:
        """Return the credit that a new stream opens with."""
        with self._lock:
            self._credit.lost()
            return 0 if nothing else self._credit.grant()

    def grant(self) -> int:
        """Return how many messages more may come; 0: too few for a request."""
        with self._lock:
            return self._credit.grant() if self._credit.due() else 0

    def stream_broke(self) -> None:
        """Drop what nobody has seen: the leases are over."""
        with self._lock:
            self._stream_no += 1
            # First: nobody may see an empty inbox as the end.
            self._drop(sum(map(len, self._batches)) + len(self._rest))
            self._batches.clear()
            self._rest = []

    def clear(self) -> None:
        """Let nothing be taken any more."""
        with self._lock:
            self._batches.clear()
            self._rest = []

    def waits(self, batch: Batch) -> Sequence[int]:
        """Return the queue offsets of a batch that the application has not got."""
        with self._lock:
            if self._rest and self._rest[-1].batch is batch:
                return [message.queue_offset for message in reversed(self._rest)]
            return batch.queue_offsets if batch in self._batches else ()

    # ---- going back unseen

    def shed(self) -> list[Part]:
        """Return, and forget, what the application's pace does not let it come to in time.

        The last ones first: what stays has no gap.
        """
        now_s, out = self._now_s(), list[Part]()
        with self._lock:
            if self._one_by_one and not self._idle:
                self._set_limit(now_s)
            excess = self._excess()
            while self._batches and len(self._batches[-1]) <= excess:
                excess -= len(self._batches[-1])
                out.append(self._forget(self._batches.pop()))
            if excess and self._rest and not self._batches:
                going = self._rest[:excess]
                del self._rest[:excess]
                out.append(self._forget(going))
        return out

    def give_up(self, batch: Batch) -> list[Part]:
        """Return, and forget, what waits of a batch; let nothing come until more is asked for."""
        with self._lock:
            self._idle = True
            self._credit.limit = self._credit.wanted = 0
            if self._rest and self._rest[-1].batch is batch:
                going, self._rest = self._rest, []
                return [self._forget(going)]
            if batch in self._batches:
                self._batches.remove(batch)
                return [self._forget(batch)]
        return []

    def drain(self) -> list[Part]:
        """Return, and forget, all that waits."""
        with self._lock:
            parts = [self._forget(self._rest)] if self._rest else []
            parts += [self._forget(batch) for batch in self._batches]
            self._rest = []
            self._batches.clear()
        return [part for part in parts if not self._stale(part[0])]

    def _is_due(self) -> bool:
        return self._credit.due() or self._excess() > 0

    def _excess(self) -> int:
        """Return how many messages should go back: none, or more than stay."""
        limit = self._credit.limit
        waiting = self._credit.waiting
        if not self._one_by_one or self._idle or waiting <= 2 * limit:
            return 0
        return waiting - limit

    def _forget(self, going: Sequence[Message]) -> Part:
        self._credit.dropped(len(going))
        if isinstance(going, Batch):
            return going, going.queue_offsets
        return going[0].batch, sorted(message.queue_offset for message in going)
