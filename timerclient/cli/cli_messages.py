"""`timerctl schedule` and `consume`: single messages from a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands, UsageError, add_when, duration, non_empty, when_of
from timerclient.cli.cli_errors import OK, TOO_FEW, put_failure
from timerclient.cli.cli_peek import payload_text
from timerclient.rows.message_json import payload_fields
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest
from timerclient.values.results import ScheduleResult

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.rows.messages import Message


class MessageCommands(Commands):
    """The commands about single messages."""

    def register_schedule(self, schedule: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `schedule`."""
        schedule.set_defaults(run=self.schedule)
        _add_schedule(schedule)

    def register_consume(self, consume: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `consume`."""
        consume.set_defaults(run=self.consume)
        _add_consume(consume)

    def schedule(self, args: argparse.Namespace) -> int:
        """Schedule one message, or those of a file."""
        if args.source is not None:
            return self._bulk(args)
        if args.payload is None:
            raise UsageError(
                "the following arguments are required: PAYLOAD, or --from FILE", "timerctl schedule"
            )
        if args.skip:
            raise InvalidRequest.of("--skip", args.skip, "needs --from")
        if args.on_conflict and not args.key:
            raise InvalidRequest.of("--on-conflict", args.on_conflict, "needs --key")
        headers: dict[str, str] = {}
        for name, value in args.headers:
            if name in headers:
                raise InvalidRequest.of("--header", f"{name}={value}", "each name once")
            headers[name] = value
        import secrets

        is_piped = args.payload == "-"
        payload = cli_args.standard_input().read() if is_piped else os.fsencode(args.payload)
        with self._connect(args) as client:
            timer = client.schedule(
                args.topic,
                payload,
                key=args.key,
                on_conflict=args.on_conflict or "reject",
                headers=headers,
                ordering_key=args.ordering_key,
                priority=args.priority,
                request_id=args.request_id
                or secrets.token_hex(16),  # one request needs no producer
                **when_of(args),
            )
        document = {"id": timer.id, "due_ms": timer.due_ms, "duplicate": timer.duplicate}
        document["result"] = timer.result.name
        note = "" if timer.result is ScheduleResult.SCHEDULED else f"  {timer.result.name}"
        note += "  repeated" if timer.duplicate and args.request_id else ""
        self._put(args, document, f"{timer.id}  due {output.instant(timer.due_ms)}{note}")
        return OK

    def _bulk(self, args: argparse.Namespace) -> int:
        from timerclient.cli.cli_bulk import ID_BYTES, BulkSchedule  # for this command only

        own = args.payload, args.key, args.ordering_key, args.priority
        if any(each is not None for each in own) or args.headers:
            raise UsageError(
                "--from takes no PAYLOAD, --key, --ordering-key, --priority and --header: the lines"
                " have their own",
                "timerctl schedule",
            )
        if args.skip < 0:
            raise InvalidRequest.of("--skip", args.skip, "must not be negative")
        if len((args.request_id or "").encode()) > ID_BYTES:
            limit = f"with --from at most {ID_BYTES} bytes"
            raise InvalidRequest.of("--request-id", args.request_id, limit)
        with self._connect(args) as client:
            return BulkSchedule(args).run(client)

    def consume(self, args: argparse.Namespace) -> int:
        """Print a group's messages as they arrive; ack them, except with --no-ack."""
        if args.count is not None and args.count < 1:
            raise InvalidRequest.of("--count", args.count, "must be positive")
        idle = args.timeout if args.idle is None and args.count is not None else args.idle
        came = 0
        with (
            self._connect(args) as client,
            client.consumer(
                args.topic,
                args.group,
                lease=args.lease,
                start=args.start,
                max_messages=args.count,
            ) as consumer,
        ):
            unacked: list[Message] = []
            try:
                while messages := consumer.receive(1_000, timeout=idle):
                    came += len(messages)
                    for message in messages:
                        print(_line(args, message))
                    sys.stdout.flush()  # a message that could not be printed is not acked
                    if args.no_ack:
                        unacked += messages
                    else:
                        for message in messages:
                            _ = message.ack()  # confirmed at the end of the block
            finally:
                for message in unacked:
                    _ = message.give_back()
        if args.count is not None and came < args.count and idle is not None:
            waited = f"no further one within {cli_args.duration_text(idle)} (--idle)"
            text = f"{came} of {output.counted(args.count, 'message')} arrived; {waited}"
            return put_failure(args, "TOO_FEW", text, TOO_FEW)
        return OK


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Without a due time the timer fires at once. "
        "Examples: timerctl schedule orders 'remind 4711' --delay 30m; "
        "timerctl schedule orders --from timers.ndjson"
    )
    parser.add_argument("topic", metavar="TOPIC", help="created if it does not exist")
    parser.add_argument(
        "payload", metavar="PAYLOAD", nargs="?", help="text; - reads standard input"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="schedule one message per line of FILE (-: standard input). A line is a JSON object: "
        "payload or payload_base64; delay, delay_level, due or due_ms (default: the option); key, "
        "ordering_key, priority, headers, request_id. -o json prints one line for each",
    )
    parser.add_argument(
        "--skip", metavar="N", type=int, default=0, help="with --from: leave out the first N lines"
    )
    add_when(parser)
    parser.add_argument("--key", type=non_empty, help="unique among the topic's pending timers")
    parser.add_argument(
        "--ordering-key",
        metavar="KEY",
        type=non_empty,
        help="key_shared groups keep the order of messages with this key; default: --key",
    )
    parser.add_argument(
        "--priority",
        metavar="0..9",
        type=int,
        help="shared groups deliver ready messages of higher priority first; default: 4",
    )
    parser.add_argument(
        "--on-conflict",
        choices=("reject", "replace", "keep", "update"),
        help="with --key: the effect if a pending timer has the key; default: reject. "
        "update: replace it, and schedule nothing if there is none",
    )
    parser.add_argument(
        "--request-id",
        type=non_empty,
        help="a repeated command with the same id schedules nothing, for five minutes; with --from "
        "the id is that of the whole file",
    )
    parser.add_argument(
        "--header",
        metavar="NAME=VALUE",
        type=header,
        action="append",
        default=[],
        dest="headers",
        help="may be repeated",
    )


def _add_consume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", help="created if it does not exist")
    parser.add_argument("--group", required=True, help="created if it does not exist")
    parser.add_argument("--count", metavar="N", type=int, help="stop after N messages")
    parser.add_argument(
        "--idle",
        metavar="DURATION",
        type=duration,
        help="stop after this time without a message; default: with --count --timeout, else never",
    )
    parser.add_argument(
        "--no-ack",
        action="store_true",
        help="show messages without acking them. They return to the group at the end, without a "
        "failure if their leases have not ended",
    )
    parser.add_argument(
        "--lease",
        metavar="DURATION",
        type=cli_args.positive_duration,
        help="default: the group's own",
    )
    cli_args.add_start(parser)


def header(text: str) -> tuple[str, str]:
    """Return the (name, value) of "name=value"."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        msg = f"{text!r} is not NAME=VALUE"
        raise argparse.ArgumentTypeError(msg)
    return name, value


def _line(args: argparse.Namespace, message: Message) -> str:
    if args.output == "json":
        return output.to_json(_document(message), indent=None)
    due_ms = ids.due_ms_of(message.raw_id)
    return (
        f"{message.queue_offset}  {message.id}  due {output.instant(due_ms)}  "
        f"fired {output.instant(message.fired_at_ms)}  attempt {message.attempt}  "
        f"key {output.escape_controls(message.key or '-')}  "
        f"{output.escape_controls(payload_text(message.payload))}"
    )


def _document(message: Message) -> dict[str, Any]:
    """Return a message for JSON: its payload as text if it is UTF-8, else as base64.

    `due_ms` is the effective due time, as in the output of `schedule` and of `timers get`.
    """
    return {
        "id": message.id,
        "queue_offset": message.queue_offset,
        "due_ms": ids.due_ms_of(message.raw_id),
        "requested_ms": message.due_ms,
        "fired_at_ms": message.fired_at_ms,
        "attempt": message.attempt,
        "failures": message.failures,
        "key": message.key,
        "ordering_key": message.ordering_key,
        "priority": message.priority,
        "headers": message.headers,
        **payload_fields(message.payload),
    }
