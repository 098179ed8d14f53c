"""Readers and writers of the format "timers", as Spark's tasks call them. Without Spark."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from tests.cluster.running import until
from timer.state.producers import ANSWER_ROWS_MAX
from timerclient import AlreadyExists, InvalidRequest, TimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import Closed, OutcomeForgotten, SequenceGap
from timerspark import format_options, message_readers, timer_requests, timer_writers
from timerspark.format_options import FormatOptions
from timerspark.message_readers import RESTORE_STEP, MessagesLost, OffsetRange, QueueIdentity
from timerspark.timers_format import TimersFormat

DUE = datetime(2036, 11, 1, 12, 0, 0, 1, tzinfo=UTC)
COLUMNS = {
    "topic": "string",
    "payload": "binary",
    "key": "string",
    "headers": "map<string,string>",
    "due": "timestamp",
    "delay": "double",
    "ordering_key": "string",
    "priority": "integer",
}
ARROW = {
    "topic": pa.string(),
    "payload": pa.binary(),
    "key": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()),
    "due": pa.timestamp("us", "UTC"),
    "delay": pa.float64(),
    "ordering_key": pa.string(),
    "priority": pa.int32(),
}


class Task:
    def __init__(self, partition: int, **properties: str) -> None:
        self.partition, self.properties = partition, properties

    def partitionId(self) -> int:  # noqa: N802
        return self.partition

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        return self.properties.get(name)


def struct(**columns: str) -> StructType:
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in columns.items()
        if kind != "map<string,string>"
    ]
    found = StructType.fromJson({"type": "struct", "fields": fields})
    if "headers" in columns:
        from pyspark.sql.types import MapType, StringType

        found = found.add("headers", MapType(StringType(), StringType()))
    return found


def source(cluster: str, topic: str, /, **options: Any) -> TimersFormat:
    given = {"cluster": cluster, "path": topic, **{k: str(v) for k, v in options.items()}}
    return TimersFormat(CaseInsensitiveDict(given))


def batch(**columns: list[Any]) -> pa.RecordBatch:
    arrays = [pa.array(values, ARROW[name]) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=[*columns])


def kinds(*names: str) -> StructType:
    return struct(**{name: COLUMNS[name] for name in names})


def test_older_pyspark_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.2.0", "4.10.0.dev1", "5.0.0"):
        monkeypatch.setattr("pyspark.__version__", version)
        assert source("h:1", "t").name() == "timers"
    monkeypatch.setattr("pyspark.__version__", "4.1.1")
    with pytest.raises(ImportError, match=r"timers needs PySpark 4\.2 or newer, not 4\.1\.1$"):
        source("h:1", "t")


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    found = Task(3)
    monkeypatch.setattr(timer_writers, "_task", lambda: found)
    return found


def read(reader: Any) -> Iterator[Any]:
    for part in reader.partitions() or [InputPartition(None)]:  # as Spark does
        for found in reader.read(part):
            yield from found.to_pylist()


def all_columns(cluster: str, topic: str, **options: Any) -> list[dict[str, Any]]:
    of = source(cluster, topic, **options)
    names = [each.split()[0] for each in of.schema().replace(", STRING>", ">").split(", ")]
    types = {"offset": "long", "due": "timestamp", "requested": "timestamp"}
    types |= {
        "priority": "integer",
        "fired_at": "timestamp",
        "payload": "binary",
        "headers": "map<string,string>",
    }
    schema = struct(**{name: types.get(name, "string") for name in names})
    return [*read(of.reader(schema))]


def test_rows_are_written_once_however_often_their_task_runs(
    cluster: str, client: TimerClient, topic: str, task: Task
) -> None:
    rows = batch(
        payload=[b"%d" % n for n in range(2_500)],
        key=[None if n % 2 else f"k{n}" for n in range(2_500)],
        headers=[{f"{m}": "ü" for m in range(40)} if n == 7 else None for n in range(2_500)],
        due=[DUE + timedelta(hours=n) for n in range(2_500)],
    )
    schema = kinds("payload", "key", "due", "headers")
    of: Any = source(cluster, topic, job_id=topic)
    first = of.writer(schema, False).write(iter([rows]))
    assert (first.rows, first.repeated) == (2_500, 0)
    again = of.writer(schema, False).write(iter([rows]))
    assert (again.rows, again.repeated) == (2_500, 2_500)
    with pytest.raises(InvalidRequest, match="sequence"):
        of.writer(schema, False).write(iter([rows.slice(1)]))
    task.partition = 4  # another partition is another producer; pending keys are taken
    # The task succeeds: Spark would repeat a failed one, and so miss answers that are forgotten.
    stream: Any = source(cluster, topic)
    writer = of.writer(schema, False)
    second = writer.write(iter([rows.slice(2_000)]))
    writer.commit([first, None])
    with pytest.raises(AlreadyExists, match="250 of 3000 rows were not scheduled for their keys"):
        writer.commit([first, second])
    with pytest.raises(AlreadyExists, match="250 of 500 rows were not scheduled for their keys"):
        stream.streamWriter(kinds("payload", "delay"), False).commit([second], 0)
    assert len({stream.writer(schema, False)._job for _ in range(2)}) == 2  # without a job_id
    update: Any = source(cluster, topic, on_conflict="update").writer(schema, False)
    missing = batch(payload=[b""], key=["none"], headers=[None], due=[DUE])
    with pytest.raises(AlreadyExists, match="1 of 1 rows were not scheduled for their keys"):
        update.commit([update.write(iter([missing]))])
    status = client.describe_topic(topic)
    assert status.scheduled == 2_500 + 250
    pending = {each.payload: each for each in client.list_timers(topic)}
    assert pending[b"7"].headers == {f"{m}": "ü" for m in range(40)}
    found = pending[b"2000"]
    assert (found.key, found.requested_ms) == (
        "k2000",
        # a microsecond more is the next millisecond: no timer fires early
        round((DUE + timedelta(hours=2_000)).timestamp() * 1000) + 1,
    )


def test_micro_batch_with_a_taken_key_can_be_ended(
    cluster: str, client: TimerClient, topic: str, task: Task
) -> None:
    task.properties = {timer_writers.QUERY_ID: topic, timer_writers.BATCH_ID: "7"}
    client.schedule(topic, b"", key="k1", due=DUE)
    rows = batch(payload=[b""] * 4, key=["k3", "k0", "k1", "k2"], due=[DUE] * 4)

    def ended(**options: Any) -> None:
        of = source(cluster, topic, **options)
        writer: Any = of.streamWriter(kinds("payload", "key", "due"), False)
        writer.commit([writer.write(iter([rows]))], 7)

    with pytest.raises(AlreadyExists, match=r"1 of 4 rows .* such as \['k1'\]: set fail_on_conf"):
        ended()
    client.cancel(topic=topic, key="k1")
    with pytest.raises(AlreadyExists, match="1 of 4 rows"):  # the cluster repeats its answer
        ended()
    with pytest.raises(InvalidRequest, match="sequence = 1") as failed:
        ended(on_conflict="replace")
    assert "another on_conflict" in failed.value.__notes__[-1]
    ended(fail_on_conflict="false")
    assert {each.key for each in client.list_timers(topic)} == {"k3", "k0", "k2"}


def test_long_headers_make_more_requests() -> None:
    headers = [{"h": "x" * 30_000, "n": f"{n}"} for n in range(400)]
    rows = batch(payload=[b""] * 400, delay=[1.0] * 400, headers=headers)
    options = FormatOptions.of({"cluster": "a:1", "path": "t"})
    found = [*timer_requests.requests_of([rows.slice(100)], options)]
    assert [sum(map(len, (t.payload_sizes for t in each.timers))) for each in found] == [
        139,
        139,
        22,
    ]
    assert max(each.ByteSize() for each in found) < format_options.REQUEST_BYTES_MAX + 10_000


def test_requests_are_as_small_as_the_options_say() -> None:
    rows = batch(payload=[b"x" * 100] * 10, delay=[1.0] * 10)

    def sizes(**options: str) -> list[int]:
        of = FormatOptions.of({"cluster": "a:1", "path": "t", **options})
        found = timer_requests.requests_of([rows], of)
        return [len(each.timers[0].payload_sizes) for each in found]

    assert sizes(rows_per_request="4") == [4, 4, 2]
    assert sizes(bytes_per_request="350") == [3, 3, 3, 1]
    assert sizes(bytes_per_request="99") == [1] * 10


@pytest.mark.parametrize("kind", [pa.float64(), pa.duration("us")])
def test_delays_are_rounded_up(kind: pa.DataType) -> None:
    micros = [0, 1, 1_000, 1_001]
    delays = [n / 1e6 for n in micros] if kind == pa.float64() else micros
    columns = [pa.array([b""] * 4), pa.array(delays, kind)]
    rows = pa.RecordBatch.from_arrays(columns, names=["payload", "delay"])
    options = FormatOptions.of({"cluster": "a:1", "path": "t"})
    [request] = timer_requests.requests_of([rows], options)
    assert [*request.timers[0].delay_ms] == [0, 1, 1, 2]


def sender(schedule: Any) -> timer_writers._Sender:
    """A sender whose calls of Schedule are answered by a function of the request."""
    timers = SimpleNamespace(
        Schedule=lambda request, **_: schedule(request),
        RegisterProducer=lambda _, **__: pb.RegisterProducerResponse(producer_id=7),
    )

    async def call(method: Any, **_: object) -> Any:
        await asyncio.sleep(0)
        return method(SimpleNamespace(timers=timers), 1.0)

    client: Any = SimpleNamespace(
        nodes=lambda: SimpleNamespace(call=call), within_s=lambda seconds: seconds
    )
    return timer_writers._Sender(client, "a partition")


def requests(count: int, rows: int = 2) -> Iterator[pb.ScheduleRequest]:
    for _ in range(count):
        yield pb.ScheduleRequest(timers=[pb.TimerColumns(payload_sizes=[1] * rows)])


async def test_forgotten_requests_count_as_written_if_the_last_one_is_compared() -> None:
    def schedule(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
        if request.sequence < 3:
            raise OutcomeForgotten("x")
        return pb.ScheduleResponse(duplicate=True)

    written = await sender(schedule).run(requests(3))
    assert (written.rows, written.repeated) == (6, 6)
    with pytest.raises(InvalidRequest, match="sequence = 2: must be the last request") as failed:
        await sender(schedule).run(requests(2))  # another, shorter table with the same job_id
    assert failed.value.__notes__[0] == "request 2 of the partition a partition"


def test_cluster_keeps_the_answers_of_all_requests_in_flight() -> None:
    rows_max = timer_writers.REQUESTS_IN_FLIGHT * format_options.REQUEST_ROWS_MAX
    assert rows_max <= ANSWER_ROWS_MAX  # else the answer to a repeated request may be forgotten


async def test_requests_that_overtake_one_are_sent_again_after_it() -> None:
    applied: list[int] = []
    attempts: list[int] = []

    def schedule(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
        attempts.append(request.sequence)
        first = attempts.count(request.sequence) == 1
        if request.sequence > len(applied) + 1 or (first and request.sequence in (3, 30)):
            raise SequenceGap("x")  # as if another one had overtaken it, too
        applied.append(request.sequence)
        return pb.ScheduleResponse()

    written = await sender(schedule).run(requests(50))
    assert (applied, written.rows) == ([*range(1, 51)], 100)
    again = [number for number in {*attempts} if attempts.count(number) > 1]
    assert {3, 30} <= {*again}
    assert len(again) <= 2 * timer_writers.REQUESTS_IN_FLIGHT


async def test_unanswered_requests_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_writers, "BYTES_IN_FLIGHT", 50)
    unanswered: list[int] = []

    def schedule(_: pb.ScheduleRequest) -> pb.ScheduleResponse:
        unanswered.append(len(found._unanswered))
        return pb.ScheduleResponse()

    found = sender(schedule)
    await found.run(requests(9, rows=20))  # of more than 25 bytes each
    assert {*unanswered} == {1}


async def test_failed_request_ends_the_task_with_its_own_error_and_nothing_after_it() -> None:
    applied: list[int] = []

    def schedule(request: pb.ScheduleRequest) -> pb.ScheduleResponse:
        if request.sequence == 5:
            raise InvalidRequest.of("payload", "x", "must be smaller")
        if request.sequence > len(applied) + 1:
            raise SequenceGap("x")
        applied.append(request.sequence)
        return pb.ScheduleResponse()

    with pytest.raises(InvalidRequest, match="must be smaller") as failed:
        await sender(schedule).run(requests(50))
    assert failed.value.__notes__ == ["request 5 of the partition a partition"]
    assert applied == [1, 2, 3, 4]


def test_ordering_keys_and_priorities_are_columns(
    cluster: str, client: TimerClient, topic: str
) -> None:
    rows = batch(
        payload=[b"0", b"1", b"2"],
        due=[DUE] * 3,
        ordering_key=["a", None, ""],
        priority=[9, None, 4],
    )
    writer: Any = source(cluster, topic).writer(
        kinds("payload", "due", "ordering_key", "priority"), False
    )
    assert writer.write(iter([rows])).rows == 3
    found = {each.payload: each for each in client.list_timers(topic)}
    traits = [(found[name].ordering_key, found[name].priority) for name in (b"0", b"1", b"2")]
    assert traits == [("a", 9), (None, 4), (None, 4)]
    for wrong in (-1, 10):
        one = batch(payload=[b""], due=[DUE], ordering_key=[None], priority=[wrong])
        with pytest.raises(InvalidRequest, match=f"priority = {wrong}: must be 0 to 9"):
            writer.write(iter([one]))


def test_micro_batch_is_written_once(
    cluster: str, client: TimerClient, topic: str, task: Task
) -> None:
    rows = batch(payload=[b"a", b"b"], topic=[topic, topic + "-2"], delay=[0.0, 3600.5])
    of = source(cluster, "")
    writer: Any = of.streamWriter(kinds("payload", "topic", "delay"), False)
    with pytest.raises(InvalidRequest, match="must be set by Spark"):
        writer.write(iter([rows]))
    for query, number, partition in (
        *(("q", "0", 3), ("q", "0", 3), ("q", "1", 3)),
        *(("q", "0", 4), ("r", "0", 3)),
    ):
        task.properties = {timer_writers.QUERY_ID: topic + query, timer_writers.BATCH_ID: number}
        task.partition = partition
        writer.write(iter([rows]))
    counts = [client.describe_topic(topic + more).scheduled for more in ("", "-2")]
    assert counts == [4, 4]
    assert {each.payload for each in client.list_timers(topic + "-2")} == {b"b"}


def test_messages_are_read_in_ranges_of_offsets(
    cluster: str, client: TimerClient, topic: str
) -> None:
    client.create_group(topic, "g")
    ended: Any = source(cluster, topic).streamReader(struct(key="string"))
    ended.prepareForTriggerAvailableNow()  # before any message
    headers = [{"a": "b", "c": ""} if n == 3 else {} for n in range(1_000)]
    keys = [f"k{n}" if n % 3 == 0 else None for n in range(1_000)]
    payloads = [b"%d" % n for n in range(1_000)]
    timers = client.schedule_batch(
        *(topic, payloads),
        keys=keys,
        headers=headers,
        ordering_keys=["o" if n == 3 else None for n in range(1_000)],
        priorities=[9 if n == 4 else None for n in range(1_000)],
        due_ms=10**12,
    )
    until(lambda: client.describe_topic(topic).queue_end == 1_000)
    found = all_columns(cluster, topic, rows_per_partition=300)
    assert [(each["offset"], each["payload"]) for each in found] == [*enumerate(payloads)]
    assert [each["key"] for each in found] == keys
    assert [each["id"] for each in found] == [timer.id for timer in timers]
    assert (found[3]["headers"], found[4]["headers"]) == ([("a", "b"), ("c", "")], [])
    assert [each["ordering_key"] for each in found[2:5]] == [None, "o", None]
    assert [each["priority"] for each in found[2:5]] == [4, 4, 9]
    assert found[0]["requested"] == datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
    assert timers[0].due == found[0]["due"] <= found[0]["fired_at"]
    some = all_columns(cluster, topic, start_offset=10, end_offset=12, columns="offset, topic")
    assert some == [{"offset": 10, "topic": topic}, {"offset": 11, "topic": topic}]
    stream: Any = source(cluster, topic, rows_per_batch=400).streamReader(struct(key="string"))
    first = stream.initialOffset()
    second = stream.latestOffset(first, ReadMaxRows(400))
    third = stream.latestOffset(second, ReadAllAvailable())
    assert [int(each["offset"]) for each in (first, second, third)] == [0, 400, 1_000]
    assert stream.latestOffset(third, ReadAllAvailable()) == third
    assert ended.latestOffset(first, ReadAllAvailable()) == first
    later: Any = source(cluster, topic, start_offset="latest").streamReader(struct(key="string"))
    assert later.initialOffset() == third
    beyond: Any = source(cluster, topic, start_offset=1_001).streamReader(struct(key="string"))
    with pytest.raises(InvalidRequest, match="start_offset = 1001: must be at most 1000, the end"):
        beyond.initialOffset()
    parts = stream.partitions(first, second) + stream.partitions(second, third)
    read_keys = [key for part in parts for b in stream.read(part) for key in b["key"].to_pylist()]
    assert read_keys == keys
    with pytest.raises(MessagesLost, match="ends at offset 1000, below 1001"):
        [*stream.read(OffsetRange(QueueIdentity.of(first), 0, 1_001))]
    with pytest.raises(MessagesLost, match="ends at offset 1000, below 1001"):
        stream.latestOffset({**third, "offset": 1_001}, ReadAllAvailable())
    # a retention that is over
    with client.consumer(topic, group="g") as consumer:
        for _, message in zip(range(1_000), consumer, strict=False):
            _ = message.ack()
    until(lambda: client.read_messages(topic).begin_offset == 1_000)
    with pytest.raises(MessagesLost, match="from offset 1000 on; 10 is below it"):
        all_columns(cluster, topic, start_offset=10, end_offset=1_000)
    with pytest.raises(MessagesLost):
        [*stream.read(parts[0])]
    assert all_columns(cluster, topic, start_offset=10, fail_on_loss="false") == []
    going_on = source(cluster, topic, rows_per_batch=400, fail_on_loss="false")
    left: Any = going_on.streamReader(struct(key="string"))
    assert left.latestOffset(first, ReadMaxRows(400)) == third
    assert left.partitions(first, third) == [], "no tasks for messages that are gone"
    ending: Any = going_on.streamReader(struct(key="string"))
    ending.prepareForTriggerAvailableNow()
    client.delete_topic(topic)
    client.create_topic(topic)
    client.schedule(topic, b"", due_ms=10**12)
    until(lambda: client.describe_topic(topic).queue_end == 1)
    anew = left.latestOffset(third, ReadMaxRows(400))
    assert (anew["topic_id"] != third["topic_id"], anew["offset"]) == (True, 1)
    assert ending.latestOffset(third, ReadAllAvailable()) == anew
    client.schedule(topic, b"", due_ms=10**12)
    until(lambda: client.describe_topic(topic).queue_end == 2)
    assert ending.latestOffset(anew, ReadAllAvailable()) == anew, "it ends"
    assert [(each.start, each.end) for each in left.partitions(third, anew)] == [(0, 1)]
    assert [*left.read(OffsetRange(QueueIdentity.of(first), 0, 1))] == []
    with pytest.raises(MessagesLost, match="created again"):
        stream.latestOffset(third, ReadAllAvailable())


def test_idle_stream_keeps_its_client(
    cluster: str, client: TimerClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[TimerClient] = []
    statuses: list[object] = []

    class Counted(TimerClient):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            clients.append(self)

        def status(self, *args: Any, **options: Any) -> Any:
            statuses.append(args)
            return super().status(*args, **options)

    monkeypatch.setattr(message_readers, "TimerClient", Counted)
    client.create_topic(topic)
    stream: Any = source(cluster, topic).streamReader(struct(key="string"))
    first = stream.initialOffset()
    for _ in range(3):
        assert stream.latestOffset(first, ReadAllAvailable()) == first
    assert (len(clients), len(statuses)) == (1, 1)
    stream.stop()
    with pytest.raises(Closed):
        clients[0].describe_topic(topic)


def test_position_in_another_queue_is_lost(cluster: str, client: TimerClient, topic: str) -> None:
    client.schedule_batch(topic, [b""] * 5, due_ms=10**12)
    until(lambda: client.describe_topic(topic).queue_end == 5)

    def reader(**options: Any) -> Any:
        return source(cluster, topic, **options).streamReader(struct(key="string"))

    stream, going_on = reader(), reader(fail_on_loss="false")
    first = stream.initialOffset()
    last = stream.latestOffset(first, ReadAllAvailable())
    epoch = last["epoch"]
    for other, reason, left in (
        ({"cluster": "elsewhere"}, "is of the cluster 'elsewhere', and", 0),
        ({"topic": "others"}, f"is of the topic 'others', and the query reads '{topic}'", 0),
        ({"epoch": epoch - RESTORE_STEP, "offset": 7}, "was restored from a backup", 5),
        ({"epoch": epoch + 1, "offset": 2}, "was restored from a backup", 2),
    ):
        position = {**last, **other}
        with pytest.raises(MessagesLost, match=reason):
            stream.latestOffset(position, ReadAllAvailable())
        with pytest.raises(MessagesLost, match=reason):  # of a micro-batch that is repeated
            stream.partitions({**position, "offset": 0}, position)
        assert going_on.latestOffset(position, ReadAllAvailable()) == last
        ranges = going_on.partitions(position, last)
        assert [(each.start, each.end) for each in ranges] == ([(left, 5)] if left < 5 else [])
    assert stream.latestOffset({**last, "epoch": epoch - 1}, ReadAllAvailable())["offset"] == 5
    old = {"topic_id": last["topic_id"], "offset": 5}  # as version 0.1 wrote it
    assert stream.latestOffset(old, ReadAllAvailable()) == old
    assert going_on.latestOffset({**old, "offset": 7}, ReadAllAvailable()) == last
    [part] = stream.partitions({**old, "offset": 2}, last)
    assert (part.start, part.end, [*map(len, stream.read(part))]) == (2, 5, [3])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (("payload",), {}, "column due or a column delay"),
        (("due",), {}, "column payload"),
        (("payload", "due", "topic"), {}, "not both"),
        (("payload", "due"), {"on_conflict": "update"}, "column key"),
        (("payload", "due"), {"on_conflict": "perhaps"}, "on_conflict"),
        (("payload", "due"), {"colour": "red"}, "colour"),
        (("payload", "due"), {"timeout": "0"}, "timeout"),
        (("payload", "due"), {"columns": "key, key"}, "columns"),
        (("payload", "due"), {"fail_on_loss": "perhaps"}, "fail_on_loss"),
        (("payload", "due"), {"start_offset": "-1"}, "start_offset"),
        (("payload", "due"), {"topic": "others"}, "topic = 'others': must be the path 'orders'"),
        (("payload", "due"), {"rows_per_request": "0"}, "rows_per_request = '0': .* 1 to 16384"),
        (("payload", "due"), {"bytes_per_request": "9M"}, "bytes_per_request"),
    ],
)
def test_wrong_columns_and_options_are_named(
    columns: tuple[str, ...], options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        source("127.0.0.1:1", "orders", **options).writer(kinds(*columns), False)


def test_nulls_and_values_out_of_range_are_named(cluster: str, topic: str) -> None:
    writer: Any = source(cluster, topic).writer(kinds("payload", "delay"), False)
    for row, message in (((None, 1.0), "payload"), ((b"", None), "delay"), ((b"", -1.0), "delay")):
        with pytest.raises(InvalidRequest, match=f"{message}( = .*)?: "):
            writer.write(iter([batch(payload=[row[0]], delay=[row[1]])]))
    for seconds, named in (
        *((-5.0, "-5000"), (1e300, "1.*e[+]30[23]"), (float("inf"), "inf"), (1e306, "inf")),
        *((float("nan"), "nan"), (281474976710.656, "281474976710656")),
    ):
        with pytest.raises(InvalidRequest, match=f"^delay = '{named} ms': must be 0 to "):
            writer.write(iter([batch(payload=[b""], delay=[seconds])]))
    nulls = batch(payload=[b""], delay=[1.0], headers=[[("a", None)]])
    keyed: Any = source(cluster, topic).writer(kinds("payload", "delay", "headers"), False)
    with pytest.raises(InvalidRequest, match="headers: no value may be null"):
        keyed.write(iter([nulls]))
    with pytest.raises(InvalidRequest, match="append"):
        source(cluster, topic).writer(kinds("payload", "delay"), True)
    with pytest.raises(InvalidRequest, match="schema = 'key bigint'"):
        source(cluster, topic).reader(struct(key="long"))
