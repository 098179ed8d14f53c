"""A run in which one thing after the other is wrong, in logs that all agree: each has its name."""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.audit.rules.queries import BOUNDS
from chaos.history import history
from chaos.history.history import OpOutcome, RunFolder, States, payload_of
from chaos.history.history_check import check
from tests.chaos import test_audit_groups as letters
from tests.chaos import test_audit_rules as rules
from tests.chaos import test_audit_series as series
from tests.chaos.told_history import ToldHistory
from tests.chaos.told_lies import Audited
from tests.chaos.world import Log, Story, id_of, write_log
from timer.entries import entry_frame, payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import AlterGroup, Nack, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import Epoch, LogIndex, ReplicaId, UnixMs

pytestmark = pytest.mark.spark

FIRST_MS = 100_000
"""When timers fire: long after the first leader began."""
OK = OpOutcome.OK


class Lies:
    """A run under construction: one log for all nodes, and what clients tell of it."""

    def __init__(self, root: Path, topics: Sequence[str]) -> None:
        self.run = RunFolder(root)
        self.log = Log()
        self.log.epoch(1)
        self.topics = {name: self.log.topic(name) for name in topics}
        self.log.entry(EntryKind.CHECKPOINT, b"")
        self.checkpoint = len(self.log.frames)
        self.producer = ToldHistory(self.run, "producer")
        self.consumer = ToldHistory(self.run, "consumer")

    @property
    def now_ms(self) -> int:
        return int(self.log.time_ms)

    def timer(
        self, topic: str, due_ms: int, *, asked_ms: int | None = None, told: str = "",
        key: str = "", crc: int | None = None,
    ) -> tuple[str, int]:  # fmt: skip
        """Schedule one timer, told and logged; return its id and its mark, which is its seq."""
        mark, keys = self.log.seqs + 1, [key.encode()] if key else []
        self.log.schedule(self.topics[topic], [(due_ms, mark)], keys=keys)
        timer = id_of(due_ms, mark)
        right = zlib.crc32(payload_of(mark))
        self.producer.schedule(
            [mark], ids=[timer], due_ms=[due_ms if asked_ms is None else asked_ms],
            topic=told or topic, span_ms=(self.now_ms, self.now_ms + 1), outcome=OK,
            payload_crcs=[right if crc is None else crc], **({"keys": [key]} if key else {}),
        )  # fmt: skip
        return timer, mark

    def given(self, topic: str, timer: str, mark: int, due_ms: int, **more: Any) -> None:
        """Tell of a delivery to the group g, at the log's time."""
        line: dict[str, Any] = {
            "epoch": 1,
            "lease_id": mark,
            "offsets": [0],
            "ids": [timer],
            "marks": [mark],
        }
        line |= {"attempts": [1], "fired_at_ms": [self.now_ms], "due_ms": [due_ms]}
        line |= {"handed_out_ms": self.now_ms, "received_ms": self.now_ms, "stream": 1}
        self.consumer.deliver(topic, "g", **(line | more))

    def acked(self, topic: str, offset: int = 0, at_ms: int | None = None, **lease: int) -> None:
        at_ms = self.now_ms if at_ms is None else at_ms
        self.consumer.ack(
            topic, "g", [offset], results=["ACKED"], span_ms=(at_ms, at_ms), outcome=OK, **lease
        )

    def say(self, op: str, **fields: Any) -> None:
        span = {"start_ms": self.now_ms, "end_ms": self.now_ms + 1, "outcome": "ok"}
        self.producer.write({"op": op, "client": "producer"} | span | fields)


def timers(run: Lies) -> None:
    """Write timers that are not what clients asked for, or were told."""
    log, topics, soon_ms = run.log, run.topics, FIRST_MS + BOUNDS["fired_ms"]
    log.fire(40)
    run.timer("late", FIRST_MS)
    run.timer("paused", FIRST_MS)  # as late, and excused
    run.timer("fired", soon_ms, told="late")
    run.timer("sooner", soon_ms, asked_ms=FIRST_MS - 60_000)
    run.timer("bytes", soon_ms, crc=7)
    fired, _ = run.timer("fired", soon_ms)
    for key in ("pending", "ended"):
        run.timer("keys", soon_ms, key=key)
    _, mark = run.timer("filter", FIRST_MS)
    log.entry(
        EntryKind.POLICY,
        encode_policy(Scope("", topics["paused"]), ScopePolicy(paused=True)),
        at_ms=99,
    )
    run.producer.change(
        "cancel", ids=[fired], results=["ALREADY_FIRED"], span_ms=(99, 100), outcome=OK
    )
    log.cancel_keys([(topics["keys"], b"ended")])
    for key in ("pending", "ended"):
        run.say("cancel", topic="keys", keys=[key], results=["NOT_FOUND"])
    log.cancel([(FIRST_MS, mark)])
    run.say("cancel", topic="filter", changed=0, due_to_ms=FIRST_MS + 1)
    policy = ScopePolicy(retention_ms=6)
    log.entry(EntryKind.POLICY, encode_policy(Scope("", topics["bytes"]), policy))
    run.say("policy", topic="bytes", said=json.dumps({"retention_ms": 5}))


def groups(run: Lies) -> None:
    """Write groups whose settings, nacks and letters are not what clients were told."""
    log, topic, due_ms = run.log, run.topics["nacked"], 40
    timer, mark = run.timer("nacked", due_ms)
    group = log.group(topic, "g", lease_ms=1000)
    log.reserve(topic, group, 8)
    run.consumer.open("nacked", "g", start_ms=0, lease_ms=1000)
    fired_ms = run.now_ms
    run.given("nacked", timer, mark, due_ms)
    log.op(Nack(Op.NACK, topic, group, np.array([0], np.uint64), np.array([fired_ms + 9])))
    run.consumer.change(
        "nack", span_ms=(fired_ms, fired_ms + 1), outcome=OK, topic="nacked", group="g",
        offsets=[0], results=["NACKED"], delay_ms=3_600_000,
    )  # fmt: skip
    log.ack(topic, group, [0], at_ms=fired_ms + 20)
    run.given("nacked", timer, mark, due_ms, attempts=[2], fired_at_ms=[fired_ms])
    run.acked("nacked")
    # A dead letter that failed once, where five times are allowed; three, a client was told.
    topic = run.topics["dead"]
    timer, mark = run.timer("dead", due_ms)
    group = log.group(topic, "g", lease_ms=1000, max_attempts=2)
    for attempts in (5, 6):
        log.op(AlterGroup(topic, group, {"max_attempts": attempts}))
    log.reserve(topic, group, 8)
    run.consumer.open("dead", "g", start_ms=0, max_attempts=3, group_lease_ms=1000)
    run.given("dead", timer, mark, due_ms)
    log.op(Nack(Op.NACK, topic, group, np.array([0], np.uint64), np.array([run.now_ms])))
    log.move(topic, group, [0], "dead.g.dead", "dead-letters", marks=[mark])


def leases(run: Lies) -> None:
    """Write leases that no consumer held, and acks of messages that no consumer got."""
    log, topic, now_ms = run.log, run.topics["lease"], run.now_ms
    group = log.group(topic, "g", lease_ms=10_000)
    both = [run.timer("lease", now_ms) for _ in range(2)]
    log.reserve(topic, group, 8)
    run.consumer.open("lease", "g", start_ms=0, lease_ms=10_000)
    run.given("lease", *both[0], now_ms)
    log.ended(topic, group, [0])  # at once, while its consumer goes on
    for offset, attempt, at_ms in ((1, 1, now_ms + 3_000), (0, 2, now_ms + 3_001)):
        run.given(
            "lease", *both[offset], now_ms, handed_out_ms=at_ms, received_ms=at_ms,
            offsets=[offset], attempts=[attempt],
        )  # fmt: skip
        run.acked("lease", offset, at_ms + 50)
    log.ack(topic, group, [0, 1], at_ms=now_ms + 4_000)
    # Two held at once, where one is allowed.
    topic, now_ms = run.topics["flight"], run.now_ms
    log.fire(now_ms)
    group = log.group(topic, "g", lease_ms=10_000, max_in_flight=1)
    both = [run.timer("flight", now_ms) for _ in range(2)]
    log.reserve(topic, group, 8)
    run.consumer.open("flight", "g", start_ms=0, lease_ms=10_000, max_in_flight=1)
    for offset, two in enumerate(both):
        run.given("flight", *two, now_ms, offsets=[offset])
        run.acked("flight", offset, now_ms + 800, epoch=1, lease_id=two[1])
    log.ack(topic, group, [0, 1], at_ms=now_ms + 900)
    # Given in another topic than it fired in; an ack of a message that never was.
    timer, mark = run.timer("handed", now_ms)
    run.given("nowhere", timer, mark, now_ms)
    # A message that comes a minute after it fired, to a consumer that held nothing.
    timer, mark = run.timer("given late", now_ms)
    late_ms = now_ms + 60_000
    group = log.group(run.topics["given late"], "g", lease_ms=10_000)
    log.reserve(run.topics["given late"], group, 8)
    run.consumer.open("given late", "g", start_ms=0, lease_ms=10_000)
    run.given("given late", timer, mark, now_ms, received_ms=late_ms)
    run.acked("given late", at_ms=late_ms)
    log.ack(run.topics["given late"], group, [0], at_ms=now_ms + 4_000)
    run.acked("handed", 5_000_000)


NAMES = ("late", "paused", "sooner", "bytes", "fired", "keys", "filter", "nacked", "dead", "lease",
         "flight", "handed", "nowhere", "given late")  # fmt: skip
SIGNS = "a%20 b#c[d]e{f}g*h?i:j,k\\l"
"""Signs that a reader of files may take for more than a name."""


def write(root: Path, stories: Iterable[Story]) -> RunFolder:
    """Write a run that holds the lies of this file, and stories after them."""
    run = Lies(root / SIGNS, NAMES)
    log = run.log
    timers(run)
    groups(run)
    going = encode_policy(Scope("", run.topics["paused"]), ScopePolicy(paused=False))
    log.entry(EntryKind.POLICY, going, at_ms=FIRST_MS + 10)
    log.fire(FIRST_MS + BOUNDS["fired_ms"] + 1)
    leases(run)
    for story in stories:
        story.tell(run.run, log)
    log.current = Epoch(2)
    start = payloads.EpochStart(Epoch(2), ReplicaId(77), (ReplicaId(77), ReplicaId(78)))
    log.entry(EntryKind.EPOCH, payloads.encode_epoch(start))
    log.entry(EntryKind.CHECKPOINT, b"")
    log.current = Epoch(1)
    log.entry(EntryKind.CHECKPOINT, b"")
    last = len(log.frames)
    for node in ("n1", "n2", "n3"):
        frames = [*log.frames]
        if (
            node == "n3"
        ):  # a deposed leader's frame that can't be decoded; the next is as everywhere
            frames[2] = entry_frame.encode(
                EntryKind.SCHEDULE, Epoch(0), LogIndex(3), UnixMs(0), [b"garbage"]
            )
        write_log(run.run.root / node / "log", frames)
    run.run.about.write_text(json.dumps({history.CLOCK_ERROR: 10}))
    with States(run.run) as states:
        for index in (run.checkpoint, last - 1):
            states.told("n1", index, at_ms=1, digest="0")
        states.told("n2", last + 7, at_ms=1, digest="1")
    for each in (run.producer, run.consumer):
        each.close()
    for path in [*run.run.histories.iterdir()]:
        assert [*map(str, check(path))] == []
        path.rename(path.with_name(f"{SIGNS}{path.name}"))
    return run.run


VIOLATIONS = {
    "delivered_late": 1,
    "late": 1,  # and not the timer of the topic that was paused
    "diverged": 2,  # asked for in another topic, given in another topic
    "misdated": 1,
    "cancel_untrue": 3,
    "undercounted": 1,
    "payload_untrue": 1,
    "policy_untrue": 1,
    "nack_untrue": 1,
    "moved_early": 1,
    "group_untrue": 1,
    "lease_cut": 1,
    "over_in_flight": 1,
    "ack_unfounded": 1,
    "epoch_untrue": 1,
    "diverged_entries": 1,
    "falling_entries": 4,  # the last frame of each log, and the deposed leader's
    "frozen_digests": 1,
    "short_log": 1,
}


def test_every_lie_of_logs_that_agree_has_its_name_and_nothing_else_is_accused(
    audited: Audited,
) -> None:
    told: tuple[dict[str, int], ...] = (
        VIOLATIONS,
        rules.VIOLATIONS,
        letters.LETTERS_VIOLATIONS,
        letters.LIVES_VIOLATIONS,
    )
    told += (series.VIOLATIONS,)
    wanted = sum(map(Counter, told), Counter[str]())
    assert audited.summary["violations"] == wanted
    producers = "home-producer, lived-producer, sought-producer"
    consumers = "home-g, home-h, lived-consumer, sought-ahead, sought-anew, …"
    assert audited.summary["not_looked_at"] == [
        "counts of n1, n2, n3: states.jsonl has none",
        "digests of n2, n3: states.jsonl has none",
        "files of n1, n2, n3: no manifest is in the folder",
        f"payloads beyond their marks: lines of {producers} have no payload_crcs",
        f"times of deliveries: lines of {consumers} have no handed_out_ms",
    ]
