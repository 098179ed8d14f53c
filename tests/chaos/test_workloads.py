"""The workloads: their books, and their clients against a fake cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import workloads
from chaos.history.history import OpOutcome, RunFolder, payload_of, read
from chaos.history.history_check import check
from chaos.workloads import workload_clients as clients_module
from chaos.workloads import workload_consumer
from chaos.workloads.history_books import Books
from chaos.workloads.recorded_requests import RecordedRequests, outcome_of
from chaos.workloads.workload_clients import Produce, Setting, WorkloadClients, WorkloadKind
from chaos.workloads.workload_consumer import RecordingConsumer, WorkloadReader
from tests.chaos.world import told
from tests.timerclient.conftest import once
from tests.timerclient.fake_cluster import NOW_MS, Cluster, wire_error
from tests.waiting import until
from timerclient import AsyncTimerClient
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.pending_timers import Changed, Rescheduled
from timerclient.rows.scheduled_timers import Timer
from timerclient.values import errors
from timerclient.values.results import CancelResult, RescheduleResult


def lines(run: RunFolder, name: str, op: str) -> list[dict[str, Any]]:
    """Return the lines of one operation from all histories whose names begin with `name`."""
    paths = sorted(run.histories.glob(f"{name}*.jsonl"))
    return [line for path in paths for line in told(path) if line["op"] == op]


def flat(found: Sequence[dict[str, Any]], field: str) -> list[Any]:
    """Return the elements of a list of all lines, one after the other."""
    return [*chain.from_iterable(line.get(field) or () for line in found)]


# ---- one client against a fake cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncTimerClient]:
    async with AsyncTimerClient([node.address for node in cluster.nodes], timeout=5) as client:
        yield client


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_outcome_of_an_error_is_what_it_says_of_itself() -> None:
    assert outcome_of(errors.Overloaded("x")) is OpOutcome.FAIL
    assert outcome_of(errors.ConnectionLost("x")) is OpOutcome.UNKNOWN
    assert outcome_of(errors.as_unknown(errors.Overloaded("x"))) is OpOutcome.UNKNOWN
    assert outcome_of(errors.OutcomeForgotten("x")) is OpOutcome.UNKNOWN


async def test_producer_writes_down_every_outcome(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder
) -> None:
    books = Books()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    assert len((await producer.batch([1, 2], [NOW_MS, NOW_MS])).ids) == 2
    cluster.on_schedule = lambda _: wire_error(pb.REASON_INVALID_REQUEST, "no")
    assert (await producer.single(3, 0.5)).ids == []
    cluster.on_schedule = lambda _: wire_error(pb.REASON_QUOTA_REACHED)
    refused = await producer.batch([6], [NOW_MS])  # at once, though it may succeed later
    assert isinstance(refused.error, errors.TimerError)
    cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
    assert (await producer.batch([4], [NOW_MS], timeout_s=0.2)).ids == []
    asked = asyncio.create_task(producer.batch([5], [NOW_MS], timeout_s=60))
    await until(lambda: len([*read(run.histories / "p.jsonl")]) == 2 * 4 + 1)
    asked.cancel()
    await asyncio.wait([asked])
    assert books.asked == 5
    producer.close()
    found = lines(run, "p", "schedule")
    assert [(line["marks"], line["outcome"], bool(line.get("ids"))) for line in found] == [
        ([1, 2], "ok", True),
        ([3], "fail", False),
        ([6], "fail", False),
        ([4], "unknown", False),
    ]
    assert found[1]["due_ms"] is None
    assert [*check(run.histories / "p.jsonl")] == []
    assert books.unanswered == 3
    assert [row.payload for row in cluster.rows[:2]] == [payload_of(m, 100) for m in (1, 2)]


async def test_cancel_says_whether_it_was_refused(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder
) -> None:
    producer = RecordedRequests(run, "p", client, Books(), topic="t")
    due_ms = [NOW_MS + 60_000, NOW_MS, NOW_MS + 60_000, NOW_MS + 60_000]
    ids = (await producer.batch([1, 2, 3, 4], due_ms)).ids
    done = [await producer.cancel(ids[:1]), await producer.cancel(ids[:2])]
    cluster.on_call = lambda _: wire_error(pb.REASON_INVALID_REQUEST, "no")
    assert [*done, await producer.cancel(ids[2:3])] == [True, True, False]
    producer.close()
    found = lines(run, "p", "cancel")
    assert [line.get("results") for line in found] == [
        ["CANCELLED"],
        ["ALREADY_CANCELLED", "ALREADY_FIRED"],
        None,
    ]
    assert [line["outcome"] for line in found] == ["ok", "ok", "fail"]
    assert [*check(run.histories / "p.jsonl")] == []


class Answers:
    """A client that answers what it is told to, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = [*answers]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*_: Any, **__: Any) -> Any:
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


async def test_changer_writes_down_what_it_lets_hold_for_the_topic(run: RunFolder) -> None:
    deleted = SimpleNamespace(topic_id=7, pending=3)
    client: Any = Answers(None, None, errors.LeadershipLost("x"), None, deleted, None)
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    assert [await changer.pause(), await changer.resume("drop"), await changer.resume("all")] == [
        True,
        True,
        False,
    ]
    assert await changer.rule({"ttl_ms": 5}, among=("retention_ms", "ttl_ms"))
    assert [await changer.delete(), await changer.delete()] == [True, True]
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(line["op"], line["outcome"], line.get("said")) for line in found] == [
        ("policy", "ok", '{"paused": true}'),
        ("policy", "ok", '{"catch_up": "drop", "paused": false}'),
        ("policy", "unknown", '{"catch_up": "all", "paused": false}'),
        ("policy", "ok", '{"retention_ms": null, "ttl_ms": 5}'),
        ("delete", "ok", None), ("delete", "ok", None),
    ]  # fmt: skip
    assert [line.get("pending") for line in found[4:]] == [3, None]  # gone, its answer lost
    assert [*check(run.histories / "c.jsonl")] == []


async def test_changer_names_the_scope_that_it_lets_say_something(run: RunFolder) -> None:
    asked: list[dict[str, object]] = []

    async def alter(said: object, *, unset: object, **where: object) -> None:
        asked.append(where)

    client: Any = SimpleNamespace(alter_policies=alter)
    for topic in ("ns/t", "plain"):
        changer = RecordedRequests(run, topic[0], client, Books(), topic=topic)
        for scope in ("topic", "namespace", "cluster"):
            assert await changer.rule({"tick_ms": 20}, among=("tick_ms",), scope=scope)
        changer.close()
    assert asked[:3] == [{"topic": "ns/t"}, {"namespace": "ns"}, {"cluster": True}]
    assert asked[3:] == [{"topic": "plain"}, {"namespace": "default"}, {"cluster": True}]
    names = [line["topic"] for at in "np" for line in told(run.histories / f"{at}.jsonl")]
    assert names == ["ns/t", "ns/", "/", "plain", "default/", "/"]
    assert [*check(run.histories / "n.jsonl")] == []


async def test_changer_writes_down_every_way_and_outcome(run: RunFolder) -> None:
    raw = bytes(15)
    moved = Rescheduled(RescheduleResult.RESCHEDULED, Timer(raw))
    refused = errors.Overloaded("x")
    client: Any = Answers(
        [CancelResult.CANCELLED, CancelResult.NOT_FOUND], [moved, Rescheduled(
            RescheduleResult.ALREADY_FIRED, None)], refused, Changed.of(7, exact=True), refused,
        Changed.of(8, exact=False),
    )  # fmt: skip
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    ids = ["0" * 24, "1" * 24]
    await changer.cancel_keys(["a", "b"])
    assert await changer.reschedule(ids, [1, 2]) == [Timer(raw).id]
    await changer.reschedule_keys(["a"], [3])
    await changer.cancel_where({"due_from": 4, "due_to": 5})
    await changer.cancel_where({"key_prefix": "k"})  # a page of it may be done
    await changer.reschedule_where({"key_prefix": "k"}, 6)
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(line["op"], line["outcome"]) for line in found] == [
        ("cancel", "ok"), ("reschedule", "ok"), ("reschedule", "fail"), ("cancel", "ok"),
        ("cancel", "unknown"), ("reschedule", "unknown"),
    ]  # fmt: skip
    assert found[1]["new_ids"] == [Timer(raw).id, None]
    assert (found[3]["due_from_ms"], found[3]["due_to_ms"], found[3]["changed"]) == (4, 5, 7)
    assert [*check(run.histories / "c.jsonl")] == []


async def test_changer_writes_down_changes_of_series(run: RunFolder) -> None:
    client: Any = Answers(1, 1, errors.LeadershipLost("x"), None, errors.NotFound("x"))
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("create_series", "a", {"said": {"every": 1.5, "misfire": "skip"}}),
        ("alter_series", "a", {"said": {"paused": True}}),
        ("alter_series", "a", {"said": {"paused": False}}),
        ("delete_series", "a", {}), ("delete_series", "b", {}),
    ]  # fmt: skip
    done = [await changer.change(op, client.change(), key=key, **more) for op, key, more in changes]
    assert done == [True, True, False, True, False]
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(each["op"], each["key"], each["outcome"], each.get("said")) for each in found] == [
        ("create_series", "a", "ok", '{"every_ms": 1500, "misfire": "skip"}'),
        ("alter_series", "a", "ok", '{"paused": true}'),
        ("alter_series", "a", "unknown", '{"paused": false}'),
        ("delete_series", "a", "ok", None), ("delete_series", "b", "fail", None),
    ]  # fmt: skip
    assert [*check(run.histories / "c.jsonl")] == []


async def test_changer_writes_down_seeks_deletions_of_groups_and_redrives(run: RunFolder) -> None:
    lost = errors.LeadershipLost("x")
    sought = SimpleNamespace(group_id=9)
    client: Any = Answers(sought, sought, sought, errors.NotFound("x"), None, lost, 7, lost)
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    assert await changer.seek("g", offset=5)
    assert await changer.seek("g", start="earliest")
    assert await changer.seek("g", time_ms=1_000)
    assert not await changer.seek("g", start="latest")
    for surely in (True, False):
        assert await changer.change("delete_group", client.delete_group(), group="g") == surely
    await changer.redrive("t.g.dead", None)
    await changer.redrive("t.g.dead", 3)  # some may be sent
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(each["op"], each["outcome"]) for each in found] == [
        *[("seek", "ok")] * 3, ("seek", "fail"), ("delete_group", "ok"),
        ("delete_group", "unknown"), ("redrive", "ok"), ("redrive", "unknown"),
    ]  # fmt: skip
    assert [each.get("to_offset") for each in found[:4]] == [5, 0, None, None]
    assert [each.get("group_id") for each in found[:4]] == [9, 9, 9, None]
    assert (found[6]["topic"], found[6]["changed"]) == ("t.g.dead", 7)
    assert [*check(run.histories / "c.jsonl")] == []


@contextlib.asynccontextmanager
async def consuming(
    run: RunFolder, client: AsyncTimerClient, books: Books, reader: WorkloadReader | None = None,
    stopping: asyncio.Event | None = None,
) -> AsyncIterator[RecordingConsumer]:  # fmt: skip
    """A consumer of `t` whose history is `c`, and which has ended after the block."""
    consumer = RecordingConsumer(
        run, "c", client, books, reader or WorkloadReader(), topic="t",
        stopping=stopping or asyncio.Event(),
    )  # fmt: skip
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(consumer.run())
        yield consumer
        await consumer.close()


async def schedule(run: RunFolder, client: AsyncTimerClient, books: Books, *marks: int) -> None:
    producer = RecordedRequests(run, "p", client, books, topic="t")
    assert (await producer.batch([*marks], [NOW_MS] * len(marks))).ok
    producer.close()


async def test_consumer_that_dies_comes_back_and_gets_its_messages_again(
    client: AsyncTimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_consumer, "DEATH_S", 0.0)
    books, stopping = Books(), asyncio.Event()
    await schedule(run, client, books, 1, 2)
    async with consuming(run, client, books, WorkloadReader(dies=True), stopping):
        await until(lambda: len(lines(run, "c", "deliver")) > 2)
        stopping.set()
        await until(lambda: len(flat(lines(run, "c", "ack"), "results")) == 2)
    given = lines(run, "c", "deliver")
    assert [line["attempts"][0] for line in given][:3] == [1, 2, 3]
    assert {*flat(given, "marks")} == {1, 2}
    assert flat(lines(run, "c", "ack"), "results") == ["ACKED", "ACKED"]
    assert len(lines(run, "c", "open")) >= 2, "one for each stream"
    assert [*check(run.histories / "c.jsonl")] == []


async def test_consumer_makes_its_group_as_it_is_to_be(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder
) -> None:
    reader = WorkloadReader(options={"type": "failover"})
    async with consuming(run, client, Books(), reader) as consumer:
        await asyncio.wait_for(consumer.opened.wait(), 30)
        [request] = cluster.called(pb.CreateGroupRequest)
        assert request.settings.type == "failover"


async def test_ack_of_a_lost_lease_is_written_down(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks: list[Callable[[], None]] = []
    books = Books()
    await schedule(run, client, books, 1, 2)
    ack = RecordingConsumer._ack
    monkeypatch.setattr(RecordingConsumer, "_ack", lambda *of: acks.append(partial(ack, *of)))
    async with consuming(run, client, books):
        await until(lambda: acks)
        lost = [pb.ACK_RESULT_LEASE_LOST, pb.ACK_RESULT_ACKED]
        cluster.on_ack = once(pb.AckResponse(results=lost))
        acks.pop()()
        await until(lambda: lines(run, "c", "ack"))
    assert flat(lines(run, "c", "ack"), "results") == ["ACK_LEASE_LOST", "ACKED"]


async def test_ack_of_what_expired_says_of_which(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder
) -> None:
    expired = [pb.ACK_RESULT_EXPIRED, pb.ACK_RESULT_ACKED]
    cluster.on_ack = once(pb.AckResponse(results=expired))
    books = Books()
    await schedule(run, client, books, 1, 2)
    async with consuming(run, client, books):
        await until(lambda: lines(run, "c", "ack"))
    (ack,) = lines(run, "c", "ack")
    assert (ack["offsets"], ack["results"]) == ([0, 1], ["EXPIRED", "ACKED"])
    assert [*check(run.histories / "c.jsonl")] == []


async def test_ack_that_died_unanswered_is_unknown(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
    books, consume = Books(), RecordingConsumer._consume

    async def consume_and_die(consumer: RecordingConsumer) -> None:
        consuming = asyncio.create_task(consume(consumer))
        await until(lambda: cluster.acks)
        assert consumer._subscription is not None
        with contextlib.suppress(errors.TimerError):
            await consumer._subscription.close(0.001)
        await consuming
        cluster.on_ack = lambda _: None
        consumer._closed = True

    monkeypatch.setattr(RecordingConsumer, "_consume", consume_and_die)
    monkeypatch.setattr(workload_consumer, "REOPEN_S", 0.0)
    await schedule(run, client, books, 1)
    async with consuming(run, client, books):
        await until(lambda: lines(run, "c", "ack"))
    assert lines(run, "c", "ack")[0]["outcome"] == "unknown"
    assert [*check(run.histories / "c.jsonl")] == []


@pytest.mark.parametrize("stops", [False, True])
async def test_late_acks_are_sent_after_a_while_or_at_once_if_it_stops(
    client: AsyncTimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch, *, stops: bool
) -> None:
    monkeypatch.setattr(workload_consumer, "LATE_SHARE", 1.0)
    books, stopping = Books(), asyncio.Event()
    await schedule(run, client, books, 1)
    reader = WorkloadReader(acks_late=True, lease=timedelta(seconds=3600 if stops else 0.1))
    async with consuming(run, client, books, reader, stopping):
        await until(lambda: lines(run, "c", "deliver"))
        if stops:
            assert lines(run, "c", "ack") == []
            stopping.set()
        await until(lambda: lines(run, "c", "ack"))


async def test_client_that_can_t_open_its_group_ends_when_closed(
    cluster: Cluster, client: AsyncTimerClient, run: RunFolder
) -> None:
    async with consuming(run, client, Books(), WorkloadReader(group="-")) as consumer:
        await until(lambda: len(cluster.opened) > 1)  # it tries again
        assert not consumer.opened.is_set()


# ---- one workload against a fake cluster


def workload(cluster: Cluster, run: RunFolder, kind: WorkloadKind) -> WorkloadClients:
    """Return a workload on a fake cluster, where whatever is scheduled is delivered at once."""
    endpoints = [node.address for node in cluster.nodes]
    setting = Setting(
        run=run, endpoints=lambda: endpoints, seed=1, rate_per_s=100, horizon_s=1
    )  # fmt: skip
    return WorkloadClients("w", kind, setting)


@contextlib.asynccontextmanager
async def playing(clients: WorkloadClients) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.play())
        yield
        clients._setting.stopping.set()
        clients._setting.closing.set()


def making(produce: Produce) -> WorkloadKind:
    return WorkloadKind(produce=produce, readers=())


async def test_workload_is_drained_when_the_cluster_has_nothing_left_for_it(
    cluster: Cluster, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = workload(cluster, run, workloads.KINDS["uniform"])
    due, unacked = iter([["a"], [], [], []]), iter([1, 0, 1, 0, 0])

    async def list_timers(_: str, *, due_to: int) -> AsyncIterator[str]:
        for each in next(due):
            yield each

    async def topics() -> list[Any]:
        return found or [
            SimpleNamespace(name=name, groups=[SimpleNamespace(unacked=next(unacked))])
            for name in ("w", "w.workers.dead")
        ]

    found: list[Any] = []
    client: Any = SimpleNamespace(list_timers=list_timers, topics=topics)
    clients.client = client
    assert [await clients._is_over() for _ in range(2)] == [False, False]
    found.append(SimpleNamespace(name="wide", groups=[SimpleNamespace(unacked=9)]))
    assert not await clients._is_over(), "the topic is not there"
    found.append(SimpleNamespace(name="w", groups=[SimpleNamespace(unacked=0)]))
    assert await clients._is_over()
    clients.requests.close()


async def test_workload_is_drained_after_its_last_look(
    cluster: Cluster, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()

    async def is_over(_: WorkloadClients) -> bool:
        return over.is_set()

    monkeypatch.setattr(WorkloadClients, "_is_over", is_over)
    clients = workload(cluster, run, workloads.KINDS["uniform"])
    async with playing(clients):
        await until(lambda: clients.books.asked)
        await cluster.core.advance(timedelta(days=10_000))
        await until(lambda: clients.books.delivered)
        clients._setting.stopping.set()
        assert not clients.over
        over.set()
        await until(lambda: clients.over)
    asked = flat(lines(run, "w", "schedule"), "marks")
    assert {*flat(lines(run, "w", "deliver"), "marks")} <= {*asked}


async def test_workload_closed_before_its_end_leaves_no_task(
    cluster: Cluster, run: RunFolder
) -> None:
    clients = workload(cluster, run, workloads.KINDS["dying"])
    before = asyncio.all_tasks()
    async with playing(clients):
        await until(lambda: clients.books.asked)
    left = [task for task in asyncio.all_tasks() - before if "chaos" in repr(task)]
    assert left == []


async def test_later_work_goes_on_beside_other_work_and_is_dropped_at_the_end(
    cluster: Cluster, run: RunFolder
) -> None:
    done: list[object] = []
    goes_on = asyncio.Event()

    async def produce(clients: WorkloadClients) -> None:
        async def first() -> None:
            done.append(await goes_on.wait())

        async def second() -> None:
            goes_on.set()

        async def never() -> None:
            done.append("never")

        clients.after(0, first)
        clients.after(0, second)
        clients.after(3600, never)
        await goes_on.wait()
        clients._setting.stopping.set()
        clients.after(0, never)

    clients = workload(cluster, run, making(produce))
    async with playing(clients):
        await until(lambda: done)
    assert done == [True]


@pytest.mark.parametrize("later", [False, True])
async def test_failure_of_a_workload_is_raised(
    cluster: Cluster, run: RunFolder, *, later: bool
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def produce(clients: WorkloadClients) -> None:
        if not later:
            await fail()
        clients.after(0, fail)
        await asyncio.sleep(3600)

    with pytest.raises(ExceptionGroup) as raised:
        await workload(cluster, run, making(produce)).play()
    assert raised.value.subgroup(ZeroDivisionError)


async def test_beats_keep_the_rate_and_make_up_for_no_outage(
    cluster: Cluster, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(clients_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    clients = workload(cluster, run, workloads.KINDS["uniform"])
    beats = clients.beats(0.25)
    counts = [await anext(beats)]
    for passed_s in (0.25, 0.375, 4.0):  # a beat, a late one, an outage
        now_s += passed_s
        counts.append(await anext(beats))
    assert counts == [(0, 25), (1, 25), (2, 37), (3, 50)]
    clients._setting.stopping.set()
    assert [each async for each in beats] == []
    clients.requests.close()


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (["uniform", "unifrom"], {}, "workload = 'unifrom': must be one of uniform, herd"),
        (["herd", "herd"], {}, "workloads = herd, herd: each at most once"),
        (["herd"], {"rate_per_s": 0}, "rate_per_s = 0: must be positive"),
        (["herd"], {"horizon_s": 0.0}, "horizon_s = 0.0: must be positive"),
    ],
)
def test_workloads_that_make_no_sense_are_refused(
    names: list[str], more: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"rate_per_s": 1, "horizon_s": 1.0, **more}
    with pytest.raises(ValueError, match=said):
        workloads.check(names, **given)


def test_each_kind_has_a_line() -> None:
    assert all(kind.line.endswith(".") for kind in workloads.KINDS.values())
    assert len(workloads.KINDS) == 28
