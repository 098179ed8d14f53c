"""The identity in a certificate: one URI among its alternative names.

    timer://CLUSTER/node/n1           may act as the node n1
    timer://CLUSTER/client/billing    an application
    timer://CLUSTER/admin/alice       an operator

A bearer token (cluster/security/token_hashes.py) has an identity too, token/NAME. No certificate
gives it.

Only this URI counts. The common name and all other names are ignored. A certificate with no such
URI, with several URIs, or with the URI of another cluster has no identity here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cluster.settings.names import NAME

SCHEME: Final = "timer"


class IdentityKind(StrEnum):
    """The kind of an identity."""

    NODE = "node"
    CLIENT = "client"
    ADMIN = "admin"
    TOKEN = "token"  # noqa: S105 - a name
    """A caller with a bearer token."""


CERTIFIED: Final = frozenset({IdentityKind.NODE, IdentityKind.CLIENT, IdentityKind.ADMIN})
"""The kinds of a certificate."""


class UntrustedIdentityError(Exception):
    """A certificate has no identity in this cluster; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """The identity of a node, client or administrator in one cluster."""

    kind: IdentityKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def uri(self, cluster_id: str) -> str:
        """Return the URI for certificates."""
        return f"{SCHEME}://{cluster_id}/{self}"


def identity_of(
    uris: Iterable[str], cluster_id: str, kinds: Collection[IdentityKind] = CERTIFIED
) -> CallerIdentity:
    """Return the identity in the URIs of a certificate, of one of the `kinds`.

    Raises:
        UntrustedIdentityError: there is not exactly one URI, or it is not of this cluster.
    """
    found = list(uris)
    if not found:
        raise UntrustedIdentityError("no certificate with an identity of the cluster")
    if len(found) != 1:
        raise UntrustedIdentityError(f"{len(found)} URIs in the certificate: must be 1")
    prefix = f"{SCHEME}://{cluster_id}/"
    if not found[0].startswith(prefix):
        raise UntrustedIdentityError(f"{found[0]!r:.200}: must begin with {prefix}")
    kind, _, name = found[0].removeprefix(prefix).partition("/")
    if kind not in kinds or not NAME.fullmatch(name):
        limit = f"must be {prefix} and node/NAME, client/NAME or admin/NAME"
        raise UntrustedIdentityError(f"{found[0]!r:.200}: {limit}")
    return CallerIdentity(IdentityKind(kind), name)


def claimed_identity(uris: Iterable[str], cluster_id: str) -> str:
    """Return the identity in the URIs of a denied caller's certificate, for records.

    Without an identity of this cluster: the URIs. Empty: there is none.
    """
    found = list(uris)
    try:
        return str(identity_of(found, cluster_id))
    except UntrustedIdentityError:
        return ", ".join(found)


def node_host(name: str, cluster_id: str) -> str:
    """Return the DNS name in a node's certificate. Other nodes require it; it is in no DNS."""
    return f"{name}.{nodes_host(cluster_id)}"


def nodes_host(cluster_id: str) -> str:
    """Return the DNS name in the certificates of all nodes of a cluster."""
    return f"nodes.{cluster_id}.timer"
