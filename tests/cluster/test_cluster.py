"""Against three real processes: the results of applications' calls, and rejected calls."""

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.cluster.running import (
    RPC_S,
    Running,
    code_of,
    columns,
    error_of,
    in_time,
    nothing_comes,
    now_ms,
    schedule,
    streamed,
    take,
    until,
)
from timer.files.data_directory import read_identity
from timer.files.disk import RealDisk
from timer.model.feature_level import LEVEL_MAX
from timerclient import InvalidRequest, Timer, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.streams.node_channel import DIRECT
from timerclient.values.errors import NotFound

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20
PAYLOAD_MAX = 64 * KIB
ROWS_MAX = 5000
REQUEST_MAX = 512 * KIB
SETTINGS = (
    f"limits.payload_bytes_max = {PAYLOAD_MAX}",
    f"limits.request_rows_max = {ROWS_MAX}",
    f"limits.request_bytes_max = {REQUEST_MAX}",
    "limits.delay_ms_max = 86400000",
)


# ---- from schedule to gone


def test_new_cluster_has_the_highest_feature_level_also_on_its_disks(cluster: Running) -> None:
    cluster.digests_agree()
    status = cluster.admin().GetStatus(pb.GetStatusRequest(), timeout=RPC_S)
    assert {node.feature_level for node in status.nodes} == {LEVEL_MAX}
    datas = [cluster.directory / node.data for node in cluster.nodes.values()]
    assert {read_identity(RealDisk(), data).level for data in datas} == {LEVEL_MAX}


def test_timers_fire_in_due_order_and_are_gone_once_acked(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    delays = [600, 300, 450, 300]

    def scheduled(start_ms: int) -> tuple[str, int, list[Timer]]:
        name = f"{topic}-{start_ms}"
        timers = [
            client.schedule(
                name, b"%d" % delay, due_ms=start_ms + delay, key=f"k{at}", headers={"a": "b"}
            )
            for at, delay in enumerate(delays)
        ]
        client.schedule(name, b"past", due_ms=start_ms - 60_000)
        client.schedule(name, b"at once", key="ü", headers={"name": "wert €", "empty": ""})
        client.schedule(name, b"delayed", delay=timedelta(milliseconds=start_ms + 800 - before_ms))
        return name, start_ms, timers

    before_ms = now_ms()
    topic, start_ms, timers = in_time(scheduled, 300)
    with client.consumer(topic, group="g") as consumer:
        messages = take(consumer, 7)
        assert [m.payload for m in messages] == [
            b"past", b"at once", b"300", b"300", b"450", b"600", b"delayed",
        ]  # fmt: skip
        assert [m.key for m in messages[1:4]] == ["ü", "k1", "k3"]
        assert messages[1].headers == {"name": "wert €", "empty": ""}
        assert [m.queue_offset for m in messages] == [*range(7)]
        assert {m.attempt for m in messages} == {1}
        assert messages[2].id == timers[1].id
        for message in messages[2:6]:
            assert start_ms + int(message.payload) <= message.due_ms <= message.fired_at_ms
        nothing_comes(consumer, lambda: client.schedule(topic, b"the next"))

    def gone() -> bool:
        (found,) = (each for each in client.topics() if each.name == topic)
        assert found.pending == 0
        return found.queue_begin == found.queue_end == 8 and found.groups[0].unacked == 0

    assert until(gone)
    cluster.counts_add_up()


# ---- cancelling


def test_raw_ids_that_are_garbage_are_not_found_or_refused(cluster: Running) -> None:
    timers = cluster.timers()
    garbage = bytes(15) + b"\xff" * 15 + bytes(range(15))
    assert [*timers.Cancel(pb.CancelRequest(timer_ids=garbage), timeout=RPC_S).results] == [
        pb.CANCEL_RESULT_NOT_FOUND
    ] * 3
    for raw in (b"", b"x", b"x" * 16, bytes(15 * (ROWS_MAX + 1))):
        refused = refusal(partial(timers.Cancel, pb.CancelRequest(timer_ids=raw), timeout=RPC_S))
        assert refused.field == ("timer_ids" if raw else "timer_ids, keys, filter"), refused


# ---- rejected requests


def refusal(call: Callable[[], object]) -> pb.Error:
    """Return the error: INVALID_ARGUMENT, unlike all others, and with a known outcome."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    error = error_of(failed.value)
    assert error.reason == pb.REASON_INVALID_REQUEST, error
    assert code_of(failed.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert error.outcome_known
    assert not error.retryable
    assert error.field in error.message
    assert error.limit in error.message
    return error


TOO_FAR_MS = 86_400_001
HEADER = struct.pack("<H", 1) + b"n" + struct.pack("<H", 1) + b"v"

BAD_COLUMNS: dict[str, tuple[pb.TimerColumns, str]] = {
    "payload too large": (columns("t", [bytes(PAYLOAD_MAX + 1)]), "payload"),
    "too many rows": (columns("t", [b""] * (ROWS_MAX + 1)), "timers"),
    "no rows": (columns("t", []), "payload_sizes"),
    "request too large": (columns("t", [bytes(PAYLOAD_MAX)] * 9), "payloads"),
    "due too far": (columns("t", [b""], due_ms=[(1 << 62)]), "due_ms"),
    "due before the epoch": (columns("t", [b""], due_ms=[-1]), "due_ms"),
    "due of no time": (columns("t", [b""], due_ms=[0]), "due_ms"),
    "delay too long": (columns("t", [b""], delay_ms=[TOO_FAR_MS]), "delay_ms"),
    "delay negative": (columns("t", [b""], delay_ms=[-1]), "delay_ms"),
    "delay least": (columns("t", [b""], delay_ms=[-(1 << 63)]), "delay_ms"),
    "delay most": (columns("t", [b""], delay_ms=[(1 << 63) - 1]), "delay_ms"),
    "due and delay": (columns("t", [b""], due_ms=[1], delay_ms=[1]), "due_ms"),
    "neither": (columns("t", [b""], due_ms=[]), "due_ms"),
    "due of other length": (columns("t", [b""] * 3, due_ms=[1, 2]), "due_ms"),
    "payload sizes short": (columns("t", [b"abc"], payload_sizes=[2]), "payload_sizes"),
    "payload sizes long": (columns("t", [b"abc"], payload_sizes=[4]), "payload_sizes"),
    "payload sizes huge": (columns("t", [b"a"], payload_sizes=[(1 << 32) - 1] * 2), "payload"),
    "keys without sizes": (columns("t", [b""], keys=b"k"), "key_sizes"),
    "key sizes too few": (columns("t", [b""] * 2, keys=b"k", key_sizes=[1]), "key_sizes"),
    "key too long": (columns("t", [b""], keys=b"k" * 1025, key_sizes=[1025]), "key"),
    "key not UTF-8": (columns("t", [b""], keys=b"\xff", key_sizes=[1]), "keys"),
    "key cut": (columns("t", [b""] * 2, keys="ü".encode(), key_sizes=[1, 1]), "keys"),
    "headers cut": (columns("t", [b""], headers=HEADER[:-1], headers_sizes=[5]), "headers"),
    "headers odd": (columns("t", [b""], headers=HEADER[:3], headers_sizes=[3]), "headers"),
    "headers not UTF-8": (
        columns("t", [b""], headers=b"\x01\x00\xff\x00\x00", headers_sizes=[5]), "headers"),
    "headers too long": (
        columns("t", [b""], headers=bytes(32 * KIB + 4), headers_sizes=[32 * KIB + 4]), "headers"),
    "topic empty": (columns("", [b""]), "topic"),
    "topic with a space": (columns("a b", [b""]), "topic"),
    "topic too long": (columns("t" * 256, [b""]), "topic"),
    "topic with a line": (columns("t\n", [b""]), "topic"),
    "topic not ASCII": (columns("tö", [b""]), "topic"),
}  # fmt: skip


@pytest.mark.parametrize(("timers", "field"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_a_malformed_schedule_is_refused_whole_on_both_ways(
    cluster: Running, timers: pb.TimerColumns, field: str
) -> None:
    stub = cluster.timers()
    before = cluster.counts_add_up().scheduled
    good = columns("t", [b"good"])
    error = refusal(lambda: stub.Schedule(schedule(good, timers), timeout=RPC_S))
    assert error.field.startswith(field), error
    requests = [schedule(timers, request_no=1), schedule(good, request_no=2)]
    refused, taken = stub.ScheduleStream(streamed(*requests), timeout=RPC_S)
    assert (refused.request_no, refused.error.reason) == (1, pb.REASON_INVALID_REQUEST)
    assert (taken.request_no, len(taken.timer_ids)) == (2, 15)
    assert cluster.counts_add_up().scheduled == before + 1


def test_exactly_the_limits_pass(cluster: Running, client: TimerClient, topic: str) -> None:
    stub = cluster.timers()
    largest = bytes(PAYLOAD_MAX)
    for timers in (
        columns(topic, [largest], delay_ms=[0]),
        columns(topic, [largest] * 8, delay_ms=[0]),
        columns(topic, [b""] * ROWS_MAX, delay_ms=[86_400_000]),
        columns(topic, [b""], delay_ms=[0], keys=b"k" * 1024, key_sizes=[1024]),
        columns("t" * 255, [b""]),
    ):
        assert stub.Schedule(schedule(timers), timeout=RPC_S).timer_ids
    with client.consumer(topic, group="g" * 255) as consumer:
        assert [len(m.payload) for m in take(consumer, 10)] == [PAYLOAD_MAX] * 9 + [0]


def test_the_client_refuses_what_is_no_utf_8_and_what_is_no_payload(client: TimerClient) -> None:
    bad: list[dict[str, Any]] = [{"key": "k\udc80"}, {"headers": {"a": "\udc80"}}]
    for more in bad:
        with pytest.raises(InvalidRequest):
            client.schedule("t", b"x", **more)
    for payload in ("text", None, 7):
        with pytest.raises((InvalidRequest, TypeError)):
            client.schedule("t", payload, delay=60)  # type: ignore[arg-type]


DIRECTLY: Final[dict[str, Any]] = {"timeout": RPC_S, "metadata": DIRECT}
"""Keywords of a call that is not sent on."""


def test_direct_requests_to_a_follower_get_the_leaders_address(cluster: Running) -> None:
    leader, (follower, _) = cluster.wait_for_leader(), cluster.followers()
    timers, consuming = cluster.timers(follower), cluster.consuming(follower)
    opening = pb.ConsumeRequest(open=pb.OpenConsumer(topic="t", group="g"))
    for call in (
        lambda: timers.Schedule(schedule(columns("t", [b""])), **DIRECTLY),
        lambda: timers.Cancel(
            pb.CancelRequest(timer_ids=bytes(15)), timeout=RPC_S, metadata=DIRECT
        ),
        lambda: timers.RegisterProducer(
            pb.RegisterProducerRequest(token=b"t"), timeout=RPC_S, metadata=DIRECT
        ),
        lambda: [*consuming.Consume(iter([opening]), **DIRECTLY)],
        lambda: cluster.admin(follower).ListTopics(
            pb.ListTopicsRequest(), timeout=RPC_S, metadata=DIRECT
        ),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            call()
        error = error_of(failed.value)
        assert code_of(failed.value) is grpc.StatusCode.FAILED_PRECONDITION
        assert (error.reason, error.leader) == (pb.REASON_NOT_LEADER, cluster.node(leader).grpc)
        assert error.outcome_known
        assert error.retryable
    (answer,) = timers.ScheduleStream(
        streamed(schedule(columns("t", [b""]), request_no=9)), timeout=10, metadata=DIRECT
    )
    assert (answer.request_no, answer.error.leader) == (9, cluster.node(leader).grpc)


def test_tokens_and_sequences_are_checked(cluster: Running, topic: str) -> None:
    stub = cluster.timers()
    for token in (b"", bytes(65)):
        bad = pb.RegisterProducerRequest(token=token)
        error = refusal(partial(stub.RegisterProducer, bad, timeout=RPC_S))
        assert error.field == "token"
    register = pb.RegisterProducerRequest(token=topic.encode()[:64])
    producer = stub.RegisterProducer(register, timeout=RPC_S).producer_id
    assert stub.RegisterProducer(register, timeout=RPC_S).producer_id == producer

    def sent(sequence: int, producer_id: int = producer) -> pb.ScheduleRequest:
        return schedule(columns(topic, [b"x"]), producer_id=producer_id, sequence=sequence)

    assert refusal(lambda: stub.Schedule(sent(0), timeout=RPC_S)).field == "sequence"
    first = stub.Schedule(sent(1), timeout=RPC_S)
    again = stub.Schedule(sent(1), timeout=RPC_S)
    assert (again.timer_ids, again.duplicate) == (first.timer_ids, True)
    other = schedule(columns(topic, [b"y"]), producer_id=producer, sequence=1)
    for request, reason, code in (
        (other, pb.REASON_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
        (sent(3), pb.REASON_SEQUENCE_GAP, grpc.StatusCode.OUT_OF_RANGE),
        (sent(1, 1 << 60), pb.REASON_UNKNOWN_PRODUCER, grpc.StatusCode.UNAUTHENTICATED),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            stub.Schedule(request, timeout=RPC_S)
        assert code_of(failed.value) is code
        assert error_of(failed.value).reason == reason
    assert error_of_gap(lambda: stub.Schedule(sent(3), timeout=RPC_S)).expected_sequence == 2


def error_of_gap(call: Callable[[], object]) -> pb.Error:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    return error_of(failed.value)


# ---- consuming against the rules


def open_with(**fields: Any) -> pb.ConsumeRequest:
    return pb.ConsumeRequest(open=pb.OpenConsumer(**{"topic": "rules", "group": "g"} | fields))


BAD_STREAMS: dict[str, tuple[list[pb.ConsumeRequest], str]] = {
    "topic": ([open_with(topic="no good")], "topic"),
    "group empty": ([open_with(group="")], "group"),
    "group with a slash": ([open_with(group="a/b")], "group"),
    "group too long": ([open_with(group="g" * 256)], "group"),
    "lease too short": ([open_with(lease_ms=1)], "lease_ms"),
    "lease too long": ([open_with(lease_ms=(1 << 32) - 1)], "lease_ms"),
    "nothing": ([], "kind"),
    "empty request": ([pb.ConsumeRequest()], "kind"),
    "credit first": ([pb.ConsumeRequest(credit=1)], "kind"),
    "opened twice": ([open_with(), open_with()], "kind"),
    "empty later": ([open_with(), pb.ConsumeRequest()], "kind"),
}


@pytest.mark.parametrize(("requests", "field"), BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_a_consumer_that_breaks_the_rules_is_sent_away(
    cluster: Running, requests: list[pb.ConsumeRequest], field: str
) -> None:
    consuming = cluster.consuming()
    error = refusal(lambda: [*consuming.Consume(iter(requests), timeout=RPC_S)])
    assert error.field == field


def test_acks_of_nothing_and_of_too_many_are_refused_and_the_consumer_goes_on(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.create_topic(topic)
    hold = Requests(open_with(topic=topic, credit=0))
    for count in (0, 65_537):
        hold.put(pb.AckRequest(offsets=range(count)))
    hold.put(pb.AckRequest(offsets=[5]))
    answers = cluster.consuming().Consume(hold, timeout=RPC_S)
    assert next(answers).HasField("opened")
    refused = [next(answers).acked for _ in range(2)]
    assert [each.error.field for each in refused] == ["offsets"] * 2
    assert len(next(answers).acked.results) == 1
    hold.end()
    assert [*answers] == []


def test_acks_of_what_was_never_handed_out_are_told_and_change_nothing(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule_batch(topic, [b"0", b"1"])
    offsets = [0, 1, 5, 1 << 40, (1 << 64) - 1]
    hold = Requests(open_with(topic=topic, credit=0))
    for lease_id in (0, 1, (1 << 64) - 1):
        for epoch in (0, 1, (1 << 64) - 1):
            hold.put(pb.AckRequest(request_no=7, lease_id=lease_id, epoch=epoch, offsets=offsets))
    answers = cluster.consuming().Consume(hold, timeout=RPC_S)
    assert next(answers).HasField("opened")
    for _ in range(9):
        acked = next(answers).acked
        assert acked.request_no == 7
        assert acked.HasField("error") or pb.ACK_RESULT_ACKED not in acked.results, acked
    hold.end()
    assert [*answers] == []
    with client.consumer(topic, group="g") as consumer:
        assert [m.payload for m in take(consumer, 2)] == [b"0", b"1"]


class Requests:
    """The requests of a stream that stays open until `end`."""

    def __init__(self, *first: pb.ConsumeRequest) -> None:
        import queue

        self._queue: queue.Queue[pb.ConsumeRequest | None] = queue.Queue()
        for request in first:
            self._queue.put(request)

    def put(self, ack: pb.AckRequest) -> None:
        self._queue.put(pb.ConsumeRequest(ack=ack))

    def grant(self, credit: int) -> None:
        self.tell(pb.ConsumeRequest(credit=credit))

    def tell(self, request: pb.ConsumeRequest) -> None:
        self._queue.put(request)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> "Requests":
        return self

    def __next__(self) -> pb.ConsumeRequest:
        request = self._queue.get()
        if request is None:
            raise StopIteration
        return request


def test_a_huge_credit_is_as_good_as_a_large_one_and_a_stream_that_breaks_gives_all_back(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule_batch(topic, [b"%d" % at for at in range(500)])
    hold = Requests(open_with(topic=topic, credit=(1 << 32) - 1))
    for _ in range(5):
        hold.grant((1 << 32) - 1)
    answers = cluster.consuming().Consume(hold, timeout=RPC_S)
    got = 0
    for answer in answers:
        got += len(answer.deliveries.queue_offsets)
        if got == 500:
            break
    answers.cancel()
    hold.end()
    with client.consumer(topic, group="g") as consumer:
        messages = take(consumer, 500)
        assert {m.attempt for m in messages} == {2}
        assert [m.queue_offset for m in messages] == [*range(500)]


def test_a_consumer_that_never_reads_is_paused_and_the_others_go_on(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    hold = Requests(open_with(topic=topic, credit=1_000_000, lease_ms=600_000))
    answers = cluster.consuming().Consume(hold, timeout=600)
    assert next(answers).HasField("opened")  # and then it reads no more
    payload = bytes(60 * KIB)
    count = 640  # 38 MB
    with client.consumer(topic, group="other") as other:
        for _ in range(0, count, 8):
            client.submit_batch(topic, [payload] * 8)
        assert len(take(other, count)) == count
    leader = cluster.wait_for_leader()
    leased = next(
        group.leased
        for each in client.topics()
        if each.name == topic
        for group in each.groups
        if group.name == "g"
    )
    assert 0 < leased < count, "the unread stream took everything"
    answers.cancel()
    hold.end()
    until(lambda: cluster.metric(leader, "timer_consumers") == 0)
    assert cluster.metric(leader, "timer_promotion_seconds_count") >= 1


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("group_type", ["shared", "key_shared"])
def test_deliveries_on_their_way_to_a_consumer_stay_within_its_window(
    cluster: Running, client: TimerClient, topic: str, group_type: Any, rows: bool
) -> None:
    client.create_group(topic, "g", type=group_type)
    client.schedule_batch(topic, [b""] * 16, headers={"h": "x" * 10 * KIB})
    opening = pb.OpenConsumer(topic=topic, group="g", credit=1, rows=rows)
    hold = Requests(pb.ConsumeRequest(open=opening, window_bytes=25 * KIB))
    answers = cluster.consuming().Consume(hold, timeout=RPC_S)
    assert next(answers).HasField("opened")

    def come(*counts: int) -> None:
        """Receive deliveries of so many messages, and no more."""
        for count in counts:
            came = next(answers).deliveries
            assert (len(came.messages) if rows else len(came.queue_offsets)) == count
        hold.put(pb.AckRequest(lease_id=1, epoch=1, offsets=[10_000]))
        assert next(answers).HasField("acked"), "no more deliveries before that"

    come(1)
    for credit in (1, 1, 100):
        hold.grant(credit)
        come(*[1] * (credit == 1))  # the third message fills the window
    hold.tell(pb.ConsumeRequest(received=1))
    come()  # less than half the window is free
    hold.tell(pb.ConsumeRequest(credit=0, received=2))
    come(1, 1)
    hold.tell(pb.ConsumeRequest(credit=0, window_bytes=110 * KIB))
    come(7, 1)
    hold.tell(pb.ConsumeRequest(window_bytes=25 * KIB, received=7))
    come(2, 1)
    hold.tell(pb.ConsumeRequest(received=16))  # messages, not deliveries
    with pytest.raises(grpc.RpcError, match="received = 16: must be at most 9, the number of"):
        next(answers)
    hold.end()


# ---- other ways in


def test_unknown_fields_and_methods_do_no_harm(cluster: Running, topic: str) -> None:
    channel = cluster.channel(cluster.wait_for_leader())
    unknown = b"\xc0\x3e\x01" + b"\xca\x3e\x03abc"  # fields 1000 and 1001
    body = schedule(columns(topic, [b"x"])).SerializeToString()
    send: Any = channel.unary_unary(
        "/timer.v1.TimerService/Schedule", response_deserializer=pb.ScheduleResponse.FromString
    )
    assert len(send(body + unknown, timeout=RPC_S).timer_ids) == 15
    with pytest.raises(grpc.RpcError):
        send(b"\xff" * 100, timeout=RPC_S)
    nothing: Any = channel.unary_unary("/timer.v1.TimerService/Nothing")
    with pytest.raises(grpc.RpcError) as failed:
        nothing(b"", timeout=RPC_S)
    assert code_of(failed.value) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["/replication.v1.Peer/Link", "/timer.cluster.Control/Link"])
def test_garbage_on_the_peers_streams_is_refused_and_nothing_comes_of_it(
    cluster: Running, client: TimerClient, method: str
) -> None:
    epoch = client.status().epoch
    for name in cluster.nodes:
        link: Any = cluster.channel(name).stream_stream(method)
        for words in ([], [b""], [b"\xff" * 1000], [b"\x93\x01\xa1a\xa1b"], [bytes(1 << 20)]):
            with pytest.raises(grpc.RpcError) as failed:
                [*link(iter(words), timeout=RPC_S)]
            assert code_of(failed.value) in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.INVALID_ARGUMENT,
            ), (name, words, failed.value)
    client.schedule("garbage", b"goes on", delay=60)
    assert client.status().epoch == epoch


def test_bytes_that_are_no_http2_do_no_harm(cluster: Running, client: TimerClient) -> None:
    for name, node in cluster.nodes.items():
        for address in (node.grpc, node.http):
            host, _, port = address.partition(":")
            with (
                contextlib.suppress(ConnectionError),  # it may hang up before all is sent
                socket.create_connection((host, int(port)), timeout=RPC_S) as raw,
            ):
                raw.sendall(b"\x00\xff" * 500 + b"\r\n\r\n")
                with contextlib.suppress(OSError):
                    raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        assert cluster.get(name, "/healthz")[0] == 200
    client.schedule("garbage", b"goes on", delay=60)


def test_health_and_reflection_answer(cluster: Running) -> None:
    leader = cluster.wait_for_leader()
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in cluster.nodes:
        channel = cluster.channel(name)
        health = health_pb2_grpc.HealthStub(channel)

        def state(service: str, health: Any = health) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            found: int = health.Check(request, timeout=RPC_S).status
            return found

        assert state("") == state("timer.v1.AdminService") == serving
        for service in ("timer.v1.TimerService", "timer.v1.ConsumeService"):
            assert (state(service) == serving) == (name == leader)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([asked]), timeout=RPC_S)
        names = {service.name for service in answer.list_services_response.service}
        assert {"timer.v1.TimerService", "timer.v1.ConsumeService", "timer.v1.AdminService"} < names


def test_http_pages_answer_on_leader_and_follower(cluster: Running) -> None:
    leader = cluster.wait_for_leader()
    cluster.digests_agree()
    for name in cluster.nodes:
        for path in ("/", "/healthz", "/readyz", "/metrics"):
            until(lambda: cluster.get(name, path)[0] == 200)  # noqa: B023
        assert cluster.get(name, "/nothing")[0] == 404
        status = cluster.json(name, "/v1/status")
        assert (status["leader"], len(status["nodes"])) == (leader, 1)
        assert status["nodes"][0]["serving"] == (name == leader)
        until(lambda: len(cluster.json(name, "/v1/status?scope=cluster")["nodes"]) == 3)  # noqa: B023

        def whole(name: str = name) -> Any:
            found = cluster.json(name, "/v1/checkpoint?scope=cluster")
            return found if {node["node"] for node in found["nodes"]} == {*cluster.nodes} else None

        checkpoint = until(whole)
        assert checkpoint["shared"]["epoch"] == status["epoch"]


@pytest.mark.long  # makes 2,000 topics
def test_thousands_of_topics_and_groups_are_served(cluster: Running, client: TimerClient) -> None:
    futures = [client.submit(f"many/{at}", b"x") for at in range(2000)]
    for future in futures:
        future.result()
    with client.consumer("many/1999", group="g") as consumer:
        assert len(take(consumer, 1)) == 1
    cluster.digests_agree()
    assert sum(each.name.startswith("many/") for each in client.topics()) == 2000


def test_transfers_move_the_leadership_and_a_wrong_target_does_not(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    def leads(name: str) -> bool:
        return client.status().leader == name

    with pytest.raises(NotFound):
        client.transfer("n9")
    with client.consumer(topic, group="g") as consumer:
        for target in itertools.islice(itertools.cycle(sorted(cluster.nodes)), 4):
            cluster.change_leader(client, target)
            until(partial(leads, target))
            client.schedule(topic, target.encode())
            assert [m.payload for m in take(consumer, 1)] == [target.encode()]
