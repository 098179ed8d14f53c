"""Processes that fork while they have a client, and after they closed one."""

import os
import subprocess
import sys

import pytest

from tests.timerclient.conftest import Threaded

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

PARENT = """
import gc, os, signal, sys
from timerclient import TimerClient

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def use():
    client = TimerClient(sys.argv[1], timeout=5)
    client.schedule_batch("orders", [b"p"])
    consumer = client.consumer("orders", "g")
    consumer.receive()
    return client, consumer
"""
OPEN = """
client, consumer = use()
print({forked(lambda: [gc.collect() for _ in range(20)]) for _ in range(20)})
client.schedule("orders", b"p")
os._exit(0)
"""
CLOSED = """
for _ in range(10):
    client, consumer = use()
    consumer.close()
    client.close()
    print(forked(use))
"""
ONE_DOWN = (
    """
sys.argv[1] = "127.0.0.1:1," + sys.argv[1]
"""
    + CLOSED
)
KEPT = """
from timerclient.streams import node_channel
client, consumer = use()
kept, slept = client._client._nodes._leader, []
client.close()
forked(int)
node_channel.time.sleep = slept.append
print(forked(int), slept)
"""
ENDED = """
import asyncio
from timerclient import TimerApp
app = TimerApp("timers://" + sys.argv[1], timeout=5)

async def use_app():
    await app.client.schedule("orders", b"p")

asyncio.run(use_app())
print(forked(lambda: asyncio.run(use_app())))
"""
SOON = """
from timerclient.streams import node_channel
client, consumer = use()
slept = []
client.close()
node_channel.time.sleep = slept.append
print(forked(int), len(slept))
"""
WITHIN = """
with TimerClient(sys.argv[1], timeout=5) as client:
    client.schedule_batch("orders", [b"p"])
    with client.consumer("orders", "g"):
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        print(os.waitpid(pid, 0)[1])
"""


def run(threaded: Threaded, program: str) -> str:
    quiet = "ignore:This process (pid=:DeprecationWarning"  # Python 3.12 and later warn of threads
    command = [sys.executable, "-W", quiet, "-c", program, threaded.cluster.address]
    environ = {name: os.environ[name] for name in os.environ if not name.startswith("GRPC")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environ, check=False
    )
    return done.stdout + done.stderr


def test_process_forked_off_one_with_an_open_client_does_not_crash(threaded: Threaded) -> None:
    assert run(threaded, PARENT + OPEN) == "{0}\n"


def test_process_forked_within_the_blocks_of_a_client_leaves_them_without_a_close(
    threaded: Threaded,
) -> None:
    assert run(threaded, PARENT + WITHIN) == "0\n"


def test_process_forked_after_a_client_was_closed_has_its_own(threaded: Threaded) -> None:
    assert run(threaded, PARENT + CLOSED) == "0\n" * 10


def test_process_forked_after_a_client_met_a_node_that_is_down_has_its_own(
    threaded: Threaded,
) -> None:
    assert run(threaded, PARENT + ONE_DOWN) == "0\n" * 10


def test_process_forked_after_an_event_loop_ended_with_an_open_client_makes_none(
    threaded: Threaded,
) -> None:
    answer = run(threaded, PARENT + ENDED)
    assert answer.startswith("RuntimeError this process was forked from one with an open client")
    assert answer.endswith("256\n")


def test_fork_soon_after_a_close_waits_for_the_end_of_the_threads(threaded: Threaded) -> None:
    assert run(threaded, PARENT + SOON) == "0 1\n"


def test_fork_does_not_wait_for_a_channel_that_the_application_keeps(threaded: Threaded) -> None:
    assert run(threaded, PARENT + KEPT) == "0 []\n"
