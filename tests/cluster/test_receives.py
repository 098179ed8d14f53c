"""Waiting Receives are counted by caller, before anything is changed for them.

So are the bytes that a caller has not read.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from cluster.api import consume_service, wire_rows
from cluster.api.consume_service import ConsumeService, _Stream
from cluster.rpc.outboxes import STEP_DELIVERIES, Outboxes
from cluster.rpc.rpc_caller import CALLER
from timer.entries.payloads import SHARED
from timerclient.proto import timer_pb2 as pb


class Desk:
    """Opens no group: it keeps every Receive waiting, and counts."""

    def __init__(self) -> None:
        self.opened = 0

    def check_lease(self, lease_ms: int) -> None:
        del lease_ms

    async def open(self, *_: Any) -> Any:
        self.opened += 1
        await asyncio.Event().wait()


class Caller:
    """The context of a call from an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:1000"

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        del trailing_metadata
        raise ConnectionAbortedError(f"{code.name} {details}")


async def test_caller_has_as_many_receives_as_it_leaves_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consume_service, "RECEIVES_MAX", 6)
    desk: Any = Desk()
    host: Any = SimpleNamespace()
    service = ConsumeService(host, desk, Outboxes(1 << 20), salt=0)
    waiting: list[asyncio.Task[Any]] = []

    async def receive(address: str) -> None:
        context: Any = Caller(address)
        call = service.Receive(pb.ReceiveRequest(topic="t", group="g"), context)
        waiting.append(asyncio.ensure_future(call))
        await asyncio.wait(waiting[-1:], timeout=0)
        while waiting and waiting[-1].done():
            await waiting.pop()

    for address in ("10.0.0.1",) * 3 + ("10.0.0.2",):
        await receive(address)
    assert desk.opened == 4
    for address in ("10.0.0.1", "10.0.0.2"):
        with pytest.raises(ConnectionAbortedError, match="RESOURCE_EXHAUSTED"):
            await receive(address)
    assert desk.opened == 4, "a rejected Receive opened its group"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    del waiting[:]
    await receive("10.0.0.1")
    assert desk.opened == 5
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("method", ["Peek", "ReadMessages", "Receive"])
async def test_identity_leaves_places_to_others_of_its_address(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk: Any = Desk()
    for limit in ("RECEIVES_MAX", "PEEKS_MAX"):
        monkeypatch.setattr(consume_service, limit, 3)
    for work in ("peek", "read_messages"):
        monkeypatch.setattr(consume_service, work, desk.open)
    unused: Any = None
    call = getattr(ConsumeService(unused, desk, Outboxes(1 << 20), salt=0), method)
    tasks = list[asyncio.Task[Any]]()
    for name in ("a", "a", "b"):
        token = CALLER.set(SimpleNamespace(identity=f"client/{name}"))  # type: ignore[arg-type]
        tasks.append(asyncio.ensure_future(call(pb.ReceiveRequest(), Caller("10.0.0.1"))))
        await asyncio.wait(tasks[-1:], timeout=0)
        CALLER.reset(token)
    assert [each.done() for each in tasks] == [False, True, False]
    for each in tasks:
        each.cancel()
    _, refused, _ = await asyncio.gather(*tasks, return_exceptions=True)
    assert "RESOURCE_EXHAUSTED" in str(refused)


async def test_deliveries_to_an_identity_are_as_large_as_its_share_allows() -> None:
    groups, unused = Mock(), cast("Any", None)
    host: Any = SimpleNamespace(kick=lambda: None)
    leader: Any = SimpleNamespace(groups=groups, epoch=1)
    settings = SimpleNamespace(type=SHARED, lease_ms=1_000)
    group: Any = SimpleNamespace(topic=1, group_id=2, settings=settings)
    service = ConsumeService(host, unused, Outboxes(1 << 28), salt=0)
    service.outboxes.add("peer", "client/a", 1 << 26)
    for name in ("client/a", "client/b"):
        token = CALLER.set(SimpleNamespace(identity=name))  # type: ignore[arg-type]
        stream = _Stream(host, leader, group, unused, 0, unused, service.outboxes, "peer")
        stream.join("c", 1_000)
        call = asyncio.ensure_future(service._receive(leader, group, pb.ReceiveRequest(), name))
        await asyncio.wait([call], timeout=0)
        CALLER.reset(token)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    sizes = [called.args[1].delivery_max() for called in groups.join.call_args_list]
    assert [each * STEP_DELIVERIES for each in sizes] == [1 << 27] * 2 + [3 << 26] * 2


async def test_only_a_caller_that_does_not_read_gets_no_more_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        wire_rows, "put_delivery", lambda out, *_: setattr(out, "payloads", bytes(600))
    )
    host: Any = SimpleNamespace(kick=lambda: None)
    desk: Any = Desk()
    leader: Any = SimpleNamespace(groups=SimpleNamespace(join=lambda *_: None), epoch=1)
    group: Any = SimpleNamespace(
        topic=1, group_id=2, settings=SimpleNamespace(type=SHARED), groups=None
    )
    lease: Any = SimpleNamespace(lease=SimpleNamespace(lease_id=1, offsets=[0]))
    service = ConsumeService(host, desk, Outboxes(1_000), salt=0)
    ids: Any = None
    paused = dict[str, bool]()
    for name in ("evil", "other"):
        token = CALLER.set(SimpleNamespace(identity=f"client/{name}"))  # type: ignore[arg-type]
        stream = _Stream(host, leader, group, desk, 0, ids, service.outboxes, name)
        stream.join("c", 1_000)
        assert stream._consumer is not None
        if name == "evil":
            stream._deliver(lease)
        context: Any = Caller("10.0.0.1")
        call = asyncio.ensure_future(
            service.Receive(pb.ReceiveRequest(topic="t", group="g"), context)
        )
        await asyncio.wait([call], timeout=0)
        paused[name] = stream._consumer.paused
        assert call.done() == (name == "evil")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        CALLER.reset(token)
    assert paused == {"evil": True, "other": False}
