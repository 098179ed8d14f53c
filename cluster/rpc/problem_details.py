"""Errors of the HTTP port as `application/problem+json` (RFC 9457).

    {"type": "about:blank", "title": "NOT_FOUND", "status": 404, "detail": "no such topic: 'x'",
     "reason": "NOT_FOUND", "retryable": false, "outcome_known": true}

`reason` is the short name of a reason in timer.proto. `field`, `limit` and `retry_after_ms` are
there if they are known.
"""

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes

from cluster.rpc.aiohttp_server import RequestHandler, web
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.schemas import FLAG, TEXT, WHOLE, nullable, object_schema, words
from timer.model.timer_errors import HIDDEN, EngineError, InvalidRequestError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name, short_names

UNAUTHORIZED: Final = 401
SHOWN_MAX: Final = 64
"""Characters of a header in an error."""
UNSUPPORTED: Final = 415
PROBLEM: Final = "application/problem+json"
HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""Of each JSON answer under /v1."""
_CODES: Final = {
    pb.REASON_INVALID_REQUEST: 400,
    pb.REASON_NOT_FOUND: 404,
    pb.REASON_ALREADY_EXISTS: 409,
    pb.REASON_NOT_LEADER: 503,
    pb.REASON_NOT_READY: 503,
    pb.REASON_OVERLOADED: 429,
    pb.REASON_COMMIT_TIMEOUT: 504,
    pb.REASON_LEADERSHIP_LOST: 504,
    pb.REASON_SHUTTING_DOWN: 503,
    pb.REASON_DISK_FULL: 507,
    pb.REASON_GROUP_HELD: 409,
    pb.REASON_QUOTA_REACHED: 429,
    pb.REASON_PERMISSION_DENIED: 403,
    pb.REASON_TOKEN_REJECTED: 401,
    pb.REASON_CONFIG: 400,
}
"""Reason -> HTTP status; 500 for the others."""
_MORE: Final = {
    "field": TEXT,
    "limit": TEXT,
    "retry_after_ms": WHOLE,
    "result": TEXT | {"description": "of a timer that was not scheduled or rescheduled"},
    "other_id": nullable(TEXT) | {"description": "the timer that has its key"},
    "successor_id": nullable(TEXT) | {"description": "the timer that fires instead of it"},
}
PROBLEM_SCHEMA: Final = object_schema(
    "Problem",
    {
        "type": TEXT,
        "title": TEXT,
        "status": WHOLE,
        "detail": TEXT,
        "reason": words(*short_names(pb.Reason.DESCRIPTOR)),
        "retryable": FLAG | {"description": "the identical request may succeed later"},
        "outcome_known": FLAG | {"description": "true: the request certainly had no effect"},
        **_MORE,
    },
    optional=_MORE,
)
_PLAIN: Final = {403: pb.REASON_PERMISSION_DENIED, 404: pb.REASON_NOT_FOUND}


class ProblemError(Exception):
    """The refusal of a request, as the wire has it."""

    def __init__(
        self, error: pb.Error, status: int = 0, more: Mapping[str, object] | None = None
    ) -> None:
        """`status`: HTTP status; 0: that of the reason. `more`: further fields of the document."""
        super().__init__(error.message)
        self.error, self.status, self.more = error, status, more or {}


def json_line(document: object) -> str:
    """Return a document as JSON on a line of its own, for terminals."""
    return json.dumps(document) + "\n"


def document_of_error(wire: pb.Error, status: int = 0) -> dict[str, Any]:
    """Return an error for JSON. `status`: HTTP status; 0: that of the reason."""
    reason = short_name(pb.Reason.DESCRIPTOR, wire.reason)
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": reason,
        "status": status or _CODES.get(wire.reason, 500),
        "detail": wire.message,
        "reason": reason,
        "retryable": wire.retryable,
        "outcome_known": wire.outcome_known,
    }
    for name in ("field", "limit", "retry_after_ms"):
        if value := getattr(wire, name):
            document[name] = value
    return document


def problem_of(error: pb.Error | EngineError | ProblemError, status: int = 0) -> web.Response:
    """Return the answer for an error. `status`: HTTP status; 0: that of the error."""
    more: Mapping[str, object] = {}
    if isinstance(error, ProblemError):
        wire, status, more = error.error, status or error.status, error.more
    else:
        wire = to_wire(error) if isinstance(error, EngineError) else error
    document = document_of_error(wire, status) | dict(more)
    code = document["status"]
    answer = web.json_response(document, status=code, content_type=PROBLEM, dumps=json_line)
    answer.headers.update(HEADERS)
    if code == UNAUTHORIZED:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if wire.retry_after_ms:
        answer.headers["Retry-After"] = str(-(-wire.retry_after_ms // 1000))
    return answer


def is_api(request: web.BaseRequest) -> bool:
    """Return whether errors of a request's path are problem+json."""
    return request.path == "/v1" or request.path.startswith("/v1/")


class ProblemProtocol(RequestHandler):
    """A connection that answers as problem+json also where no handler runs."""

    __slots__ = ()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer; see RequestHandler. A wrong `Expect` is refused before the handlers."""
        if isinstance(resp, web.HTTPExpectationFailed):
            given = request.headers["Expect"][:SHOWN_MAX]
            resp = problem_of(InvalidRequestError("Expect", given, "must be 100-continue"), 417)
            resp.force_close()  # the client may send its body, or not
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to a request that aiohttp refuses before its path is known."""
        plain = super().handle_error(request, status, exc, message)  # it also logs a bug
        if status != 400:
            answer = problem_of(pb.Error(message=f"{plain.reason}: see the node's log"), status)
            answer.force_close()
            return answer
        why = (message or "").partition("\n")[0].partition(": b")[0][:200]
        error = InvalidRequestError("request", HIDDEN, f"must be HTTP/1.1: {why}")
        answer = problem_of(error)
        answer.force_close()
        return answer


@web.middleware
async def problems(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer refusals of aiohttp itself in the same form: 404, 405, 413.

    A path or query that is not UTF-8 is refused: aiohttp would take `%ff` for another name.
    """
    try:
        unquote_to_bytes(request.raw_path).decode()
    except UnicodeError:
        path, _, query = request.raw_path.partition("?")
        wrong = ("path", path) if "\ufffd" in unquote(path) else ("query", query)
        return problem_of(
            InvalidRequestError(wrong[0], wrong[1][:300], "must be percent-encoded UTF-8")
        )
    try:
        answer: web.StreamResponse = await handler(request)
    except web.HTTPException as refused:
        if refused.status < 400:
            raise
        allowed = refused.headers.get("Allow", "")
        error = pb.Error(
            reason=_PLAIN.get(refused.status, pb.REASON_INVALID_REQUEST),
            message={
                404: f"no such path: {request.path!r:.300}; /v1/openapi.json has all paths; write a"
                " / in a name as %2F",
                405: f"this path takes {allowed}, not {request.method}",
            }.get(refused.status, refused.reason),
            outcome_known=True,
        )
        answer = problem_of(error, refused.status)
        if allowed:
            answer.headers["Allow"] = allowed
    return answer
