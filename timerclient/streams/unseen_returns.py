"""Messages that a consumer returns unseen: the application is too slow for them.

A return counts as no failure. It also ends the credit that was granted before. The client grants no
more until the leader has answered all returns. With the old credit the leader would deliver the
same messages here again. In an ordered group the leader also recalls later messages of their keys
before it answers, so the inbox returns none of these until then.
"""

from collections.abc import Callable, Sequence
from functools import partial

from timerclient.rows.messages import SHED
from timerclient.streams.acks import AnswerCallback, QueuedAck
from timerclient.streams.inbox import Inbox, Part


class UnseenReturns:
    """See the module.

    `send_own` sends a request soon; False: the consumer is over. `on_arrival` is called when
    messages that waited for an answer may be taken.
    """

    def __init__(
        self, inbox: Inbox, send_own: Callable[[QueuedAck], bool], on_arrival: Callable[[], None]
    ) -> None:
        self.unanswered = 0
        """Returns that the leader has not answered."""
        self._inbox = inbox
        self._send_own, self._on_arrival = send_own, on_arrival

    def shed(self, *, at_once: bool = False) -> None:
        """Return the messages that the application will not reach in time; see Inbox."""
        self.send(self._inbox.shed(at_once=at_once))

    def send(self, parts: Sequence[Part]) -> None:
        """Return messages that are no longer in the inbox."""
        for batch, offsets in parts:
            self.unanswered += 1
            keys = self._inbox.block(batch, offsets)
            batch.hold.settle(offsets)
            receiver = AnswerCallback(
                lambda *_, keys=keys: self._on_answer(keys), partial(self._on_answer, keys)
            )
            if not self._send_own(QueuedAck(batch, offsets, receiver, SHED)):
                self._on_answer(keys)

    def _on_answer(self, keys: set[str]) -> None:
        self.unanswered -= 1
        self._inbox.release(keys)
        self._on_arrival()
        if not self.unanswered:
            self._inbox.on_credit_ended()
