"""The client's calls that delete and describe topics and namespaces.

A namespace exists as long as it has a topic or a policy. No call creates one.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from timerclient.client.story_calls import QueryCalls
from timerclient.client.timer_calls import counting_done
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.values.errors import InvalidRequest, NotFound, NotReady

DELETED_AT_ONCE: Final = 64
"""Topics of a namespace that are deleted at a time: they share commits."""
DEFAULT: Final = "default"
"""The namespace of topics without a "/" in their names."""


class Namespace(NamedTuple):
    """A namespace, its topics and its own policy."""

    name: str
    topics: list[pb.TopicStatus]
    policy: dict[str, Any]
    """Fields set in the namespace itself; `describe_policies` returns the effective ones."""


def namespace_of(topic: str) -> str:
    """Return the namespace of a topic."""
    namespace, slash, _ = topic.partition("/")
    return namespace if slash else DEFAULT


class TopicCalls(QueryCalls):
    """Calls about topics, for an event loop."""

    async def delete_topic(self, topic: str) -> pb.DeleteTopicResponse | None:
        """Delete a topic with its timers, messages, groups and policy; return how many there were.

        Consumers of the topic end with NotFound, and so do their acks. None of its timers fires. A
        topic that is created later with the same name is a different topic.

        Returns None if the topic is deleted, and the answer with the counts was lost.

        Raises:
            NotFound: There is no such topic.
        """
        request = pb.DeleteTopicRequest(topic=rows.text("topic", topic))
        return await self._delete(lambda node: node.admin.DeleteTopic, request)

    async def namespaces(self) -> list[Namespace]:
        """Return all namespaces that have a topic or a policy, by name."""
        topics = defaultdict[str, list[pb.TopicStatus]](list)
        async for topic in self._all_topics():
            topics[namespace_of(topic.name)].append(topic)
        of_cluster = await self._policies_of(pb.PolicyScope())
        own: dict[str, dict[str, Any]] = {}
        for scope in of_cluster.narrower:
            if scope.namespace:
                own[scope.namespace] = policy_fields.fields_of((await self._policies_of(scope)).own)
        names = sorted(topics.keys() | own.keys())
        return [Namespace(name, topics[name], own.get(name, {})) for name in names]

    async def describe_namespace(self, namespace: str) -> Namespace:
        """Return one namespace.

        Raises:
            NotFound: The namespace has neither a topic nor a policy.
        """
        scope = policy_fields.scope(namespace)
        topics = await self._topics_in(namespace)
        own = policy_fields.fields_of((await self._policies_of(scope)).own)
        if not (topics or own):
            raise NotFound(f"no such namespace: {namespace!r}")
        return Namespace(namespace, topics, own)

    async def delete_namespace(self, namespace: str) -> list[str]:
        """Delete all topics of a namespace, then its policy; return the names of the topics.

        Each topic is deleted as by `delete_topic`. If the call fails, the error's `done` is the
        number of deleted topics; a further call deletes the others.

        Raises:
            InvalidRequest: It is the default namespace.
            NotFound: The namespace has neither a topic nor a policy.
            NotReady: Topics are created in the namespace during the call; its policy is kept.
        """
        if namespace in ("", DEFAULT):
            raise InvalidRequest.of("namespace", namespace, "must not be the default namespace")
        found = await self.describe_namespace(namespace)
        deleted: list[str] = []
        topics = found.topics
        for _ in range(ROUNDS_MAX):  # topics may be created in the meantime
            for first in range(0, len(topics), DELETED_AT_ONCE):
                names = [topic.name for topic in topics[first : first + DELETED_AT_ONCE]]
                deleting = map(self.delete_topic, names)
                outcomes = await asyncio.gather(*deleting, return_exceptions=True)
                failed: list[BaseException] = []
                for name, outcome in zip(names, outcomes, strict=True):
                    if isinstance(outcome, BaseException) and not isinstance(outcome, NotFound):
                        failed.append(outcome)
                    else:  # not found: another call has deleted it
                        deleted.append(name)
                if failed:
                    with counting_done(deleted, len(deleted)):
                        raise failed[0]
            with counting_done(deleted, len(deleted)):
                topics = await self._topics_in(namespace)
            if not topics:
                break
        else:
            with counting_done(deleted, len(deleted)):
                raise NotReady(f"topics of {namespace!r} are created during their deletion")
        request = pb.AlterPoliciesRequest(
            scope=pb.PolicyScope(namespace=namespace), unset=[*found.policy]
        )
        if found.policy:
            with counting_done(deleted, len(deleted)):
                await self._call(lambda node: node.admin.AlterPolicies, request)
        return deleted

    async def _topics_in(self, namespace: str) -> list[pb.TopicStatus]:
        found = self._all_topics("" if namespace == DEFAULT else f"{namespace}/")
        return [topic async for topic in found if namespace_of(topic.name) == namespace]

    async def _all_topics(self, prefix: str = "") -> AsyncIterator[pb.TopicStatus]:
        """Yield all topics with the prefix, by name. A server of an older release yields others."""
        request = pb.ListTopicsRequest(prefix=prefix)
        while True:
            answer = await self._call(lambda node: node.admin.ListTopics, request)
            for topic in answer.topics:
                yield topic
            if not answer.next_after:
                return
            request.after = answer.next_after

    async def _policies_of(self, scope: pb.PolicyScope) -> pb.DescribePoliciesResponse:
        request = pb.DescribePoliciesRequest(scope=scope)
        return await self._call(lambda node: node.admin.DescribePolicies, request)


ROUNDS_MAX: Final = 4
"""Times that a namespace's topics are listed and deleted."""
