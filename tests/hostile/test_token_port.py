"""A node with a port for bearer tokens: callers have no certificate, and all else is denied."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from deploy.local_tls import FOLDER, open_http
from tests.cluster.running import code_of, error_of, take, until
from tests.hostile.token_ports import RPC_S, RULE, WithTokens
from timerclient import ClientTls
from timerclient.proto import timer_pb2
from timerclient.proto import timer_pb2_grpc as rpc

pytestmark = pytest.mark.slow

BOUND_S: Final = 10.0
"""docs/deploy.md: an ended trust ends open calls within this time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithTokens]:
    running = WithTokens(tmp_path_factory.mktemp("tokens"))
    with running.cleaned():
        running.wait_for_leader()
        rules = CertificateStore(running.directory / FOLDER).access
        rules.write_text(rules.read_text() + RULE)
        later = time.time() + 3_600
        running.allow(ci=later, leaver=later)
        with running.client() as admin:
            files = admin.reload_files("n1").files
            named = {each.setting: each.result for each in files}
            taken = timer_pb2.ReloadFilesResponse.RESULT_TAKEN
            assert named["tls.tokens"] == named["tls.access"] == taken
        yield running


def channel(cluster: WithTokens, port: str, tls: ClientTls | None = None) -> grpc.Channel:
    _, certificate, key = tls.read() if tls is not None else (b"", None, None)
    credentials = grpc.ssl_channel_credentials(cluster.ca.read_bytes(), key, certificate)
    return grpc.secure_channel(port, credentials)


def test_a_token_schedules_and_consumes_within_its_rules(cluster: WithTokens) -> None:
    with cluster.by_token("ci") as client:
        client.schedule("payments/a", b"x", delay=0)
        with client.consumer("payments/a", "g") as consumer:
            assert [message.payload for message in take(consumer, 1)] == [b"x"]
        with pytest.raises(Exception, match="token/ci has no rule for produce on 'orders'"):
            client.schedule("orders", b"x")
        for _ in range(2):
            client.create_topic("payments/audited")
        index = client.status().nodes[0].applied_index
    created, repeated = (
        json.loads(json.loads(line.partition("msg=")[2]))
        for line in cluster.log("n1").splitlines()
        if "payments/audited" in line
    )
    assert (created["identity"], created["method"]) == ("token/ci", "CreateTopic")
    assert 0 < created["log_index"] <= index
    assert "log_index" not in repeated, "it appended nothing"


def test_other_callers_are_denied_counted_and_their_token_is_in_no_log(cluster: WithTokens) -> None:
    status = timer_pb2.GetStatusRequest(local=True)
    wrong: list[tuple[ClientTls | None, tuple[tuple[str, str], ...]]] = [
        (None, ()),
        (cluster.tls, ()),
        (None, (("authorization", "Bearer hidden-token"),)),
        (None, (("authorization", "Bearer ci"), ("authorization", "Bearer ci"))),
        (None, (("timer-caller", "timer://c/admin/local"),)),
    ]
    for tls, metadata in wrong:
        with channel(cluster, cluster.token_port, tls) as opened:
            with pytest.raises(grpc.RpcError) as caught:
                rpc.AdminServiceStub(opened).GetStatus(status, timeout=RPC_S, metadata=metadata)
            assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
            assert error_of(caught.value).reason == timer_pb2.REASON_TOKEN_REJECTED
    with channel(cluster, cluster.token_port) as opened:  # denied before a message is read
        unsent: Any = opened.stream_stream("/timer.v1.TimerService/Schedule")
        queue: SimpleQueue[Any] = SimpleQueue()
        with pytest.raises(grpc.RpcError) as caught:
            next(unsent(iter(queue.get, None), timeout=RPC_S))
        queue.put(None)
        assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
    own = (("authorization", "Bearer ci"),)
    for port in (cluster.node("n1").grpc, cluster.node("n1").link):  # these stay mutual
        with channel(cluster, port) as opened, pytest.raises(grpc.RpcError) as caught:
            rpc.AdminServiceStub(opened).GetStatus(status, timeout=RPC_S, metadata=own)
        assert code_of(caught.value) is grpc.StatusCode.UNAVAILABLE
    log = cluster.log("n1")
    assert "the bearer token is unknown" in log
    assert "hidden-token" not in log
    assert cluster.tls is not None
    with contextlib.closing(open_http(cluster.node("n1").http, cluster.tls, RPC_S)) as page:
        page.request("GET", "/metrics")
        found = page.getresponse().read().decode()
    [denied] = [line for line in found.splitlines() if line.startswith("timer_denied_total ")]
    assert float(denied.split()[1]) >= len(wrong)


def test_calls_with_health_checks_have_the_status_of_their_own_denial(cluster: WithTokens) -> None:
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "timer.v1.TimerService"},
    }
    options = [("grpc.service_config", json.dumps(config))]
    store = CertificateStore(cluster.directory / FOLDER)
    certificate = store.issue(IdentityKind.CLIENT, "norule").read_bytes()
    key = store.path("client-norule", key=True).read_bytes()
    by_token = grpc.ssl_channel_credentials(cluster.ca.read_bytes())
    by_certificate = grpc.ssl_channel_credentials(cluster.ca.read_bytes(), key, certificate)
    unknown = (("authorization", "Bearer unknown"),)
    for port, tls, metadata, code in (
        (cluster.token_port, by_token, unknown, grpc.StatusCode.UNAUTHENTICATED),
        (cluster.node("n1").grpc, by_certificate, (), grpc.StatusCode.PERMISSION_DENIED),
    ):
        with grpc.secure_channel(port, tls, options) as opened:
            get = rpc.TimerServiceStub(opened).GetTimer
            with pytest.raises(grpc.RpcError) as caught:
                get(timer_pb2.GetTimerRequest(topic="t", key="k"), timeout=RPC_S, metadata=metadata)
            assert code_of(caught.value) is code
            watch = health_pb2_grpc.HealthStub(opened).Watch
            with pytest.raises(grpc.RpcError) as caught:
                next(watch(health_pb2.HealthCheckRequest(), timeout=RPC_S, metadata=metadata))
            assert code_of(caught.value) is grpc.StatusCode.UNIMPLEMENTED
            assert error_of(caught.value).message  # the reason of the denial


def test_the_http_port_takes_tokens(cluster: WithTokens) -> None:
    with cluster.by_token("ci") as client:
        client.create_topic("payments/http")
    path = "/v1/topics/payments%2Fhttp"
    assert cluster.http(path, "ci")[0] == 200
    for token in ("", "wrong"):
        status, body, headers = cluster.http(path, token)
        assert (status, json.loads(body)["reason"]) == (401, "TOKEN_REJECTED")
        assert headers["Content-Type"].startswith("application/problem+json")
        assert headers["WWW-Authenticate"] == "Bearer"
        assert [cluster.http(page, token)[0] for page in ("/metrics", "/v1/status")] == [401] * 2
        assert cluster.http("/healthz", token)[0] == 200
    assert [cluster.http(page, "ci")[0] for page in ("/metrics", "/v1/status")] == [403] * 2


def test_timers_over_http_need_the_rules_of_their_methods(cluster: WithTokens) -> None:
    own, other = (f"/v1/topics/{name}%2Fjson" for name in ("payments", "orders"))
    timer = '{"json": 1, "delay": 0}'
    status, made, _ = cluster.http(f"{own}/timers", "ci", "POST", timer)
    assert (status, json.loads(made)["result"]) == (200, "SCHEDULED")
    status, lines, _ = cluster.http(
        f"{own}/timers/stream", "ci", "POST", f"{timer}\n{timer}\n", "application/x-ndjson"
    )
    assert (status, [json.loads(line)["line"] for line in lines.splitlines()]) == (200, [1, 2])
    wanted, held = '{"max_messages": 3, "wait": 5}', ""
    for words in (("extend", "nack"), ("ack",)):  # a nacked message is delivered again
        received = json.loads(cluster.http(f"{own}/groups/g/receive", "ci", "POST", wanted)[1])
        offsets = [*(each["queue_offset"] for each in received["messages"]), 1_000]
        for word in words:
            more = {"delay": 0} if word == "nack" else {}
            held = json.dumps({"lease_id": received["lease_id"], "offsets": offsets, **more})
            results = json.loads(cluster.http(f"{own}/groups/g/{word}", "ci", "POST", held)[1])
            done = f"{word}ed".upper()  # the last offset is that of no message
            assert results["results"] == [done] * (len(offsets) - 1) + ["NOT_DELIVERED"]
    assert cluster.http(f"{own}/policies", "ci")[0] == 200
    for path, body in (("timers", timer), ("groups/g/receive", "{}"), ("groups/g/ack", held)):
        status, refused, _ = cluster.http(f"{other}/{path}", "ci", "POST", body)
        assert (status, json.loads(refused)["reason"]) == (403, "PERMISSION_DENIED")
        assert cluster.http(f"{own}/{path}", "wrong", "POST", body)[0] == 401
    status, lines, _ = cluster.http(
        f"{other}/timers/stream", "ci", "POST", timer, "application/x-ndjson"
    )
    assert json.loads(lines)["error"]["reason"] == "PERMISSION_DENIED"
    unknown = cluster.http(f"{own}/timers/stream", "wrong", "POST", timer, "application/x-ndjson")
    assert unknown[0] == 401
    assert cluster.http(f"{other}/timers/count", "ci")[0] == 404  # as if it were not there
    for verb, path, sent, expected in (
        ("PUT", f"{own}/series/k", '{"every": 3600}', 200),
        ("GET", f"{own}/series/k?next_times=1", None, 200),
        ("GET", f"{own}/series", None, 200),
        ("POST", f"{own}/series/preview", '{"every": 3600}', 200),
        ("PATCH", f"{own}/series/k", '{"paused": true}', 403),  # no rule for cancel
        ("DELETE", f"{own}/series/k", None, 403),
        ("PUT", f"{other}/series/k", '{"every": 3600}', 403),
        ("POST", f"{other}/series/preview", '{"every": 3600}', 403),
        ("GET", f"{other}/series", None, 404),
        ("GET", "/v1/series?page_size=1", None, 200),
        ("GET", "/v1/topics", None, 200),
        ("GET", f"{own}/queue", None, 200),
        ("GET", f"{other}/queue", None, 404),
    ):
        assert cluster.http(path, "ci", verb, sent)[0] == expected, (verb, path)
    with cluster.client() as client:
        client.create_series("orders/of-others", "k", b"", every=3_600)
    for path in ("/v1/series?page_size=100", "/v1/topics?prefix=o", "/v1/topics"):
        listed = json.loads(cluster.http(path, "ci")[1])
        found = listed.get("series") or listed["topics"]
        names = [each.get("topic") or each["name"] for each in found]
        assert all(name.startswith("payments/") for name in names), (path, names)
        assert ("payments/json" in names) == ("prefix=o" not in path)
        assert listed.get("count") is None
    assert cluster.tls is not None  # a certificate that may see all of the cluster
    with contextlib.closing(open_http(cluster.node("n1").http, cluster.tls, RPC_S)) as page:
        page.request("GET", f"/v1/timer?id={json.loads(made)['id']}")
        answer = page.getresponse()
        assert (answer.status, json.loads(answer.read())["state"]) == (200, "fired")
    for node in cluster.nodes.values():  # each node gets the leader's figures, as a node itself

        def shown(address: str = node.http) -> bool:
            assert cluster.tls is not None
            with contextlib.closing(open_http(address, cluster.tls, RPC_S)) as page:
                page.request("GET", "/v1/overview")
                overview = json.loads(page.getresponse().read())
            return overview["counters"]["acked"] is not None and overview["lags"] is not None

        until(shown)


def test_timers_that_arrive_together_over_http_have_answers_of_their_own(
    cluster: WithTokens,
) -> None:
    def scheduled(at: int) -> tuple[int, str]:
        topic = ("payments", "orders")[at % 2]
        timer = json.dumps({"key": f"{at // 2}", "delay": 3600})
        status, answer, _ = cluster.http(
            f"/v1/topics/{topic}%2Ftogether/timers", "ci", "POST", timer
        )
        return status, json.loads(answer).get("id")

    with ThreadPoolExecutor(16) as callers:
        found = list(callers.map(scheduled, range(64)))
    assert [status for status, _ in found] == [200, 403] * 32
    assert len({made for status, made in found if status == 200}) == 32


@contextlib.contextmanager
def stream(cluster: WithTokens, token: str) -> Iterator[Any]:
    """Open the stream of a consumer."""
    opening = timer_pb2.OpenConsumer(topic="payments/stream", group=token, credit=1)
    queue: SimpleQueue[Any] = SimpleQueue()
    queue.put(timer_pb2.ConsumeRequest(open=opening))
    with channel(cluster, cluster.token_port) as opened:
        call: Any = rpc.ConsumeServiceStub(opened).Consume(
            iter(queue.get, None), metadata=(("authorization", f"Bearer {token}"),)
        )
        try:
            assert next(call).HasField("opened")
            yield call
        finally:
            queue.put(None)
            call.cancel()


def test_streams_end_with_the_withdrawal_and_the_expiry_of_their_token(cluster: WithTokens) -> None:
    later, soon = time.time() + 3_600, time.time() + 4
    cluster.allow(ci=later, leaver=later, brief=soon)
    with cluster.client() as admin:
        admin.reload_files("n1")
        with (
            stream(cluster, "ci") as staying,
            stream(cluster, "leaver") as leaving,
            stream(cluster, "brief") as brief,
        ):
            with pytest.raises(grpc.RpcError) as caught:
                next(brief)
            assert soon - 0.5 < time.time() < soon + BOUND_S
            assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
            assert "token/brief expired at" in str(caught.value)
            cluster.allow(ci=later)
            began_s = time.monotonic()  # the node looks by itself
            with pytest.raises(grpc.RpcError) as caught:
                next(leaving)
            assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
            assert time.monotonic() - began_s < BOUND_S
            assert not staying.done()
            until(lambda: "new tokens in force" in cluster.log("n1"))
