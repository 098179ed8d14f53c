"""Makes the certificates of a cluster: two authorities and their certificates.

The package `cryptography` is needed.

    D/ca.pem  D/ca-key.pem                    signs nodes
    D/client-ca.pem  D/client-ca-key.pem      signs clients and administrators
    D/node-n1.pem  D/node-n1-key.pem          and client-NAME, admin-NAME
    D/access.toml                             a first version of the rules

Keys are P-256, readable by the owner only. The keys of the authorities belong on no node: keep the
directory on the machine of an operator.
"""

import contextlib
import datetime
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    identity_of,
    node_host,
    nodes_host,
)
from cluster.settings.names import NAME, NAME_RULE

AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 365
CLOCK_SKEW: Final = datetime.timedelta(hours=1)
"""Certificates are valid from an hour ago, for machines whose clocks are behind."""
ACCESS: Final = """\
# Rules of access: docs/deploy.md. All else is denied.
[[rule]]
who = ["admin/*"]
may = ["produce", "cancel", "consume", "observe", "manage", "operate"]

# [[rule]]
# who = ["client/billing"]
# may = ["produce", "cancel", "consume", "observe"]
# topics = ["payments/*", "orders"]
# groups = ["billing*"]
"""
_DNS_NAME: Final = re.compile(r"(\*\.)?([\w-]+\.)*[\w-]*[A-Za-z][\w-]*\.?", re.ASCII)
"""The last label has a letter, so it is no IP address with a wrong number."""
_AUTHORITY_OF: Final = {
    IdentityKind.NODE: "ca",
    IdentityKind.CLIENT: "client-ca",
    IdentityKind.ADMIN: "client-ca",
}


class CertificateError(Exception):
    """A certificate could not be made or read; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """The contents of a certificate."""

    path: Path
    subject: str
    """The identity, such as node/n1; of an authority its name."""
    cluster: str
    hosts: tuple[str, ...]
    issuer: str
    issuer_key_id: str
    """Of the authority's key, in hexadecimal digits; empty: the certificate does not state it."""
    not_after: datetime.datetime


class CertificateStore:
    """The certificates in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str, *, key: bool = False) -> Path:
        """Return the path of a certificate, or of its key; `name`: such as `ca` or `node-n1`."""
        return self.directory / (f"{name}-key.pem" if key else f"{name}.pem")

    def create(self, cluster_id: str, days: int = AUTHORITY_DAYS) -> None:
        """Make both authorities and a first `access.toml`.

        Raises:
            CertificateError: there are authorities already, or the cluster's id is malformed.
        """
        if not NAME.fullmatch(cluster_id):
            raise CertificateError(f"cluster id = {cluster_id!r}: must be {NAME_RULE}")
        if any(self.path(name).exists() for name in ("ca", "client-ca")):
            raise CertificateError(f"{self.directory} has authorities already")
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, signs in (("ca", "nodes"), ("client-ca", "clients")):
            key = ec.generate_private_key(ec.SECP256R1())
            subject = _subject_name(f"{cluster_id} {signs}", cluster_id)
            built = (
                _builder(subject, subject, key, _in_days(days))
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs=True), critical=True)
                .add_extension(
                    x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
                )
            )
            self._write(name, built.sign(key, hashes.SHA256()), key)
        if not self.access.exists():
            self.access.write_text(ACCESS)

    @property
    def access(self) -> Path:
        """The file of the rules."""
        return self.directory / "access.toml"

    @property
    def cluster_id(self) -> str:
        """The cluster's id, from the nodes' authority.

        Raises:
            CertificateError: there is no authority.
        """
        return _cluster_of(_load(self.path("ca"))[0].subject)

    def issue(
        self, kind: IdentityKind, name: str, *, hosts: Sequence[str] = (), days: float = LEAF_DAYS
    ) -> Path:
        """Make a key and a certificate, in place of an earlier one; return the certificate's path.

        `hosts`: DNS names and IP addresses at which clients reach a node; empty: those of the
            earlier certificate.
        `days`: validity. The certificate ends with its authority at the latest.

        Raises:
            CertificateError: a name is malformed, the authority's key is not here or is that of
                another authority, the authority has expired, or an earlier certificate that would
                have the hosts is damaged.
        """
        if not NAME.fullmatch(name):
            raise CertificateError(f"name = {name!r}: must be {NAME_RULE}")
        if name == "ca" or name.endswith("-key"):
            # client-ca.pem is the authority, and client-x-key.pem the key of client x.
            raise CertificateError(f"name = {name!r}: must not be `ca`, nor end in `-key`")
        if hosts and kind is not IdentityKind.NODE:
            raise CertificateError("hosts: only the certificates of nodes have them")
        authority, signer = self._signer(kind)
        cluster_id = _cluster_of(authority.subject)
        until = min(_in_days(days), authority.not_valid_after_utc)
        identity = CallerIdentity(kind, name)
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri(cluster_id))]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if kind is IdentityKind.NODE:
            own = (node_host(name, cluster_id), nodes_host(cluster_id))
            named = [_host(each, is_new=bool(hosts)) for each in hosts or self._hosts(name)]
            names += [*map(x509.DNSName, own), *named]
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issuer_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        built = (
            _builder(_subject_name(str(identity), cluster_id), authority.subject, key, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer_key_id, critical=False)
        )
        made = f"{kind}-{name}"
        self._write(made, built.sign(signer, hashes.SHA256()), key)
        return self.path(made)

    def authority_end(self, kind: IdentityKind) -> datetime.datetime:
        """Return the time at which the authority of a kind of certificates expires.

        Raises:
            CertificateError: see `issue`.
        """
        return self._signer(kind)[0].not_valid_after_utc

    def facts(self) -> Iterator[CertificateFacts]:
        """Yield the facts of each certificate in the directory, by file name.

        Raises:
            CertificateError: a file has no certificate.
        """
        for path in sorted(self.directory.glob("*.pem")):
            if not path.name.endswith("-key.pem"):
                yield from facts_of(path)

    # ---- files

    def _signer(self, kind: IdentityKind) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Return the authority of a kind of certificates, and its key.

        A file may have two authorities, while one replaces the other.
        """
        name = _AUTHORITY_OF[kind]
        path, key = self.path(name), self._key(name)
        mine = [each for each in _load(path) if each.public_key() == key.public_key()]
        if not mine:
            other = self.path(name, key=True)
            raise CertificateError(f"{other}: the key of another authority than {path}")
        last = max(mine, key=lambda each: each.not_valid_after_utc)
        if last.not_valid_after_utc <= _in_days(0):
            raise CertificateError(f"{path}: expired at {last.not_valid_after_utc:%Y-%m-%d %H:%MZ}")
        return last, key

    def _hosts(self, name: str) -> tuple[str, ...]:
        """Return the hosts of a node's present certificate, except its names among the nodes."""
        path = self.path(f"{IdentityKind.NODE}-{name}")
        if not path.exists():
            return ()
        before = facts_of(path)[0]
        own = (node_host(name, before.cluster), nodes_host(before.cluster))
        return tuple(each for each in before.hosts if each not in own)

    def _key(self, name: str) -> ec.EllipticCurvePrivateKey:
        path = self.path(name, key=True)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except OSError as error:
            raise CertificateError(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{path}: not a private key: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{path}: must be a key on an elliptic curve")
        return key

    def _write(
        self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        """Replace certificate and key, each atomically. A node that sees a mixed pair waits."""
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _replace(self.path(name, key=True), private, 0o600)
        _replace(self.path(name), certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def facts_of(path: Path) -> list[CertificateFacts]:
    """Return the facts of each certificate in a file, at least one.

    Raises:
        CertificateError: it cannot be read, or has no certificate.
    """
    return [_facts(path, each) for each in _load(path)]


def _facts(path: Path, found: x509.Certificate) -> CertificateFacts:
    cluster = _cluster_of(found.subject)
    subject, hosts = _common_name(found.subject), tuple[str, ...]()
    with contextlib.suppress(x509.ExtensionNotFound):  # an authority
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = (
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        )
        try:
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
            subject = str(identity_of(uris, cluster))
        except UntrustedIdentityError as error:
            raise CertificateError(f"{path}: {error}") from None
    return CertificateFacts(
        path=path,
        subject=subject,
        cluster=cluster,
        hosts=hosts,
        issuer=_common_name(found.issuer),
        issuer_key_id=_issuer_key_id(found.extensions),
        not_after=found.not_valid_after_utc,
    )


def _issuer_key_id(extensions: x509.Extensions) -> str:
    """Return the key id of a certificate's authority, which an authority states as its own."""
    with contextlib.suppress(x509.ExtensionNotFound):
        named = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        return (named.key_identifier or b"").hex()
    with contextlib.suppress(x509.ExtensionNotFound):
        own = extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return own.digest.hex()
    return ""


def _load(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CertificateError(f"{path}: not a certificate: {error}") from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_in_days(0) - CLOCK_SKEW)
        .not_valid_after(until)
    )


def _in_days(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _subject_name(common: str, cluster_id: str) -> x509.Name:
    """Return a certificate's name. Programs do not read it, except `timerctl certs`."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster_id),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:64]),
        ]
    )


def _common_name(name: x509.Name) -> str:
    return "".join(str(each.value) for each in name.get_attributes_for_oid(NameOID.COMMON_NAME))


def _cluster_of(name: x509.Name) -> str:
    return "".join(
        str(each.value) for each in name.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str, *, is_new: bool) -> x509.GeneralName:
    """Return a host for a certificate. A renewal does not fail for hosts of earlier releases."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    if is_new and not _DNS_NAME.fullmatch(text):
        limit = "must be a DNS name or an IP address, without scheme and port"
        raise CertificateError(f"host = {text!r}: {limit}")
    return x509.DNSName(text)


def _replace(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
