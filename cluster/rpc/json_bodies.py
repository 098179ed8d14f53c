"""Bodies of requests to the HTTP port: read within bounds, and parsed strictly.

    headers --> BodyCharge.read: size, time, bytes of all --> parsed: values, UTF-8 --> object
                  |
                BodyReader: the body, expanded piece by piece

A body above SMALL_BYTES_MAX is charged to the account of the port until its request is answered.
So many large requests at once are refused, and small ones are not.

JSON of a few bytes for a value takes many times its size in memory, and its parser holds the
interpreter. So the separators of a larger body are counted first. Each value but the first of a
body follows one.
"""

import asyncio
import json
import math
import zlib
from collections import Counter
from typing import Any, Final, NoReturn, Self

from cluster.rpc.aiohttp_server import web
from cluster.rpc.grpc_errors import to_wire
from cluster.rpc.problem_details import ProblemError
from timer.model.timer_errors import InvalidRequestError, OverloadedError

SMALL_BYTES_MAX: Final = 64 << 10
"""Bytes of the body of a request, for most paths; a longer one gets 413."""
LARGE_BYTES_MAX: Final = 8 << 20
"""Bytes of the body of a request with payloads."""
ACCOUNT_BYTES_MAX: Final = 64 << 20
"""Bytes of all bodies above SMALL_BYTES_MAX, until their requests are answered."""
BODY_S: Final = 5.0
"""Seconds for the body of a request. A large one gets more, by PACE."""
PACE: Final = 1 << 20
"""Bytes a second that the body of a large request must have."""
VALUES_MAX: Final = 100_000
"""Most values in a body above SMALL_BYTES_MAX, counted by its commas and opening brackets. Parsing
them takes about 20 ms."""
TOO_DEEP: Final = "is nested too deeply: up to 900 levels are accepted"
"""Python's limit is 1,000 nested calls, with those of the port."""
PIECE_BYTES: Final = 16 << 10
"""Bytes of an expanded body, at most, between two turns of the event loop."""
RETRY_AFTER_MS: Final = 500
TOO_LARGE: Final = 413


class BodyAccount:
    """The bytes of the large bodies under way on one port."""

    def __init__(self) -> None:
        self.bytes = 0
        self.parsing = asyncio.Lock()
        """Held while a thread parses one of them: each further thread would hold up the event loop,
        and the files of the node, which use the same threads."""


class BodyCharge:
    """The charge of one request. It is paid back at the end of its context."""

    __slots__ = ("account", "bytes")

    def __init__(self, account: BodyAccount) -> None:
        self.account, self.bytes = account, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.account.bytes -= self.bytes

    async def read(self, request: web.Request, bytes_max: int) -> bytes:
        """Return the body of a request.

        Raises:
            ProblemError: it is longer than `bytes_max`.
            InvalidRequestError: it did not arrive in time.
            OverloadedError: all large bodies together have too many bytes.
        """
        declared = request.content_length
        if declared is not None and declared > bytes_max:
            raise too_large(declared, bytes_max)
        large = bytes_max > SMALL_BYTES_MAX
        limit_s = BODY_S + (min(declared or bytes_max, bytes_max) / PACE if large else 0.0)
        if request.content.is_eof():  # as a rule a small body arrives with its headers
            return await self._pieces(request, bytes_max)
        try:
            async with asyncio.timeout(limit_s):
                return await self._pieces(request, bytes_max)
        except TimeoutError:
            limit = f"must arrive within {limit_s:.3g} s"
            raise InvalidRequestError("body", "incomplete", limit) from None

    async def _pieces(self, request: web.Request, bytes_max: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        reader = BodyReader(request)
        while piece := await reader.next_piece():
            pieces.append(piece)
            size += len(piece)
            if size > bytes_max:
                raise too_large(size, bytes_max)
            if size > SMALL_BYTES_MAX:
                self.hold(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def hold(self, size: int) -> None:
        """Charge `size` bytes in all.

        Raises:
            OverloadedError: all large bodies together have too many bytes.
        """
        account, more = self.account, size - self.bytes
        if more > 0 and account.bytes + more > ACCOUNT_BYTES_MAX:
            what = f"room for large bodies ({ACCOUNT_BYTES_MAX} bytes)"
            raise OverloadedError(what, retry_after_ms=RETRY_AFTER_MS)
        self.bytes = size
        account.bytes += more


class BodyReader:
    """Reads the body of a request in pieces, and expands one of gzip or deflate.

    aiohttp would expand a body without a turn of the event loop, also one that no handler reads.
    """

    __slots__ = ("_coding", "_content", "_expander", "_rest")

    def __init__(self, request: web.Request) -> None:
        self._content = request.content
        self._coding = request.headers.get("Content-Encoding", "").lower()
        self._expander: zlib._Decompress | None = None
        """None: no byte is expanded yet."""
        self._rest = b""
        """Bytes that were read and are not expanded."""

    async def next_piece(self) -> bytes:
        """Return the next piece, decoded. Empty: the body has ended.

        Raises:
            InvalidRequestError: it is not encoded as its headers say.
        """
        try:
            if self._coding in ("gzip", "deflate"):
                return await self._decompressed_body()
            return await self._content.readany()
        except (web.RequestPayloadError, zlib.error) as error:
            why = str(error).rpartition("\n")[2].strip()
            limit = f"must be encoded as the headers say: {why}"
            raise InvalidRequestError("body", "damaged", limit) from None

    async def _decompressed_body(self) -> bytes:
        while True:
            if self._rest and (self._expander is None or self._expander.eof):
                self._expander = zlib.decompressobj(self._window())
            if (expander := self._expander) is not None:
                await asyncio.sleep(0)
                piece = expander.decompress(self._rest, PIECE_BYTES)
                self._rest = expander.unconsumed_tail or expander.unused_data
                if piece:
                    return piece
            if not self._rest:
                self._rest = await self._content.readany()
                if not self._rest:
                    break
        if expander is not None and not expander.eof:
            raise zlib.error(f"the {self._coding} data ends early")
        return b""

    def _window(self) -> int:
        """Return zlib's number for the coding. Some clients send deflate without its header."""
        if self._coding == "gzip":
            return zlib.MAX_WBITS | 16
        return zlib.MAX_WBITS if self._rest[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS


def too_large(size: int, bytes_max: int) -> ProblemError:
    """Return the refusal of a body of `size` bytes or more."""
    limit = f"must have at most {bytes_max} bytes"
    return ProblemError(to_wire(InvalidRequestError("body", f"{size} bytes", limit)), TOO_LARGE)


def parse_object(data: bytes, name: str = "body") -> dict[str, Any]:
    """Return a JSON object. `name`: of the body, for errors. An empty body is an empty object.

    Raises:
        InvalidRequestError: it has too many values, or is no JSON object in UTF-8. NaN, infinities
            and names that are given twice are refused.
    """
    if has_too_many_values(data):
        limit = f"must have at most {VALUES_MAX}: give text with many as payload_base64"
        raise InvalidRequestError(name, "commas and opening brackets", limit)
    try:
        found = decode_json(data or b"{}")
    except RecursionError:
        raise InvalidRequestError(name, f"{len(data)} bytes", TOO_DEEP) from None
    except ValueError as error:  # of UTF-8, too
        why = str(error).partition(";")[0]  # behind it, words for programmers of Python
        raise InvalidRequestError(name, f"{len(data)} bytes", f"must be JSON: {why}") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(name, f"{len(data)} bytes", "must be a JSON object")
    return found


def has_too_many_values(data: bytes) -> bool:
    """Return whether a JSON text may have too many values to be parsed at once."""
    if len(data) <= SMALL_BYTES_MAX:
        return False
    return data.count(b",") + data.count(b"[") + data.count(b"{") >= VALUES_MAX


def decode_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8, without NaN, infinities and names given twice.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(data.decode())


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice[:64]!r} is given twice")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:64]} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"{text[:64]} is beyond the range of numbers")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_fields, parse_constant=_no_number, parse_float=_finite
)
