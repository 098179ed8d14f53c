"""Cancels, keys and reschedules on a real cluster, as the live audit is told of them."""

import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from chaos import workloads
from chaos.history.history import RunFolder
from chaos.live import export, exported_events, judge
from chaos.live.exported_events import EventKind
from chaos.live.witness import witness
from tests.chaos.test_judge import Court
from tests.chaos.told import EventFiles
from tests.cluster.running import Running, until

TOPICS = ["cancels", "keyed", "moved"]
SECONDS = 5.0
RATE_PER_S = 120
OVERDUE_MS = 30_000
"""More than any pause of a busy machine; the clock is moved on by the test."""
KINDS = (EventKind.SCHEDULED, EventKind.CANCELLED, EventKind.RACED, EventKind.GIVEN)
MANY = 10
UNTIL_S = 120.0
"""For what takes seconds on an idle machine."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[pa.Table]:
    """The events of a run of some seconds, one table a file, in the order in which they came."""
    run = RunFolder(tmp_path_factory.mktemp("changes"))
    into = run.root / "events"
    files = EventFiles(into)
    over = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Any) -> threading.Thread:
        def body() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    with Running(run.root).cleaned() as cluster:
        with cluster.client() as client:
            for topic in TOPICS:
                client.create_topic(topic)
        exporter = export.open_exporter(run.data(), into)

        def follow() -> None:
            while not over.is_set():
                exporter.step(time.monotonic())
                over.wait(0.05)

        threads = [
            guarded(follow),
            guarded(lambda: witness(cluster.endpoints, TOPICS, into, stopped=over.is_set)),
        ]
        works = workloads.make(
            TOPICS, run=run, endpoints=lambda: cluster.endpoints, seed=2,
            rate_per_s=RATE_PER_S, horizon_s=SECONDS,
        )  # fmt: skip
        try:
            until(lambda: failures or _watched(files) == {*TOPICS}, timeout_s=UNTIL_S)
            for work in works:
                work.start()
            time_up_ms = exported_events.now_ms() + int(1000 * SECONDS)
            until(lambda: failures or exported_events.now_ms() > time_up_ms, timeout_s=UNTIL_S)
            until(lambda: failures or _many_of_each(files), timeout_s=UNTIL_S)
            for work in works:
                work.stop_producing()
            for work in works:
                until(work.drained, timeout_s=UNTIL_S)
            end_ms = exported_events.now_ms()
            until(lambda: failures or _told_all(files, end_ms), timeout_s=UNTIL_S)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
            for work in works:
                work.close()
        assert not failures, failures
    paths = sorted(into.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    return [pq.read_table(path, schema=exported_events.ARROW) for path in paths]


def _watched(files: EventFiles) -> set[str]:
    return {row["topic"] for row in files.of(EventKind.REACH)}


def _many_of_each(files: EventFiles) -> bool:
    return all(len(files.of(kind)) > MANY for kind in KINDS)


def _told_all(files: EventFiles, upto_ms: int) -> bool:
    """Whether all that was scheduled by then is told, and all of it that has to come came."""
    if files.clock_ms() <= upto_ms:
        return False
    expected = files.seqs(EventKind.SCHEDULED) - files.seqs(EventKind.CANCELLED, EventKind.RACED)
    return expected <= files.seqs(EventKind.GIVEN)


def judged(tables: list[pa.Table]) -> list[judge.Alert]:
    """Return the alerts of a judge that is given the tables one after the other, and then time."""
    court = Court(OVERDUE_MS)
    alerts: list[judge.Alert] = []
    for table in tables:
        court.told.append(table)
        alerts += court.step()
    clocks = [table.filter(pc.equal(table["kind"], int(EventKind.CLOCK))) for table in tables]
    last = pa.concat_tables(clocks).to_pylist()[-1]
    moved = {
        name: value for name, value in last.items() if name not in ("kind", *exported_events.TEXTS)
    }
    for later_ms in (last["at_ms"] + 2 * OVERDUE_MS, last["at_ms"] + 4 * OVERDUE_MS):
        for topic in TOPICS:
            court.tell(EventKind.REACH, topic=topic, read_ms=later_ms, at_ms=later_ms)
        court.tell(EventKind.CLOCK, **moved | {"at_ms": later_ms, "read_ms": later_ms})
        alerts += court.step()
    return alerts


@pytest.mark.slow
def test_changes_under_way_raise_no_alert(told: list[pa.Table]) -> None:
    assert judged(told) == []
    kinds = np.concatenate([table["kind"].to_numpy() for table in told])
    for kind in KINDS:
        assert np.count_nonzero(kinds == kind) > MANY, kind


@pytest.mark.slow
def test_loss_of_what_was_moved_by_its_key_is_raised(told: list[pa.Table]) -> None:
    tables = [table.to_pandas() for table in told]
    given = {seq for table in tables for seq in table[table["kind"] == EventKind.GIVEN]["seq"]}
    excused = {seq for table in tables for seq in table[table["kind"] == EventKind.RACED]["seq"]}
    keyed = [
        int(seq)
        for table in tables
        for seq in table[(table["kind"] == EventKind.SCHEDULED) & (table["topic"] == "keyed")][
            "seq"
        ]
        if seq in given - excused
    ]
    lost = keyed[len(keyed) // 2]
    without = [
        pa.Table.from_pandas(
            table[(table["kind"] != EventKind.GIVEN) | (table["seq"] != lost)],
            schema=exported_events.ARROW, preserve_index=False,
        )
        for table in tables
    ]  # fmt: skip
    alerts = judged(without)
    assert [(alert.kind, alert.seq, alert.topic) for alert in alerts] == [("lost", lost, "keyed")]
