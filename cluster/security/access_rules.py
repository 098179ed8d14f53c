"""Rules of access: the permissions of identities, for topics and groups. All else is denied.

[[rule]]
who = ["client/billing"]                # identities; * matches any text
may = ["produce", "cancel", "consume"]
topics = ["payments/*", "orders"]       # default: ["*"]
groups = ["billing*"]                   # default: ["*"]; of these topics
rate = { requests = 500, rows = 50_000, bytes = 20_971_520 }    # a second; default: no limit
most = { connections = 16, streams = 200, topics = 20, series = 1_000 }         # likewise

If several rules name an identity, the least of their limits counts, for all of its calls.

Namespace and name of a topic are matched apart. A pattern without "/" matches names of the
namespace `default`.

    o*            topics of the namespace default
    payments/*    all topics of payments, and payments itself
    default/*     all topics of default, and default itself
    *             all topics of all namespaces, all namespaces, and the whole cluster
"""

import functools
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from cluster.security.caller_limits import CallerLimits
from cluster.security.identities import CallerIdentity
from timer.model.timer_errors import HIDDEN, ConfigError

RULES_MAX: Final = 1_000
IDENTITIES_MAX: Final = 16_384
"""Identities whose rules are remembered."""
DEFAULT_NAMESPACE: Final = "default/"


class Permission(StrEnum):
    """A kind of requests."""

    PRODUCE = "produce"
    """Schedule timers."""
    CANCEL = "cancel"
    """Cancel and reschedule timers."""
    CONSUME = "consume"
    """Receive and ack messages; create the group if it does not exist."""
    OBSERVE = "observe"
    """Look at timers, topics and groups. A rule for all topics and groups: at the cluster, too."""
    MANAGE = "manage"
    """Create, change and delete topics, groups and policies."""
    OPERATE = "operate"
    """Transfer the leadership, and change the voters."""


@dataclass(frozen=True, slots=True)
class AccessTarget:
    """The object of a request. Both None: the whole cluster."""

    topic: str | None = None
    """A topic, or "NAMESPACE/": the namespace itself."""
    group: str | None = None
    """None: the topic itself, without effect on its groups. ALL_GROUPS: the topic with them."""


ALL: Final = "*"
ALL_GROUPS: Final = ALL
"""Stands for every group of a topic. A rule covers it only if its own groups are all."""
CLUSTER: Final = AccessTarget()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """One rule; see the module."""

    who: tuple[str, ...]
    may: tuple[str, ...]
    topics: tuple[str, ...] = ("*",)
    groups: tuple[str, ...] = ("*",)
    limits: CallerLimits = field(default_factory=CallerLimits)
    """From `rate` and `most`."""

    def covers(self, target: AccessTarget) -> bool:
        """Return whether the target lies within the topics and groups of the rule."""
        if target.topic is None:
            return ALL in self.topics and ALL in self.groups
        return any(_covers(pattern, target.topic) for pattern in self.topics) and (
            target.group is None or _matches(target.group, self.groups)
        )


class _Rights(NamedTuple):
    """The permissions and limits of one identity."""

    rules: Mapping[str, tuple[AccessRule, ...]]
    """By permission; one without rules is absent."""
    limits: CallerLimits


class AccessRules:
    """All rules of a cluster."""

    def __init__(self, rules: tuple[AccessRule, ...]) -> None:
        self._rules = rules
        self._by_name: dict[str, list[AccessRule]] = defaultdict(list)
        """Rules that name an identity without a wildcard."""
        for rule in rules:
            for who in rule.who:
                self._by_name[who].append(rule)
        self._wide = [rule for rule in rules if any(ALL in who for who in rule.who)]
        self._of = functools.lru_cache(IDENTITIES_MAX)(self._rights_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AccessRules) and self._rules == other._rules

    __hash__ = None  # type: ignore[assignment]

    def knows(self, caller: CallerIdentity) -> bool:
        """Return whether a rule names the caller."""
        return bool(self._of(caller).rules)

    def may_some(self, caller: CallerIdentity, permission: Permission) -> bool:
        """Return whether the caller has the permission for some topic."""
        return permission in self._of(caller).rules

    def may(self, caller: CallerIdentity, permission: Permission, target: AccessTarget) -> bool:
        """Return whether the caller has the permission for the target."""
        return any(rule.covers(target) for rule in self._of(caller).rules.get(permission, ()))

    def prefixes(self, caller: CallerIdentity, permission: Permission) -> tuple[str, ...]:
        """Return prefixes: each topic for which the caller has the permission has one of them."""
        rules = self._of(caller).rules.get(permission, ())
        return tuple({_prefix(pattern) for rule in rules for pattern in rule.topics})

    def limits(self, caller: CallerIdentity) -> CallerLimits:
        """Return the limits of an identity."""
        return self._of(caller).limits

    def _rights_of(self, caller: CallerIdentity) -> _Rights:
        name = str(caller)
        wide = (rule for rule in self._wide if _matches(name, rule.who))
        mine = dict.fromkeys((*self._by_name.get(name, ()), *wide))
        of: dict[str, tuple[AccessRule, ...]] = {
            each: tuple(rule for rule in mine if each in rule.may)
            for each in {each for rule in mine for each in rule.may}
        }
        limits = functools.reduce(
            CallerLimits.lesser, (rule.limits for rule in mine), CallerLimits()
        )
        return _Rights(of, limits)


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def _covers(pattern: str, topic: str) -> bool:
    """Return whether a pattern of topics covers a topic, or a namespace "NAMESPACE/"."""
    if pattern == ALL:
        return True
    namespaces, names = _split(pattern)
    namespace, name = _split(topic)
    if not name:
        return (namespaces, names) == (namespace, ALL)
    return fnmatchcase(namespace, namespaces) and fnmatchcase(name, names)


def _prefix(pattern: str) -> str:
    """Return the longest text with which all topics of a pattern begin, as they are listed."""
    namespaces, names = _split(pattern)
    if ALL in namespaces:
        return ""
    begin = names.partition(ALL)[0]
    return begin if f"{namespaces}/" == DEFAULT_NAMESPACE else f"{namespaces}/{begin}"


def _split(topic: str) -> tuple[str, str]:
    """Return (namespace, name) of a topic. "default/ns/name" is another way to write "ns/name"."""
    plain = topic.removeprefix(DEFAULT_NAMESPACE)
    namespace, slash, name = plain.partition("/")
    return (namespace, name) if slash else (DEFAULT_NAMESPACE.rstrip("/"), plain)


def parse_rules(text: str) -> AccessRules:
    """Return the rules of a TOML text.

    Raises:
        ConfigError: the text is not TOML, or a rule is malformed; names the rule, from 1 on.
    """
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("access", HIDDEN, f"must be TOML: {error}") from None
    rules = tables.pop("rule", [])
    if tables:
        raise ConfigError("access", sorted(tables)[0], "unknown: the file has [[rule]] only")
    if not isinstance(rules, list) or len(rules) > RULES_MAX:
        raise ConfigError("access.rule", HIDDEN, f"must be at most {RULES_MAX} tables [[rule]]")
    if not rules:  # as in a file that is being written
        raise ConfigError("access.rule", HIDDEN, "must be at least one table [[rule]]")
    return AccessRules(tuple(_rule(f"access.rule {n}", each) for n, each in enumerate(rules, 1)))


def _rule(key: str, table: Any) -> AccessRule:
    known = {each.name for each in fields(AccessRule)} - {"limits"} | {"rate", "most"}
    if not isinstance(table, dict):
        raise ConfigError(key, table, "must be a table [[rule]]")
    if unknown := table.keys() - known:
        limit = f"unknown: a rule has {', '.join(sorted(known))}"
        raise ConfigError(key, sorted(unknown)[0], limit)
    for name in ("who", "may"):
        if not table.get(name):
            raise ConfigError(f"{key}: {name}", HIDDEN, "must be set")
    limits = CallerLimits.of(key, table.pop("rate", {}), table.pop("most", {}))
    for name, values in table.items():
        _check_texts(f"{key}: {name}", values)
    for each in table["may"]:
        if each not in set(Permission):
            raise ConfigError(f"{key}: may", each, f"must be one of {', '.join(Permission)}")
    for each in table["who"]:
        if not each.startswith(("client/", "admin/", "token/")):
            limit = "must be client/NAME, admin/NAME or token/NAME; NAME may have *"
            raise ConfigError(f"{key}: who", each, limit)
    texts = {name: tuple(values) for name, values in table.items()}
    return AccessRule(**texts, limits=limits)


def _check_texts(key: str, values: Any) -> None:
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ConfigError(key, values, "must be a list of strings")
    for each in values:
        if set(each) & set("?["):
            raise ConfigError(key, each, "must have no ? and no [: the only wildcard is *")
