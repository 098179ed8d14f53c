"""Limits of topics, groups and producers: a rejected request appends nothing."""

from unittest import mock

import pytest

from tests.timer.leading import Play, delivered
from timer.entries.payloads import CreateGroup, GroupSettings, GroupStart
from timer.leader.intake.count_limits import RARE_MS, CountLimits, check_group, check_topics
from timer.leader.leader import LeaderConfig
from timer.model.timer_errors import LimitReachedError, QuotaReachedError
from timer.model.units import ProducerId, TopicId
from timer.ready.group import Group
from timer.ready.topic import Topic


def playing(**limits: int) -> Play:
    """Return a leader with these limits and the topic a."""
    return Play(LeaderConfig(limits=CountLimits(**limits)))


def refused(play: Play, name: str) -> str:
    """Return the error for a new topic of this name; check that no entry is appended."""
    before = len(play.log.entries)
    with pytest.raises(LimitReachedError) as why:
        play.leader.create_topic(name, play.now, play.done(name))
    assert len(play.log.entries) == before
    assert isinstance(why.value, QuotaReachedError), "the client does not send it again by itself"
    return str(why.value)


def test_topics_are_counted_in_all_and_by_namespace_those_on_their_way_too() -> None:
    play = playing(topics_max=4, namespace_topics_max=2)
    play.make_topic("ns/b")
    play.leader.create_topic("ns/c", play.now, play.done("c"))
    why = "limits.namespace_topics_max: namespace 'ns' has 2: must be at most 2"
    assert refused(play, "ns/d") == why
    play.leader.create_topic("ns/c", play.now, play.done("c again"))
    play.leader.create_topic("b", play.now, play.done("b"))
    assert refused(play, "e/f") == "limits.topics_max: the cluster has 4: must be at most 4"
    play.commit()
    assert isinstance(play.answers["c again"], Topic)
    assert refused(play, "e/f") == "limits.topics_max: the cluster has 4: must be at most 4"
    play.leader.delete_topic(play.machine.topic_by_name["ns/b"].topic_id, play.now, lambda _: None)
    play.commit()
    play.make_topic("ns/d")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["ns/c", "b"], None),
        ([*"bcde"], "topics_max: the cluster has 3: must be at most 6"),
        (["ns/c", "ns/d"], "namespace_topics_max: namespace 'ns' has 2: must be at most 2"),
        (["x/a", "x/b", "x/c"], "namespace_topics_max: namespace 'x' has 0: must be at most 2"),
    ],
)
def test_new_topics_of_a_request_are_counted_together(names: list[str], why: str | None) -> None:
    play = playing(topics_max=6, namespace_topics_max=2)
    play.make_topic("ns/b")
    play.leader.create_topic("ns/c", play.now, play.done("c"))
    if why is None:
        play.leader.check_new_topics(names)
        return
    with pytest.raises(LimitReachedError, match=why):
        play.leader.check_new_topics(names)


def test_names_on_their_way_are_not_looked_at_far_from_the_limits() -> None:
    play = Play()
    on_their_way = mock.MagicMock(**{"__len__.return_value": 500, "__iter__.side_effect": KeyError})
    limits = CountLimits()
    check_topics(limits, play.machine, ["ns/a"], on_their_way)
    check_group(limits, play.machine, play.machine.topics[play.topic_id], on_their_way)
    on_their_way.__len__.return_value = limits.namespace_topics_max
    with pytest.raises(KeyError):
        check_topics(limits, play.machine, ["ns/a"], on_their_way)


def test_consumers_of_a_group_are_counted() -> None:
    play = playing(group_consumers_max=2)
    group = play.make_group("g")
    first, _ = play.join(group), play.join(group)
    with pytest.raises(LimitReachedError) as why:
        play.join(group)
    assert str(why.value) == "limits.group_consumers_max: group 'g' has 2: must be at most 2"
    play.leader.groups.leave(group, first)
    play.join(group)


def test_groups_are_counted_in_all_and_by_topic_those_on_their_way_too() -> None:
    play = playing(groups_max=3, topic_groups_max=2)
    first = play.make_group("g")

    def create(topic: int, name: str, answer: str) -> None:
        settings = GroupSettings(lease_ms=1000)
        topic_id = play.machine.topics[TopicId(topic)].topic_id
        wanted = CreateGroup(topic_id, name, GroupStart.EARLIEST, settings)
        play.leader.groups.create(wanted, play.done(answer))

    other = play.make_topic("b").topic_id
    create(play.topic_id, "h", "h")
    with pytest.raises(LimitReachedError) as why:
        create(play.topic_id, "i", "i")
    assert str(why.value) == "limits.topic_groups_max: topic 'a' has 2: must be at most 2"
    create(play.topic_id, "h", "h again")
    create(play.topic_id, "g", "g again")
    create(other, "i", "i")
    with pytest.raises(LimitReachedError) as why:
        create(other, "j", "j")
    assert str(why.value) == "limits.groups_max: the cluster has 3: must be at most 3"
    with pytest.raises(LimitReachedError):
        play.leader.check_group_of_new_topic()
    play.settle()
    assert all(isinstance(play.answers[name], Group) for name in ("h", "h again", "g again", "i"))
    play.leader.groups.delete(first, play.done("deleted"))
    play.settle()
    create(other, "j", "j")


def test_dead_letters_stay_where_they_are_while_their_topic_may_not_be_made() -> None:
    play = playing(topics_max=2)
    play.make_topic("other")
    group, _ = delivered(play)
    play.alter(group, max_attempts=1)
    play.nack("n", play.deliveries[-1], delay_ms=0)
    play.settle()
    assert group.unacked_count(play.machine.topics[group.topic].queue.end) == 1
    play.leader.delete_topic(play.machine.topic_by_name["other"].topic_id, play.now, lambda _: None)
    play.commit()
    play.wait(1000)
    play.settle()
    assert len(play.messages("a.g.dead")) == 1


def test_producers_are_counted_and_rare_ones_make_room() -> None:
    play = playing(producers_max=20)

    def register(number: int) -> None:
        play.leader.register(
            b"%d" % number, ProducerId(number + 1), play.now, play.done(str(number))
        )

    for number in range(20):
        register(number)
    with pytest.raises(LimitReachedError) as why:
        register(20)
    assert str(why.value) == "limits.producers_max: the cluster has 20: must be at most 20"
    play.commit()
    with pytest.raises(LimitReachedError):
        register(20)
    del play.answers["7"]
    play.wait(RARE_MS)
    register(7)  # it has an id
    play.commit()
    play.wait(1)
    play.leader.checkpoint(play.now)
    play.commit()
    assert [producer_id for producer_id, _ in play.machine.producers] == [play.answers["7"]]
    register(20)


def test_fewer_producers_are_remembered_for_as_long_as_the_settings_say() -> None:
    play = playing(producers_max=20)
    play.leader.register(b"one", ProducerId(1), play.now, play.done("one"))
    play.commit()
    play.wait(2 * RARE_MS)
    play.leader.checkpoint(play.now)
    play.commit()
    assert len(play.machine.producers) == 1
