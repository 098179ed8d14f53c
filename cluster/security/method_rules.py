"""The permission that each method of the public ports needs, and the targets of its requests.

A method without a line here is denied; a test compares the table with the services. Look-ups of a
target that the caller may not see answer NOT_FOUND, as if the target did not exist.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.security.access_rules import ALL_GROUPS, CLUSTER, AccessTarget, Permission
from timer.leader.groups import dead_letters

Targets = Callable[[Any], Iterable[AccessTarget]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRule:
    """What a method needs."""

    permission: Permission | None
    """None: any rule about the caller suffices."""
    targets: Targets = lambda request: ()
    """Returns the targets of a request that has been parsed."""
    look_up: bool = False
    """A denied target is reported as NOT_FOUND."""
    each_answered: bool = False
    """A stream whose service checks each request itself, and answers a denied one."""


def _nothing(_: Any) -> Iterable[AccessTarget]:
    return ()


def _cluster(_: Any) -> Iterable[AccessTarget]:
    return (CLUSTER,)


def _columns(request: Any) -> Iterable[AccessTarget]:
    return {AccessTarget(each.topic) for each in request.timers}


def _group(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic, request.group),)


def _topic(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic),)


def _topic_and_groups(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic, ALL_GROUPS),)


def _topic_or_all(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic) if request.topic else CLUSTER,)


def _group_and_letters(request: Any) -> Iterable[AccessTarget]:
    """Dead letters are written into a topic that the group's settings name, or the default one."""
    named = request.settings.dead_letter_topic
    letters = dead_letters.topic_of(request.topic, request.group, named)
    return (*_group(request), AccessTarget(letters))


def _timers(request: Any) -> Iterable[AccessTarget]:
    """Timers by key or filter. Those by id have their topics looked up by the service."""
    if request.HasField("keys"):
        return (AccessTarget(request.keys.topic),)
    return (AccessTarget(request.filter.topic),) if request.HasField("filter") else ()


def _timer(request: Any) -> Iterable[AccessTarget]:
    return () if request.timer_id else (AccessTarget(request.topic),)


def _opening(request: Any) -> Iterable[AccessTarget]:
    return _group(request.open) if request.WhichOneof("kind") == "open" else ()


def _scope(request: Any) -> Iterable[AccessTarget]:
    """A namespace needs a pattern for all of its topics, the cluster needs "*"."""
    scope = request.scope
    if scope.topic:
        return (AccessTarget(scope.topic),)
    return (AccessTarget(f"{scope.namespace}/") if scope.namespace else CLUSTER,)


def _scope_and_groups(request: Any) -> Iterable[AccessTarget]:
    """A policy has an effect on every group of its topics."""
    return (
        each if each is CLUSTER else AccessTarget(each.topic, ALL_GROUPS)
        for each in _scope(request)
    )


def _rule(
    permission: Permission | None, targets: Targets = _nothing, *, look_up: bool = False
) -> MethodRule:
    return MethodRule(permission=permission, targets=targets, look_up=look_up)


_P: Final = Permission
METHOD_RULES: Final[Mapping[str, MethodRule]] = {
    "/timer.v1.TimerService/RegisterProducer": _rule(_P.PRODUCE),
    "/timer.v1.TimerService/UnregisterProducer": _rule(_P.PRODUCE),
    "/timer.v1.TimerService/Schedule": _rule(_P.PRODUCE, _columns),
    "/timer.v1.TimerService/ScheduleStream": MethodRule(
        permission=_P.PRODUCE, targets=_columns, each_answered=True
    ),
    "/timer.v1.TimerService/Cancel": _rule(_P.CANCEL, _timers),
    "/timer.v1.TimerService/Reschedule": _rule(_P.CANCEL, _timers),
    "/timer.v1.TimerService/GetTimer": _rule(_P.OBSERVE, _timer, look_up=True),
    "/timer.v1.TimerService/ListTimers": _rule(
        _P.OBSERVE, lambda request: _topic(request.filter), look_up=True
    ),
    "/timer.v1.TimerService/CountTimers": _rule(_P.OBSERVE, _topic, look_up=True),
    "/timer.v1.TimerService/TellStory": _rule(_P.OBSERVE, _cluster),
    "/timer.v1.ConsumeService/Consume": _rule(_P.CONSUME, _opening),
    "/timer.v1.ConsumeService/Receive": _rule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Ack": _rule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Nack": _rule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Extend": _rule(_P.CONSUME, _group),
    "/timer.v1.AdminService/GetStatus": _rule(None),
    "/timer.v1.AdminService/GetCheckpoint": _rule(_P.OBSERVE, _cluster),
    "/timer.v1.AdminService/ListTopics": _rule(_P.OBSERVE, _topic_or_all, look_up=True),
    "/timer.v1.AdminService/ListProducers": _rule(_P.OBSERVE, _cluster),
    "/timer.v1.AdminService/ListMembers": _rule(_P.OBSERVE),
    "/timer.v1.AdminService/DescribePolicies": _rule(_P.OBSERVE, _scope, look_up=True),
    "/timer.v1.AdminService/CreateTopic": _rule(_P.MANAGE, _topic),
    "/timer.v1.AdminService/DeleteTopic": _rule(_P.MANAGE, _topic_and_groups),
    "/timer.v1.AdminService/CreateGroup": _rule(_P.MANAGE, _group_and_letters),
    "/timer.v1.AdminService/AlterGroup": _rule(_P.MANAGE, _group_and_letters),
    "/timer.v1.AdminService/SeekGroup": _rule(_P.MANAGE, _group),
    "/timer.v1.AdminService/DeleteGroup": _rule(_P.MANAGE, _group),
    "/timer.v1.AdminService/Redrive": _rule(_P.MANAGE, _topic),
    "/timer.v1.AdminService/AlterPolicies": _rule(_P.MANAGE, _scope_and_groups),
    "/timer.v1.AdminService/TransferLeadership": _rule(_P.OPERATE),
    "/timer.v1.AdminService/ChangeMembers": _rule(_P.OPERATE),
    "/grpc.health.v1.Health/Check": _rule(None),
    "/grpc.health.v1.Health/Watch": _rule(None),
    "/grpc.health.v1.Health/List": _rule(None),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _rule(None),
}
"""Path of a method -> what it needs."""
AUDITED: Final = frozenset({Permission.MANAGE, Permission.OPERATE})
"""Permissions of the calls that the audit log has, also if they are allowed."""
