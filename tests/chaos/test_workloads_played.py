"""All workloads against a real cluster: each does what its line says."""

from collections import Counter

import pytest

from chaos import workloads
from chaos.history.history import RunFolder
from chaos.history.history_check import check
from chaos.workloads import kinds
from tests.chaos.workload_deeds import RATE_PER_S, SECONDS, Deeds, flat, undone

pytestmark = pytest.mark.long  # plays all workloads; `make chaos-short` plays them, too


def test_histories_of_all_workloads_are_right(played: RunFolder) -> None:
    problems = [str(p) for path in played.histories.iterdir() for p in check(path)]
    assert problems == []
    did = Deeds(played)
    marks = flat(did.of("", "schedule"), "marks")
    assert len({*marks}) == len(marks) > 0.5 * SECONDS * RATE_PER_S
    topics = {line["topic"].rpartition("/")[2] for line in did.of("", "schedule")}
    assert topics == {*workloads.KINDS}


def test_each_workload_did_what_its_line_says(played: RunFolder) -> None:
    did = Deeds(played)
    assert undone(did) == []
    end_ms = max(line["received_ms"] for line in did.of("", "deliver"))
    beyond = [due > end_ms + kinds.DAY_MS / 2 for due in flat(did.asked("longtail"), "due_ms")]
    assert 0 < sum(beyond) < len(beyond) / 2
    past = [due < line["start_ms"] for line in did.asked("pastdue") for due in line["due_ms"]]
    assert sum(past) > len(past) / 2
    assert all(line["keys"] for op in ("cancel", "reschedule") for line in did.of("keyed-", op))
    # What is asked for after the horizon is due within a second: no herd.
    herds = Counter(
        due // 1000
        for line in did.asked("herd")
        for due in line["due_ms"]
        if due > line["start_ms"] + 1000
    )
    assert max(herds.values()) >= herds.total() / 3
