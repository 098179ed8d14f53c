"""Result files: one JSON per invocation, and the last figure of each kind.

    run/bench/20260301T120000Z-1a2b3c4.json
    {
      "format": 1, "utc": "20260301T120000Z", "commit": "1a2b3c4", "form": "short",
      "machine": {"cpu": ..., "cores": 2, "fdatasync_ms": 0.15, "packages": {...}, ...},
      "measures": {
        "s1": {
          "title": ..., "runs": 2, "busy_cores_before": 0.02, "error": null,
          "calibration_s": 0.085,
          "samples": {"rate_5s": [512300.0, 498000.0], ...},
          "figures": {"for 5 s": {"value": 505150.0, "unit": "timers/s", "must": ..., "aim": ...}}
        }
      }
    }

The last result of a figure comes from the newest file that contains it. bench/baseline.json, which
is under version control, counts as the oldest file. Measures with `audits` don't count: recording
their traffic has slowed them.
"""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import bench_machine
from bench.bench_audit import AuditOutcome
from bench.measure import Form, Measure, Series

FORMAT: Final = 1


@dataclass(slots=True)
class MeasureOutcome:
    """The results of one measure's runs."""

    measure: Measure
    runs: int = 0
    samples: Series = field(default_factory=dict)
    busy_cores_before: float = 0.0
    """Cores used by other work on this machine just before; such work distorts the figures."""
    calibrations_s: list[float] = field(default_factory=list)
    """Times of the calibration before, between and after the runs."""
    error: str | None = None
    """Reason why runs are missing. None: no run failed."""
    audits: list[AuditOutcome] = field(default_factory=list)
    """With --audit, one for each cluster whose runs all succeeded."""

    @property
    def calibration_s(self) -> float | None:
        """The median time of the calibration. None: it did not run."""
        return statistics.median(self.calibrations_s) if self.calibrations_s else None

    def add(self, series: Series) -> None:
        """Append the samples of one run."""
        self.runs += 1
        for name, samples in series.items():
            self.samples.setdefault(name, []).extend(samples)

    def values(self) -> dict[str, float]:
        """Return the value of each figure that has samples, by name."""
        return {
            figure.name: figure.value(samples)
            for figure in self.measure.figures
            if (samples := self.samples.get(figure.series))
        }

    def to_json(self) -> dict[str, Any]:
        """Return the measure as stored in a result file."""
        values = self.values()
        figures = {
            figure.name: {
                "value": values[figure.name],
                "unit": figure.unit,
                "must": figure.must,
                "aim": figure.aim,
            }
            for figure in self.measure.figures
            if figure.name in values
        }
        return {
            "title": self.measure.title,
            "runs": self.runs,
            "busy_cores_before": self.busy_cores_before,
            "error": self.error,
            "calibration_s": self.calibration_s,
            "samples": self.samples,
            "figures": figures,
            **({"audits": [*map(asdict, self.audits)]} if self.audits else {}),
        }


@dataclass(frozen=True, slots=True)
class LastValue:
    """A figure's value in an earlier result."""

    value: float
    calibration_s: float | None = None
    """The time of the calibration then. None: the file is older than the calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultHead:
    """Facts common to the results of one invocation."""

    utc: str
    """YYYYmmddTHHMMSSZ, which sorts by time."""
    commit: str
    form: Form
    machine: Mapping[str, object]

    @property
    def stem(self) -> str:
        """The name of its files without an extension."""
        return f"{self.utc}-{self.commit}"


def head_of(directory: Path, form: Form) -> ResultHead:
    """Return the head of an invocation that begins now.

    `directory`: the place of the results and of the nodes' data. It is made if it is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    machine = bench_machine.describe(directory)
    return ResultHead(utc=utc, commit=bench_machine.commit(), form=form, machine=machine)


def save(path: Path, head: ResultHead, outcomes: Sequence[MeasureOutcome]) -> None:
    """Write a result file; see `write`."""
    measures = {outcome.measure.name: outcome.to_json() for outcome in outcomes}
    write(path, {"format": FORMAT, **asdict(head), "measures": measures})


def write(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file atomically: a reader finds all of it or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def last_values(directory: Path, baseline: Path) -> dict[tuple[str, str], LastValue]:
    """Return the last value of each (measure, figure). Files of another format are ignored."""
    found: dict[tuple[str, str], LastValue] = {}
    for path in (baseline, *sorted(directory.glob("*.json"))):
        if not path.exists():
            continue
        content = json.loads(path.read_text())
        if content.get("format") != FORMAT:
            continue
        for name, measure in content["measures"].items():
            if measure.get("audits"):
                continue
            calibration_s = measure.get("calibration_s")
            for of, each in measure["figures"].items():
                found[name, of] = LastValue(each["value"], calibration_s)
    return found
