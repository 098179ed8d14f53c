"""TLS of a local cluster: its certificates, and the launcher's own connections.

D/certs/    authorities, a certificate for each node, admin-local, client-local, access.toml
"""

import http.client
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc

from timerclient.values.client_tls import ClientTls

FOLDER: Final = "certs"
LOCAL_NAME: Final = "local"
"""Name of the administrator and of the client."""
RULES: Final = """
[[rule]]
who = ["client/local"]
may = ["produce", "cancel", "consume", "observe"]
"""
"""Rules of a local cluster, after those of its administrators."""


def make_certificates(directory: Path, cluster_id: str, hosts: Iterable[tuple[str, str]]) -> None:
    """Make the certificates of a new cluster in `directory`. `hosts`: (node, host) pairs.

    Raises:
        CertificateError: the directory has authorities already.
        ModuleNotFoundError: the extra `certs` is not installed.
    """
    from cluster.security.identities import IdentityKind
    from deploy.certificate_store import CertificateStore

    store = CertificateStore(directory / FOLDER)
    store.create(cluster_id)
    for node, host in hosts:
        store.issue(IdentityKind.NODE, node, hosts=["localhost", host])
    with store.access.open("a") as rules:
        rules.write(RULES)
    store.issue(IdentityKind.ADMIN, LOCAL_NAME)
    store.issue(IdentityKind.CLIENT, LOCAL_NAME)


def settings_of(directory: Path, node: str) -> list[str]:
    """Return the lines of a node's TOML file: the table [tls]."""
    files = {
        "ca": "ca.pem",
        "client_ca": "client-ca.pem",
        "certificate": f"node-{node}.pem",
        "key": f"node-{node}-key.pem",
        "access": "access.toml",
    }
    folder = directory / FOLDER
    return ["\n[tls]", *(f'{key} = "{folder / file}"' for key, file in files.items())]


def tls_of(directory: Path) -> ClientTls | None:
    """Return the files of the administrator. None: no TLS."""
    folder = directory / FOLDER
    if not (folder / "ca.pem").exists():
        return None
    who = f"admin-{LOCAL_NAME}"
    return ClientTls(
        ca=folder / "ca.pem", certificate=folder / f"{who}.pem", key=folder / f"{who}-key.pem"
    )


def open_channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    """Return a channel to a node."""
    if tls is None:
        return grpc.insecure_channel(address)
    ca, certificate, key = tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate))


def open_http(address: str, tls: ClientTls | None, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to a node's HTTP port."""
    if tls is None:
        return http.client.HTTPConnection(address, timeout=timeout_s)
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    return http.client.HTTPSConnection(address, timeout=timeout_s, context=context)
