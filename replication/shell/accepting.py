"""Connections accepted from a listening socket, before TLS and before any protocol.

A server of asyncio counts a connection after its handshake. A listener that bounds unfinished
handshakes therefore accepts connections itself.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Final

PAUSE_S: Final = 0.1
"""Pause after a connection that could not be accepted, as without free files."""


async def accepted(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield the connections of a socket that does not block, without end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listening)
        except OSError:  # EMFILE, or the connection is gone already
            await asyncio.sleep(PAUSE_S)
            continue
        yield connection
        await asyncio.sleep(0)  # sock_accept does not wait while connections are there
