"""`timerctl policies …`: the policies of the cluster, of namespaces and of topics.

policies show [SCOPE]
policies set SCOPE FIELD=VALUE... [--yes]
policies unset SCOPE FIELD... [--yes]
policies export [FILE], apply FILE: see cli_policy_files.py

SCOPE is --cluster, --namespace NAMESPACE or --topic TOPIC. `show` without one shows the cluster's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from timerclient.cli import cli_args
from timerclient.cli.cli_args import Commands
from timerclient.values import policy_names
from timerclient.values.errors import InvalidRequest, NotFound

if TYPE_CHECKING:  # the client is loaded by a command that connects
    from timerclient.client.timer_client import TimerClient
    from timerclient.proto import timer_pb2 as pb
    from timerclient.values.policy_names import PolicyFields

CATCH_UP_ALL: Final = "all"
_FLAGS: Final = {"on": True, "true": True, "off": False, "false": False}
_SIZES: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MS: Final = timedelta(milliseconds=1)
_SET_HELP: Final = (
    "set fields for timers that are scheduled later;"
    " pauses, quotas, ttl and retention also apply to existing timers and messages"
)

_EFFECTS_TO_CONFIRM: Final = {
    "ttl_ms": "Older messages without an ack expire at once, in all groups.",
    "retention_ms": "Older messages that all groups have acked, or without a group, are deleted.",
    "catch_up": "Held timers may be dropped when their topic is resumed: all, or all but the last.",
    "paused": "Held timers fire, or are dropped, depending on catch_up.",
}
"""Fields that may end existing timers or messages, each with its effect."""


class PolicyCommands(Commands):
    """The commands of `policies`."""

    def register_policies(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser
    ) -> None:
        """Add the commands to the parser of `policies`."""
        add = self.command_adder(parser, common)
        shown = add("show", self._show, "show a scope's own and effective fields")
        _add_scope(shown, required=False)
        fields = f"one of {', '.join(policy_names.FIELDS)}"
        to_set = add("set", self._alter, _SET_HELP)
        _add_scope(to_set, of_topic="; created if it does not exist")
        values = f"{fields}: docs/settings.md. A bare number of a duration is in milliseconds"
        to_set.add_argument(
            "fields", metavar="FIELD=VALUE", nargs="+", type=field_value, help=values
        )
        cli_args.add_yes(to_set)
        to_set.set_defaults(unset=[])
        unset = add("unset", self._alter, "unset fields; they follow the wider scope again")
        _add_scope(unset)
        unset.add_argument("unset", metavar="FIELD", nargs="+", help=fields)
        cli_args.add_yes(unset)
        unset.set_defaults(fields=[])
        self._add_of_files(add)

    def _add_of_files(self, add: cli_args.Add) -> None:
        """Add `export` and `apply`. Their module is loaded when one of them runs."""
        export = add("export", self._export, "print the policies of all scopes, or write them")
        export.add_argument(
            "file", metavar="FILE", nargs="?", help="TOML, or JSON if it ends in .json; - prints"
        )
        apply = add("apply", self._apply, "make the policies those of a file, after a diff")
        apply.add_argument(
            "file", metavar="FILE", help="as `export` writes it; - reads standard input"
        )
        apply.add_argument(
            "--prune", action="store_true", help="unset all fields of scopes that FILE leaves out"
        )
        apply.add_argument("--dry-run", action="store_true", help="only print the diff")
        cli_args.add_yes(apply)

    def _export(self, args: argparse.Namespace) -> int:
        from timerclient.cli.cli_policy_files import PolicyFileCommands

        return PolicyFileCommands(self._connect, self._put).export(args)

    def _apply(self, args: argparse.Namespace) -> int:
        from timerclient.cli.cli_policy_files import PolicyFileCommands

        return PolicyFileCommands(self._connect, self._put).apply(args)

    def _show(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._print(args, client.describe_policies(**scope_of(args)))
        return 0

    def _alter(self, args: argparse.Namespace) -> int:
        from timerclient.rows import policy_fields

        names = [name for name, _ in args.fields]
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest.of(name, f"{names.count(name)} times", "set it once")
        fields, scope = dict(args.fields), scope_of(args)
        with self._connect(args) as client:
            for name, so in _EFFECTS_TO_CONFIRM.items():
                touched = name in fields or name in args.unset
                if args.yes or not touched or _is_harmless(client, scope, name, fields):
                    continue
                whose = scope_text(policy_fields.scope(**scope))
                change = f"{'set' if name in fields else 'unset'} {name} of {whose}"
                if not cli_args.confirm(args, change, so):
                    return 1
            changed = client.alter_policies(
                cast("PolicyFields", fields), unset=args.unset, cluster=args.cluster, **scope
            )
            self._print(args, changed)
        return 0

    def _print(self, args: argparse.Namespace, answer: pb.DescribePoliciesResponse) -> None:
        from timerclient.rows import policy_fields

        own, effective = (
            policy_fields.fields_of(answer.own),
            policy_fields.fields_of(answer.effective),
        )
        sources = dict(answer.sources)
        document = {
            "scope": scope_document(answer.scope),
            "own": own,
            "effective": effective,
            "sources": sources,
            "narrower": [*map(scope_document, answer.narrower)],
        }
        rows = [
            (
                name,
                value_text(name, effective.get(name)),
                sources.get(name),
                value_text(name, own.get(name)),
            )
            for name in policy_names.FIELDS
        ]
        table = cli_args.table(args, ("FIELD", "EFFECTIVE", "FROM", "OWN"), rows)
        narrower = ", ".join(map(scope_text, answer.narrower))
        others = f"\n\nalso set by: {narrower}" if narrower else ""
        self._put(args, document, f"{scope_text(answer.scope)}\n\n{table}{others}")


def _is_harmless(
    client: TimerClient, scope: Mapping[str, str], name: str, fields: Mapping[str, Any]
) -> bool:
    """Return whether a change of a field certainly ends no timer or message."""
    if name != "paused":
        return name in fields and fields[name] == {"ttl_ms": 0, "catch_up": CATCH_UP_ALL}.get(name)
    if fields.get(name):
        return True
    try:
        found = client.describe_policies(**scope)
    except NotFound:  # a new topic holds nothing
        return True
    inside = (
        client.describe_policies(namespace=each.namespace or None, topic=each.topic or None)
        for each in found.narrower
    )
    ways = {
        fields.get("catch_up", found.effective.catch_up),
        *(each.own.catch_up for each in inside),
    }
    return ways <= {CATCH_UP_ALL, ""}


def _add_scope(
    parser: argparse.ArgumentParser, *, required: bool = True, of_topic: str = ""
) -> None:
    scope = parser.add_mutually_exclusive_group(required=required)
    topic = f"one topic, such as orders or payments/due{of_topic}"
    scope.add_argument("--topic", metavar="TOPIC", help=topic)
    scope.add_argument("--namespace", metavar="NAMESPACE", help="every topic of a namespace")
    scope.add_argument("--cluster", action="store_true", help="every topic")


def scope_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the namespace or the topic that was given; neither: the cluster."""
    given = {"topic": args.topic, "namespace": args.namespace}
    return {kind: name for kind, name in given.items() if name is not None}


def scope_document(scope: pb.PolicyScope) -> dict[str, str | bool]:
    """Return a scope for JSON: its kind and its name."""
    if scope.topic:
        return {"topic": scope.topic if "/" in scope.topic else f"default/{scope.topic}"}
    return {"namespace": scope.namespace} if scope.namespace else {"cluster": True}


def scope_text(scope: pb.PolicyScope) -> str:
    """Return a scope for people: topic default/orders, namespace payments, the cluster."""
    [(kind, name)] = scope_document(scope).items()
    return "the cluster" if kind == "cluster" else f"{kind} {name}"


def field_value(text: str) -> tuple[str, Any]:
    """Return the field and the value of "field=value"."""
    name, equals, value = text.partition("=")
    if not equals or name not in policy_names.FIELDS:
        wrong = f"{text!r} is not FIELD=VALUE. The scope needs --topic, --namespace or --cluster;"
        if equals:
            near = cli_args.similar_hint(name, policy_names.FIELDS)
            wrong = f"{name!r} is not a field{near or ';'}"
        msg = f"{wrong} fields: {', '.join(policy_names.FIELDS)}"
        raise argparse.ArgumentTypeError(msg)
    if name in policy_names.TEXTS:
        return name, value
    if name in policy_names.FLAGS:
        if value not in _FLAGS:
            raise argparse.ArgumentTypeError(f"{name} = {value!r}: must be on or off")
        return name, _FLAGS[value]
    if name == policy_names.LEVELS:
        return name, [_milliseconds(name, part) for part in value.split(",")]
    return name, (_milliseconds if "_ms" in name else _size)(name, value)


def _milliseconds(name: str, text: str) -> int:
    """Return the milliseconds of "90s", or of a bare number of milliseconds."""
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{name} = {text!r}: must not be negative")
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"\d+\.\d+", text):  # `duration` would take it for seconds
        limit = "must be a whole number of ms, or have a unit, such as 90s"
        raise argparse.ArgumentTypeError(f"{name} = {text!r}: {limit}")
    try:
        return -(-cli_args.duration(text) // _MS)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}; a bare number is in ms") from None


def _size(name: str, text: str) -> int:
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{name} = {text!r}: must not be negative")
    found = re.fullmatch(r"(\d+)(KiB|MiB|GiB|)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{name} = {text!r}: write 4096, 64KiB or 1MiB")
    return int(found[1]) * _SIZES[found[2]]


def value_text(name: str, value: Any) -> str:
    """Return a field's value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "ttl_ms" and not value:
        return "none"
    if name == policy_names.LEVELS:
        return ",".join(map(_delay, value))
    return _delay(value) if "_ms" in name else str(value)


def _delay(ms: int) -> str:
    """Return a delay as `field_value` reads it."""
    return f"{ms}ms" if ms % 1000 else cli_args.duration_text(timedelta(milliseconds=ms))
