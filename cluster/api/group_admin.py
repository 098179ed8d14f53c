"""Requests about consumer groups: open, find, alter, seek, delete, redrive.

All client input about groups is checked here. An error names the field, the value and the limit.
Delivery to groups is in timer/leader/groups/group_dispatch.py.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from cluster.api import message_peek, wire_rows
from cluster.api.timer_service import TimerService
from cluster.rpc import grpc_errors
from cluster.rpc.rpc_caller import CALLER
from cluster.settings.config import GroupsConfig
from cluster.state.host import Host
from timer.entries.payloads import TYPES, AlterGroup, CreateGroup, GroupSettings, GroupStart
from timer.leader.groups import dead_letters
from timer.leader.groups.group_batch import OnResult
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import DELIVERY_BYTES, ConsumerStream
from timer.leader.leader import Leader
from timer.model.columns import U64
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TopicDeletedError,
)
from timer.model.units import QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.state.apply_results import MoveApplied
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.enum_names import short_names
from timerclient.rows.rows import ATTEMPTS_MAX, GROUP_NAME, IN_FLIGHT_MAX, PAUSE_MS_MAX

REDRIVE_MAX: Final = 256
SEEKS_MAX: Final = 10
"""Attempts of a request, at most. It is repeated if the group is sought meanwhile."""
REDRIVE_WAIT_S: Final = 2.0
"""Limit of a redrive: its dead letters may be leased, or the disk may be slow."""


class GroupDesk:
    """Finds, creates and changes groups, on the leader."""

    def __init__(
        self, host: Host, timers: TimerService, defaults: GroupsConfig, name_bytes_max: int
    ) -> None:
        self._host = host
        self._timers = timers
        self._defaults = defaults
        self._name_bytes_max = name_bytes_max

    def check_lease(self, lease_ms: int) -> None:
        """Check a lease's length in milliseconds. 0 means the group's default.

        Raises:
            InvalidRequestError: the lease is too short or too long.
        """
        low = self._defaults.visibility_timeout_ms_min
        high = self._defaults.visibility_timeout_ms_max
        if lease_ms and not low <= lease_ms <= high:
            limit = f"must be {low} to {high}; absent: that of the group"
            raise InvalidRequestError("lease_ms", lease_ms, limit)

    async def open(
        self, topic: str, group: str, start: int, changes: pb.GroupSettings
    ) -> tuple[Leader, Group]:
        """Return the leader and a group; a missing group is created.

        Raises:
            AlreadyExistsError: the group has another type than requested.
            InvalidRequestError: a name or a setting is not allowed.
            NotLeaderError: this node does not lead, or no longer.
        """
        topic = wire_rows.topic_name(topic)
        wire_rows.check_name("group", group, GROUP_NAME, self._name_bytes_max)
        check_start(start)
        settings = GroupSettings(lease_ms=self._defaults.visibility_timeout_ms)
        settings = self._changed_settings(settings, topic, group, changes)
        leader = self._host.require_leader()
        if leader.topic_or_none(topic) is None:  # a refused request creates no topic
            self._timers.creations.check_group(leader)
        of = await self._timers.topic(leader, topic)
        at = GroupStart.LATEST if start == pb.GROUP_START_LATEST else GroupStart.EARLIEST
        create = CreateGroup(of.topic_id, group, at, settings)
        try:
            made = await self._host.ask(
                lambda done: self._timers.creations.group(leader, create, done)
            )
        except TopicDeletedError:
            raise TopicDeletedError(of.name) from None  # the original error has only the id
        assert isinstance(made, Group)
        if leader.closed is not None:
            raise leader.closed
        if changes.HasField("type") and made.settings.type != settings.type:
            why = (
                f"its type is {made.settings.type}, and a type never changes; create a group before"
                " a consumer opens it, or delete this one first"
            )
            raise AlreadyExistsError("group", group, why)
        return leader, made

    def find(self, topic: str, group: str) -> tuple[Leader, Topic, Group]:
        """Return the leader, a topic and a group of that topic.

        Raises:
            NotFoundError: the topic or the group does not exist.
            NotLeaderError: this node does not lead.
        """
        leader, of = self._topic(topic)
        found = of.groups.get(group)
        if found is None:
            raise NotFoundError("group", group)
        return leader, of, found

    def _topic(self, name: str) -> tuple[Leader, Topic]:
        leader = self._host.require_leader()
        return leader, wire_rows.topic_of(leader.machine.topic_by_name, name)

    async def alter(self, topic: str, group: str, changes: pb.GroupSettings) -> Group:
        """Change settings of a group; committed on return.

        Raises:
            InvalidRequestError: a setting is not allowed.
            NotFoundError: the group does not exist.
        """
        leader, of, found = self.find(topic, group)
        changed = self._changed_settings(found.settings, of.name, group, changes)
        if changed.type != found.settings.type:
            limit = f"cannot change after the group was created; it is {found.settings.type}"
            raise InvalidRequestError("type", changed.type, limit)
        given = {field.name: value for field, value in changes.ListFields()}
        given.pop("type", None)
        groups = leader.groups
        await self._ask(
            found,
            lambda done: groups.alter(AlterGroup(found.topic, found.group_id, given), done),
        )
        return found

    async def delete(self, topic: str, group: str) -> None:
        """Delete a group; committed on return.

        Raises:
            InvalidRequestError: it is the group of dead letters, and some wait. Without it, no list
                shows them, and no redrive finds them.
            NotFoundError: the group does not exist.
        """
        leader, of, found = self.find(topic, group)
        if group == dead_letters.GROUP and (letters := found.unacked_count(of.queue.end)):
            limit = f"has {letters} dead letters of topic {of.name!r}: redrive or purge them first"
            raise InvalidRequestError("group", group, limit)
        await self._ask(found, lambda done: leader.groups.delete(found, done))

    async def seek(self, request: pb.SeekGroupRequest) -> None:
        """Move a group to the requested position; committed on return.

        Raises:
            InvalidRequestError: the topic does not have that offset, or no position is given.
            NotFoundError: the group does not exist.
        """
        leader, of, found = self.find(request.topic, request.group)
        to, groups, queue = request.WhichOneof("to"), leader.groups, of.queue
        if to is None:
            raise InvalidRequestError("to", "nothing", "give one of offset, time_ms and start")
        if to == "time_ms":
            wire_rows.check_instant("time_ms", request.time_ms)
            at = UnixMs(request.time_ms)
            await self._ask(found, lambda done: groups.seek_time(found, at, done))
            return
        check_start(request.start)
        offset = queue.end if request.start == pb.GROUP_START_LATEST else queue.begin
        offset = QueueOffset(request.offset) if to == "offset" else offset
        await self._ask(found, lambda done: groups.seek(found, offset, done))

    async def _ask(self, group: Group, start: Callable[[OnResult], None]) -> None:
        """Start a group's op; repeat it if a seek has assigned another group id meanwhile.

        Raises:
            NotFoundError: the group was deleted meanwhile.
            OverloadedError: SEEKS_MAX seeks came in between.
        """
        for _ in range(SEEKS_MAX):
            try:
                await self._host.ask(start)
            except NotFoundError:
                if group.deleted:
                    raise NotFoundError("group", group.name) from None
            else:
                return
        raise OverloadedError(f"the seeks of group {group.name}", retry_after_ms=OVERLOAD_RETRY_MS)

    def _changed_settings(
        self, settings: GroupSettings, topic: str, group: str, changes: pb.GroupSettings
    ) -> GroupSettings:
        """Return the changed settings, checked; the dead letter topic's name is in plain form."""
        if changes.dead_letter_topic:
            plain = wire_rows.topic_name(changes.dead_letter_topic, "dead_letter_topic")
            changes.dead_letter_topic = plain
        changed = _wire_settings(settings)
        changed.MergeFrom(changes)
        defaults = self._defaults
        limits = {
            "lease_ms": (defaults.visibility_timeout_ms_min, defaults.visibility_timeout_ms_max),
            "max_attempts": (0, ATTEMPTS_MAX),
            "backoff_ms_min": (0, PAUSE_MS_MAX),
            "backoff_ms_max": (0, PAUSE_MS_MAX),
            "max_in_flight": (0, IN_FLIGHT_MAX),
        }
        for name, (low, high) in limits.items():
            value = getattr(changed, name)
            if not low <= value <= high:
                raise InvalidRequestError(name, value, f"must be {low} to {high}")
        if 0 < changed.backoff_ms_max < changed.backoff_ms_min:
            limit = f"must be at most backoff_ms_max ({changed.backoff_ms_max})"
            raise InvalidRequestError("backoff_ms_min", changed.backoff_ms_min, limit)
        to = changed.dead_letter_topic
        if to or changed.max_attempts:
            wire_rows.check_name("dead_letter_topic", dead_letters.topic_of(topic, group, to))
        if to == topic:
            limit = "must be another topic than the group's"
            raise InvalidRequestError("dead_letter_topic", to, limit)
        if changed.type not in TYPES:
            raise InvalidRequestError("type", changed.type, f"must be one of {', '.join(TYPES)}")
        return GroupSettings(**{name: getattr(changed, name) for name in GroupSettings.__slots__})

    async def redrive(self, topic: str, messages: int) -> pb.RedriveResponse:
        """Send up to `messages` dead letters back to their topics; committed on return.

        Letters stay if the caller may not produce to their topic, or if it has no group of their
        headers with this dead-letter topic, set or default: clients can forge headers.
        If some could not be sent, the answer has the reason and the number of those sent.

        Args:
            topic: The topic of the dead letters.
            messages: At most REDRIVE_MAX. 0: REDRIVE_MAX.

        Raises:
            InvalidRequestError: too many at once.
            NotFoundError: the topic has no dead letters.
            EngineError: no dead letter is known to have been sent.
        """
        if not 0 <= messages <= REDRIVE_MAX:
            raise InvalidRequestError("max_messages", messages, f"must be at most {REDRIVE_MAX}")
        leader, of, group = self._letters(topic)
        answer = pb.RedriveResponse()
        if group.unacked_count(of.queue.end):
            moves = _Moves(self._host, leader)
            if await self._lease_and_move(leader, group, messages or REDRIVE_MAX, moves):
                await moves.answered
            answer.left = group.unacked_count(of.queue.end)
            moves.report(answer)
        return answer

    async def redrive_letters(
        self, topic: str, offsets: Sequence[int]
    ) -> pb.RedriveLettersResponse:
        """Send the dead letters at these queue offsets back, otherwise as `redrive`.

        Letters that a consumer has stay. Sends about a megabyte; a further call with the offsets
        from `next_offset` on sends the others. Offsets of letters that are gone have no effect.

        Raises:
            InvalidRequestError: none, too many, or an offset is beyond the end of the topic.
            NotFoundError: the topic has no dead letters.
            NotReadyError: the letters were not read from disk in time.
            EngineError: no dead letter is known to have been sent.
        """
        if not 1 <= len(offsets) <= REDRIVE_MAX:
            limit = f"must be 1 to {REDRIVE_MAX}"
            raise InvalidRequestError("offsets", f"{len(offsets)} of them", limit)
        wanted = np.unique(np.array(offsets, np.uint64))
        until_s = asyncio.get_running_loop().time() + REDRIVE_WAIT_S
        while True:
            leader, of, group = self._letters(topic)
            if wanted[-1] >= of.queue.end:
                limit = f"must be below {of.queue.end}, the end of the topic"
                raise InvalidRequestError("offsets", int(wanted[-1]), limit)
            letters = wanted[~group.is_acked(wanted)]
            states = leader.groups.states(group, letters)
            free = letters[states.free | states.waiting]
            if not len(free) or (there := of.queue.count_in_memory(free)):
                break
            await message_peek.wait_for_disk(self._host, until_s)
        answer = pb.RedriveLettersResponse(leased=len(letters) - len(free))
        if len(free):
            sent = free[: of.queue.count_fitting(free[:there], DELIVERY_BYTES)]
            if len(sent) < len(free):
                answer.next_offset = int(free[len(sent)])
                answer.leased = int(np.count_nonzero(letters < free[len(sent)])) - len(sent)
            moves = _Moves(self._host, leader)
            moves.begin(group, sent)
            self._host.kick()
            await moves.answered
            moves.report(answer)
        return answer

    def _letters(self, topic: str) -> tuple[Leader, Topic, Group]:
        """Return the leader, a topic of dead letters and the group of its letters, as `find`."""
        leader, of = self._topic(topic)
        group = of.groups.get(dead_letters.GROUP)
        if group is None:
            raise NotFoundError("topic of dead letters", topic)
        if leader.disk_error is not None:
            raise leader.disk_error
        return leader, of, group

    async def _lease_and_move(
        self, leader: Leader, group: Group, messages: int, moves: "_Moves"
    ) -> bool:
        """Begin to move the letters that are next; return whether some came in time."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(delivery: Delivery) -> None:
            if reached.done():
                return
            try:  # at once: later they may have expired, or left memory
                moves.begin(group, delivery.lease.offsets)
            except Exception as why:  # noqa: BLE001 - it ends this RPC, and is logged there
                reached.set_exception(why)  # it must not end the leader's step
                return
            reached.set_result(None)

        def end(why: EngineError) -> None:
            if not reached.done():
                reached.set_exception(why)

        consumer = ConsumerStream(
            "redrive",
            group.settings.lease_ms,
            take,
            end=end,
            withdraw=lambda lease_id: [lease_id],  # no application gets it: no failure counts
            single_lease=True,
        )
        leader.groups.join(group, consumer)
        try:
            leader.groups.credit(group, consumer, messages)
            self._host.kick()
            await asyncio.wait([reached], timeout=REDRIVE_WAIT_S)
        except asyncio.CancelledError:
            moves.answered.cancel()  # a redrive that was begun here gets a line of the audit log
            raise
        finally:
            # The other letters stay leased a while, so that the next call gets different ones.
            took = reached.done() and reached.exception() is None
            reached.cancel()  # no effect if it is done; else `take` does nothing more
            (leader.groups.retire if took else leader.groups.give_up)(group, consumer)
            self._host.kick()
        if reached.cancelled():
            return False
        reached.result()
        return True


class _Moves:
    """The MOVE ops of one redrive, one for each topic of origin, and their results."""

    def __init__(self, host: Host, leader: Leader) -> None:
        self.answered, self._answer_with = host.expect()
        """Ends with the last result; fails if no op succeeds."""
        self._leader, self._caller = leader, CALLER.get()  # `begin` runs in the leader's step
        self._moved: list[MoveApplied] = []
        self._failed: list[EngineError] = []
        self._waiting = self._homeless = 0

    def begin(self, group: Group, letters: U64) -> None:
        """Append the ops; see `redrive` of the group dispatch."""
        allows = self._caller.may_produce if self._caller else lambda _: True
        moves = self._leader.groups.redrive(group, letters, self._one, allows)
        self._homeless = len(letters) - sum(len(move.offsets) for move in moves)
        self._waiting = len(moves)
        if not moves:
            self._answer_with(None)

    def _one(self, result: object) -> None:
        if isinstance(result, EngineError):
            self._failed.append(result)
        else:
            assert isinstance(result, MoveApplied), result
            self._moved.append(result)
        if len(self._moved) + len(self._failed) == self._waiting:
            self._answer_with(None if self._moved else self._failed[0])

    def report(self, answer: pb.RedriveResponse | pb.RedriveLettersResponse) -> None:
        """Put the results into the answer.

        Raises:
            EngineError: that of an op, if no letter was sent.
        """
        for each in self._moved:
            if count := int(each.new.sum()):
                answer.topics[each.op.to] += count
        answer.redriven = sum(answer.topics.values())
        answer.homeless = self._homeless
        if self._failed:
            if not answer.redriven:
                raise self._failed[0]
            answer.error.CopyFrom(grpc_errors.to_wire(self._failed[0]))


def check_start(start: int) -> None:
    """Check the position where a new group begins.

    Raises:
        InvalidRequestError: the value is unknown.
    """
    if start not in pb.GroupStart.values():
        known = ", ".join(short_names(pb.GroupStart.DESCRIPTOR))
        raise InvalidRequestError("start", start, f"must be one of {known}")


def status_of(group: Group, queue_end: QueueOffset, leased: int, consumers: int) -> pb.GroupStatus:
    """Return a group's status for operators."""
    settings = group.settings
    return pb.GroupStatus(
        name=group.name,
        group_id=group.group_id,
        type=settings.type,
        cursor=group.cursor,
        unacked=group.unacked_count(queue_end),
        expired=group.expired,
        leased=leased,
        consumers=consumers,
        lease_ms=settings.lease_ms,
        settings=_wire_settings(settings),
    )


def _wire_settings(settings: GroupSettings) -> pb.GroupSettings:
    return pb.GroupSettings(
        lease_ms=settings.lease_ms,
        max_attempts=settings.max_attempts,
        dead_letter_topic=settings.dead_letter_topic,
        backoff_ms_min=settings.backoff_ms_min,
        backoff_ms_max=settings.backoff_ms_max,
        type=settings.type,
        max_in_flight=settings.max_in_flight,
    )
