"""A consumer that will be killed: it receives messages, records them, and acks none.

python -m chaos.suite.stage.doomed RUN CLIENT ENDPOINTS TOPIC GROUP LEASE_MS
"""

import sys
import time
from pathlib import Path

from chaos.history.history import History, RunFolder, mark_of
from timerclient import TimerClient


def main() -> None:
    """Consume until killed. Print a line for each batch of messages."""
    root, name, endpoints, topic, group, lease_ms = sys.argv[1:]
    history = History(RunFolder(Path(root)), name)
    client = TimerClient(endpoints)
    consumer = client.consumer(topic, group=group, lease=int(lease_ms) / 1000, name=name)
    for batch in consumer.batches():
        history.deliver(
            topic,
            group,
            received_ms=time.time_ns() // 1_000_000,
            epoch=batch.epoch,
            lease_id=batch.lease_id,
            group_id=batch.group_id,
            offsets=[*batch.queue_offsets],
            ids=batch.ids,
            marks=[*map(mark_of, batch.payloads)],
            attempts=[*batch.attempts],
            fired_at_ms=[*batch.fired_at_ms],
            due_ms=[*batch.due_ms],
        )
        print("taken", flush=True)


if __name__ == "__main__":
    main()
