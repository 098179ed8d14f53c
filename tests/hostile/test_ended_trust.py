"""Open connections end with the certificate of their handshake, and with its authority.

A withdrawn token ends at a follower, too.
"""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest

from cluster.rpc.node_tls import EXPIRY_S
from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from deploy.local_tls import FOLDER
from tests.cluster.running import Running, code_of, columns, schedule, take, until
from tests.hostile.token_ports import RULE, WithTokens
from timerclient.proto import timer_pb2
from timerclient.proto import timer_pb2_grpc as rpc

pytestmark = pytest.mark.slow

BOUND_S: Final = 10.0
"""docs/deploy.md: an ended trust ends open connections within this time."""
CALL_S: Final = 5.0
SHORT_S: Final = 8.0
ROUNDS: Final = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WithTokens]:
    running = WithTokens(tmp_path_factory.mktemp("trust"), nodes=3)
    with running.cleaned():
        yield running


@pytest.fixture(scope="module")
def store(cluster: Running) -> CertificateStore:
    return CertificateStore(cluster.directory / FOLDER)


def channel(address: str, ca: Path, made: CertificateStore, name: str) -> grpc.Channel:
    key, certificate = made.path(name, key=True).read_bytes(), made.path(name).read_bytes()
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
    return grpc.secure_channel(address, credentials)


@contextlib.contextmanager
def streams(cluster: Running, ca: Path, made: CertificateStore, name: str) -> Iterator[list[Any]]:
    """Open the stream of a consumer on the leader and on a follower."""
    opening = timer_pb2.OpenConsumer(topic="trust", group=name, credit=1)
    with contextlib.ExitStack() as stack:
        found = []
        for node in (cluster.wait_for_leader(), cluster.followers()[0]):
            opened = stack.enter_context(channel(cluster.node(node).grpc, ca, made, name))
            queue: SimpleQueue[Any] = SimpleQueue()
            queue.put(timer_pb2.ConsumeRequest(open=opening))
            call: Any = rpc.ConsumeServiceStub(opened).Consume(iter(queue.get, None))
            stack.callback(queue.put, None)
            assert next(call).HasField("opened")
            found.append(call)
        yield found


def ended(call: Any) -> grpc.RpcError:
    """Return the error with which an open stream ends."""
    with pytest.raises(grpc.RpcError) as caught:
        any(False for _ in call)
    return caught.value


def test_streams_of_an_expired_certificate_end(cluster: Running, store: CertificateStore) -> None:
    began_s = time.time()
    store.issue(IdentityKind.ADMIN, "brief", days=SHORT_S / 86_400)
    with streams(cluster, store.path("ca"), store, "admin-brief") as open_:
        for call in open_:
            error: Any = ended(call)
            assert code_of(error) is grpc.StatusCode.UNAVAILABLE
            assert "your certificate expired at" in error.details()
            assert "Z (this node's clock: 20" in error.details()
        assert SHORT_S - 1 < time.time() - began_s < SHORT_S + BOUND_S


def test_a_leader_whose_certificate_is_about_to_expire_gives_way(
    cluster: Running, store: CertificateStore
) -> None:
    leader = cluster.wait_for_leader()
    store.issue(IdentityKind.NODE, leader, days=EXPIRY_S / 86_400)
    cluster.kill(leader, signal.SIGHUP)
    until(lambda: cluster.wait_for_leader() != leader)
    store.issue(IdentityKind.NODE, leader)
    count = cluster.log(leader).count("new certificate in use")
    cluster.kill(leader, signal.SIGHUP)
    until(lambda: cluster.log(leader).count("new certificate in use") > count)


def append_authorities(cluster: Running, to: CertificateStore, made: CertificateStore) -> None:
    for name in ("ca", "client-ca"):
        with to.path(name).open("ab") as file:
            file.write(made.path(name).read_bytes())
    reload(cluster, "new certificate in use")


def reload(cluster: Running, line: str) -> None:
    """Let all nodes look at the files; wait for a further line of each log."""
    counts = {name: cluster.log(name).count(line) for name in cluster.nodes}
    for name in counts:
        cluster.kill(name, signal.SIGHUP)
    until(lambda: all(cluster.log(name).count(line) > n for name, n in counts.items()))


def test_connections_of_a_withdrawn_authority_end_and_other_clients_see_no_error(
    cluster: Running, store: CertificateStore, tmp_path: Path
) -> None:
    other = CertificateStore(tmp_path / "other")
    other.create(store.cluster_id)
    other.issue(IdentityKind.ADMIN, "guest")
    # On a machine without time for the nodes a leader can change at any moment.
    assert any(keeps_leader(cluster, store, other, number) for number in range(ROUNDS))


def keeps_leader(
    cluster: Running, store: CertificateStore, other: CertificateStore, number: int
) -> bool:
    """Trust another authority, and withdraw it under load; return whether the leader stayed."""
    trusted, topic = store.path("ca"), f"load{number}"
    leader = cluster.wait_for_leader()
    impostor = other.issue(IdentityKind.NODE, cluster.followers()[0]).stem
    before = {name: store.path(name).read_bytes() for name in ("ca", "client-ca")}
    append_authorities(cluster, store, other)
    epoch = cluster.role_and_epoch(leader)
    status = timer_pb2.GetStatusRequest(local=True)
    with (
        streams(cluster, trusted, other, "admin-guest") as open_,
        channel(cluster.node(leader).link, trusted, other, impostor) as link,
        cluster.client() as client,
        client.consumer(topic, "watch") as consumer,
    ):
        ask = partial(rpc.AdminServiceStub(link).GetStatus, status, timeout=CALL_S)
        assert ask().nodes
        futures = [client.submit(topic, b"%d" % i, delay=0) for i in range(200)]
        began_s = time.monotonic()
        for name, data in before.items():
            store.path(name).write_bytes(data)
        reload(cluster, "authorities were withdrawn")
        futures += [client.submit(topic, b"%d" % i, delay=0) for i in range(200, 400)]
        for call in open_:
            # ABORTED: of the follower's connection to the leader, which ended as well.
            assert code_of(ended(call)) in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED}
        assert time.monotonic() - began_s < BOUND_S
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert code_of(caught.value) is grpc.StatusCode.UNAVAILABLE
        assert [error for future in futures if (error := future.exception()) is not None] == []
        taken = take(consumer, len(futures))
        assert sorted(int(message.payload) for message in taken) == [*range(400)]
    return cluster.role_and_epoch(leader) == epoch


def test_a_token_at_a_follower_is_itself_at_the_leader_and_nothing_after_its_withdrawal(
    cluster: WithTokens, store: CertificateStore
) -> None:
    leader, follower = cluster.wait_for_leader(), cluster.followers()[0]
    rules = store.access.read_text()
    store.access.write_text(rules + RULE)
    cluster.allow(ci=time.time() + 3_600)
    with (
        cluster.client() as admin,
        grpc.secure_channel(
            cluster.token_ports[follower], grpc.ssl_channel_credentials(cluster.ca.read_bytes())
        ) as channel,
    ):

        def reload_all() -> None:
            for name in cluster.nodes:
                admin.reload_files(name)

        reload_all()
        own: Any = {"metadata": (("authorization", "Bearer ci"),), "timeout": CALL_S}
        create, asked = rpc.AdminServiceStub(channel).CreateTopic, timer_pb2.CreateTopicRequest
        assert create(asked(topic="payments/by-token"), **own).topic_id
        denied = schedule(columns("by-token", [b"x"]))
        with pytest.raises(grpc.RpcError) as caught:
            rpc.TimerServiceStub(channel).Schedule(denied, **own)
        assert code_of(caught.value) is grpc.StatusCode.PERMISSION_DENIED
        cluster.allow()
        reload_all()
        with pytest.raises(grpc.RpcError) as caught:
            create(asked(topic="payments/by-token"), **own)
        assert code_of(caught.value) is grpc.StatusCode.UNAUTHENTICATED
        store.access.write_text(rules)
        reload_all()

    def audited(name: str) -> list[tuple[str, str, bool]]:
        lines = [line for line in audit_lines(cluster, name) if "/token/" in f"/{line['identity']}"]
        return [(each["method"], each["result"], "log_index" in each) for each in lines]

    assert audited(leader) == [("CreateTopic", "OK", True)], "denied calls are not sent on"
    assert audited(follower) == [("CreateTopic", "OK", False), ("Schedule", "DENIED", False)]
    unnamed = [line for line in audit_lines(cluster, follower) if not line["identity"]]
    assert ("CreateTopic", "DENIED") in {(each["method"], each["result"]) for each in unnamed}


def audit_lines(cluster: Running, name: str) -> list[Any]:
    """Return the lines of a node's audit log."""
    lines = [line for line in cluster.log(name).splitlines() if "logger=cluster.audit" in line]
    return [json.loads(json.loads(line.partition("msg=")[2])) for line in lines]
