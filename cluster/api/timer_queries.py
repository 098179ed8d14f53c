"""Looking in: what the leader knows of pending timers, for people and programs.

    request --> lease held? --> cut, on the loop --> page or count, in a thread --> answer
    one timer ----------------> in memory? else a thread asks the runs for it ----> answer

Only a leader that certainly leads answers, from what it has applied: so what was answered before,
by any leader, is in it. The thread sees a cut, or runs, and nothing else; a firing never waits for
it: the threads are of this alone, also those whose caller has given up. Damage that is met ends the
process, whoever met it: it must not lead on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import numpy as np

from cluster.api import wire_rows, wire_timers
from cluster.state.host import Host
from timer.entries.payloads import Ids, Keys, Targets
from timer.leader.leader import Leader
from timer.model import timer_id
from timer.model.columns import U32, U64
from timer.model.firing_order import Position
from timer.model.timer_errors import (
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    StorageError,
)
from timer.model.timer_id import SEQ_MAX
from timer.model.units import DUE_MS_MAX, TopicId
from timer.pending.read_view import Cut, Filter, ViewPage
from timer.pending.runs.row_reader import Whole
from timer.pending.store import Store
from timer.state.apply_results import ALREADY_CANCELLED, ALREADY_FIRED, DROPPED
from timer.state.machine import Machine
from timer.state.successors import last_of
from timerclient.proto import timer_pb2 as pb

HORIZONS_MS: Final = tuple(
    1000 * seconds for seconds in (5, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000)
)
LOOKS_MAX: Final = 2
"""Cuts that threads look at, at a time."""
LOOKS_WAITING_MAX: Final = 64
CUTS_MAX: Final = 3
"""New cuts that are taken because a merge removed files of the last one."""

STATES: Final = {
    ALREADY_FIRED: pb.TIMER_FIRED,
    ALREADY_CANCELLED: pb.TIMER_CANCELLED,
    DROPPED: pb.TIMER_DROPPED,
}
_T = TypeVar("_T")


class LookingIn:
    """See the module."""

    def __init__(
        self, host: Host, *, salt: int, key_bytes_max: int, threads: Executor | None = None
    ) -> None:
        """`threads`: None: its own."""
        self._host = host
        self._salt = salt
        self._key_bytes_max = key_bytes_max
        self._threads = threads or ThreadPoolExecutor(LOOKS_MAX, "looking-in")
        self._turns = asyncio.Semaphore(LOOKS_MAX)
        self._waiting = 0

    async def get(self, request: pb.GetTimerRequest) -> pb.GetTimerResponse:
        """Return one timer.

        Raises:
            InvalidRequestError: neither an id nor topic and key are given, or both.
            NotFoundError: no pending timer has the key; the id is not known, or no more.
        """
        target, whole = await self.read(self._target(self._host.require_lease(), request))
        machine = self._host.require_lease().machine
        if not target.seq[0]:
            raise NotFoundError("pending timer with key", request.key)
        if whole.rows["seq"][0]:
            topic = machine.topics[TopicId(int(whole.rows["topic"][0]))]
            timer = wire_timers.pending_of(whole, self._salt)
            return pb.GetTimerResponse(
                state=pb.TIMER_PENDING,
                topic=topic.name,
                timer=timer,
                held=bool(machine.pauses.past(whole.rows)[0]),
            )
        state = STATES.get(int(machine.judge(target)[0]))
        successor = b""
        if state in (None, pb.TIMER_CANCELLED):
            last = await self.successors(machine, target.seq)
            if last.seq[0]:
                state = pb.TIMER_CANCELLED
                successor = timer_id.encode(last.due_ms, last.seq, self._salt)
        if state is None:
            raise NotFoundError("timer", timer_id.to_text(request.timer_id))
        return pb.GetTimerResponse(state=state, successor_id=successor)

    async def successors(self, machine: Machine, seq: U64) -> Ids:
        """Return the last timers known to go on for rescheduled ones, (n,); seq = 0: none.

        Raises:
            OverloadedError: too many look in already.
        """
        links = machine.successors.links
        if not links:
            return Ids(np.zeros(len(seq), np.int64), np.zeros(len(seq), np.uint64))
        return await self.in_turn(partial(last_of, links, seq))

    async def read(self, target: Targets) -> tuple[Ids, Whole]:
        """Return which timer that is, and all of it; seq = 0: no pending one has the key, or is it.

        What runs have of it is verified in a thread; then, on the loop, it is but a few reads.
        """
        async with self._asked(target) as store:
            if isinstance(target, Keys):
                rows = store.find_keys(target.topic, target.key)
                target = Ids(rows["due_ms"].astype(np.int64), rows["seq"].astype(np.uint64))
            return target, store.read(target.due_ms, target.seq, 0)[0]

    async def topics(self, ids: Ids) -> U32:
        """Return the topics of pending timers (n,); 0: it is not pending."""
        async with self._asked(ids) as store:
            return store.topics(ids.due_ms, ids.seq)

    @asynccontextmanager
    async def _asked(self, target: Targets) -> AsyncIterator[Store]:
        """Have a thread ask the runs for timers; give the store, which then needs not to wait."""
        prepared = self._host.require_lease().machine.store.begin_look(target)
        if prepared is not None:
            async with self._turn():
                await self._in_thread(prepared.read)
        store = self._host.require_lease().machine.store
        try:
            with store.looked_up(prepared):
                yield store
        except StorageError as error:
            self._host.fatal(error)
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
        topic = wire_timers.topic_of(leader.machine.topic_by_name, request.topic)
        return wire_timers.one_key(topic, request.key, self._key_bytes_max)

    async def list(self, request: pb.ListTimersRequest) -> pb.ListTimersResponse:
        """Return the next page of a filter's timers.

        Raises:
            InvalidRequestError: it names field, value and limit.
            NotFoundError: there is no such topic.
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
        answer = pb.ListTimersResponse(timers=wire_timers.pending_of(page.timers, self._salt))
        if page.next is not None:
            token = wire_timers.page_token(request.filter, page.next, SEQ_MAX, self._salt)
            answer.next_page_token = token
        return answer

    def filter(self, leader: Leader, what: pb.TimerFilter, seq_end: int = SEQ_MAX) -> Filter:
        """Return a filter, checked; see wire_timers.filter_of."""
        topics = leader.machine.topic_by_name
        return wire_timers.filter_of(what, topics, self._key_bytes_max, seq_end)

    async def page(
        self, what: Filter, seen: Position, rows_max: int, *, whole: bool = True
    ) -> ViewPage:
        """Return the next timers of a filter after `seen`; see Cut.page."""
        return await self._look(lambda cut: cut.page(what, seen, rows_max, whole=whole))

    async def count(self, request: pb.CountTimersRequest) -> pb.CountTimersResponse:
        """Return how many timers of a topic are pending.

        Raises:
            NotFoundError: there is no such topic.
        """
        leader = self._host.require_lease()
        topic = wire_timers.topic_of(leader.machine.topic_by_name, request.topic)
        clock_ms = self._host.now().clock_ms
        until = [min(clock_ms + horizon, DUE_MS_MAX) for horizon in HORIZONS_MS]
        *within, pending = await self._look(lambda cut: cut.count(topic, [*until, DUE_MS_MAX]))
        return pb.CountTimersResponse(
            pending=pending, horizon_ms=HORIZONS_MS, within=within, clock_ms=clock_ms
        )

    async def lag_ms(self, topic: TopicId) -> int:
        """Return the age of a topic's oldest overdue timer, however many are overdue; 0: none.

        What is held, or will be, is not late.
        """
        clock_ms = self._host.now().clock_ms
        machine = self._host.require_lease().machine
        first = machine.store.next_due()
        there = machine.topics.get(topic)  # it may have been deleted meanwhile
        if first is None or first > clock_ms or there is None or there.holding:
            return 0
        what = Filter(topic=topic, due_from_ms=0, due_to_ms=clock_ms + 1)
        seen: Position | None = what.start
        while seen is not None:
            page = await self.page(what, seen, 1, whole=False)
            if len(page.timers.rows):
                return clock_ms - int(page.timers.rows["due_ms"][0])
            seen = page.next
        return 0

    async def _look(self, look: Callable[[Cut], _T]) -> _T:
        """Return what a thread saw on a cut.

        Raises:
            NotReadyError: this node leads no more, or not certainly; or files went again and again.
            OverloadedError: too many look in already.
            StorageError: this node's files are damaged; the process ends.
        """
        async with self._turn():
            for _ in range(CUTS_MAX):
                cut = self._host.require_lease().machine.store.cut()
                with suppress(FileNotFoundError):
                    return await self._in_thread(partial(look, cut))
        raise NotReadyError("runs are merged faster than they are read")

    async def in_turn(self, work: Callable[[], _T]) -> _T:
        """Return what a thread makes of work that needs no cut.

        Raises:
            OverloadedError: too many look in already.
            StorageError: this node's files are damaged; the process ends.
        """
        async with self._turn():
            return await self._in_thread(work)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until a thread is free, with as many others as may wait."""
        if self._waiting >= LOOKS_WAITING_MAX:
            raise OverloadedError("the queue of those who look in", retry_after_ms=100)
        self._waiting += 1
        try:
            async with self._turns:
                yield
        finally:
            self._waiting -= 1

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()

        def run() -> _T:
            try:
                return work()
            except StorageError as error:  # told also if nobody waits for it any more
                loop.call_soon_threadsafe(self._host.fatal, error)
                raise

        return await loop.run_in_executor(self._threads, run)
