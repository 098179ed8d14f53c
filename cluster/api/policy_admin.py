"""Policies for operators: the API's form of timer/entries/policies.py."""

from typing import TYPE_CHECKING

from cluster.api import wire_rows
from cluster.state.host import Host
from timer.entries.policies import (
    CLUSTER,
    FIELDS,
    FIELDS_OF_LEVEL_2,
    LEVELS_MAX,
    Policies,
    Scope,
    ScopePolicy,
    namespace_of,
)
from timer.leader.intake.quotas import NEW_TOPIC
from timer.model.feature_level import LEVEL_OF_SMOOTHING
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import TopicId
from timer.state.machine import Machine
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.rows import GROUP_NAME

if TYPE_CHECKING:
    from cluster.api.timer_service import TimerService


def policy_of(message: pb.Policy) -> ScopePolicy:
    """Return the fields that a message sets.

    Raises:
        InvalidRequestError: too many delay levels.
    """
    fields = {each.name: value for each, value in message.ListFields()}
    if (levels := fields.get("delay_levels_ms")) is not None:
        if len(levels.ms) > LEVELS_MAX:
            limit = f"1 to {LEVELS_MAX} values"
            raise InvalidRequestError("delay_levels_ms", f"{len(levels.ms)} values", limit)
        fields["delay_levels_ms"] = tuple(levels.ms)
    return ScopePolicy(**fields)


def message_of(policy: ScopePolicy) -> pb.Policy:
    """Return the message that sets the same fields."""
    fields = policy.pack()
    if (levels := fields.get("delay_levels_ms")) is not None:
        fields["delay_levels_ms"] = pb.DelayLevels(ms=levels)
    return pb.Policy(**fields)


def checked_scope(scope: pb.PolicyScope) -> pb.PolicyScope:
    """Return a scope with the topic's name in its plain form.

    Raises:
        InvalidRequestError: both a namespace and a topic are given, or a name is not allowed.
    """
    if scope.namespace and scope.topic:
        raise InvalidRequestError("namespace, topic", "both", "at most one may be given")
    if scope.topic:
        return pb.PolicyScope(topic=wire_rows.topic_name(scope.topic))
    if scope.namespace:
        wire_rows.check_name("namespace", scope.namespace, GROUP_NAME)
    return pb.PolicyScope(namespace=scope.namespace)


def scope_of(machine: Machine, scope: pb.PolicyScope) -> Scope:
    """Return the machine's form of a checked scope.

    Raises:
        NotFoundError: the topic does not exist.
    """
    if not scope.topic:
        return Scope(scope.namespace)
    return Scope("", wire_rows.topic_of(machine.topic_by_name, scope.topic).topic_id)


def description(
    machine: Machine, node: ScopePolicy, asked: pb.PolicyScope
) -> pb.DescribePoliciesResponse:
    """Return the scope's own fields and the effective ones, from the policies applied on this node.

    Args:
        machine: The applied state.
        node: Settings of this node, for fields that no scope sets.
        asked: The scope as requested.

    Raises:
        InvalidRequestError: both a namespace and a topic are given, or a name is not allowed.
        NotFoundError: the topic does not exist.
    """
    named = checked_scope(asked)
    scope, policies = scope_of(machine, named), machine.policies
    namespace = namespace_of(named.topic) if named.topic else named.namespace
    policy, sources = policies.effective(node, namespace, scope.topic)
    return pb.DescribePoliciesResponse(
        scope=named,
        own=message_of(policies.of(scope)),
        effective=message_of(policy),
        sources=sources,
        narrower=_narrower(machine, policies, scope),
    )


def _narrower(machine: Machine, policies: Policies, scope: Scope) -> list[pb.PolicyScope]:
    """Return the scopes within `scope` that set fields: namespaces, then topics, each by name."""
    if scope.topic:
        return []
    others = [each for each, _ in policies if each not in (scope, CLUSTER)]
    namespaces = [] if scope.namespace else sorted(each.namespace for each in others)
    names = sorted(machine.topics[TopicId(each.topic)].name for each in others if each.topic)
    inside = [name for name in names if scope.namespace in ("", namespace_of(name))]
    found = [pb.PolicyScope(namespace=name) for name in namespaces if name]
    return found + [pb.PolicyScope(topic=name) for name in inside]


class PolicyDesk:
    """Changes and describes policies, on the leader."""

    def __init__(self, host: Host, timers: "TimerService") -> None:
        self._host = host
        self._timers = timers

    async def alter(self, request: pb.AlterPoliciesRequest) -> pb.DescribePoliciesResponse:
        """Set and unset fields of one scope; return its policy when the change is applied.

        Raises:
            InvalidRequestError: a field is out of its limits, or no field or scope is given.
            NotFoundError: the topic does not exist, and the request does not create it.
        """
        leader, named = self._host.require_leader(), checked_scope(request.scope)
        if len(request.unset) > len(FIELDS):
            limit = f"at most {len(FIELDS)}, each once"
            raise InvalidRequestError("unset", f"{len(request.unset)} names", limit)
        fields = policy_of(request.set)
        if not fields.pack() and not request.unset:
            raise InvalidRequestError("set, unset", "none", "at least one field must be given")
        if not request.HasField("scope"):  # it may have been forgotten
            limit = "must be given; an empty scope is the whole cluster"
            raise InvalidRequestError("scope", "none", limit)
        if later := fields.pack().keys() & set(FIELDS_OF_LEVEL_2):
            wire_rows.check_level(min(later), leader.machine.level, LEVEL_OF_SMOOTHING)
        if named.topic and fields.pack() and not request.existing:
            if leader.topic_or_none(named.topic) is None:  # a refused change creates no topic
                leader.admission.policy_with(Scope("", NEW_TOPIC), fields, request.unset)
            await self._timers.topic(leader, named.topic)
        scope, now = scope_of(leader.machine, named), self._host.now()
        await self._host.ask(
            lambda done: leader.set_policy(scope, fields, request.unset, now, done)
        )
        return description(leader.machine, self._host.engine.node_policy, named)

    def describe(self, scope: pb.PolicyScope) -> pb.DescribePoliciesResponse:
        """Return a scope's own and effective fields; see `description`."""
        machine = self._host.require_lease().machine
        return description(machine, self._host.engine.node_policy, scope)
