"""The address of a cluster as one URL, for applications that read it from their environment.

    timers://10.0.0.1:7401,10.0.0.2:7401
    timers+tls://timers.example:7401?ca=/etc/timers/ca.pem&cert=…&key=…&server_name=…&token_file=…

`timers+tls` takes each file that the URL does not name from the environment: TIMERS_TLS_CA,
TIMERS_TLS_CERT, TIMERS_TLS_KEY, TIMERS_TLS_SERVER_NAME and TIMERS_TOKEN_FILE. TIMERS_TOKEN has a
bearer token itself. No URL has one, because URLs are logged.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

from timerclient.values.client_tls import ClientTls
from timerclient.values.errors import InvalidRequest

VARIABLE: Final = "TIMERS_URL"
PLAIN: Final = "timers://"
SECURE: Final = "timers+tls://"
VARIABLE_OF: Final = {
    "ca": "TIMERS_TLS_CA",
    "cert": "TIMERS_TLS_CERT",
    "key": "TIMERS_TLS_KEY",
    "server_name": "TIMERS_TLS_SERVER_NAME",
    "token_file": "TIMERS_TOKEN_FILE",
}
"""Parameter of a URL -> the variable that replaces an absent one."""
TOKEN: Final = "TIMERS_TOKEN"  # noqa: S105 -- a name


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """A URL, read."""

    addresses: str
    """host:port, separated by commas."""
    tls: ClientTls | None = None
    token: str | Path | None = None

    @classmethod
    def read(cls, url: str, environ: Mapping[str, str] = os.environ) -> "ClusterUrl":
        """Read a URL.

        Raises:
            InvalidRequest: It has another form, or TLS lacks the file of the authorities.
        """
        scheme = next((each for each in (PLAIN, SECURE) if url.startswith(each)), None)
        if scheme is None:
            limit = f"must begin with {PLAIN} or {SECURE}, such as {PLAIN}10.0.0.1:7401"
            raise InvalidRequest.of("url", url, limit)
        addresses, _, query = url.removeprefix(scheme).partition("?")
        if "@" in addresses:
            limit = f"has no user and no token: set {TOKEN}, or name a token_file"
            raise InvalidRequest.of("url", "(not shown)", limit)
        addresses = addresses.rstrip("/")
        given = dict(parse_qsl(query, keep_blank_values=True))
        known = VARIABLE_OF if scheme == SECURE else {}
        for name in given:
            if name not in known:
                limit = f"the parameters of {SECURE} are {', '.join(VARIABLE_OF)}"
                raise InvalidRequest.of("url", f"…?{name}=", limit)
        if scheme == PLAIN:
            return cls(addresses)
        found = {name: given.get(name) or environ.get(of, "") for name, of in known.items()}
        if not found["ca"]:
            limit = f"TLS needs the nodes' authorities: ?ca=FILE, or {VARIABLE_OF['ca']}"
            raise InvalidRequest.of("url", f"{SECURE}{addresses}", limit)
        tls = ClientTls(
            ca=found["ca"],
            certificate=found["cert"],
            key=found["key"],
            server_name=found["server_name"],
        )
        return cls(addresses, tls, _token(given, environ, found["token_file"]))


def _token(given: Mapping[str, str], environ: Mapping[str, str], file: str) -> str | Path | None:
    if "token_file" not in given and environ.get(TOKEN):
        return environ[TOKEN]
    return Path(file) if file else None


def default_cluster() -> str:
    """Return the cluster of clients that name none: $TIMERS_URL.

    Raises:
        InvalidRequest: The variable is not set, or empty.
    """
    if url := os.environ.get(VARIABLE):
        return url
    limit = f"set the variable {VARIABLE} to {PLAIN}HOST:PORT,…, or give addresses or a URL"
    raise InvalidRequest.of("cluster", None, limit)


def is_url(cluster: object) -> bool:
    """Return whether a client's argument `cluster` is a URL."""
    return isinstance(cluster, str) and cluster.startswith((PLAIN, SECURE))
