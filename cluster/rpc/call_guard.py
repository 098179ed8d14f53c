"""The guard of a port: it stands before every handler, and decides by the caller's identity.

    RPC --> admitted by the port's gate? --yes--> the handler, which runs with CALLER set
                    \\--no--> PERMISSION_DENIED; the handler does not run

A guard is an interceptor of the server, so no service can be registered beside it. gRPC calls an
interceptor without the call's context. So the interceptor returns another handler, which has it.

New rules concern open RPCs, too: each is checked again, and ended if the rules deny it now. So does
the end of the caller's certificate or token: its open RPCs end within SWEEP_S, and it gets no
further ones.
"""

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import grpc

from cluster.rpc import grpc_errors
from cluster.rpc.access_file import AccessFile, TokenFile
from cluster.rpc.audit_log import AuditLog, request_for_log
from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.connections import SHAPES
from cluster.rpc.node_tls import caller_identity
from cluster.rpc.rpc_caller import CALLER, METADATA, Caller
from cluster.security.caller_limits import CallerLimits
from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    claimed_identity,
    identity_of,
)
from cluster.security.method_rules import METHOD_RULES
from cluster.security.token_hashes import hash_in
from cluster.settings.rounds import next_round
from timer.model.timer_errors import (
    CallerLimitError,
    EngineError,
    NotReadyError,
    PermissionDeniedError,
    TokenRejectedError,
)
from timerclient.values.certificate_dates import end_of_certificate_s, utc_text

_Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]] | None
"""Of an RPC, as gRPC has it."""
SWEEP_S: Final = 2.0
"""Interval in which the certificates of open RPCs are compared with the clock."""
AUTHORIZATION: Final = "authorization"
"""Metadata with a bearer token."""
_DENIALS: Final = (PermissionDeniedError, TokenRejectedError)
"""Errors of a caller whom repetitions do not help."""


class Gate(Protocol):
    """The rule of a port."""

    def admit(self, method: str, context: _Context) -> Caller | None:
        """Return the caller, if it may call the method, such as /timer.v1.TimerService/Cancel.

        None: another node that calls for itself.

        Raises:
            EngineError: the caller may not.
        """

    def claimed_identity(self, context: _Context) -> str:
        """Return the identity that a caller shows, for the line of a denied call.

        The URIs of a certificate without one. Empty: the caller shows nothing.
        """


class _CertificateGate:
    """A gate of callers that have certificates."""

    def __init__(self, cluster_id: str, access: AccessFile, usages: CallerUsages) -> None:
        self._cluster_id, self._access, self._usages = cluster_id, access, usages

    def claimed_identity(self, context: _Context) -> str:
        """See Gate."""
        return claimed_identity(_uris_of(context), self._cluster_id)


class PublicGate(_CertificateGate):
    """Admits clients and administrators by the access rules."""

    def admit(self, method: str, context: _Context) -> Caller:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is IdentityKind.NODE:
            raise PermissionDeniedError(f"{method}: {found} is a node; nodes have their own port")
        return _admit_caller(found, method, context, self._access, self._usages)


class LinkGate(_CertificateGate):
    """Admits the other nodes to every method, and their callers by the access rules."""

    def __init__(
        self, cluster_id: str, access: AccessFile, usages: CallerUsages, nodes: Container[str]
    ) -> None:
        super().__init__(cluster_id, access, usages)
        self._nodes = nodes

    def admit(self, method: str, context: _Context) -> Caller | None:
        """See Gate."""
        found = caller_identity(context, self._cluster_id)
        if found.kind is not IdentityKind.NODE or found.name not in self._nodes:
            raise PermissionDeniedError(f"{method}: {found} is not another node of this cluster")
        behind = [value for key, value in context.invocation_metadata() or () if key == METADATA]
        if not behind:
            return None
        try:
            caller = identity_of(map(str, behind), self._cluster_id, frozenset(IdentityKind))
        except UntrustedIdentityError as error:
            raise PermissionDeniedError(f"{method}: {error}") from None
        return _admit_caller(caller, method, context, self._access, self._usages)


class TokenGate:
    """Admits the callers that send a bearer token, by the access rules."""

    def __init__(self, access: AccessFile, usages: CallerUsages, tokens: TokenFile) -> None:
        self._access, self._usages, self._tokens = access, usages, tokens

    def admit(self, method: str, context: _Context) -> Caller:
        """See Gate."""
        sha256 = hash_in(authorization_in(context.invocation_metadata()))
        identity = CallerIdentity(
            IdentityKind.TOKEN, self._tokens.content.check(sha256, time.time())
        )

        def check() -> None:
            self._tokens.content.check(sha256, time.time())

        return _admit_caller(identity, method, context, self._access, self._usages, check)

    def knows(self, metadata: Metadata) -> bool:
        """Return whether the metadata of an RPC has a token in force."""
        return self._name_in(metadata) is not None

    def claimed_identity(self, context: _Context) -> str:
        """See Gate."""
        name = self._name_in(context.invocation_metadata())
        return "" if name is None else str(CallerIdentity(IdentityKind.TOKEN, name))

    def _name_in(self, metadata: Metadata) -> str | None:
        try:
            sha256 = hash_in(authorization_in(metadata))
            return self._tokens.content.check(sha256, time.time())
        except TokenRejectedError:
            return None


class HttpGate:
    """Admits callers with a bearer token, and others by their certificate."""

    def __init__(
        self, cluster_id: str, access: AccessFile, usages: CallerUsages, tokens: TokenFile | None
    ) -> None:
        """`tokens`: None: a token is ignored."""
        self._by_certificate = PublicGate(cluster_id, access, usages)
        self._by_token = TokenGate(access, usages, tokens) if tokens is not None else None

    def admit(self, method: str, context: _Context) -> Caller:
        """See Gate."""
        return self._gate_of(context).admit(method, context)

    def claimed_identity(self, context: _Context) -> str:
        """See Gate."""
        return self._gate_of(context).claimed_identity(context)

    def _gate_of(self, context: _Context) -> PublicGate | TokenGate:
        sent = authorization_in(context.invocation_metadata())
        if self._by_token and (sent or not _uris_of(context)):
            return self._by_token
        return self._by_certificate


def _uris_of(context: _Context) -> list[str]:
    """Return the URIs in a caller's certificate."""
    return [str(uri, errors="replace") for uri in context.auth_context().get("peer_uri", ())]


def authorization_in(metadata: Metadata) -> list[str]:
    """Return the values of `authorization` in the metadata of an RPC."""
    return [str(value) for key, value in metadata or () if key == AUTHORIZATION]


async def _unread(requests: Any, context: _Context) -> AsyncIterator[Any]:
    """Stand in for the handler of a call that the gate will deny."""
    del requests, context
    nothing: tuple[Any, ...] = ()
    for each in nothing:
        yield each
    raise NotReadyError("the token has just begun to count: repeat the call")


def _admit_caller(
    identity: CallerIdentity,
    method: str,
    context: _Context,
    access: AccessFile,
    usages: CallerUsages,
    check_token: Callable[[], object] = lambda: None,
) -> Caller:
    rule = METHOD_RULES.get(method)
    if rule is None:
        raise PermissionDeniedError(f"{method}: no rule covers this method")
    caller = Caller(
        identity, method, rule, lambda: access.rules, context.peer(), usages, check_token
    )
    caller.admit()
    return caller


@dataclass(eq=False, slots=True)
class _OpenRpc:
    """An RPC that a handler works on."""

    caller: Caller | None
    """None: another node."""
    expires_s: float
    """Unix time at which the certificate of the connection expires."""
    task: "asyncio.Task[Any]"
    denied: EngineError | None = None
    """Why the RPC is being ended."""
    is_cancellable: bool = True

    def allow_cancel(self) -> None:
        """Let checks cancel the task from now on.

        Raises:
            EngineError: a check denied the RPC meanwhile.
        """
        self.is_cancellable = True
        if self.denied is not None:
            raise self.denied

    def end_unless(self, check: Callable[[], object]) -> None:
        """End the RPC if a check raises an EngineError."""
        try:
            check()
        except EngineError as error:
            if self.denied is None:
                self.denied = _without_traceback(error)
                if self.is_cancellable:
                    self.task.cancel()


def _check_date(expires_s: float, now_s: float) -> None:
    if now_s >= expires_s:
        at = f"{utc_text(expires_s)} (this node's clock: {utc_text(now_s)})"
        raise NotReadyError(f"your certificate expired at {at}: connect again with a new one")


def _expiry_of(context: _Context) -> float:
    """Return the Unix time at which the certificate of an RPC's connection expires.

    Never without a certificate, as on the HTTP port: the gate denies such a call.

    Raises:
        PermissionDeniedError: the date is unreadable.
    """
    pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    if not pem:
        return math.inf
    try:
        return end_of_certificate_s(pem)
    except ValueError as error:
        raise PermissionDeniedError(f"the certificate has no readable date: {error}") from None


class CallGuard(grpc.aio.ServerInterceptor):
    """Puts a gate before every method of a server."""

    def __init__(
        self, gate: Gate, access: AccessFile, audit: AuditLog, tokens: TokenFile | None = None
    ) -> None:
        """`tokens`: of the gate; None: it knows none."""
        self._gate, self._access, self._audit = gate, access, audit
        self._open: set[_OpenRpc] = set()
        access.on_change.append(self.check_again)
        if tokens is not None:
            tokens.on_change.append(self.check_again)

    def limits(self, identity: CallerIdentity) -> CallerLimits:
        """Return the limits of a caller by the rules in force."""
        return self._access.rules.limits(identity)

    def check_again(self) -> None:
        """End the open RPCs that the rules in force deny."""
        for each in list(self._open):
            if each.caller is not None:
                each.end_unless(each.caller.check_again)

    def check_dates(self) -> None:
        """End the open RPCs of expired certificates and tokens."""
        now_s = time.time()
        for each in list(self._open):
            each.end_unless(partial(_check_date, each.expires_s, now_s))
            if each.caller is not None:
                each.end_unless(each.caller.check_token)

    async def run(self) -> None:
        """Compare the certificates of open RPCs with the clock, for as long as the node runs."""
        while True:
            await next_round(SWEEP_S)
            self.check_dates()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the guarded handler of a method; see grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        shape = next(each for each in SHAPES if getattr(handler, each) is not None)
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata
        if isinstance(self._gate, TokenGate) and not self._gate.knows(metadata):
            # Any host can call here. A stream's handler denies the call before a message is read.
            return grpc.stream_stream_rpc_method_handler(self.guard_handler(method, _unread))
        return handler._replace(**{shape: self.guard_handler(method, getattr(handler, shape))})

    def guard_handler(self, method: str, serve: Any) -> Any:
        """Return the handler `serve` behind the gate. `method`: its path."""

        # No frame here holds a request while it awaits, or a context when it fails: an error refers
        # to the frames it passed, and the context to gRPC's abort error.
        async def answer(request: Any, context: _Context) -> Any:
            rpc = None
            try:
                with self._admission(method, request, context) as rpc:
                    work = serve(request, context)
                    request = None
                    return await work
            except EngineError as error:
                refusing = _refuse(method, rpc, _without_traceback(error), context)
            finally:
                del request, context
            return await refusing

        async def stream(request: Any, context: _Context) -> Any:
            rpc = None
            try:
                with self._admission(method, request, context) as rpc:
                    responses = serve(request, context)
                    request = None
                    async with aclosing(responses):
                        # gRPC can't end a call whose first write was cancelled.
                        rpc.is_cancellable = False
                        await context.send_initial_metadata(())
                        rpc.allow_cancel()
                        async for response in responses:
                            await context.write(response)
            except EngineError as error:
                refusing = _refuse(method, rpc, _without_traceback(error), context)
            else:
                return
            finally:
                del request, context
            await refusing

        return stream if inspect.isasyncgenfunction(serve) else answer

    @contextmanager
    def receiving(self, method: str, context: Any) -> Iterator[None]:
        """Count an RPC as open while its request arrives. A request that fails is charged.

        Raises:
            EngineError: the gate denies the RPC, or its caller is over a limit.
        """
        caller, _ = self._admit(method, context)
        assert caller is not None
        with caller.counting_as_open():
            try:
                yield
            except BaseException:
                with suppress(CallerLimitError):  # an empty bucket gets no debt
                    caller.usages.charge(caller.identity, None)
                raise

    @contextmanager
    def _admission(self, method: str, request: Any, context: _Context) -> Iterator[_OpenRpc]:
        """Admit the caller of the RPC that this task handles; audit a change at the end.

        Raises:
            EngineError: the gate denies the RPC, new rules ended it, or the caller is over a limit.
        """
        caller, expires_s = self._admit(method, context)
        if caller is not None and caller.rule.is_standard:
            caller.usages.charge(caller.identity, request)
        audited = caller is not None and self._audit.has_line(caller)
        change = request_for_log(request) if audited else None
        del request
        task = asyncio.current_task()
        assert task is not None
        rpc = _OpenRpc(caller, expires_s, task)
        CALLER.set(caller)
        if caller is not None and change is not None:
            caller.on_late = partial(self._audit.record_late_answer, change)
        self._open.add(rpc)
        result = "UNKNOWN"  # of any other error
        try:
            with caller.counting_as_open() if caller is not None else nullcontext():
                yield rpc
            result = "OK"
        except asyncio.CancelledError:
            result = "CANCELLED"
            if rpc.denied is None:
                raise
            task.uncancel()
            raise rpc.denied from None
        except grpc.aio.AbortError:
            result = _code_of(context)
            raise
        except EngineError as error:
            result = grpc_errors.code_of(error).name
            raise
        finally:
            self._open.discard(rpc)
            if caller is not None and change is not None:
                self._audit.record_change(caller, change, result)

    def _admit(self, method: str, context: _Context) -> tuple[Caller | None, float]:
        """Return the caller, and when the certificate expires; see `Gate.admit`."""
        try:
            expires_s = _expiry_of(context)
            _check_date(expires_s, time.time())
            return self._gate.admit(method, context), expires_s
        except CallerLimitError:
            raise
        except EngineError as error:
            self._audit.record_denial(
                method, self._gate.claimed_identity(context), context.peer(), error
            )
            raise


def _without_traceback(error: EngineError) -> EngineError:
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _code_of(context: _Context) -> str:
    code: Any = context.code()
    return getattr(code, "name", str(code))


async def _refuse(
    method: str, rpc: _OpenRpc | None, denied: EngineError, context: _Context
) -> None:
    """End an RPC with the error, except if its handler was ending it with another one.

    `rpc`: None: it was not admitted.

    Raises:
        grpc.aio.AbortError, CancelledError: gRPC takes both as the end of an RPC.
    """
    rule, code = METHOD_RULES.get(method), None
    if rpc is None and rule and rule.denied_unimplemented and isinstance(denied, _DENIALS):
        code = grpc.StatusCode.UNIMPLEMENTED
    try:
        await grpc_errors.abort(context, denied, code=code)
    except grpc.aio.UsageError:
        raise asyncio.CancelledError from None
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
        raise
    finally:
        del context
