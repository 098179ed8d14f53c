"""What all tests share: scenario files that rewrite themselves, and one Spark session."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Spark's settings for tables of some rows: compiling a query takes longer than running it."""
PARTS: Final = "spark.sql.shuffle.partitions"

LONGEST: Final = (
    "spark",
    "tests/chaos/test_sim_planted.py",
    "tests/chaos/test_suite_nemeses.py",
    "tests/conformance",
    "tests/hostile",
    "tests/timer/test_machine.py",
    "tests/cluster/test_failures.py",
    "tests/cluster/test_timerd.py",
    "tests/timer/test_store.py",
    "tests/timer/test_compaction.py",
    "tests/cluster/test_healing.py",
    "tests/cluster/test_seen.py",
    "tests/cluster/test_cluster.py",
)
"""Units of work that take longest, longest first: one that begins last ends alone."""
ROOT: Final = Path(__file__).parent.parent

# Spark's launcher forks through Python's preexec_fn. Since 1.81 gRPC's fork handlers can end that
# child before its exec, when calls are under way in this process (grpc/grpc#43055). Nothing here
# forks without an exec. gRPC reads this when it is imported: before any test's module.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# How long an example takes says something of the machine alone.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


def pytest_configure() -> None:
    """Each worker has ports of its own: what one has chosen and not bound, no other takes."""
    from deploy import local

    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    local._PORTS = local._PORTS[worker::workers]  # type: ignore[misc]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite scenario expectations")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether scenario files take over what they got (then read git diff)."""
    return bool(request.config.getoption("--rewrite"))


@cache
def why_no_spark() -> str | None:
    """Return why Spark can't run here, None if it can."""
    java = shutil.which("java")
    if java is None:
        return f"no java on the PATH; Spark needs Java {JAVA_MIN} or newer"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < JAVA_MIN:
        first = said.splitlines()[:1]
        return f"java on the PATH is {first}; Spark needs Java {JAVA_MIN} or newer"
    return None


@cache
def unit_of(path: str) -> str:
    """Return what the tests of a file share that is dear to start; else it is on its own.

    The cluster of a folder's tests, or a JVM, which then compiles only once what it runs.
    """
    for folder in ("tests/conformance", "tests/hostile"):
        if path.startswith(f"{folder}/"):
            return folder
    return "spark" if "pytest.mark.spark" in (ROOT / path).read_text() else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a worker gets whole units instead of files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = lambda test: unit_of(test.partition("::")[0])
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark") is None:
            continue
        for warning in ("Deprecation", "Resource", "Future"):  # of pyspark's own making
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{warning}Warning"))
        if why := why_no_spark():
            item.add_marker(pytest.mark.skip(reason=why))
    ranks = {unit: rank for rank, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(unit_of(item.location[0]), len(ranks)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "spark" in r.keywords]
    if skipped:
        terminalreporter.write_sep("!", f"{len(skipped)} SPARK TESTS SKIPPED", red=True, bold=True)
        terminalreporter.write_line(f"THE AUDIT WAS NOT TESTED: {why_no_spark()}", red=True)


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """One Spark session for all tests that are marked `spark`."""
    from chaos.spark.session import spark_session

    session = spark_session("tests", quick=True, settings={**INTERPRETED, PARTS: "1"})
    yield session
    session.stop()
