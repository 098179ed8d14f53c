"""The caller of the RPC that a task handles, and the caller's permissions.

A port's gate notes the caller before the handler runs. Services need it only where a request alone
does not name its topic, as for timers by id and dead letters, or needs one more permission.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.rpc.caller_usages import CallerUsages
from cluster.rpc.request_bounds import UnreadableRequest
from cluster.security.access_rules import CLUSTER, AccessRules, AccessTarget, Permission
from cluster.security.identities import CallerIdentity
from cluster.security.method_rules import MethodRule
from timer.model.timer_errors import EngineError, NotFoundError, PermissionDeniedError

METADATA: Final = "timer-caller"
"""Metadata of a relayed request: the identity of the node's own caller. Only nodes send it."""


@dataclass(eq=False, slots=True)
class Caller:
    """The caller of one RPC."""

    identity: CallerIdentity
    method: str
    rule: MethodRule
    rules: Callable[[], AccessRules]
    """Returns the rules in force."""
    address: str
    """In gRPC's form; of a relayed request the node's."""
    usages: CallerUsages
    check_token: Callable[[], object] = lambda: None
    """Raises TokenRejectedError once the caller's token is withdrawn or has expired."""
    log_index: int = 0
    """Index of the last log entry that the RPC appended; 0: there is none, or it is not known."""
    epoch: int = 0
    """Epoch of that entry."""
    on_late: "Callable[[Caller, EngineError | None], object]" = lambda _, __: None
    """Called with the error of an entry that was answered after the RPC's end; None: no error."""
    recheck_targets: list[AccessTarget] = field(default_factory=list)
    """Targets of the requests so far, to be checked again with new rules."""

    def note(self, epoch: int, log_index: int) -> None:
        """Note a log entry of the RPC. 0: it appended none."""
        if log_index:
            self.epoch, self.log_index = max((self.epoch, self.log_index), (epoch, log_index))

    def admit(self) -> None:
        """Check that the caller may call the method for some target, and count a denied call.

        Raises:
            PermissionDeniedError: it may not.
            CallerLimitError: it may not, and has sent too much.
        """
        if not self._may_call():
            self.usages.charge(self.identity, None)
            raise self._denial(CLUSTER)

    def _may_call(self) -> bool:
        rules, permission = self.rules(), self.rule.permission
        if permission is None:
            return rules.knows(self.identity)
        return rules.may_some(self.identity, permission)

    def charge(self, request: Any) -> None:
        """Count a request, if it is not one of a paced stream.

        Raises:
            CallerLimitError: the caller has sent too much.
        """
        if not self.rule.paced:
            self.usages.charge(self.identity, request)

    def check(self, request: Any) -> None:
        """Check that the caller may send the request, and count it.

        Raises:
            PermissionDeniedError, NotFoundError: it may not.
            CallerLimitError: it has sent too much.
        """
        self.charge(request)
        for target in self.rule.targets(request):
            self.check_target(target)
            if not self.rule.answers_each:
                self.recheck_targets.append(target)

    def check_target(self, target: AccessTarget) -> None:
        """Check that the caller has the method's permission for a target.

        Raises:
            PermissionDeniedError, NotFoundError: it has not.
        """
        if self.allows(target):
            return
        if self.rule.hides_target and target.topic is not None:
            raise self.hidden("topic", target.topic, target)
        raise self._denial(target)

    def hidden(self, kind: str, name: str, target: AccessTarget) -> NotFoundError:
        """Return the error of a denied look-up: the object seems not to exist."""
        error = NotFoundError(kind, name)
        error.denial = self._denial(target)
        return error

    def allows(self, target: AccessTarget) -> bool:
        """Return whether the caller has the method's permission for a target."""
        permission = self.rule.permission
        return permission is None or self.rules().may(self.identity, permission, target)

    def topic_prefixes(self) -> tuple[str, ...]:
        """Return prefixes: each topic that `allows` covers has one of them."""
        permission = self.rule.permission
        return ("",) if permission is None else self.rules().prefixes(self.identity, permission)

    def require(self, permission: Permission, target: AccessTarget) -> None:
        """Check that the caller has one more permission than the method's for a target.

        Raises:
            PermissionDeniedError: it has not.
        """
        if not self.rules().may(self.identity, permission, target):
            raise self._denial(target, permission)

    def may_produce(self, topic: str) -> bool:
        """Return whether the caller may produce to a topic, by the rules in force."""
        return self.rules().may(self.identity, Permission.PRODUCE, AccessTarget(topic))

    def counting_as_open(self) -> AbstractContextManager[None]:
        """Return a context that counts the RPC as open.

        Raises:
            CallerLimitError: the caller has too many; at its begin.
        """
        return self.usages.open_call(self.identity, self.address)

    def check_again(self) -> None:
        """Check that the rules in force allow what the RPC was allowed before.

        Raises:
            PermissionDeniedError, NotFoundError: they do not.
            TokenRejectedError: the token is withdrawn, or has expired.
        """
        self.check_token()
        if not self._may_call():
            raise self._denial(CLUSTER)
        for target in self.recheck_targets:
            self.check_target(target)

    def _denial(
        self, target: AccessTarget, permission: Permission | None = None
    ) -> PermissionDeniedError:
        permission = permission or self.rule.permission
        needed = "" if permission is None else f" for {permission}"
        on = "" if target.topic is None else f" on {target.topic!r:.300}"
        on += "" if target.group is None else f", group {target.group!r:.300}"
        if permission and target == CLUSTER and self.rules().may_some(self.identity, permission):
            on = " on all topics and groups"
        name = self.method.rpartition("/")[2]
        return PermissionDeniedError(f"{name}: {self.identity} has no rule{needed}{on}")


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the RPC of this task. None: there is no TLS, or a node asks for itself."""


def denial_in(error: EngineError) -> PermissionDeniedError | None:
    """Return the denial that an error of a call stands for. None: the call was not denied."""
    found = error.denial if isinstance(error, NotFoundError) else error
    return found if isinstance(found, PermissionDeniedError) else None


def caller_name() -> str | None:
    """Return the identity of the present caller. None: see CALLER."""
    caller = CALLER.get()
    return None if caller is None else str(caller.identity)


def check_request(request: Any) -> None:
    """Check a request of the present caller; an unreadable one is counted, and rejected elsewhere.

    Raises:
        PermissionDeniedError, NotFoundError, CallerLimitError: see `Caller.check`.
    """
    caller = CALLER.get()
    if caller is None:
        return
    if isinstance(request, UnreadableRequest):
        caller.charge(request)
    elif not caller.rule.answers_each:
        caller.check(request)


async def keep_pace(request: Any) -> None:
    """Count a request of the present caller's stream; wait if it is above the caller's rate."""
    caller = CALLER.get()
    if caller is not None and caller.rule.paced:
        pause_s = caller.usages.pace_s(caller.identity, request)
        if pause_s > 0.0:
            await asyncio.sleep(pause_s)
