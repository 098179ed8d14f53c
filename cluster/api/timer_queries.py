"""Queries: the leader's pending timers, for people and programs.

    request --> lease held? --> view, on the loop --> page or count, in a thread --> answer
    one timer ----------------> in memory? else a thread looks it up in the runs -> answer

Only a leader with a valid lease answers, from its applied state. An answer therefore includes
everything that an earlier answer of any leader included. Queries have threads of their own, also
after a caller has given up, so that no firing waits for them. Damage that a query finds goes to the
scrubber: the leader hands over, and the node heals. A node without peers ends.
"""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from cluster.api import wire_rows, wire_timers
from cluster.api.ended_topics import topic_of_ended
from cluster.rpc.caller_turns import CallerTurns
from cluster.rpc.rpc_caller import CALLER, caller_name
from cluster.rpc.shares import Places
from cluster.security.access_rules import CLUSTER, AccessTarget
from cluster.state.host import Host
from cluster.state.query_threads import QueryThreads
from timer.entries.payloads import Ids, Keys, Targets
from timer.leader.leader import Leader
from timer.model import timer_id
from timer.model.columns import U32, U64
from timer.model.firing_order import Position
from timer.model.timer_errors import (
    HIDDEN,
    InvalidRequestError,
    NotFoundError,
    StorageError,
)
from timer.model.timer_id import SEQ_MAX
from timer.model.units import DUE_MS_MAX, TopicId
from timer.pending.read_view import Filter, ReadView, ViewPage
from timer.pending.runs.row_reader import WholeRows
from timer.pending.store import Store
from timer.state.apply_results import ALREADY_CANCELLED, ALREADY_FIRED, DROPPED
from timer.state.machine import Machine
from timer.state.successors import last_of
from timerclient.proto import timer_pb2 as pb

HORIZONS_MS: Final = tuple(
    1000 * seconds for seconds in (5, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000)
)
"""CountTimers counts the timers that are due within each of these times."""
QUERIES_MAX: Final = 2
"""Queries that run in threads at the same time."""
QUERIES_WAITING_MAX: Final = 64
"""Queries that run or wait, at most. A caller may have as many as it leaves free."""
LOOK_UPS_WAITING_MAX: Final = 512
"""Likewise of those for changes, each of a few timers."""
QUERIES_RETRY_MS: Final = 100
OVERDUE_ROWS_MAX: Final = 65_536
"""Overdue timers of each run that are searched for each topic's oldest, the oldest first."""

STATES: Final = {
    ALREADY_FIRED: pb.TIMER_STATE_FIRED,
    ALREADY_CANCELLED: pb.TIMER_STATE_CANCELLED,
    DROPPED: pb.TIMER_STATE_DROPPED,
}
_T = TypeVar("_T")


class TimerQueries:
    """Answers queries on the leader; see the module."""

    def __init__(
        self,
        host: Host,
        *,
        salt: int,
        key_bytes_max: int,
        threads: Executor | None = None,
        name: str = "queries",
        waiting_max: int = QUERIES_WAITING_MAX,
    ) -> None:
        """`threads`: None for threads of its own. `waiting_max`: queries that run or wait.

        `name`: of the queries, for errors and for the threads.
        """
        self._host = host
        self._salt = salt
        self._key_bytes_max = key_bytes_max
        self._threads = QueryThreads(host, threads or ThreadPoolExecutor(QUERIES_MAX, name))
        self._turns = CallerTurns(QUERIES_MAX)
        queue = f"the leader's queue of {name}"
        self.places = Places(queue, waiting_max, retry_ms=QUERIES_RETRY_MS)

    async def get(self, request: pb.GetTimerRequest) -> pb.GetTimerResponse:
        """Return one timer.

        Raises:
            InvalidRequestError: exactly one of id, and topic with key, must be given.
            NotFoundError: no pending timer has the key, or the id is unknown or forgotten.
        """
        target, whole = await self.read(self._target(self._host.require_lease(), request))
        machine = self._host.require_lease().machine
        if not target.seq[0]:
            raise NotFoundError("pending timer with key", request.key)
        if whole.rows["seq"][0]:
            topic = machine.topics[TopicId(int(whole.rows["topic"][0]))]
            caller = CALLER.get()
            where = AccessTarget(topic.name)
            if caller is not None and not caller.allows(where):
                raise caller.hidden("timer", timer_id.to_text(request.timer_id), where)
            timer = wire_timers.pending_of(whole, self._salt)
            return pb.GetTimerResponse(
                state=pb.TIMER_STATE_PENDING,
                topic=topic.name,
                timer=timer,
                held=bool(machine.ledger.is_past(whole.rows)[0]),
            )
        state = STATES.get(int(machine.outcomes_of(target)[0]))
        successor = b""
        if state in (None, pb.TIMER_STATE_CANCELLED):
            last = await self.visible_successors(await self.successors(machine, target.seq))
            if last.seq[0]:
                state = pb.TIMER_STATE_CANCELLED
                successor = timer_id.encode(last.due_ms, last.seq, self._salt)
        if state is None:
            raise NotFoundError("timer", timer_id.to_text(request.timer_id))
        if not successor:
            await self._check_ended(machine, target, timer_id.to_text(request.timer_id))
        return pb.GetTimerResponse(state=state, successor_id=successor)

    async def _check_ended(self, machine: Machine, timer: Ids, name: str) -> None:
        """Check that the caller may see how a timer ended.

        Raises:
            NotFoundError: its topic is not known, or not covered.
            OverloadedError: too many queries wait already.
        """
        caller = CALLER.get()
        if caller is None or caller.allows(CLUSTER):
            return
        topic = await topic_of_ended(machine, self._host.log, timer, self.in_thread)
        there = machine.topics.get(topic) if topic is not None else None
        if there is None:
            raise NotFoundError("timer", name)
        if not caller.allows(where := AccessTarget(there.name)):
            raise caller.hidden("timer", name, where)

    async def successors(self, machine: Machine, seq: U64) -> Ids:
        """Return the last timers known to go on for rescheduled ones, (n,); seq = 0: none.

        Raises:
            OverloadedError: too many queries wait already.
        """
        links = machine.successors.links
        if not links:
            return Ids(np.zeros(len(seq), np.int64), np.zeros(len(seq), np.uint64))
        return await self.in_thread(partial(last_of, links, seq))

    async def visible_successors(self, successors: Ids) -> Ids:
        """Return the successors (n,) that the caller may see; seq = 0 in place of the others.

        A caller with rules for some topics sees those that are pending in its topics.
        """
        caller = CALLER.get()
        if caller is None or caller.allows(CLUSTER):
            return successors
        machine = self._host.require_lease().machine
        topics = await self.topics(successors)
        mine = [
            int(topic) in machine.topics
            and caller.allows(AccessTarget(machine.topics[TopicId(int(topic))].name))
            for topic in topics
        ]
        return Ids(successors.due_ms, np.where(mine, successors.seq, np.uint64(0)))

    async def read(self, target: Targets) -> tuple[Ids, WholeRows]:
        """Return the timer's id and the timer; seq = 0: no pending timer has this key or id.

        A thread reads and verifies the parts of it in runs. The rest is a few reads on the loop.
        """
        async with self._prefetch(target) as store:
            if isinstance(target, Keys):
                rows = store.find_keys(target.topic, target.key)
                target = Ids(rows["due_ms"].astype(np.int64), rows["seq"].astype(np.uint64))
            return target, store.read(target.due_ms, target.seq, 0)[0]

    async def topics(self, ids: Ids) -> U32:
        """Return the topic ids (n,) of timers; 0: this timer is not pending."""
        async with self._prefetch(ids) as store:
            return store.topics(ids.due_ms, ids.seq)

    async def permission_mask(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which timers (n,) the caller may change, by their topics.

        True for timers that have ended: nothing changes them. False for ids of the future.
        """
        caller = CALLER.get()
        if caller is None or caller.allows(CLUSTER):
            return np.ones(len(ids), bool)
        machine = self._host.require_lease().machine
        known = ids.seq < machine.next_seq
        topics = await self.topics(ids)
        allowed = {
            int(topic): caller.allows(AccessTarget(machine.topics[TopicId(int(topic))].name))
            for topic in np.unique(topics)
            if int(topic) in machine.topics
        }
        mine = np.array([allowed.get(topic, True) for topic in topics.tolist()], bool)
        permitted: npt.NDArray[np.bool_] = known & mine
        return permitted

    @asynccontextmanager
    async def _prefetch(self, target: Targets) -> AsyncIterator[Store]:
        """Look timers up in the runs, in a thread; yield the store, whose reads then do not wait.

        Raises:
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        prefetch = self._host.require_lease().machine.store.prefetch_of(target)
        if prefetch is not None:
            async with self._turn():
                await self._threads.run(prefetch.read)
        store = self._host.require_lease().machine.store
        try:
            with store.using_prefetch(prefetch):
                yield store
        except StorageError as error:
            self._host.on_read_error(error)
            raise

    def _target(self, leader: Leader, request: pb.GetTimerRequest) -> Targets:
        if bool(request.timer_id) == bool(request.topic and request.key):
            limit = "either timer_id, or topic and key must be given"
            raise InvalidRequestError("timer_id, topic, key", "both or none", limit)
        if request.timer_id:
            due_ms, seq, genuine = wire_rows.timers_of(request.timer_id, 1, self._salt)
            if not genuine[0]:
                raise NotFoundError("timer", timer_id.to_text(request.timer_id))
            return Ids(due_ms, seq)
        topic = wire_rows.topic_of(leader.machine.topic_by_name, request.topic).topic_id
        return wire_timers.one_key(topic, request.key, self._key_bytes_max)

    async def list(self, request: pb.ListTimersRequest) -> pb.ListTimersResponse:
        """Return the next page of a filter's timers.

        Raises:
            InvalidRequestError: a field is out of its limits.
            NotFoundError: the topic does not exist.
        """
        size = request.page_size or wire_timers.PAGE_SIZE
        if size > wire_timers.PAGE_SIZE_MAX:
            limit = f"must be at most {wire_timers.PAGE_SIZE_MAX}"
            raise InvalidRequestError("page_size", size, limit)
        leader = self._host.require_lease()
        what = self.filter(leader, request.filter)
        seen = what.start
        if request.page_token:
            token = request.page_token
            seen, _ = wire_timers.read_page_token(token, request.filter, self._salt)
        page = await self.page(what, seen, size)
        timers = wire_timers.pending_of(page.timers, self._salt)
        answer = pb.ListTimersResponse(timers=timers, held=page.held_count)
        if page.next is not None:
            token = wire_timers.page_token(request.filter, page.next, SEQ_MAX, self._salt)
            answer.next_page_token = token
        return answer

    def filter(self, leader: Leader, what: pb.TimerFilter, seq_end: int = SEQ_MAX) -> Filter:
        """Return the checked form of a filter; see wire_timers.filter_of."""
        topics = leader.machine.topic_by_name
        return wire_timers.filter_of(what, topics, self._key_bytes_max, seq_end)

    async def page(
        self, what: Filter, seen: Position, rows_max: int, *, whole: bool = True
    ) -> ViewPage:
        """Return the next timers of a filter after `seen`; see ReadView.page."""
        return await self._with_view(lambda view: view.page(what, seen, rows_max, with_bytes=whole))

    async def count(self, request: pb.CountTimersRequest) -> pb.CountTimersResponse:
        """Return the number of a topic's pending timers, in all and by horizon; or of a filter's.

        Raises:
            InvalidRequestError: a field is out of its limits.
            NotFoundError: the topic does not exist.
        """
        leader = self._host.require_lease()
        if request.HasField("filter"):
            return await self._count_of(leader, request)
        if request.page_token:
            raise InvalidRequestError("page_token", HIDDEN, "allowed only with a filter")
        topic = wire_rows.topic_of(leader.machine.topic_by_name, request.topic).topic_id
        clock_ms = self._host.now().clock_ms
        until = [min(clock_ms + horizon, DUE_MS_MAX) for horizon in HORIZONS_MS]
        *within, pending = await self._with_view(
            lambda view: view.count(topic, [*until, DUE_MS_MAX])
        )
        return pb.CountTimersResponse(
            pending=pending, horizon_ms=HORIZONS_MS, within=within, clock_ms=clock_ms
        )

    async def _count_of(
        self, leader: Leader, request: pb.CountTimersRequest
    ) -> pb.CountTimersResponse:
        """Return the number of a filter's timers in the next part of its topic."""
        if request.topic:
            limit = "exactly one must be given"
            raise InvalidRequestError("topic, filter", "both", limit)
        clock_ms, token = self._host.now().clock_ms, b""
        what = self.filter(leader, request.filter)
        seen = what.start
        if request.page_token:
            seen, _ = wire_timers.read_page_token(request.page_token, request.filter, self._salt)
        count, following = await self._with_view(lambda view: view.tally(what, seen))
        if following is not None:
            token = wire_timers.page_token(request.filter, following, SEQ_MAX, self._salt)
        return pb.CountTimersResponse(pending=count, clock_ms=clock_ms, next_page_token=token)

    async def lag_ms(self, topic: TopicId) -> int:
        """Return the age of a topic's oldest overdue timer in ms; 0: none is overdue.

        Timers that a pause holds, or will hold, are not overdue.
        """
        clock_ms = self._host.now().clock_ms
        machine = self._host.require_lease().machine
        first = machine.store.next_due()
        there = machine.topics.get(topic)  # it may have been deleted meanwhile
        if first is None or first > clock_ms or there is None or there.is_holding:
            return 0
        what = Filter(topic=topic, due_from_ms=0, due_to_ms=clock_ms + 1)
        seen: Position | None = what.start
        while seen is not None:
            page = await self.page(what, seen, 1, whole=False)
            if len(page.timers.rows):
                return clock_ms - int(page.timers.rows["due_ms"][0])
            seen = page.next
        return 0

    async def late_topics(self) -> dict[TopicId, int]:
        """Return topic -> age of its oldest overdue timer in ms. Topics without one are absent.

        In a long backlog only the oldest timers on disk are searched. See `lag_ms`.
        """
        clock_ms = self._host.now().clock_ms
        first = self._host.require_lease().machine.store.next_due()
        if first is None or first > clock_ms:
            return {}
        found = await self._with_view(lambda view: view.first_overdue(clock_ms, OVERDUE_ROWS_MAX))
        topics = self._host.require_lease().machine.topics
        return {
            TopicId(topic): clock_ms - due_ms
            for topic, due_ms in found.items()
            if (there := topics.get(TopicId(topic))) is not None and not there.is_holding
        }

    async def _with_view(self, read: Callable[[ReadView], _T]) -> _T:
        """Return the result of `read` on a view, from a thread.

        Raises:
            NotReadyError: this node has no valid lease, or merges deleted files of each view.
            OverloadedError: too many queries wait already.
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        async with self._turn():
            return await self._threads.with_view(
                lambda: self._host.require_lease().machine.store, read
            )

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which needs no view, from a thread.

        Raises:
            OverloadedError: too many queries wait already.
            StorageError: this node's files are damaged; see Host.on_read_error.
        """
        async with self._turn():
            return await self._threads.run(work)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a free thread, in turn with other callers.

        Raises:
            OverloadedError: too many queries wait already, of all callers or of this one.
        """
        caller = caller_name()
        with self.places.hold(caller):
            async with self._turns.turn(caller):
                yield
