"""A node with queues that hardly fit into memory, compared with lists and sets."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import Log, catch_up, engine_on, leases_of, part_of, u64
from timer.entries.payloads import Op
from timer.leader.groups.group_leases import ACCEPT, Leases
from timer.leader.groups.lease_table import ConsumerStream
from timer.model.units import MonoMs, TopicId, UnixMs
from timer.ready import page_cache
from timer.ready import queue as queues_module
from timer.ready import spill as spill_module
from timer.ready.group import Group
from timer.ready.spill import PageFetch
from timer.recovery import engine as engine_module
from timer.recovery.engine import Engine, Flush

Message = tuple[int, bytes]
"""Time of firing in ms, and payload."""


def make_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the memory so that hardly a message stays in it."""
    for module, name, value in (
        (page_cache, "PAGES_SIZE_MAX", 3_000),
        (engine_module, "FETCH_SIZE", 1_500),
        (queues_module, "AHEAD_BLOCKS", 2),
        (spill_module, "BLOCK_ROWS_MAX", 3),
        (spill_module, "BLOCK_SIZE_MAX", 40),
        (spill_module, "WRITE_SIZE", 100),
        (spill_module, "SMALL_BLOCK", 3 * spill_module.ROW_WEIGHT),
        (spill_module, "JOINED_MIN", 2),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)


@dataclass
class Mailroom:
    """One engine, its log, and the expected contents of its topics and groups."""

    chance: random.Random
    log: Log = field(default_factory=Log)
    messages: dict[int, list[Message]] = field(default_factory=lambda: {1: [], 2: []})
    acked: dict[int, set[int]] = field(default_factory=dict)
    flush: Flush | None = None
    written: bool = False
    fetch: PageFetch | None = None
    number: int = 0
    last_read_ms: int = 0

    def __post_init__(self) -> None:
        self.disk = SimDisk()
        self.engine: Engine = engine_on(self.disk)
        self.leases: dict[int, Leases] = {}
        self.log.begin_epoch()
        for topic, name in ((1, "a"), (2, "b")):
            self.log.topic(name)
            for group in ("g", "h")[:topic]:
                self.log.create_group(topic, group)
        self.apply()
        self.acked = {group.group_id: set() for group in self.groups()}

    def groups(self) -> list[Group]:
        topics = self.engine.machine.topics.values()
        return [group for topic in topics for group in topic.groups.values()]

    def apply(self) -> None:
        catch_up(self.engine, self.log)

    # ---- steps

    def fire(self) -> None:
        """Fire a few messages, at once or from the store, by one FIRE entry or several."""
        self.log.now_ms += self.chance.choice([1, 10, 700_000])
        for _ in range(self.chance.randint(1, 4)):
            topic = self.chance.choice([1, 2])
            payloads = [b"m%d" % (self.number + i) for i in range(self.chance.randint(1, 6))]
            self.number += len(payloads)
            due = self.log.now_ms + self.chance.choice([0, 5])
            keys = [b"k" + payload for payload in payloads]
            timers = [(topic, due, payload) for payload in payloads]
            self.log.schedule(part_of(timers, keys=keys))
            fired_at_ms = self.log.now_ms + (5 if due > self.last_read_ms else 0)
            self.log.now_ms += 5
            self.log.fire(self.log.now_ms)
            self.last_read_ms = self.log.now_ms
            self.messages[topic] += [(fired_at_ms, payload) for payload in payloads]
        self.apply()

    def consume(self) -> None:
        """Lease and compare a group's messages in memory, ack some, and fetch missing ones or not.

        Group 1 never acks its first message, so its cursor does not move.
        """
        group = self.chance.choice(self.groups())
        leases = self.leases.get(group.group_id)
        if leases is None:
            leases = self.leases[group.group_id] = leases_of(group, self.log.epoch)
            leases.join(ConsumerStream("c", 1_000, lambda _: None, credit=1 << 30))
        queue = self.engine.machine.topics[group.topic].queue
        self.log.op(Op.RESERVE, group.topic, group.group_id, [queue.end])
        self.apply()
        lease = leases.deliver(MonoMs(0), UnixMs(0), queue, self.chance.choice([1, 3, 100]))
        if lease is None:
            self.step_fetch()
            return
        offsets = lease.offsets.tolist()
        assert not self.acked[group.group_id] & {*offsets}, "acked, and handed out again"
        assert self.read(group.topic, lease.offsets) == [
            self.messages[group.topic][offset] for offset in offsets
        ]
        if self.chance.random() < 0.8:
            mine = [o for o in offsets if group.group_id != 1 or o]
            verdict = leases.ack(leases.epoch, lease.lease_id, u64(mine))
            assert (verdict == ACCEPT).all()
            self.log.op(Op.ACK, group.topic, group.group_id, mine)
            self.acked[group.group_id] |= {*mine}
            self.apply()

    def read(
        self, topic: int, offsets: np.ndarray[tuple[int], np.dtype[np.uint64]]
    ) -> list[Message]:
        found: list[Message] = []
        for page, places in self.engine.machine.topics[TopicId(topic)].queue.slices(offsets):
            at = places.astype(np.int64)
            for row, fired_at_ms in zip(page.rows[at], page.fired_at_ms[at], strict=True):
                start, size = int(row["payload_start"]), int(row["payload_size"])
                key = int(row["key_start"])
                payload = bytes(page.bufs[int(row["buf"])][start : start + size])
                assert page.bufs[int(row["buf"])][key : key + size + 1] == b"k" + payload
                found.append((int(fired_at_ms), payload))
        return found

    def step_fetch(self) -> None:
        """Begin a fetch, or use the fetched pages."""
        if self.fetch is None:
            self.fetch = self.engine.begin_fetch()
            if self.fetch is not None:
                self.fetch.read()
        else:
            self.engine.end_fetch(self.fetch)
            self.fetch = None

    def step_flush(self) -> None:
        """Begin a flush, write it, or end it."""
        if self.flush is None:
            self.flush, self.written = self.engine.begin_flush(), False
        elif not self.written:
            self.flush.write()
            self.written = True
        else:
            self.engine.end_flush(self.flush)
            self.flush = None

    def restart(self) -> None:
        digest = self.engine.machine.digest()
        self.disk.crash(self.chance)
        self.flush = self.fetch = None
        self.leases = {}
        self.engine = engine_on(self.disk)
        self.apply()
        assert self.engine.machine.digest() == digest

    def failover(self) -> None:
        self.log.begin_epoch()
        self.leases = {}
        self.apply()

    def check(self) -> None:
        """Check that memory is bounded, and that its counts are right."""
        pages = self.engine.machine.pages
        blocks = [b for t in self.engine.machine.topics.values() for b in t.queue.blocks]
        held = [(block.page.size, block.spill) for block in blocks if block.page is not None]
        assert pages.spilled_size == sum(size for size, spill in held if spill is not None)
        assert pages.unspilled_size == sum(size for size, spill in held if spill is None)
        largest = max((size for size, _ in held), default=0)
        assert pages.spilled_size <= 3_000 + 2 * largest

    def drain(self) -> None:
        """Check that every message without an ack can be read in the end."""
        self.failover()
        for group in self.groups():
            queue = self.engine.machine.topics[group.topic].queue
            left = {*range(len(self.messages[group.topic]))} - self.acked[group.group_id]
            for offset in sorted(left):
                while not queue.count_in_memory(u64([offset])):
                    assert self.engine.machine.pages.requested_blocks(1), (
                        f"offset {offset} is not fetched"
                    )
                    self.step_fetch()
                assert self.read(group.topic, u64([offset])) == [self.messages[group.topic][offset]]


def run_mailroom(seed: int) -> None:
    """Play a random program."""
    chance = random.Random(seed)
    room = Mailroom(chance)
    actions = [room.fire, room.consume, room.step_fetch, room.step_flush, room.restart]
    actions.append(room.failover)
    for _ in range(150):
        chance.choices(actions, [3, 8, 4, 4, 0.3, 0.3])[0]()
        room.check()
    room.drain()
    room.restart()
    room.drain()
