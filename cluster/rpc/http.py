"""The HTTP port: metrics, health, the node's state as JSON, and the administration under /v1.

    /metrics         Prometheus
    /healthz         200: the event loop runs. No answer: restart the process
    /readyz          200: send clients here: the node leads, or follows the leader. 503: why not
    /v1/status       this node; with the others' answers: ?scope=cluster
    /v1/checkpoint   likewise
    /v1/policies     the cluster's, or ?namespace=ns, or ?topic=ns/t, as this node has applied them
    /v1/openapi.json the document of all paths under /v1, made of the table in http_routes.py
    /, further /v1   the status page and its JSON (cluster/page/page_routes.py); without: links

The port reads the node through a `NodeView`. It decides from one `LocalState` whether the node is
ready. An error that a restart may cure ends the process itself, as a failed disk does.
"""

import asyncio
import errno
import functools
import html
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from prometheus_client import CollectorRegistry

from cluster.rpc import openapi
from cluster.rpc.access_file import AccessFile, TokenFile
from cluster.rpc.aiohttp_server import web
from cluster.rpc.audit_log import AuditLog
from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.http_api import IDENTITY, RULES, certificate_uris, peer_of
from cluster.rpc.http_connections import PROBES, HttpConnections
from cluster.rpc.http_listener import HttpListener
from cluster.rpc.http_routes import (
    CALLING_PATHS,
    FILTERED_PATHS,
    READERS,
    RPC_PATHS,
    SCOPES,
    HttpRoute,
)
from cluster.rpc.json_bodies import SMALL_BYTES_MAX
from cluster.rpc.metrics_pages import MetricsPages
from cluster.rpc.open_files import HTTP_RESERVED
from cluster.rpc.problem_details import (
    ProblemError,
    ProblemProtocol,
    is_api,
    json_line,
    problem_of,
    problems,
)
from cluster.security.access_rules import CLUSTER, Permission
from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    claimed_identity,
    identity_of,
)
from cluster.security.token_hashes import hash_in
from cluster.settings.config import parse_address
from timer.model.timer_errors import (
    CallerLimitError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    PermissionDeniedError,
)

ANSWER_TIMEOUT_S: Final = 5.0
"""Limit for the status of the whole cluster, which needs the other nodes' answers."""
IDLE_S: Final = 30.0
"""A connection is closed after this time without a request's headers, also after each answer."""
BEHIND_MS_MAX: Final = 5_000
"""A follower that lacks committed entries for longer is not ready; a busy one does for a moment."""
DRAIN_TIMEOUT_S: Final = 1.0
"""Seconds that a stopping server waits for open answers; a scrape can be repeated."""

_LINKS: Final = (
    *("/v1/status", "/v1/status?scope=cluster"),
    *("/v1/checkpoint", "/v1/checkpoint?scope=cluster"),
    "/v1/policies",
    *("/metrics", "/healthz", "/readyz"),
)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """The node's state for probes, known without requests to other nodes."""

    role: str
    """leader, follower, candidate, learner; stopping, once the stop has begun; or the reason why
    the node takes no part."""
    serving: bool
    """The node leads, has a valid lease and has applied all entries of earlier epochs."""
    leader: str
    """Name of the leader that the node follows; empty: unknown."""
    silent_ms: int
    """Time since the last message of the leader, on a follower."""
    silent_ms_max: int
    """A follower without a message for longer has lost its leader: the lease and its guard."""
    behind_ms: int | None = 0
    """Since this follower last had all that the leader had committed. None: never."""


class NodeView(Protocol):
    """The node's methods that the HTTP port calls."""

    def local(self) -> LocalState:
        """Return the state for probes, at once."""

    async def measure(self) -> None:
        """Update the metrics of the registry that take a while to read."""

    async def status(self, *, cluster: bool) -> Mapping[str, object]:
        """Return the status of the node, or of the whole cluster; JSON's types only."""

    async def checkpoint(self, *, cluster: bool) -> Mapping[str, object]:
        """Return the node's checkpoint, or all nodes' and the shared one; JSON's types only."""

    async def policies(self, *, namespace: str, topic: str) -> Mapping[str, object]:
        """Return the policies of a scope; JSON's types only."""


class ExtraPaths(Protocol):
    """Further paths of the port."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes. One of them is `/`."""

    async def close(self) -> None:
        """End all work; the server has stopped."""


def why_not_ready(state: LocalState) -> str:
    """Return the reason to send no clients to this node; empty: there is none."""
    match state.role:
        case "leader":
            return "" if state.serving else "leads, but does not serve: no lease, or not caught up"
        case "follower" | "learner" if not state.leader:
            return "knows no leader"
        case "follower" | "learner" if state.silent_ms > state.silent_ms_max:
            return f"has not heard the leader {state.leader} for {state.silent_ms} ms"
        case "follower" | "learner":
            return _why_behind(state)
        case role:
            return f"is {role}"


def _why_behind(state: LocalState) -> str:
    if state.behind_ms is None:
        return f"has not caught up with the leader {state.leader} since its start"
    if state.behind_ms > BEHIND_MS_MAX:
        seconds = state.behind_ms // 1_000
        return f"has lacked entries of the leader {state.leader} for {seconds} s"
    return ""


_unix_s: Final = functools.lru_cache(maxsize=1_024)(ssl.cert_time_to_seconds)


@dataclass(frozen=True, slots=True)
class HttpTls:
    """TLS of the HTTP port. Probes need no certificate. RPC routes need one or a token, and check
    the rules of their methods before they read a body. A list of topics needs one that may observe
    some topic, and the other pages one that may observe the cluster. All count for the caller's
    limits, except for probes."""

    context: Callable[[], ssl.SSLContext]
    """Returns the one for the next handshake."""
    cluster_id: str
    access: AccessFile

    tokens: TokenFile | None
    """None: bearer tokens are ignored."""
    audit: AuditLog
    usages: CallerUsages

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request whose caller may make it, and has not reached a limit; refuse others."""
        if request.path in PROBES:
            return await handler(request)
        resource = request.match_info.route.resource
        path = request.method, resource.canonical if resource is not None else ""
        try:
            caller = request[IDENTITY] = self._caller(request)
            rules = request[RULES] = self.access.rules
            some = request.path in FILTERED_PATHS and rules.may_some(caller, Permission.OBSERVE)
            if not (path in RPC_PATHS or some):
                self._check(caller)
        except EngineError as denied:
            named = self._claimed_identity(request)
            self.audit.record_denial(request.path[:200], named, peer_of(request), denied)
            return _refusal(request, denied)
        if path in CALLING_PATHS:
            return await handler(request)
        with ExitStack() as opened:
            try:
                opened.enter_context(self.usages.open_call(caller, peer_of(request)))
                self.usages.charge(caller, None)
            except CallerLimitError as error:
                return _refusal(request, error)
            return await handler(request)

    def _check(self, caller: CallerIdentity) -> None:
        """Check that a caller may observe the cluster.

        Raises:
            PermissionDeniedError: it may not.
        """
        if not self.access.rules.may(caller, Permission.OBSERVE, CLUSTER):
            raise PermissionDeniedError(
                f"{caller} has no rule for observe on all topics and groups"
            )

    def _claimed_identity(self, request: web.Request) -> str:
        """Return the identity that a denied caller shows; see `Gate.claimed_identity`."""
        with suppress(EngineError):
            if (caller := self._caller(request)).kind is IdentityKind.TOKEN:
                return str(caller)
        by_token = self.tokens is not None and "Authorization" in request.headers
        return "" if by_token else claimed_identity(certificate_uris(request), self.cluster_id)

    def _caller(self, request: web.Request) -> CallerIdentity:
        uris, sent = certificate_uris(request), request.headers.getall("Authorization", ())
        if self.tokens is not None and (sent or not uris):
            name = self.tokens.content.check(hash_in(sent), time.time())
            return CallerIdentity(IdentityKind.TOKEN, name)
        try:
            caller = identity_of(uris, self.cluster_id)
        except UntrustedIdentityError as error:
            bare = ", ".join(sorted(PROBES))
            raise PermissionDeniedError(f"{error}; without a certificate: {bare}") from None
        until = (request.get_extra_info("peercert") or {}).get("notAfter", "")
        if _unix_s(until) <= time.time():
            raise PermissionDeniedError(f"the certificate expired at {until}")
        return caller


def _refusal(request: web.Request, error: EngineError) -> web.Response:
    answer = problem_of(error)
    if not is_api(request):
        del answer.headers["Content-Type"]
        answer.text, answer.content_type = f"{error}\n", "text/plain"
    return answer


@dataclass(frozen=True, slots=True)
class HttpHooks:
    """Callbacks of the HTTP server. The defaults do nothing."""

    on_handshake_failed: Callable[[], object] = lambda: None
    """Called for each TLS handshake that fails."""
    on_ended: Callable[[], object] = lambda: None
    """Called for each connection that is ended because its client does not read."""


NO_HTTP_HOOKS: Final = HttpHooks()


class HttpServer:
    """Serves one node's HTTP port from `start` to `stop`."""

    def __init__(  # noqa: PLR0913 - its parts, and one limit
        self,
        address: str,
        view: NodeView,
        registry: CollectorRegistry,
        pages: ExtraPaths | None = None,
        tls: HttpTls | None = None,
        hooks: HttpHooks = NO_HTTP_HOOKS,
        *,
        connections_max: int = HTTP_RESERVED,
    ) -> None:
        """`address` is host:port; port 0: any free one. `pages`: None for a page of links.

        `tls`: None: without TLS. `connections_max`: see HttpListener.
        """
        self._hooks = hooks
        self._connections_max = connections_max
        self._tls = tls
        self._text = address
        self._address = parse_address("http", address, port_min=0)
        self._view = view
        self._pages = pages
        self._metrics_pages = MetricsPages(view.measure, registry)
        self._runner: web.AppRunner | None = None
        self._listener: HttpListener | None = None
        self.port = self._address.port
        """The port; 0: the system chooses it at `start`."""

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            ConfigError: the address is in use, not this machine's, or not allowed.
        """
        connections = HttpConnections(self._hooks.on_ended, self._connections_max)
        admission = [self._tls.admit] if self._tls is not None else []
        middlewares = [connections.deliver, problems, *admission]
        app = web.Application(middlewares=middlewares, client_max_size=SMALL_BYTES_MAX)
        readers: dict[str, Handler] = {
            "status": self._status,
            "checkpoint": self._checkpoint,
            "policies": self._policies,
            "openapi": self._openapi,
        }
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._ready),
                *(
                    web.get(each.path, with_known_parameters(each, readers[each.reader]))
                    for each in READERS
                ),
            ]
        )
        app.add_routes(self._pages.routes() if self._pages else [web.get("/", self._index)])
        self._runner = runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=DRAIN_TIMEOUT_S,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # see BodyReader
            handler_cancellation=True,  # a receive whose client has gone leases no message
        )
        await runner.setup()
        server = runner.server
        assert server is not None

        tls = self._tls
        context = tls.context if tls is not None else lambda: None
        protocol = functools.partial(
            ProblemProtocol,
            server,
            loop=asyncio.get_running_loop(),
            **server._kwargs,  # noqa: SLF001
        )
        self._listener = HttpListener(
            protocol,
            connections,
            context,
            self._hooks.on_handshake_failed,
            self._connections_max,
        )
        try:
            self.port = await self._listener.start(*self._address)
        except OSError as error:
            await self.stop()
            why = "in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise ConfigError("http", self._text, f"can't listen: {why}") from error
        return self.port

    async def stop(self) -> None:
        """Refuse new requests, finish those under way, close; allowed at any time."""
        if self._listener is not None:
            await self._listener.stop()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
            if self._pages is not None:
                await self._pages.close()

    # ---- pages

    async def _index(self, _: web.Request) -> web.Response:
        state = self._view.local()
        why = why_not_ready(state)
        leader = f", leader {state.leader}" if state.leader else ""
        links = "\n".join(f'<li><a href="{path}">{path}</a></li>' for path in _LINKS)
        status = html.escape(f"{state.role}{leader}: {why or 'ready'}")
        text = (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>timerd</title>\n'
            f"<h1>timerd</h1>\n<p>{status}</p>\n<ul>\n{links}\n</ul></html>\n"
        )
        return web.Response(text=text, content_type="text/html")

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._metrics_pages.page(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _health(self, _: web.Request) -> web.Response:
        return _verdict("")

    async def _ready(self, _: web.Request) -> web.Response:
        return _verdict(why_not_ready(self._view.local()))

    async def _status(self, request: web.Request) -> web.Response:
        return await json_answer(lambda: self._view.status(cluster=_is_cluster_wide(request)))

    async def _checkpoint(self, request: web.Request) -> web.Response:
        return await json_answer(lambda: self._view.checkpoint(cluster=_is_cluster_wide(request)))

    async def _policies(self, request: web.Request) -> web.Response:
        scope = {name: request.query.get(name, "") for name in ("namespace", "topic")}
        return await json_answer(lambda: self._view.policies(**scope))

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(text=openapi.text(), content_type="application/json")


def _verdict(why_not: str) -> web.Response:
    return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)


def _is_cluster_wide(request: web.Request) -> bool:
    """Return whether a request is about all nodes.

    Raises:
        InvalidRequestError: its scope is unknown.
    """
    scope = request.query.get("scope", "node")
    if scope not in SCOPES:
        raise InvalidRequestError("scope", scope, f"must be {' or '.join(SCOPES)}")
    return scope == "cluster"


def with_known_parameters(route: HttpRoute, handler: Handler) -> Handler:
    """Return the handler of a route of a reader; it refuses parameters that the route lacks."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            route.parameters(request.query.items())
        except EngineError as error:
            return problem_of(error)
        return await handler(request)

    return handle


async def json_answer(read: Callable[[], Awaitable[Mapping[str, object]]]) -> web.Response:
    """Answer with the result of `read`, or with its error."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return web.json_response(await read(), dumps=json_line)
    except (EngineError, ProblemError) as error:
        return problem_of(error)
    except TimeoutError:
        return problem_of(NotReadyError(f"no answer within {ANSWER_TIMEOUT_S:g} s"))
