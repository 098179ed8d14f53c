"""Channels over TLS. The certificate or the token may be replaced while the client runs."""

import math
import time
from pathlib import Path
from typing import Any, Final

import grpc

from timerclient.values.certificate_dates import utc_text, validities_in
from timerclient.values.client_tls import ClientTls, stamp_of
from timerclient.values.client_token import read_token
from timerclient.values.errors import InvalidRequest

CHECK_INTERVAL_S: Final = 1.0
"""Least seconds between two checks of the files. One comes before a call of a node."""


def with_token(credentials: grpc.ChannelCredentials, token: str) -> grpc.ChannelCredentials:
    """Return credentials that send a bearer token with each call. gRPC sends it over TLS only."""
    sent = grpc.access_token_call_credentials(token)
    return grpc.composite_channel_credentials(credentials, sent)


class SecureDial:
    """Makes channels with the files of `ClientTls`, and with a bearer token."""

    def __init__(self, tls: ClientTls, options: Any, token: str | Path | None) -> None:
        """Read the files. `token`: a path: it is read again when the file changes.

        Raises:
            InvalidRequest: see `ClientTls.read` and `read_token`; or there is neither a certificate
                nor a token.
        """
        if not (tls.certificate or tls.key) and token is None:
            limit = "must be set: the client has no token"
            raise InvalidRequest.of("certificate", "", limit)
        self._tls, self._token = tls, token
        self._stamp = self._file_stamps()
        self._last_contents = self._contents()
        self._checked_s = time.monotonic()
        override = ("grpc.ssl_target_name_override", tls.server_name)
        self._options = (*options, override) if tls.server_name else (*options,)

    def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a new channel to an address (host:port)."""
        (ca, certificate, key), token = self._last_contents
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        if token is not None:
            credentials = with_token(credentials, token)
        return grpc.aio.secure_channel(address, credentials, self._options)

    def date_error(self) -> str:
        """Return why the certificate is not valid by this machine's clock. Empty: it is valid.

        A node that rejects a certificate gives no reason.
        """
        (_, certificate, _), _ = self._last_contents
        now_s = time.time()
        begin_s, end_s = validities_in(certificate)[0] if certificate else (now_s, math.inf)
        if begin_s <= now_s < end_s:
            return ""
        expired, early = (
            f"expired at {utc_text(end_s)}",
            f"is valid only from {utc_text(begin_s)} on",
        )
        what, clock = expired if end_s <= now_s else early, utc_text(now_s)
        return f"; {self._tls.certificate}: {what} (this machine's clock: {clock})"

    def has_new_files(self) -> bool:
        """Read the files again if they changed; return whether earlier channels are outdated.

        Files that do not fit are not used. The next check reads them again.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return False
        self._checked_s = now_s
        stamp = self._file_stamps()
        if stamp == self._stamp:
            return False
        try:
            found = self._contents()
        except InvalidRequest:  # perhaps some are new and some are old
            return False
        self._stamp = stamp
        changed, self._last_contents = found != self._last_contents, found
        return changed

    def _file_stamps(self) -> tuple[tuple[int, int], ...]:
        own = (stamp_of(self._token),) if isinstance(self._token, Path) else ()
        return *self._tls.stamp(), *own

    def _contents(self) -> tuple[tuple[bytes, bytes | None, bytes | None], str | None]:
        return self._tls.read(), None if self._token is None else read_token(self._token)
