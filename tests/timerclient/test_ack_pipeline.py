"""The pipeline of acks, on its own: each future is settled once, whatever the stream does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import ACK, ACK_UP_TO, SHED, Acking, Batch, extend_by, nack_after
from timerclient.streams.ack_pipeline import AckPipeline
from timerclient.streams.acks import AckCall, AnswerCallback, QueuedAck
from timerclient.values.errors import (
    ConnectionLost,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    TimerError,
)
from timerclient.values.results import AckResult

OFFSETS_MAX, REQUESTS_MAX = 3, 2
WORDS = {"ack": ACK, "up to": ACK_UP_TO, "nack": nack_after(1.0), "extend": extend_by(2.0)}
RESULTS = {
    "ack": pb.ACK_RESULT_ACKED,
    "nack": pb.ACK_RESULT_NACKED,
    "extend": pb.ACK_RESULT_EXTENDED,
}


class Play:
    """A pipeline, its application and its leader."""

    def __init__(self) -> None:
        packed: list[QueuedAck] = []
        self.pipeline = AckPipeline(OFFSETS_MAX, REQUESTS_MAX, packed.append)
        self.batches = [
            Batch(
                pb.Deliveries(epoch=1, lease_id=lease, queue_offsets=range(lease, 1000, 2)),
                lambda *_: None,
            )
            for lease in (1, 2)
        ]
        self.acks: list[tuple[str, Acking[Any]]] = []
        self.own: list[str] = []
        self.wire: list[AckCall] = []
        self.now_s = 0.0

    def put(self, which: int, word: str, n: int = 1) -> None:
        batch = self.batches[which]
        for _ in range(n):
            acking: Acking[Any] = Acking()
            offset = batch.queue_offsets[len(self.acks)]
            assert self.pipeline.put(batch, [offset], acking, WORDS[word])
            self.acks.append((word, acking))

    def put_own(self, which: int) -> None:
        entry = QueuedAck(self.batches[which], [1 + which], heard(self.own), SHED)
        assert self.pipeline.put_own(entry)

    def send(self) -> None:
        call = self.pipeline.send(self.now_s)
        if call is None:
            return
        self.wire.append(call)
        most = (
            1 if call.action.is_cumulative else 2 * OFFSETS_MAX - 1
        )  # the last entry may exceed the bound
        assert 0 < len(call.request.offsets) <= most
        assert {offset % 2 for offset in call.request.offsets} == {call.request.lease_id % 2}
        assert {each.action for each in call.entries} == {call.action}

    def answer(self, at: int) -> None:
        if self.wire:
            call = self.wire.pop(at % len(self.wire))
            results = [RESULTS[call.action.kind]] * len(call.request.offsets)
            assert self.pipeline.take_answered(call.request.request_no, results) is call
            assert self.pipeline.take_answered(call.request.request_no, results) is None
            call.settle(results)

    def reject(self, at: int, *, again: bool) -> None:
        if self.wire:
            call = self.wire.pop(at % len(self.wire))
            assert self.pipeline.take_rejected(call.request.request_no) is call
            if again:
                self.pipeline.requeue(call)
                assert next(iter(self.pipeline._packed)) == call.request.request_no
            else:
                call.fail(NotFound("no such group"))

    def new_stream(self) -> None:
        """The stream breaks, and all that waits is sent on the next one."""
        kept = {call.request.request_no for call in self.wire if call.action.kind == "ack"}
        self.pipeline.pack()
        kept |= {no for no, call in self.pipeline._packed.items() if stays(call)}
        self.wire.clear()
        self.pipeline.on_stream_broken()
        waits = self.pipeline.begin_stream()
        assert waits == self.pipeline.has_resends
        assert [*self.pipeline._packed] == sorted(kept)


def heard(into: list[str]) -> AnswerCallback:
    return AnswerCallback(lambda *_: into.append("done"), lambda: into.append("failed"))


def stays(call: AckCall) -> bool:
    """Whether a request that waits is sent on the next stream."""
    return call.action.kind == "ack" or not (call.was_sent or call.action.own)


STEPS = st.one_of(
    st.tuples(
        st.just("put"), st.sampled_from([0, 1]), st.sampled_from([*WORDS]), st.integers(1, 5)
    ),
    st.tuples(st.just("put_own"), st.sampled_from([0, 1])),
    st.tuples(st.just("send")),
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("new_stream")),
)


@given(st.lists(STEPS, min_size=20, max_size=80))
def test_each_future_is_settled_once(steps: list[Any]) -> None:
    play = Play()
    for name, *values in steps:
        if name in ("again", "fail"):
            play.reject(*values, again=name == "again")
        else:
            getattr(play, name)(*values)
        assert play.pipeline.wire_count == len(play.wire) <= REQUESTS_MAX
    own = sum(step[0] == "put_own" for step in steps)
    acks = [acking for word, acking in play.acks if word in ("ack", "up to") and not acking.done()]
    play.pipeline.close(None)
    assert play.pipeline.unconfirmed == len(acks)
    assert len(play.own) == own
    assert all(acking.done() for _, acking in play.acks)
    for _, acking in play.acks:
        error = acking.exception(0)
        assert error is None or isinstance(error, TimerError)
    assert not play.pipeline.put(play.batches[0], [1], Acking(), ACK)
    assert not play.pipeline.put_own(QueuedAck(play.batches[0], [1], heard(play.own), SHED))
    play.pipeline.pack()
    assert not play.pipeline.has_resends


def test_answer_of_another_length_breaks_the_stream_and_loses_no_ack() -> None:
    play = Play()
    play.put(0, "ack")
    play.put(0, "nack")
    play.send()
    play.send()
    for call in play.wire:
        with pytest.raises(ConnectionLost):
            play.pipeline.take_answered(call.request.request_no, [pb.ACK_RESULT_ACKED] * 2)
    play.new_stream()
    [(_, acked), (_, nacked)] = play.acks
    assert isinstance(nacked.exception(0), OutcomeUnknown)
    play.send()
    play.answer(0)
    assert acked.result(0) is AckResult.ACKED


def test_nacks_with_one_text_share_a_request_and_the_text_is_cut_to_its_limit() -> None:
    play = Play()
    batch, texts = play.batches[0], ["no stock", "no stock", "é" * 1_000, "\ud800"]
    for offset, text in zip(batch.queue_offsets, texts, strict=False):
        play.pipeline.put(batch, [offset], Acking[Any](), nack_after(None, text))
    requests = []
    while (call := play.pipeline.send(0.0)) is not None:
        assert isinstance(call.request, pb.NackRequest)
        requests.append(call.request)
        play.pipeline.take_answered(call.request.request_no, [5] * len(call.request.offsets))
    assert [(each.detail, len(each.offsets)) for each in requests] == [
        *[("no stock", 2), ("é" * 510 + "…", 1)],
        ("?", 1),
    ]
    with pytest.raises(InvalidRequest, match="detail = ValueError: must be a str"):
        nack_after(None, ValueError("no stock"))  # type: ignore[arg-type]
