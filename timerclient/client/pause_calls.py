"""The part of the client that pauses topics and lets them go on."""

from collections.abc import Mapping
from typing import Any

from timerclient.client.group_calls import GroupCalls, GroupFront
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.rows.policy_fields import CatchUp


class PauseCalls(GroupCalls):
    """Pauses, for an event loop."""

    async def pause_topic(self, topic: str) -> pb.DescribePoliciesResponse:
        """Let nothing of a topic fire: what comes due is held, and pending still.

        It sets `paused` of the topic's policy; returns what is said of it then.

        Raises:
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; it may be paused.
        """
        return await self._say(topic, {"paused": True})

    async def resume_topic(
        self, topic: str, *, catch_up: CatchUp | None = None
    ) -> pb.DescribePoliciesResponse:
        """Let a topic fire again, also where its namespace is paused.

        `catch_up`, of the topic's policy from then on: what becomes of the timers that are overdue
        by now. all: they fire, in their order. latest: only the last of them. drop: none of them.

        Raises:
            InvalidRequest: that is none of these.
            NotFound: there is no such topic.
            OutcomeUnknown: no answer in time; it may go on.
        """
        said: dict[str, Any] = {"paused": False}
        return await self._say(topic, said if catch_up is None else said | {"catch_up": catch_up})

    async def _say(self, topic: str, said: Mapping[str, Any]) -> pb.DescribePoliciesResponse:
        scope = pb.PolicyScope(topic=rows.name("topic", topic))
        request = pb.AlterPoliciesRequest(
            scope=scope, set=policy_fields.policy(said), existing=True
        )
        return await self.nodes().call(
            lambda node, left_s: node.admin.AlterPolicies(request, timeout=left_s),
            within_s=self.within_s(None),
            repeatable=False,
        )


class PauseFront(GroupFront):
    """The same for threads."""

    _seen: PauseCalls

    def pause_topic(self, topic: str) -> pb.DescribePoliciesResponse:
        """See PauseCalls."""
        found: pb.DescribePoliciesResponse = self._call(self._seen.pause_topic(topic))
        return found

    def resume_topic(
        self, topic: str, *, catch_up: CatchUp | None = None
    ) -> pb.DescribePoliciesResponse:
        """See PauseCalls."""
        call = self._seen.resume_topic(topic, catch_up=catch_up)
        found: pb.DescribePoliciesResponse = self._call(call)
        return found
