"""Quotas in simulated worlds: the limits that hold for accepted requests.

The book is told from the log and from the requests that leaders accepted, independently of
timer/leader/intake/quotas.py.
"""

from dataclasses import dataclass, field
from typing import Any

from chaos.sim.checks.policybook import PolicyBook, accepted_parts, name_of
from chaos.sim.world.referee import Broken
from timer.entries.entry_frame import Entry
from timer.leader.leader import Leader
from timer.model.columns import Part
from timer.ready.topic import Topic
from timer.state.apply_results import ScheduleApplied
from timer.state.machine import Machine


@dataclass(slots=True)
class QuotaBook:
    """See the module. It raises Broken if a request exceeded a quota."""

    policies: PolicyBook
    taken: set[tuple[int, object]] = field(default_factory=set)
    """(epoch, request) of requests that a leader accepted."""
    repeated: set[tuple[int, object]] = field(default_factory=set)
    """Those that repeated a known request. If its id is forgotten by the time of the entry, the
    request counts as new, though no quota was checked for it."""
    refused: int = 0
    """Requests that were rejected for a quota."""

    def took(self, leader: Leader, part: Part, *, repeated: bool) -> None:
        """Note a request that a leader accepted; `repeated`: it is applied or under way already."""
        request = name_of(part.producer_id, part.sequence, part.request)
        known = repeated or (leader.epoch, request) in self.taken
        self.taken.add((leader.epoch, request))
        if repeated:
            self.repeated.add((leader.epoch, request))
        for topic_id in {*part.topic.tolist()} if not known else ():
            topic = leader.machine.topics[topic_id]
            for name, there in zip(("ready_max", "ready_bytes_max"), _ready(topic), strict=True):
                limit = getattr(leader.admission.rules(topic_id).effective.policy, name)
                if limit is not None and there >= limit:
                    raise Broken("quota", f"{request} taken, {there} in {topic.name}: {name}")

    def check(self, entry: Entry, applied: object, machine: Machine) -> None:
        """Check that new timers fit the quotas of earlier entries, and that they were accepted."""
        if not isinstance(applied, ScheduleApplied):
            return
        fresh: set[int] = set()
        for name, rows in accepted_parts(entry, applied):
            if (entry.epoch, name) not in self.taken:
                raise Broken("quota", f"{entry.index}: {name} was not taken under {entry.epoch}")
            if (entry.epoch, name) not in self.repeated:
                fresh |= {*rows["topic"].tolist()}
        for topic_id in fresh:
            self._within(entry, machine.topics[topic_id])  # type: ignore[index]

    def _within(self, entry: Entry, topic: Topic) -> None:
        said: dict[str, Any] = self.policies.at(entry.index, topic.name)
        there = {"pending_max": topic.counts.pending, "pending_bytes_max": topic.pending_bytes}
        for name, amount in there.items():
            limit = said.get(name)
            if limit is not None and amount > limit:
                raise Broken("quota", f"{entry.index}: {amount} in {topic.name}, {name} = {limit}")


def _ready(topic: Topic) -> tuple[int, int]:
    """Return the number of messages that some group has not acked, and about their bytes."""
    first = min((group.cursor for group in topic.groups.values()), default=topic.queue.begin)
    whole = [block for block in topic.queue.blocks if block.first >= first]
    return topic.queue.end - first, sum(block.payload_bytes for block in whole)
