"""The witness: a consumer of its own group, which records the messages that it receives.

    python -m chaos.live.witness --cluster HOST:PORT,... --topic orders --into RUN_DIR

The log decides which timers fire. Between the log and a consumer lie store, wheel, queue and
leases, so the live audit needs a consumer, too. The witness consumes topics in the group
`live-audit`. It records each message in a history (docs/history-format.md) and acks the message
afterwards: an unwritten message is delivered again. It costs the cluster as much as any other group
of the topic. When a topic is deleted, the witness waits for the next topic of that name. It does
not create the topic.

Its history is `RUN_DIR/live/histories/witness-<milliseconds>.jsonl`, one per process. The time of
the file tells that the witness is alive: it sets that time every BEAT_S. Every LOOK_S it asks the
cluster for the topics in which its group has acked all messages, and records the time of the
question in `RUN_DIR/live/drained/witness-<milliseconds>.json`.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from chaos.history.history import History, RunFolder, now_ms
from chaos.live.judge import WITNESS_GROUP
from chaos.live.recorded_messages import DRAINED, LIVE
from timer.entries.policies import DEFAULT_NAMESPACE
from timerclient.client.timer_client import TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import Closed, LeaseLost, NotFound, TimerError

LEASE_MS: Final = 2_000
"""The messages of a witness that died are delivered again after this time."""
BEAT_S: Final = 0.5
LOOK_S: Final = 0.5


def consume(client: TimerClient, topic: str, history: History) -> None:
    """Record the messages of a topic, and ack them, until the client is closed."""
    while True:
        history.open(topic, WITNESS_GROUP, start_ms=now_ms(), lease_ms=LEASE_MS)
        with contextlib.suppress(NotFound):
            consumer = client.consumer(
                topic, WITNESS_GROUP, lease=LEASE_MS / 1000, start="latest", name="witness"
            )
            for batch in consumer.batches():
                history.receive(topic, WITNESS_GROUP, batch)
                with contextlib.suppress(LeaseLost):  # the messages come again
                    _ = batch.ack()  # a lost ack costs another delivery
            return
        wait_for(client, topic)


def wait_for(client: TimerClient, topic: str) -> None:
    """Return as soon as a deleted topic exists again."""
    for topics in _looks(client):
        if any(status.name == topic for status in topics):
            return


def record_drained(client: TimerClient, path: Path) -> None:
    """Record when the witness's group last had no unacked message in a topic, until the close."""
    drained: dict[str, int] = {}
    asked_ms = now_ms()
    for topics in _looks(client):
        for status in topics:
            if any(g.name == WITNESS_GROUP and not g.unacked for g in status.groups):
                drained[status.name] = asked_ms
        other = path.with_suffix(".new")
        other.write_text(json.dumps(drained))
        other.rename(path)
        asked_ms = now_ms()


def _looks(client: TimerClient) -> Iterator[Sequence[pb.TopicStatus]]:
    """Yield the topics of the cluster, every LOOK_S, until the client is closed."""
    while True:
        try:
            yield client.topics()
        except Closed:
            raise
        except TimerError:  # the next call may succeed
            pass
        time.sleep(LOOK_S)


def witness(
    endpoints: Sequence[str], topics: Sequence[str], run: Path, *, stopped: Callable[[], bool]
) -> None:
    """Consume the topics and record their messages, until `stopped`.

    Raises:
        TimerError: the cluster can't be reached, or rejects a call.
    """
    topics = [topic.removeprefix(f"{DEFAULT_NAMESPACE}/") for topic in topics]
    folder, name = RunFolder(run / LIVE), f"witness-{now_ms():013d}"
    drained = folder.root / DRAINED / f"{name}.json"
    drained.parent.mkdir(parents=True, exist_ok=True)
    with (
        History(folder, name) as history,
        ThreadPoolExecutor(len(topics) + 1) as pool,  # its threads end when the client is closed
        TimerClient(endpoints) as client,
    ):
        works = [pool.submit(consume, client, topic, history) for topic in topics]
        works.append(pool.submit(record_drained, client, drained))
        while not stopped():
            beat_ns = time.time_ns()
            os.utime(folder.histories / f"{name}.jsonl", ns=(beat_ns, beat_ns))
            for work in wait(works, BEAT_S, FIRST_COMPLETED).done:
                work.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m chaos.live.witness`."""
    parser = argparse.ArgumentParser(description="consume topics for the live audit")
    parser.add_argument("--cluster", required=True, metavar="HOST:PORT,...", help="some nodes")
    parser.add_argument("--topic", action="append", required=True, help="may be repeated")
    parser.add_argument("--into", type=Path, required=True, metavar="RUN_DIR", help="its folder")
    args = parser.parse_args(argv)
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopping.append(number))
    try:
        witness(args.cluster.split(","), args.topic, args.into, stopped=lambda: bool(stopping))
    except TimerError as broken:
        print(f"witness: {broken}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
