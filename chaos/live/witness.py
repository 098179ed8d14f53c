"""The witness: a consumer of its own group, which records for the live audit the messages it gets.

    python -m chaos.live.witness --cluster HOST:PORT,... --topic orders --into DIR

The log decides which timers fire. Between the log and a consumer lie store, wheel, queue and
leases, so the live audit needs a consumer, too. The witness consumes topics in the group
`live-audit`. It writes each message to a file (chaos/live/exported_events.py) and acks the message
afterwards: an unwritten message is delivered again. It costs the cluster as much as any other group
of the topic. When a topic is deleted, the witness waits for the next topic of that name. It does
not create the topic.

REACH is the progress of one topic: a due time up to which every message has come. While messages
come, it is the greatest due time among them: a topic's messages come in the order of firing, and
timers fire in the order of their due times. After `IDLE_S` without a message it is now.

The files are `given-<milliseconds>-<number>`, per process. The file `witness.alive` is touched with
each of them, at least once a second.
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

from chaos.live import exported_events
from chaos.live.exported_events import WITNESS_GROUP, EventColumns, EventKind
from timer.entries.policies import DEFAULT_NAMESPACE
from timer.model import timer_id
from timerclient.client.sync import Consumer
from timerclient.client.timer_client import TimerClient
from timerclient.rows.messages import Batch
from timerclient.values.errors import Closed, LeaseLost, NotFound, TimerError

ALIVE: Final = "witness.alive"
LEASE_S: Final = 2.0
"""The messages of a witness that died are delivered again after this time."""
FLUSH_S: Final = 0.5
HEARTBEAT_S: Final = 1.0
IDLE_S: Final = 2.0
LOOK_S: Final = 0.5
WAITING_MAX: Final = 1000
"""The most batches that wait to be written. The consumers stop at this number."""

Given = tuple[str, Batch, int]
"""(topic, batch, its arrival in Unix milliseconds)."""


@dataclass(slots=True)
class TopicProgress:
    """The progress of one topic."""

    due_ms: int = 0
    """The greatest due time of the messages that came."""
    came_ms: int = 0
    """The arrival of the last message."""

    def reach_ms(self, now_ms: int) -> int:
        """Return the due time up to which every message has come."""
        idle = now_ms - self.came_ms >= 1000 * IDLE_S
        return now_ms if idle else min(self.due_ms, now_ms)


class Writer:
    """Writes messages, then acks them; `step` is one round."""

    def __init__(self, into: Path, topics: Sequence[str]) -> None:
        into.mkdir(parents=True, exist_ok=True)
        self._into = into
        self._progress = {topic: TopicProgress() for topic in topics}
        self._began_ms = exported_events.now_ms()
        self._files = 0
        self._flushed_s = float("-inf")

    def step(self, waiting: Sequence[Given], now_s: float, now_ms: int) -> bool:
        """Write the waiting batches and the progress, if it is time, and ack; return whether."""
        since_s = now_s - self._flushed_s
        if since_s < (FLUSH_S if waiting else HEARTBEAT_S):
            return False
        self._flushed_s = now_s
        told = [self._given(*each) for each in waiting]
        for topic, progress in self._progress.items():
            reach_ms = progress.reach_ms(now_ms)
            columns = {"topic": topic, "at_ms": now_ms, "read_ms": reach_ms}
            told.append(EventColumns(EventKind.REACH, 1, columns))
        self._files += 1
        exported_events.put(self._into, f"given-{self._began_ms:013d}-{self._files:012d}", told)
        (self._into / ALIVE).touch()
        for _, batch, _ in waiting:
            with contextlib.suppress(LeaseLost):  # the messages come again
                _ = batch.ack()  # a lost ack costs another delivery
        return True

    def _given(self, topic: str, batch: Batch, came_ms: int) -> EventColumns:
        due_ms, seq, _ = timer_id.decode(batch.raw_ids, 0)  # the audit judges the checksum
        progress = self._progress[topic]
        progress.due_ms = max(progress.due_ms, int(due_ms.max(initial=0)))
        progress.came_ms = max(progress.came_ms, came_ms)
        columns = {
            "seq": seq.astype(np.int64),
            "due_ms": due_ms.astype(np.int64),
            "queue_offset": np.array(batch.queue_offsets, np.int64),
            "fired_at_ms": list(batch.fired_at_ms),
            "handed_out_ms": batch.handed_out_ms,
            "topic": topic,
        }
        return EventColumns(EventKind.GIVEN, len(due_ms), columns)


def _opened(client: TimerClient, topic: str) -> Consumer:
    return client.consumer(topic, WITNESS_GROUP, lease=LEASE_S, start="latest", name="witness")


def _consume(
    client: TimerClient, topic: str, consumer: Consumer, came: "queue.Queue[Given]"
) -> None:
    """Put batches into `came` until the consumer is closed."""
    while True:
        with contextlib.suppress(NotFound):
            for batch in consumer.batches():
                came.put((topic, batch, exported_events.now_ms()))
            return
        consumer = _opened_again(client, topic)


def _opened_again(client: TimerClient, topic: str) -> Consumer:
    """Return a consumer as soon as a deleted topic exists again."""
    while True:
        try:
            if any(status.name == topic for status in client.topics()):
                return _opened(client, topic)
        except Closed:
            raise
        except TimerError:  # the next call may succeed
            pass
        time.sleep(LOOK_S)


def witness(
    endpoints: Sequence[str], topics: Sequence[str], into: Path, *,
    stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Consume the topics and write their messages, until `stopped`.

    Raises:
        TimerError: the cluster can't be reached, or rejects a call.
    """
    topics = [topic.removeprefix(f"{DEFAULT_NAMESPACE}/") for topic in topics]
    came: queue.Queue[Given] = queue.Queue(WAITING_MAX)
    failures: list[BaseException] = []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(TimerClient(endpoints))
        for topic in topics:
            consume = partial(_consume, client, topic, _opened(client, topic), came)
            work = _guarded(consume, failures)
            threading.Thread(target=work, name=f"witness-{topic}", daemon=True).start()
        writer = Writer(into, topics)
        waiting: list[Given] = []
        while not stopped() and not failures:
            with contextlib.suppress(queue.Empty):
                waiting.append(came.get(timeout=FLUSH_S / 10))
            if writer.step(waiting, time.monotonic(), exported_events.now_ms()):
                waiting.clear()
    if failures:
        raise failures[0]


def _guarded(work: Callable[[], None], failures: list[BaseException]) -> Callable[[], None]:
    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            failures.append(error)

    return guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.live.witness`."""
    parser = argparse.ArgumentParser(description="consume topics for the live audit")
    parser.add_argument("--cluster", required=True, metavar="HOST:PORT,...", help="its nodes")
    parser.add_argument("--topic", action="append", required=True, help="may be given again")
    parser.add_argument("--into", type=Path, required=True, help="the folder for the events")
    args = parser.parse_args(argv)
    stopping: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.append(1))
    try:
        witness(args.cluster.split(","), args.topic, args.into, stopped=lambda: bool(stopping))
    except TimerError as broken:
        print(f"witness: {broken}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
