"""The RPC routes of the HTTP port: JSON becomes the request of a public method.

    path, query, body --checked, by form--> request --LocalCalls--> answer, or problem+json

A caller without the permission, or with too many open calls, is refused before its body is read.

A web page of another origin must not change a cluster through the browser of an operator, nor read
payloads and stacks. Browsers send PUT, PATCH, DELETE and the content type application/json to
another origin only after a preflight, and the port answers no preflight. So a POST, and each body,
needs that content type. An `Origin` must be the port's own. Without TLS the `Host` must be
loopback, an address of this port, or a name in the settings: a name that an attacker's DNS points
at the node (DNS rebinding) is none.
"""

import asyncio
import functools
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard
from urllib.parse import urlsplit

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.rpc.aiohttp_server import web
from cluster.rpc.connections import grpc_address
from cluster.rpc.field_names import as_sent, moments_of, with_field
from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.http_form import HttpForm
from cluster.rpc.http_routes import NDJSON, RPC_ROUTES, HttpRoute
from cluster.rpc.json_bodies import SMALL_BYTES_MAX, BodyAccount, BodyCharge, parse_object
from cluster.rpc.json_fields import field_error
from cluster.rpc.json_messages import check_message
from cluster.rpc.peek_form import peek_answer
from cluster.rpc.problem_details import HEADERS, UNSUPPORTED, ProblemError, json_line, problem_of
from cluster.rpc.relay import METHODS
from cluster.rpc.route_forms import FORMS
from cluster.rpc.schedule_batches import BatchCaller, ScheduleBatches
from cluster.rpc.timer_stream import KEY_SIZE_MAX, TimerLines
from timer.model.timer_errors import (
    HIDDEN,
    CommitTimeoutError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    PermissionDeniedError,
)
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import with_numbers
from timerclient.rows.message_json import as_dict
from timerclient.rows.rows import REQUEST_ID_SIZE_MAX

PEEK_BYTES_MAX: Final = 2 << 20
"""Bytes of an answer of Peek over HTTP; JSON may need six times as many."""
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
SINGLE: Final = "ScheduleTimer"
"""Form of a request with one new timer."""
IDENTITY: Final = "identity"
"""Name of a value of a request: the identity that TLS admitted. Absent: there is no TLS."""
RULES: Final = "rules"
"""Name of a value of a request: the access rules that admitted it. Absent: there is no TLS."""
ANSWER_BYTES: Final = 64 << 10
"""Bytes of a message of the contract. The JSON of a longer one is made in a thread."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Work = Callable[[web.Request, BodyCharge], Awaitable[web.StreamResponse]]
"""Returns the answer to a request that no page of another origin sends."""
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class HttpApi:
    """Handlers of the RPC routes."""

    def __init__(self, calls: LocalCalls, own_hosts: Iterable[str], *, secure: bool) -> None:
        """`own_hosts`: addresses and names of the nodes. `secure`: the port uses TLS."""
        self._calls, self._secure = calls, secure
        self._bodies = BodyAccount()
        self._batches = ScheduleBatches(calls)
        self._hosts = _LOOPBACK | ({_plain_name(each.strip("[]")) for each in own_hosts} - {""})

    def routes(self) -> Sequence[web.RouteDef]:
        """Return all routes."""
        return [
            web.route(each.verb, each.path, self._handler(each, self._work_of(each)))
            for each in RPC_ROUTES
        ]

    def _handler(self, route: HttpRoute, work: _Work) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                if route.is_change:
                    _check_type(request, route.media)
                if route.is_change or route.is_private:
                    self.check_origin(request)
                with BodyCharge(self._bodies) as charge:
                    return await work(request, charge)
            except EngineError as error:
                is_type = isinstance(error, InvalidRequestError) and error.field in (_TYPE, _CODING)
                return problem_of(error, UNSUPPORTED if is_type else 0)
            except ProblemError as error:
                return problem_of(error)

        return handle

    def _work_of(self, route: HttpRoute) -> _Work:
        form = FORMS.get(route.form)
        if form is not None and route.media == NDJSON:
            return functools.partial(self._stream, form)
        return functools.partial(self._answer, route, form)

    async def _stream(
        self, form: HttpForm, request: web.Request, charge: BodyCharge
    ) -> web.StreamResponse:
        key = _key_of(request, KEY_SIZE_MAX)
        lines = TimerLines(form, request.match_info["topic"], key, request, charge)
        return await lines.serve(self._calls, context_of(request, None))

    async def _answer(
        self, route: HttpRoute, form: HttpForm | None, request: web.Request, charge: BodyCharge
    ) -> web.Response:
        with self._calls.receiving(route.rpc, context_of(request, None)):
            message, moments = await _message(route, form, request, charge)
        try:
            made = await self._text(route, form, message, request)
        except ProblemError as refusal:
            if form is not None and (field := refusal.error.field):
                name = as_sent(form.field_in_json(message, field), moments)
                refusal.error = with_field(refusal.error, name)
            raise
        return web.json_response(text=made, headers=HEADERS)

    async def _text(
        self, route: HttpRoute, form: HttpForm | None, message: Message, request: web.Request
    ) -> str:
        """Return the JSON of the answer.

        Raises:
            EngineError, ProblemError: the call was refused.
        """
        answer = await self._call(route, message, request)
        if route.rpc == "Peek" and (size := answer.ByteSize()) > PEEK_BYTES_MAX:
            limit = f"at most {PEEK_BYTES_MAX} over HTTP; `timerctl peek` shows it"
            raise InvalidRequestError("bytes of the messages", size, limit)

        def text() -> str:
            return json_line(_document(route, form, message, answer))

        # In a thread: a message of megabytes would hold the event loop.
        is_small = form is not None and answer.ByteSize() < ANSWER_BYTES
        return text() if is_small else await asyncio.to_thread(text)

    async def _call(self, route: HttpRoute, message: Message, request: web.Request) -> Any:
        """Return the answer of a route's method.

        Raises:
            EngineError: there was none in time.
            ProblemError: the call was refused.
        """
        try:
            if self._is_single(message, route, request):
                caller = BatchCaller(peer_of(request).rpartition(":")[0], request.get(IDENTITY))
                context = functools.partial(context_of, request, route.timeout_s)
                return await self._batches.schedule(message, caller, context)
            async with asyncio.timeout(route.timeout_s):
                # A task of its own: the guard notes the caller in its context, and may cancel it.
                call = self._calls.unary(route.rpc, message, context_of(request, route.timeout_s))
                return await asyncio.create_task(call)
        except TimeoutError:
            late = f"no answer within {route.timeout_s:g} s"
            if route.is_change:
                raise CommitTimeoutError(f"{late}; the change may still be applied") from None
            raise NotReadyError(late) from None

    def _is_single(
        self, message: Message, route: HttpRoute, request: web.Request
    ) -> TypeGuard[pb.ScheduleRequest]:
        """Return whether a request is a new timer that may share a request with others."""
        return (
            isinstance(message, pb.ScheduleRequest)
            and route.form == SINGLE
            and not message.request_id
            and self._calls.is_unlimited(request.get(IDENTITY))
        )

    def check_origin(self, request: web.Request) -> None:
        """Check that no web page of another origin sends a request; see the module.

        Raises:
            PermissionDeniedError: host or origin are others.
        """
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
        if origin is not None and _host_in(origin) != request.host.lower():
            raise PermissionDeniedError(f"Origin = {origin!r:.300}: a page of another origin")
        if site not in (None, "same-origin", "none"):  # such as an image of another page
            raise PermissionDeniedError(f"Sec-Fetch-Site = {site!r:.300}: a page of another origin")
        host = host_of(request.host)
        if not self._secure and host not in self._hosts and host != _own(request):
            limit = (
                "without TLS this needs an address of the port, or a name in http_names or peers"
            )
            raise PermissionDeniedError(f"Host = {request.host!r:.300}: {limit}")


def _host_in(origin: str) -> str:
    """Return host and port of an origin; empty: it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


_TYPE: Final = "Content-Type"
_CODING: Final = "Content-Encoding"


def _check_type(request: web.Request, media: str) -> None:
    """Check content type and encoding of a change; see the module. `media`: that of its route.

    Raises:
        InvalidRequestError: one is another one.
    """
    needs_type = request.method == "POST" or request.body_exists
    if needs_type and request.content_type != media:
        raise field_error(_TYPE, request.headers.get(_TYPE), f"must be {media}")
    coding = request.headers.get(_CODING)
    if coding is not None and coding.lower() not in ("gzip", "deflate", "identity"):
        raise field_error(_CODING, coding, "must be gzip or deflate, or absent")


@functools.lru_cache(maxsize=64)
def host_of(text: str) -> str:
    """Return the host in the value of a `Host` header, without port and brackets.

    Empty: the value is malformed.
    """
    try:
        found = urlsplit(f"//{text}")
        port = found.port
    except ValueError:  # of `port`, too
        return ""
    return _plain_name(found.hostname or "") if port is None or port else ""


def _plain_name(host: str) -> str:
    """Return a host as it is compared: `timers.lan.` and `Timers.LAN` are `timers.lan`."""
    return host.lower().removesuffix(".")


def certificate_uris(request: web.Request) -> list[str]:
    """Return the URIs in the certificate of a request's caller; without one: none."""
    peer = request.get_extra_info("peercert") or {}
    return [value for kind, value in peer.get("subjectAltName", ()) if kind == "URI"]


def context_of(request: web.Request, timeout_s: float | None) -> HttpContext:
    """Return the context of a call for a request's caller."""
    connection = request.get_extra_info("ssl_object")
    der = connection.getpeercert(binary_form=True) if connection is not None else None
    pem = ssl.DER_cert_to_PEM_cert(der).encode() if der else b""
    uris, tokens = certificate_uris(request), request.headers.getall("Authorization", ())
    return HttpContext(peer_of(request), timeout_s, uris, pem, tokens)


def peer_of(request: web.Request) -> str:
    """Return the address of a request's caller in gRPC's form."""
    return grpc_address(request.get_extra_info("peername") or ("", 0))


def _own(request: web.Request) -> str | None:
    """Return the address of this node at which the request arrived; None: it is not known."""
    name = request.get_extra_info("sockname")
    return _plain_address(str(name[0])) if name else None


@functools.lru_cache(maxsize=64)
def _plain_address(text: str) -> str:
    address = ipaddress.ip_address(text.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _document(
    route: HttpRoute, form: HttpForm | None, message: Message, answer: Any
) -> Mapping[str, Any]:
    """Return the answer of a route for JSON.

    Raises:
        EngineError: the answer refuses the request.
    """
    if form is not None:
        return form.answer(message, answer)
    if route.rpc == "Peek":
        return peek_answer(answer)
    return as_dict(getattr(answer, route.first_of)[0] if route.first_of else answer)


async def _message(
    route: HttpRoute, form: HttpForm | None, request: web.Request, charge: BodyCharge
) -> tuple[Message, frozenset[str]]:
    """Return the RPC's request of an HTTP request, and the `moments_of` its fields.

    Raises:
        InvalidRequestError: a field is unknown, given twice, or has a wrong type.
        OverloadedError, ProblemError: see `BodyCharge.read`.
    """
    bytes_max = form.bytes_max if form is not None else SMALL_BYTES_MAX
    body = await charge.read(request, bytes_max) if route.is_change else b""
    if len(body) > SMALL_BYTES_MAX:  # many timers would hold the event loop
        async with charge.account.parsing:
            return await asyncio.to_thread(_parsed, route, form, request, body)
    return _parsed(route, form, request, body)


def _parsed(
    route: HttpRoute, form: HttpForm | None, request: web.Request, body: bytes
) -> tuple[Message, frozenset[str]]:
    fields = parse_object(body)
    named = {**request.match_info, **_query(route, form, request), **_request_id(form, request)}
    for name in (route.inner,) if route.inner else named:
        if name in fields:
            raise field_error(name, fields[name], "is in the path: leave it out of the body")
    if form is not None:
        return form.message(named, fields), moments_of({**fields, **named})
    made = GetMessageClass(METHODS[route.rpc].input_type)()
    check_message(fields, made.DESCRIPTOR, leave_out={route.inner, *named})
    given = {route.inner: named} if route.inner else named
    check_message(given, made.DESCRIPTOR)
    return ParseDict(with_numbers(fields | given, made.DESCRIPTOR), made), frozenset()


def _request_id(form: HttpForm | None, request: web.Request) -> dict[str, str]:
    """Return the field `request_id` of the header Idempotency-Key, if the request has one."""
    if IDEMPOTENCY_KEY not in request.headers:
        return {}
    if form is None or not form.takes_request_id:
        raise InvalidRequestError(IDEMPOTENCY_KEY, HIDDEN, "only new timers take it")
    return {"request_id": _key_of(request, REQUEST_ID_SIZE_MAX)}


def _key_of(request: web.Request, size_max: int) -> str:
    """Return the Idempotency-Key of a request; empty: it has none.

    Raises:
        InvalidRequestError: it is given twice, too long, empty, or not of ASCII.
    """
    given = request.headers.getall(IDEMPOTENCY_KEY, ())
    if not given:
        return ""
    key = given[0]
    if len(given) > 1 or not (1 <= len(key) <= size_max and key.isascii()):
        limit = f"must be given once, with 1 to {size_max} characters of ASCII"
        raise InvalidRequestError(IDEMPOTENCY_KEY, key, limit)
    return key


def _query(route: HttpRoute, form: HttpForm | None, request: web.Request) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in route.parameters(request.query.items()).items():
        is_flag = form is None and _is_flag(route, name)
        fields[name] = {"true": True, "false": False}.get(value, value) if is_flag else value
    return fields


def _is_flag(route: HttpRoute, name: str) -> bool:
    declared = METHODS[route.rpc].input_type.fields_by_name[name]
    return bool(declared.cpp_type == FieldDescriptor.CPPTYPE_BOOL)
