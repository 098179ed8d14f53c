"""Against three real processes with the lease that nodes have by default: the leader is gone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

from tests.cluster.load import loaded
from tests.cluster.running import AS_SHIPPED, RPC_S, Running, columns, schedule, until
from timerclient.proto import timer_pb2 as pb

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

SETTINGS = (*AS_SHIPPED, "storage.flush_interval_ms = 1000")


def leader_other_than(cluster: Running, name: str) -> str:
    def other() -> str | None:
        """Request the leader's name from other nodes only; a stopped process takes a second."""
        for each in cluster.nodes:
            state = cluster.state(each) if each != name else None
            if state is not None and state.role == "leader" and state.serving:
                return each
        return None

    found = until(other)
    assert found is not None
    return found


def test_leader_killed_under_load_loses_and_repeats_nothing(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    cluster.up()
    before = cluster.digests_agree().shared.epoch
    with loaded(cluster, topic) as load:
        leader = cluster.wait_for_leader()
        killed_s = time.monotonic()
        cluster.kill(leader)
        leader_other_than(cluster, leader)
        led_s = time.monotonic()
        load.wait_for_acks(200)
        cluster.restart(leader)
        load.wait_for_acks(100)
    figures(
        f"kill -9: successor seen after {led_s - killed_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s, no delivery for {load.longest_delivery_gap_s():.2f} s; "
        f"{len(load.scheduled)} timers, {len(load.deliveries) - len(load.acked)} redeliveries"
    )
    assert cluster.digests_agree().shared.epoch > before

    def one_epoch() -> bool:
        state = cluster.admin().GetCheckpoint(pb.GetCheckpointRequest(), timeout=RPC_S)
        return len(state.nodes) == 3 and {n.epoch for n in state.nodes} == {state.shared.epoch}

    until(one_epoch)


def test_leader_stopped_until_another_serves_is_replaced_and_confirms_nothing_late(
    cluster: Running, topic: str, figures: Callable[[str], None]
) -> None:
    cluster.up()
    with ThreadPoolExecutor() as threads, loaded(cluster, topic) as load:
        leader = cluster.wait_for_leader()
        pid = cluster.node(leader).pid
        stub = cluster.timers(leader)
        stopped_s = time.monotonic()
        cluster.kill(leader, signal.SIGSTOP)
        late = [
            threads.submit(stub.Schedule, schedule(columns(topic, [b"late"])), timeout=RPC_S)
            for _ in range(5)
        ]
        led = leader_other_than(cluster, leader)
        led_s = time.monotonic()
        load.wait_for_acks(300)
        cluster.kill(leader, signal.SIGCONT)
        for future in late:
            # The old leader fails the call, or has seen that it no longer leads and relays it.
            try:
                timer_id = future.result().timer_ids
            except grpc.RpcError:
                continue
            cluster.timers(led).GetTimer(pb.GetTimerRequest(timer_id=timer_id), timeout=RPC_S)
        load.wait_for_acks(100)
    assert cluster.node(leader).pid == pid, "it went on as a follower"
    assert cluster.is_running(leader)
    figures(
        f"SIGSTOP: successor seen after {led_s - stopped_s:.2f} s, no schedule answered for "
        f"{load.longest_gap_s():.2f} s"
    )


WORKER = """
import os
from timerclient import Backoff, TimerApp
app = TimerApp()
@app.timer("jobs", group="g", retry=Backoff(0.1, max=1))
async def job(number: int) -> None:
    with open("done", "a") as file:
        file.write(f"{number}\\n")
"""


def test_worker_runs_every_timer_through_a_killed_leader_and_ends_at_sigterm(
    cluster: Running, tmp_path: Path
) -> None:
    cluster.up()
    (tmp_path / "jobs_app.py").write_text(WORKER)
    (tmp_path / "done").touch()
    command = [sys.executable, "-m", "timerclient.cli.timerctl", "worker", "jobs_app:app"]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TIMERS_URL": f"timers://{','.join(cluster.endpoints)}",
    }
    env["XDG_CONFIG_HOME"] = str(tmp_path)

    def done() -> set[str]:
        return {*(tmp_path / "done").read_text().split()}

    with cluster.client() as client, (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=log)
        try:
            delays = [number * 0.01 for number in range(300)]
            for number, delay in enumerate(delays):
                client.submit("jobs", json={"number": number}, delay=delay)
            until(lambda: len(done()) >= 50)
            leader = cluster.wait_for_leader()
            cluster.kill(leader)
            until(lambda: len(done()) == 300)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            worker.kill()
            worker.wait()
        assert done() == {*map(str, range(300))}
        [jobs] = [each for each in client.topics() if each.name == "jobs"]
        assert (jobs.groups[0].unacked, jobs.groups[0].settings.backoff_ms_min) == (0, 100)
    assert "worker stopped" in (tmp_path / "log").read_text()


class Hook(ThreadingHTTPServer):
    """An HTTP server: it fails each tenth message once, and keeps `last` until `go` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.last, self.go = threading.Event(), threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                name = self.rfile.read(int(self.headers["Content-Length"])).decode()
                self.send_response(hook.answer(name))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def answer(self, name: str) -> int:
        if name.endswith("0") and name not in self.failed:
            self.failed.add(name)
            return 500
        if name == "last":
            self.last.set()
            assert self.go.wait(60)
        self.done.add(name)
        return 204


@contextmanager
def serving() -> Iterator[Hook]:
    with Hook() as hook:
        thread = threading.Thread(target=hook.serve_forever, args=[0.05])
        thread.start()
        try:
            yield hook
        finally:
            hook.shutdown()
            thread.join()


def test_push_posts_every_timer_through_a_killed_leader_and_ends_at_sigterm(
    cluster: Running, tmp_path: Path
) -> None:
    cluster.up()
    words = ["push", "hooks", "--group", "g", "--backoff-min", "100ms", "--backoff-max", "1s"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path)}
    env["TIMERCTL_ENDPOINTS"] = ",".join(cluster.endpoints)
    with serving() as hook, cluster.client() as client, (tmp_path / "log").open("w") as log:
        to = f"http://127.0.0.1:{hook.server_port}/"
        command = [sys.executable, "-m", "timerclient.cli.timerctl", *words, "--to", to]
        push = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=log)
        try:
            for number in range(300):
                client.submit("hooks", b"%d" % number, delay=number * 0.01)
            until(lambda: len(hook.done) >= 50)
            cluster.kill(cluster.wait_for_leader())
            until(lambda: len(hook.done) == 300)
            assert len(hook.failed) == 30
            client.schedule("hooks", b"last", delay=0)
            assert hook.last.wait(60)
            push.send_signal(signal.SIGTERM)
            until(lambda: "draining" in (tmp_path / "log").read_text())
            hook.go.set()
            assert push.wait(30) == 0, (tmp_path / "log").read_text()
        finally:
            hook.go.set()
            push.kill()
            push.wait()
        assert hook.done == {"last", *map(str, range(300))}
        [hooks] = [each for each in client.topics() if each.name == "hooks"]
        assert hooks.groups[0].unacked == 0
    assert "worker stopped" in (tmp_path / "log").read_text()
