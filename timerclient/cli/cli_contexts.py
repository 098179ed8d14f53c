"""`timerctl context …`: named settings of connections; see contexts.py.

context add NAME --endpoints HOST:PORT,... [--tls-ca --tls-cert --tls-key --tls-server-name]
            [--token-file] [--use] [--replace]
context use NAME | none
context list
context show [NAME]
context remove NAME
"""

import argparse
from pathlib import Path
from typing import Any, Final

from timerclient.cli import cli_args, contexts
from timerclient.cli.cli_args import Commands, UsageError
from timerclient.cli.cli_errors import OK
from timerclient.cli.contexts import NONE, SETTINGS

_FILES: Final = ("tls_ca", "tls_cert", "tls_key")


class ContextCommands(Commands):
    """The commands of `context`."""

    def register_context(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `context`."""
        parser.description = f"{parser.description} {PRECEDENCE}"
        add = self.command_adder(parser, common, self._list)
        new = add("add", self._add, "keep --endpoints and the files of TLS under a name")
        new.description = (
            "Keep --endpoints and the files of TLS under a name. "
            "Example: timerctl context add prod --endpoints 10.0.0.1:7401,10.0.0.2:7401 --use"
        )
        new.add_argument("name", metavar="NAME")
        new.add_argument("--use", action="store_true", help="also make it the current context")
        new.add_argument("--replace", action="store_true", help="replace a context of that name")
        use = add("use", self._use, "make a context the current one; none: use no context")
        use.add_argument("name", metavar="NAME")
        add("list", self._list, "show the contexts; * marks the one in effect")
        show = add("show", self._show, "show the settings in effect, and the source of each")
        show.add_argument("name", metavar="NAME", nargs="?", help="show this context only")
        remove = add("remove", self._remove, "remove a context; the files of TLS stay")
        remove.add_argument("name", metavar="NAME")

    def _add(self, args: argparse.Namespace) -> int:
        contexts.check_context_name(args.name)
        own = _given_settings(args)
        known = contexts.load()
        if args.name in known.named and not args.replace:
            raise UsageError(f"context {args.name!r} exists in {known.path}; see --replace")
        known.named[args.name] = own
        known.current = args.name if args.use else known.current
        known.save()
        text = f"context {args.name} is kept in {known.path}"
        text += "" if known.current == args.name else f"; next: timerctl context use {args.name}"
        self._put(args, {"context": args.name, **own}, text)
        return OK

    def _use(self, args: argparse.Namespace) -> int:
        known = contexts.load()
        if args.name != NONE:
            known.get(args.name)
        known.current = "" if args.name == NONE else args.name
        known.save()
        text = f"the current context is {known.current or NONE}"
        self._put(args, {"current": known.current or None}, text)
        return OK

    def _list(self, args: argparse.Namespace) -> int:
        known = contexts.load()
        used = contexts.name_in_effect(args, known)
        rows = [
            ("*" if name == used else " ", name, own.get("endpoints"), "tls_ca" in own)
            for name, own in sorted(known.named.items())
        ]
        text = cli_args.table(args, ("", "NAME", "ENDPOINTS", "TLS"), rows) if rows else ""
        listed = [{"name": name, **known.named[name]} for _, name, *_ in rows]
        document = {"current": known.current or None, "in_effect": used or None, "contexts": listed}
        self._put(args, document, text or f"no contexts in {known.path}")
        return OK

    def _show(self, args: argparse.Namespace) -> int:
        if args.name:
            own = contexts.load().get(args.name)
            rows: list[tuple[Any, ...]] = [(key, own.get(key)) for key in SETTINGS]
            self._put(
                args, {"name": args.name, **own}, _set_rows_table(args, ("SETTING", "VALUE"), rows)
            )
            return OK
        found = contexts.settings_in_effect(args)
        rows = [(key, each.value, each.source) for key, each in found.items()]
        document = {
            key: {"value": each.value or None, "from": each.source} for key, each in found.items()
        }
        self._put(args, document, _set_rows_table(args, ("SETTING", "VALUE", "FROM"), rows))
        return OK

    def _remove(self, args: argparse.Namespace) -> int:
        known = contexts.load()
        known.get(args.name)
        del known.named[args.name]
        was_current = known.current == args.name
        known.current = "" if was_current else known.current
        known.save()
        text = f"context {args.name} is removed"
        text += "; there is no current context now" if was_current else ""
        self._put(args, {"removed": args.name}, text)
        return OK


PRECEDENCE: Final = (
    "A setting's value is that of its option, else of its TIMERCTL_… variable, else of the "
    "context, else the default. The context is that of --context, else of TIMERCTL_CONTEXT, else "
    "of `context use`; none: no context."
)


def _set_rows_table(
    args: argparse.Namespace, headings: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> str:
    return cli_args.table(args, headings, [row for row in rows if row[1]])


def _given_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of the options, with absolute paths.

    Raises:
        UsageError: --endpoints is absent, TLS is incomplete, or a file can't be read.
    """
    own = {key: vars(args)[key] for key in SETTINGS if vars(args)[key]}
    if "endpoints" not in own:
        raise UsageError("context add needs --endpoints HOST:PORT,...", "timerctl context add")
    for each in (each.strip() for each in own["endpoints"].split(",")):
        host, _, port = each.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65_535:
            raise UsageError(f"--endpoints = {each!r}: must be HOST:PORT, port 1 to 65535")
    if any(key in own for key in (*_FILES, "tls_server_name")):
        bare = "token_file" in own and not own.keys() & {"tls_cert", "tls_key"}
        needed = _FILES[:1] if bare else _FILES
        missing = [f"--{key.replace('_', '-')}" for key in needed if key not in own]
        if missing:
            raise UsageError(f"TLS also needs {' and '.join(missing)}")
    if "token_file" in own and "tls_ca" not in own:
        raise UsageError("a token is sent over TLS only, which needs --tls-ca")
    for key in (*_FILES, "token_file"):
        if key in own:
            path = Path(own[key]).absolute()
            if not path.is_file():
                raise UsageError(f"--{key.replace('_', '-')} = {own[key]!r}: no such file")
            own[key] = str(path)
    return own
