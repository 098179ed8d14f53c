"""The client's calls that pause and resume topics."""

from collections.abc import Mapping
from typing import Any

from timerclient.client.node_calls import OneNodeCalls
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import policy_fields, rows
from timerclient.values.policy_names import CatchUp
from timerclient.values.same_fields import as_type


class PauseCalls(OneNodeCalls):
    """Pause and resume, for an event loop."""

    async def pause_topic(self, topic: str) -> pb.DescribePoliciesResponse:
        """Stop the firing of a topic. Timers that come due are held, and stay pending.

        The call sets `paused` in the topic's policy, and returns the policy.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the topic may be paused.
        """
        return await self._set_policy(topic, {"paused": True})

    async def resume_topic(
        self, topic: str, *, catch_up: CatchUp | None = None
    ) -> pb.DescribePoliciesResponse:
        """Resume the firing of a topic, even if its namespace is paused. Return its policy.

        Args:
            catch_up: The overdue timers that fire: "all" in their order, only the "latest", or
                none ("drop"). The others are dropped. It is set in the topic's policy, and applies
                to later resumes, too. None: the policy is unchanged.

        Raises:
            InvalidRequest: `catch_up` is none of these.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the topic may be resumed.
        """
        fields: dict[str, Any] = {"paused": False}
        return await self._set_policy(
            topic, fields if catch_up is None else fields | {"catch_up": catch_up}
        )

    async def _set_policy(
        self, topic: str, fields: Mapping[str, Any]
    ) -> pb.DescribePoliciesResponse:
        scope = pb.PolicyScope(topic=rows.name("topic", topic))
        request = pb.AlterPoliciesRequest(
            scope=scope, set=policy_fields.policy_of(fields), existing=True
        )
        answer = await self._call(lambda node: node.admin.AlterPolicies, request, repeatable=False)
        return as_type(pb.DescribePoliciesResponse, answer)
