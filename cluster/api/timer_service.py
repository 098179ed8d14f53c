"""TimerService: passes requests to the leader, and returns the answers."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, TypeAlias

from cluster.api import row_messages, wire_rows
from cluster.api.owners import (
    CreationLimits,
    as_sent,
    check_producer_owner,
    owned_token,
    owns_producer,
)
from cluster.api.series_desk import SeriesDesk
from cluster.api.timer_changes import TimerChanges
from cluster.api.timer_queries import LOOK_UPS_WAITING_MAX, TimerQueries
from cluster.api.timer_stories import Stories
from cluster.api.wire_rows import AnyScheduling, RequestLimits
from cluster.rpc import grpc_errors
from cluster.rpc.handlers import (
    Context,
    RequestStream,
    Service,
    ServiceHooks,
    caller_of,
    stream_handler,
    turn_of,
    unary_handler,
    within,
)
from cluster.rpc.outboxes import ANSWER_BYTES, Outboxes, reader_of
from cluster.rpc.relay import error_for
from cluster.rpc.request_bounds import size_of
from cluster.rpc.rpc_caller import CALLER
from cluster.state.host import Host
from timer.leader.intake.quotas import NEW_TOPIC
from timer.leader.leader import Leader
from timer.model.columns import Part
from timer.model.timer_errors import (
    EngineError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    TopicDeletedError,
)
from timer.model.units import ProducerId, TopicId
from timer.ready.topic import Topic
from timer.state.apply_results import Accepted, DeleteTopicApplied, Repeated
from timer.state.producers import ANSWER_ROWS_MAX, ANSWERS_MAX, ID_BITS
from timerclient.proto import timer_pb2 as pb
from timerclient.proto import timer_pb2_grpc as rpc
from timerclient.values.same_fields import as_type

UNREAD_ANSWERS_MAX: Final = 1024
"""Unread answers of a stream. Above this its requests are not read; see _UnreadBytes, too."""
TOPICS_AT_ONCE: Final = 128
"""Topics of a request that are created or checked together: each takes some 50 µs of the loop."""


class TimerService(Service, rpc.TimerServiceServicer):
    """Schedules, changes and shows timers, on the leader."""

    def __init__(  # noqa: PLR0913 - settings and parts of a node
        self,
        host: Host,
        *,
        limits: RequestLimits,
        salt: int,
        auto_create_topics: bool,
        topic_name_bytes_max: int,
        threads: Executor | None,
        outboxes: Outboxes,
        hooks: ServiceHooks,
    ) -> None:
        """`threads` run queries; None: threads of its own. `outboxes` count unread bytes."""
        super().__init__(hooks)
        self._host, self._outboxes = host, outboxes
        self._limits = limits
        self._salt = salt
        self._auto_create_topics = auto_create_topics
        self._topic_name_bytes_max = topic_name_bytes_max
        key_bytes_max = limits.key_bytes_max
        self.creations = CreationLimits()
        queries = functools.partial(
            TimerQueries, host, salt=salt, key_bytes_max=key_bytes_max, threads=threads
        )
        self.queries = queries()
        self.stories = Stories(host, self.queries, salt=salt)
        self._series = SeriesDesk(host, self.topic, self.creations, limits, salt=salt)
        look_ups = queries(name="look-ups", waiting_max=LOOK_UPS_WAITING_MAX)
        self._changes = TimerChanges(
            host, self.queries, look_ups, salt=salt, key_bytes_max=key_bytes_max
        )

    @unary_handler
    async def RegisterProducer(  # noqa: N802
        self, request: pb.RegisterProducerRequest, context: Context
    ) -> pb.RegisterProducerResponse:
        """Issue a producer id; it is committed on return."""
        size = len(request.token)
        if not 1 <= size <= wire_rows.TOKEN_SIZE_MAX:
            limit = f"must have 1 to {wire_rows.TOKEN_SIZE_MAX} bytes"
            raise InvalidRequestError("token", f"{size} bytes", limit)
        leader, now = self._host.require_leader(), self._host.now()
        drawn = ProducerId(self._host.draw_id(ID_BITS) or 1)
        token = owned_token(request.token)
        register = functools.partial(self.creations.register, leader, token, drawn, now)
        producer_id = await within(self._host.ask(register), context)
        assert isinstance(producer_id, int)
        if not producer_id:
            raise NotReadyError("the random producer id is in use already; register again")
        return pb.RegisterProducerResponse(
            producer_id=producer_id, requests_kept=ANSWERS_MAX, rows_kept=ANSWER_ROWS_MAX
        )

    @unary_handler
    async def UnregisterProducer(  # noqa: N802
        self, request: pb.UnregisterProducerRequest, context: Context
    ) -> pb.UnregisterProducerResponse:
        """End a producer; committed on return."""
        leader, now = self._host.require_leader(), self._host.now()
        producer_id = ProducerId(request.producer_id)
        if owns_producer(leader, producer_id):
            work = self._host.ask(lambda done: leader.end_producer(producer_id, now, done))
            await within(work, context)
        return pb.UnregisterProducerResponse()

    @unary_handler
    async def Schedule(  # noqa: N802
        self, request: pb.ScheduleRequest, context: Context
    ) -> pb.ScheduleResponse:
        """Schedule timers; the answer comes when they are committed and applied."""
        future = await self._schedule(request, caller_of(context))
        return await within(future, context)

    @unary_handler
    async def ScheduleTimer(  # noqa: N802
        self, request: pb.ScheduleTimerRequest, context: Context
    ) -> pb.ScheduleTimerResponse:
        """Schedule one timer, given as a row."""
        refused: InvalidRequestError
        try:
            future = await self._schedule(row_messages.columns_of(request), caller_of(context))
            columns = await within(future, context)
        except InvalidRequestError as error:
            refused = row_messages.named_as_sent(error)
        else:
            answer = row_messages.row_answer(columns, self._salt)
            if request.conflict_is_error:
                row_messages.check_conflict(request.key, answer)
            return answer
        raise refused

    @stream_handler
    async def ScheduleStream(  # noqa: N802
        self, requests: AsyncIterator[pb.ScheduleStreamRequest], context: Context
    ) -> AsyncGenerator[pb.ScheduleStreamResponse, None]:
        """Schedule timers in the order of the stream; answer each request once."""
        unread: list[EngineError] = []
        answers: asyncio.Queue[tuple[float, _Answering] | None] = asyncio.Queue()
        room = asyncio.Semaphore(UNREAD_ANSWERS_MAX)
        backlog = _UnreadBytes(self._outboxes, context)
        whose = caller_of(context)

        async def read() -> None:
            try:
                async for request in RequestStream(requests, context, self.hooks.on_request):
                    began = time.perf_counter()
                    try:
                        future = await self._schedule_in_turn(request, context, whose)
                        future.add_done_callback(backlog.add)
                        answers.put_nowait((began, future))
                        del future
                    except EngineError as error:
                        refusal = self._refusal(request.request_no, error, context)
                        answers.put_nowait((began, refusal))
                    del request  # the client may read its answer much later
                    await room.acquire()
                    await backlog.wait_for_room()
            except EngineError as error:  # the stream is broken: no later request is readable
                unread.append(error)
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (waiting := await answers.get()) is not None:
                began, future = waiting
                answer = await _answer(future, context)
                code = grpc_errors.code_in(answer.error)
                self.hooks.on_answer("ScheduleStream", code, "no", time.perf_counter() - began)
                yield as_type(pb.ScheduleStreamResponse, answer)
                backlog.remove(future)
                room.release()
                del waiting, future, answer
            if unread:
                raise unread.pop()
        finally:
            reader.cancel()
            backlog.close()
            while not answers.empty():  # the client has gone
                left = answers.get_nowait()
                if left is not None and isinstance(left[1], asyncio.Future):
                    left[1].cancel()

    def _refusal(self, number: int, error: EngineError, context: Context) -> pb.ScheduleResponse:
        """Return the answer to a refused request, and clear the frames that the error passed."""
        error = error_for(context, error)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.hooks.on_error("ScheduleStream", error)
        return _error_response(number, error)

    async def _schedule_in_turn(
        self, request: AnyScheduling, context: Context, whose: str
    ) -> "asyncio.Future[pb.ScheduleResponse]":
        """See `_schedule`; each request of a stream is admitted, and waits for its turn first."""
        self.hooks.admit("ScheduleStream", size_of(request))
        queue, caller = self.hooks.queue, turn_of(context)
        weight = await queue.enter(caller, request)
        try:
            future = await self._schedule(request, whose)
        except BaseException:
            queue.leave(caller, weight)
            raise
        future.add_done_callback(lambda _: queue.leave(caller, weight))
        return future

    async def _schedule(
        self, request: AnyScheduling, whose: str
    ) -> "asyncio.Future[pb.ScheduleResponse]":
        """Pass a request to the leader; the future gets its answer, or an EngineError.

        Raises:
            EngineError: the request was refused and had no effect.
        """
        began_ns = time.monotonic_ns() if self._host.hops.on else 0
        leader = self._host.require_leader()
        caller = CALLER.get()
        if caller is not None and caller.rule.answers_each:
            caller.check(request)
        wire_rows.check_request(request, self._limits)
        check_producer_owner(leader, ProducerId(request.producer_id))
        try:
            return await self._pass_on(leader, request, whose, began_ns)
        except InvalidRequestError as error:
            refused = as_sent(error, request.request_id)
        raise refused

    async def _pass_on(
        self, leader: Leader, request: AnyScheduling, whose: str, began_ns: int
    ) -> "asyncio.Future[pb.ScheduleResponse]":
        """See `_schedule`; the request is checked. `began_ns`: 0: hops are not recorded."""
        topics = self._known_topics(leader, request)
        if topics is None and wire_rows.is_repeated(request, leader, self._host.now()):
            topics = {timers.topic: wire_rows.NO_TOPIC for timers in request.timers}
        elif topics is None:
            topics = await self._create_topics(leader, request, whose)
        future = _NumberedFuture(request.request_no)
        part = await self._part_of(leader, request, topics)

        def done(result: object) -> None:
            if future.done():
                return
            if isinstance(result, TopicDeletedError):
                result = TopicDeletedError(", ".join(topics))
            if isinstance(result, EngineError):
                future.set_exception(result)
                return
            assert isinstance(result, Accepted | Repeated)
            again = isinstance(result, Repeated)
            future.set_result(
                wire_rows.response_of(
                    request, part, result.answer, duplicate=again, salt=self._salt
                )
            )
            if began_ns:
                self._host.stamp_request(began_ns)

        leader.schedule(part, done, self._host.now(), whose)
        self._host.kick()
        return future

    async def _part_of(
        self, leader: Leader, request: AnyScheduling, topics: Mapping[str, TopicId]
    ) -> Part:
        """Return a request as columns. The loop serves others between portions of many topics."""
        now, policies = self._host.now(), leader.admission.policies
        pieces: list[wire_rows.CheckedColumns] = []
        for piece in wire_rows.pieces_of(request, topics, self._limits, leader, now):
            pieces.append(piece)
            if not len(pieces) % TOPICS_AT_ONCE:
                await asyncio.sleep(0)
        if leader.admission.policies is not policies:  # its entry is behind the new ones
            now = self._host.now()
            pieces = [*wire_rows.pieces_of(request, topics, self._limits, leader, now)]
        return wire_rows.part_of(request, topics, pieces, leader, now)

    def _known_topics(self, leader: Leader, request: AnyScheduling) -> dict[str, TopicId] | None:
        topics: dict[str, TopicId] = {}
        for timers in request.timers:
            topic = leader.topic_or_none(timers.topic)
            if topic is None:
                return None
            topics[timers.topic] = topic.topic_id
        return topics

    async def _create_topics(
        self, leader: Leader, request: AnyScheduling, whose: str
    ) -> dict[str, TopicId]:
        """Create the missing topics of a request, after all checks: a refused one has no effect."""
        names = [*dict.fromkeys(timers.topic for timers in request.timers)]
        if self._auto_create_topics:
            await self._check_new_topics(leader, request, names, whose)
        topics: list[Topic] = []
        while some := names[len(topics) : len(topics) + TOPICS_AT_ONCE]:
            topics += await asyncio.gather(*(self.topic(leader, name) for name in some))
        return {name: topic.topic_id for name, topic in zip(names, topics, strict=True)}

    async def _check_new_topics(
        self, leader: Leader, request: AnyScheduling, names: Sequence[str], whose: str
    ) -> None:
        """Check a request as if its missing topics existed, and that they may be created."""
        topics, new = dict[str, TopicId](), dict[TopicId, str]()
        for name in names:
            if (topic := leader.topic_or_none(name)) is not None:
                topics[name] = topic.topic_id
                continue
            wire_rows.check_name("topic", name, bytes_max=self._topic_name_bytes_max)
            topics[name] = stand_in = TopicId(NEW_TOPIC - len(new))
            new[stand_in] = name
        part = await self._part_of(leader, request, topics)
        leader.check(part, self._host.now(), whose, new)
        missing = [name for name in new.values() if leader.topic_or_none(name) is None]
        self.creations.check_topics(leader, missing)  # others may have created some meanwhile

    async def topic(self, leader: Leader, name: str, *, create: bool = False) -> Topic:
        """Return a topic. It is created if `create` or the node's settings allow that.

        Raises:
            NotFoundError: the topic does not exist, and auto_create_topics is off.
            NotReadyError: the same, while the topic is being deleted.
            InvalidRequestError: the name is too long for a new topic.
        """
        if not (create or self._auto_create_topics):
            return leader.find_topic(name)
        known = leader.topic_or_none(name)
        if known is not None:
            return known
        wire_rows.check_name("topic", name, bytes_max=self._topic_name_bytes_max)
        now = self._host.now()
        topic = await self._host.ask(lambda done: self.creations.topic(leader, name, now, done))
        assert isinstance(topic, Topic)
        return topic

    async def delete_topic(self, leader: Leader, name: str) -> DeleteTopicApplied:
        """Delete a topic; committed on return.

        Raises:
            NotFoundError: the topic does not exist.
        """
        topic_id = wire_rows.topic_of(leader.machine.topic_by_name, name).topic_id
        now = self._host.now()
        applied = await self._host.ask(lambda done: leader.delete_topic(topic_id, now, done))
        assert isinstance(applied, DeleteTopicApplied)
        if applied.topic is None:
            raise NotFoundError("topic", name)
        return applied

    @unary_handler
    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, context: Context
    ) -> pb.CancelResponse:
        """Cancel timers by id, key or filter."""
        return await self._changes.cancel(request, context)

    @unary_handler
    async def Reschedule(  # noqa: N802
        self, request: pb.RescheduleRequest, context: Context
    ) -> pb.RescheduleResponse:
        """Give timers another due time, by id, key or filter."""
        return await self._changes.reschedule(request, context)

    @unary_handler
    async def GetTimer(  # noqa: N802
        self, request: pb.GetTimerRequest, context: Context
    ) -> pb.GetTimerResponse:
        """Return one timer."""
        del context
        return await self.queries.get(request)

    @unary_handler
    async def ListTimers(  # noqa: N802
        self, request: pb.ListTimersRequest, context: Context
    ) -> pb.ListTimersResponse:
        """Return a page of pending timers."""
        del context
        return await self.queries.list(request)

    @unary_handler
    async def CountTimers(  # noqa: N802
        self, request: pb.CountTimersRequest, context: Context
    ) -> pb.CountTimersResponse:
        """Return the number of pending timers."""
        del context
        return await self.queries.count(request)

    @unary_handler
    async def CreateSeries(  # noqa: N802
        self, request: pb.CreateSeriesRequest, context: Context
    ) -> pb.CreateSeriesResponse:
        """Create a series; it is committed on return."""
        return await within(self._series.create(request), context)

    @unary_handler
    async def AlterSeries(  # noqa: N802
        self, request: pb.AlterSeriesRequest, context: Context
    ) -> pb.AlterSeriesResponse:
        """Change a series; committed on return."""
        return await within(self._series.alter(request), context)

    @unary_handler
    async def DeleteSeries(  # noqa: N802
        self, request: pb.DeleteSeriesRequest, context: Context
    ) -> pb.DeleteSeriesResponse:
        """Delete a series; committed on return."""
        return await within(self._series.delete(request), context)

    @unary_handler
    async def GetSeries(  # noqa: N802
        self, request: pb.GetSeriesRequest, context: Context
    ) -> pb.GetSeriesResponse:
        """Return one series."""
        del context
        return await self._series.get(request)

    @unary_handler
    async def ListSeries(  # noqa: N802
        self, request: pb.ListSeriesRequest, context: Context
    ) -> pb.ListSeriesResponse:
        """Return a page of series."""
        del context
        return await self._series.list(request)

    @stream_handler
    async def TellStory(  # noqa: N802
        self, request: pb.TellStoryRequest, context: Context
    ) -> AsyncGenerator[pb.TellStoryResponse, None]:
        """Return the events of one timer, while they are read."""
        del context
        async for answer in self.stories.tell(request):
            yield answer


_Answering: TypeAlias = asyncio.Future[pb.ScheduleResponse] | pb.ScheduleResponse


class _UnreadBytes:
    """The bytes of a stream's answers that its producer has not read; see Outboxes.most."""

    def __init__(self, outboxes: Outboxes, context: Context) -> None:
        self._outboxes, self._peer = outboxes, context.peer()
        self._caller = reader_of(self._peer)
        self._size, self._open = 0, True
        self._changed = asyncio.Event()

    def add(self, future: _Answering) -> None:
        """Add an answer, which is ready."""
        self._count(_size_of(future))

    def remove(self, future: _Answering) -> None:
        """Remove an answer that was read."""
        self._count(-_size_of(future))

    def close(self) -> None:
        """Remove all answers, and count no further ones."""
        self._count(-self._size)
        self._open = False

    def _count(self, size: int) -> None:
        if self._open and size:
            self._size += size
            self._outboxes.add(self._peer, self._caller, size)
            self._changed.set()

    async def wait_for_room(self) -> None:
        """Wait until the stream may hold the bytes that it holds."""
        while self._size > self._outboxes.most(self._caller):
            self._changed.clear()
            await self._changed.wait()


def _size_of(future: _Answering) -> int:
    """Return the bytes of an answer; 0: it is an error, or not worth a count."""
    if not isinstance(future, asyncio.Future) or future.cancelled() or future.exception():
        return 0
    size = future.result().ByteSize()
    return size if size >= ANSWER_BYTES else 0


class _NumberedFuture(asyncio.Future[pb.ScheduleResponse]):
    """The future answer to the request with this number."""

    def __init__(self, request_no: int) -> None:
        super().__init__()
        self.request_no = request_no


async def _answer(future: _Answering, context: Context) -> pb.ScheduleResponse:
    if not isinstance(future, asyncio.Future):
        return future
    try:
        return await future
    except EngineError as error:
        assert isinstance(future, _NumberedFuture)
        return _error_response(future.request_no, error_for(context, error))


def _error_response(request_no: int, error: EngineError) -> pb.ScheduleResponse:
    return pb.ScheduleResponse(request_no=request_no, error=grpc_errors.to_wire(error))
