"""The examples of the documentation pass: those for tests as a test file, others on a fake."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import timerclient
from timerclient import OutcomeUnknown, TimerClient
from timerfake import FakeApp, FakeCluster

ROOT = Path(__file__).parents[2]


def examples(document: str) -> list[str]:
    """Return the examples in Python of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


EXAMPLES = examples("docs/testing.md")
SETTINGS = ["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function"]


def test_examples_of_the_documentation_pass(tmp_path: Path) -> None:
    source = "\n\n".join(EXAMPLES)
    (tmp_path / "test_examples.py").write_text(source)
    (tmp_path / "pytest.ini").write_text(
        "\n".join(["[pytest]", *SETTINGS, "filterwarnings = error"])
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    tests = len(re.findall(r"^(?:async )?def test_", source, re.MULTILINE))
    assert tests >= 9
    assert f"{tests} passed" in run.stdout, run.stdout + run.stderr


def played(example: str, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what an example prints, run as it stands, while the fake's time passes."""
    printed: list[str] = []

    def connect(addresses: str) -> TimerClient:
        assert addresses.count(":74") == 3
        return fake.client()

    def note(*words: object) -> None:
        printed.append(" ".join(map(str, words)))

    monkeypatch.setattr(timerclient, "TimerClient", connect)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(exec, example, {"print": note})
        while not done.done():
            fake.advance(0.1)
        done.result()
    return printed


def test_example_of_workers_cancels_unpaid_orders_and_rejects_others(
    capsys: pytest.CaptureFixture[str], timer_app: Callable[..., FakeApp]
) -> None:
    names: dict[str, Any] = {}
    for example in examples("docs/workers.md"):
        exec(example, names)
    timers = timer_app(names["app"])
    for number in (4711, -1):
        names["cancel_unpaid"].schedule_sync(order_id=number, delay=1800)
    timers.advance(1800)
    assert re.fullmatch(r"cancel 4711 timer \w{24}\n", capsys.readouterr().out)
    assert [str(each) for each in timers.errors] == ["no such order: -1"]


def test_example_of_the_readme_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = examples("README.md")
    with FakeCluster() as fake, fake.client() as client:
        cancelled, listed, count, *rest = played(example, fake, monkeypatch)
        assert re.match(r"cancelled: \w{24} 20\d\d-", cancelled)
        assert listed.endswith("+00:00 order-4711")
        assert (count, rest) == ("1", ["b'remind 1'", "b'remind 2'"])
        [topic] = client.topics()
        assert (topic.pending, topic.cancelled, topic.fired) == (0, 3, 2)
        assert topic.groups[0].unacked == 0


def test_example_of_throughput_sends_what_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    example = examples("docs/python.md")[3]
    with FakeCluster() as fake:
        assert sum(map(int, played(example, fake, monkeypatch))) == 5_000


def test_example_of_codecs_prints_what_was_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    example = examples("docs/python.md")[2]
    with FakeCluster() as fake:
        assert played(example, fake, monkeypatch) == ["4711 shout"]


def test_example_of_a_cancel_by_key_passes_over_a_lost_answer() -> None:
    names: dict[str, Any] = {}
    exec(examples("docs/python.md")[1], names)
    with FakeCluster() as fake, fake.client() as client:
        for order in (4711, 4712):
            client.schedule("orders", b"", key=f"order-{order}", delay=60)
        names["on_payment"](client, 4711)
        assert client.count_timers("orders").pending == 1
        really_cancel = client.cancel

        def cancel(**named: Any) -> None:
            really_cancel(**named)
            raise OutcomeUnknown

        client.cancel = cancel  # type: ignore[assignment]
        names["on_payment"](client, 4712)
        assert client.count_timers("orders").pending == 0


def test_example_of_keys_updates_a_timer_and_finds_one_by_its_old_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [example, *_] = examples("docs/python.md")
    with FakeCluster() as fake, fake.client() as client:
        assert played(example, fake, monkeypatch) == []
        assert client.get_timer(key="order-4711", topic="orders").payload == b"total 25"


def test_consumer_holds_what_it_has_and_its_window_and_gives_its_group_its_lease() -> None:
    with FakeCluster() as fake, fake.client() as client:
        client.schedule_batch("orders", [b""] * 100)
        with client.consumer("orders", group="mails", window=10, lease=60) as consumer:
            fake.settle()
            consumer.receive(5, timeout=0)
            fake.settle()
            [group] = client.topics()[0].groups
            assert (group.leased, group.settings.lease_ms) == (15, 60_000)
        with client.consumer("orders", group="mails", lease=5):
            [group] = client.topics()[0].groups
            assert group.settings.lease_ms == 60_000


def test_example_of_quotas_is_refused_at_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = examples("docs/quotas.md")
    with FakeCluster() as fake, fake.client() as client:
        for some in (50_000, 49_999):
            client.schedule_batch("orders", [b""] * some, delay=60)
        for shown in ("", "pending_max at most 100000 (pending_max of the topic)"):
            exec(example, {"client": client})
            assert capsys.readouterr().out.strip().replace("must be ", "") == shown
