"""The witness: a topic that was deleted comes back; a lease ends before its batch is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos.history import history_check
from chaos.history.history import History, RunFolder
from chaos.live import witness
from tests.chaos import told
from timer.model import timer_id
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Batch
from timerclient.values.errors import (
    Closed,
    CommitTimeout,
    LeadershipLost,
    LeaseLost,
    NotReady,
    TimerError,
)


class Client:
    """A client whose calls fail, one after the other; then its only topic is there."""

    def __init__(self, *failures: TimerError, batches: tuple[Batch, ...] = ()) -> None:
        self.failures = [*failures]
        self.name = "t"
        self._batches = batches

    def topics(self) -> list[Any]:
        if self.failures:
            raise self.failures.pop(0)
        return [self]

    def consumer(self, *_: object, **__: object) -> "Client":
        return self

    def batches(self) -> tuple[Batch, ...]:
        return self._batches


def waited(client: Any) -> None:
    witness.wait_for(client, "t")


def test_witness_waits_for_a_topic_whatever_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(witness, "LOOK_S", 0)
    client = Client(NotReady(), LeadershipLost(), CommitTimeout())
    waited(client)
    assert client.failures == []


def test_time_at_which_all_messages_are_acked_is_that_of_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of topics `one` and `two`: the first look finds a message in `one`; the second finds none."""
    clock = iter(range(1, 9))
    monkeypatch.setattr(witness, "now_ms", lambda: next(clock))
    monkeypatch.setattr(witness, "LOOK_S", 0)
    groups = [
        [pb.GroupStatus(name=name, unacked=n) for name, n in (("live-audit", left), ("g", 1))]
        for left in (1, 0)
    ]
    one, none = (pb.TopicStatus(name="one", groups=each) for each in groups)
    two = pb.TopicStatus(name="two", groups=groups[1])
    answers: list[Any] = [[one, two], NotReady(), [none, pb.TopicStatus(name="two")], Closed()]
    told: list[dict[str, int]] = []

    class Topics:
        def topics(self) -> Any:
            told.extend(json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
            if isinstance(answer := answers.pop(0), TimerError):
                raise answer
            return answer

    with pytest.raises(Closed):
        witness.record_drained(Topics(), tmp_path / "witness-1.json")  # type: ignore[arg-type]
    assert told == [{"two": 1}, {"two": 1}, {"one": 2, "two": 1}]


def test_witness_that_is_closed_waits_no_more() -> None:
    with pytest.raises(Closed):
        waited(Client(Closed()))


def test_messages_whose_leases_end_before_they_are_written_stop_nothing(tmp_path: Path) -> None:
    def lost(*_: object) -> None:
        raise LeaseLost.of([7], 1)

    ids = timer_id.encode(np.array([1], np.int64), np.array([2], np.uint64), 0)
    columns = pb.Deliveries(
        queue_offsets=[7], due_ms=[1], fired_at_ms=[1], attempts=[1], timer_ids=ids,
        payload_sizes=[8], payloads=b"12345678",
    )  # fmt: skip
    client: Any = Client(batches=(Batch(columns, lost),))
    with History(RunFolder(tmp_path / "live"), "witness") as history:
        witness.consume(client, "t", history)
    assert told.seqs(tmp_path) == {2}
    [path] = RunFolder(tmp_path / "live").history_files()
    assert [*history_check.check(path)] == []
