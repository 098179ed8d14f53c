"""The examples of the documentation pass: those for tests as a test file, others on a fake."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import timerclient
from tests.timerfake.doc_examples import ROOT, examples
from timerclient import OutcomeUnknown, TimerClient
from timerfake import FakeApp, FakeCluster

EXAMPLES = examples("docs/testing.md")
SETTINGS = ["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function"]


def output(folder: Path, *words: str) -> str:
    """Return all that a module prints in a folder, where the project's packages are found."""
    run = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return run.stdout + run.stderr


def test_examples_of_the_documentation_pass(tmp_path: Path) -> None:
    source = "\n\n".join(EXAMPLES)
    (tmp_path / "test_examples.py").write_text(source)
    (tmp_path / "pytest.ini").write_text(
        "\n".join(["[pytest]", *SETTINGS, "filterwarnings = error"])
    )
    told = output(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    tests = len(re.findall(r"^(?:async )?def test_", source, re.MULTILINE))
    assert tests >= 9
    assert f"{tests} passed" in told, told


def test_examples_have_types(tmp_path: Path) -> None:
    sources = {f"migrating_{at}": each for at, each in enumerate(examples("docs/migrating.md"))}
    sources["deleting"] = examples("docs/deleting-data.md")[0]
    sources |= {f"python_{at}": each for at, each in enumerate(examples("docs/python.md"))}
    sources["workers"] = "\n".join(examples("docs/workers.md")[:3])
    [sources["handlers"]] = [each for each in EXAMPLES if "timer_app" in each]
    sources["fastapi_app"] = examples("docs/recipes.md")[0]
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    files = [f"{name}.py" for name in sources]
    told = output(tmp_path, "mypy", "--strict", "--ignore-missing-imports", *files)
    errors = [line for line in told.splitlines() if "[untyped-decorator]" not in line]
    assert not [line for line in errors if ": error:" in line], told


def test_type_checkers_know_the_arguments_of_a_handler(tmp_path: Path) -> None:
    wrong = [
        'cancel.bind(order_id="x")',
        "cancel.bind(oder_id=1)",
        "cancel.bind()",
        "cancel.bind(1).schedule_sync(delai=3)",
        'cancel.bind(1).new_timer(delay="3")',
        "TimerApp(setings=3)",
    ]
    lines = [
        "from timerclient import NewTimer, Timer, TimerApp",
        '@TimerApp(timeout=3).timer("orders", group="shop")',
        "def cancel(order_id: int) -> None: ...",
        'new: NewTimer = cancel.bind(1).new_timer(delay=3, key="k")',
        'timer: Timer = cancel.bind(order_id=1).schedule_sync(delay=3, on_conflict="keep")',
    ]
    (tmp_path / "shop.py").write_text("\n".join([*lines, *wrong, ""]))
    told = output(tmp_path, "mypy", "--strict", "shop.py")
    found = {int(line) for line in re.findall(r"^shop\.py:(\d+): error:", told, re.MULTILINE)}
    assert found == set(range(len(lines) + 1, len(lines) + len(wrong) + 1)), told


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


def test_examples_of_the_client_run_in_the_order_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeCluster() as fake, fake.client() as client:
        keys, _, codecs, throughput, _ = (
            played(each, fake, monkeypatch) for each in examples("docs/python.md")
        )
        assert (keys, codecs) == ([], ["4711 shout"])
        assert sum(map(int, throughput)) == 5_000
        assert client.get_timer(key="order-4711", topic="orders").payload == b"total 25"


def test_examples_of_recurring_timers_run_in_the_order_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = examples("docs/recurring.md")
    with FakeCluster() as fake, fake.client() as client:
        shown = played(first, fake, monkeypatch)
        assert shown == [f"Occurrence(series=2, key='db-1', number={n})" for n in (1, 2, 3)]
        exec(second, {"client": client})
        assert client.get_series("reports", "daily").cron == "0 6 * * *"


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


def test_example_of_a_deletion_leaves_nothing_readable(
    timer_app: Callable[..., FakeApp],
) -> None:
    names: dict[str, Any] = {}
    exec(examples("docs/deleting-data.md")[0], names)
    timers = timer_app(names["app"])
    names["on_order"](1, "one@example.org")
    names["on_order"](2, "two@example.org")
    with timers.cluster.client() as client:
        pending = [*client.list_timers("reminders")]
        assert "example.org" not in str([each.json() for each in pending])
        names["on_deletion"](1)
        client.reschedule(key="customer-2", topic="reminders", delay=1)
    names["remind"].schedule_sync(customer=1, sealed=pending[0].json()["sealed"])
    timers.advance(86_400)
    assert (names["sent"], timers.errors) == (["two@example.org"], [])


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


def test_example_for_users_of_celery_runs_with_time(timer_app: Callable[..., FakeApp]) -> None:
    names: dict[str, Any] = {}
    exec(examples("docs/migrating.md")[0], names)
    timers = timer_app(names["app"], start=datetime(2027, 1, 30, tzinfo=UTC))
    names["on_order"](1, datetime(2027, 1, 30, 1, tzinfo=UTC))
    names["on_payment"](1)
    names["charge"].schedule_sync(order_id=2, provider="busy")
    timers.advance(59)
    assert (names["paid"], len(timers.errors)) == ({}, 1)
    timers.advance(1)
    assert (names["paid"], len(timers.errors)) == ({}, 2)
    timers.advance(3600)
    assert [*names["paid"]] == [1]  # the reminder alone
    names["on_order"](3, datetime(2027, 2, 3, tzinfo=UTC))
    timers.advance(timedelta(days=1.5))
    with timers.cluster.client() as client:
        assert client.get_series("charges", "order-3").ended == 0
        timers.advance(timedelta(hours=17))  # 7:00 in Berlin
        assert client.get_series("charges", "order-3").ended == 1


class SortedSet:
    """A sorted set of Redis, with the two calls of the example. `dies`: the next removal fails."""

    def __init__(self, members: dict[bytes, float]) -> None:
        self.members = members
        self.dies = False

    def zrangebyscore(
        self, _: str, low: float, _high: str, *, start: int, num: int, withscores: bool
    ) -> list[tuple[bytes, float]]:
        assert withscores
        found = [(member, score) for member, score in self.members.items() if score >= low]
        return sorted(found, key=lambda each: each[1])[start : start + num]

    def zrem(self, _: str, *members: bytes) -> None:
        if self.dies:
            raise KeyboardInterrupt
        for member in members:
            del self.members[member]


def test_example_moves_a_sorted_set_once_though_it_is_killed_and_run_again() -> None:
    names: dict[str, Any] = {}
    exec(examples("docs/migrating.md")[1], names)
    now_s = time.time()
    members = {b'{"order_id": %d}' % n: now_s + 3600 + n + 0.25 for n in range(2500)}
    soon = {b'{"order_id": 9999}': now_s + 30}
    redis = SortedSet(members | soon)
    with FakeCluster() as fake, fake.client() as client:
        redis.dies = True
        with pytest.raises(KeyboardInterrupt):
            names["move"](redis, client, "delayed")
        assert (len(redis.members), client.count_timers("orders").pending) == (2501, 1000)
        redis.dies = False
        assert names["move"](redis, client, "delayed") == 2500
        assert names["move"](redis, client, "delayed") == 0
        assert redis.members == soon
        assert client.count_timers("orders").pending == 2500
        timer = client.get_timer(key="order-7", topic="orders")
        assert (timer.payload, timer.due_ms) == (b'{"order_id": 7}', round(now_s * 1000 + 3607250))


def test_example_of_quotas_is_refused_at_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = examples("docs/quotas.md")
    with FakeCluster() as fake, fake.client() as client:
        for some in (50_000, 49_999):
            client.schedule_batch("orders", [b""] * some, delay=60)
        for shown in ("", "pending_max at most 100000 (pending_max of the topic)"):
            exec(example, {"client": client})
            assert capsys.readouterr().out.strip().replace("must be ", "") == shown
