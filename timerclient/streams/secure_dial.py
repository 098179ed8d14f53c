"""Channels over TLS. The certificate may be replaced while the client runs."""

import time
from typing import Any, Final

import grpc

from timerclient.values.client_tls import ClientTls
from timerclient.values.errors import InvalidRequest

LOOK_S: Final = 1.0
"""Least seconds between two looks at the files. A look comes before a call of a node."""


class SecureDial:
    """Makes channels with the files of `ClientTls`."""

    def __init__(self, tls: ClientTls, options: Any) -> None:
        """Read the files.

        Raises:
            InvalidRequest: see `ClientTls.read`.
        """
        self._tls = tls
        self._stamp = tls.stamp()
        self._read = tls.read()
        self._looked_s = time.monotonic()
        override = ("grpc.ssl_target_name_override", tls.server_name)
        self._options = (*options, override) if tls.server_name else (*options,)

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a new channel to an address (host:port)."""
        ca, certificate, key = self._read
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return grpc.aio.secure_channel(address, credentials, self._options)

    def renewed(self) -> bool:
        """Read the files again if they changed; return whether earlier channels are outdated.

        Files that do not fit are not used. The next look reads them again.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        stamp = self._tls.stamp()
        if stamp == self._stamp:
            return False
        try:
            found = self._tls.read()
        except InvalidRequest:  # perhaps some are new and some are old
            return False
        self._stamp = stamp
        changed, self._read = found != self._read, found
        return changed
