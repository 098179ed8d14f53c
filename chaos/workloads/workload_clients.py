"""One workload at work: its producer's thread, its consumers, and how it comes to an end.

    open the consumers ─► produce, beat by beat ─► come to rest ─► wait for the last due time
    ─► a last timer ─► what did not come has expired

The last timer is what makes "drained" certain. It fires behind everything else of its topic; when
every group has acked it, and was given every queue offset up to it, then nothing that fired is
missing: also not of what was asked for with an unknown outcome, which nobody could wait for.

A kind that changes what holds for its topic lets the topic come to rest before that: nothing is
held, refused or expires any more, or goes with the topic.
"""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from chaos.history.history import MARK_NONE, RunFolder
from chaos.workloads.agenda import Agenda
from chaos.workloads.changer import Changer
from chaos.workloads.history_books import GROUP, PAYLOAD_SIZE, Books
from chaos.workloads.workload_consumer import (
    AT_ONCE_S,
    END_TIMEOUT_S,
    LEASE,
    Habit,
    Morgue,
    RecordingConsumer,
    Source,
    prompt,
)
from chaos.workloads.workload_producer import RecordingProducer, now_ms
from timerclient import TimerClient
from timerclient.client.group_calls import GroupOptions
from timerclient.values.client_settings import ClientSettings
from timerclient.values.errors import TimerError

SETTINGS: Final = ClientSettings(call_s=10.0)
"""Shorter than the default: an outage of that length then shows in the histories."""
SETTLE_S: Final = 1.0
"""After the last due time, before the last timer: what is on its way gets there first."""
CANCELS_AT_ONCE: Final = 4
"""A cancel that waits for another one misses its moment."""
RETRY_S: Final = 0.5
CLOSE_S: Final = 10.0


Rest = Callable[[], bool]
"""Lets a topic come to rest; asked again until it returns True. It may raise a TimerError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReader:
    """A consumer of a workload: from the start, or joined later."""

    group: str = GROUP
    lease: timedelta = LEASE
    hold_max: float | None = None
    nacks: float = 0.0
    """See Source, as of the one before and the next."""
    options: GroupOptions = field(default_factory=GroupOptions)
    redriven: bool = False
    """Nobody consumes its dead letters."""
    habit: Callable[["WorkloadClients"], Habit] = lambda _: prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadKind:
    """What makes one workload differ from the others."""

    line: str
    """What it does, in one line."""
    produce: Callable[["WorkloadClients"], "Rest | None"]
    """Asks for timers until `beats` ends."""
    readers: Sequence[WorkloadReader] = (WorkloadReader(),)
    settle: "Callable[[WorkloadClients], bool] | None" = None
    """Looks, after the last timer was asked for, whether all is over; asked until it is. It may
    raise a TimerError."""
    payload_size: int = PAYLOAD_SIZE
    """Of each timer, in bytes."""
    apart: bool = False
    """Its topic has a namespace of its own, of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all workloads of a run have in common; see chaos.workloads.make."""

    run: RunFolder
    endpoints: Callable[[], Sequence[str]]
    seed: int
    rate_per_s: float
    """Of one workload."""
    horizon_s: float
    marks: "itertools.count[int]"


class WorkloadClients:
    """One workload. Public attributes are for its kind's functions."""

    def __init__(self, name: str, kind: WorkloadKind, setting: Setting) -> None:
        self.name = name
        self.topic = f"{name}/{name}" if kind.apart else name
        self.chance = random.Random(f"{setting.seed}/{name}")
        """Of its producing thread alone."""
        self.habit_chance = random.Random(f"{setting.seed}/{name}/habit")
        """Of its consumers' threads."""
        self._kind = kind
        self.books = Books(self.groups, payload_size=kind.payload_size)
        self._setting = setting
        self._run = setting.run
        self._started = False
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._clients: list[TimerClient] = []
        self._consumers: dict[str, RecordingConsumer] = {}
        self._morgues: dict[str, Morgue] = {}
        """By group."""
        self._last = MARK_NONE
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    # ---- the interface of a workload

    def start(self) -> None:
        """See `Workload`."""
        self.start_ms = now_ms()
        """When it was started."""
        self.end_ms = self.start_ms + int(1000 * self._setting.horizon_s)
        """What is expected within the run is due by then, or within a second."""
        self.cancels = Agenda(f"{self.name}-cancels", self.books, threads=CANCELS_AT_ONCE)
        """For what is asked later, or beside the producing; stops with it."""
        self.acks = Agenda(f"{self.name}-acks", self.books)
        """For acks that wait; stops at the very end."""
        self.client = self.connect()
        """Of its producer and of its consumers."""
        self.producer = RecordingProducer(
            self._run, f"{self.name}-producer", self.client, self.books, topic=self.topic
        )
        self.changer = Changer(self._run, f"{self.name}-changer", self.client, topic=self.topic)
        self._started = True
        self._thread.start()

    def stop_producing(self) -> None:
        """See `Workload`."""
        self._stopping.set()
        if self._started:
            self.cancels.stop()

    def drained(self) -> bool:
        """See `Workload`."""
        self.books.check()
        return self._ended.is_set() and not self.books.missing and self.books.gapless

    def close(self) -> None:
        """See `Workload`.

        Raises:
            Exception: what a thread of it failed with.
        """
        self._closing.set()
        self.stop_producing()
        if not self._started:
            return
        self.acks.stop()
        for thread in (self.cancels.join, self.acks.join, self._join):
            with self.books.noting_failure():
                assert thread(END_TIMEOUT_S), f"{self.name}: a thread did not end"
        for consumer in self._consumers.values():
            consumer.close()
        for morgue in self._morgues.values():
            morgue.close()
        for client in self._clients:
            with self.books.noting_failure():
                client.close(CLOSE_S)
        self.producer.close()
        self.changer.close()
        self.books.check()

    # ---- for kinds

    @property
    def groups(self) -> list[str]:
        """Those that it has from the start."""
        return sorted({reader.group for reader in self._kind.readers})

    @property
    def last_came(self) -> bool:
        """Whether every group has acked the last timer."""
        return not self.books.waits_for(self._last)

    @property
    def stopping(self) -> bool:
        """Whether nothing new may be asked for."""
        return self._stopping.is_set()

    def connect(self) -> TimerClient:
        """Return a client of its own, closed at the end."""
        client = TimerClient(self._setting.endpoints(), settings=SETTINGS)
        self._clients = [*self._clients, client]
        return client

    def drop(self, client: TimerClient) -> None:
        """Break a client's connections, whatever is under way on them."""
        self._clients = [each for each in self._clients if each is not client]
        client.close(AT_ONCE_S)

    def join(self, reader: WorkloadReader) -> None:
        """Add a consumer; return when it is open, or the workload is being closed."""
        number = sum(name.startswith(f"{reader.group}-") for name in self._consumers) + 1
        name = f"{reader.group}-{number}"
        self.books.join(reader.group)
        source = Source(
            topic=self.topic, group=reader.group, lease=reader.lease, hold_max=reader.hold_max,
            nacks=reader.nacks, options=reader.options,
        )  # fmt: skip
        buried = "max_attempts" in reader.options and not reader.redriven
        if buried and reader.group not in self._morgues:
            dead = f"{self.name}-{reader.group}-dead"
            self._morgues[reader.group] = Morgue(self._run, dead, self.client, self.books, source)
        consumer = self._consumers[name] = RecordingConsumer(
            self._run, f"{self.name}-{name}", self.client, self.books, source, reader.habit(self)
        )
        while not consumer.wait_opened(RETRY_S) and not self._closing.is_set():
            self.books.check()

    def beats(self, every_s: float) -> Iterator[int]:
        """Yield, about every `every_s` seconds, how many timers to ask for, until it has to stop.

        The first are asked for at once. What an outage kept from being asked for is lost.
        """
        owed, last_s = 0.0, time.monotonic() - every_s
        while not self._stopping.wait(max(0.0, last_s + every_s - time.monotonic())):
            now_s = time.monotonic()
            owed += self._setting.rate_per_s * min(now_s - last_s, 2 * every_s)
            last_s = now_s
            if count := int(owed):
                owed -= count
                yield count

    def marks(self, count: int) -> list[int]:
        """Return marks that no other timer of the run has."""
        return [*itertools.islice(self._setting.marks, count)]

    def within(self, due_ms: float) -> int:
        """Return a due time within the run: by its end, or within a second from now."""
        return min(int(due_ms), max(self.end_ms, now_ms() + 1000))

    # ---- its thread

    def _work(self) -> None:
        with self.books.noting_failure():
            for reader in self._kind.readers:
                self.join(reader)
            rest = self._kind.produce(self)
            self.cancels.join(END_TIMEOUT_S)  # what is moved last is waited for, too
            if rest is not None:
                self._until(rest)
            self._pause_until(self.producer.last_due_ms / 1000 + SETTLE_S)
            self._until(self._ask_for_last)
            settle = self._kind.settle
            if settle is not None:
                self._until(lambda: settle(self))
            if not self._closing.is_set():
                self._ended.set()

    def _until(self, step: Rest) -> None:
        """Do it until it is done, or the workload is being closed."""
        while not self._closing.is_set():
            with contextlib.suppress(TimerError):
                if step():
                    return
            self._closing.wait(RETRY_S)

    def _ask_for_last(self) -> bool:
        [self._last] = self.marks(1)
        return bool(self.producer.single(self._last, 0.0))

    def _pause_until(self, at_s: float) -> None:
        self._closing.wait(max(0.0, at_s - time.time()))

    def _join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
