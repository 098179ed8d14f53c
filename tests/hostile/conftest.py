"""One cluster for all attacks; each attack must leave it unharmed.

leader, epoch, memory --> attack --> the same leader and epoch, a timer fires, the counts of timers
                                     add up, memory is as before
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tests.cluster.running import POLL_S_MAX, RPC_S, Running, take
from timerclient import TimerClient

MIB: Final = 1 << 20
MEMORY_BACK: Final = 1.2
"""Highest ratio of a node's memory after an attack to its memory before."""
HEAPS: Final = 40 * MIB
"""Bytes allowed beside that ratio: a large request leaves them in the heaps of gRPC's threads."""
BACK_S: Final = 60.0
"""Time until memory is back: twice the time after which a node returns free pages once more."""
GROUPS_MAX: Final = 40
SETTINGS: Final = (
    f"limits.topic_groups_max = {GROUPS_MAX}",
    "limits.memory_bytes_max = 629_145_600",
    "limits.outbox_bytes_max = 67_108_864",
)


class Victim(Running):
    """A cluster under attack."""

    usual: Mapping[str, int] = {}
    """Resident memory of each node before all attacks, bytes."""

    def rss(self, name: str) -> int:
        """Return the resident memory of a node, bytes."""
        status = Path(f"/proc/{self.node(name).pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def is_back(self, name: str, before: int, kept: int = 0) -> None:
        """Wait until a node's memory is as before, with at most `kept` bytes more."""
        began_s = time.monotonic()
        while (now := self.rss(name)) > MEMORY_BACK * before + HEAPS + kept:
            waited_s = time.monotonic() - began_s
            assert waited_s < BACK_S, f"{name}: {before / MIB:.0f} -> {now / MIB:.0f} MiB"
            time.sleep(POLL_S_MAX)

    def epoch(self) -> int:
        """Return the leader's epoch."""
        return self._epoch()


@pytest.fixture(scope="package")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Three nodes, the target of all attacks."""
    running = Victim(tmp_path_factory.mktemp("hostile"), SETTINGS)
    with running.cleaned(), running.client() as client:
        _canary(client, "warm")
        for name in running.nodes:  # so that gRPC's threads have their heaps
            _warm(running, name)
        time.sleep(2)  # the allocator returns free memory
        running.usual = {name: running.rss(name) for name in running.nodes}
        yield running


@pytest.fixture(scope="package")
def client(town: Victim) -> Iterator[TimerClient]:
    """A client that does normal work."""
    with town.client() as client:
        yield client


@pytest.fixture(autouse=True)
def unharmed(
    town: Victim, client: TimerClient, topic: str, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Check after each test that the cluster is as it was before."""
    leader, epoch = town.wait_for_leader(), town.epoch()
    before = {name: town.rss(name) for name in town.nodes}
    scheduled = town.counts_add_up().scheduled
    yield
    _canary(client, topic)
    assert (town.wait_for_leader(), town.epoch()) == (leader, epoch), "there was a failover"
    assert town.counts_add_up().scheduled > scheduled
    for name in town.nodes:
        kept = getattr(request.module, "KEPT", 0)
        town.is_back(name, max(before[name], town.usual[name]), kept)


def _warm(running: Victim, name: str) -> None:
    call: Any = running.channel(name).unary_unary("/timer.v1.TimerService/Schedule")
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            call(bytes(60 * MIB), timeout=RPC_S)


def _canary(client: TimerClient, topic: str) -> None:
    """Check that a timer fires and is delivered."""
    payload = str(time.time_ns()).encode()
    with client.consumer(f"canary-{topic}"[:200], group="canary") as consumer:
        client.schedule(f"canary-{topic}"[:200], payload, delay=0.1)
        (message,) = take(consumer, 1)
    assert message.payload == payload
