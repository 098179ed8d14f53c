"""timerctl push: sends the messages of a topic to a URL. It is a worker with one handler."""

import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from timerclient.cli.cli_args import (
    Commands,
    UsageError,
    add_start,
    duration,
    duration_text,
    tls_of,
    token_of,
)
from timerclient.cli.cli_worker import add_process_options, begin_log, check_port, run_worker
from timerclient.cli.contexts import apply_context
from timerclient.cli.missing_modules import why_missing

if TYPE_CHECKING:
    from timerclient.worker.http_target import HttpTarget

EXAMPLE: Final = (
    "Example: timerctl push orders --group billing --to https://app.example/timers/orders "
    "--secret-file secret --port 9100"
)


class PushCommands(Commands):
    """The command `push`."""

    def register_push(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments."""
        parser.description = f"{parser.description} docs/push.md describes the requests. {EXAMPLE}"
        parser.add_argument("topic", metavar="TOPIC", help="created if it does not exist")
        parser.add_argument("--group", required=True, help="created if it does not exist")
        parser.add_argument("--to", metavar="URL", required=True, help="http://… or https://…")
        parser.add_argument(
            "--concurrency",
            metavar="N",
            type=int,
            default=16,
            help="requests at a time; default: 16",
        )
        parser.add_argument(
            "--request-timeout",
            metavar="DURATION",
            type=duration,
            default=timedelta(seconds=30),
            help="time of one request, a third of it for the connection; default: 30s",
        )
        _add_retries(parser)
        _add_trust(parser)
        add_process_options(parser)
        parser.set_defaults(run=self._run)

    def _run(self, args: argparse.Namespace) -> int:
        check_port(args)
        if not timedelta(milliseconds=1) <= args.backoff_min <= args.backoff_max:
            limit = "must be 1ms or more, and at most --backoff-max"
            raise UsageError(f"--backoff-min {duration_text(args.backoff_min)}: {limit}")
        begin_log(args)
        apply_context(args)
        from timerclient.worker.retry_policy import Backoff
        from timerclient.worker.timer_app import TimerApp
        from timerclient.worker.worker import Worker

        app = TimerApp(args.endpoints, credentials=tls_of(args), token=token_of(args))
        app.push(
            args.topic,
            group=args.group,
            to=_target(args),
            concurrency=args.concurrency,
            retry=Backoff(args.backoff_min, max=args.backoff_max, attempts=args.max_attempts),
            start=args.start,
        )
        return run_worker(Worker(app, drain=args.drain), args)


def _add_retries(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-attempts",
        metavar="N",
        type=int,
        default=16,
        help="failures after which a message becomes a dead letter; 0: no limit; default: 16",
    )
    parser.add_argument(
        "--backoff-min",
        metavar="DURATION",
        type=duration,
        default=timedelta(seconds=1),
        help="delay after the first failure; it doubles with each further one; default: 1s",
    )
    parser.add_argument(
        "--backoff-max",
        metavar="DURATION",
        type=duration,
        default=timedelta(hours=1),
        help="longest such delay; default: 1h",
    )
    add_start(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        default=[],
        dest="headers",
        help="sent with each request; may be repeated. Other users of the machine see it",
    )
    parser.add_argument(
        "--header-file", metavar="FILE", help="lines NAME: VALUE; read again when it changes"
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="secret of the signature: whsec_ and base64; a second line during a rotation; read "
        "again when it changes",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="authorities of the certificate of the URL (PEM); default: the system's",
    )


def _target(args: argparse.Namespace) -> "HttpTarget":
    from timerclient.worker.http_target import HttpTarget

    headers = {}
    for text in args.headers:
        name, colon, value = text.partition(":")
        if not colon:
            raise UsageError("--header: must be NAME: VALUE")
        if (name := name.strip()) in headers:
            raise UsageError(f"--header {name!r}: must be given once")
        headers[name] = value.strip()
    try:
        return HttpTarget(
            args.to,
            timeout=args.request_timeout,
            headers=headers,
            header_file=args.header_file and Path(args.header_file),
            secret_file=args.secret_file and Path(args.secret_file),
            ca=args.ca,
        )
    except ModuleNotFoundError as error:
        raise UsageError(f"push {why_missing(error, 'push')}") from None
