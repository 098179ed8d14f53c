"""TLS of a node's ports and channels, with certificates that are renewed while they are in use.

    files --every 5 s, or at once--> checked --> used by the next handshakes
                                         \\--> do not fit: the old ones stay, with a warning

Servers ask for the certificate at each handshake, on a thread of gRPC: neither a disk nor asyncio
may be touched there. Open connections keep the certificate of their handshake: the guard ends RPCs
whose certificate expires (cluster/rpc/call_guard.py). If an authority is withdrawn, all connections
of its ports end, because gRPC does not say which authority signed a certificate.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import grpc

from cluster.rpc.access_file import AccessFile, TokenFile
from cluster.security.certificates import (
    FILE_BYTES_MAX,
    CertificateFiles,
    NodeCertificate,
    load_authorities,
    load_pair,
    read_certificate,
)
from cluster.security.identities import (
    CallerIdentity,
    UntrustedIdentityError,
    identity_of,
    node_host,
)
from cluster.security.plain_file import read_plain
from cluster.security.reread_files import RereadFile, RereadResult
from cluster.settings.config import NodeConfig
from timer.model.timer_errors import ConfigError, PermissionDeniedError
from timerclient.values.certificate_dates import utc_text

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 5.0
"""Interval in which the files are read again."""
EXPIRY_S: Final = 60.0
"""A node whose certificate expires this soon does not lead if another can."""
ANSWER_S: Final = 1.0
"""Time for the answer of a reload before the connections of withdrawn authorities end."""
_FILES: Final = ("ca", "client_ca", "certificate", "key")
"""Names of the files of a certificate, in the settings [tls] and in `NodeCertificate`."""


class Withdrawn(NamedTuple):
    """Which of the trusted authorities a renewal has removed some of."""

    nodes: bool
    clients: bool


class ReplicationContexts(NamedTuple):
    """The contexts of connections between nodes without gRPC. Both ends are verified."""

    accept: ssl.SSLContext
    dial: ssl.SSLContext


class NodeTls:
    """The certificate of one node, and the credentials made of it."""

    def __init__(self, config: NodeConfig) -> None:
        """Read the files.

        Raises:
            ConfigError: see `read_certificate`.
        """
        self._name, self._cluster_id = config.name, config.cluster_id
        self._files = CertificateFiles(
            ca=config.tls.ca,
            client_ca=config.tls.client_ca,
            certificate=config.tls.certificate,
            key=config.tls.key,
        )
        self._stamp = self._stamps()
        self.certificate = self._read()
        self.access = AccessFile(config.tls.access)
        self.tokens = TokenFile(config.tls.tokens) if config.tls.tokens else None
        """None: no bearer tokens."""
        self.on_renewal: Callable[[], None] = lambda: None
        """Called after a renewal: channels that were made before have the old certificate."""
        self.on_withdrawal: Callable[[Withdrawn], int] = lambda withdrawn: 0
        """Called on a thread after authorities were withdrawn: connections made before trusted
        them. Returns the number of those that it ended."""
        self._withdrawn = Withdrawn(nodes=False, clients=False)
        """Authorities whose connections are open still."""
        self.http = self._http_context()
        """Of the next handshake at the HTTP port. Clients may do without a certificate."""
        self.replication = self._replication_contexts()
        """Of the next handshake over TCP without gRPC, between nodes."""
        self._reload_requested = asyncio.Event()
        self._reread_lock = asyncio.Lock()
        self._complaint = ""
        self._logged: list[str] = []
        """Expired certificates that the log has."""

    def _read(self) -> NodeCertificate:
        return read_certificate(self._files, name=self._name, cluster_id=self._cluster_id)

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that changes when a file of the certificate is replaced."""
        return tuple(_stamp(getattr(self._files, each)) for each in _FILES)

    def complaints(self) -> list[str]:
        """Return why files are not in force as they are on disk, and which certificates in use have
        expired; empty: all is well."""
        tokens = self.tokens.complaint if self.tokens is not None else ""
        kept = filter(None, (self._complaint, self.access.complaint, tokens))
        return [*kept, *self._expired_certificates()]

    def expires_soon(self) -> bool:
        """Return whether the node's certificate has expired, or will within EXPIRY_S.

        Then new connections to the node fail, while those between nodes may stay.
        """
        return self.certificate.not_after_s["certificate"] <= time.time() + EXPIRY_S

    def _expired_certificates(self) -> list[str]:
        """Return the certificates in use that have expired, with file and date."""
        now_s = time.time()
        return [
            f"tls.{each} = {getattr(self._files, each)!r}: "
            f"{'' if each == 'certificate' else 'an authority in it '}expired at {utc_text(end_s)}"
            for each, end_s in self.certificate.not_after_s.items()
            if end_s <= now_s
        ]

    # ---- renewal

    def reload_now(self) -> None:
        """Read the files again at once."""
        self._reload_requested.set()

    async def run(self) -> None:
        """Read the files again and again, and take new ones that fit."""
        while True:
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._reload_requested.wait()
            except TimeoutError:
                pass
            self._reload_requested.clear()
            await self.renew()

    async def renew(self) -> None:
        """Take changed files that fit, and end the connections of withdrawn authorities."""
        await self._reread()
        self._log_expired()
        await self._end_distrusted()

    def _log_expired(self) -> None:
        """Log each certificate in use that has expired, once."""
        before, self._logged = self._logged, self._expired_certificates()
        for each in set(self._logged).difference(before):
            logger.error("%s", each)

    async def reload(self) -> tuple[RereadFile, ...]:
        """Read the files at once; return the result for each.

        Connections of withdrawn authorities end after the answer, which one of them may carry.
        """
        found = await self._reread()
        asyncio.get_running_loop().call_later(ANSWER_S, self.reload_now)
        return found

    async def _reread(self) -> tuple[RereadFile, ...]:
        async with self._reread_lock:
            watched = (self.access, self.tokens) if self.tokens is not None else (self.access,)
            found = [await each.reread() for each in watched]
            return *found, *await self._reread_certificate()

    async def _reread_certificate(self) -> list[RereadFile]:
        """Take changed files if they fit; else warn, once for each reason.

        No content of a file may end a node, so every error keeps the present contents.
        """
        stamp = await asyncio.to_thread(self._stamps)
        if stamp == self._stamp:  # the check takes 50 ms of processor
            self._complaint = ""
            return self._results_after(self.certificate)
        try:
            found = await asyncio.to_thread(self._read)
        except Exception as wrong:  # noqa: BLE001
            complaint = f"the certificate in use stays: {wrong}"
            if complaint != self._complaint:
                logger.warning("%s", complaint)
            self._complaint = complaint
            return await asyncio.to_thread(self._rejections, wrong)  # and again: it may begin later
        self._stamp, self._complaint = stamp, ""
        before, self.certificate = self.certificate, found
        if found == before:
            return self._results_after(before)
        self.http = self._http_context()
        self.replication = self._replication_contexts()
        logger.warning(
            "new certificate in use",
            extra={f"{which}_not_after_s": int(end) for which, end in found.not_after_s.items()},
        )
        self.on_renewal()
        self._withdrawn = Withdrawn(
            nodes=self._withdrawn.nodes or _has_withdrawn(before, found, "ca"),
            clients=self._withdrawn.clients or _has_withdrawn(before, found, "client_ca"),
        )
        return self._results_after(before)

    def _results_after(self, before: NodeCertificate) -> list[RereadFile]:
        """Return the result for each file, after `before` was in use."""
        same, new = RereadResult.UNCHANGED, RereadResult.TAKEN
        return [
            self._result(name, same if getattr(before, name) == now else new)
            for name in _FILES
            for now in [getattr(self.certificate, name)]
        ]

    def _rejections(self, why: Exception) -> list[RereadFile]:
        """Return the results of files that do not fit. A file as in use is kept if `why` names it.

        Files are taken all together, so one that does not fit keeps the other changed ones.
        """
        named = why.key if isinstance(why, ConfigError) else ""
        return [
            self._result(name, RereadResult.UNCHANGED)
            if named != f"tls.{name}" and self._is_in_use(name)
            else self._result(name, RereadResult.KEPT, str(why))
            for name in _FILES
        ]

    def _is_in_use(self, name: str) -> bool:
        try:
            found = read_plain(getattr(self._files, name), FILE_BYTES_MAX)
        except OSError:
            return False
        return bool(found == getattr(self.certificate, name))

    def _result(self, name: str, result: RereadResult, why: str = "") -> RereadFile:
        return RereadFile(f"tls.{name}", getattr(self._files, name), result, why)

    async def _end_distrusted(self) -> None:
        """End the connections of withdrawn authorities; if that fails, at the next look."""
        if any(self._withdrawn):
            try:
                count = await asyncio.to_thread(self.on_withdrawal, self._withdrawn)
            except OSError as error:  # there is no free file
                logger.warning("connections of withdrawn authorities are open: %s", error)
                return
            self._withdrawn = Withdrawn(nodes=False, clients=False)
            logger.warning("authorities were withdrawn: ended %d connections", count)

    # ---- accepting

    def for_nodes(self) -> grpc.ServerCredentials:
        """Return credentials of a server for nodes."""
        return self._server(lambda found: found.ca)

    def for_clients(self) -> grpc.ServerCredentials:
        """Return credentials of a server for clients and administrators."""
        return self._server(lambda found: found.client_ca)

    def for_tokens(self) -> grpc.ServerCredentials:
        """Return credentials of a server for callers without a certificate."""
        return self._server(None)

    def _server(self, trusted: Callable[[NodeCertificate], bytes] | None) -> grpc.ServerCredentials:
        """Return credentials. `trusted`: signs callers; None: they have no certificates."""
        served = self.certificate

        def configuration(found: NodeCertificate) -> grpc.ServerCertificateConfiguration:
            pair = found.key, found.certificate
            authorities = trusted(found) if trusted is not None else None
            return grpc.ssl_server_certificate_configuration([pair], authorities)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            found = self.certificate
            if found is served:
                return None
            served = found
            return configuration(found)

        return grpc.dynamic_ssl_server_credentials(
            configuration(served),
            fetch,  # type: ignore[arg-type]  # the stubs omit None: nothing new
            require_client_authentication=trusted is not None,
        )

    def _http_context(self) -> ssl.SSLContext:
        context, found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.certificate
        context.verify_mode = ssl.CERT_OPTIONAL
        load_pair(context, found.certificate + b"\n" + found.key)
        load_authorities(context, found.client_ca)
        return context

    def _replication_contexts(self) -> ReplicationContexts:
        found = self.certificate
        contexts = ReplicationContexts(
            accept=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            dial=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        for each in contexts:
            each.verify_mode = ssl.CERT_REQUIRED
            load_pair(each, found.certificate + b"\n" + found.key)
            load_authorities(each, found.ca)
        return contexts

    # ---- dialling

    def channel(self, name: str, address: str, options: Any) -> grpc.aio.Channel:
        """Return a new channel to another node, which must have that node's certificate."""
        found = self.certificate
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)
        host = node_host(name, self._cluster_id)
        wanted = (*options, ("grpc.ssl_target_name_override", host))
        return grpc.aio.secure_channel(address, credentials, wanted)


def _has_withdrawn(before: NodeCertificate, found: NodeCertificate, which: str) -> bool:
    """Return whether an authority in the file `which` is gone."""
    return bool(before.authorities[which] - found.authorities[which])


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_mode


def caller_identity(
    context: "grpc.aio.ServicerContext[Any, Any]", cluster_id: str
) -> CallerIdentity:
    """Return the identity in the certificate of an RPC's caller.

    Raises:
        PermissionDeniedError: it has none in this cluster.
    """
    uris = context.auth_context().get("peer_uri", ())
    try:
        return identity_of((str(uri, errors="replace") for uri in uris), cluster_id)
    except UntrustedIdentityError as error:
        raise PermissionDeniedError(str(error)) from None
