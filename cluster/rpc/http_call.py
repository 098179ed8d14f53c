"""Calls of the node's own public methods, without gRPC: from its HTTP port.

    request --> the guard of the public port --> handler --> answer
                                                 \\--not the leader--> relay --> the leader's answer

A call takes a context in place of gRPC's. So rules, audit log, limits, metrics and relay are those
of gRPC.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.rpc.call_guard import CallGuard
from cluster.rpc.grpc_errors import TRAILER
from cluster.rpc.handlers import Service
from cluster.rpc.problem_details import ProblemError
from cluster.rpc.relay import METHODS, PATHS
from cluster.security.caller_limits import CallerLimits
from cluster.security.identities import CallerIdentity
from timerclient.proto import timer_pb2 as pb

_REASONS: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.REASON_COMMIT_TIMEOUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.REASON_OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: pb.REASON_NOT_READY,
}
"""Status code of an error without a reason -> the reason."""


UNREAD_MAX: Final = 64
"""Answers of a stream that are not read yet, at most."""


class HttpContext:
    """The context of one call: the part of gRPC's `ServicerContext` that handlers use."""

    def __init__(
        self,
        peer: str,
        timeout_s: float | None,
        identities: Iterable[str] = (),
        pem: bytes = b"",
        authorization: Iterable[str] = (),
    ) -> None:
        """`peer`: address in gRPC's form. `pem`: the caller's certificate; empty: it has none.

        `timeout_s`: None: there is no deadline.

        `identities`: URIs of that certificate. `authorization`: values of that header.
        """
        self._metadata = tuple(("authorization", value) for value in authorization)
        self._peer = peer
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._identities, self._pem = tuple(uri.encode() for uri in identities), pem
        self._code: Any = None
        self.error = pb.Error()
        """The reason of the refusal."""

    def peer(self) -> str:
        """Return the address of the caller."""
        return self._peer

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the caller's certificate and its URIs."""
        return {"peer_uri": self._identities, "x509_pem_cert": (self._pem,)}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the bearer token, if the request has one."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None: there is none."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def begin_stream(self) -> None:
        """Make room for the answers of a stream."""
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._free_reads = asyncio.Semaphore(UNREAD_MAX)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Ignore the metadata: there is no stream of gRPC."""

    async def write(self, answer: Any) -> None:
        """Pass one answer of a stream on; wait while UNREAD_MAX are unread."""
        await self._free_reads.acquire()
        self._answers.put_nowait(answer)

    def end(self) -> None:
        """Note that a stream has no further answers."""
        self._answers.put_nowait(None)

    async def read_answer(self) -> Any:
        """Return the next answer of a stream. None: there is none."""
        answer = await self._answers.get()
        self._free_reads.release()
        return answer

    def code(self) -> Any:
        """Return the status code of a refused call."""
        return self._code

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with an error.

        Raises:
            grpc.aio.AbortError: always.
        """
        self._code = code
        wire = dict(trailing_metadata).get(TRAILER)
        if wire is not None:
            self.error = pb.Error.FromString(wire)
        else:  # of gRPC itself, on the way to the leader
            reason = _REASONS.get(code, pb.REASON_UNSPECIFIED)
            self.error = pb.Error(reason=reason, message=details)
        raise grpc.aio.AbortError(details)


class LocalCalls:
    """Calls the methods of a node's services. Each call needs a task of its own."""

    def __init__(self, services: Iterable[Service], guard: CallGuard | None) -> None:
        """`guard`: that of the public port. None: there is no TLS."""
        self._services, self._guard = tuple(services), guard

    def is_unlimited(self, identity: CallerIdentity | None) -> bool:
        """Return whether no limit counts the calls of a caller. None: there is no TLS."""
        if self._guard is None:
            return True
        return identity is not None and self._guard.limits(identity) == CallerLimits()

    def receiving(self, method: str, context: HttpContext) -> AbstractContextManager[None]:
        """Return a context for the arrival of a call's request; see `CallGuard.receiving`."""
        if self._guard is None:
            return nullcontext()
        return self._guard.receiving(PATHS[method], context)

    async def unary(self, method: str, request: Message, context: HttpContext) -> Any:
        """Return the answer of a method with one request and one answer.

        Raises:
            ProblemError: the call was refused.
        """
        try:
            answer = await self._handler(method)(request, context)
        except grpc.aio.AbortError:
            raise ProblemError(context.error) from None
        return _message_of(method, answer)

    async def stream(
        self, method: str, request: Any, context: HttpContext
    ) -> AsyncGenerator[Any, None]:
        """Yield the answers of a method with a stream of answers.

        `request`: one message, or an iterator of messages.

        Raises:
            ProblemError: the call was refused.
        """
        context.begin_stream()
        work = asyncio.create_task(_written(self._handler(method), request, context))
        work.add_done_callback(lambda _: context.end())
        try:
            while (answer := await context.read_answer()) is not None:
                yield _message_of(method, answer)
            await work
        except grpc.aio.AbortError:
            raise ProblemError(context.error) from None
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work

    def _handler(self, method: str) -> Any:
        handler = next(
            found for each in self._services if (found := getattr(each, method, None)) is not None
        )
        return handler if self._guard is None else self._guard.guard_handler(PATHS[method], handler)


async def _written(handler: Any, request: Any, context: HttpContext) -> None:
    """Run a handler with a stream of answers, which go to the context. A guarded one writes them
    itself."""
    if inspect.iscoroutinefunction(handler):
        await handler(request, context)
        return
    async with aclosing(handler(request, context)) as answers:
        async for answer in answers:
            await context.write(answer)


def _message_of(method: str, answer: Any) -> Any:
    """Return an answer as a message. The leader's answer to a relayed request is encoded."""
    if isinstance(answer, bytes):
        return GetMessageClass(METHODS[method].output_type).FromString(answer)
    return answer
