"""Any node takes any request: a node that does not lead sends it on to the leader.

    client --request--> n1, a follower --request, deadline, DIRECT--> n2, the leader
           <--answer---                <--answer--------------------

A request takes one hop at most: a request with the metadata DIRECT is never sent on, so none
circles while nodes disagree about the leader. Clients that look for the leader themselves send
DIRECT, too. They get NOT_LEADER with the leader's address.

The leader's errors are passed on as they are, except NOT_LEADER: the leadership is moving, and the
caller should repeat the request after a pause (NOT_READY).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NoReturn

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.rpc_caller import CALLER, METADATA
from timer.model.timer_errors import EngineError, LeadershipLostError, NotReadyError
from timerclient.proto import timer_pb2 as pb

DIRECT: Final = "timer-direct"
"""Metadata of a request that is not sent on. Value: the sender, for the log."""

SERVED_HERE: Final = frozenset(
    {
        *("GetStatus", "GetCheckpoint", "ListMembers"),
        "TransferLeadership",  # any node passes the command to the controller
    }
)
"""Methods that each node answers itself. All others need the leader."""
LOOK_UPS: Final = frozenset(
    {
        *("GetTimer", "ListTimers", "CountTimers", "TellStory"),
        *("ListTopics", "ListProducers", "DescribePolicies"),
    }
)
"""Methods that change nothing: without an answer, a caller may always repeat them."""
PATHS: Final = {
    method.name: f"/{service.full_name}/{method.name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Name of each public method -> its path."""

Context = grpc.aio.ServicerContext[Any, Any]


class Relay:
    """Sends requests to the leader on behalf of one node that does not lead."""

    def __init__(
        self,
        name: str,
        leader_elsewhere: Callable[[], str | None],
        channel: Callable[[str], grpc.aio.Channel],
        relayed: Callable[[], object] = lambda: None,
        *,
        cluster_id: str = "",
    ) -> None:
        """`name`: this node's. `channel` returns a new channel to the node with a name.

        `leader_elsewhere` returns the leader's name. None: this node leads, or none is known.
        `relayed` is called for each RPC that is sent on.
        """
        self._leader, self._channel, self._relayed = leader_elsewhere, channel, relayed
        self._name, self._cluster_id = name, cluster_id
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._outdated: list[grpc.aio.Channel] = []

    def renew(self) -> None:
        """Send further requests on new channels. Those on the old ones may finish."""
        self._outdated += self._channels.values()
        self._channels.clear()

    async def close(self) -> None:
        """Close the channels."""
        channels, self._channels = [*self._outdated, *self._channels.values()], {}
        for channel in channels:
            await channel.close()

    def target(self, method: str, context: Context) -> str | None:
        """Return the name of the node that has to answer this RPC. None: this node."""
        if method in SERVED_HERE or any(
            key == DIRECT for key, _ in context.invocation_metadata() or ()
        ):
            return None
        return self._leader()

    async def answer(self, target: str, method: str, request: Any, context: Context) -> bytes:
        """Return the leader's answer to a request, encoded.

        Raises:
            EngineError: there is no answer; see the module.
            grpc.aio.AbortError: the leader refused the request. The RPC has ended.
        """
        call: Any = self._of(target).unary_unary(PATHS[method])
        sent = call(
            request.SerializeToString(), metadata=self._metadata(), timeout=_left_s(context)
        )
        del request
        try:
            answer: bytes = await sent
        except grpc.aio.AioRpcError as failed:
            refused = _Refused(failed, target, method)
        else:
            return answer
        return await refused.end(context)

    async def stream(
        self, target: str, method: str, requests: Any, context: Context
    ) -> AsyncIterator[bytes]:
        """Yield the leader's answers, encoded. `requests`: one request, or an iterator.

        Raises:
            EngineError: a request is unreadable, or the stream broke.
            grpc.aio.AbortError: the leader refused the request. The RPC has ended.
        """
        timeout_s, channel = _left_s(context), self._of(target)
        unread: list[EngineError] = []
        pump: asyncio.Task[None] | None = None
        if hasattr(requests, "SerializeToString"):
            call: Any = channel.unary_stream(PATHS[method])(
                requests.SerializeToString(), metadata=self._metadata(), timeout=timeout_s
            )
        else:
            call = channel.stream_stream(PATHS[method])(
                metadata=self._metadata(), timeout=timeout_s
            )
            pump = asyncio.create_task(_pump(requests, call, unread))
        del requests
        refused: _Refused | None = None
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as failed:
            refused = _Refused(failed, target, method)
        except asyncio.CancelledError:
            if not unread:
                raise
        finally:
            if pump is not None:
                pump.cancel()
            call.cancel()
        if unread:
            raise unread.pop()
        if refused is not None:
            await refused.end(context)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a relayed request. The leader checks the rules of its caller."""
        caller = CALLER.get()
        if caller is None:
            return ((DIRECT, self._name),)
        return (DIRECT, self._name), (METADATA, caller.identity.uri(self._cluster_id))

    def _of(self, target: str) -> grpc.aio.Channel:
        self._relayed()
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = self._channel(target)
        return channel


async def _pump(requests: Any, call: Any, unread: list[EngineError]) -> None:
    """Write the requests to the leader as fast as it reads them."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended
        try:
            async for request in requests:
                await call.write(request.SerializeToString())
                del request
            await call.done_writing()
        except EngineError as error:
            unread.append(error)
            call.cancel()


class _Refused:
    """The end of an RPC that the leader refused, or that broke. It keeps no frames."""

    def __init__(self, failed: grpc.aio.AioRpcError, target: str, method: str) -> None:
        self._code, self._details = failed.code(), failed.details() or ""
        trailer = dict(failed.trailing_metadata() or ()).get(grpc_errors.TRAILER)
        self._trailer = trailer if isinstance(trailer, bytes) else None
        self._target, self._method = target, method

    async def end(self, context: Context) -> NoReturn:
        """End the RPC of the node's own caller likewise.

        Raises:
            EngineError: the leadership moves, or the leader's answer is lost.
            grpc.aio.AbortError: the leader's own refusal.
        """
        if self._trailer is not None:
            if pb.Error.FromString(self._trailer).reason == pb.NOT_LEADER:
                raise NotReadyError("the leadership is moving to another node: retry")
        elif self._code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            lost = f"the leader {self._target} did not answer: {self._details:.200}"
            if self._method in LOOK_UPS:
                raise NotReadyError(lost)
            raise LeadershipLostError(f"{lost}; the request may have been applied")
        trailer = () if self._trailer is None else ((grpc_errors.TRAILER, self._trailer),)
        try:
            await context.abort(self._code, self._details, trailer)
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
            raise
        finally:
            del context  # the abort's traceback refers to this frame, and the context to the abort
        raise AssertionError("abort returned")


def _left_s(context: Context) -> float | None:
    left_s: float | None = context.time_remaining()  # the type stubs omit None: no deadline
    return left_s
