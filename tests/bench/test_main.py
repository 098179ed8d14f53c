"""The command: what is chosen, on which clusters it runs, and what a failure leaves."""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import bench_audit, bench_results
from bench.bench_audit import AuditOutcome
from bench.measure import Form, Measure, Series, rate
from bench.rig import BenchError, Rig
from deploy.local import LocalCluster


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of the clusters that would have been started."""
    made: list[Path] = []

    @contextlib.contextmanager
    def fake_rig(directory: Path, loop: asyncio.Runner, *, evidence: bool) -> Iterator[Rig]:
        made.append(directory)
        if evidence:
            directory.mkdir(parents=True)
        yield Rig(LocalCluster(directory), loop)

    monkeypatch.setattr(command, "new_rig", fake_rig)
    monkeypatch.setattr(command, "POLL_INTERVAL_S", 0.0)
    return made


def make_measure(
    name: str, rates: list[float], *, fresh: bool = False, recorded: bool = False
) -> Measure:
    """Return a measure whose runs give these rates, then fail."""
    left = [*rates]

    def run(rig: Rig, form: Form) -> Series:
        if not left:
            raise BenchError("nothing left")
        return {"rate": [left.pop(0)]}

    figures = (rate("rate", "rate", "timers/s", 2, 4),)
    runs = {Form.SHORT: 3, Form.FULL: 5}
    return Measure(
        name=name, title=name, run=run, figures=figures, runs=runs, fresh=fresh, recorded=recorded
    )


def use(monkeypatch: pytest.MonkeyPatch, *measures: Measure) -> None:
    monkeypatch.setattr(command, "MEASURES", {each.name: each for each in measures})
    monkeypatch.setattr(command, "calibration_s", lambda: 0.1)


def only_result(directory: Path) -> dict[str, object]:
    [path] = directory.glob("*.json")
    measures: dict[str, object] = json.loads(path.read_text())["measures"]
    return measures


def test_chosen_measures_run_on_shared_or_fresh_clusters(
    tmp_path: Path, rigs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(
        monkeypatch,
        make_measure("s1", [1.0, 2.0, 3.0], fresh=True),
        make_measure("s2", [1.0]),
        make_measure("s3", [1.0, 2.0, 3.0]),
    )
    assert command.main(["--only", "s3,S1", "--dir", str(tmp_path)]) == 0
    assert [each.name.partition("Z-")[2] for each in rigs] == ["s1-1", "s1-2", "s1-3", "s3-1"]
    measures = only_result(tmp_path)
    assert [*measures] == ["s1", "s3"]


def test_a_failure_keeps_earlier_runs_and_the_other_measures(
    tmp_path: Path,
    rigs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, make_measure("s1", [1.0, 2.0]), make_measure("s2", [5.0, 6.0, 7.0]))
    assert command.main(["--dir", str(tmp_path)]) == 1
    measures = only_result(tmp_path)
    assert [(m["runs"], m["error"]) for m in measures.values()] == [  # type: ignore[index]
        (2, "BenchError: nothing left"),
        (3, None),
    ]
    printed = capsys.readouterr().out
    assert "failed: BenchError: nothing left" in printed
    assert "reaches the aim" in printed


@pytest.mark.parametrize(("full", "runs"), [("", 3), ("full", 5)])
def test_the_environment_chooses_the_form(
    full: str, runs: int, tmp_path: Path, rigs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH", full)
    use(monkeypatch, make_measure("s1", [1.0] * runs))
    assert command.main(["--dir", str(tmp_path)]) == 0
    assert only_result(tmp_path)["s1"]["runs"] == runs  # type: ignore[index]


def test_the_next_table_shows_the_last_result(
    tmp_path: Path,
    rigs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, make_measure("s1", [3.0, 6.0]))
    assert command.main(["--repeat", "1", "--dir", str(tmp_path)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(command, "calibration_s", lambda: 0.2)  # half the machine's speed
    assert command.main(["--repeat", "1", "--dir", str(tmp_path)]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "timers/s" in line]
    assert row[1:4] == ["6", "3", "4.00"]


def test_an_audit_follows_the_runs_of_each_cluster(
    tmp_path: Path,
    rigs: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    violations: list[dict[str, int]] = [{}, {"lost": 2}]

    def fake_audit(directory: Path) -> AuditOutcome:
        assert directory in rigs
        found = violations.pop(0)
        counts = dict.fromkeys(bench_audit.SUMMARY_FIELDS, 7)
        verdict = "VIOLATED" if found else "OK"
        summary = {"verdict": verdict, "violations": found, "not_looked_at": []}
        return AuditOutcome(3.0, counts | summary)

    monkeypatch.setattr(command, "audit", fake_audit)
    use(
        monkeypatch,
        make_measure("s1", [1.0, 2.0, 3.0], recorded=True),
        make_measure("s2", [1.0, 2.0, 3.0]),
        make_measure("s3", [1.0, 2.0, 3.0], recorded=True),
    )
    assert command.main(["--audit", "--dir", str(tmp_path)]) == 1
    measures: dict[str, Any] = only_result(tmp_path)
    told = {n: [a["summary"]["violations"] for a in m["audits"]] for n, m in measures.items()}
    assert told == {"s1": [{}], "s3": [{"lost": 2}]}
    assert [each.exists() for each in rigs] == [False, True]
    assert "audit: VIOLATED, 7 scheduled" in capsys.readouterr().out
    assert bench_results.last_values(tmp_path, tmp_path / "none.json") == {}
    with pytest.raises(SystemExit):
        command.main(["--audit", "--only", "s1,s2", "--dir", str(tmp_path)])
    assert "--only s2: can't be audited; these can: s1, s3" in capsys.readouterr().err


def test_unknown_measures_are_refused_by_name() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: s99; known: s1, "):
        command._measures_of("s1,s99")


@pytest.mark.parametrize(
    "arguments", [["--repeat", "0"], ["--repeat", "-1"], ["stages", "--runs=x"]]
)
def test_a_number_of_runs_is_at_least_one(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "must be 1 or more" in capsys.readouterr().err
