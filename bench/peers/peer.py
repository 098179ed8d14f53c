"""A contestant: servers on this machine, and a client that schedules and consumes through them.

    install ── start ── schedule_one, schedule_many, consume, kill_leader ── stop

A schedule call returns once the timers are as durable as the peer makes them. `consume` passes each
message to `Receipts` at its arrival, and again once it is acknowledged.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol

from bench.footprint import disk_bytes
from bench.peers.server import PeerServer

CLOSE_LIMIT_S: Final = 5.0


class Receipts(Protocol):
    """The harness's view of a consumer."""

    def received(self, payloads: Sequence[bytes]) -> None:
        """Record messages that arrive now."""

    def acked(self, count: int) -> None:
        """Record that `count` further messages are acknowledged."""


class Peer(ABC):
    """One system in one mode."""

    title: ClassVar[str]
    """System and mode, for tables."""
    lacks: ClassVar[tuple[str, ...]] = ()
    """Properties of ours that it does not have."""
    fails_over: ClassVar[bool] = False
    """Whether another node takes over after `kill_leader` without parts of the user's own."""
    batches_in_flight: ClassVar[int] = 8
    """Concurrent calls of `schedule_many` with which its ingest is fastest."""

    def __init__(self, directory: Path) -> None:
        """Use `directory`, which does not exist yet, for the servers' data and logs."""
        self.directory = directory
        self.servers: list[PeerServer] = []

    @classmethod
    @abstractmethod
    def install(cls) -> str:
        """Install the servers into the cache, unless they are there. Return their version.

        Raises:
            NotInstallable: this machine can't install them.
        """

    @abstractmethod
    async def start(self) -> None:
        """Start the servers and connect the client."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect the client."""

    @abstractmethod
    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        """Schedule one timer, due at a Unix time in milliseconds."""

    @abstractmethod
    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Schedule timers in the fastest way that the client has."""

    @abstractmethod
    async def consume(self, receipts: Receipts) -> None:
        """Receive and acknowledge messages until cancelled."""

    async def kill_leader(self) -> None:
        """Kill the server that leads, with SIGKILL."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Disconnect, and end the servers."""
        with contextlib.suppress(Exception):  # a client may not be connected, or have lost them
            await asyncio.wait_for(self.close(), CLOSE_LIMIT_S)
        for server in self.servers:
            server.kill()

    def memory(self) -> int:
        """Return the resident bytes of all servers."""
        return sum(server.resident_bytes() for server in self.servers)

    def disk(self) -> int:
        """Return the bytes that all servers' files occupy."""
        return disk_bytes(self.directory)
