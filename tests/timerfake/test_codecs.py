"""Values as payloads: JSON and other codecs, and the errors of what they can't convert."""

import struct
from typing import Any

import pytest

from timerclient import JSON, EncodedValue, InvalidRequest, NewTimer, UndecodablePayload
from timerclient.values.codecs import PayloadReader
from timerfake import AsyncFakeCluster, FakeCluster


class Numbers:
    """A codec of lists of numbers."""

    content_type = "application/x-numbers"

    def encode(self, value: Any) -> bytes:
        return b"".join(struct.pack("<q", each) for each in value)

    def decode(self, payload: bytes) -> Any:
        return [each for (each,) in struct.iter_unpack("<q", payload)]


NUMBERS = Numbers()
ORDER = {"order": 4711, "lines": [None, True, 1.5, "Ä"]}


def test_values_arrive_as_they_were_and_bytes_without_a_header() -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        client.schedule("orders", json=ORDER, delay=60)
        typed_so = {"a": "b", "content-type": "Application/JSON; charset=utf-8"}
        client.submit("orders", json=None, headers=typed_so).result()
        client.schedule("orders", EncodedValue([1, 2], NUMBERS))
        own = {"content-type": "application/vnd.order+json"}
        client.schedule_all(
            [NewTimer("orders", json=[1], headers=own), NewTimer("orders", b"bytes")]
        )
        [peeked] = client.peek("orders", max_messages=1).messages
        assert peeked.json() is None
        with client.consumer("orders", group="billing") as consumer:
            cluster.advance(60)
            null, numbers, typed, plain = consumer.receive(10, timeout=0)
            [order] = consumer.receive(10, timeout=0)
        assert (order.json(), order.payload[:9]) == (ORDER, b'{"order":')
        assert order.headers == {"content-type": "application/json"}
        assert (null.json(), null.decode(JSON), null.headers) == (None, None, typed_so)
        assert (numbers.decode(NUMBERS), numbers.headers["content-type"]) == (
            [1, 2],
            NUMBERS.content_type,
        )
        assert (typed.json(), typed.headers) == ([1], own)
        assert (plain.payload, plain.headers) == (b"bytes", {})
        for message, codec, text in (
            (plain, JSON, "a payload of 5 bytes is not application/json: JSONDecodeError"),
            (numbers, JSON, "content-type = 'application/x-numbers': the codec is of applic"),
            (plain, NUMBERS, "a payload of 5 bytes is not application/x-numbers: error: iter"),
        ):
            with pytest.raises(UndecodablePayload, match=text):
                message.decode(codec)


def test_values_of_pending_timers_peeked_messages_and_series_are_read_as_those_of_messages() -> (
    None
):
    with FakeCluster() as cluster, cluster.client() as client:
        timer = client.schedule("orders", json=ORDER, delay=60)
        [listed] = client.list_timers("orders")
        assert listed.json() == client.get_timer(timer).decode(JSON) == ORDER
        client.cancel(timer)
        for read in (client.get_timer(timer).json, lambda: client.get_timer(timer).decode(JSON)):
            with pytest.raises(UndecodablePayload, match="only a pending timer"):
                read()
        series = client.create_series("orders", "daily", json=ORDER, every=60)
        assert series.json() == client.get_series("orders", "daily").json() == ORDER
        fired = client.schedule("orders", json=None, key="k")
        [peeked] = client.peek("orders").messages
        assert repr(peeked) == (
            f"PeekedMessage('{fired.id}', UNKNOWN, queue_offset=0, failures=0, key='k')"
        )


async def test_client_for_asyncio_takes_the_same() -> None:
    async with AsyncFakeCluster() as cluster, cluster.client() as client:
        await client.schedule("orders", json=ORDER)
        async with client.consumer("orders", group="billing") as consumer:
            [message] = await consumer.receive(1, timeout=5)
            assert message.json() == ORDER


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "payload: give bytes, or a value as `json`"),
        ({"payload": b"", "json": 1}, "json = int: give `payload` or `json`, not both"),
        ({"json": {1, 2}}, "json = set: must have a form as application/json: TypeError: Object"),
        ({"json": float("nan")}, "json = float: must have a form as application/json: ValueErr"),
        ({"json": CIRCLE}, "ValueError: Circular"),
        ({"json": DEEP}, "RecursionError"),
        ({"json": "\ud800"}, "UnicodeEncodeError"),
        ({"payload": EncodedValue(["x"], NUMBERS)}, "payload = list: must have a form as appl"),
        (
            {"payload": {"a": 1}},
            "= dict: must be bytes; encode text first, or give a value as `json`",
        ),
    ],
)
def test_value_that_can_not_be_encoded_is_rejected_and_not_shown(
    given: dict[str, Any], text: str
) -> None:
    with FakeCluster() as cluster, cluster.client() as client:
        for call in (client.schedule, client.submit):
            with pytest.raises(InvalidRequest, match=text):
                call("orders", **given)
        assert client.topics() == []


@pytest.mark.parametrize("payload", [b"NaN", b"\xff", b"{", b"", b"[" * 100_000])
def test_payload_that_is_no_json_is_one_error(payload: bytes) -> None:
    class Given(PayloadReader):
        @property
        def payload(self) -> bytes:
            return payload

    with pytest.raises(UndecodablePayload, match="is not application/json"):
        Given().json()


def test_codec_whose_error_has_no_text_fails_as_others_do() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise KeyError

    class Broken(Numbers):
        def decode(self, payload: bytes) -> Any:
            raise Mute

    class Given(PayloadReader):
        payload, headers = b"12", None

    with pytest.raises(UndecodablePayload, match=r"a payload of 2 bytes is not .*: Mute$"):
        Given().decode(Broken())
