"""What a client tells of itself: events, log lines, and errors of wrong addresses."""

import asyncio
import importlib.metadata
import logging
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.timerclient.conftest import QUICK
from tests.timerclient.fake_cluster import NOW_MS, Cluster
from tests.waiting import until
from timerclient import (
    AckResult,
    AsyncTimerClient,
    CancelResult,
    ClientSettings,
    Connected,
    Event,
    InvalidRequest,
    LeaderChanged,
    LeaderMissing,
    SubmitBlocked,
    TimerClient,
    TimerState,
    Unreachable,
)
from timerclient.rows.pending_timers import TimerInfo
from timerclient.threads.background import Budget
from timerclient.values.node_addresses import parse_addresses


async def test_leaders_are_events_and_log_lines(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "timerclient")
    events: list[Event] = []
    async with AsyncTimerClient(
        cluster.address, timeout=60, settings=QUICK, on_event=events.append
    ) as client:
        await client.schedule("t", b"")
        await cluster.fail_over(1)
        await client.topics()
        cluster.leader = None
        asked = asyncio.ensure_future(client.topics())
        await until(lambda: isinstance(events[-1], LeaderMissing))
        cluster.leader = 1
        await asked
    first, second = cluster.nodes[0].address, cluster.nodes[1].address
    found, changed, missing, again = events
    assert (found, changed) == (Connected(first, 1), LeaderChanged(second, 2))
    assert isinstance(missing, LeaderMissing)
    assert missing.for_s >= 1
    assert missing.trouble.endswith("answers, but does not lead")
    assert again == Connected(second, 2)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "timerclient"]
    assert lines[0] == ("INFO", f"connected: {first} leads, epoch 1")
    assert lines[2][0] == "WARNING"
    assert lines[2][1].startswith("unreachable: no leader for 1 s")


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
async def test_error_of_on_event_is_logged_and_harms_nothing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def fail(event: Event) -> None:
        raise kind(event)

    async with AsyncTimerClient(cluster.address, timeout=60, on_event=fail) as client:
        await client.schedule("t", b"")
    assert "on_event failed" in caplog.text


def test_settings_are_finite() -> None:
    for value in (math.nan, math.inf, 0):
        with pytest.raises(InvalidRequest, match=r"call_s = .*: must be positive and finite"):
            ClientSettings(call_s=value)
    with pytest.raises(InvalidRequest, match="hold_s_max = nan"):
        ClientSettings(hold_s_max=math.nan)


def test_submit_that_blocks_is_told_before_it_waits() -> None:
    told: list[int] = []
    freed = threading.Event()

    def blocked(used: int) -> None:
        told.append(used)
        freed.set()

    budget = Budget(10, blocked)
    budget.take(10, 0)
    waiting = threading.Thread(target=budget.take, args=[5, 60])
    waiting.start()
    assert freed.wait(60)
    budget.release(10)
    waiting.join()
    assert told == [10]
    assert str(SubmitBlocked(10)) == "submit blocked: 10 submitted bytes are unanswered"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://10.0.0.1:7401", "without http://, such as 10.0.0.1:7401"),
        ("timers://timers.example", "without timers://, such as timers.example:7401"),
        ("timers.example", "gRPC port is 7401"),
        ("10.0.0.1:7401/x", "without a path"),
        ("10.0.0.1:", "must be host:port"),
        ("10.0.0.1:99999", "with a port of 1 to 65535"),
        ("::1", "in brackets"),
        (":7401", "must be host:port"),
    ],
)
def test_wrong_address_is_refused_with_a_way_to_mend_it(address: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TimerClient(f"10.0.0.1:7401,{address}")
    assert refused.value.field == "cluster"
    assert repr(address) in str(refused.value)
    assert told in refused.value.limit


@pytest.mark.parametrize("cluster", [7401, ["10.0.0.1:7401", None]])
def test_addresses_of_a_wrong_type_are_refused(cluster: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be str, or a sequence of str"):
        TimerClient(cluster)


def test_addresses_of_all_kinds_are_taken() -> None:
    good = ["[::1]:7401", "localhost:1", "10.0.0.1:65535"]
    assert parse_addresses(",".join(good)) == good


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_http_port_is_told_apart(http_port: int) -> None:
    async with AsyncTimerClient(f"127.0.0.1:{http_port}", settings=QUICK, timeout=600) as client:
        for call in (client.schedule("t", b""), client.topics(), client.status()):
            with pytest.raises(Unreachable, match="not its HTTP port"):  # at once
                await call
        with pytest.raises(Unreachable, match="not its HTTP port"):
            await client.consumer("t", "g").__aenter__()


async def test_grpc_writes_nothing_of_its_own_to_stderr(http_port: int) -> None:
    code = (
        "import timerclient, grpc\n"
        f"client = timerclient.TimerClient('127.0.0.1:{http_port}', timeout=1,\n"
        "    credentials=grpc.ssl_channel_credentials())\n"
        "try: client.status()\n"
        "except timerclient.Unreachable: client.close()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


def test_results_print_their_names_and_only_cancelled_is_true() -> None:
    assert [str(result) for result in CancelResult if result] == ["CANCELLED"]
    assert f"{CancelResult.NOT_FOUND}, {AckResult.ACKED}" == "NOT_FOUND, ACKED"


async def test_timer_of_a_list_is_cancelled_and_no_error_prints_its_payload(
    cluster: Cluster,
) -> None:
    async with AsyncTimerClient(cluster.address, timeout=60) as client:
        timer = await client.schedule("t", b"secret", due_ms=NOW_MS + 60_000, key="k")
        [info] = [each async for each in client.list_timers("t")]
        assert info.due == timer.due == datetime.fromtimestamp(info.due_ms / 1000, UTC)
        assert (await client.get_timer(info)).payload == b"secret"
        shown = f"{timer.id!r}, PENDING, topic='t', key='k', due_ms={timer.due_ms}"
        assert repr(info) == f"TimerInfo({shown})"
        moved = await client.reschedule(info, delay=600)
        both: Any = {"timer": info, "key": "k"}
        wrong: list[Any] = [b"secret", [info], {"secret": 1}]
        for refused in (
            client.cancel(**both),
            *map(client.cancel, wrong),
            client.schedule("t", wrong[2]),
            client.schedule_batch("t", "secret"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidRequest) as caught:
                await refused
            assert "secret" not in str(caught.value)
        assert await client.cancel(moved)
    assert TimerInfo(timer.raw, TimerState.PENDING).due == timer.due


@pytest.mark.slow
def test_types_are_seen_by_an_application_outside_the_tree(tmp_path: Path) -> None:
    installed = importlib.metadata.distribution("timer-cluster").files or []
    if any("finder" in str(file) for file in installed):
        pytest.skip("installed by an older Makefile: remove .venv/.made-from-lock, then make setup")
    (tmp_path / "app.py").write_text(
        "from timerclient import Message, TimerClient\n"
        "def work(client: TimerClient, message: Message) -> str:\n"
        "    client.schedule('t', b'', on_conflict='replac')\n"
        "    client.create_group('t', 'g', type='sharde')\n"
        "    client.alter_policies({'ttl_sm': 1}, topic='t')\n"
        "    client.consumer('t', 'g', start='middle')\n"
        "    reveal_type(message.due)\n"
        "    return message.topic\n"
    )
    script = Path(__file__).with_name("user_script.py").read_text()
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "app.py", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert told == ["3", "4", "5", "6"], done.stdout
    assert "script.py" not in done.stdout
    assert 'note: Revealed type is "datetime.datetime"' in done.stdout
