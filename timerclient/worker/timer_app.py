"""Handlers of timers as functions of an application.

    app = TimerApp("timers://10.0.0.1:7401,10.0.0.2:7401")

    @app.timer("orders", group="billing", retry=Backoff(30, max=3600, attempts=8))
    async def cancel_unpaid(order_id: int) -> None: ...

    await cancel_unpaid.schedule(order_id=4711, delay=timedelta(minutes=30), key="order-4711")

A timer's payload is an object with the arguments, by default as JSON. `timerctl worker myapp:app`
runs the handlers. A handler runs *at least once* for each timer: again after an exception, after
the loss of a lease, and if its worker ends before the ack is committed. Make it idempotent;
`app.context.id` is the same in each attempt. `app.push` sends messages to a URL in place of a
function.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any, Final, Generic, Never, ParamSpec, TypeVar, Unpack, cast

from timerclient.client.aio import AsyncTimerClient, ClientOptions
from timerclient.client.consumers import make_opening
from timerclient.client.group_calls import Start
from timerclient.client.timer_calls import Seconds
from timerclient.client.timer_client import TimerClient
from timerclient.rows import rows
from timerclient.rows.messages import Message
from timerclient.rows.rows import NewTimer
from timerclient.rows.scheduled_timers import Timer
from timerclient.rows.series_fields import Series, SeriesConflict, SeriesOptions
from timerclient.values.cluster_url import VARIABLE
from timerclient.values.codecs import JSON, BytesCodec, Codec, EncodedValue
from timerclient.values.errors import Closed, Described, InvalidRequest
from timerclient.values.lease_clock import BOOT_CLOCK, LeaseClock
from timerclient.worker.handler_arguments import (
    OPTIONS,
    HandlerArguments,
    NewTimerOptions,
    ScheduleOptions,
)
from timerclient.worker.http_target import HttpTarget
from timerclient.worker.retry_policy import Backoff
from timerclient.worker.target_brake import TargetBrake

P = ParamSpec("P")
R = TypeVar("R")

CONCURRENCY: Final = 16
CONCURRENCY_MAX: Final = 10_000
HOLD_S: Final = 600.0
"""Least `hold_max` of a push, in seconds."""
HOLD_MARGIN_S: Final = 60.0
"""Seconds by which it exceeds the time of one request."""


@dataclass(frozen=True, slots=True)
class TimerContext:
    """The delivery that a handler works on."""

    message: Message
    group: str
    clock: LeaseClock = BOOT_CLOCK
    """The clock of the message's lease."""

    @property
    def id(self) -> str:
        """The timer's id, the same in each attempt: a key for idempotence."""
        return self.message.id

    @property
    def attempt(self) -> int:
        """How often the message may have been delivered; 1: this is the first time."""
        return self.message.attempt

    @property
    def failures(self) -> int:
        """Nacks and ended leases of the message so far; the group's `attempts` limit these."""
        return self.message.failures

    @property
    def is_lost(self) -> bool:
        """The lease may have ended: another worker may have the message, and an ack come too late.

        The message may also be a dead letter by now, or have expired.
        """
        message = self.message
        return message.batch.hold.may_have_ended(message.queue_offset, self.clock.now_s())


CONTEXT: Final[ContextVar[TimerContext]] = ContextVar("timer_context")


OnHandlerError = Callable[[TimerContext, BaseException], object]
"""Called on the worker's event loop; it must not block."""


@dataclass(frozen=True, eq=False, slots=True)
class AppConnection:
    """The cluster of an app: URL or addresses, the options of the clients, and the clients.

    No lock is held while a client is made: a signal handler may meanwhile wait for the clients'
    own thread, and that thread for the lock. The first client that is noted counts.
    """

    cluster: str | None
    options: Mapping[str, Any]
    clients: dict[asyncio.AbstractEventLoop, AsyncTimerClient] = field(default_factory=dict)
    thread_clients: dict[int, TimerClient] = field(default_factory=dict)
    """Process id -> the client of its threads."""
    workers: Counter[asyncio.AbstractEventLoop] = field(default_factory=Counter)
    """Workers that run on an event loop. The last one closes the client of the loop."""

    def url(self) -> str | None:
        """Return the URL of the cluster. None: neither the app nor $TIMERS_URL has one."""
        return self.cluster or os.environ.get(VARIABLE)


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """The options of one handler; see `TimerApp.timer`."""

    topic: str
    group: str
    concurrency: int
    retry: Backoff | None
    lease: float | timedelta | None
    hold_max: float | timedelta | None
    start: Start

    @property
    def place(self) -> tuple[str, str]:
        """The topic and the group; two handlers with the same would share the messages."""
        return self.topic.removeprefix("default/"), self.group

    def __post_init__(self) -> None:
        rows.name("topic", self.topic, rows.TOPIC_NAME)
        rows.name("group", self.group, rows.GROUP_NAME)
        rows.whole_number("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        make_opening(self.topic, self.group, self.lease, self.start, "")  # it checks these
        if self.hold_max is not None:
            rows.span_ms("hold_max", self.hold_max)
        if not isinstance(self.retry, Backoff | None):
            raise InvalidRequest.of("retry", self.retry, "must be a Backoff or None")


@dataclass(frozen=True, slots=True)
class BoundHandler:
    """A handler with the arguments of one call; see `TimerHandler.bind`."""

    handler: "TimerHandler[..., Any]"
    payload: EncodedValue

    async def schedule(self, **options: Unpack[ScheduleOptions]) -> Timer:
        """Schedule a timer for this call, on an event loop; as `AsyncTimerClient.schedule`."""
        handler = self.handler
        return await handler.app.client.schedule(handler.options.topic, self.payload, **options)

    def schedule_sync(self, **options: Unpack[ScheduleOptions]) -> Timer:
        """Schedule a timer for this call from a thread; otherwise as `schedule`."""
        handler = self.handler
        return handler.app.thread_client.schedule(handler.options.topic, self.payload, **options)

    def new_timer(self, **options: Unpack[NewTimerOptions]) -> NewTimer:
        """Return a timer for this call, for `schedule_all` of the client."""
        return NewTimer(self.handler.options.topic, self.payload, **options)


class TimerHandler(Generic[P, R]):
    """A function that handles the timers of a topic. A call of it runs the function as it is."""

    brake: TargetBrake | None = None
    """Reduces the messages that run while a target is unavailable. None: there is no target."""
    logs_place = True
    """Whether the log has the line of the program that failed."""

    def __init__(self, app: "TimerApp", function: Callable[P, R], options: HandlerOptions) -> None:
        self.app = app
        self.function = function
        self.name: str = getattr(function, "__qualname__", repr(function))
        self.options = options
        self.is_async = iscoroutinefunction(function)
        self.arguments = HandlerArguments(function, self.name)
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, without a timer."""
        return self.function(*args, **kwargs)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundHandler:
        """Return the handler with the arguments of one call, to be scheduled.

        They are encoded here: later changes of a list or dict do not change the timer.
        Type checkers check them by the function's parameters.

        Raises:
            InvalidRequest: An argument is missing, unknown or of another type.
        """
        return self._bound(self.arguments.by_name(args, kwargs))

    def _bound(self, arguments: Mapping[str, Any]) -> BoundHandler:
        return BoundHandler(self, self._payload(arguments))

    async def schedule(self, *args: Never, **given: Any) -> Timer:
        """Schedule a timer for this handler, with its arguments by name; on an event loop.

        Type checkers do not check them: see `bind`.
        The options are those of `AsyncTimerClient.schedule`: delay, delay_level, due or due_ms;
        key, on_conflict, headers, ordering_key, priority, request_id and timeout.

        Raises:
            InvalidRequest: An argument is missing, unknown or of another type, or an option
                exceeds a limit.
            TimerError: As `AsyncTimerClient.schedule`.
        """
        options = _options_from(args, given)
        return await self._bound(given).schedule(**options)

    def schedule_sync(self, *args: Never, **given: Any) -> Timer:
        """Schedule a timer for this handler from a thread; otherwise as `schedule`."""
        options = _options_from(args, given)
        return self._bound(given).schedule_sync(**options)

    def _payload(self, arguments: Mapping[str, Any]) -> EncodedValue:
        given = dict(arguments)
        self.arguments.check(given)
        codec = self.app.codec
        value = EncodedValue(given, codec, "arguments")
        try:
            decoded = value.of_payload(payload := value.payload())
        except InvalidRequest as error:
            raise self._with_argument(error, given) from error
        self.arguments.check(decoded, codec.content_type)
        return EncodedValue(payload, BytesCodec(codec.content_type), "arguments")

    def _with_argument(self, error: InvalidRequest, given: dict[str, Any]) -> InvalidRequest:
        """Return the error of the first argument that has no form; without any, the one given."""
        for name, value in given.items():
            alone = EncodedValue({name: value}, self.app.codec)
            try:
                alone.of_payload(alone.payload())
            except InvalidRequest as own:
                return InvalidRequest.of(name, Described(type(value).__name__), own.limit)
        return error

    async def create_series(
        self,
        key: str,
        arguments: Mapping[str, Any],
        *,
        on_conflict: SeriesConflict = "reject",
        timeout: Seconds | None = None,  # noqa: ASYNC109
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Create a series of recurring timers for this handler; on an event loop.

        Args:
            key: One series of the handler's topic has it.
            arguments: The handler's arguments in each occurrence, by name.
            on_conflict: "alter" gives this definition to a series of another one that has the key.
            options: `every=` or `cron=`, and others: see SeriesOptions.

        Raises:
            InvalidRequest: An argument is missing, unknown or of another type, or an option
                exceeds a limit.
            TimerError: As `AsyncTimerClient.create_series`.
        """
        payload = self._payload(arguments)
        return await self.app.client.create_series(
            self.options.topic, key, payload, on_conflict=on_conflict, timeout=timeout, **options
        )

    def create_series_sync(
        self,
        key: str,
        arguments: Mapping[str, Any],
        *,
        on_conflict: SeriesConflict = "reject",
        timeout: Seconds | None = None,
        **options: Unpack[SeriesOptions],
    ) -> Series:
        """Create a series for this handler from a thread; otherwise as `create_series`."""
        payload = self._payload(arguments)
        return self.app.thread_client.create_series(
            self.options.topic, key, payload, on_conflict=on_conflict, timeout=timeout, **options
        )

    def arguments_of(self, message: Message) -> dict[str, Any]:
        """Return the arguments that a message has.

        Raises:
            UndecodablePayload: The payload is not of the app's codec.
            InvalidRequest: The arguments do not fit the function.
        """
        return self.arguments.check(message.decode(self.app.codec))

    async def close(self) -> None:
        """Release the resources of the calls, at the end of a worker."""

    def __repr__(self) -> str:
        return f"TimerHandler({self.name}, {self.options.topic!r}, {self.options.group!r})"


def _options_from(args: tuple[Never, ...], given: dict[str, Any]) -> ScheduleOptions:
    """Remove the options of `schedule` from the arguments of a call, and return them.

    Raises:
        InvalidRequest: An argument has no name.
    """
    if args:
        limit = "give them by name, or call `bind(…).schedule(…)`"
        raise InvalidRequest.of("arguments", None, limit)
    taken = {name: given.pop(name) for name in OPTIONS if name in given}
    return cast("ScheduleOptions", taken)


class PushHandler(TimerHandler[[Message], Coroutine[Any, Any, None]]):
    """A handler that sends each message to a URL; see `TimerApp.push`."""

    logs_place = False

    def __init__(self, app: "TimerApp", target: HttpTarget, options: HandlerOptions) -> None:
        super().__init__(app, target.post, options)
        self.name = target.name
        self.brake = target.brake
        self._target = target

    def arguments_of(self, message: Message) -> dict[str, Any]:
        """Return the message: its payload may be any bytes."""
        return {"message": message}

    async def close(self) -> None:
        """Close the connections to the URL."""
        await self._target.close()


class TimerApp:
    """The handlers of an application, and its clients of one cluster.

    A client is made when it is first used: one for each event loop, one for all threads of a
    process.

    Args:
        url: timers://HOST:PORT,… or timers+tls://…. None: $TIMERS_URL when a client is made.
        codec: Of the arguments; it must encode a dict. All processes need the same.
        on_error: Called in a worker with each error of a handler; all are also logged.
        send_errors: Dead letters have the text of the last exception. False: only its type, because
            texts may have secrets. The text of a `Reject` is always sent.
        options: Further options of the clients, such as `timeout` or `on_event`.

    Raises:
        TypeError: The clients have no such option.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        codec: Codec = JSON,
        on_error: OnHandlerError | None = None,
        send_errors: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        if unknown := options.keys() - ClientOptions.__annotations__.keys():
            known = ", ".join(ClientOptions.__annotations__)
            raise TypeError(f"unexpected option {min(unknown)!r}: the clients have {known}")
        self.connection = AppConnection(url, options)
        self.codec = codec
        self.on_error = on_error
        self.send_errors = send_errors
        self.handlers: list[TimerHandler[..., Any]] = []

    def __repr__(self) -> str:
        return f"TimerApp({self.url()!r}, handlers={[each.name for each in self.handlers]})"

    # ---- handlers

    def timer(  # noqa: PLR0913 -- options, by keyword
        self,
        topic: str,
        *,
        group: str,
        concurrency: int = CONCURRENCY,
        retry: Backoff | None = Backoff(),  # noqa: B008 -- frozen
        lease: float | timedelta | None = None,
        hold_max: float | timedelta | None = None,
        start: Start = "earliest",
    ) -> Callable[[Callable[P, R]], TimerHandler[P, R]]:
        """Return a decorator that makes a function the handler of a topic.

        Each group of a topic receives all of its messages. A function that is not `async` runs in
        a thread.

        Args:
            topic: Of the timers.
            group: The group of consumers that all workers of this handler form.
            concurrency: Calls at a time in one worker, 1 to 10,000. In an ordered group, one at a
                time for each ordering key, or in all.
            retry: Pauses and number of attempts, set in the group when a worker starts. None: the
                group keeps its own.
            lease: As for a consumer. The worker renews leases while a handler runs.
            hold_max: Longest time of a call, in which its lease is renewed. An `async` function is
                then cancelled, which is a failure. A function in a thread runs on, and the
                message is delivered again when its lease ends. None: the clients' `hold_s_max`,
                ten minutes.
            start: First message of a group that the worker creates.

        Raises:
            InvalidRequest: An option is out of range, another handler has the topic and the group,
                a parameter of the function can't be given by name, or JSON, as the app's codec,
                has no value for a parameter without a default.
        """
        options = HandlerOptions(
            topic=topic,
            group=group,
            concurrency=concurrency,
            retry=retry,
            lease=lease,
            hold_max=hold_max,
            start=start,
        )

        def register(function: Callable[P, R]) -> TimerHandler[P, R]:
            handler = TimerHandler(self, function, options)
            if self.codec is JSON:
                handler.arguments.check_json()
            self._add(handler)
            return handler

        return register

    def push(
        self,
        topic: str,
        *,
        group: str,
        to: HttpTarget,
        concurrency: int = CONCURRENCY,
        retry: Backoff | None = Backoff(),  # noqa: B008 -- frozen
        start: Start = "earliest",
    ) -> None:
        """Send the messages of a topic to a URL; a worker runs this as it runs the handlers.

        docs/push.md describes the requests, and the meaning of the answers.

        Args:
            topic: Of the timers. Payloads may be any bytes.
            group: The group of consumers that all workers with this push form.
            to: The URL, with the headers and secrets of the requests.
            concurrency: Requests at a time in one worker, 1 to 10,000.
            retry: As for `timer`.
            start: First message of a group that the worker creates.

        Raises:
            InvalidRequest: An option is out of range, or a handler has the topic and the group.
        """
        options = HandlerOptions(
            topic=topic,
            group=group,
            concurrency=concurrency,
            retry=retry,
            lease=None,
            hold_max=max(HOLD_S, to.timeout_s + HOLD_MARGIN_S),
            start=start,
        )
        self._add(PushHandler(self, to, options))

    def _add(self, handler: TimerHandler[..., Any]) -> None:
        of = handler.options
        for other in self.handlers:
            if other.options.place == of.place:
                limit = f"handler {other.name} already runs it for the topic {of.topic!r}"
                raise InvalidRequest.of("group", of.group, limit)
        self.handlers.append(handler)

    @property
    def context(self) -> TimerContext:
        """The delivery that the calling handler works on.

        Raises:
            RuntimeError: No handler that a worker runs is the caller.
        """
        try:
            return CONTEXT.get()
        except LookupError:
            raise RuntimeError("app.context is for a handler that a worker runs") from None

    # ---- clients

    def url(self) -> str | None:
        """Return the URL of the cluster. None: neither the app nor $TIMERS_URL has one."""
        return self.connection.url()

    def connect(self, to: AppConnection) -> AppConnection:
        """Use another cluster and its clients; return the former one, which keeps its clients.

        `timerctl worker --endpoints` and the fixtures of `timerfake` do so.
        """
        former, self.connection = self.connection, to
        return former

    @property
    def client(self) -> AsyncTimerClient:
        """The client of the running event loop.

        Raises:
            InvalidRequest: There is no URL, or it is wrong.
            RuntimeError: No event loop runs here.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            msg = "app.client is for code on an event loop; in other threads use app.thread_client"
            raise RuntimeError(msg) from None
        connection = self.connection
        if (found := connection.clients.get(loop)) is None:
            self._abandon_ended_clients()
            made = AsyncTimerClient(connection.url() or None, **connection.options)
            found = connection.clients.setdefault(loop, made)
        return found

    def _abandon_ended_clients(self) -> None:
        """Forget the clients of event loops that have ended, and close their connections."""
        clients = self.connection.clients
        for loop, client in list(clients.items()):  # others may do so meanwhile
            if not loop.is_closed():
                continue
            with contextlib.suppress(Closed):
                nodes = client.nodes()
                if nodes.pid != os.getpid():  # the parent's: see check_not_forked
                    continue
                nodes.abandon()
            clients.pop(loop, None)

    @property
    def thread_client(self) -> TimerClient:
        """The client of all threads of this process; as `client`."""
        pid, connection = os.getpid(), self.connection
        if (found := connection.thread_clients.get(pid)) is None:
            made = TimerClient(connection.url() or None, **connection.options)
            found = connection.thread_clients.setdefault(pid, made)
        return found

    async def close(self) -> None:
        """Close the client of the running event loop."""
        client = self.connection.clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def close_sync(self, timeout: Seconds | None = None) -> None:
        """Close the client of this process's threads, as `TimerClient.close`."""
        client = self.connection.thread_clients.pop(os.getpid(), None)
        if client is not None:
            client.close(timeout)
