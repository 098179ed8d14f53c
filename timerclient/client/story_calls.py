"""The client's queries: the story of a timer, the statistics of one topic, producers."""

from typing import NamedTuple

from timerclient.client.pause_calls import PauseCalls
from timerclient.client.timer_calls import Seconds, TimerLike, raw_ids
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.peeked_messages import MessagePage, Peeked, page_of, peeked_of
from timerclient.streams.node_channel import NodeChannel
from timerclient.values.client_settings import PEEK_MAX, READ_MAX


class TimerStory(NamedTuple):
    """The events of one timer that the log still holds."""

    events: list[pb.StoryEvent]
    """In the order of the log."""
    end: pb.StoryEnd
    """The timer's present state, the range of the log, and missing parts of the story."""


class QueryCalls(PauseCalls):
    """Queries, for an event loop."""

    async def tell_story(self, timer: TimerLike, *, timeout: Seconds | None = None) -> TimerStory:
        """Return the events of a timer that the leader's log still holds.

        If the log begins after the timer's first events, `end.gaps` says so.

        Raises:
            InvalidRequest: `timer` is not a timer or an id.
            NotFound: This cluster has not issued the id.
        """
        request = pb.TellStoryRequest(timer_id=raw_ids([timer]))

        async def read(node: NodeChannel, _: float) -> TimerStory:
            story = TimerStory([], pb.StoryEnd())
            async for answer in node.timers.TellStory(request):
                story.events.extend(answer.events)
                if answer.HasField("end"):
                    story.end.CopyFrom(answer.end)
            return story

        return await self.nodes().call(read, within_s=self.within_s(timeout))

    async def describe_topic(self, topic: str) -> pb.TopicStatus:
        """Return a topic with its groups, their lag, and the lateness of firing and delivery.

        Raises:
            NotFound: There is no such topic.
        """
        request = pb.ListTopicsRequest(topic=rows.name("topic", topic), lateness=True)
        answer = await self._call(lambda node: node.admin.ListTopics, request)
        return answer.topics[0]

    async def peek(
        self,
        topic: str,
        group: str = "",
        *,
        max_messages: int = PEEK_MAX,
        from_offset: int = 0,
        timeout: Seconds | None = None,
    ) -> Peeked:
        """Return messages without delivering them: nothing is leased, and nothing changes.

        With a `group`: its unacked messages, each with its state. Without one: all messages that
        the topic keeps. A call returns at most 100 messages and about a mebibyte.

        Args:
            max_messages: 1 to 100.
            from_offset: The first queue offset; `next_offset` of a result continues it.

        Raises:
            NotFound: There is no such topic or group.
            InvalidRequest: An argument exceeds a limit.
        """
        request = pb.PeekRequest(
            topic=rows.name("topic", topic),
            group=rows.text("group", group),
            max_messages=rows.whole_number("max_messages", max_messages, 1, PEEK_MAX),
            from_offset=rows.whole_number("from_offset", from_offset, 0, rows.UINT64_MAX),
        )
        answer = await self._call(lambda node: node.consuming.Peek, request, timeout)
        return peeked_of(answer)

    async def read_messages(
        self,
        topic: str,
        from_offset: int = 0,
        *,
        end_offset: int | None = None,
        max_messages: int = READ_MAX,
        payloads: bool = True,
        timeout: Seconds | None = None,
    ) -> MessagePage:
        """Return fired messages by their queue offsets, for a reader that keeps its own position.

        A call returns at most 4 MiB. Nothing is leased, and nothing changes. The message at an
        offset never changes either. It is there until the topic's retention ends and all groups
        have acked it.

        Args:
            from_offset: The first queue offset; `next_offset` of a result continues it. If the
                messages from it on were deleted, the result begins with the oldest one kept, and
                its `begin_offset` is greater.
            end_offset: The offset after the last message; None: all messages that have fired.
            max_messages: 1 to 16,384.
            payloads: Whether the result has payloads; without them fewer bytes are sent.

        Raises:
            NotFound: There is no such topic.
            InvalidRequest: An argument exceeds a limit.
        """
        request = pb.ReadMessagesRequest(
            topic=rows.name("topic", topic),
            from_offset=rows.whole_number("from_offset", from_offset, 0, rows.UINT64_MAX),
            max_messages=rows.whole_number("max_messages", max_messages, 1, READ_MAX),
            omit_payloads=not payloads,
        )
        if end_offset is not None:
            least = max(from_offset, 1)  # on the wire, 0 is no limit
            request.end_offset = rows.whole_number("end_offset", end_offset, least, rows.UINT64_MAX)
        answer = await self._call(lambda node: node.consuming.ReadMessages, request, timeout)
        return page_of(answer)

    async def producers(self) -> list[pb.ProducerStatus]:
        """Return all registered idempotent producers, in the order of their public names."""
        found: list[pb.ProducerStatus] = []
        request = pb.ListProducersRequest(page_size=1_000)
        while True:
            answer = await self._call(lambda node: node.admin.ListProducers, request)
            found += answer.producers
            if not answer.next_after:
                return found
            request.after = answer.next_after

    async def describe_producer(self, producer: int) -> pb.ProducerStatus:
        """Return one producer, by its public name.

        Raises:
            UnknownProducer: There is no such producer, or it has expired.
        """
        name = rows.whole_number("producer", producer, 1, rows.UINT64_MAX)
        request = pb.ListProducersRequest(producer=name)
        answer = await self._call(lambda node: node.admin.ListProducers, request)
        return answer.producers[0]
