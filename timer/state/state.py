"""The state of one replica at `applied_index`: its data, and views of it.

The machine applies entries to it. The ledger alone counts the timers in it. The pauses hold and
release timers in it. The digest hashes it, and the manifest stores it.
"""

from collections import Counter, deque
from collections.abc import Iterable

from timer.entries.policies import Policies
from timer.model.columns import RowArray
from timer.model.firing_order import Position
from timer.model.units import (
    Epoch,
    GroupId,
    LogIndex,
    ReplicaId,
    Seq,
    TopicId,
    UnixMs,
)
from timer.pending.store import Store
from timer.ready.group import Group
from timer.ready.page_cache import Pages
from timer.ready.topic import Counts, Topic
from timer.ready.topic_shares import TopicRows, shares_of
from timer.state.apply_results import Checkpoint
from timer.state.cancel_outcomes import Outcomes
from timer.state.creators import Creators
from timer.state.dirty_topics import DirtyIds
from timer.state.firing_trace import Trace
from timer.state.producers import Producers
from timer.state.request_ids import RequestIds
from timer.state.series_table import SeriesTable
from timer.state.successors import Successors


class State:
    """Topics, timers, producers and policies, and the indexes and times that were applied last."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.applied_index = LogIndex(0)
        self.applied_epoch = Epoch(0)
        self.applied_time_ms = UnixMs(0)
        self.voters: tuple[ReplicaId, ...] = ()
        """Voters in the last EPOCH entry applied. Empty: none was applied."""
        self.level = 0
        """The highest feature level of an applied EPOCH entry. 0: none was applied."""
        self.last_read_time_ms = UnixMs(0)
        self.next_seq = Seq(1)
        self.next_topic_id = TopicId(1)
        self.next_group_id = GroupId(1)
        self.counts = Counts()
        self.pages = Pages(store.hasher)
        self.topics: dict[TopicId, Topic] = {}
        self.topic_by_name: dict[str, Topic] = {}
        self.namespaces: Counter[str] = Counter()
        """Number of topics in each namespace."""
        self.groups = 0
        """Number of groups in all topics."""
        self.creators = Creators()
        self.topic_deleted_in = Epoch(0)
        """Epoch of the last deletion of a topic."""
        self.policies = Policies()
        self.producers = Producers()
        self.requests = RequestIds()
        self.trace = Trace()
        self.successors = Successors()
        self.series = SeriesTable()
        self.outcomes = Outcomes()
        """Cancelled timers, and held ones that ended."""
        self.held = 0
        """Timers of paused and releasing topics that came due and have not fired."""
        self.held_bytes = 0
        """Bytes of the held timers' payloads."""
        self.sweep_position: Position | None = None
        """Position up to which the sweep has passed the held rows. None: no sweep."""
        self.fire_marks: deque[tuple[UnixMs, UnixMs]] = deque()
        """(log time, last_read_time_ms then), one each FIRE_MARK_MS, back to the horizon."""
        self.checkpoint: Checkpoint | None = None
        """The last checkpoint recorded. None: none was."""
        self.changes = DirtyIds[TopicId]()
        """Readers of changed topics."""
        self.topics_split = 0
        """Most topics that rows were split into since the last SCHEDULE began. Decides nothing."""

    def topic_to_change(self, topic_id: int) -> Topic:
        """Note a topic as changing, and return it."""
        self.changes.note(TopicId(topic_id))
        return self.topics[TopicId(topic_id)]

    def by_topic(self, rows: RowArray, *, sums: bool) -> list[tuple[Topic, TopicRows]]:
        """Split rows by topic, each part in the order of `rows`; note the topics as changing.

        `sums`: the parts have their sums, as a change of what is pending needs them.
        """
        shares = [
            (self.topic_to_change(share.topic), share) for share in shares_of(rows, sums=sums)
        ]
        self.topics_split = max(self.topics_split, len(shares))
        return shares

    def group(self, topic_id: TopicId, group_id: GroupId) -> Group:
        """Return a group by its id."""
        return self.topics[topic_id].group_by_id[group_id]

    def retain(self, topics: Iterable[TopicId], now_ms: UnixMs) -> None:
        """Set the retention of topics, those that exist, by the policies."""
        for topic in filter(None, map(self.topics.get, topics)):
            retention_ms = self.policies.value_of("retention_ms", topic.name, topic.topic_id)
            topic.set_retention(retention_ms, now_ms)
            self.changes.note(topic.topic_id)
