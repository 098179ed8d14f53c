"""Streams behind the guard: new rules end them at any moment, with their reason."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from cluster.rpc import caller_usages
from cluster.rpc.access_file import AccessFile
from cluster.rpc.call_guard import CallGuard
from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.rpc_caller import Caller
from cluster.security.identities import CallerIdentity, IdentityKind
from cluster.security.method_rules import METHOD_RULES
from tests.waiting import until
from timer.model.timer_errors import (
    CallerLimitError,
    EngineError,
    PermissionDeniedError,
    TokenRejectedError,
)

METHOD = "/timer.v1.ConsumeService/Consume"
WATCH = "/grpc.health.v1.Health/Watch"
CHUNK = b"x" * (1 << 20)
DEADLINE_S = 60.0


class Gate:
    """Admits every RPC of another node, which has no caller, or denies all with an error."""

    error: EngineError | None = None

    def admit(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def claimed_identity(self, _: object) -> str:
        return ""


class Endless(grpc.GenericRpcHandler):
    """Sends chunks until its stream is ended."""

    def __init__(self) -> None:
        self.sent = 0

    def service(self, _: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, _requests: object, _context: object) -> AsyncIterator[bytes]:
        while True:
            self.sent += 1
            yield CHUNK


class Watched(Endless):
    """Sends nothing until its stream is ended, and writes to the context, as the health service."""

    async def _serve(self, _requests: object, _context: object) -> None:  # type: ignore[override]
        self.sent += 1
        await asyncio.Event().wait()


class Aborting(Endless):
    """Aborts its streams, and lets `meanwhile` run before the status is sent."""

    meanwhile: Callable[[], object]

    async def _serve(self, _requests: object, context: Any) -> AsyncIterator[bytes]:
        asyncio.get_running_loop().call_soon(self.meanwhile)
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such topic")
        yield CHUNK


Serving = tuple[CallGuard, Endless, Callable[[], Any]]


@contextlib.asynccontextmanager
async def serving(
    handler: Endless | None = None, method: str = METHOD, error: EngineError | None = None
) -> AsyncIterator[Serving]:
    gate: Any = Gate()
    gate.error = error
    access: Any = SimpleNamespace(on_change=[])
    guard, handler = CallGuard(gate, access, Mock()), handler or Endless()
    server = grpc.aio.server(interceptors=[guard])
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield guard, handler, channel.stream_stream(method)
    await server.stop(0)


def deny(guard: CallGuard, error: EngineError | None = None) -> None:
    def refuse() -> None:
        raise error or PermissionDeniedError("a new rule")

    for rpc in list(guard._open):
        rpc.end_unless(refuse)


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code(), await call.details()


async def test_stream_blocked_in_a_write_ends_with_the_reason() -> None:
    async with serving() as (guard, handler, open_call):
        call = open_call()
        await until(lambda: handler.sent)
        before = -1
        while handler.sent != before:  # the client's window is full
            before = handler.sent
            await asyncio.sleep(0.2)
        deny(guard)
        assert await end_of(call) == (grpc.StatusCode.PERMISSION_DENIED, "a new rule")
        assert not guard._open


@pytest.mark.parametrize("service", [Watched, Endless])
async def test_watch_that_is_ended_keeps_the_code_so_that_health_checks_go_on(
    service: type[Endless],
) -> None:
    async with serving(service(), WATCH) as (guard, handler, open_call):
        call = open_call()
        await until(lambda: handler.sent)
        deny(guard, TokenRejectedError("the token has expired"))
        assert await end_of(call) == (grpc.StatusCode.UNAUTHENTICATED, "the token has expired")


@pytest.mark.parametrize("service", [Watched, Endless])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TokenRejectedError("no token"), grpc.StatusCode.UNIMPLEMENTED),
        (PermissionDeniedError("no rule"), grpc.StatusCode.UNIMPLEMENTED),
        (CallerLimitError("", "", 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_watch_that_is_not_admitted_turns_health_checks_off_except_above_a_limit(
    service: type[Endless], error: EngineError, code: grpc.StatusCode
) -> None:
    async with serving(service(), WATCH, error) as (_, _, open_call):
        assert await end_of(open_call()) == (code, str(error))


@pytest.mark.parametrize("error", [PermissionDeniedError("no rule"), CallerLimitError("", "", 1)])
def test_denied_call_has_a_line_in_the_audit_log_if_below_the_limit(error: EngineError) -> None:
    gate, audit, context, access = Mock(), Mock(), Mock(), Mock(on_change=[])
    context.auth_context.return_value = {}
    gate.admit.side_effect = error
    with pytest.raises(type(error)):
        CallGuard(gate, access, audit)._admit(METHOD, context)
    assert audit.record_denial.called == isinstance(error, PermissionDeniedError)


def test_only_requests_that_fail_while_they_arrive_are_charged_and_leave_no_debt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_usages, "time", SimpleNamespace(monotonic=lambda: 5.0))
    rule = '[[rule]]\nwho = ["client/a"]\nmay = ["consume"]\nrate = { requests = 2 }\n'
    (tmp_path / "access.toml").write_text(rule)
    access = AccessFile(str(tmp_path / "access.toml"))
    usages, gate, context = CallerUsages(access), Mock(), Mock()
    identity = CallerIdentity(IdentityKind.CLIENT, "a")
    gate.admit.return_value = Caller(
        identity, METHOD, METHOD_RULES[METHOD], lambda: access.rules, "", usages
    )
    context.auth_context.return_value = {}
    guard = CallGuard(gate, access, Mock())
    for _ in range(3):
        with guard.receiving(METHOD, context):
            pass
    usages.charge(identity, None)
    for _ in range(5):
        with pytest.raises(ConnectionError), guard.receiving(METHOD, context):
            raise ConnectionError
    with pytest.raises(CallerLimitError, match="must be at most 2 a second; retry after 501 ms"):
        usages.charge(identity, None)


@pytest.mark.parametrize("steps", range(6))
async def test_stream_denied_while_it_begins_ends_with_the_reason(steps: int) -> None:
    async with serving() as (guard, _, open_call):
        call = open_call()
        await until(lambda: guard._open)
        for _ in range(steps):
            await asyncio.sleep(0)
        deny(guard)
        assert await end_of(call) == (grpc.StatusCode.PERMISSION_DENIED, "a new rule")


async def test_stream_denied_while_its_handler_aborts_it_has_the_first_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = Aborting()
    async with serving(handler) as (guard, _, open_call):
        handler.meanwhile = lambda: deny(guard)
        assert await end_of(open_call()) == (grpc.StatusCode.NOT_FOUND, "no such topic")
        await until(lambda: not guard._open)
    assert not caplog.records
