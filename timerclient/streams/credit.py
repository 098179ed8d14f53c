"""Limits of a consumer's prefetch: pure cores; the time is an argument.

`WorkPace` measures how long the application works on a message. `Credit` counts messages that are
granted, that wait here, and that may come in total. `LinkWindow` limits the bytes on their way.
"""

from collections.abc import Sized
from typing import Final

from timerclient.values.client_settings import WINDOW_BYTES_MAX

FIRST_FETCH: Final = 100
"""Messages fetched ahead before their size is known, and the pace of an application that takes
them one by one."""
WEIGHT: Final = 0.2
"""Weight of the last measurement in the mean."""
TRAVEL_SHARE: Final = 1 / 4
"""Fraction of a lease that a delivery may take to arrive, with those before it."""
LINK_BYTES_MIN: Final = 64 << 10
LINK_BYTES_MAX: Final = 16 << 20
REPORT_SHARE: Final = 1 / 4
"""Fraction of a window after which the client reports the received bytes."""


class WorkPace:
    """The time that an application works on one message: a moving mean."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._since_s = 0.0
        self.given_count = 0
        """Messages it has worked on since `_since_s`. 0: it waits, or has requested none yet."""

    def end_work(self, now_s: float) -> None:
        """Note that the application requests messages: its work on the last ones is done."""
        if not self.given_count:
            return
        each_s = (now_s - self._since_s) / self.given_count
        mean_s = each_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + WEIGHT * (each_s - mean_s)
        self.given_count = 0

    def begin_work(self, n: int, now_s: float) -> None:
        """Note that the application received `n` messages."""
        self.given_count, self._since_s = n, now_s

    def messages_within(self, span_s: float, now_s: float) -> int | None:
        """Return the number of messages that take `span_s` seconds. None: not known yet.

        If the present work has already taken longer than the mean, its time counts instead.
        """
        each_s = self._mean_s or 0.0
        if self.given_count:
            running_s = (now_s - self._since_s) / self.given_count
            each_s = running_s if self._mean_s is None else max(each_s, running_s)
        elif self._mean_s is None:
            return None
        return int(span_s / each_s) if each_s > 0 else 1 << 62


class Credit:
    """Number of messages that may come: a window that refills, and an optional total.

    The window counts messages. If their payloads are large, fewer are granted, so that about
    `bytes_max` bytes wait here, or one message.
    """

    def __init__(self, window: int, total: int | None = None) -> None:
        self.window = window
        """Most messages that are granted or wait here."""
        self.limit = window
        """The same, limited by the application's pace."""
        self.wanted = 0
        """Messages that the application waits for while none waits here."""
        self._total_left = total
        """Messages that may still be granted. None: no limit."""
        self._granted = 0
        """Messages granted and not arrived."""
        self.waiting = 0
        """Messages arrived and not taken."""
        self.in_lines: Sized = ()
        """Those of them that wait for others of their keys. The pace does not limit them."""
        self.bytes_max = WINDOW_BYTES_MAX
        """Payload bytes that may wait here, roughly."""
        self._fitting_count = FIRST_FETCH
        """Messages whose payloads fit into `bytes_max`."""
        self._mean_bytes = 0.0
        """Payload bytes of a message: the mean of a batch, which rises at once and falls slowly."""

    @property
    def reach(self) -> int:
        """Number of messages that the application will reach in time, at its pace."""
        return min(self.window, max(self.limit, self.wanted))

    def is_due(self) -> bool:
        """Whether enough credit is free for a request: half the limit, or the rest of the total."""
        free = self._free_count()
        half = (min(self.limit, self._fitting_count) + 1) // 2
        return free > 0 and (free >= half or free == self._total_left)

    def grant(self) -> int:
        """Return how many more messages may come, and count them as granted."""
        free = max(0, self._free_count())
        self._granted += free
        if self._total_left is not None:
            self._total_left -= free
        return free

    def revoke(self) -> None:
        """Take back the granted credit: the stream broke, or its credit was ended."""
        if self._total_left is not None:
            self._total_left += self._granted
        self._granted = 0

    def count_arrived(self, n: int, payload_bytes: int | None = None) -> None:
        """Count `n` granted messages as arrived. `payload_bytes`: of all; None: unknown."""
        self._granted = max(0, self._granted - n)
        self.waiting += n
        if payload_bytes is None or not n:
            return
        each = payload_bytes / n
        self._mean_bytes = max(each, self._mean_bytes + WEIGHT * (each - self._mean_bytes))
        self._fitting_count = max(1, int(self.bytes_max / max(1.0, self._mean_bytes)))

    def count_taken(self, n: int) -> None:
        """Count `n` arrived messages as taken."""
        self.waiting -= n

    def count_dropped(self, n: int) -> None:
        """Count `n` arrived messages as not received."""
        self.waiting -= n
        if self._total_left is not None:
            self._total_left += n

    @property
    def is_exhausted(self) -> bool:
        """Whether all messages of the total were taken."""
        return self._total_left == 0 and not self._granted and not self.waiting

    def _free_count(self) -> int:
        most = min(self.window, self.reach + len(self.in_lines), self._fitting_count)
        free = most - self._granted - self.waiting
        return free if self._total_left is None else min(free, self._total_left)


class LinkWindow:
    """Bytes that may be on their way on one stream.

    A lease runs while its delivery waits for a slow link. So the window has as many bytes as come
    in a quarter of a lease, at the rate of the last window. It at most doubles each time. A pause
    between messages counts as time of the link, so it makes the window small.
    """

    def __init__(self, now_s: float) -> None:
        self.size = LINK_BYTES_MIN
        self.received = 0
        """Number of all deliveries of the stream."""
        self._bytes = self._reported_bytes = 0
        """Bytes of all deliveries, and of those that the leader knows to have come."""
        self._begin, self._begin_s = 0, now_s
        """`_bytes` and the time when the last window was full."""

    def count_arrived(self, size: int, lease_s: float, now_s: float) -> None:
        """Count a delivery of `size` bytes."""
        self.received += 1
        self._bytes += size
        came = self._bytes - self._begin
        if came >= self.size:
            took_s = max(now_s - self._begin_s, 1e-6)
            fits = min(int(came / took_s * lease_s * TRAVEL_SHARE), 2 * self.size, LINK_BYTES_MAX)
            self.size = max(fits, LINK_BYTES_MIN)
            self._begin, self._begin_s = self._bytes, now_s

    def is_report_due(self) -> bool:
        """Return whether so much has come that the client should report it."""
        return self._bytes - self._reported_bytes >= self.size * REPORT_SHARE

    def take_report(self) -> int:
        """Return `received`, and count it as reported."""
        self._reported_bytes = self._bytes
        return self.received
