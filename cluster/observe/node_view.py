"""The node's view of itself for operators, over gRPC and HTTP."""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from cluster.api.admin_service import checkpoint_answer, status_answer
from cluster.api.backup_desk import BackupDesk
from cluster.api.peer_queries import Peers, Stub, ask_all, status_of
from cluster.api.policy_admin import description
from cluster.control.control_plane import ControlPlane
from cluster.control.control_state import ControlState
from cluster.control.membership import id_name
from cluster.files.scrubber import Scrubber
from cluster.files.storage import LastRepair
from cluster.observe import lag, quota_view
from cluster.observe.busiest_topics import BusiestTopics, TopicFigures
from cluster.observe.clock_watch import ClockWatch, warnings_of
from cluster.observe.leader_history import LeaderHistory
from cluster.observe.metrics import WORST_MAX, Levels, NamedFigures
from cluster.observe.topic_view import TopicView
from cluster.rpc.connections import connections_of
from cluster.rpc.http import LocalState, why_not_ready
from cluster.rpc.memory import resident_bytes
from cluster.rpc.open_files import connections_max, has_spare
from cluster.settings.config import NodeConfig, parse_address, shared_settings
from cluster.settings.release import RELEASE
from cluster.state.host import Host
from replication.shell.replica import Replica
from timer.leader.leader import Leader
from timer.model.units import LogIndex, MonoMs, ReplicaId
from timer.ready.group import Group
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.message_json import as_dict
from timerclient.values.certificate_dates import utc_text

_WILDCARDS: Final = frozenset(("", "0.0.0.0", "[::]"))  # noqa: S104 - compared, not bound
SERIES_BEHIND_MS: Final = 10_000
"""The status reports series that are further behind; as the warning of `timerctl check`."""
REPAIR_REPORT_MS: Final = 86_400_000
"""Time for which the status shows a repair."""
MEASURE_S: Final = 0.5
"""Seconds that a scrape waits for measurements."""


class NodeState(TopicView):
    """A node's view of itself and of the cluster."""

    def __init__(  # noqa: PLR0913 - the parts of the node that it shows
        self,
        config: NodeConfig,
        replica: Replica,
        host: Host,
        control: ControlPlane,
        stubs: Mapping[str, Stub],
        mono_ms: Callable[[], MonoMs],
        scrubber: Scrubber,
        backups: BackupDesk | None = None,
        *,
        is_drained: Callable[[], bool] = lambda: False,
        not_after_s: Callable[[], Mapping[str, float]] = dict,
        last_repair: LastRepair | None = None,
    ) -> None:
        """`is_drained` returns whether an operator wants this node not to lead.

        `not_after_s` returns certificate or authority -> Unix time of its end.
        `last_repair`: None if this node was never repaired.
        """
        super().__init__(host, config)
        self.name = config.name
        self.cluster_id = config.cluster_id
        self._replica = replica
        self._control = control
        self._stubs = stubs
        self._mono_ms = mono_ms
        self._scrubber = scrubber
        self._started_at_ms = mono_ms()
        self.history = LeaderHistory()
        """The leaders that the control plane appointed."""
        self._drained, self._not_after_s, self._backups = is_drained, not_after_s, backups
        self._last_repair = last_repair
        self._to_apply: LogIndex | None = None
        """The log's end when a scrape first found this node ready. None: none did."""
        self._current = False
        """See `is_current`."""
        self.http_port = 0
        """The port that the HTTP server is bound to. 0: it is not open yet."""
        self.is_stopping = False
        """The stop of the node has begun."""
        self.concerns: list[Callable[[], Iterable[str]]] = []
        """Each returns states that an operator has to end; empty: there are none."""
        self.memory_high: Callable[[], bool] = lambda: False
        """Returns whether new work is rejected for lack of memory."""
        self._lags: list[lag.GroupLag] = []
        self._quotas: tuple[NamedFigures, ...] = ()
        self._topics = BusiestTopics(
            host.engine.machine, config.limits.metric_topics_max, mono_ms, self._all_topics
        )
        self._connections: Mapping[str, int] = {}
        self._measuring: asyncio.Task[None] | None = None
        self.clock_watch = ClockWatch(self.voter_name)

    # ---- leadership

    def leadership(self) -> tuple[int, str, str]:
        """Return (epoch, leader's name, controller's name); an empty name: unknown.

        The controller is named while this node has a link to it.

        Epoch and leader come from the same source, so that a new epoch is never shown with an old
        leader: the leader's stream to this node, or the appointment if its epoch is higher.
        """
        replica, state = self._replica, self._control.state
        epoch, leader = replica.epoch, replica.leader_id
        if state.epoch > epoch or (state.epoch == epoch and leader is None):
            epoch, leader = state.epoch, state.leader
        return epoch, self.name_of(leader), self._control.reached_controller or ""

    @property
    def log_end(self) -> LogIndex:
        """Index of the last entry of this node's log."""
        return self._replica.last_index

    def leader_address(self) -> str | None:
        """Return host:port of the leader. None: this node leads, or the leader is unknown."""
        name = self.leader_name()
        return self._config.peers.get(name) if name not in (None, self.name) else None

    def hears_leader(self) -> bool:
        """Return whether the leader that this node follows was heard a moment ago."""
        return self._replica.silent_ms <= self._config.replication_config().guard_ms

    def leader_name(self) -> str | None:
        """Return the name of the leader that this node follows, or its own. None: unknown."""
        return self._name_of(self._replica.leader_id)

    def note_leader(self, state: ControlState) -> None:
        """Record the appointment of a control state, if it is a new one."""
        now_ms = self._host.now().clock_ms
        self.history.note(state, now_ms, earlier=not self._control.is_current)

    def name_of(self, replica_id: ReplicaId | None) -> str:
        """Return the name of a replica; empty: unknown."""
        return self._name_of(replica_id) or ""

    def voter_name(self, voter: ReplicaId) -> str:
        """Return the name of a voter, or its replica id if the name is unknown."""
        return self._name_of(voter) or id_name(voter)

    def _name_of(self, replica_id: ReplicaId | None) -> str | None:
        if replica_id == self._replica.replica_id:
            return self.name
        if replica_id is None:
            return None
        published = self._control.state.name_of(replica_id)
        if published in (None, id_name(replica_id)):
            return self._replica.name_of(replica_id) or published
        return published

    def peers(self) -> Peers:
        """Return the other nodes: name -> (address, stub)."""
        return {name: (self._config.peers[name], stub) for name, stub in self._stubs.items()}

    def is_voter(self, name: str) -> bool:
        """Return whether the node with a name is a voter. It may be one whose name is unknown."""
        names = {self._name_of(voter) for voter in self._replica.voters}
        return name in names or None in names

    async def members(self) -> pb.ListMembersResponse:
        """Return the voters of this node's log and the learners that answer, voters first.

        The answer names a leader only if that node answers and serves in this epoch.
        """
        epoch, leader, _ = self.leadership()
        nodes = [self.node_status(), *await ask_all(self.peers(), status_of)]
        end = max((node.log_end for node in nodes if node.name == leader), default=0)
        voters = self._replica.voters
        rows = [
            pb.Member(
                name=node.name,
                replica_id=node.replica_id,
                voter=node.replica_id in voters,
                role=node.role,
                unsure=node.unsure,
                log_end=node.log_end,
                lag_entries=max(0, end - node.log_end),
                address=node.address,
            )
            for node in nodes
            if node.reachable
        ]
        for voter in voters - {row.replica_id for row in rows}:
            name = self._replica.name_of(voter) or self.voter_name(voter)
            address = self._config.peers.get(name, "")
            rows.append(
                pb.Member(
                    name=name, replica_id=voter, voter=True, role="unreachable", address=address
                )
            )
        rows.sort(key=lambda row: (not row.voter, row.name, row.replica_id))
        leads = any(n.serving and (n.name, n.epoch) == (leader, epoch) for n in nodes)
        return pb.ListMembersResponse(epoch=epoch, leader=leader if leads else "", members=rows)

    def _role(self) -> str:
        """Return the role for probes and metrics: the replica's, or stopping."""
        return "stopping" if self.is_stopping else self._replica.role.value

    def local(self) -> LocalState:
        """Return the state for probes."""
        replica = self._replica
        return LocalState(
            role=self._role(),
            serving=self._host.serves,
            leader=self._name_of(replica.leader_id) or "",
            silent_ms=replica.silent_ms,
            silent_ms_max=self._config.replication_config().guard_ms,
            behind_ms=replica.behind_ms,
        )

    def is_current(self) -> bool:
        """Return whether the state has all that was committed before this node's start.

        The node knows that once it was ready and has applied the log that it had then. Call this
        at each scrape.
        """
        if self._to_apply is None and not why_not_ready(self.local()):
            self._to_apply = self._replica.last_index
        if not self._current and self._to_apply is not None:
            end = min(self._to_apply, self._replica.last_index)  # the leader may replace the rest
            self._current = self._host.applied_index >= end
        return self._current

    async def measure(self) -> None:
        """Measure lags, the use of quotas, topics and connections for `levels`.

        If that takes longer than MEASURE_S, a scrape shows the results of the last measurement, and
        the next scrape shows this one's.
        """
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure())
        await asyncio.wait([self._measuring], timeout=MEASURE_S)
        if self._measuring.done():
            self._measuring.result()  # raises its error, if it failed

    async def _measure(self) -> None:
        leader, engine = self._host.leader, self._host.engine
        bound = {name: getattr(self._config, name) for name in ("grpc", "tokens", "link")}
        ports = {name: parse_address(name, at).port for name, at in bound.items() if at}
        ports |= {"http": self.http_port, "replication": self._replica.tcp_port}
        known = {name: port for name, port in ports.items() if port}
        with suppress(OSError):  # no file can be opened; the last figures stay
            self._connections = await asyncio.to_thread(connections_of, known)
        await self._topics.measure()
        if leader is None:
            self._lags, self._late, self._quotas = [], {}, ()
            return
        unacked = self._host.totals.unacked_topics()
        self._lags = await lag.of_groups(leader, self._host.now().clock_ms, unacked)
        self._quotas = await quota_view.fullest(engine.machine, WORST_MAX)
        await self.late_soon()  # last: it waits behind queries; `levels` shows what it found

    def levels(self) -> Levels:
        """Return the values of a scrape; those of lags and quotas are of the last `measure`.

        Lags of topics are absent if they are older than LATE_AGE_MS_MAX.
        """
        replica, engine, leader = self._replica, self._host.engine, self._host.leader
        machine = engine.machine
        now, clocks, backups = self._host.now(), self._host.clock_report(), self._backups
        due = machine.store.next_due() if leader is not None else None
        held = [] if leader is None else [*leader.groups.all_lease_counts()]
        lags = [] if leader is None else self._lags
        awaited = lag.of_consumers(lags)
        late, current = self.last_late(), self.is_current()
        return Levels(
            role=self._role(),
            current=current,
            serving=self._host.serves,
            epoch=replica.epoch,
            raft_term=self._control.raft_term,
            controller_reached=self._control.reached_controller is not None,
            feature_level=self._replica.level,
            voters=len(replica.voters),
            log_end=replica.last_index,
            commit_index=replica.commit_index,
            applied_index=machine.applied_index,
            scheduled=machine.counts.scheduled,
            fired=machine.counts.fired,
            cancelled=machine.counts.cancelled,
            dropped=machine.counts.dropped,
            pending=machine.counts.pending,
            producers=len(machine.producers),
            request_ids=len(machine.requests),
            request_id_timers=machine.requests.rows,
            expired=self._host.totals.n_expired,
            held=machine.store.held,
            ready=self._host.totals.ready,
            leased=sum(leased for _, leased, _ in held),
            consumers=sum(consumers for _, _, consumers in held),
            undelivered_lag_ms=max((each.undelivered_ms for each in awaited), default=0),
            unacked_lag_ms=max((each.unacked_ms for each in awaited), default=0),
            lagging_groups=tuple(
                ((each.topic.name, each.group.name), (each.undelivered_ms, each.unacked_ms))
                for each in lag.worst(lags, WORST_MAX)
            ),
            late_topics=_worst(
                ((machine.topics[topic].name,), (late_ms,))
                for topic, late_ms in late.items()
                if topic in machine.topics  # deleted meanwhile
            ),
            fullest_quotas=() if leader is None else self._quotas,
            groups=() if leader is None else self._groups(leader, held, lags),
            topics=self._topics.figures() if current else (),
            connections=self._connections,
            connections_limits=connections_limits(self._config),
            inflight_bytes=leader.bytes_in_flight if leader is not None else 0,
            memtable_bytes=machine.store.memtable.size,
            clock_spread_ms=clocks.spread_ms,
            clock_jumped_ms=self.clock_watch.jumped_total_ms,
            clock_error_ms=clocks.error_ms,
            clock_offsets=tuple(
                ((self.voter_name(voter),), (offset_ms,))
                for voter, offset_ms in clocks.offsets_ms.items()
            ),
            disk_free_bytes=engine.disk_space.free,
            disk_reserve_bytes=engine.disk_space.reserve,
            disk_low=engine.disk_space.low,
            refusing=leader is not None and leader.disk_error is not None,
            series_lag_ms=machine.series.behind_ms(now.clock_ms) if leader is not None else 0,
            unplanned_series=leader.series.unplanned if leader is not None else 0,
            scrubbed_bytes=self._scrubber.bytes_read,
            scrub_passes=self._scrubber.passes,
            damaged=bool(self._scrubber.damage),
            last_repair_ms=self._last_repair.began_ms if self._last_repair is not None else 0,
            concerns=sum(1 for concern in self.concerns for _ in concern()),
            backup_completed_ms=backups.completed_ms if backups is not None else 0,
            backup_log_index=backups.log.stored_index if backups is not None else 0,
            backup_log_ms=backups.log.stored_ms if backups is not None else 0,
            read_time_lag_ms=max(0, now.clock_ms - due) if due is not None else 0,
        )

    def _groups(
        self,
        leader: Leader,
        held: Iterable[tuple[Group, int, int]],
        lags: Iterable[lag.GroupLag],
    ) -> tuple[NamedFigures, ...]:
        """Return the consumers and leases of the groups with most lag, and of those with most."""
        lagging = lag.worst(lags, WORST_MAX)
        most = heapq.nlargest(WORST_MAX, held, key=lambda each: (each[2], each[1]))
        chosen = {each.group.group_id: each.group for each in lagging}
        chosen |= {group.group_id: group for group, _, _ in most}
        topics, found = leader.machine.topics, []
        for group in chosen.values():
            topic = topics.get(group.topic)
            if topic is not None and not group.deleted:
                leased, consumers = leader.groups.lease_counts(group)
                found.append(((topic.name, group.name), (consumers, leased)))
        return tuple(found)

    def _all_topics(self) -> TopicFigures:
        counts, totals = self._machine.counts, self._host.totals
        counters = (
            counts.scheduled,
            counts.fired,
            counts.cancelled,
            counts.dropped,
            totals.n_expired,
        )
        gauges = counts.pending, self._machine.store.held, totals.ready
        return TopicFigures("", counters, gauges)

    # ---- status

    def node_leadership(self) -> pb.NodeStatus:
        """Return identity and leadership of this node; cheap, however much data it has."""
        return pb.NodeStatus(
            name=self.name,
            address=self._config.peers[self.name],
            reachable=True,
            replica_id=self._replica.replica_id,
            role=self._replica.role.value,
            serving=self._host.serves,
            epoch=self._replica.epoch,
        )

    def node_status(self) -> pb.NodeStatus:
        """Return this node's part of the status."""
        machine = self._host.engine.machine
        replica, counts = self._replica, machine.counts
        status = pb.NodeStatus(
            log_end=replica.last_index,
            commit_index=replica.commit_index,
            applied_index=machine.applied_index,
            pending=counts.pending,
            ready=self._host.totals.ready,
            scheduled=counts.scheduled,
            fired=counts.fired,
            cancelled=counts.cancelled,
            dropped=counts.dropped,
            clock_ms=self._host.now().clock_ms,
            version=RELEASE.program,
            feature_level=replica.level,
            feature_level_max=RELEASE.level_max,
            uptime_ms=self._mono_ms() - self._started_at_ms,
            unsure=replica.unsure,
            rss_bytes=resident_bytes(),
            disk_bytes=self._host.engine.disk_space.used,
            disk_free_bytes=self._host.engine.disk_space.free,
            disk_reserve_bytes=self._config.storage.reserve_bytes,
            disk_low=self._host.engine.disk_space.low,
            damage=self._scrubber.damage,
            scrubbed_bytes=self._scrubber.bytes_read,
            scrubbed_at_ms=self._scrubber.ended_ms,
            withholds_votes=self._control.withholds_votes,
            http_address=self._http_address(),
            drained=self._drained(),
            tls_not_after_ms=int(1000 * min(self._not_after_s().values(), default=0)),
            warnings=self._warnings(),
            settings=shared_settings(self._config),
            memory_high=self.memory_high(),
        )
        status.MergeFrom(self.node_leadership())
        return status

    def _warnings(self) -> Iterator[str]:
        """Yield the states that an operator has to end."""
        for concern in self.concerns:
            yield from concern()
        if not has_spare():
            yield "its limit of open files is reached: it takes no connections"
        yield from warnings_of(self._host.clock_report(), self.voter_name)
        if self._host.serves:
            series = self._host.engine.machine.series
            if series.deferred:
                leader = "a leader that knows their cron expression or time zone"
                yield f"series that wait for {leader}: {len(series.deferred)}"
            behind_ms = series.behind_ms(self._host.now().clock_ms)
            if behind_ms > SERIES_BEHIND_MS:
                yield f"a series with misfire=fire_all is {behind_ms // 1_000} s behind its times"
        repair = self._last_repair
        if repair is not None and self._host.now().clock_ms - repair.began_ms < REPAIR_REPORT_MS:
            yield f"repaired at {utc_text(repair.began_ms / 1000)}: {repair.why}"
        if why := why_not_ready(self.local()):
            yield f"not ready: {why}"

    def _http_address(self) -> str:
        """Return host:port for viewers; empty: the port is not open yet."""
        if not self.http_port:
            return ""
        host = self._config.http.rpartition(":")[0]
        if host in _WILDCARDS:
            host = self._config.peers[self.name].rpartition(":")[0]
        return f"{host}:{self.http_port}"

    def node_checkpoint(self, at_index: LogIndex = LogIndex(0)) -> pb.NodeCheckpoint:
        """Return this node's checkpoint. `at_index`: also the digest at this index; 0: the last.

        With `at_index` the queue offsets are left out: the caller compares only digests, and there
        may be many topics.
        """
        engine, replica = self._host.engine, self._replica
        machine = engine.machine
        checkpoint = machine.checkpoint
        digest = checkpoint.digest if checkpoint else ""
        topics = () if at_index else machine.topics.values()
        offsets = {topic.name: int(topic.queue.end) for topic in topics}
        known_end = max(replica.last_index, replica.commit_index)
        return pb.NodeCheckpoint(
            node=self.name,
            role=replica.role.value,
            epoch=replica.epoch,
            log_end=replica.last_index,
            commit_index=replica.commit_index,
            applied_index=machine.applied_index,
            last_read_time_ms=machine.last_read_time_ms,
            queue_offsets=offsets,
            digest=engine.digests.get(at_index, "") if at_index else digest,
            checkpoint_index=checkpoint.index if checkpoint else 0,
            age_ms=max(0, self._host.now().clock_ms - checkpoint.time_ms) if checkpoint else 0,
            lag_entries=known_end - machine.applied_index,
            manifest_index=engine.manifest_index,
            runs=len(machine.store.runs),
            window_end_ms=machine.store.window_end_ms or 0,
            reachable=True,
        )

    def shared_checkpoint(self, *, offsets: bool = True) -> pb.SharedCheckpoint | None:
        """Return the shared checkpoint of this node's control plane. None: there is none.

        `offsets`: with the queue offsets; there may be many topics.
        """
        shared = self._control.state.checkpoint
        if shared is None:
            return None
        ends = shared.queue_offsets.items() if offsets else ()
        return pb.SharedCheckpoint(
            epoch=shared.epoch,
            index=shared.index,
            last_read_time_ms=shared.last_read_time_ms,
            queue_offsets={topic: int(end) for topic, end in ends if end is not None},
            digest=shared.digest,
            published_at_ms=shared.published_at_ms,
            age_ms=max(0, self._host.now().clock_ms - shared.published_at_ms),
        )

    # ---- JSON

    async def status(self, *, cluster: bool) -> dict[str, Any]:
        """Return the status for HTTP, of this node or of all."""
        return as_dict(await status_answer(self, local=not cluster))

    async def checkpoint(self, *, cluster: bool) -> dict[str, Any]:
        """Return the checkpoints for HTTP: this node's or all members', and the shared one."""
        return as_dict(await checkpoint_answer(self, local=not cluster))

    async def policies(self, *, namespace: str, topic: str) -> Mapping[str, object]:
        """Return a scope's own and effective policies on this node, for HTTP.

        A field that is not set is left out.
        """
        engine, scope = self._host.engine, pb.PolicyScope(namespace=namespace, topic=topic)
        found = as_dict(description(engine.machine, engine.node_policy, scope))
        for policy in ("own", "effective"):
            fields = found[policy] or {}
            found[policy] = {name: value for name, value in fields.items() if value is not None}
        return found


def _worst(lags: Iterable[NamedFigures]) -> tuple[NamedFigures, ...]:
    """Return the WORST_MAX entries with the greatest figures; the first figure decides."""
    return tuple(heapq.nlargest(WORST_MAX, lags, key=lambda each: each[1]))


def connections_limits(config: NodeConfig) -> dict[str, int]:
    """Return the gRPC ports of clients -> connections that each takes, at most."""
    ports = ["grpc", "tokens"] if config.tokens else ["grpc"]
    limits = config.limits
    most = connections_max(limits.connections_max, len(ports), limits.http_connections_max)
    return dict.fromkeys(ports, most)
