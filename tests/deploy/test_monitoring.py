"""Dashboard and alerts name what a node exports, and each alert has its entry in the runbook."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client import Gauge

from cluster.observe.metrics import Levels, Telemetry
from tests.deploy.kubernetes import call

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy/monitoring/rules.yaml"
CASES: Final = sorted(Path(__file__).parent.glob("alerts*_test.yaml"))
DASHBOARD: Final = ROOT / "deploy/monitoring/dashboard.json"
ALERTS: Final = re.findall(
    r"^      - alert: (\w+)\n        expr: (.+)\n(?:        for: \w+\n)?"
    r"        labels:\n          severity: (critical|warning)\n"
    r'        annotations:\n          summary: "(.+)"\n          runbook_url: (\S+)$',
    RULES.read_text(),
    re.MULTILINE,
)
"""Name, expression, severity, summary and runbook of each alert."""


def exported() -> set[str]:
    """Return the names of all series of a node, or of one that waits (`Standby`)."""
    telemetry = Telemetry(node="n1", version="1", read_levels=Levels)
    Gauge("timer_standby", "", ["role"], registry=telemetry.registry)
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    return {
        family.name + suffix
        for family in telemetry.registry.collect()
        for suffix in suffixes.get(family.type, ("_info",) if family.type == "info" else ("",))
    }


def unknown(expression: str) -> set[str]:
    """Return the metrics of an expression that no node exports."""
    return {*re.findall(r"\b(?:timer|process)_\w+(?=\W)", expression + " ")} - exported()


def expressions() -> Iterator[str]:
    """Yield the expressions of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_alerts_name_metrics_of_a_node() -> None:
    assert len(ALERTS) == RULES.read_text().count("- alert:") > 10, "all are of this form"
    assert {name: unknown(expr) for name, expr, *_ in ALERTS if unknown(expr)} == {}


def test_dashboard_names_metrics_of_a_node() -> None:
    named = [*expressions()]
    assert len(named) > 40
    labels = {"timer_role"}  # a label of the metric, too
    assert {each: unknown(each) - labels for each in named if unknown(each) - labels} == {}
    assert all('namespace=~"$namespace",job=~"$job"' in each for each in named)


def test_dashboard_shows_one_cluster() -> None:
    variables = {
        each["name"]: each for each in json.loads(DASHBOARD.read_text())["templating"]["list"]
    }
    job = variables["job"]
    assert (job["includeAll"], job["multi"], job["current"]) == (False, False, {})
    assert not [each for each in expressions() if "scalar" in each], "the same job elsewhere"


def test_dashboard_has_panels_that_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_each_alert_has_its_entry_in_the_runbook_and_its_line_in_the_reference() -> None:
    page = (ROOT / "docs/runbook.md").read_text()
    entries = dict(re.findall(r"^### (Timer\w+)\n+(\S.*)$", page, re.MULTILINE))
    assert [*entries] == [name for name, *_ in ALERTS], "entries of docs/runbook.md, in order"
    assert {name: url for name, *_, url in ALERTS} == {
        name: f"docs/runbook.md#{name.lower()}" for name in entries
    }
    reference = (ROOT / "docs/metrics.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\(runbook\.md#(\w+)\) \| (\w+) \|", reference, re.MULTILINE)
    wanted = [(name, name.lower(), severity) for name, _, severity, *_ in ALERTS]
    assert listed == wanted, "lines of docs/metrics.md, in order"


def test_alerts_on_kubernetes_are_the_same() -> None:
    rule = ROOT / "deploy/kubernetes/components/monitoring/prometheus-rule.yaml"
    _, _, groups = rule.read_text().partition("\nspec:\n")
    indented = re.sub("^(?=.)", "  ", RULES.read_text(), flags=re.MULTILINE)
    assert groups == indented, "make fmt writes the file"
    assert (ROOT / "deploy/helm/timer-cluster/rules.yaml").read_text() == RULES.read_text()


def test_each_alert_has_a_case() -> None:
    cases = "".join(each.read_text() for each in CASES)
    assert [name for name, *_ in ALERTS if not re.search(rf"\b{name}\b", cases)] == []


def test_alerts_fire_at_their_thresholds() -> None:
    call("promtool", "check", "rules", str(RULES))
    call("promtool", "test", "rules", *map(str, CASES))


def test_expressions_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": each.replace("$__rate_interval", "1m")}
        for number, each in enumerate(expressions())
    ]
    file = tmp_path / "rules.json"  # which is YAML, too
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    call("promtool", "check", "rules", "--lint=none", str(file))
