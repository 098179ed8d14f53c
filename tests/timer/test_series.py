"""Series: each occurrence becomes one timer, through any change, restart and repeated entry."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from chaos.oracle.story import LogStory
from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import (
    EVERY,
    START_MS,
    Log,
    catch_up,
    engine_on,
    flush,
    ids_of,
    machine_on,
    queue_of,
    state_of,
)
from timer.entries.policies import DROP, Scope
from timer.entries.series_payloads import (
    AlterSeries,
    CreateSeries,
    DeleteSeries,
    decode_occurrences,
    decode_series,
    encode_series,
)
from timer.model.columns import decode_headers, encode_headers, gather
from timer.model.recurrence import (
    EVERY_MS_MAX,
    EVERY_MS_MIN,
    SERIES_BYTES_MAX,
    Misfire,
    SeriesSpec,
)
from timer.model.timer_errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    TopicDeletedError,
)
from timer.model.units import TopicId, UnixMs
from timer.state.apply_results import OccurrencesApplied, SeriesApplied
from timer.state.machine import Machine
from timer.state.recurring import NUMBER_HEADER, SERIES_HEADER, SERIES_KEY_HEADER
from timer.state.series_table import SeriesTable
from timerclient.rows.series_fields import EVERY_S_MAX, EVERY_S_MIN

FAR_MS = START_MS + 10**9


@dataclass
class Bench:
    """A machine with its log; each entry is applied at once."""

    def __post_init__(self) -> None:
        self.log, self.machine = Log(), machine_on(SimDisk(), leads=True)
        self.do("begin_epoch", 2)
        self.do("topic", "a")

    def do(self, name: str, *args: Any, **named: Any) -> Any:
        return self.machine.apply(getattr(self.log, name)(*args, **named))

    def create(self, key: bytes = b"k", spec: SeriesSpec = EVERY) -> int:
        applied = self.do("series", CreateSeries(TopicId(1), key, spec, UnixMs(START_MS)))
        assert applied.refusal is None
        return int(applied.series)

    def alter(self, series: int, last_ms: int = 0, **changes: Any) -> SeriesApplied:
        applied = self.do("series", AlterSeries(series, changes, UnixMs(last_ms)))
        assert isinstance(applied, SeriesApplied)
        return applied

    def occur(self, *rows: tuple[int, int, int]) -> list[bool]:
        """Append occurrences (series, number, due), planned for their due time."""
        applied = self.do("occur", [(*row, row[2]) for row in rows])
        assert isinstance(applied, OccurrencesApplied)
        return [bool(each) for each in applied.new]

    def pending_of(self, series: int) -> tuple[int, int]:
        view = self.machine.series.view(series)
        assert view is not None
        return view.due_ms, view.seq

    @property
    def waiting(self) -> list[int]:
        return sorted(self.machine.series.waiting)


def headers_of(machine: Machine, topic: int) -> list[dict[str, str]]:
    found = []
    queue = machine.topics[TopicId(topic)].queue
    for page, places in queue.slices(np.arange(queue.begin, queue.end, dtype=np.uint64)):
        for at in range(len(places)):
            column = gather(page.rows[places[at : at + 1]], page.bufs, "headers")
            found.append(decode_headers(bytes(column.blob)))
    return found


def test_occurrence_is_a_timer_and_its_firing_makes_the_series_wait_for_the_next() -> None:
    bench = Bench()
    series = bench.create(b"daily", replace(EVERY, headers=encode_headers({"h": "v"})))
    assert bench.waiting == [series]
    assert bench.occur((series, 1, START_MS + 1_000)) == [True]
    assert bench.waiting == []
    bench.do("fire", START_MS + 1_000)
    assert bench.waiting == [series]
    assert queue_of(bench.machine, 1) == [(0, 1, b"p")]
    named = {SERIES_HEADER: str(series), SERIES_KEY_HEADER: "daily", NUMBER_HEADER: "1"}
    assert headers_of(bench.machine, 1) == [{"h": "v"} | named]
    view = bench.machine.series.view(series)
    assert view is not None
    assert (view.number, view.last_ms, view.seq) == (1, START_MS + 1_000, 0)
    assert bench.occur((series, 2, START_MS + 500)) == [True]  # due already: it fires at once
    assert bench.waiting == [series]
    assert [seq for _, seq, _ in queue_of(bench.machine, 1)] == [1, 2]


def test_row_has_no_effect_unless_the_series_waits_for_its_number() -> None:
    bench = Bench()
    one, other = bench.create(b"1"), bench.create(b"2")
    assert bench.occur((one, 2, FAR_MS), (other, 1, FAR_MS), (9, 1, FAR_MS)) == [False, True, False]
    assert bench.occur((one, 1, FAR_MS), (other, 1, FAR_MS)) == [True, False]
    assert bench.machine.next_seq == 6  # each row takes a seq
    assert bench.machine.counts.pending == 2


def test_pause_change_and_deletion_cancel_the_occurrence_and_its_number_is_used_again() -> None:
    bench = Bench()
    series = bench.create()
    bench.occur((series, 1, FAR_MS))
    bench.alter(series, paused=True)
    assert (bench.machine.counts.pending, bench.waiting) == (0, [])
    assert bench.occur((series, 1, FAR_MS)) == [False]
    bench.alter(series, paused=False)
    assert bench.waiting == [series]
    assert bench.occur((series, 1, FAR_MS)) == [True]
    bench.alter(series, START_MS + 7, payload=b"new")
    assert bench.occur((series, 1, START_MS + 9)) == [True]
    bench.do("fire", START_MS + 10)
    assert [payload for _, _, payload in queue_of(bench.machine, 1)] == [b"new"]
    bench.occur((series, 2, FAR_MS))
    bench.do("series", DeleteSeries(series))
    assert (bench.machine.counts.pending, bench.waiting, len(bench.machine.series)) == (0, [], 0)
    assert bench.create() == series + 1


def test_cancelled_occurrence_is_skipped_and_a_rescheduled_one_is_followed() -> None:
    bench = Bench()
    series = bench.create()
    bench.occur((series, 1, FAR_MS))
    bench.do("cancel", [bench.pending_of(series)])
    assert bench.waiting == [series]
    assert bench.occur((series, 2, FAR_MS)) == [True]
    bench.do("reschedule", ids_of([bench.pending_of(series)]), [START_MS + 5])
    assert bench.waiting == []
    assert bench.pending_of(series)[0] == START_MS + 5
    bench.do("fire", START_MS + 5)
    assert bench.waiting == [series]
    bench.occur((series, 3, FAR_MS))
    bench.do("reschedule", ids_of([bench.pending_of(series)]), [START_MS + 5])  # fires at once
    assert bench.waiting == [series]


def test_finished_series_waits_again_after_a_change() -> None:
    bench = Bench()
    series = bench.create()
    bench.do("occur", [(series, 1, -1, 0)])
    view = bench.machine.series.view(series)
    assert view is not None
    assert (view.finished, bench.waiting) == (True, [])
    bench.alter(series, max_count=7)
    assert bench.waiting == [series]


def test_paused_topic_holds_an_occurrence_and_a_drop_lets_the_series_go_on() -> None:
    bench = Bench()
    series = bench.create()
    bench.occur((series, 1, START_MS + 1_000))
    bench.do("policy", Scope("", TopicId(1)), paused=True)
    bench.do("fire", START_MS + 1_000)
    assert bench.waiting == []
    bench.do("policy", Scope("", TopicId(1)), paused=False, catch_up=DROP)
    bench.do("fire", START_MS + 2_000)
    assert bench.machine.counts.dropped == 1
    assert bench.waiting == [series]


def test_refused_changes_name_their_reason() -> None:
    bench = Bench()
    series = bench.create()
    for op, error in (
        (CreateSeries(TopicId(1), b"k", EVERY, UnixMs(0)), AlreadyExistsError),
        (CreateSeries(TopicId(7), b"k", EVERY, UnixMs(0)), TopicDeletedError),
        (AlterSeries(9, {"paused": True}, UnixMs(0)), NotFoundError),
        (AlterSeries(series, {"end_ms": 1}, UnixMs(0)), InvalidRequestError),
        (DeleteSeries(9), NotFoundError),
    ):
        assert isinstance(bench.do("series", op).refusal, error)
    view = bench.machine.series.view(series)
    assert view is not None
    assert view.spec == EVERY
    bench.occur((series, 1, START_MS + 1_000))
    bench.do("delete_topic", 1)
    assert (len(bench.machine.series), bench.waiting) == (0, [])
    assert not bench.machine.series._by_seq, "nothing is kept for timers that never fire"


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_number_each_occurrence_once_and_replicas_and_oracle_agree(
    seed: int, tmp_path: Path
) -> None:
    rng, log, disk = random.Random(seed), Log(), SimDisk()
    leading = machine_on(SimDisk(), leads=True)
    following = engine_on(disk)
    oracle = LogStory(Mock(), tmp_path)
    log.begin_epoch(2)
    log.topic("a")
    log.topic("b")

    def apply() -> None:
        for entry in log.entries[leading.applied_index :]:
            leading.apply(entry)
            oracle.apply(entry)

    apply()
    read_ms = START_MS
    for step in range(150):
        log.now_ms += 100
        views = leading.series.views(leading.series.ids_of(None, 0, 1 << 20))
        pending = [(view.due_ms, view.seq) for view in views if view.seq]
        some = rng.choice(views).series_id if views else 1
        match rng.randrange(9):
            case 0 | 1:
                key, topic = b"k%d" % rng.randrange(40), TopicId(rng.randint(1, 2))
                log.series(CreateSeries(topic, key, replace(EVERY, payload=key), UnixMs(START_MS)))
            case 2:
                log.series(AlterSeries(some, {"paused": rng.random() < 0.3}, UnixMs(0)))
            case 3:
                log.series(DeleteSeries(some))
            case 4 if pending:
                log.cancel([rng.choice(pending)])
            case 5 if pending:
                log.reschedule(ids_of([rng.choice(pending)]), [read_ms + rng.randrange(-50, 900)])
            case 6:
                read_ms += rng.randrange(300)
                log.fire(read_ms)
            case 7 if rng.random() < 0.2:
                log.policy(Scope("", TopicId(2)), paused=rng.random() < 0.5)
            case _ if leading.series.waiting:
                ready = sorted(leading.series.waiting)[rng.randrange(3) :]
                rows = [
                    (each.series_id, each.number + rng.choice((1, 1, 1, 2)), read_ms + 7)
                    for each in leading.series.views(ready)
                ]
                if rows:
                    log.occur([(*row, row[2] + rng.randrange(-20, 500)) for row in rows])
            case _:
                pass
        before = {view.series_id: view.number for view in views}
        apply()
        told = {number: (each.ended, each.pending) for number, each in oracle.series.series.items()}
        for view in leading.series.views(told):
            occurrence = (view.due_ms, view.seq) if view.seq else None
            assert told.pop(view.series_id) == (view.number, occurrence)
        assert not told
        for view in leading.series.views(before):
            assert view.number in (before[view.series_id], before[view.series_id] + 1)
            waits = view.series_id in leading.series.waiting
            assert [view.seq > 0, view.spec.paused, waits].count(True) == 1
        assert leading.digest() == leading.recomputed_digest()
        if step % 40 == 20:
            log.checkpoint()
            apply()
            catch_up(following, log)
            flush(following)
            disk.crash(rng)
            following = engine_on(disk)
    catch_up(following, log)
    assert state_of(following.machine) == state_of(leading)
    assert following.machine.recomputed_digest() == leading.digest()
    fired = headers_of(leading, 1) + headers_of(leading, 2)
    numbers = [(each[SERIES_HEADER], each[NUMBER_HEADER]) for each in fired]
    assert len(numbers) == len(set(numbers)) > 10


def test_series_is_behind_by_its_oldest_missed_time_that_still_has_to_occur() -> None:
    now_ms, hour = START_MS + 10**9, 3_600_000
    all_ = SeriesSpec(every_ms=hour, start_ms=START_MS, misfire=Misfire.FIRE_ALL)
    daily = replace(all_, every_ms=24 * hour)

    def behind_ms(
        spec: SeriesSpec, last_ms: int, *, planned_ms: int = 0, due_ms: int = 0, over: bool = False
    ) -> int:
        table, place = SeriesTable(), np.array([0])
        table.add(TopicId(1), b"k", spec, UnixMs(last_ms))
        if planned_ms:
            due = np.array([due_ms or planned_ms])
            table.begin_occurrences(place, np.array([1], np.uint64), due, np.array([planned_ms]))
        if over:
            table.finish(place)
        return table.behind_ms(now_ms)

    old_ms, ago_ms = now_ms - 9 * hour, now_ms - 5 * hour
    assert behind_ms(all_, old_ms) == 8 * hour
    assert behind_ms(all_, old_ms, planned_ms=ago_ms, due_ms=now_ms) == 5 * hour
    assert behind_ms(all_, old_ms, planned_ms=ago_ms, due_ms=now_ms + 1) == 0  # rescheduled, tick
    assert behind_ms(all_, old_ms, planned_ms=now_ms + hour) == 0
    assert behind_ms(daily, old_ms) == 0
    assert behind_ms(replace(all_, end_ms=old_ms + hour), old_ms) == 8 * hour  # the end counts
    for spec in (
        replace(all_, every_ms=0, cron="0 9 1 * *"),
        replace(all_, end_ms=old_ms + hour - 1),
        replace(daily, start_ms=now_ms + hour),
        replace(all_, paused=True),
        replace(all_, misfire=Misfire.SKIP),
    ):
        assert behind_ms(spec, old_ms) == 0, spec
    assert behind_ms(all_, old_ms, over=True) == 0
    table = SeriesTable()
    table.add(TopicId(1), b"k", replace(all_, max_count=1), UnixMs(old_ms))
    one, past = np.array([1], np.uint64), np.array([old_ms])
    table.begin_occurrences(np.array([0]), one, past, past)
    table.on_ended(one)
    assert table.behind_ms(now_ms) == 0, "as many as it may have"


def test_malformed_payloads_are_refused() -> None:
    good = encode_series(CreateSeries(TopicId(1), b"k", EVERY, UnixMs(0)))
    assert isinstance(decode_series(memoryview(good)), CreateSeries)
    for spec, field in (
        (replace(EVERY, every_ms=EVERY_MS_MIN - 1), "every_ms"),
        (replace(EVERY, cron="* * * * *"), "every_ms, cron"),
        (replace(EVERY, start_ms=0), "start_ms"),
        (replace(EVERY, end_ms=5), "end_ms"),
        (replace(EVERY, payload=bytes(SERIES_BYTES_MAX)), "payload"),
        (replace(EVERY, max_count=-1), "max_count"),
        (replace(EVERY, zone="UTC"), "zone"),
    ):
        payload = encode_series(CreateSeries(TopicId(1), b"k", spec, UnixMs(0)))
        with pytest.raises(InvalidRequestError, match=f"^{field} = "):
            decode_series(memoryview(payload))
    for payload in (
        encode_series(CreateSeries(TopicId(1), b"", EVERY, UnixMs(0))),
        encode_series(AlterSeries(0, {}, UnixMs(0))),
        encode_series(AlterSeries(1, {"nothing": 1}, UnixMs(0))),
        encode_series(AlterSeries(1, {"cron": 1}, UnixMs(0))),
        encode_series(AlterSeries(1, {"misfire": 9}, UnixMs(0))),
        good[:-1],
    ):
        with pytest.raises(ValueError, match=r".+"):
            decode_series(memoryview(payload))
    log = Log()
    for rows in ([(2, 1, 5, 5), (2, 1, 5, 5)], [(1, 1, -2, 5)], [(1, 1, 5, -1)]):
        with pytest.raises(ValueError, match="OCCURRENCES"):
            decode_occurrences(log.occur(rows).payload)
    assert Misfire(0) is Misfire.FIRE_ONCE


def test_clients_check_an_interval_by_the_limits_of_the_nodes() -> None:
    assert (EVERY_S_MIN * 1000, EVERY_S_MAX * 1000) == (EVERY_MS_MIN, EVERY_MS_MAX)
