"""The usage of this node by each identity, compared with the limits in the rules of access.

The leader charges all requests, also relayed ones, so a rate holds for the cluster as a whole. A
node that relays charges them too. Open calls and connections are counted on each node, and so are
pages of the HTTP port, which the node answers itself.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cluster.rpc.access_file import AccessFile
from cluster.rpc.request_bounds import size_of
from cluster.security.caller_limits import CallerLimits, CallerUsage
from cluster.security.identities import CallerIdentity
from timerclient.proto import timer_pb2 as pb

USAGES_MAX: Final = 4_096
"""Identities after which idle ones are forgotten."""
PACE_S_MAX: Final = 1.0
"""Longest pause between two requests of a stream."""


class CallerUsages:
    """All usages; see the module. For the event loop."""

    def __init__(self, access: AccessFile) -> None:
        self._access = access
        self._of: dict[CallerIdentity, CallerUsage] = {}

    @contextmanager
    def open_call(self, identity: CallerIdentity, address: str) -> Iterator[None]:
        """Count an open call.

        Raises:
            CallerLimitError: the identity has too many.
        """
        usage, limits = self._usage(identity), self.limits(identity)
        usage.open(limits, address)
        try:
            yield
        finally:
            usage.close(address)

    def charge(self, identity: CallerIdentity, request: Any) -> None:
        """Count a request. None: one without a message.

        Raises:
            CallerLimitError: the identity has sent too much.
        """
        limits = self.limits(identity)
        if limits != CallerLimits():
            amounts = _amounts(request)
            self._usage(identity).charge(limits, time.monotonic(), **amounts)

    def pace_s(self, identity: CallerIdentity, request: Any) -> float:
        """Count a request of a stream; return the pause before the next one is read, in seconds."""
        limits = self.limits(identity)
        if limits == CallerLimits():
            return 0.0
        usage, now_s = self._usage(identity), time.monotonic()
        usage.take(limits, now_s, **_amounts(request))
        return min(usage.wait_s(limits, now_s)[0], PACE_S_MAX)

    def limits(self, identity: CallerIdentity) -> CallerLimits:
        """Return the limits in the rules in force."""
        return self._access.rules.limits(identity)

    def _usage(self, identity: CallerIdentity) -> CallerUsage:
        found = self._of.get(identity)
        if found is None:
            if len(self._of) >= USAGES_MAX:
                now_s = time.monotonic()
                self._of = {who: each for who, each in self._of.items() if not each.idle(now_s)}
            found = self._of[identity] = CallerUsage(str(identity))
        return found


def _amounts(request: Any) -> dict[str, int]:
    rows = sum(len(timers.payload_sizes) for timers in getattr(request, "timers", ()))
    rows += isinstance(request, pb.ScheduleTimerRequest)
    return {"requests": 1, "rows": rows, "bytes": size_of(request)}
