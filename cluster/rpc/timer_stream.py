"""Timers as a stream: a JSON object in each line of a request, a result in each line of the answer.

    lines --> checked --> ScheduleStream --> results, in the order of their lines --> client
                  \\--refused-----------------/

The lines are requests of their own, accepted in their order. A line that is refused does not end
the stream. An unreadable line ends it, after the results of the lines before. The answer begins
with its first result, so that a stream that is refused as a whole gets a status.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from cluster.rpc.aiohttp_server import web
from cluster.rpc.field_names import as_sent, moments_of, with_field
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.http_call import HttpContext, LocalCalls
from cluster.rpc.http_connections import count_piece
from cluster.rpc.http_form import HttpForm
from cluster.rpc.http_routes import NDJSON
from cluster.rpc.json_bodies import SMALL_BYTES_MAX, BodyCharge, BodyReader, parse_object
from cluster.rpc.problem_details import HEADERS, ProblemError, document_of_error
from timer.model.timer_errors import HIDDEN, EngineError, InvalidRequestError
from timerclient.proto import timer_pb2 as pb
from timerclient.values.same_fields import as_type

logger = logging.getLogger(__name__)

LINE_BYTES_MAX: Final = 1 << 20
"""Bytes of one line."""
LINES_PER_TURN: Final = 16
"""Lines of one stream that are read in a turn of the event loop. A small compressed body may have
millions of lines that need no answer of the service, such as empty ones."""
LINES_MAX: Final = 1_000
"""Lines of a stream that were read and have no result that the client has read."""
SILENCE_S: Final = 30.0
"""Seconds without a byte, after which a stream ends."""
KEY_SIZE_MAX: Final = 53
"""Characters of a stream's Idempotency-Key: the number of a line follows it."""


class TimerLines:
    """The lines of a request, and their results."""

    def __init__(
        self, form: HttpForm, topic: str, key: str, request: web.Request, charge: BodyCharge
    ) -> None:
        """`form`: of a line. `key`: the Idempotency-Key; empty: there is none."""
        self._form, self._topic, self._key = form, topic, key
        self._request, self._charge = request, charge
        self._body = BodyReader(request)
        self._free_lines = asyncio.Semaphore(LINES_MAX)
        self._waiting: deque[int] = deque()
        """Numbers of lines without a written result."""
        self._results: dict[int, Mapping[str, Any]] = {}
        self._moments: dict[int, frozenset[str]] = {}
        """Of lines without a result; see `moments_of`."""
        self._changed = asyncio.Event()
        self._read = 0
        """Lines that were read."""
        self._ended = False
        self._unread: pb.Error | None = None
        """Why no further line can be read."""
        self._error: pb.Error | None = None
        """Why the stream failed."""

    async def serve(self, calls: LocalCalls, context: HttpContext) -> web.StreamResponse:
        """Schedule the lines, and return the answer with their results.

        Raises:
            ProblemError: the stream was refused before its first result.
        """
        response = web.StreamResponse(headers=HEADERS | {"Content-Type": NDJSON})
        pump = asyncio.create_task(self._pump(calls, context))
        try:
            ended = False
            while not ended:
                await self._changed.wait()
                self._changed.clear()
                ended = self._ended
                has_results = response.prepared or bool(self._results)
                lines = self._ready()
                if ended and (error := self._failure()) is not None:
                    if not has_results:
                        raise ProblemError(error)
                    number = self._waiting[0] if self._waiting else self._read + 1
                    lines.append(_line(number, {"error": document_of_error(error)}))
                if lines or ended:
                    await response.prepare(self._request)
                if lines:
                    text = "".join(lines).encode()
                    count_piece(len(text))
                    await response.write(text)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        return response

    def _failure(self) -> pb.Error | None:
        """Return why a stream that has ended is incomplete. None: it is complete."""
        error = self._error or self._unread
        if error is not None and self._waiting:  # these lines may have been scheduled
            error.outcome_known = False
        return error

    def _ready(self) -> list[str]:
        """Return the lines of the answer that can be written."""
        lines = []
        while self._waiting and self._waiting[0] in self._results:
            number = self._waiting.popleft()
            lines.append(_line(number, self._results.pop(number)))
            self._free_lines.release()
        return lines

    async def _pump(self, calls: LocalCalls, context: HttpContext) -> None:
        """Send the lines to the service, and note its answers."""
        try:
            requests = self._requests()
            async with aclosing(calls.stream("ScheduleStream", requests, context)) as answers:
                async for answer in answers:
                    self._add_result(answer.request_no, self._result(answer))
        except ProblemError as refused:
            self._error = refused.error
        except EngineError as error:
            self._error = to_wire(error)
        except asyncio.CancelledError:  # by the service, unless `serve` is over
            self._error = _internal()
            raise
        except Exception:
            logger.exception("a stream of timers failed")
            self._error = _internal()
        finally:
            self._ended = True
            self._changed.set()

    def _add_result(self, number: int, result: Mapping[str, Any]) -> None:
        self._results[number] = result
        self._changed.set()

    def _result(self, answer: pb.ScheduleStreamResponse) -> Mapping[str, Any]:
        moments = self._moments.pop(answer.request_no, frozenset())
        if answer.HasField("error"):
            name = as_sent(self._form.field_in_json(None, answer.error.field), moments)
            error = with_field(answer.error, name)
            return {"error": document_of_error(error)}
        return self._form.answer(None, answer)

    async def _requests(self) -> AsyncIterator[pb.ScheduleStreamRequest]:
        """Yield the requests of the lines, up to the first that cannot be read.

        It does not raise the error: the service would drop the results of the lines before.
        """
        try:
            async for line in self._lines():
                self._read = number = self._read + 1
                if number % LINES_PER_TURN == 0:
                    await asyncio.sleep(0)
                if not line.strip():
                    continue
                await self._free_lines.acquire()
                self._waiting.append(number)
                try:
                    request = self._message(number, line)
                except InvalidRequestError as error:
                    self._add_result(number, {"error": document_of_error(to_wire(error))})
                else:
                    yield request
        except EngineError as error:
            self._unread = to_wire(error)

    def _message(self, number: int, line: bytes) -> pb.ScheduleStreamRequest:
        named = {"topic": self._topic}
        if self._key:
            named["request_id"] = f"{self._key}/{number}"
        fields = parse_object(line, "line")
        made = self._form.message(named, fields)
        if moments := moments_of(fields):
            self._moments[number] = moments
        request = as_type(pb.ScheduleStreamRequest, made)
        request.request_no = number
        return request

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body, without their ends.

        Raises:
            InvalidRequestError: a line is too long, the client is silent, or the body is damaged.
            OverloadedError: all large bodies together have too many bytes.
        """
        rest = bytearray()
        while piece := await self._piece():
            *lines, last = piece.split(b"\n")
            for line in lines:
                rest += line
                _check_size(rest)
                yield bytes(rest)
                rest.clear()
            rest += last
            _check_size(rest)
            self._charge.hold(len(rest) if len(rest) > SMALL_BYTES_MAX else 0)
        if rest:
            yield bytes(rest)

    async def _piece(self) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self._body.next_piece()
        except TimeoutError:
            limit = f"a stream needs a byte within {SILENCE_S:g} s"
            raise InvalidRequestError("line", "incomplete", limit) from None


def _check_size(line: bytearray) -> None:
    if len(line) > LINE_BYTES_MAX:  # its whole size is not known
        raise InvalidRequestError("line", HIDDEN, f"must have at most {LINE_BYTES_MAX} bytes")


def _internal() -> pb.Error:
    return pb.Error(message="Internal Server Error: see the node's log")


def _line(number: int, result: Mapping[str, Any]) -> str:
    return json.dumps({"line": number, **result}) + "\n"
