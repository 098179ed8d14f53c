"""The story of a timer: the events of its life, from the leader's log and memory, for people.

    the machine's knowledge, on the loop --> Story --> log, in portions, in a thread --> answers

The rules are in timer/state/timer_story.py. The threads are those of the queries, and each portion
takes its turn there. So the story of a long log does not hold the loop, and delays other queries by
one portion at most. Only applied entries are read.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from cluster.api import wire_rows
from cluster.api.timer_queries import STATES, TimerQueries
from cluster.state.host import Host
from timer.entries.payloads import Ids
from timer.model import timer_id
from timer.model.timer_errors import NotFoundError, NotReadyError
from timer.model.timer_id import TimerKey
from timer.model.units import GroupId, LogIndex, ProducerId, Seq, TopicId, UnixMs
from timer.pending.runs.row_reader import WholeRows
from timer.state import firing_trace
from timer.state.apply_results import ALREADY_CANCELLED, DROPPED
from timer.state.machine import Machine
from timer.state.producers import name_of
from timer.state.timer_story import KnownTimer, StoryEvent, StoryReader
from timerclient.proto import timer_pb2 as pb

PORTION_BYTES: Final = 2 << 20
"""Bytes of the log that one turn reads."""
EVENTS_MAX: Final = 10_000
"""Events of one story, at most; a message may be nacked any number of times."""
BEGINS_MAX: Final = 10
"""Attempts to read the first entry of the log, which the node may drop meanwhile."""


class Stories:
    """Reads stories on the leader; see the module."""

    def __init__(self, host: Host, queries: TimerQueries, *, salt: int) -> None:
        self._host = host
        self._queries = queries
        self._salt = salt

    async def tell(self, request: pb.TellStoryRequest) -> AsyncIterator[pb.TellStoryResponse]:
        """Yield a timer's events, in several answers, and at the end its state.

        Raises:
            InvalidRequestError: malformed id.
            NotFoundError: the id is not of this cluster, or was not issued yet.
        """
        due_ms, seq, genuine = wire_rows.timers_of(request.timer_id, 1, self._salt)
        machine = self._host.require_lease().machine
        if not genuine[0] or seq[0] >= machine.next_seq:
            raise NotFoundError("timer", timer_id.to_text(request.timer_id))
        target, whole = await self._queries.read(Ids(due_ms, seq))
        machine = self._host.require_lease().machine
        last = machine.applied_index
        story, state = await self._story(machine, target, whole)
        n_events = 0
        while not story.over and story.next <= last and n_events < EVENTS_MAX:
            events = await self._queries.in_thread(partial(self._portion, story, last))
            n_events += len(events)
            if events:
                yield pb.TellStoryResponse(events=[self._event(machine, each) for each in events])
        if story.dropped:
            state = pb.TIMER_STATE_DROPPED
        begin = await self._queries.in_thread(self._log_begin)
        end = pb.StoryEnd(
            state=state,
            log_first=begin[0],
            log_first_ms=begin[1],
            log_last=last,
            gaps=_gaps(story, state, begin, cut=n_events >= EVENTS_MAX),
        )
        yield pb.TellStoryResponse(end=end)

    async def _story(
        self, machine: Machine, target: Ids, whole: WholeRows
    ) -> tuple[StoryReader, pb.TimerState.ValueType]:
        row, firings, marks = whole.rows[0], [*machine.trace.firings], [*machine.trace.marks]
        key = TimerKey(UnixMs(int(target.due_ms[0])), Seq(int(target.seq[0])))
        pending, judged = bool(row["seq"]), int(machine.outcomes_of(target)[0])
        fired = await self._queries.in_thread(partial(firing_trace.find_firing, firings, key.seq))
        topic = fired.topic if fired is not None else None
        if pending:
            topic = TopicId(int(row["topic"]))
        dropped = None
        if judged == DROPPED and not pending:
            drops = [*machine.trace.drops]
            dropped = await self._queries.in_thread(
                partial(firing_trace.find_firing, drops, key.seq)
            )
            topic = dropped.topic if dropped is not None else None
        ended = judged == ALREADY_CANCELLED or (judged == DROPPED and dropped is None)
        is_topic_deleted = topic is not None and topic not in machine.topics
        there = machine.topics.get(topic) if topic is not None else None
        known = KnownTimer(
            pending, ended, fired, topic, b"", dropped and dropped.entry, is_topic_deleted
        )
        groups = frozenset[GroupId]()
        if fired is not None and there is not None:
            groups = frozenset(there.group_by_id)
        state = (
            pb.TIMER_STATE_PENDING if pending else STATES.get(judged, pb.TIMER_STATE_UNSPECIFIED)
        )
        if fired is not None:
            state = pb.TIMER_STATE_FIRED
        return StoryReader(key, known, marks, groups), state

    def _portion(self, story: StoryReader, last: LogIndex) -> list[StoryEvent]:
        """Pass the next entries to a story; return its events. For a thread."""
        log = self._host.log
        story.skip_to(log.first_index)
        events: list[StoryEvent] = []
        for entry in log.stored_entries(story.next, last, PORTION_BYTES):
            if entry.index == story.next and not story.over:  # a story may skip entries
                events += story.feed(entry)
        return events

    def _log_begin(self) -> tuple[LogIndex, UnixMs]:
        """Return index and time of the log's first entry. For a thread.

        Raises:
            NotReadyError: the log is empty, or drops its first entries again and again.
        """
        log = self._host.log
        for _ in range(BEGINS_MAX):
            first = log.first_index
            for entry in log.stored_entries(first, first, 1):
                return entry.index, entry.time_ms
        raise NotReadyError("the log of this node has no entries at the moment: retry")

    def _event(self, machine: Machine, event: StoryEvent) -> pb.StoryEvent:
        topic = machine.topics.get(event.topic)
        group = topic.group_by_id.get(event.group) if topic is not None else None
        out = pb.StoryEvent(
            what=event.kind,  # type: ignore[arg-type] # the numbers are the API's
            index=event.entry.index,
            time_ms=event.entry.time_ms,
            epoch=event.entry.epoch,
            topic=topic.name if topic is not None else "",
            group=group.name if group is not None else "",
            queue_offset=event.offset or 0,
            producer=name_of(ProducerId(event.producer)) if event.producer else 0,
            sequence=event.sequence,
            request_id=event.request.decode(errors="replace"),
            requested_ms=event.requested_ms,
            until_ms=event.until_ms,
            to_topic=event.to,
            attempt=event.attempt,
            series=event.series,
            number=event.number,
        )
        if event.other is not None:
            other = np.array([event.other.due_ms]), np.array([event.other.seq], np.uint64)
            out.other_id = timer_id.encode(*other, self._salt)
        return out


def _gaps(
    story: StoryReader, state: int, begin: tuple[LogIndex, UnixMs], *, cut: bool
) -> Sequence[str]:
    """Return the parts that a complete story lacks, each with the reason."""
    first, first_ms = begin
    gaps = []
    if not story.begun:
        why = f"the log begins later, with entry {first} of {first_ms} ms"
        if not story.located and first <= story.marks[0].entry:
            why = "its place in the log is no longer known"
        gaps.append(f"how it began: {why}")
    if state == pb.TIMER_STATE_FIRED and story.known.fired is None:
        gaps.append(
            "its queue offset, and the deliveries to groups: too many timers have fired since; its"
            " firing is shown at the first entry that could have fired it"
        )
    elif story.known.fired is not None and story.known.fired.entry < first:
        fired = story.known.fired
        gaps.append(
            f"the firing, entry {fired.entry}, to queue offset {fired.offset}: the log begins"
            f" later, with entry {first} of {first_ms} ms"
        )
    if state == pb.TIMER_STATE_CANCELLED and not story.over:
        gaps.append("the cancel: not found in the log; perhaps by key, which is not known")
    if state == pb.TIMER_STATE_DROPPED and not story.over:
        gaps.append("the drop: not found in the log, or no longer known")
    if cut:
        gaps.append(f"the events after the first {EVENTS_MAX}")
    return gaps
