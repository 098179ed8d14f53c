"""The format "timerlog", view `events`: what a log says in columns. Without Spark."""

import json
import mmap
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from chaos.history.archive import follow
from deploy.local import LocalCluster
from tests.chaos.world import SALT, Log, by_id, by_key, durable_log, id_of, write_log
from tests.cluster.running import until
from tests.timerspark.conftest import started
from timer.entries import entry_frame
from timer.entries.entry_frame import EntryKind
from timer.entries.payloads import GroupOp, Op
from timer.entries.policies import Scope, ScopePolicy, encode_policy
from timer.files.log import MARK_NAME
from timer.files.segment import HEADER_SIZE
from timer.model.timer_errors import CorruptFileError
from timer.model.units import GroupId, LogIndex, Seq, TopicId
from timer.state.firing_trace import SeqMark
from timerclient import TimerClient
from timerspark.log import log_readers
from timerspark.log.log_events import EventReader
from timerspark.log.log_options import EVENT_COLUMNS
from timerspark.log.log_plan import LogGap, Names, Seqs, frame_heads
from timerspark.timerlog_format import TimerLogFormat

TYPES: dict[str, DataType] = {
    "STRING": StringType(),
    "BIGINT": LongType(),
    "INT": IntegerType(),
    "TIMESTAMP": TimestampType(),
    "BINARY": BinaryType(),
    "MAP<STRING, STRING>": MapType(StringType(), StringType()),
}
LATER = datetime(2036, 11, 1, 12, tzinfo=UTC)


def events(folder: Path | str, *columns: str, **options: str) -> list[dict[str, Any]]:
    named = {"columns": ", ".join(columns)} if columns else {}
    of = TimerLogFormat(CaseInsensitiveDict({"path": str(folder), **named, **options}))
    assert of.schema().startswith("`event` STRING, " if not columns else f"`{columns[0]}` ")
    schema = StructType()
    for name in columns or EVENT_COLUMNS:
        schema = schema.add(name, TYPES[EVENT_COLUMNS[name]])
    reader: Any = of.reader(schema)
    found = [*chain.from_iterable(map(reader.read, reader.partitions()))]
    assert all(batch.schema.equals(to_arrow_schema(schema, timezone="UTC")) for batch in found)
    return [row for batch in found for row in batch.to_pylist()]


def said(folder: Path | str, **options: str) -> list[tuple[Any, ...]]:
    found = events(folder, "index", "event", "topic", "group", "offset", **options)
    return [tuple(row.values()) for row in found]


def test_names_are_those_at_the_time_of_the_entry(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    first = log.topic("orders")
    group = log.group(first, "g")
    log.ack(first, group, [3, 4])
    log.delete_topic(first)
    again = log.topic("orders")
    other = log.group(again, "h")
    log.op(GroupOp(Op.SEEK, again, other, np.array([1], np.uint64)))
    log.groups += 1  # the seek gave it a new number
    log.move(again, type(other)(log.groups), [5], "dead", "dead-group")
    log.ack(type(first)(log.topics), type(other)(log.groups), [0])
    log.schedule(again, [(100, 1)])
    write_log(tmp_path / "log", log.frames, frames_per_segment=4)
    assert said(tmp_path)[1:] == [
        (2, "create_topic", "orders", None, None),
        (3, "create_group", "orders", "g", None),
        (4, "ack", "orders", "g", 3),
        (4, "ack", "orders", "g", 4),
        (5, "delete_topic", "orders", None, None),
        (6, "create_topic", "orders", None, None),
        (7, "create_group", "orders", "h", None),
        (8, "seek", "orders", "h", 1),
        (9, "move", "orders", "h", 5),
        (10, "ack", "dead", "dead-group", 0),
        (11, "schedule", "orders", None, None),
    ]
    topics = [row["topic_id"] for row in events(tmp_path, "topic_id", index_min="10")]
    assert topics == [3, 2]


def test_each_kind_of_entry_has_rows_and_options_select_them(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1, at_ms=1_001)
    topic = log.topic("t")
    producer = log.producer(b"token")
    log.schedule(topic, [(2_000, 1), (3_000, 2)], producer=(producer, 1), keys=[b"k", b""])
    log.cancel([(3_000, 2)], at_ms=1_500)
    log.cancel_keys([(topic, b"k")])
    log.reschedule(by_id([(2_000, 1)]), [4_000])
    log.reschedule(by_key([(topic, b"k")]), [5_000])
    group = log.group(topic, "g", max_attempts=3)
    log.fire(6_000)
    log.reserve(topic, group, 10)
    log.nack(topic, group, [0], [7_000])
    log.entry(EntryKind.CHECKPOINT)
    log.entry(EntryKind.POLICY, encode_policy(Scope("", TopicId(0)), ScopePolicy(ttl_ms=7)))
    write_log(tmp_path / "000", log.frames)
    found = events(tmp_path)
    assert [*found[0]] == [*EVENT_COLUMNS]
    assert [(row["event"], row["position"]) for row in found] == [
        *(("epoch", 0), ("create_topic", 0), ("register_producer", 0)),
        *(("schedule", 0), ("schedule", 1), ("cancel", 0), ("cancel", 0)),
        *(("reschedule", 0), ("reschedule", 0), ("create_group", 0), ("fire", 0)),
        *(("nack", 0), ("checkpoint", 0), ("policy", 0)),
    ]
    assert (found[13]["topic_id"], found[13]["details"]) == (None, '{"ttl_ms": 7}')
    one, two = found[3:5]
    assert (one["key"], two["key"], one["payload"][:1]) == ("k", None, b"\1")
    assert (one["due"], two["due"]) == tuple(
        datetime.fromtimestamp(second, UTC) for second in (2, 3)
    )
    assert (one["sequence"], one["on_conflict"], one["producer"]) == (1, "reject", two["producer"])
    assert one["producer"] == found[2]["producer"] != f"{producer:016x}"
    assert {row["id"] for row in found} == {None}  # without a data directory
    assert found[6]["key"] == found[8]["key"] == "k"
    assert found[8]["due"] == datetime.fromtimestamp(5, UTC)
    assert '"max_attempts": 3' in found[9]["details"]
    assert found[11]["until"] == datetime.fromtimestamp(7, UTC)
    assert found[10]["until"] == found[10]["time"] == datetime.fromtimestamp(6, UTC)
    some = {"time_min": "1970-01-01T00:00:01.500Z", "time_max": "1970-01-01T00:00:05Z"}
    assert [row[0] for row in said(tmp_path, **some)] == [*range(5, 10)]
    at_first = {"time_min": "1970-01-01T00:00:01.001Z", "time_max": "1970-01-01T00:00:01.001Z"}
    assert {row[0] for row in said(tmp_path, **at_first)} == {1, 2, 3, 4}
    assert [row[1] for row in said(tmp_path, kind="FIRE,EPOCH")] == ["epoch", "fire"]
    with pytest.raises(ValueError, match="colour: no option; one of columns, "):
        events(tmp_path, colour="red")
    with pytest.raises(ValueError, match="path: must be named"):
        events("")
    with pytest.raises(ValueError, match="columns = 'time, colour': must be"):
        events(tmp_path, "time", "colour")


def test_entries_that_are_not_wanted_fill_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_readers, "_BYTES_PER_BATCH", 100)
    log = Log()
    log.epoch(1)
    topic = log.topic("t")
    for mark in range(3):
        log.schedule(topic, [(100, mark)], size=200)
    log.group(topic, "g")
    write_log(tmp_path / "log", log.frames)
    assert said(tmp_path, kind="GROUP") == [(6, "create_group", "t", "g", None)]
    assert len(said(tmp_path)) == 6


def test_ids_follow_from_the_marks_of_the_manifest() -> None:
    log = Log()
    log.epoch(1)
    topic = log.topic("t")
    log.schedule(topic, [(100, 1), (200, 2)])
    log.occurrence(1, 1, planned_ms=1_000, due_ms=2_000)
    log.move(topic, GroupId(1), [0], "dead", "")
    log.schedule(topic, [(300, 3)])  # a repeat
    log.schedule(topic, [(400, 4)], producer=(7, 8))
    log.schedule(topic, [(500, 5)])  # after the manifest
    marks = [SeqMark(LogIndex(3), Seq(10)), SeqMark(LogIndex(6), Seq(14), b"\x80")]
    entries: list[Any] = [entry_frame.frame_at(memoryview(each), 0) for each in log.frames]

    def reader(marks: list[SeqMark]) -> EventReader:
        seqs = Seqs(None, {each.entry: each for each in marks}, 8)
        return EventReader(Names(), seqs, SALT, ["id", "new_id", "requested", "sequence"])

    every, last = reader(marks), reader(marks[:1])
    rows = [row for each in entries for b in every.read(each) for row in b.to_pylist()][2:]
    assert [row["id"] or row["new_id"] for row in rows] == [
        *(id_of(100, 10), id_of(200, 11), id_of(2_000, 12), id_of(1, 13)),
        *(None, id_of(400, 14), None),
    ]
    assert rows[2]["requested"] == datetime.fromtimestamp(1, UTC)
    assert [row["sequence"] for row in rows] == [None, None, 1, None, None, 8, None]
    for each in entries[:6]:
        last.skip(each)  # as if entry 6 were no repeat
    [batch] = last.read(entries[6])
    assert batch["id"].to_pylist() == [id_of(400, 15)]


def test_lives_of_a_log_are_joined_and_a_gap_between_them_is_an_error(tmp_path: Path) -> None:
    old = Log()
    old.epoch(1)
    for number in range(5):
        old.topic(f"t{number}")
    new = Log(prefix=old)
    new.frames = new.frames[:4]
    new.topic("later")
    new.topic("last")
    new.schedule(TopicId(2), [(100, 1)])
    write_log(tmp_path / "000", old.frames, frames_per_segment=2)
    write_log(tmp_path / "001", new.frames, first=5)
    assert [row[2] for row in said(tmp_path)] == [None, "t0", "t1", "t2", "later", "last", "t1"]
    for first in (3, 5):
        (tmp_path / "000" / f"{first:016x}.log").unlink()
    with pytest.raises(LogGap, match="entries 3 to 4 are missing before"):
        said(tmp_path)
    found = [(row[0], row[2]) for row in said(tmp_path, fail_on_loss="false")]
    assert found == [(1, None), (2, "t0"), (5, "later"), (6, "last"), (7, None)]


def test_life_that_a_later_one_replaces_is_not_read(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    for number in range(9):
        log.topic(f"t{number}")
    write_log(tmp_path / "000", log.frames)
    write_log(tmp_path / "001", log.frames[:8], first=7)
    write_log(tmp_path / "002", log.frames, first=5)
    assert [row[0] for row in said(tmp_path)] == [*range(1, 11)]
    (tmp_path / "notes.txt").write_text("no segment")
    assert said(tmp_path.as_uri()) == said(tmp_path)  # as from an object store
    with pytest.raises(FileNotFoundError):
        said(f"{tmp_path.as_uri()}/none")
    with pytest.raises(ValueError, match="path = 'unknown://x': "):
        said("unknown://x")


def test_names_after_a_missing_segment_are_unknown(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    first = log.topic("first")
    missing = log.topic("missing")
    log.delete_topic(first)
    log.topic("last")
    log.schedule(missing, [(100, 1)])
    write_log(tmp_path / "log", log.frames, frames_per_segment=2)
    (tmp_path / "log" / f"{3:016x}.log").unlink()
    assert said(tmp_path, index_min="6") == [(6, "schedule", None, None, None)]
    with pytest.raises(CorruptFileError, match="ends before entry 3; the next segment begins at 5"):
        said(tmp_path)


def test_filter_skips_no_segment_that_is_damaged_and_no_missing_one(tmp_path: Path) -> None:
    log = Log()
    for number in range(1, 13):
        log.epoch(number, at_ms=1_000 * number)
    write_log(tmp_path / "log", log.frames, frames_per_segment=4)
    first, second, _ = sorted((tmp_path / "log").iterdir())
    late = {"time_min": "1970-01-01T00:00:08Z", "time_max": "1970-01-01T00:00:08Z"}
    assert [row[0] for row in said(tmp_path, **late)] == [8]
    data = second.read_bytes()
    second.write_bytes(data.replace(log.frames[5], b"x" * len(log.frames[5])))
    for options in ({"index_min": "8"}, late):
        with pytest.raises(CorruptFileError, match="entry 6: "):
            said(tmp_path, **options)
    second.unlink()
    with pytest.raises(CorruptFileError, match="ends before entry 5; the next segment begins at 9"):
        said(tmp_path, index_min="8")
    first.unlink()
    with pytest.raises(LogGap, match="entries 3 to 8 are missing before"):
        said(tmp_path, index_min="3")
    for options in ({}, {"index_min": "3", "fail_on_loss": "false"}):
        assert [row[0] for row in said(tmp_path, **options)] == [9, 10, 11, 12]


def test_torn_payload_at_the_end_of_a_log_is_its_end(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    topic = log.topic("t")
    log.group(topic, "g")
    write_log(tmp_path / "log", log.frames)
    [path] = (tmp_path / "log").iterdir()
    data = path.read_bytes()
    head = len(data) - len(log.frames[-1]) + entry_frame.HEADER_SIZE
    path.write_bytes(data[:head].ljust(len(data), b"\0"))
    assert [row[0] for row in said(tmp_path)] == [1, 2]


def test_log_of_a_running_node_may_be_cut_while_it_is_planned(tmp_path: Path) -> None:
    path = durable_log(tmp_path, entries=400)
    assert path.stat().st_size > 2 * mmap.PAGESIZE, "a mapped page that is cut ends the process"
    heads = frame_heads(path)
    *_, (_, payload) = islice(heads, 390)
    os.truncate(path, HEADER_SIZE)
    assert payload() is None
    assert [*heads] == []


@pytest.mark.parametrize("at", [8, -1], ids=["head", "payload"])
def test_wrong_byte_in_a_durable_entry_is_no_torn_end(tmp_path: Path, at: int) -> None:
    path = durable_log(tmp_path)
    data = bytearray(path.read_bytes())
    last = data.rindex(entry_frame.MAGIC) - 8
    data[last + at if at > 0 else at] ^= 1
    path.write_bytes(data)
    for folder, options in (
        (tmp_path, {}),
        (tmp_path, {"index_min": "5"}),
        (tmp_path.as_uri(), {}),
    ):
        with pytest.raises(CorruptFileError, match=f"corrupt at byte {last}: entry 4: "):
            said(folder, **options)
    (path.parent / MARK_NAME).unlink()
    assert [row[0] for row in said(tmp_path)] == [1, 2, 3]


def test_wrong_byte_in_a_durable_entry_of_an_archived_log_is_no_torn_end(tmp_path: Path) -> None:
    path = durable_log(tmp_path / "nodes" / "n1")
    listed = {"nodes": [{"name": "n1", "data": "nodes/n1"}]}
    (tmp_path / "cluster.json").write_text(json.dumps(listed))
    follow(path.parent, tmp_path / "nodes" / "n1" / "kept")
    assert [row[0] for row in said(tmp_path)] == [1, 2, 3, 4]
    with path.open("r+b") as file:  # the archive has the same file
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    with pytest.raises(CorruptFileError, match=r"n1/log/.*: entry 4: checksum mismatch"):
        said(tmp_path)


@pytest.mark.parametrize("of_a_head", [False, True])
def test_log_that_was_copied_before_its_durable_mark_ends_torn(
    tmp_path: Path, *, of_a_head: bool
) -> None:
    path = durable_log(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(entry_frame.MAGIC) if of_a_head else -1])
    assert [row[0] for row in said(tmp_path)] == [1, 2, 3]


def test_nodes_whose_names_are_numbers_are_no_lives(tmp_path: Path) -> None:
    log = Log()
    log.epoch(1)
    for node in ("1", "2"):
        write_log(tmp_path / node / "log", log.frames)
    assert [row[0] for row in said(tmp_path, node="2")] == [1]


def test_longest_log_of_a_relative_path_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    for number in range(1, 6):
        log.epoch(number)
    for node, entries in (("n1", 2), ("n2", 5), ("n3", 4)):
        write_log(tmp_path / node / "log", log.frames[:entries])
    monkeypatch.chdir(tmp_path.parent)
    assert [row[0] for row in said(tmp_path.name)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [EntryKind.SCHEDULE, EntryKind.TOPIC])
def test_entry_that_cannot_be_decoded_is_named(tmp_path: Path, kind: EntryKind) -> None:
    log = Log()
    log.epoch(1)
    log.entry(kind, b"garbage")  # its checksum is right
    write_log(tmp_path / "log", log.frames)
    with pytest.raises(ValueError, match=r"log/.*: entry 2 can't be decoded: "):
        events(tmp_path)


def test_folder_without_a_segment_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()  # as in /var
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: has no segment of a log"):
        events(tmp_path)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[LocalCluster, TimerClient]]:
    with (
        started(tmp_path / "cluster", 1) as cluster,
        TimerClient(",".join(cluster.endpoints)) as client,
    ):
        yield cluster, client


def test_stopped_nodes_log_has_the_ids_that_clients_know(
    stopped: tuple[LocalCluster, TimerClient],
) -> None:
    cluster, client = stopped
    client.create_group("t", "g")
    one = client.schedule(
        *("t", b"one"), key="k", headers={"a": "ü"}, ordering_key="o", priority=7, due=LATER
    )
    many = client.schedule_batch("t", [b"%d" % n for n in range(5)], due=LATER)
    moved = client.reschedule(many[0], due=LATER + timedelta(days=1))
    client.cancel(many[1])
    with pytest.raises(Exception, match="k"):
        client.schedule("t", b"two", key="k", due=LATER)
    fired = client.schedule("t", b"now", delay=0)
    with client.consumer("t", group="g") as consumer:
        [message] = consumer.receive(1, timeout=60)
        message.ack().result(60)
    until(lambda: client.describe_topic("t").queue_end == 1)
    cluster.stop()
    found = events(cluster.directory)
    [data] = cluster.directory.glob("*/log")
    assert events(data.parent.as_uri()) == found
    rows = [row for row in found if row["event"] == "schedule"]
    assert [row["id"] for row in rows if row["payload"] != b"two"] == [
        *(one.id, *(timer.id for timer in many), fired.id)
    ]
    [first] = [row for row in rows if row["payload"] == b"one"]
    assert {name: first[name] for name in ("topic", "key", "headers", "due", "requested")} == {
        "topic": "t",
        "key": "k",
        "headers": [("a", "ü")],
        "due": LATER,
        "requested": LATER,
    }
    assert (first["ordering_key"], first["priority"], rows[1]["priority"]) == ("o", 7, 4)
    [change] = [row for row in found if row["event"] == "reschedule"]
    assert (change["id"], change["new_id"]) == (many[0].id, moved.id)
    [cancel] = [row for row in found if row["event"] == "cancel"]
    assert cancel["id"] == many[1].id
    some = events(cluster.directory, "new_id", kind="RESCHEDULE")
    assert some == [{"new_id": moved.id}]  # the entries before it are counted, and not returned
    [ack] = [row for row in found if row["event"] == "ack"]
    assert (ack["topic"], ack["group"], ack["offset"]) == ("t", "g", message.queue_offset)
    assert ack["time"] >= fired.due
