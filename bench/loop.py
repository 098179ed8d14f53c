"""An engine that leads over a log in memory, and the CPU time of each step of its loop.

The engine processes crowds as the state plane does (cluster/state/state_plane.py). Entries are
looked up: on a thread in production, here in between. They are then folded in portions, and the
leader's step follows. A step is the loop's work until another task gets its turn. Its CPU time is
the thread's, so that a busy machine changes little.
"""

import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from timer.entries import payloads
from timer.entries.entry_frame import Entry, EntryKind, encode, frame_at
from timer.entries.payloads import EpochStart
from timer.entries.policies import Scope, ScopePolicy
from timer.files.disk import RealDisk
from timer.leader.intake.count_limits import CountLimits
from timer.leader.leader import LeaderConfig
from timer.model.columns import Binary, Part
from timer.model.units import Epoch, LogIndex, MonoMs, Now, ProducerId, ReplicaId, TopicId, UnixMs
from timer.pending.store import Store
from timer.recovery.engine import Engine

START_MS: Final = 1_700_000_000_000
TOPICS: Final = 10_000
PORTION: Final = 256
"""Entries that the host passes on at a time."""
ROWS: Final = 50_000
"""Rows of one request."""
CANCELS: Final = 1_000

_T = TypeVar("_T")


def read_ahead(store: Store, now_ms: int) -> None:
    """Read the rows of runs that are due soon, in this thread."""
    ahead = store.begin_read_ahead(UnixMs(now_ms))
    if ahead is not None:
        ahead.read()
        store.end_read_ahead(ahead)


class Loop:
    """A leading engine, and the CPU time of each of its steps."""

    def __init__(self, directory: Path) -> None:
        limits = CountLimits(topics_max=1 << 20, namespace_topics_max=1 << 20, groups_max=1 << 20)
        config = LeaderConfig(limits=limits, checkpoint_interval_ms=1 << 40)
        self.engine = Engine(RealDisk(), directory, config)
        self.longest_ms = 0.0
        self.longest = ""
        self._mono_ms = 1_000
        self._entries: list[Entry] = []
        self._folded = 0
        start = EpochStart(Epoch(1), ReplicaId(1), (ReplicaId(1),))
        self.append(EntryKind.EPOCH, [payloads.encode_epoch(start)], UnixMs(START_MS))
        self.fold()
        self.leader = self.engine.lead(Epoch(1), self.append, self.now)

    @property
    def now(self) -> Now:
        """The present instant."""
        return Now(MonoMs(self._mono_ms), UnixMs(START_MS + self._mono_ms))

    def wait(self, until_ms: int) -> None:
        """Advance time to `until_ms` milliseconds after the start."""
        self._mono_ms = until_ms

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Add an entry to the log in memory; the next `fold` applies it."""
        index = LogIndex(self._folded + len(self._entries) + 1)
        frame = encode(kind, Epoch(1), index, time_ms, payload)
        entry = frame_at(memoryview(frame), 0)
        assert isinstance(entry, Entry)
        self._entries.append(entry)
        return index

    @property
    def behind(self) -> bool:
        """Whether appended entries are not yet applied."""
        return bool(self._entries)

    def step(self, name: str, work: Callable[[], _T]) -> _T:
        """Run `work` as one step of the loop."""
        began = time.thread_time()
        result = work()
        took_ms = (time.thread_time() - began) * 1_000
        if took_ms > self.longest_ms:
            self.longest_ms, self.longest = took_ms, name
        return result

    def fold(self) -> None:
        """Apply the appended entries."""
        engine = self.engine
        while self._entries:
            engine.raise_commit_index(self._entries[-1].index)
            portion = self._entries[:PORTION]
            prefetch = self.step(
                "begin_prefetch", functools.partial(engine.begin_prefetch, portion)
            )
            if prefetch is not None:
                prefetch.read()  # on a thread in production
                self.step("use_prefetch", functools.partial(engine.use_prefetch, prefetch))
            count = self.step("fold", functools.partial(engine.fold, portion))
            del self._entries[:count]
            self._folded += count
            while self.step("keep_up", engine.keep_up):
                pass

    def settle(self) -> None:
        """Step until no work is left."""
        while True:
            out = self.step("step", self._step)
            if not self.behind and not out:
                return
            self.fold()

    def _step(self) -> int:
        """Do the work of StatePlane._step. Return the number of deliveries."""
        self.leader.step(self.now)
        out = self.leader.deliver(self.now)
        for delivery in out:
            delivery.lease.consumer.sink(delivery)
        if self.leader.groups.waiting:
            self.leader.step(self.now)
        self.engine.keep_up()
        return len(out)

    def checkpoint(self) -> None:
        """Append a CHECKPOINT and apply it."""
        self.leader.checkpoint(self.now)
        self.fold()

    def topics(self, count: int) -> list[TopicId]:
        """Create topics and return their ids."""
        made: list[Any] = []
        for number in range(count):
            self.leader.create_topic(f"crowd/{number}", self.now, made.append)
            if number % PORTION == PORTION - 1:
                self.fold()
        self.fold()
        return [topic.topic_id for topic in made]

    def schedule(self, topics: Sequence[TopicId], due_ms: "np.ndarray[Any, Any]") -> None:
        """Schedule timers to the topics in turn. `due_ms`: milliseconds after the start."""
        for start in range(0, len(due_ms), ROWS):
            due = START_MS + due_ms[start : start + ROWS].astype(np.int64)
            topic = np.resize(np.array(topics, np.uint32), len(due_ms))[start : start + ROWS]
            for low in range(0, len(due), ROWS if len(topics) == 1 else 1_000):
                high = low + (ROWS if len(topics) == 1 else 1_000)
                self.request(due[low:high], topic[low:high])
            self.settle()

    def request(
        self,
        due: "np.ndarray[Any, Any]",
        topic: "np.ndarray[Any, Any]",
        producer_id: int = 0,
        sequence: int = 0,
        size: int = 10,
    ) -> None:
        """Process one request. `size`: bytes of each payload."""
        payload = Binary(
            sizes=np.full(len(due), size, np.uint32),
            blob=bytes(size * len(due)),
        )
        part = Part(
            producer_id=ProducerId(producer_id),
            sequence=sequence,
            due_ms=due,
            requested_ms=due,
            topic=topic,
            payload=payload,
        )
        self.leader.schedule(part, lambda _: None, self.now)

    def alter(self, scope: Scope, policy: ScopePolicy) -> None:
        """Set the policy of a scope."""
        self.leader.set_policy(scope, policy, [], self.now, lambda _: None)

    def cancel(self, due_ms: "np.ndarray[Any, Any]", first_seq: int) -> None:
        """Cancel timers with consecutive seqs from `first_seq` on."""
        due = START_MS + due_ms.astype(np.int64)
        seq = first_seq + np.arange(len(due), dtype=np.uint64)
        for start in range(0, len(due), CANCELS):
            part = slice(start, start + CANCELS)
            self.leader.cancel(due[part], seq[part], lambda _: None)
            self.leader.step(self.now)
            self.fold()

    def flush(self) -> None:
        """Flush, then merge."""
        engine, store = self.engine, self.engine.machine.store
        while not self.step("prepare_flush", lambda: engine.prepare_flush(128)):
            pass
        flush = self.step("begin_flush", engine.begin_flush)
        assert flush is not None
        flush.write()
        while not self.step("settle_flush", lambda: engine.settle_flush(flush, 128)):
            pass
        self.step("end_flush", lambda: engine.end_flush(flush))
        while (merge := engine.begin_merge()) is not None:
            store.install_merge(merge, store.write_merge(merge))

    def forget(self) -> None:
        """Begin to measure: earlier steps were preparation."""
        self.longest_ms, self.longest = 0.0, ""
        gc.collect()
        gc.freeze()
