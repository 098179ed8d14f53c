"""The workloads: their books, and their clients against a fake cluster."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import workloads
from chaos.history.history import OpOutcome, RunFolder, payload_of
from chaos.history.history_check import check
from chaos.workloads import workload_clients as clients_module
from chaos.workloads import workload_consumer
from chaos.workloads.history_books import GROUP, Books
from chaos.workloads.recorded_requests import RecordedRequests, outcome_of
from chaos.workloads.workload_clients import Setting, WorkloadClients, WorkloadKind
from chaos.workloads.workload_consumer import RecordingConsumer, WorkloadReader
from tests.chaos.world import told
from tests.cluster.running import until
from tests.timerclient.conftest import Threaded
from tests.timerclient.fake_cluster import NOW_MS, Group, wire_error
from timerclient import TimerClient
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
def fake() -> Iterator[Threaded]:
    threaded = Threaded()
    yield threaded
    threaded.stop()


@pytest.fixture
def client(fake: Threaded) -> Iterator[TimerClient]:
    with TimerClient([node.address for node in fake.cluster.nodes], timeout=5) as client:
        yield client


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_outcome_of_an_error_is_what_it_says_of_itself() -> None:
    assert outcome_of(errors.Overloaded("x")) is OpOutcome.FAIL
    assert outcome_of(errors.ConnectionLost("x")) is OpOutcome.UNKNOWN
    assert outcome_of(errors.as_unknown(errors.Overloaded("x"))) is OpOutcome.UNKNOWN
    assert outcome_of(errors.OutcomeForgotten("x")) is OpOutcome.UNKNOWN


def test_producer_writes_down_every_outcome(
    fake: Threaded, client: TimerClient, run: RunFolder
) -> None:
    books = Books()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    assert len(producer.batch([1, 2], [NOW_MS, NOW_MS])) == 2
    fake.cluster.on_schedule = lambda _: wire_error(pb.REASON_INVALID_REQUEST, "no")
    assert producer.single(3, 0.5) == []
    fake.cluster.on_schedule = lambda _: wire_error(pb.REASON_QUOTA_REACHED)
    assert producer.batch([6], [NOW_MS]) == []  # at once, though it may succeed later
    fake.cluster.on_schedule = lambda _: wire_error(pb.REASON_COMMIT_TIMEOUT)
    assert producer.batch([4], [NOW_MS], timeout_s=0.2) == []
    future = producer.submit([5], [NOW_MS], timeout_s=0.2)
    with pytest.raises(errors.TimerError):
        future.result(20)
    until(lambda: books.asked == 6)
    producer.close()
    found = lines(run, "p", "schedule")
    assert [(line["marks"], line["outcome"], bool(line.get("ids"))) for line in found] == [
        ([1, 2], "ok", True),
        ([3], "fail", False),
        ([6], "fail", False),
        ([4], "unknown", False),
        ([5], "unknown", False),
    ]
    assert found[1]["due_ms"] is None
    assert [*check(run.histories / "p.jsonl")] == []
    assert books.unanswered == 4
    assert [row.payload for row in fake.cluster.rows[:2]] == [payload_of(m, 100) for m in (1, 2)]


def test_cancel_says_whether_it_was_refused(
    fake: Threaded, client: TimerClient, run: RunFolder
) -> None:
    producer = RecordedRequests(run, "p", client, Books(), topic="t")
    ids = producer.batch([1, 2, 3, 4], [NOW_MS] * 4)
    fake.cluster.rows[1].payload = b"FIRED"
    done = [producer.cancel(ids[:1]), producer.cancel(ids[:2])]
    fake.cluster.on_cancel = lambda: wire_error(pb.REASON_INVALID_REQUEST, "no")
    assert [*done, producer.cancel(ids[2:3])] == [True, True, False]
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
        def call(*_: Any, **__: Any) -> Any:
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def test_changer_writes_down_what_it_lets_hold_for_the_topic(run: RunFolder) -> None:
    deleted = SimpleNamespace(topic_id=7, pending=3)
    client: Any = Answers(None, None, errors.LeadershipLost("x"), None, deleted, None)
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    assert [changer.pause(), changer.resume("drop"), changer.resume("all")] == [True, True, False]
    assert changer.rule({"ttl_ms": 5}, among=("retention_ms", "ttl_ms"))
    assert [changer.delete(), changer.delete()] == [True, True]
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


def test_changer_names_the_scope_that_it_lets_say_something(run: RunFolder) -> None:
    asked: list[dict[str, object]] = []

    def alter(said: object, *, unset: object, **where: object) -> None:
        asked.append(where)

    client: Any = SimpleNamespace(alter_policies=alter)
    for topic in ("ns/t", "plain"):
        changer = RecordedRequests(run, topic[0], client, Books(), topic=topic)
        for scope in ("topic", "namespace", "cluster"):
            assert changer.rule({"tick_ms": 20}, among=("tick_ms",), scope=scope)
        changer.close()
    assert asked[:3] == [{"topic": "ns/t"}, {"namespace": "ns"}, {"cluster": True}]
    assert asked[3:] == [{"topic": "plain"}, {"namespace": "default"}, {"cluster": True}]
    names = [line["topic"] for at in "np" for line in told(run.histories / f"{at}.jsonl")]
    assert names == ["ns/t", "ns/", "/", "plain", "default/", "/"]
    assert [*check(run.histories / "n.jsonl")] == []


def test_changer_writes_down_every_way_and_outcome(run: RunFolder) -> None:
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
    changer.cancel_keys(["a", "b"])
    assert changer.reschedule(ids, [1, 2]) == [Timer(raw).id]
    assert changer.reschedule_keys(["a"], [3]) == []
    changer.cancel_where({"due_from": 4, "due_to": 5})
    changer.cancel_where({"key_prefix": "k"})  # a page of it may be done
    changer.reschedule_where({"key_prefix": "k"}, 6)
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(line["op"], line["outcome"]) for line in found] == [
        ("cancel", "ok"), ("reschedule", "ok"), ("reschedule", "fail"), ("cancel", "ok"),
        ("cancel", "unknown"), ("reschedule", "unknown"),
    ]  # fmt: skip
    assert found[1]["new_ids"] == [Timer(raw).id, None]
    assert (found[3]["due_from_ms"], found[3]["due_to_ms"], found[3]["changed"]) == (4, 5, 7)
    assert [*check(run.histories / "c.jsonl")] == []


def test_changer_writes_down_changes_of_series(run: RunFolder) -> None:
    client: Any = Answers(1, 1, 1, errors.LeadershipLost("x"), None, errors.NotFound("x"))
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    assert changer.create_series("a", b"p", {"every": 1.5, "misfire": "skip"})
    assert changer.alter_series("a", {"cron": "* * * * *"})
    assert changer.pause_series("a", paused=True)
    assert not changer.pause_series("a", paused=False)
    assert [changer.delete_series("a"), changer.delete_series("b")] == [True, False]
    changer.close()
    found = told(run.histories / "c.jsonl")
    assert [(each["op"], each["key"], each["outcome"], each.get("said")) for each in found] == [
        ("create_series", "a", "ok", '{"every_ms": 1500, "misfire": "skip"}'),
        ("alter_series", "a", "ok", '{"cron": "* * * * *"}'),
        ("alter_series", "a", "ok", '{"paused": true}'),
        ("alter_series", "a", "unknown", '{"paused": false}'),
        ("delete_series", "a", "ok", None), ("delete_series", "b", "fail", None),
    ]  # fmt: skip
    assert [*check(run.histories / "c.jsonl")] == []


def test_changer_writes_down_seeks_deletions_of_groups_and_redrives(run: RunFolder) -> None:
    lost = errors.LeadershipLost("x")
    sought = SimpleNamespace(group_id=9)
    client: Any = Answers(sought, sought, sought, errors.NotFound("x"), None, lost, 7, lost)
    changer = RecordedRequests(run, "c", client, Books(), topic="t")
    assert changer.seek("g", offset=5)
    assert changer.seek("g", start="earliest")
    assert changer.seek("g", time_ms=1_000)
    assert not changer.seek("g", start="latest")
    assert [changer.delete_group("g"), changer.delete_group("g")] == [True, False]
    changer.redrive("t.g.dead", None)
    changer.redrive("t.g.dead", 3)  # some may be sent
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


def consume(run: RunFolder, client: TimerClient, books: Books) -> RecordingConsumer:
    return RecordingConsumer(run, "c", client, books, WorkloadReader(), topic="t")


def test_consumer_that_dies_comes_back_and_gets_its_messages_again(
    fake: Threaded, client: TimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_consumer, "DEATH_S", 0.0)
    books, stopping = Books(), threading.Event()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    producer.batch([1, 2], [NOW_MS, NOW_MS])
    reader = WorkloadReader(dies=True)
    consumer = RecordingConsumer(run, "c", client, books, reader, topic="t", stopping=stopping)

    until(lambda: len(lines(run, "c", "deliver")) > 2)
    stopping.set()
    until(lambda: len(flat(lines(run, "c", "ack"), "results")) == 2)
    consumer.close()
    producer.close()
    given = lines(run, "c", "deliver")
    assert [line["attempts"][0] for line in given][:3] == [1, 2, 3]
    assert {*flat(given, "marks")} == {1, 2}
    assert flat(lines(run, "c", "ack"), "results") == ["ACKED", "ACKED"]
    assert len(lines(run, "c", "open")) >= 2, "one for each stream"
    assert [*check(run.histories / "c.jsonl")] == []
    books.check()


def test_consumer_makes_its_group_as_it_is_to_be(
    fake: Threaded, client: TimerClient, run: RunFolder
) -> None:
    reader = WorkloadReader(options={"type": "failover"})
    consumer = RecordingConsumer(run, "c", client, Books(), reader, topic="t")
    assert consumer.wait_opened(30)
    assert fake.cluster.settings[0].type == "failover"
    consumer.close()


def test_ack_of_a_lost_lease_is_written_down(
    fake: Threaded, client: TimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    acks: list[Callable[[], None]] = []
    books = Books()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    producer.batch([1, 2], [NOW_MS, NOW_MS])
    ack = RecordingConsumer._ack
    monkeypatch.setattr(RecordingConsumer, "_ack", lambda *of: acks.append(partial(ack, *of)))
    consumer = consume(run, client, books)
    until(lambda: acks)
    fake.cluster.groups["t", GROUP].held[0] = (99, 99)  # somebody else's meanwhile
    acks.pop()()
    until(lambda: lines(run, "c", "ack"))
    assert flat(lines(run, "c", "ack"), "results") == ["ACK_LEASE_LOST", "ACKED"]
    consumer.close()
    producer.close()


def test_ack_of_what_expired_says_of_which(
    fake: Threaded, client: TimerClient, run: RunFolder
) -> None:
    fake.cluster.groups["t", GROUP] = Group(expired={0})
    books = Books()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    producer.batch([1, 2], [NOW_MS, NOW_MS])
    consumer = consume(run, client, books)
    until(lambda: lines(run, "c", "ack"))
    consumer.close()
    producer.close()
    (ack,) = lines(run, "c", "ack")
    assert (ack["offsets"], ack["results"]) == ([0, 1], ["EXPIRED", "ACKED"])
    assert [*check(run.histories / "c.jsonl")] == []


def test_ack_that_died_unanswered_is_unknown(
    fake: Threaded, client: TimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.cluster.on_ack = lambda _: wire_error(pb.REASON_OVERLOADED, retry_after_ms=1)
    ack, lives = RecordingConsumer._ack, iter([False])

    def ack_and_die(*of: Any) -> None:
        ack(*of)
        until(lambda: fake.cluster.acks)
        if not next(lives, True):
            raise errors.ConnectionLost("it died")

    monkeypatch.setattr(RecordingConsumer, "_ack", ack_and_die)
    books = Books()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    producer.batch([1], [NOW_MS])
    consumer = consume(run, client, books)
    until(lambda: lines(run, "c", "ack"))
    fake.cluster.on_ack = lambda _: None
    consumer.close()
    producer.close()
    assert lines(run, "c", "ack")[0]["outcome"] == "unknown"
    assert [*check(run.histories / "c.jsonl")] == []


@pytest.mark.parametrize("stops", [False, True])
def test_late_acks_are_sent_after_a_while_or_at_once_if_it_stops(
    fake: Threaded, client: TimerClient, run: RunFolder, monkeypatch: pytest.MonkeyPatch,
    stops: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(workload_consumer, "LATE_SHARE", 1.0)
    books, stopping = Books(), threading.Event()
    if stops:
        stopping.set()
    producer = RecordedRequests(run, "p", client, books, topic="t")
    producer.batch([1], [NOW_MS])
    lease = timedelta(seconds=3600 if stops else 0.1)
    reader = WorkloadReader(acks_late=True, lease=lease)
    consumer = RecordingConsumer(run, "c", client, books, reader, topic="t", stopping=stopping)
    until(lambda: lines(run, "c", "ack"))
    assert bool(consumer._late_acks) != stops
    consumer.close()
    producer.close()
    books.check()


def test_client_that_can_t_open_its_group_ends_when_closed(
    fake: Threaded, client: TimerClient, run: RunFolder
) -> None:
    consumer = RecordingConsumer(
        run, "c", client, Books(), WorkloadReader(group="FORBIDDEN"), topic="t"
    )
    until(lambda: len(fake.cluster.opened) > 1)  # it tries again
    assert not consumer.wait_opened(0)
    consumer.close()


# ---- one workload against a fake cluster


def workload(
    fake: Threaded, run: RunFolder, kind: WorkloadKind, waiting_max: int | None = None
) -> WorkloadClients:
    """Return a workload on a fake cluster, where whatever is scheduled is delivered at once."""
    notified: set[asyncio.Task[None]] = set()
    fake.cluster.on_schedule = lambda _: notified.add(asyncio.ensure_future(fake.cluster.notify()))
    endpoints = [node.address for node in fake.cluster.nodes]
    setting = Setting(
        run=run, endpoints=lambda: endpoints, seed=1, rate_per_s=100, horizon_s=1,
        marks=itertools.count(1), waiting_max=waiting_max,
    )  # fmt: skip
    return WorkloadClients("w", kind, setting)


def test_workload_that_is_far_behind_requests_nothing(
    fake: Threaded, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = workload(fake, run, workloads.KINDS["uniform"], waiting_max=5)
    clients.books.asked = 8
    looks = iter([2, 1, 2, 3])
    delivered = property(lambda _: next(looks), lambda *_: None)
    monkeypatch.setattr(Books, "delivered", delivered, raising=False)
    assert next(clients.beats(0.1)) > 0
    assert [*looks] == []
    clients.close()


def test_workload_is_drained_when_the_cluster_has_nothing_left_for_it(
    fake: Threaded, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = workload(fake, run, workloads.KINDS["uniform"])
    due, unacked = iter([["a"], [], [], []]), iter([1, 0, 1, 0, 0])
    client: Any = SimpleNamespace(
        list_timers=lambda topic, *, due_to: next(due),
        topics=lambda: [
            SimpleNamespace(name=name, groups=[SimpleNamespace(unacked=next(unacked))])
            for name in ("w", "w.workers.dead")
        ],
    )
    clients.client = client
    others: Any = SimpleNamespace(name="wide", groups=[SimpleNamespace(unacked=9)])
    assert [clients._is_over() for _ in range(2)] == [False, False]
    monkeypatch.setattr(client, "topics", lambda: [others])
    assert not clients._is_over(), "the topic is not there"
    clear = SimpleNamespace(name="w", groups=[SimpleNamespace(unacked=0)])
    monkeypatch.setattr(client, "topics", lambda: [others, clear])
    assert clients._is_over()
    clients.close()


def test_workload_is_drained_after_its_last_look(
    fake: Threaded, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(WorkloadClients, "_is_over", lambda _: over.is_set())
    clients = workload(fake, run, workloads.KINDS["uniform"])
    clients.start()
    until(lambda: clients.books.delivered)
    clients.stop_producing()
    assert not clients.drained()
    over.set()
    until(clients.drained)
    clients.close()
    asked = flat(lines(run, "w", "schedule"), "marks")
    assert {*flat(lines(run, "w", "deliver"), "marks")} <= {*asked}


def test_workload_whose_thread_failed_says_so(fake: Threaded, run: RunFolder) -> None:
    def produce(_: WorkloadClients) -> None:
        raise ZeroDivisionError

    clients = workload(fake, run, WorkloadKind(produce=produce, readers=()))
    clients.start()
    clients.stop_producing()
    until(lambda: not clients._thread.is_alive())
    with pytest.raises(ZeroDivisionError):
        clients.drained()
    with pytest.raises(ZeroDivisionError):
        clients.close()


def test_workload_closed_before_its_end_leaves_no_thread(fake: Threaded, run: RunFolder) -> None:
    workload(fake, run, workloads.KINDS["dying"]).close()  # not started: nothing to close
    clients = workload(fake, run, workloads.KINDS["dying"])
    clients.start()
    until(lambda: clients.books.asked)
    clients.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("w")] == []


def test_later_work_goes_on_beside_other_work_and_is_dropped_at_the_end(
    fake: Threaded, run: RunFolder
) -> None:
    clients, goes_on = workload(fake, run, workloads.KINDS["uniform"]), threading.Event()
    done: list[bool] = []
    clients.after(0, lambda: done.append(goes_on.wait(20)))
    clients.after(0, goes_on.set)
    until(lambda: done == [True])
    clients.after(3600, lambda: done.append(False))
    clients.close()
    clients.after(0, lambda: done.append(False))
    assert done == [True]


def test_failure_of_later_work_is_raised(fake: Threaded, run: RunFolder) -> None:
    clients = workload(fake, run, workloads.KINDS["uniform"])
    clients.after(0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clients.close()


def test_beats_keep_the_rate_and_make_up_for_no_outage(
    fake: Threaded, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(clients_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    clients = workload(fake, run, workloads.KINDS["uniform"])
    beats = clients.beats(0.25)
    counts = [next(beats)]
    for passed_s in (0.25, 0.375, 4.0):  # a beat, a late one, an outage
        now_s += passed_s
        counts.append(next(beats))
    assert counts == [25, 25, 37, 50]
    clients.stop_producing()
    assert [*beats] == []
    clients.close()


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
    run: RunFolder, names: list[str], more: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"seed": 1, "rate_per_s": 1, "horizon_s": 1.0, **more}
    with pytest.raises(ValueError, match=said):
        workloads.make(names, Setting(run=run, endpoints=list, **given))


def test_each_kind_has_a_line() -> None:
    assert all(kind.line.endswith(".") for kind in workloads.KINDS.values())
    assert len(workloads.KINDS) == 28
