"""Messages that a consumer returns unseen: the application is too slow for them.

A return counts as no failure. It also ends the credit that was granted before. The client grants no
more until the leader has answered all returns. With the old credit the leader would deliver the
same messages here again. In an ordered group the leader also recalls later messages of their keys
before it answers, so the inbox returns none of these until then.
"""

from collections.abc import Callable, Sequence
from functools import partial

from timerclient.rows.messages import SHED
from timerclient.streams.acks import Heard, QueuedAck
from timerclient.streams.inbox import Inbox, Part


class UnseenReturns:
    """See the module.

    `say` sends a request soon; False: the consumer is over. `arrived` is called when messages that
    waited for an answer may be taken.
    """

    def __init__(
        self, inbox: Inbox, say: Callable[[QueuedAck], bool], arrived: Callable[[], None]
    ) -> None:
        self.unanswered = 0
        """Returns that the leader has not answered."""
        self._inbox = inbox
        self._say, self._arrived = say, arrived

    def shed(self, *, at_once: bool = False) -> None:
        """Return the messages that the application will not reach in time; see Inbox."""
        self.send(self._inbox.shed(at_once=at_once))

    def send(self, parts: Sequence[Part]) -> None:
        """Return messages that are no longer in the inbox."""
        for batch, offsets in parts:
            self.unanswered += 1
            keys = self._inbox.block(batch, offsets)
            batch.hold.settle(offsets)
            heard = Heard(lambda *_, keys=keys: self._answered(keys), partial(self._answered, keys))
            if not self._say(QueuedAck(batch, offsets, heard, SHED)):
                self._answered(keys)

    def _answered(self, keys: set[str]) -> None:
        self.unanswered -= 1
        self._inbox.release(keys)
        self._arrived()
        if not self.unanswered:
            self._inbox.credit_ended()
