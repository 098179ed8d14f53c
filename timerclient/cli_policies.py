"""`timerctl policies …`: what the cluster, namespaces and topics say about their timers.

policies show [SCOPE]
policies set SCOPE FIELD=VALUE... [--yes]
policies unset SCOPE FIELD...

SCOPE is `cluster`, NAMESPACE or NAMESPACE/TOPIC (default/TOPIC for a topic without a namespace); a
namespace that is called cluster is written `cluster/`.
"""

import argparse
import re
from datetime import timedelta
from typing import Any, Final

from timerclient import cli_args, policies, show
from timerclient.cli_args import Commands
from timerclient.errors import InvalidRequest
from timerclient.proto import timer_pb2 as pb

CLUSTER: Final = "cluster"
_FLAGS: Final = {"on": True, "true": True, "off": False, "false": False}
_SIZES: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MS: Final = timedelta(milliseconds=1)
_SCOPE_HELP: Final = "cluster, NAMESPACE or NAMESPACE/TOPIC; the default namespace is `default`"
_SET_HELP: Final = (
    "set fields, for what is scheduled from then on;"
    " pauses, quotas, ttl and retention for what is there, too"
)

_TAKE_AWAY: Final = {
    "ttl_ms": "What is older, and not acked, expires at once, in all groups.",
    "retention_ms": "What is older, and acked by all groups, is kept no longer.",
    "catch_up": "What is held is dropped when its topic is resumed.",
}
"""Fields that may end what is there, and what they do to it; of catch_up `drop` does."""


class PolicyCommands(Commands):
    """The commands of `policies`."""

    def register(self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
        """Add the commands to the parser of `policies`."""
        add = self.adding(parser, common)
        shown = add("show", self._show, "show what a scope says, and what holds for it")
        shown.add_argument("scope", metavar="SCOPE", nargs="?", default=CLUSTER, help=_SCOPE_HELP)
        fields = f"one of {', '.join(policies.FIELDS)}"
        to_set = add("set", self._alter, _SET_HELP)
        to_set.add_argument("scope", metavar="SCOPE", help=_SCOPE_HELP)
        to_set.add_argument("said", metavar="FIELD=VALUE", nargs="+", type=field_value, help=fields)
        to_set.add_argument("--yes", action="store_true", help="don't ask")
        to_set.set_defaults(unset=[])
        unset = add("unset", self._alter, "leave fields to the wider scope again")
        unset.add_argument("scope", metavar="SCOPE", help=_SCOPE_HELP)
        unset.add_argument("unset", metavar="FIELD", nargs="+", help=fields)
        unset.set_defaults(said=[], yes=True)

    def _show(self, args: argparse.Namespace) -> int:
        with self._connect(args) as client:
            self._print(args, client.describe_policies(**scope_of(args.scope)))
        return 0

    def _alter(self, args: argparse.Namespace) -> int:
        names = [name for name, _ in args.said]
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest.of(name, f"{names.count(name)} times", "set it once")
        said = dict(args.said)
        for name, so in _TAKE_AWAY.items():
            asks = said.get(name) == "drop" if name == "catch_up" else said.get(name)
            if asks and not (args.yes or cli_args.agreed(f"set the {name} of {args.scope}", so)):
                return 1
        with self._connect(args) as client:
            scope = scope_of(args.scope)
            self._print(args, client.alter_policies(dict(args.said), unset=args.unset, **scope))
        return 0

    def _print(self, args: argparse.Namespace, answer: pb.DescribePoliciesResponse) -> None:
        own, effective = policies.said(answer.own), policies.said(answer.effective)
        sources, narrower = dict(answer.sources), [*map(scope_text, answer.narrower)]
        document = {
            "scope": scope_text(answer.scope),
            "own": own,
            "effective": effective,
            "sources": sources,
            "narrower": narrower,
        }
        rows = [
            (name, _text(name, effective.get(name)), sources.get(name), _text(name, own.get(name)))
            for name in policies.FIELDS
        ]
        table = show.table(("FIELD", "EFFECTIVE", "FROM", "OWN"), rows)
        others = f"\n\nmore is said by: {', '.join(narrower)}" if narrower else ""
        self._put(args, document, f"{document['scope']}\n\n{table}{others}")


def scope_of(text: str) -> dict[str, str]:
    """Return which namespace or topic a text names; none: the cluster."""
    if text == CLUSTER:
        return {}
    namespace, slash, topic = text.partition("/")
    return {"topic": f"{namespace}/{topic}"} if slash and topic else {"namespace": namespace}


def scope_text(scope: pb.PolicyScope) -> str:
    """Return the text that names a scope."""
    if scope.topic:
        return scope.topic if "/" in scope.topic else f"default/{scope.topic}"
    return f"{CLUSTER}/" if scope.namespace == CLUSTER else scope.namespace or CLUSTER


def field_value(text: str) -> tuple[str, Any]:
    """Return the field and its value of "field=value"."""
    name, equals, value = text.partition("=")
    if not equals or name not in policies.FIELDS:
        msg = f"{text!r} is not FIELD=VALUE with one of {', '.join(policies.FIELDS)}"
        raise argparse.ArgumentTypeError(msg)
    if name in policies.TEXTS:
        return name, value
    if name in policies.FLAGS:
        if value not in _FLAGS:
            raise argparse.ArgumentTypeError(f"{name} = {value!r}: must be on or off")
        return name, _FLAGS[value]
    if name == policies.LEVELS:
        return name, [_milliseconds(name, part) for part in value.split(",")]
    return name, (_milliseconds if "_ms" in name else _size)(name, value)


def _milliseconds(name: str, text: str) -> int:
    """Return what "90s", or a bare number of milliseconds, stands for."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return -(-cli_args.duration(text) // _MS)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}; a bare number is in ms") from None


def _size(name: str, text: str) -> int:
    found = re.fullmatch(r"(-?\d+)(KiB|MiB|GiB|)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{name} = {text!r}: write 4096, 64KiB or 1MiB")
    return int(found[1]) * _SIZES[found[2]]


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "ttl_ms" and not value:
        return "none"
    if name == policies.LEVELS:
        return ",".join(map(_delay, value))
    return _delay(value) if "_ms" in name else str(value)


def _delay(ms: int) -> str:
    """Return a delay as `field_value` reads it."""
    return f"{ms}ms" if ms % 1000 else cli_args.duration_text(timedelta(milliseconds=ms))
