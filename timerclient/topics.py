"""The part of the client that is about the life of topics."""

from timerclient import rows
from timerclient.errors import NotFound
from timerclient.proto import timer_pb2 as pb
from timerclient.seen import SeenCalls, SeenFront


class TopicCalls(SeenCalls):
    """Calls about topics, for an event loop."""

    async def delete_topic(self, topic: str) -> pb.DeleteTopicResponse | None:
        """Delete a topic with its pending timers, messages, groups and policy; return what it had.

        Its consumers end with NotFound, and so do their acks; a timer of it never fires. A topic of
        the same name that is made later is another one. None: an answer was lost, and it is gone.

        Raises:
            NotFound: there is no such topic.
        """
        request = pb.DeleteTopicRequest(topic=rows.utf8("topic", topic).decode())
        doubts: list[None] = []
        try:
            return await self.nodes().call(
                lambda node: lambda: node.admin.DeleteTopic(request),
                within_s=self.within_s(None),
                on_doubt=lambda: doubts.append(None),
            )
        except NotFound:
            if not doubts:  # else an earlier sending did it
                raise
            return None


class TopicFront(SeenFront):
    """The same for threads."""

    _seen: TopicCalls

    def delete_topic(self, topic: str) -> pb.DeleteTopicResponse | None:
        """See TopicCalls."""
        gone: pb.DeleteTopicResponse | None = self._call(self._seen.delete_topic(topic))
        return gone
