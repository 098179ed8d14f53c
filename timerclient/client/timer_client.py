"""TimerClient: made of AsyncTimerClient by `make fmt`, not written by hand."""

# ruff: noqa: B008, PLR0913 -- as in its source
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import grpc

from timerclient.client.aio import AsyncTimerClient, Change
from timerclient.client.consumers import WINDOW, make_credit, make_opening
from timerclient.client.group_calls import GroupOptions, Start
from timerclient.client.story_calls import TimerStory
from timerclient.client.sync import Consumer, ThreadClient
from timerclient.client.timer_calls import Seconds, TimerLike
from timerclient.client.topic_calls import Namespace
from timerclient.client.tracing import Tracing
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import pending_timers
from timerclient.rows.peeked_messages import MessagePage, Peeked
from timerclient.rows.pending_timers import (
    Changed,
    Redriven,
    Rescheduled,
    TimerCounts,
    TimerInfo,
    Where,
)
from timerclient.rows.rows import (
    DueTime,
    Headers,
    NewTimer,
    OnConflict,
    WhenMany,
    at_hand,
    times_at_hand,
)
from timerclient.rows.scheduled_timers import Timer, Timers
from timerclient.rows.series_fields import Series, SeriesConflict, SeriesOptions
from timerclient.streams.node_channel import Dial
from timerclient.threads.background import check_wait
from timerclient.values.client_events import OnEvent
from timerclient.values.client_settings import PEEK_MAX, READ_MAX, ClientSettings
from timerclient.values.client_tls import ClientTls
from timerclient.values.codecs import NO_VALUE, Payload
from timerclient.values.policy_names import NOTHING, CatchUp, PolicyFields
from timerclient.values.results import CancelResult


class TimerClient(ThreadClient):
    """A client of a cluster, for threads.

    Args:
        cluster: "host:port,host:port", a sequence of addresses, or a URL
            (timerclient/values/cluster_url.py). Some of the nodes suffice. None: $TIMERS_URL.
        timeout: Default timeout of calls, failovers included. None: `ClientSettings.call_s`.
        credentials: TLS: the files of a certificate, or gRPC's credentials. None: no TLS.
        token: A bearer token or the path of its file. Needs TLS and all nodes' ports for tokens.
        dial: Makes the channel to an address; `credentials` are then ignored. None: TCP.
        settings: Limits and waits.
        on_event: Called with each event (timerclient/values/client_events.py). All are also logged.
        tracing: Makes OpenTelemetry's spans of schedules. None: no traces.

    Raises:
        InvalidRequest: An argument is wrong, or neither `cluster` nor $TIMERS_URL names a cluster.
    """

    def __init__(
        self,
        cluster: str | Sequence[str] | None = None,
        *,
        timeout: Seconds | None = None,
        credentials: grpc.ChannelCredentials | ClientTls | None = None,
        token: str | Path | None = None,
        dial: Dial | None = None,
        settings: ClientSettings = ClientSettings(),
        on_event: OnEvent | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(
            AsyncTimerClient(
                cluster,
                timeout=timeout,
                credentials=credentials,
                token=token,
                dial=dial,
                settings=settings,
                on_event=on_event,
                tracing=tracing,
            )
        )

    def schedule(
        self,
        topic: str,
        payload: Payload | None = None,
        *,
        json: Any = NO_VALUE,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | None = None,
        ordering_key: str | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Schedule a timer; return it once a majority of the cluster has it on disk.

        Give the `payload`, as bytes or as an `EncodedValue`, or a value as `json`. The header
        `content-type` then has the type of an encoded value, if `headers` do not.

        The due time is one of `delay` (a timedelta, or seconds), `delay_level` (n: the topic's nth
        delay), `due` (an aware datetime) and `due_ms` (Unix milliseconds). Without any, the timer
        fires at once. Policies may change the due time: see `describe_policies`.

        A `key` is unique among the pending timers of its topic; an empty key is no key. If a
        pending timer has the key, `on_conflict` decides: "reject" raises AlreadyExists, "replace"
        cancels the pending timer, "keep" returns the pending timer and schedules nothing. If no
        pending timer has the key, these three schedule the new timer. "update" replaces a pending
        timer; if there is none, it raises NotPending. All but "reject" need a key.

        Groups of type key_shared keep the order of messages with one `ordering_key`, or without one
        of those with one `key`. Any number of pending timers may share an ordering key. Shared
        groups deliver ready messages of a higher `priority` first: 0 to 9, None: 4.

        A `request_id` (up to 64 bytes) lets any process repeat the call. Within the cluster's
        window (limits.request_window_ms, five minutes) the same call with the same id schedules
        nothing more and returns the same timer. The client retries for four minutes. If the window
        is shorter, use a `timeout` below it.

        Raises:
            AlreadyExists: A pending timer has the key; `existing` is its id.
            NotPending: `on_conflict` is "update", and no pending timer has the key.
            InvalidRequest: An argument is wrong, or a different call had the request id.
            OutcomeUnknown: No answer in time; the timer may have been scheduled, or may still be.
            TimerError: The call was rejected; no timer was scheduled.
        """
        if request_id is None and (not self._client.is_new):
            check_wait()
            return self.submit(
                topic,
                payload,
                json=json,
                key=key,
                on_conflict=on_conflict,
                headers=headers,
                ordering_key=ordering_key,
                priority=priority,
                timeout=timeout,
                **when,
            ).result()
        return self._call(
            self._client.schedule(
                topic,
                payload,
                json=json,
                key=key,
                on_conflict=on_conflict,
                headers=headers,
                ordering_key=ordering_key,
                priority=priority,
                request_id=request_id,
                timeout=timeout,
                **when,
            )
        )

    def schedule_batch(
        self,
        topic: str,
        payloads: Iterable[bytes],
        *,
        keys: Iterable[str | None] | None = None,
        on_conflict: OnConflict = "reject",
        headers: Headers | Iterable[Headers | None] | None = None,
        ordering_keys: Iterable[str | None] | None = None,
        priorities: int | Iterable[int | None] | None = None,
        request_id: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> Timers:
        """Schedule the timers of one request, all or none; return once a majority has them on disk.

        The due time and `priorities` are one value for all, or a sequence with one for each
        payload; see `schedule`. If a pending timer has a key of the batch, `on_conflict` decides
        about the new timer with that key only: see `Timers.results`. A `request_id` is of the whole
        batch. A request holds up to 65,536 timers, of which up to 1,024 have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or a datetime is naive.
            OutcomeUnknown: No answer in time; the timers may have been scheduled, or may still be.
            TimerError: The batch was rejected; no timer was scheduled.
        """
        if request_id is None:
            check_wait()
            return self.submit_batch(
                topic,
                payloads,
                keys=keys,
                on_conflict=on_conflict,
                headers=headers,
                ordering_keys=ordering_keys,
                priorities=priorities,
                timeout=timeout,
                **when,
            ).result()
        return self._call(
            self._client.schedule_batch(
                topic,
                at_hand(payloads),
                keys=at_hand(keys),
                on_conflict=on_conflict,
                headers=at_hand(headers),
                ordering_keys=at_hand(ordering_keys),
                priorities=at_hand(priorities),
                request_id=request_id,
                timeout=timeout,
                **times_at_hand(when),
            )
        )

    def schedule_all(
        self,
        timers: Iterable[NewTimer],
        *,
        on_conflict: OnConflict = "reject",
        request_id: str | None = None,
        timeout: Seconds | None = None,
    ) -> Timers:
        """Schedule timers of any topics in one request, all or none; return them in their order.

        One entry of the log holds all of them. A key that a pending timer has concerns its own
        timer only, as in a batch. Up to 1,024 timers have keys.

        Raises:
            InvalidRequest: An argument exceeds a limit, or there is no timer.
            OutcomeUnknown: No answer in time; all may have been scheduled, or may still be.
            TimerError: The request was rejected; no timer was scheduled.
        """
        return self._call(
            self._client.schedule_all(
                at_hand(timers), on_conflict=on_conflict, request_id=request_id, timeout=timeout
            )
        )

    def consumer(
        self,
        topic: str,
        group: str,
        *,
        lease: Seconds | None = None,
        hold_max: Seconds | None = None,
        start: Start = "earliest",
        window: int = WINDOW,
        max_messages: int | None = None,
        name: str = "",
    ) -> Consumer:
        """Return a consumer of a group. Use `with`: an open one keeps messages from the others.

        For asyncio, `async with` connects it and raises the errors below. Without it, the first use
        connects, and waits until a leader accepts or rejects it. For threads, it is connected on
        return. A missing group is created, and a missing topic if topics are created automatically.

        Args:
            lease: Duration of a lease, a timedelta or seconds; None: the group's setting. A group
                that is created by this call has it as its setting.
            hold_max: Time after the receipt of a message in which its lease is extended; 0: leases
                are not extended; None: `ClientSettings.hold_s_max`, ten minutes.
            start: First message of a group that is created by this call.
            window: Messages in flight or waiting in the consumer, 1 to 1,000,000. Fewer, if the
                application receives single messages slowly.
            max_messages: The iteration ends after this many; no more are leased. None: no limit.
            name: Of the consumer, for people.

        Raises:
            Unreachable: No leader accepted it in time.
            TimerError: The consumer was rejected.
        """
        credit = make_credit(window, max_messages)
        return self._consumer(make_opening(topic, group, lease, start, name), credit, hold_max)

    def status(self, *, local: bool = False) -> pb.GetStatusResponse:
        """Return the cluster's status, as one node knows it.

        The status is that of the first node that knows a serving leader; if there is none, of the
        node with the highest epoch. `local`: the first answer, with that node's own status only.
        """
        return self._call(self._client.status(local=local))

    def checkpoint(self, *, local: bool = False, at_index: int = 0) -> pb.GetCheckpointResponse:
        """Return the nodes' checkpoints and the shared one, from a node that reaches most nodes.

        Args:
            local: Only of the first node that answers.
            at_index: Index of a CHECKPOINT entry: the digests are those there, empty if a node has
                not applied it, or has forgotten it. 0: of the last one that each node applied.
        """
        return self._call(self._client.checkpoint(local=local, at_index=at_index))

    def topics(self) -> list[pb.TopicStatus]:
        """Return the topics that the caller may see, with groups, by name, from the leader."""
        return self._call(self._client.topics())

    def create_topic(self, topic: str) -> int:
        """Create a topic if it does not exist; return its id."""
        return self._call(self._client.create_topic(topic))

    def transfer(self, target: str = "") -> bool:
        """Transfer the leadership to the node named `target`; empty: to any other node.

        Returns True when the successor serves, and False if the target was the leader already.

        Raises:
            InvalidRequest: The target lags and did not catch up; the leader is unchanged.
        """
        return self._call(self._client.transfer(target))

    def members(self) -> pb.ListMembersResponse:
        """Return the voters, and the learners that answer.

        The answer is that of the first node that reaches the leader and a majority of the voters;
        if there is none, of the node with the highest epoch.
        """
        return self._call(self._client.members())

    def change_members(self, change: Change, name: str) -> pb.ListMembersResponse:
        """Make a learner a voter (`add`, `replace`), or a voter a learner (`remove`).

        Raises:
            InvalidRequest: There is no such change.
            OutcomeUnknown: The change was proposed and may still be committed.
        """
        return self._call(self._client.change_members(change, name))

    def describe_policies(
        self, *, namespace: str | None = None, topic: str | None = None
    ) -> pb.DescribePoliciesResponse:
        """Return the policy of the cluster, a namespace or a topic: own and effective fields.

        Raises:
            NotFound: There is no such topic.
        """
        return self._call(self._client.describe_policies(namespace=namespace, topic=topic))

    def alter_policies(
        self,
        fields: PolicyFields = NOTHING,
        *,
        unset: Iterable[str] = (),
        namespace: str | None = None,
        topic: str | None = None,
        cluster: bool = False,
    ) -> pb.DescribePoliciesResponse:
        """Set and unset policy fields of one scope: a namespace, a topic, or the cluster.

        A field applies to timers that are scheduled later. Pauses, quotas, ttl and retention also
        apply to existing timers and messages.

        Args:
            fields: Names and values of fields to set.
            unset: Names of fields to unset; they follow the wider scope again.

        Raises:
            InvalidRequest: Not exactly one scope is given, a field is unknown, or a value is out
                of range.
            NotFound: There is no such topic. If topics are created automatically, `fields` do so.
            OutcomeUnknown: No answer in time; the policy may have been changed.
        """
        return self._call(
            self._client.alter_policies(
                fields, unset=at_hand(unset), namespace=namespace, topic=topic, cluster=cluster
            )
        )

    def cancel(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> CancelResult:
        """Cancel one timer, by its id, or by its key and topic; return the outcome.

        A cancel by id is retried through failovers. If the answer of an earlier attempt was lost,
        the outcome may be ALREADY_CANCELLED through the call itself. RESCHEDULED: the timer was
        rescheduled before; `get_timer(timer).replaced_by` is the id that fires. A cancel by key
        finds pending timers only. It is sent once, because another timer may have the key then.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer; the timer may be cancelled. Repeat a cancel by id; after one
                by key, call `get_timer` first.
        """
        return self._call(self._client.cancel(timer, key=key, topic=topic, timeout=timeout))

    def cancel_batch(
        self, timers: Iterable[TimerLike], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel many timers; return one outcome per timer, in their order; see `cancel`."""
        return self._call(self._client.cancel_batch(at_hand(timers), timeout=timeout))

    def cancel_keys(
        self, topic: str, keys: Iterable[str], *, timeout: Seconds | None = None
    ) -> list[CancelResult]:
        """Cancel pending timers by their keys; return one outcome per key, in their order.

        Each request has up to 256 keys and is sent once, as `cancel` by key.
        """
        return self._call(self._client.cancel_keys(topic, at_hand(keys), timeout=timeout))

    def cancel_where(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> Changed:
        """Cancel the pending timers of a topic that `where` selects; return their number.

        Without `where`, or with an empty prefix alone, all are selected. Timers that are scheduled
        during the call are not cancelled. The call sends one request per page; `timeout` applies to
        each. A page is retried through failovers; then the number may be too low, and not `exact`.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; some timers may be cancelled.
        """
        return self._call(self._client.cancel_where(topic, timeout=timeout, **where))

    def reschedule(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
        **when: Unpack[DueTime],
    ) -> Timer:
        """Change the due time of a pending timer, named by id, or by key and topic.

        Returns the new timer, which has a new id, and the key, payload and headers of the old one.
        The due time is as in `schedule`, and required. The cluster knows at least its last 65,536
        reschedules. For an old id, `get_timer` returns the new id in `replaced_by`; so does the
        error of a further reschedule. A cancel returns RESCHEDULED.

        Raises:
            NotPending: The timer fired, was cancelled, was rescheduled before (`replaced_by`), or
                is not known. It was not changed.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the timer may be rescheduled. Call `get_timer`, by
                its key if it has one.
        """
        return self._call(
            self._client.reschedule(timer, key=key, topic=topic, timeout=timeout, **when)
        )

    def reschedule_batch(
        self,
        timers: Iterable[TimerLike],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule many timers; return one outcome per timer, in their order; see `reschedule`.

        `delay`, `delay_level`, `due` or `due_ms` is one value for all, or one for each timer. A
        timer that is not pending is an outcome, not a NotPending error.
        """
        return self._call(
            self._client.reschedule_batch(at_hand(timers), timeout=timeout, **times_at_hand(when))
        )

    def reschedule_keys(
        self,
        topic: str,
        keys: Iterable[str],
        *,
        timeout: Seconds | None = None,
        **when: Unpack[WhenMany],
    ) -> list[Rescheduled]:
        """Reschedule pending timers by their keys; one outcome per key; see `reschedule_batch`."""
        return self._call(
            self._client.reschedule_keys(
                topic, at_hand(keys), timeout=timeout, **times_at_hand(when)
            )
        )

    def reschedule_where(
        self, topic: str, where: Where, *, timeout: Seconds | None = None, **when: Unpack[DueTime]
    ) -> Changed:
        """Reschedule the pending timers that `where` selects to one due time; return their number.

        Each is rescheduled once, even if `where` selects its new due time. Else as `cancel_where`.
        """
        return self._call(self._client.reschedule_where(topic, where, timeout=timeout, **when))

    def get_timer(
        self,
        timer: TimerLike | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        timeout: Seconds | None = None,
    ) -> TimerInfo:
        """Return the state of one timer, by its id, or, if it is pending, by its key and topic.

        Raises:
            NotFound: The timer does not exist or is no longer known.
        """
        return self._call(self._client.get_timer(timer, key=key, topic=topic, timeout=timeout))

    def list_timers(
        self,
        topic: str,
        *,
        page_size: int = pending_timers.PAGE_SIZE,
        timeout: Seconds | None = None,
        **where: Unpack[Where],
    ) -> Iterator[TimerInfo]:
        """Iterate over the pending timers of a topic that `where` selects, in order of due time.

        Pages are read during the iteration. A timer that is pending throughout is returned once.
        """
        return self._each(
            lambda token: self._client.list_page(
                topic, token, page_size=page_size, timeout=timeout, **where
            )
        )

    def count_timers(
        self, topic: str, *, timeout: Seconds | None = None, **where: Unpack[Where]
    ) -> TimerCounts:
        """Return how many timers of a topic are pending, and how soon; or how many `where` selects.

        A count by `key_prefix` reads all keys in the due range. Other counts take one request.
        """
        return self._call(self._client.count_timers(topic, timeout=timeout, **where))

    def create_group(
        self, topic: str, group: str, *, start: Start = "earliest", **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """Create a group, if it does not exist; return its status. An existing one is unchanged.

        Raises:
            AlreadyExists: The group exists and has another type than the requested one.
            InvalidRequest: An argument exceeds a limit.
        """
        return self._call(self._client.create_group(topic, group, start=start, **options))

    def alter_group(
        self, topic: str, group: str, **options: Unpack[GroupOptions]
    ) -> pb.GroupStatus:
        """Change the given settings of a group; return its status.

        Raises:
            InvalidRequest: An argument exceeds a limit.
            NotFound: There is no such group.
        """
        return self._call(self._client.alter_group(topic, group, **options))

    def seek_group(
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
        return self._call(
            self._client.seek_group(topic, group, offset=offset, time=time, start=start)
        )

    def reset_group(self, topic: str, group: str) -> pb.GroupStatus:
        """Move a group to the earliest message that its topic keeps; see `seek_group`."""
        return self._call(self._client.reset_group(topic, group))

    def delete_group(self, topic: str, group: str) -> None:
        """Delete a group. Its consumers end with NotFound, and so do their acks.

        Raises:
            InvalidRequest: It is `dead-letters`, and has letters: redrive or purge them first.
            NotFound: There is no such group.
        """
        self._call(self._client.delete_group(topic, group))

    def redrive(
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
        return self._call(self._client.redrive(topic, max_messages, offsets=at_hand(offsets)))

    def set_log_level(self, level: str, *, node: str = "", logger: str = "") -> str:
        """Set the level of a logger of one node, until it restarts; return the level before.

        Args:
            level: "debug", "info", "warning" or "error"; of a named logger also "default": it
                follows its package again.
            node: Its name. Empty: the first node that answers.
            logger: Such as "cluster.control". Empty: all loggers without a level of their own.

        Raises:
            InvalidRequest: There is no such level.
            NotFound: There is no such node or logger.
        """
        return self._call(self._client.set_log_level(level, node=node, logger=logger))

    def drain_node(self, node: str, *, undo: bool = False, by: str = "") -> pb.DrainNodeResponse:
        """Drain one node: it gives the leadership away, and gets none while another node can lead.

        A restart or `undo` ends that. Returns when another node leads. `by`: holder of the drain.

        Raises:
            NotFound, AlreadyExists: There is no such node; or another holder has drained it.
            InvalidRequest, Unavailable: No other node can lead now; the node is not drained.
        """
        return self._call(self._client.drain_node(node, undo=undo, by=by))

    def dump_stacks(self, node: str = "") -> pb.DumpStacksResponse:
        """Return the stacks of all threads and tasks of a node; "": of the first that answers.

        Raises:
            NotFound: There is no such node.
        """
        return self._call(self._client.dump_stacks(node))

    def trace_hops(self, node: str, *, begin: bool = False) -> pb.TraceHopsResponse:
        """Begin the record of one node's hops, or end it and return its stamps.

        A record ends by itself after 10 seconds, or with 4,096 stamps.

        Raises:
            NotFound: There is no such node.
        """
        return self._call(self._client.trace_hops(node, begin=begin))

    def reload_files(self, node: str = "") -> pb.ReloadFilesResponse:
        """Let a node look at its files of TLS at once; return the result for each file.

        `node`: its name; empty: the first that answers. No files: the node has no TLS.

        Raises:
            NotFound: There is no such node.
        """
        return self._call(self._client.reload_files(node))

    def begin_verification(self, node: str = "") -> pb.BeginVerificationResponse:
        """Let a node read all its files now; "": all nodes. A pass that runs is joined."""
        return self._call(self._client.begin_verification(node))

    def verification(self, node: str = "") -> pb.GetVerificationResponse:
        """Return a node's last pass over its files; "": all nodes', and if their states agree."""
        return self._call(self._client.verification(node))

    def open_backup(
        self, node: str, backup_id: int, *, min_index: int = 0
    ) -> pb.OpenBackupResponse:
        """Pin the state of one node for a backup; return its index and its parts.

        `backup_id`: random, not 0. `min_index`: in the state. After a minute unread it is closed.

        Raises:
            NotFound, InvalidRequest: There is no such node; the id is 0.
            Unavailable: Not in time; the call may be repeated.
        """
        return self._call(self._client.open_backup(node, backup_id, min_index=min_index))

    def fetch_backup(self, node: str, backup_id: int, path: str, offset: int) -> bytes:
        """Return at most a mebibyte of a part of an open backup from a byte on; none after its end.

        Raises:
            NotFound: The backup is not open any more, or has no such part.
            Unavailable: Not in time; the call may be repeated.
        """
        return self._call(self._client.fetch_backup(node, backup_id, path, offset))

    def fetch_log(
        self, node: str, after: int, *, stored: int = 0, shipper_id: int = 0
    ) -> pb.FetchLogResponse:
        """Return a node's log entries after an index. `stored`: the store has them up to here.

        Raises:
            NotFound, Unavailable: There is no such node; it did not answer in time.
        """
        return self._call(self._client.fetch_log(node, after, stored=stored, shipper_id=shipper_id))

    def close_backup(self, node: str, backup_id: int, *, complete: bool = False) -> None:
        """Unpin a backup; no effect if it is not open. `complete`: the store has all its parts.

        Raises:
            NotFound: There is no such node.
        """
        self._call(self._client.close_backup(node, backup_id, complete=complete))

    def pause_topic(self, topic: str) -> pb.DescribePoliciesResponse:
        """Stop the firing of a topic. Timers that come due are held, and stay pending.

        The call sets `paused` in the topic's policy, and returns the policy.

        Raises:
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the topic may be paused.
        """
        return self._call(self._client.pause_topic(topic))

    def resume_topic(
        self, topic: str, *, catch_up: CatchUp | None = None
    ) -> pb.DescribePoliciesResponse:
        """Resume the firing of a topic, even if its namespace is paused. Return its policy.

        Args:
            catch_up: The overdue timers that fire: "all" in their order, only the "latest", or
                none ("drop"). The others are dropped. It is set in the topic's policy, and applies
                to later resumes, too. None: the policy is unchanged.

        Raises:
            InvalidRequest: `catch_up` is none of these.
            NotFound: There is no such topic.
            OutcomeUnknown: No answer in time; the topic may be resumed.
        """
        return self._call(self._client.resume_topic(topic, catch_up=catch_up))

    def tell_story(self, timer: TimerLike, *, timeout: Seconds | None = None) -> TimerStory:
        """Return the events of a timer that the leader's log still holds.

        If the log begins after the timer's first events, `end.gaps` says so.

        Raises:
            InvalidRequest: `timer` is not a timer or an id.
            NotFound: This cluster has not issued the id.
        """
        return self._call(self._client.tell_story(timer, timeout=timeout))

    def describe_topic(self, topic: str) -> pb.TopicStatus:
        """Return a topic with its groups, their lag, and the lateness of firing and delivery.

        Raises:
            NotFound: There is no such topic.
        """
        return self._call(self._client.describe_topic(topic))

    def peek(
        self,
        topic: str,
        group: str = "",
        *,
        max_messages: int = PEEK_MAX,
        from_offset: int = 0,
        timeout: Seconds | None = None,
    ) -> Peeked:
        """Return messages without delivering them: nothing is leased, and nothing changes.

        With a `group`: its unacked messages, each with its state. Without one: all messages that
        the topic keeps. A call returns at most 100 messages and about a mebibyte.

        Args:
            max_messages: 1 to 100.
            from_offset: The first queue offset; `next_offset` of a result continues it.

        Raises:
            NotFound: There is no such topic or group.
            InvalidRequest: An argument exceeds a limit.
        """
        return self._call(
            self._client.peek(
                topic, group, max_messages=max_messages, from_offset=from_offset, timeout=timeout
            )
        )

    def read_messages(
        self,
        topic: str,
        from_offset: int = 0,
        *,
        end_offset: int | None = None,
        max_messages: int = READ_MAX,
        payloads: bool = True,
        timeout: Seconds | None = None,
    ) -> MessagePage:
        """Return fired messages by their queue offsets, for a reader that keeps its own position.

        A call returns at most 4 MiB. Nothing is leased, and nothing changes. The message at an
        offset never changes either. It is there until the topic's retention ends and all groups
        have acked it.

        Args:
            from_offset: The first queue offset; `next_offset` of a result continues it. If the
                messages from it on were deleted, the result begins with the oldest one kept, and
                its `begin_offset` is greater.
            end_offset: The offset after the last message; None: all messages that have fired.
            max_messages: 1 to 16,384.
            payloads: Whether the result has payloads; without them fewer bytes are sent.

        Raises:
            NotFound: There is no such topic.
            InvalidRequest: An argument exceeds a limit.
        """
        return self._call(
            self._client.read_messages(
                topic,
                from_offset,
                end_offset=end_offset,
                max_messages=max_messages,
                payloads=payloads,
                timeout=timeout,
            )
        )

    def producers(self) -> list[pb.ProducerStatus]:
        """Return all registered idempotent producers, in the order of their public names."""
        return self._call(self._client.producers())

    def describe_producer(self, producer: int) -> pb.ProducerStatus:
        """Return one producer, by its public name.

        Raises:
            UnknownProducer: There is no such producer, or it has expired.
        """
        return self._call(self._client.describe_producer(producer))

    def delete_topic(self, topic: str) -> pb.DeleteTopicResponse | None:
        """Delete a topic with its timers, messages, groups and policy; return how many there were.

        Consumers of the topic end with NotFound, and so do their acks. None of its timers fires. A
        topic that is created later with the same name is a different topic.

        Returns None if the topic is deleted, and the answer with the counts was lost.

        Raises:
            NotFound: There is no such topic.
        """
        return self._call(self._client.delete_topic(topic))

    def namespaces(self) -> list[Namespace]:
        """Return all namespaces that have a topic or a policy, by name."""
        return self._call(self._client.namespaces())

    def describe_namespace(self, namespace: str) -> Namespace:
        """Return one namespace.

        Raises:
            NotFound: The namespace has neither a topic nor a policy.
        """
        return self._call(self._client.describe_namespace(namespace))

    def delete_namespace(self, namespace: str) -> list[str]:
        """Delete all topics of a namespace, then its policy; return the names of the topics.

        Each topic is deleted as by `delete_topic`. If the call fails, the error's `done` is the
        number of deleted topics; a further call deletes the others.

        Raises:
            InvalidRequest: It is the default namespace.
            NotFound: The namespace has neither a topic nor a policy.
            NotReady: Topics are created in the namespace during the call; its policy is kept.
        """
        return self._call(self._client.delete_namespace(namespace))

    def create_series(
        self,
        topic: str,
        key: str,
        payload: Payload | None = None,
        *,
        json: object = NO_VALUE,
        on_conflict: SeriesConflict = "reject",
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Create a series of recurring timers; return it. A repeat returns the existing series.

        If a series of another definition has the key, `on_conflict` decides: "reject" raises
        AlreadyExists, "alter" gives it this definition. So an application can declare its series at
        each start. Options that are not given get their defaults, except that a paused series stays
        paused, and without `start` the start stays.

        Args:
            topic: The topic of the occurrences. It is created if the cluster allows that.
            key: One series of the topic has it. Keys of single timers are others.
            payload: Payload of each occurrence, bytes. None: empty.
            json: A value for the payload instead, encoded as JSON.
            options: `every=` or `cron=`, and others: see SeriesOptions.

        Raises:
            InvalidRequest: An argument exceeds a limit.
            AlreadyExists: A series with another definition has the key.
            QuotaReached: The cluster has the most series that it may have.
            OutcomeUnknown: No answer in time; call it again.
        """
        return self._call(
            self._client.create_series(
                topic, key, payload, json=json, on_conflict=on_conflict, timeout=timeout, **options
            )
        )

    def preview_series(
        self,
        topic: str,
        count: int = 5,
        *,
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> list[datetime]:
        """Return the next times of a series that is not created, 1 to 100.

        Raises:
            InvalidRequest: An argument exceeds a limit.
        """
        return self._call(self._client.preview_series(topic, count, timeout=timeout, **options))

    def alter_series(
        self,
        topic: str,
        key: str,
        payload: Payload | None = None,
        *,
        json: object = NO_VALUE,
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Change the given fields of a series; return it.

        The pending occurrence is cancelled, and planned again. No time before a change of `every`,
        `cron`, `zone` or `start` counts as missed.

        Args:
            payload: Another payload, bytes. None: as it is.
            json: A value for the payload instead, encoded as JSON.
            options: See SeriesOptions. `cron` replaces `every`, and the reverse.

        Raises:
            InvalidRequest: An argument exceeds a limit, or none is given.
            NotFound: There is no such topic or series.
            OutcomeUnknown: No answer in time; the series may be changed.
        """
        return self._call(
            self._client.alter_series(topic, key, payload, json=json, timeout=timeout, **options)
        )

    def pause_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> Series:
        """Pause a series: its pending occurrence is cancelled. Return it.

        Raises:
            NotFound: There is no such topic or series.
        """
        return self._call(self._client.pause_series(topic, key, timeout=timeout))

    def resume_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> Series:
        """Resume a series; its `misfire` decides about the times in the pause. Return it.

        Raises:
            NotFound: There is no such topic or series.
        """
        return self._call(self._client.resume_series(topic, key, timeout=timeout))

    def delete_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> None:
        """Delete a series, and cancel its pending occurrence. Messages that fired stay.

        Raises:
            NotFound: There is no such topic or series.
        """
        self._call(self._client.delete_series(topic, key, timeout=timeout))

    def get_series(self, topic: str, key: str, *, timeout: Seconds | None = None) -> Series:
        """Return a series.

        Raises:
            NotFound: There is no such topic or series.
        """
        return self._call(self._client.get_series(topic, key, timeout=timeout))

    def next_occurrences(
        self, topic: str, key: str, count: int = 5, *, timeout: Seconds | None = None
    ) -> list[datetime]:
        """Return the next times of a series, 1 to 100; the pending occurrence first.

        A paused series shows the times that it has if it is resumed now.

        Raises:
            InvalidRequest: `count` is out of range.
            NotFound: There is no such topic or series.
        """
        return self._call(self._client.next_occurrences(topic, key, count, timeout=timeout))

    def list_series(self, topic: str = "", *, timeout: Seconds | None = None) -> Sequence[Series]:
        """Return the series of a topic, in the order of their creation; "": of all topics.

        The call sends a request for each 1,000 series; `timeout` applies to each request.

        Raises:
            NotFound: There is no such topic.
        """
        return self._call(self._client.list_series(topic, timeout=timeout))
