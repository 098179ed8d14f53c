"""timerctl with a fake cluster: its questions before actions that can't be undone."""

import io
import json
from pathlib import Path

import pytest

from tests.timerfake.conftest import Ctl
from timerclient import TimerClient
from timerclient.client.topic_calls import ROUNDS_MAX, TopicCalls
from timerclient.proto import timer_pb2 as pb
from timerclient.values.errors import NotFound, NotReady
from timerfake import FakeCluster

HOUR = 3600.0


def test_namespaces_are_listed_described_and_deleted(ctl: Ctl, client: TimerClient) -> None:
    assert ctl("namespaces", "list")[1] == "no namespaces\n"
    ctl("topics", "create", "pay/refunds")
    ctl("policies", "set", "--namespace", "pay", "tick_ms=50")
    client.schedule("orders", b"", delay=HOUR)
    client.schedule("pay/refunds", b"", delay=HOUR)
    listed = json.loads(ctl("namespaces", "list", "-o", "json")[1])["namespaces"]
    assert [each["name"] for each in listed] == ["default", "pay"]
    assert listed[1] == {"name": "pay", "topics": ["pay/refunds"], "policy": {"tick_ms": 50}}
    assert ctl("namespaces", "describe", "pay")[1].splitlines()[1].split() == [
        *("pay", "1", "1", "0", "tick_ms=50ms"),
    ]
    assert ctl("namespaces", "describe", "nobody")[0] == 1
    code, _, err = ctl("namespaces", "delete", "pay")
    assert (code, "delete namespace pay needs --yes" in err) == (2, True)
    assert client.count_timers("pay/refunds").pending == 1
    out = ctl("namespaces", "delete", "pay", "--yes")[1]
    assert out == "namespace pay is deleted, with 1 topic\n"
    assert [each.name for each in client.namespaces()] == ["default"]
    code, _, err = ctl("namespaces", "delete", "default", "--yes")
    assert (code, "NAMESPACE = 'default': must not be" in err) == (2, True)


def test_policies_are_exported_to_and_applied_from_a_pipe(
    ctl: Ctl, client: TimerClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    client.alter_policies({"tick_ms": 50}, cluster=True)
    code, exported, _ = ctl("policies", "export", "-")
    assert (code, exported) == (0, ctl("policies", "export")[1])
    client.alter_policies({"tick_ms": 60}, cluster=True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(exported.encode())))
    assert ctl("policies", "apply", "-", "--yes")[0] == 0
    assert client.describe_policies().own.tick_ms == 50
    assert not [*tmp_path.iterdir()]


def test_group_and_its_dead_letters_are_named_as_the_command_line_has_them(ctl: Ctl) -> None:
    for words, wrong in (
        (("a b",), "GROUP = 'a b'"),
        (("g", "--dead-letter-topic", "a b"), "--dead-letter-topic = 'a b'"),
    ):
        code, _, err = ctl("groups", "create", "orders", *words)
        assert (code, err.startswith(f"timerctl: {wrong}: must be 1 to 255 of")) == (2, True), err


def test_check_of_a_topic_that_cannot_exist_is_a_wrong_command_line(ctl: Ctl) -> None:
    code, out, err = ctl("check", "--topic", "a b")
    assert (code, out, err[:40]) == (2, "", "timerctl: --topic = 'a b': must be 1 to ")


def test_topics_are_made_listed_and_described(ctl: Ctl, client: TimerClient) -> None:
    assert ctl("topics", "create", "orders")[:2] == (0, "topic orders is ready\n")
    assert [each.name for each in client.topics()] == ["orders"]
    assert ctl("topics", "list")[1] == ctl("topics")[1]
    assert ctl("topics", "describe", "orders")[1].startswith(ctl("topics")[1].rstrip())
    assert ctl("topics", "describe", "nobody")[0] == 1


@pytest.mark.parametrize("command", [("cancel",), ("timers", "cancel")])
def test_cancel_by_an_old_id_prints_the_new_one(
    ctl: Ctl, client: TimerClient, command: tuple[str, ...]
) -> None:
    old, other = (client.schedule("orders", b"", delay=HOUR) for _ in range(2))
    new = client.reschedule(old, delay=2 * HOUR)
    code, out, _ = ctl(*command, old.id, other.id)
    assert (code, [line.split() for line in out.splitlines()[1:]]) == (
        5,
        [[old.id, "RESCHEDULED", new.id], [other.id, "CANCELLED", "-"]],
    )
    [row] = json.loads(ctl(*command, old.id, "-o", "json")[1])["results"]
    assert row == {"id": old.id, "result": "RESCHEDULED", "new_id": new.id}
    [row] = json.loads(ctl(*command, new.id, "-o", "json")[1])["results"]
    assert row == {"id": new.id, "result": "CANCELLED", "new_id": None}


@pytest.mark.parametrize("said", ["flag", "policy"])
def test_resume_that_drops_asks_first(
    ctl: Ctl, client: TimerClient, cluster: FakeCluster, said: str
) -> None:
    client.schedule("orders", b"", delay=1)
    client.pause_topic("orders")
    cluster.advance(2)
    if said == "policy":
        client.alter_policies({"catch_up": "drop"}, topic="orders")
    resume = ("topics", "resume", "orders", *(["--catch-up", "drop"] if said == "flag" else []))
    code, _, err = ctl(*resume)
    assert (code, "resume orders with drop needs --yes" in err) == (2, True)
    assert client.describe_topic("orders").held == 1
    assert ctl(*resume, "--yes")[0] == 0
    cluster.settle()
    assert client.describe_topic("orders").dropped == 1


def test_results_of_a_cancel_are_printed_though_the_look_up_of_new_ids_fails(
    ctl: Ctl, client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, moved = (client.schedule("orders", b"", delay=HOUR) for _ in range(2))
    client.reschedule(moved, delay=2 * HOUR)

    def lost(*_: object, **__: object) -> None:
        raise NotReady("no leader")

    monkeypatch.setattr(TimerClient, "get_timer", lost)
    code, out, _ = ctl("cancel", moved.id, pending.id, "-o", "json")
    rows = json.loads(out)["results"]
    assert [(row["result"], row["new_id"]) for row in rows] == [
        ("RESCHEDULED", None),
        ("CANCELLED", None),
    ]
    assert code == 5


def test_names_and_times_are_whole_in_lists_on_eighty_columns(
    ctl: Ctl, client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group, key = "orders.payments.dead", "dead-letters", "customer-4711-daily"
    client.schedule(topic, b"p" * 60, delay=HOUR, key=key)
    client.create_group(topic, group)
    client.create_series(topic, key, cron="0 6 * * MON-FRI", zone="Europe/Berlin")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    for words, whole in (
        ("topics", [topic, group]),
        ("groups list", [topic, group]),
        (f"timers list {topic}", [key, ":00.000Z"]),
        ("recurring", [topic, key]),
    ):
        out = ctl(*words.split(), "--color", "never")[1]
        assert [text in out for text in whole] == [True, True], out
        assert max(map(len, out.splitlines())) <= 80


def test_resume_that_drops_nothing_does_not_ask(ctl: Ctl, client: TimerClient) -> None:
    client.create_topic("orders")
    client.pause_topic("orders")
    assert ctl("topics", "resume", "orders", "--catch-up", "drop")[0] == 0
    client.pause_topic("orders")
    assert ctl("topics", "resume", "orders", "--catch-up", "all")[0] == 0


def test_time_to_live_is_set_only_when_that_is_said_twice(ctl: Ctl, client: TimerClient) -> None:
    code, _, err = ctl("policies", "set", "--namespace", "pay", "ttl_ms=1h")
    assert (code, "set ttl_ms of namespace pay needs --yes" in err) == (2, True)
    assert not client.describe_policies(namespace="pay").own.HasField("ttl_ms")
    assert ctl("policies", "set", "--namespace", "pay", "ttl_ms=1h", "--yes")[0] == 0
    assert client.describe_policies(namespace="pay").own.ttl_ms == 3_600_000
    assert ctl("policies", "set", "--namespace", "pay", "ttl_ms=0")[0] == 0
    for said in ("retention_ms=1h", "retention_ms=0", "catch_up=drop"):
        assert ctl("policies", "set", "--namespace", "pay", said)[0] == 2
        assert ctl("policies", "set", "--namespace", "pay", said, "--yes")[0] == 0
    assert ctl("policies", "set", "--namespace", "pay", "catch_up=all")[0] == 0
    unset = ("policies", "unset", "--namespace", "pay", "ttl_ms")
    assert ctl(*unset)[0] == 2, "the cluster's may be shorter"
    assert ctl(*unset, "--yes")[0] == 0


def test_policy_that_lets_a_topic_go_on_asks_where_that_drops(
    ctl: Ctl, client: TimerClient, cluster: FakeCluster
) -> None:
    client.alter_policies({"paused": True}, namespace="pay")
    client.schedule("pay/a", b"held")
    client.schedule("pay/b", b"held")
    cluster.settle()
    client.alter_policies({"catch_up": "latest"}, topic="pay/b")
    for words in (
        ("set", "--namespace", "pay", "paused=off"),
        ("unset", "--namespace", "pay", "paused"),
    ):
        code, _, err = ctl("policies", *words)
        assert (code, "paused of namespace pay needs --yes" in err) == (2, True)
    assert ctl("policies", "set", "--topic", "new", "paused=off")[0] == 0, "it holds nothing"
    client.alter_policies({"catch_up": "all"}, topic="pay/b")
    assert ctl("policies", "unset", "--namespace", "pay", "paused")[0] == 0
    cluster.settle()
    fired = {topic.name: topic.fired for topic in client.topics()}
    assert fired == {"pay/a": 1, "pay/b": 1, "new": 0}


class Terminal(io.StringIO):
    """A terminal with this input and no more."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "code"), [("y\n", 0), ("Y\n", 0), ("yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)]
)
def test_who_sits_at_the_terminal_is_asked_beside_what_is_printed(
    ctl: Ctl, client: TimerClient, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    client.create_topic("orders")
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    done, out, err = ctl("topics", "delete", "orders", "-o", "json")
    assert (done, "delete topic orders? " in err) == (code, True)
    assert bool(out) is (code == 0)
    assert bool(client.topics()) is (code == 1)
    if out:
        json.loads(out)


def test_without_a_standard_input_nobody_said_yes(
    ctl: Ctl, client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_topic("orders")
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = ctl("topics", "delete", "orders")
    assert (code, "needs --yes without a terminal" in err) == (2, True)


@pytest.mark.parametrize("others", [1, 99])
def test_topic_that_is_made_while_its_namespace_is_deleted_goes_too(
    client: TimerClient, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Unless somebody goes on making some: then the policy stays, and the error says why."""
    client.create_topic("pay/a")
    client.alter_policies({"tick_ms": 50}, namespace="pay")
    delete, names = TopicCalls.delete_topic, [f"pay/b{n}" for n in range(others)]

    async def meanwhile(calls: TopicCalls, topic: str) -> pb.DeleteTopicResponse | None:
        gone = await delete(calls, topic)
        if names:
            other = pb.CreateTopicRequest(topic=names.pop())
            await calls._call(lambda node: node.admin.CreateTopic, other)
        return gone

    monkeypatch.setattr(TopicCalls, "delete_topic", meanwhile)
    if others == 1:
        assert client.delete_namespace("pay") == ["pay/a", "pay/b0"]
        assert client.namespaces() == []
    else:
        with pytest.raises(NotReady, match="are created during their deletion") as failed:
            client.delete_namespace("pay")
        assert failed.value.done == ROUNDS_MAX
        assert client.describe_policies(namespace="pay").own.tick_ms == 50


def test_topics_of_a_namespace_are_deleted_although_one_of_them_is_not(
    client: TimerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pay/a", "pay/b", "pay/c"):
        client.create_topic(name)
    delete = TopicCalls.delete_topic

    async def refusing_b(calls: TopicCalls, topic: str) -> pb.DeleteTopicResponse | None:
        if topic == "pay/b":
            raise NotReady("not now")
        await delete(calls, topic)
        raise NotFound(topic)  # as if another call had deleted it

    monkeypatch.setattr(TopicCalls, "delete_topic", refusing_b)
    with pytest.raises(NotReady, match="not now") as failed:
        client.delete_namespace("pay")
    assert failed.value.done == 2
    assert [topic.name for topic in client.describe_namespace("pay").topics] == ["pay/b"]
