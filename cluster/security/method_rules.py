"""The permission that each method of the public ports needs, and the targets of its requests.

A method without a line here is denied; a test compares the table with the services. A denied
look-up gets NOT_FOUND, as if its target did not exist.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.security.access_rules import ALL_GROUPS, CLUSTER, AccessTarget, Permission
from timer.leader.groups import dead_letters

Targets = Callable[[Any], Iterable[AccessTarget]]


def _nothing(_: Any) -> Iterable[AccessTarget]:
    return ()


def _cluster(_: Any) -> Iterable[AccessTarget]:
    return (CLUSTER,)


def _columns(request: Any) -> Iterable[AccessTarget]:
    return {AccessTarget(each.topic) for each in request.timers}


def _group(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic, request.group),)


def _group_or_topic(request: Any) -> Iterable[AccessTarget]:
    return _group(request) if request.group else _topic(request)


def _topic(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic),)


def _topic_and_groups(request: Any) -> Iterable[AccessTarget]:
    return (AccessTarget(request.topic, ALL_GROUPS),)


def _topic_or_shown(request: Any) -> Iterable[AccessTarget]:
    """The topic. Of all topics the service shows those that the caller's rules cover."""
    return _topic(request) if request.topic else ()


def _group_and_letters(request: Any) -> Iterable[AccessTarget]:
    """The group, and the topic of its dead letters: named in its settings, or the default."""
    named = request.settings.dead_letter_topic
    letters = dead_letters.topic_of(request.topic, request.group, named)
    return (*_group(request), AccessTarget(letters))


def _timers(request: Any) -> Iterable[AccessTarget]:
    """Timers by key or filter. The service looks up the topics of timers by id."""
    if request.HasField("keys"):
        return (AccessTarget(request.keys.topic),)
    return (AccessTarget(request.filter.topic),) if request.HasField("filter") else ()


def _topic_or_filter(request: Any) -> Iterable[AccessTarget]:
    return _topic(request.filter if request.HasField("filter") else request)


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


@dataclass(frozen=True, slots=True)
class MethodRule:
    """The permission and the targets of one method."""

    permission: Permission | None
    """None: the caller needs any rule."""
    targets: Targets = _nothing
    """Returns the targets of a parsed request."""
    look_up: bool = field(default=False, kw_only=True)
    """A denied target is reported as NOT_FOUND."""
    each_answered: bool = field(default=False, kw_only=True)
    """The service checks each request of the stream itself, and answers a denied one."""
    paced: bool = field(default=False, kw_only=True)
    """Requests of the stream above the caller's rate wait, because an error would end it."""
    is_standard: bool = field(default=False, kw_only=True)
    """A method of gRPC's standard services. The guard counts its calls; others count their own."""
    is_step: bool = field(default=False, kw_only=True)
    """A step of an audited call. It has no line in the audit log, except if it is denied."""
    is_polled: bool = field(default=False, kw_only=True)
    """Called all the time. The calls of one caller have one line an hour in the audit log."""

    @property
    def is_audited(self) -> bool:
        """Whether a call has a line in the audit log even if it succeeds."""
        return self.permission in AUDITED and not self.is_step


_P: Final = Permission
METHOD_RULES: Final[Mapping[str, MethodRule]] = {
    "/timer.v1.TimerService/RegisterProducer": MethodRule(_P.PRODUCE),
    "/timer.v1.TimerService/UnregisterProducer": MethodRule(_P.PRODUCE),
    "/timer.v1.TimerService/Schedule": MethodRule(_P.PRODUCE, _columns),
    "/timer.v1.TimerService/ScheduleTimer": MethodRule(_P.PRODUCE, _topic),
    "/timer.v1.TimerService/ScheduleStream": MethodRule(_P.PRODUCE, _columns, each_answered=True),
    "/timer.v1.TimerService/Cancel": MethodRule(_P.CANCEL, _timers),
    "/timer.v1.TimerService/Reschedule": MethodRule(_P.CANCEL, _timers),
    "/timer.v1.TimerService/GetTimer": MethodRule(_P.OBSERVE, _timer, look_up=True),
    "/timer.v1.TimerService/ListTimers": MethodRule(
        _P.OBSERVE, lambda request: _topic(request.filter), look_up=True
    ),
    "/timer.v1.TimerService/CountTimers": MethodRule(_P.OBSERVE, _topic_or_filter, look_up=True),
    "/timer.v1.TimerService/CreateSeries": MethodRule(_P.PRODUCE, _topic),
    "/timer.v1.TimerService/AlterSeries": MethodRule(_P.CANCEL, _topic),
    "/timer.v1.TimerService/DeleteSeries": MethodRule(_P.CANCEL, _topic),
    "/timer.v1.TimerService/GetSeries": MethodRule(_P.OBSERVE, _topic, look_up=True),
    "/timer.v1.TimerService/ListSeries": MethodRule(_P.OBSERVE, _topic_or_shown, look_up=True),
    "/timer.v1.TimerService/TellStory": MethodRule(_P.OBSERVE, _cluster),
    "/timer.v1.ConsumeService/Consume": MethodRule(_P.CONSUME, _opening, paced=True),
    "/timer.v1.ConsumeService/Receive": MethodRule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Ack": MethodRule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Nack": MethodRule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Extend": MethodRule(_P.CONSUME, _group),
    "/timer.v1.ConsumeService/Peek": MethodRule(_P.OBSERVE, _group_or_topic, look_up=True),
    "/timer.v1.ConsumeService/ReadMessages": MethodRule(_P.OBSERVE, _topic, look_up=True),
    "/timer.v1.AdminService/GetStatus": MethodRule(None),
    "/timer.v1.AdminService/GetCheckpoint": MethodRule(_P.OBSERVE, _cluster),
    "/timer.v1.AdminService/GetVerification": MethodRule(_P.OBSERVE, _cluster),
    "/timer.v1.AdminService/ListTopics": MethodRule(_P.OBSERVE, _topic_or_shown, look_up=True),
    "/timer.v1.AdminService/ListProducers": MethodRule(_P.OBSERVE, _cluster),
    "/timer.v1.AdminService/ListMembers": MethodRule(_P.OBSERVE),
    "/timer.v1.AdminService/DescribePolicies": MethodRule(_P.OBSERVE, _scope, look_up=True),
    "/timer.v1.AdminService/CreateTopic": MethodRule(_P.MANAGE, _topic),
    "/timer.v1.AdminService/DeleteTopic": MethodRule(_P.MANAGE, _topic_and_groups),
    "/timer.v1.AdminService/CreateGroup": MethodRule(_P.MANAGE, _group_and_letters),
    "/timer.v1.AdminService/AlterGroup": MethodRule(_P.MANAGE, _group_and_letters),
    "/timer.v1.AdminService/SeekGroup": MethodRule(_P.MANAGE, _group),
    "/timer.v1.AdminService/DeleteGroup": MethodRule(_P.MANAGE, _group),
    "/timer.v1.AdminService/Redrive": MethodRule(_P.MANAGE, _topic),
    "/timer.v1.AdminService/RedriveLetters": MethodRule(_P.MANAGE, _topic),
    "/timer.v1.AdminService/AlterPolicies": MethodRule(_P.MANAGE, _scope_and_groups),
    "/timer.v1.AdminService/TransferLeadership": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/ChangeMembers": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/DrainNode": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/SetLogLevel": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/DumpStacks": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/BeginVerification": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/TraceHops": MethodRule(_P.OPERATE, is_step=True),
    "/timer.v1.AdminService/ReloadFiles": MethodRule(_P.OPERATE),
    "/timer.v1.AdminService/OpenBackup": MethodRule(_P.OPERATE, _cluster),
    "/timer.v1.AdminService/FetchBackup": MethodRule(_P.OPERATE, _cluster, is_step=True),
    "/timer.v1.AdminService/CloseBackup": MethodRule(_P.OPERATE, _cluster),
    "/timer.v1.AdminService/FetchLog": MethodRule(_P.OPERATE, _cluster, is_polled=True),
    "/grpc.health.v1.Health/Check": MethodRule(None, is_standard=True),
    "/grpc.health.v1.Health/Watch": MethodRule(None, is_standard=True),
    "/grpc.health.v1.Health/List": MethodRule(None, is_standard=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": MethodRule(
        None, paced=True, is_standard=True
    ),
}
"""Path of a method -> its rule."""
AUDITED: Final = frozenset({Permission.MANAGE, Permission.OPERATE})
"""Permissions of the calls that are audited even if they succeed."""
