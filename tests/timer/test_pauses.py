"""Pauses: held timers, changes of held timers, and their release.

Random logs against a naive model, on replicas with all allowed differences; and single cases.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.seeds import seeds
from tests.timer.machine_world import KEYS, World
from tests.timer.machines import (
    START_MS,
    Model,
    catch_up,
    check_counts,
    keys_of,
    pages,
    part_of,
    queue_of,
    tallied,
    u64,
)
from tests.timer.pausing import Paused, settle
from timer.entries import payloads
from timer.entries.payloads import Ids, Op
from timer.entries.policies import CATCH_UPS, CLUSTER, Scope
from timer.model.columns import OnConflict
from timer.model.feature_level import LEVEL_OF_BOUNDED_SWEEPS
from timer.model.firing_order import Position
from timer.model.timer_id import SEQ_MAX
from timer.model.units import TopicId, UnixMs
from timer.pending.memory.held_rows import HELD_OFFSET_MS, HeldTiers
from timer.pending.read_view import Filter
from timer.pending.runs.read_window import SLICE_ROWS_MIN
from timer.state import pauses
from timer.state.apply_results import (
    ALREADY_CANCELLED,
    ALREADY_FIRED,
    CANCELLED,
    DROPPED,
    NOT_FOUND,
)
from timer.state.cancel_outcomes import HORIZON_MS

Place = tuple[int, int]
BEGIN: Place = (-1, SEQ_MAX)


@dataclass
class Held(Model):
    """The model with pauses: a pending timer at or before `position` is held."""

    position: Place = (0, SEQ_MAX)
    said: dict[str, tuple[bool | None, str | None]] = field(default_factory=dict)
    """Policy fields of "cluster", "default", and of topics by their id as text."""
    paused: set[int] = field(default_factory=set)
    releases: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    last: dict[int, Place] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    together: int = 16
    apart_max: int = 1 << 18
    apart_bytes: int = 64 << 20
    bounded: bool = False
    """A portion has rows of some topics: from level 2 on."""
    swept: Place | None = None
    dropped_at: dict[int, int] = field(default_factory=dict)

    def place(self, seq: int) -> Place:
        return self.timers[seq][1], seq

    @property
    def held(self) -> list[Place]:
        return sorted(p for p in map(self.place, self.pending) if p <= self.position)

    @property
    def held_bytes(self) -> int:
        return sum(len(self.timers[seq][2]) for _, seq in self.held)

    @property
    def apart(self) -> bool:
        return len(self.held) <= self.apart_max and self.held_bytes <= self.apart_bytes

    def say(self, scope: str, paused: bool | None, catch_up: str | None, now_ms: int) -> None:
        self.said[scope] = paused, catch_up
        for topic in (1, 2):
            said = [self.said.get(s, (None, None)) for s in ("cluster", "default", str(topic))]
            pauses = ([each for each, _ in said if each is not None] or [False])[-1]
            mode = ([each for _, each in said if each is not None] or ["all"])[-1]
            if pauses == (topic in self.paused):
                continue
            self.releases.pop(topic, None)
            self.last.pop(topic, None)
            if pauses:
                self.paused.add(topic)
            else:
                self.paused.remove(topic)
                holds = any(self.timers[seq][0] == topic for _, seq in self.held)
                if holds or mode != "all":
                    self.releases[topic] = mode, max(now_ms, self.last_read_ms), self.next_seq
                if holds:
                    self.waiting.add(topic)
        self.begin()

    def begin(self) -> None:
        self.waiting &= self.releases.keys()
        if self.swept in (None, BEGIN) or self.waiting == self.releases.keys():
            self.swept = BEGIN if self.releases else None
            self.admit(self.together - len(self.releases.keys() - self.waiting))

    def admit(self, count: int) -> None:
        turns = sorted(self.waiting, key=lambda topic: (self.releases[topic][1], topic))
        count = max(count, 0) if self.apart else len(turns)
        self.waiting -= {*turns[:count]}

    def _begin(self, seq: int, timer: tuple[int, int, bytes], key: bytes, now_ms: int) -> None:
        if timer[0] not in self.paused | self.releases.keys():
            super()._begin(seq, timer, key, now_ms)
            return
        self.timers[seq], self.keys[seq] = timer, key
        self.weights[seq] = len(timer[2]) + len(key)
        self.pending.add(seq)

    def fire(self, fire: payloads.Fire, now_ms: int) -> tuple[list[int], bool]:
        due = sorted(
            place
            for place in map(self.place, self.pending)
            if place > self.position and place[0] <= fire.read_time_ms
        )
        taken, topics = list[Place](), set[int]()
        for place in self._fitting(due, fire):
            topics.add(self.timers[place[1]][0])
            if len(topics) > fire.topics_max:
                break
            taken.append(place)
        limited = len(taken) < len(due)
        self.position = taken[-1] if limited else (fire.read_time_ms, SEQ_MAX)
        self.last_read_ms = self.position[0]
        holding = self.paused | self.releases.keys()
        fired = [seq for _, seq in taken if self.timers[seq][0] not in holding]
        for seq in fired:
            self._fire(seq, now_ms)
        return fired, limited

    def _fitting(self, places: list[Place], fire: payloads.Fire) -> list[Place]:
        size = 0
        for number, (_, seq) in enumerate(places):
            size += self.weights[seq]
            if number == fire.rows_max or (number and size > fire.bytes_max):
                return places[:number]
        return places

    def sweep(self, fire: payloads.Fire, now_ms: int) -> bool:
        if not self.releases:
            return False
        takes_part = self.releases.keys() - self.waiting
        rest = [place for place in self.held if place > (self.swept or BEGIN)]
        if self.apart:
            rest = [place for place in rest if self.timers[place[1]][0] in takes_part]
        few = max(fire.topics_max // 2, 1) if self.bounded else 2
        portion = self._of_few_topics(self._fitting(rest, fire), few, takes_part)
        for topic in sorted({self.timers[seq][0] for _, seq in portion} & takes_part):
            for place in portion:
                if self.timers[place[1]][0] == topic:
                    self._let_go(topic, place, now_ms)
        self.swept = portion[-1] if portion else self.swept or BEGIN
        if len(portion) < len(rest):
            return True
        again, early = bool(self.waiting), False
        through = [t for t in takes_part if self.position >= (self.releases[t][1], SEQ_MAX)]
        lasts = sorted(topic for topic in through if topic in self.last)
        for topic in lasts[:few]:
            self._decide(topic, now_ms)
        if len(lasts) > few:
            return True
        for topic in takes_part:
            if topic not in through:
                early = True
            elif any(self.timers[seq][0] == topic for _, seq in self.held):
                again = True
            else:
                del self.releases[topic]
        self.swept = BEGIN if again else self.swept if early else None
        if again:
            self.admit(self.together)
        self.begin()
        return again

    def _of_few_topics(self, places: list[Place], few: int, takes_part: set[int]) -> list[Place]:
        topics = set[int]()
        for number, (_, seq) in enumerate(places):
            topics |= {self.timers[seq][0]} & takes_part
            if len(topics) > few:
                return places[:number]
        return places

    def _let_go(self, topic: int, place: Place, now_ms: int) -> None:
        mode, until_ms, seq_end = self.releases[topic]
        overdue = place[0] <= until_ms and place[1] < seq_end
        if mode == "all" or not overdue:
            if place[0] > until_ms:
                self._decide(topic, now_ms)
            self._fire(place[1], now_ms)
        elif mode == "drop":
            self._drop(place[1], now_ms)
        else:
            before = self.last.get(topic)
            if before is not None and before < place and before[1] in self.pending:
                self._drop(before[1], now_ms)
            self.last[topic] = place

    def _decide(self, topic: int, now_ms: int) -> None:
        place = self.last.pop(topic, None)
        if place is not None and place[1] in self.pending:
            self._fire(place[1], now_ms)

    def _drop(self, seq: int, now_ms: int) -> None:
        self.pending.remove(seq)
        self.dropped_at[seq] = now_ms

    def cancel(self, targets: Any, now_ms: int) -> list[set[int]]:
        results = super().cancel(targets, now_ms)
        for at, (_, seq) in enumerate(targets):
            if seq in self.dropped_at:
                fresh = now_ms - self.dropped_at[seq] <= HORIZON_MS
                results[at] = {DROPPED} if fresh else {DROPPED, NOT_FOUND}
        return results


class PausingWorld(World):
    """Replicas and the model, with topics that are paused and resumed."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Held = Held(answers=self.model.answers)

    def say(self, scope: str, paused: bool | None, catch_up: str | None) -> None:
        of = {"cluster": CLUSTER, "default": Scope("default")}
        where = of.get(scope) or Scope("", TopicId(int(scope)))
        said = {"paused": paused, "catch_up": catch_up}
        self.model.say(scope, paused, catch_up, self.log.now_ms)
        self.apply(self.log.policy(where, **{k: v for k, v in said.items() if v is not None}))

    def fire(self, ahead_ms: int, *limits: int) -> None:
        self.log.now_ms += ahead_ms
        model, now_ms = self.model, self.log.now_ms
        read_ms = UnixMs(max(now_ms, model.last_read_ms))
        fire = payloads.Fire(read_ms, *limits)
        queues = {topic: len(model.queues.get(topic, [])) for topic in (1, 2)}
        dropped = {*model.dropped_at}
        fired, limited = model.fire(fire, now_ms)
        more = model.sweep(fire, now_ms)
        answer = self.apply(self.log.fire(*fire))
        assert answer[1] == (limited or more)
        moved: dict[int, list[int]] = {1: [], 2: []}
        for topic, seqs in (*answer[0], *(answer[2] if len(answer) > 2 else ())):
            moved[topic] += seqs
        assert moved == {t: model.queues.get(t, [])[begin:] for t, begin in queues.items()}
        assert {s for _, seqs in answer[0] for s in seqs} == {*fired}
        gone = {s for _, seqs in (answer[3] if len(answer) > 2 else ()) for s in seqs}
        assert gone == {*model.dropped_at} - dropped
        assert self.leader.last_read_time_ms == model.last_read_ms
        assert self.leader.store.held == len(model.held)
        assert self.leader.held_bytes == model.held_bytes

    def random_step(self, draw: random.Random) -> None:
        deltas = [-(10**13), -1000, 0, 0, 10, 10, 20, 50, 500, 60_000]
        topic, names = draw.randint(1, 2), [(1, KEYS[0]), (2, KEYS[0]), (1, KEYS[1])]
        picks = [draw.randrange(200) for _ in range(3)]
        timers = [
            (draw.randint(1, 2), draw.choice(deltas), draw.randint(0, 3), draw.choice([b"", *KEYS]))
            for _ in range(draw.randint(1, 5))
        ]
        rows_max, topics_max = draw.choice([1, 2, 3, 16_384]), draw.choice([1, 16])
        limits = rows_max, draw.choice([0, 3, 100, 1 << 20]), topics_max
        match draw.randrange(16):
            case 0 | 1 | 2:
                self.schedule([(0, 1, draw.choice([*OnConflict]), timers)])
            case 3 | 4 | 5:
                self.fire(draw.choice([0, 10, 25, 600]), *limits)
            case 6 | 7:
                scope = draw.choice(["1", "1", "2", "default", "cluster"])
                flag = draw.choice([True, True, False, False, None])
                self.say(scope, flag, draw.choice([*CATCH_UPS, None]))
            case 8:
                self.cancel(picks)
            case 9:
                self.reschedule(picks, [draw.choice(deltas), draw.choice(deltas)])
            case 10:
                draw.choice([self.cancel_keys, self.look_for])(draw.sample(names, 2))
            case 11:
                self.reschedule_keys(draw.sample(names, 2), [draw.choice(deltas)])
            case 12:
                self.look_in(topic, draw.choice([b"", b"a"]), 10**9, draw.choice([1, 3, 1000]))
            case 13:
                self.advance_flush(draw.choice([3, 3, 1, 2]))
            case 14:
                self.restart(draw.randrange(9))
            case _:
                draw.choice([self.checkpoint, self.epoch, self.compare])()
                self.toggle_leading(draw.random() < 0.5)

    def look_for(self, _: object) -> None:
        self.look_for_keys()

    def look_in(self, topic: int, prefix: bytes, ahead_ms: int, rows_max: int) -> None:
        catch_up(self.engine, self.log)
        mine = sorted(place for place in map(self.model.place, self.model.pending))
        mine = [place for place in mine if self.model.timers[place[1]][0] == topic]
        keyed = [each for each in mine if self.model.keys[each[1]].startswith(prefix)]
        low = (mine[len(mine) // 2][0] if mine else 0) - 1
        for machine in (self.leader, self.follower, self.engine.machine):
            cut = machine.store.read_view()
            for begin, end in ((0, 10**14), (low, 10**14), (0, low + 1)):
                what = Filter(topic=topic, due_from_ms=begin, due_to_ms=end, key_prefix=prefix)
                listed = [row[:2] for page in pages(cut, what, rows_max) for row in page]
                assert listed == [place for place in keyed if begin <= place[0] < end]
                assert tallied(cut, what) == len(listed)
            until = [0, low, self.log.now_ms, 10**14]
            timers = self.model.timers
            check_counts(cut, topic, until, [timers[s][:2] for s in self.model.pending])

    def check_end(self) -> None:
        for scope in ("cluster", "default", "1", "2"):
            self.say(scope, None, None)
        self.checkpoint()
        self.compare()
        for _ in range(1_000):
            self.fire(10**9, 2, 1 << 20)
            if not self.model.pending and not self.model.releases:
                break
        self.checkpoint()
        self.compare()
        model = self.model
        assert not model.pending
        assert not self.leader.store.held
        assert not any(topic.is_holding for topic in self.leader.topics.values())
        ends = [*model.fired_at, *model.cancelled_at, *model.dropped_at]
        assert sorted(ends) == sorted(model.timers)
        for topic, seqs in model.queues.items():
            begin = self.leader.topics[TopicId(topic)].queue.begin
            expected = [(o, s, model.timers[s][2]) for o, s in enumerate(seqs)]
            assert queue_of(self.leader, topic) == expected[begin:]


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_replicas_and_model_agree_whatever_is_paused_flushed_or_restarted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    together, apart_max = draw.choice([1, 16]), draw.choice([0, 5, 1 << 18, 1 << 18])
    apart_bytes = draw.choice([4, 64 << 20, 64 << 20])
    monkeypatch.setattr(pauses, "SWEEP_TOPICS", together)
    monkeypatch.setattr(pauses, "SEARCH_BYTES_MAX", apart_bytes)
    monkeypatch.setattr(pauses, "SEARCH_ROWS_MAX", apart_max)
    world = PausingWorld()
    world.model.together, world.model.apart_max = together, apart_max
    world.model.apart_bytes, world.model.bounded = apart_bytes, draw.choice([False, True])
    if world.model.bounded:
        world.apply(world.log.begin_epoch(LEVEL_OF_BOUNDED_SWEEPS))
    for _ in range(60):
        world.random_step(draw)
    world.check_end()


# ---- single cases


def test_nothing_of_a_paused_topic_fires_and_others_do() -> None:
    paused = Paused()
    paused.schedule(10, 20)
    paused.schedule(10, 20, topic=2)
    assert paused.fire(15) == ([(2, [3])], False)
    assert (paused.fired(), paused.fired(2)) == ([], [10])
    assert paused.pending() == [10, 20]
    assert paused.machine.topics[TopicId(1)].held == 1
    assert paused.machine.store.next_due() == START_MS + 20


@pytest.mark.parametrize("flushed", [False, True])
def test_held_timers_are_cancelled_rescheduled_read_and_keep_their_keys(flushed: bool) -> None:
    paused = Paused()
    one, two, three = paused.schedule(10, 20, 30)
    [keyed] = paused.schedule(40, key=b"k")
    paused.fire(50)
    if flushed:
        paused.restart()
    store = paused.machine.store
    topics = store.topics(np.array([one[0], 5]), u64([one[1], 1]))
    assert topics.tolist() == [1, 0]
    whole, _ = store.read(np.array([two[0]]), u64([two[1]]), 0)
    assert (int(whole.rows["due_ms"][0]), whole.blob) == (two[0], b"p20")
    asked = keys_of([(1, b"k")])
    assert int(store.find_keys(asked.topic, asked.key)["due_ms"][0]) == keyed[0]
    row = store.find(UnixMs(three[0]), three[1])
    assert row is not None
    assert int(row["due_ms"][0]) == three[0]
    assert paused.cancel(one, one) == [CANCELLED, ALREADY_CANCELLED]
    later = START_MS + 10_000
    paused.log.reschedule(Ids(np.array([two[0]]), u64([two[1]])), [later])
    paused.log.reschedule(asked, [later + 1])
    rejected = part_of([(1, START_MS + 99, b"x")], keys=[b"k"])
    answer = paused._answered(paused.log.schedule(rejected))
    assert answer[0][0][3][0][0] == 4  # rejected: the key is taken
    assert paused.machine.store.held == 1
    assert paused.cancel(two, keyed) == [ALREADY_CANCELLED, ALREADY_CANCELLED]
    paused.resume("all", 60)
    assert [*settle(paused, 60)][-1][1] is False
    assert paused.fired() == [30]
    [*settle(paused, 20_000)]
    assert paused.fired() == [30, 20, 40]


@pytest.mark.parametrize("rows_max", [1, 2, 16_384])
@pytest.mark.parametrize(
    ("catch_up", "fires", "drops"),
    [("all", [10, 20, 30, 90], 0), ("latest", [30, 90], 2), ("drop", [90], 3)],
)
def test_overdue_timers_follow_catch_up_and_others_fire(
    catch_up: str, fires: list[int], drops: int, rows_max: int
) -> None:
    paused = Paused()
    timers = paused.schedule(10, 30, 20, 90)
    paused.fire(40)
    paused.restart()
    paused.resume(catch_up, 50)
    [*settle(paused, 60, rows_max)]
    paused.fire(100)
    assert paused.fired() == fires
    topic = paused.machine.topics[TopicId(1)]
    assert topic.counts.dropped == paused.machine.counts.dropped == drops
    assert (topic.held, topic.release, paused.machine.sweep_position) == (0, None, None)
    told = {10 * n: result for n, result in zip((1, 3, 2, 9), paused.cancel(*timers), strict=True)}
    assert {due for due, result in told.items() if result == ALREADY_FIRED} == {*fires}
    assert {*told.values()} <= {ALREADY_FIRED, DROPPED}


def test_the_latest_that_is_cancelled_before_its_turn_fires_nothing() -> None:
    paused = Paused()
    paused.machine.pauses.search_rows_max = (
        0  # so that what another topic holds keeps the sweep busy
    )
    timers = paused.schedule(10, 20)
    paused.schedule(15, topic=2)
    paused.say(Scope("", TopicId(2)), paused=True)
    paused.fire(30)
    paused.schedule(25, topic=2)
    paused.resume("latest", 30)
    assert paused.fire(30, 3)[1]
    assert paused.cancel(timers[1]) == [CANCELLED]
    [*settle(paused, 30, 3)]
    assert paused.fired() == []
    assert paused.cancel(*timers) == [DROPPED, ALREADY_CANCELLED]


def test_a_narrower_scope_goes_on_while_a_wider_one_is_paused() -> None:
    paused = Paused()
    paused.say(Scope("default"), paused=True)
    paused.say(paused=False)
    paused.catch_up()
    paused.schedule(10)
    paused.schedule(10, topic=2)
    paused.fire(20)
    assert (paused.fired(), paused.fired(2)) == ([10], [])
    paused.log.topic("c")
    paused.log.topic("other/c")
    paused.catch_up()
    assert [topic.paused for topic in paused.machine.topics.values()] == [False, True, True, False]


def test_what_a_move_brings_to_a_paused_topic_is_a_message_already() -> None:
    paused = Paused()
    paused.log.create_group(2, "g")
    paused.schedule(10, topic=2)
    paused.fire(20)
    paused.log.op(Op.RESERVE, 2, 1, [1])
    paused.log.move(2, 1, [0], "a")
    paused.catch_up()
    assert [body for _, _, body in queue_of(paused.machine, 1)] == [b"moved 0"]
    assert paused.machine.store.held == 0


@pytest.mark.parametrize("outcome", ["cancelled", "fired", "dropped"])
def test_how_a_held_timer_ended_is_told_for_the_horizon_from_then_on(outcome: str) -> None:
    paused = Paused()
    [timer] = paused.schedule(10)
    long_after = 10 * HORIZON_MS
    for at_ms in range(20, long_after, HORIZON_MS // 4):
        paused.fire(at_ms)
        paused.log.checkpoint()
    paused.log.now_ms = START_MS + long_after
    if outcome == "cancelled":
        assert paused.cancel(timer) == [CANCELLED]
    else:
        paused.resume("drop" if outcome == "dropped" else "all", long_after)
        paused.fire(long_after)
    expected = {"cancelled": ALREADY_CANCELLED, "fired": ALREADY_FIRED, "dropped": DROPPED}[outcome]
    paused.log.now_ms += HORIZON_MS
    paused.log.checkpoint()
    paused.restart()
    assert paused.cancel(timer) == [expected]
    for _ in range(2):  # firing goes on, and passes that by the horizon
        paused.log.now_ms += HORIZON_MS
        paused.fire(paused.log.now_ms - START_MS)
        paused.log.checkpoint()
    assert paused.cancel(timer) == [NOT_FOUND]


@pytest.mark.parametrize("outcome", ["cancelled", "dropped"])
def test_how_a_held_timer_ended_is_told_until_its_due_time_is_forgotten(outcome: str) -> None:
    paused = Paused()
    [timer] = paused.schedule(10)
    paused.fire(5)  # of this one there is a mark, of the next one not
    paused.fire(20)
    paused.log.now_ms = START_MS + 30
    if outcome == "cancelled":
        assert paused.cancel(timer) == [CANCELLED]
    else:
        paused.resume("drop", 30)
        paused.fire(31)
    expected = {"cancelled": ALREADY_CANCELLED, "dropped": DROPPED}[outcome]
    day_ms = 86_400_000
    paused.fire(day_ms)  # nothing was written in between
    paused.log.checkpoint()
    paused.restart()
    assert paused.cancel(timer) == [expected]
    paused.fire(day_ms + HORIZON_MS)
    paused.log.checkpoint()
    assert paused.cancel(timer) == [NOT_FOUND]


def test_held_rows_lie_in_runs_of_their_own() -> None:
    paused = Paused()
    paused.schedule(*range(50), 100_000, 200_000)
    paused.fire(60)
    paused.flush()
    metas = paused.machine.store.runs
    assert sorted(meta.first.due_ms >= HELD_OFFSET_MS for meta in metas) == [False, True]
    assert [meta.rows for meta in metas if meta.first.due_ms >= HELD_OFFSET_MS] == [50]
    assert all(
        (meta.first.due_ms >= HELD_OFFSET_MS) == (meta.last.due_ms >= HELD_OFFSET_MS)
        for meta in metas
    )


def test_window_ends_before_what_only_files_hold_and_held_rows_are_not_waited_for() -> None:
    paused = Paused()
    store = paused.machine.store

    def end_ms() -> int | None:
        return store.window_end_ms

    paused.schedule(*range(50))
    paused.schedule(40, topic=2)
    paused.fire(60)
    assert end_ms() is None
    paused.flush()
    assert end_ms() is None, "all of the rest is held"
    paused.schedule(*range(100_000, 110_000), topic=2)
    paused.flush()
    assert end_ms() == START_MS + 100_000, "a new run is loaded for some seconds"
    ahead = store.begin_read_ahead(UnixMs(START_MS + 99_000))
    assert ahead is not None
    ahead.read()
    store.end_read_ahead(ahead)
    assert end_ms() == START_MS + 100_000 + SLICE_ROWS_MIN


def test_disks_and_memory_let_go_of_what_was_held() -> None:
    paused = Paused()
    for round_ in range(12):
        paused.say(paused=True)
        paused.schedule(*range(1_000 * round_, 1_000 * round_ + 100))
        paused.fire(1_000 * round_ + 500)
        paused.flush()
        paused.resume("all", 1_000 * round_ + 600)
        [*settle(paused, 1_000 * round_ + 600, 40)]
        paused.flush()
    paused.flush()
    assert len(paused.fired()) == 1_200
    assert sum(meta.rows for meta in paused.machine.store.runs) <= 400
    assert paused.machine.store._runs._held_rows is None


def test_held_tiers_find_and_peek_as_a_sorted_list_does() -> None:
    draw = random.Random(3)
    tiers, alive = HeldTiers(), np.ones(4_096, np.bool_)
    model: list[Place] = []
    for _ in range(200):
        rows = [
            (HELD_OFFSET_MS + draw.randrange(50), len(model) + at)
            for at in range(draw.randint(1, 9))
        ]
        draw.shuffle(rows)
        first = len(model)
        tiers.add(
            np.array([due for due, _ in rows]),
            u64(seq for _, seq in rows),
            np.arange(first, first + len(rows)),
            alive,
        )
        model += rows
        dead = draw.randrange(len(model))
        alive[dead] = False
        live = sorted(row for at, row in enumerate(model) if alive[at])
        seen = Position(*draw.choice(model))
        places, last = tiers.peek(seen, 3, alive)
        expected = [row for row in live if row > seen and (last is None or row <= last)]
        assert [model[place] for place in places] == expected
        assert last is not None or expected == [row for row in live if row > seen]
        asked = [draw.choice(model) for _ in range(4)]
        found = tiers.find(np.array([d for d, _ in asked]), u64(s for _, s in asked), alive)
        assert found.tolist() == [model.index(a) if alive[model.index(a)] else -1 for a in asked]
