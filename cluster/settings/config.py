"""Settings of a node: one frozen dataclass per part, each field with unit, reason and range.

    defaults  <  TOML file  <  environment           <  flags
                 [limits]      TIMERD_LIMITS__         --set limits.key_bytes_max=512
                 key_bytes_max KEY_BYTES_MAX=512

A setting's *key* is its path, such as `limits.key_bytes_max`. All sources become one flat mapping
of keys to values, in which a later source overrides an earlier one, and then a `NodeConfig`. Text
from the environment and from flags is parsed as the setting's type; `peers` and `links` as
`name=host:port,...`. Unknown keys are refused. All values of a `NodeConfig` are in range and
consistent with each other.
"""

import argparse
import difflib
import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from cluster.settings.names import NAME, NAME_RULE
from replication.core.replication_config import ReplicationConfig
from timer.entries.entry_frame import HEADER_SIZE, PAYLOAD_SIZE_MAX
from timer.model.columns import ROW
from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN
from timer.model.timer_errors import HIDDEN, ConfigError
from timer.model.units import DUE_MS_MAX

KIB: Final = 1 << 10
MIB: Final = 1 << 20
ENV_PREFIX: Final = "TIMERD_"
ENV_FILE: Final = "TIMERD_CONFIG"
"""The variable with the path of the TOML file; not a setting itself."""
PEERS_MAX: Final = 7
TEST_CLUSTER: Final = "test-"
"""Prefix of the ids of test clusters. Only their clocks can be moved."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")

_HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]", re.ASCII)
_NO_HOST: Final = re.compile(r"[\s/@\[\],]|^\.|\.\.|[^.:]{64}")
"""In no host name. A label of DNS has 1 to 63 bytes."""
_DIALLED: Final = "must be an address that others connect to; to bind all, set grpc or link"
_LOOPBACK: Final = "must be a loopback address; others need TLS: set [tls], or insecure = true"
_TABLES: Final = ("peers", "links")
_IN_TABLE: Final = tuple(f"{each}." for each in _TABLES)
# Kubernetes sets such variables for each service; for one called `timerd`, TIMERD_PORT=tcp://…
_SERVICE_LINK: Final = re.compile(r"TIMERD_(SERVICE|PORT)(_[A-Z0-9_]+)?")
_FLAGS: Final = ("name", "data", "grpc", "http")


def _int(default: int, low: int, high: int, *, own: bool = False) -> int:
    """Declare a whole number with its default and its range, both ends inclusive.

    `own`: each node may have another value, as for the memory and the pace of its machine.
    """
    declared: Any = field(default=default, metadata={"range": (low, high), "own": own})
    return declared  # type: ignore[no-any-return]  # dataclass takes it apart


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Base of the parts; checks types and ranges."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is int and not (isinstance(value, int) and not isinstance(value, bool)):
                raise ConfigError(self.key_of(each.name), value, "must be a whole number")
            if "range" in each.metadata:
                low, high = each.metadata["range"]
                if not low <= value <= high:
                    raise ConfigError(self.key_of(each.name), value, f"must be {low} to {high}")

    def key_of(self, name: str) -> str:
        """Return the key of the field `name`."""
        return f"{self.section}.{name}" if self.section else name

    def refuse(self, name: str, limit: str) -> ConfigError:
        """Return an error for the field `name`; `limit`: the rule for its value."""
        return ConfigError(self.key_of(name), getattr(self, name), limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig(_Part):
    """Intervals and limits of time, in milliseconds."""

    section: ClassVar[str] = "timing"

    tick_ms: int = _int(1, 1, 1_000)
    """Step to which due times are rounded up. Larger: timers of a step fire together."""
    fold_interval_ms: int = _int(50, 10, 5_000, own=True)
    """Interval in which a follower applies committed entries; a promotion applies the rest."""
    checkpoint_interval_ms: int = _int(3_000, 100, 60_000)
    """Interval in which replicas compare digests and the shared checkpoint moves."""
    drain_timeout_ms: int = _int(10_000, 0, 600_000, own=True)
    """A stopping node waits this long for a successor and for its requests under way."""

    def __post_init__(self) -> None:
        # super() without arguments fails in dataclasses with slots.
        _Part.__post_init__(self)
        if self.fold_interval_ms > self.checkpoint_interval_ms:
            limit = f"must be at most timing.checkpoint_interval_ms ({self.checkpoint_interval_ms})"
            raise self.refuse("fold_interval_ms", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipConfig(_Part):
    """Detection of a lost leader; CLOCK_BOOTTIME milliseconds. The same on all nodes."""

    section: ClassVar[str] = "leadership"

    lease_ms: int = _int(500, 50, 60_000)
    """A leader may act alone for this long after it sent a message that a majority answered. No
    unplanned failover is faster, and no shorter pause causes one."""
    heartbeat_ms: int = _int(100, 5, 10_000)
    """Interval of an idle leader's messages: five per lease."""

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        if self.heartbeat_ms * 2 >= self.lease_ms:
            limit = f"must be below half of leadership.lease_ms ({self.lease_ms})"
            raise self.refuse("heartbeat_ms", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(_Part):
    """Limits of requests, and of waiting data. Text is counted in bytes of UTF-8."""

    section: ClassVar[str] = "limits"

    payload_bytes_max: int = _int(4 * MIB, 1, 16 * MIB)
    """Payload of one timer."""
    key_bytes_max: int = _int(1024, 0, 64 * KIB)
    """Key of one timer."""
    headers_bytes_max: int = _int(32 * KIB, 0, MIB)
    """Headers of one timer: names, values and their sizes."""
    topic_name_bytes_max: int = _int(255, 1, 255)
    """Topic's name; the shared checkpoint has topic names in pages below 4 KB."""
    group_name_bytes_max: int = _int(255, 1, 255)
    """Group's name."""
    delay_ms_max: int = _int(DUE_MS_MAX, 1, DUE_MS_MAX)
    """How far ahead a timer may be scheduled; by default as far as its id can encode."""
    request_rows_max: int = _int(65_536, 1, 65_536)
    """Timers in one request."""
    request_bytes_max: int = _int(16 * MIB, 1 * KIB, PAYLOAD_SIZE_MAX)
    """Payloads, keys and headers of one request. With its rows it must fit into one log entry."""
    request_window_ms: int = _int(300_000, 60_000, 86_400_000)
    """How long the answer to a request with a request_id is stored. At most 524,288 are stored, or
    1,747 per second over the default; further requests get RESOURCE_EXHAUSTED."""
    producer_idle_ms: int = _int(7 * 86_400_000, 1_000, 366 * 86_400_000)
    """A producer idle for this time is forgotten at the next checkpoint; its client registers again
    by itself."""
    topics_max: int = _int(100_000, 1, 1_000_000)
    """Topics, at most. Every replica has each in memory, about 2 KB, and in every manifest."""
    namespace_topics_max: int = _int(10_000, 1, 1_000_000)
    """Topics of a namespace, at most, so that one application cannot use up topics_max."""
    groups_max: int = _int(100_000, 1, 1_000_000)
    """Groups of all topics together, at most."""
    topic_groups_max: int = _int(1_000, 1, 100_000)
    """Groups of a topic, at most; each of its messages is checked for every group."""
    group_consumers_max: int = _int(5_000, 1, 20_000)
    """Consumers of a group, at most; a look for the next one may pass all of them."""
    group_leases_max: int = _int(8_192, 1, 16_384)
    """Leases of a group, at most, each with one or more messages; at the limit its deliveries
    pause until one ends. Some steps take one or two microseconds for each lease."""
    producers_max: int = _int(100_000, 1, 1_000_000)
    """Producers, at most. If a tenth or less is free, those idle for an hour are forgotten."""
    series_max: int = _int(200_000, 0, 1_000_000)
    """Series of recurring timers, at most. Every replica has each in memory, about 500 bytes and
    its payload."""
    connections_max: int = _int(8_192, 16, 1_000_000, own=True)
    """Connections of clients and peers to the gRPC port; fewer if the open-file limit is low."""
    http_connections_max: int = _int(256, 16, 65_536, own=True)
    """Connections to the HTTP port. With one more the one without a request for longest is closed.
    One in 16 takes no request except a probe."""
    streams_max: int = _int(1_024, 8, 1_000_000, own=True)
    """RPCs at a time on one connection; further ones wait in the client."""
    memory_bytes_max: int = _int(0, 0, 1 << 50, own=True)
    """Above this resident memory new work is refused, and the heaviest connections are ended. 0:
    three quarters of the memory of the machine or of the process's cgroup."""
    outbox_bytes_max: int = _int(256 * MIB, 16 * MIB, 1 << 40, own=True)
    """Deliveries that consumers have not read, of all consumers together; of each at most 8 MiB.
    At most a quarter of the memory limit."""
    metric_topics_max: int = _int(100, 0, 10_000)
    """Topics with figures of their own in the metrics: this many of the busiest, and as many that
    hold timers. 0: none."""
    inflight_bytes_max: int = _int(64 * MIB, 1 * MIB, 4096 * MIB, own=True)
    """Bytes at the leader that are not on a majority yet, queued or sent; further requests get
    RESOURCE_EXHAUSTED."""

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        one = self.payload_bytes_max + self.key_bytes_max + self.headers_bytes_max
        if self.request_bytes_max < one:
            limit = f"must be at least one timer with key and headers ({one})"
            raise self.refuse("request_bytes_max", limit)
        room = PAYLOAD_SIZE_MAX - self.request_rows_max * ROW.itemsize
        if self.request_bytes_max > room:
            limit = (
                f"must be at most {room}: an entry holds {PAYLOAD_SIZE_MAX} bytes, rows included"
            )
            raise self.refuse("request_bytes_max", limit)
        if self.inflight_bytes_max < HEADER_SIZE + PAYLOAD_SIZE_MAX:
            limit = f"must be at least one entry ({HEADER_SIZE + PAYLOAD_SIZE_MAX})"
            raise self.refuse("inflight_bytes_max", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsConfig(_Part):
    """Defaults and limits of consumer groups; milliseconds."""

    section: ClassVar[str] = "groups"

    visibility_timeout_ms: int = _int(30_000, 1, 43_200_000)
    """A delivered message that is not acknowledged by then is delivered again. (The leader's own
    lease is leadership.lease_ms.)"""
    visibility_timeout_ms_min: int = _int(100, 1, 43_200_000)
    """The shortest timeout of a consumer; a shorter one would only cause redeliveries."""
    visibility_timeout_ms_max: int = _int(43_200_000, 1, 43_200_000)
    """The longest timeout (12 hours). A hung consumer with an open connection can use all of it."""

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        low, high = self.visibility_timeout_ms_min, self.visibility_timeout_ms_max
        if low > high:
            limit = f"must be at most groups.visibility_timeout_ms_max ({high})"
            raise self.refuse("visibility_timeout_ms_min", limit)
        if not low <= self.visibility_timeout_ms <= high:
            raise self.refuse("visibility_timeout_ms", f"must be {low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig(_Part):
    """Limits of files: when the memtable is flushed to a run (by whichever of the first four
    settings is first), how much log is kept, and how nodes without it get a snapshot."""

    section: ClassVar[str] = "storage"

    memtable_bytes_flush: int = _int(64 * MIB, 1 * MIB, 4096 * MIB)
    """Bounds memory."""
    log_bytes_flush: int = _int(256 * MIB, 1 * MIB, 65_536 * MIB)
    """Bounds the replay of a restart, and the log's disk space."""
    log_entries_flush: int = _int(8_192, 64, 1_048_576)
    """Bounds the replay of a restart, too: each entry takes 0.1 to 0.2 ms, however small."""
    flush_interval_ms: int = _int(600_000, 1_000, 86_400_000)
    """Bounds the age of a manifest on a quiet node."""
    log_kept_bytes_max: int = _int(1024 * MIB, 0, 1_048_576 * MIB)
    """Log below the manifest that is kept for nodes behind, at most. A node that is further behind
    gets a snapshot."""
    reserve_bytes: int = _int(1024 * MIB, 0, 1 << 50)
    """Free space for necessary work; below it new timers are rejected
    (timer/files/disk_reserve.py). It must hold a flush, the entries in flight, and messages
    that fire while no consumer reads them. 0: no reserve."""
    scrub_bytes_per_s: int = _int(4 * MIB, 0, 65_536 * MIB)
    """Rate at which the scrub reads all files to find damage. 0: only if an operator asks."""
    scrub_interval_ms: int = _int(3_600_000, 100, 2_592_000_000)
    """Time from the start of one pass to the next; longer if the pass takes longer."""
    snapshot_bytes_per_s: int = _int(64 * MIB, 64 * KIB, 65_536 * MIB)
    """Rate at which a leader sends snapshots, all together. A node sends the files of backups at
    the same rate."""
    refetch_timeout_ms: int = _int(300_000, 1_000, 86_400_000)
    """Longest wait of a node with damaged files for a leader that offers a snapshot, and for each
    part of it. Then it ends and reports the damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig(_Part):
    """Paths of PEM files (cluster/security/certificates.py), of the rules and of the tokens. All
    are set, except perhaps `tokens`, or none: no TLS."""

    section: ClassVar[str] = "tls"

    ca: str = ""
    """Authorities that sign the certificates of nodes."""
    client_ca: str = ""
    """Authorities that sign the certificates of clients and administrators."""
    certificate: str = ""
    """This node's certificate, with the authorities between it and one of `ca`."""
    key: str = ""
    """This node's private key; no other user may read it."""
    access: str = ""
    """The rules of access, in TOML (cluster/security/access_rules.py)."""
    tokens: str = ""
    """Hashes of bearer tokens, in TOML (cluster/security/token_hashes.py). Empty: no tokens."""

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        needed = [each.name for each in fields(self) if each.name != "tokens"]
        missing = [name for name in needed if not getattr(self, name)]
        if missing and (self.tokens or len(missing) < len(needed)):
            limit = "must be set, too: TLS needs all settings of [tls] except tls.tokens"
            raise self.refuse(missing[0], limit)

    @property
    def on(self) -> bool:
        """Whether all ports use TLS."""
        return bool(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(_Part):
    """All settings of a node."""

    name: str
    """Name of this node, one of `peers`. A replaced node keeps its name."""
    cluster_id: str
    """The same on all nodes; a data directory of another cluster is refused."""
    data: Path
    """Directory of this node alone; created by `timerd init`."""
    peers: Mapping[str, str]
    """Name -> host:port of the gRPC port for other nodes and clients; all 1 to 7 nodes, this one
    included."""
    grpc: str = ""
    """host:port to bind for clients; empty: this node's address in `peers`."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Name -> host:port of each node's port for the other nodes only. Empty: they use the gRPC
    port. TLS needs such a port."""
    link: str = ""
    """host:port to bind for the other nodes; empty: this node's address in `links`."""
    replication: str = ""
    """host:port to bind for messages of the other nodes about log and leadership, over TCP: gRPC
    takes more time. They connect to the host in `links` or `peers` and to this port; port 0: any
    free one. Empty: these messages go over gRPC."""
    tokens: str = ""
    """host:port to bind for callers with a bearer token, over TLS without certificates of theirs;
    empty: no such port."""
    http: str = "127.0.0.1:8080"
    """host:port to bind for metrics, health and status; port 0: any free one."""
    http_names: str = ""
    """Names of the HTTP port, separated by commas, such as that of a load balancer: without TLS,
    changes over HTTP may address it by these, by those in `peers`, and by addresses."""
    insecure: bool = False
    """Bind and dial beyond loopback, without TLS: any host that reaches the ports can read and
    write."""
    auto_create_topics: bool = True
    """A schedule or a consumer creates a topic that does not exist."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text: key=value. json: one object a line."""
    feature_level_max: int = _int(LEVEL_MAX, LEVEL_MIN, LEVEL_MAX)
    """The cluster's feature level does not rise above this. Set it to the present level to be able
    to go back to the previous release (docs/upgrade.md)."""
    audit_log: str = ""
    """Path of the file for the audit log; empty: its lines go to the node's log."""
    test_clock: str = ""
    """Path of a file that moves this node's wall clock (cluster/settings/wall_clock.py). Allowed
    only if `cluster_id` begins with `test-`, so never in a cluster with real data."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    leadership: LeadershipConfig = field(default_factory=LeadershipConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        _Part.__post_init__(self)
        for each in ("name", "cluster_id"):
            if not NAME.fullmatch(getattr(self, each)):
                raise self.refuse(each, f"must be {NAME_RULE}")
        self._check_peers()
        self._check_links()
        for table, bound in (("peers", "grpc"), ("links", "link")):
            addresses = MappingProxyType(dict(getattr(self, table)))
            object.__setattr__(self, table, addresses)
            if addresses and not getattr(self, bound):
                object.__setattr__(self, bound, addresses[self.name])
        self._check_ports()
        self._check_data()
        if self.test_clock and not self.cluster_id.startswith(TEST_CLUSTER):
            raise self.refuse(
                "test_clock", f"must be empty, or cluster_id must begin with {TEST_CLUSTER}"
            )
        if self.log_level not in LOG_LEVELS:
            raise self.refuse("log_level", f"must be one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise self.refuse("log_format", f"must be one of {', '.join(LOG_FORMATS)}")
        if self.storage.memtable_bytes_flush < self.limits.request_bytes_max:
            limit = f"must be at least limits.request_bytes_max ({self.limits.request_bytes_max})"
            raise self.storage.refuse("memtable_bytes_flush", limit)
        needed = self.storage.memtable_bytes_flush + self.limits.inflight_bytes_max
        if 0 < self.storage.reserve_bytes < needed:
            sum_ = "storage.memtable_bytes_flush + limits.inflight_bytes_max"
            raise self.storage.refuse("reserve_bytes", f"must be 0, or at least {sum_} ({needed})")

    def _check_peers(self) -> None:
        if not 1 <= len(self.peers) <= PEERS_MAX:
            raise ConfigError("peers", sorted(self.peers), f"must be 1 to {PEERS_MAX} nodes")
        _check_table("peers", self.peers)
        if self.name not in self.peers:
            raise self.refuse("name", f"must be one of peers: {', '.join(sorted(self.peers))}")

    def _check_links(self) -> None:
        _check_table("links", self.links)
        if self.links and self.links.keys() != self.peers.keys():
            raise self.refuse(
                "links", f"must be the nodes of peers: {', '.join(sorted(self.peers))}"
            )
        if self.tls.on and not self.links:
            raise self.refuse("links", "must be set with TLS: a port of each node for other nodes")
        if self.link and not self.links:
            raise self.refuse("link", "must be empty without links")

    def _check_ports(self) -> None:
        if self.insecure and self.tls.on:
            raise self.refuse("insecure", "must be false with TLS: [tls] is set")
        self._check_bound("grpc", port_min=1)
        for name in self.http_names.split(","):
            if not _HOST_NAME.fullmatch(name.strip()):
                raise self.refuse("http_names", "must be hosts without ports, separated by commas")
        self._check_bound("http", port_min=0)
        if self.links:
            self._check_bound("link", port_min=1)
        if self.tokens:
            self._check_bound("tokens", port_min=1)
            if not self.tls.tokens:
                raise self.refuse("tokens", "must be empty without tls.tokens")
        self._check_dialled()
        if self.grpc == self.http:
            raise self.refuse("http", "must differ from grpc")
        if self.link and self.link in (self.grpc, self.http):
            raise self.refuse("link", "must differ from grpc and http")
        if self.tokens and self.tokens in (self.grpc, self.http, self.link):
            raise self.refuse("tokens", "must differ from grpc, http and link")
        if self.replication:
            self._check_bound("replication", port_min=0)
            known = self.replication in (self.grpc, self.http, self.link, self.tokens)
            if known and not self.replication.endswith(":0"):
                raise self.refuse("replication", "must differ from grpc, http, link and tokens")

    def _check_bound(self, name: str, *, port_min: int) -> None:
        address = parse_address(name, getattr(self, name), port_min=port_min)
        if not (self.insecure or self.tls.on or address.is_loopback):
            raise self.refuse(name, _LOOPBACK)

    def _check_dialled(self) -> None:
        """Check the addresses of the other nodes that this node connects to."""
        if self.insecure or self.tls.on:
            return
        key = "links" if self.links else "peers"
        for name, text in getattr(self, key).items():
            address = parse_address(f"{key}.{name}", text)
            if name != self.name and not address.is_loopback:
                raise ConfigError(f"{key}.{name}", text, _LOOPBACK)

    def _check_data(self) -> None:
        try:
            str(self.data).encode()
        except UnicodeEncodeError:
            raise self.refuse("data", "must be a path in UTF-8") from None
        if str(self.data) in ("", "."):
            raise self.refuse("data", "must be a directory other than the current one")
        check_directory("data", self.data)

    def source_of(self, bound: str) -> str:
        """Return the key of the setting that an address to bind comes from, such as `peers.n1`."""
        table = {"grpc": "peers", "link": "links"}.get(bound, "")
        own = getattr(self, table).get(self.name) if table else None
        return f"{table}.{self.name}" if own == getattr(self, bound) else bound

    def replication_config(self) -> ReplicationConfig:
        """Return the settings of the replication; further ones have their defaults."""
        return ReplicationConfig(
            lease_ms=self.leadership.lease_ms,
            heartbeat_ms=self.leadership.heartbeat_ms,
            uncommitted_bytes=self.limits.inflight_bytes_max,
            log_kept_bytes=self.storage.log_kept_bytes_max,
        )


_P = TypeVar("_P", bound=_Part)


def _check_table(key: str, addresses: Mapping[str, str]) -> None:
    """Check the names and addresses of `peers` or `links`."""
    for name, address in addresses.items():
        if not NAME.fullmatch(name):
            raise ConfigError(key, name, f"must be {NAME_RULE}")
        if parse_address(f"{key}.{name}", address).is_wildcard:
            raise ConfigError(f"{key}.{name}", address, _DIALLED)
    if len(set(addresses.values())) < len(addresses):
        raise ConfigError(key, dict(addresses), "must not have two nodes with the same address")


def check_directory(key: str, path: Path) -> None:
    """Check that a path is no file.

    Raises:
        ConfigError: it is one; the error names `key`.
    """
    with suppress(OSError):  # the start reports it
        if path.is_file():
            raise ConfigError(key, str(path), "must be a directory, not a file")


# ---- addresses


class Address(NamedTuple):
    """An address to listen on or to connect to."""

    host: str
    """Without brackets."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; False for names other than localhost."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of a machine: none can be connected to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(key: str, text: str, *, port_min: int = 1) -> Address:
    """Return the parts of host:port; an IPv6 address is in brackets.

    Raises:
        ConfigError: the text is malformed; the error names `key`.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    whole = plain and bracketed == (":" in plain) and re.fullmatch(r"[0-9]{1,5}", port, re.ASCII)
    if not whole or _NO_HOST.search(plain):
        raise ConfigError(key, text, "must be host:port, or [IPv6]:port")
    if not port_min <= int(port) <= 65_535:
        raise ConfigError(key, text, f"must have a port of {port_min} to 65535")
    return Address(plain, int(port))


# ---- keys


def _types_of(part: type[_Part]) -> Iterator[tuple[str, type]]:
    """Yield key and type of every setting, in the order of the fields."""
    prefix = f"{part.section}." if part.section else ""
    for each in fields(part):
        kind = each.type
        if isinstance(kind, type) and issubclass(kind, _Part):
            yield from _types_of(kind)
        else:
            yield f"{prefix}{each.name}", kind if isinstance(kind, type) else dict


TYPES: Final[Mapping[str, type]] = MappingProxyType(dict(_types_of(NodeConfig)))
"""Key -> int, str, bool, Path, or dict (`peers`, `links`)."""


def _check_key(key: str, value: object, written: Callable[[str], str] = str) -> None:
    """Refuse an unknown key, and suggest a similar one, or those of its table.

    `written`: a key as its source has it.
    """
    if key in TYPES or key.startswith(_IN_TABLE):
        return
    if any(each.startswith(f"{key}.") for each in TYPES):
        limit = f"must be a table: [{key}], with one setting per line below"
        raise ConfigError(written(key), value, limit)
    by_leaf = {each.rpartition(".")[2]: each for each in TYPES}
    leaf = key.rpartition(".")[2].lower()
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {written(by_leaf[near[0]])}?"
    else:
        table = key.rpartition(".")[0]
        beside = [each for each in TYPES if each.rpartition(".")[0] == table and table]
        known = beside or dict.fromkeys(each.partition(".")[0] for each in TYPES)
        hint = f"known: {', '.join(map(written, known))}"
    raise ConfigError(written(key), value, f"unknown; {hint}")


def _read_as(key: str, value: object) -> object:
    """Return a value of its setting's type: text is parsed, other values must have the type."""
    kind = str if key.startswith(_IN_TABLE) else TYPES[key]
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is bool and isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ConfigError(key, value, "must be true or false")
        return value.lower() == "true"
    if kind is int and isinstance(value, str):
        if not re.fullmatch(r"-?[0-9]+(_[0-9]+)*", value.strip(), re.ASCII):
            raise ConfigError(key, value, "must be a whole number")
        return _whole_number(key, value.strip())
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "a whole number", bool: "true or false", dict: "a table of name = host:port"}
        raise ConfigError(key, value, f"must be {names.get(kind, 'a string')}")
    return value


def _whole_number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:  # too many digits
        raise ConfigError(key, f"{text[:20]}…", "must be a whole number") from None


def _addresses(key: str, text: object) -> dict[str, object]:
    """Return the table of `name=host:port,name=host:port`."""
    if not isinstance(text, str):
        raise ConfigError(key, text, "must be a table of name = host:port")
    table: dict[str, object] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, equals, address = each.partition("=")
        if not equals or name.strip() in table:
            raise ConfigError(key, text, "must be name=host:port,name=host:port, each name once")
        table[name.strip()] = address.strip()
    return table


# ---- sources


def flatten(tables: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a parsed TOML file by key; a table in place of a value stays one."""
    flat: dict[str, object] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping) and TYPES.get(name, dict) is dict:
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            flat[name] = value
    return flat


def from_env(env: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of the environment by key: TIMERD_GROUPS__X is groups.x.

    Raises:
        ConfigError: a variable is unknown; the error names it.
    """
    found: dict[str, object] = {}
    for name, value in env.items():
        if name.startswith(ENV_PREFIX) and name != ENV_FILE and not _SERVICE_LINK.fullmatch(name):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _check_key(key, value, _variable)
            found[key] = value
    return found


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def build_config(*sources: Mapping[str, object]) -> NodeConfig:
    """Return the configuration of all sources; a later source overrides an earlier one.

    Raises:
        ConfigError: a setting is unknown, missing, of the wrong type or out of range.
    """
    settings: dict[str, object] = {}
    tables: dict[str, dict[str, object]] = {each: {} for each in _TABLES}
    for source in sources:
        for table in _TABLES:
            if table in source:
                tables[table] = _addresses(table, source[table])
        for key, value in source.items():
            _check_key(key, value)
            if key.startswith(_IN_TABLE):
                table, _, name = key.partition(".")
                tables[table][name] = _read_as(key, value)
            elif key not in _TABLES:
                settings[key] = _read_as(key, value)
    settings |= tables
    for needed in ("name", "cluster_id", "data"):
        if needed not in settings:
            raise ConfigError(needed, HIDDEN, "must be set")
    return _assemble(NodeConfig, settings)


def _assemble(part: type[_P], settings: Mapping[str, object]) -> _P:
    prefix = f"{part.section}." if part.section else ""
    arguments: dict[str, Any] = {}
    for each in fields(part):
        key = f"{prefix}{each.name}"
        if isinstance(each.type, type) and issubclass(each.type, _Part):
            arguments[each.name] = _assemble(each.type, settings)
        elif key in settings:
            arguments[each.name] = settings[key]
    return part(**arguments)


def load_config(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, str]
) -> NodeConfig:
    """Return the configuration of a file (None: no file), the environment and the flags.

    Raises:
        ConfigError: the file cannot be read, or as for `build_config`.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("config", str(path), error.strerror or str(error)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError("config", str(path), f"must be TOML: {error}") from None
    return build_config(flatten(tables), from_env(env), overrides)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the configuration to a program's parser."""
    parser.add_argument("--config", type=Path, help=f"TOML file (or {ENV_FILE})")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", help=f"the setting {name!r}")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="any setting, such as limits.key_bytes_max=512; may be repeated",
    )


def flags_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the settings of the flags of `add_flags`, by key.

    Raises:
        ConfigError: a `--set` without "=".
    """
    found: dict[str, str] = {}
    for each in arguments.settings:
        key, equals, value = each.partition("=")
        if not equals:
            raise ConfigError("--set", each, "must be KEY=VALUE")
        found[key.strip()] = value
    named = {name: getattr(arguments, name) for name in _FLAGS}
    return found | {name: value for name, value in named.items() if value is not None}


# ---- printing


def print_config(config: NodeConfig) -> str:
    """Return TOML from which `load_config` builds the same configuration."""
    return "\n".join(_lines(config, config.section)) + "\n"


def shared_settings(config: NodeConfig) -> dict[str, str]:
    """Return the settings in tables that must be the same on all nodes, as in TOML."""
    parts = config.timing, config.leadership, config.limits, config.groups  # not [storage]
    return {
        f"{part.section}.{each.name}": _toml(getattr(part, each.name))
        for part in parts
        for each in fields(part)
        if not each.metadata["own"]
    }


def _lines(part: _Part, section: str) -> Iterator[str]:
    if section:
        yield f"\n[{section}]"
    tables: list[tuple[str, Any]] = []
    for each in fields(part):
        value = getattr(part, each.name)
        if is_dataclass(value) or isinstance(value, Mapping):
            tables.append((each.name, value))
        else:
            yield f"{each.name} = {_toml(value)}"
    for name, table in tables:
        if isinstance(table, _Part):
            yield from _lines(table, name)
        else:
            yield f"\n[{name}]"
            yield from (f"{_toml(key)} = {_toml(value)}" for key, value in table.items())


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    # TOML's strings are JSON's, except for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
