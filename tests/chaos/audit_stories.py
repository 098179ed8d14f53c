"""Stories that the audit reads in one run."""

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chaos.audit.rules.queries import BOUNDS
from chaos.history import history
from chaos.history.history import OpOutcome, RunFolder, States, payload_of
from chaos.history.history_check import check
from tests.chaos.told_history import ToldHistory
from tests.chaos.world import Log, Story, id_of, write_log
from timer.entries import entry_frame, payloads
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import AlterGroup, GroupOp, Nack, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import Epoch, GroupId, LogIndex, ReplicaId, TopicId, UnixMs

OK = OpOutcome.OK


def schedule(story: Story, topic: TopicId, numbers: Sequence[int], due_ms: int, at_ms: int) -> None:
    """Schedule timers by their numbers; times are the story's."""
    rows = [(story.ms(due_ms), story.mark(number)) for number in numbers]
    story.log.schedule(topic, rows, at_ms=story.ms(at_ms))


def ask(
    story: Story, h: ToldHistory, topic: str, numbers: Sequence[int], due_ms: int, at_ms: int
) -> None:  # fmt: skip
    """Tell of such a request."""
    due_ms, marks = story.ms(due_ms), [*map(story.mark, numbers)]
    h.schedule(marks, ids=[id_of(due_ms, mark) for mark in marks], due_ms=[due_ms] * len(marks),
               topic=topic, span_ms=story.span_ms(at_ms - 1, at_ms), outcome=OK)  # fmt: skip


def ack(
    story: Story, h: ToldHistory, where: tuple[str, str], lease_id: int, offsets: list[int]
) -> None:  # fmt: skip
    h.ack(*where, offsets, results=["ACKED"] * len(offsets), epoch=1, lease_id=lease_id,
          span_ms=story.span_ms(6_500, 6_510), outcome=OK)  # fmt: skip


DEAD = (2, 3, 4, 5, 6, 7)
"""Numbers of those that die in the group "g" of the topic "home": offsets 1 to 6. The group "h"
gets the messages that the log has."""


class Redriven(Story):
    """Six of seven messages die in one of two groups, and are redriven."""

    def __init__(self) -> None:
        self.redriven = {number: number for number in DEAD}
        """Letter -> whose mark has what is made of it."""
        self.elsewhere = 0
        """So many of the last ones go to another topic."""
        self.told = 6
        self.unseen = set[int]()
        """Numbers of what is redriven, and not given to g."""
        self.twice = set[int]()
        """And given again, as another message."""

    def write(self) -> None:
        run, log = self.run, self.log
        topic = log.topic("home")
        g, h = groups = log.group(topic, "g"), log.group(topic, "h")
        schedule(self, topic, range(1, 8), 100, 10)
        log.fire(self.ms(120))
        log.reserve(topic, g, 20)
        log.reserve(topic, h, 20)
        log.ack(topic, g, [0], at_ms=self.ms(130))
        marks = [*map(self.mark, DEAD)]
        log.move(topic, g, range(1, 7), "home.g.dead", "dead-letters", marks=marks,
                 at_ms=self.ms(140))  # fmt: skip
        dead, letters = TopicId(log.topics), GroupId(log.groups)  # seqs 8 to 13
        log.reserve(dead, letters, 6)
        letters_of = [*self.redriven]
        home = letters_of[: len(letters_of) - self.elsewhere]
        numbers = [self.redriven[letter] for letter in home]
        log.move(dead, letters, [letter - 2 for letter in home], "home", "",
                 marks=[*map(self.mark, numbers)], at_ms=self.ms(200))  # fmt: skip
        for letter in letters_of[len(home) :]:  # seqs from 14 on
            log.move(dead, letters, [letter - 2], "elsewhere", "", marks=[self.mark(letter)])
        offsets = [*range(7, 7 + len(home))]
        log.ack(topic, g, offsets, at_ms=self.ms(300))
        log.ack(topic, h, [*range(7), *offsets], at_ms=self.ms(300))
        again = [(14 + at, number, 7 + at) for at, number in enumerate(numbers)]
        with ToldHistory(run, "home-producer") as each:
            ask(self, each, "home", range(1, 8), 100, 10)
            each.change("redrive", span_ms=self.span_ms(199, 201), outcome=OK, topic="home.g.dead",
                        changed=self.told)  # fmt: skip
        for group, number in zip("gh", groups, strict=True):
            unseen, twice = (self.unseen, self.twice) if group == "g" else (set[int](), set[int]())
            where = "home", group
            with ToldHistory(run, f"home-{group}") as each:
                each.open(*where, start_ms=self.start_ms)
                firsts = [(each, each, each - 1) for each in range(1, 8)]
                self._deliver(each, group, number, 1, (self.ms(100), 120), firsts)
                ack(self, each, where, 1, [0] if group == "g" else [*range(7)])
                seen = [row for row in again if row[1] not in unseen]
                self._deliver(each, group, number, 2, (1, 200), seen)
                ack(self, each, where, 2, [offset for *_, offset in seen])
                more = [(seq + 50, n, offset + 50) for seq, n, offset in again if n in twice]
                if more:
                    self._deliver(each, group, number, 3, (1, 200), more)

    def _deliver(
        self, h: ToldHistory, group: str, group_id: int, lease_id: int,
        times: tuple[int, int], rows: list[tuple[int, int, int]],
    ) -> None:  # fmt: skip
        seqs, numbers, offsets = zip(*rows, strict=True)
        due_ms, at_ms = times
        h.deliver("home", group, received_ms=self.ms(at_ms + 1), epoch=1, lease_id=lease_id,
                  group_id=group_id, offsets=[*offsets],
                  ids=[id_of(due_ms, self.mark(seq)) for seq in seqs],
                  marks=[*map(self.mark, numbers)], attempts=[1] * len(rows),
                  fired_at_ms=[self.ms(at_ms)] * len(rows),
                  due_ms=[due_ms] * len(rows))  # fmt: skip


def redriven() -> Redriven:
    """Return the story with lies about letters, and what was made of them."""
    story = Redriven()
    del story.redriven[6]  # it stays where nobody looks
    story.redriven[5] = 2  # another one's payload
    story.elsewhere = 1  # the last
    story.unseen, story.twice = {3}, {4}
    return story


class Sought(Story):
    """A topic, which keeps all, has eight messages; 7 and 8 come later.

    "back" has acked all of six, and is sought to offset 2; "ahead" has acked two, and is sought to
    offset 6; "anew" has acked all of six, is deleted, and made again from the start; "gone" was
    given one, and is deleted.
    """

    def __init__(self) -> None:
        self.later = {
            "back": {offset: [2] if offset < 6 else [1] for offset in range(2, 8)},
            "ahead": {6: [1], 7: [1]},
            "anew": {offset: [1] for offset in range(8)},
        }
        """Group -> offset -> attempts under which it comes, in the life that it has at the end."""
        self.unlogged = set[int]()
        """Acks of the last life of "back" that the log lacks."""
        self.told_lives = {"back": 5, "ahead": 6}
        self.to = {"back": 2}
        """Where who sought says it was sought to; else it was to a time."""
        self.deletions = ["anew", "gone"]

    def write(self) -> None:
        run, log = self.run, self.log
        self.groups = log.groups
        topic = log.topic("sought")
        policy = ScopePolicy(retention_ms=60_000)
        log.entry(EntryKind.POLICY, encode_policy(Scope("", topic), policy))
        for name in ("back", "ahead", "anew", "gone"):  # groups 1 to 4
            log.reserve(topic, log.group(topic, name), 6)
        back, ahead, anew, gone = map(self._group, range(1, 5))
        schedule(self, topic, range(1, 7), 100, 10)
        log.fire(self.ms(120))
        log.ack(topic, back, range(6), at_ms=self.ms(130))
        log.ack(topic, ahead, range(2))
        log.ack(topic, anew, range(6))
        log.op(GroupOp(Op.SEEK, topic, back, np.array([2], np.uint64)), self.ms(200))
        log.op(GroupOp(Op.SEEK, topic, ahead, np.array([6], np.uint64)))
        log.op(GroupOp(Op.DELETE, topic, anew, np.zeros(0, np.uint64)))
        log.op(GroupOp(Op.DELETE, topic, gone, np.zeros(0, np.uint64)))
        log.groups += 2  # a group that is sought has another id
        log.group(topic, "anew")
        schedule(self, topic, (7, 8), 300, 250)
        log.fire(self.ms(310))
        for number, offsets in ((5, {*range(2, 8)} - self.unlogged), (6, {6, 7}), (7, range(8))):
            log.reserve(topic, self._group(number), 8)
            log.ack(topic, self._group(number), sorted(offsets), at_ms=self.ms(330))
        with ToldHistory(run, "sought-producer") as h:
            ask(self, h, "sought", range(1, 7), 100, 10)
            ask(self, h, "sought", (7, 8), 300, 250)
            for name, number in self.told_lives.items():
                to = {"to_offset": self.to[name]} if name in self.to else {}
                h.change("seek", span_ms=self.span_ms(199, 201), outcome=OK, topic="sought",
                         group=name, group_id=self._group(number), **to)  # fmt: skip
            for name in self.deletions:
                h.change("delete_group", span_ms=self.span_ms(199, 201), outcome=OK,
                         topic="sought", group=name)  # fmt: skip
        self._consume("back", (1, range(6), range(6)), 5)
        self._consume("ahead", (2, range(3), range(2)), 6)
        self._consume("anew", (3, range(6), range(6)), 7)
        self._consume("gone", (4, range(1), ()), None)

    def _group(self, number: int) -> GroupId:
        return GroupId(self.groups + number)

    def _consume(
        self, group: str, first: tuple[int, Iterable[int], Iterable[int]], last: int | None
    ) -> None:
        number, given, acked = first
        with ToldHistory(self.run, f"sought-{group}") as h:
            h.open("sought", group, start_ms=self.start_ms)
            self._deliver(h, group, number, 1, [(offset, 1) for offset in given])
            if acked:
                ack(self, h, ("sought", group), 1, [*acked])
            rows = self.later.get(group, {})
            for turn in range(2):  # a lease has a message once
                again = [
                    (o, attempts[turn]) for o, attempts in rows.items() if turn < len(attempts)
                ]
                if last is not None and again:
                    self._deliver(h, group, last, 2 + turn, again)
            if last is not None:
                ack(self, h, ("sought", group), 2, [*rows])

    def _deliver(
        self, h: ToldHistory, group: str, life: int, lease_id: int, rows: list[tuple[int, int]]
    ) -> None:
        offsets, attempts = zip(*rows, strict=True)
        times = [(100, 120) if offset < 6 else (300, 310) for offset in offsets]
        due_ms = [self.ms(due) for due, _ in times]
        marks = [self.mark(offset + 1) for offset in offsets]
        h.deliver("sought", group, received_ms=self.ms(400), epoch=1, lease_id=lease_id,
                  offsets=[*offsets], ids=[*map(id_of, due_ms, marks)], marks=marks,
                  attempts=[*attempts], fired_at_ms=[self.ms(fired) for _, fired in times],
                  due_ms=due_ms, group_id=self._group(life))  # fmt: skip


def sought() -> Sought:
    """Return the story with lies about groups' lives."""
    story = Sought()
    del story.later["back"][3]
    del story.later["ahead"][7]
    del story.later["anew"][0]
    story.later["back"][4] = [2, 3]
    story.later["anew"][1] = [1, 1]
    story.unlogged = {5}
    story.told_lives["back"] = 6
    story.to["ahead"] = 5
    story.deletions.append("gone")
    return story


FIRST_MS = 100_000
"""When timers fire: long after the first leader began."""


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
            states.record("n1", index, at_ms=1, digest="0")
        states.record("n2", last + 7, at_ms=1, digest="1")
    for each in (run.producer, run.consumer):
        each.close()
    for path in [*run.run.histories.iterdir()]:
        assert [*map(str, check(path))] == []
        path.rename(path.with_name(f"{SIGNS}{path.name}"))
    return run.run


DUE_MS = {1: 100, 2: 100, 3: 900, 4: 300, 5: 300, 6: 300}
"""Of the timers, by their numbers, from when the story begins."""


def said(log: Log, topic: int, **fields: Any) -> None:
    policy = ScopePolicy(**fields)
    log.entry(EntryKind.POLICY, encode_policy(Scope("", TopicId(topic)), policy))


class Lived(Story):
    """A story in which topic "lived" is deleted, and made again.

    Its first life: 1 is acked, 2 was handed out, 3 pending. Its second one: 4, 5 and 6, all acked.
    """

    def __init__(self) -> None:
        self.quotas = {"pending_max": 3, "pending_bytes_max": 24, "ready_max": 1}
        """Of the second life, as it begins."""
        self.policies = 1
        self.scopes = ["lived"]
        self.told_pending = 1
        self.acked = [0, 1, 2]
        """In the second life, by the log."""
        self.given = {4: 0, 5: 1, 6: 2}
        """Number -> offset, in the second life, by the consumer."""

    def write(self) -> None:
        run, log = self.run, self.log
        first = log.topic("lived")
        self._schedule(first, [1, 2, 3], 10)
        group = log.group(first, "g")
        log.fire(self.ms(120))
        log.reserve(first, group, 2)
        log.ack(first, group, [0], at_ms=self.ms(130))
        log.delete_topic(first, at_ms=self.ms(140))
        second = log.topic("lived")
        said(log, second, **self.quotas)
        anew = log.group(second, "g")
        self._schedule(second, [4, 5, 6], 150)
        log.fire(self.ms(310))
        log.reserve(second, anew, 3)
        log.ack(second, anew, self.acked, at_ms=self.ms(330))
        with ToldHistory(run, "lived-producer") as h:
            for numbers, at_ms in (([1, 2, 3], 9), ([4, 5, 6], 149)):
                h.schedule([*map(self.mark, numbers)], ids=[*map(self.id, numbers)],
                           due_ms=[*map(self.due_ms, numbers)], topic="lived",
                           span_ms=self.span_ms(at_ms, at_ms + 3), outcome=OK)  # fmt: skip
            h.change("delete", span_ms=self.span_ms(139, 141), outcome=OK, topic="lived",
                     topic_id=int(first), pending=self.told_pending)  # fmt: skip
            for name in self.scopes * self.policies:
                h.change("policy", span_ms=self.span_ms(142, 144), outcome=OK, topic=name,
                         said='{"pending_max": 3}')  # fmt: skip
            for result, at_ms in (("NOT_FOUND", 145), ("ALREADY_FIRED", 1145)):
                h.change("cancel", ids=[self.id(3)], results=[result],
                         span_ms=self.span_ms(at_ms, at_ms + 1), outcome=OK)  # fmt: skip
        with ToldHistory(run, "lived-consumer") as h:
            h.open("lived", "g", start_ms=self.start_ms)
            self._deliver(h, 1, {1: 0, 2: 1}, 120)
            self._ack(h, 1, [0])
            self._deliver(h, 2, self.given, 310)
            self._ack(h, 2, [0, 1, 2])

    def due_ms(self, number: int) -> int:
        return self.ms(DUE_MS[number])

    def id(self, number: int) -> str:
        return id_of(self.due_ms(number), self.mark(number))

    def _schedule(self, topic: TopicId, numbers: list[int], at_ms: int) -> None:
        rows = [(self.due_ms(number), self.mark(number)) for number in numbers]
        self.log.schedule(topic, rows, at_ms=self.ms(at_ms))

    def _deliver(self, h: ToldHistory, lease_id: int, given: dict[int, int], at_ms: int) -> None:
        h.deliver("lived", "g", received_ms=self.ms(at_ms + 1), epoch=1, lease_id=lease_id,
                  offsets=[*given.values()], ids=[*map(self.id, given)],
                  marks=[*map(self.mark, given)], attempts=[1] * len(given),
                  fired_at_ms=[self.ms(at_ms)] * len(given),
                  due_ms=[*map(self.due_ms, given)])  # fmt: skip

    def _ack(self, h: ToldHistory, lease_id: int, offsets: list[int]) -> None:
        h.ack("lived", "g", offsets, results=["ACKED"] * len(offsets), epoch=1, lease_id=lease_id,
              span_ms=self.span_ms(6_500, 6_510), outcome=OK)  # fmt: skip


def lied() -> Lived:
    """Return the story with lies about the lives of a topic, its quotas and policies."""
    lived = Lived()
    lived.acked = [0, 1]  # an ack counts in the other life
    lived.given = {4: 0, 3: 1, 6: 2}  # the timer that was dropped comes, in the place of 5
    lived.quotas |= {"pending_max": 2, "pending_bytes_max": 23}
    lived.quotas |= {"ready_max": 0, "ready_bytes_max": 0}
    lived.told_pending = 2
    lived.policies = 2  # each is told twice
    lived.scopes = ["lived", "default/", "/"]
    return lived
