"""Messages of a broken or hostile peer: each ends its stream, and nothing else happens."""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgpack
import pytest

from replication.core.peer_messages import (
    Append,
    AppendAnswer,
    Conflict,
    Fence,
    FenceAnswer,
    Fetch,
    FetchAnswer,
    LogStart,
    Refused,
)
from replication.core.promise import Promise
from tests.cluster.running import Running, take, until
from tests.hostile.peer_attack import Attacker
from timer.entries import payloads
from timer.entries.entry_frame import EntryKind, encode
from timer.entries.payloads import EpochStart
from timer.model.units import Epoch, LogIndex, MonoMs, Nonce, ReplicaId, UnixMs

pytestmark = pytest.mark.slow

FAR: Final = 1 << 60
LAST_EPOCH: Final = (1 << 63) - 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("peers")).cleaned() as running:
        yield running


def canary(cluster: Running, pids: dict[str, int]) -> None:
    """No node has ended, one leads, and a timer goes through."""
    assert {name: node.pid for name, node in cluster.nodes.items()} == pids
    cluster.wait_for_leader()
    with cluster.client() as client, client.consumer("canary", "watch") as consumer:
        client.schedule("canary", b"alive", delay=0)
        assert [message.payload for message in take(consumer, 1)] == [b"alive"]


@pytest.fixture
def attacked(cluster: Running) -> Iterator[Running]:
    """The cluster, which is as before afterwards."""
    cluster.wait_for_leader()
    pids = {name: node.pid for name, node in cluster.nodes.items()}
    yield cluster
    canary(cluster, pids)


def index(number: int) -> LogIndex:
    return LogIndex(number)


def answer(under: Promise, **said: Any) -> AppendAnswer:
    usual = AppendAnswer(
        under=under, nonce=Nonce(5), prev_index=index(1), matched_index=index(1),
        durable_index=index(1), conflict=None, fenced_by=Epoch(0), echo_ms=MonoMs(1), waited_ms=0,
    )  # fmt: skip
    return replace(usual, **said)


def append(under: Promise, **said: Any) -> Append:
    usual = Append(
        under=under, sent_ms=MonoMs(1), to_nonce=Nonce(0), prev_epoch=Epoch(0),
        prev_index=index(0), last_index=index(0), starts=(), commit_index=index(0),
        kept_from=index(0),
    )  # fmt: skip
    return replace(usual, **said)


def fence_answer(under: Promise, **said: Any) -> FenceAnswer:
    sets = (LogStart(index(1), Epoch(1), frozenset([ReplicaId(1)])),)
    usual = FenceAnswer(
        under=under, last_epoch=Epoch(1), last_index=index(1), unsure=False, sets=sets,
        echo_ms=MonoMs(1), waited_ms=0,
    )  # fmt: skip
    return replace(usual, **said)


def fetch_answer(under: Promise, **said: Any) -> FetchAnswer:
    usual = FetchAnswer(
        under=under, prev_epoch=Epoch(1), prev_index=index(1), last_index=index(1), starts=(),
        conflict=None,
    )  # fmt: skip
    return replace(usual, **said)


TO_LEADER: Final[dict[str, tuple[Callable[[Promise], Any], str]]] = {
    "durable beyond the log": (
        lambda p: answer(p, durable_index=1 << 40, matched_index=1 << 40),
        "must ascend up to the log's last index",
    ),
    "durable beyond what it matched": (lambda p: answer(p, durable_index=2), "must ascend"),
    "answer to what was never sent": (lambda p: answer(p, prev_index=FAR), "must ascend"),
    "echo of the future": (lambda p: answer(p, echo_ms=FAR), "echo_ms"),
    "held for less than no time": (lambda p: answer(p, waited_ms=-5), "held_ms = -5"),
    "conflict above the question": (
        lambda p: answer(p, conflict=Conflict(Epoch(1), index(5), index(9))),
        "conflict",
    ),
    "fenced by the last epoch": (lambda p: answer(p, fenced_by=LAST_EPOCH), "fenced_by"),
    "refused by the last epoch": (
        lambda p: Refused(under=p, promise=replace(p, epoch=Epoch(LAST_EPOCH))),
        f"promise.epoch = {LAST_EPOCH}",
    ),
    "refused by a lower epoch": (
        lambda p: Refused(under=replace(p, epoch=Epoch(p.epoch + 1)), promise=p),
        "promise.epoch",
    ),
    "voters of no set": (lambda p: fence_answer(p, sets=()), "sets = []"),
    "log of an epoch above": (
        lambda p: fence_answer(p, last_epoch=p.epoch + 1, last_index=FAR),
        "last_epoch",
    ),
    "entries of an epoch above": (
        lambda p: fetch_answer(p, prev_epoch=p.epoch + 1),
        "entries of epoch",
    ),
    "append under its own leadership": (append, "must be the replica that leads or bids"),
    "leadership of nobody": (lambda p: append(replace(p, leader=ReplicaId(0))), "leadership"),
}


@pytest.mark.parametrize("attack", TO_LEADER)
def test_leader_ends_the_stream_of_an_impossible_answer(attacked: Running, attack: str) -> None:
    make, why = TO_LEADER[attack]
    leader = attacked.wait_for_leader()
    attacker = Attacker(attacked, attacked.followers()[0])
    assert why in attacker.say(leader, make(attacker.promise_of(leader)))
    assert attacked.wait_for_leader() == leader


def own(attacker: Attacker, epoch: int) -> Promise:
    """Return a leadership that the attacker claims."""
    return Promise(Epoch(epoch), attacker.identity.replica_id, Nonce(77))


def entry(p: Promise, kind: EntryKind, payload: bytes, at: int = 1, time_ms: int = 1) -> bytes:
    return encode(kind, p.epoch, index(at), UnixMs(time_ms), [payload])


def first_entries(p: Promise, *more: tuple[EntryKind, bytes]) -> tuple[Append, list[bytes]]:
    """Return an append of a whole log: an EPOCH entry and `more`."""
    start = LogStart(index(1), p.epoch, frozenset([p.leader]))
    said = payloads.encode_epoch(EpochStart(p.epoch, p.leader, (p.leader,)))
    frames = [entry(p, EntryKind.EPOCH, said)]
    frames += [entry(p, *each, at) for at, each in enumerate(more, 2)]
    return append(p, last_index=index(len(frames)), starts=(start,)), frames


def test_follower_ends_the_stream_of_an_impossible_request(attacked: Running) -> None:
    follower, other = attacked.followers()
    leader = attacked.wait_for_leader()
    attacker = Attacker(attacked, other)
    there = attacker.promise_of(leader)
    above, last = own(attacker, there.epoch + 1), own(attacker, LAST_EPOCH)
    fence = Fence(under=last, last_epoch=Epoch(1), sent_ms=MonoMs(1))
    for message, why in (
        (fence, f"under.epoch = {LAST_EPOCH}"),
        (append(last), f"under.epoch = {LAST_EPOCH}"),
        (Fetch(under=last, prev_epoch=Epoch(1), prev_index=index(1)), "under.epoch"),
        (replace(fence, under=above, last_epoch=above.epoch), "last_epoch"),
        (append(there), "must be the replica that leads or bids"),
        (append(above, prev_epoch=Epoch(above.epoch + 1)), "entries of epoch"),
        (b"", "message of 0 bytes"),
        (b"\xff\xff\xff\xff", "envelope of"),
        (struct.pack("<I", 2) + b"\xff\xff", "damaged envelope"),
        (struct.pack("<I", 0), "invalid leadership 0, 0, 0"),
    ):
        assert why in attacker.say(follower, message), message
    assert "the one committed here is of epoch" in attacker.say(follower, *first_entries(above))
    assert attacker.promise_of(follower) == there


POISON: Final = {
    "unreadable timers": (EntryKind.SCHEDULE, b"poison"),
    "group of no known op": (EntryKind.GROUP, b"\xff" * 16),
    "policy out of range": (
        EntryKind.POLICY,
        msgpack.packb({"version": 1, "namespace": "", "topic": 0, "policy": {"tick_ms": 0}}),
    ),
    "fires at no time": (EntryKind.FIRE, struct.pack("<qII", -1, 1, 1)),
    "apply version of nobody": (EntryKind.EPOCH, b""),
}


@pytest.mark.parametrize("poison", POISON)
def test_entry_that_nobody_can_apply_is_not_appended(attacked: Running, poison: str) -> None:
    follower, other = attacked.followers()
    attacker = Attacker(attacked, other)
    there = attacker.promise_of(follower)
    above = own(attacker, there.epoch + 1)
    kind, payload = POISON[poison]
    if kind is EntryKind.EPOCH:
        start = EpochStart(above.epoch, above.leader, (above.leader,), level=99)
        payload = payloads.encode_epoch(start)
        message, _ = first_entries(above)
        assert "feature level 99" in attacker.say(follower, message, [entry(above, kind, payload)])
    else:
        assert f"{kind.name} entry 2" in attacker.say(
            follower, *first_entries(above, (kind, payload))
        )
    assert attacker.promise_of(follower) == there, "nothing of it was believed"


def test_bad_message_over_tcp_ends_its_connection(attacked: Running) -> None:
    follower, other = attacked.followers()
    Attacker(attacked, other).say_over_tcp(follower, b"over TCP")


def test_attacks_in_a_row_leave_one_line_in_the_log(attacked: Running) -> None:
    follower, other = attacked.followers()
    attacker = Attacker(attacked, other)
    for _ in range(50):
        attacker.say(follower, b"noise")
    until(lambda: "bad message" in attacked.log(follower))
    lines = [line for line in attacked.log(follower).splitlines() if "bad message" in line]
    assert len(lines) <= 2, "one for each peer that was attacked as"


def raft(**message: Any) -> bytes:
    """Return a message of Raft's as it is on a link."""
    data: bytes = msgpack.packb([(0, msgpack.packb(message))])
    return data


RAFT: Final = {
    "term of the end of time": raft(type="request_vote", term=LAST_EPOCH, last_log_index=1,
                                    last_log_term=1),
    "append of such a term": raft(type="append_entries", term=LAST_EPOCH, commit_index=1,
                                  prevLogIdx=1, prevLogTerm=1, entries=()),
    "records with a gap": raft(type="append_entries", term=1 << 31, commit_index=1, prevLogIdx=1,
                               prevLogTerm=0, entries=((b"\0x", 5, 1),)),
    "records of terms that fall": raft(type="append_entries", term=1 << 31, commit_index=1,
                                       prevLogIdx=1, prevLogTerm=0,
                                       entries=((b"\0x", 2, 5), (b"\0y", 3, 4))),
    "record of a term above": raft(type="append_entries", term=3, commit_index=1, prevLogIdx=1,
                                   prevLogTerm=0, entries=((b"\0x", 2, 4),)),
    "snapshot in a part that is first and last": raft(
        type="append_entries", term=3, commit_index=1, serialized=(b"\0" * 4, True, True)),
    "no such message": raft(type="explode"),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("attack", RAFT)
def test_malformed_message_of_raft_ends_its_link(attacked: Running, attack: str) -> None:
    attacker = Attacker(attacked, attacked.followers()[0])
    assert attacker.say_raft(attacked.wait_for_leader(), RAFT[attack])


def sealed(body: Any) -> bytes:
    """Return a snapshot of Raft's, as its file is."""
    data: bytes = msgpack.packb(body)
    return struct.pack("<I", zlib.crc32(data)) + data


def parts_of(snapshot: bytes) -> list[tuple[bytes, bool, bool]]:
    """Return a snapshot in parts: with whether each is the first, and the last."""
    return [(snapshot, True, False), (b"", False, True)]


def test_snapshot_of_raft_that_holds_no_state_is_not_installed(attacked: Running) -> None:
    attacker = Attacker(attacked, attacked.followers()[0])
    target = attacked.followers()[1]
    records = (b"\0x", 5, 1), (b"\0y", 6, 1)
    term = int(attacked.metric(target, "timer_raft_term")) + 1
    for body in (
        [1, b"no state", records[1], records[0]],
        [1, msgpack.packb([1, "c", {}, "no epoch", None, None]), records[1], records[0]],
        [1, b"", (b"\0y", 6, LAST_EPOCH), records[0]],
        [1, b"", "no record", records[0]],
        "nothing",
    ):
        append = {"type": "append_entries", "term": term, "commit_index": 1}
        parts = [raft(**append, serialized=part) for part in parts_of(sealed(body))]
        # Taken as messages, and thrown away: what ends the link here is the noise behind them.
        assert attacker.say_raft(target, *parts, b"noise")


def appointments(cluster: Running) -> list[str]:
    """Return the lines of all logs about decisions of controllers, oldest first."""
    lines = (line for name in cluster.nodes for line in cluster.log(name).splitlines())
    return sorted(line for line in lines if "the controller decided" in line)


def test_reports_of_epochs_that_nobody_led_appoint_nobody(attacked: Running) -> None:
    epoch, before = attacked._epoch(), appointments(attacked)
    controllers = [name for name in attacked.nodes if attacked.json(name, "/v1/status")]
    attacker = Attacker(attacked, attacked.followers()[0])
    for number in (LAST_EPOCH, (1 << 64) - 1, -1, epoch + (1 << 40)):
        report = (
            *(attacker.identity.replica_id, attacker.name, "follower", number, False, False),
            *(number, 1, 1, number, False, number, 0, 0, True),
        )
        for to in controllers:
            if to != attacker.name:
                frames = msgpack.packb([(1, msgpack.packb(report))])
                assert attacker.say_raft(to, frames, b"noise")
    canary(attacked, {name: node.pid for name, node in attacked.nodes.items()})
    # Each attack ends a true link. A controller that waits long for it may replace the leader.
    causes = ("its link broke", "no report for", "it has no lease")
    for reason in appointments(attacked)[len(before) :]:
        assert any(cause in reason for cause in causes), reason
    assert attacked._epoch() < epoch + (1 << 40)
