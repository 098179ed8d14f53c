"""timerctl push: its errors; the brake and the signature, which it uses."""

import base64
import hmac
import importlib.metadata
import re
import sys
import time
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timerclient.conftest import Ctl
from timerclient.cli.cli_errors import USAGE
from timerclient.cli.missing_modules import why_missing
from timerclient.worker.target_brake import FIRST_S, LONGEST_S, TargetBrake
from timerclient.worker.webhook_headers import read_secrets, webhook_headers

ROOT = Path(__file__).parents[2]
PUSH = ("push", "orders", "--group", "billing")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "the following arguments are required: --to"),
        ("--to ftp://h", "--to = 'ftp://h': must be http://HOST"),
        ("--to http://h --header geheim", "--header: must be NAME: VALUE"),
        ("--to http://h --header a:1 --header a:geheim", "--header 'a': must be given once"),
        ("--to http://h --ca ca.pem", "--ca = 'ca.pem': needs a URL that begins with https://"),
        ("--to http://h --header-file none", "--header-file = 'none': must be a readable file"),
        ("--to http://h --secret-file none", "--secret-file = 'none': must be a readable file"),
        ("--to https://h --ca none", "--ca = 'none': must be a PEM file"),
        ("--to http://h --concurrency 0", "--concurrency = 0: must be 1 to 10000"),
        ("--to http://h --max-attempts 2000", "--max-attempts = 2000: must be 0 to 1000"),
        ("--to http://h --backoff-min 2h", "--backoff-min 2h: must be 1ms or more, and at"),
        ("--to http://h --request-timeout 2h", "--request-timeout = 2h: must be 100ms to 1h"),
        ("--to http://h --port 70000", "--port 70000: must be 0 to 65535"),
    ],
)
def test_push_that_can_not_start_says_why(
    words: str, text: str, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    code, out, err = ctl(*PUSH, *words.split())
    assert (code, out) == (USAGE, "")
    assert text in err
    assert "geheim" not in err


def test_push_without_its_module_names_the_extra(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    _, _, err = ctl(*PUSH, "--to", "http://h")
    named = "push needs aiohttp: pip install '.[push]' in a clone of timer-cluster"
    assert err == f"timerctl: {named}\n"

    def wheel_of_the_client(name: str) -> object:
        if name != "timer-client":
            raise importlib.metadata.PackageNotFoundError(name)
        metadata = Message()
        metadata["Provides-Extra"] = "push"
        return SimpleNamespace(metadata=metadata, version="0.2.0")

    monkeypatch.setattr(importlib.metadata, "distribution", wheel_of_the_client)
    named = "pip install 'timer_client-0.2.0-py3-none-any.whl[push]'"
    assert why_missing(ModuleNotFoundError(name="aiohttp"), "push").endswith(named)


def test_brake_pauses_twice_as_long_after_each_request_up_to_a_limit() -> None:
    brake, now_s, pauses = TargetBrake(), 100.0, list[float]()
    assert (brake.calls_max(16), brake.left_s(now_s)) == (16, 0)
    for _ in range(7):
        brake.on_unavailable(now_s, now_s)
        brake.on_unavailable(now_s - 1, now_s)  # one that began before says nothing new
        assert brake.calls_max(16) == 1
        pauses.append(brake.left_s(now_s))
        now_s += pauses[-1]
        assert brake.left_s(now_s) == 0
    assert pauses == [1, 2, 4, 8, 16, 30, 30] == [*pauses[:5], LONGEST_S, LONGEST_S]
    brake.on_answer()
    assert (brake.is_on, brake.calls_max(16), brake.left_s(now_s)) == (False, 16, 0)
    brake.on_unavailable(now_s, now_s, 20)
    assert brake.left_s(now_s) == 20
    brake.on_answer()
    brake.on_unavailable(now_s, now_s, 3600)
    assert brake.left_s(now_s) == LONGEST_S
    brake.on_answer()
    brake.on_unavailable(now_s, now_s)
    assert brake.left_s(now_s) == FIRST_S


def test_signature_is_that_of_the_standard() -> None:
    """The example of the libraries of "Standard Webhooks"."""
    [key] = read_secrets([(1, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")])
    headers = webhook_headers(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', [key], 1614265330
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_receivers_of_the_documentation_print_messages_and_check_signatures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    receiver, example = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/push.md").read_text(), re.DOTALL
    )
    flask: dict[str, Any] = {"__name__": "receiver"}
    exec(receiver, flask)
    posted = {"webhook-id": "06h2", "Timer-Key": "order%204711"}
    answer = flask["app"].test_client().post("/timers/orders", data=b"body", headers=posted)
    assert (answer.status_code, answer.data) == (204, b"")
    assert capsys.readouterr().out == "06h2 order 4711 body\n"
    known: dict[str, Any] = {"base64": base64, "hmac": hmac, "time": time, "Mapping": Mapping}
    exec(example, known)
    key, now_s = bytes(range(32)), int(time.time())
    headers = webhook_headers("06h2", b"body", [bytes(32), key], now_s)
    assert known["is_genuine"](headers, b"body", key)
    assert not known["is_genuine"](headers, b"Body", key)
    assert not known["is_genuine"](headers, b"body", key[::-1])
    old = webhook_headers("06h2", b"body", [key], now_s - 301)
    assert not known["is_genuine"](old, b"body", key)


def test_secret_may_stand_without_its_prefix() -> None:
    bare = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert read_secrets([(1, bare)]) == read_secrets([(1, f"whsec_{bare}")])
