"""Bearer tokens: their file, the check of a token, and where a client sends one."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.rpc.access_file import AccessFile, TokenFile
from cluster.rpc.call_guard import HttpGate, LinkGate, TokenGate
from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.rpc_caller import METADATA
from cluster.rpc.watched_file import WatchedFile
from cluster.security.token_hashes import TokenHash, TokenHashes, hash_in, parse_tokens
from cluster.settings.config import build_config
from timer.model.timer_errors import ConfigError, PermissionDeniedError, TokenRejectedError
from timerclient import ClientTls, TimerClient
from timerclient.cli.timerctl import main
from timerclient.values.errors import InvalidRequest

SECRET = "timer_secret"
SHA256 = hashlib.sha256(SECRET.encode()).hexdigest()
ENTRY = f'[[token]]\nname = "ci"\nsha256 = "{SHA256}"\nexpires = 2030-01-31T00:00:00Z\n'
RULES = (
    '[[rule]]\nwho = ["token/ci"]\nmay = ["produce"]\n[[rule]]\nwho = ["admin/*"]\nmay=["observe"]'
)
SCHEDULE = "/timer.v1.TimerService/Schedule"
LIST = "/timer.v1.AdminService/ListTopics"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"token = {SECRET}", "must be TOML: line 1, column 9"),
        ("", "without any: token = "),
        (f'token = ["{SECRET}"]', "token 1: must be a table"),
        (ENTRY + "admin = true", "token 1: must be a table"),
        (ENTRY.replace('"ci"', f'"{SECRET}/"'), "token 1: name"),
        (ENTRY.replace(SHA256, SECRET), "the hash, not the token"),
        (ENTRY.replace(SHA256, SHA256.upper()), "in lower case"),
        (ENTRY.replace("00Z", "00"), "a time with its offset"),
        (ENTRY.replace("2030-01-31T00:00:00Z", "true"), "a time with its offset"),
        (ENTRY.replace("2030-01-31T00:00:00Z", "0001-01-01T00:00:00+01:00"), "1970 to 9998"),
        (ENTRY + ENTRY, "no two tokens may have"),
        (f"{SECRET} = 1\n" + ENTRY, "must have .*token.* only"),
    ],
)
def test_a_malformed_file_is_rejected_without_the_values_in_it(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_tokens(text)
    assert SECRET not in str(caught.value)


def test_a_token_has_its_name_until_it_expires_and_is_in_no_error() -> None:
    tokens = parse_tokens(ENTRY)
    [token] = tokens
    for value in (f"Bearer {SECRET}", f"bearer {SECRET}"):
        assert tokens.check(hash_in([value]), token.expires_s - 1) == "ci"
    with pytest.raises(TokenRejectedError, match="token/ci expired at 2030-01-31T00:00:00Z"):
        tokens.check(hash_in([f"Bearer {SECRET}"]), token.expires_s)
    assert [*parse_tokens("token = []")] == []
    renewed = ENTRY.replace("2030", "2031").replace(SHA256, "0" * 64)
    for text in (ENTRY + renewed, renewed + ENTRY):
        assert parse_tokens(text).not_after_s() == {"ci": parse_tokens(renewed).not_after_s()["ci"]}
    for values in ([], [""], [SECRET], [f"Basic {SECRET}"], [f"Bearer {SECRET}"] * 2, ["Bearer "]):
        with pytest.raises(TokenRejectedError) as caught:
            hash_in(values)
        assert SECRET not in str(caught.value)
    for wrong in (f"Bearer {SECRET}x", f"Bearer  {SECRET}", "Bearer \udc80", "Bearer " + "x" * 256):
        with pytest.raises(TokenRejectedError, match="is unknown"):
            tokens.check(hash_in([wrong]), 0)


def test_a_rotated_name_has_two_tokens() -> None:
    both = TokenHashes([TokenHash("ci", bytes([n]) * 32, 10.0) for n in range(2)])
    assert [both.check(bytes([n]) * 32, 9.0) for n in range(2)] == ["ci", "ci"]


def call(*, uri: str = "", **metadata: str) -> Any:
    """Return the context of a call."""
    pairs = [(key.replace("_", "-"), value) for key, value in metadata.items()]
    return SimpleNamespace(
        auth_context=lambda: {"peer_uri": [uri.encode()] if uri else []},
        invocation_metadata=lambda: pairs,
        peer=lambda: "ipv4:127.0.0.1:1",
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[AccessFile, TokenFile]:
    (tmp_path / "access.toml").write_text(RULES)
    (tmp_path / "tokens.toml").write_text(ENTRY)
    return AccessFile(str(tmp_path / "access.toml")), TokenFile(str(tmp_path / "tokens.toml"))


async def test_a_withdrawn_token_is_denied_and_a_malformed_file_keeps_the_tokens(
    files: tuple[AccessFile, TokenFile], tmp_path: Path
) -> None:
    access, tokens = files
    gate = TokenGate(access, CallerUsages(access), tokens)
    caller = gate.admit(SCHEDULE, call(authorization=f"Bearer {SECRET}"))
    assert str(caller.identity) == "token/ci"
    with pytest.raises(PermissionDeniedError, match="token/ci has no rule for observe"):
        gate.admit(LIST, call(authorization=f"Bearer {SECRET}"))
    certificate = call(uri="timer://c/admin/a", **{METADATA: "timer://c/admin/a"})
    with pytest.raises(TokenRejectedError, match="no token"):  # neither counts here
        gate.admit(LIST, certificate)
    (tmp_path / "tokens.toml").write_text(f"token = {SECRET}")
    assert (await tokens.reread()).result == "KEPT"
    caller.check_again()
    (tmp_path / "tokens.toml").write_text("token = []")
    assert (await tokens.reread()).result == "TAKEN"
    with pytest.raises(TokenRejectedError, match="is unknown"):
        caller.check_again()


def test_over_http_a_token_counts_before_a_certificate_if_the_node_has_tokens(
    files: tuple[AccessFile, TokenFile],
) -> None:
    access, tokens = files
    both = call(uri="timer://c/admin/a", authorization="Bearer wrong")
    gate = HttpGate("c", access, CallerUsages(access), tokens)
    with pytest.raises(TokenRejectedError):
        gate.admit(LIST, both)
    assert gate.claimed_identity(both) == "", "a denied line must not accuse the certificate"
    with pytest.raises(TokenRejectedError, match="no token"):
        gate.admit(LIST, call())
    certified = call(uri="timer://c/admin/a")
    assert str(gate.admit(LIST, certified).identity) == "admin/a"
    assert gate.claimed_identity(certified) == "admin/a"
    assert gate.claimed_identity(call(uri="timer://other/admin/a")) == "timer://other/admin/a"
    assert gate.claimed_identity(call(authorization=f"Bearer {SECRET}")) == "token/ci"
    with pytest.raises(PermissionDeniedError):  # no certificate gives the identity of a token
        gate.admit(SCHEDULE, call(uri="timer://c/token/ci"))
    without = HttpGate("c", access, CallerUsages(access), None)
    assert str(without.admit(LIST, both).identity) == "admin/a"


def test_a_relayed_call_keeps_the_identity_of_a_token(files: tuple[AccessFile, TokenFile]) -> None:
    access, _ = files
    gate = LinkGate("c", access, CallerUsages(access), {"n2"})
    relayed = call(uri="timer://c/node/n2", **{METADATA: "timer://c/token/ci"})
    caller = gate.admit(SCHEDULE, relayed)
    assert caller is not None
    assert str(caller.identity) == "token/ci"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tls.tokens": ""}, "tokens = '10.0.0.1:7403': must be empty without tls.tokens"),
        ({"tokens": "10.0.0.1:7402"}, "must differ from grpc, http and link"),
        ({"tls.key": ""}, "tls.key = '': must be set, too"),
        ({f"tls.{n}": "" for n in ("ca", "client_ca", "certificate", "key", "access")}, "tls.ca"),
    ],
)
def test_a_port_for_tokens_needs_tls_and_their_file(changed: dict[str, str], why: str) -> None:
    tls = ("ca", "client_ca", "certificate", "key", "access", "tokens")
    right = {
        "name": "n1",
        "cluster_id": "c",
        "data": "d",
        "peers.n1": "10.0.0.1:7401",
        "links.n1": "10.0.0.1:7402",
        "tokens": "10.0.0.1:7403",
    } | {f"tls.{name}": name for name in tls}
    assert build_config(right).tokens == "10.0.0.1:7403"
    with pytest.raises(ConfigError, match=why):
        build_config(right | changed)


def test_a_client_sends_a_token_over_tls_only_and_shows_it_in_no_error(tmp_path: Path) -> None:
    at, tls = "127.0.0.1:1", ClientTls(ca=tmp_path / "ca.pem")
    (tmp_path / "ca.pem").write_text("")
    (tmp_path / "empty").write_text("")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"token": SECRET}, "over TLS only"),
        ({"token": f"{SECRET}\n{SECRET}", "credentials": tls}, "without spaces"),
        ({"token": SECRET + " ", "credentials": grpc.ssl_channel_credentials()}, "without spaces"),
        ({"token": tmp_path / "no", "credentials": tls}, "a readable file"),
        ({"token": tmp_path / "empty", "credentials": tls}, "1 to 256"),
        ({"credentials": tls}, "has no token"),
    ]
    for arguments, why in wrong:
        with pytest.raises(InvalidRequest, match=why) as caught:
            TimerClient(at, **arguments)
        assert SECRET not in str(caught.value)


def test_a_command_takes_a_token_of_its_environment_only_with_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("TIMERCTL_TOKEN", SECRET)
    assert main(["status"]) == 2
    said = capsys.readouterr().err
    assert "over TLS only, which needs --tls-ca" in said
    assert SECRET not in said


def test_a_new_token_is_shown_with_its_line_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", "new", "ci", "--valid", "1"]) == 0
    token, _, entry = capsys.readouterr().out.partition("\n\n")
    [found] = parse_tokens(entry)
    assert 86_300 < found.expires_s - time.time() <= 86_400
    assert TokenHashes([found]).check(hash_in([f"Bearer {token}"]), time.time()) == "ci"
    (tmp_path / "tokens.toml").write_text(entry)
    assert main(["tokens", "show", str(tmp_path / "tokens.toml")]) == 0
    shown = capsys.readouterr().out
    assert "token/ci" in shown
    assert "in force" in shown
    assert token not in shown
    assert main(["tokens", "show", str(tmp_path / "absent")]) == 1


async def test_a_watched_file_is_parsed_when_it_changes_and_a_fifo_in_its_place_is_no_wait(
    tmp_path: Path,
) -> None:
    path, parsed = tmp_path / "tokens.toml", list[str]()

    def parse(text: str) -> str:
        parsed.append(text)
        if text == "wrong":
            raise ConfigError("tokens", "", "wrong")
        return text

    path.write_text("a")
    watched = WatchedFile("tls.tokens", str(path), parse, "tokens")
    for text, results in (
        ("a", ["UNCHANGED", "UNCHANGED"]),
        ("wrong", ["KEPT", "KEPT"]),
        ("b", ["TAKEN", "UNCHANGED"]),
        ("wrong", ["KEPT", "KEPT"]),
    ):
        path.write_text(text)
        assert [(await watched.reread()).result.name for _ in range(2)] == results
    assert parsed == ["a", "wrong", "b"]
    path.unlink()
    os.mkfifo(path)
    found = await watched.reread()
    assert (found.result.name, watched.content) == ("KEPT", "b")
    assert "not a regular file" in found.why
