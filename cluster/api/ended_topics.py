r"""The topic of a timer that has ended, for callers with rules for some topics only.

    notes of firings and drops --known?--> topic
                                  \--no--> log, in portions: the entry that began it --> topic

The state keeps the outcome of an ended timer, and not its topic. A topic that is not found counts
as one that the caller may not see.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from cluster.state.loop_io import HostLog
from timer.entries.payloads import Ids
from timer.model.timer_id import TimerKey
from timer.model.units import LogIndex, Seq, TopicId, UnixMs
from timer.state import firing_trace
from timer.state.firing_trace import Firing
from timer.state.machine import Machine
from timer.state.timer_story import KnownTimer, StoryKind, StoryReader

PORTION_BYTES: Final = 2 << 20
"""Bytes of the log that one turn reads."""
PORTIONS_MAX: Final = 16
"""Portions that are read for one timer: its reschedules included."""

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs work in a thread, after other queries."""


async def topic_of_ended(
    machine: Machine, log: HostLog, timer: Ids, in_thread: InThread
) -> TopicId | None:
    """Return the topic of an ended timer (one id). None: it is not known any more."""
    seq = Seq(int(timer.seq[0]))
    noted: list[Firing] = [*machine.trace.firings, *machine.trace.drops]
    place = await in_thread(partial(firing_trace.find_firing, noted, seq))
    if place is not None:
        found: TopicId = place.topic
        return found
    target, last = TimerKey(UnixMs(int(timer.due_ms[0])), seq), machine.applied_index
    marks = [*machine.trace.marks]
    nothing = KnownTimer(pending=False, ended=True, fired=None, topic=None, key=b"")
    story: StoryReader = await in_thread(partial(StoryReader, target, nothing, marks, frozenset()))
    for _ in range(PORTIONS_MAX):
        old = await in_thread(partial(_read_on, log, story, last))
        if story.topic:
            return story.topic
        if old is not None:
            story = await in_thread(partial(StoryReader, old, nothing, marks, frozenset()))
        elif story.begun or story.never_began or story.next > last:
            return None
    return None


def _read_on(log: HostLog, story: StoryReader, last: LogIndex) -> TimerKey | None:
    """Feed a portion of the log, until the timer begins. For a thread.

    Returns the timer that a reschedule by id has replaced by it; it has the same topic.
    """
    story.skip_to(log.first_index)
    for entry in log.stored_entries(story.next, last, PORTION_BYTES):
        if story.begun or story.never_began or entry.index != story.next:
            break
        for event in story.feed(entry):
            if event.kind is StoryKind.RESCHEDULED_FROM and not story.topic:
                return event.other
    return None
