"""The part of the client that is about consumer groups: their life, and their dead letters."""

from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from timerclient.client.timer_calls import Existing, Seconds, part_of
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.pending_timers import Redriven
from timerclient.streams.nodes import Method
from timerclient.values.errors import InvalidRequest, NotFound, from_wire

T = TypeVar("T")

Start = Literal["earliest", "latest"]
"""Where a group begins."""
GroupType = Literal["shared", "key_shared", "exclusive", "failover"]
STARTS: Final[dict[str, pb.GroupStart.ValueType]] = {"earliest": pb.EARLIEST, "latest": pb.LATEST}
REDRIVE_MAX: Final = 256
"""Dead letters in one request."""


class GroupOptions(TypedDict, total=False):
    """Settings of a group. What is not given is left as it is, or at its default."""

    lease: Seconds
    """How long a consumer holds a message, unless it asks for something else."""
    max_attempts: int
    """After so many nacks and ended leases a message is a dead letter. 0: it never is."""
    dead_letter_topic: str
    """Where dead letters go. Empty: TOPIC.GROUP.dead."""
    backoff_min: Seconds
    """How long a nack without a delay waits the first time; then twice as long each time …"""
    backoff_max: Seconds
    """… but never longer than this. 0: always as long as the first time."""
    type: GroupType
    """Of a new group only."""
    max_in_flight: int
    """Messages that all consumers together hold at most. 0: no limit."""


_PLAIN: Final = ("max_attempts", "dead_letter_topic", "type", "max_in_flight")
_TIMES: Final = {
    "lease": "lease_ms",
    "backoff_min": "backoff_ms_min",
    "backoff_max": "backoff_ms_max",
}


def encode_options(options: GroupOptions) -> pb.GroupSettings:
    """Return settings as the contract has them.

    Raises:
        InvalidRequest: a value is of the wrong kind, or out of range.
        TypeError: an option of another name.
    """
    settings = pb.GroupSettings()
    for name, value in options.items():
        if name in _TIMES:
            setattr(settings, _TIMES[name], rows.span_ms(name, value, rows.UINT32_MAX))
        elif name in _PLAIN:
            rows.put(settings, name, value)
        else:
            msg = f"unexpected keyword argument {name!r}"
            raise TypeError(msg)
    return settings


class GroupCalls(Existing):
    """Calls about groups, for an event loop."""

    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: Start = "earliest",
        **options: Unpack[GroupOptions],
    ) -> pb.GroupStatus:
        """Return a group that exists from now on, as it is: one that was there stays as it was.

        Raises:
            AlreadyExists: it was there, and is not of the type that is asked for.
            InvalidRequest: an argument breaks a limit.
        """
        request = pb.CreateGroupRequest(
            topic=rows.utf8("topic", topic).decode(),
            group=rows.utf8("group", group).decode(),
            start=rows.choice("start", start, STARTS),
            settings=encode_options(options),
        )
        return await self._admin(
            lambda node, left_s: node.admin.CreateGroup(request, timeout=left_s)
        )

    async def alter_group(
        self, topic: str, group: str, **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """Change the settings that are given; return the group as it is then.

        Raises:
            InvalidRequest: an argument breaks a limit.
            NotFound: there is no such group.
        """
        request = pb.AlterGroupRequest(
            topic=rows.utf8("topic", topic).decode(),
            group=rows.utf8("group", group).decode(),
            settings=encode_options(options),
        )
        return await self._admin(
            lambda node, left_s: node.admin.AlterGroup(request, timeout=left_s)
        )

    async def seek_group(
        self,
        topic: str,
        group: str,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        start: Start | None = None,
    ) -> pb.GroupStatus:
        """Let a group go on elsewhere in what its topic keeps; return it as it is then.

        At a queue `offset`, at the first message that fired at `time` or later, or at the `start`
        ("earliest", "latest"): one of them. What was delivered before counts as not acked, and
        comes as a redelivery; acks of what consumers hold raise LeaseLost from then on.

        Raises:
            InvalidRequest: the topic does not keep that offset; not exactly one place is given.
            NotFound: there is no such group.
        """
        places = {"offset": offset, "time": time, "start": start}
        given = [name for name, place in places.items() if place is not None]
        if len(given) != 1:
            raise InvalidRequest.of("to", given, "give one of offset, time and start")
        request = pb.SeekGroupRequest(
            topic=rows.utf8("topic", topic).decode(), group=rows.utf8("group", group).decode()
        )
        if offset is not None:
            request.offset = rows.whole("offset", offset, 0, rows.UINT64_MAX)
        elif time is not None:
            request.time_ms = rows.instant_ms("time", time)
        else:
            request.start = rows.choice("start", start, STARTS)
        return await self._admin(lambda node, left_s: node.admin.SeekGroup(request, timeout=left_s))

    async def reset_group(self, topic: str, group: str) -> pb.GroupStatus:
        """Let a group begin anew with the earliest message that its topic keeps: see seek_group."""
        return await self.seek_group(topic, group, start="earliest")

    async def delete_group(self, topic: str, group: str) -> None:
        """Delete a group: its consumers end with NotFound, and so do their acks.

        Raises:
            NotFound: there is no such group.
        """
        request = pb.DeleteGroupRequest(
            topic=rows.utf8("topic", topic).decode(), group=rows.utf8("group", group).decode()
        )
        doubts: list[None] = []
        try:
            await self.nodes().call(
                lambda node, left_s: node.admin.DeleteGroup(request, timeout=left_s),
                within_s=self.within_s(None),
                on_doubt=lambda: doubts.append(None),
            )
        except NotFound:
            if not doubts:  # else an earlier sending did it, and its answer was lost
                raise

    async def redrive(self, topic: str, max_messages: int | None = None) -> Redriven:
        """Send dead letters of `topic` back to the topics that they came from, each exactly once.

        Those that are there when it begins, or so many of them; return how many were sent. Others
        may be leased by a consumer of the group `dead-letters`; `homeless` of what is returned
        counts those that stay, as they name no topic that is there: it was deleted, or it is
        `topic` itself, or none is named. Who makes a deleted topic again can redrive its letters.
        If it fails on the way, the error's `done` says how many were sent; to call it again sends
        none twice. With `max_messages` a request whose answer was lost is not sent again, as the
        next would send others: never more than so many are sent.

        Raises:
            NotFound: there is no such topic, or it has no dead letters.
            OutcomeUnknown: an answer was lost: some of its letters may have been sent, too.
        """
        if max_messages is not None:
            rows.whole("max_messages", max_messages, 0, rows.UINT64_MAX)
        name = rows.utf8("topic", topic).decode()
        doubts: list[None] = []
        sent = homeless = fruitless = 0
        left = wanted = rows.UINT64_MAX
        if max_messages is not None:
            wanted = max_messages
        while wanted > sent:
            size = min(wanted - sent, REDRIVE_MAX)
            request = pb.RedriveRequest(topic=name, max_messages=size)
            with part_of(sent, sent):
                answer = await self._redrive(request, doubts, repeatable=max_messages is None)
            sent += answer.redriven
            homeless += answer.homeless
            if answer.HasField("error"):
                error = from_wire(answer.error)
                doubts += [] if error.outcome_known else [None]
                lost = max_messages is not None and not error.outcome_known
                if lost or not error.retryable:
                    with part_of(sent, sent):
                        raise error
            left = min(left, answer.left)  # what came meanwhile is behind it
            wanted = min(wanted, sent + left)
            # What was looked at is leased for a while, so that the next request gets others. A
            # failover ends all leases, and these letters come first again: then they are counted
            # twice. Nothing that can go is behind them if they were all met twice in a row.
            fruitless = 0 if answer.redriven else fruitless + answer.homeless
            nothing = not answer.redriven and (not answer.homeless or fruitless >= 2 * left)
            if nothing or answer.homeless >= answer.left:  # one request meets each but once
                break
        redriven = Redriven.of(sent, exact=not doubts)
        redriven.homeless = min(homeless, left)
        return redriven

    async def _redrive(
        self, request: pb.RedriveRequest, doubts: list[None], *, repeatable: bool
    ) -> pb.RedriveResponse:
        return await self.nodes().call(
            lambda node, left_s: node.admin.Redrive(request, timeout=left_s),
            within_s=self.within_s(None),
            repeatable=repeatable,
            on_doubt=lambda: doubts.append(None),
        )

    async def _admin(self, method: Method[T]) -> T:
        return await self.nodes().call(method, within_s=self.within_s(None))


class GroupFront:
    """The same for threads."""

    _seen: GroupCalls
    _call: Callable[[Coroutine[Any, Any, Any]], Any]

    def create_group(
        self, topic: str, group: str, *, start: Start = "earliest", **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """See GroupCalls."""
        made = self._seen.create_group(topic, group, start=start, **options)
        found: pb.GroupStatus = self._call(made)
        return found

    def alter_group(
        self, topic: str, group: str, **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """See GroupCalls."""
        found: pb.GroupStatus = self._call(self._seen.alter_group(topic, group, **options))
        return found

    def seek_group(
        self,
        topic: str,
        group: str,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        start: Start | None = None,
    ) -> pb.GroupStatus:
        """See GroupCalls."""
        sought = self._seen.seek_group(topic, group, offset=offset, time=time, start=start)
        found: pb.GroupStatus = self._call(sought)
        return found

    def reset_group(self, topic: str, group: str) -> pb.GroupStatus:
        """See GroupCalls."""
        found: pb.GroupStatus = self._call(self._seen.reset_group(topic, group))
        return found

    def delete_group(self, topic: str, group: str) -> None:
        """See GroupCalls."""
        self._call(self._seen.delete_group(topic, group))

    def redrive(self, topic: str, max_messages: int | None = None) -> Redriven:
        """See GroupCalls."""
        redriven: Redriven = self._call(self._seen.redrive(topic, max_messages))
        return redriven
