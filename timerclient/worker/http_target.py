"""A URL to which messages are pushed: one POST for each delivery, and the meaning of its answer.

    2xx                      the message is acked
    410                      a dead letter at once
    429, 503 + Retry-After   a failure; delivered again after that time, or the longer backoff
    any other, no answer     a failure; delivered again after the backoff of the group
    no connection            no failure; the message returns to the group

After no connection, no answer, 429, 502, 503 and 504 the target counts as unavailable, and the
brake (`target_brake.py`) reduces the requests to one at a time. Redirects are not followed.
"""

import asyncio
import email.utils
import ipaddress
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from timerclient.rows import rows
from timerclient.rows.messages import Message, truncate_detail
from timerclient.values.errors import InvalidRequest
from timerclient.worker.renewed_file import RenewedFile
from timerclient.worker.retry_policy import Reject, RetryAfter
from timerclient.worker.target_brake import TargetBrake, TargetUnreached
from timerclient.worker.webhook_headers import (
    delivery_headers,
    lines_of,
    read_header_file,
    read_headers,
    read_secrets,
    webhook_headers,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

LOG: Final = logging.getLogger("timerclient.worker")
NAME_MAX: Final = 200
TIMEOUT_S: Final = 30.0
TIMEOUT_MS_MAX: Final = 3_600_000
RETRY_AFTER_S_MAX: Final = 3600.0
"""Longest time of a header Retry-After that is kept."""
BODY_BYTES_MAX: Final = 4_096
"""Bytes of an answer that are read. A longer one ends the connection."""
BODY_S: Final = 2.0
"""Longest wait for the body of an answer, whose status counts."""
IDLE_S: Final = 1.0
"""Time for which an idle connection is kept: less than servers keep theirs, so that no request
meets its end."""
URL_CHARACTERS: Final = "%:/?#[]@!$&'()*+,;="
"""Punctuation of URLs (RFC 3986). Other characters are percent-encoded."""
_UNAVAILABLE: Final = (429, 502, 503, 504)
_HOST: Final = re.compile(r"[0-9A-Za-z._:%-]+")


class PushFailed(Exception):
    """The target answered with a status that is no success, or not at all."""


class HttpTarget:
    """A URL to which `TimerApp.push` and `timerctl push` send messages. Needs aiohttp.

    Args:
        url: http:// or https://, without user and password.
        timeout: Of one request, a timedelta or seconds. A third of it is for the connection.
        headers: Sent with each request, such as Authorization.
        header_file: File of further headers, a line `Name: value` for each; none of those in
            `headers`. It is read again when it changes.
        secrets: Keys of the signature, as `whsec_` and base64. Several during a rotation.
        secret_file: File of further ones, a line for each. It is read again when it changes.
        ca: PEM file of the authorities that sign the target's certificate. None: the system's.

    Raises:
        InvalidRequest: An argument does not fit, or a file can't be read.
        ModuleNotFoundError: aiohttp is not installed: it comes with the extra `push`.
    """

    def __init__(  # noqa: PLR0913 -- options, by keyword
        self,
        url: str,
        *,
        timeout: float | timedelta = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        header_file: str | Path | None = None,
        secrets: Sequence[str] = (),
        secret_file: str | Path | None = None,
        ca: str | Path | None = None,
    ) -> None:
        import aiohttp  # a missing one is an error here, not at the first timer
        from yarl import URL

        self.url = url
        self.name = f"push:{_url_without_query(url)}"[:NAME_MAX]
        """For logs and the list of consumers."""
        self._sent_url = URL(quote(url, safe=URL_CHARACTERS), encoded=True)
        """As given, since a signature in a query may cover its escapes."""
        self.brake = TargetBrake()
        self.timeout_s = rows.span_ms("timeout", timeout, TIMEOUT_MS_MAX, 100) / 1000
        named = enumerate((f"{name}: {value}" for name, value in (headers or {}).items()), 1)
        self._headers = read_headers(named)
        read = partial(read_header_file, given=self._headers)
        self._header_file = _file("header_file", header_file, read)
        self._secrets = read_secrets(enumerate(secrets, 1)) if secrets else []
        self._secret_file = _file("secret_file", secret_file, lambda t: read_secrets(lines_of(t)))
        self._tls = _tls_of(url, ca)
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"HttpTarget({self.name.removeprefix('push:')!r})"

    # ---- requests

    async def post(self, message: Message) -> None:
        """Send a message; return if the target answers with success.

        Raises:
            Reject: It answers 410.
            RetryAfter: It answers 429 or 503, and when to try again.
            PushFailed: It answers otherwise, or the connection ends before the answer.
            TargetUnreached: There is no connection, or one with an answer before its request.
            TimeoutError: There is no answer in time.
        """
        import aiohttp

        began_s = time.monotonic()
        try:
            sending = self._open_session().post(
                self._sent_url,
                data=message.payload,
                headers=self._request_headers(message),
                allow_redirects=False,
            )
            async with sending as answer:
                body = await _beginning(answer)
                self._raise_for(answer, body, began_s)
        except TargetUnreached as error:
            self._on_unavailable(began_s, str(error))
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # Without the URL, whose query may have secrets.
            timed_out = isinstance(error, aiohttp.ConnectionTimeoutError)
            why = "no connection in time" if timed_out else _one_line(str(error))
            text = f"{type(error).__name__}: {why}"
            self._on_unavailable(began_s, text)
            raise TargetUnreached(text) from None
        except TimeoutError:
            text = f"no answer within {self.timeout_s:g} s"
            self._on_unavailable(began_s, text)
            raise TimeoutError(text) from None
        except aiohttp.ClientError as error:
            why = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
            if isinstance(error, aiohttp.ServerDisconnectedError):
                why = "Server disconnected"  # its own text may be the headers of the answer
            text = f"no answer: {type(error).__name__}: {_one_line(why)}"
            self._on_unavailable(began_s, text)
            raise PushFailed(text) from None

    def _request_headers(self, message: Message) -> dict[str, str]:
        own = self._headers | (self._header_file.value if self._header_file else {})
        secrets = self._secrets + (self._secret_file.value if self._secret_file else [])
        signed = webhook_headers(message.id, message.payload, secrets, int(time.time()))
        described = delivery_headers(message)
        if any(name.lower() == "content-type" for name in own):
            del described["Content-Type"]
        return described | signed | own

    def _raise_for(self, answer: "aiohttp.ClientResponse", body: str, began_s: float) -> None:
        """Raise the exception that is the meaning of an answer; none for a success."""
        status = answer.status
        text = f"{_named(status)}: {body}" if body else _named(status)
        after_s = _retry_after_s(answer) if status in (429, 503) else None
        if status in _UNAVAILABLE:
            self._on_unavailable(began_s, text, after_s or 0.0)
        elif self.brake.is_on:
            self.brake.on_answer()
            LOG.info("target answers again: %s status=%d", self.name, status)
        if 200 <= status < 300:
            return
        if status == 410:
            raise Reject(text)
        if after_s is not None:
            raise RetryAfter(text, delay=after_s)
        raise PushFailed(text)

    def _on_unavailable(self, began_s: float, why: str, least_s: float = 0.0) -> None:
        if not self.brake.is_on:
            text = "target unavailable, one request at a time: %s error=%r"
            LOG.warning(text, self.name, why)
        self.brake.on_unavailable(began_s, time.monotonic(), least_s)

    # ---- the connections

    def _open_session(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            from timerclient import __version__

            connect_s = self.timeout_s / 3
            self._session = aiohttp.ClientSession(
                connector=_connector(self._tls),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, connect=connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={
                    "User-Agent": f"timer-cluster/{__version__}",
                    "Accept": "*/*",
                    "Accept-Encoding": "identity",
                },
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _url_without_query(url: str) -> str:
    """Return a URL without its query.

    Raises:
        InvalidRequest: It is no http:// or https://, no host can have its name, or it has a user,
            a fragment or a space.
    """
    limit, shown = "must be http://HOST… or https://HOST…, in visible ASCII", url.partition("?")[0]
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        fits = parts.scheme in ("http", "https") and parts.port != 0 and _HOST.fullmatch(host)
        host.encode("idna")  # as before a look-up of its address
        if host.rpartition(".")[2].isdecimal():
            ipaddress.ip_address(host)
    except ValueError:
        raise InvalidRequest.of("url", shown, limit) from None
    if "@" in parts.netloc:
        limit = "must have no user and password: send a header Authorization"
        raise InvalidRequest.of("url", f"{parts.scheme}://…@{parts.hostname}", limit)
    if not (fits and url.isascii() and url.isprintable()) or " " in url or "#" in url:
        raise InvalidRequest.of("url", shown, limit)
    return shown


def _file(field: str, path: str | Path | None, read: Callable[[str], T]) -> RenewedFile[T] | None:
    return None if path is None else RenewedFile(field, Path(path), read)


def _connector(tls: "ssl.SSLContext | bool") -> "aiohttp.TCPConnector":
    """Return a pool of connections. One that already has an answer gets no request.

    Else that answer, as of a target that answers twice, would ack a message without a delivery.
    """
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        async def connect(self, *request: Any, **options: Any) -> "aiohttp.connector.Connection":
            found = await super().connect(*request, **options)
            if found.protocol is not None and found.protocol.should_close:
                found.close()
                raise TargetUnreached("an answer came before the request")
            return found

    return Connector(limit=0, ssl=tls, keepalive_timeout=IDLE_S)


def _tls_of(url: str, ca: str | Path | None) -> ssl.SSLContext | bool:
    """Return the check of certificates. True: the URL has no TLS.

    Raises:
        InvalidRequest: `ca` can't be read, or is given for http://.
    """
    if not url.lower().startswith("https:"):
        if ca is not None:
            raise InvalidRequest.of("ca", str(ca), "needs a URL that begins with https://")
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        limit = f"must be a PEM file of certificates: {error.strerror or error}"
        raise InvalidRequest.of("ca", str(ca), limit) from None


async def _beginning(answer: "aiohttp.ClientResponse") -> str:
    """Return the beginning of an answer's body in one line. It may be late, broken or endless."""
    import aiohttp

    data = b""
    try:
        async with asyncio.timeout(BODY_S):
            while part := await answer.content.read(BODY_BYTES_MAX - len(data)):
                data += part  # a read of 0 bytes ends it
    except (aiohttp.ClientError, TimeoutError):
        pass
    return _one_line(data.decode(errors="replace"))


def _one_line(text: str) -> str:
    """Return the beginning of a text from the target in one line, as long as a detail may be."""
    return truncate_detail(" ".join("".join(c if c.isprintable() else " " for c in text).split()))


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _retry_after_s(answer: "aiohttp.ClientResponse") -> float | None:
    """Return the time of a header Retry-After, in seconds or as a date; None: there is none."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        after_s = float(text[:9])
    else:
        try:
            at = email.utils.parsedate_to_datetime(text)
            if at.tzinfo is None:  # the oldest form of a date names no zone
                at = at.replace(tzinfo=UTC)
            after_s = at.timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(1.0, after_s), RETRY_AFTER_S_MAX)
