"""Credit of consumers, as they grant it and end it; a part of the book.

A consumer gets no message for which it granted no credit. A consumer that returns messages unseen
and ends its credit gets none until it grants some again (docs/adr/0025-consumption.md).
"""

from dataclasses import dataclass, field

from chaos.sim.world.referee import Broken


@dataclass(slots=True)
class CreditBook:
    """See the module. `delivered` raises Broken. A stream is any hashable name of it."""

    left: dict[object, int] = field(default_factory=dict)
    """Stream -> messages that its node may send."""

    def granted(self, stream: object, messages: int) -> None:
        """A node got credit for a stream; the first opens it."""
        self.left[stream] = self.left.get(stream, 0) + messages

    def ended(self, stream: object) -> None:
        """A node got the end of a stream's credit."""
        self.left[stream] = 0

    def delivered(self, stream: object, messages: int) -> None:
        """A leader delivers messages on a stream, no more than it has credit for."""
        left = self.left.get(stream, 0)
        if messages > left:
            raise Broken("credit", f"{messages} messages on a stream with credit for {left}")
        self.left[stream] = left - messages
