"""`timerctl deadletters list`, `peek` and `purge`, on the cores of the cluster."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.timerclient.conftest import Ctl, Threaded
from tests.timerclient.dead_letters import DeadLetters
from tests.timerclient.fake_cluster import wire_error
from timerclient import TimerClient
from timerclient.cli import cli_errors, timerctl
from timerclient.proto import timer_pb2 as pb
from timerfake import FakeCluster

DEAD = "orders.g.dead"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster in memory, to which timerctl connects. Three letters came from orders/g."""
    with FakeCluster() as cluster:
        monkeypatch.setattr(timerctl, "_client", lambda _: cluster.client())
        with cluster.client() as client:
            client.create_group("orders", "g", max_attempts=1)
            client.schedule_batch("orders", [b"1", b"2", b"3"])
            fail(client, 3)
        yield cluster


def fail(client: TimerClient, count: int) -> None:
    """Let messages of orders fail until they are dead letters."""
    with client.consumer("orders", "g", max_messages=count) as consumer:
        for message in consumer:
            message.nack(detail="OSError: closed").result()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = timerctl.main(["deadletters", *argv])
    return code, *capsys.readouterr()


def test_letters_are_listed_with_the_groups_that_send_them(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "list")
    assert (code, err, out.splitlines()[1].split()[:2]) == (0, "", [DEAD, "3"])
    [topic] = json.loads(run(capsys, "list", DEAD, "-o", "json")[1])["topics"]
    assert (topic["topic"], topic["letters"], topic["from"]) == (DEAD, 3, "orders/g")
    code, _, err = run(capsys, "list", "orders")
    assert (code, "such as TOPIC.GROUP.dead" in err) == (1, True)


def test_a_peek_shows_the_present_letters_only(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "peek", DEAD, "--limit", "2", "-o", "json")
    assert (code, err) == (0, "")
    assert [each["payload"] for each in json.loads(out)["messages"]] == ["1", "2"]
    table = run(capsys, "peek", DEAD, "-o", "wide")[1]
    heads, first, *_ = (re.split(r"  +", line.strip()) for line in table.splitlines())
    letter = dict(zip(heads, first, strict=False))
    assert (letter["ATTEMPTS"], letter["FROM"]) == ("1", "orders/g")
    assert letter["REASON"] == "nacked: OSError: closed"
    headers = {"dead-letter-reason": "rejected", "dead-letter-detail": "no\nstock" + "!" * 99}
    with fake.client() as client:
        client.schedule(DEAD, b"4", headers=headers)
    assert "  rejected: no\\nstock!!" in run(capsys, "peek", DEAD)[1]
    code, _, err = run(capsys, "peek", "orders")
    assert (code, "such as TOPIC.GROUP.dead" in err) == (1, True)
    assert run(capsys, "purge", DEAD, "--yes")[0] == 0
    assert run(capsys, "peek", DEAD)[:2] == (0, "no messages\n")


def test_letters_are_redriven_by_their_offsets(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("redrive", DEAD, "--offset", "2", "--offset", "0")
    assert run(capsys, *chosen)[:2] == (0, "2 redriven: 2 to orders\n")
    assert run(capsys, *chosen)[1] == "0 redriven; offsets without a letter: 2\n"
    assert json.loads(run(capsys, *chosen, "-o", "json")[1])["leased"] == 0
    assert [
        each["letters"] for each in json.loads(run(capsys, "list", "-o", "json")[1])["topics"]
    ] == [1]
    code, _, err = run(capsys, "redrive", DEAD, "--offset", "9")
    assert (code, "must be below 3, the end of the topic" in err) == (2, True), err
    code, _, err = run(capsys, "redrive", DEAD, "--offset", "1", "--limit", "1")
    assert (code, "not allowed with argument" in err) == (2, True), err


def test_a_purge_deletes_the_letters_that_it_counted_and_no_later_one(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "purge", DEAD)
    assert (code, "needs --yes without a terminal; nothing was changed" in err) == (2, True)
    assert run(capsys, "purge", DEAD, "--yes")[:2] == (0, "3 purged\n")
    assert run(capsys, "purge", DEAD)[:2] == (0, "0 purged\n")
    assert run(capsys, "redrive", DEAD)[:2] == (0, "0 redriven\n")
    with fake.client() as client:
        _ = client.schedule("orders", b"4")
        fail(client, 1)
    assert run(capsys, "redrive", DEAD)[:2] == (0, "1 redriven: 1 to orders\n")
    for wrong in ("orders", "absent"):
        assert run(capsys, "purge", wrong, "--yes")[0] == 1


# ---- redrives that are disturbed


@pytest.fixture
def letters(threaded: Threaded) -> DeadLetters:
    letters = DeadLetters(250)
    threaded.cluster.on_call = letters.redrive
    return letters


def test_dead_letters_are_redriven_all_or_some(ctl: Ctl, letters: DeadLetters) -> None:
    assert ctl("deadletters", "redrive", "orders.billing.dead", "--limit", "30")[1] == (
        "30 redriven\n"
    )
    out = ctl("deadletters", "redrive", "orders.billing.dead", "-o", "json")[1]
    assert json.loads(out) == {"redriven": 220, "exact": True, "topics": {}, "homeless": 0}


@pytest.mark.parametrize("missing", ["topic of dead letters: 'orders'", "group: 'dead-letters'"])
def test_redrive_of_a_topic_without_dead_letters_names_the_topic(
    missing: str, ctl: Ctl, letters: DeadLetters
) -> None:
    letters.count = 0
    letters.errors = [wire_error(pb.REASON_NOT_FOUND, f"no such {missing}")]
    code, _, err = ctl("deadletters", "redrive", "orders")
    text = "'orders' has no dead letters: give the topic of dead letters, such as TOPIC.GROUP.dead"
    assert (code, err) == (1, f"timerctl: {text}\n")


def test_redrive_goes_on_past_letters_that_cannot_go_home_and_says_how_many(
    ctl: Ctl, letters: DeadLetters
) -> None:
    letters.homeless = 300  # in front: one whole request, and some of the next
    code, out, _ = ctl("deadletters", "redrive", "orders.billing.dead")
    assert code == 0
    assert out == "250 redriven; 300 stay: their headers name no topic that they may go back to\n"


@pytest.mark.parametrize(
    ("homeless", "others"), [(300, 1_000), (300, 5), (300, 0), (20, 90), (0, 250)]
)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_redrive_leaves_nothing_behind_if_a_failover_brings_letters_to_the_front_again(
    ctl: Ctl, letters: DeadLetters, homeless: int, others: int, after: int
) -> None:
    letters.homeless, letters.count, letters.forget = homeless, others, {after}
    out = ctl("deadletters", "redrive", "orders.billing.dead", "-o", "json")[1]
    assert json.loads(out).items() >= {"redriven": others, "homeless": homeless}.items()


def test_redrive_ends_though_it_meets_the_same_letters_again_and_again(
    ctl: Ctl, letters: DeadLetters
) -> None:
    letters.homeless, letters.forget = 300, {*range(1, 100)}
    out = ctl("deadletters", "redrive", "orders.billing.dead")[1]
    assert out.startswith("0 redriven; ")
    assert letters.redrives == 5  # two times 300 and 250, of 256 each


def test_redrive_that_fails_on_the_way_says_how_many_went_back(
    ctl: Ctl, letters: DeadLetters
) -> None:
    letters.errors = [
        None,
        wire_error(pb.REASON_INVALID_REQUEST, "no more of them"),
    ]
    code, _, err = ctl("deadletters", "redrive", "orders.billing.dead")
    assert code == cli_errors.UNKNOWN
    assert err == "timerctl: no more of them (at least 200 were done before the error)\n"
    code, out, _ = ctl("deadletters", "redrive", "orders.billing.dead")
    assert (code, out) == (0, "50 redriven\n")
