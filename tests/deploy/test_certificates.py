"""Certificates: `timerctl certs` makes them, a node checks them before use."""

import dataclasses
import json
import re
import ssl
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.node import timerd
from cluster.rpc import node_tls
from cluster.rpc.node_tls import NodeTls
from cluster.security.certificates import CertificateFiles, read_certificate
from cluster.security.identities import (
    CallerIdentity,
    IdentityKind,
    UntrustedIdentityError,
    identity_of,
)
from cluster.settings.exit_codes import ExitCode
from deploy import certificate_store
from deploy.certificate_store import CertificateError, CertificateStore, facts_of
from timer.model.timer_errors import CertificateDateError, ConfigError
from timerclient.cli import timerctl
from timerclient.values.certificate_dates import end_of_certificate_s, utc_text, validities_in


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CertificateStore:
    made = CertificateStore(tmp_path_factory.mktemp("certs") / "d")
    made.create("prod")
    for name in ("n1", "n2"):
        made.issue(IdentityKind.NODE, name, hosts=["10.0.0.1", "n1.example.com"])
    made.issue(IdentityKind.CLIENT, "billing")
    (made.directory / "empty.pem").write_bytes(b"")
    return made


def files(store: CertificateStore, name: str = "node-n1") -> CertificateFiles:
    return CertificateFiles(
        ca=str(store.path("ca")),
        client_ca=str(store.path("client-ca")),
        certificate=str(store.path(name)),
        key=str(store.path(name, key=True)),
    )


def test_a_node_certificate_fits_its_node_and_says_when_it_expires(
    store: CertificateStore,
) -> None:
    found = read_certificate(files(store), name="n1", cluster_id="prod")
    assert found.not_after_s["certificate"] < found.not_after_s["ca"]
    assert "PRIVATE KEY" not in repr(found)
    assert end_of_certificate_s(found.certificate) == found.not_after_s["certificate"]
    short = ssl.PEM_cert_to_DER_cert(found.certificate.decode())[:100]
    with pytest.raises(ValueError, match="a value of"):
        end_of_certificate_s(ssl.DER_cert_to_PEM_cert(short).encode())


def test_comments_in_the_files_may_have_any_bytes(tmp_path: Path) -> None:
    store, tls = node_with_tls(tmp_path)
    comment = "# für n1\n".encode("latin-1")
    for name in ("ca", "client-ca", "node-n1"):
        store.path(name).write_bytes(comment + store.path(name).read_bytes() + comment)
    commented = NodeTls(tls_config(store))
    assert commented.certificate.authorities == tls.certificate.authorities


def test_the_two_authorities_must_differ(store: CertificateStore, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(store.path("client-ca").read_bytes() + store.path("ca").read_bytes())
    wrong = dataclasses.replace(files(store), client_ca=str(both))
    with pytest.raises(ConfigError, match=r"tls.client_ca.*no authority with tls.ca"):
        read_certificate(wrong, name="n1", cluster_id="prod")


@pytest.mark.parametrize(
    ("name", "cluster_id", "changes", "why"),
    [
        ("n2", "prod", {}, "Hostname mismatch"),
        ("n1", "test", {}, "Hostname mismatch"),
        ("n1", "prod", {"key": "node-n2-key.pem"}, "must be of the key"),
        ("n1", "prod", {"ca": "client-ca.pem"}, r"authority in tls.ca = .*client-ca.pem: unable"),
        ("n1", "prod", {"ca": "ca-key.pem"}, "tls.ca"),
        ("n1", "prod", {"client_ca": "empty.pem"}, "tls.client_ca"),
        ("n1", "prod", {"certificate": "access.toml"}, "tls.certificate"),
        ("n1", "prod", {"certificate": "none.pem"}, "No such file"),
        (
            "n1",
            "prod",
            {"certificate": "client-billing.pem", "key": "client-billing-key.pem"},
            "local issuer",
        ),
    ],
)
def test_files_that_do_not_fit_are_rejected_with_the_setting(
    store: CertificateStore, name: str, cluster_id: str, changes: dict[str, str], why: str
) -> None:
    changed = {each: str(store.directory / file) for each, file in changes.items()}
    wrong = dataclasses.replace(files(store), **changed)
    with pytest.raises(ConfigError, match=why) as caught:
        read_certificate(wrong, name=name, cluster_id=cluster_id)
    assert caught.value.key.startswith("tls.")


def node_with_tls(directory: Path) -> tuple[CertificateStore, NodeTls]:
    """Return the authorities of a new cluster, and the TLS of its node n1."""
    store = CertificateStore(directory)
    store.create("prod")
    store.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    return store, NodeTls(tls_config(store))


def tls_config(store: CertificateStore) -> Any:
    """Return the settings of n1 that its TLS needs."""
    names = dataclasses.asdict(files(store)) | {"access": str(store.access), "tokens": ""}
    return SimpleNamespace(name="n1", cluster_id="prod", tls=SimpleNamespace(**names))


@pytest.mark.parametrize("cut", ["ca.pem", "client-ca.pem", "node-n1.pem", "access.toml"])
async def test_a_file_that_is_being_written_leaves_the_old_ones_in_use(
    tmp_path: Path, cut: str
) -> None:
    store, tls = node_with_tls(tmp_path)
    certificate, rules = tls.certificate, tls.access.rules
    whole = (tmp_path / cut).read_bytes()
    for part in (b"", whole[: len(whole) // 2], b"rule = [1]"):
        (tmp_path / cut).write_bytes(part)
        await tls.renew()
        assert (tls.certificate, tls.access.rules) == (certificate, rules)
    (tmp_path / cut).write_bytes(whole)
    store.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    await tls.renew()
    assert tls.certificate != certificate


async def test_a_certificate_is_tried_again_while_its_time_has_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tls = node_with_tls(tmp_path)
    before = tls.certificate
    store.issue(IdentityKind.NODE, "n1", hosts=["127.0.0.1"])
    with monkeypatch.context() as early:
        early.setattr(tls, "_read", Mock(side_effect=ConfigError("tls", "", "not yet valid")))
        await tls.renew()
    assert tls.certificate is before
    await tls.renew()
    assert tls.certificate is not before
    read = Mock()
    monkeypatch.setattr(tls, "_read", read)
    await tls.renew()
    assert read.call_count == 0, "unchanged files are not checked again"


@pytest.mark.parametrize(
    ("early", "days", "which", "why"),
    [
        (["node-n1", "ca"], 2, "certificate", "is valid only from"),
        (["ca"], 2, "ca", "is valid only from"),
        ([], 0, "certificate", "expired at"),
    ],
)
def test_a_node_whose_clock_may_be_wrong_ends_with_a_status_after_which_it_is_restarted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    early: list[str],
    days: int,
    which: str,
    why: str,
) -> None:
    store, usual = CertificateStore(tmp_path), certificate_store.CLOCK_SKEW
    ahead = {name: timedelta(days=-1) for name in early}
    monkeypatch.setattr(certificate_store, "CLOCK_SKEW", ahead.get("ca", usual))
    store.create("prod")
    monkeypatch.setattr(certificate_store, "CLOCK_SKEW", ahead.get("node-n1", usual))
    store.issue(IdentityKind.NODE, "n1", days=days)

    def start(_: object) -> int:
        read_certificate(files(store), name="n1", cluster_id="prod")
        return 0

    monkeypatch.setattr(timerd, "run", start)
    assert timerd.main([]) == ExitCode.DATE
    error = capsys.readouterr().err
    assert f"tls.{which} = '{getattr(files(store), which)}': {why} 20" in error
    assert f"(this machine's clock: {datetime.now(UTC):%Y-%m-}" in error


@pytest.mark.parametrize("header", ["CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_a_date_error_names_the_node_certificate_beside_a_later_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    store, later = CertificateStore(tmp_path / "a"), CertificateStore(tmp_path / "b")
    store.create("prod")
    monkeypatch.setattr(certificate_store, "CLOCK_SKEW", timedelta(days=-1))
    store.issue(IdentityKind.NODE, "n1")
    monkeypatch.setattr(certificate_store, "CLOCK_SKEW", timedelta(days=-2))
    later.create("prod")
    both = store.path("ca").read_bytes() + later.path("ca").read_bytes()
    store.path("ca").write_bytes(both)
    own = store.path("node-n1").read_bytes()
    store.path("node-n1").write_bytes(own.replace(b" CERTIFICATE-", b" %b-" % header.encode()))
    begin = utc_text(validities_in(own)[0].begin_s)
    with pytest.raises(CertificateDateError, match=rf"tls\.certificate .*from {begin}"):
        read_certificate(files(store), name="n1", cluster_id="prod")


async def test_the_end_of_a_certificate_in_use_is_a_complaint_and_one_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, tls = node_with_tls(tmp_path)
    clock, end_s = Mock(), tls.certificate.not_after_s
    monkeypatch.setattr(node_tls, "time", clock)
    found: list[str] = []
    first_s, last_s = end_s["certificate"], max(end_s.values())
    own_s = end_s["certificate"] - node_tls.EXPIRY_S
    for now_s, count in ((own_s - 1, 0), (first_s - 1, 0), (first_s, 1), (last_s, 3)):
        clock.time.return_value = now_s
        assert tls.expires_soon() == (now_s >= own_s)
        for _ in range(2):
            await tls.renew()
        found = tls.complaints()
        assert len(found) == count
        assert {*caplog.messages} == {*found}
        assert len(caplog.messages) == count
    assert "ca.pem': an authority in it expired at 20" in found[0]
    assert found[2].startswith(f"tls.certificate = '{store.path('node-n1')}': expired at 20")


def test_an_expired_certificate_and_a_key_for_others_are_rejected(tmp_path: Path) -> None:
    store = CertificateStore(tmp_path / "d")
    store.create("prod")
    store.issue(IdentityKind.NODE, "n1", days=0)  # it expires at once
    with pytest.raises(ConfigError, match="expired"):
        read_certificate(files(store), name="n1", cluster_id="prod")
    store.issue(IdentityKind.NODE, "n1")
    store.path("node-n1", key=True).chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.key.*others can use the key"):
        read_certificate(files(store), name="n1", cluster_id="prod")


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["timer://prod/node/n1", "timer://prod/admin/a"],
        ["timer://test/node/n1"],
        ["timer://prod/root/n1"],
        ["timer://prod/node/"],
        ["timer://prod/node/n1/x"],
        ["timer://prodx/node/n1"],
        ["https://prod/node/n1"],
    ],
)
def test_other_uris_are_no_identity(uris: list[str]) -> None:
    with pytest.raises(UntrustedIdentityError):
        identity_of(uris, "prod")
    wanted = CallerIdentity(IdentityKind.NODE, "n1")
    assert identity_of(["timer://prod/node/n1"], "prod") == wanted


@pytest.mark.parametrize("name", ["ca", "billing-key"])
def test_a_name_whose_files_are_those_of_others_is_rejected(
    store: CertificateStore, name: str
) -> None:
    before = {path: path.read_bytes() for path in store.directory.iterdir()}
    with pytest.raises(CertificateError, match=f"name = '{name}'"):
        store.issue(IdentityKind.CLIENT, name)
    assert {path: path.read_bytes() for path in store.directory.iterdir()} == before


def test_a_certificate_is_signed_by_the_authority_of_the_key_and_ends_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, other = CertificateStore(tmp_path), CertificateStore(tmp_path / "other")
    store.create("prod")
    other.create("prod", days=90)

    def issue() -> int:
        return timerctl.main(["certs", "issue", "node", "n1", "--dir", str(tmp_path)])

    assert issue() == 0
    assert "authority" not in capsys.readouterr().err
    store.path("ca", key=True).write_bytes(other.path("ca", key=True).read_bytes())
    assert issue() == 1
    assert "ca-key.pem: the key of another authority than" in capsys.readouterr().err
    with store.path("ca").open("ab") as file:
        file.write(other.path("ca").read_bytes())
    assert issue() == 0
    assert "node-n1.pem expires with its authority on 20" in capsys.readouterr().err
    found = read_certificate(files(store), name="n1", cluster_id="prod")
    assert found.not_after_s["certificate"] == found.not_after_s["ca"]
    other.directory.joinpath("ca.pem").unlink()
    other.directory.joinpath("client-ca.pem").unlink()
    other.create("prod", days=0)
    with pytest.raises(CertificateError, match=r"ca\.pem: expired at"):
        other.issue(IdentityKind.NODE, "n1")


def test_a_renewed_certificate_keeps_its_hosts_except_if_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CertificateStore(tmp_path)
    store.create("prod")
    for given, hosts in (((), ()), (("a.lan.", "::1"), ("a.lan.", "::1")), ((), ("a.lan.", "::1"))):
        [made] = facts_of(store.issue(IdentityKind.NODE, "n1", hosts=given))
        assert made.hosts == ("n1.nodes.prod.timer", "nodes.prod.timer", *hosts)
    with monkeypatch.context() as earlier:
        earlier.setattr(certificate_store, "_DNS_NAME", re.compile(".*"))
        store.issue(IdentityKind.NODE, "n1", hosts=["a.lan", "a.lan:7401"])
    [made] = facts_of(store.issue(IdentityKind.NODE, "n1"))
    assert made.hosts[2:] == ("a.lan", "a.lan:7401")


def test_the_command_makes_shows_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def certs(*words: str) -> int:
        return timerctl.main(["certs", *words, "--dir", str(tmp_path / "d")])

    assert certs("init", "prod") == 0
    assert certs("issue", "node", "n1") == 0
    assert "node-n1.pem has no host" in capsys.readouterr().err
    assert certs("issue", "node", "n1", "--host", "::1") == 0
    assert certs("issue", "admin", "alice", "--days", "10") == 0
    for wrong in ("10.0.0.1:7401", "https://n1.lan", "n1,n2", "10.0.0.256", ""):
        assert certs("issue", "node", "n1", "--host", wrong) == 1
        assert f"host = {wrong!r}: must be a DNS name" in capsys.readouterr().err
    assert certs("issue", "client", "b", "--host", "h") == 2
    assert "no host" not in capsys.readouterr().err
    assert certs("show", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)["certificates"]
    assert [each["identity"] for each in shown] == [
        *("admin/alice", "prod nodes", "prod clients", "node/n1"),
    ]
    assert shown[3]["hosts"] == ["n1.nodes.prod.timer", "nodes.prod.timer", "::1"]
    assert certs("check") == 1
    assert "admin-alice.pem" in capsys.readouterr().err
    assert certs("check", "--within", "9") == 0
    brief = CertificateStore(tmp_path / "brief")
    brief.create("prod", days=5)
    with (tmp_path / "d" / "ca.pem").open("ab") as file:
        file.write(brief.path("ca").read_bytes())
    capsys.readouterr()
    assert certs("check", "--within", "9") == 1, "ca.pem has two authorities"
    shown = capsys.readouterr()
    signed = re.findall(r"^(ca|node-n1)\.pem .* prod nodes ([0-9a-f]{8}) ", shown.out, re.MULTILINE)
    assert [name for name, _ in signed] == ["ca", "ca", "node-n1"]
    assert signed[2][1] == signed[0][1] != signed[1][1], "node-n1 is of the first authority"
    assert (shown.out.count("\nca.pem "), shown.err.count("ca.pem")) == (2, 1)
    assert certs("init", "prod") == 1
    assert "already" in capsys.readouterr().err


def test_certificates_and_tokens_need_no_package_of_a_node(tmp_path: Path) -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    absent = [re.split(r"[=<>]", each)[0].replace("-", "_") for each in extras["server"]]
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    )

    def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, module, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (tmp_path / "tokens.toml").write_text("token = []")
    for words in (
        ("certs", "init", "prod", "--dir", str(tmp_path)),
        ("certs", "check", "--dir", str(tmp_path)),
        ("tokens", "new", "ci"),
        ("tokens", "show", str(tmp_path / "tokens.toml")),
    ):
        done = run("timerclient.cli.timerctl", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    done = run(
        "cluster.node.timerd",
        "init",
        "--data",
        "d",
        "--name",
        "n1",
        "--cluster-id",
        "c",
        "--voters",
        "n1",
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "needs isal: pip install '.[server]'" in done.stderr
