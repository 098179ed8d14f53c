"""Any node takes any request: a node that does not lead sends it on to the leader.

    client --request--> n1, a follower --request, deadline, DIRECT--> n2, the leader
           <--answer---                <--answer--------------------

A request takes one hop at most: a request with the metadata DIRECT is never sent on, so none
circles while nodes disagree about the leader. Clients that look for the leader themselves send
DIRECT, too. They get NOT_LEADER with the leader's address.

The leader's errors are passed on as they are, except NOT_LEADER: the leadership is moving, and the
caller should repeat the request after a pause (NOT_READY). So it is if this node knows no leader. A
leader that falls silent without closing its connections is given up as soon as this node knows
another leader. A node that stops gives up the calls that wait for messages.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.rpc_caller import CALLER, METADATA
from cluster.security.method_rules import CONTRACT_RULES, Repeat
from timer.model.timer_errors import (
    EngineError,
    LeadershipLostError,
    NotLeaderError,
    NotReadyError,
)
from timerclient.proto import timer_pb2 as pb

DIRECT: Final = "timer-direct"
"""Metadata of a request that is not sent on. Value: the sender, for the log."""

METHODS: Final = {
    method.name: method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Name of each public method -> its descriptor."""
PATHS: Final = {
    name: f"/{method.containing_service.full_name}/{name}" for name, method in METHODS.items()
}
"""Name of each public method -> its path."""

LINE_CALLS_MAX: Final = 256
"""Open calls on one connection to the leader. Its limit for a connection (limits.streams_max) would
let further ones wait, also those of other clients."""
CONNECT_S: Final = 2.0
"""Longest time for the connection to the leader, in seconds. A request that does not get one is
not sent."""
WATCH_S: Final = 0.5
"""Interval in which open calls are compared with the present leader."""
WAITING: Final = frozenset({"Consume", "Receive"})
"""Methods whose calls wait for messages."""
MOVING: Final = "the leadership is moving to another node: retry"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class _Line:
    """A connection to the node `target`, with `calls` open calls."""

    target: str
    channel: grpc.aio.Channel
    calls: int = 0
    outdated: bool = False
    """Made with a certificate that was replaced: it gets no further call."""

    async def connect(self, left_s: float | None) -> None:
        """Wait until the connection is open. `left_s`: seconds that the caller waits; None: any.

        A request that finds no connection was certainly not applied.

        Raises:
            NotReadyError: the connection failed, or is not open in time.
        """
        within_s = CONNECT_S if left_s is None else min(CONNECT_S, left_s)
        state = self.channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(within_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise NotReadyError(f"no connection to the node {self.target}: retry")
                    await self.channel.wait_for_state_change(state)
                    state = self.channel.get_state(try_to_connect=True)
        except TimeoutError:
            text = f"the node {self.target} took no connection within {within_s:.3g} s: retry"
            raise NotReadyError(text) from None


class Relay:
    """Sends requests to the leader on behalf of one node that does not lead."""

    def __init__(
        self,
        name: str,
        leader: Callable[[], str | None],
        channel: Callable[[str], grpc.aio.Channel],
        relayed: Callable[[], object] = lambda: None,
        *,
        cluster_id: str = "",
    ) -> None:
        """`name`: this node's. `leader` returns the leader's name; None: it is unknown.

        `channel` returns a new channel to the node with a name. `relayed` is called for each RPC
        that is sent on.
        """
        self._name, self._leader, self._channel, self._relayed = name, leader, channel, relayed
        self._cluster_id = cluster_id
        self._lines: list[_Line] = []
        self._open: dict[Any, tuple[str, str]] = {}
        """Open call -> its method and its target."""
        self._cancel_reasons: dict[Any, str] = {}
        """Open calls that were cancelled -> why."""
        self._stops = False
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connections. Open calls end."""
        if self._watching is not None:
            self._watching.cancel()
        for line in self._lines:
            self._shut(line)
        await asyncio.gather(*self._closing)

    def end_waiting(self) -> None:
        """Give up the calls that wait for messages, and refuse further ones: this node stops."""
        self._stops = True
        for call, (method, _) in self._open.items():
            if method in WAITING:
                self._cancel(call, "this node stops")

    def renew(self) -> None:
        """Send further requests on new connections. Calls on the old ones may finish."""
        for line in self._lines:
            line.outdated = True
            if not line.calls:
                self._shut(line)

    def target(self, method: str, context: Context) -> str | None:
        """Return the name of the node that has to answer this RPC. None: this node."""
        if CONTRACT_RULES[method].here or is_direct(context):
            return None
        leader = self._leader()
        return None if leader == self._name else leader

    async def answer(self, target: str, method: str, request: Any, context: Context) -> bytes:
        """Return another node's answer to a request, encoded. `target`: as a rule the leader.

        Raises:
            EngineError: there is no answer; see the module.
            grpc.aio.AbortError: the leader refused the request. The RPC has ended.
        """
        with self._line(target) as line:
            await self._connect(line, method, context)
            repeatable = is_repeatable(method, request)
            call: Any = line.channel.unary_unary(PATHS[method])
            sent = call(
                request.SerializeToString(),
                metadata=self._metadata(),
                timeout=_remaining_s(context),
            )
            del request
            with self._open_call(sent, method, target):
                try:
                    answer: bytes = await sent
                except grpc.aio.AioRpcError as failed:
                    refused = _Refused(target, method, failed, is_repeatable=repeatable)
                except asyncio.CancelledError:
                    if sent not in self._cancel_reasons:
                        raise
                    refused = _Refused(target, method, self._cancel_reasons[sent])
                else:
                    return answer
        ending = refused.end(context)
        del context  # the abort's traceback refers to this frame, too
        return await ending

    async def stream(
        self, target: str, method: str, requests: Any, context: Context
    ) -> AsyncIterator[bytes]:
        """Yield the leader's answers, encoded. `requests`: one request, or an iterator.

        Raises:
            EngineError: a request is unreadable, or the stream broke.
            grpc.aio.AbortError: the leader refused the request. The RPC has ended.
        """
        unread: list[EngineError] = []
        pump: asyncio.Task[None] | None = None
        refused: _Refused | None = None
        with self._line(target) as line:
            await self._connect(line, method, context)
            options: Any = {"metadata": self._metadata(), "timeout": _remaining_s(context)}
            if hasattr(requests, "SerializeToString"):
                one: Any = line.channel.unary_stream(PATHS[method])
                call = one(requests.SerializeToString(), **options)
            else:
                many: Any = line.channel.stream_stream(PATHS[method])
                call = many(**options)
                pump = asyncio.create_task(_pump(requests, call, unread))
            del requests
            with self._open_call(call, method, target):
                try:
                    # Not `async for`: the call refers to its iterator, which refers to the call and
                    # to the last answer.
                    while (answer := await call.read()) is not grpc.aio.EOF:
                        yield answer
                        del answer
                except grpc.aio.AioRpcError as failed:
                    refused = _Refused(target, method, failed)
                except asyncio.CancelledError:
                    if call not in self._cancel_reasons:
                        raise
                    refused = _Refused(target, method, self._cancel_reasons[call])
                finally:
                    if pump is not None:
                        pump.cancel()
                    call.cancel()
        if refused is not None:
            ending = refused.end(context)
            del context
            await ending
        if unread:
            raise unread.pop()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a relayed request. The leader checks the rules of its caller."""
        caller = CALLER.get()
        if caller is None:
            return ((DIRECT, self._name),)
        return (DIRECT, self._name), (METADATA, caller.identity.uri(self._cluster_id))

    @contextlib.contextmanager
    def _line(self, target: str) -> Iterator[_Line]:
        """Use a connection for one call. It closes with its last call, if there is another."""
        self._relayed()
        lines = (each for each in self._lines if each.target == target and not each.outdated)
        line = next((each for each in lines if each.calls < LINE_CALLS_MAX), None)
        if line is None:
            line = _Line(target, self._channel(target))
            self._lines.append(line)
        line.calls += 1
        try:
            yield line
        finally:
            line.calls -= 1
            if not line.calls and (len(self._lines) > 1 or line.outdated):
                self._shut(line)

    def _shut(self, line: _Line) -> None:
        """Close a connection; allowed at any time."""
        if line in self._lines:
            self._lines = [each for each in self._lines if each is not line]
            closing = asyncio.ensure_future(line.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _connect(self, line: _Line, method: str, context: Context) -> None:
        """Wait until a call of a method may begin.

        Raises:
            NotReadyError: see `_Line.connect`; or this node stops, and the call would wait.
        """
        await line.connect(_remaining_s(context))
        if self._stops and method in WAITING:
            raise NotReadyError("this node stops: retry at another one")

    @contextlib.contextmanager
    def _open_call(self, call: Any, method: str, target: str) -> Iterator[None]:
        """Watch a call of a method: see `_watch`."""
        self._open[call] = method, target
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._open[call]
            self._cancel_reasons.pop(call, None)

    def _cancel(self, call: Any, why: str) -> None:
        self._cancel_reasons[call] = why
        call.cancel()

    async def _watch(self) -> None:
        """Cancel each call for the leader once another node than its target leads."""
        while self._open:
            await asyncio.sleep(WATCH_S)
            leader = self._leader()
            if leader is None:
                continue  # the target may lead on
            for call, (method, target) in self._open.items():
                if target != leader and not CONTRACT_RULES[method].here:
                    self._cancel(call, "another node leads now")


async def _pump(requests: Any, call: Any, unread: list[EngineError]) -> None:
    """Write the requests to the leader as fast as it reads them.

    They end before one that is unreadable or refused, whose error is added to `unread`.
    """
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended
        try:
            async for request in requests:
                await call.write(request.SerializeToString())
                del request
        except EngineError as error:
            unread.append(error)
        await call.done_writing()


class _Refused:
    """The end of an RPC that the leader refused, or that broke. It keeps no frames."""

    def __init__(
        self,
        target: str,
        method: str,
        failed: grpc.aio.AioRpcError | str,
        *,
        is_repeatable: bool = False,
    ) -> None:
        """`failed`: the leader's error, or why this node cancelled the call.

        `is_repeatable`: the request may be applied twice without harm.
        """
        self._is_repeatable = is_repeatable
        self._code, self._details, trailer = grpc.StatusCode.CANCELLED, str(failed), None
        self._lost = f"this node gave up the call of {target}: {failed}"
        if isinstance(failed, grpc.aio.AioRpcError):
            self._code, self._details = failed.code(), failed.details() or ""
            self._lost = f"the node {target} did not answer: {self._details:.200}"
            trailer = dict(failed.trailing_metadata() or ()).get(grpc_errors.TRAILER)
        self._trailer = trailer if isinstance(trailer, bytes) else None
        self._method = method

    async def end(self, context: Context) -> NoReturn:
        """End the RPC of the node's own caller likewise.

        Raises:
            EngineError: the leadership moves, or the leader's answer is lost.
            grpc.aio.AbortError: the leader's own refusal.
        """
        trailers: tuple[tuple[str, str | bytes], ...] = ()
        if self._trailer is not None:
            wire = pb.Error.FromString(self._trailer)
            if wire.reason == pb.REASON_NOT_LEADER:
                raise NotReadyError(MOVING)
            trailers = grpc_errors.trailers_of(self._code, wire, is_repeatable=self._is_repeatable)
        elif self._code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            if CONTRACT_RULES[self._method].repeat is Repeat.READ:
                raise NotReadyError(self._lost)
            raise LeadershipLostError(f"{self._lost}; the request may have been applied")
        try:
            await context.abort(self._code, self._details, trailers)
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
            raise
        finally:
            del context  # the abort's traceback refers to this frame, and the context to the abort
        raise AssertionError("abort returned")


def is_repeatable(method: str, request: Any) -> bool:
    """Return whether a method's request may be applied twice without harm.

    `request`: a stream of requests is judged by its method alone.
    """
    match request:
        case pb.ScheduleRequest() | pb.ScheduleTimerRequest():
            return bool(request.request_id or getattr(request, "producer_id", 0))
        case pb.CancelRequest() | pb.RescheduleRequest():
            return not request.HasField("keys")  # another timer may have the key by then
        case pb.CreateSeriesRequest():
            return not request.alter
        case _:
            return CONTRACT_RULES[method].repeat is not Repeat.NO


def is_direct(context: Context) -> bool:
    """Return whether a request has the metadata DIRECT."""
    return any(key == DIRECT for key, _ in context.invocation_metadata() or ())


def error_for(context: Context, error: EngineError) -> EngineError:
    """Return the error for a caller: NOT_LEADER only for one that looks for the leader itself."""
    if not isinstance(error, NotLeaderError) or is_direct(context):
        return error
    return NotReadyError(MOVING if error.leader else "no leader is known at the moment: retry")


def _remaining_s(context: Context) -> float | None:
    left_s: float | None = context.time_remaining()  # the type stubs omit None: no deadline
    return left_s
