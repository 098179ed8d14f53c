"""Result files: written whole, and the last value of each figure found again."""

import json
from pathlib import Path

from bench.bench_results import LastValue, MeasureOutcome, ResultHead, last_values, save
from bench.measure import Figure, Form, Measure, Series, cost, rate
from bench.rig import Rig


def no_run(rig: Rig, form: Form) -> Series:
    raise AssertionError("nothing runs here")


def make_outcome(name: str = "s1", **samples: list[float]) -> MeasureOutcome:
    figures: tuple[Figure, ...] = (
        rate("for 5 s", "rate", "timers/s", 500, 1_000),
        cost("p50", "p50", "ms"),
    )
    measure = Measure(name=name, title="ingest", run=no_run, figures=figures, runs={Form.SHORT: 1})
    outcome = MeasureOutcome(measure)
    if samples:
        outcome.add(samples)
    return outcome


def head(utc: str, commit: str = "abc") -> ResultHead:
    return ResultHead(utc=utc, commit=commit, form=Form.SHORT, machine={"cores": 2})


def put(directory: Path, utc: str, outcome: MeasureOutcome) -> None:
    save(directory / f"{head(utc).stem}.json", head(utc), [outcome])


def test_runs_add_up_to_samples_and_figures() -> None:
    outcome = make_outcome(rate=[700.0], unnamed=[1.0])
    outcome.add({"rate": [500.0], "unnamed": [2.0]})
    assert outcome.runs == 2
    assert outcome.samples == {"rate": [700.0, 500.0], "unnamed": [1.0, 2.0]}
    assert outcome.values() == {"for 5 s": 600.0}


def test_a_file_holds_samples_figures_machine_and_commit(tmp_path: Path) -> None:
    outcome = make_outcome(rate=[700.0, 500.0])
    outcome.error = "BenchError: lost some"
    outcome.calibrations_s = [0.3, 0.1, 0.2]
    put(tmp_path, "20260101T000000Z", outcome)
    [path] = tmp_path.iterdir()
    assert path.name == "20260101T000000Z-abc.json"
    content = json.loads(path.read_text())
    assert (content["commit"], content["form"]) == ("abc", "short")
    assert content["machine"] == {"cores": 2}
    measure = content["measures"]["s1"]
    assert measure["samples"] == {"rate": [700.0, 500.0]}
    assert measure["error"] == "BenchError: lost some"
    assert measure["calibration_s"] == 0.2
    [last] = last_values(tmp_path, tmp_path / "none").values()
    assert last == LastValue(600.0, 0.2)
    figure = {"value": 600.0, "unit": "timers/s", "must": 500, "aim": 1_000}
    assert measure["figures"] == {"for 5 s": figure}


def test_the_last_value_is_the_newest_files_that_has_the_figure(tmp_path: Path) -> None:
    put(tmp_path, "20260101T000000Z", make_outcome(rate=[1.0], p50=[9.0]))
    put(tmp_path, "20260102T000000Z", make_outcome(rate=[2.0]))
    put(tmp_path, "20260103T000000Z", make_outcome(name="s3", rate=[3.0]))
    assert last_values(tmp_path, tmp_path / "none") == {
        ("s1", "for 5 s"): LastValue(2.0),
        ("s1", "p50"): LastValue(9.0),
        ("s3", "for 5 s"): LastValue(3.0),
    }


def test_the_baseline_is_older_than_any_result(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    save(baseline, head("20990101T000000Z"), [make_outcome(rate=[1.0], p50=[9.0])])
    found = tmp_path / "found"
    found.mkdir()
    assert last_values(found, baseline)["s1", "for 5 s"] == LastValue(1.0)
    put(found, "20260101T000000Z", make_outcome(rate=[2.0]))
    assert last_values(found, baseline) == {
        ("s1", "for 5 s"): LastValue(2.0),
        ("s1", "p50"): LastValue(9.0),
    }


def test_files_of_another_format_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "20260101T000000Z-abc.json").write_text('{"format": 0, "measures": {"s1": 1}}')
    assert last_values(tmp_path, tmp_path / "none") == {}
