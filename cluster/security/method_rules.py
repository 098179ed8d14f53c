"""The properties of each method of the public ports: permission, targets, place, load, repetition.

A method without a line here is denied; a test compares the table with the services. A denied
look-up gets NOT_FOUND, as if its target did not exist.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from cluster.security.access_rules import ALL_GROUPS, CLUSTER, AccessTarget, Permission
from timer.leader.groups import dead_letters

Targets = Callable[[Any], Iterable[AccessTarget]]


def _no_targets(_: Any) -> Iterable[AccessTarget]:
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


def _topic_if_given(request: Any) -> Iterable[AccessTarget]:
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


def _opened_group(request: Any) -> Iterable[AccessTarget]:
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


class Repeat(Enum):
    """Whether a caller may repeat a request with an unknown outcome."""

    NO = "no"
    """No, except for the requests that `cluster.rpc.relay.is_repeatable` names."""
    SAFE = "safe"
    """A request may be applied twice without harm. A lost answer is LEADERSHIP_LOST."""
    READ = "read"
    """The same holds, and no caller needs to know the outcome: a lost answer is NOT_READY."""


@dataclass(frozen=True, slots=True)
class MethodRule:
    """The properties of one method."""

    permission: Permission | None
    """None: the caller needs any rule."""
    targets: Targets = _no_targets
    """Returns the targets of a parsed request."""
    hides_target: bool = field(default=False, kw_only=True)
    """A denied target is reported as NOT_FOUND."""
    answers_each: bool = field(default=False, kw_only=True)
    """The service checks each request of the stream itself, and answers a denied one."""
    paced: bool = field(default=False, kw_only=True)
    """Requests of the stream above the caller's rate wait, because an error would end it."""
    is_standard: bool = field(default=False, kw_only=True)
    """A method of gRPC's standard services. The guard counts its calls; others count their own."""
    denied_unimplemented: bool = field(default=False, kw_only=True)
    """A call that is denied at its begin gets UNIMPLEMENTED. gRPC then makes the client's calls
    without health checks, and each gets the status of its own denial. After any other status, gRPC
    repeats the call, and until it is admitted, the client's calls are UNAVAILABLE."""
    is_step: bool = field(default=False, kw_only=True)
    """A step of an audited call. It has no line in the audit log, except if it is denied."""
    is_polled: bool = field(default=False, kw_only=True)
    """Called all the time. The calls of one caller have one line an hour in the audit log."""
    here: bool = field(default=False, kw_only=True)
    """Each node answers it itself, or asks the named node or the controller. All others need the
    leader."""
    at_once: bool = field(default=False, kw_only=True)
    """Requests do not wait for a turn, as with `here`: consumers and operators need them under
    load, and a Receive may wait for messages."""
    while_memory_is_high: bool = field(default=False, kw_only=True)
    """Always served: it frees memory, or operators need it. Consumers ack through Consume, and
    `limits.outbox_bytes_max` bounds the deliveries that they have not read."""
    repeat: Repeat = field(default=Repeat.NO, kw_only=True)

    @property
    def is_audited(self) -> bool:
        """Whether a call has a line in the audit log even if it succeeds."""
        return self.permission in AUDITED and not self.is_step


_P: Final = Permission
_SAFE: Final = Repeat.SAFE
_READ: Final = Repeat.READ
_TIMERS: Final = {
    "RegisterProducer": MethodRule(_P.PRODUCE, repeat=_SAFE),
    "UnregisterProducer": MethodRule(_P.PRODUCE, repeat=_SAFE),
    "Schedule": MethodRule(_P.PRODUCE, _columns),
    "ScheduleTimer": MethodRule(_P.PRODUCE, _topic),
    "ScheduleStream": MethodRule(_P.PRODUCE, _columns, answers_each=True),
    "Cancel": MethodRule(_P.CANCEL, _timers, while_memory_is_high=True),
    "Reschedule": MethodRule(_P.CANCEL, _timers),
    "GetTimer": MethodRule(_P.OBSERVE, _timer, hides_target=True, repeat=_READ),
    "ListTimers": MethodRule(
        _P.OBSERVE, lambda request: _topic(request.filter), hides_target=True, repeat=_READ
    ),
    "CountTimers": MethodRule(_P.OBSERVE, _topic_or_filter, hides_target=True, repeat=_READ),
    "CreateSeries": MethodRule(_P.PRODUCE, _topic),
    "AlterSeries": MethodRule(_P.CANCEL, _topic),
    "DeleteSeries": MethodRule(_P.CANCEL, _topic),
    "GetSeries": MethodRule(_P.OBSERVE, _topic, hides_target=True, repeat=_READ),
    "ListSeries": MethodRule(_P.OBSERVE, _topic_if_given, hides_target=True, repeat=_READ),
    "TellStory": MethodRule(_P.OBSERVE, _cluster, repeat=_READ),
}
_CONSUMERS: Final = {
    "Consume": MethodRule(_P.CONSUME, _opened_group, paced=True, while_memory_is_high=True),
    "Receive": MethodRule(_P.CONSUME, _group, at_once=True, repeat=_SAFE),
    "Ack": MethodRule(_P.CONSUME, _group, at_once=True, while_memory_is_high=True, repeat=_SAFE),
    "Nack": MethodRule(_P.CONSUME, _group, at_once=True, while_memory_is_high=True, repeat=_SAFE),
    "Extend": MethodRule(_P.CONSUME, _group, at_once=True, while_memory_is_high=True, repeat=_SAFE),
    "Peek": MethodRule(_P.OBSERVE, _group_or_topic, hides_target=True, repeat=_READ),
    "ReadMessages": MethodRule(_P.OBSERVE, _topic, hides_target=True, repeat=_READ),
}
_ADMINISTRATION: Final = {
    "GetStatus": MethodRule(None, here=True, while_memory_is_high=True, repeat=_READ),
    "GetCheckpoint": MethodRule(
        _P.OBSERVE, _cluster, here=True, while_memory_is_high=True, repeat=_READ
    ),
    "GetVerification": MethodRule(_P.OBSERVE, _cluster, here=True, repeat=_READ),
    "ListTopics": MethodRule(_P.OBSERVE, _topic_if_given, hides_target=True, repeat=_READ),
    "ListProducers": MethodRule(_P.OBSERVE, _cluster, repeat=_READ),
    "ListMembers": MethodRule(_P.OBSERVE, here=True, while_memory_is_high=True, repeat=_READ),
    "DescribePolicies": MethodRule(_P.OBSERVE, _scope, hides_target=True, repeat=_READ),
    "CreateTopic": MethodRule(_P.MANAGE, _topic, repeat=_SAFE),
    "DeleteTopic": MethodRule(_P.MANAGE, _topic_and_groups, while_memory_is_high=True),
    "CreateGroup": MethodRule(_P.MANAGE, _group_and_letters, repeat=_SAFE),
    "AlterGroup": MethodRule(_P.MANAGE, _group_and_letters),
    "SeekGroup": MethodRule(_P.MANAGE, _group),
    "DeleteGroup": MethodRule(_P.MANAGE, _group, while_memory_is_high=True),
    "Redrive": MethodRule(_P.MANAGE, _topic),
    "RedriveLetters": MethodRule(_P.MANAGE, _topic, repeat=_SAFE),
    "AlterPolicies": MethodRule(_P.MANAGE, _scope_and_groups),
    "TransferLeadership": MethodRule(_P.OPERATE, here=True, while_memory_is_high=True),
    "ChangeMembers": MethodRule(_P.OPERATE, at_once=True, while_memory_is_high=True),
    "DrainNode": MethodRule(_P.OPERATE, here=True, while_memory_is_high=True),
    "SetLogLevel": MethodRule(_P.OPERATE, here=True, while_memory_is_high=True),
    "DumpStacks": MethodRule(_P.OPERATE, here=True, while_memory_is_high=True, repeat=_READ),
    "BeginVerification": MethodRule(_P.OPERATE, here=True),
    "TraceHops": MethodRule(_P.OPERATE, is_step=True, here=True),
    "ReloadFiles": MethodRule(_P.OPERATE, here=True, while_memory_is_high=True),
    "OpenBackup": MethodRule(_P.OPERATE, _cluster, here=True, repeat=_READ),
    "FetchBackup": MethodRule(_P.OPERATE, _cluster, is_step=True, here=True, repeat=_READ),
    "CloseBackup": MethodRule(
        _P.OPERATE, _cluster, here=True, while_memory_is_high=True, repeat=_READ
    ),
    "FetchLog": MethodRule(_P.OPERATE, _cluster, is_polled=True, here=True, repeat=_READ),
}
CONTRACT_RULES: Final[Mapping[str, MethodRule]] = _TIMERS | _CONSUMERS | _ADMINISTRATION
"""Name of a method of the contract -> its rule."""
_SERVICES: Final[Mapping[str, Mapping[str, MethodRule]]] = {
    "timer.v1.TimerService": _TIMERS,
    "timer.v1.ConsumeService": _CONSUMERS,
    "timer.v1.AdminService": _ADMINISTRATION,
    "grpc.health.v1.Health": {
        "Check": MethodRule(None, is_standard=True),
        "List": MethodRule(None, is_standard=True),
        "Watch": MethodRule(None, is_standard=True, denied_unimplemented=True),
    },
    "grpc.reflection.v1alpha.ServerReflection": {
        "ServerReflectionInfo": MethodRule(None, paced=True, is_standard=True)
    },
}
METHOD_RULES: Final[Mapping[str, MethodRule]] = {
    f"/{service}/{name}": rule
    for service, rules in _SERVICES.items()
    for name, rule in rules.items()
}
"""Path of a method of the public ports -> its rule."""
AUDITED: Final = frozenset({Permission.MANAGE, Permission.OPERATE})
"""Permissions of the calls that are audited even if they succeed."""
