"""A slow link: a process that reads packets from a TUN device, holds them, and writes them back.

    python -m chaos.suite.stage.slow_link DEVICE DELAY_MS JITTER_MS LOSS

The router sends the packets of one direction of a link here (chaos/suite/stage/network.py), and
routes the returned packets. Packets stay in order, as on a long cable, because a reordering would
make TCP resend. The process prints `up` when the device is attached. It runs until it is killed.
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_PACKET_SIZE_MAX: Final = 65_536
_QUEUE_MAX: Final = 20_000
"""Packets held, about 30 MB. Further packets are lost, as in any router."""


def main() -> None:
    """Attach to the device and forward for ever."""
    device, delay_ms, jitter_ms, loss = sys.argv[1], *map(float, sys.argv[2:5])
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    print("up", flush=True)
    forward(tun, delay_ms / 1000, jitter_ms / 1000, loss)


def forward(tun: int, delay_s: float, jitter_s: float, loss: float) -> None:
    """Hold each packet for delay_s to delay_s + jitter_s; lose a share `loss` of them, 0 .. 1."""
    chance = random.Random()
    held: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([tun], [], [], wait_s)
        now = time.monotonic()
        if readable and len(held) < _QUEUE_MAX:
            packet = os.read(tun, _PACKET_SIZE_MAX)
            if chance.random() >= loss:
                out_at = now + delay_s + jitter_s * chance.random()
                held.append((max(out_at, held[-1][0] if held else 0.0), packet))
        elif readable:
            os.read(tun, _PACKET_SIZE_MAX)
        while held and held[0][0] <= now:
            os.write(tun, held.popleft()[1])


if __name__ == "__main__":
    main()
