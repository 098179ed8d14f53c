"""The topics that a list shows to its caller: all of them, or those that the caller's rules cover.

    sorted names --prefixes of the rules--> candidates --AccessRules.may--> shown names

A page holds and names shown topics only, so neither it nor its token has the name of another topic.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.rpc.rpc_caller import CALLER
from cluster.security.access_rules import CLUSTER, AccessRules, AccessTarget, Permission
from cluster.security.identities import CallerIdentity

NAMES_AT_ONCE: Final = 512
"""Names compared with the rules without a pause: about three milliseconds of work."""


@dataclass(frozen=True, slots=True)
class TopicFilter:
    """The topics that rules cover."""

    prefixes: Sequence[str]
    """The name of each covered topic begins with one of these."""
    covers: Callable[[str], bool]
    """Returns whether a topic is covered, by its name."""

    async def after(self, names: list[str], after: str, most: int) -> list[str]:
        """Return the covered ones of sorted names after a name, at most `most`.

        The work pauses after NAMES_AT_ONCE, so that the loop serves others meanwhile.
        """
        found: list[str] = []
        for n, name in enumerate(self._candidates(names, after), 1):
            if self.covers(name):
                found.append(name)
                if len(found) == most:
                    break
            if n % NAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    def _candidates(self, names: list[str], after: str) -> Iterator[str]:
        """Yield the names after a name that have one of the prefixes, each once, sorted."""
        done = bisect_right(names, after)
        for prefix in sorted(self.prefixes):
            start, end = span_of(names, prefix)
            for at in range(max(start, done), end):
                yield names[at]
            done = max(done, end)


def filter_of_caller() -> TopicFilter | None:
    """Return the filter for the present caller. None: it may see all topics."""
    caller = CALLER.get()
    if caller is None or caller.allows(CLUSTER):
        return None
    return TopicFilter(caller.topic_prefixes(), lambda name: caller.allows(AccessTarget(name)))


def filter_of_observer(rules: AccessRules, observer: CallerIdentity) -> TopicFilter | None:
    """Return the filter for a caller that reads pages over HTTP. None: it may see all topics."""
    permission = Permission.OBSERVE
    if rules.may(observer, permission, CLUSTER):
        return None
    return TopicFilter(
        rules.prefixes(observer, permission),
        lambda name: rules.may(observer, permission, AccessTarget(name)),
    )


def span_of(names: list[str], prefix: str) -> tuple[int, int]:
    """Return begin and end of the sorted names that have the prefix."""
    if not prefix:
        return 0, len(names)
    start = bisect_left(names, prefix)
    return start, bisect_left(names, 1, start, key=lambda name: not name.startswith(prefix))
