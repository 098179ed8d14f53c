"""Messages that are pushed to a URL, on an in-memory cluster and a real HTTP server."""

import asyncio
import base64
import email.utils
import gzip
import hashlib
import hmac
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import unquote

import aiohttp
import pytest

from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from tests.timerfake.receiver import OK, Answers, Posted, Receiver, answer
from timerclient import AsyncTimerClient, Backoff, HttpTarget, InvalidRequest, TimerApp, Worker
from timerclient.worker import handler_runner, http_target, renewed_file, target_brake
from timerclient.worker.renewed_file import RenewedFile
from timerclient.worker.webhook_headers import read_header_file
from timerclient.worker.worker_metrics import Outcome, exposition
from timerfake import AsyncFakeApp

LETTERS = "orders.billing.dead"
SECRETS = [f"whsec_{base64.b64encode(bytes([n]) * 32).decode()}" for n in (1, 2, 3)]


class Pushing:
    """An app on an in-memory cluster that pushes the topic `orders`."""

    def __init__(self, timers: AsyncFakeApp, client: AsyncTimerClient) -> None:
        self.timers, self.client = timers, client

    async def send(self, payload: bytes = b"x", **options: Any) -> str:
        timer = await self.client.schedule("orders", payload, delay=1, **options)
        await self.timers.advance(1)
        return timer.id

    async def left(self) -> int:
        topic = await self.client.describe_topic("orders")
        return topic.groups[0].unacked

    async def letter(self) -> dict[str, str]:
        page = await self.client.peek(LETTERS, "dead-letters")
        [found] = page.messages
        return dict(found.headers)

    def outcomes(self) -> dict[str, int]:
        [runner] = self.worker.runners
        return {of.value: count for of, count in runner.metrics.outcomes.items() if count}

    @property
    def worker(self) -> Worker:
        assert self.timers._worker is not None
        return self.timers._worker


@asynccontextmanager
async def pushing(
    url: str, *, concurrency: int = 16, attempts: int = 16, **options: Any
) -> AsyncIterator[Pushing]:
    app = TimerApp()
    app.push(
        "orders",
        group="billing",
        to=HttpTarget(url, **options),
        concurrency=concurrency,
        retry=Backoff(10, max=100, attempts=attempts),
    )
    async with AsyncFakeApp(app, handler_s=60) as timers, timers.cluster.client() as client:
        yield Pushing(timers, client)


def idle_connection(push: Pushing) -> Any:
    """Return the only connection in the pool of a push."""
    [runner] = push.worker.runners
    session = runner.handler._target._session  # type: ignore[attr-defined]
    [[(connection, _)]] = session.connector._conns.values()
    return connection


def verified(posted: Posted, secret: str) -> bool:
    """Return whether one of the signatures fits, as a receiver checks it."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{posted.id}.{posted.headers['webhook-timestamp']}.".encode() + posted.body
    wanted = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return wanted in posted.headers["webhook-signature"].split(" ")


async def test_message_is_posted_as_it_is_with_a_signature_and_acked() -> None:
    payload = bytes(range(256)) * 100
    async with Receiver() as receiver, pushing(receiver.url, secrets=SECRETS[:2]) as push:
        timer_id = await push.send(payload, key="order 4711", headers={"trace": "a b"})
        await push.send(b"")
        await push.client.schedule("orders", json={"a": 1})
        await push.timers.settle()
        assert (await push.left(), push.outcomes()) == (0, {"done": 3})
    first, empty, json = receiver.posted
    assert (first.line, first.body, first.id) == ("POST /hook?who=me HTTP/1.1", payload, timer_id)
    assert [verified(first, each) for each in SECRETS] == [True, True, False]
    assert abs(int(first.headers["webhook-timestamp"]) - time.time()) < 60
    wanted = {
        "timer-topic": "orders",
        "timer-key": "order%204711",
        "timer-attempt": "1",
        "timer-failures": "0",
        "timer-header-trace": "a%20b",
        "content-type": "application/octet-stream",
    }
    assert wanted.items() <= first.headers.items()
    assert first.headers["timer-due"] <= first.headers["timer-fired"]
    assert (empty.body, empty.headers["content-length"]) == (b"", "0")
    assert (json.body, json.headers["content-type"]) == (b'{"a":1}', "application/json")


async def test_idle_connection_serves_the_next_request() -> None:
    async with Receiver() as receiver, pushing(receiver.url, concurrency=1) as push:
        for _ in range(5):
            await push.send()
    assert (len(receiver.posted), receiver.connections) == (5, 1)


async def test_hostile_texts_of_a_message_do_not_reach_other_headers() -> None:
    texts = {
        "plain\r\nevil: 1": "v\r\n\r\nPOST /evil HTTP/1.1\r\n",
        "schlüssel": "ü€\u2028\x00\x7f100%",
        "webhook-id": "forged",
        "encoded": "%41",
    }
    headers = texts | {"content-type": "text/html\r\nevil: 1"}
    async with Receiver() as receiver, pushing(receiver.url, secrets=SECRETS[:1]) as push:
        timer_id = await push.send(key="k\r\nevil: 1 ü", headers=headers)
    [posted] = receiver.posted
    assert posted.id == timer_id
    assert verified(posted, SECRETS[0])
    assert posted.headers["content-type"] == "application/octet-stream"
    assert unquote(posted.headers["timer-key"]) == "k\r\nevil: 1 ü"
    named = [each.split("timer-header-") for each in posted.headers if "timer-header-" in each]
    own = {unquote(name): unquote(posted.headers["timer-header-" + name]) for _, name in named}
    assert own == texts
    assert "evil" not in posted.headers
    assert all(each.isascii() and each.isprintable() for each in posted.headers.values())


async def test_headers_that_are_too_large_are_left_out_and_counted() -> None:
    headers = {"small": "1", "huge": "€" * 1000, "SMALL": "3", "last": "2"}
    headers["content-type"] = "a/b;" + "c" * 9000
    async with Receiver() as receiver, pushing(receiver.url) as push:
        await push.send(headers=headers)
    [posted] = receiver.posted
    own = {name for name in posted.headers if name.startswith("timer-header")}
    assert own == {"timer-header-small", "timer-header-last", "timer-headers-omitted"}
    assert posted.headers["timer-headers-omitted"] == "2"
    assert posted.headers["timer-header-small"] == "1"
    assert posted.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("/cb?sig=a%2Fb%3D&sp=%2Frun&x=%7E&n=%41", None),
        ("/a/%2E%2E/b/../c;v=%3D?p[]=a+b", None),
        ("?sig=%2f", "/?sig=%2f"),
        ('/{id}|"?q=<x>', "/%7Bid%7D%7C%22?q=%3Cx%3E"),
    ],
)
async def test_url_is_sent_as_it_is_given(given: str, sent: str | None) -> None:
    async with Receiver(path=given) as receiver, pushing(receiver.url) as push:
        await push.send()
    assert receiver.posted[0].line == f"POST {sent or given} HTTP/1.1"


@pytest.mark.parametrize("status", [200, 202, 204, 299])
async def test_success_is_an_ack(status: int) -> None:
    answers: Answers = lambda _: answer(status)  # noqa: E731
    async with Receiver(answers) as receiver, pushing(receiver.url) as push:
        await push.send()
        assert (await push.left(), push.outcomes()) == (0, {"done": 1})


@pytest.mark.parametrize("status", [302, 307, 400, 401, 404, 408, 425, 429, 500, 502, 503, 599])
async def test_other_answers_are_failures_and_tried_again_after_the_backoff(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.001)
    answers = iter([answer(status, b"no\nroom", Location="/other"), OK])
    async with Receiver(lambda _: next(answers)) as receiver, pushing(receiver.url) as push:
        await push.send()
        await push.timers.advance(9)
        assert (await push.left(), len(receiver.posted)) == (1, 1)
        await push.timers.advance(1)
        await receiver.until(2)
        await push.timers.settle()
        assert (await push.left(), push.outcomes()) == (0, {"failed": 1, "done": 1})
        [error] = push.timers.errors
    first, second = receiver.posted
    assert (first.id, second.line) == (second.id, first.line)
    assert [each.headers["timer-failures"] for each in receiver.posted] == ["0", "1"]
    assert str(error).startswith(str(status))
    assert str(error).endswith(": no room")
    [line] = [each for each in caplog.messages if "timer failed" in each]
    assert (line.endswith("no room'"), " at=" in line) == (True, False)


async def test_gone_is_a_dead_letter_at_once() -> None:
    answers: Answers = lambda _: answer(410, b"no such order")  # noqa: E731
    async with Receiver(answers) as receiver, pushing(receiver.url) as push:
        await push.send()
        assert (await push.left(), push.outcomes()) == (0, {"rejected": 1})
        letter = await push.letter()
    assert letter["dead-letter-reason"] == "rejected"
    assert letter["dead-letter-detail"] == "410 Gone: no such order"


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local time is nine hours ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_east")
@pytest.mark.parametrize(
    ("status", "after", "waits_s"),
    [
        (429, "30", 30),
        (503, "30", 30),
        (503, "date", 30),
        (503, "date without a zone", 30),
        (503, "0", 10),
        (503, "999999999999999999999", 3600),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT", 10),
        (503, "soon", 10),
        (503, "-5", 10),
        (500, "30", 10),
    ],
)
async def test_target_asks_for_a_longer_pause_than_the_backoff_and_not_for_a_shorter_one(
    status: int, after: str, waits_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.001)
    monkeypatch.setattr(target_brake, "LONGEST_S", 0.001)
    if after == "date":
        after = email.utils.formatdate(time.time() + 30, usegmt=True)
    elif after == "date without a zone":
        after = time.asctime(time.gmtime(time.time() + 30))
    answers = iter([answer(status, Retry_After=after), OK])
    async with Receiver(lambda _: next(answers)) as receiver, pushing(receiver.url) as push:
        await push.send()
        await push.timers.advance(waits_s * 0.9)
        assert len(receiver.posted) == 1
        await push.timers.advance(waits_s * 0.11 + 1)
        await receiver.until(2)
    assert receiver.posted[1].headers["timer-failures"] == "1"


async def test_dead_letter_after_all_attempts_has_the_beginning_of_the_last_answer() -> None:
    answers: Answers = lambda _: answer(500, b"\x1b[31m\xff" + b"stack " * 100_000)  # noqa: E731
    async with Receiver(answers) as receiver, pushing(receiver.url, attempts=3) as push:
        await push.send()
        await push.timers.advance(60)
        assert (await push.left(), len(receiver.posted)) == (0, 3)
        detail = (await push.letter())["dead-letter-detail"]
    assert detail.startswith("PushFailed: 500 Internal Server Error: [31m\ufffdstack stack")
    assert len(detail.encode()) <= 1024
    assert receiver.connections == 3, "the rest of a long answer is not read"


async def test_status_counts_if_the_connection_ends_within_the_body() -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"
    async with Receiver(lambda _: cut, closes=True) as receiver, pushing(receiver.url) as push:
        await push.send()
        assert push.outcomes() == {"done": 1}


async def test_compressed_answer_is_not_expanded() -> None:
    packed = answer(500, gzip.compress(b"a" * 1_000_000), Content_Encoding="gzip")
    async with Receiver(lambda _: packed) as receiver, pushing(receiver.url) as push:
        await push.send()
        [error] = push.timers.errors
    assert "aaaa" not in str(error)


async def test_status_counts_if_the_body_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_target, "BODY_S", 0.01)
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"
    async with Receiver(lambda _: endless) as receiver, pushing(receiver.url) as push:
        await push.send()
        assert push.outcomes() == {"done": 1}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (None, "no answer within 1 s"),
        (b"", "Server disconnected"),
        (b"HTTP/1.1 200 OK\r\nSet-Cookie: " + b"geheim" * 1000, "Error: Server disconnected"),
        (b"HTTP/1.1 200 OK\r\n" + b"geheim" * 1000 + b"\r\n\r\n", "ClientResponseError: "),
        (b"nonsense\r\n\r\n", "no answer: ClientResponseError: Bad status line"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200_000, "no answer: ClientResponseError: "),
    ],
)
async def test_target_that_does_not_answer_well_is_a_failure(
    data: bytes | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.001)

    def answers(_: Posted) -> bytes | None:
        if data == b"":
            raise ConnectionError
        return data

    timeout = 1 if data is None else 30
    receiver = Receiver(answers, closes=True)
    async with receiver, pushing(receiver.url, timeout=timeout) as push:
        await push.send()
        assert push.outcomes() == {"failed": 1}
        [failed] = push.timers.errors
        assert error in str(failed)
        assert len(str(failed)) < 1_100
        assert "who=me" not in str(failed)
        receiver.answers = lambda _: OK
        await push.timers.advance(10)
        await receiver.until(2)
    assert receiver.posted[1].headers["timer-failures"] == "1"


async def test_second_answer_to_one_message_does_not_ack_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.001)
    monkeypatch.setattr(http_target, "IDLE_S", 60.0)
    async with Receiver() as receiver, pushing(receiver.url) as push:
        await push.send()
        await receiver.say(OK)
        connection = idle_connection(push)
        while not connection.should_close:
            await push.timers.settle()
        await push.send()
        await receiver.until(2)
        await push.timers.settle()
        assert (await push.left(), push.outcomes()) == (0, {"done": 2, "returned": 1})
        assert str(push.timers.errors[0]) == "an answer came before the request"
    assert receiver.posted[1].headers["timer-failures"] == "0"


# ---- a target that is unavailable


async def test_log_has_no_query_of_a_target_that_takes_no_connection_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(_: object, url: str, **__: object) -> NoReturn:
        raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}")

    monkeypatch.setattr(aiohttp.ClientSession, "post", late)
    async with pushing("http://target/hook?token=opensesame") as push:
        await push.send(b"")
        await push.timers.settle()
    assert "no connection in time" in caplog.text
    assert "opensesame" not in caplog.text


async def test_messages_do_not_fail_while_the_target_can_not_be_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.05)
    caplog.set_level("INFO")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tries = 0
    post = HttpTarget.post

    async def counted(self: HttpTarget, message: Any) -> None:
        nonlocal tries
        tries += 1
        await post(self, message)

    monkeypatch.setattr(HttpTarget, "post", counted)
    receiver = Receiver(port=port)
    async with pushing(receiver.url, concurrency=4, attempts=1) as push:
        await push.client.schedule_batch("orders", [b"%d" % n for n in range(50)])
        await push.timers.settle()
        [runner] = push.worker.runners
        while runner.metrics.outcomes[Outcome.RETURNED] < 7:  # four at a time, then one by one
            await push.timers.settle()
        assert "timers_worker_braked" in (text := exposition([runner.metrics]))
        assert '_braked{topic="orders",group="billing"} 1' in text
        async with receiver:
            await receiver.until(50)
            await push.timers.settle()
        assert (await push.left(), push.outcomes()["done"]) == (0, 50)
        assert tries - 50 <= 12
        assert '_braked{topic="orders",group="billing"} 0' in exposition([runner.metrics])
    assert {each.headers["timer-failures"] for each in receiver.posted} == {"0"}
    assert len({each.id for each in receiver.posted}) == 50
    assert "target unavailable, one request at a time: push:http://127.0.0.1" in caplog.text
    assert "target answers again" in caplog.text
    assert "who=me" not in caplog.text


async def test_unavailable_target_gets_one_request_at_a_time_and_the_other_messages_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.02)
    monkeypatch.setattr(target_brake, "LONGEST_S", 0.02)
    receiver = Receiver(lambda _: answer(503), gate=(gate := asyncio.Event()))
    async with receiver, pushing(receiver.url, concurrency=4) as push:
        await push.client.schedule_batch("orders", [b"%d" % n for n in range(100)])
        await receiver.until(4)
        assert receiver.most_at_once == 4
        gate.set()
        await receiver.until(8)
        receiver.most_at_once, receiver.slow_s = 0, 0.02  # so that requests would meet
        await receiver.until(20)
        assert receiver.most_at_once == 1
        receiver.answers = lambda _: OK
        await push.timers.settle()
        while await push.left() > 20:
            await push.timers.settle()
        failed = push.outcomes()["failed"]
        assert 19 <= failed <= 24, "the other messages have not failed"


async def test_wrong_certificate_sends_nothing_and_fails_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.01)
    stores = [CertificateStore(tmp_path / name) for name in ("own", "other")]
    for each in stores:
        each.create("prod")
        each.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(stores[0].path("node-n1"), stores[0].path("node-n1", key=True))
    async with Receiver(tls=tls) as receiver:
        for ca in (None, stores[1].path("ca")):
            async with pushing(receiver.url, ca=ca) as push:
                await push.send()
                assert push.outcomes().keys() == {"returned"}
                assert "CERTIFICATE_VERIFY_FAILED" in str(push.timers.errors[0])
        assert receiver.posted == []
        async with pushing(receiver.url, ca=stores[0].path("ca")) as push:
            await push.send()
            assert push.outcomes() == {"done": 1}


async def test_message_that_returns_waits_for_the_end_of_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 60.0)
    monkeypatch.setattr(target_brake, "LONGEST_S", 60.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with pushing(f"http://127.0.0.1:{free.getsockname()[1]}") as push:
            await push.send()  # the worker waits for it with room for 16
            await push.send()
            assert (push.outcomes(), await push.left()) == ({"returned": 1}, 2)


async def test_target_that_asks_for_a_pause_gets_no_other_message_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_brake, "FIRST_S", 0.001)
    receiver = Receiver(lambda _: answer(503, Retry_After="30"))
    async with receiver, pushing(receiver.url) as push:
        for _ in range(3):
            await push.send()
        assert (len(receiver.posted), await push.left()) == (1, 3)


# ---- the end, and settings


async def test_drain_waits_for_the_answer_of_a_running_request() -> None:
    receiver = Receiver(gate=(gate := asyncio.Event()))
    async with receiver, pushing(receiver.url) as push:
        push.timers.cluster.works.clear()
        await push.client.schedule("orders", b"x")
        await receiver.until(1)
        push.worker.stop()
        gate.set()
        await push.timers._worker_task  # type: ignore[misc]
        assert (push.worker.left_running, await push.left()) == (0, 0)


async def test_files_of_secrets_and_headers_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed_file, "CHECK_INTERVAL_S", 0.0)
    secrets, headers = tmp_path / "secrets", tmp_path / "headers"

    def write(path: Path, text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    write(secrets, f"# of today\n{SECRETS[0]}\n")
    write(headers, "Authorization: Bearer one\n")
    files: dict[str, Any] = {"secret_file": secrets, "header_file": headers}
    extra = {"X-From": "timers", "content-type": "text/plain"}
    async with Receiver() as receiver, pushing(receiver.url, headers=extra, **files) as push:
        await push.send()
        write(secrets, "\n".join(SECRETS[:2]))
        write(headers, "Authorization: Bearer two\n")
        await push.send()
        write(secrets, "nonsense")
        await push.send()
    first, second, third = receiver.posted
    assert [verified(first, each) for each in SECRETS[:2]] == [True, False]
    assert [verified(second, each) for each in SECRETS[:2]] == [True, True]
    assert [verified(third, each) for each in SECRETS[:2]] == [True, True]
    tokens = [each.headers["authorization"] for each in receiver.posted]
    assert tokens == ["Bearer one", "Bearer two", "Bearer two"]
    assert (first.headers["x-from"], first.headers["content-type"]) == ("timers", "text/plain")
    write(headers, "x-from: elsewhere\n")
    with pytest.raises(InvalidRequest, match="header = 'x-from': must be given once"):
        HttpTarget(receiver.url, headers=extra, **files)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("geheim", "header 1: must be NAME: VALUE, in visible characters of ASCII"),
        ("", "headers: there is none: give lines NAME: VALUE"),
    ],
)
def test_file_that_does_not_fit_is_reported_once(
    text: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(renewed_file, "CHECK_INTERVAL_S", 0.0)
    (path := tmp_path / "headers").write_text("a: 1")
    file = RenewedFile("header_file", path, read_header_file)
    (tmp_path / "new").write_text(text)
    (tmp_path / "new").rename(path)
    assert (file.value, caplog.messages) == ({"a": "1"}, []), "perhaps half written"
    for _ in range(3):
        assert file.value == {"a": "1"}
    [message] = caplog.messages
    assert message.startswith("file does not fit, the former one is used: header_file = ")
    assert message.endswith(why)
    (tmp_path / "new").write_text("a: 2")
    (tmp_path / "new").rename(path)
    assert file.value == {"a": "2"}


def test_file_that_is_gone_is_reported_once_and_read_again_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewed_file, "CHECK_INTERVAL_S", 0.0)
    (path := tmp_path / "headers").write_text("a: 1")
    file = RenewedFile("header_file", path, read_header_file)
    path.rename(tmp_path / "old")  # keeps its inode in use
    assert [file.value for _ in range(3)] == [{"a": "1"}] * 3
    path.symlink_to("a" * 300)  # can't be looked at, as in a folder without access
    assert file.value == {"a": "1"}
    assert caplog.messages == [f"file can't be found, its last value is used: {path}"]
    path.unlink()
    path.write_text("\ufeffa: 2")  # as editors on Windows write it
    assert file.value == {"a": "2"}
    path.rename(tmp_path / "older")
    assert (file.value, len(caplog.messages)) == ({"a": "2"}, 2)


def test_pipe_in_place_of_a_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed_file, "CHECK_INTERVAL_S", 0.0)
    os.mkfifo(path := tmp_path / "pipe")
    stamps = count()
    monkeypatch.setattr(renewed_file, "stamp_of", lambda _: (0, next(stamps)))
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(path.write_text, "a: 1")
        file = RenewedFile("header_file", path, read_header_file)
        writing.result()
    monkeypatch.setattr(RenewedFile, "_content", lambda _: pytest.fail("it has no writer"))
    assert file.value == {"a": "1"}


_NO_HEADER = "header_file = '/dev/null': headers: there is none: give lines NAME: VALUE"


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("ftp://h/x", {}, "url = 'ftp://h/x': must be http://HOST"),
        ("https:///x", {}, "must be http://HOST"),
        ("http://h:99999/", {}, "must be http://HOST"),
        ("http://h/ x", {}, "must be http://HOST"),
        ("http://h/\r\nx", {}, "must be http://HOST"),
        ("http://h/#x", {}, "must be http://HOST"),
        ("http://bücher/", {}, "must be http://HOST"),
        ("http://a\\b/?token=geheim", {}, "url = 'http://a\\\\b/': must be http://HOST"),
        ("http://a..b/?token=geheim", {}, "must be http://HOST"),
        ("http://1.2.3.4.5/?token=geheim", {}, "must be http://HOST"),
        ("https://me:geheim@h/", {}, "must have no user and password"),
        ("http://h/?token=geheim#x", {}, "must be http://HOST"),
        ("http://h", {"timeout": 0}, "timeout = 0: must be 0.1 to 3600 s"),
        ("http://h", {"headers": {"a b": "geheim"}}, "header 1: must be NAME: VALUE"),
        ("http://h", {"headers": {"a": "geheim\r\nb: c"}}, "header 1: must be NAME: VALUE"),
        ("http://h", {"headers": {"a": "1", "A": "geheim"}}, "header = 'A': must be given once"),
        ("http://h", {"headers": {"Host": "geheim"}}, "header = 'Host': is set by the push"),
        ("http://h", {"headers": {"Webhook-Id": "geheim"}}, "is set by the push itself"),
        ("http://h", {"header_file": "none"}, "header_file = 'none': must be a readable file"),
        ("http://h", {"header_file": "/dev/null"}, _NO_HEADER),
        ("http://h", {"secrets": ["geheim"]}, "secret 1: must be whsec_ and the base64 of 24 to"),
        ("http://h", {"secrets": ["whsec_Z2VoZWlt"]}, "secret 1: must be whsec_ and the base64"),
        ("http://h", {"secret_file": "/dev/null"}, "secrets: there is none"),
        ("HTTPS://h", {"ca": "none"}, "ca = 'none': must be a PEM file of certificates: No such"),
        ("http://h", {"ca": "ca.pem"}, "ca = 'ca.pem': needs a URL that begins with https://"),
        ("https://h", {"ca": "/dev/null"}, "ca = '/dev/null': must be a PEM file"),
    ],
)
def test_target_that_can_not_be_used_is_refused_without_its_secrets(
    url: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        HttpTarget(url, **options)
    assert text in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_header_whose_name_begins_as_a_reserved_one_is_taken() -> None:
    HttpTarget("http://h", headers={"Host-Group": "a", "Connection-Id": "b"})


def test_push_and_handler_of_one_group_are_refused() -> None:
    app, target = TimerApp(), HttpTarget("http://h/x?token=1", timeout=timedelta(minutes=20))
    assert repr(target) == "HttpTarget('http://h/x')"
    app.push("orders", group="billing", to=target)
    [push] = app.handlers
    assert (push.name, push.options.hold_max) == ("push:http://h/x", 1260)
    decorate: Callable[..., Any] = app.timer("orders", group="billing")
    with pytest.raises(
        InvalidRequest, match="push:http://h/x already runs it for the topic 'orders'"
    ):
        decorate(lambda: None)


async def test_pause_that_ends_while_the_room_is_counted_holds_up_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, target = TimerApp(), HttpTarget("http://h")
    app.push("orders", group="billing", to=target)
    [runner] = Worker(app).runners
    target.brake.on_unavailable(0.0, 0.0)  # until 1.0
    ticks = iter([0.999, 1.0])
    clock = SimpleNamespace(monotonic=lambda: next(ticks, 2.0))
    monkeypatch.setattr(handler_runner, "time", clock)
    async with asyncio.timeout(10):
        assert await runner._wait_for_capacity() == 1
