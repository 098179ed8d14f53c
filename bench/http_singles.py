"""S16: one timer a request with JSON over HTTP, at the leader's port.

The client keeps CONNECTIONS connections open, and one request under way on each. It writes and
reads sockets itself: a library would take more of the machine than the request takes of the node.
"""

import asyncio
import functools
import json
import time
from typing import Final

import numpy as np

from bench.feed import HOUR_MS, PAYLOAD_SIZE
from bench.measure import Form, Measure, Series, check, cost, rate
from bench.rig import Rig

CONNECTIONS: Final = 200
LASTING_S: Final = {Form.SHORT: 4.0, Form.FULL: 20.0}


class _Caller(asyncio.Protocol):
    """One connection, which sends the next request once it has an answer."""

    def __init__(self, request: bytes, until_s: float) -> None:
        self._request, self._until_s = request, until_s
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.took_s: list[float] = []
        self._begun_s, self._answer = 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Send the next request once an answer is complete: each is one JSON object."""
        self._answer += data
        if not self._answer.endswith(b"}"):
            return
        if not self._answer.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(self._answer.decode()))
            self._transport.close()
            return
        now_s = time.perf_counter()
        self.took_s.append(now_s - self._begun_s)
        if now_s < self._until_s:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.ended.done():
            self.ended.set_result(None)

    def _send(self) -> None:
        self._answer, self._begun_s = b"", time.perf_counter()
        self._transport.write(self._request)


def _itself(caller: _Caller) -> _Caller:
    return caller


def singles(rig: Rig, form: Form) -> Series:
    """Schedule timers one by one over all connections."""
    return rig.within(120, _singles(rig, LASTING_S[form]))


async def _singles(rig: Rig, lasting_s: float) -> Series:
    leader = rig.cluster.nodes[rig.cluster.wait_for_leader()]
    host, _, port = leader.http.rpartition(":")
    timer = {"json": "x" * (PAYLOAD_SIZE - 2), "delay": HOUR_MS / 1000}
    body = json.dumps(timer).encode()
    request = (
        f"POST /v1/topics/{rig.topic('s16')}/timers HTTP/1.1\r\nHost: {leader.http}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    callers = [_Caller(request, began + lasting_s) for _ in range(CONNECTIONS)]
    with rig.cpu_use() as use:
        for each in callers:
            await loop.create_connection(functools.partial(_itself, each), host, int(port))
        await asyncio.gather(*(each.ended for each in callers))
        took_s = time.perf_counter() - began
    latencies = [each * 1000 for caller in callers for each in caller.took_s]
    check(len(latencies) > CONNECTIONS, "no request was answered")
    return {
        "rate": [len(latencies) / took_s],
        "p99": [float(np.percentile(latencies, 99))],
        **use.series(),
    }


S16: Final = Measure(
    name="s16",
    title=f"one timer a request, JSON over HTTP, {CONNECTIONS} connections",
    run=singles,
    figures=(
        rate("rate", "rate", "timers/s", 2_000, 5_000),
        cost("p99", "p99", "ms"),
        cost("leader", "cores_leader", "cores"),
        cost("client", "cores_client", "cores"),
    ),
    runs={Form.SHORT: 2, Form.FULL: 5},
)
