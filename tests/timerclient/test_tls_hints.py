"""Errors of connections that fail because one end has TLS and the other end has none."""

from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from cluster.security.identities import IdentityKind
from deploy.certificate_store import CertificateStore
from timerclient import AsyncTimerClient, ClientTls
from timerclient.values.errors import Unreachable


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CertificateStore:
    made = CertificateStore(tmp_path_factory.mktemp("hints"))
    made.create("c")
    made.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    made.issue(IdentityKind.ADMIN, "a")
    return made


def files(store: CertificateStore, ca: str = "ca") -> ClientTls:
    own = store.path("admin-a")
    return ClientTls(ca=store.path(ca), certificate=own, key=store.path("admin-a", key=True))


@pytest.fixture
async def port(store: CertificateStore) -> AsyncIterator[Callable[[bool], int]]:
    """Returns a port of a server, with TLS or without."""
    server = grpc.aio.server()
    pair = store.path("node-n1", key=True).read_bytes(), store.path("node-n1").read_bytes()
    trusted = store.path("client-ca").read_bytes()
    secured = grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)
    made = {
        True: server.add_secure_port("127.0.0.1:0", secured),
        False: server.add_insecure_port("127.0.0.1:0"),
    }
    await server.start()
    yield made.__getitem__
    await server.stop(None)


@pytest.mark.parametrize(
    ("secure", "ca", "hint"),
    [
        (True, None, r"if it has TLS, .*a valid certificate .*timers\+tls:// with TIMERS_TLS_CA"),
        (False, "ca", "this port speaks no TLS"),
        (True, "client-ca", "the node's certificate does not fit the client's `ca`"),
    ],
)
async def test_an_end_without_tls_is_named_in_the_error(
    port: Callable[[bool], int],
    store: CertificateStore,
    *,
    secure: bool,
    ca: str | None,
    hint: str,
) -> None:
    tls = files(store, ca) if ca is not None else None
    async with AsyncTimerClient(
        f"127.0.0.1:{port(secure)}", credentials=tls, timeout=0.5
    ) as client:
        with pytest.raises(Unreachable, match=hint):
            await client.create_topic("t")
