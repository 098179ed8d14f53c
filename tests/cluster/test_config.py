"""A node's settings: their sources, valid values and rejected ones."""

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.settings.config import (
    MIB,
    TYPES,
    Address,
    GroupsConfig,
    LeadershipConfig,
    LimitsConfig,
    NodeConfig,
    StorageConfig,
    TimingConfig,
    add_flags,
    build_config,
    flags_of,
    flatten,
    from_env,
    load_config,
    parse_address,
    print_config,
)
from tests.cluster.hosted import BASE, PEERS
from timer.entries.entry_frame import PAYLOAD_SIZE_MAX
from timer.model.columns import ROW
from timer.model.timer_errors import ConfigError
from timer.model.units import DUE_MS_MAX

FILE = """
name = "n2"
cluster_id = "demo"
data = "run/n2"
log_level = "debug"
[peers]
n1 = "127.0.0.1:7101"
n2 = "127.0.0.1:7102"
[limits]
payload_bytes_max = 1000
[groups]
visibility_timeout_ms = 5_000
"""


def refused(*sources: dict[str, object]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        build_config(BASE, *sources)
    return error.value


# ---- defaults and relations


def test_defaults_are_the_documented_ones() -> None:
    config = build_config(BASE)
    assert config.grpc == "127.0.0.1:7101"
    assert config.data == Path("run/n1")
    assert dict(config.peers) == PEERS
    assert config.auto_create_topics
    assert not config.insecure
    assert (config.timing.tick_ms, config.timing.checkpoint_interval_ms) == (1, 3_000)
    assert (config.leadership.lease_ms, config.leadership.heartbeat_ms) == (500, 100)
    assert config.limits.payload_bytes_max == 4 * MIB
    assert config.limits.delay_ms_max == DUE_MS_MAX
    assert config.groups.visibility_timeout_ms == 30_000
    assert config.storage.memtable_bytes_flush == 64 * MIB


def test_configuration_cannot_be_changed() -> None:
    config = build_config(BASE)
    with pytest.raises(AttributeError):
        config.name = "n2"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.peers["n4"] = "x"  # type: ignore[index]


def test_replication_gets_its_settings() -> None:
    config = build_config(BASE, {"leadership.lease_ms": 900, "limits.inflight_bytes_max": 99 * MIB})
    replication = config.replication_config()
    assert (replication.lease_ms, replication.heartbeat_ms) == (900, 100)
    assert replication.uncommitted_bytes == 99 * MIB


@pytest.mark.parametrize(
    "part", [TimingConfig, LeadershipConfig, LimitsConfig, GroupsConfig, StorageConfig]
)
def test_every_number_has_a_range_and_is_refused_beyond_it(part: type[Any]) -> None:
    for declared in fields(part):
        name = declared.name
        low, high = declared.metadata["range"]
        for value in (low - 1, high + 1):
            with pytest.raises(ConfigError) as error:
                part(**{name: value})
            assert str(error.value) == f"{part.section}.{name} = {value}: must be {low} to {high}"


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        (
            "timing.fold_interval_ms",
            {"timing.checkpoint_interval_ms": 200, "timing.fold_interval_ms": 201},
        ),
        ("leadership.heartbeat_ms", {"leadership.heartbeat_ms": 250}),
        ("limits.request_bytes_max", {"limits.request_bytes_max": 4 * MIB}),
        (
            "limits.inflight_bytes_max",
            {"limits.inflight_bytes_max": 32 * MIB},
        ),
        ("groups.visibility_timeout_ms", {"groups.visibility_timeout_ms": 99}),
        ("groups.visibility_timeout_ms", {"groups.visibility_timeout_ms_max": 29_999}),
        (
            "groups.visibility_timeout_ms_min",
            {"groups.visibility_timeout_ms_min": 9, "groups.visibility_timeout_ms_max": 8},
        ),
        ("storage.memtable_bytes_flush", {"storage.memtable_bytes_flush": 15 * MIB}),
        ("name", {"name": "n4"}),
        ("name", {"name": "-n1"}),
        ("cluster_id", {"cluster_id": "a b"}),
        ("cluster_id", {"cluster_id": ""}),
        ("data", {"data": ""}),
        ("data", {"data": "run/\udcff"}),
        ("log_level", {"log_level": "loud"}),
        ("test_clock", {"test_clock": "clock.json"}),
        ("http", {"http": "127.0.0.1:7101"}),
        ("peers", {"peers": ""}),
        ("peers", {"peers": ",".join(f"n{i}=127.0.0.1:{7000 + i}" for i in range(8))}),
        ("peers", {"peers": "n1=127.0.0.1:7101,n1=127.0.0.1:7102"}),
        ("peers", {"peers": "n1=127.0.0.1:7101,n2=127.0.0.1:7101"}),
        ("peers", {"peers": "n1=127.0.0.1:7101,n 2=127.0.0.1:7102"}),
        ("peers", {"peers": "n1"}),
        ("peers", {"peers": 7}),
        ("peers.n1", {"peers": "n1=somewhere"}),
        ("peers.n1", {"peers.n1": 7}),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(key: str, settings: dict[str, object]) -> None:
    assert refused(settings).key == key


def test_largest_allowed_request_fits_into_an_entry() -> None:
    room = PAYLOAD_SIZE_MAX - 65_536 * ROW.itemsize
    build_config(BASE, {"limits.request_bytes_max": room})
    assert "rows included" in str(refused({"limits.request_bytes_max": room + 1}))
    fewer = {"limits.request_bytes_max": room + 1, "limits.request_rows_max": 65_535}
    build_config(BASE, fewer)


@pytest.mark.parametrize("key", ["name", "cluster_id", "data"])
def test_what_has_no_default_must_be_set(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: must be set$"):
        build_config({each: value for each, value in BASE.items() if each != key})


# ---- binding


@pytest.mark.parametrize("key", ["grpc", "http"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "node1"])
def test_port_open_to_the_network_needs_insecure(key: str, host: str) -> None:
    settings: dict[str, object] = {key: f"{host}:7900"}
    assert "insecure" in str(refused(settings))
    config = build_config(BASE, settings, {"insecure": "true"})
    assert getattr(config, key) == f"{host}:7900"


@pytest.mark.parametrize("table", ["peers", "links"])
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_address_that_others_connect_to_is_no_wildcard(table: str, host: str) -> None:
    error = refused({"insecure": True, f"{table}.n1": f"{host}:7900"})
    assert error.key == f"{table}.n1"
    assert "must be an address that others connect to" in str(error)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.9.9.9"])
def test_loopback_needs_no_permission(host: str) -> None:
    assert build_config(BASE, {"grpc": f"{host}:7900"}).grpc == f"{host}:7900"


def test_only_the_http_port_may_be_any_free_one() -> None:
    assert build_config(BASE, {"http": "127.0.0.1:0"}).http == "127.0.0.1:0"
    assert refused({"grpc": "127.0.0.1:0"}).key == "grpc"


def test_names_of_the_http_port_are_hosts() -> None:
    names = "timers.lan, timers.,[fd00::1],10.0.0.9"
    assert build_config(BASE, {"http_names": names}).http_names == names
    for text in ("timers.lan:7411", "a,http://timers.lan", "*.lan", "a b", "fd00::1"):
        assert refused({"http_names": text}).key == "http_names"


def test_address_is_taken_apart() -> None:
    assert parse_address("k", "node1.svc:7100") == Address("node1.svc", 7100)
    assert parse_address("k", "[fe80::1]:65535") == Address("fe80::1", 65535)


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":7100", "::1:7100", "[host]:7100", "[::1]", "h:65536", "h:0"),
        *("h:-1", "h:7_1", "h:\u0663", "a b:1", "http://h:1", "h:1,g:2", "h:" + "9" * 5_000),
        *("a..b:1", ".a:1", "x" * 64 + ":1"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address("k", text)


# ---- keys and types


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("timing.tik_ms", "timing.tick_ms"),
        ("tick_ms", "timing.tick_ms"),
        ("limits.visibility_timeout_ms", "groups.visibility_timeout_ms"),
        ("cluster-id", "cluster_id"),
        ("GRPC", "grpc"),
    ],
)
def test_unknown_key_is_refused_with_the_one_that_was_meant(key: str, meant: str) -> None:
    error = refused({key: 5})
    assert error.key == key
    assert str(error).endswith(f"unknown; did you mean {meant}?")


def test_table_in_place_of_a_value_is_refused_under_its_own_name() -> None:
    error = refused(flatten({"name": {"a": 1}}))
    assert (error.key, str(error)) == ("name", "name = {'a': 1}: must be a string")


def test_unknown_key_like_no_other_is_refused_with_those_of_its_table() -> None:
    for table in ({"zzz": 5}, {"zzz": {"b": 5}}):
        first, _, known = str(refused(flatten(table))).partition("unknown; known: ")
        assert first.startswith("zzz")
        assert {"name", "peers", "limits", "tls"} <= {*known.split(", ")}
    in_table = str(refused({"leadership.zzz": 5}))
    known = "leadership.lease_ms, leadership.heartbeat_ms"
    assert in_table == f"leadership.zzz = 5: unknown; known: {known}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timing.tick_ms", "10.5"),
        ("timing.tick_ms", ""),
        ("timing.tick_ms", "1_"),
        ("timing.tick_ms", "9" * 5_000),
        ("timing.tick_ms", 10.0),
        ("timing.tick_ms", True),
        ("insecure", "yes"),
        ("insecure", 1),
        ("name", 3),
        ("data", 3),
        ("limits.key_bytes_max", {"a": 1}),
    ],
)
def test_value_of_another_type_is_refused(key: str, value: object) -> None:
    assert refused({key: value}).key == key


def test_part_made_in_code_refuses_what_is_no_number() -> None:
    with pytest.raises(ConfigError, match="a whole number"):
        TimingConfig(tick_ms="10")  # type: ignore[arg-type]


def test_every_setting_can_be_given_as_text() -> None:
    config = build_config(BASE)
    for key, kind in TYPES.items():
        part: object = config
        for name in key.split("."):
            part = getattr(part, name)
        text = str(part)
        if kind is dict:
            assert isinstance(part, Mapping)
            text = ",".join(f"{name}={address}" for name, address in part.items())
        assert build_config(BASE, {key: text}) == config


# ---- sources


def test_environment_is_read_by_key() -> None:
    env = {"TIMERD_NAME": "n2", "TIMERD_GROUPS__VISIBILITY_TIMEOUT_MS": "7000", "HOME": "/x"}
    assert from_env(env) == {"name": "n2", "groups.visibility_timeout_ms": "7000"}


def test_environment_of_a_kubernetes_service_is_no_setting() -> None:
    env = {"TIMERD_PORT": "tcp://10.0.0.1:1", "TIMERD_PORT_7100_TCP_ADDR": "x"}
    assert from_env({**env, "TIMERD_SERVICE_HOST": "y", "TIMERD_CONFIG": "node.toml"}) == {}


def test_unknown_setting_in_the_environment_is_refused() -> None:
    near = "TIMERD_GROUPS__VISIBILITY_TIMEOUT_MS"
    with pytest.raises(ConfigError, match=rf"^TIMERD_VISIBILITY_TIMEOUT_MS = '1': .* {near}\?$"):
        from_env({"TIMERD_VISIBILITY_TIMEOUT_MS": "1"})


def test_flags_prevail_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(FILE)
    env = {"TIMERD_LOG_LEVEL": "warning", "TIMERD_LIMITS__PAYLOAD_BYTES_MAX": "2_000"}
    config = load_config(path, env, {"log_level": "error"})
    assert config.log_level == "error"
    assert config.limits.payload_bytes_max == 2_000
    assert config.groups.visibility_timeout_ms == 5_000
    assert config.grpc == "127.0.0.1:7102"


def test_peers_given_as_a_whole_replace_those_of_the_file_and_single_ones_are_added() -> None:
    file = flatten({"peers": {"n1": "127.0.0.1:1", "n9": "127.0.0.1:9"}})
    added = build_config(BASE, {"peers.n4": "127.0.0.1:7104"})
    assert dict(added.peers) == {**PEERS, "n4": "127.0.0.1:7104"}
    assert dict(build_config(file, BASE).peers) == PEERS
    assert build_config(BASE, file).peers["n1"] == "127.0.0.1:1"


def test_flags_are_settings() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    line = "--config node.toml --name n3 --data d --set timing.tick_ms=20 --set peers.n1=h:1"
    arguments = parser.parse_args(line.split())
    assert arguments.config == Path("node.toml")
    flags = {"name": "n3", "data": "d", "timing.tick_ms": "20", "peers.n1": "h:1"}
    assert flags_of(arguments) == flags
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        flags_of(parser.parse_args(["--set", "tick"]))


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none.toml.*No such file"):
        load_config(missing, {}, {})
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n")
    with pytest.raises(ConfigError, match=r"broken.toml.*must be TOML.*line 1"):
        load_config(broken, {}, {})
    broken.write_bytes(b"name = '\xff'\n")
    with pytest.raises(ConfigError, match="must be TOML"):
        load_config(broken, {}, {})


def test_printed_configuration_makes_the_same_one(tmp_path: Path) -> None:
    odd = replace(
        build_config(BASE, {"insecure": True, "http": "[::]:0", "log_level": "error"}),
        data=Path('run/"q"\\ \x7f\té𝄞'),
        timing=TimingConfig(tick_ms=1, fold_interval_ms=10),
    )
    path = tmp_path / "printed.toml"
    for config in (odd, build_config(BASE)):
        path.write_text(print_config(config), encoding="utf-8")
        again = load_config(path, {}, {})
        assert again == config
        assert isinstance(again, NodeConfig)


def test_printed_configuration_names_every_setting() -> None:
    printed = print_config(build_config(BASE))
    assert [key for key in TYPES if key.rpartition(".")[2] not in printed] == []
