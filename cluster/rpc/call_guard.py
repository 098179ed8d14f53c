"""The guard of a port: it stands before every handler, and decides by the caller's identity.

    RPC --> admitted by the port's gate? --yes--> the handler
                    \\--no--> PERMISSION_DENIED; the handler does not run

A guard is an interceptor of the server, so no service can be registered beside it. gRPC calls an
interceptor without the call's context. So the interceptor returns another handler, which has it.
"""

import inspect
from collections.abc import Container
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.node_tls import caller_identity
from cluster.security.identities import CallerIdentity, IdentityKind
from timer.model.timer_errors import EngineError, PermissionDeniedError

_Context = grpc.aio.ServicerContext[Any, Any]
_SHAPES: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Gate(Protocol):
    """The rule of a port."""

    def admit(self, method: str, context: _Context) -> object:
        """Return if the caller may call the method, such as /timer.v1.TimerService/Cancel.

        Raises:
            EngineError: the caller may not.
        """


class NodesOnly:
    """Admits the other nodes to every method."""

    def __init__(self, cluster_id: str, nodes: Container[str]) -> None:
        self._cluster_id, self._nodes = cluster_id, nodes

    def admit(self, method: str, context: _Context) -> CallerIdentity:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is not IdentityKind.NODE or found.name not in self._nodes:
            raise PermissionDeniedError(f"{method}: {found} is not another node of this cluster")
        return found


class OfCluster:
    """Admits clients and administrators of the cluster to every method."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id

    def admit(self, method: str, context: _Context) -> CallerIdentity:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is IdentityKind.NODE:
            raise PermissionDeniedError(f"{method}: {found} is a node; nodes have their own port")
        return found


class CallGuard(grpc.aio.ServerInterceptor):
    """Puts a gate before every method of a server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the guarded handler of a method; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        shape = next(each for each in _SHAPES if getattr(handler, each) is not None)
        method = handler_call_details.method
        return handler._replace(**{shape: self._guarded(method, getattr(handler, shape))})

    def _guarded(self, method: str, serve: Any) -> Any:
        # No frame here holds a request while it awaits: an error refers to the frames it passed.
        async def answer(request: Any, context: _Context) -> Any:
            denied = self._denied(method, context)
            answering = _refuse(denied, context) if denied else serve(request, context)
            del request, context
            return await answering

        async def stream(request: Any, context: _Context) -> Any:
            denied = self._denied(method, context)
            if denied:
                refusing = _refuse(denied, context)
                del request, context
                await refusing
                return
            responses = serve(request, context)
            del request, context
            async with aclosing(responses):
                async for response in responses:
                    yield response

        return stream if inspect.isasyncgenfunction(serve) else answer

    def _denied(self, method: str, context: _Context) -> EngineError | None:
        try:
            self._gate.admit(method, context)
        except EngineError as error:
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
        return None


async def _refuse(denied: EngineError, context: _Context) -> None:
    try:
        await grpc_errors.abort(context, denied)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
        raise
    finally:
        del context
