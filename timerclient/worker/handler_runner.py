"""One handler in a worker: fetches messages, runs the function, and acks or returns each.

    fetch ──► arguments ──► function ──► returned: ack, unless it has nacked the message
                  │             ├──────► raised: nack with the backoff, one line of log
                  │             ├──────► raised Reject: a dead letter, then the ack
                  │             ├──────► raised TargetUnreached: back to the group, not failed
                  │             ├──────► runs for longer than `hold_max`: cancelled, nack with the
                  │             │        backoff; in a thread it runs on, and keeps its place
                  │             └──────► cut off by the drain: back to the group, not failed
                  └──► no arguments of the function: nack with the backoff

The consumer reconnects through failovers and renews the leases. If a lease ends while the function
runs, the ack fails with a warning, and the message is delivered again. A cancellation that is not
the worker's own is a failure as any exception.

In ordered groups the calls keep the order: one call at a time for each ordering key, or one in all
if the whole group is ordered. Messages that wait for their key are in the consumer's inbox, which
renews, drops and returns them as others.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from timerclient.client.consumers import AsyncConsumer, hold_max_s
from timerclient.client.group_calls import GroupOptions, encode_options
from timerclient.client.tracing import Tracing
from timerclient.proto import timer_pb2 as pb
from timerclient.rows.messages import Message
from timerclient.values.codecs import reason_of
from timerclient.values.errors import LeaseLost, NotFound, PermissionDenied, TimerError
from timerclient.values.lease_clock import BOOT_CLOCK, ClockAlarm, LeaseClock
from timerclient.worker.rejected_letters import (
    failure_text,
    first_failure,
    letters_topic,
    write_letter,
)
from timerclient.worker.retry_policy import Backoff, Reject, Retry, RetryAfter
from timerclient.worker.target_brake import TargetUnreached
from timerclient.worker.timer_app import CONTEXT, TimerContext, TimerHandler
from timerclient.worker.worker_metrics import HandlerMetrics, Outcome

LOG: Final = logging.getLogger("timerclient.worker")
PAUSE_S: Final = 1.0
"""First pause before a consumer that ended with an error is opened again. It doubles each time."""
PAUSE_S_MAX: Final = 30.0
"""Longest pause before a consumer that ended with an error is opened again."""
HOLD_S_MAX: Final = 3_650 * 86_400.0
"""Longest time of a call in seconds, in place of an endless `hold_max`."""
NACK_S: Final = 2.0
"""Seconds for which leases are renewed beyond `hold_max`: the nack of a handler that is cancelled
then comes before the end of its lease. A call for which no lease is renewed ends so long before the
lease, or a quarter of the lease before if that is less."""
PLAIN: Final = re.compile("[!#-&(-~]+")
"""Printable ASCII without spaces and quotes."""
DEFAULT_BACKOFF: Final = Backoff(1, max=60, attempts=0)
"""Pauses for a group without a backoff: what always fails must not loop at full speed."""


@dataclass(slots=True, eq=False)
class HandlerRun:
    """One call of a handler, for one message."""

    message: Message
    began_s: float
    """On the clock of leases."""
    lease_s: float
    """What was left of the lease then."""
    cancel_cause: Outcome | None = None
    """TIMEOUT or INTERRUPTED: why the worker has cancelled the call. None: it has not."""
    error: BaseException | None = None
    """The end of the call, for its trace. None: it returned."""
    in_thread: bool = False
    """The function runs in a thread, where it can't be cancelled."""
    is_overdue: bool = False
    """The call runs for longer than `hold_max`."""
    alarm: ClockAlarm | None = None
    """Rings when the time of the call is up."""


class HandlerRunner:
    """Runs one handler on the running event loop; functions that are not async on `executor`."""

    def __init__(
        self, handler: TimerHandler[..., Any], executor: Executor, concurrency: int | None
    ) -> None:
        self.handler = handler
        self.metrics = HandlerMetrics(handler.options.topic, handler.options.group)
        self.running: dict[asyncio.Task[None], HandlerRun] = {}
        self.ended_count = 0
        """Handlers that have ended."""
        self._executor = executor
        self._concurrency = concurrency or handler.options.concurrency
        self._hold_s = 0.0
        """Longest time of a call in seconds. 0: the lease alone."""
        self._clock: LeaseClock = BOOT_CLOCK
        self._tracing: Tracing | None = None
        self._call_ended = asyncio.Event()
        """Set when a handler ends."""
        self._consumer: AsyncConsumer | None = None
        self._was_open = False
        """A consumer was open: a group that no longer exists was deleted."""
        self._backoff = DEFAULT_BACKOFF
        """Pauses of the group, or of this worker."""
        self._is_pacing = True
        """The worker gives the pauses: the group has none, or could not be set, or is not known."""
        self._denial = ""
        """Reason for which the group could not be set, as logged. Empty: it was set."""
        self._letters_topic = ""
        """Topic of the dead letters."""
        self._attempts_max = 0
        """Failures of a message in the group at most. 0: no limit, or not known."""

    @property
    def concurrency(self) -> int:
        """Calls at a time: one in a group that is ordered as a whole."""
        consumer = self._consumer
        return 1 if consumer is not None and consumer.is_ordered_as_a_whole else self._concurrency

    # ---- fetching

    async def fetch(self) -> None:
        """Run handlers until cancelled; open the consumer again after an error.

        Raises:
            TimerError: The first attempt to open it was rejected for good.
            NotFound: Its group or topic was deleted later.
        """
        pause_s = PAUSE_S
        while True:
            try:
                await self._open()
                pause_s, self._was_open = PAUSE_S, True
                await self._run_messages()
            except TimerError as error:
                if not self._was_open:
                    if not error.retryable:
                        raise
                elif isinstance(error, NotFound):
                    topic, group = self.handler.options.place
                    text = f"the next start of the worker creates {group!r} of {topic!r} again"
                    raise NotFound(f"{error}; {text}") from error
                self._log(logging.WARNING, "consumer ended", error=reason_of(error))
            finally:
                self.metrics.is_connected = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _open(self) -> None:
        if not self._was_open:
            await self._prepare_group()
        await self.close()
        options, client = self.handler.options, self.handler.app.client
        self._clock, self._tracing = client.nodes().clock, client.tracing
        self._hold_s = min(hold_max_s(options.hold_max, client.settings), HOLD_S_MAX)
        consumer = client.consumer(
            options.topic,
            options.group,
            lease=options.lease,
            hold_max=self._hold_s and self._hold_s + NACK_S,
            start=options.start,
            name=self.handler.name,
        )
        if self._was_open:
            consumer.require_group()
            self._is_pacing = True  # it may be another group of that name, without a backoff
        await consumer.__aenter__()  # `close` leaves it, after the handlers have ended
        consumer.take_turns(run.message for run in self.running.values())
        self._consumer = consumer
        self.metrics.is_connected = True

    async def _prepare_group(self) -> None:
        """Create the group if it does not exist, and give it the handler's settings."""
        options, client = self.handler.options, self.handler.app.client
        wanted: GroupOptions = {}
        if options.retry is not None:
            wanted |= options.retry.settings()
        if options.lease is not None:
            wanted["lease"] = options.lease
        self._letters_topic = letters_topic(options.topic, options.group, "")
        try:
            status = await client.create_group(
                options.topic, options.group, start=options.start, **wanted
            )
            changed = [
                f"{field.name}: {old}->{value}"
                for field, value in encode_options(wanted).ListFields()
                if (old := getattr(status.settings, field.name)) != value
            ]
            if changed:
                status = await client.alter_group(options.topic, options.group, **wanted)
                text = "settings of the group replaced by the handler's"
                self._log(logging.WARNING, text, settings=", ".join(changed))
        except PermissionDenied as error:
            self._backoff, self._is_pacing = options.retry or DEFAULT_BACKOFF, True
            if (reason := reason_of(error)) != self._denial:
                text = "no permission to set the group, which keeps its number of attempts"
                self._log(logging.WARNING, text, error=reason)
            self._denial = reason
            return
        self._denial = ""
        self._is_pacing = not status.settings.backoff_ms_min
        self._backoff = DEFAULT_BACKOFF if self._is_pacing else _backoff_of(status.settings)
        self._attempts_max = status.settings.max_attempts
        self._letters_topic = letters_topic(
            options.topic, options.group, status.settings.dead_letter_topic
        )

    async def _run_messages(self) -> None:
        assert self._consumer is not None
        while True:
            free = await self._wait_for_capacity()
            # A cancellation loses no message: the receipt waits for the first one only.
            if not (messages := await self._consumer.receive(free)):
                return  # the consumer was closed
            # Fewer, if the target has become unavailable meanwhile.
            free = self._free_count(time.monotonic())
            for message in messages[free:]:
                self._return_unseen(message)
                self._consumer.end_turn(message)
            for message in messages[:free]:
                self._begin(message)
            self.metrics.running = len(self.running)

    def _begin(self, message: Message) -> None:
        now_s = self._clock.now_s()
        run = HandlerRun(message, now_s, message.batch.hold.ends_s - now_s)
        task = asyncio.create_task(self._handle(run))
        self.running[task] = run
        task.add_done_callback(self._on_task_end)
        self._end_if_overdue(task, run)

    def _end_if_overdue(self, task: asyncio.Task[None], run: HandlerRun) -> None:
        """End a call if its time is up; otherwise check it again when it will be.

        An extension by the handler begins its time again. Those of other messages of the batch do
        not, although they extend the lease.
        """
        extensions = run.message.batch.hold.extensions
        began = (run.began_s, run.lease_s)
        since_s, lease_s = extensions.get(run.message.queue_offset, began)
        end_s = since_s + max(self._hold_s, lease_s - min(NACK_S, lease_s / 4))
        if self._clock.now_s() < end_s:
            run.alarm = self._clock.call_at(
                end_s, functools.partial(self._end_if_overdue, task, run)
            )
            return
        run.is_overdue = True
        self.metrics.overdue += 1
        if run.in_thread:
            text = "handler in a thread runs for longer than hold_max"
            self._log(logging.WARNING, text, run.message)
        elif run.cancel_cause is None:
            run.cancel_cause = Outcome.TIMEOUT
            task.cancel()

    async def _wait_for_capacity(self) -> int:
        """Wait until further messages may run; return their number."""
        # One time for both: if the pause ended between two, the wait would have no end.
        while not (free := self._free_count(now_s := time.monotonic())):
            self._call_ended.clear()
            pause_s = self.handler.brake.left_s(now_s) if self.handler.brake else 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._call_ended.wait(), pause_s or None)
        return free

    def _free_count(self, now_s: float) -> int:
        """Return the number of further messages that may run now."""
        most, brake = self.concurrency, self.handler.brake
        if brake is not None:
            most = 0 if brake.left_s(now_s) else brake.calls_max(most)
        return max(0, most - len(self.running))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        run = self.running.pop(task)
        if run.alarm is not None:
            run.alarm.cancel()
        self.metrics.overdue -= run.is_overdue
        self.ended_count += 1
        self.metrics.running = len(self.running)
        self.metrics.is_braked = self.handler.brake is not None and self.handler.brake.is_on
        if self._consumer is not None:
            self._consumer.end_turn(run.message)
        self._call_ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(logging.ERROR, "worker's own error", run.message, cause=error)

    # ---- one message

    async def _handle(self, run: HandlerRun) -> None:
        began_s = time.monotonic()
        tracing = self._tracing
        with self._tracing_work(run, tracing) if tracing else contextlib.nullcontext():
            try:
                outcome = await self._outcome(run)
            except BaseException as error:  # noqa: BLE001 -- an edge: any code of a user
                outcome = self._fail(run, error)
        took_s = time.monotonic() - began_s
        self.metrics.add(outcome, took_s)
        if outcome is Outcome.DONE and LOG.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, "timer done", run.message, seconds=round(took_s, 3))

    @contextlib.contextmanager
    def _tracing_work(self, run: HandlerRun, tracing: Tracing) -> Iterator[None]:
        """Trace the work on a message. An error of the tracing is logged, and fails no message."""
        spans = contextlib.ExitStack()
        with self._logging_errors(run.message):
            spans.enter_context(tracing.process(run.message))
        yield
        with self._logging_errors(run.message):
            if (error := run.error) is None:
                spans.close()
            else:
                spans.__exit__(type(error), error, error.__traceback__)

    @contextlib.contextmanager
    def _logging_errors(self, message: Message) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 -- an edge: the application's exporters
            self._log(logging.ERROR, "tracing failed", message, cause=error)

    async def _outcome(self, run: HandlerRun) -> Outcome:
        message = run.message
        try:
            arguments = self.handler.arguments_of(message)
        except (TimerError, ValueError) as error:
            return self._return_failed(run, error, Outcome.UNREADABLE)
        CONTEXT.set(self._context(message))
        try:
            await self._call(run, arguments)
        except Reject as error:
            return await self._reject(run, error)
        except TargetUnreached as error:
            return self._return_unreached(run, error)
        returned = message.batch.hold.returned_offsets.get(message.queue_offset)
        if returned is not None:  # by the handler
            return Outcome.RETURNED if returned else Outcome.FAILED
        self._ack(message)
        return Outcome.DONE

    def _context(self, message: Message) -> TimerContext:
        return TimerContext(message, self.handler.options.group, self._clock)

    async def _call(self, run: HandlerRun, arguments: dict[str, Any]) -> None:
        if self.handler.is_async:
            with _ending_forks():
                await self.handler.function(**arguments)
            return
        work = functools.partial(copy_context().run, _run, self.handler.function, arguments)
        run.in_thread = True
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            run.in_thread = False
        if inspect.iscoroutine(result):  # a decorator that is not async wraps an async function
            if run.is_overdue:  # no alarm would end it
                result.close()
                run.cancel_cause = Outcome.TIMEOUT
                raise asyncio.CancelledError
            with _ending_forks():
                await result
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError("the handler returned a generator, which has not run")

    def _fail(self, run: HandlerRun, error: BaseException) -> Outcome:
        """Return the message of a call that ended with an error, by the cause of its end."""
        if not isinstance(error, asyncio.CancelledError) or run.cancel_cause is None:
            return self._return_failed(run, error, Outcome.FAILED)
        if run.cancel_cause is Outcome.INTERRUPTED:
            run.error = error
            self._return_unseen(run.message)
            return Outcome.INTERRUPTED
        late = TimeoutError(f"the handler ran for longer than hold_max ({self._hold_s:g} s)")
        return self._return_failed(run, late.with_traceback(error.__traceback__), Outcome.TIMEOUT)

    def _return_failed(self, run: HandlerRun, error: BaseException, outcome: Outcome) -> Outcome:
        """Nack a message with the backoff, and log the error."""
        message, run.error = run.message, error
        backoff_s = self._backoff.delay_s(message.failures)
        pause_s = backoff_s if self._is_pacing else None
        try:
            own_s = error.delay_s if isinstance(error, Retry) else None
            if own_s is not None and isinstance(error, RetryAfter):
                own_s = max(own_s, backoff_s)
            text = failure_text(error, with_text=self.handler.app.send_errors)
            self._nack(message, pause_s if own_s is None else own_s, text)
            self._log_failure(outcome, message, error)
        except BaseException as own:  # noqa: BLE001 -- an edge: the application's own exceptions
            self._log(logging.ERROR, f"timer {outcome}", message, cause=own)
            self._nack(message, pause_s, type(error).__name__)
        return outcome

    def _return_unreached(self, run: HandlerRun, error: BaseException) -> Outcome:
        """Return a message as unseen, and log the error."""
        run.error = error
        self._return_unseen(run.message)
        self._log_failure(Outcome.RETURNED, run.message, error)
        return Outcome.RETURNED

    @staticmethod
    def _return_unseen(message: Message) -> None:
        with contextlib.suppress(TimerError):  # the lease is lost: the message comes again
            _ = message.give_back()

    @staticmethod
    def _nack(message: Message, pause_s: float | None, detail: str) -> None:
        with contextlib.suppress(LeaseLost):  # the lease is lost: the message comes again
            _ = message.nack(pause_s, detail=detail)

    async def _reject(self, run: HandlerRun, error: Reject) -> Outcome:
        message, run.error = run.message, error
        client, group = self.handler.app.client, self.handler.options.group
        try:
            await write_letter(client, message, group, self._letters_topic, error)
        except TimerError as failed:
            text, why = "dead letter not written, the timer fails", reason_of(failed)
            self._log(logging.WARNING, text, message, letters=self._letters_topic, error=why)
            return self._return_failed(run, error, Outcome.FAILED)
        self._ack(message)
        self._log_failure(Outcome.REJECTED, message, error)
        return Outcome.REJECTED

    def _ack(self, message: Message) -> None:
        try:
            acking = message.ack()
        except TimerError as error:  # the lease is lost, and the consumer knows it
            self._log_ack_failure(message, error)
        else:
            acking.add_failure_callback(functools.partial(self._on_ack_failure, message))

    def _on_ack_failure(self, message: Message, acking: "Future[Any]") -> None:
        if (error := acking.exception()) is not None:
            self._log_ack_failure(message, error)
            return
        self.metrics.outcomes[Outcome.LOST] += 1
        self._log(logging.WARNING, "ack too late", message, result=acking.result())

    def _log_ack_failure(self, message: Message, error: BaseException) -> None:
        self.metrics.outcomes[Outcome.LOST] += isinstance(error, LeaseLost)
        text = "ack failed, the timer may run again"
        self._log(logging.WARNING, text, message, error=f"{type(error).__name__}: {error}")

    # ---- the end

    def begin_leaving(self) -> None:
        """Return the messages that no handler has seen, and fetch no more."""
        if self._consumer is not None:
            self._consumer.begin_leaving()

    def cancel_calls(self) -> int:
        """Cancel the calls that run, and return their messages; return the number of calls.

        A function in a thread runs on: its message is returned nonetheless.
        """
        calls = [
            each for each in self.running.items() if each[1].cancel_cause is not Outcome.INTERRUPTED
        ]
        for task, run in calls:
            run.cancel_cause = Outcome.INTERRUPTED
            task.cancel()
        return len(calls)

    async def close(self) -> None:
        """Wait for the acks and leave the group."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            with contextlib.suppress(TimerError):  # a message that was not acked comes again
                await consumer.close()

    # ---- log

    def _log_failure(self, outcome: Outcome, message: Message, error: BaseException) -> None:
        if (on_error := self.handler.app.on_error) is not None:
            try:
                on_error(self._context(message), error)
            except BaseException as own:  # noqa: BLE001 -- an edge: any code of a user
                self._log(logging.ERROR, "on_error failed", message, cause=own)
        count, first = first_failure(error)
        place = {"at": _place_of(first)} if self.handler.logs_place else {}
        why = reason_of(first) if isinstance(first, Exception) else type(first).__name__
        counts = outcome not in (Outcome.REJECTED, Outcome.RETURNED)
        is_last = counts and message.failures + 1 == self._attempts_max
        is_final = is_last or outcome is Outcome.REJECTED
        self._log(
            logging.ERROR if is_last else logging.WARNING,
            f"timer {outcome}",
            message,
            cause=error if LOG.isEnabledFor(logging.DEBUG) else None,
            final=is_final,
            **({"letters": self._letters_topic} if is_final else {}),
            error=count + why,
            **place,
        )

    def _log(
        self,
        level: int,
        event: str,
        message: Message | None = None,
        *,
        cause: BaseException | None = None,
        **more: object,
    ) -> None:
        """Write a line of an event with its fields, which are also attributes of the record."""
        options = self.handler.options
        fields: dict[str, object] = {
            "handler": self.handler.name,
            "topic": options.topic,
            "group": options.group,
        }
        if message is not None:
            fields["id"] = message.id
            if message.key is not None:
                fields["key"] = message.key
            fields |= {"attempt": message.attempt, "failures": message.failures}
        fields |= more
        text = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
        extra = {"timer_event": event} | {f"timer_{name}": each for name, each in fields.items()}
        LOG.log(level, "%s: %s", event, text, exc_info=cause, extra=extra)


def _backoff_of(settings: pb.GroupSettings) -> Backoff:
    """Return the backoff of a group that has one."""
    first_ms = settings.backoff_ms_min
    longest_ms = settings.backoff_ms_max or first_ms
    return Backoff(timedelta(milliseconds=first_ms), max=timedelta(milliseconds=longest_ms))


def _quoted(value: object) -> str:
    """Return a value for a line of the log, in quotes if it has more than printable ASCII."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else repr(text)


def _place_of(error: BaseException) -> str:
    """Return file and line where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "-"


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> object:
    """Call a function that is not async. A future can't hold a StopIteration."""
    try:
        with _ending_forks():
            return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration") from error


@contextlib.contextmanager
def _ending_forks() -> Iterator[None]:
    """End a process that a handler has forked, as it leaves the handler.

    Otherwise it would be a second worker on the connections of the first, or hang in its thread.
    """
    pid, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == pid:
            raise
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        else:
            code = 1
            traceback.print_exception(error)
    finally:
        if os.getpid() != pid:
            for stream in sys.stdout, sys.stderr:
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code & 0xFF)
