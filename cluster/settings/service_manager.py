"""Notices to the service manager: systemd with `Type=notify`, or another that has its protocol.

    NOTIFY_SOCKET   path of a datagram socket; "@" at its start: an abstract one. Absent: no notices
    WATCHDOG_USEC   microseconds without WATCHDOG=1 after which the manager ends the process

    READY=1         the ports are open, also those of a node that waits for room or for repair
    STATUS=...      one line for people
    WATCHDOG=1      the event loop turns
    STOPPING=1      the node drains

A process that replaces itself (`cluster/node/process.py`) keeps its pid and its environment. The
event loop stands still while the node opens its files, so the watchdog pauses until READY=1.
"""

import asyncio
import logging
import os
import socket
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE: Final = "WATCHDOG_USEC"

logger = logging.getLogger(__name__)


def send_notice(*lines: str) -> None:
    """Send one datagram of lines such as READY=1. Without a service manager nothing is sent.

    A failure is logged and has no other effect.
    """
    path = os.environ.get(SOCKET_VARIABLE, "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.settimeout(0)  # the event loop must not wait for the manager
            sending.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.warning("no notice to %s: %s", path, error)


def notice_ready(status: str) -> None:
    """Report open ports, with a status of one line; the watchdog counts from now on."""
    watchdog = os.environ.get(WATCHDOG_VARIABLE)
    send_notice("READY=1", f"STATUS={status}", *([f"WATCHDOG_USEC={watchdog}"] if watchdog else []))


def notice_stopping() -> None:
    """Report that the node drains and ends."""
    send_notice("STOPPING=1", "STATUS=draining")


def notice_opening() -> None:
    """Report that the node reads its files. The watchdog pauses until it is ready."""
    paused = ["WATCHDOG_USEC=0"] if os.environ.get(WATCHDOG_VARIABLE) else []
    send_notice("STATUS=opening the data directory", *paused)


async def keep_watchdog() -> None:
    """Send WATCHDOG=1 twice in each watchdog period, until cancelled. Without one, return."""
    text = os.environ.get(WATCHDOG_VARIABLE, "")
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        return
    while True:
        send_notice("WATCHDOG=1")
        await asyncio.sleep(int(text) / 2_000_000)
