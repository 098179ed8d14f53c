"""The audit of whole runs, from their folders: logs, histories, what nodes said; and bad ones."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.testing import assertDataFrameEqual

from chaos.audit import command, histories, job
from chaos.audit.report.report import describe
from chaos.audit.rules.queries import query
from chaos.history import history
from chaos.history.history import RunFolder
from chaos.history.history_check import COLUMNS
from tests.chaos.told_history import ToldHistory
from tests.chaos.world import Log, id_of, write_log
from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece, entries_of, segments

pytestmark = pytest.mark.spark


@pytest.fixture
def world(tmp_path: Path) -> RunFolder:
    """Two epochs, three nodes, four timers: one cancelled, one late; n2 has a stale tail."""
    run = RunFolder(tmp_path)
    log = Log()
    log.epoch(1)
    topic = log.topic("t")
    producer = log.producer(b"p" * 16)
    log.schedule(topic, [(100, 1), (300, 2), (300, 3)], producer=(producer, 1), at_ms=10)
    log.schedule(topic, [(100, 1), (300, 2), (300, 3)], producer=(producer, 1), at_ms=11)  # a retry
    group = log.group(topic, "g")
    log.cancel([(300, 3)])
    log.reserve(topic, group, 10)
    log.fire(120)
    deposed = Log(log)
    deposed.schedule(topic, [(700, 9)], at_ms=125)
    log.epoch(2, at_ms=200)
    log.schedule(topic, [(90, 4)], at_ms=210)  # due already
    log.reserve(topic, group, 10)
    log.fire(310)
    log.ack(topic, group, [0, 1, 2], at_ms=320)
    log.entry(EntryKind.CHECKPOINT, b"", at_ms=330)
    assert len(log.frames) == 15
    for node, story in (("n1", log), ("n2", deposed), ("n3", log)):
        write_log(run.root / node / "log", story.frames, frames_per_segment=4)
    ids = {m: id_of(due, s) for m, due, s in ((1, 100, 1), (2, 300, 2), (3, 300, 3), (4, 90, 4))}
    with ToldHistory(run, "producer") as h:
        h.schedule([1, 2, 3], ids=[ids[1], ids[2], ids[3]], due_ms=[100, 300, 300], topic="t",
                   span_ms=(9, 12), outcome=history.OpOutcome.OK)  # fmt: skip
        h.schedule([4], ids=[ids[4]], due_ms=[90], topic="t",
                   span_ms=(209, 212), outcome=history.OpOutcome.OK)  # fmt: skip
        h.schedule([9], ids=None, due_ms=[700], topic="t",
                   span_ms=(124, 190), outcome=history.OpOutcome.UNKNOWN)  # fmt: skip
        h.change(
            "cancel",
            ids=[ids[3]],
            results=["CANCELLED"],
            span_ms=(20, 21),
            outcome=history.OpOutcome.OK,
        )
    with ToldHistory(run, "consumer") as h:
        h.open("t", "g", start_ms=0)
        given = {"epoch": 1, "lease_id": 1, "offsets": [0], "ids": [ids[1]], "marks": [1]}
        h.deliver("t", "g", received_ms=121, **given, attempts=[1], fired_at_ms=[120], due_ms=[100])
        h.deliver("t", "g", received_ms=315, epoch=2, lease_id=2, offsets=[0, 1, 2],
                  ids=[ids[1], ids[4], ids[2]], marks=[1, 4, 2], attempts=[2, 1, 1],
                  fired_at_ms=[120, 210, 310], due_ms=[100, 90, 300])  # fmt: skip
        h.ack("t", "g", [0, 1, 2], results=["ACKED"] * 3, span_ms=(316, 322),
              outcome=history.OpOutcome.OK)  # fmt: skip
    with history.FaultTimeline(run) as faults:
        faults.record("kill", at_ms=130, node="n1", role="leader", epoch=1)
    with history.States(run) as states:
        for node, index, *said in (
            ("n1", 7, 3, 2, 0, 1), ("n2", 7, 3, 2, 0, 1), ("n1", 15, 4, 0, 3, 1),
        ):  # fmt: skip
            counts = dict(zip(("scheduled", "pending", "fired", "cancelled"), said, strict=True))
            states.record(node, index, at_ms=1, **counts, dropped=0)
        for node, index in (("n1", 15), ("n3", 15), ("n3", 15)):
            states.record(node, index, at_ms=2, digest=f"{index:016x}")
    return run


@pytest.mark.long  # a whole audit of its own; `make chaos-short` ends with one
def test_honest_run_is_ok_though_nodes_began_anew(spark: SparkSession, world: RunFolder) -> None:
    """Nodes are compared from there on; what nobody holds, or no majority, is refused."""
    # n1 lost its log after entry 8; n2 and n3 began after snapshots at 10 and 4, n3 from the start.
    frames = read_frames(world.root / "n3/log")
    for node in ("n1", "n2", "n3"):
        shutil.rmtree(world.root / node / "log")
    for node, life, first, last in (
        ("n1", 0, 1, 8), ("n1", 1, 11, 15), ("n2", 0, 1, 3), ("n2", 1, 11, 14), ("n3", 0, 5, 15),
    ):  # fmt: skip
        write_log(world.root / node / f"log/{life:03d}", frames[:last], first=first)
    world.about.write_text('{"failures": ["n2 ended by itself"], "seed": 7}')
    in_parquet(world.histories / "consumer.jsonl")
    report = job.audit(spark, world)
    assert report.line() == (
        "verdict: INCOMPLETE kills=1 failovers=1 scheduled=4 fired=3 delivered=3 cancelled=1"
        " redelivered=1 lost=0 duplicated=0 early=0"
    )
    assert not report.ok
    assert report.summary["not_looked_at"] == [
        "counts of n2, n3: states.jsonl has none of the last fifth of the log",
        "digests of n2: states.jsonl has none of the last fifth of the log",
        "files of n1, n2, n3: no manifest is in the folder",
        "payloads beyond their marks: lines of producer have no payload_crcs",
        "times of deliveries: lines of consumer have no handed_out_ms",
        "times on clients' clocks: run.json has no clock_error_ms",
    ]
    summary = json.loads((world.audit / "summary.json").read_text())
    assert summary == report.summary
    told = {"seed": 7, "failures": ["n2 ended by itself"]}
    assert summary["run"] == told | {"left_out": [], "without": [], "not_struck": []}
    assert summary["verdicts"] == {"ok": 3, "cancelled": 1, "unknown_not_fired": 1}
    assert summary["lateness_ms"]["fire"]["all"]["max"] == 20
    assert summary["failover_gaps"] == [{"node": "n1", "epoch": 2, "fired_after_ms": 180}]
    assert (summary["replayed"]["node"], summary["replayed"]["fired"]) == ("n1, n3", 3)
    assert summary["redeliveries"] == {"failover": 1}
    assert summary["conservation"] == {
        "checkpoints": 1,
        "last": [
            {"index": 15, "time_ms": 330, "scheduled": 4, "pending": 0, "fired": 3, "cancelled": 1}
            | {"dropped": 0, "balanced": True}
        ],
        "said": {"counts": 3, "digests": 3, "nodes": 3},
    }
    assert summary["other_offenders"] == []
    assert summary["holes"] == [
        {"node": "n1", "from": 9, "to": 10},
        {"node": "n2", "from": 4, "to": 10},
        {"node": "n2", "from": 15, "to": 15},
        {"node": "n3", "from": 1, "to": 4},
    ]
    assert summary["thin"] == [{"from": 4, "to": 4}, {"from": 9, "to": 10}]
    lines = [*describe(report)]
    assert any("n2's log never held entries 4 .. 10" in line for line in lines)
    assert lines[-1] == report.line()
    # Without n3's log nobody has entries 9 and 10; without n2's, too, there is no majority.
    shutil.rmtree(world.root / "n3/log/000")
    write_log(world.root / "n3/log/000", frames, first=11)
    with pytest.raises(ValueError, match=r"entries 9 \.\. 10 are in no node's log"):
        job.audit(spark, world)
    for node in ("n2", "n3"):
        shutil.rmtree(world.root / node / "log")
        (world.root / node / "log").mkdir()
    shutil.rmtree(world.root / "n1/log/001")
    with pytest.raises(ValueError, match="no entry is on a majority"):
        job.audit(spark, world)


def in_parquet(path: Path) -> Path:
    """Turn a history of JSON lines into one of Parquet; return where it lies."""
    table = pa.Table.from_pylist([*history.read(path)], schema=pa.schema([*COLUMNS.items()]))
    pq.write_table(table, path.with_suffix(".parquet"))
    path.unlink()
    return path.with_suffix(".parquet")


def read_frames(log: Path) -> list[bytes]:
    """Return a log's frames, from the first on."""
    return [
        entry_frame.encode(each.kind, each.epoch, each.index, each.time_ms, [bytes(each.payload)])
        for each in entries_of(Piece(segments(log), LogIndex(1), LogIndex(1 << 40)))
    ]


@pytest.mark.long  # a whole audit of its own
def test_each_witness_that_contradicts_the_others_is_named(
    spark: SparkSession, world: RunFolder
) -> None:
    """Nodes' logs, counts and digests, a lease's time of handing out, an outage without end."""
    path = sorted((world.root / "n3/log").iterdir())[0]
    other = Log()
    other.epoch(1)
    topic = other.topic("t")
    other.producer(b"q" * 16)
    other.schedule(topic, [(101, 1), (300, 2), (300, 3)], producer=(1, 1), at_ms=10)
    path.unlink()
    write_log(path.parent, other.frames, frames_per_segment=4)
    with history.States(world) as states:
        for node in ("n3", "n1", "n2"):
            states.record(node, 8, at_ms=3, scheduled=3, pending=1, fired=2, cancelled=0, dropped=0)
        states.record("n3", 15, at_ms=3, digest="other")
    world.states.write_text(world.states.read_text() + '{"node": "n1", "ind')  # torn
    world.about.write_text('{"clock_error_ms": 49}')
    with ToldHistory(world, "producer") as h:
        for start_ms in (230, 400):
            span_ms = (start_ms, start_ms + 200)
            h.schedule([start_ms], ids=None, due_ms=[700], topic="t", span_ms=span_ms,
                       outcome=history.OpOutcome.UNKNOWN)  # fmt: skip
    with ToldHistory(world, "consumer") as h:
        for lease_id, handed_out_ms in ((9, 260), (10, 259)):  # 50 ms and 49 after its epoch's end
            h.deliver("t", "g", received_ms=400, epoch=1, lease_id=lease_id, offsets=[0],
                      handed_out_ms=handed_out_ms, ids=[id_of(100, 1)], marks=[1], attempts=[1],
                      fired_at_ms=[120], due_ms=[100])  # fmt: skip
    with history.FaultTimeline(world) as faults:
        faults.record("restart", at_ms=320, node="n1")
        faults.record("gave_up", at_ms=2000)
    report = job.audit(spark, world)
    lines = [*describe(report)]

    said = {"miscounted": 3, "diverged_states": 1}
    logged = {"diverged": 3, "diverged_entries": 2}  # its redelivery is a diverged timer's
    assert report.summary["violations"] == said | logged | {"deposed_handed_out": 1}
    marks = {row["mark"] for row in report.summary["offenders"] if row["verdict"] == "diverged"}
    assert marks == {1, 2, 3}
    assert report.summary["stale_entries"] == 1
    ends = {node["node"]: (node["upto"], node["stale"]) for node in report.summary["nodes"]}
    assert ends == {"n1": (15, 0), "n2": (9, 1), "n3": (2, 0)}
    assert report.line().startswith("verdict: VIOLATED kills=1 ")
    found = {name: [row for row in report.summary["other_offenders"] if row["verdict"] == name]
             for name in report.summary["violations"]}  # fmt: skip
    assert [(row["node"], row["index"], row["said_fired"], row["fired"])
            for row in found["miscounted"]] == [(f"n{n}", 8, 2, 0) for n in (1, 2, 3)]  # fmt: skip
    assert [row["index"] for row in found["diverged_states"]] == [15]
    assert "n3 other" in found["diverged_states"][0]["digests"]
    assert len(found["diverged_entries"]) == 2
    counts = "  verdict=miscounted node=n1 index=8 said_scheduled=3"
    assert any(line.startswith(counts) for line in lines)
    assert " miscounted=3 diverged_states=1" in lines[-1]

    (fault,) = report.summary["faults"]
    assert (fault["healed_after_ms"], fault["recovered_after_ms"]) == (190, None)
    gap = (fault["schedule_gap_ms"], fault["schedule_gap_after_ms"], fault["schedule_gap_open"])
    assert gap == (600 - 212, 212 - 130, True)
    assert (fault["fire_gap_ms"], fault["fire_gap_open"]) == (100, False)
    assert (fault["fire_late_max_ms"], fault["deliver_late_max_ms"]) == (10, 105)
    assert "not recovered from kill leader n1 at 0.1 s: no schedule for 388 ms, to the end" in lines


def test_word_of_a_node_that_is_none_is_refused(spark: SparkSession, world: RunFolder) -> None:
    world.states.write_text("torn\n" + world.states.read_text())
    with pytest.raises(ValueError, match=r"states\.jsonl: 1 lines lack a `node`"):
        histories.read_states(spark, world)


def test_rows_of_the_log_are_those_that_were_appended(
    spark: SparkSession, world: RunFolder
) -> None:
    rows = spark.read.format("timerlog").option("node", "n2").load(str(world.root))
    found = rows.where("event = 'schedule'").selectExpr(
        *("index", "position", "sequence", "unix_millis(due) AS due_ms"),
        "conv(hex(reverse(substr(payload, 1, 8))), 16, 10) AS mark",
    )
    batch = [(0, 1, 100, 1), (1, 1, 300, 2), (2, 1, 300, 3)]
    wanted = [(index, *row) for index in (4, 5) for row in batch] + [(10, 0, None, 700, 9)]
    schema = "index BIGINT, position INT, sequence BIGINT, due_ms BIGINT, mark STRING"
    assertDataFrameEqual(found, spark.createDataFrame(wanted, schema))


def test_command_says_what_is_missing(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "spark_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    assert command.main([str(tmp_path)]) == 2
    assert "no histories" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nonsense", '{"clock_error_ms": -1}', '{"failures": 1}'])
def test_run_json_is_read_before_any_work(spark: SparkSession, tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.about.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: "):  # that there are no histories comes later
        job.audit(spark, run)


def test_damaged_segment_is_named_and_the_run_is_unusable(
    world: RunFolder, spark: SparkSession, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = sorted((world.root / "n1/log").iterdir())[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(command, "spark_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    assert command.main([str(world.root)]) == 2
    assert path.name in capsys.readouterr().err


def test_entry_of_a_majority_that_cannot_be_decoded_is_named(
    world: RunFolder, spark: SparkSession, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    log = Log()
    log.epoch(1)
    log.entry(EntryKind.SCHEDULE, b"garbage")  # its checksum is right
    for node in ("n1", "n2", "n3"):
        shutil.rmtree(world.root / node / "log")
        write_log(world.root / node / "log", log.frames)
    monkeypatch.setattr(command, "spark_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    assert command.main([str(world.root)]) == 2
    told = r"log of n\d: entry 2 \(SCHEDULE\) can't be replayed: SCHEDULE of 7 bytes"
    assert re.search(told, capsys.readouterr().err)


def test_request_that_a_client_was_about_to_send_as_it_crashed_is_one_without_an_outcome(
    spark: SparkSession, world: RunFolder
) -> None:
    path = world.histories / "producer.jsonl"
    answered, four, unknown, cancel = history.read(path)
    path.unlink()
    with ToldHistory(world, "producer") as h:
        for line, ended in ((answered, True), (four, False), (unknown, True), (cancel, False)):
            names = ("topic", "marks", "due_ms") if line["op"] == "schedule" else ("ids",)
            asks = {name: line[name] for name in names}
            request = h.asks(line["op"], start_ms=line["start_ms"], **asks)
            if ended:
                h.write(line | {"request": request})
    lines = histories.read_histories(spark, world)
    asked: list[Any] = (
        query("clients", "asks", {"lines": lines}).select("mark", "outcome").collect()
    )
    assert sorted(map(tuple, asked)) == [
        (1, "ok"),
        (2, "ok"),
        (3, "ok"),
        (4, "unknown"),
        (9, "unknown"),
    ]
    cancels: list[Any] = lines.where("op = 'cancel'").select("outcome", "ids").collect()
    assert [tuple(row) for row in cancels] == [("unknown", [id_of(300, 3)])]


def test_torn_last_line_of_a_history_is_left_out(spark: SparkSession, world: RunFolder) -> None:
    path = world.histories / "producer.jsonl"
    path.write_text(path.read_text() + '{"op": "sched')
    assert histories.read_histories(spark, world).count() == 8


@pytest.mark.parametrize(("tail", "count"), [("", 1), ('{"op": "sched', 2)])
def test_history_with_more_than_a_torn_line_is_refused(
    spark: SparkSession, world: RunFolder, tail: str, count: int
) -> None:
    path = world.histories / "producer.jsonl"
    path.write_text("nonsense\n" + path.read_text() + tail)
    with pytest.raises(
        ValueError, match=f"producer.jsonl: {count} lines are not lines of a history"
    ):
        histories.read_histories(spark, world)


def test_bad_history_is_named_as_it_lies_in_its_folder(spark: SparkSession, tmp_path: Path) -> None:
    """Also where the readers were given a link, as its name or its folder's is a pattern."""
    run = RunFolder(tmp_path / "run[1]")
    run.histories.mkdir(parents=True)
    path = run.histories / "127.0.0.1:7401?.jsonl"
    path.write_text('{"client": "c"}\n')
    with (
        histories.plain_path(run) as reachable,
        pytest.raises(ValueError, match=re.escape(f"{path}: 1 lines are not lines of a history")),
    ):
        histories.read_histories(spark, reachable)


def test_parquet_of_which_a_line_is_none_is_refused(spark: SparkSession, world: RunFolder) -> None:
    path = world.histories / "consumer.jsonl"
    path.write_text('{"client": "consumer"}\n' + path.read_text())
    in_parquet(path)
    with pytest.raises(ValueError, match=r"consumer.parquet: 1 lines are not lines of a history"):
        histories.read_histories(spark, world)


def test_times_that_are_no_milliseconds_are_refused(spark: SparkSession, world: RunFolder) -> None:
    lines = histories.read_histories(spark, world)  # which end at 322
    timeline = [{"event": "drained", "at_ms": 500}]
    assert job.until_ms(lines, timeline, [Row(began_ms=322 + job.DAY_MS)]) == 500
    with pytest.raises(ValueError, match=r"end at 322, .* are their times Unix milliseconds\?"):
        job.until_ms(lines, timeline, [Row(began_ms=None), Row(began_ms=323 + job.DAY_MS)])


def test_options_reach_the_files_and_filters_of_one_table_do_not_meet(
    spark: SparkSession, world: RunFolder
) -> None:
    path = min((world.root / "n1/log").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    reader = spark.read.format("timerlog").option("view", "entries")
    sound = reader.option("node", "n2,n3").load(str(world.root))
    assert sound.count() == 10 + 15, "what is damaged is not even opened"
    of_each = [sound.where(f"node = '{node}'") for node in ("n2", "n3")]
    assert of_each[0].union(of_each[1]).select("node").distinct().count() == 2
    with pytest.raises(PySparkException, match="CorruptFile"):
        reader.option("node", "n1,n2").load(str(world.root)).count()


def test_what_a_node_never_held_is_told_also_if_it_is_its_logs_end_or_all() -> None:
    held = [
        {"node": "n1", "first": 1, "last": 40},
        {"node": "n1", "first": 61, "last": 100},
        {"node": "n2", "first": 1, "last": 70},
        {"node": "n2", "first": 50, "last": 90},
    ]
    assert job._holes(held, ["n1", "n2", "n3"], 100) == [
        {"node": "n1", "from": 41, "to": 60},
        {"node": "n2", "from": 91, "to": 100},
        {"node": "n3", "from": 1, "to": 100},
    ]
    assert job._holes(held[:2], ["n1"], 40) == [{"node": "n1", "from": 41, "to": 60}]
