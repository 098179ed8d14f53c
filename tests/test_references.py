"""The reference pages say what the code does: settings, metrics, options, in both directions."""

import argparse
import ast
import builtins
import re
import runpy
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.commands.chaos_commands import register_chaos
from chaos.sim.__main__ import make_parser
from cluster.api import wire_rows
from cluster.observe.busiest_topics import COUNTERS, GAUGES, TopicFigures
from cluster.observe.metrics import Levels, Telemetry
from cluster.rpc import openapi
from cluster.rpc.http_routes import ROUTES
from cluster.settings.config import TYPES, NodeConfig, build_config, flatten, shared_settings
from tests.parsing import parsed, statements
from tests.product_files import product
from timer.entries import policies
from timer.model.timer_errors import InvalidRequestError
from timerclient.cli.cli_errors import EXIT_MEANINGS
from timerclient.cli.timerctl import make_parser as make_ctl_parser
from timerclient.rows.rows import GROUP_NAME, TOPIC_NAME
from timerclient.values import errors

ROOT = Path(__file__).parent.parent


def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str) -> dict[str, list[str]]:
    """The rows of tables whose first cell is a name in code: that name -> the other cells."""
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    named = {row[0].strip("` "): row[1:] for row in cells}
    assert len(named) == len(cells), "no name twice"
    return named


def declared(part: type = NodeConfig, section: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Key and field of every setting."""
    for each in fields(part):
        if isinstance(each.type, type) and is_dataclass(each.type):
            yield from declared(each.type, f"{each.name}.")
        else:
            yield section + each.name, each


def number(cell: str) -> int:
    return int(re.fullmatch(r"`([0-9_]+)`", cell)[1])  # type: ignore[index]


def test_page_of_settings_has_each_with_its_default_and_range() -> None:
    told = rows(page("docs/settings.md").partition("## Names")[0].partition("## The node")[2])
    settings = dict(declared())
    assert told.keys() == settings.keys() == TYPES.keys(), "settings on docs/settings.md"
    for key, (unit, default, limits, meaning) in told.items():
        each = settings[key]
        if each.default_factory is dict:
            assert default == "`{}`", key
        elif each.default is MISSING:
            assert default == "must be set", key
        else:
            assert tomllib.loads(f"x = {default.strip('`')}") == {"x": each.default}, key
        if "range" in each.metadata:
            low, high = limits.split(" to ")
            assert (number(low), number(high)) == each.metadata["range"], key
            assert unit == ("ms" if "_ms" in key else "bytes/s" if "per_s" in key else unit), key
        assert meaning, key


def test_page_of_settings_names_those_of_a_single_node() -> None:
    text = page("docs/settings.md").partition("## Names")[0]
    same, _, others = text.partition("**Use the same settings on all nodes**")[2].partition(". ")
    assert others
    meanings = {key: cells[-1] for key, cells in rows(text.partition("## The node")[2]).items()}
    own = re.compile("address to bind |(name|PEM file) of this node|directory used by this node ")
    assert {*re.findall(r"`(\S+)`", same)} == {key for key in meanings if own.match(meanings[key])}
    unlike = others.partition("between machines of different sizes:")[2].partition("\n\n")[0]
    node = {"name": "n", "cluster_id": "c", "data": "d", "peers.n": "127.0.0.1:1"}
    compared = shared_settings(build_config(node))
    in_tables = {key for key in meanings if re.match(r"(timing|leadership|limits|groups)\.", key)}
    assert compared.keys() == in_tables - {*re.findall(r"`(\w+\.\w+)`", unlike)}


def test_page_of_settings_has_the_rules_of_names() -> None:
    names = page("docs/settings.md").partition("## Names")[2]
    for pattern in (TOPIC_NAME, GROUP_NAME):
        with pytest.raises(InvalidRequestError) as refused:
            wire_rows.check_name("name", "/", pattern)
        assert f"| {refused.value.limit.removeprefix('must be ')};" in names.replace("`", "")


def test_page_of_settings_has_each_field_of_a_policy() -> None:
    table = page("docs/settings.md").partition("## Policies")[2]
    listed = [cells.split(" | ")[0] for cells in re.findall(r"^\| (`.*)$", table, re.MULTILINE)]
    assert tuple(re.findall(r"`(\w+)`", " ".join(listed))) == policies.FIELDS, "on the page"


def test_page_of_metrics_has_each_with_its_type_and_labels() -> None:
    lag = ((("t", "g"), (1, 2)),)
    levels = Levels(
        lagging_groups=lag,
        late_topics=((("t",), (1,)),),
        fullest_quotas=lag,
        groups=lag,
        topics=(TopicFigures("t", (0,) * len(COUNTERS), (0,) * len(GAUGES)),),
        connections={"grpc": 1},
        connections_limits={"grpc": 1},
        clock_offsets=((("n1",), (1,)),),
    )
    telemetry = Telemetry(node="n1", version="1", read_levels=lambda: levels)
    telemetry.rpcs.on_answer("Cancel", "OK", relayed="yes", seconds=0.1)
    telemetry.rpcs.on_stream("Consume")
    telemetry.rpcs.on_stream_end("Consume", "OK", relayed="yes")
    telemetry.error("Cancel", "NOT_FOUND")
    telemetry.observe_step("step", 0.1)
    telemetry.certificates.not_after_s = lambda: {"ca": 1.0}
    telemetry.tokens.not_after_s = lambda: {"ci": 1.0}
    shown, unseen = {}, []
    for family in telemetry.registry.collect():
        unseen += [] if family.samples else [family.name]
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        labels.pop("le", None)
        shown[name + f"{{{','.join(labels)}}}" * bool(labels)] = family.type
    assert unseen == [], "give them a sample above: only a sample has the labels"
    alerts, _, reference = page("docs/metrics.md").partition("## State")
    told = {name: kind for name, (kind, _) in rows(reference).items()}
    assert told == shown, "docs/metrics.md on the left, the node on the right"
    names = {name.partition("{")[0] for name in shown} | {"timer_standby"}
    assert {*re.findall(r"timer_[a-z_]+", alerts)} <= names


def test_settings_of_the_readme_are_taken_from_other_machines() -> None:
    text, tls = re.findall(r"```toml\n(.*?)```", page("docs/deploy.md"), re.DOTALL)
    config = build_config(flatten(tomllib.loads(text)))
    assert config.insecure
    safe = build_config(
        flatten(tomllib.loads(text)) | {"insecure": False},
        flatten(tomllib.loads(textwrap.dedent(tls))),
    )
    assert safe.tls.on
    assert safe.link == safe.links[safe.name]
    for address in (config.grpc, config.http, *config.peers.values(), *safe.links.values()):
        assert address.startswith("10.0.0."), address
    assert config.grpc == config.peers[config.name]


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {each.option_strings[0] for each in parser._actions if each.option_strings} - {"-h"}


def test_figures_of_other_systems_in_the_readme_are_those_of_the_page() -> None:
    systems = [
        "timer-cluster, 3",
        "Redis, AOF always, alone",
        "Redis, AOF always, 2",
        "RabbitMQ",
        "NATS",
    ]
    killed = "kill of the leader at 2,000 due/s: latest message"
    told = dict.fromkeys(["batched scheduling, measured", killed], "")
    for line in page("README.md").splitlines():
        if (name := line.strip("| ").partition(" | ")[0]) in told:
            told[name] = line
    measured: dict[str, list[list[str]]] = {each: [] for each in systems}
    tables = page("docs/performance.md").partition("## Beside other systems")[2]
    for line in tables.splitlines():
        for each in systems:
            if line.startswith(f"| {each}") and "each write synced" not in line:
                measured[each].append(
                    [cell.split(" (")[0] for cell in line.strip("| ").split(" | ")]
                )
    rates = [float(measured[each][0][3].replace(",", "")) for each in systems]
    stated = re.findall(r"([\d,]+)/s", told["batched scheduling, measured"])
    assert stated == [f"{round(rate, -3):,.0f}" for rate in rates]
    kills = [measured[each][2] for each in systems if not each.startswith("Redis")]
    stated = re.findall(r"nothing lost, ([\d.]+) s late", told[killed])
    assert stated == [f"{float(kill[4].replace(',', '')) / 1000:.1f}" for kill in kills]
    assert all(kill[1:3] == ["0", "0"] for kill in kills), "nothing lost, nothing twice"


def test_page_of_proofs_has_each_option() -> None:
    suite, _, simulator = page("docs/chaos.md").partition("## The simulator")
    commands = argparse.ArgumentParser().add_subparsers()
    register_chaos(commands)
    chaos = commands.choices["chaos"]
    [actions] = [each.choices for each in chaos._actions if isinstance(each.choices, dict)]
    assert {*re.findall(r"^\| `(--[a-z]+)", suite, re.MULTILINE)} == options(actions["run"])
    assert {*re.findall(r"^timerctl chaos (\w+)", suite, re.MULTILINE)} == actions.keys()
    assert {*re.findall(r"^\| `(--[a-z]+)", simulator, re.MULTILINE)} == options(make_parser())


def test_pages_have_each_command_of_timerctl() -> None:
    pages = page("README.md") + "".join(each.read_text() for each in (ROOT / "docs").glob("*.md"))
    commands = make_ctl_parser().commands.choices
    assert [each for each in commands if f"timerctl {each}" not in pages] == []


def test_exit_codes_of_the_page_are_those_of_the_help() -> None:
    told = re.findall(
        r"^\| (\d+) \| (.*) \|$", page("docs/timerctl.md").partition("## Exit")[2], re.M
    )
    assert {int(code): meaning for code, meaning in told} == EXIT_MEANINGS


def test_pages_of_http_have_each_path_and_the_document_is_current() -> None:
    pages = page("docs/http.md") + page("docs/http-api.md")
    ends = {re.findall(r"/[a-z.-]+", each.path)[-1] for each in ROUTES}
    assert [each for each in sorted(ends) if each not in pages] == []
    assert page("docs/openapi.json") == openapi.text(), "`make fmt` writes it"


def test_site_has_lists_and_links_to_files_in_docs_and_other_links_become_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "mkdocs",
        "mkdocs.structure",
        "mkdocs.structure.files",
    ):  # not in requirements.lock
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(File=None, Files=None))
    hook = runpy.run_path(str(ROOT / "docs/site/outside.py"))["on_page_markdown"]

    def site_page(name: str) -> SimpleNamespace:
        return SimpleNamespace(file=SimpleNamespace(src_uri=name))

    def links(name: str) -> set[str]:
        text = hook(page(f"docs/{name}"), page=site_page(name))
        return {*re.findall(r"\]\(([^)#:]+)\)", text)}

    figures = {each.name for each in (ROOT / "docs").glob("*.svg")}
    assert {each for each in links("performance.md") if each.endswith(".svg")} == figures
    assert "openapi.json" in links("http.md")
    assert [each for each in links("metrics.md") if each.startswith("../")] == []
    a_list = hook("Two:\n1. a\n\n   ```\n   - b\n   ```\n2. c\nd", page=site_page("logs.md"))
    assert a_list == "Two:\n\n1. a\n\n    ```\n    - b\n    ```\n\n2. c\nd"


def test_page_of_logs_has_its_paths_of_http() -> None:
    told = {*re.findall(r"`(?:GET|PUT|POST) (/v1/\S+)`", page("docs/logs.md"))}
    ends = ("/log-level", "/stacks")
    paths = {each.path.replace("{node}", "NODE") for each in ROUTES if each.path.endswith(ends)}
    assert told == paths


def test_arguments_in_the_clients_docstrings_are_parameters() -> None:
    """The documentation's site is built strictly and fails otherwise."""
    wrong, seen = [], 0
    for path in (ROOT / "timerclient").rglob("*.py"):
        for node in statements(parsed(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            listed = re.search(r"^Args:\n((?:    .*\n?|\n)+)", ast.get_docstring(node) or "", re.M)
            names = re.findall(r"^    (\S.*?):", listed[1], re.M) if listed else []
            arguments = [*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            seen += len(names)
            known = {each.arg for each in arguments if each}
            wrong += [(path.name, node.name, name) for name in names if name not in known]
    assert seen > 20
    assert wrong == []


def test_docstrings_name_errors_that_are_there() -> None:
    known, listed = {*dir(builtins)}, []
    for path in product():
        for node in statements(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").partition("Raises:\n")[2]
                found = re.findall(r"^    ([A-Z][\w, ]*):", text, re.M)
                listed += [(path.name, each) for several in found for each in several.split(", ")]
    wrong = [(name, each) for name, each in listed if each not in known]
    assert len(listed) > 500
    assert wrong == []


def test_tree_of_errors_has_all() -> None:
    tree = re.findall(r"^ +(?:\|   )?\+-- (\w+) ", errors.__doc__ or "", re.M)
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    names = {each.__name__ for each in classes if issubclass(each, errors.TimerError)}
    assert {"TimerError", *tree} == names


def test_example_of_settings_loads_and_states_the_defaults() -> None:
    text = page("deploy/timerd.toml")
    adapted = flatten(tomllib.loads(text))
    chosen = build_config(adapted)
    assert {key for key in adapted if not key.startswith("peers.")} == {
        *("name", "cluster_id", "data", "http", "insecure", "replication"),
    }
    shown = re.sub(r"^#([a-z_]+ = )", r"\1", text, flags=re.MULTILINE)
    settings = flatten(tomllib.loads(shown))
    assert build_config(settings) == chosen, "each line that is commented out is a default"
    named = {key if not key.startswith("peers.") else "peers" for key in settings}
    assert named == TYPES.keys() - {"test_clock", "links"}, "lines of deploy/timerd.toml"
    assert "#[links]" in text
