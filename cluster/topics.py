"""Topics and groups as a node has applied them, for operators."""

from cluster import groups
from cluster.host import Host
from timer.groups import Group
from timer.machine import Topic
from timerclient.proto import timer_pb2 as pb


class TopicView:
    """What a node tells of its topics and groups."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def topics(self) -> list[pb.TopicStatus]:
        """Return every topic, as this node has applied it."""
        machine = self._host.engine.machine
        return [self._topic(topic) for _, topic in sorted(machine.topic_by_name.items())]

    def group(self, topic: str, group: str) -> pb.GroupStatus:
        """Return a group, as this node has applied it."""
        of = self._host.engine.machine.topic_by_name[topic]
        return self._group(of, of.groups[group])

    def _topic(self, topic: Topic) -> pb.TopicStatus:
        counts, queue = topic.counts, topic.queue
        return pb.TopicStatus(
            name=topic.name,
            topic_id=topic.topic_id,
            pending=counts.pending,
            scheduled=counts.scheduled,
            fired=counts.fired,
            cancelled=counts.cancelled,
            queue_end=queue.end,
            queue_begin=queue.begin,
            groups=[self._group(topic, group) for group in topic.groups.values()],
        )

    def _group(self, topic: Topic, group: Group) -> pb.GroupStatus:
        leader = self._host.leader
        leased, consumers = leader.groups.leased(group) if leader is not None else (0, 0)
        return groups.status_of(group, topic.queue.end, leased, consumers)
