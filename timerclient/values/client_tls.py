"""TLS of a client: the files of its certificate, which may be replaced while the client runs."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from timerclient.values.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Paths of PEM files, as `timerctl certs` makes them.

    A client reads the files again when they change, and connects again with them.
    """

    ca: str | Path
    """The authorities that sign the certificates of nodes."""
    certificate: str | Path = ""
    """The client's certificate. Empty, as `key`: the client has a bearer token in its place."""
    key: str | Path = ""
    """The client's private key."""
    server_name: str = ""
    """A DNS name that the certificates of all nodes have, such as nodes.CLUSTER.timer. Empty: each
    certificate must have the host of the node's address."""

    def read(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Return the contents of `ca`, `certificate` and `key`; None: there is no certificate.

        Raises:
            InvalidRequest: A file cannot be read, or certificate and key do not fit.
        """
        if not (self.certificate or self.key):
            return self._read("ca"), None, None
        ca, certificate, key = (self._read(each) for each in ("ca", "certificate", "key"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            limit = f"must be a certificate and its key {self.key}: {error}"
            raise InvalidRequest.of("certificate", str(self.certificate), limit) from None
        return ca, certificate, key

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Return a value that changes when a file is replaced; of a missing file (0, 0)."""
        return tuple(stamp_of(Path(each)) for each in (self.ca, self.certificate, self.key))

    def _read(self, name: str) -> bytes:
        path = Path(getattr(self, name))
        try:
            return path.read_bytes()
        except OSError as error:
            why = f"must be a readable file: {error.strerror}"
            raise InvalidRequest.of(name, str(path), why) from None


def stamp_of(path: Path) -> tuple[int, int]:
    """Return a value that changes when a file is replaced; of a missing file (0, 0)."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
