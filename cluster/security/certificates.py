"""The certificates of a node: read, checked and dated.

A node has four files. Two authorities, so that a stolen client authority makes no node:

    ca           signs nodes; nodes and clients trust it
    client_ca    signs clients and administrators; only the public ports trust it
    certificate  this node's, with the authorities between it and `ca`
    key          its private key

The check is a TLS handshake in memory between two ends with these files. It tests everything that
a peer tests: key, chain, purpose, name and dates.
"""

import contextlib
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    identity_of,
    node_host,
)
from cluster.security.plain_file import read_plain
from timer.model.timer_errors import CertificateDateError, ConfigError
from timerclient.values.certificate_dates import utc_text, validities_in

FILE_BYTES_MAX: Final = 1 << 20
_HANDSHAKE_STEPS: Final = 16
"""A handshake takes four steps."""
_NOT_YET_VALID, _EXPIRED, _NO_ISSUER = 9, 10, 20
"""Of OpenSSL: X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED and
X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """Paths of PEM files."""

    ca: str
    client_ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificate:
    """The contents of the four files, checked. Bytes are PEM."""

    ca: bytes
    client_ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    authorities: Mapping[str, frozenset[bytes]]
    """The certificates in `ca` and in `client_ca`, in DER."""
    not_after_s: Mapping[str, float]
    """Unix time at which each of `certificate`, `ca` and `client_ca` expires; of the authorities
    in a file the earliest."""


def read_certificate(files: CertificateFiles, *, name: str, cluster_id: str) -> NodeCertificate:
    """Return the contents of a node's files.

    `name`: the node's, which the certificate must have.

    Raises:
        CertificateDateError: by this machine's clock a certificate is not valid yet, or not any
            more. A note has the clock.
        ConfigError: a file cannot be read, others can read the key, or another check fails. Both
            errors name the setting, such as `tls.key`.
    """
    check_key_mode("tls.key", Path(files.key))
    ca, client_ca = (_read(f"tls.{each}", getattr(files, each)) for each in ("ca", "client_ca"))
    certificate, key = _read("tls.certificate", files.certificate), _read("tls.key", files.key)
    dates, trusted = dict[str, float](), dict[str, frozenset[bytes]]()
    for which, path, pem in (("ca", files.ca, ca), ("client_ca", files.client_ca, client_ca)):
        dates[which], trusted[which] = _authorities_in(f"tls.{which}", path, pem)
    peer = _peer_of_handshake(files, ca, certificate + b"\n" + key, node_host(name, cluster_id))
    if trusted["ca"] & trusted["client_ca"]:
        limit = f"must share no authority with tls.ca = {files.ca}: it could make nodes"
        raise ConfigError("tls.client_ca", files.client_ca, limit)
    uris = [value for kind, value in peer.get("subjectAltName", ()) if kind == "URI"]
    wanted = CallerIdentity(IdentityKind.NODE, name)
    try:
        found = identity_of(uris, cluster_id)
    except UntrustedIdentityError as error:
        raise ConfigError("tls.certificate", files.certificate, str(error)) from None
    if found != wanted:
        limit = f"must be of {wanted}, and is of {found}"
        raise ConfigError("tls.certificate", files.certificate, limit)
    dates["certificate"] = float(ssl.cert_time_to_seconds(peer["notAfter"]))
    return NodeCertificate(
        ca=ca,
        client_ca=client_ca,
        certificate=certificate,
        key=key,
        authorities=trusted,
        not_after_s=dates,
    )


def check_key_mode(setting: str, path: Path) -> None:
    """Check that only the owner can read a private key. Root's may be readable by its group.

    Raises:
        ConfigError: others can read or write the file, or it does not exist.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(setting, str(path), error.strerror or str(error)) from None
    forbidden = 0o037 if found.st_uid == 0 else 0o077
    if found.st_mode & forbidden:
        limit = f"others can use the key (mode {found.st_mode & 0o777:03o}): chmod 600"
        raise ConfigError(setting, str(path), limit)


def load_authorities(context: ssl.SSLContext, authorities: bytes) -> None:
    """Let a context trust authorities (PEM), from memory. Comments may have any bytes.

    Raises:
        ssl.SSLError: the bytes have no certificates, or one is damaged.
    """
    with _as_file(authorities) as path:
        context.load_verify_locations(path)


def load_pair(context: ssl.SSLContext, pair: bytes) -> None:
    """Load a certificate with its key (PEM) into a context, from memory.

    Raises:
        ssl.SSLError: the bytes are no such pair.
    """
    with _as_file(pair) as path:
        context.load_cert_chain(path, password=lambda: b"")


def _read(setting: str, path: str) -> bytes:
    try:
        data = read_plain(path, FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(setting, path, error.strerror or str(error)) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(setting, path, f"must have at most {FILE_BYTES_MAX} bytes")
    return data


def _authorities_in(setting: str, path: str, pem: bytes) -> tuple[float, frozenset[bytes]]:
    """Return the Unix time at which the first of the authorities expires, and all in DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        load_authorities(context, pem)
    except ssl.SSLError:
        raise ConfigError(setting, path, "must have certificates in PEM") from None
    ends = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs()]
    if not ends:
        raise ConfigError(setting, path, "must have the certificate of an authority")
    return float(min(ends)), frozenset(context.get_ca_certs(binary_form=True))


def _peer_of_handshake(
    files: CertificateFiles, ca: bytes, pair: bytes, host: str
) -> dict[str, Any]:
    """Return the certificate (see `ssl.SSLSocket.getpeercert`) after both ends verified it."""
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        for context in (server, client):
            load_authorities(context, ca)
            load_pair(context, pair)
        return _shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            raise _date_error(files, ca, pair, error.verify_code) from None
        limit = error.verify_message
        if error.verify_code == _NO_ISSUER:
            limit = f"not signed by an authority in tls.ca = {files.ca}: {limit}"
        raise ConfigError("tls.certificate", files.certificate, limit) from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            limit = f"must be of the key {files.key}"
        else:
            limit = f"with {files.key}: {error.reason or error}"
        raise ConfigError("tls.certificate", files.certificate, limit) from None


def _date_error(files: CertificateFiles, ca: bytes, pair: bytes, code: int) -> ConfigError:
    """Return the error of a date, by the code of the verification."""
    now_s, own, authorities = time.time(), validities_in(pair), validities_in(ca)
    if code == _NOT_YET_VALID:
        own_s, ca_s = (max(each.begin_s for each in dates) for dates in (own, authorities))
        is_own, what = own_s > now_s, "is valid only from {} on"
    else:
        own_s, ca_s = (min(each.end_s for each in dates) for dates in (own, authorities))
        is_own, what = own_s <= now_s, "expired at {}"
    setting, path = ("certificate", files.certificate) if is_own else ("ca", files.ca)
    error = CertificateDateError(
        f"tls.{setting}", path, what.format(utc_text(own_s if is_own else ca_s))
    )
    error.add_note(f"(this machine's clock: {utc_text(now_s)})")
    return error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, Any]:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(up, down, server_side=True)
    dialling = client.wrap_bio(down, up, server_hostname=host)
    waiting = [dialling, accepting]
    for _ in range(_HANDSHAKE_STEPS):
        for end in list(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
        if not waiting:
            return dialling.getpeercert() or {}
    raise AssertionError("the handshake in memory does not end")


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Give bytes a path that only this process can open, for functions that take paths."""
    descriptor = os.memfd_create("pair", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
