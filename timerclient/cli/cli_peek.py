"""`timerctl peek TOPIC [--group G]`: messages, shown without a delivery."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import OK
from timerclient.rows.message_json import payload_fields
from timerclient.values.client_settings import PEEK_MAX
from timerclient.values.errors import InvalidRequest

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.rows.peeked_messages import PeekedMessage

MESSAGES_DEFAULT: Final = 10
PAYLOAD_MAX: Final = 40
"""Characters of a payload in a table, except with -o wide."""
_HEADINGS: Final = ("OFFSET", "ID", "STATE", "FAILED", "DUE", "FIRED", "KEY")
_WIDE: Final = frozenset(("DUE",))


def add_range(parser: argparse.ArgumentParser) -> None:
    """Add the options --offset and --limit."""
    parser.add_argument(
        "--offset", metavar="N", type=int, default=0, help="first queue offset; default: 0"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=MESSAGES_DEFAULT,
        help=f"most messages, 1 to {PEEK_MAX}; default: {MESSAGES_DEFAULT}",
    )


class PeekCommands(Commands):
    """The command `peek`."""

    def register_peek(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `peek`."""
        parser.set_defaults(run=self.peek)
        parser.description = (
            f"{parser.description} With --group: its unacked messages and their states, else all "
            "messages that the topic keeps. Nothing is leased. "
            "Example: timerctl peek orders --group billing --limit 20"
        )
        parser.add_argument("topic", metavar="TOPIC", help="topic of the messages")
        parser.add_argument(
            "--group", help="show its unacked messages only; default: all messages of the topic"
        )
        add_range(parser)

    def peek(
        self,
        args: argparse.Namespace,
        more: Mapping[str, Callable[[PeekedMessage], object]] = MappingProxyType({}),
        wide: frozenset[str] = _WIDE,
    ) -> int:
        """Show messages; see the module. `more`: further columns, before that of the payload."""
        if not 1 <= args.limit <= PEEK_MAX:
            raise InvalidRequest.of("--limit", args.limit, f"must be 1 to {PEEK_MAX}")
        if args.offset < 0:
            raise InvalidRequest.of("--offset", args.offset, "must not be negative")
        if args.group == "":
            raise InvalidRequest.of("--group", args.group, "must not be empty")
        from timerclient.rows.peeked_messages import document_of

        with self._connect(args) as client:
            found = client.peek(
                args.topic, args.group or "", max_messages=args.limit, from_offset=args.offset
            )
        rows = [
            (
                *_row(message),
                *(text(message) for text in more.values()),
                shown_payload(args, message.payload),
            )
            for message in found.messages
        ]
        headings = (*_HEADINGS, *more, "PAYLOAD")
        text = cli_args.table(args, headings, rows, wide) if rows else "no messages"
        text += f"\n… and more: --offset {found.next_offset}" if found.next_offset else ""
        document = {
            "messages": [document_of(message) for message in found.messages],
            "next_offset": found.next_offset or None,
        }
        self._put(args, document, text)
        return OK


def _row(message: PeekedMessage) -> tuple[Any, ...]:
    state = message.state.name.lower() if message.state else ""
    return (
        *(message.queue_offset, message.id, state, message.failures),
        *(output.instant(message.due_ms), output.instant(message.fired_at_ms), message.key),
    )


def payload_text(payload: bytes) -> str:
    """Return a payload for people: as text if it is UTF-8, else in base64, after "base64:"."""
    [(name, text)] = payload_fields(payload).items()
    return text if name == "payload" else f"base64:{text}"


def shown_payload(args: argparse.Namespace, payload: bytes) -> str:
    """Return the beginning of a payload for a table; with -o wide all of it."""
    return cli_args.shorten(args, payload_text(payload), PAYLOAD_MAX)
