"""Messages that wait in an inbox for earlier ones of their keys: one line for each key.

    block(key) ──► messages of the key queue up in its line ──► release(key) ──► the line moves on

A key may be blocked several times: while a nack of one of its messages is unanswered, and while the
application works on one, if it takes one at a time. The inbox that owns the lines has the lock.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch, Message


class GroupOrder(Enum):
    """The order in which a group delivers."""

    NONE = "none"
    KEY = "of each ordering key"
    QUEUE = "of the whole queue"


def order_of(opened: pb.ConsumerOpened) -> GroupOrder:
    """Return the order of a group by the leader's first answer."""
    if not opened.ordered:
        return GroupOrder.NONE
    return GroupOrder.KEY if opened.by_key else GroupOrder.QUEUE


def key_of(message: Message) -> str | None:
    """Return the key by which a message is ordered. None: it has no order."""
    return message.ordering_key or message.key


class KeyLines:
    """See the module. `len` is the number of messages in all lines."""

    def __init__(self) -> None:
        self._blocks = Counter[str]()
        self._lines: dict[str, OrderedDict[Message, None]] = {}
        self._batches: dict[Batch, OrderedDict[Message, None]] = {}
        """The messages of all lines by their batches."""
        self._len = 0
        self._free_keys = OrderedDict[str, None]()
        """Keys of lines that are not blocked, in the order of their release."""

    @property
    def is_blocked(self) -> bool:
        """Whether any key is blocked."""
        return bool(self._blocks)

    @property
    def is_active(self) -> bool:
        """Whether a key is blocked, or has a line."""
        return bool(self._blocks or self._lines)

    def __len__(self) -> int:
        return self._len

    def batches(self) -> list[Batch]:
        """Return the batches of which messages wait."""
        return [*self._batches]

    def block(self, keys: Iterable[str]) -> None:
        """Let messages of these keys wait until `release` was called as often as this."""
        for key in keys:
            self._blocks[key] += 1
            self._free_keys.pop(key, None)

    def release(self, keys: Iterable[str]) -> None:
        """See `block`."""
        for key in keys:
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
                if key in self._lines:
                    self._free_keys[key] = None

    def first_free(self) -> Message | None:
        """Return the first message of a line that may move on. None: there is none."""
        return next(iter(self._lines[next(iter(self._free_keys))])) if self._free_keys else None

    def append_if_blocked(self, message: Message) -> bool:
        """Append a message to the line of its key if it must wait; return whether it must."""
        key = key_of(message)
        if key is None or key not in self._blocks:
            return False  # and its line is empty: lines that may move on are read first
        self._lines.setdefault(key, OrderedDict())[message] = None
        self._batches.setdefault(message.batch, OrderedDict())[message] = None
        self._len += 1
        return True

    def messages_of(self, batch: Batch) -> list[Message]:
        """Return the messages of a batch that wait."""
        return [*self._batches.get(batch, ())]

    def remove(self, message: Message) -> None:
        """Remove a message from its line."""
        key = key_of(message) or ""
        self._len -= 1
        del self._lines[key][message], self._batches[message.batch][message]
        if not self._batches[message.batch]:
            del self._batches[message.batch]
        if not self._lines[key]:
            del self._lines[key]
            self._free_keys.pop(key, None)

    def clear(self) -> None:
        """Remove all messages. Blocked keys stay blocked."""
        self._lines.clear()
        self._batches.clear()
        self._free_keys.clear()
        self._len = 0
