"""Stages: the CPU time of each stage of a timer's life, per timer, on one thread, without network.

    client   encode a batch of timers                        timerclient/rows/rows.py
    read     decode and check the request                    cluster/api/wire_rows.py
    append   decide on it, and encode its entry              timer/leader/
    check    a follower checks the entry's frame             timer/entries/entry_frame.py
    write    append the frame to the log's file, no sync     timer/files/log.py
    fold     apply the SCHEDULE                              timer/state/, timer/pending/
    fire     append and apply the FIRE                       timer/leader/, timer/pending/
    deliver  lease the messages, and encode them             timer/leader/groups/
    ack      append and apply the acks                       timer/leader/groups/
    promote  begin to lead, with timers in memory            timer/recovery/engine.py
    flush    write the timers from memory to a run, with     timer/pending/runs/
             the merges that are then due

The leader runs all stages except client and check. A follower runs check, write, fold, flush, and
the applying parts of fire and ack. Each case varies one size and keeps the others. The engine is
that of bench/loop.py.

    python -m bench stages              a table of all cases
    python -m bench stages --memory     bytes that each stage allocates, and keeps
    python -m bench profile stages      a flame graph
"""

import contextlib
import gc
import shutil
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from bench import bench_machine
from bench.calibration import calibration_s
from bench.crowds import LEASE_MS
from bench.loop import START_MS, Loop
from bench.measure import Form, Measure, Series, check, cost
from cluster.api import wire_rows
from cluster.api.lease_ids import LeaseIds
from cluster.api.wire_rows import RequestLimits
from timer.entries.entry_frame import Entry, EntryKind, encode, frame_at
from timer.entries.payloads import CreateGroup, GroupSettings, GroupStart
from timer.files.disk import RealDisk
from timer.files.log import Log
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.columns import Part
from timer.model.timer_errors import NotLeaderError
from timer.model.units import Epoch, LogIndex, TopicId, UnixMs
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows

STAGES: Final = (
    *("client", "read", "append", "check", "write", "fold", "fire", "deliver", "ack"),
    *("promote", "flush"),
)
FIRE_MS: Final = 10
"""Milliseconds between two FIREs; each fires one batch."""
FAR_MS: Final = 3_600_000
"""Delay of timers that stay pending."""
SALT: Final = 1
LIMITS: Final = RequestLimits(
    key_bytes_max=1 << 10,
    headers_bytes_max=1 << 14,
    request_rows_max=1 << 16,
    request_bytes_max=8 << 20,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes of a run."""

    batch: int = 1_000
    """Timers in a request, in a FIRE, and in an ack."""
    payload: int = 100
    """Bytes."""
    topics: int = 1
    """Topics in each request; divides `batch`."""
    groups: int = 1
    """Groups of each topic."""
    pending: int = 0
    """Timers that stay pending in files meanwhile."""

    @property
    def timers(self) -> int:
        """The timers that are scheduled, fired and acked."""
        whole = min(20_000, (32 << 20) // self.payload, 400 * self.batch)
        return max(1, whole // self.batch) * self.batch

    @property
    def flushed(self) -> int:
        """The timers that are flushed."""
        return min(100_000, (64 << 20) // self.payload)


BASE: Final = Case()
CASES: Final[dict[str, Case]] = {
    "base": BASE,
    "batch 1": replace(BASE, batch=1),
    "batch 100": replace(BASE, batch=100),
    "batch 10,000": replace(BASE, batch=10_000),
    "10 B": replace(BASE, payload=10),
    "1,000 B": replace(BASE, payload=1_000),
    "100 topics": replace(BASE, topics=100),
    "10 groups": replace(BASE, groups=10),
    "1 million pending": replace(BASE, pending=1_000_000),
}
"""The first one is the reference; each of the others changes one size."""


class StagedLoop(Loop):
    """A leading engine that adds up the CPU time, or the memory, of each stage."""

    def __init__(self, directory: Path, *, memory: bool) -> None:
        """`memory`: measure bytes in place of seconds; tracemalloc must run."""
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.kept_bytes: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.stage = ""
        """The stage that `step` adds to; empty: none."""
        self._memory = memory
        self._frames: list[bytes] = []
        self._log = Log.open(RealDisk(), directory / "log")
        super().__init__(directory / "engine")

    def timed(self, stage: str, work: Callable[[], _T]) -> _T:
        """Run a part of a stage."""
        if not stage:
            return work()
        if self._memory:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            result = work()
            after, peak = tracemalloc.get_traced_memory()
            self.kept_bytes[stage] += after - before
            self.peak[stage] = max(self.peak[stage], peak - before)
            return result
        began = time.thread_time()
        result = work()
        self.cpu_s[stage] += time.thread_time() - began
        return result

    def step(self, name: str, work: Callable[[], _T]) -> _T:
        """Run a step of the loop as a part of the present stage."""
        return self.timed(self.stage, work)

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Encode an entry; the next `fold` applies it."""
        index = LogIndex(self._folded + len(self._frames) + 1)
        self._frames.append(encode(kind, Epoch(1), index, time_ms, payload))
        return index

    @property
    def behind(self) -> bool:
        """Whether appended entries are not yet applied."""
        return bool(self._frames)

    def fold(self) -> None:
        """Write, check and apply the appended entries."""
        frames, self._frames = self._frames, []
        alone = self.stage == "fold"  # in other stages these are parts of the stage
        for frame in frames:
            self.timed("write" if alone else self.stage, partial(self._log.append, [frame]))
            check_frame = partial(frame_at, memoryview(frame), 0)
            entry = self.timed("check" if alone else self.stage, check_frame)
            assert isinstance(entry, Entry)
            self._entries.append(entry)
        super().fold()

    def close(self) -> None:
        """Close the files."""
        self._log.close()


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one case, per timer."""

    us: dict[str, float]
    """Stage -> microseconds of CPU; of `promote`, in all."""
    kept: dict[str, float]
    """Stage -> bytes that stay allocated after it."""
    peak: dict[str, float]
    """Stage -> bytes allocated at its peak, for the timers of one call."""


def costs_of(case: Case, *, memory: bool = False) -> StageCosts:
    """Run one case in a directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="bench-stages-"))
    if memory:
        tracemalloc.start()
    try:
        loop = StagedLoop(directory, memory=memory)
        play(loop, case)
        loop.close()
    finally:
        tracemalloc.stop()
        shutil.rmtree(directory)

    timers = dict.fromkeys(STAGES, case.timers) | {"promote": 1, "flush": case.flushed}
    at_once = dict.fromkeys(STAGES, case.batch) | {"promote": 1, "flush": case.flushed}
    return StageCosts(
        us={stage: 1e6 * loop.cpu_s[stage] / timers[stage] for stage in STAGES},
        kept={stage: loop.kept_bytes[stage] / timers[stage] for stage in STAGES},
        peak={stage: loop.peak[stage] / at_once[stage] for stage in STAGES},
    )


def play(loop: StagedLoop, case: Case) -> None:
    """Let timers go through all stages."""
    topics = loop.topics(case.topics)
    names = [f"crowd/{number}" for number in range(case.topics)]
    if case.pending:
        loop.schedule(topics, FAR_MS + np.arange(case.pending) % 1_000_000)
        loop.flush()
    got = _consume(loop, topics, case)
    _schedule(loop, names, topics, case)
    fired = loop.engine.machine.counts.fired
    for number in range(case.timers // case.batch):
        loop.wait(60_000 + number * FIRE_MS + 1)
        _fire(loop)
        left = case.batch * case.groups
        while left and (messages := _deliver_and_ack(loop, got)):  # a part, above a limit
            left -= messages
        check(left == 0, f"{left} messages of a batch were not delivered")
    fired = loop.engine.machine.counts.fired - fired
    check(fired == case.timers, f"{fired} of {case.timers} fired")
    _promote_and_flush(loop, topics, case)


def _consume(loop: Loop, topics: Sequence[TopicId], case: Case) -> list[Delivery]:
    """Add the groups, each with a consumer. Return the list that gets their deliveries."""
    made, got = list[Any](), list[Delivery]()
    for topic in topics:
        for number in range(case.groups):
            settings = GroupSettings(lease_ms=LEASE_MS)
            new = CreateGroup(topic, f"g{number}", GroupStart.EARLIEST, settings)
            loop.leader.groups.create(new, made.append)
        loop.settle()
    for group in made:
        consumer = ConsumerStream("c", LEASE_MS, got.append)
        loop.leader.groups.join(group, consumer)
        loop.leader.groups.credit(group, consumer, case.timers)
    loop.settle()
    return got


def _schedule(loop: StagedLoop, names: Sequence[str], ids: Sequence[TopicId], case: Case) -> None:
    """Schedule all timers; each batch has a due time of its own."""
    topics = dict(zip(names, ids, strict=True))
    rows_each = case.batch // case.topics
    payloads = [bytes([number % 251]) * case.payload for number in range(rows_each)]

    def encoded(due_ms: int) -> bytes:
        when = {"due_ms": due_ms}
        each = (rows.encode_batch(name, payloads, when, None, None)[0] for name in names)
        return b"".join(each)  # joined messages merge: one request with the columns of all topics

    def read(body: bytes) -> Part:
        request = pb.ScheduleRequest.FromString(body)
        wire_rows.check_request(request, LIMITS)
        pieces = [*wire_rows.pieces_of(request, topics, LIMITS, loop.leader, loop.now)]
        return wire_rows.part_of(request, topics, pieces, loop.leader, loop.now)

    def append(part: Part) -> None:
        loop.leader.schedule(part, lambda _: None, loop.now)
        loop.leader.step(loop.now)

    for number in range(case.timers // case.batch):
        due_ms = START_MS + 60_000 + number * FIRE_MS
        body = loop.timed("client", partial(encoded, due_ms))
        part = loop.timed("read", partial(read, body))
        loop.timed("append", partial(append, part))
        loop.stage = "fold"
        loop.fold()
        loop.stage = ""


def _fire(loop: StagedLoop) -> None:
    loop.stage = "fire"
    loop.step("step", lambda: loop.leader.step(loop.now))
    loop.fold()
    loop.stage = ""


def _deliver_and_ack(loop: StagedLoop, got: list[Delivery]) -> int:
    """Deliver all that was fired, and ack it. Return the number of messages."""
    ids = LeaseIds(b"secret", loop.leader.epoch)

    def deliver() -> bool:
        out = loop.leader.deliver(loop.now)
        for each in out:
            each.lease.consumer.sink(each)
            response = pb.ConsumeResponse()
            wire_rows.put_delivery(response.deliveries, each, ids, SALT)
            response.SerializeToString()
        return bool(out)

    def ack(each: Delivery) -> None:
        lease = each.lease
        loop.leader.groups.ack(
            each.group, each.epoch, lease.lease_id, lease.offsets, lambda _: None
        )

    while loop.timed("deliver", deliver):
        pass
    messages = sum(len(each.lease.offsets) for each in got)
    loop.stage = "ack"
    for each in got:
        loop.step("ack", partial(ack, each))
    got.clear()
    loop.step("step", lambda: loop.leader.step(loop.now))
    loop.fold()
    loop.stage = ""
    loop.settle()
    return messages


def _promote_and_flush(loop: StagedLoop, topics: Sequence[TopicId], case: Case) -> None:
    """Lead again with timers in memory, then write them to a run."""
    chunk = min(1_000, (8 << 20) // case.payload)
    for start in range(0, case.flushed, chunk):
        due = START_MS + FAR_MS + np.arange(start, min(start + chunk, case.flushed))
        loop.request(due, np.full(len(due), topics[0], np.uint32), size=case.payload)
        loop.settle()
    engine = loop.engine
    engine.step_down(NotLeaderError(None))

    def lead() -> None:
        loop.leader = engine.lead(Epoch(1), loop.append, loop.now)
        engine.machine.store.next_due()

    loop.timed("promote", lead)
    loop.timed("flush", loop.flush)


# ---- the machine


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """The least costs on this machine."""

    copy_ns: float
    """Nanoseconds to copy a byte."""
    loopback_us: float
    """Microseconds to send 100 KB through a connection on loopback, and to receive it."""
    sync_ms: float
    """Milliseconds of fdatasync after 4 KiB were appended."""


def machine_costs(directory: Path) -> MachineCosts:
    """Measure the machine; `directory`: a place on the disk of the nodes."""
    data = np.ones(64 << 20, np.uint8)
    into = np.empty_like(data)
    copies = _best_of(5, lambda: np.copyto(into, data))
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    chunk = bytes(100_000)

    def pass_on() -> None:
        near.sendall(chunk)
        left = len(chunk)
        while left:
            left -= len(far.recv(left))

    sends = _best_of(50, pass_on)
    for each in (near, far, listener):
        each.close()
    sync_ms = bench_machine.fdatasync_ms(directory)
    return MachineCosts(1e9 * copies / len(data), 1e6 * sends, sync_ms)


def _best_of(rounds: int, work: Callable[[], object]) -> float:
    def seconds() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return min(seconds() for _ in range(rounds))


# ---- the measure, and the tables


def stages(form: Form) -> Series:
    """Return the cost of each stage, microseconds of CPU per timer."""
    del form
    with without_gc():
        return {stage: [us] for stage, us in costs_of(BASE).us.items()}


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off, as a node does (cluster/node/python_garbage.py)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cpu_table(runs: int, directory: Path) -> Iterator[str]:
    """Yield the lines of the table of all cases: medians of `runs` runs, microseconds per timer.

    `directory`: a place on the disk of the nodes.
    """
    machine = machine_costs(directory)
    copy_us = machine.copy_ns * BASE.payload / 1_000
    medians: dict[str, dict[str, float]] = {}
    with without_gc():
        for name, case in CASES.items():
            all_of = [costs_of(case).us for _ in range(runs)]
            medians[name] = {
                stage: statistics.median(each[stage] for each in all_of) for stage in STAGES
            }
    yield f"| stage | {' | '.join(CASES)} | copies |"
    yield "|---" * (len(CASES) + 2) + "|"
    for stage in STAGES:
        cells = " | ".join(_us(medians[name][stage]) for name in CASES)
        copies = "" if stage == "promote" else f"{medians['base'][stage] / copy_us:,.0f}"
        yield f"| {stage} | {cells} | {copies} |"
    yield ""
    yield f"A copy of {BASE.payload} bytes in memory: {copy_us * 1_000:.1f} ns."
    yield f"100 KB through loopback: {machine.loopback_us:.0f} us."
    yield f"A sync of the disk: {machine.sync_ms:.2f} ms."
    yield f"The calibration: {calibration_s() * 1_000:.0f} ms."


def memory_table() -> Iterator[str]:
    """Yield the lines of the table of memory: the base case, bytes per timer."""
    costs = costs_of(BASE, memory=True)
    yield "| stage | allocated at its peak | kept after it |"
    yield "|---|---|---|"
    for stage in STAGES:
        yield f"| {stage} | {costs.peak[stage]:,.0f} | {costs.kept[stage]:,.0f} |"


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


STAGE_COSTS: Final = Measure(
    name="stages",
    title="CPU of each stage, batches of 1,000 x 100 B",
    alone=stages,
    figures=tuple(
        cost("promote, in all" if stage == "promote" else stage, stage, "us") for stage in STAGES
    ),
    runs={Form.SHORT: 3, Form.FULL: 9},
)
