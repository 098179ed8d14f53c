"""The page /metrics: scrapes that come together share one rendering.

A rendering holds the event loop for milliseconds. So renderings have pauses between them, in which
the node works on. A scrape gets a rendering that began after it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

MEASURE_INTERVAL_S: Final = 0.1
"""From the start of one rendering to that of the next."""


class MetricsPages:
    """Renders the metrics of a registry."""

    def __init__(self, measure: Callable[[], Awaitable[None]], registry: CollectorRegistry) -> None:
        """`measure` updates the metrics that take a while to read."""
        self._measure, self._registry = measure, registry
        self._next: dict[str, asyncio.Task[bytes]] = {}
        """Encoding -> the rendering that has not begun."""
        self._free_s = 0.0
        """The next rendering may begin then, time of the event loop."""

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type. `accept`: the header of the request."""
        encode, encoding = choose_encoder(accept)
        if encoding not in self._next:
            self._next[encoding] = asyncio.create_task(self._render(encode, encoding))
        return await asyncio.shield(self._next[encoding]), encoding

    async def _render(self, encode: Callable[[CollectorRegistry], bytes], encoding: str) -> bytes:
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + MEASURE_INTERVAL_S
        await asyncio.sleep(begin_s - now_s)
        del self._next[encoding]  # a later scrape needs later values
        await self._measure()
        return encode(self._registry)
