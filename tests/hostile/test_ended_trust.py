"""Open connections end with the certificate of their handshake, and with its authority."""

import contextlib
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import grpc
import pytest

from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from deploy.local_tls import FOLDER
from tests.cluster.running import Running, code_of, take, until
from timerclient.proto import timer_pb2
from timerclient.proto import timer_pb2_grpc as rpc

pytestmark = pytest.mark.slow

BOUND_S: Final = 10.0
"""docs/deploy.md: an ended trust ends open connections within this time."""
CALL_S: Final = 5.0
SHORT_S: Final = 8.0
ROUNDS: Final = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("trust"), tls=True).cleaned() as running:
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
        assert SHORT_S - 1 < time.time() - began_s < SHORT_S + BOUND_S


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
    epoch = epoch_of(cluster, leader)
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
    return epoch_of(cluster, leader) == epoch


def epoch_of(cluster: Running, name: str) -> tuple[str, int]:
    """Return a node's role and epoch. The controller may be another node at any time."""
    state = until(lambda: cluster.state(name))
    return state.role, state.epoch
