"""The page shows all recorded values, and recording is cheap and safe."""

import mmap
import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram, generate_latest
from prometheus_client.registry import CollectorRegistry

from cluster.observe.metrics import (
    _COUNTERS,
    _STATE,
    ROLES,
    BatchHistogram,
    Levels,
    NodeRegistry,
    Telemetry,
)
from cluster.rpc.memory import resident_bytes
from timer.entries.entry_frame import EntryKind

BOUNDS = (0.01, 0.043, 0.1)  # 0.043 / 0.001 is a little below 43


def telemetry_of(levels: Levels) -> Telemetry:
    return Telemetry(node="n1", version="0.1.0", read_levels=lambda: levels)


def page_of(registry: CollectorRegistry) -> dict[str, float]:
    """The page's samples: name and labels -> value."""
    lines = generate_latest(registry).decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


@given(st.lists(st.sampled_from([-5, 0, 9, 10, 11, 42, 43, 44, 99, 100, 101, 10**9])))
def test_column_fills_the_buckets_as_prometheus_own_histogram_does(late_ms: list[int]) -> None:
    ours, theirs = CollectorRegistry(), NodeRegistry()
    histogram = BatchHistogram("late", "text", BOUNDS, scale=0.001)
    ours.register(histogram)
    histogram.observe_column(np.array(late_ms, np.int64))
    model = Histogram("late", "text", buckets=BOUNDS, registry=theirs)
    for each in late_ms:
        model.observe(each / 1000)
    assert page_of(ours) == pytest.approx(page_of(theirs))


def test_single_values_and_columns_are_counted_alike() -> None:
    one, column = BatchHistogram("a", "", BOUNDS), BatchHistogram("a", "", BOUNDS)
    values = [0.0, 0.01, 0.0100001, 0.03, 0.1, 7.0]
    for each in values:
        one.observe(each)
    column.observe_column(np.array(values))
    assert list(one.collect()) == list(column.collect())


def test_histogram_loses_nothing_that_threads_feed_it() -> None:
    registry = CollectorRegistry()
    histogram = BatchHistogram("a", "", BOUNDS)
    registry.register(histogram)
    ready = threading.Barrier(4)

    def feed() -> None:
        ready.wait()
        for _ in range(2_000):
            histogram.observe(0.5)

    threads = [threading.Thread(target=feed) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert page_of(registry)["a_count"] == 8_000


def test_lateness_is_fed_in_milliseconds_and_shown_in_seconds() -> None:
    telemetry = telemetry_of(Levels())
    telemetry.lateness.observe_column(np.array([0, 30, 400], np.int64))
    page = page_of(telemetry.registry)
    assert page['timer_lateness_seconds_bucket{le="0.02"}'] == 1
    assert page['timer_lateness_seconds_bucket{le="0.03"}'] == 2
    assert page['timer_lateness_seconds_bucket{le="+Inf"}'] == 3
    assert page["timer_lateness_seconds_sum"] == pytest.approx(0.43)


def test_waits_for_a_majority_are_told_apart_by_the_kind_of_entry() -> None:
    telemetry = telemetry_of(Levels())
    before = page_of(telemetry.registry)
    telemetry.observe_commit(EntryKind.CANCEL, 0.003)
    page = page_of(telemetry.registry)
    changed = {name: page[name] - before[name] for name in page if "commit_seconds" in name}
    assert changed['timer_commit_seconds_sum{kind="cancel"}'] == pytest.approx(0.003)
    assert changed['timer_commit_seconds_bucket{kind="cancel",le="0.002"}'] == 0
    assert changed['timer_commit_seconds_bucket{kind="cancel",le="0.005"}'] == 1
    assert not any(new for name, new in changed.items() if 'kind="cancel"' not in name)


def test_levels_are_read_once_per_scrape_and_not_before() -> None:
    reads = []

    def read() -> Levels:
        reads.append(1)
        return Levels(scheduled=10, pending=10)

    telemetry = Telemetry(node="n1", version="0.1.0", read_levels=read)
    assert reads == []
    page_of(telemetry.registry)
    assert reads == [1]


def test_page_shows_the_levels() -> None:
    levels = Levels(
        role="leader",
        serving=True,
        epoch=4,
        scheduled=10,
        fired=5,
        cancelled=2,
        pending=3,
        read_time_lag_ms=250,
        series_lag_ms=1_500,
        clock_jumped_ms=2_500,
    )
    page = page_of(telemetry_of(levels).registry)
    assert page["timer_scheduled_total"] == 10
    assert page["timer_pending"] == 3
    assert page["timer_epoch"] == 4
    assert page["timer_serving"] == 1
    assert page["timer_read_time_lag_seconds"] == 0.25
    assert page["timer_series_lag_seconds"] == 1.5
    assert page["timer_clock_jumped_seconds_total"] == 2.5
    roles = {role: page[f'timer_role{{timer_role="{role}"}}'] for role in ROLES}
    assert roles == {role: float(role == "leader") for role in ROLES}
    assert page['timer_build_info{node="n1",version="0.1.0"}'] == 1
    replays = page_of(telemetry_of(Levels(current=False)).registry)
    state = {f"timer_{name}{'_total' * (name in _COUNTERS)}" for name in _STATE}
    assert {*page} - {*replays} == state, "metrics of the state are absent while it is behind"


def test_page_shows_what_is_used_of_quotas() -> None:
    levels = Levels(fullest_quotas=((("orders", "ready_max"), (3, 10)),))
    page = page_of(telemetry_of(levels).registry)
    assert page['timer_quota_used{quota="ready_max",topic="orders"}'] == 3
    assert page['timer_quota_limit{quota="ready_max",topic="orders"}'] == 10


def test_page_shows_the_lag_of_those_that_lag_most_in_seconds() -> None:
    levels = Levels(
        undelivered_lag_ms=1_500,
        unacked_lag_ms=2_500,
        lagging_groups=((("orders", "g"), (1_500, 2_500)), (("mails", "h"), (0, 10))),
        late_topics=((("orders",), (40,)),),
    )
    telemetry = telemetry_of(levels)
    telemetry.handed_out_lateness.observe_column(np.array([30], np.int64))
    page = page_of(telemetry.registry)
    assert page["timer_undelivered_lag_seconds"] == 1.5
    assert page["timer_unacked_lag_seconds"] == 2.5
    assert page['timer_topic_lag_seconds{topic="orders"}'] == 0.04
    assert page['timer_group_undelivered_lag_seconds{group="g",topic="orders"}'] == 1.5
    assert page['timer_group_unacked_lag_seconds{group="h",topic="mails"}'] == 0.01
    assert page['timer_handed_out_lateness_seconds_bucket{le="0.03"}'] == 1


def test_page_shows_flows_errors_and_memory() -> None:
    telemetry = telemetry_of(Levels())
    telemetry.delivered.inc(1_000)
    telemetry.error("Schedule", "NOT_LEADER")
    telemetry.error("Schedule", "NOT_LEADER")
    page = page_of(telemetry.registry)
    assert page["timer_delivered_total"] == 1_000
    assert page['timer_grpc_errors_total{method="Schedule",reason="NOT_LEADER"}'] == 2
    assert page["process_resident_memory_bytes"] > 0


def test_every_metric_is_ours_or_the_processes_and_explained() -> None:
    page = generate_latest(telemetry_of(Levels()).registry).decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    assert {name.split("_")[0] for name in helps} == {"timer", "process"}
    assert all(helps.values())


def test_two_nodes_in_one_process_share_nothing() -> None:
    first, second = telemetry_of(Levels()), telemetry_of(Levels())
    first.acked.inc(5)
    assert page_of(second.registry)["timer_acked_total"] == 0


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as held:  # malloc might hand out again what it has
        held.write(bytes([1]) * len(held))
        assert resident_bytes() - before > len(held) // 2
