"""One workload in action: its producer's thread, its consumers, and its end.

    open the consumers ─► produce, beat by beat ─► come to rest ─► wait for the last due time
    ─► wait until no timer of the topic is due and no message is without an ack, by the cluster

The cluster's word ends a workload, not a verdict: the audit judges the histories by the log.

A kind that changes the rules of its topic ends them before the last wait (`Rest`). Then no timer
is held or refused, no message expires, and the topic is not deleted.
"""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chaos.history.history import RunFolder
from chaos.workloads.history_books import PAYLOAD_SIZE, Books
from chaos.workloads.recorded_requests import RecordedRequests, now_ms
from chaos.workloads.workload_consumer import (
    AT_ONCE_S,
    END_TIMEOUT_S,
    LETTERS,
    ONE,
    RecordingConsumer,
    WorkloadReader,
)
from timerclient import TimerClient
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import TimerError

BEAT_S: Final = 0.25
SETTINGS: Final = ClientSettings(call_s=10.0)
"""Calls end sooner than by default, so that the histories show an outage of that length."""
SETTLE_S: Final = 1.0
"""From the last due time to the first look, so that all timers have fired."""
RETRY_S: Final = 0.5
CLOSE_S: Final = 10.0


Rest = Callable[[], bool]
"""Ends the rules of a topic. Called again until it returns True; it may raise a TimerError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    """The properties of one workload."""

    produce: Callable[["WorkloadClients"], "Rest | None"]
    """Sends requests until `beats` ends. None: the topic needs no `Rest`."""
    readers: Sequence[WorkloadReader]
    settle: "Callable[[WorkloadClients], None] | None" = None
    """Called again and again in the last wait, before each look; it may raise a TimerError."""
    payload_size: int = PAYLOAD_SIZE
    """Of each timer, in bytes."""
    apart: bool = False
    """Its topic is in a namespace of its own, with the same name."""

    @property
    def line(self) -> str:
        """Its description in one line."""
        return (self.produce.__doc__ or "").partition("\n")[0]


def kind(
    *readers: WorkloadReader, **more: Any
) -> Callable[[Callable[["WorkloadClients"], "Rest | None"]], WorkloadKind]:
    """Make a kind of a producing function, with these consumers; without any, with a plain one."""
    return lambda produce: WorkloadKind(produce=produce, readers=readers or (ONE,), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Values that all workloads of a run share."""

    run: RunFolder
    """The folder of the histories."""
    endpoints: Callable[[], Sequence[str]]
    """Returns the nodes' addresses, at each new client."""
    seed: int
    """Of all random choices: delays, payload sizes, cancels."""
    rate_per_s: float
    """Timers per second on average, of all workloads together."""
    horizon_s: float
    """Seconds from `start`. Expected timers are due within it, and later requests are due within a
    second. Use the time until `stop_producing` or a little more: `drained` can't become true much
    earlier."""
    marks: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    """The next marks of timers, unique in the run."""
    waiting_max: int | None = None
    """A workload with more timers without a delivery requests none. None: no limit."""


class WorkloadClients:
    """The clients of one kind. The functions of their kind use the public attributes."""

    def __init__(self, name: str, kind: WorkloadKind, setting: Setting) -> None:
        """Prepare the clients. The nodes have addresses by now."""
        self.name = name
        self.topic = f"{name}/{name}" if kind.apart else name
        self.chance = random.Random(f"{setting.seed}/{name}")
        """Random choices of the producing thread only."""
        self.books = Books(payload_size=kind.payload_size)
        self._kind = kind
        self._setting = setting
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._clients: list[TimerClient] = []
        self._consumers: dict[str, RecordingConsumer] = {}
        """By name: GROUP-NUMBER; GROUP/dead for the dead letters of a group."""
        self._late = [reader for reader in kind.readers if reader.late]
        """Those that have not joined."""
        self._lock = threading.Lock()
        self._later: list[threading.Thread] = []
        self.client = self.connect()
        """Of the producer and the consumers."""
        self.requests = RecordedRequests(
            setting.run, f"{name}-requests", self.client, self.books, topic=self.topic
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    # ---- for the harness

    def start(self) -> None:
        """Start the threads and return at once. Requests begin when the consumers are open."""
        self.start_ms = now_ms()
        """Unix milliseconds."""
        self.end_ms = self.start_ms + int(1000 * self._setting.horizon_s)
        """Expected timers are due by this time, or within a second of their request."""
        self._thread.start()

    def stop_producing(self) -> None:
        """Send no new requests from now on, except those that end the workload. Returns at once."""
        self._stopping.set()

    def drained(self) -> bool:
        """Return whether every request is accounted for: acked by every group, or over.

        Never true before `stop_producing`. It needs a cluster that serves. Timers that are due
        after the run's end are not waited for. Poll it: a call is cheap.

        Raises:
            Exception: the failure of a thread of this workload. Rejections and failures of the
                cluster are not raised, because the histories have them.
        """
        self.books.check()
        return self._ended.is_set()

    def close(self) -> None:
        """Stop; confirm acks as far as the cluster answers; close clients and histories.

        Raises:
            Exception: the failure of a thread of the workload.
        """
        self._closing.set()
        self.stop_producing()
        threads = [*self._later, *[self._thread] * (self._thread.ident is not None)]
        with self.books.noting_failure():
            assert _joined(threads), f"{self.name}: a thread did not end"
        for consumer in self._consumers.values():
            consumer.close()
        for client in self._clients:
            with self.books.noting_failure():
                client.close(CLOSE_S)
        self.requests.close()
        self.books.check()

    # ---- for kinds

    @property
    def groups(self) -> list[str]:
        """The groups that exist from the start."""
        return sorted({reader.group for reader in self._kind.readers if not reader.late})

    @property
    def stopping(self) -> bool:
        """Whether no new requests may be sent."""
        return self._stopping.is_set()

    def connect(self) -> TimerClient:
        """Return a new client. `close` closes it."""
        client = TimerClient(self._setting.endpoints(), settings=SETTINGS)
        self._clients = [*self._clients, client]
        return client

    def drop(self, client: TimerClient) -> None:
        """Close a client's connections at once, during its requests."""
        self._clients = [each for each in self._clients if each is not client]
        client.close(AT_ONCE_S)

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Call `work` in a thread of its own after `delay_s`; drop it if `stopping` by then."""

        def run() -> None:
            with self.books.noting_failure():
                if not self._stopping.wait(delay_s):
                    work()

        thread = threading.Thread(target=run, name=f"{self.name}-later", daemon=True)
        thread.start()
        with self._lock:
            self._later = [*(each for each in self._later if each.is_alive()), thread]

    def join(self, reader: WorkloadReader) -> None:
        """Add a consumer; return once it is open, or the workload is being closed."""
        number = sum(name.startswith(f"{reader.group}-") for name in self._consumers) + 1
        dead = f"{reader.group}/dead"
        if "max_attempts" in reader.options and not reader.redriven and dead not in self._consumers:
            letters = WorkloadReader(group=LETTERS, dead_of=reader.group)
            topic = f"{self.topic}.{reader.group}.dead"
            self._consumers[dead] = self._consumer(f"{reader.group}-dead", letters, topic)
        name = f"{reader.group}-{number}"
        consumer = self._consumers[name] = self._consumer(name, reader, self.topic)
        while not consumer.wait_opened(RETRY_S) and not self._closing.is_set():
            self.books.check()

    def _consumer(self, name: str, reader: WorkloadReader, topic: str) -> RecordingConsumer:
        return RecordingConsumer(
            self._setting.run, f"{self.name}-{name}", self.client, self.books, reader,
            topic=topic, stopping=self._stopping,
        )  # fmt: skip

    def beats(self, every_s: float = BEAT_S) -> Iterator[int]:
        """Yield the number of timers to request, about every `every_s`, until `stop_producing`.

        The first number comes at once. After an outage, at most two beats are caught up.
        """
        owed, last_s = 0.0, time.monotonic() - every_s
        most = self._setting.waiting_max
        while not self._stopping.wait(max(0.0, last_s + every_s - time.monotonic())):
            now_s = time.monotonic()
            if self._late and now_ms() >= self.start_ms + (self.end_ms - self.start_ms) // 3:
                self._join_late()
            if most is not None and self.books.asked - self.books.delivered > most:
                last_s = now_s
                continue
            owed += self._setting.rate_per_s * min(now_s - last_s, 2 * every_s)
            last_s = now_s
            if count := int(owed):
                owed -= count
                yield count

    def _join_late(self) -> None:
        while self._late:
            self.join(self._late.pop())

    def marks(self, count: int) -> list[int]:
        """Return new marks, unique in the run."""
        return [*itertools.islice(self._setting.marks, count)]

    def within(self, due_ms: float) -> int:
        """Return a due time within the run: by its end, or within a second from now."""
        return min(int(due_ms), max(self.end_ms, now_ms() + 1000))

    def soon(self, count: int, delay_ms_max: float) -> list[int]:
        """Return due times within the run, evenly spread from now on."""
        now = now_ms()
        return [self.within(now + self.chance.uniform(0, delay_ms_max)) for _ in range(count)]

    def schedule(self, count: int, delay_ms_max: float) -> None:
        """Schedule timers in one request, with evenly distributed delays."""
        self.requests.batch(self.marks(count), self.soon(count, delay_ms_max))

    # ---- its thread

    def _work(self) -> None:
        with self.books.noting_failure():
            for reader in self._kind.readers:
                if not reader.late:
                    self.join(reader)
            rest = self._kind.produce(self)
            self._join_late()
            _joined(self._later)  # their last requests may move `last_due_ms`
            if rest is not None:
                self._until(rest)
            settled_s = self.requests.last_due_ms / 1000 + SETTLE_S
            self._closing.wait(max(0.0, settled_s - time.time()))
            self._until(self._is_over)
            if not self._closing.is_set():
                self._ended.set()

    def _until(self, step: Rest) -> None:
        """Call `step` until it returns True, or the workload is being closed."""
        while not self._closing.is_set():
            with contextlib.suppress(TimerError):
                if step():
                    return
            self._closing.wait(RETRY_S)

    def _is_over(self) -> bool:
        """Return whether no timer is due, and no message or dead letter is without an ack."""
        if self._kind.settle is not None:
            self._kind.settle(self)
        for _ in self.client.list_timers(self.topic, due_to=now_ms()):
            return False
        topics = (t for t in self.client.topics() if f"{t.name}.".startswith(f"{self.topic}."))
        groups = [group for topic in topics for group in topic.groups]
        return bool(groups) and not any(group.unacked for group in groups)


def _joined(threads: Sequence[threading.Thread]) -> bool:
    """Wait for threads, at most END_TIMEOUT_S for each; return whether all have ended."""
    for thread in threads:
        thread.join(END_TIMEOUT_S)
    return not any(thread.is_alive() for thread in threads)
