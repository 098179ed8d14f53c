"""The audit of redrives, seeks, and groups that are deleted: honest ones, and planted lies."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

from chaos.audit import job
from chaos.history import history
from chaos.history.history import OpOutcome, RunFolder
from chaos.history.history_check import check
from tests.chaos.world import Log, id_of, write_log
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.model.units import GroupId, TopicId

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

OK = OpOutcome.OK
LEASE = {"epoch": 1}


def save(run: RunFolder, log: Log) -> None:
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=900)
    for node in ("n1", "n2", "n3"):
        write_log(run.root / node / "log", log.frames)


def schedule(h: history.History, marks: Iterable[int], due_ms: int, at_ms: int) -> None:
    marks = [*marks]
    h.schedule(marks, ids=[id_of(due_ms, m) for m in marks], due_ms=[due_ms] * len(marks),
               topic="t", span_ms=(at_ms, at_ms + 1), outcome=OK)  # fmt: skip


def ack(h: history.History, group: str, lease_id: int, offsets: list[int]) -> None:
    h.ack("t", group, offsets, results=["ACKED"] * len(offsets), span_ms=(6_500, 6_510),
          outcome=OK, epoch=1, lease_id=lease_id)  # fmt: skip


def audited(spark: SparkSession, run: RunFolder, *, sift: bool) -> dict[str, Any]:
    """Return the summary. Tests say all that it accuses: of what is honest in a run, nothing."""
    assert [str(p) for path in run.histories.iterdir() for p in check(path)] == []
    return job.audit(spark, run, sift=sift).summary


# ---- dead letters, redriven


DEAD = (2, 3, 4, 5, 6, 7)
"""Marks of those that die in the group "g" of the topic "t": offsets 1 to 6. What the group
"h" is given is what the log has."""


class Redriven:
    """A run in which six of seven messages die in one of two groups, and are redriven."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root)
        self.redriven = {mark: mark for mark in DEAD}
        """Letter -> the mark of what is made of it."""
        self.elsewhere = 0
        """So many of the last ones go to another topic."""
        self.told = 6
        self.unseen = set[int]()
        """Marks of what is redriven, and not given to g."""
        self.twice = set[int]()
        """And given again, as another message."""

    def write(self) -> RunFolder:
        log = Log()
        log.epoch(1)
        topic = log.topic("t")
        g, h = log.group(topic, "g"), log.group(topic, "h")
        log.schedule(topic, [(100, mark) for mark in range(1, 8)], at_ms=10)
        log.fire(120)
        log.reserve(topic, g, 20)
        log.reserve(topic, h, 20)
        log.ack(topic, g, [0], at_ms=130)
        log.move(topic, g, range(1, 7), "t.g.dead", "dead-letters", marks=DEAD, at_ms=140)
        dead, letters = TopicId(2), GroupId(3)  # seqs 8 to 13
        log.reserve(dead, letters, 6)
        letters_of = [*self.redriven]
        home = letters_of[: len(letters_of) - self.elsewhere]
        marks = [self.redriven[letter] for letter in home]
        log.move(dead, letters, [letter - 2 for letter in home], "t", "", marks=marks, at_ms=200)
        for letter in letters_of[len(home) :]:  # seqs from 14 on
            log.move(dead, letters, [letter - 2], "u", "", marks=[letter], at_ms=200)
        offsets = [*range(7, 7 + len(home))]
        log.ack(topic, g, offsets, at_ms=300)
        log.ack(topic, h, [*range(7), *offsets], at_ms=300)
        save(self.run, log)
        again = [(14 + at, mark, 7 + at) for at, mark in enumerate(marks)]
        with history.History(self.run, "producer") as each:
            schedule(each, range(1, 8), 100, 9)
            each.change("redrive", span_ms=(199, 201), outcome=OK, topic="t.g.dead",
                        changed=self.told)  # fmt: skip
        for group in ("g", "h"):
            unseen, twice = (self.unseen, self.twice) if group == "g" else (set[int](), set[int]())
            with history.History(self.run, group) as each:
                each.open("t", group, start_ms=0)
                firsts = [(mark, mark, mark - 1) for mark in range(1, 8)]
                self._deliver(each, group, 1, 100, 120, firsts)
                ack(each, group, 1, [0] if group == "g" else [*range(7)])
                seen = [row for row in again if row[1] not in unseen]
                self._deliver(each, group, 2, 1, 200, seen)
                ack(each, group, 2, [offset for *_, offset in seen])
                more = [
                    (seq + 50, mark, offset + 50) for seq, mark, offset in again if mark in twice
                ]
                if more:
                    self._deliver(each, group, 3, 1, 200, more)
        return self.run

    def _deliver(
        self, h: history.History, group: str, lease_id: int, due_ms: int, at_ms: int,
        rows: list[tuple[int, int, int]],
    ) -> None:  # fmt: skip
        seqs, marks, offsets = zip(*rows, strict=True)
        h.deliver("t", group, received_ms=at_ms + 1, epoch=1, lease_id=lease_id, group_id=1,
                  offsets=[*offsets], ids=[id_of(due_ms, seq) for seq in seqs], marks=[*marks],
                  attempts=[1] * len(rows), fired_at_ms=[at_ms] * len(rows),
                  due_ms=[due_ms] * len(rows))  # fmt: skip


def test_letters_that_are_redriven_are_messages_of_their_own_and_lies_about_them_are_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    run = Redriven(tmp_path)
    del run.redriven[6]  # it stays where nobody looks
    run.redriven[5] = 2  # another one's payload
    run.elsewhere = 1  # the last
    run.unseen, run.twice = {3}, {4}
    found = audited(spark, run.write(), sift=True)
    wanted = {"lost": 2, "phantom": 1, "redrive_untrue": 1, "carried_untrue": 2}
    wanted["moved_early"] = 6  # of a group without a limit
    assert found["violations"] == wanted, (found["offenders"], found["rule_offenders"])
    assert found["verdicts"] == {"ok": 7, "carried": 8, "lost": 2, "phantom": 1}
    assert (found["scheduled"], found["fired"], found["delivered"]) == (7, 7, 22)
    assert {"op": "redrive", "by": "name", "on_conflict": "", "result": "changed", "n": 6} in found[
        "operations"
    ]
    named = {(row["verdict"], row["mark"], row["topic"]) for row in found["offenders"]}
    assert named == {("lost", 3, "t"), ("lost", 6, "t.g.dead"), ("phantom", 4, None)}
    redrive, carried, elsewhere = found["rule_offenders"]  # these by seq
    assert (carried["mark"], carried["was_mark"], carried["topic"]) == (2, 5, "t")
    assert (elsewhere["mark"], elsewhere["topic"], elsewhere["was_from"]) == (7, "u", "t")
    assert (redrive["told"], redrive["logged"]) == (6, 5)


# ---- groups that are sought, or deleted


class Sought:
    """A run of one topic, which keeps all, with eight messages; 7 and 8 come later.

    "back" has acked all of six, and is sought to offset 2; "ahead" has acked two, and is sought to
    offset 6; "anew" has acked all of six, is deleted, and made again from the start; "gone" was
    given one, and is deleted.
    """

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root)
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

    def write(self) -> RunFolder:
        log = Log()
        log.epoch(1)
        topic = log.topic("t")
        policy = ScopePolicy(retention_ms=60_000)
        log.entry(EntryKind.POLICY, encode_policy(Scope("", topic), policy))
        for name in ("back", "ahead", "anew", "gone"):  # groups 1 to 4
            log.reserve(topic, log.group(topic, name), 6)
        log.schedule(topic, [(100, mark) for mark in range(1, 7)], at_ms=10)
        log.fire(120)
        log.ack(topic, GroupId(1), range(6), at_ms=130)
        log.ack(topic, GroupId(2), range(2))
        log.ack(topic, GroupId(3), range(6))
        log.op(GroupOp(Op.SEEK, topic, GroupId(1), np.array([2], np.uint64)), 200)
        log.op(GroupOp(Op.SEEK, topic, GroupId(2), np.array([6], np.uint64)), 200)
        log.op(GroupOp(Op.DELETE, topic, GroupId(3), np.zeros(0, np.uint64)), 200)
        log.op(GroupOp(Op.DELETE, topic, GroupId(4), np.zeros(0, np.uint64)), 200)
        log.group(topic, "anew")
        log.schedule(topic, [(300, 7), (300, 8)], at_ms=250)
        log.fire(310)
        for number, offsets in ((5, {*range(2, 8)} - self.unlogged), (6, {6, 7}), (7, range(8))):
            log.reserve(topic, GroupId(number), 8)
            log.ack(topic, GroupId(number), sorted(offsets), at_ms=330)
        save(self.run, log)
        with history.History(self.run, "producer") as h:
            schedule(h, range(1, 7), 100, 9)
            schedule(h, (7, 8), 300, 249)
            for name, number in self.told_lives.items():
                to = {"to_offset": self.to[name]} if name in self.to else {}
                h.change("seek", span_ms=(199, 201), outcome=OK, topic="t", group=name,
                         group_id=number, **to)  # fmt: skip
            for name in self.deletions:
                h.change("delete_group", span_ms=(199, 201), outcome=OK, topic="t", group=name)
        self._consume("back", (1, range(6), range(6)), 5)
        self._consume("ahead", (2, range(3), range(2)), 6)
        self._consume("anew", (3, range(6), range(6)), 7)
        self._consume("gone", (4, range(1), ()), None)
        return self.run

    def _consume(
        self, group: str, first: tuple[int, Iterable[int], Iterable[int]], last: int | None
    ) -> None:
        number, given, acked = first
        with history.History(self.run, group) as h:
            h.open("t", group, start_ms=0)
            self._deliver(h, group, number, 1, [(offset, 1) for offset in given])
            if acked:
                ack(h, group, 1, [*acked])
            rows = self.later.get(group, {})
            for turn in range(2):  # a lease has a message once
                again = [
                    (o, attempts[turn]) for o, attempts in rows.items() if turn < len(attempts)
                ]
                if last is not None and again:
                    self._deliver(h, group, last, 2 + turn, again)
            if last is not None:
                ack(h, group, 2, [*rows])

    def _deliver(
        self, h: history.History, group: str, life: int, lease_id: int, rows: list[tuple[int, int]]
    ) -> None:
        offsets, attempts = zip(*rows, strict=True)
        times = [(100, 120) if offset < 6 else (300, 310) for offset in offsets]
        ids = [id_of(due, offset + 1) for offset, (due, _) in zip(offsets, times, strict=True)]
        h.deliver("t", group, received_ms=400, epoch=1, lease_id=lease_id, offsets=[*offsets],
                  ids=ids, marks=[offset + 1 for offset in offsets], attempts=[*attempts],
                  fired_at_ms=[fired for _, fired in times], due_ms=[due for due, _ in times],
                  group_id=life)  # fmt: skip


def test_each_life_of_a_group_owes_what_lies_from_its_start_on_and_lies_about_it_are_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    run = Sought(tmp_path)
    del run.later["back"][3]
    del run.later["ahead"][7]
    del run.later["anew"][0]
    run.later["back"][4] = [2, 3]
    run.later["anew"][1] = [1, 1]
    run.unlogged = {5}
    run.told_lives["back"] = 6
    run.to["ahead"] = 5
    run.deletions.append("gone")
    found = audited(spark, run.write(), sift=False)
    assert found["violations"] == {
        "lost": 3, "acked_again": 1, "unmarked_redelivery": 1, "ack_lost": 1,
        "seek_untrue": 2, "group_delete_lost": 1,
    }, (found["offenders"], found["rule_offenders"])  # fmt: skip
    assert found["verdicts"]["ok"] == 2
    counts = {row["op"]: row["n"] for row in found["operations"]}
    assert counts == {"seek": 2, "delete_group": 3}
    assert {(row["verdict"], row["mark"]) for row in found["offenders"]} == {
        ("lost", 4), ("lost", 8), ("lost", 1), ("acked_again", 5), ("unmarked_redelivery", 2),
        ("ack_lost", 6),
    }  # fmt: skip
    sought = [row for row in found["rule_offenders"] if row.get("to_offset") is not None]
    assert {(row["group"], row["to_offset"], row["start_offset"]) for row in sought} == {
        ("back", 2, None), ("ahead", 5, 6),
    }  # fmt: skip
