"""Limits of one identity: requests a second, and open calls. The rules of access set them.

A bucket fills with the limit's amount each second, and holds one second's amount at most. A request
is accepted while the bucket is not empty, and may leave a debt. So a request larger than the limit
is accepted, and the following ones wait for it.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from timer.model.timer_errors import CallerLimitError, ConfigError

LIMIT_MAX: Final = 1_000_000_000_000
RATES: Final = ("requests", "rows", "bytes")
"""Keys of `rate`: requests a second, timers scheduled by them, and bytes of them."""
COUNTS: Final = ("connections", "streams", "producers", "topics", "groups", "series")
"""Keys of `most`: connections with open calls, and open calls, on each node; what there is of the
identity in the cluster."""
OPEN_RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The limits of one identity. None: there is no limit."""

    requests: int | None = None
    rows: int | None = None
    bytes: int | None = None
    connections: int | None = None
    streams: int | None = None
    producers: int | None = None
    """Registered producers, of the cluster."""
    topics: int | None = None
    """Topics of the cluster that the identity created."""
    groups: int | None = None
    """Groups of the cluster that it created."""
    series: int | None = None
    """Series of the cluster in all topics to which the identity may produce."""

    def lesser(self, other: "CallerLimits") -> "CallerLimits":
        """Return the lesser of both limits, for each."""
        found: dict[str, int | None] = {}
        for each in fields(self):
            both = (getattr(self, each.name), getattr(other, each.name))
            found[each.name] = min((limit for limit in both if limit is not None), default=None)
        return CallerLimits(**found)

    @classmethod
    def of(cls, key: str, rate: Any, most: Any) -> Self:
        """Return the limits in the tables `rate` and `most` of a rule.

        Raises:
            ConfigError: a table is malformed; `key` names the rule.
        """
        found: dict[str, int] = {}
        for name, table, known in (("rate", rate, RATES), ("most", most, COUNTS)):
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{key}: {name}", table, f"must be a table with {', '.join(known)}"
                )
            for each, limit in table.items():
                if each not in known:
                    raise ConfigError(f"{key}: {name}", each, f"must be one of {', '.join(known)}")
                if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
                    raise ConfigError(f"{key}: {name}.{each}", limit, f"must be 1 to {LIMIT_MAX}")
                found[each] = limit
        return cls(**found)


@dataclass(slots=True)
class CallerUsage:
    """The use of this node by one identity."""

    name: str
    """The identity, for errors."""
    addresses: Counter[str] = field(default_factory=Counter)
    """Open calls by remote address."""
    _tokens: dict[str, float] = field(default_factory=dict)
    """The rest in each bucket; below 0: a debt. A missing bucket is full."""
    _filled_s: float = 0.0

    def wait_s(self, limits: CallerLimits, now_s: float) -> tuple[float, str]:
        """Return the seconds until no bucket is empty, and the last one to fill. 0.0: now."""
        self._fill(limits, now_s)
        longest = 0.0, ""
        for name, left in self._tokens.items():
            if left <= 0.0:
                longest = max(longest, ((1.0 - left) / getattr(limits, name), name))
        return longest

    def take(self, limits: CallerLimits, now_s: float, **amounts: int) -> None:
        """Take the amounts of an accepted request from the buckets."""
        self._fill(limits, now_s)
        for name in self._tokens:
            self._tokens[name] -= amounts[name]

    def charge(self, limits: CallerLimits, now_s: float, **amounts: int) -> None:
        """Take the amounts of a request.

        Raises:
            CallerLimitError: a bucket is empty. Nothing is taken.
        """
        wait_s, name = self.wait_s(limits, now_s)
        if name:
            limit = f"must be at most {getattr(limits, name)} a second"
            raise CallerLimitError(f"rate.{name} of {self.name}", limit, int(wait_s * 1000) + 1)
        self.take(limits, now_s, **amounts)

    def open(self, limits: CallerLimits, address: str) -> None:
        """Count one more open call.

        Raises:
            CallerLimitError: there are too many calls or connections.
        """
        calls, most = self.addresses.total(), limits.streams
        if most is not None and calls >= most:
            self._refuse("streams", calls, most)
        connections, most = len(self.addresses), limits.connections
        if most is not None and connections >= most and address not in self.addresses:
            self._refuse("connections", connections, most)
        self.addresses[address] += 1

    def close(self, address: str) -> None:
        """Count one open call less."""
        self.addresses[address] -= 1
        if not self.addresses[address]:
            del self.addresses[address]

    def idle(self, now_s: float) -> bool:
        """Return whether nothing is open or was used for a minute: debts are small by then."""
        return not self.addresses and now_s - self._filled_s > 60.0

    def _refuse(self, name: str, there: int, most: int) -> None:
        limit = f"{there} are open on this node: must be at most {most}"
        raise CallerLimitError(f"most.{name} of {self.name}", limit, OPEN_RETRY_MS)

    def _fill(self, limits: CallerLimits, now_s: float) -> None:
        passed_s = now_s - self._filled_s
        self._filled_s = now_s
        before, self._tokens = self._tokens, {}
        for name in RATES:
            limit = getattr(limits, name)
            if limit is not None:
                left = before.get(name, float(limit)) + passed_s * limit
                self._tokens[name] = min(left, float(limit))
