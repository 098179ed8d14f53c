"""The fake and the real cluster give equal answers to the same calls, drawn from a seed."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.worlds import FakeWorld, World, answer
from timerclient import TimerClient
from timerclient.rows.rows import OnConflict
from timerfake import FakeCluster

CALLS = 150
HOUR = 3600.0
MODES: tuple[OnConflict, ...] = ("reject", "replace", "keep")


class Player:
    """Makes calls in one world. Its answers name ids by number and times in hours, because those
    differ between worlds."""

    def __init__(self, world: World, topic: str) -> None:
        self.client: TimerClient = world.client
        self.topics = [f"{topic}/{name}" for name in ("a", "b")]
        self.ids: list[str] = []
        self.begin_ms = world.clock_ms()

    def name(self, timer_id: str | None) -> int | None:
        """Return the number of a timer among those made here. None: it is not one of them."""
        if timer_id is not None and timer_id not in self.ids:
            self.ids.append(timer_id)
        return None if timer_id is None else self.ids.index(timer_id)

    def hours(self, due_ms: int) -> int:
        return round((due_ms - self.begin_ms) / 1000 / HOUR)

    def timer(self, rng: random.Random) -> str:
        return rng.choice(self.ids) if self.ids else "0" * 24

    # ---- calls; each draws the same values in both worlds

    def schedule(self, rng: random.Random) -> Any:
        key = rng.choice([None, "k1", "k2", "k3", "k" * 1025])
        mode = rng.choice(MODES) if key or rng.random() < 0.2 else "reject"
        delay = rng.choice([1, 2, 30, 10**9]) * HOUR
        payload = rng.randbytes(rng.choice([0, 1, 20, 21]))
        done = self.client.schedule(
            rng.choice(self.topics), payload, key=key, delay=delay, on_conflict=mode
        )
        return self.name(done.id), done.result.name, self.hours(done.due_ms)

    def schedule_batch(self, rng: random.Random) -> Any:
        topic, mode = rng.choice(self.topics), rng.choice(MODES)
        some = ["k1", "k2", "k4", *([None] if mode == "reject" else [])]
        keys = rng.choices(some, k=rng.randint(1, 5))
        delays = [rng.randint(1, 9) * HOUR for _ in keys]
        done = self.client.schedule_batch(
            topic, [b"p"] * len(keys), keys=keys, delay=delays, on_conflict=mode
        )
        others = [self.name(existing) for existing in done.existing]
        names = [r.name for r in done.results]
        return (
            names,
            others,
            [self.name(i) for i, r in zip(done.ids, names, strict=True) if r[2] != "J"],
        )

    def cancel(self, rng: random.Random) -> Any:
        timers = [self.timer(rng) for _ in range(rng.randint(1, 3))]
        return [result.name for result in self.client.cancel_batch(timers)]

    def cancel_key(self, rng: random.Random) -> Any:
        return self.client.cancel(key=rng.choice(["k1", "k2"]), topic=rng.choice(self.topics)).name

    def cancel_where(self, rng: random.Random) -> Any:
        where: Any = {"key_prefix": rng.choice(["k1", "k4", "nobody"])}
        return int(self.client.cancel_where(rng.choice(self.topics), **where))

    def reschedule(self, rng: random.Random) -> Any:
        timer, delay = self.timer(rng), rng.choice([3, 4, 10**9]) * HOUR
        done = self.client.reschedule(timer, delay=delay)
        return self.name(done.id), self.hours(done.due_ms)

    def reschedule_keys(self, rng: random.Random) -> Any:
        keys, topic = rng.sample(["k1", "k2", "k3"], 2), rng.choice(self.topics)
        done = self.client.reschedule_keys(topic, keys, delay_level=18)
        return [(each.result.name, each.timer and self.name(each.timer.id)) for each in done]

    def get(self, rng: random.Random) -> Any:
        info = self.client.get_timer(self.timer(rng))
        return info.state.name, info.key, info.payload, self.hours(info.due_ms)

    def pending(self, rng: random.Random) -> Any:
        listed = self.client.list_timers(rng.choice(self.topics), page_size=7)
        return [(self.name(t.id), t.key, t.payload, self.hours(t.due_ms)) for t in listed]

    def count(self, rng: random.Random) -> Any:
        counts = self.client.count_timers(rng.choice(self.topics))
        return counts.pending, counts.beyond

    def policy(self, rng: random.Random) -> Any:
        said: Any = rng.choice(
            [
                {"delay_ms_min": 7_200_000},
                {"delay_ms_max": 14_400_000},
                {"fixed_delay_ms": 18_000_000},
                {"payload_bytes_max": 20},
                {"delay_levels_ms": [3_600_000, 10_800_000]},
                {"tick_ms": 0},
            ]
        )
        gone: list[str] = rng.choice([[], [], ["delay_ms_max"], ["fixed_delay_ms"], ["nonsense"]])
        done = self.client.alter_policies(said, unset=gone, topic=rng.choice(self.topics))
        return str(done.own), str(done.effective), dict(done.sources)

    def play(self, seed: int) -> list[Any]:
        """Return the answers to many calls: the result of each, or its error."""
        rng = random.Random(seed)
        calls: list[Callable[[random.Random], Any]] = [
            *[self.schedule] * 4, self.schedule_batch, self.cancel, self.cancel_key,
            self.cancel_where, self.reschedule, self.reschedule_keys, self.get, self.pending,
            self.count, self.policy,
        ]  # fmt: skip
        for topic in self.topics:
            self.client.create_topic(topic)
        return [answer(rng.choice(calls), random.Random(rng.random())) for _ in range(CALLS)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_calls_drawn_from_a_seed_are_answered_alike(
    real_world: World, topic: str, seed: int
) -> None:
    with FakeCluster() as fake, fake.client() as client:
        there = Player(real_world, topic).play(seed)
        here = Player(FakeWorld(fake, client), topic).play(seed)
    assert here == there
    shown = {str(answer[1][0]) for answer in here if isinstance(answer[1], tuple)}
    assert {"InvalidRequest", "AlreadyExists", "NotPending"} <= shown, shown
    for name in ("a", "b"):
        real_world.client.cancel_where(f"{topic}/{name}")
