"""Fixtures of several files: the audit runs once for all planted cases, the workloads play once."""

import random
from typing import TYPE_CHECKING

import pytest

from chaos.history.history import RunFolder
from tests.chaos.world import Log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.chaos.audit_cases import Case
    from tests.chaos.told_lies import Audited


@pytest.fixture
def chance() -> random.Random:
    """A seeded source of random numbers."""
    return random.Random(1)


@pytest.fixture
def log() -> Log:
    """A log with an epoch and the topic `t`, which has the id 1."""
    log = Log()
    log.epoch(1)
    log.topic("t")
    return log


@pytest.fixture(scope="session")
def judged(
    spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory
) -> "tuple[dict[str, Case], DataFrame]":
    """All cases by name, each in a topic of its own, and the verdicts of their timers."""
    from tests.chaos.planted_cases import CASES, verdicts

    cases = {each.__name__: each() for each in CASES}
    table = verdicts(spark, tmp_path_factory.mktemp("rules"), [*cases.values()])
    return cases, table


@pytest.fixture(scope="session")
def audited(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> "Audited":
    """One run with all defects that need a whole run, and the audit's summary of it."""
    from chaos.audit import job
    from tests.chaos.audit_stories import lied, redriven, sought, write
    from tests.chaos.told_lies import Audited
    from tests.chaos.told_series import Recurred

    stories = {"lived": lied(), "redriven": redriven(), "sought": sought(), "recurred": Recurred()}
    run = write(tmp_path_factory.mktemp("lies"), stories.values())
    return Audited(job.audit(spark, run).summary, stories)


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a run of all workloads; its nodes are stopped."""
    from tests.chaos.workload_deeds import play

    return play(tmp_path_factory.mktemp("workloads"))
