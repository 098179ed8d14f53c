"""`timerctl policies export` and `apply`: the policies of all scopes, in a file.

    [cluster]
    ttl_ms = 86400000

    [topic."payments/due"]
    paused = true
    delay_levels_ms = [1000, 5000]

    policies export [FILE]
    policies apply FILE [--prune] [--dry-run] [--yes]

A file is TOML, or JSON of the same structure if its name ends in .json. A scope in the file gets
exactly its fields there. Other scopes stay, or with --prune lose their fields.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from timerclient.cli import cli_args, output
from timerclient.cli.cli_args import Commands, UsageError
from timerclient.cli.cli_errors import FAILED
from timerclient.client.timer_client import TimerClient
from timerclient.rows import policy_fields
from timerclient.values import policy_names
from timerclient.values.errors import InvalidRequest, NotFound, TimerError
from timerclient.values.policy_names import PolicyFields

CLUSTER: Final = ("cluster", "")
_KINDS: Final = ("namespace", "topic")

ScopeKey = tuple[str, str]
"""cluster, namespace or topic, and the name; topics of the namespace `default` without it."""
PolicySet = dict[ScopeKey, dict[str, Any]]
"""Own fields of each scope that sets some."""


@dataclass(frozen=True, slots=True)
class ScopeChange:
    """The change of one scope."""

    scope: ScopeKey
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def set(self) -> dict[str, Any]:
        """Fields with new values."""
        return {name: v for name, v in self.after.items() if self.before.get(name) != v}

    @property
    def unset(self) -> list[str]:
        """Fields without a value now."""
        return [name for name in self.before if name not in self.after]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the diff."""
        yield scope_heading(self.scope)
        for name in policy_names.FIELDS:
            old, new = self.before.get(name), self.after.get(name)
            if old == new:
                continue
            if old is not None:
                yield f"  - {name} = {_value(old)}"
            if new is not None:
                yield f"  + {name} = {_value(new)}"


def scope_heading(scope: ScopeKey) -> str:
    """Return a scope for people."""
    return "the cluster" if scope == CLUSTER else " ".join(scope)


def changes_of(now: PolicySet, wanted: PolicySet, *, prune: bool) -> list[ScopeChange]:
    """Return the changes from `now` to `wanted`: the cluster, then namespaces, then topics."""
    scopes = [*wanted, *(now.keys() - wanted.keys() if prune else ())]
    found = [ScopeChange(each, now.get(each, {}), wanted.get(each, {})) for each in sorted(scopes)]
    return [each for each in found if each.before != each.after]


def to_toml(policies: PolicySet) -> str:
    """Return a file's text."""
    tables = []
    for scope, fields in sorted(policies.items()):
        heading = "cluster" if scope == CLUSTER else f"{scope[0]}.{_value(scope[1])}"
        lines = [f"{name} = {_value(value)}" for name, value in fields.items()]
        tables.append("\n".join([f"[{heading}]", *lines]) + "\n")
    return "\n".join(tables)


def to_document(policies: PolicySet) -> dict[str, Any]:
    """Return a file's contents as JSON's types."""
    document: dict[str, Any] = {}
    for (kind, name), fields in sorted(policies.items()):
        if kind == "cluster":
            document[kind] = fields
        else:
            document.setdefault(kind, {})[name] = fields
    return document


def from_document(document: Mapping[str, Any]) -> PolicySet:
    """Return the policies of a file's contents.

    Raises:
        UsageError: The structure is another one, or a field or its value is not allowed.
    """
    found: PolicySet = {}
    for kind, tables in document.items():
        if kind not in ("cluster", *_KINDS) or not isinstance(tables, dict):
            raise UsageError(f"{kind!r}: must be a table cluster, namespace.NAME or topic.NAME")
        for name, fields in ({"": tables} if kind == "cluster" else tables).items():
            scope = (kind, name.removeprefix("default/") if kind == "topic" else name)
            if not isinstance(fields, dict):
                raise UsageError(f"{kind}.{name}: must be a table of fields")
            if scope in found:
                raise UsageError(f"{scope_heading(scope)}: is given twice")
            try:
                policy_fields.scope(**_arguments(scope))
                found[scope] = policy_fields.fields_of(policy_fields.policy_of(fields))
            except InvalidRequest as error:
                raise UsageError(f"{scope_heading(scope)}: {error}") from None
    return found


def read_file(path: str) -> PolicySet:
    """Return the policies in a file; -: TOML from the standard input.

    Raises:
        UsageError: It can't be read, or is no such file, or a field or its value is not allowed.
    """
    try:
        is_piped = path == "-"
        text = (cli_args.standard_input().read() if is_piped else Path(path).read_bytes()).decode()
        document = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of the parsers, too
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: must be an object")
    try:
        return from_document(document)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def read_cluster(client: TimerClient) -> PolicySet:
    """Return the policies of all scopes of a cluster that set fields."""
    whole = client.describe_policies()
    found: PolicySet = {CLUSTER: policy_fields.fields_of(whole.own)}
    for scope in whole.narrower:
        kind, name = ("topic", scope.topic) if scope.topic else ("namespace", scope.namespace)
        found[kind, name.removeprefix("default/") if scope.topic else name] = _own(
            client, (kind, name)
        )
    return {scope: fields for scope, fields in found.items() if fields}


def _own(client: TimerClient, scope: ScopeKey) -> dict[str, Any]:
    try:
        return policy_fields.fields_of(client.describe_policies(**_arguments(scope)).own)
    except NotFound:  # deleted meanwhile
        return {}


def _arguments(scope: ScopeKey) -> dict[str, str]:
    return {} if scope == CLUSTER else {scope[0]: scope[1]}


def _value(value: Any) -> str:
    """Return a value as TOML and JSON write it."""
    return json.dumps(value, ensure_ascii=False)


class PolicyFileCommands(Commands):
    """`policies export` and `apply`."""

    def export(self, args: argparse.Namespace) -> int:
        """Print the policies of all scopes, or write them into a file."""
        with self._connect(args) as client:
            policies = read_cluster(client)
        document = to_document(policies)
        if args.file in (None, "-"):
            self._put(args, document, to_toml(policies).rstrip("\n"))
            return 0
        is_json = args.file.endswith(".json")
        text = f"{output.to_json(document)}\n" if is_json else to_toml(policies)
        try:
            Path(args.file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{args.file}: {error.strerror}") from None
        self._put(args, {"file": args.file, "scopes": len(policies)}, f"wrote {args.file}")
        return 0

    def apply(self, args: argparse.Namespace) -> int:
        """Make the policies those of a file, after a diff."""
        wanted = read_file(args.file)
        with self._connect(args) as client:
            changes = changes_of(read_cluster(client), wanted, prune=args.prune)
            diff = "\n".join(line for change in changes for line in change.lines())
            if args.dry_run or not changes:
                self._put(args, _document(changes, 0), diff or "no change")
                return 0
            if args.output != "json" or not args.yes:
                sys.stderr.write(f"{diff}\n")
            so = "Fields such as ttl_ms may end existing timers and messages at once."
            if not cli_args.confirm(args, f"apply to {_scopes(changes)}", so):
                return FAILED
            self._change(args, client, changes)
        self._put(args, _document(changes, len(changes)), f"changed {_scopes(changes)}")
        return 0

    def _change(
        self, args: argparse.Namespace, client: TimerClient, changes: list[ScopeChange]
    ) -> None:
        """Apply changes, one scope after the other."""
        for number, change in enumerate(changes):
            where = _arguments(change.scope)
            try:
                client.alter_policies(
                    cast("PolicyFields", change.set),
                    unset=change.unset,
                    cluster=not where,
                    **where,
                )
            except TimerError as error:
                error.done = number
                scopes = {
                    "changed": [scope_heading(each.scope) for each in changes[:number]],
                    "failed": [scope_heading(change.scope)],
                    "not tried": [scope_heading(each.scope) for each in changes[number + 1 :]],
                }
                args.of_error = {key.replace(" ", "_"): each for key, each in scopes.items()}
                if args.output != "json":
                    for key, each in scopes.items():
                        sys.stderr.write(f"{key}: {', '.join(each) or 'no scope'}\n")
                raise


def _scopes(changes: list[ScopeChange]) -> str:
    return "1 scope" if len(changes) == 1 else f"{len(changes)} scopes"


def _document(changes: list[ScopeChange], done: int) -> dict[str, Any]:
    return {
        "changes": [
            {"scope": dict([each.scope]), "set": each.set, "unset": each.unset} for each in changes
        ],
        "applied": done,
    }
