"""A consumer that will be killed: it receives messages, records them, and acks none.

python -m chaos.suite.stage.doomed RUN CLIENT ENDPOINTS TOPIC GROUP LEASE_MS
"""

import sys
from pathlib import Path

from chaos.history.history import History, RunFolder
from timerclient import TimerClient


def main() -> None:
    """Consume until killed. Print a line for each batch of messages."""
    root, name, endpoints, topic, group, lease_ms = sys.argv[1:]
    history = History(RunFolder(Path(root)), name)
    client = TimerClient(endpoints)
    consumer = client.consumer(topic, group=group, lease=int(lease_ms) / 1000, name=name)
    for batch in consumer.batches():
        history.receive(topic, group, batch)
        print("taken", flush=True)


if __name__ == "__main__":
    main()
