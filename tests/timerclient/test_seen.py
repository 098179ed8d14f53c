"""Request ids, several topics in one request, and what the client looks at."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.timerclient.conftest import Threaded, once
from tests.timerclient.fake_cluster import NOW_MS, Cluster, wire_error
from timerclient import AsyncTimerClient, NewTimer
from timerclient.cli import timerctl
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_names
from timerclient.values import errors


async def test_request_with_an_id_is_repeated_until_it_is_answered_and_once_is_enough(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    cluster.on_schedule = once("lose", "lose")
    timer = await client.schedule("orders", b"p", delay=5, key="k", request_id="r")
    assert timer.duplicate
    again = await client.schedule("orders", b"p", delay=5, key="k", request_id="r")
    assert again == timer
    assert cluster.payloads == [b"p"]
    assert cluster.registrations == 0
    batch = await client.schedule_batch("orders", [b"a", b"b"], request_id="s")
    assert (await client.schedule_batch("orders", [b"a", b"b"], request_id="s")).ids == batch.ids
    assert cluster.payloads == [b"p", b"a", b"b"]


@pytest.mark.parametrize("request_id", ["", "x" * 65, "\0", "\ud800", "ü" * 33])
async def test_request_id_beyond_its_limit_is_refused_before_it_is_sent(
    client: AsyncTimerClient, request_id: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match="request_id"):
        await client.schedule("orders", b"p", request_id=request_id)


@pytest.mark.parametrize("request_id", [None, "r"])
async def test_timers_of_several_topics_are_one_request_and_come_back_in_order(
    cluster: Cluster, client: AsyncTimerClient, request_id: str | None
) -> None:
    new = [
        NewTimer("a", b"0", delay=1),
        NewTimer("b", b"1", due_ms=NOW_MS + 7_000),
        NewTimer("a", b"2", delay_level=3, headers={"h": "v"}),
        NewTimer("a", b"3", delay=2, key="k"),
        NewTimer("b", b"4"),
    ]
    timers = await client.schedule_all(new, request_id=request_id)
    by_id = {row.raw: row for row in cluster.rows}
    assert [by_id[timer.raw].payload for timer in timers] == [b"0", b"1", b"2", b"3", b"4"]
    assert [by_id[timer.raw].topic for timer in timers] == ["a", "b", "a", "a", "b"]
    assert [due - NOW_MS for due in timers.due_ms] == [1_000, 7_000, 10_000, 2_000, 0]
    again = await client.schedule_all(
        [NewTimer("b", b"x"), NewTimer("a", b"y", key="k"), NewTimer("b", b"z", due_ms=NOW_MS)]
    )
    assert [result.name for result in again.results] == ["SCHEDULED", "REJECTED", "SCHEDULED"]
    assert again.existing == [None, timers.ids[3], None]


async def test_several_topics_refuse_what_one_would(
    cluster: Cluster, client: AsyncTimerClient
) -> None:
    with pytest.raises(errors.InvalidRequest, match="at least one"):
        await client.schedule_all([])
    with pytest.raises(errors.InvalidRequest, match="only one of"):
        await client.schedule_all([NewTimer("a", b"", delay=1, due_ms=1)])
    with pytest.raises(errors.InvalidRequest, match="priority = 10"):
        await client.schedule_all([NewTimer("a", b"ok"), NewTimer("b", b"", priority=10)])
    cluster.on_schedule = lambda _: wire_error(pb.REASON_INVALID_REQUEST, "by the node")
    with pytest.raises(errors.InvalidRequest, match="by the node"):
        await client.schedule_all([NewTimer("a", b""), NewTimer("b", b"")])


def looks(request: Any) -> Any:
    """Return pages of five producers, and the parts of a story."""
    if isinstance(request, pb.ListProducersRequest):
        names = range(request.after + 1, min(request.after + 3, 6))
        return pb.ListProducersResponse(
            producers=[pb.ProducerStatus(producer=each, used_at_ms=each) for each in names],
            next_after=names[-1] % 5,
            count=5,
        )
    what = pb.StoryEvent.WHAT_FIRED
    fired = pb.StoryEvent(what=what, index=9, queue_offset=4, topic="orders")
    scheduled = pb.StoryEvent(what=pb.StoryEvent.WHAT_SCHEDULED, index=3)
    end = pb.StoryEnd(state=pb.TIMER_STATE_FIRED, log_first=2, log_last=12, gaps=["a gap"])
    parts = {"events": [scheduled]}, {"events": [fired]}, {"end": end}
    return [pb.TellStoryResponse(**part) for part in parts]


async def test_looks_are_read_whole(cluster: Cluster, client: AsyncTimerClient) -> None:
    cluster.on_call = looks
    assert [each.producer for each in await client.producers()] == [1, 2, 3, 4, 5]
    story = await client.tell_story("0" * 24)
    assert [event.index for event in story.events] == [3, 9]
    assert list(story.end.gaps) == ["a gap"]
    with pytest.raises(errors.InvalidRequest, match="producer"):
        await client.describe_producer(0)


def run(capsys: pytest.CaptureFixture[str], cluster: Cluster, *words: str) -> str:
    assert timerctl.main(["--endpoints", cluster.address, *words]) == 0
    return capsys.readouterr().out


def test_timerctl_shows_stories_and_producers(
    threaded: Threaded, capsys: pytest.CaptureFixture[str]
) -> None:
    threaded.cluster.on_call = looks
    text = run(capsys, threaded.cluster, "timers", "story", "0" * 24)
    assert "SCHEDULED" in text
    assert "topic=orders  offset=4" in text
    assert "missing: a gap" in text
    document: Any = json.loads(
        run(capsys, threaded.cluster, "-o", "json", "timers", "story", "0" * 24)
    )
    assert [event["what"] for event in document["events"]] == ["SCHEDULED", "FIRED"]
    assert document["end"]["state"] == "fired"
    text = run(capsys, threaded.cluster, "producers", "list", "--limit", "2")
    assert text.splitlines()[1].startswith("0000000000000005"), "the last used is the first"
    assert text.splitlines()[-1] == "… of 5: --limit"
    threaded.cluster.on_call = once()
    text = run(capsys, threaded.cluster, "schedule", "orders", "x", "--request-id", "r")
    again = run(capsys, threaded.cluster, "schedule", "orders", "x", "--request-id", "r")
    assert again.strip() == f"{text.strip()}  repeated"


@pytest.mark.parametrize("name", ["nope", "0x00000000000005", "5" * 17])
def test_name_that_no_producer_has_is_a_wrong_command_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timerctl.main(["producers", "describe", name]) == 2
    said = f"argument PRODUCER: {name!r}: must be 16 hexadecimal digits, as `producers list` prints"
    assert said in capsys.readouterr().err


def test_every_event_of_a_story_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs/looking.md").read_text()
    missing = [name for name in short_names(pb.StoryEvent.What.DESCRIPTOR) if name not in text]
    assert missing == ["WHAT_UNSPECIFIED"]
