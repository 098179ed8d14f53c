"""Groups of the fake and the real cluster behave alike under the same calls, drawn from a seed."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.conformance.worlds import FakeWorld, World, answer
from timerclient import NewTimer
from timerclient.proto import timer_pb2 as pb
from timerfake import FakeCluster

CALLS = 120
LEASE_MS = 3_600_000
"""So long that no lease ends during the test, even on a slow machine."""
GROUPS = ("g", "h")
TYPES = ("shared", "key_shared", "exclusive", "failover")


class Player:
    """Consumes two topics by unary calls, so that deliveries do not depend on speed."""

    def __init__(self, world: World, topic: str, comes: Iterable[bool] = ()) -> None:
        """`comes`: whether a message is there for each Receive, if that is known."""
        self.comes, self.came = iter(comes), list[bool]()
        self.world, self.client = world, world.client
        self.topics = [f"{topic}/a", f"{topic}/b"]
        self.dead = f"{topic}/dead"
        self.got: list[tuple[str, str, pb.Deliveries]] = []
        self.request = 0

    def settled(self) -> None:
        """Return when no timer is pending, except in paused topics."""

        def is_so() -> bool:
            topics = (self.client.describe_topic(name) for name in self.topics)
            return all(t.paused or t.pending == 0 for t in topics)

        self.world.until(is_so)

    # ---- calls; each draws the same values in both worlds

    def schedule(self, rng: random.Random) -> Any:
        topic, n = rng.choice(self.topics), rng.randint(1, 4)
        headers = {"h": str(rng.randint(0, 9))}
        done = self.client.schedule_batch(topic, [rng.randbytes(3)] * n, headers=headers)
        self.settled()
        return [result.name for result in done.results]

    def schedule_all(self, rng: random.Random) -> Any:
        name = f"{self.topics[0]}-{rng.randint(0, 3)}"
        payload = rng.choice([b"1", b"1", b"2"])
        timers = [NewTimer(topic, payload) for topic in self.topics]
        done = self.client.schedule_all(timers, request_id=name[-64:])
        self.settled()
        return done.duplicate, [result.name for result in done.results]

    def receive(self, rng: random.Random) -> Any:
        topic, group = rng.choice(self.topics), rng.choice(GROUPS)
        request = pb.ReceiveRequest(topic=topic, group=group, max_messages=rng.randint(1, 4))
        request.lease_ms = LEASE_MS
        # With a wait an available message comes, even slowly; without, only one that is there soon.
        request.wait_ms = 20_000 if next(self.comes, False) else 0
        self.came.append(False)
        got = self.world.unary("Receive", request)
        self.got.append((topic, group, got))
        self.came[-1] = bool(got.queue_offsets)
        return [*got.queue_offsets], [*got.attempts], got.payloads

    def settle(self, rng: random.Random) -> Any:
        if not self.got:
            return None
        topic, group, got = rng.choice(self.got)
        offsets = rng.sample(
            [*got.queue_offsets, 9_999], rng.randint(1, len(got.queue_offsets) + 1)
        )
        said: dict[str, Any] = {"topic": topic, "group": group, "offsets": sorted(offsets)}
        said |= {"epoch": got.epoch, "lease_id": got.lease_id}
        ack, nack, extend = pb.AckRequest(**said), pb.NackRequest(**said), pb.ExtendRequest(**said)
        nack.delay_ms, extend.lease_ms = 0, rng.choice([10_000, 99])
        ack.cumulative = rng.random() < 0.3
        kind: str = rng.choice(["Ack", "Ack", "Nack", "Extend"])
        request = {"Ack": ack, "Nack": nack, "Extend": extend}[kind]
        return kind, [*self.world.unary(kind, request).results]

    def create(self, rng: random.Random) -> Any:
        kind: Any = rng.choice(TYPES)
        start: Any = rng.choice(["earliest", "latest"])
        attempts = rng.choice([0, 1, 2, 1001])
        topic, group = rng.choice(self.topics), rng.choice(GROUPS)
        made = self.client.create_group(
            topic, group, start=start, type=kind, max_attempts=attempts, dead_letter_topic=self.dead
        )
        return self.seen(made)

    def alter(self, rng: random.Random) -> Any:
        options: Any = rng.choice([{"max_attempts": 1}, {"max_in_flight": 2}, {"lease": 0}])
        return self.seen(
            self.client.alter_group(rng.choice(self.topics), rng.choice(GROUPS), **options)
        )

    def seek(self, rng: random.Random) -> Any:
        places = [{"offset": rng.randint(0, 30)}, {"start": "latest"}, {"start": "earliest"}]
        to: Any = rng.choice(places)
        return self.seen(self.client.seek_group(rng.choice(self.topics), rng.choice(GROUPS), **to))

    def delete(self, rng: random.Random) -> Any:
        return self.client.delete_group(rng.choice(self.topics), rng.choice(GROUPS))

    def redrive(self, rng: random.Random) -> Any:
        done = self.client.redrive(self.dead, rng.choice([None, 1, 2]))
        return int(done), done.homeless, done.exact

    def policy(self, rng: random.Random) -> Any:
        said: Any = rng.choice([{"ready_max": 20}, {"pending_max": 3}, {"retention_ms": 3_600_000}])
        gone = [] if rng.random() < 0.5 else ["ready_max", "pending_max"]
        gone = [name for name in gone if name not in said]
        return str(self.client.alter_policies(said, unset=gone, topic=rng.choice(self.topics)).own)

    def pause(self, rng: random.Random) -> Any:
        return str(self.client.pause_topic(rng.choice(self.topics)).own)

    def resume(self, rng: random.Random) -> Any:
        way: Any = rng.choice(["all", "latest", "drop"])
        own = str(self.client.resume_topic(rng.choice(self.topics), catch_up=way).own)
        self.settled()
        return own

    def look(self, rng: random.Random) -> Any:
        t = self.client.describe_topic(rng.choice(self.topics))
        ends = t.queue_begin, t.queue_end, t.pending, t.scheduled, t.fired, t.cancelled, t.ready
        return ends, t.held, t.paused, [self.seen(group) for group in t.groups]

    @staticmethod
    def seen(g: pb.GroupStatus) -> Any:
        return g.name, g.type, g.cursor, g.unacked, g.leased, str(g.settings)

    def play(self, seed: int) -> list[Any]:
        """Return the answers to many calls: the result of each, or its error."""
        rng = random.Random(seed)
        calls: list[Callable[[random.Random], Any]] = [
            *[self.schedule] * 4, self.schedule_all, *[self.receive] * 6, *[self.settle] * 8,
            self.create, self.create, self.alter, self.seek, self.delete, self.redrive, self.policy,
            self.pause, self.resume, self.look,
        ]  # fmt: skip
        for topic in (*self.topics, self.dead):
            # Retain all messages: otherwise a checkpoint at any time deletes those acked by all.
            self.client.create_group(topic, "keeper")
        return [answer(rng.choice(calls), random.Random(rng.random())) for _ in range(CALLS)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_groups_and_what_is_drawn_of_them_do_the_same(
    real_world: World, topic: str, seed: int
) -> None:
    here, there, epoch = list[Any](), list[Any](), -1
    while epoch != real_world.client.status().epoch:  # a new leader ends all leases: play again
        epoch = real_world.client.status().epoch
        topic += "x"
        with FakeCluster() as fake, fake.client() as client:
            player = Player(FakeWorld(fake, client), topic)
            here = player.play(seed)
        there = Player(real_world, topic, player.came).play(seed)
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        assert ours == theirs, number
