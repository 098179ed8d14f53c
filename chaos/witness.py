"""The witness: a consumer group of its own, which tells the live audit what really came.

    python -m chaos.witness --cluster HOST:PORT,... --topic orders --into DIR

What the log promises (chaos/export.py) and what consumers are given go different ways through the
product: store, wheel, queue and leases lie between. The witness reads topics to the end in the
group `live-audit`, writes what it was given (chaos/events.py), and only then acks it: what was
not written comes again. It needs the timers' ids, not their payloads, but is sent both: it costs
the cluster what any further group of the topic costs. A topic that is deleted is waited for, not
made again.

REACH is its progress, per topic. While messages keep coming it is the greatest due time among
them: messages of a topic come in the order in which they fired, and nothing fires before what was
due earlier. When none came for `IDLE_S` everything has come, up to now.

Its files are `given-<milliseconds>-<number>`, per process.
"""

import argparse
import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from chaos import events
from chaos.events import WITNESS_GROUP, Event, Outbox, Told
from timer import timer_id
from timer.policies import DEFAULT_NAMESPACE
from timerclient.errors import Closed, NotFound, TimerError
from timerclient.groups import Start
from timerclient.messages import Batch
from timerclient.sync import Consumer, TimerClient

PREFIX: Final = "given-"
LEASE_S: Final = 2.0
"""What was given to a witness that died comes again after this."""
FLUSH_S: Final = 0.5
HEARTBEAT_S: Final = 1.0
IDLE_S: Final = 2.0
LOOK_S: Final = 0.5
PRUNE_S: Final = 60.0
WAITING_MAX: Final = 1000
"""Batches that wait to be written; consuming stands still beyond it."""

Given = tuple[str, Batch, int]
"""Topic, batch, when it came (Unix milliseconds)."""


@dataclass(slots=True)
class Progress:
    """How far one topic was given."""

    due_ms: int = 0
    """Greatest due time of what came."""
    came_ms: int = 0

    def reach_ms(self, now_ms: int) -> int:
        """Return the due time up to which everything that fired has come."""
        idle = now_ms - self.came_ms >= 1000 * IDLE_S
        return now_ms if idle else min(self.due_ms, now_ms)


class Writer:
    """Writes what came, then acks it; `step` is one look at what waits."""

    def __init__(self, into: Path, topics: Sequence[str], *, keep_s: float) -> None:
        self._outbox = Outbox(into, keep_s=keep_s)
        self._progress = {topic: Progress() for topic in topics}
        self._began_ms = events.now_ms()
        self._files = 0
        self._flushed_s = self._pruned_s = float("-inf")

    def step(self, waiting: Sequence[Given], now_s: float, now_ms: int) -> bool:
        """Write and ack what waits, and the progress, if it is time to; return whether it was."""
        since_s = now_s - self._flushed_s
        if since_s < (FLUSH_S if waiting else HEARTBEAT_S):
            return False
        self._flushed_s = now_s
        told = [self._given(*each) for each in waiting]
        for topic, progress in self._progress.items():
            reach_ms = progress.reach_ms(now_ms)
            columns = {"topic": topic, "at_ms": now_ms, "read_ms": reach_ms}
            told.append(Told(Event.REACH, 1, columns))
        self._files += 1
        self._outbox.put(f"{PREFIX}{self._began_ms:013d}-{self._files:012d}", told)
        for _, batch, _ in waiting:
            _ = batch.ack()  # unconfirmed ones come again
        if now_s - self._pruned_s >= PRUNE_S:
            self._pruned_s = now_s
            self._outbox.prune(PREFIX, time.time())
        return True

    def _given(self, topic: str, batch: Batch, came_ms: int) -> Told:
        due_ms, seq, _ = timer_id.decode(batch.raw_ids, 0)  # the check is not ours to judge
        progress = self._progress[topic]
        progress.due_ms = max(progress.due_ms, int(due_ms.max(initial=0)))
        progress.came_ms = max(progress.came_ms, came_ms)
        columns = {
            "seq": seq.astype(np.int64),
            "due_ms": due_ms,
            "at_ms": came_ms,
            "epoch": batch.epoch,
            "queue_offset": batch.queue_offsets,
            "fired_at_ms": list(batch.fired_at_ms),
            "handed_out_ms": batch.handed_out_ms,
            "topic": topic,
        }
        return Told(Event.GIVEN, len(due_ms), columns)


def _consume(
    topic: str, consumer: Consumer, again: Callable[[], Consumer], came: "queue.Queue[Given]"
) -> None:
    """Put what comes into `came`, until the consumer is closed."""
    while True:
        with contextlib.suppress(NotFound):
            for batch in consumer.batches():
                came.put((topic, batch, events.now_ms()))
            return
        consumer = again()


def _when_there(
    client: TimerClient, topic: str, consume: Callable[[], Consumer]
) -> Callable[[], Consumer]:
    """Return what waits for a topic that was deleted, and makes a consumer of the one to come."""

    def wait() -> Consumer:
        name = topic.removeprefix(f"{DEFAULT_NAMESPACE}/")
        while True:
            try:
                if any(status.name == name for status in client.topics()):
                    return consume()
            except Closed:
                raise
            except TimerError:  # whatever it is, the next look may go well
                pass
            time.sleep(LOOK_S)

    return wait


def witness(
    endpoints: Sequence[str], topics: Sequence[str], into: Path, *,
    stopped: Callable[[], bool], start: Start = "latest", keep_s: float = events.KEEP_S,
) -> None:  # fmt: skip
    """Consume the topics and write what comes, until `stopped`.

    Raises:
        TimerError: the cluster can't be reached, or refuses.
    """
    came: queue.Queue[Given] = queue.Queue(WAITING_MAX)
    failures: list[BaseException] = []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(TimerClient(endpoints))
        for topic in topics:
            consume = partial(
                client.consumer, topic, WITNESS_GROUP, lease=LEASE_S, start=start, name="witness"
            )
            again = _when_there(client, topic, consume)
            work = _guarded(partial(_consume, topic, consume(), again, came), failures)
            threading.Thread(target=work, name=f"witness-{topic}", daemon=True).start()
        writer = Writer(into, topics, keep_s=keep_s)
        waiting: list[Given] = []
        while not stopped() and not failures:
            with contextlib.suppress(queue.Empty):
                waiting.append(came.get(timeout=FLUSH_S / 10))
            if writer.step(waiting, time.monotonic(), events.now_ms()):
                waiting.clear()
    if failures:
        raise failures[0]


def _guarded(work: Callable[[], None], failures: list[BaseException]) -> Callable[[], None]:
    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            failures.append(error)

    return guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.witness`."""
    parser = argparse.ArgumentParser(description="consume topics for the live audit")
    parser.add_argument("--cluster", required=True, metavar="HOST:PORT,...", help="its nodes")
    parser.add_argument("--topic", action="append", required=True, help="may be given again")
    parser.add_argument("--into", type=Path, required=True, help="the folder for the events")
    parser.add_argument("--keep-s", type=float, default=events.KEEP_S, help="until files go")
    args = parser.parse_args(argv)
    stopping: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.append(1))
    try:
        witness(
            args.cluster.split(","), args.topic, args.into,
            stopped=lambda: bool(stopping), keep_s=args.keep_s,
        )  # fmt: skip
    except TimerError as broken:
        print(f"witness: {broken}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
