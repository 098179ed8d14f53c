"""A leader over a log in memory, with its clocks and answers; the test commits the entries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, Log, Timer, catch_up, engine_on, machine_on, part_of, u64
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import AlterGroup, CreateGroup, GroupSettings, GroupStart
from timer.entries.policies import (
    Scope,
)
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Leader, LeaderConfig
from timer.model.columns import Binary, OnConflict, decode_headers, encode_headers, gather
from timer.model.row_traits import Traits, join
from timer.model.timer_errors import EngineError, NotLeaderError
from timer.model.units import Epoch, LogIndex, MonoMs, Now, TopicId, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic

LEASE_MS = 1000


@dataclass
class Play:
    """A leader with its log, clocks, deliveries and answers."""

    config: LeaderConfig = field(default_factory=LeaderConfig)
    full: EngineError | None = None
    """The error of every append. None: appends are accepted."""
    mono_ms: int = 50_000
    answers: dict[str, Any] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = Log()
        self.machine = machine_on(SimDisk(), leads=True)
        self.machine.apply(self.log.begin_epoch())
        self.lead()
        self.topic_id = self.make_topic("a").topic_id

    def lead(self) -> None:
        epoch = Epoch(self.log.epoch)
        self.leader = Leader(self.machine, epoch, self.append, self.config, self.now)

    def append(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        if self.full is not None:
            raise self.full
        assert time_ms >= (self.log.entries[-1].time_ms if self.log.entries else 0)
        self.log.now_ms = time_ms
        return self.log.append(kind, payload).index

    @property
    def now(self) -> Now:
        return Now(MonoMs(self.mono_ms), UnixMs(START_MS + self.mono_ms))

    @property
    def appended(self) -> list[EntryKind]:
        """Kinds of the appended entries that are not applied."""
        return [entry.kind for entry in self.log.entries[self.machine.applied_index :]]

    def commit(self, count: int | None = None) -> None:
        """Commit and apply the first `count` appended entries. None: all."""
        waiting = self.log.entries[self.machine.applied_index :]
        for entry in waiting[:count]:
            self.leader.on_applied(entry, self.machine.apply(entry))

    def step(self) -> list[EntryKind]:
        self.leader.step(self.now)
        return self.appended

    def wait(self, ms: int) -> None:
        self.mono_ms += ms

    def settle(self) -> None:
        """Step, deliver and commit until nothing is left to do at this instant."""
        for _ in range(100):
            self.step()
            self.deliver()
            self.step()
            if not self.appended:
                return
            self.commit()
        raise AssertionError("not settled after 100 steps")

    def deliver(self) -> list[list[int]]:
        return [delivery.lease.offsets.tolist() for delivery in self.hand_out_new()]

    def hand_out_new(self) -> list[Delivery]:
        new = self.leader.deliver(self.now)
        self.deliveries += new
        return new

    def done(self, name: str) -> Callable[[object], None]:
        def done(result: object) -> None:
            assert name not in self.answers, f"{name} was answered twice"
            self.answers[name] = result

        return done

    # ---- requests

    def make_topic(self, name: str) -> Topic:
        self.leader.create_topic(name, self.now, self.done(f"topic {name}"))
        self.commit()
        topic = self.answers.pop(f"topic {name}")
        assert isinstance(topic, Topic)
        return topic

    def make_group(self, name: str = "g", **settings: Any) -> Group:
        settings = {"lease_ms": LEASE_MS} | settings
        create = CreateGroup(self.topic_id, name, GroupStart.EARLIEST, GroupSettings(**settings))
        self.leader.groups.create(create, self.done(f"group {name}"))
        self.settle()
        group = self.answers.pop(f"group {name}")
        assert isinstance(group, Group)
        return group

    def schedule(
        self,
        name: str,
        *delays: int,
        producer: int = 0,
        sequence: int = 0,
        size: int = 1,
        keys: list[bytes] | None = None,
    ) -> None:
        requested = np.array([self.now.clock_ms + delay for delay in delays], np.int64)
        when, topics = (
            WantedTimes("due_ms", requested),
            np.full(len(requested), self.topic_id, np.uint32),
        )
        _, due = self.leader.admission.times(when, len(requested), topics, self.now)
        timers: list[Timer] = [(self.topic_id, each, b"x" * size) for each in due.tolist()]
        part = part_of(timers, producer, sequence, keys=keys, on_conflict=OnConflict.REPLACE)
        self.leader.schedule(part, self.done(name), self.now)

    def cancel(self, name: str, *targets: tuple[int, int]) -> None:
        due = np.array([due for due, _ in targets], np.int64)
        self.leader.cancel(due, u64(seq for _, seq in targets), self.done(name))

    def join(self, group: Group, credit: int = 100) -> ConsumerStream:
        consumer = ConsumerStream("c", LEASE_MS, lambda _: None)
        self.leader.groups.join(group, consumer)
        self.leader.groups.credit(group, consumer, credit)
        return consumer

    def ack(
        self,
        name: str,
        delivery: Delivery,
        offsets: list[int] | None = None,
        epoch: int | None = None,
    ) -> None:
        chosen = delivery.lease.offsets if offsets is None else u64(offsets)
        epoch = self.log.epoch if epoch is None else epoch
        lease_id = delivery.lease.lease_id
        self.leader.groups.ack(delivery.group, Epoch(epoch), lease_id, chosen, self.done(name))

    def nack(
        self,
        name: str,
        delivery: Delivery,
        offsets: list[int] | None = None,
        delay_ms: int | None = None,
        detail: str = "",
    ) -> None:
        chosen = delivery.lease.offsets if offsets is None else u64(offsets)
        held = delivery.group, delivery.epoch, delivery.lease.lease_id, chosen
        self.leader.groups.nack(*held, delay_ms, self.now, self.done(name), detail)

    def restart(self) -> None:
        """Begin another epoch with a new leader over the same state."""
        self.leader.close(NotLeaderError(None))
        self.machine.apply(self.log.begin_epoch())
        self.lead()

    def alter(self, group: Group, **changes: int | str) -> None:
        alter = AlterGroup(group.topic, group.group_id, changes)
        self.leader.groups.alter(alter, self.done("alter"))
        self.settle()
        assert self.answers.pop("alter") is group

    def last(self) -> tuple[list[int], list[int]]:
        """Return the offsets and attempts of the last delivery."""
        delivery = self.deliveries[-1]
        return delivery.lease.offsets.tolist(), delivery.attempts.tolist()

    def messages(self, topic: str) -> list[tuple[bytes, bytes | None, dict[str, str]]]:
        """Return (payload, key, headers) of all messages in a topic's queue; no key is None."""
        queue = self.machine.topic_by_name[topic].queue
        out: list[tuple[bytes, bytes | None, dict[str, str]]] = []
        for page, at in queue.slices(np.arange(queue.begin, queue.end, dtype=np.uint64)):
            rows = page.rows[at.astype(np.int64)]
            columns = [gather(rows, page.bufs, name) for name in ("payload", "key", "headers")]
            payloads_, keys, headers = (column.values() for column in columns)
            out += zip(
                payloads_, [k or None for k in keys], map(decode_headers, headers), strict=True
            )
        return out

    def verdict(self, name: str) -> list[int]:
        return [int(each) for each in self.answers[name]]


def delivered(play: Play, *delays: int, credit: int = 100) -> tuple[Group, ConsumerStream]:
    """Schedule messages that are due at once and deliver them to one consumer."""
    group = play.make_group()
    consumer = play.join(group, credit)
    play.settle()
    play.schedule("s", *(delays or (0,)))
    play.settle()
    del play.answers["s"]
    return group, consumer


def engine_with(**topics: dict[str, Any]) -> tuple[Log, Any, SimDisk]:
    """Return an engine with topics and the given policy of each."""
    log, disk = Log(), SimDisk()
    log.begin_epoch()
    for number, (name, said) in enumerate(topics.items(), 1):
        log.topic(name)
        log.policy(Scope("", TopicId(number)), **said)
    engine = engine_on(disk)
    catch_up(engine, log)
    return log, engine, disk


def schedule(
    play: Play, priorities: Sequence[int], ordering: Sequence[bytes] = (), ago_ms: int = 0
) -> None:
    """Schedule timers with these priorities, due `ago_ms` milliseconds ago."""
    due_ms, n = int(play.now.clock_ms) - ago_ms, len(priorities)
    timers: list[Timer] = [(play.topic_id, due_ms, b"x")] * n
    keys = [*ordering] or [b""] * n
    headers = Binary.of([encode_headers({"a": "b"}) if at % 3 else b"" for at in range(n)])
    traits = Traits(Binary.of(keys), np.array(priorities, np.uint8))
    part = replace(part_of(timers), headers=join(headers, traits))
    play.leader.schedule(part, play.done("schedule"), play.now)
    play.settle()
    del play.answers["schedule"]
