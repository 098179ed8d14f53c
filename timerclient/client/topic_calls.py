"""The part of the client that is about the life of topics, and of the namespaces they are in.

A namespace is there as long as there is a topic in it, or a policy of it: nobody makes one.
"""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from timerclient.client.story_calls import SeenCalls, SeenFront
from timerclient.client.timer_calls import part_of
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.values.errors import InvalidRequest, NotFound, NotReady

DEFAULT: Final = "default"
"""The namespace of topics whose names say none."""


class Namespace(NamedTuple):
    """What is in a namespace, and what it says of it."""

    name: str
    topics: list[pb.TopicStatus]
    policy: dict[str, Any]
    """What it says itself, by field; see `describe_policies` for what holds."""


def namespace_of(topic: str) -> str:
    """Return the namespace of a topic."""
    namespace, slash, _ = topic.partition("/")
    return namespace if slash else DEFAULT


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
                lambda node, left_s: node.admin.DeleteTopic(request, timeout=left_s),
                within_s=self.within_s(None),
                on_doubt=lambda: doubts.append(None),
            )
        except NotFound:
            if not doubts:  # else an earlier sending did it
                raise
            return None

    async def namespaces(self) -> list[Namespace]:
        """Return all namespaces, by name: those that have a topic, or a policy."""
        topics = defaultdict[str, list[pb.TopicStatus]](list)
        async for topic in self._all_topics():
            topics[namespace_of(topic.name)].append(topic)
        of_cluster = await self._said_of(pb.PolicyScope())
        own: dict[str, dict[str, Any]] = {}
        for scope in of_cluster.narrower:
            if scope.namespace:
                own[scope.namespace] = policy_fields.said((await self._said_of(scope)).own)
        names = sorted(topics.keys() | own.keys())
        return [Namespace(name, topics[name], own.get(name, {})) for name in names]

    async def describe_namespace(self, namespace: str) -> Namespace:
        """Return one namespace.

        Raises:
            NotFound: there is neither a topic in it nor a policy of it.
        """
        scope = policy_fields.scope(namespace)
        topics = await self._topics_in(namespace)
        own = policy_fields.said((await self._said_of(scope)).own)
        if not (topics or own):
            raise NotFound(f"no such namespace: {namespace!r}")
        return Namespace(namespace, topics, own)

    async def delete_namespace(self, namespace: str) -> list[str]:
        """Delete all topics of a namespace, then its policy; return which topics these were.

        One after the other: if it fails on the way the error's `done` says how many topics are
        gone, and to call it again deletes the others. Each topic goes as by `delete_topic`.

        Raises:
            InvalidRequest: it is the default namespace.
            NotFound: there is neither a topic in it nor a policy of it.
            NotReady: somebody goes on making topics in it; its policy stays.
        """
        if namespace in ("", DEFAULT):
            raise InvalidRequest.of("namespace", namespace, "must be another one than the default")
        found = await self.describe_namespace(namespace)
        gone: list[str] = []
        topics = found.topics
        for _ in range(ROUNDS_MAX):  # meanwhile somebody may make others
            for topic in topics:
                with part_of(gone, len(gone)), suppress(NotFound):  # by somebody else
                    await self.delete_topic(topic.name)
                gone.append(topic.name)
            with part_of(gone, len(gone)):
                topics = await self._topics_in(namespace)
            if not topics:
                break
        else:
            with part_of(gone, len(gone)):
                raise NotReady(f"topics of {namespace!r} are made while they are deleted")
        request = pb.AlterPoliciesRequest(
            scope=pb.PolicyScope(namespace=namespace), unset=[*found.policy]
        )
        if found.policy:
            with part_of(gone, len(gone)):
                await self._admin(
                    lambda node, left_s: node.admin.AlterPolicies(request, timeout=left_s)
                )
        return gone

    async def _topics_in(self, namespace: str) -> list[pb.TopicStatus]:
        all_topics = self._all_topics()
        return [topic async for topic in all_topics if namespace_of(topic.name) == namespace]

    async def _all_topics(self) -> AsyncIterator[pb.TopicStatus]:
        """Yield all topics, by name."""
        request = pb.ListTopicsRequest()
        while True:
            answer = await self._admin(
                lambda node, left_s: node.admin.ListTopics(request, timeout=left_s)
            )
            for topic in answer.topics:
                yield topic
            if not answer.next_after:
                return
            request.after = answer.next_after

    async def _said_of(self, scope: pb.PolicyScope) -> pb.DescribePoliciesResponse:
        request = pb.DescribePoliciesRequest(scope=scope)
        return await self._admin(
            lambda node, left_s: node.admin.DescribePolicies(request, timeout=left_s)
        )


ROUNDS_MAX: Final = 4
"""Times that a namespace's topics are listed and deleted."""


class TopicFront(SeenFront):
    """The same for threads."""

    _seen: TopicCalls

    def delete_topic(self, topic: str) -> pb.DeleteTopicResponse | None:
        """See TopicCalls."""
        gone: pb.DeleteTopicResponse | None = self._call(self._seen.delete_topic(topic))
        return gone

    def namespaces(self) -> list[Namespace]:
        """See TopicCalls."""
        found: list[Namespace] = self._call(self._seen.namespaces())
        return found

    def describe_namespace(self, namespace: str) -> Namespace:
        """See TopicCalls."""
        found: Namespace = self._call(self._seen.describe_namespace(namespace))
        return found

    def delete_namespace(self, namespace: str) -> list[str]:
        """See TopicCalls."""
        gone: list[str] = self._call(self._seen.delete_namespace(namespace))
        return gone
