"""Nacks, extensions and dead letters against three real processes, over failovers."""

from typing import Any

import pytest

from tests.cluster.running import WAIT_S, Running, receive, redriven, until
from tests.timerfake.doc_examples import examples
from timerclient import ExtendResult, NackResult, TimerClient
from timerclient.values import errors

pytestmark = pytest.mark.slow

PAGES = ("docs/consuming.md", "docs/dead-letters.md", "docs/topics.md")


def test_nacked_message_comes_back_after_its_delay_over_a_failover(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule_batch(topic, [b"later", b"held"])
    with client.consumer(topic, "g") as consumer:
        later, held = receive(consumer, 2)
        assert later.nack(delay=4).result(WAIT_S) == NackResult.NACKED
        assert held.extend(lease=60).result(WAIT_S) == ExtendResult.EXTENDED
        cluster.change_leader(client)
        again = {message.payload: message for message in receive(consumer, 2)}
        assert set(again) == {b"later", b"held"}
        counts = {payload: (m.attempt, m.failures) for payload, m in again.items()}
        assert counts == {b"later": (2, 1), b"held": (2, 0)}, "the transfer counts for nothing"
        handed_out_ms = again[b"later"].handed_out_ms
        assert handed_out_ms >= later.handed_out_ms + 4_000
        for message in again.values():
            _ = message.ack()
    cluster.digests_agree()


def test_transfers_count_as_no_attempt_of_a_message_that_nobody_has_seen(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    client.schedule(topic, b"seen")
    with client.consumer(topic, "g") as consumer:
        [seen] = receive(consumer, 1)
        assert seen.ack().result(WAIT_S)
    client.schedule_batch(topic, [b"%d" % at for at in range(10)])
    for _ in range(3):
        cluster.change_leader(client)
    with client.consumer(topic, "g") as consumer:
        assert {(m.attempt, m.failures) for m in receive(consumer, 10)} == {(1, 0)}
    cluster.digests_agree()


def test_dead_letters_say_what_they_were_and_are_redriven_once(
    cluster: Running, client: TimerClient, topic: str
) -> None:
    status = client.create_group(topic, "g", max_attempts=2, backoff_min=0.05, backoff_max=1)
    assert (status.settings.max_attempts, status.settings.backoff_ms_min) == (2, 50)
    client.schedule_batch(topic, [b"bad %d" % n for n in range(600)], headers={"mine": "1"})
    timer = client.schedule(topic, b"worst")
    with client.consumer(topic, "g") as consumer:
        for _ in range(2 * 601):
            _ = receive(consumer, 1)[0].nack()
        consumer.flush()
    dead = f"{topic}.g.dead"
    until(lambda: unacked(client, dead) == 601)
    assert unacked(client, topic) == 0
    with client.consumer(dead, "look", max_messages=601) as consumer:
        letters = {message.payload: message.headers for message in consumer}
    assert letters[b"worst"]["dead-letter-timer-id"] == timer.id
    assert letters[b"bad 0"]["mine"] == "1"
    assert letters[b"bad 0"]["dead-letter-reason"] == "nacked"
    assert letters[b"bad 0"]["dead-letter-attempts"] == "2"
    redriven(client, dead, 601)
    assert client.redrive(dead) == 0
    with client.consumer(topic, "g", max_messages=601) as consumer:
        back = [(message.payload, message.headers) for message in consumer]
    assert len(back) == len({payload for payload, _ in back}) == 601
    assert {b"worst"} == {payload for payload, headers in back if headers != {"mine": "1"}}
    cluster.digests_agree()
    cluster.counts_add_up()


def unacked(client: TimerClient, topic: str) -> int:
    """Return the number of messages that a topic's first group has not acked; -1: no group."""
    groups = [each.groups for each in client.topics() if each.name == topic]
    return groups[0][0].unacked if groups and groups[0] else -1


def test_examples_of_the_documentation_run_in_the_order_of_their_pages(cluster: Running) -> None:
    for page in PAGES:
        names: dict[str, Any] = {}
        for example in examples(page):
            with cluster.client() as names["client"]:
                exec(example, names)
        assert len(names) > 1, page


def test_group_settings_are_checked_changed_in_part_and_told(client: TimerClient) -> None:
    client.create_group("settings", "g", lease=5, max_attempts=3)
    assert client.create_group("settings", "g", lease=9).settings.lease_ms == 5_000, "it was there"
    altered = client.alter_group("settings", "g", max_attempts=0, backoff_min=2).settings
    assert (altered.lease_ms, altered.max_attempts, altered.backoff_ms_min) == (5_000, 0, 2_000)
    wrong: list[dict[str, Any]] = [
        {"max_attempts": 1001},
        {"lease": 0.001},
        {"backoff_min": 9, "backoff_max": 3},
        {"backoff_max": 1},
        {"dead_letter_topic": "settings"},
        {"dead_letter_topic": "no spaces"},
    ]
    for options in wrong:
        with pytest.raises(errors.InvalidRequest):
            client.alter_group("settings", "g", **options)
    with pytest.raises(errors.NotFound):
        client.alter_group("settings", "nobody", max_attempts=1)
    with pytest.raises(errors.NotFound):
        client.redrive("settings")
