"""The client's calls about consumer groups and their dead letters."""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from typing import Final, Literal, TypedDict, Unpack

from timerclient.client.timer_calls import Seconds, TimerCalls, counting_done
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.rows.pending_timers import Redriven
from timerclient.values.errors import InvalidRequest
from timerclient.values.same_fields import as_type
from timerclient.values.wire_errors import from_wire

Start = Literal["earliest", "latest"]
"""First message of a group."""
GroupType = Literal["shared", "key_shared", "exclusive", "failover"]
STARTS: Final[dict[str, pb.GroupStart.ValueType]] = {
    "earliest": pb.GROUP_START_UNSPECIFIED,
    "latest": pb.GROUP_START_LATEST,
}
REDRIVE_MAX: Final = 256
"""Dead letters in one request."""


class GroupOptions(TypedDict, total=False):
    """Settings of a group. Missing ones are unchanged, or in a new group the default."""

    lease: Seconds
    """Duration of a lease, if the consumer sets none."""
    max_attempts: int
    """Nacks and ended leases after which a message becomes a dead letter. 0: no limit."""
    dead_letter_topic: str
    """Topic of the dead letters. Empty: TOPIC.GROUP.dead."""
    backoff_min: Seconds
    """Delay after a message's first nack without a delay. It doubles with each further one."""
    backoff_max: Seconds
    """Longest such delay. 0: always `backoff_min`."""
    type: GroupType
    """Of a new group only."""
    max_in_flight: int
    """Messages that all consumers together hold at most. 0: no limit."""


_PLAIN: Final = ("dead_letter_topic", "type")
_NUMBERS: Final = {"max_attempts": rows.ATTEMPTS_MAX, "max_in_flight": rows.IN_FLIGHT_MAX}
_TIMES: Final = {
    "backoff_min": "backoff_ms_min",
    "backoff_max": "backoff_ms_max",
}


def encode_options(options: GroupOptions) -> pb.GroupSettings:
    """Return the contract's message of settings.

    Raises:
        InvalidRequest: A value is of the wrong type, or out of range.
        TypeError: There is no such setting.
    """
    settings = pb.GroupSettings()
    for name, value in options.items():
        if name == "lease":
            settings.lease_ms = rows.lease_ms(value)
        elif name in _TIMES:
            setattr(settings, _TIMES[name], rows.span_ms(name, value, rows.PAUSE_MS_MAX))
        elif name in _NUMBERS:
            setattr(settings, name, rows.whole_number(name, value, 0, _NUMBERS[name]))
        elif name in _PLAIN:
            rows.set_field(settings, name, value)
        else:
            msg = f"unexpected keyword argument {name!r}"
            raise TypeError(msg)
    return settings


class GroupCalls(TimerCalls):
    """Calls about groups, for an event loop."""

    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: Start = "earliest",
        **options: Unpack[GroupOptions],
    ) -> pb.GroupStatus:
        """Create a group, if it does not exist; return its status. An existing one is unchanged.

        Raises:
            AlreadyExists: The group exists and has another type than the requested one.
            InvalidRequest: An argument exceeds a limit.
        """
        request = pb.CreateGroupRequest(
            topic=rows.text("topic", topic),
            group=rows.text("group", group),
            start=rows.choice("start", start, STARTS),
            settings=encode_options(options),
        )
        answer = await self._call(lambda node: node.admin.CreateGroup, request)
        return as_type(pb.GroupStatus, answer)

    async def alter_group(
        self, topic: str, group: str, **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """Change the given settings of a group; return its status.

        Raises:
            InvalidRequest: An argument exceeds a limit.
            NotFound: There is no such group.
        """
        request = pb.AlterGroupRequest(
            topic=rows.text("topic", topic),
            group=rows.text("group", group),
            settings=encode_options(options),
        )
        answer = await self._call(lambda node: node.admin.AlterGroup, request)
        return as_type(pb.GroupStatus, answer)

    async def seek_group(
        self,
        topic: str,
        group: str,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        start: Start | None = None,
    ) -> pb.GroupStatus:
        """Move a group to another message that its topic keeps; return the group's status.

        Give one of: a queue `offset`, a `time` (the first message that fired then or later), or
        `start` ("earliest" or "latest"). Messages from there on are not acked. Those that were
        delivered before are redeliveries. Acks of deliveries from before the seek raise LeaseLost.

        Raises:
            InvalidRequest: Not exactly one argument is given, or the topic lacks the offset.
            NotFound: There is no such group.
        """
        places = {"offset": offset, "time": time, "start": start}
        given = [name for name, place in places.items() if place is not None]
        if len(given) != 1:
            raise InvalidRequest.of("to", given, "give one of offset, time and start")
        request = pb.SeekGroupRequest(
            topic=rows.text("topic", topic), group=rows.text("group", group)
        )
        if offset is not None:
            request.offset = rows.whole_number("offset", offset, 0, rows.UINT64_MAX)
        elif time is not None:
            request.time_ms = rows.instant_ms("time", time)
        else:
            request.start = rows.choice("start", start, STARTS)
        answer = await self._call(lambda node: node.admin.SeekGroup, request)
        return as_type(pb.GroupStatus, answer)

    async def reset_group(self, topic: str, group: str) -> pb.GroupStatus:
        """Move a group to the earliest message that its topic keeps; see `seek_group`."""
        return await self.seek_group(topic, group, start="earliest")

    async def delete_group(self, topic: str, group: str) -> None:
        """Delete a group. Its consumers end with NotFound, and so do their acks.

        Raises:
            InvalidRequest: It is `dead-letters`, and has letters: redrive or purge them first.
            NotFound: There is no such group.
        """
        request = pb.DeleteGroupRequest(
            topic=rows.text("topic", topic), group=rows.text("group", group)
        )
        await self._delete(lambda node: node.admin.DeleteGroup, request)

    async def redrive(
        self, topic: str, max_messages: int | None = None, *, offsets: Iterable[int] | None = None
    ) -> Redriven:
        """Send dead letters of `topic` back to the topics from which they came, each exactly once.

        Sends the present letters, at most `max_messages` (None: no limit), or those with the queue
        `offsets`; returns the number sent. Letters leased in the group `dead-letters` are not sent.

        `topics` of the result counts letters by the topic they went to; `homeless` those that stay,
        as headers name no other topic that the caller may produce to and that sends letters here.

        If the call fails, the error's `done` is the number of letters sent; no call sends these
        again. With `max_messages`, a request without an answer is not retried: it may send others.

        Raises:
            NotFound: There is no such topic, or it has no dead letters.
            OutcomeUnknown: An answer was lost; its letters may have been sent, too.
        """
        if offsets is not None:
            if max_messages is not None:
                limit = "give max_messages or offsets, not both"
                raise InvalidRequest.of("max_messages", max_messages, limit)
            return await self._redrive_letters(topic, offsets)
        if max_messages is not None:
            rows.whole_number("max_messages", max_messages, 0, rows.UINT64_MAX)
        name = rows.text("topic", topic)
        doubts: list[None] = []
        note_doubt = partial(doubts.append, None)
        topics = Counter[str]()
        sent = homeless = fruitless = 0
        left = wanted = rows.UINT64_MAX
        if max_messages is not None:
            wanted = max_messages
        while wanted > sent:
            size = min(wanted - sent, REDRIVE_MAX)
            request = pb.RedriveRequest(topic=name, max_messages=size)
            with counting_done(sent, sent):
                answer = await self._call(
                    lambda node: node.admin.Redrive,
                    request,
                    repeatable=max_messages is None,
                    on_doubt=note_doubt,
                )
            sent += answer.redriven
            topics.update(answer.topics)
            homeless += answer.homeless
            if answer.HasField("error"):
                error = from_wire(answer.error)
                doubts += [] if error.outcome_known else [None]
                lost = max_messages is not None and not error.outcome_known
                if lost or not error.retryable:
                    with counting_done(sent, sent):
                        raise error
            left = min(left, answer.left)  # letters that came during the call are not counted
            wanted = min(wanted, sent + left)
            # The leader leases homeless letters for a while, so that the next request reads others.
            # A failover ends the leases; the same letters are then read first, and counted twice.
            # If all were read twice in a row, no letter behind them can be sent.
            fruitless = 0 if answer.redriven else fruitless + answer.homeless
            nothing = not answer.redriven and (not answer.homeless or fruitless >= 2 * left)
            if nothing or answer.homeless >= answer.left:  # a request reads each letter once
                break
        redriven = Redriven.of(sent, exact=not doubts)
        redriven.topics, redriven.homeless = topics, min(homeless, left)
        return redriven

    async def _redrive_letters(self, topic: str, offsets: Iterable[int]) -> Redriven:
        wanted = rows.sequence_of("offsets", offsets)
        left = sorted({rows.whole_number("offsets", each, 0, rows.UINT64_MAX) for each in wanted})
        name = rows.text("topic", topic)
        doubts: list[None] = []
        note_doubt = partial(doubts.append, None)
        topics = Counter[str]()
        sent = homeless = leased = 0
        while left:
            some = left[:REDRIVE_MAX]
            request = pb.RedriveLettersRequest(topic=name, offsets=some)
            with counting_done(sent, sent):
                answer = await self._call(
                    lambda node: node.admin.RedriveLetters, request, on_doubt=note_doubt
                )
            sent += answer.redriven
            topics.update(answer.topics)
            if answer.HasField("error"):
                error = from_wire(answer.error)
                doubts += [] if error.outcome_known else [None]
                if not error.retryable:
                    with counting_done(sent, sent):
                        raise error
                continue  # sends no letter twice
            homeless += answer.homeless
            leased += answer.leased
            left = [each for each in left if each >= (answer.next_offset or some[-1] + 1)]
        redriven = Redriven.of(sent, exact=not doubts)
        redriven.topics, redriven.homeless, redriven.leased = topics, homeless, leased
        return redriven
