"""The history of a measure's own traffic: calls, deliveries and acks, as the format has them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bench.recording import Recording, id_texts
from chaos.history import history_check
from timerclient import AckResult, Batch, LeaseLost, TimerError
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Acking
from timerclient.values import ids
from timerclient.values.errors import OutcomeUnknown


def make_batch(n: int) -> tuple[Batch, list[Acking[Any]]]:
    """Return a batch of n messages, and where the futures of its acks will be found."""
    ackings: list[Acking[Any]] = []
    columns = pb.Deliveries(
        epoch=3, lease_id=7, queue_offsets=range(n), due_ms=[5] * n, fired_at_ms=[6] * n,
        attempts=[1] * n, timer_ids=bytes(range(15)) * n, payload_sizes=[100] * n,
        payloads=b"".join((70 + i).to_bytes(8, "little") + bytes(92) for i in range(n)),
    )  # fmt: skip
    return Batch(columns, lambda _, __, acking, ___: ackings.append(acking), topic="t"), ackings


def lines_of(recording: Recording, path: Path) -> list[dict[str, Any]]:
    recording.write(path)
    assert [*history_check.check(path)] == []
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def results_of(ack: dict[str, Any]) -> dict[int, str]:
    return dict(zip(ack["offsets"], ack["results"], strict=True))


def test_ids_are_the_clients_texts() -> None:
    raw = np.random.default_rng(1).bytes(40 * ids.SIZE)
    assert id_texts(raw) == [ids.to_text(raw[at : at + 15]) for at in range(0, len(raw), 15)]
    assert id_texts(b"") == []


def test_a_call_without_an_answer_is_unknown(tmp_path: Path) -> None:
    recording = Recording()
    for error in (OutcomeUnknown("late"), TimerError("refused"), asyncio.CancelledError()):
        recording.record_schedule("t", [bytes(100)] * 2, [8, 9]).failed(error)
    call = recording.record_schedule("t", [b"x" * 100], None)
    call.answered(bytes(15))
    recording.record_schedule("t", [bytes(100)], 10)
    lines = lines_of(recording, tmp_path / "bench.parquet")
    outcomes = ["unknown", "fail", "unknown", "ok", "unknown"]
    assert [line["outcome"] for line in lines] == outcomes
    assert [line["marks"] for line in lines] == [[1, 2], [3, 4], [5, 6], [7], [8]]
    assert call.payloads == [(7).to_bytes(8, "little") + b"x" * 92]
    assert (lines[3]["delay_ms"], lines[4]["due_ms"]) == (0, [10])


def test_each_message_of_an_ack_has_its_own_answer(tmp_path: Path) -> None:
    recording = Recording()
    batch, ackings = make_batch(5)
    recording.record_delivery("g", batch[:2])  # the sync consumer returns a part of a batch
    for message in batch[:2]:
        _ = message.ack()
    recording.record_delivery("g", batch[2:])
    _ = [message.ack() for message in batch[2:]]
    ackings[0].set_exception(LeaseLost.of([0], 1))
    ackings[1].set_result(AckResult.ACKED)
    for acking in ackings[2:4]:
        acking.set_result(AckResult.ACKED)
    whole, joint = make_batch(3)
    recording.record_delivery("g", whole)
    _ = whole.ack()
    joint[0].set_exception(LeaseLost.of([1], 3))
    some, few = make_batch(2)
    recording.record_delivery("g", some)
    _ = some.ack()
    few[0].set_result(1)  # one of the two had expired: the answer does not say which
    first, acks, second, *others, third, last, _, doubtful = lines_of(
        recording, tmp_path / "bench.parquet"
    )
    assert (first["offsets"], first["marks"]) == ([0, 1], [70, 71])
    assert results_of(acks) == {0: "ACK_LEASE_LOST", 1: "ACKED"}
    assert second["offsets"] == [2, 3, 4]
    told = {line["outcome"]: line["offsets"] for line in others}
    assert told == {"ok": [2, 3], "unknown": [4]}  # the last ack was not answered
    assert third["ids"] == [ids.to_text(bytes(range(15)))] * 3
    assert (doubtful["outcome"], doubtful["offsets"]) == ("unknown", [0, 1])
    assert results_of(last) == {0: "ACKED", 1: "ACK_LEASE_LOST", 2: "ACKED"}
