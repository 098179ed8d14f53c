"""The examples of the documentation pass: those for tests as a test file, others on a fake."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import timerclient
from timerclient import TimerClient
from timerclient.messages import Message
from timerfake import FakeCluster

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


class Enough(Exception):
    """The example's loop has had its messages."""


def test_example_of_the_readme_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    example, _ = examples("README.md")
    processed: list[bytes] = []

    def process(message: Message) -> None:
        processed.append(message.payload)
        if len(processed) == 3:
            raise Enough

    with FakeCluster() as fake:

        def connect(addresses: str) -> TimerClient:
            assert addresses.count(":74") == 3
            return fake.client()

        monkeypatch.setattr(timerclient, "TimerClient", connect)
        due_times = [fake.now_ms, fake.now_ms, fake.now_ms + 7_200_000, fake.now_ms]
        payloads = [b"1", b"2", b"cancelled", b"3"]
        names: dict[str, Any] = {"payloads": payloads, "due_times": due_times, "process": process}
        names["midnight"] = fake.now + timedelta(days=1)
        with pytest.raises(Enough):
            exec(example, names)
        assert processed == [b"1", b"2", b"3"]
        with fake.client() as client:
            [topic] = client.topics()
            assert (topic.pending, topic.cancelled, topic.fired) == (0, 4, 3)


def test_example_of_throughput_sends_what_was_submitted() -> None:
    _, example = examples("README.md")
    parts = [[b"%d" % n for n in range(at, at + 1_000)] for at in range(0, 5_000, 1_000)]
    sent: list[bytes] = []

    def send(payloads: list[bytes]) -> None:
        sent.extend(payloads)
        if len(sent) == 5_000:
            raise Enough

    with FakeCluster() as fake, fake.client() as client:
        names: dict[str, Any] = {
            "client": client,
            "parts": parts,
            "due_ms": fake.now_ms,
            "send": send,
        }
        with pytest.raises(Enough):
            exec(example, names)
        assert [each for part in parts for each in part] == sent
        assert sum(len(timers) for timers in names["timers"]) == 5_000


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
