"""The two worlds of a conformance test: the fake cluster, and three real processes.

A test states durations in *moments*. A moment of the fake lasts 5 s of its clock and passes at
once. A moment of the real cluster lasts 0.25 s, and the test waits for it. A lease of the default
30 s is longer than five moments. Both worlds must show the same results. Tests wait for a result
with the same timeout; on the fake it is there at the first poll.
"""

import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import grpc

from tests.cluster.running import (
    RPC_S,
    WAIT_S,
    Running,
    code_of,
    error_of,
    receive,
    redriven,
    until,
)
from timerclient import TimerClient, TimerError
from timerclient.client.sync import Consumer
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.rows.messages import Message
from timerclient.threads.background import Background
from timerclient.values.errors import InvalidRequest
from timerclient.values.wire_errors import from_wire
from timerfake import FakeCluster

T = TypeVar("T")
CLOCK = "clock"
"""A topic that serves only to read the cluster's time."""


class World:
    """A cluster and its client."""

    moment: float
    """Length of a moment in seconds; long enough to differ from no delay."""

    def __init__(self, client: TimerClient) -> None:
        self.client = client
        client.create_topic(CLOCK)

    @property
    def moment_ms(self) -> int:
        """Length of a moment in milliseconds."""
        return round(1000 * self.moment)

    def clock_ms(self) -> int:
        """Return the cluster's time in Unix milliseconds."""
        return self.client.count_timers(CLOCK).clock_ms

    def another_client(self) -> AbstractContextManager[TimerClient]:
        """Return a new client; the caller closes it."""
        raise NotImplementedError

    def pass_time(self, moments: float = 1) -> None:
        """Return when `moments` more moments have passed on the cluster's clock."""
        raise NotImplementedError

    def in_time(self, work: Callable[[int], T], moments: float) -> T:
        """Call `work` with a time `moments` ahead; return its result if it ends before that time.

        Else try again with a time four times as far ahead. For timers that must all be scheduled
        before the first of them is due.
        """
        while moments < 100:  # a test can't wait for later timers
            due_ms = self.clock_ms() + round(moments * self.moment_ms)
            done = work(due_ms)
            if self.clock_ms() < due_ms:
                return done
            moments *= 4
        raise AssertionError(f"not done within {moments / 4} moments: {work}")

    def change_leader(self) -> None:
        """Let another node lead; return when it serves."""
        raise NotImplementedError

    def redriven(self, topic: str, count: int) -> int:
        """Redrive `count` dead letters; return the number of homeless ones."""
        raise NotImplementedError

    def unary(self, method: str, request: Any) -> Any:
        """Return the answer to a unary call of the ConsumeService or the TimerService.

        Raises:
            grpc.RpcError: the call was rejected.
        """
        raise NotImplementedError

    # ---- results

    def receive(self, consumer: Consumer, count: int) -> list[Message]:
        """Return `count` messages without an ack."""
        return receive(consumer, count)

    def take(self, consumer: Consumer, count: int) -> list[Message]:
        """Return `count` messages after their confirmed acks."""
        got = self.receive(consumer, count)
        for acking in [message.ack() for message in got]:
            acking.result(WAIT_S)
        return got

    def nothing_waits(self, consumer: Consumer, topic: str) -> None:
        """Check that no message waits for a consumer: a new message is the next delivery."""
        self.client.schedule(topic, b"the next")
        [message] = self.take(consumer, 1)
        assert message.payload == b"the next", message

    def unacked(self, topic: str, group: str) -> int:
        """Return the number of fired messages that a group has not acked; -1: no group."""
        found = self.group(topic, group)
        return -1 if found is None else found.unacked

    def leased(self, topic: str, group: str) -> int:
        """Return the number of leased messages of a group; -1: no group."""
        found = self.group(topic, group)
        return -1 if found is None else found.leased

    def group(self, topic: str, name: str) -> pb.GroupStatus | None:
        """Return a group's status. None: there is no such group."""
        groups = [each for of in self.client.topics() if of.name == topic for each in of.groups]
        return next((each for each in groups if each.name == name), None)

    def until(self, condition: Callable[[], T | None]) -> T:
        """Call `condition` until its value is true; return the value."""
        return until(condition)


class FakeWorld(World):
    """A fake cluster, with long moments that pass at once."""

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
        answer = self.client.redrive(topic)  # without a slow node one call redrives all
        assert answer == count
        return answer.homeless

    def unary(self, method: str, request: Any) -> Any:
        consuming: Any = rpc.ConsumeServiceStub(self._fake.dial(""))
        stub = (
            consuming if hasattr(consuming, method) else rpc.TimerServiceStub(self._fake.dial(""))
        )
        return Background().call(getattr(stub, method)(request))


class RealWorld(World):
    """Three processes, with short moments in real time."""

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
        consuming: Any = self._cluster.consuming()
        stub = consuming if hasattr(consuming, method) else self._cluster.timers()
        return getattr(stub, method)(request, timeout=RPC_S)


def refusal(world: World, method: str, request: Any) -> pb.Error:
    """Return the `Error` message with which a unary call is rejected."""
    try:
        answer = world.unary(method, request)
    except (grpc.RpcError, grpc.aio.AioRpcError) as refused:
        error, code = error_of(refused), code_of(refused)
        is_invalid = error.reason == pb.REASON_INVALID_REQUEST
        assert is_invalid == (code is grpc.StatusCode.INVALID_ARGUMENT), (error, code)
        return error
    raise AssertionError(f"{method} was answered: {answer}")


def answer(call: Callable[[random.Random], Any], rng: random.Random) -> Any:
    """Return a call's name with its result, or with the error that rejects it."""
    try:
        return call.__name__, call(rng)
    except (grpc.RpcError, grpc.aio.AioRpcError) as failed:
        error = from_wire(error_of(failed))
    except TimerError as raised:
        error = raised
    told = type(error).__name__, error.reason, error.retryable, error.outcome_known
    if not isinstance(error, InvalidRequest):
        return call.__name__, told
    # An absolute time in a limit differs between calls.
    return call.__name__, told, error.field, re.sub(r"\d{13,}", "…", error.limit)
