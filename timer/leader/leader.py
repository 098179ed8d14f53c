"""The leader of one epoch: turns requests and time into log entries, and entries into answers.

A pure core around the machine (timer/state/machine.py). Every decision goes through the log: the
leader appends an entry, waits until it is committed and applied, then answers.

    request --> waiting --append--> in flight --applied--> answer
    clock   --> FIRE shortly before a timer is due, CHECKPOINT every few seconds
    ended   --> OCCURRENCES of the series that wait (timer/leader/intake/occurrence_planner.py)
    fired   --> deliver, if the epoch's lease is held (timer/leader/groups/group_dispatch.py)

While entries of a kind are in flight, requests of that kind gather and share the next entry (group
commit). The shell calls `step` after every batch of events and at `wake_at_ms`. It decides nothing
itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from timer.entries import payloads
from timer.entries.entry_frame import PAYLOAD_SIZE_MAX, Entry, EntryKind
from timer.entries.payloads import FIRE_TOPICS_MAX, Fire, Ids, Keys, Targets
from timer.entries.policies import DEFAULTS, Policies, Scope, ScopePolicy, encode_policy
from timer.leader.change_lines import ChangeLine
from timer.leader.fire_times import FireTimes
from timer.leader.groups.group_batch import OnResult
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.group_dispatch import GroupDispatch
from timer.leader.intake.admission import UNBOUNDED, Admission, Rules, WantedTimes
from timer.leader.intake.count_limits import (
    CountLimits,
    check_group,
    check_producer,
    check_topics,
    producer_idle_ms,
)
from timer.leader.intake.intake import Freshness, Intake
from timer.leader.intake.occurrence_planner import NoCalendar, NoteUnplanned
from timer.leader.intake.quotas import NO_TOPICS, Charge, NewTopics, Quotas
from timer.leader.intake.series_intake import SeriesHooks, SeriesIntake
from timer.model.columns import I64, U32, U64, Part, RequestId, encode_schedule
from timer.model.recurrence import Calendar
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    EngineError,
    InvalidRequestError,
    LeadershipLostError,
    NotFoundError,
    OverloadedError,
)
from timer.model.timer_id import mix_one
from timer.model.units import DUE_MS_MAX, Epoch, LogIndex, MonoMs, Now, ProducerId, TopicId, UnixMs
from timer.ready.topic import Topic
from timer.state.apply_results import (
    Applied,
    CancelApplied,
    Checkpoint,
    DeleteTopicApplied,
    FireApplied,
    OccurrencesApplied,
    RescheduleApplied,
    ScheduleApplied,
)
from timer.state.machine import Machine
from timer.state.producers import IDLE_MS_MAX

ENTRY_ROWS_MAX: Final = 65_536
"""Most timers in one SCHEDULE entry or request, and ids in one request to cancel."""
ENTRY_BYTES_MAX: Final = 8 << 20
"""Most bytes of one SCHEDULE entry, except that one request may have more."""
ENTRY_PARTS_MAX: Final = 1024
"""Requests in one SCHEDULE entry: each costs some microseconds, even with few rows."""
CANCEL_ROWS_MAX: Final = 1024
"""Cancels gathered in one entry: that many take about 15 ms if their timers are in runs. One
request is never split, and the service accepts no larger request."""
REQUEST_BYTES_MAX: Final = PAYLOAD_SIZE_MAX - 4096
"""Most bytes of one request, columns included: it must fit into one entry."""
ENTRY_TOPICS_MAX: Final = 1024
"""Topics in one SCHEDULE entry, except that one request may have more: some 10 µs for each."""
KEYED_ROWS_MAX: Final = 1024
"""Timers with keys in one SCHEDULE entry or request: each may need a search in the runs."""
KEYS_MAX: Final = 256
"""Keys in one CANCEL or RESCHEDULE entry."""
RESCHEDULE_ROWS_MAX: Final = 32
"""Timers in one RESCHEDULE entry: their payloads are read, perhaps from as many batches."""
CHANGES_MAX: Final = 256
"""Entries of series and policies in flight; above that: OverloadedError."""
CANCELS_WAITING_MAX: Final = 1 << 20
"""Cancels by id that wait or are in flight; above that: OverloadedError."""
KEYS_WAITING_MAX: Final = 1 << 16
"""The same limit for cancels by key."""
MOVES_WAITING_MAX: Final = 1 << 13
"""The same limit for reschedules by id, and for those by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderConfig:
    """Limits and intervals of the leader."""

    policy: ScopePolicy = DEFAULTS
    """The node's settings, which hold where no policy sets a value."""
    checkpoint_interval_ms: int = 3000
    waiting_bytes_max: int = 64 << 20
    """Bytes of schedules not yet committed or rejected; above that: OverloadedError."""
    schedules_in_flight: int = 2
    """SCHEDULE entries appended and not applied; above that, small requests gather."""
    gather_bytes: int = 256 << 10
    """Bytes of waiting requests that are appended at once, even above `schedules_in_flight`."""
    request_window_ms: int = 300_000
    """Time for which a request id is remembered, on the log's clock, milliseconds."""
    producer_idle_ms: int = IDLE_MS_MAX
    """A producer idle for this time, in milliseconds, is forgotten at the next CHECKPOINT."""
    limits: CountLimits = field(default_factory=CountLimits)
    """Most topics, groups and producers."""
    fire_topics_max: int = FIRE_TOPICS_MAX
    """Topics with timers in one FIRE: some 10 µs for each, even with few timers."""
    calendar: Calendar = field(default_factory=NoCalendar)
    """Computes the times of cron expressions."""
    on_unplanned: NoteUnplanned = lambda view, why: None
    """Called once for each expression or zone that the calendar does not know."""
    id_salt: int = 0
    """The cluster's salt of timer ids: the headers of a dead letter hold its first timer id."""


Append: TypeAlias = Callable[[EntryKind, list[bytes], UnixMs], LogIndex]
"""Append an entry to the log and return its index; raises an EngineError if the log rejects it."""


class Leader:
    """One epoch: `step` after events, `on_applied` for each entry, `close` at its end."""

    def __init__(
        self, machine: Machine, epoch: Epoch, append: Append, config: LeaderConfig, now: Now
    ) -> None:
        self.machine = machine
        self.admission = Admission(machine, config.policy, config.id_salt ^ mix_one(epoch))
        self.epoch = epoch
        self._append = append
        self._config = config
        self._time_ms = machine.applied_time_ms
        """Header time of the last appended entry; never goes back."""
        self._read_time_ms = machine.last_read_time_ms
        """Read time of the last FIRE proposed; the next one's is not earlier."""
        self.quotas = Quotas(machine, self.admission)
        self._parts: list[tuple[Part, OnResult]] = []
        self._parts_bytes = 0
        self._intake = Intake(machine, config.request_window_ms)
        self._batches: dict[int, list[tuple[Part, OnResult]]] = {}
        """Requests that were appended together and are neither applied nor rejected."""
        cancels, moves = "the leader's queue of cancels", "the leader's queue of reschedules"
        self._cancel_ids = ChangeLine(
            cancels, self._propose, CANCEL_ROWS_MAX, CANCELS_WAITING_MAX, eager=False
        )
        self._cancel_keys = ChangeLine(cancels, self._propose, KEYS_MAX, KEYS_WAITING_MAX)
        self._moves = {
            kind: ChangeLine(moves, self._propose, RESCHEDULE_ROWS_MAX, MOVES_WAITING_MAX)
            for kind in (Ids, Keys)
        }
        self._lines = (self._cancel_ids, self._cancel_keys, *self._moves.values())
        self._in_flight: dict[LogIndex, Callable[[Applied | EngineError], None]] = {}
        self._schedules_in_flight = 0
        self._changes_in_flight = 0
        self.bytes_in_flight = 0
        """Bytes of schedules that wait, or are appended and not yet applied."""
        self._fires_in_flight = 0
        self._fire_times = FireTimes()
        self._must_fire = machine.sweep_position is not None
        """A FIRE must follow even if no timer is due."""
        self._fire_rejected = False
        self.series = SeriesIntake(
            machine,
            self.admission,
            config.calendar,
            config.limits,
            SeriesHooks(self._propose, self._change, self._check_series, config.on_unplanned),
        )
        self._checkpoint_in_flight = False
        self._checkpoint_at_ms = MonoMs(now.mono_ms + config.checkpoint_interval_ms)
        self._topics_in_flight: dict[str, list[OnResult]] = {}
        self._registrations_in_flight = 0
        """Registrations of producers in flight."""
        self.answering_index = LogIndex(0)
        """Index of the entry whose proposers get their answers just now; 0: none."""
        self.last_proposed = LogIndex(0)
        """Index of the last entry that this leader has appended; 0: none."""
        self.closed: EngineError | None = None
        """Error that ended the epoch. None: the epoch goes on."""
        self.disk_error: EngineError | None = None
        """The reason to reject new timers (timer/files/disk_reserve.py), or None."""
        self.groups = GroupDispatch(
            machine,
            epoch,
            self._propose,
            config.id_salt,
            self.admission.ttl_ms,
            lambda: self.admission.has_ttl,
            self.admission.rates,
            config.limits,
        )

    # ---- requests

    def schedule(
        self, part: Part, done: OnResult, now: Now | None = None, sender: str = ""
    ) -> None:
        """Accept one request; `done` gets Accepted, Repeated or an EngineError.

        See `check` for the arguments and the errors.
        """
        charges, freshness = self.check(part, now, sender)
        if freshness is Freshness.REPEAT:
            charges = []  # a repeat has no effect
        self._intake.accept(part, freshness, sender)
        self._parts.append((part, self.quotas.charge(charges, done)))
        self._parts_bytes += part.size
        self.bytes_in_flight += part.size

    def check(
        self,
        part: Part,
        now: Now | None = None,
        sender: str = "",
        new: NewTopics = NO_TOPICS,
    ) -> tuple[list[Charge], Freshness]:
        """Check one request; return its charges, and what is known about it.

        `now`: rows due by then count as ready; None: no row does. `sender`: for the
        limit on each sender's request ids (timer/leader/intake/request_shares.py). `new`: the
        topics that are yet to be created for it.

        Raises:
            InvalidRequestError: it has no row, or more than fits into one entry; or its request id
                belongs to another request.
            OverloadedError: too much is waiting already, or too many request ids are remembered;
                the request was not accepted.
            DiskFullError: it is new, and there is no room for it.
            QuotaReachedError: it is new, and a topic would exceed a quota.
            NotReadyError, TopicDeletedError: it is new, and one of its topics is being deleted, or
                was deleted.
            UnknownProducerError: the producer id was never issued, or has expired.
            SequenceGapError: a request of this producer is missing before this one.
        """
        self.groups.check_open()
        size = part.size
        if part.keyed_rows > KEYED_ROWS_MAX:
            limit = f"a request holds at most {KEYED_ROWS_MAX} timers with keys"
            raise InvalidRequestError("keys", part.keyed_rows, limit)
        if not 1 <= len(part.due_ms) <= ENTRY_ROWS_MAX:
            limit = f"a request holds 1 to {ENTRY_ROWS_MAX} timers"
            raise InvalidRequestError("timers", len(part.due_ms), limit)
        if size > REQUEST_BYTES_MAX:
            limit = f"a request holds at most {REQUEST_BYTES_MAX} bytes, columns included"
            raise InvalidRequestError("timers", f"{size} bytes", limit)
        if self.bytes_in_flight + size > self._config.waiting_bytes_max and self.bytes_in_flight:
            raise OverloadedError("the leader's intake", retry_after_ms=OVERLOAD_RETRY_MS)
        charges = self.quotas.weigh(part, now.clock_ms if now is not None else UnixMs(-1), new)
        freshness = self._intake.classify(part, self._time_ms)
        if freshness is Freshness.NEW:
            self._intake.check_share(part, sender, self._time_ms)
            self._check_new(part, charges, new)
        return charges, freshness

    def _check_new(self, part: Part, charges: list[Charge], new: NewTopics) -> None:
        """Check a request that has certainly not been applied.

        Raises:
            DiskFullError: there is no room for it.
            QuotaReachedError: a topic would exceed a quota.
            NotReadyError: one of its topics is being deleted.
            TopicDeletedError: one of its topics was deleted.
        """
        self._check_disk_space()
        if self.groups.deleting or self.machine.store.deleted_topics:
            for topic in {*np.unique(part.topic).tolist()} - new.keys():
                self.groups.check_topic(TopicId(topic))
        self.quotas.check(charges, new)

    def request_id(self, text: bytes, body: int, now: Now) -> RequestId:
        """Return the id of a request that is accepted now."""
        return RequestId(text, body, UnixMs(now.clock_ms + self._config.request_window_ms))

    def rules(
        self,
        topic: TopicId,
        producer_id: ProducerId,
        sequence: int,
        request: RequestId | None = None,
        new: str = "",
    ) -> Rules:
        """Return the rules for a topic's rows in a request. `new`: see Admission.rules.

        A repeat of an applied request gets its first answer, so no policy set since may reject it.

        Raises:
            InvalidRequestError: the request id belongs to another request.
        """
        if self.was_applied(producer_id, sequence, request):
            return UNBOUNDED
        return self.admission.rules(topic, new)

    def was_applied(
        self, producer_id: ProducerId, sequence: int, request: RequestId | None
    ) -> bool:
        """Return whether a request repeats an applied one.

        Raises:
            InvalidRequestError: the request id belongs to another request.
        """
        return self._intake.was_applied(producer_id, sequence, request, self._time_ms)

    def cancel(self, due_ms: I64, seq: U64, done: OnResult) -> None:
        """Accept one cancel request; `done` gets the machine's results, (n, uint8).

        Raises:
            InvalidRequestError: it has no timer, or more than fit into one entry.
            OverloadedError: too many wait already; the request was not accepted.
        """
        self.groups.check_open()
        if not 1 <= len(seq) <= ENTRY_ROWS_MAX:
            limit = f"a request holds 1 to {ENTRY_ROWS_MAX} ids"
            raise InvalidRequestError("timer_ids", len(seq), limit)

        def answer(applied: object) -> None:
            done(applied.results if isinstance(applied, CancelApplied) else applied)

        self._cancel_ids.add(Ids(due_ms, seq), answer)

    def cancel_keys(self, targets: Keys, done: OnResult) -> None:
        """Accept one cancel by keys, all different; `done` gets the CancelApplied.

        Raises:
            InvalidRequestError: it has no key, or more than fit into one entry.
            OverloadedError: too many wait already; the request was not accepted.
        """
        self._check_targets(targets, KEYS_MAX)
        self._cancel_keys.add(targets, done)

    def reschedule(
        self, targets: Targets, topics: U32 | None, when: WantedTimes, now: Now, done: OnResult
    ) -> None:
        """Accept one reschedule, of ids or of keys that are all different.

        `topics`: see Admission. `done` gets the RescheduleApplied.

        Raises:
            InvalidRequestError: it has no timer, or more than fit into one entry, or a time beyond
                the maximum.
            OverloadedError: too many wait already; the request was not accepted.
            DiskFullError: there is no room for the new rows.
        """
        self._check_disk_space()
        self._check_targets(targets, RESCHEDULE_ROWS_MAX)
        times = self.admission.times(when, len(targets), topics, now)
        self._moves[type(targets)].add(targets, done, times)

    def _check_targets(self, targets: Targets, rows_max: int) -> None:
        self.groups.check_open()
        if not 1 <= len(targets) <= rows_max:
            field = "keys" if isinstance(targets, Keys) else "timer_ids"
            raise InvalidRequestError(field, len(targets), f"a request holds 1 to {rows_max}")
        if isinstance(targets, Keys):
            for topic in np.unique(targets.topic).tolist():
                self.groups.check_topic(TopicId(topic))

    def _check_changes(self) -> None:
        self.groups.check_open()
        if self._changes_in_flight >= CHANGES_MAX:
            raise OverloadedError("the leader's queue of changes", retry_after_ms=OVERLOAD_RETRY_MS)

    def _check_series(self, topic: TopicId, *, new: bool) -> None:
        """Check that a change of a topic's series may be appended. `new`: it creates one."""
        self._check_changes()
        if new:
            self._check_disk_space()
        self.groups.check_topic(topic)

    def set_policy(
        self, scope: Scope, fields: ScopePolicy, unset: Sequence[str], now: Now, done: OnResult
    ) -> None:
        """Set and unset fields of a scope's policy; `done` gets the Policies.

        Raises:
            InvalidRequestError: names field, value and limit.
            OverloadedError: too much is in flight already; the request was not accepted.
            NotReadyError, TopicDeletedError: the topic is being deleted, or was deleted.
        """
        self._check_changes()
        if scope.topic:
            self.groups.check_topic(scope.topic)
        policy = self.admission.policy_with(scope, fields, unset)
        self._flush_timed(now)  # their times follow the previous policy
        if self._change(EntryKind.POLICY, [encode_policy(scope, policy)], now, done):
            self.admission.change(scope, policy)
            self._charge_all(now)
            self.groups.expiry.check_all()

    def _charge_all(self, now: Now) -> None:
        """Charge requests in flight for quotas that were set after they were accepted."""
        for batch in (self._parts, *self._batches.values()) if self.admission.has_quotas else ():
            for at, (part, done) in enumerate(batch):
                batch[at] = part, self.quotas.charge_new_quotas(part, done, now.clock_ms)

    def _change(self, kind: EntryKind, payload: list[bytes], now: Now, done: OnResult) -> bool:
        self._changes_in_flight += 1

        def answer(applied: Applied | EngineError) -> None:
            self._changes_in_flight -= 1
            done(applied)

        return self._propose(kind, payload, now, answer)

    def register(self, token: bytes, drawn: ProducerId, now: Now, done: OnResult) -> None:
        """Register a producer; `done` gets its ProducerId.

        The id is `drawn`, or the one registered earlier with the same token. 0: another producer
        has the id `drawn`.

        Raises:
            LimitReachedError: the cluster has the most producers that it may have.
        """
        self.groups.check_open()
        self._check_disk_space()
        if not self.machine.producers.has_token(token):
            check_producer(self._config.limits, self.machine, self._registrations_in_flight)
        self._registrations_in_flight += 1

        def answer(applied: Applied | EngineError) -> None:
            self._registrations_in_flight -= 1
            done(applied)

        self._propose(EntryKind.PRODUCER, [payloads.encode_producer(token, drawn)], now, answer)

    def end_producer(self, producer_id: ProducerId, now: Now, done: OnResult) -> None:
        """Forget a producer that sends nothing more; `done` gets its id."""
        self.groups.check_open()
        if self.machine.producers.get(producer_id) is None:
            done(producer_id)
            return
        self._propose(EntryKind.PRODUCER, [payloads.encode_end_producer(producer_id)], now, done)

    def topic_or_none(self, name: str) -> Topic | None:
        """Return the topic of a name. None: no such topic, or its deletion is in flight."""
        known = self.machine.topic_by_name.get(name)
        return None if known is None or known.topic_id in self.groups.deleting else known

    def check_new_topics(self, names: Iterable[str]) -> None:
        """Check that topics, which do not exist, may be created, all together.

        Raises:
            LimitReachedError: the cluster or a namespace would have more than it may have.
        """
        new = [name for name in names if name not in self._topics_in_flight]
        check_topics(self._config.limits, self.machine, new, self._topics_in_flight)

    def check_group_of_new_topic(self) -> None:
        """Check that a topic that does not exist yet may have a group.

        Raises:
            LimitReachedError: the cluster has the most groups that it may have.
        """
        check_group(self._config.limits, self.machine, None, self.groups.creating)

    def find_topic(self, name: str) -> Topic:
        """Return the topic of a name.

        Raises:
            NotFoundError: no such topic.
            NotReadyError: its deletion is in flight, and may still fail.
        """
        topic = self.machine.topic_by_name.get(name)
        if topic is None:
            raise NotFoundError("topic", name)
        self.groups.check_topic(topic.topic_id)
        return topic

    def delete_topic(self, topic_id: TopicId, now: Now, done: OnResult) -> None:
        """Delete a topic with its timers, messages and groups; `done` gets the DeleteTopicApplied.

        Raises:
            NotReadyError, TopicDeletedError: it is being deleted already, or was deleted.
            OverloadedError: too much is in flight already; the request was not accepted.
        """
        self._check_changes()
        self.groups.check_topic(topic_id)
        self._flush_timed(now)  # requests to the topic go before its deletion
        if self._change(EntryKind.TOPIC, [payloads.encode_delete_topic(topic_id)], now, done):
            self.groups.begin_deletion(topic_id)
            self.admission.change(Scope("", topic_id), ScopePolicy())

    def create_topic(self, name: str, now: Now, done: OnResult, creator: str = "") -> None:
        """Create a topic if it does not exist; `done` gets the Topic.

        `creator`: see timer/state/creators.py; only from feature level 2 on.

        Raises:
            LimitReachedError: the cluster has the most topics that it may have.
        """
        self.groups.check_open()
        known = self.topic_or_none(name)
        if known is not None:
            done(known)
        elif name in self._topics_in_flight:
            self._topics_in_flight[name].append(done)
        else:
            self._check_disk_space()
            check_topics(self._config.limits, self.machine, [name], self._topics_in_flight)
            waiters = self._topics_in_flight[name] = [done]

            def answer(applied: object) -> None:
                del self._topics_in_flight[name]
                for waiter in waiters:
                    waiter(applied)

            self._propose(EntryKind.TOPIC, [payloads.encode_topic(name, creator)], now, answer)

    # ---- time

    def step(self, now: Now) -> None:
        """Append the entries that waiting requests and the time require."""
        if self.closed is not None:
            return
        self.groups.expire(now)
        self._step_fire(now)
        if not self.groups.refusal and self.disk_error is None and self.series.step(now):
            self._fire(now)  # so that occurrences due at once fire without a second commit
        self._flush_schedules(now)
        self._flush_changes(now, *self._lines)
        self.groups.flush(now)
        if now.mono_ms >= self._next_checkpoint_ms():
            self.checkpoint(now)

    def checkpoint(self, now: Now) -> None:
        """Append a CHECKPOINT, after a FIRE that brings the read time up to date."""
        self._checkpoint_in_flight = True
        self._checkpoint_at_ms = MonoMs(now.mono_ms + self._config.checkpoint_interval_ms)
        if not self._fires_in_flight:
            self._fire(now)
        idle_ms = self._config.producer_idle_ms
        idle_ms = producer_idle_ms(self._config.limits, self.machine, idle_ms)
        expiry = payloads.encode_checkpoint(idle_ms)
        self._propose(EntryKind.CHECKPOINT, [expiry], now, self._on_checkpoint)

    def _next_checkpoint_ms(self) -> MonoMs:
        """Return when a checkpoint is due: none before the last one is committed.

        In a drain none is due, so an idle log stays committed.
        """
        is_off = self.groups.refusal or self._checkpoint_in_flight
        return MonoMs(DUE_MS_MAX) if is_off else self._checkpoint_at_ms

    def wake_at_ms(self, now: Now) -> MonoMs:
        """Return when `step` must be called next, on the monotonic clock."""
        wake = self._next_checkpoint_ms()
        if (following := self._next_fire(now)) is not None:
            # After a rejected FIRE the log is full. The next commit lets the shell step sooner.
            pause_ms = OVERLOAD_RETRY_MS if self._fire_rejected else 0
            wake = min(wake, MonoMs(now.mono_ms + max(pause_ms, following[0])))
        if self.series.is_needed and not self.groups.refusal and self.disk_error is None:
            # As after a rejected FIRE.
            wait_ms = OVERLOAD_RETRY_MS if self.series.rejected else 0
            wake = min(wake, MonoMs(now.mono_ms + wait_ms))
        return min(wake, self.groups.wake_at_ms(now))

    def deliver(self, now: Now) -> list[Delivery]:
        """Return deliveries. Call only while the epoch's lease is held."""
        if self.closed or self.groups.refusal:
            return []
        return self.groups.deliver(now, may_move_letters=self.disk_error is None)

    # ---- committed and applied

    def on_committed(self, index: LogIndex, mono_ms: MonoMs) -> None:
        """Note that the entries up to `index` are committed."""
        self._fire_times.on_committed(index, mono_ms)

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        """Answer the proposer of an entry that was committed and applied."""
        if isinstance(applied, DeleteTopicApplied):
            self.groups.on_topic_deleted(applied)
        if entry.epoch == self.epoch:
            done = self._in_flight.pop(entry.index, None)
            if done is not None:
                self.answering_index = entry.index
                done(applied)
                self.answering_index = LogIndex(0)
        if isinstance(applied, FireApplied):
            self.groups.feed(topic for topic, _ in (*applied.fired, *applied.released))
        elif isinstance(applied, ScheduleApplied | RescheduleApplied | OccurrencesApplied):
            self.groups.feed(applied.ready)
        elif isinstance(applied, Policies):
            self._must_fire |= self.machine.sweep_position is not None
            self.groups.expiry.on_policy_applied()

    def hand_over(self, now: Now) -> bool:
        """Append the last entries of the epoch before the leadership is transferred.

        Returns whether another call is needed.
        """
        return self.closed is None and self.groups.hand_over(now)

    def begin_drain(self, why: EngineError) -> None:
        """Begin a drain: reject new requests except acks, deliver nothing, finish the rest."""
        self.groups.refusal = why

    def close(self, why: EngineError) -> None:
        """End the epoch. Entries in flight have unknown outcomes; waiting requests, no effect."""
        if self.closed is not None:
            return
        self.closed = why
        self.groups.close(why)
        lost = LeadershipLostError("the leader lost its epoch with the request in flight")
        in_flight, self._in_flight = self._in_flight, {}
        for done in in_flight.values():
            done(lost)
        for _, waiter in self._parts:
            waiter(why)
        self._parts = []
        for line in self._lines:
            line.close(why)

    @property
    def idle(self) -> bool:
        """Whether no caller waits for an answer. Firing may go on."""
        waiting = self._parts or any(self._lines) or self.groups.waiting
        return not waiting and len(self._in_flight) == self._fires_in_flight

    def _check_disk_space(self) -> None:
        if self.disk_error is not None:
            raise self.disk_error.with_traceback(None)

    def _propose(
        self,
        kind: EntryKind,
        payload: list[bytes],
        now: Now,
        done: Callable[[Applied | EngineError], None],
    ) -> bool:
        """Append an entry; return whether the log accepted it. If not, `done` got the error."""
        time_ms = max(self._time_ms, now.clock_ms)
        try:
            index = self._append(kind, payload, time_ms)
        except EngineError as refused:
            done(refused)
            return False
        self._time_ms = time_ms
        self._in_flight[index] = done
        self.last_proposed = index
        return True

    # ---- schedules

    def _flush_schedules(self, now: Now, *, all_of_them: bool = False) -> None:
        while self._parts and (
            all_of_them
            or self._schedules_in_flight < self._config.schedules_in_flight
            or self._parts_bytes >= self._config.gather_bytes
        ):
            count, rows, size, keyed, topics = 0, 0, 0, 0, set[int]()
            for part, _ in self._parts:
                rows += len(part.due_ms)
                size += part.size
                keyed += part.keyed_rows
                topics |= part.topics
                is_full = rows > ENTRY_ROWS_MAX or size > ENTRY_BYTES_MAX or keyed > KEYED_ROWS_MAX
                if count and (is_full or len(topics) > ENTRY_TOPICS_MAX):
                    break
                count += 1
                if count == ENTRY_PARTS_MAX:
                    break
            batch = self._parts[:count]
            del self._parts[:count]
            self._append_schedules(batch, now)

    def _append_schedules(self, batch: list[tuple[Part, OnResult]], now: Now) -> None:
        size = sum(part.size for part, _ in batch)
        self._parts_bytes -= size
        self._schedules_in_flight += 1
        self._batches[id(batch)] = batch

        def answer(applied: Applied | EngineError) -> None:
            self._schedules_in_flight -= 1
            del self._batches[id(batch)]
            self.bytes_in_flight -= size
            assert isinstance(applied, ScheduleApplied | EngineError)
            count = len(batch)
            parts = applied.parts if isinstance(applied, ScheduleApplied) else (applied,) * count
            for (part, _), result in zip(batch, parts, strict=True):
                self._intake.settle(part, applied=not isinstance(result, EngineError))
            for (_, done), result in zip(batch, parts, strict=True):
                done(result)

        self._propose(EntryKind.SCHEDULE, encode_schedule([part for part, _ in batch]), now, answer)
        if any(int(part.due_ms.min()) <= now.clock_ms for part, _ in batch):
            self._fire(now)

    def _flush_timed(self, now: Now) -> None:
        """Append all requests whose times are computed: schedules and reschedules."""
        self._flush_schedules(now, all_of_them=True)
        self._flush_changes(now, *self._moves.values(), all_of_them=True)

    # ---- changes

    def _flush_changes(self, now: Now, *lines: ChangeLine, all_of_them: bool = False) -> None:
        due = [line.flush(now, all_of_them=all_of_them) for line in lines if line or all_of_them]
        if any(due):
            self._fire(now)

    # ---- firing

    def _step_fire(self, now: Now) -> None:
        following = self._next_fire(now)
        if following is not None and following[0] <= 0:
            self._fire(now, following[1])

    def _next_fire(self, now: Now) -> tuple[int, int] | None:
        """Return the times of the next FIRE, in milliseconds, as `FireTimes.next` does.

        None: one is in flight, or no timer waits.
        """
        if self._fires_in_flight:
            return None
        if self._must_fire:
            return 0, 0
        due = self.machine.store.next_due()
        if due is None:
            return None
        return self._fire_times.next(due - now.clock_ms, now.mono_ms)

    def _fire(self, now: Now, ahead_ms: int = 0) -> None:
        """Append a FIRE; directly after new timers, so that those due at once share the commit."""
        self._fires_in_flight += 1
        self._must_fire = False
        self._fire_rejected = False
        clock_ms = UnixMs(now.clock_ms + ahead_ms)
        read_time_ms = max(clock_ms, self.machine.last_read_time_ms, self._read_time_ms)
        self._read_time_ms = UnixMs(read_time_ms)
        fire = payloads.encode_fire(
            Fire(self._read_time_ms, topics_max=self._config.fire_topics_max)
        )
        takes_effect = Now(now.mono_ms, self._read_time_ms)
        if self._propose(EntryKind.FIRE, [fire], takes_effect, self._on_fire):
            self._fire_times.on_appended(self.last_proposed, now.mono_ms)

    def _on_fire(self, applied: Applied | EngineError) -> None:
        self._fires_in_flight -= 1
        if isinstance(applied, FireApplied):
            self._must_fire = applied.limited
        else:
            self._fire_rejected = True
            self._must_fire = self.machine.sweep_position is not None

    def _on_checkpoint(self, applied: Applied | EngineError) -> None:
        self._checkpoint_in_flight = False
        assert isinstance(applied, Checkpoint | EngineError), applied
