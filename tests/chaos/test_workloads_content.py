"""Consumers of the workloads compare what is delivered with what was scheduled, byte for byte."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from chaos.history.history import RunFolder, payload_of
from chaos.workloads.history_books import GROUP, PAYLOAD_SIZE, Books, headers_of
from chaos.workloads.workload_consumer import LETTERS, RecordingConsumer, WorkloadReader
from tests.timerclient.fake_cluster import NOW_MS, Cluster
from timerclient import AsyncTimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch
from timerclient.rows.rows import encode_headers

SIZE = 20
KEYED, PLAIN = 1, 2
KEYS = {KEYED: "k"}
HEADERS = {KEYED: headers_of(KEYED)}
PAYLOADS = {mark: payload_of(mark, SIZE) for mark in (KEYED, PLAIN)}
LETTER = {"dead-letter-group": "g", "prior-dead-letter-group": "h"}


def check(
    payloads: dict[int, bytes], keys: dict[int, str], headers: dict[int, dict[str, str]]
) -> None:
    """Let a workload that scheduled both timers be given them with this content."""
    books = Books(payload_size=SIZE)
    books.expect([KEYED], key=[KEYS[KEYED]], headers=[HEADERS[KEYED]])
    marks = [KEYED, PLAIN]
    columns = pb.Deliveries(queue_offsets=[0, 1], payload_sizes=[len(payloads[m]) for m in marks])
    columns.payloads = b"".join(payloads[m] for m in marks)
    key = [keys.get(m, "").encode() for m in marks]
    header = [encode_headers(headers.get(m, {})) for m in marks]
    for name, each in (("key", key), ("headers", header)):
        getattr(columns, f"{name}_sizes").extend(map(len, each))
    columns.keys, columns.headers = b"".join(key), b"".join(header)
    books.check_content(Batch(columns, lambda *_: None), marks)


def test_content_as_it_was_scheduled_is_right_also_in_a_dead_letter() -> None:
    check(PAYLOADS, KEYS, HEADERS)
    check(PAYLOADS, KEYS, {mark: HEADERS.get(mark, {}) | LETTER for mark in PAYLOADS})


@pytest.mark.parametrize("ordering", ["", "o", "p"])
@pytest.mark.parametrize("priority", [4, 9])
@pytest.mark.parametrize("series", ["", "s", "t"])
def test_other_traits_and_occurrences_of_another_series_are_found(
    ordering: str, priority: int, series: str
) -> None:
    books = Books(payload_size=SIZE)
    books.expect([PLAIN], ordering_key=["o"], priority=[9], series=["s"])
    header = encode_headers({"timer-series-key": series} if series else {})
    columns = pb.Deliveries(
        queue_offsets=[0], payload_sizes=[SIZE], payloads=PAYLOADS[PLAIN], headers=header,
        headers_sizes=[len(header)], ordering_keys=ordering.encode(),
        ordering_key_sizes=[len(ordering)], priorities=[priority],
    )  # fmt: skip
    right = (ordering, priority, series) == ("o", 9, "s")
    with nullcontext() if right else pytest.raises(AssertionError):
        books.check_content(Batch(columns, lambda *_: None), [PLAIN])


@pytest.mark.parametrize("mark", [KEYED, PLAIN])
@pytest.mark.parametrize("size", [8, SIZE - 1, SIZE + 1])
def test_payload_of_another_length_is_found(mark: int, size: int) -> None:
    with pytest.raises(AssertionError):
        check(PAYLOADS | {mark: payload_of(mark, size)}, KEYS, HEADERS)


@pytest.mark.parametrize("at", range(8, SIZE))
def test_payload_with_another_byte_is_found(at: int) -> None:
    other = bytearray(PAYLOADS[PLAIN])
    other[at] ^= 1
    with pytest.raises(AssertionError):
        check(PAYLOADS | {PLAIN: bytes(other)}, KEYS, HEADERS)


@pytest.mark.parametrize("keys", [{}, {KEYED: "kk"}, {PLAIN: "k"}, KEYS | {PLAIN: "x"}])
def test_another_key_is_found(keys: dict[int, str]) -> None:
    with pytest.raises(AssertionError):
        check(PAYLOADS, keys, HEADERS)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {KEYED: headers_of(PLAIN)},
        {KEYED: {"mark": "1"}},
        {KEYED: headers_of(KEYED) | {"more": ""}},
        HEADERS | {PLAIN: {"more": ""}},
    ],
)
def test_other_headers_are_found(headers: dict[int, dict[str, str]]) -> None:
    with pytest.raises(AssertionError):
        check(PAYLOADS, KEYS, headers)


@pytest.mark.parametrize("dead_of", ["", GROUP])
@pytest.mark.parametrize("keyed", [False, True])
async def test_consumer_fails_if_it_is_given_other_content(
    tmp_path: Path, dead_of: str, *, keyed: bool
) -> None:
    books, topic = Books(), f"t.{GROUP}.dead" if dead_of else "t"
    if keyed:
        books.expect([3], key=["k"])  # and comes without
    payload = payload_of(3, PAYLOAD_SIZE if keyed else PAYLOAD_SIZE - 1)
    cluster = Cluster()
    await cluster.start()
    async with AsyncTimerClient([node.address for node in cluster.nodes], timeout=5) as client:
        await client.schedule(topic, payload, due_ms=NOW_MS, headers={"dead-letter-group": GROUP})
        reader = WorkloadReader(group=LETTERS if dead_of else GROUP, dead_of=dead_of)
        consumer = RecordingConsumer(
            RunFolder(tmp_path), "c", client, books, reader, topic=topic, stopping=asyncio.Event()
        )
        with pytest.raises(ExceptionGroup) as raised:
            await consumer.run()
    assert raised.value.subgroup(AssertionError)
    await cluster.stop()
