"""Headless Chromium for tests of the status page, through its remote debugging protocol.

Browser --starts--> chromium --DevToolsActivePort--> one web socket to one tab
"""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.conftest import CHROMIUMS

START_S: Final = 60.0
CALL_S: Final = 30.0
POLL_S: Final = 0.05


class Tab:
    """One tab: its calls, and everything that it complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and requests that failed."""
        self.requested: list[str] = []
        """Addresses of all requests."""

    async def read(self) -> None:
        """Take answers and events until the socket closes."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._calls.pop(said["id"]).set_result(said)
            else:
                self._event(said["method"], said["params"])

    def _event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(params["entry"]))
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case _:
                pass

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, CALL_S)
        assert "error" not in said, said
        return said["result"]

    async def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        more = {"returnByValue": True, "awaitPromise": True}
        said = await self.call("Runtime.evaluate", expression=script, **more)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, script: str, timeout_s: float = START_S) -> Any:
        """Evaluate an expression until its value is true; return the value."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.value(script)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
        return value

    async def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextlib.asynccontextmanager
async def opened(directory: Path, url: str) -> AsyncIterator[Tab]:
    """Open a page in a new Chromium with an empty profile in `directory`; end it afterwards."""
    chromium = next(path for name in CHROMIUMS if (path := shutil.which(name)))
    words = (
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-dev-shm-usage", f"--user-data-dir={directory}", "about:blank"),
    )
    quiet = subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(session, directory)
            async with session.ws_connect(address, max_msg_size=64 << 20) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read())
                for domain in ("Runtime", "Log", "Network", "Page"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                try:
                    yield tab
                finally:
                    reading.cancel()
    finally:
        browser.terminate()
        await browser.wait()


async def _address(session: aiohttp.ClientSession, directory: Path) -> str:
    """Return the address of the first tab's socket, once the browser listens."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(FileNotFoundError, IndexError, aiohttp.ClientError):
                port = (directory / "DevToolsActivePort").read_text().splitlines()[0]
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [each for each in await answer.json() if each["type"] == "page"]
                    return str(tabs[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(POLL_S)
