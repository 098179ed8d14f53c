"""Keeps room for callers on the gRPC ports: ends unused connections of a port that is nearly full.

gRPC takes connections up to a limit, first come, first served. A denied call or a ping keeps a
connection open for ever. Without this guard one host could thus occupy a port, without any rights.

    port nearly full --> a connection without an accepted request at two looks in a row is ended

Calls of gRPC's standard services, such as an open Watch of the health, do not count as requests.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from cluster.rpc.connections import Connections
from cluster.settings.rounds import next_round

CHECK_INTERVAL_S: Final = 5.0
"""Time between two looks: a new connection has at least this long until its first request."""

logger = logging.getLogger(__name__)


class PortGuard:
    """Looks at the connections of the gRPC ports for clients every LOOK_S."""

    def __init__(
        self, connections: Connections, most: int, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`most`: connections that each port takes, at most.

        `on_end`: called for each connection that the guard ends.
        """
        self._connections, self._on_end = connections, on_end
        self._limit, self._full = most, most - most // 16
        self._unused: AbstractSet[str] = frozenset()
        """Addresses of the unused connections of nearly full ports at the last look."""
        self._full_ports: AbstractSet[int] = frozenset()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await next_round(CHECK_INTERVAL_S)
            with contextlib.suppress(OSError):  # no file can be opened: the next look retries
                await self.check()

    async def check(self) -> None:
        """Look once; end connections of nearly full ports that were unused at the last look, too.

        Logs a line for each port that has become nearly full, or of which connections were ended.
        """
        by_port = await self._connections.by_port()
        full = {port: peers for port, peers in by_port.items() if len(peers) >= self._full}
        unused = set().union(*full.values()) - self._connections.used_addresses
        ending, self._unused = unused & self._unused, unused - self._unused
        await self._connections.end(ending)
        for port, peers in full.items():
            ended = peers & ending
            if ended or port not in self._full_ports:
                host, most = Counter(each.rpartition(":")[0] for each in peers).most_common(1)[0]
                more = {"port": port, "connections": len(peers), "limit": self._limit}
                logger.warning(
                    "port nearly full: unused connections are ended",
                    extra={**more, "ended": len(ended), "host": host, "of_host": most},
                )
            for _ in ended:
                self._on_end()
        self._full_ports = full.keys()
