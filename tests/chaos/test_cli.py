"""What the commands say of a wrong command line, or where they lack what they need."""

import builtins
import runpy
from pathlib import Path
from typing import Any

import pytest

from chaos.suite import suite_run
from timerclient.cli import timerctl


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--overdue-ms", "1", "--alerts", "a"], "audit: --alerts, --overdue-ms: only with --live"),
        (["--live", "--check-history"], "audit: --check-history: only without --live"),
        (["--live", "--horizon-ms", "0"], "live audit: --horizon-ms 0: must be above 0"),
        (["--live", "--stalled-ms", "-5"], "live audit: --stalled-ms -5: must be above 0"),
    ],
)
def test_option_that_would_do_nothing_is_refused(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timerctl.main(["audit", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err == says + "\n"


@pytest.mark.parametrize(
    "words", [["chaos", "list"], ["chaos", "run", "mix"], ["audit", "r"],
              ["audit", "r", "--live"], ["archive", "r"]],
)  # fmt: skip
def test_what_the_small_install_lacks_is_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = builtins.__import__

    def lacking(name: str, *more: Any) -> Any:
        if name.startswith("chaos."):
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
        return known(name, *more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    assert timerctl.main(words) == 2
    said = capsys.readouterr().err
    assert said == (
        "timerctl: needs numpy: pip install '.[server,audit]' in a clone of timer-cluster\n"
    )


def test_live_audit_of_a_folder_that_is_no_run_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "typo"
    assert timerctl.main(["audit", str(folder), "--live"]) == 2
    assert capsys.readouterr().err.startswith("live audit: ")
    assert not folder.exists()


def test_run_that_can_not_be_audited_is_not_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite_run, "execute", lambda *_: 0)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert timerctl.main(["chaos", "run", "mix", "--plain", "--dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"timerctl chaos: no java in JAVA_HOME = {tmp_path}")


def test_audit_without_spark_is_no_broken_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = builtins.__import__

    def lacking(name: str, *more: Any, **how: Any) -> Any:
        if name == "chaos.audit.command":
            raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")
        return known(name, *more, **how)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("chaos.audit", run_name="__main__")
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("audit: needs pyspark: pip install")


@pytest.mark.parametrize("words", [("audit",), ("chaos", "run")])
def test_help_lists_the_exit_codes(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        timerctl.main([*words, "--help"])
    assert "  3    INCOMPLETE: no guarantee was seen broken" in capsys.readouterr().out
