"""Listening sockets, and the connections that they accept before TLS and before any protocol.

A server of asyncio counts a connection after its handshake. A listener that bounds unfinished
handshakes therefore accepts connections itself.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Final

PAUSE_S: Final = 0.1
"""Pause after a connection that could not be accepted, as without free files."""
BACKLOG: Final = 1_024
AT_ONCE_MAX: Final = 32
"""Connections that a socket accepts in one turn of the event loop."""
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - as the settings name them
_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def listen_at(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host, all at one port; port 0: any free one.

    As gRPC's servers do, it takes IPv4 and IPv6 at 0.0.0.0 and at [::], and leaves out an address
    that this machine does not have if there is another.

    Raises:
        OSError: an address is in use, or all are not this machine's.
    """
    both = host in _WILDCARDS and socket.has_dualstack_ipv6()
    if host in _WILDCARDS:
        host = "::" if both else "0.0.0.0"  # noqa: S104 - as the settings name it
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made, absent = list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "no address")
    with contextlib.ExitStack() as closing:
        for family, _, _, _, address in dict.fromkeys(found):
            at = (address[0], port, *address[2:])
            try:
                each = socket.create_server(at, family=family, backlog=BACKLOG, dualstack_ipv6=both)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
                continue
            made.append(closing.enter_context(each))
            each.settimeout(0)  # it does not block
            port = int(each.getsockname()[1])
        if not made:
            raise absent
        closing.pop_all()
    return made


async def connections_of(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield the connections of a socket that does not block, without end.

    A turn of a busy event loop takes long, so each accepts all that wait, up to AT_ONCE_MAX.
    """
    while True:
        await _readable(listening)
        try:
            for _ in range(AT_ONCE_MAX):
                connection, _ = listening.accept()
                connection.setblocking(False)  # noqa: FBT003 - its only form
                yield connection
        except BlockingIOError:  # no more wait
            pass
        except OSError:  # EMFILE, or the connection is gone already
            await asyncio.sleep(PAUSE_S)


async def _readable(listening: socket.socket) -> None:
    """Wait for a connection. `sock_accept` would take one, and lose it if it is cancelled then."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listening, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listening)
