"""A cluster with TLS: certificates of others have no effect, and new ones cause no error."""

import contextlib
import hashlib
import http.client
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest

from cluster.control import raft_link
from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from deploy.local_tls import FOLDER, open_http, tls_of
from replication.proto import replication_pb2 as pb
from replication.proto import snapshot_pb2
from replication.shell import snapshot_service, transport
from replication.shell.tcp_stream import HALF
from tests.cluster.running import Running, code_of, error_of, take, until
from timer.files.data_directory import read_identity
from timer.files.disk import RealDisk
from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN
from timerclient import ClientTls
from timerclient.proto import timer_pb2
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.errors import (
    InvalidRequest,
    NotFound,
    PermissionDenied,
    QuotaReached,
    TimerError,
)

pytestmark = pytest.mark.slow

STREAM_S: Final = 5.0
CALL_S: Final = 20.0
DENIED: Final = {
    grpc.StatusCode.UNAVAILABLE,  # of a failed handshake
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,  # the public port has no methods for nodes
}

UNSERVED: Final = (
    ("/timer.v1.TimerService/Schedule", b"\xff"),
    ("/timer.v1.AdminService/DrainNode", b""),
    ("/grpc.health.v1.Health/Check", b""),
)
"""Calls that no handler of the node serves: unreadable, denied, and of another service."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("tls"), tls=True).cleaned() as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster: Running) -> CertificateStore:
    return CertificateStore(cluster.directory / FOLDER)


def credentials(tls: ClientTls | None, ca: Path) -> grpc.ChannelCredentials:
    if tls is None:
        return grpc.ssl_channel_credentials(ca.read_bytes())
    _, certificate, key = tls.read()
    return grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)


@pytest.fixture(scope="module")
def strangers(
    cluster: Running, store: CertificateStore, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ClientTls | None]:
    """Name -> files that make no node; n1's from an authority with the same names included."""
    folder, found = tmp_path_factory.mktemp("others"), dict[str, ClientTls | None]()
    forged = CertificateStore(folder / "forged")
    forged.create(store.cluster_id)
    other = CertificateStore(folder / "other")
    other.create("other")
    for made in (forged, other):
        made.issue(IdentityKind.NODE, "n1")
        found[made.directory.name] = pair(made, "node-n1")
    for kind in (IdentityKind.CLIENT, IdentityKind.ADMIN):
        store.issue(kind, "n1")
        found[str(kind)] = pair(store, f"{kind}-n1")
    found["unknown node"] = pair(store, store.issue(IdentityKind.NODE, "n9").stem)
    found["nobody"] = None
    return found


def pair(store: CertificateStore, name: str) -> ClientTls:
    return ClientTls(
        ca=store.path("ca"), certificate=store.path(name), key=store.path(name, key=True)
    )


def forged_calls(cluster: Running, to: str, sender: str) -> Iterator[tuple[str, str, list[bytes]]]:
    """Yield (method, shape, messages) that a node named `sender` would send to the node `to`."""
    node = cluster.node(sender)
    identity = read_identity(RealDisk(), cluster.directory / node.data)
    hello = pb.Hello(
        version=transport.VERSION,
        cluster_id=identity.cluster_id,
        sender=identity.replica_id,
        name=sender,
        receiver_name=to,
        level_min=LEVEL_MIN,
        level_max=LEVEL_MAX,
    )
    yield transport.METHOD, "stream_stream", [hello.SerializeToString()]
    greeting = raft_link._hello(sender, to, identity.cluster_id)
    yield raft_link.METHOD, "stream_stream", [greeting]
    open_ = snapshot_pb2.SnapshotOpen(
        version=snapshot_service.VERSION, cluster_id=identity.cluster_id, name=sender
    )
    yield snapshot_service.OPEN, "unary_unary", [open_.SerializeToString()]
    fetch = snapshot_pb2.SnapshotFetch()
    yield snapshot_service.FETCH, "unary_stream", [fetch.SerializeToString()]


def call(channel: grpc.Channel, method: str, shape: str, messages: list[bytes]) -> Any:
    """Return the error of a forged call. None: it was answered."""
    made: Any = getattr(channel, shape)(method)
    try:
        if shape == "stream_stream":
            stream = made(iter(messages), timeout=STREAM_S)
            with contextlib.ExitStack() as ending:
                ending.callback(stream.cancel)
                next(stream, None)
        elif shape == "unary_stream":
            _ = [*made(messages[0], timeout=STREAM_S)]
        else:
            made(messages[0], timeout=STREAM_S)
    except grpc.RpcError as error:
        return error
    return None


def refused(cluster: Running, to: str, tls: ClientTls | None, sender: str) -> None:
    """Check that every call of a node is denied on both ports."""
    node, ca = cluster.node(to), cluster.directory / FOLDER / "ca.pem"
    for address in (node.link, node.grpc):
        with grpc.secure_channel(address, credentials(tls, ca)) as channel:
            for method, shape, messages in forged_calls(cluster, to, sender):
                error = call(channel, method, shape, messages)
                assert error is not None, (address, method)
                assert code_of(error) in DENIED, (address, method, error)


def test_messages_under_a_nodes_name_need_its_certificate(
    cluster: Running, store: CertificateStore, strangers: dict[str, ClientTls | None]
) -> None:
    leader = cluster.wait_for_leader()
    epoch = cluster.role_and_epoch(leader)
    for tls in strangers.values():
        refused(cluster, leader, tls, cluster.followers()[0])
    # A true node under the name of another node.
    first, second = cluster.followers()
    with grpc.secure_channel(
        cluster.node(leader).link, credentials(pair(store, f"node-{first}"), store.path("ca"))
    ) as channel:
        for method, shape, messages in forged_calls(cluster, leader, second):
            if method != snapshot_service.FETCH:  # it names no node
                error = call(channel, method, shape, messages)
                assert code_of(error) is grpc.StatusCode.PERMISSION_DENIED, method
    assert cluster.role_and_epoch(leader) == epoch
    with cluster.client() as client, client.consumer("alive", "watch") as consumer:
        client.schedule("alive", b"x", delay=0)
        assert [message.payload for message in take(consumer, 1)] == [b"x"]


def test_messages_over_tcp_need_a_nodes_certificate_and_the_key_of_its_stream(
    cluster: Running, store: CertificateStore, strangers: dict[str, ClientTls | None]
) -> None:
    until(lambda: metric(cluster, 'timer_connections{port="replication"}') == 4)
    with hello_of_a_node(cluster, store) as (said, files):
        half, rest = said.tcp_key[:HALF], said.tcp_key[HALF:]
        assert answer_of(said.tcp_port, None, half) == b""
        for tls in (each for name, each in strangers.items() if name != "unknown node"):
            assert answer_of(said.tcp_port, context_of(store, tls), half) == b""
        assert answer_of(said.tcp_port, context_of(store, files), rest) == b""
        made = socket.create_connection(("127.0.0.1", said.tcp_port), CALL_S)
        made = context_of(store, files).wrap_socket(made)
        made.sendall(half)
        assert made.recv(1_024) == rest
    with contextlib.closing(made), contextlib.suppress(ConnectionResetError):
        assert made.recv(1_024) == b"", "the connection ends with its stream"
    assert answer_of(said.tcp_port, context_of(store, files), half) == b"", "and so does the key"


@contextlib.contextmanager
def hello_of_a_node(
    cluster: Running, store: CertificateStore
) -> Iterator[tuple[pb.Hello, ClientTls]]:
    """Yield the Hello that one follower answers to the other, whose files are yielded, too.

    The stream between them ends with the block.
    """
    sender, to = cluster.followers()
    files = pair(store, f"node-{sender}")
    with grpc.secure_channel(
        cluster.node(to).link, credentials(files, store.path("ca"))
    ) as channel:
        stream: Any = channel.stream_stream(transport.METHOD)
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        _, _, [hello] = next(forged_calls(cluster, to, sender))
        requests.put(hello)
        answers = stream(iter(requests.get, None))  # without a reference it would be cancelled
        yield pb.Hello.FromString(next(answers)), files
        requests.put(None)


def context_of(store: CertificateStore, tls: ClientTls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(store.path("ca")))
    context.check_hostname = False
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def answer_of(port: int, context: ssl.SSLContext | None, sent: bytes) -> bytes:
    """Send bytes to a port; return the answer's first bytes. Empty: the connection was ended."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        made = stack.enter_context(socket.create_connection(("127.0.0.1", port), STREAM_S))
        if context is not None:
            made = stack.enter_context(context.wrap_socket(made))
        made.sendall(sent)
        return made.recv(1_024)
    return b""


def test_the_link_port_is_for_nodes_and_the_public_port_for_clients(
    cluster: Running, store: CertificateStore, strangers: dict[str, ClientTls | None]
) -> None:
    ca, node = store.path("ca"), cluster.node("n1")
    asked = timer_pb2.GetStatusRequest(local=True)
    for address, tls in (
        (node.link, tls_of(cluster.directory)),
        (node.grpc, pair(store, "node-n2")),
        (node.grpc, strangers["forged"]),
        (node.grpc, None),
    ):
        with grpc.secure_channel(address, credentials(tls, ca)) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                rpc.AdminServiceStub(channel).GetStatus(asked, timeout=STREAM_S)
            assert code_of(caught.value) in DENIED
    with grpc.insecure_channel(node.grpc) as channel, pytest.raises(grpc.RpcError):
        rpc.AdminServiceStub(channel).GetStatus(asked, timeout=STREAM_S)


def test_a_follower_relays_requests_over_its_own_certificate(cluster: Running) -> None:
    assert cluster.tls is not None
    node = cluster.node(cluster.followers()[0])
    with grpc.secure_channel(node.grpc, credentials(cluster.tls, Path(cluster.tls.ca))) as channel:
        asked = timer_pb2.CreateTopicRequest(topic="relayed")
        assert rpc.AdminServiceStub(channel).CreateTopic(asked, timeout=STREAM_S * 4).topic_id


def test_the_http_port_shows_only_probes_without_a_certificate(cluster: Running) -> None:
    address, admin = cluster.node("n1").http, cluster.tls
    assert admin is not None
    context = ssl.create_default_context(cafile=str(admin.ca))
    pages = (
        ("/healthz", 200),
        ("/readyz", 200),
        ("/metrics", 403),
        ("/", 403),
        ("/v1/topics", 403),
    )
    for path, without in pages:
        connection = open_http(address, admin, STREAM_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            assert connection.getresponse().status == 200
        bare = http.client.HTTPSConnection(address, timeout=STREAM_S, context=context)
        with contextlib.closing(bare):
            bare.request("GET", path)
            assert bare.getresponse().status == without
    bare = http.client.HTTPSConnection(address, timeout=STREAM_S, context=context)
    with contextlib.closing(bare):  # the caller comes first: a body is not even parsed
        bare.request("PUT", "/v1/topics/x", "{", {"Content-Type": "application/json"})
        assert bare.getresponse().status == 403
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), STREAM_S) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        while plain.recv(1_024):
            pass
    until(lambda: metric(cluster, "timer_http_tls_handshakes_failed_total") >= 1)
    assert metric(cluster, 'timer_connections{port="http"}') >= 1


def metric(cluster: Running, name: str) -> float:
    """Return a sample of n1's metrics."""
    assert cluster.tls is not None
    with contextlib.closing(open_http(cluster.node("n1").http, cluster.tls, STREAM_S)) as page:
        page.request("GET", "/metrics")
        lines = page.getresponse().read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_a_change_over_http_needs_the_rules_of_its_method(
    cluster: Running, store: CertificateStore
) -> None:
    store.issue(IdentityKind.CLIENT, "http")
    node = cluster.followers()[0]

    def change(tls: ClientTls | None) -> tuple[int, str]:
        connection = open_http(cluster.node(node).http, tls, STREAM_S * 4)
        with contextlib.closing(connection):
            body, headers = "{}", {"Content-Type": "application/json"}
            connection.request("PUT", "/v1/topics/over-http", body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()).get("reason", "")

    assert change(pair(store, "client-http")) == (403, "PERMISSION_DENIED")
    assert change(cluster.tls) == (200, "")
    lines = [line for line in cluster.log(node).splitlines() if "CreateTopic" in line]
    assert sum("DENIED" in line for line in lines) == 1
    assert sum("OK" in line and "over-http" in line for line in lines) == 1


def served_on(address: str) -> str:
    """Return a hash of the certificate that a port serves now."""
    host, _, port = address.rpartition(":")
    return hashlib.sha256(ssl.get_server_certificate((host, int(port))).encode()).hexdigest()


def is_renewed(address: str, was: str) -> bool:
    return served_on(address) != was


def test_new_certificates_under_load_cause_no_error(
    cluster: Running, store: CertificateStore
) -> None:
    leader = cluster.wait_for_leader()
    state = cluster.role_and_epoch(leader)
    old = {name: served_on(node.http) for name, node in cluster.nodes.items()}
    with hello_of_a_node(cluster, store) as (said, _):
        replication = f"127.0.0.1:{said.tcp_port}"
        was = served_on(replication)
    errors: list[TimerError] = []
    with cluster.client() as client, client.consumer("load", "watch") as consumer:
        futures = [client.submit("load", b"%d" % i, delay=0) for i in range(100)]
        for name, node in cluster.nodes.items():
            store.issue(IdentityKind.NODE, name, hosts=["127.0.0.1"])
            cluster.kill(name, signal.SIGHUP)
            futures += [client.submit("load", b"%d" % len(futures), delay=0) for _ in range(100)]
            until(partial(is_renewed, node.http, old[name]))
        store.issue(IdentityKind.ADMIN, "local")  # this client's own
        with cluster.client() as fresh:
            futures.append(fresh.submit("load", b"fresh", delay=0))
            for future in futures:
                error = future.exception()
                errors += [error] if isinstance(error, TimerError) else []
        assert errors == []
        assert len(take(consumer, len(futures))) == len(futures)
    assert cluster.role_and_epoch(leader) == state, "no failover"
    assert is_renewed(replication, was)
    until(lambda: metric(cluster, 'timer_connections{port="replication"}') == 4)
    assert metric(cluster, "timer_voters") == 3


def test_files_that_do_not_fit_leave_the_old_certificate_in_use(
    cluster: Running, store: CertificateStore
) -> None:
    node = cluster.node("n1")
    before, right = served_on(node.http), store.path("node-n1").read_bytes()
    store.path("node-n1").write_bytes(store.path("node-n2").read_bytes())
    cluster.kill("n1", signal.SIGHUP)
    until(lambda: "the certificate in use stays: tls.certificate" in cluster.log("n1"))
    assert served_on(node.http) == before

    def warnings() -> list[str]:
        with cluster.client() as client:
            return [text for each in client.status().nodes for text in each.warnings]

    [warning] = warnings()
    assert warning.startswith("the certificate in use stays: tls.certificate")
    store.path("node-n1").write_bytes(right)
    cluster.kill("n1", signal.SIGHUP)
    until(lambda: not warnings())
    assert cluster.tls is not None
    connection = open_http(node.http, cluster.tls, STREAM_S)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/status?scope=cluster")
        nodes = json.loads(connection.getresponse().read())["nodes"]
    assert {each["role"] for each in nodes} == {"leader", "follower"}
    assert all(int(each["tls_not_after_ms"]) > int(each["clock_ms"]) for each in nodes)


def test_a_reload_has_a_result_for_each_file(cluster: Running, store: CertificateStore) -> None:
    def results() -> dict[str, str]:
        found = client.reload_files("n1")
        assert found.node == "n1"
        return {
            each.setting.removeprefix("tls."): timer_pb2.ReloadFilesResponse.Result.Name(
                each.result
            ).removeprefix("RESULT_")
            for each in found.files
        }

    right, rules = store.path("node-n1").read_bytes(), store.access.read_text()
    unchanged = dict.fromkeys(("access", "ca", "client_ca", "certificate", "key"), "UNCHANGED")
    with cluster.client() as client:
        assert results() == unchanged
        store.path("node-n1").write_bytes(store.path("node-n2").read_bytes())
        store.access.write_text(rules + "[[rule]]\n")
        assert results() == unchanged | {"access": "KEPT", "certificate": "KEPT"}
        whys = {each.setting: each.why for each in client.reload_files("n1").files}
        assert "must be of the key" in whys["tls.certificate"]
        assert "who" in whys["tls.access"]
        store.path("node-n1").write_bytes(right)
        store.access.write_text(rules + '[[rule]]\nwho = ["client/x"]\nmay = ["observe"]\n')
        assert results() == unchanged | {"access": "TAKEN"}
        store.access.write_text(rules)
        assert results() == unchanged | {"access": "TAKEN"}
    lines = [line for line in cluster.log("n1").splitlines() if "ReloadFiles" in line]
    assert lines
    assert all("admin/local" in line and "OK" in line for line in lines)


def test_a_verification_needs_operate_and_its_progress_observe(
    cluster: Running, store: CertificateStore
) -> None:
    store.issue(IdentityKind.CLIENT, "viewer")
    rules = store.access.read_text()
    store.access.write_text(rules + '[[rule]]\nwho = ["client/viewer"]\nmay = ["observe"]\n')
    names = [*cluster.nodes]
    with (
        cluster.client() as admin,
        cluster.client(credentials=pair(store, "client-viewer")) as viewer,
    ):
        for name in names:
            admin.reload_files(name)
        for name in ("", *names):
            with pytest.raises(PermissionDenied, match="operate"):
                viewer.begin_verification(name)
        assert {each.node for each in admin.begin_verification().nodes} == {*names}
        until(lambda: all(each.ended_at_ms for each in viewer.verification().nodes))
        assert all(each.reachable for each in admin.verification().nodes)
        store.access.write_text(rules)
        for name in names:
            admin.reload_files(name)
            with pytest.raises(PermissionDenied):
                viewer.verification(name)
    lines = [line for name in names for line in cluster.log(name).splitlines()]
    audited = [line for line in lines if "logger=cluster.audit" in line and "Verification" in line]
    assert sum("admin/local" in line for line in audited) == 1, "of the node that was asked"
    assert any("client/viewer" in line and "DENIED" in line for line in audited)
    assert not any("GetVerification" in line and "DENIED" not in line for line in audited)


# ---- rules of access


@pytest.fixture
def shop(cluster: Running, store: CertificateStore) -> ClientTls:
    """A client that may work on the topics payments/* only."""
    store.issue(IdentityKind.CLIENT, "shop")
    if "client/shop" not in store.access.read_text():
        counts = {name: renewals(cluster, name) for name in cluster.nodes}
        with store.access.open("a") as rules:
            rules.write(
                '[[rule]]\nwho = ["client/shop"]\ntopics = ["payments/*"]\n'
                'may = ["produce", "cancel", "consume", "observe"]\n'
            )
        for name in cluster.nodes:
            cluster.kill(name, signal.SIGHUP)
        until(lambda: all(renewals(cluster, name) > n for name, n in counts.items()))
    return pair(store, "client-shop")


def renewals(cluster: Running, name: str) -> int:
    return cluster.log(name).count("new access rules in force")


def test_a_client_works_on_the_topics_of_its_rules_only(cluster: Running, shop: ClientTls) -> None:
    with cluster.client() as admin, cluster.client(credentials=shop) as client:
        foreign = admin.schedule("orders", b"x", delay=3_600)
        own = client.schedule("payments/a", b"y", delay=3_600)
        assert client.get_timer(own).id == own.id
        for denied in (
            lambda: client.schedule("orders", b"x"),
            lambda: client.schedule("payments", b"x"),
            lambda: client.create_topic("payments/b"),
            lambda: client.delete_topic("orders"),
            lambda: client.transfer(""),
            lambda: client.dump_stacks("n1"),
            lambda: client.set_log_level("debug"),
            lambda: client.tell_story(foreign),
        ):
            with pytest.raises(PermissionDenied):
                denied()
        for unseen in (lambda: client.count_timers("orders"), lambda: client.get_timer(foreign)):
            with pytest.raises(NotFound):
                unseen()
        assert {admin.dump_stacks(name).node for name in cluster.nodes} == {*cluster.nodes}
        assert client.cancel(foreign).name == "NOT_FOUND"
        assert client.cancel(own).name == "CANCELLED"
        assert admin.get_timer(foreign).id == foreign.id
        # The same by way of a follower, which relays requests.
        node = cluster.node(cluster.followers()[0])
        made = credentials(shop, Path(shop.ca))
        with grpc.secure_channel(node.grpc, made) as channel:
            stub = rpc.TimerServiceStub(channel)
            asked = timer_pb2.CancelRequest(timer_ids=foreign.raw)
            answer = stub.Cancel(asked, timeout=STREAM_S * 4)
            assert [*answer.results] == [timer_pb2.CANCEL_RESULT_NOT_FOUND]
            count = timer_pb2.CountTimersRequest(topic="orders")
            with pytest.raises(grpc.RpcError) as caught:
                stub.CountTimers(count, timeout=STREAM_S * 4)
            assert code_of(caught.value) is grpc.StatusCode.NOT_FOUND
        assert client.cancel(foreign).name == "NOT_FOUND"
        assert admin.cancel(foreign).name == "CANCELLED"
        # Ended timers: their topics are in the notes of firings, or in the log.
        ended = [foreign, own]
        for topic in ("orders", "payments/a"):
            ended.append(fired := admin.schedule(topic, b"z", delay=0))
            until(partial(has_state, admin, fired, "FIRED"))
            moved = admin.schedule(topic, b"z", delay=3_600)
            for _ in range(2):
                moved = admin.reschedule(moved, delay=3_600)
            assert admin.cancel(moved).name == "CANCELLED"
            ended.append(moved)
        for each in ended:
            assert admin.get_timer(each).state.name in ("FIRED", "CANCELLED")
        for each in (foreign, *ended[2:4]):
            with pytest.raises(NotFound):
                client.get_timer(each)
        assert has_state(client, own, "CANCELLED")
        assert has_state(client, ended[4], "FIRED")
        assert has_state(client, ended[5], "CANCELLED")


def test_a_list_of_topics_names_only_those_of_the_callers_rules(
    cluster: Running, shop: ClientTls
) -> None:
    with cluster.client() as admin, cluster.client(credentials=shop) as client:
        own = [f"payments/list-{n}" for n in range(3)]
        for topic in ("list", "payment/x", "payments", *own, "payments2/x", "zebra/payments"):
            admin.create_topic(topic)
        every = [each.name for each in admin.topics()]
        mine = [name for name in every if name.startswith("payments/")]
        assert {*own} <= {*mine} < {*every}
        assert [each.name for each in client.topics()] == mine
        made = credentials(shop, Path(shop.ca))
        for name in cluster.nodes:  # followers relay the request
            with grpc.secure_channel(cluster.node(name).grpc, made) as channel:
                page_of = partial(rpc.AdminServiceStub(channel).ListTopics, timeout=CALL_S)
                after, found = "", []
                for _ in mine:
                    page = page_of(timer_pb2.ListTopicsRequest(page_size=1, after=after))
                    found += [each.name for each in page.topics]
                    after = page.next_after
                    assert (page.count, after in {"", *mine}) == (0, True)
                assert (found, after) == (mine, "")
                for edge, names in (("payments", mine), ("payments/~", []), ("zebra", [])):
                    page = page_of(timer_pb2.ListTopicsRequest(page_size=1_000, after=edge))
                    assert ([each.name for each in page.topics], page.next_after) == (names, "")
                with pytest.raises(grpc.RpcError) as caught:
                    page_of(timer_pb2.ListTopicsRequest(topic="list"))
                assert code_of(caught.value) is grpc.StatusCode.NOT_FOUND


def test_lists_over_http_change_no_timer_of_another_topic(
    cluster: Running, shop: ClientTls
) -> None:
    node = cluster.node(cluster.followers()[0])

    def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with contextlib.closing(open_http(node.http, shop, CALL_S)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    with cluster.client() as admin:
        foreign = admin.schedule("orders", b"x", key="k", delay=3_600)
        old = admin.schedule("orders", b"x", delay=3_600)
        new = admin.reschedule(old, delay=7_200)
        own = admin.schedule("payments/a", b"y", key="k", delay=3_600)
        others = [foreign.id, old.id, new.id]
        moves = [{"id": each, "delay": 60} for each in [own.id, *others]]
        status, moved = post("timers/reschedule", {"timers": moves})
        assert status == 200
        done, *unseen = moved["timers"]
        assert done["result"] == "RESCHEDULED"
        assert [each["result"] for each in unseen] == [
            *("NOT_FOUND", "ALREADY_CANCELLED", "NOT_FOUND"),
        ]
        assert not any(each["id"] or each["successor_id"] for each in unseen)
        status, cancelled = post("timers/cancel", {"ids": [*others, done["id"]]})
        assert status == 200
        assert [(each["result"], each["successor_id"]) for each in cancelled["timers"]] == [
            ("NOT_FOUND", None),
            ("ALREADY_CANCELLED", None),  # its end is no secret, its successor is
            ("NOT_FOUND", None),
            ("CANCELLED", None),
        ]
        far = {"key": "k", "delay": 60}
        for path, body in (
            ("topics/orders/keys/cancel", {"keys": ["k"]}),
            ("topics/orders/keys/reschedule", {"timers": [far]}),
            ("topics/orders/timers/cancel", {}),
            ("topics/orders/timers/reschedule", {"delay": 60}),
        ):
            status, refused = post(path, body)
            assert (status, refused["reason"]) == (403, "PERMISSION_DENIED"), path
        _, page = post("topics/payments%2Fa/timers/cancel", {})
        token = page["next_page_token"]  # of another filter
        assert post("topics/orders/timers/cancel", {"page_token": token})[0] == 403
        assert [has_state(admin, each, "PENDING") for each in (foreign, new)] == [True] * 2
        assert [admin.cancel(each).name for each in (foreign, new)] == ["CANCELLED"] * 2


def has_state(client: Any, timer: Any, name: str) -> bool:
    """Return whether a timer has a state."""
    return bool(client.get_timer(timer).state.name == name)


def test_request_ids_producers_and_successors_of_others_are_out_of_reach(
    cluster: Running, shop: ClientTls
) -> None:
    topic = "payments/ids"
    with cluster.client() as admin, cluster.client(credentials=shop) as client:
        guessed = client.schedule(topic, b"guess", delay=3_600, request_id="next")
        own = admin.schedule(topic, b"own", delay=3_600, request_id="next")
        assert own.id != guessed.id
        assert admin.schedule(topic, b"own", delay=3_600, request_id="next").id == own.id
        old = admin.schedule("orders", b"x", delay=3_600)
        admin.reschedule(old, delay=7_200)
        leader = cluster.node(cluster.wait_for_leader()).grpc
        admins, theirs = (
            grpc.secure_channel(leader, credentials(each, Path(each.ca)))
            for each in (cluster.tls, shop)
            if each is not None
        )
        with admins, theirs:
            stubs = [rpc.TimerServiceStub(each) for each in (admins, theirs)]
            register = timer_pb2.RegisterProducerRequest(token=b"t")
            first, second = (each.RegisterProducer(register, timeout=CALL_S) for each in stubs)
            assert first.producer_id != second.producer_id
            asked = timer_pb2.ScheduleRequest(producer_id=first.producer_id, sequence=1)
            asked.timers.add(topic=topic, delay_ms=[1], payload_sizes=[0])
            ended = timer_pb2.UnregisterProducerRequest(producer_id=first.producer_id)
            stubs[1].UnregisterProducer(ended, timeout=CALL_S)  # as if there were none
            with pytest.raises(grpc.RpcError) as caught:
                stubs[1].Schedule(asked, timeout=CALL_S)
            assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
            assert stubs[0].Schedule(asked, timeout=CALL_S).timer_ids
            by_id = timer_pb2.GetTimerRequest(timer_id=old.raw)
            assert stubs[0].GetTimer(by_id, timeout=CALL_S).successor_id
            with pytest.raises(grpc.RpcError) as caught:
                stubs[1].GetTimer(by_id, timeout=CALL_S)
            assert code_of(caught.value) is grpc.StatusCode.NOT_FOUND
            cancel = timer_pb2.CancelRequest(timer_ids=old.raw)
            assert not stubs[1].Cancel(cancel, timeout=CALL_S).successor_ids
        with pytest.raises(InvalidRequest, match="request_id = 'next'"):
            client.schedule(topic, b"other", delay=3_600, request_id="next")


def take_rules(cluster: Running, store: CertificateStore, rules: str) -> None:
    """Put these rules into effect on all nodes."""
    counts = {name: renewals(cluster, name) for name in cluster.nodes}
    store.access.write_text(rules)
    for name in cluster.nodes:
        cluster.kill(name, signal.SIGHUP)
    until(lambda: all(renewals(cluster, name) > n for name, n in counts.items()))


def test_limits_of_the_rules_slow_or_reject_their_client_and_are_named(
    cluster: Running, store: CertificateStore, shop: ClientTls
) -> None:
    rules = store.access.read_text()
    limits = "rate = { requests = 5 }\nmost = { streams = 4, topics = 1, groups = 1, series = 1 }\n"
    take_rules(cluster, store, rules + limits)  # of the last rule
    topic, made = "payments/rate", credentials(shop, Path(shop.ca))
    with (
        cluster.client() as admin,
        grpc.secure_channel(cluster.node(cluster.wait_for_leader()).grpc, made) as channel,
    ):
        for each in admin.topics():  # those of other tests count, too
            admin.delete_topic(each.name)
        admin.create_topic(topic)
        count = rpc.TimerServiceStub(channel).CountTimers
        request = timer_pb2.CountTimersRequest(topic=topic)

        with pytest.raises(grpc.RpcError) as caught:
            _ = [count(request, timeout=CALL_S) for _ in range(1_000)]  # without a pause
        assert code_of(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_of(caught.value).retry_after_ms
        message = error_of(caught.value).message
        assert "rate.requests of client/shop: must be at most 5 a second" in message
        for method, data in UNSERVED:
            asked: Any = channel.unary_unary(method)
            codes = {asked.future(data, timeout=CALL_S).code() for _ in range(200)}
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes, method
        with cluster.client(credentials=shop) as client:  # it waits, without an error
            for _ in range(10):
                client.schedule(topic, b"x", delay=3_600)
            client.schedule("payments/own", b"x", delay=3_600)
            with pytest.raises(QuotaReached, match=r"most.topics: client/shop has 1: must be"):
                client.schedule("payments/more", b"x", delay=3_600)
            client.consumer("payments/own", "g").close()
            with pytest.raises(QuotaReached, match=r"most.groups: client/shop has 1: must be"):
                next(iter(client.consumer("payments/own", "h")))
            admin.delete_topic("payments/own")
            client.schedule("payments/more", b"x", delay=3_600)
            client.create_series("payments/more", "s", every=3_600)
            with pytest.raises(QuotaReached, match=r"most.series: client/shop has 1: must be"):
                client.create_series("payments/more", "t", every=3_600)
        consume = rpc.ConsumeServiceStub(channel).Consume
        queue: SimpleQueue[Any] = SimpleQueue()
        calls: list[Any] = [consume(iter(queue.get, None)) for _ in range(5)]
        ended = until(lambda: next((each for each in calls if each.done()), None))
        assert "most.streams of client/shop: 4 are open on this node" in str(ended.details())
        for each in calls:
            queue.put(None)
            each.cancel()
    take_rules(cluster, store, rules)


def test_streams_of_a_denied_client_end_and_the_audit_log_has_denied_calls_and_changes(
    cluster: Running, store: CertificateStore, shop: ClientTls
) -> None:
    made, topic = credentials(shop, Path(shop.ca)), "payments/stream"
    opening = timer_pb2.OpenConsumer(topic=topic, group="g", credit=1)
    with cluster.client() as admin, cluster.client(credentials=shop) as client:
        foreign = admin.schedule("orders", b"x", delay=3_600)
        with pytest.raises(PermissionDenied):
            client.delete_topic("orders")
        with pytest.raises(NotFound):
            client.count_timers("orders")
        with pytest.raises(NotFound):
            client.get_timer(foreign)
    streams = []
    with contextlib.ExitStack() as stack:
        for name in (cluster.wait_for_leader(), cluster.followers()[0]):
            channel = stack.enter_context(grpc.secure_channel(cluster.node(name).grpc, made))
            queue: SimpleQueue[Any] = SimpleQueue()
            queue.put(timer_pb2.ConsumeRequest(open=opening))
            call: Any = rpc.ConsumeServiceStub(channel).Consume(iter(queue.get, None))
            stack.callback(queue.put, None)
            assert next(call).HasField("opened")
            streams.append(call)
        began_s = time.monotonic()
        store.access.write_text(store.access.read_text().partition('[[rule]]\nwho = ["client/s')[0])
        for call in streams:  # no SIGHUP: the nodes look at the file by themselves
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert code_of(caught.value) is grpc.StatusCode.PERMISSION_DENIED, caught.value
        assert time.monotonic() - began_s < 10
    with cluster.client() as admin, cluster.client(credentials=shop) as client:
        # As soon as the third node has looked, too: every node denies the client all calls.
        with pytest.raises(PermissionDenied, match=r"client/[a-z]+ has no rule$"):
            client.schedule(topic, b"x", timeout=CALL_S)
        with pytest.raises(PermissionDenied), client.consumer(topic, "g") as consumer:
            take(consumer, 1)
        admin.delete_topic(topic)
    assert metric(cluster, "timer_denied_total") >= 1
    lines = [
        json.loads(json.loads(line.partition("msg=")[2]))
        for name in cluster.nodes
        for line in cluster.log(name).splitlines()
        if "logger=cluster.audit" in line
    ]
    audited = {(each["identity"], each.get("method"), each["result"]) for each in lines}
    assert ("admin/local", "DeleteTopic", "OK") in audited
    for method in ("DeleteTopic", "CountTimers", "GetTimer"):
        assert ("client/shop", method, "DENIED") in audited
