"""The demo: timers survive the death of their leader, twice, and an audit says so.

    three nodes up -> clients schedule, cancel and consume all along
                      kill -9 the leader mid-delay, restart it; and once more
                   -> wait until everything due was delivered and acked -> stop -> audit

What the clients do is written to histories (chaos/history.py); the verdict comes from those and
from the nodes' own logs, and knows nothing of this program. Its folder stays: `make audit RUN=…`.
"""

import argparse
import contextlib
import itertools
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from chaos.history import Faults, History, Outcome, Run, mark_of, payload_of
from deploy.local import LaunchError, LocalCluster
from timerclient import TimerClient
from timerclient.errors import LeaseLost, OutcomeForgotten, TimerError
from timerclient.messages import Acking, Batch

TOPIC: Final = "demo"
GROUP: Final = "workers"
CONSUMERS: Final = 2
PAYLOAD_SIZE: Final = 100
BATCH_SIZE: Final = 200
LEASE: Final = timedelta(seconds=10)
DRAIN_TIMEOUT_S: Final = 30.0
"""After the last due time. Failovers are long over by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo does, and when; seconds from the first schedule."""

    timers: int = 30_000
    batch_size: int = BATCH_SIZE
    scheduling_s: float = 22.0
    """Schedules are spread over this long, so that some meet a dead leader."""
    delay_s_max: float = 30.0
    """The last timer is due this long after the start."""
    singles: int = 400
    cancels: int = 600
    kills_at_s: tuple[float, ...] = (8.0, 18.0)
    down_s: float = 3.0
    """A killed node stays down for so long."""
    seed: int = 1

    @classmethod
    def of(cls, *, timers: int, kills: int, seed: int) -> "Plan":
        """Return a plan with so many kills, one every ten seconds, under load until the last."""
        kills_at_s = tuple(8.0 + 10.0 * number for number in range(kills))
        last_s = max(kills_at_s, default=8.0)
        singles = 20 * int(last_s + 4)
        singles += (timers - singles) % BATCH_SIZE  # the rest comes in whole batches
        return cls(
            timers=timers,
            scheduling_s=last_s + 4,
            delay_s_max=last_s + 12,
            singles=singles,
            cancels=timers // 50,
            kills_at_s=kills_at_s,
            seed=seed,
        )


def now_ms() -> int:
    """Return this machine's clock, in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def outcome_of(error: TimerError) -> Outcome:
    """Return what a client knows of an operation that raised."""
    certain = error.outcome_known and not isinstance(error, OutcomeForgotten)
    return Outcome.FAIL if certain else Outcome.UNKNOWN


@dataclass(slots=True)
class Books:
    """What the workload itself knows; decides when the demo is over, not whether it went well."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    open: set[int] = field(default_factory=set)
    """Marks of timers that were answered OK and have not been acked or cancelled yet."""
    over: set[int] = field(default_factory=set)
    """Marks that were acked or cancelled: perhaps before their schedule's answer was read."""
    asked: int = 0
    unanswered: int = 0
    delivered: int = 0

    def scheduled(self, marks: Sequence[int], outcome: Outcome) -> None:
        """Note the answer of a schedule."""
        with self.lock:
            self.asked += len(marks)
            if outcome is Outcome.OK:
                self.open |= {*marks} - self.over
            else:
                self.unanswered += len(marks)

    def ended(self, marks: Sequence[int]) -> None:
        """Note timers that nothing more is expected of."""
        with self.lock:
            self.over.update(marks)
            self.open.difference_update(marks)


class Producer:
    """A client that schedules batches and singles, and cancels some of them."""

    def __init__(self, run: Run, name: str, endpoints: Sequence[str], books: Books) -> None:
        self._history = History(run, name)
        self._client = TimerClient(endpoints)
        self._books = books

    def batch(self, marks: Sequence[int], due_ms: Sequence[int]) -> list[str]:
        """Schedule timers in one request; return their ids, none if it failed."""
        payloads = [payload_of(mark, PAYLOAD_SIZE) for mark in marks]

        def schedule() -> list[str]:
            return self._client.schedule_batch(TOPIC, payloads, due_ms=due_ms).ids

        return self._schedule(marks, due_ms, schedule)

    def single(self, mark: int, delay_s: float) -> list[str]:
        """Schedule one timer by its delay."""
        payload, delay = payload_of(mark, PAYLOAD_SIZE), timedelta(seconds=delay_s)

        def schedule() -> list[str]:
            return [self._client.schedule(TOPIC, payload, delay=delay).id]

        return self._schedule([mark], None, schedule)

    def _schedule(
        self, marks: Sequence[int], due_ms: Sequence[int] | None, call: Callable[[], list[str]]
    ) -> list[str]:
        start_ms, ids, more = now_ms(), None, {}
        outcome = Outcome.OK
        try:
            ids = call()
        except TimerError as error:
            outcome, more = outcome_of(error), {"detail": repr(error)}
        span_ms = (start_ms, now_ms())
        self._history.schedule(
            marks, ids=ids, due_ms=due_ms, topic=TOPIC, span_ms=span_ms, outcome=outcome, **more
        )
        self._books.scheduled(marks, outcome)
        return ids or []

    def cancel(self, timer_id: str, mark: int) -> None:
        """Cancel one timer."""
        start_ms, results, more = now_ms(), None, {}
        outcome = Outcome.OK
        try:
            results = [self._client.cancel(timer_id).name]
        except TimerError as error:
            outcome, more = outcome_of(error), {"detail": repr(error)}
        span_ms = (start_ms, now_ms())
        self._history.cancel([timer_id], results=results, span_ms=span_ms, outcome=outcome, **more)
        # ALREADY_FIRED ones are still to come; of an unknown one, nothing is expected.
        if results != ["ALREADY_FIRED"]:
            self._books.ended([mark])

    def close(self) -> None:
        """Close the client, then its history."""
        self._client.close()
        self._history.close()


class Consumer:
    """A client that takes messages and acks them, in a thread of its own, until it is closed."""

    def __init__(self, run: Run, name: str, endpoints: Sequence[str], books: Books) -> None:
        self._history = History(run, name)
        self._history.open(TOPIC, GROUP, start_ms=now_ms())
        self._client = TimerClient(endpoints)
        self._consumer = self._client.consumer(TOPIC, group=GROUP, lease=LEASE)
        self._books = books
        self._thread = threading.Thread(target=self._consume, name=name, daemon=True)
        self._thread.start()

    def _consume(self) -> None:
        for batch in self._consumer.batches():
            marks = [*map(mark_of, batch.payloads)]
            self._history.deliver(
                TOPIC,
                GROUP,
                received_ms=now_ms(),
                epoch=batch.epoch,
                lease_id=batch.lease_id,
                offsets=[*batch.queue_offsets],
                ids=batch.ids,
                marks=marks,
                attempts=[*batch.attempts],
                fired_at_ms=[*batch.fired_at_ms],
                due_ms=[*batch.due_ms],
            )
            with self._books.lock:
                self._books.delivered += len(batch)
            self._ack(batch, marks)

    def _ack(self, batch: Batch, marks: Sequence[int]) -> None:
        start_ms, offsets, epoch = now_ms(), [*batch.queue_offsets], batch.epoch

        def answered(acking: Acking[int]) -> None:
            results: list[str] | None = ["ACKED"] * len(offsets)
            outcome, more, done = Outcome.OK, {}, marks
            error = acking.exception()
            if isinstance(error, LeaseLost):
                lost = {*error.offsets}
                results = ["ACK_LEASE_LOST" if o in lost else "ACKED" for o in offsets]
                done = [m for m, o in zip(marks, offsets, strict=True) if o not in lost]
            elif error is not None:
                known = isinstance(error, TimerError) and error.outcome_known
                outcome, results = Outcome.FAIL if known else Outcome.UNKNOWN, None
                more, done = {"detail": repr(error)}, []
            span_ms = (start_ms, now_ms())
            self._history.ack(
                TOPIC, GROUP, offsets, results=results, span_ms=span_ms, outcome=outcome,
                epoch=epoch, **more,
            )  # fmt: skip
            self._books.ended(done)

        batch.ack().add_done_callback(answered)  # type: ignore[arg-type]  # it is an Acking

    def close(self) -> None:
        """Confirm the acks that are under way, then end."""
        self._consumer.close()
        self._thread.join(timeout=10)
        self._client.close()
        self._history.close()


class Demo:
    """One run of the demo in one folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.run = Run(folder.resolve())
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._marks = itertools.count(1)
        self._books = Books()
        self._cluster = LocalCluster(self.run.root)
        self._began = time.monotonic()

    def play(self) -> int:
        """Play it; return the audit's exit status."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop_nodes)
            self._cluster.start()
            faults = stack.enter_context(Faults(self.run))
            self._began = time.monotonic()
            self._say(f"three nodes are up, {self._cluster.wait_for_leader()} leads")
            self._work(faults, stack)
        self._say("all nodes stopped; auditing histories and logs")
        audit = [sys.executable, "-m", "chaos.audit", str(self.run.root)]
        return subprocess.run(audit, check=False).returncode

    def _work(self, faults: Faults, stack: contextlib.ExitStack) -> None:
        plan, endpoints = self._plan, self._cluster.endpoints
        names = [f"consumer-{number}" for number in range(1, CONSUMERS + 1)]
        for name in names:
            consumer = Consumer(self.run, name, endpoints, self._books)
            stack.callback(consumer.close)
        start_ms = now_ms()
        self._say(
            f"{plan.timers:,} timers for the next {plan.delay_s_max:g} s, {plan.cancels} cancels"
        )
        with _threads(lambda: self._batches(start_ms, endpoints), lambda: self._singles(endpoints)):
            for at_s in plan.kills_at_s:
                self._sleep_until(start_ms, at_s)
                self._kill_leader(faults)
        drained = self._drain(start_ms)
        faults.record("drained" if drained else "gave_up", at_ms=now_ms())
        books = self._books
        rest = "nothing is missing" if drained else f"{len(books.open):,} are missing"
        self._say(
            f"{books.asked:,} timers asked for ({books.unanswered} without an answer),"
            f" {books.delivered:,} deliveries; {rest}"
        )

    def _batches(self, start_ms: int, endpoints: Sequence[str]) -> None:
        """Schedule batches and cancel some of their timers, evenly over the scheduling time."""
        plan = self._plan
        producer = Producer(self.run, "producer", endpoints, self._books)
        count = (plan.timers - plan.singles) // plan.batch_size
        cancels_each, cancelled = plan.cancels / count, 0
        chance = random.Random(self._random.random())
        for number in range(count):
            at_s = number * plan.scheduling_s / count
            self._sleep_until(start_ms, at_s)
            # Some are due within moments, some have been for a moment.
            delays = [chance.uniform(-0.2, plan.delay_s_max - at_s) for _ in range(plan.batch_size)]
            due_ms = [start_ms + int(1000 * (at_s + delay)) for delay in delays]
            marks = [*itertools.islice(self._marks, plan.batch_size)]
            ids = producer.batch(marks, due_ms)
            while ids and cancelled < cancels_each * (number + 1):
                chosen = chance.randrange(len(ids))
                producer.cancel(ids[chosen], marks[chosen])
                cancelled += 1
        producer.close()

    def _singles(self, endpoints: Sequence[str]) -> None:
        plan, start_ms = self._plan, now_ms()
        producer = Producer(self.run, "singles", endpoints, self._books)
        chance = random.Random(self._random.random())
        for number in range(plan.singles):
            self._sleep_until(start_ms, number * plan.scheduling_s / plan.singles)
            producer.single(next(self._marks), chance.uniform(0, 5))
        producer.close()

    def _kill_leader(self, faults: Faults) -> None:
        leader = self._cluster.wait_for_leader()
        state = self._cluster.state(leader)
        epoch = state.epoch if state else None
        so_far = f"{self._books.asked:,} asked for, {self._books.delivered:,} delivered"
        self._say(f"{so_far}: kill -9 {leader}, the leader")
        at_ms, at = now_ms(), time.monotonic()
        self._cluster.kill(leader)
        faults.record("kill", at_ms=at_ms, node=leader, role="leader", epoch=epoch)
        successor = self._cluster.wait_for_leader()
        self._say(f"{successor} leads, {time.monotonic() - at:.2f} s later")
        _pause(self._plan.down_s - (time.monotonic() - at))
        self._cluster.restart(leader)
        faults.record("restart", at_ms=now_ms(), node=leader)
        self._say(f"{leader} is back")

    def _drain(self, start_ms: int) -> bool:
        """Wait until nothing is open any more; return whether that came."""
        end_s = self._plan.delay_s_max + DRAIN_TIMEOUT_S
        while self._books.open:
            if now_ms() - start_ms > 1000 * end_s:
                return False
            _pause(0.05)
        # What nobody was answered may still come: it is due by now at the latest.
        self._sleep_until(start_ms, self._plan.delay_s_max + 1.0)
        return not self._books.open

    def _stop_nodes(self) -> None:
        try:
            self._cluster.stop()
        except LaunchError as error:
            print(error, file=sys.stderr)
            for name in filter(self._cluster.is_running, self._cluster.nodes):
                self._cluster.kill(name)

    def _sleep_until(self, start_ms: int, at_s: float) -> None:
        _pause(start_ms / 1000 + at_s - time.time())

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)


def _pause(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


@contextlib.contextmanager
def _threads(*works: Callable[[], None]) -> Iterator[None]:
    """Run works in threads; leave when all have ended, with the first failure of any."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def fresh(folder: Path) -> Path:
    """Return the folder, emptied of an earlier run.

    Raises:
        LaunchError: it holds something else, or nodes that don't end.
    """
    run = Run(folder)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "cluster.json").exists() and not run.histories.exists():
            raise LaunchError(f"{folder} is not an earlier run's: name another folder")
        LocalCluster(folder).stop()
        shutil.rmtree(folder)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.demo`."""
    parser = argparse.ArgumentParser(description="kill the leader; lose and repeat nothing")
    parser.add_argument("--dir", type=Path, default=Path("run/demo"), help="the run's folder")
    parser.add_argument("--timers", type=int, default=30_000)
    parser.add_argument("--kills", type=int, default=2, help="of the leader, ten seconds apart")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        return Demo(
            fresh(args.dir), Plan.of(timers=args.timers, kills=args.kills, seed=args.seed)
        ).play()
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
