"""Celery: tasks with an ETA. The broker is a Redis that syncs its log before each answer.

A worker takes every waiting task into its memory, and starts it at its time.
"""

import asyncio
import contextlib
import datetime
import os
import sys
from collections.abc import Sequence
from typing import Any

import celery

from bench.bench_machine import ROOT
from bench.feed import PAYLOAD_SIZE
from bench.peers import installs
from bench.peers.peer import Peer, Receipts
from bench.peers.server import START_LIMIT_S, PeerServer
from deploy.local import free_ports


class Celery(Peer):
    """One broker, and a worker of two processes."""

    title = "Celery ETA, Redis with AOF always, alone"
    lacks = (
        "not replicated",
        "waiting tasks fill the workers' memory",
        "acks of tasks can't be seen: the last receipt counts",
        "a repeated call schedules twice",
    )
    batches_in_flight = 1

    @classmethod
    def install(cls) -> str:
        installs.debian()
        version: str = celery.__version__
        return version

    async def start(self) -> None:
        self._receipts: Receipts | None = None
        self._worker_ready = asyncio.Event()
        [port] = free_ports(1)
        home = self.directory / "broker"
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        words += ["--dir", str(home), "--appendonly", "yes", "--appendfsync", "always"]
        self.servers.append(PeerServer(installs.in_debian(home, *words), home / "log"))
        await self.servers[0].ready(port)
        self._listener = await asyncio.start_server(self._arrive, "127.0.0.1", 0)
        os.environ["PEERS_BROKER"] = f"redis://127.0.0.1:{port}/0"
        os.environ["PEERS_PORT"] = str(self._listener.sockets[0].getsockname()[1])
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        words = [sys.executable, "-m", "celery", "-A", "bench.peers.celery_app", "worker"]
        words += ["--concurrency", "2", "--without-gossip", "--without-mingle"]
        self.servers.append(PeerServer(words, self.directory / "worker.log", {"PYTHONPATH": path}))
        sys.modules.pop("bench.peers.celery_app", None)  # an earlier turn had another broker
        from bench.peers import celery_app

        self._app, self._task = celery_app.app, celery_app.fire_task
        await self.schedule_one(0, bytes(PAYLOAD_SIZE))
        await asyncio.wait_for(self._worker_ready.wait(), START_LIMIT_S)

    async def close(self) -> None:
        self._listener.close()
        await asyncio.to_thread(self._app.close)

    async def _arrive(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        """Take the payloads of one worker process."""
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                payload = await reader.readexactly(PAYLOAD_SIZE)
                self._worker_ready.set()
                if self._receipts is not None:
                    self._receipts.received([payload])
                    self._receipts.acked(1)

    async def schedule_one(self, due_ms: int, payload: bytes) -> None:
        await asyncio.to_thread(self._send, [due_ms], [payload])

    async def schedule_many(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        await asyncio.to_thread(self._send, due_ms, payloads)

    def _send(self, due_ms: Sequence[int], payloads: Sequence[bytes]) -> None:
        producer: Any
        with self._app.producer_pool.acquire(block=True) as producer:
            for due, payload in zip(due_ms, payloads, strict=True):
                eta = datetime.datetime.fromtimestamp(due / 1000, datetime.UTC)
                text = payload.decode("latin-1")
                self._task.apply_async((text,), eta=eta, producer=producer)

    async def consume(self, receipts: Receipts) -> None:
        self._receipts = receipts
        try:
            await asyncio.Event().wait()
        finally:
            self._receipts = None
