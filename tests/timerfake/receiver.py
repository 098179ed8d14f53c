"""An HTTP server for tests of pushes: it notes the requests, and answers as the test says."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

OK = b"HTTP/1.1 204 No Content\r\n\r\n"


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body))} | {k.replace("_", "-"): headers[k] for k in headers}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Posted:
    """One request. Names of headers are in lower case."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


Answers = Callable[[Posted], bytes | None]
"""Returns the bytes of an answer. None: there is none, and the connection stays open."""


@dataclass
class Receiver:
    """See the module. Entered as a context, it listens."""

    answers: Answers = lambda _: OK
    tls: ssl.SSLContext | None = None
    port: int = 0
    path: str = "/hook?who=me"
    posted: list[Posted] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0
    slow_s: float = 0.0
    """Time of a request before its answer."""
    closes: bool = False
    """An answer ends its connection."""
    gate: asyncio.Event | None = None
    """Set: answers may go out. None: they always may."""
    _writer: asyncio.StreamWriter | None = None
    """Of the last connection."""
    _running: int = 0
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}{self.path}"

    async def until(self, number: int) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(60):
            while len(self.posted) < number:
                self._came.clear()
                await self._came.wait()

    async def say(self, data: bytes) -> None:
        """Send bytes on the last connection, without a request."""
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None] | None] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            assert task is not None
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        self.connections += 1
        self._writer = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self._running += 1
                self.most_at_once = max(self.most_at_once, self._running)
                line, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
                named = [each.split(": ", 1) for each in fields]
                headers = {name.lower(): value for name, value in named}
                assert len(headers) == len(named)
                body = await reader.readexactly(int(headers["content-length"]))
                self.posted.append(Posted(line, headers, body))
                self._came.set()
                if self.slow_s:
                    await asyncio.sleep(self.slow_s)
                if self.gate is not None:
                    await self.gate.wait()
                if (data := self.answers(self.posted[-1])) is None:
                    await reader.read()
                    return
                self._running -= 1
                writer.write(data)
                await writer.drain()
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
