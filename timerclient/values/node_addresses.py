"""Addresses of nodes, as a caller gives them."""

from collections.abc import Iterable, Sequence
from typing import Any

from timerclient.values.errors import InvalidRequest


def parse_addresses(cluster: str | Sequence[str]) -> list[str]:
    """Return the addresses of "host:port,host:port" or of a sequence of them.

    Raises:
        InvalidRequest: There is none, or one is not host:port; the limit has the correct form.
    """
    given: Any = cluster.split(",") if isinstance(cluster, str) else cluster
    if not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
        raise InvalidRequest.of("cluster", cluster, "must be str, or a sequence of str")
    addresses = [address.strip() for address in given if address.strip()]
    if not addresses:
        raise InvalidRequest.of("cluster", cluster, "must name at least one host:port")
    for address in addresses:
        _check_address(address)
    return addresses


def _check_address(address: str) -> None:
    scheme, slashes, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    bare = "" if ":" in host and not host.startswith("[") else host  # an IPv6 address
    right = f"{bare or rest.strip('[]')}:{port if bare and port.isdecimal() else 7401}"
    if slashes:
        limit = f"must be host:port, without {scheme}://, such as {right}"
    elif "/" in address:
        limit = "must be host:port, without a path"
    elif not host or not port.isdecimal():
        limit = "must be host:port; the default gRPC port is 7401"
    elif not bare:
        limit = "must be host:port, with an IPv6 address in brackets, such as [::1]:7401"
    elif not 0 < int(port) < 1 << 16:
        limit = "must be host:port, with a port of 1 to 65535"
    else:
        return
    raise InvalidRequest.of("cluster", address, limit)
