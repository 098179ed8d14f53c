"""The audit of the benchmarks' own traffic (`python -m bench --audit`).

    the cluster runs      its clients are recorded, its logs archived, its nodes' counts polled
    clients, nodes ended  history and run.json are written beside the nodes' files
    afterwards            `python -m chaos.audit` judges every timer of the cluster

docs/audit.md describes the verdicts, and the files of a run.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.recording import CLIENT, Recording, now_ms
from chaos.history.archive import Archive
from chaos.history.history import CLIENTS_ERROR, CLOCK_ERROR, FaultTimeline, RunFolder
from chaos.suite.stage.states import StateRecorder
from deploy.local import LocalCluster

CLOCK_ERROR_MS: Final = 1_000
"""Clients and nodes share the clock of one machine; a new leader's may be late (chaos/suite)."""
AUDIT: Final = (sys.executable, "-m", "chaos.audit")
SUMMARY_FIELDS: Final = (
    *("verdict", "violations", "not_looked_at", "scheduled", "pending", "fired", "delivered"),
    *("redelivered", "failovers"),
)
"""Fields of the audit's summary that go into the results."""


class Evidence:
    """Collects the evidence of one running cluster, in its own directory."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.recording = Recording()
        self._cluster, self._run = cluster, RunFolder(cluster.directory)
        self._faults = FaultTimeline(self._run)
        nodes = cluster.nodes
        self._archive = Archive(
            {
                name: (cluster.directory / node.data / "log", self._run.archive_of(name))
                for name, node in nodes.items()
            }
        )
        self._states = StateRecorder(self._run, {name: node.grpc for name, node in nodes.items()})

    def fault(self, event: str, node: str, **more: Any) -> None:
        """Record that a node was killed, or restarted; see chaos/history/history.py."""
        self._faults.record(event, at_ms=now_ms(), node=node, **more)

    def close(self) -> None:
        """Stop the nodes in good order and write the rest. End the clients first."""
        self._states.close()
        self._cluster.stop()
        self._archive.close()
        self._faults.close()
        self.recording.write(self._run.histories / f"{CLIENT}.parquet")
        self._run.about.write_text(json.dumps({CLOCK_ERROR: CLOCK_ERROR_MS, CLIENTS_ERROR: 0}))


@dataclass(frozen=True, slots=True)
class AuditOutcome:
    """The result of one audit."""

    took_s: float
    summary: dict[str, Any] = field(default_factory=dict)
    """KEPT of the audit's summary; empty: there was no audit."""
    error: str = ""
    """The reason why there was none."""

    @property
    def ok(self) -> bool:
        """Whether every promise was kept, with all evidence."""
        return self.summary.get("verdict") == "OK"

    def text(self) -> str:
        """Return the result in one line."""
        if not self.summary:
            return f"failed: {self.error}"
        counts = ", ".join(f"{self.summary[name]:,} {name}" for name in SUMMARY_FIELDS[3:])
        why = [f"{count:,} {name}" for name, count in self.summary["violations"].items()]
        why += [f"not judged: {each}" for each in self.summary["not_looked_at"]]
        return "; ".join([f"{self.summary['verdict']}, {counts}, in {self.took_s:.0f} s", *why])


def audit(directory: Path) -> AuditOutcome:
    """Audit a cluster whose evidence was collected. The audit's own files are added to it."""
    began_s = time.monotonic()
    done = subprocess.run([*AUDIT, str(directory)], capture_output=True, text=True, check=False)
    took_s, path = time.monotonic() - began_s, RunFolder(directory).audit / "summary.json"
    if done.returncode == 2 or not path.exists():
        return AuditOutcome(took_s, error=done.stderr.strip())
    summary = json.loads(path.read_text())
    return AuditOutcome(took_s, {name: summary[name] for name in SUMMARY_FIELDS})
