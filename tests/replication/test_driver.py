"""The order in which the driver hands work to its shell."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from replication.core import codec
from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    Durable,
    Effects,
    OutgoingMessage,
    Persist,
    Read,
    Received,
    Role,
)
from replication.core.log_shape import LogShape
from replication.core.peer_messages import (
    ENTRIES_MAX,
    Append,
    Fetch,
    FetchAnswer,
    LogStart,
    Message,
)
from replication.core.promise import Promise
from replication.core.replication_config import ReplicationConfig
from replication.driver.driver import INBOX_MAX, Driver, FramedEntry
from replication.driver.write_order import Drop, Order, TruncateLog, Write
from timer.entries.entry_frame import HEADER_SIZE, Entry, EntryKind, encode
from timer.entries.payloads import decode_epoch
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

ME, OLD, NEW = map(ReplicaId, (1, 2, 3))
VOTERS = frozenset((ME, OLD, NEW))


class Shell:
    """A shell that records its orders and carries out none."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.persists: list[Persist] = []
        self.persist, self.write = self.persists.append, self.orders.append
        self.reads: list[Read] = []
        self.read = self.reads.append
        self.sent: list[tuple[Message, Sequence[Any]]] = []
        self.overtaking: list[tuple[ReplicaId, Message]] = []
        self.checked: list[Entry] = []
        self.check = self.checked.append

    def send(self, _: ReplicaId, message: Message, frames: Sequence[Any]) -> None:
        self.sent.append((message, frames))

    def overtake(self, to: ReplicaId, message: Message) -> None:
        self.overtaking.append((to, message))

    def mono_ms(self) -> MonoMs:
        return MonoMs(0)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def framed(epoch: int, index: int) -> FramedEntry:
    where = Epoch(epoch), LogIndex(index), UnixMs(5)
    frame = encode(EntryKind.FIRE, *where, [b""])
    return FramedEntry(frame, Entry(EntryKind.FIRE, *where, memoryview(frame)[HEADER_SIZE:]))


def follower(shell: Shell, *, unsure: bool = False) -> Driver:
    """Return a follower with the entries 1 to 100 of epoch 3, all durable."""
    shape = LogShape(LogIndex(0), Epoch(0), VOTERS, LogIndex(0))
    shape.extend(LogIndex(100), [LogStart(LogIndex(1), Epoch(3), VOTERS)])
    core = Core(
        me=ME, nonce=Nonce(7), conf=ReplicationConfig(), unsure=unsure, shape=shape,
        promise=Promise(Epoch(3), OLD, Nonce(20)), commit_index=LogIndex(50), now_ms=MonoMs(0),
    )  # fmt: skip
    return Driver(core, shell, shell, UnixMs(5))


def conflicting(last: int) -> tuple[Append, Sequence[FramedEntry]]:
    """Return the entries of epoch 4 that replace entry 91 and all later ones."""
    message = Append(
        under=Promise(Epoch(4), NEW, Nonce(30)), sent_ms=MonoMs(0), to_nonce=Nonce(7),
        prev_epoch=Epoch(3), prev_index=LogIndex(90), last_index=LogIndex(last),
        starts=(LogStart(LogIndex(91), Epoch(4), VOTERS),), commit_index=LogIndex(50),
        kept_from=LogIndex(0),
    )  # fmt: skip
    return message, [framed(4, index) for index in range(91, last + 1)]


def test_log_that_is_dropped_while_a_promise_is_awaited_makes_nothing_durable() -> None:
    shell = Shell()
    driver = follower(shell)
    message, chunk = conflicting(120)
    driver.handle(Received(NEW, message, UnixMs(0), [len(f.frame) for f in chunk]), chunk)
    assert (len(shell.persists), shell.orders) == (1, [])
    driver.drop_before(LogIndex(40))
    (drop,) = shell.orders
    assert isinstance(drop, Drop)
    driver.handle(Durable(drop.version, LogIndex(100)))  # the log as it still is
    driver.on_persisted()
    assert driver.core.durable_index == 90
    assert [type(order) for order in shell.orders] == [Drop, TruncateLog, Write]
    driver.handle(Durable(shell.orders[-1].version, LogIndex(120)))
    assert driver.core.durable_index == 120


def test_messages_that_come_while_a_promise_is_awaited_are_bounded() -> None:
    shell = Shell()
    driver = follower(shell)
    message, chunk = conflicting(120)
    driver.handle(Received(NEW, message, UnixMs(0), [len(f.frame) for f in chunk]), chunk)
    heartbeat = replace(message, prev_epoch=Epoch(4), prev_index=LogIndex(120), starts=())
    for _ in range(3 * INBOX_MAX):
        driver.receive(NEW, heartbeat, UnixMs(0), memoryview(b""))
        driver.tick()
    assert len(driver._inbox) == INBOX_MAX
    driver.on_persisted()
    assert (len(driver._inbox), driver.core.shape.last_index) == (0, 120)


def test_reads_for_one_peer_that_wait_for_a_promise_keep_their_own_frames() -> None:
    shell = Shell()
    driver = follower(shell, unsure=True)
    for prev in (20, 10):  # a candidate that asks twice: the second question counts
        fetch = Fetch(under=driver.core.promise, prev_epoch=Epoch(3), prev_index=LogIndex(prev))
        driver.handle(Received(OLD, fetch, UnixMs(0)))
    message = Append(
        under=driver.core.promise, sent_ms=MonoMs(0), to_nonce=Nonce(7), prev_epoch=Epoch(3),
        prev_index=LogIndex(100), last_index=LogIndex(100), starts=(), commit_index=LogIndex(100),
        kept_from=LogIndex(0),
    )  # fmt: skip
    driver.handle(Received(OLD, message, UnixMs(0)))
    assert len(shell.persists) == 1, "it is sure from now on"
    shell.sent.clear()
    for read in reversed(shell.reads):
        first = int(read.first)
        driver.on_read(read, [framed(3, index).frame for index in range(first, first + 5)])
    assert shell.sent == []
    driver.on_persisted()
    answers = [(m, frames) for m, frames in shell.sent if isinstance(m, FetchAnswer)]
    assert [(m.prev_index, m.last_index) for m, _ in answers] == [(10, 15)]
    assert answers[0][1] == [framed(3, index).frame for index in range(11, 16)]


def test_epoch_entry_has_the_highest_level_known_and_is_checked_before_it_is_in_the_log() -> None:
    for in_log, appointed in ((2, 1), (1, 2)):
        shell = Shell()
        driver = Driver(follower(shell).core, shell, shell, UnixMs(5), in_log)
        driver.handle(Appointed(Epoch(4), NEW, None, appointed))
        entry = driver._epoch_entry(LogStart(LogIndex(101), Epoch(4), VOTERS)).entry
        assert decode_epoch(entry.payload).level == 2
        assert shell.checked == [entry]


def test_message_with_more_entries_than_a_step_may_check_is_no_message() -> None:
    message, _ = conflicting(90 + ENTRIES_MAX)
    assert codec.decode(codec.encode(message, UnixMs(5), []))[0] == message
    longer = replace(message, last_index=LogIndex(91 + ENTRIES_MAX))
    with pytest.raises(ValueError, match=r"must be 0 \.\. 1024"):
        codec.decode(codec.encode(longer, UnixMs(5), []))


def test_messages_that_may_overtake_others_are_handed_over_as_such() -> None:
    shell = Shell()
    driver = follower(shell)
    heartbeat, _ = conflicting(90)
    effects = Effects(overtake=[OutgoingMessage(OLD, heartbeat)])
    with mock.patch.object(driver.core, "step", return_value=effects):
        driver.tick()
    assert (shell.sent, shell.overtaking) == ([], [(OLD, heartbeat)])


def test_commit_is_not_measured_while_a_full_link_delays_it() -> None:
    driver = follower(Shell())
    core = mock.Mock(role=Role.LEADER, commit_index=5, durable_index=9, timed_index=5)
    core.shape.last_index = 9
    driver.core = core
    for now_ms in (0, 5_000):
        driver._measure(MonoMs(now_ms))
    assert driver._commit_latency.ms(MonoMs(5_000)) == 0
    core.timed_index = 9
    driver._measure(MonoMs(5_000))
    assert driver._commit_latency.ms(MonoMs(6_000)) == 1_000
