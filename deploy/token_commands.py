"""`timerctl tokens …`: makes bearer tokens, and shows those of a file.

tokens new NAME [--valid DAYS]
tokens show FILE

`timerctl --help` imports this module, so a command itself imports the modules of the node.
"""

import argparse
import datetime
import hashlib
import secrets
import sys
import time
from pathlib import Path
from typing import Any, Final

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import UsageError
from timerclient.cli.cli_errors import put_failure

VALID_DAYS: Final = 90
DAYS_MAX: Final = 3_650
RANDOM_BYTES: Final = 32
PREFIX: Final = "timer_"
"""Beginning of each token, by which scanners for secrets find one in a repository."""


def register(subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Add `timerctl tokens`. Its parser sets `run`, which takes the parsed arguments."""
    tokens = subparsers.add_parser(
        "tokens", **cli_args.help_arguments("make and show bearer tokens")
    )
    actions = tokens.add_subparsers(metavar="ACTION", required=True)
    new = actions.add_parser("new", **cli_args.help_arguments("make a token; it is printed once"))
    new.add_argument(
        "name", metavar="NAME", help="name of the token, token/NAME in the rules of access"
    )
    new.add_argument(
        "--valid",
        metavar="DAYS",
        type=cli_args.days(DAYS_MAX),
        default=VALID_DAYS,
        help=f"days until the token expires; default: {VALID_DAYS}",
    )
    new.set_defaults(run=_new)
    show = actions.add_parser("show", **cli_args.help_arguments("show the tokens of a file"))
    show.add_argument(
        "file", metavar="FILE", type=Path, help="file of tokens, as in the setting tls.tokens"
    )
    show.set_defaults(run=_show)
    for each in (new, show):
        cli_args.add_output(each)


def _new(args: argparse.Namespace) -> int:
    from cluster.settings.names import NAME, NAME_RULE

    if not NAME.fullmatch(args.name):
        raise UsageError(f"NAME = {args.name!r}: must be {NAME_RULE}", "timerctl tokens new")
    token = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    sha256 = hashlib.sha256(token.encode()).hexdigest()
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=args.valid)
    expires = f"{until:%Y-%m-%dT%H:%M:%SZ}"
    entry = f'[[token]]\nname = "{args.name}"\nsha256 = "{sha256}"\nexpires = {expires}\n'
    if args.output == "json":
        found = {"name": args.name, "token": token, "sha256": sha256, "expires": expires}
        print(output.to_json(found | {"entry": entry}))
    else:
        print(f"{token}\n\n{entry}", end="")
        sys.stderr.write(
            "The first line is the token; nothing shows it again. "
            "Append the rest to the nodes' file tls.tokens.\n"
        )
    return 0


def _show(args: argparse.Namespace) -> int:
    from cluster.security.token_hashes import parse_tokens
    from timer.model.timer_errors import ConfigError

    try:
        found = parse_tokens(args.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        why = f"{args.file}: {getattr(error, 'strerror', None) or error}"
        return put_failure(args, "TOKENS", why)
    now_s = time.time()
    rows = [
        (
            f"token/{each.name}",
            each.sha256.hex()[:12],
            output.instant(int(each.expires_s * 1000)),
            "expired" if each.expires_s <= now_s else "in force",
        )
        for each in found
    ]
    if args.output == "json":
        keys = ("identity", "sha256", "expires", "state")
        print(output.to_json({"tokens": [dict(zip(keys, row, strict=True)) for row in rows]}))
    else:
        print(cli_args.table(args, ("IDENTITY", "SHA256", "EXPIRES", "STATE"), rows))
    return 0
