"""Leases of ordered groups: random histories against a model of the order, then single cases."""

import random
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest

from tests.calls import calls_of
from tests.seeds import seeds
from tests.timer.lease_play import LEASE_MS, Play, check_bookkeeping, take_step
from tests.timer.machines import leases_of
from timer.entries.payloads import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    GroupOp,
    GroupSettings,
    Nack,
    Op,
)
from timer.leader.groups import key_order
from timer.leader.groups.group_leases import (
    ACCEPT,
    ALREADY_ACKED,
    LEASE_LOST,
    NOT_DELIVERED,
    Leases,
)
from timer.leader.groups.key_order import ORDER_WINDOW, KeyOrder
from timer.leader.groups.lease_table import ConsumerStream, Lease, LeaseTable
from timer.leader.groups.roster import Roster
from timer.leader.groups.turns import LEASE_WORK, OFFSETS_A_UNIT, WORK_MAX
from timer.model.columns import ROW, U64, Buffers
from timer.model.units import Epoch, QueueOffset, UnixMs

KEYS = b"abc"


@dataclass
class OrderedPlay(Play):
    """An ordered group, with the messages in flight of each key."""

    type: str = KEY_SHARED
    keys: dict[int, bytes] = field(default_factory=dict)
    in_flight: dict[int, ConsumerStream] = field(default_factory=dict)
    acking: set[int] = field(default_factory=set)

    def make_leases(self) -> Leases:
        self.group.settings = GroupSettings(
            **{each: getattr(self.group.settings, each) for each in ("lease_ms", "max_in_flight")},
            type=self.type,
        )
        return leases_of(self.group, self.epoch)

    def fire(self, count: int, size: int = 1, keys: bytes = b"") -> None:
        """Let messages fire, with keys of one letter; `-` is none."""
        rows = np.zeros(count, ROW)
        first = int(self.queue.end)
        keys = keys or bytes(
            (KEYS + b"-")[(7 * n + n // 3) % 4] for n in range(first, first + count)
        )
        rows["seq"] = np.arange(count) + first + 1
        rows["payload_size"] = size
        rows["key_start"] = np.arange(count)
        rows["key_size"] = [key != ord("-") for key in keys]
        bufs: Buffers = {0: keys + bytes(size)}
        for at, key in enumerate(keys):
            alone = self.type == KEY_SHARED and key == ord("-")
            name = b"%d" % (first + at) if alone else bytes([key])
            self.keys[first + at] = name if self.type == KEY_SHARED else b""
        self.queue.append(rows, bufs, UnixMs(first))

    def propose(self, op: GroupOp | None) -> None:
        if op is not None and op.op is Op.ENDED:
            self.came_back(op.offsets.tolist())
        super().propose(op)

    def nack(self, back: int, picks: int, delay_ms: int) -> list[int]:
        before = len(self.log)
        verdict = super().nack(back, picks, delay_ms)
        for op in self.log[before:]:
            if isinstance(op, Nack):
                self.came_back(op.offsets.tolist())
        return verdict

    def came_back(self, offsets: list[int]) -> None:
        for first in offsets:
            behind = [o for o in self.in_flight if o >= first and self.keys[o] == self.keys[first]]
            for offset in behind:
                del self.in_flight[offset]

    def ack(self, epoch: int, lease_id: int, offsets: list[int]) -> list[int]:
        verdict = super().ack(epoch, lease_id, offsets)
        self.acking |= {o for o, v in zip(offsets, verdict, strict=True) if v == ACCEPT}
        return verdict

    def deliver(self, limit: int = 1000) -> list[int]:
        offsets = super().deliver(limit)
        if offsets:
            self.check_order(self.held[-1][1])
        return offsets

    def check_order(self, lease: Lease) -> None:
        """Check that earlier messages of a key are done, or leased to the same consumer."""
        offsets: list[int] = lease.offsets.tolist()
        passed, leased = self.done | self.acking, {*offsets}
        others: dict[object, int] = {}  # key -> the first message that the consumer does not have
        for offset in range(1 + max(offsets)):
            mine = offset in leased or self.in_flight.get(offset) is lease.consumer
            if not mine and offset not in passed:
                others.setdefault(self.keys[offset], offset)
        last: dict[object, int] = {}
        for offset in offsets:
            key = self.keys[offset]
            assert others.get(key, offset) >= offset, f"{offset} before {others[key]}"
            assert last.get(key, -1) < offset, f"{last[key]} before {offset}"
            assert offset not in self.in_flight
            last[key], self.in_flight[offset] = offset, lease.consumer

    def next_epoch(self) -> None:
        super().next_epoch()
        self.in_flight.clear()
        self.acking.clear()


def ordered(messages: int, type: str = KEY_SHARED, keys: bytes = b"") -> OrderedPlay:  # noqa: A002
    """Return a play with one consumer that takes all messages."""
    play = OrderedPlay(type=type)
    play.fire(messages, keys=keys)
    play.join(1000)
    play.apply()
    return play


WEIGHTS = {
    "fire": 3.0, "join": 1, "leave": 1, "credit": 8, "hand out": 12, "ack": 6, "nack": 2,
    "extend": 1, "wait": 1, "apply": 12, "epoch": 0.1, "hand over": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("unit", [1, OFFSETS_A_UNIT])  # 1: looks share small windows, too
@pytest.mark.parametrize("type", [KEY_SHARED, FAILOVER])
@pytest.mark.parametrize("seed", seeds(10, 100))
def test_whatever_happens_each_key_keeps_its_order_and_all_is_acked(
    monkeypatch: pytest.MonkeyPatch,
    type: str,  # noqa: A002
    seed: int,
    unit: int,
) -> None:
    monkeypatch.setattr(key_order, "OFFSETS_A_UNIT", unit)
    chance, play = random.Random(seed), OrderedPlay(type=type)
    for what in chance.choices([*WEIGHTS], [*WEIGHTS.values()], k=300):
        wait = what == "wait"
        value = chance.choice([1, LEASE_MS - 1, LEASE_MS]) if wait else chance.randrange(1 << 12)
        take_step(play, what, 1 + value % 5 if what in ("fire", "join", "credit") else value)
        check_bookkeeping(play)
    for consumer in [*play.consumers]:
        play.leave(consumer)
    play.join(credit=10_000)
    for _ in range(4):
        play.apply()
        while play.deliver():
            assert set(play.ack_lease()) == {ACCEPT}
            play.apply()
        play.wait(3 * LEASE_MS)
    assert play.done == set(range(int(play.queue.end)))
    assert play.leases.in_flight == 0


# ---- keys


def test_key_stays_with_its_consumer_while_anything_of_it_is_in_flight() -> None:
    play = ordered(4, keys=b"aabb")
    (first,) = play.consumers
    first.credit = 1
    assert play.deliver() == [0]
    second = play.join(credit=10)
    assert play.deliver() == [2, 3], "the other key"
    assert play.deliver() == []
    play.fire(1, keys=b"a")
    first.credit = 1
    assert play.deliver() == [1]
    play.ack_lease()
    play.ack_lease(back=3)
    assert play.deliver() == [4], "nothing of it is in flight: to anybody"
    assert second.credit == 7


def test_burst_of_many_keys_is_shared_and_what_a_consumer_owns_is_not() -> None:
    play = ordered(7, keys=b"abcdefa")
    (first,) = play.consumers
    first.credit = 20
    for _ in range(2):
        play.join(credit=20)
    assert [play.deliver() for _ in range(4)] == [[0, 1, 2], [3, 4], [5], [6]]
    play.fire(5, keys=b"aaaax")
    assert sorted(play.deliver() for _ in range(2)) == [[7, 8, 9, 10], [11]]
    assert first.credit == 20 - 8


def test_messages_without_a_key_wait_for_nobody() -> None:
    play = ordered(4, keys=b"--a-")
    play.consumers[0].credit = 2
    play.deliver()
    play.nack(1, 1, delay_ms=10**6)
    play.apply()
    play.join(credit=10)
    assert play.deliver() == [2, 3]


def test_nack_with_a_delay_holds_back_its_key_alone_and_takes_back_what_was_behind() -> None:
    play, told = ordered(6, keys=b"ababab"), list[U64 | None]()
    play.consumers[0].recall = told.append
    assert play.deliver() == [0, 1, 2, 3, 4, 5]
    play.nack(1, 1, delay_ms=50)
    assert [each.tolist() for each in told if each is not None] == [[2, 4]]
    assert [op.op for op in play.log[-2:]] == [Op.RECALL, Op.NACK]
    assert play.log[-2].offsets.tolist() == [2, 4]
    assert play.leases.in_flight == 3
    play.apply()
    play.fire(2, keys=b"ab")
    assert play.deliver() == [7]
    play.wait(50)
    assert play.leases.next_return_ms() == 50
    assert play.deliver() == [0, 2, 4, 6]
    assert play.group.attempts(np.array([0, 2, 4], np.uint64)).tolist() == [2, 2, 2]
    assert play.group.failures(np.array([0, 2, 4], np.uint64)).tolist() == [1, 0, 0]


def test_what_was_taken_back_may_be_acked_until_somebody_gets_it() -> None:
    play = ordered(3, keys=b"aaa")
    play.deliver()
    play.nack(1, 1, delay_ms=0)
    assert play.ack_lease([1]) == [ACCEPT]
    play.apply()
    assert play.ack_lease([2]) == [ACCEPT]
    assert play.deliver() == [0]


def test_keys_of_messages_that_left_memory_are_waited_for() -> None:
    play = ordered(4, keys=b"abab")
    (block,) = play.queue.blocks
    page, block.page = block.page, None
    assert play.deliver() == []
    assert play.queue.pages.is_requested(block)
    block.page = page
    assert play.deliver(2) == [0, 1]
    block.page = None
    assert play.deliver() == []
    block.page = page
    assert play.deliver() == [2, 3]


def test_window_bounds_what_is_handed_out_beyond_the_first_unacked() -> None:
    play = ordered(1, FAILOVER)
    play.check_order = lambda lease: None  # type: ignore[method-assign] # every pair takes long
    for _ in range(20):
        play.fire(1000)
    play.consumers[0].credit = 100_000
    given = 0
    while got := play.deliver(2048):
        given += len(got)
        play.apply()
    assert given == ORDER_WINDOW
    play.ack_lease(play.held[0][1].offsets.tolist(), back=len(play.held))
    play.apply()
    assert play.deliver(2048)


# ---- one consumer at a time


def test_next_consumer_takes_over_where_the_active_one_left() -> None:
    play = ordered(6, FAILOVER)
    first, second = play.consumers[0], play.join(credit=100)
    first.credit = 3
    assert play.deliver() == [0, 1, 2]
    assert play.deliver() == [], "the active one takes no more"
    play.ack_lease([1])
    play.leave(first)
    assert play.deliver() == [], "it isn't committed that the lease ended"
    play.apply()
    assert play.deliver() == [0, 2, 3, 4, 5]
    assert play.held[-1][1].consumer is second


def test_consumer_that_joins_is_served_before_a_silent_one() -> None:
    play = ordered(3, FAILOVER)
    silent = play.consumers[0]
    assert play.deliver() == [0, 1, 2]
    play.wait(LEASE_MS)
    play.apply()
    joined = play.join(credit=100)
    assert play.deliver() == [0, 1, 2]
    assert silent.silent
    assert play.held[-1][1].consumer is joined


def test_receiver_that_is_gone_holds_back_all_until_its_lease_ends() -> None:
    play = ordered(3, EXCLUSIVE)
    play.consumers[0].credit = 1
    assert play.deliver() == [0]
    play.leases.retire(play.consumers.pop())
    play.join(credit=10)
    assert play.deliver() == []
    play.wait(LEASE_MS)
    play.apply()
    assert play.deliver() == [0, 1, 2]


def test_dead_letter_holds_back_what_is_behind_until_it_has_moved() -> None:
    play = ordered(3, FAILOVER)
    play.group.settings = GroupSettings(lease_ms=LEASE_MS, type=FAILOVER, max_attempts=1)
    play.deliver()
    play.nack(1, 1, delay_ms=0)
    play.apply()
    assert play.deliver() == []
    assert play.leases.take_dead(play.queue).tolist() == [0]
    play.group.ack(np.array([0], np.uint64))
    play.done.add(0)
    assert play.deliver() == [1, 2]


def test_what_is_recalled_again_and_again_has_not_failed() -> None:
    play = ordered(3, FAILOVER)
    for _ in range(9):
        play.deliver()
        play.nack(1, 1, delay_ms=0)
        play.apply()
    assert play.group.failures(np.arange(3, dtype=np.uint64)).tolist() == [9, 0, 0]
    assert play.group.attempts(np.arange(3, dtype=np.uint64)).tolist() == [10, 10, 10]
    play.consumers[0].credit = 10_000
    for fired in (2000, 1):
        play.deliver(3000)
        play.ack_lease()
        play.apply()
        play.fire(fired)
    assert not play.group.recalled.nbytes, "it takes no memory any more"


def test_keys_of_acked_messages_behind_a_stuck_one_are_forgotten() -> None:
    play = ordered(1, KEY_SHARED)
    for consumer in play.consumers:
        consumer.credit = 10**6
    assert play.deliver() == [0]
    with mock.patch.object(key_order, "ORDER_WINDOW", 50):
        for _ in range(50):
            play.fire(60, keys=b"-" * 60)
            while play.deliver():
                play.ack_lease()
                play.apply()
            order = play.leases._order
            assert isinstance(order, KeyOrder)
            assert order._keys.used <= 160
    assert (play.group.cursor, play.group.unacked_count(play.queue.end)) == (0, 1)


def up_to(play: OrderedPlay, offset: int, back: int = 1) -> tuple[int, list[int]]:
    epoch, lease = play.held[-back]
    verdict, offsets = play.leases.ack_up_to(Epoch(epoch), lease.lease_id, offset)
    if len(offsets):
        ids = play.group.topic, play.group.group_id
        play.log.append(GroupOp(Op.ACK, *ids, offsets))
        play.acking |= set(offsets.tolist())
    return verdict, offsets.tolist()


def test_cumulative_ack_takes_everything_up_to_its_offset_once() -> None:
    play = ordered(6, EXCLUSIVE)
    assert play.deliver(2) == [0, 1]
    assert play.deliver(3) == [2, 3, 4]
    assert up_to(play, 5) == (NOT_DELIVERED, [])
    play.ack_lease([1], back=2)
    assert up_to(play, 3) == (ACCEPT, [0, 2, 3])
    assert up_to(play, 3) == (ACCEPT, [3]), "asked for once more, behind what is under way"
    assert play.leases.in_flight == 1
    play.apply()
    assert play.group.cursor == 4
    assert up_to(play, 3) == (ALREADY_ACKED, [])


def test_cumulative_ack_of_who_lost_the_messages_is_refused_whole() -> None:
    play = ordered(3, FAILOVER)
    first = play.consumers[0]
    play.deliver(2)
    play.join(credit=10)
    play.leave(first)
    play.apply()
    assert up_to(play, 0) == (ACCEPT, [0]), "nobody has it by now"
    assert play.deliver() == [1, 2]
    assert up_to(play, 1, back=2) == (LEASE_LOST, [])


def test_cumulative_ack_is_accepted_for_the_leases_of_a_consumer_that_just_left() -> None:
    play = ordered(2, FAILOVER)
    assert [play.deliver(1) for _ in range(2)] == [[0], [1]]
    play.leases.leave(play.consumers[0])
    play.ack_lease()
    assert up_to(play, 1) == (ACCEPT, [0])


@pytest.mark.parametrize("type", [KEY_SHARED, FAILOVER, "shared"])
def test_no_more_is_in_flight_than_the_group_allows(type: str) -> None:  # noqa: A002
    play = OrderedPlay(type=type)
    play.group.settings = GroupSettings(lease_ms=LEASE_MS, type=type, max_in_flight=3)
    play.leases = leases_of(play.group, 1)
    play.fire(9, keys=b"abcdefghi")
    play.join(1000)
    play.apply()
    assert play.deliver() == [0, 1, 2]
    assert play.deliver() == []
    play.ack_lease([0, 1])
    assert play.deliver() == [3, 4]
    play.wait(LEASE_MS)
    play.apply()
    assert play.deliver()[0] == 2


def test_look_at_a_full_window_counts_as_the_work_of_a_whole_step() -> None:
    play = ordered(ORDER_WINDOW, KEY_SHARED)
    play.consumers[0].credit, works = ORDER_WINDOW, list[int]()
    for _ in range(ORDER_WINDOW // 2048):
        play.deliver(2048)
        works.append(play.leases.work)
        play.apply()
    assert LEASE_WORK * max(works) >= WORK_MAX


def test_looks_share_a_window_until_a_message_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    play = ordered(ORDER_WINDOW, KEY_SHARED, keys=b"-" * ORDER_WINDOW)
    play.check_order = lambda lease: None  # type: ignore[method-assign] # every pair takes long
    windows = calls_of(monkeypatch, KeyOrder, "_open_window")
    consumer, count = play.consumers[0], 64
    for _ in range(count):
        consumer.credit = 1
        assert play.deliver()
        play.ack_lease()
    work = play.leases._order._window.size // OFFSETS_A_UNIT  # type: ignore[attr-defined]
    assert work > 1
    assert len(windows) == -(-count // (1 + work)), "it serves a further look for each work unit"
    consumer.credit = 2
    returned = play.deliver()
    play.nack(1, 1, delay_ms=0)
    play.apply()
    consumer.credit = 1
    assert play.deliver() == returned[:1]


@pytest.fixture
def small_windows_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "OFFSETS_A_UNIT", 1)


@pytest.mark.usefixtures("small_windows_are_shared")
def test_message_that_was_not_sent_is_delivered_before_those_behind_it() -> None:
    play = ordered(3, keys=b"aaa")
    assert play.deliver(1) == [0]
    play.consumers[0].withdraw = lambda lease_id: [lease_id]
    play.wait(LEASE_MS)
    play.in_flight.clear()
    play.delivered.clear()
    assert play.deliver() == [0, 1, 2]


@pytest.mark.usefixtures("small_windows_are_shared")
def test_message_that_new_settings_make_a_dead_letter_is_not_delivered_again() -> None:
    play = ordered(2, keys=b"ab")
    assert play.deliver() == [0, 1]
    play.nack(1, 0b11, delay_ms=0)
    play.apply()
    assert play.deliver(1) == [0]
    play.group.settings = GroupSettings(lease_ms=LEASE_MS, type=KEY_SHARED, max_attempts=1)
    play.leases.on_settings_changed()
    assert play.deliver() == []
    assert play.leases.take_dead(play.queue).tolist() == [1]


@pytest.mark.usefixtures("small_windows_are_shared")
def test_after_a_handover_nothing_is_delivered_until_it_is_reserved() -> None:
    play = ordered(2, keys=b"ab")
    assert play.deliver(1) == [0]
    play.log += play.leases.hand_over()
    play.apply()
    assert play.deliver() == []
    play.apply()
    assert play.deliver() == [1]


@pytest.mark.usefixtures("small_windows_are_shared")
def test_message_acked_under_a_lease_of_an_earlier_leader_is_not_delivered() -> None:
    play = ordered(2, keys=b"ab")
    assert play.deliver() == [0, 1]
    play.next_epoch()
    play.join(credit=10)
    play.apply()
    assert play.deliver(1) == [0]
    assert play.ack_lease([1], back=2) == [ACCEPT]
    assert play.deliver() == []


@pytest.mark.usefixtures("small_windows_are_shared")
def test_message_that_expired_is_not_delivered() -> None:
    play = ordered(3, keys=b"abc")
    assert play.deliver(1) == [0]
    play.group.expire_below(QueueOffset(2), np.zeros(2, np.bool_))
    play.leases.on_expired_below()
    assert play.deliver() == [2]


def test_look_tries_only_consumers_that_may_get_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    play = ordered(1)
    assert play.deliver() == [0]
    play.fire(1, keys=play.keys[0])
    play.consumers[0].credit = 0
    for _ in range(10):
        play.join(credit=1)
    tried = calls_of(monkeypatch, KeyOrder, "_deliverable")
    assert play.deliver() == [], "an earlier message of the key is leased to another consumer"
    assert tried == []
    play.consumers[0].credit = 1
    assert play.deliver() == [1]
    assert [consumer for _, consumer, *_ in tried] == play.consumers[:1]


@pytest.mark.parametrize("type", [KEY_SHARED, SHARED])
def test_lease_looks_at_few_of_many_consumers_and_leases(
    monkeypatch: pytest.MonkeyPatch,
    type: str,  # noqa: A002
) -> None:
    play = ordered(1, type, keys=b"-")
    assert play.deliver() == [0]
    play.consumers[0].credit = 10
    play.check_order = lambda lease: None  # type: ignore[method-assign] # every pair takes long
    for _ in range(299):
        play.join(credit=10)
    looks = calls_of(monkeypatch, Roster, "allowance")
    leases = calls_of(monkeypatch, LeaseTable, "__getitem__")
    for _ in range(300):
        play.fire(1, keys=b"-")
        assert len(play.deliver()) == 1
        assert play.deliver() == []
    assert len(play.leases._table) == 301
    play.fire(300, keys=b"-" * 300)
    while play.deliver():
        pass
    assert len(looks) < 10 * len(play.leases._table)
    assert not leases, "no key has a consumer"
