"""Errors of connections that TLS ends: one end has none, or a certificate is not valid."""

import re
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from timerclient import AsyncTimerClient, ClientTls
from timerclient.streams.secure_dial import SecureDial
from timerclient.values.errors import Unreachable


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CertificateStore:
    made = CertificateStore(tmp_path_factory.mktemp("hints"))
    made.create("c")
    made.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    made.issue(IdentityKind.ADMIN, "a")
    made.issue(IdentityKind.ADMIN, "old", days=0)
    made.issue(IdentityKind.NODE, "old", hosts=["127.0.0.1"], days=0)
    return made


def files(store: CertificateStore, ca: str = "ca", own: str = "admin-a") -> ClientTls:
    return ClientTls(ca=store.path(ca), certificate=store.path(own), key=store.path(own, key=True))


@pytest.fixture
async def port(store: CertificateStore) -> AsyncIterator[Callable[[str], int]]:
    """Returns a port of a server with the certificate of this name; empty: without TLS."""
    server = grpc.aio.server()
    trusted = store.path("client-ca").read_bytes()
    made = {"": server.add_insecure_port("127.0.0.1:0")}
    for name in "node-n1", "node-old":
        pair = store.path(name, key=True).read_bytes(), store.path(name).read_bytes()
        secured = grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)
        made[name] = server.add_secure_port("127.0.0.1:0", secured)
    await server.start()
    yield made.__getitem__
    await server.stop(None)


@pytest.mark.parametrize(
    ("node", "ca", "own", "hint"),
    [
        ("node-n1", None, "", r"if it has TLS, .*a valid .*timers\+tls:// with TIMERS_TLS_CA"),
        ("", "ca", "admin-a", "this port speaks no TLS"),
        (
            "node-n1",
            "client-ca",
            "admin-a",
            "the node's certificate does not fit the client's `ca`",
        ),
        (
            "node-old",
            "ca",
            "admin-a",
            "the node's certificate or its authority has expired, .*OK.$",
        ),
        ("node-n1", "ca", "admin-old", r"/admin-old.pem: expired at 20.*Z \(this machine's .*Z\)$"),
    ],
)
async def test_cause_of_a_connection_that_tls_ends_is_named_in_the_error(
    port: Callable[[str], int],
    store: CertificateStore,
    *,
    node: str,
    ca: str | None,
    own: str,
    hint: str,
) -> None:
    tls = files(store, ca, own) if ca is not None else None
    async with AsyncTimerClient(f"127.0.0.1:{port(node)}", credentials=tls, timeout=0.5) as client:
        with pytest.raises(Unreachable, match=hint):
            await client.create_topic("t")


def test_certificate_of_a_client_is_named_if_it_is_not_valid_yet(
    store: CertificateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SecureDial(files(store), (), None)
    none = SecureDial(ClientTls(ca=store.path("ca")), (), "t")
    assert (own.date_error(), none.date_error()) == ("", "")
    with monkeypatch.context() as behind:
        behind.setattr(time, "time", lambda: 0.0)
        found = own.date_error()
    assert re.search(r"/admin-a.pem: is valid only from 20.*Z on \(.* clock: 1970.*\)$", found)
