"""Fixtures of all tests: rewriting of scenario files, a topic, figures, and one Spark session."""

import contextlib
import gc
import importlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
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
"""Spark's settings for small tables, where compiling a query takes longer than running it."""
UNSEEN = {
    # Each execution writes its plans out for the pages of Spark's interface.
    "spark.sql.ui.explainMode": "simple",
    # Each rule of the analyzer and the optimizer is followed by checks of the whole plan.
    "spark.sql.lightweightPlanChangeValidation": "false",
}
"""Spark's settings that leave out work for nothing."""
PARTS: Final = "spark.sql.shuffle.partitions"

LONGEST: Final = (
    "spark",
    "tests/conformance",
    "tests/hostile",
    "tests/cluster/test_failures.py",
    "tests/chaos/test_suite_run.py",
    "tests/cluster/test_control_plane.py",
    "tests/chaos/test_sim_planted.py",
    "tests/chaos/test_suite_failing.py",
    "tests/cluster/test_failovers.py",
    "tests/timerclient/test_scheduling.py",
    "tests/cluster/test_keepalive.py",
    "tests/cluster/test_seen.py",
    "tests/cluster/test_slow_work.py",
    "tests/cluster/test_cluster.py",
    "tests/cluster/test_page_live.py",
    "tests/cluster/test_policies.py",
    "tests/cluster/test_healing.py",
    "tests/cluster/test_changes.py",
    "tests/timer/test_run.py",
    "tests/cluster/test_quotas.py",
)
"""The longest units of work, longest first. A long unit that begins last would run alone."""
CHROMIUMS: Final = ("chromium", "chromium-browser", "google-chrome")
"""Names of a browser for the tests with the mark `chromium`."""
NO_CHROMIUM: Final = (
    f"none of {', '.join(CHROMIUMS)} on the PATH (Debian: apt-get install chromium)"
)
ROOT: Final = Path(__file__).parent.parent
WORKER: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
YOUNG: Final = 10_000
"""Objects that Python allocates between two visits of its collector; 700 by default."""


class _Loggers(dict[str, Any]):
    """All loggers. pytest walks over them around each test, and a thread may make one meanwhile."""

    def values(self) -> Any:
        return list(super().values())


logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)

# Spark's launcher forks through Python's preexec_fn. Since 1.81 gRPC's fork handlers can end that
# child before its exec, if calls are under way in this process (grpc/grpc#43055). No code here
# forks without an exec. gRPC reads this variable on import, so it is set before any test's module.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

# The duration of an example depends only on the machine, so Hypothesis must not judge it.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


def pytest_configure() -> None:
    """Give each worker its own ports, so that no other worker binds a port that one has chosen.

    SIGINT raises KeyboardInterrupt, also in a background job, whose shell lets it ignore SIGINT.
    """
    from deploy import local

    signal.signal(signal.SIGINT, signal.default_int_handler)

    local._PORTS = local._PORTS[WORKER::WORKERS]  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep the modules and tests out of all later visits of the collector: they live to the end."""
    gc.disable()
    if WORKERS > 1 and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        import_tests()
    yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG, 10, 10)


def import_tests() -> None:
    """Import the test modules, those of this worker's share first.

    A fresh clone has no byte code. Each worker compiles its share and reads the other shares from
    the files that the other workers wrote. The collector reports the errors.
    """
    paths = sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py"))
    begin = len(paths) * WORKER // WORKERS
    for path in paths[begin:] + paths[:begin]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.with_suffix("").parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="rewrite scenario expectations")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether scenario files are rewritten with the actual output; read git diff afterwards."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic's name, unique to the test."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print figures past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n    {text}")

    return say


@cache
def why_no_spark() -> str | None:
    """Return the reason why Spark can't run here. None: it can."""
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
    """Return the name of the unit of work of a test file: its folder, "spark" or the file itself.

    The files of a unit share a cluster or a JVM, because both are expensive to start.
    """
    for folder in ("tests/conformance", "tests/hostile"):
        if path.startswith(f"{folder}/"):
            return folder
    return "spark" if "pytest.mark.spark" in (ROOT / path).read_text() else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole units instead of files, with `--dist loadfile`. None: without."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = lambda test: unit_of(test.partition("::")[0])
    return scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("chromium") is not None and not any(
            map(shutil.which, CHROMIUMS)
        ):
            item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
        if item.get_closest_marker("spark") is None:
            continue
        for warning in ("Deprecation", "Resource", "Future"):  # pyspark itself raises these
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{warning}Warning"))
        if why := why_no_spark():
            item.add_marker(pytest.mark.skip(reason=why))
    ranks = {unit: rank for rank, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(unit_of(item.nodeid.partition("::")[0]), len(ranks)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "spark" in r.keywords]
    if skipped:
        terminalreporter.write_sep("!", f"{len(skipped)} SPARK TESTS SKIPPED", red=True, bold=True)
        terminalreporter.write_line(f"THE AUDIT WAS NOT TESTED: {why_no_spark()}", red=True)
    if any("chromium" in r.keywords for r in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_sep("!", "THE STATUS PAGE WAS NOT TESTED", red=True, bold=True)
        terminalreporter.write_line(NO_CHROMIUM, red=True)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Name -> user and group to whom the process gave it, as if root ran it in a directory of 4242.

    Nothing is given away: the test runs as any user. All directories are of 4242.
    """
    found = dict[str, tuple[int, int]]()
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = real(fd)
        owner = (4242, 4243) if stat.S_ISDIR(status.st_mode) else (0, 0)
        return os.stat_result((*status[:4], *owner, *status[6:]))

    def chown(fd: int, user: int, group: int) -> None:
        found[Path(os.readlink(f"/proc/self/fd/{fd}")).name] = (user, group)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "fstat", fstat)
    return found


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """One Spark session for all tests with the mark `spark`."""
    from chaos.spark.session import spark_session

    session = spark_session("tests", quick=True, settings={**INTERPRETED, **UNSEEN, PARTS: "1"})
    yield session
    session.stop()
