"""Topics that are deleted and created again, in random logs: the machine's replicas and its model.

The programs are those of tests/timer/test_machine.py, with other topics: two names that mean a new
topic after each deletion, and as a third the last deleted topic.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timer.machine_world import KEYS, World, offsets_of, step_of
from tests.timer.machines import START_MS, keys_of, part_of, queue_of
from timer.entries.payloads import Op
from timer.model.columns import OnConflict, Part
from timer.model.timer_errors import TopicDeletedError
from timer.model.units import TopicId
from timer.state.apply_results import ALREADY_FIRED, NOT_FOUND


@dataclass
class Deleting(World):
    """The world with topics that are deleted and created again."""

    ids: dict[int, int] = field(default_factory=lambda: {1: 1, 2: 2})
    dropped: dict[int, int] = field(default_factory=dict)
    """Seq -> topic, of the timers that were pending at the deletion of their topic."""
    gone: list[int] = field(default_factory=list)

    def delete(self, name: int) -> None:
        """Delete a topic, and create another one with its name."""
        topic, model = self.ids[name], self.model
        mine = {seq for seq in model.pending if model.timers[seq][0] == topic}
        dropped, messages, _ = self.apply(self.log.delete_topic(topic))
        assert dropped == len(mine)
        assert messages <= len(model.queues.get(topic, []))
        assert self.apply(self.log.delete_topic(topic)) == (0, 0, ())
        model.pending -= mine
        self.dropped |= dict.fromkeys(mine, topic)
        model.queues.pop(topic, None)
        self.gone.append(topic)
        self.ids[name] = self.apply(self.log.topic("ab"[name - 1]))
        assert self.ids[name] > topic

    def late(self, offsets: list[int]) -> None:
        """Append entries that name a deleted topic; they have no effect on any replica."""
        if not self.gone:
            return
        topic, log = self.gone[-1], self.log
        [answer] = self.apply(log.schedule(part_of([(topic, self.due(10), b"late")])))[0]
        assert answer is TopicDeletedError
        for entry in (
            log.create_group(topic, "late"),
            log.op(Op.ACK, topic, 1, offsets),
            log.nack(topic, 1, offsets, log.now_ms),
        ):
            assert self.apply(entry) == ["NoEffectApplied"]
        for machine in (self.leader, self.follower):
            rows = machine.store.find_keys(*_named(topic))
            assert not rows["seq"].any()

    def judge_dropped(self, picks: list[int]) -> None:
        """Check that no cancel claims to have ended a timer that ended with its topic."""
        seqs = sorted(self.dropped)
        if seqs:
            mine = [seqs[pick % len(seqs)] for pick in picks]
            targets = [(self.model.timers[seq][1], seq) for seq in mine]
            answers, _ = self.apply(self.log.cancel(targets))
            for (due, _), answer in zip(targets, answers, strict=True):
                past = due <= self.model.last_read_ms
                assert answer == NOT_FOUND or (past and answer == ALREADY_FIRED)

    # ---- the steps of the world, with the current ids

    def part(
        self, producer: int, step: int, mode: OnConflict, timers: list[tuple[int, int, int, bytes]]
    ) -> Part:
        mine = [(self.ids[name], delta, size, key) for name, delta, size, key in timers]
        return super().part(producer, step, mode, mine)

    def picked(self, picks: list[int]) -> list[tuple[int, int]]:
        mine = [each for each in super().picked(picks) if each[1] not in self.dropped]
        return mine or [(START_MS, self.model.next_seq)]

    def cancel_keys(self, names: list[tuple[int, bytes]]) -> None:
        super().cancel_keys([(self.ids[name], key) for name, key in names])

    def reschedule_keys(self, names: list[tuple[int, bytes]], deltas: list[int]) -> None:
        super().reschedule_keys([(self.ids[name], key) for name, key in names], deltas)

    def topic_ids(self) -> list[int]:
        return sorted(self.ids.values())

    def look_in(self, topic: int, prefix: bytes, ahead_ms: int, rows_max: int) -> None:
        super().look_in(self.ids[topic], prefix, ahead_ms, rows_max)

    def group(self, topic: int, latest: bool) -> None:
        super().group(self.ids[topic], latest)

    def check_end(self) -> None:
        self.checkpoint()
        self.compare()
        self.look_for_keys()
        self.fire(10**9, 16_384, 1 << 20, 16)
        self.checkpoint()
        self.compare()
        assert not self.model.pending
        assert sorted(self.leader.topics) == self.topic_ids()
        for topic, seqs in self.model.queues.items():
            begin = self.leader.topics[TopicId(topic)].queue.begin
            expected = [(o, s, self.model.timers[s][2]) for o, s in enumerate(seqs)]
            assert queue_of(self.leader, topic) == expected[begin:]
        fired, ended = {*self.model.fired_at}, {*self.model.cancelled_at}
        assert fired | ended | {*self.dropped} == {*self.model.timers}
        assert not {*self.dropped} & (fired | ended)
        assert self.leader.counts.dropped == len(self.dropped)


def _named(topic: int) -> tuple[Any, Any]:
    keys = keys_of([(topic, key) for key in KEYS])
    return keys.topic, keys.key


deletion_of = st.one_of(
    st.tuples(st.just(Deleting.delete), st.integers(1, 2)),
    st.tuples(st.just(Deleting.delete), st.integers(1, 2)),
    st.tuples(st.just(Deleting.late), offsets_of),
    st.tuples(
        st.just(Deleting.judge_dropped), st.lists(st.integers(0, 99), min_size=1, max_size=4)
    ),
)
program_of = st.lists(st.one_of(step_of, step_of, step_of, deletion_of), min_size=20, max_size=50)


def play(program: list[tuple[Any, ...]]) -> None:
    world = Deleting()
    for step, *values in program:
        getattr(world, step.__name__)(*values)  # ours, where we have one
    world.check_end()


@settings(derandomize=True, deadline=None, max_examples=25)
@given(program_of)
def test_replicas_and_model_agree_though_topics_are_deleted(
    program: list[tuple[Any, ...]],
) -> None:
    play(program)


@pytest.mark.long  # a program takes a tenth of a second
@settings(derandomize=True, deadline=None, max_examples=150)
@given(program_of)
def test_replicas_and_model_agree_in_many_programs_with_deletions(
    program: list[tuple[Any, ...]],
) -> None:
    play(program)
