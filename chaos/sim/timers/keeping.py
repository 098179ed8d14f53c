"""Calls of operators to a simulated node: about groups, dead letters, topics and series.

A part of chaos/sim/timers/timers.py. The calls return no answer, because the log shows their
effects and the book (chaos/sim/checks/book.py) reads them from the log.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from timer.entries.payloads import AlterGroup, Ids
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Leader
from timer.model.timer_errors import EngineError, NotLeaderError
from timer.model.units import Now, QueueOffset, UnixMs
from timer.ready.group import Group
from timer.ready.topic import Topic
from timer.recovery.engine import Engine

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

REDRIVE_WAIT_US: Final = 2_000_000
"""Time after which a redrive ends."""
REDRIVE_LEASE_MS: Final = 2_000


Reply = Callable[[object], None]
"""Takes the result of a request, or its error, back to the client."""


def unanswered(result: object) -> None:
    """Drop an answer."""


class KeeperCalls:
    """The operators' calls of EngineApp, its only subclass."""

    engine: Engine
    node: "SimNode"

    def _now(self) -> Now:
        raise NotImplementedError

    def _kick(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _taking(self, reply: Reply = unanswered, *, kick: bool = True) -> Iterator[None]:
        """Take a request in the block, then let the plane step. `reply` gets the error, if any."""
        try:
            yield
        except NotLeaderError as refused:
            reply(refused)
            return
        except EngineError as refused:
            reply(refused)
        if kick:
            self._kick()

    def _leading(self) -> Leader:
        """Return the leader.

        Raises:
            NotLeaderError: the node does not lead.
        """
        if self.engine.leader is None:
            raise NotLeaderError(None)
        return self.engine.leader

    def _topic(self, name: str) -> Topic:
        """Return a topic. Raises NotLeaderError if there is none: a client tries again."""
        topic = self.engine.machine.topic_by_name.get(name)
        if topic is None:
            raise NotLeaderError(None)
        return topic

    def _group(self, topic: str, name: str) -> Group:
        """Return a group. Raises NotLeaderError as `_topic`."""
        group = self._topic(topic).groups.get(name)
        if group is None:
            raise NotLeaderError(None)
        return group

    def recur(self, method: str, *args: Any) -> None:
        """Change a series, or cancel or move an occurrence; no answer."""
        with self._taking():
            leader = self._leading()
            if method in ("cancel", "move"):
                due_ms, seq = np.array(args[:1]), np.array(args[1:], np.uint64)
                if method == "cancel":
                    leader.cancel(due_ms, seq, unanswered)
                else:
                    when = WantedTimes("delay_ms", np.array([700]))
                    leader.reschedule(Ids(due_ms, seq), None, when, self._now(), unanswered)
            else:
                getattr(leader.series, method)(*args, self._now(), unanswered)

    def seek_group(self, topic: str, name: str, by: str, where: float) -> None:
        """Seek a group to an offset or a time.

        Args:
            topic: the group's topic
            name: the group's name
            by: "offset" or "time"
            where: 0 to 1; by offset, a fraction of the queue's range; by time, 10 s before now
                times this
        """
        with self._taking():
            leader, group = self._leading(), self._group(topic, name)
            queue, now_ms = self.engine.machine.topics[group.topic].queue, self._now().clock_ms
            offset = queue.begin + round(where * (queue.end - queue.begin))
            if by == "offset":
                leader.groups.seek(group, QueueOffset(offset), unanswered)
            else:
                time_ms = UnixMs(now_ms - int(where * 10_000))
                leader.groups.seek_time(group, time_ms, unanswered)

    def alter_group(self, topic: str, name: str, changes: dict[str, int]) -> None:
        """Change settings of a group."""
        with self._taking():
            leader, group = self._leading(), self._group(topic, name)
            leader.groups.alter(AlterGroup(group.topic, group.group_id, changes), unanswered)

    def redrive(self, letters: str, most: int) -> None:
        """Redrive at most `most` dead letters, as cluster/api/group_admin.py does."""
        with self._taking():
            leader, group = self._leading(), self._group(letters, dead_letters.GROUP)
            took: list[Delivery] = []
            queue = self.engine.machine.topics[group.topic].queue
            last = np.array([queue.end - 1]).astype(np.uint64)
            free = group.unacked(queue.end) and leader.groups.states(group, last).free[0]
            if most == 1 and free and not group.is_acked(last)[0] and queue.at_hand(last):
                with suppress(EngineError):  # the youngest letter, by its offset
                    leader.groups.redrive(group, last, unanswered)

            def take(delivery: Delivery) -> None:
                took.append(delivery)
                with suppress(EngineError):
                    leader.groups.redrive(group, delivery.lease.offsets, unanswered)

            def over() -> None:
                if self.engine.leader is leader:
                    (leader.groups.retire if took else leader.groups.give_up)(group, consumer)
                    self._kick()

            consumer = ConsumerStream("redrive", REDRIVE_LEASE_MS, take, end=unanswered, once=True)
            leader.groups.join(group, consumer)
            leader.groups.credit(group, consumer, most)
            self.node.later(REDRIVE_WAIT_US, over)

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        with self._taking():
            topic = self._topic(name)
            self._leading().delete_topic(topic.topic_id, self._now(), unanswered)

    def delete_group(self, topic: str, name: str) -> None:
        """Delete a group."""
        with self._taking():
            self._leading().groups.delete(self._group(topic, name), unanswered)
