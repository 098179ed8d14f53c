"""The demo: timers survive two deaths of their leader, and an audit proves it.

    three nodes up -> clients schedule, cancel and consume all the time
                      kill -9 the leader while timers wait, restart it; twice
                   -> wait until all messages are delivered and acknowledged -> stop -> audit

The demo is a scenario of the chaos suite with clients of its own. It runs on any machine: plain
processes with default settings. Each client writes a history of its calls
(chaos/history/history.py). The audit reads only the histories and the nodes' logs. The run's folder
stays, for `make audit RUN=…`.
"""

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.history.history import RunFolder
from chaos.suite.show import Bill, Show, claimable, clear
from chaos.suite.stage.plan import Need, RunOptions, Strike
from chaos.suite.stage.stage import Stage
from chaos.workloads.history_books import GROUP, Books
from chaos.workloads.workload_consumer import RecordingConsumer, Source
from chaos.workloads.workload_producer import RecordingProducer, now_ms
from deploy.local import LaunchError
from timerclient import TimerClient

TOPIC: Final = "demo"
SOURCE: Final = Source(topic=TOPIC, group=GROUP)
CONSUMERS: Final = 2
BATCH_SIZE: Final = 200
SETTLE_S: Final = 1.0
"""After the last due time. Timers of calls without an answer may still be due until then."""
END_S: Final = 60.0
"""The longest wait for each thread to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The load and the kills of a demo. Times are in seconds from the first schedule."""

    timers: int = 30_000
    batch_size: int = BATCH_SIZE
    scheduling_s: float = 22.0
    """Schedules are spread over this time, so that some reach a dead leader."""
    delay_s_max: float = 30.0
    """Due times end this long after the start."""
    singles: int = 400
    cancels: int = 600
    kills_at_s: tuple[float, ...] = (8.0, 18.0)
    down_s: float = 3.0
    """Time until a killed node is restarted."""
    seed: int = 1

    @classmethod
    def of(cls, *, timers: int, kills: int, seed: int) -> "DemoPlan":
        """Return a plan with a kill every ten seconds and schedules until after the last one."""
        kills_at_s = tuple(8.0 + 10.0 * number for number in range(kills))
        last_s = max(kills_at_s, default=8.0)
        singles = 20 * int(last_s + 4)
        singles += (timers - singles) % BATCH_SIZE  # the other timers fill whole batches
        return cls(
            timers=timers,
            scheduling_s=last_s + 4,
            delay_s_max=last_s + 12,
            singles=singles,
            cancels=timers // 50,
            kills_at_s=kills_at_s,
            seed=seed,
        )

    def bill(self) -> Bill:
        """Return the demo as a scenario for the suite."""
        kills = [Strike(at_s=at_s, nemesis="kill", for_s=self.down_s) for at_s in self.kills_at_s]
        return Bill(
            scenario="demo",
            seed=self.seed,
            options=RunOptions(minutes=self.scheduling_s / 60, workloads=("demo",)),
            schedule=kills,
            missing=dict.fromkeys(Need, ""),
            settings=(),
            complete=True,
        )


class DemoClients:
    """The demo's clients: a workload of the suite (chaos/workloads)."""

    name = "demo"

    def __init__(self, plan: DemoPlan, run: RunFolder) -> None:
        self._plan = plan
        self._run = run
        self._endpoints: Sequence[str] = ()
        self._marks = itertools.count(1)
        self._books = Books()
        self._threads: list[threading.Thread] = []
        self._clients: list[TimerClient] = []
        self._consumers: list[RecordingConsumer] = []
        self._start_ms = 0

    def join(self, stage: Stage) -> Sequence["DemoClients"]:
        """Return the workloads for a stage: these clients."""
        plan, self._endpoints = self._plan, stage.cluster.endpoints
        stage.say(
            f"{plan.timers:,} timers for the next {plan.delay_s_max:g} s, {plan.cancels} cancels"
        )
        return [self]

    def progress(self) -> str:
        """Return a line with the counts so far."""
        books = self._books
        return (
            f"{books.asked:,} timers requested ({books.unanswered} without an answer),"
            f" {books.delivered:,} deliveries"
        )

    # ---- the interface of a workload

    def start(self) -> None:
        """Open the consumers and start the producers."""
        self._start_ms = now_ms()
        for number in range(1, CONSUMERS + 1):
            name = f"consumer-{number}"
            self._consumers.append(
                RecordingConsumer(self._run, name, self._client(), self._books, SOURCE)
            )
        for work in (self._batches, self._singles):
            thread = threading.Thread(target=self._noting, args=(work,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop_producing(self) -> None:
        """Do nothing: the demo schedules a fixed number of timers."""

    def drained(self) -> bool:
        """Return whether all timers are scheduled and all their messages have arrived.

        Raises the failure of a producer, if one failed.
        """
        self._books.check()
        over_ms = self._start_ms + int(1000 * (self._plan.delay_s_max + SETTLE_S))
        produced = not any(thread.is_alive() for thread in self._threads)
        return produced and not self._books.missing and now_ms() >= over_ms

    def close(self) -> None:
        """Confirm the acknowledgements in flight, then end."""
        for thread in self._threads:
            thread.join(END_S)
        for consumer in self._consumers:
            consumer.close()
        for client in self._clients:
            client.close()
        self._books.check()

    # ---- producing

    def _noting(self, work: Callable[[RecordingProducer, random.Random], None]) -> None:
        """Run one producer; `drained` raises its failure."""
        with self._books.noting_failure():
            name = work.__name__.strip("_")
            producer = RecordingProducer(self._run, name, self._client(), self._books, topic=TOPIC)
            work(producer, random.Random(f"{self._plan.seed}/{name}"))
            producer.close()

    def _batches(self, producer: RecordingProducer, chance: random.Random) -> None:
        """Schedule batches and cancel some of their timers, evenly over the scheduling time."""
        plan = self._plan
        count = (plan.timers - plan.singles) // plan.batch_size
        cancels_each, cancelled = plan.cancels / count, 0
        for number in range(count):
            at_s = number * plan.scheduling_s / count
            self._sleep_until(at_s)
            # Delays begin at -0.2 s: some timers are due at once, or are overdue.
            delays = [chance.uniform(-0.2, plan.delay_s_max - at_s) for _ in range(plan.batch_size)]
            due_ms = [self._start_ms + int(1000 * (at_s + delay)) for delay in delays]
            marks = [*itertools.islice(self._marks, plan.batch_size)]
            ids = producer.batch(marks, due_ms)
            while ids and cancelled < cancels_each * (number + 1):
                chosen = chance.randrange(len(ids))
                producer.cancel([ids[chosen]], [marks[chosen]])
                cancelled += 1

    def _singles(self, producer: RecordingProducer, chance: random.Random) -> None:
        """Schedule timers one by one, each with a delay of at most 5 s."""
        plan = self._plan
        for number in range(plan.singles):
            self._sleep_until(number * plan.scheduling_s / plan.singles)
            producer.single(next(self._marks), chance.uniform(0, 5))

    def _client(self) -> TimerClient:
        client = TimerClient(self._endpoints)
        self._clients.append(client)
        return client

    def _sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, self._start_ms / 1000 + at_s - time.time()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.commands.demo`."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos.commands.demo",
        description="Run three nodes under load, kill the leader, and audit the run.",
    )
    parser.add_argument("--dir", type=Path, default=Path("run/demo"), help="the run's folder")
    parser.add_argument("--timers", type=int, default=30_000, help="default: 30000")
    parser.add_argument(
        "--kills", type=int, default=2, help="kills of the leader, ten seconds apart (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients (default: 1)")
    args = parser.parse_args(argv)
    plan = DemoPlan.of(timers=args.timers, kills=args.kills, seed=args.seed)
    try:
        run = claimable(args.dir)
        clear(run)
        clients = DemoClients(plan, run)
        return Show(run, plan.bill(), clients.join, progress=clients.progress).play()
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
