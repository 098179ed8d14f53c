"""Found: timers that nodes' files hold otherwise than their log says; files that can't be read."""

import pickle
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from chaos.audit.rules import file_rules
from chaos.history.history import RunFolder
from chaos.spark.timerstate import RunFile, node_states, read_run, run_files
from tests.chaos.audit_files import DISK, FAR_MS, judged, tell
from tests.seeds import seeds
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, ids_of, part_of
from tests.timer.stores import merge_all
from timer.entries.policies import Scope
from timer.model.columns import OnConflict
from timer.model.firing_order import Position
from timer.model.timer_errors import UnknownVersionError
from timer.model.units import TopicId
from timer.recovery import manifest

PENDING = {
    "n1": 3 * 40 + 5_000,
    "n2": 3 * 40 + 5_000 - 100 - 2 - 11 - 11,  # cancelled; fired, of those that go on
    "n3": 3 * 40 + 5_000 - 100 - 2 - 11 - 11 - 29 - 14 - 1 + 3,  # deleted; fired; cancelled
}


def timers(topic: int, first: int, count: int, due_ms: int) -> list[tuple[int, int, bytes]]:
    return [(topic, due_ms + at, b"%d" % at) for at in range(first, first + count)]


def busy() -> Iterator[Log]:
    """Yield a log as it grows; each time something else becomes of what earlier runs hold."""
    log = Log()
    log.begin_epoch()
    for name in ("t", "paused", "deleted"):
        log.topic(name)
    for topic in (1, 2, 3):
        log.schedule(part_of(timers(topic, 0, 40, START_MS + 100)))  # seqs 1 .. 120
    log.schedule(part_of(timers(1, 0, 5_000, FAR_MS)))  # 121 .. 5120: of more than one batch
    log.policy(Scope("", TopicId(2)), paused=True)
    yield log
    log.cancel([(FAR_MS + at, 121 + at) for at in range(0, 500, 5)])
    log.cancel([(START_MS + 120, 61), (START_MS + 121, 22)])
    log.fire(START_MS + 110)
    yield log
    log.delete_topic(3)
    log.fire(START_MS + 125)  # of topic 2 all of these are held
    log.cancel([(START_MS + 105, 46)])
    log.schedule(part_of(timers(2, 100, 3, START_MS)))
    yield log
    log.cancel([(FAR_MS + 7, 128)])
    log.fire(START_MS + 130)
    log.checkpoint()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Three nodes' logs; their states, flushed at other times; and the tale of the log."""
    run = RunFolder(tmp_path_factory.mktemp("run"))
    nodes = {name: engine_on(DISK, run.root / name / "state") for name in PENDING}
    log = Log()
    for times, log in enumerate(busy()):
        for name in [*nodes][times:]:
            catch_up(nodes[name], log)
            flush(nodes[name])
    tell(run, log, [*nodes])
    return run


def rows_of(run: RunFolder) -> list[dict[str, Any]]:
    parts = (part for state in node_states(run) for part in run_files(state))
    batches = (batch for part in parts for batch in read_run(part))
    return [row for batch in batches for row in batch.to_pylist()]


def test_what_is_pending_has_weight_one_in_all(run: RunFolder) -> None:
    weights = Counter[tuple[str, int]]()
    for row in rows_of(run):
        weights[row["node"], row["seq"]] += row["weight"]
    assert {*weights.values()} == {0, 1}, "tombstones lie in other runs"
    assert Counter(node for (node, _), weight in weights.items() if weight) == PENDING


def drawn(chance: random.Random) -> Iterator[Log]:
    """Yield a log as it grows, of anything that moves, ends or holds timers, at random."""
    log, made = Log(), list[tuple[int, int]]()  # due, seq; not all of them, or as they are now
    log.begin_epoch()
    topics = [1, 2, 3]
    for topic in topics:
        log.topic(f"t{topic}")
    next_seq = 1
    for _ in range(60):
        log.now_ms += chance.randrange(10)
        some = chance.sample(made, min(len(made), chance.randrange(12)))
        dues = [log.now_ms + chance.randrange(-20, 200) for _ in range(chance.randrange(1, 12))]
        one = Scope("", TopicId(chance.choice(topics)))
        match chance.randrange(12):
            case 0 if some:
                log.cancel(some)
            case 1 if some:
                log.reschedule(ids_of(some), [due + 50 for due, _ in some])
            case 2:
                log.policy(one, paused=chance.random() < 0.6)
            case 3:
                log.policy(one, paused=False, catch_up=chance.choice(["all", "latest", "drop"]))
            case 4:
                gone = topics.pop(0)
                log.delete_topic(gone)
                topics.append(topics[-1] + 1)
                log.topic(f"t{gone}")
            case 5 | 6:
                log.fire(log.now_ms, rows_max=chance.choice([1, 3, 1 << 14]))
            case 7:
                log.checkpoint()
            case _:
                rows = [(chance.choice(topics), due, b"x") for due in dues]
                keys = [b"k%d" % chance.randrange(30) for _ in dues]
                how = chance.choice([OnConflict.REPLACE, OnConflict.REJECT])
                log.schedule(part_of(rows, keys=keys, on_conflict=how))
                made += [(due, next_seq + at) for at, due in enumerate(dues)]
                next_seq += len(dues)
        yield log


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_files_hold_what_the_log_says_whatever_was_flushed_and_merged(
    seed: int, tmp_path: Path
) -> None:
    chance, run, merges, log = random.Random(seed), RunFolder(tmp_path), 0, Log()
    engine = engine_on(DISK, run.root / "n1" / "state")
    for log in drawn(chance):
        if chance.random() < 0.7:
            catch_up(engine, log)
            merges += merge_all(engine.machine.store) if chance.random() < 0.4 else 0
            flush(engine)
    assert merges, "and runs were made of runs"
    tell(run, log, ["n1"])
    (state,) = node_states(run)
    said = {
        (fate["seq"], fate["due_ms"])
        for fate in pq.read_table(run.root / "tale" / "fates").to_pylist()
        if fate["schedule_index"] <= state.index < (fate["end_index"] or 1 << 60)
    }
    weights = Counter[tuple[int, int]]()
    for row in rows_of(run):
        weights[row["seq"], row["due_ms"]] += row["weight"]
    assert {*weights.values()} <= {0, 1}
    assert {timer for timer, weight in weights.items() if weight} == said
    assert said


def parts_of(run: RunFolder, node: str) -> list[RunFile]:
    [state] = [state for state in node_states(run) if state.node == node]
    return [*run_files(state)]


def with_meta(part: RunFile, **fields: Any) -> RunFile:
    assert part.meta is not None
    return replace(part, meta=replace(part.meta, **fields))


def test_run_is_small_as_a_task(run: RunFolder) -> None:
    for number, node in enumerate(PENDING, 1):
        parts = parts_of(run, node)
        assert {part.node for part in parts} == {node}
        assert len(parts) >= number, "each flush makes a run, or several"
        assert all(len(pickle.dumps(part)) < 1_000 for part in parts), "there may be thousands"


def test_what_is_put_aside_counts_only_if_it_was_due(run: RunFolder) -> None:
    parts = parts_of(run, "n3")

    def of_the_paused(part: RunFile) -> set[int]:
        rows = (row for batch in read_run(part) for row in batch.to_pylist())
        return {row["seq"] for row in rows if 40 < row["seq"] <= 80}

    last = parts[-1]
    assert of_the_paused(last), "they are held"
    assert not of_the_paused(replace(last, position=Position(0, 0))), (
        "nothing was due, so nobody finds them"
    )


@pytest.mark.parametrize(
    ("field", "more"),
    [("rows", 1), ("tombstones", 1), *((end, at) for end in ("first", "last") for at in (0, 1))],
)
def test_run_that_is_not_what_its_manifest_says_is_told(
    run: RunFolder, field: str, more: int
) -> None:
    part, *_ = parts_of(run, "n1")
    value = getattr(part.meta, field)
    if isinstance(value, Position):
        wrong: Any = Position(value.due_ms + (not more), value.seq + more)
    else:
        wrong = value + more
    *_, told = read_run(with_meta(part, **{field: wrong}))
    assert "the manifest says" in told.to_pylist()[0]["damage"]


def test_run_that_is_no_run_is_told(run: RunFolder, tmp_path: Path) -> None:
    part, *_ = parts_of(run, "n1")
    bad = tmp_path / "run.arrow"
    bad.write_bytes(data := b"written by a writer that is wrong")
    sound = with_meta(replace(part, path=bad), size=len(data), crc32=zlib.crc32(data))
    (told,) = read_run(sound)
    assert str(bad) in told.to_pylist()[0]["damage"]


@pytest.mark.parametrize("rows_per_batch", [3, 1])
def test_run_whose_rows_are_not_in_order_is_told(
    run: RunFolder, tmp_path: Path, rows_per_batch: int
) -> None:
    part, *_ = parts_of(run, "n1")
    with pa.memory_map(str(part.path)) as file, pa.ipc.open_file(file) as batches:
        first = batches.get_batch(0)
        rows = pa.Table.from_batches([first]).take([0, 2, 1])
    bad = tmp_path / "run.arrow"
    with pa.OSFile(str(bad), "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
        writer.write_table(rows.combine_chunks(), max_chunksize=rows_per_batch)
    data = bad.read_bytes()
    sound = with_meta(replace(part, path=bad), size=len(data), crc32=zlib.crc32(data))
    *_, told = read_run(sound)
    assert "not in order" in told.to_pylist()[0]["damage"]


def test_state_of_another_version_is_not_judged(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.root / "n1", tmp_path / "n1")
    path = tmp_path / "n1" / "state" / manifest.NAME
    data = path.read_bytes()
    path.write_bytes(data[:8] + (manifest.VERSION_OF_LEVEL_1 - 1).to_bytes(4, "little") + data[12:])
    with pytest.raises(UnknownVersionError):
        [*node_states(RunFolder(tmp_path))]


@pytest.mark.long  # `make chaos-short` judges the files of an honest run
@pytest.mark.spark
def test_files_that_hold_what_the_log_says_are_fine(spark: SparkSession, run: RunFolder) -> None:
    found, findings = judged(spark, run)
    assert not findings.violations
    assert {each["node"]: each["pending"] for each in found["files"]} == PENDING
    assert findings.offenders == []
    indexes = [each["index"] for each in found["files"]]
    assert indexes == sorted({*indexes}), "each node's manifest is of its own time"
    found, _ = judged(spark, run, lost={"n1"}, end=indexes[2])
    assert [each["node"] for each in found["files"]] == ["n2", "n3"]
    assert found["files_unread"] == ["n1"]


def test_logs_that_end_before_a_state_are_refused(run: RunFolder) -> None:
    last = max(state.index for state in node_states(run))
    assert len(file_rules.states_within(run, lost=(), end=last)) == 3
    with pytest.raises(ValueError, match=rf"is of entry {last}, .* end at {last - 1}: an archive"):
        file_rules.states_within(run, lost=(), end=last - 1)


@pytest.mark.spark
def test_each_way_to_hold_something_else_is_named(
    spark: SparkSession, run: RunFolder, tmp_path: Path
) -> None:
    shutil.copytree(run.root, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    states = {name: run.root / name / "state" for name in PENDING}
    said = {name: manifest.read(DISK, state) for name, state in states.items()}
    assert said["n1"] is not None
    assert said["n2"] is not None
    manifest.write(DISK, states["n1"], said["n1"] | {"index": said["n2"]["index"]})
    manifest.write(DISK, states["n2"], said["n2"] | {"runs": said["n2"]["runs"][1:]})
    damaged = next((states["n3"] / manifest.RUN_DIRECTORY).glob("*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for name, why in (("n4", b"no manifest"), ("n5", b"")):
        shutil.copytree(run.root / "n3", run.root / name)
        (run.root / name / "state" / manifest.NAME).write_bytes(why)
    shutil.copytree(run.root / "n4", run.root / "n6")  # its next start replaces that
    (run.root / "n6" / "incoming").mkdir()
    (run.root / "n6" / "incoming" / "ready").touch()
    found, findings = judged(spark, run)
    extra = 102 + 22  # cancelled; fired
    # Of the first run, and what is held by now lies in the second, with 102 traces of the first.
    lost = PENDING["n2"] - 11 + 102
    wrong = {"extra_in_files": extra, "missing_in_files": lost, "damaged_files": 3}
    assert findings.violations == wrong
    assert found["files_unread"] == ["n6"]
    of = [(row["node"], row["verdict"], row.get("times")) for row in findings.offenders]
    assert of == [
        *3 * [("n1", "extra_in_files", 1)],
        *3 * [("n2", "missing_in_files", 0)],
        *((name, "damaged_files", None) for name in ("n3", "n4", "n5")),
    ]
    assert str(damaged) in findings.offenders[-3]["damage"]
    for name in ("n1", "n3", "n4", "n5", "n6"):
        shutil.rmtree(run.root / name)
    manifest.write(DISK, states["n2"], said["n2"] | {"runs": []})
    _, findings = judged(spark, run)
    assert findings.violations == {"missing_in_files": PENDING["n2"]}
