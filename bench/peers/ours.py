"""This system: three nodes, a majority of which syncs a timer before the answer."""

from collections.abc import Sequence

from bench import bench_machine
from bench.footprint import Resident, disk_bytes
from bench.peers.peer import Peer, Receipts
from deploy.local import LocalCluster
from timerclient import Acking, AsyncTimerClient

TOPIC = GROUP = "peers"
WINDOW = 20_000


class Ours(Peer):
    """Three nodes with default settings."""

    title = "timer-cluster, 3 nodes, majority synced"
    fails_over = True
    batches_in_flight = 32

    @classmethod
    def install(cls) -> str:
        return bench_machine.commit()

    async def start(self) -> None:
        self._cluster = LocalCluster(self.directory)
        self._cluster.start()
        self._cluster.wait_for_leader()
        self._client = AsyncTimerClient(self._cluster.endpoints)

    async def close(self) -> None:
        await self._client.close()

    async def stop(self) -> None:
        await super().stop()
        for name in filter(self._cluster.is_running, self._cluster.nodes):
            self._cluster.kill(name)

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await self._client.schedule(TOPIC, payload, due_ms=due_ms)

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        await self._client.schedule_batch(TOPIC, payloads, due_ms=due_ms)

    async def consume(self, receipts: Receipts) -> None:
        def confirmed(acking: Acking[int]) -> None:
            if acking.exception() is None:
                receipts.acked(acking.result())

        async with self._client.consumer(TOPIC, GROUP, window=WINDOW) as consumer:
            async for batch in consumer.batches():
                receipts.received(batch.payloads)
                batch.ack().add_done_callback(confirmed)  # type: ignore[arg-type]

    async def kill_leader(self) -> None:
        leader = self._cluster.leader()
        assert leader is not None
        self._cluster.kill(leader)

    def memory(self) -> int:
        return sum(Resident.of(node.pid).total for node in self._cluster.nodes.values())

    def disk(self) -> int:
        return disk_bytes(self.directory)
