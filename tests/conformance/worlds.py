"""Where a behaviour is shown: on the fake cluster, and on three real processes.

A test says how long things take in *moments*. The fake's last seconds and pass at once; the real
cluster's are short, and waited for. A lease of the default 30 s outlasts five of them. What is seen
is the same, and asked for with the same patience: on the fake it is there at the first look.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import grpc

from tests.cluster.running import RPC_S, WAIT_S, Running, error_of, receive, redriven, until
from timerclient import TimerClient
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.rows.background import Background
from timerclient.rows.messages import Message
from timerfake import FakeCluster

T = TypeVar("T")
CLOCK = "clock"
"""A topic that is asked for the cluster's time."""


class World:
    """A cluster and a client of it."""

    moment: float
    """Seconds: long enough to be told from none."""

    def __init__(self, client: TimerClient) -> None:
        self.client = client
        client.create_topic(CLOCK)

    @property
    def moment_ms(self) -> int:
        """A moment in milliseconds."""
        return round(1000 * self.moment)

    def clock_ms(self) -> int:
        """Return the cluster's time."""
        return self.client.count_timers(CLOCK).clock_ms

    def another_client(self) -> AbstractContextManager[TimerClient]:
        """Return a new client, for the caller to close."""
        raise NotImplementedError

    def pass_time(self, moments: float = 1) -> None:
        """Return when so many moments more are over on the cluster's clock."""
        raise NotImplementedError

    def in_time(self, work: Callable[[int], T], moments: float) -> T:
        """Return what `work` gives for a time so many moments ahead, more if it is done too late.

        For what has to be there before the first of it is due.
        """
        while moments < 100:  # what is due later, nobody waits for
            due_ms = self.clock_ms() + round(moments * self.moment_ms)
            done = work(due_ms)
            if self.clock_ms() < due_ms:
                return done
            moments *= 4
        raise AssertionError(f"not done within {moments / 4} moments: {work}")

    def change_leader(self) -> None:
        """Return when another leadership serves."""
        raise NotImplementedError

    def redriven(self, topic: str, count: int) -> int:
        """Send so many dead letters back; return how many others stay."""
        raise NotImplementedError

    def unary(self, method: str, request: Any) -> Any:
        """Return the answer to a plain call of the ConsumeService.

        Raises:
            grpc.RpcError: it was refused.
        """
        raise NotImplementedError

    # ---- what is seen

    def receive(self, consumer: Consumer, count: int) -> list[Message]:
        """Return so many messages, unacked."""
        return receive(consumer, count)

    def take(self, consumer: Consumer, count: int) -> list[Message]:
        """Return so many messages, acked for sure."""
        got = self.receive(consumer, count)
        for acking in [message.ack() for message in got]:
            acking.result(WAIT_S)
        return got

    def nothing_waits(self, consumer: Consumer, topic: str) -> None:
        """Nothing is there for this consumer: what is scheduled now is the next that comes."""
        self.client.schedule(topic, b"the next")
        [message] = self.take(consumer, 1)
        assert message.payload == b"the next", message

    def unacked(self, topic: str, group: str) -> int:
        """Return how many messages a group has not acked, of those that fired; -1: no group."""
        found = self.group(topic, group)
        return -1 if found is None else found.unacked

    def leased(self, topic: str, group: str) -> int:
        """Return how many messages of a group are leased; -1: no group."""
        found = self.group(topic, group)
        return -1 if found is None else found.leased

    def group(self, topic: str, name: str) -> pb.GroupStatus | None:
        """Return a group as operators see it."""
        groups = [each for of in self.client.topics() if of.name == topic for each in of.groups]
        return next((each for each in groups if each.name == name), None)

    def until(self, condition: Callable[[], T | None]) -> T:
        """Return what `condition` gives as soon as it is true of something."""
        return until(condition)


class FakeWorld(World):
    """A fake cluster whose moments are long."""

    moment = 5.0

    def __init__(self, fake: FakeCluster, client: TimerClient) -> None:
        self._fake = fake
        super().__init__(client)

    def another_client(self) -> AbstractContextManager[TimerClient]:
        return self._fake.client()

    def pass_time(self, moments: float = 1) -> None:
        self._fake.advance(moments * self.moment)

    def change_leader(self) -> None:
        self._fake.fail_over()

    def redriven(self, topic: str, count: int) -> int:
        answer = self.client.redrive(topic)  # where no node is slow, one call sends them all
        assert answer == count
        return answer.homeless

    def unary(self, method: str, request: Any) -> Any:
        stub: Any = rpc.ConsumeServiceStub(self._fake.dial(""))
        return Background().call(getattr(stub, method)(request))


class RealWorld(World):
    """Three processes, whose moments have to be waited for."""

    moment = 0.25

    def __init__(self, cluster: Running, client: TimerClient) -> None:
        self._cluster = cluster
        super().__init__(client)

    def another_client(self) -> AbstractContextManager[TimerClient]:
        return self._cluster.client()

    def pass_time(self, moments: float = 1) -> None:
        end_ms = self.clock_ms() + moments * self.moment_ms
        until(lambda: self.clock_ms() >= end_ms)

    def change_leader(self) -> None:
        self._cluster.change_leader(self.client)

    def redriven(self, topic: str, count: int) -> int:
        return redriven(self.client, topic, count)

    def unary(self, method: str, request: Any) -> Any:
        return getattr(self._cluster.consuming(), method)(request, timeout=RPC_S)


def refusal(world: World, method: str, request: Any) -> pb.Error:
    """Return the contract's error that a plain call is refused with."""
    try:
        answer = world.unary(method, request)
    except (grpc.RpcError, grpc.aio.AioRpcError) as refused:
        return error_of(refused)
    raise AssertionError(f"{method} was answered: {answer}")
