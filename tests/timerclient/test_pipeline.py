"""The producer's core against a model cluster: no request is lost, doubled or misreported."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from timerclient.streams.pipeline import Pipeline, PipelinedRequest, Step
from timerclient.values.errors import (
    Closed,
    CommitTimeout,
    InvalidRequest,
    NotLeader,
    OutcomeForgotten,
    OutcomeUnknown,
    Overloaded,
    QuotaReached,
    SequenceGap,
    TimerError,
    UnknownProducer,
)


class Item(PipelinedRequest):
    """A request that the tests can name."""

    __slots__ = ("bad", "name", "parts", "size", "timers")

    def __init__(self, name: int, *, bad: bool = False, size: int = 1, timers: int = 1) -> None:
        super().__init__()
        self.name = name
        self.bad = bad
        self.size = size
        self.timers = timers
        self.parts: list[Item] = []

    def split(self) -> "list[Item]":
        return self.parts

    def demand(self) -> tuple[str, int, int] | None:
        return None if self.parts else ("odd" if self.name % 2 else "even", self.size, 1)


def make(*, window: int = 8, producer: int = 1) -> Pipeline[Item]:
    pipeline: Pipeline[Item] = Pipeline(wire_requests_max=window, wire_bytes_max=1 << 20)
    if producer:
        pipeline.on_registered(producer)
    return pipeline


def sent(pipeline: Pipeline[Item]) -> list[tuple[int, int, int]]:
    """Send all that may be sent; return (request_no, name, sequence) of each."""
    out = []
    while (following := pipeline.next()) is not None:
        out.append((following[0], following[1].name, following[1].sequence))
    return out


def sending(*items: Item) -> Pipeline[Item]:
    """Return a pipeline that has sent the items, and has no answer yet."""
    pipeline = make()
    for item in items:
        pipeline.add(item)
    sent(pipeline)
    return pipeline


def test_requests_are_numbered_when_sent_and_stop_at_the_window() -> None:
    pipeline = make(window=2)
    for name in range(3):
        pipeline.add(Item(name))
    assert sent(pipeline) == [(1, 0, 1), (2, 1, 2)]
    assert pipeline.on_answer(1, None).settled[0][0].name == 0
    assert sent(pipeline) == [(3, 2, 3)]


def test_window_of_bytes_lets_one_large_request_through_alone() -> None:
    pipeline: Pipeline[Item] = Pipeline(wire_requests_max=8, wire_bytes_max=10)
    pipeline.on_registered(1)
    pipeline.add(Item(0, size=100))
    pipeline.add(Item(1, size=1))
    assert sent(pipeline) == [(1, 0, 1)]
    pipeline.on_answer(1, None)
    assert sent(pipeline) == [(2, 1, 2)]


def test_no_more_is_on_the_wire_than_the_cluster_keeps_answers_for() -> None:
    pipeline = make(producer=0)
    pipeline.on_registered(1, requests_kept=3, timers_kept=10)
    for name, timers in enumerate((4, 6, 1, 1, 1, 50, 1)):
        pipeline.add(Item(name, timers=timers))
    assert sent(pipeline) == [(1, 0, 1), (2, 1, 2)]
    pipeline.on_answer(1, None)
    assert [name for _, name, _ in sent(pipeline)] == [2, 3]
    pipeline.on_stream_broken(received=True)
    assert [name for _, name, _ in sent(pipeline)] == [1, 2, 3], "they fit again, and no others"
    for request_no in (5, 6, 7):
        pipeline.on_answer(request_no, None)
    assert [name for _, name, _ in sent(pipeline)] == [4]
    pipeline.on_answer(8, None)
    assert [name for _, name, _ in sent(pipeline)] == [5], "the answer to the last is always kept"


def test_nothing_is_sent_before_a_producer_is_registered() -> None:
    pipeline = make(producer=0)
    pipeline.add(Item(0))
    assert sent(pipeline) == []
    assert pipeline.needs_producer
    pipeline.on_registered(7)
    assert sent(pipeline) == [(1, 0, 1)]


def test_broken_stream_resends_in_order_with_the_same_sequences() -> None:
    pipeline = sending(*map(Item, range(3)))
    pipeline.on_answer(2, None)
    assert pipeline.on_stream_broken(received=True).settled == []
    assert sent(pipeline) == [(4, 0, 1), (5, 2, 3)]


def test_overload_drains_then_resends_with_the_same_sequences() -> None:
    pipeline = sending(*map(Item, range(3)))
    assert pipeline.on_answer(1, Overloaded("full")).pause_ms == 0
    assert sent(pipeline) == []
    pipeline.on_answer(2, SequenceGap("gap"))
    assert sent(pipeline) == []
    pipeline.on_answer(3, SequenceGap("gap"))
    assert sent(pipeline) == [(4, 0, 1), (5, 1, 2), (6, 2, 3)]


def test_refusal_fails_one_and_renumbers_those_behind_it() -> None:
    pipeline = sending(*map(Item, range(3)))
    [(item, error)] = pipeline.on_answer(1, InvalidRequest("too large")).settled
    assert item.name == 0
    assert isinstance(error, InvalidRequest)
    pipeline.on_answer(2, SequenceGap("gap"))
    pipeline.on_answer(3, SequenceGap("gap"))
    assert sent(pipeline) == [(4, 1, 1), (5, 2, 2)]


def test_refusal_in_doubt_surfaces_what_lies_behind_it_in_doubt_and_spares_the_rest() -> None:
    pipeline = sending(Item(0), Item(1))
    pipeline.on_stream_broken(received=True)
    pipeline.add(Item(2))
    sent(pipeline)
    [(_, refused)] = pipeline.on_answer(3, InvalidRequest("too large")).settled
    assert refused is not None
    assert not refused.outcome_known
    pipeline.on_answer(4, SequenceGap("gap"))
    [(item, error)] = pipeline.on_answer(5, SequenceGap("gap")).settled
    assert item.name == 1
    assert isinstance(error, OutcomeUnknown)
    assert sent(pipeline) == []
    assert pipeline.needs_producer
    pipeline.on_registered(2)
    assert sent(pipeline) == [(6, 2, 1)]


def test_broken_behind_a_certain_refusal_takes_a_new_producer_and_leaves_no_doubt() -> None:
    items = [Item(0), Item(1)]
    pipeline = sending(*items)
    pipeline.on_answer(1, InvalidRequest("too large"))
    pipeline.on_stream_broken(received=True)
    assert not pipeline.may_be_applied(items[1])
    assert sent(pipeline) == []
    assert pipeline.needs_producer
    pipeline.on_registered(2)
    assert sent(pipeline) == [(3, 1, 1)]


def test_refused_request_of_many_calls_is_split_into_its_calls() -> None:
    whole = Item(0)
    whole.parts = [Item(10), Item(11, bad=True), Item(12)]
    pipeline = sending(whole)
    assert pipeline.on_answer(1, InvalidRequest("row 1")).settled == []
    assert sent(pipeline) == [(2, 10, 1), (3, 11, 2), (4, 12, 3)]


def test_quota_that_is_reached_refuses_at_once_what_asks_for_as_much_behind_it() -> None:
    pipeline = make()
    for name, size in enumerate([1, 1, 2, 2, 1, 3, 2]):
        pipeline.add(Item(name, size=size))
    sent(pipeline)
    assert pipeline.on_answer(1, None).settled
    full = QuotaReached("odd, even")
    assert [item.name for item, _ in pipeline.on_answer(3, full).settled] == [2]  # even, 2 rows
    assert pipeline.on_answer(2, Overloaded("wait")).settled == []
    for request_no in (4, 5, 7):
        assert pipeline.on_answer(request_no, SequenceGap("gap")).settled == []
    settled = pipeline.on_answer(6, SequenceGap("gap")).settled
    assert [(item.name, str(error)) for item, error in settled] == [(6, "odd, even")]
    # One has another topic, one comes before, one is smaller.
    assert sent(pipeline) == [(8, 1, 2), (9, 3, 3), (10, 4, 4), (11, 5, 5)]


def test_calls_of_one_request_are_taken_until_a_quota_is_reached() -> None:
    whole = Item(0)
    whole.parts = [Item(name) for name in (10, 12, 14, 16)]
    pipeline = sending(whole)
    full = QuotaReached("even: 2 of 2")
    full.field = "pending_max"
    assert pipeline.on_answer(1, full).settled == []
    sent(pipeline)
    assert [error for _, error in pipeline.on_answer(2, None).settled] == [None]
    settled = pipeline.on_answer(3, full).settled
    for request_no in (4, 5):
        settled += pipeline.on_answer(request_no, SequenceGap("gap")).settled
    assert [item.name for item, _ in settled] == [12, 14, 16]
    for _, error in settled:
        assert isinstance(error, QuotaReached)
        assert (str(error), error.field) == ("even: 2 of 2", "pending_max")
    assert len({id(error) for _, error in settled}) == 3, "each is raised, and grows, by itself"
    assert pipeline.is_idle


@pytest.mark.parametrize("field", ["ready_max", "ready_bytes_max"])
def test_what_lies_behind_a_quota_of_what_is_ready_is_asked_for_by_itself(field: str) -> None:
    pipeline = make()
    pipeline.add(Item(0))  # due now
    pipeline.add(Item(2))  # as large, and perhaps due in an hour: none of it is ready
    sent(pipeline)
    full = QuotaReached("even")
    full.field = field
    assert [item.name for item, _ in pipeline.on_answer(1, full).settled] == [0]
    assert pipeline.on_answer(2, SequenceGap("gap")).settled == []
    assert sent(pipeline) == [(3, 2, 1)]


def test_what_is_in_doubt_behind_a_quota_is_asked_again() -> None:
    pipeline = sending(Item(0), Item(2))
    assert pipeline.on_answer(2, CommitTimeout("slow")).settled == []
    settled = pipeline.on_answer(1, QuotaReached("even")).settled
    assert [item.name for item, _ in settled] == [0]
    assert sent(pipeline) == [(3, 2, 1)]


def test_unknown_producer_registers_again_for_what_was_certainly_not_applied() -> None:
    pipeline = sending(Item(0), Item(1))
    pipeline.on_answer(1, UnknownProducer("expired"))
    pipeline.on_answer(2, UnknownProducer("expired"))
    assert sent(pipeline) == []
    assert pipeline.needs_producer
    pipeline.on_registered(2)
    assert sent(pipeline) == [(3, 0, 1), (4, 1, 2)]


def test_unknown_producer_surfaces_for_what_is_in_doubt() -> None:
    pipeline = sending(Item(0))
    pipeline.on_stream_broken(received=True)
    sent(pipeline)
    [(_, error)] = pipeline.on_answer(2, UnknownProducer("expired")).settled
    assert isinstance(error, OutcomeUnknown)
    assert "expired" in str(error)


def test_forgotten_outcome_surfaces_and_those_behind_go_on() -> None:
    pipeline = sending(Item(0), Item(1))
    [(_, error)] = pipeline.on_answer(1, OutcomeForgotten("long ago")).settled
    assert isinstance(error, OutcomeForgotten)
    assert pipeline.on_answer(2, None).settled[0][1] is None
    assert pipeline.is_idle


def test_withdrawn_before_it_was_sent_leaves_no_gap() -> None:
    pipeline = make(window=1)
    items = [Item(name) for name in range(3)]
    for item in items:
        pipeline.add(item)
    sent(pipeline)
    assert pipeline.withdraw(items[1])
    pipeline.on_answer(1, None)
    assert sent(pipeline) == [(2, 2, 2)]


def test_withdrawn_on_the_wire_is_resent_for_those_behind_it() -> None:
    items = [Item(0), Item(1)]
    pipeline = sending(*items)
    assert not pipeline.withdraw(items[0])
    pipeline.on_stream_broken(received=True)
    assert [name for _, name, _ in sent(pipeline)] == [0, 1]


def test_withdrawn_alone_dies_with_its_stream_and_its_producer() -> None:
    item = Item(0)
    pipeline = sending(item)
    pipeline.withdraw(item)
    pipeline.on_stream_broken(received=True)
    assert pipeline.is_idle
    pipeline.add(Item(1))
    assert sent(pipeline) == []
    assert pipeline.needs_producer


def test_close_tells_what_may_have_happened_from_what_has_not() -> None:
    pipeline = make(window=1)
    pipeline.add(Item(0))
    pipeline.add(Item(1))
    sent(pipeline)
    errors = {item.name: error for item, error in pipeline.close().settled}
    assert isinstance(errors[0], OutcomeUnknown)
    assert isinstance(errors[1], Closed)
    assert pipeline.is_idle


# ---- against a model


@dataclass
class Producer:
    last: int = 0
    names: dict[int, int] = field(default_factory=dict)


@dataclass
class Model:
    """A cluster with one worst case added: what an old stream still held may arrive any time."""

    rng: random.Random
    producers: dict[int, Producer] = field(default_factory=dict)
    applied: dict[int, int] = field(default_factory=dict)
    stream: deque[tuple[int, int, int, Item]] = field(default_factory=deque)
    old_streams: list[deque[tuple[int, int, int, Item]]] = field(default_factory=list)
    answers: list[tuple[int, int | None, TimerError | None]] = field(default_factory=list)
    faults: bool = True

    def register(self) -> int:
        self.producers[len(self.producers) + 1] = Producer()
        return len(self.producers)

    def decide(
        self, producer_id: int, sequence: int, item: Item
    ) -> tuple[int | None, TimerError | None]:
        producer = self.producers[producer_id]
        if producer.last < 0:
            return None, UnknownProducer("expired")
        if sequence <= producer.last:
            return producer.names[sequence], None
        if item.bad:
            return None, InvalidRequest("bad")
        if sequence > producer.last + 1:
            gap = SequenceGap("gap")
            gap.expected_sequence = producer.last + 1
            return None, gap
        if self.faults and self.rng.random() < 0.15:
            return None, Overloaded("full")
        if self.faults and self.rng.random() < 0.05:
            return None, QuotaReached("full")
        applies = not self.faults or self.rng.random() < 0.9
        if applies:
            producer.last = sequence
            producer.names[sequence] = item.name
            self.applied[item.name] = self.applied.get(item.name, 0) + 1
        if not applies or (self.faults and self.rng.random() < 0.05):
            return None, CommitTimeout("slow")
        return item.name, None

    def work(self) -> None:
        if self.stream:
            request_no, producer_id, sequence, item = self.stream.popleft()
            self.answers.append((request_no, *self.decide(producer_id, sequence, item)))

    def work_old(self) -> None:
        old = self.rng.choice(self.old_streams)
        if old:
            _, producer_id, sequence, item = old.popleft()
            self.decide(producer_id, sequence, item)

    def cut(self) -> None:
        self.old_streams.append(self.stream)
        self.stream = deque()
        self.answers.clear()


@dataclass
class Run:
    model: Model
    pipeline: Pipeline[Item]
    outcomes: dict[int, TimerError | None] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)

    def settle(self, step: Step[Item], name: int | None = None) -> None:
        for item, error in step.settled:
            assert item.name not in self.outcomes, (item.name, error)
            if error is None:
                assert name == item.name, f"{item.name} was answered with the ids of {name}"
            self.outcomes[item.name] = error

    def cut(self) -> None:
        self.model.cut()
        self.settle(self.pipeline.on_stream_broken(received=True))

    def send(self) -> None:
        following = self.pipeline.next()
        if following is None:
            if self.pipeline.needs_producer:
                self.pipeline.on_registered(self.model.register())
            return
        request_no, item = following
        entry = request_no, self.pipeline.producer_id, item.sequence, item
        self.model.stream.append(entry)

    def answer(self) -> None:
        answers = self.model.answers
        if answers:
            # Slow commits may answer late: now and then out of order.
            at = 0 if self.model.rng.random() < 0.8 else self.model.rng.randrange(len(answers))
            request_no, name, error = answers.pop(at)
            step = self.pipeline.on_answer(request_no, error)
            self.settle(step, name)
            if step.move is not None:
                self.cut()


@pytest.mark.parametrize("first", range(0, 300, 30))
def test_random_faults_lose_nothing_double_nothing_and_tell_the_truth(first: int) -> None:
    for seed in range(first, first + 30):
        live_through_faults(seed)


def live_through_faults(seed: int) -> None:
    rng = random.Random(seed)
    run = Run(Model(rng), make(window=rng.choice([1, 3, 8]), producer=0))
    items: list[Item] = []
    for _ in range(400):
        match rng.randrange(40):
            case n if n < 8:
                items.append(Item(len(items), bad=rng.random() < 0.1))
                run.pipeline.add(items[-1])
            case n if n < 20:
                run.send()
            case n if n < 28:
                run.model.work()
            case n if n < 36:
                run.answer()
            case 36 if rng.random() < 0.5:
                run.cut()
            case 37 if run.model.old_streams:
                run.model.work_old()
            case 38 if items and rng.random() < 0.3:
                item = rng.choice(items)
                if item.name not in run.outcomes and item.name not in run.abandoned:
                    run.abandoned.add(item.name)
                    if run.pipeline.withdraw(item):
                        run.outcomes[item.name] = Closed("withdrawn unsent")
            case 39 if run.model.producers and rng.random() < 0.05:
                rng.choice(list(run.model.producers.values())).last = -1
            case _:
                pass
    run.model.faults = False
    for _ in range(4 * len(items) + 200):
        run.send()
        run.model.work()
        run.answer()
    for old in run.model.old_streams:
        while old:
            run.model.work_old()
    assert run.pipeline.is_idle
    for item in items:
        times = run.model.applied.get(item.name, 0)
        assert times <= 1, f"{item.name} was applied {times} times"
        if item.name in run.abandoned:
            continue
        error = run.outcomes[item.name]
        if error is None:
            assert times == 1
        elif error.outcome_known:
            assert times == 0, f"{item.name} was applied, and reported as {error!r}"
        if not item.bad:
            assert error is None or isinstance(error, QuotaReached) or not error.outcome_known


def test_stream_that_is_refused_as_a_whole_leaves_no_doubt() -> None:
    item = Item(0)
    pipeline = sending(item)
    pipeline.on_stream_broken(received=False)
    assert not pipeline.may_be_applied(item)
    sent(pipeline)
    step = pipeline.on_answer(2, NotLeader("elsewhere"))
    assert isinstance(step.move, NotLeader)
    assert not pipeline.may_be_applied(item)
