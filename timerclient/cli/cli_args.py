"""Shared parts of timerctl's commands: parser, durations, times, tables, confirmations."""

import argparse
import itertools
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn

from timerclient.cli import output
from timerclient.cli.colours import add_color, colours

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.rows.rows import DueTime
    from timerclient.values.client_tls import ClientTls

DEFAULT_ENDPOINTS: Final = "127.0.0.1:7401,127.0.0.1:7402,127.0.0.1:7403"
ENDPOINTS_VARIABLE: Final = "TIMERCTL_ENDPOINTS"
_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+", re.ASCII)


Connect = Callable[[argparse.Namespace], "TimerClient"]
Print = Callable[[argparse.Namespace, Any, str], None]
Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


class UsageError(Exception):
    """The command line is wrong. `command`: the command's words; empty: its help does not help."""

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command


TLS_OPTIONS: Final = (
    (
        "ca",
        "authorities of the nodes' certificates (PEM); needs --tls-cert and --tls-key, or a token",
    ),
    ("cert", "your certificate (PEM)"),
    ("key", "your private key (PEM)"),
    ("server-name", "DNS name in every node's certificate, in place of the endpoint's host"),
)
"""Options of TLS. The default of --tls-ca is the variable TIMERCTL_TLS_CA, and so on."""


TOKEN_VARIABLE: Final = "TIMERCTL_TOKEN"  # noqa: S105 - a name
"""A variable with a bearer token itself; no option has it, as other users see command lines."""


def variable_of(option: str) -> str:
    """Return the environment variable of an option of the connection: tls_ca -> TIMERCTL_TLS_CA."""
    return f"TIMERCTL_{option.upper().replace('-', '_')}"


def add_connection(
    parser: argparse._ActionsContainer, default: str | None, absent: str = "default"
) -> None:
    """Add the options of the connection. `default`: of all: None or SUPPRESS.

    The function `apply_context` gives the absent ones a value. `absent`: introduces it in the help.
    """
    parser.add_argument(
        "--endpoints",
        metavar="HOST:PORT,...",
        default=default,
        help=f"gRPC addresses of some nodes; {absent}: ${ENDPOINTS_VARIABLE}, else the context's, "
        f"else {DEFAULT_ENDPOINTS}",
    )
    for name, text in TLS_OPTIONS:
        parser.add_argument(
            f"--tls-{name}",
            metavar="NAME" if name == "server-name" else "FILE",
            default=default,
            help=f"{text}; {absent}: ${variable_of(f'tls-{name}')}, else the context's",
        )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default=default,
        help=f"file with your bearer token, in place of a certificate; {absent}: ${TOKEN_VARIABLE} "
        f"(the token itself), else ${variable_of('token-file')}, else the context's",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        default=default,
        help="settings kept by `timerctl context add`; none: no context; "
        f"{absent}: ${variable_of('context')}, else that of `timerctl context use`",
    )


def tls_of(args: argparse.Namespace) -> "ClientTls | None":
    """Return the files of the options. None: no TLS.

    Raises:
        UsageError: Only some are given.
    """
    token = token_of(args)
    if not (args.tls_ca or args.tls_cert or args.tls_key):
        if token is not None:
            raise UsageError("a token is sent over TLS only, which needs --tls-ca")
        return None
    bare = token is not None and not (args.tls_cert or args.tls_key)
    needed = ("ca",) if bare else ("ca", "cert", "key")
    missing = [f"--tls-{name}" for name in needed if not vars(args)[f"tls_{name}"]]
    if missing:
        raise UsageError(f"TLS also needs {' and '.join(missing)}")
    from timerclient.values.client_tls import ClientTls

    return ClientTls(
        ca=args.tls_ca,
        certificate=args.tls_cert or "",
        key=args.tls_key or "",
        server_name=args.tls_server_name,
    )


def token_of(args: argparse.Namespace) -> str | Path | None:
    """Return the bearer token, or the path of its file. None: there is none."""
    given: str | None = vars(args).get("token")
    return given or (Path(args.token_file) if args.token_file else None)


CHOICES_SHOWN_MAX: Final = 12
"""Commands that an error lists at most."""
SYNONYMS: Final = (
    ("get", "show", "describe", "list"),
    ("create", "new", "add", "apply"),
    ("delete", "remove", "unset"),
    ("alter", "set"),
)
"""Words for one thing, of which a command has one or two."""
FULL_COMMANDS: Final = {
    "get": "timers get",
    "list": "timers list",
    "count": "timers count",
    "story": "timers story",
    "pause": "topics pause",
    "resume": "topics resume",
    "seek": "groups seek",
    "redrive": "deadletters redrive",
    "purge": "deadletters purge",
    "up": "local up",
    "down": "local down",
}
"""Commands that stand below a word."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, so that one place prints every error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation takes values that are not meant for it: --to would be --token-file.
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # "-5s" is a value, not an option

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and reject unknown arguments in the command that got them.

        The namespace gets the names of the command's options, as `options`.

        Raises:
            UsageError: The command line is wrong.
        """
        try:
            found, unknown = super().parse_known_args(args, namespace)
        except UsageError as error:
            found, unknown = namespace, self._unknown_options(args or ())
            if not unknown or error.command != self.prog or "required" not in str(error):
                raise
        if unknown:
            options = [o for o in self._option_string_actions if o.startswith("--")]
            hints = [similar_hint(word.partition("=")[0], options) for word in unknown]
            hint = next(filter(None, hints), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if not hasattr(found, "options"):  # those of the innermost command stay
            found.options = frozenset(self._option_string_actions)
        return found, unknown

    def _unknown_options(self, args: Sequence[str]) -> list[str]:
        """Return the options that this parser does not have, of a command that lacks arguments."""
        words = itertools.takewhile(lambda word: word != "--", args)
        options = [word for word in words if re.match(r"--[a-z]\S*$", word)]
        return [
            word for word in options if word.partition("=")[0] not in self._option_string_actions
        ]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [*map(str, action.choices or ())]
            of_timerctl = "status" in choices
            named = {value: FULL_COMMANDS.get(value, "")} if of_timerctl else {}
            alike = [
                each for words in SYNONYMS if value in words for each in choices if each in words
            ]
            near = named.get(value) or next(iter(alike), "")
            hint = f"; did you mean {near}?" if near else similar_hint(str(value), choices)
            head, between, tail = str(error.message).partition(" (choose from")
            error.message = f"{head}{hint}{between}{tail}"
            raise

    def error(self, message: str) -> NoReturn:
        """Raise the error.

        Raises:
            UsageError: Always.
        """
        for action in self._actions:
            names = [*map(str, action.choices or ())]
            is_missing = message.endswith(f"required: {action.metavar}")
            if is_missing and 0 < len(names) <= CHOICES_SHOWN_MAX:
                message += f": {', '.join(names)}"
        raise UsageError(message, self.prog)


class LateParser(Parser):
    """A parser that is made when it is first used. A command line uses few of all commands'.

    `fill` adds the arguments. None: the caller adds them, which uses the parser.
    """

    def __init__(
        self, fill: Callable[[argparse.ArgumentParser], None] | None = None, **kwargs: Any
    ) -> None:
        self._make_arguments = fill, kwargs

    def _check_help(self, _: argparse.Action) -> None:
        """Check no help text, as Python 3.14 does at once: that would make the parser."""

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if "_make_arguments" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
            fill, kwargs = vars(self).pop("_make_arguments")
            super().__init__(**kwargs)
            if fill is not None:
                fill(self)
            return getattr(self, name)


def similar_hint(word: str, words: Sequence[str]) -> str:
    """Return a hint at the most similar of `words`; empty: none is similar."""
    import difflib

    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def table(
    args: argparse.Namespace,
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    wide_only: Collection[str] = (),
    spare: Sequence[str] = (),
) -> str:
    """Return a table that fits the terminal.

    With `-o wide` the table has every column, uncut. Else it has no columns in `wide_only`. On a
    narrow terminal columns in `spare` are left out, in this order; then the longest texts are cut
    until the lines fit.
    """
    if args.output == "wide":
        return output.table(headings, rows, colours=colours(args, headings, rows))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    heads, shown = _columns(headings, rows, [each for each in headings if each not in wide_only])
    if width is not None and spare:
        heads, shown = _columns(heads, shown, output.headings_that_fit(heads, shown, width, spare))
    return output.table(heads, shown, width, colours(args, heads, shown))


def shorten(args: argparse.Namespace, text: str, most: int) -> str:
    """Return the first characters of a text for a table, at most `most`; with -o wide all."""
    return text if args.output == "wide" or len(text) <= most else f"{text[: most - 1]}…"


def _columns(
    headings: Sequence[str], rows: Sequence[Sequence[Any]], shown: Collection[str]
) -> tuple[list[str], list[list[Any]]]:
    """Return the headings `shown`, and their columns."""
    heads, *found = (
        [cell for cell, heading in zip(row, headings, strict=True) if heading in shown]
        for row in (headings, *rows)
    )
    return heads, found


def help_arguments(text: str) -> dict[str, Any]:
    """Return the arguments `help` and `description` of a command's parser."""
    return {"help": text, "description": f"{text[0].upper()}{text[1:]}."}


class Commands:
    """The commands under one word.

    `connect` makes a client; `put` prints a document, or its text. A method
    `register_WORD` gets the parser of a word, and a parser with the options of every command for
    the words below it.
    """

    def __init__(self, connect: Connect, put: Print) -> None:
        self._connect = connect
        self._put = put

    @staticmethod
    def command_adder(
        parser: argparse.ArgumentParser,
        common: argparse.ArgumentParser,
        default: Callable[[argparse.Namespace], int] | None = None,
    ) -> Add:
        """Return a function that adds a command to the word's parser: name, function, help line.

        `default` runs where the word stands alone. None: a command is required.
        """
        commands = parser.add_subparsers(
            title="commands", metavar="COMMAND", required=default is None
        )
        if default is not None:
            parser.set_defaults(run=default)

        def add(
            name: str, run: Callable[[argparse.Namespace], int], text: str
        ) -> argparse.ArgumentParser:
            command = commands.add_parser(name, parents=[common], **help_arguments(text))
            command.set_defaults(run=run)
            return command

        return add


def add_output(parser: argparse._ActionsContainer, default: str = argparse.SUPPRESS) -> None:
    """Add the option -o. `default`: SUPPRESS: that of the outer parser stays."""
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default=default,
        help="table: cut to the terminal's width; wide: every column, uncut; default: table",
    )
    add_color(parser, argparse.SUPPRESS if default == argparse.SUPPRESS else "auto")


def add_yes(parser: argparse.ArgumentParser, text: str = "don't ask for confirmation") -> None:
    """Add the option --yes, for `confirm`."""
    parser.add_argument("--yes", action="store_true", help=text)


def confirm(args: argparse.Namespace, change: str, effect: str) -> bool:
    """Without --yes, ask at the terminal to confirm a `change`, which has this `effect`.

    Raises:
        UsageError: There is no terminal.
    """
    if args.yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        msg = f"{change} needs --yes without a terminal; nothing was changed"
        raise UsageError(msg)
    sys.stderr.write(f"{change}? {effect} [y/N] ")  # stdout may be a file
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("nothing was changed\n")
    return False


def standard_input() -> BinaryIO:
    """Return the standard input, of bytes.

    Raises:
        UsageError: It is closed.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed, and - reads it")
    return sys.stdin.buffer


def non_empty(text: str) -> str:
    """Return a text that is not empty, as that of an unset variable of the shell is."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def duration(text: str) -> timedelta:
    """Return the duration of "90s", "1h30m" or "250ms"; a bare number is in seconds."""
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} must not be negative")
    plain = f"{text}s" if re.fullmatch(r"\d+(\.\d+)?", text) else text
    if not _DURATION.fullmatch(plain):
        msg = f"{text!r} is not a duration; write 250ms, 90s, 1h30m or 2d"
        raise argparse.ArgumentTypeError(msg)
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", plain)
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        msg = f"{text!r} is longer than {timedelta.max.days}d"
        raise argparse.ArgumentTypeError(msg) from None


def positive_duration(text: str) -> timedelta:
    """Return the duration of a text, which is not 0."""
    found = duration(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be longer than 0")
    return found


def days(most: int) -> Callable[[str], int]:
    """Return the reader of an option in days, 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: must be 1 to {most} days")
        return int(text)

    return read


def aware_time(text: str) -> datetime:
    """Return the time of an ISO 8601 text with a UTC offset."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        msg = f"{text!r} is not an ISO 8601 time, such as 2030-01-01T09:00:00+01:00"
        raise argparse.ArgumentTypeError(msg) from None
    if moment.utcoffset() is None:
        msg = f"{text!r} needs a UTC offset, such as Z or +01:00"
        raise argparse.ArgumentTypeError(msg)
    return moment


def duration_text(span: timedelta) -> str:
    """Return a duration as `duration` reads it, in one unit."""
    if span % timedelta(seconds=1):
        return f"{round(span / timedelta(milliseconds=1))}ms"
    seconds = round(span.total_seconds())
    if not seconds:
        return "0s"
    unit = next(u for u in ("d", "h", "m", "s") if not seconds % int(_UNITS[u]) or u == "s")
    return f"{seconds // int(_UNITS[unit])}{unit}"


def add_when(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options for a due time, of which at most one may be given."""
    when = parser.add_mutually_exclusive_group(required=required)
    when.add_argument(
        "--delay",
        metavar="DURATION",
        type=duration,
        help="such as 90s or 1h30m; a bare number is in seconds",
    )
    when.add_argument(
        "--delay-level", metavar="N", type=int, help="the topic's Nth delay; 0: at once"
    )
    when.add_argument(
        "--due", metavar="ISO", type=aware_time, help="such as 2030-01-01T09:00:00+01:00"
    )
    when.add_argument("--due-ms", metavar="MS", type=int, help="Unix milliseconds")


def when_of(args: argparse.Namespace) -> "DueTime":
    """Return the due time that was given."""
    return {
        "delay": args.delay,
        "delay_level": args.delay_level,
        "due": args.due,
        "due_ms": args.due_ms,
    }


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add the option --from of a command that consumes; `start` is its value."""
    parser.add_argument(
        "--from",
        dest="start",
        choices=("earliest", "latest"),
        default="earliest",
        help="where the group begins if this command creates it; default: earliest",
    )


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Let the first SIGTERM raise SystemExit in the block. A second one ends the process at once.

    Raises:
        SystemExit: SIGTERM arrived. Its status is that of a process that the signal ended.
    """

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
