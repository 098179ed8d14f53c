"""The tables and parameters of planted runs, for the queries of rules."""

from pyspark.sql import DataFrame, Row

from chaos.audit.job import tell_times
from chaos.audit.rules.queries import RunEvidence, Tables
from chaos.audit.rules.verdict import Clocks


def evidence_of(lines: DataFrame, story: Tables, epochs: list[Row], clocks: Clocks) -> RunEvidence:
    """Return what rules read."""
    evidence = RunEvidence(story | {"lines": lines})
    tell_times(evidence, epochs, clocks)
    return evidence
