"""`timerctl context`: precedence of settings, the file, and its errors."""

import errno
import json
import stat
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from tests.timerclient.conftest import Ctl, Threaded

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def file(ctl: Ctl, tmp_path: Path) -> Path:
    """The file of contexts, which does not exist yet."""
    return tmp_path / "config" / "timerctl" / "contexts.json"


@pytest.fixture
def address(ctl: Ctl, threaded: Threaded, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cluster's address, which no variable gives."""
    monkeypatch.delenv("TIMERCTL_ENDPOINTS")
    return threaded.cluster.address


def test_a_context_is_added_used_listed_shown_and_removed(
    ctl: Ctl, file: Path, address: str
) -> None:
    assert ctl("context", "add", "prod", "--endpoints", address, "--use")[0] == 0
    assert ctl("status")[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [*file.parent.iterdir()] == [file]
    assert ctl("context", "add", "dead", "--endpoints", NOWHERE)[0] == 0
    code, out, _ = ctl("context", "list")
    assert (code, [line.split()[:2] for line in out.splitlines()[1:]]) == (
        0,
        [["dead", NOWHERE], ["*", "prod"]],
    )
    assert ctl("context", "use", "dead")[0] == 0
    assert ctl("status", "--timeout", "100ms")[0] == 3
    assert ctl("context", "remove", "dead")[:2] == (
        0,
        "context dead is removed; there is no current context now\n",
    )
    document = json.loads(ctl("context", "list", "-o", "json")[1])
    assert document["contexts"] == [{"name": "prod", "endpoints": address}]
    assert (document["current"], document["in_effect"]) == (None, None)


def test_an_option_precedes_a_variable_a_variable_a_context_a_context_the_default(
    ctl: Ctl, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*argv: str) -> tuple[str, str]:
        found = json.loads(ctl("context", "show", "-o", "json", *argv)[1])["endpoints"]
        return found["value"], found["from"]

    assert shown()[1] == "default"
    for name in ("a", "b", "c"):
        ctl("context", "add", name, "--endpoints", f"{name}:1")
    ctl("context", "use", "a")
    assert shown() == ("a:1", "context a")
    monkeypatch.setenv("TIMERCTL_CONTEXT", "b")
    assert shown() == ("b:1", "context b")
    assert shown("--context", "c") == ("c:1", "context c")
    assert shown("--context", "none")[1] == "default"
    monkeypatch.setenv("TIMERCTL_ENDPOINTS", NOWHERE)
    assert shown("--context", "c") == (NOWHERE, "TIMERCTL_ENDPOINTS")
    assert shown("--endpoints", address) == (address, "--endpoints")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not JSON"),
        ("[]", "the file = []: must be an object"),
        ('{"context": {}}', "the file: unknown key 'context'; known: current, contexts"),
        ('{"contexts": {"p": {"endpoint": "x"}}}', "contexts.p: unknown key 'endpoint'"),
        ('{"contexts": {"p": {"endpoints": 1}}}', "contexts.p.endpoints = 1: must be a string"),
        ('{"current": "q", "contexts": {}}', "current = 'q': must be the name of a context"),
        ("", "is not JSON"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_the_key(
    ctl: Ctl, file: Path, text: str, error: str
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, out, err = ctl("status")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(file) in err
    assert error in err


def test_no_context_needs_no_file_of_contexts(ctl: Ctl, file: Path, address: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{")
    assert ctl("status", "--endpoints", address)[0] == 2
    assert ctl("status", "--endpoints", address, "--context", "none")[0] == 0


def test_contexts_that_this_user_may_not_read_are_needed_only_without_endpoints(
    ctl: Ctl, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = OSError(errno.EIO, "Input/output error")
    with mock.patch.object(Path, "read_text", side_effect=damaged):
        assert ctl("status", "--endpoints", address)[0] == 2
    denied = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(Path, "read_text", side_effect=denied):
        assert ctl("status", "--endpoints", address)[0] == 0
        with monkeypatch.context() as given:
            given.setenv("TIMERCTL_ENDPOINTS", address)
            assert ctl("status")[0] == 0
        for more in ((), ("--endpoints", address, "--context", "prod")):
            code, _, err = ctl("status", *more)
            assert (code, "can't read" in err) == (2, True)


def test_contexts_that_could_not_work_are_not_kept(ctl: Ctl, file: Path, tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.touch()
    add = ("context", "add", "p", "--endpoints")
    for argv, error in (
        (("context", "add", "p"), "needs --endpoints"),
        ((*add, "a:1,b"), "--endpoints = 'b': must be HOST:PORT"),
        (("context", "add", "none", "--endpoints", "a:1"), "context = 'none': must be"),
        (("context", "add", "../p", "--endpoints", "a:1"), "context = '../p': must be"),
        ((*add, "a:1", "--tls-ca", str(pem)), "TLS also needs --tls-cert and --tls-key"),
        (
            (*add, "a:1", "--tls-ca", str(pem), "--tls-cert", str(pem), "--tls-key", "absent"),
            "--tls-key = 'absent': no such file",
        ),
        (("context", "use", "p"), "no such context: 'p'"),
        (("context", "remove", "p"), "no such context: 'p'"),
        (("status", "--context", "p"), f"no such context: 'p'; {file} has: none"),
    ):
        code, _, err = ctl(*argv)
        assert (code, error in err) == (2, True), err
    assert not file.exists()
    assert ctl(*add, "a:1")[0] == 0
    assert "exists in" in ctl(*add, "a:2")[2]
    assert ctl(*add, "a:2", "--replace")[0] == 0


def test_paths_of_a_context_are_absolute_and_used(
    ctl: Ctl, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ca", "cert", "key"):
        Path(name).write_text("no PEM")
    files = ("--tls-ca", "ca", "--tls-cert", "cert", "--tls-key", "key")
    assert ctl("context", "add", "p", "--endpoints", address, *files, "--use")[0] == 0
    own = json.loads(ctl("context", "show", "p", "-o", "json")[1])
    assert own["tls_key"] == str(tmp_path / "key")
    code, _, err = ctl("status")
    assert (code, str(tmp_path) in err) == (2, True), err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_every_command(ctl: Ctl, shell: str) -> None:
    code, out, err = ctl("completion", shell)
    assert (code, err) == (0, "")
    for word in ("timerctl", "status", "redrive", "no-ack"):
        assert word in out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=out, text=True, check=True)
