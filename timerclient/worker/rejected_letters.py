"""Dead letters of rejected messages, written by a worker; the texts of failures.

A cluster moves a message to its dead-letter topic after `max_attempts` failures, in one step. A
rejection comes before, so the worker writes the letter as a new message, with the headers that the
cluster gives its own, and then acks the message. If the worker ends between the two, the message
is delivered again, and a second letter may follow: for some minutes the request id prevents it.
"""

from typing import Final

from timerclient.client.aio import AsyncTimerClient
from timerclient.rows.messages import Message, truncate_detail
from timerclient.values.errors import InvalidRequest

LETTERS: Final = "dead-letters"
"""The group that keeps the letters of a dead-letter topic, and that a redrive reads."""
PREFIX: Final = "dead-letter-"
HEADERS: Final = frozenset(
    f"{PREFIX}{of}"
    for of in ("reason", "topic", "group", "timer-id", "offset", "attempts", "detail")
)
"""The headers of the newest death, as timer/leader/groups/dead_letters.py names them."""
PRIOR: Final = "prior-"
"""Prefix of a header of an earlier death, once for each death since."""
DEATHS_MAX: Final = 8
"""Deaths described in the headers, the newest ones: a letter in a loop must not grow for ever."""


def letters_topic(topic: str, group: str, wanted: str) -> str:
    """Return the name of a group's dead-letter topic. `wanted`: of its settings, or empty."""
    return wanted or f"{topic}.{group}.dead"


def letter_headers(message: Message, group: str) -> dict[str, str]:
    """Return the headers of a message's letter; those of an earlier death get a prefix more."""
    earlier = {
        PRIOR + name if deaths else name: value
        for name, value in message.headers.items()
        if (deaths := _deaths_at(name)) < DEATHS_MAX
    }
    return earlier | {
        f"{PREFIX}reason": "rejected",
        f"{PREFIX}topic": message.topic,
        f"{PREFIX}group": group,
        f"{PREFIX}timer-id": message.id,
        f"{PREFIX}offset": str(message.queue_offset),
        f"{PREFIX}attempts": str(message.failures + 1),
    }


def _deaths_at(name: str) -> int:
    """Return the death that a header describes: 1 is the newest. 0: an ordinary header."""
    of = name
    while of.startswith(PRIOR):
        of = of.removeprefix(PRIOR)
    return 1 + (len(name) - len(of)) // len(PRIOR) if of in HEADERS else 0


def detail_of(reason: Exception) -> dict[str, str]:
    """Return the header with the text of a rejection, which is cut; none if there is no text."""
    text = _text_of(reason)
    return {f"{PREFIX}detail": truncate_detail(text)} if text else {}


def failure_text(error: BaseException, *, with_text: bool) -> str:
    """Return an exception's type, and its text, for the dead letter of a nacked message."""
    count, first = first_failure(error)
    text = _text_of(first) if with_text else ""
    return f"{count}{type(first).__name__}" + (f": {text}" if text else "")


def first_failure(error: BaseException) -> tuple[str, BaseException]:
    """Return the first exception in a group, as of a TaskGroup, after a text with their number.

    The text is empty if there is one exception only, or no group.
    """
    each, leaves = [error], list[BaseException]()
    while each:
        if isinstance(found := each.pop(), BaseExceptionGroup):
            each += reversed(found.exceptions)
        else:
            leaves.append(found)
    return f"{len(leaves)} errors, the first: " if len(leaves) > 1 else "", leaves[0]


def _text_of(error: BaseException) -> str:
    """Return an exception's text; empty if its `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- an edge: the application's own `__str__`
        return ""


async def write_letter(
    client: AsyncTimerClient, message: Message, group: str, topic: str, reason: Exception
) -> None:
    """Make a message a dead letter of `topic`; the caller acks it then.

    If the text of `reason` exceeds the cluster's limit of headers, the letter has none.

    Raises:
        TimerError: The letter was not written, or perhaps not.
    """
    await client.create_group(topic, LETTERS)
    detail = detail_of(reason)
    while True:
        try:
            await client.schedule(
                topic,
                message.payload,
                key=message.key,
                headers=letter_headers(message, group) | detail,
                ordering_key=message.ordering_key,
                priority=message.priority,
                request_id=f"reject-{message.id}-{message.group_id}",
            )
        except InvalidRequest as error:
            if error.field == "headers" and detail:
                detail = {}
                continue
            if error.field != "request_id":
                raise  # else an earlier attempt has written the letter, and lost its ack
        return
