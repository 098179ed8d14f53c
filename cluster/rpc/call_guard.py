"""The guard of a port: it stands before every handler, and decides by the caller's identity.

    RPC --> admitted by the port's gate? --yes--> the handler, which runs with CALLER set
                    \\--no--> PERMISSION_DENIED; the handler does not run

A guard is an interceptor of the server, so no service can be registered beside it. gRPC calls an
interceptor without the call's context. So the interceptor returns another handler, which has it.

New rules concern open RPCs, too: each is checked again, and ended if the rules deny it now.
"""

import asyncio
import inspect
from collections.abc import Container, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, Protocol

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.access_file import AccessFile
from cluster.rpc.audit_log import AuditLog, shown
from cluster.rpc.node_tls import caller_identity
from cluster.rpc.rpc_caller import CALLER, METADATA, Caller
from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    identity_of,
)
from cluster.security.method_rules import AUDITED, METHOD_RULES
from timer.model.timer_errors import EngineError, PermissionDeniedError

_Context = grpc.aio.ServicerContext[Any, Any]
_SHAPES: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Gate(Protocol):
    """The rule of a port."""

    def admit(self, method: str, context: _Context) -> Caller | None:
        """Return the caller, if it may call the method, such as /timer.v1.TimerService/Cancel.

        None: another node that calls for itself.

        Raises:
            EngineError: the caller may not.
        """


class PublicGate:
    """Admits clients and administrators by the access rules."""

    def __init__(self, cluster_id: str, access: AccessFile) -> None:
        self._cluster_id, self._access = cluster_id, access

    def admit(self, method: str, context: _Context) -> Caller:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is IdentityKind.NODE:
            raise PermissionDeniedError(f"{method}: {found} is a node; nodes have their own port")
        return _admitted(found, method, context, self._access)


class LinkGate:
    """Admits the other nodes to every method, and their callers by the access rules."""

    def __init__(self, cluster_id: str, access: AccessFile, nodes: Container[str]) -> None:
        self._cluster_id, self._nodes, self._access = cluster_id, nodes, access

    def admit(self, method: str, context: _Context) -> Caller | None:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is not IdentityKind.NODE or found.name not in self._nodes:
            raise PermissionDeniedError(f"{method}: {found} is not another node of this cluster")
        behind = [value for key, value in context.invocation_metadata() or () if key == METADATA]
        if not behind:
            return None
        try:
            caller = identity_of(map(str, behind), self._cluster_id)
        except UntrustedIdentityError as error:
            raise PermissionDeniedError(f"{method}: {error}") from None
        return _admitted(caller, method, context, self._access)


def _admitted(
    identity: CallerIdentity, method: str, context: _Context, access: AccessFile
) -> Caller:
    rule = METHOD_RULES.get(method)
    if rule is None:
        raise PermissionDeniedError(f"{method}: no rule covers this method")
    caller = Caller(identity, method, rule, lambda: access.rules, context.peer())
    caller.admit()
    return caller


class CallGuard(grpc.aio.ServerInterceptor):
    """Puts a gate before every method of a server."""

    def __init__(self, gate: Gate, access: AccessFile, audit: AuditLog) -> None:
        self._gate, self._audit = gate, audit
        self._open: set[Caller] = set()
        access.on_change.append(self._check_again)

    def _check_again(self) -> None:
        for caller in list(self._open):
            caller.check_again()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the guarded handler of a method; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        shape = next(each for each in _SHAPES if getattr(handler, each) is not None)
        method = handler_call_details.method
        return handler._replace(**{shape: self.guarded(method, getattr(handler, shape))})

    def guarded(self, method: str, serve: Any) -> Any:
        """Return the handler `serve` behind the gate. `method`: its path."""

        # No frame here holds a request while it awaits: an error refers to the frames it passed.
        async def answer(request: Any, context: _Context) -> Any:
            try:
                with self._admitted(method, request, context):
                    work = serve(request, context)
                    request = None
                    return await work
            except EngineError as error:
                denied = _cleared(error)
            request = None
            return await _refuse(denied, context)

        async def stream(request: Any, context: _Context) -> Any:
            try:
                with self._admitted(method, request, context):
                    responses = serve(request, context)
                    request = None
                    async with aclosing(responses):
                        async for response in responses:
                            yield response
            except EngineError as error:
                denied = _cleared(error)
            else:
                return
            request = None
            await _refuse(denied, context)

        return stream if inspect.isasyncgenfunction(serve) else answer

    @contextmanager
    def _admitted(self, method: str, request: Any, context: _Context) -> Iterator[None]:
        """Admit the caller of the RPC that this task handles; audit a change at the end.

        Raises:
            EngineError: the gate denies the RPC, or new rules ended it.
        """
        caller = self._admit(method, context)
        if caller is None:
            yield
            return
        change = shown(request) if caller.rule.permission in AUDITED else None
        del request
        task = asyncio.current_task()
        assert task is not None
        caller.end = task.cancel
        CALLER.set(caller)
        self._open.add(caller)
        result = "UNKNOWN"  # of any other error
        try:
            yield
            result = "OK"
        except asyncio.CancelledError:
            result = "CANCELLED"
            if caller.denied is None:
                raise
            task.uncancel()
            raise caller.denied from None
        except grpc.aio.AbortError:
            result = _code_of(context)
            raise
        finally:
            self._open.discard(caller)
            if change is not None:
                self._audit.changed(caller, change, result)

    def _admit(self, method: str, context: _Context) -> Caller | None:
        try:
            return self._gate.admit(method, context)
        except EngineError as error:
            uris = context.auth_context().get("peer_uri", ())
            named = ", ".join(str(uri, errors="replace") for uri in uris)
            self._audit.denied(method, named, context.peer(), error)
            raise


def _cleared(error: EngineError) -> EngineError:
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _code_of(context: _Context) -> str:
    code: Any = context.code()
    return getattr(code, "name", str(code))


async def _refuse(denied: EngineError, context: _Context) -> None:
    try:
        await grpc_errors.abort(context, denied)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
        raise
    finally:
        del context
