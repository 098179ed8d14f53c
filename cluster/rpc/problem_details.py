"""Errors of the HTTP port as `application/problem+json` (RFC 9457).

    {"type": "about:blank", "title": "NOT_FOUND", "status": 404, "detail": "no such topic: 'x'",
     "reason": "NOT_FOUND", "retryable": false, "outcome_known": true}

`reason` is the short name of a reason in timer.proto. `field`, `limit` and `retry_after_ms` are
there if they are known.
"""

from collections.abc import Mapping
from typing import Any, Final

from cluster.rpc.aiohttp_server import web
from cluster.rpc.grpc_errors import to_wire
from timer.model.timer_errors import EngineError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_name

UNAUTHORIZED: Final = 401
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
    pb.REASON_LEASE_LOST: 409,
    pb.REASON_SHUTTING_DOWN: 503,
    pb.REASON_DISK_FULL: 507,
    pb.REASON_GROUP_HELD: 409,
    pb.REASON_QUOTA_REACHED: 429,
    pb.REASON_PERMISSION_DENIED: 403,
    pb.REASON_TOKEN_REJECTED: 401,
    pb.REASON_CONFIG: 400,
}
"""Reason -> HTTP status; 500 for the others."""
_PLAIN: Final = {403: pb.REASON_PERMISSION_DENIED, 404: pb.REASON_NOT_FOUND}


class ProblemError(Exception):
    """The refusal of a request, as the wire has it."""

    def __init__(
        self, error: pb.Error, status: int = 0, more: Mapping[str, object] | None = None
    ) -> None:
        """`status`: HTTP status; 0: that of the reason. `more`: further fields of the document."""
        super().__init__(error.message)
        self.error, self.status, self.more = error, status, more or {}


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
    answer = web.json_response(document, status=code, content_type=PROBLEM)
    answer.headers.update(HEADERS)
    if code == UNAUTHORIZED:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if wire.retry_after_ms:
        answer.headers["Retry-After"] = str(-(-wire.retry_after_ms // 1000))
    return answer


@web.middleware
async def problems(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer refusals of aiohttp itself under /v1 in the same form: 404, 405, 413."""
    try:
        answer: web.StreamResponse = await handler(request)
    except web.HTTPException as refused:
        if refused.status < 400 or not request.path.startswith("/v1/"):
            raise
        error = pb.Error(
            reason=_PLAIN.get(refused.status, pb.REASON_INVALID_REQUEST),
            message=refused.reason,
            outcome_known=True,
        )
        answer = problem_of(error, refused.status)
        if "Allow" in refused.headers:
            answer.headers["Allow"] = refused.headers["Allow"]
    return answer
