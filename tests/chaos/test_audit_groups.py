"""The audit of redrives, seeks, and groups that are deleted: planted lies."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from chaos.history.history import OpOutcome
from tests.chaos.told_history import ToldHistory
from tests.chaos.told_lies import Audited
from tests.chaos.world import Story, id_of
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import GroupId, TopicId

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

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


# ---- dead letters, redriven


DEAD = (2, 3, 4, 5, 6, 7)
"""Numbers of those that die in the group "g" of the topic "home": offsets 1 to 6. What the group
"h" is given is what the log has."""


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


LETTERS_VIOLATIONS = {
    "lost": 2, "phantom": 1, "redrive_untrue": 1, "carried_untrue": 2,
    "moved_early": 6,  # of a group without a limit
}  # fmt: skip


def test_letters_that_are_redriven_are_messages_of_their_own_and_lies_about_them_are_found(
    audited: Audited,
) -> None:
    story = audited.stories["redriven"]
    assert audited.named(story) == {("lost", 3, "home"), ("lost", 6, "home.g.dead"),
                                    ("phantom", 4, None)}  # fmt: skip
    found = audited.summary
    assert {"op": "redrive", "by": "name", "on_conflict": "", "result": "changed", "n": 6} in found[
        "operations"
    ]
    carried, elsewhere = audited.rules("carried_untrue")  # these by seq
    assert (story.number(carried["mark"]), story.number(carried["was_mark"])) == (2, 5)
    assert carried["topic"] == "home"
    assert story.number(elsewhere["mark"]) == 7
    assert (elsewhere["topic"], elsewhere["was_from"]) == ("elsewhere", "home")
    [redrive] = audited.rules("redrive_untrue")
    assert (redrive["told"], redrive["logged"]) == (6, 5)


# ---- groups that are sought, or deleted


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


LIVES_VIOLATIONS = {
    "lost": 3, "acked_again": 1, "unmarked_redelivery": 1, "ack_lost": 1, "seek_untrue": 2,
    "group_delete_lost": 1,
}  # fmt: skip


def test_each_life_of_a_group_owes_what_lies_from_its_start_on_and_lies_about_it_are_found(
    audited: Audited,
) -> None:
    assert audited.named(audited.stories["sought"]) == {
        (verdict, number, "sought") for verdict, number in (
            ("lost", 4), ("lost", 8), ("lost", 1), ("acked_again", 5), ("unmarked_redelivery", 2),
            ("ack_lost", 6),
        )
    }  # fmt: skip
    counts = {row["op"]: row["n"] for row in audited.summary["operations"]}
    assert (counts["seek"], counts["delete_group"]) == (2, 3)
    untrue = [(row["group"], row["to_offset"], row["start_offset"])
              for row in audited.rules("seek_untrue")]  # fmt: skip
    assert sorted(untrue) == [("ahead", 5, 6), ("back", 2, None)]
    [deleted] = audited.rules("group_delete_lost")
    assert (deleted["topic"], deleted["group"]) == ("sought", "gone")
