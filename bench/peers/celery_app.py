"""The task of the Celery peer. It sends its payload back to the harness over a socket."""

import functools
import os
import socket

from celery import Celery

from bench.feed import PAYLOAD_SIZE

app = Celery("peers", broker=os.environ["PEERS_BROKER"])
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    # Below the longest delay, the broker would deliver a waiting task again.
    broker_transport_options={"visibility_timeout": 86_400},
)


@functools.cache
def _harness() -> socket.socket:
    """Return the connection of this worker process."""
    return socket.create_connection(("127.0.0.1", int(os.environ["PEERS_PORT"])))


def fire(payload: str) -> None:
    """Send the payload, as characters of Latin-1, to the harness."""
    data = payload.encode("latin-1")
    assert len(data) == PAYLOAD_SIZE, len(data)
    _harness().sendall(data)


fire_task = app.task(name="fire")(fire)
