"""Calls of operators to a simulated node: about groups, dead letters, topics and series.

A part of chaos/sim/timers/timers.py. The calls return no answer, because the log shows their
effects and the book (chaos/sim/checks/book.py) reads them from the log.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from timer.entries.payloads import AlterGroup, Ids
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Leader
from timer.model.timer_errors import EngineError
from timer.model.units import Now, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.recovery.engine import Engine

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

REDRIVE_WAIT_US: Final = 2_000_000
"""Time after which a redrive ends."""
REDRIVE_LEASE_MS: Final = 2_000


class KeeperCalls:
    """The operators' calls of EngineApp, its only subclass."""

    engine: Engine
    node: "SimNode"

    def _now(self) -> Now:
        raise NotImplementedError

    def _kick(self) -> None:
        raise NotImplementedError

    def recur(self, method: str, *args: Any) -> None:
        """Change a series, or cancel or move an occurrence; no answer."""
        leader = self.engine.leader
        if leader is None:
            return
        with suppress(EngineError):
            if method in ("cancel", "move"):
                due_ms, seq = np.array(args[:1]), np.array(args[1:], np.uint64)
                if method == "cancel":
                    leader.cancel(due_ms, seq, lambda _: None)
                else:
                    when = WantedTimes("delay_ms", np.array([700]))
                    ids = Ids(due_ms, seq)
                    leader.reschedule(ids, None, when, self._now(), lambda _: None)
            else:
                getattr(leader.series, method)(*args, self._now(), lambda _: None)
        self._kick()

    def seek_group(self, topic: str, name: str, by: str, where: float) -> None:
        """Seek a group to an offset or a time.

        Args:
            topic: the group's topic
            name: the group's name
            by: "offset" or "time"
            where: 0 to 1; by offset, a fraction of the queue's range; by time, 10 s before now
                times this
        """
        leader, group = self._group(topic, name)
        if leader is None or group is None:
            return
        queue, now_ms = self.engine.machine.topics[group.topic].queue, self._now().clock_ms
        offset = queue.begin + round(where * (queue.end - queue.begin))
        with suppress(EngineError):
            if by == "offset":
                leader.groups.seek(group, QueueOffset(offset), lambda _: None)
            else:
                time_ms = UnixMs(now_ms - int(where * 10_000))
                leader.groups.seek_time(group, time_ms, lambda _: None)
        self._kick()

    def alter_group(self, topic: str, name: str, changes: dict[str, int]) -> None:
        """Change settings of a group."""
        leader, group = self._group(topic, name)
        if leader is not None and group is not None:
            with suppress(EngineError):
                alter = AlterGroup(group.topic, group.group_id, changes)
                leader.groups.alter(alter, lambda _: None)
            self._kick()

    def redrive(self, letters: str, most: int) -> None:
        """Redrive at most `most` dead letters, as cluster/api/group_admin.py does."""
        leader, group = self._group(letters, dead_letters.GROUP)
        if leader is None or group is None:
            return
        took: list[Delivery] = []
        queue = self.engine.machine.topics[group.topic].queue
        last = np.array([queue.end - 1]).astype(np.uint64)
        free = group.unacked(queue.end) and leader.groups.states(group, last).free[0]
        if most == 1 and free and not group.is_acked(last)[0] and queue.at_hand(last):
            with suppress(EngineError):  # the youngest letter, by its offset
                leader.groups.redrive(group, last, lambda _: None)

        def take(delivery: Delivery) -> None:
            took.append(delivery)
            with suppress(EngineError):
                leader.groups.redrive(group, delivery.lease.offsets, lambda _: None)

        def over() -> None:
            if self.engine.leader is leader:
                (leader.groups.retire if took else leader.groups.give_up)(group, consumer)
                self._kick()

        consumer = ConsumerStream("redrive", REDRIVE_LEASE_MS, take, end=lambda _: None, once=True)
        with suppress(EngineError):
            leader.groups.join(group, consumer)
            leader.groups.credit(group, consumer, most)
            self.node.later(REDRIVE_WAIT_US, over)
        self._kick()

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        leader, topic = self.engine.leader, self.engine.machine.topic_by_name.get(name)
        if leader is not None and topic is not None:
            with suppress(EngineError):
                leader.delete_topic(topic.topic_id, self._now(), lambda _: None)
            self._kick()

    def delete_group(self, topic: str, name: str) -> None:
        """Delete a group."""
        leader, group = self._group(topic, name)
        if leader is not None and group is not None:
            with suppress(EngineError):
                leader.groups.delete(group, lambda _: None)
            self._kick()

    def _group(self, topic: str, name: str) -> tuple[Leader | None, Group | None]:
        of = self.engine.machine.topic_by_name.get(topic)
        return self.engine.leader, of.groups.get(name) if of is not None else None
