"""Peek: messages are shown with their states, and nothing changes."""

import json

import pytest

from cluster.api import message_peek
from tests.timerfake.conftest import Ctl
from timer.ready.queue import Queue
from timerclient import InvalidRequest, NotFound, PeekState, TimerClient, Unavailable


def states(client: TimerClient, group: str = "g") -> dict[bytes, PeekState]:
    return {each.payload: each.state for each in client.peek("orders", group).messages}


def test_peek_shows_each_state_and_changes_nothing(client: TimerClient) -> None:
    client.create_group("orders", "g")
    _ = client.schedule("orders", b"0", key="k", headers={"a": "b"}, due_ms=10**10)
    client.schedule_batch("orders", [b"1", b"2", b"3"])
    assert states(client) == dict.fromkeys((b"0", b"1", b"2", b"3"), PeekState.READY)
    with client.consumer("orders", "g", window=3) as consumer:
        messages = {each.payload: each for each in consumer.receive(3, timeout=30)}
        while len(messages) < 3:
            messages |= {each.payload: each for each in consumer.receive(3, timeout=30)}
        messages[b"1"].nack(delay=3600).result()
        messages[b"2"].ack().result()
        assert states(client) | {b"3": PeekState.READY} == {
            b"0": PeekState.LEASED,
            b"1": PeekState.DELAYED,
            b"3": PeekState.READY,
        }
        before = client.describe_topic("orders").groups[0]
        first, second, *_ = client.peek("orders", "g").messages
        assert client.describe_topic("orders").groups[0].leased == before.leased
        messages[b"0"].ack().result()  # its lease is as before
    assert (first.key, first.headers, first.requested_ms) == ("k", {"a": "b"}, 10**10)
    assert (first.id, first.failures, second.failures) == (messages[b"0"].id, 0, 1)
    assert states(client) == {b"1": PeekState.DELAYED, b"3": PeekState.READY}


def test_peek_goes_on_at_its_next_offset_and_has_limits(
    client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_group("orders", "g")
    client.schedule_batch("orders", [str(number).encode() for number in range(250)])
    for group in ("g", ""):
        page = client.peek("orders", group)
        seen = [int(each.payload) for each in page.messages]
        while page.next_offset:
            page = client.peek("orders", group, from_offset=page.next_offset)
            seen += [int(each.payload) for each in page.messages]
        assert seen == [*range(250)]
    assert {each.state for each in client.peek("orders").messages} == {PeekState.UNKNOWN}
    monkeypatch.setattr(message_peek, "BYTES_MAX", 1)
    page = client.peek("orders", "g", from_offset=7)
    assert ([each.queue_offset for each in page.messages], page.next_offset) == ([7], 8)
    assert client.peek("orders", "g", from_offset=1 << 60).messages == []
    for wrong in (0, 101):
        with pytest.raises(InvalidRequest, match="max_messages"):
            client.peek("orders", max_messages=wrong)
    for topic, group in (("absent", ""), ("orders", "absent")):
        with pytest.raises(NotFound):
            client.peek(topic, group)


def test_peek_waits_for_the_disk_and_not_for_ever(
    client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ = client.schedule("orders", b"0")
    looks = iter((0, 0, 1))
    monkeypatch.setattr(Queue, "count_in_memory", lambda *_: next(looks))
    assert [each.payload for each in client.peek("orders").messages] == [b"0"]
    monkeypatch.setattr(Queue, "count_in_memory", lambda *_: 0)
    monkeypatch.setattr(message_peek, "WAIT_S", 0.0)
    with pytest.raises(Unavailable, match="not read from disk in time"):
        client.peek("orders", timeout=1.5)
    with pytest.raises(Unavailable, match="not read from disk in time"):
        client.read_messages("orders", timeout=1.5)


def test_timerctl_peek(client: TimerClient, ctl: Ctl) -> None:
    client.create_group("orders", "g")
    client.schedule_batch("orders", [b"a\x1b[2J", b"b"])
    code, out, _ = ctl("peek", "orders", "--group", "g", "--limit", "1")
    assert (code, "ready" in out, "\x1b" in out) == (0, True, False)
    assert out.endswith("… and more: --offset 1\n")
    code, out, _ = ctl("peek", "orders", "-o", "json")
    assert code == 0
    assert [each["state"] for each in json.loads(out)["messages"]] == [None, None]
    for wrong in (("--limit", "101"), ("--offset", "-1"), ("--group", "")):
        assert ctl("peek", "orders", *wrong)[0] == 2


@pytest.mark.parametrize("words", ["peek orders", "timers list later", "recurring list"])
def test_payloads_are_cut_except_with_wide_and_binary_ones_are_marked(
    words: str, client: TimerClient, ctl: Ctl
) -> None:
    for number, payload in enumerate((b"c" * 41, b"\0\xff")):
        client.schedule("orders", payload)
        client.schedule("later", payload, delay=3600 + number)
        client.create_series("orders", f"k{number}", payload, every=60)
    cells = []
    for output in ("table", "wide"):
        code, out, _ = ctl(*words.split(), "-o", output)
        assert code == 0
        cells += [line.split()[-1] for line in out.splitlines()[1:]]
    assert cells[2:] == ["c" * 41, "base64:AP8="]
    if words != "recurring list":  # it shows payloads with -o wide only
        assert cells[:2] == ["c" * 39 + "…", "base64:AP8="]
