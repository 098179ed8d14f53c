"""Traces of OpenTelemetry: a message carries the context of its schedule to its consumer.

    schedule orders                      a producer's span, while the call runs
        header `traceparent` (and `tracestate`), as the W3C defines them
    deliver orders                       from the due time to the delivery, on the cluster's clock
    └─ process orders                    the application's block

By default the span `deliver` begins where the consumer is, and has a link to `schedule`: hours may
lie between them, and few systems show such long traces well. With `parent=True` it is a child of
`schedule`, in the same trace.

A client without a `Tracing` has no code of this module in its way.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from timerclient.rows.messages import Message
from timerclient.rows.rows import NewTimer
from timerclient.rows.scheduled_timers import Timer
from timerclient.values import ids
from timerclient.values.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, TracerProvider

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACESTATE_MAX: Final = 512
"""Characters of a `tracestate`; a longer one is left out, so that headers keep their limit."""
Args: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]
Carry: TypeAlias = Callable[[Args, Options, Mapping[str, str]], tuple[Args, Options]]
"""Puts a context into the arguments of a call."""
LINKS_MAX: Final = 128
"""Links of one span, at most: OpenTelemetry's default limit."""
_NS: Final = 1_000_000


class Tracing:
    """Makes spans of a client's calls and of its consumers' work.

    Needs the package `opentelemetry-api`: the extra `otel`.

    Args:
        provider: Makes the tracer. None: the global one, `opentelemetry.trace.get_tracer_provider`.
        parent: True: deliveries are children of their schedule. False: they have a link to it.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """

    def __init__(self, provider: "TracerProvider | None" = None, *, parent: bool = False) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            text = "tracing needs opentelemetry-api: pip install opentelemetry-api"
            raise ImportError(text) from error
        self._trace = trace
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("timerclient", tracer_provider=provider)
        self._parent = parent

    # ---- consumers

    @contextmanager
    def process(self, messages: Message | Sequence[Message]) -> "Iterator[Span]":
        """Trace the work on a message, or on messages of one topic: a `with` block.

        The span `process` is the current one within the block. An exception ends it as an error,
        and so does a cancellation, but not the close of a generator that has the block.

        Raises:
            InvalidRequest: There is no message.
        """
        each = (messages,) if isinstance(messages, Message) else messages
        if not len(each):
            raise InvalidRequest.of("messages", None, "give at least one")
        around = self._trace.set_span_in_context(self._deliver(each))
        kind, attributes = (
            self._trace.SpanKind.CONSUMER,
            _attributes(each[0].topic, "process", each),
        )
        with self._tracer.start_as_current_span(
            f"process {each[0].topic}",
            around,
            kind,
            attributes,
            record_exception=False,  # of an Exception alone
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except GeneratorExit:  # the block is in a generator that its caller has closed
                raise
            except BaseException as error:
                self._end_failed_span(span, error)
                raise

    def _deliver(self, messages: Sequence[Message]) -> "Span":
        """Return the span of the delivery, which has ended."""
        first = messages[0]
        origins = self._origins(messages)
        context = origins[0] if origins and self._parent else None
        end = first.handed_out_ms
        begin = min(end, *(ids.due_ms_of(each.raw_id) for each in messages))
        span = self._tracer.start_span(
            f"deliver {first.topic}",
            context,
            self._trace.SpanKind.CONSUMER,
            _attributes(first.topic, "deliver", messages),
            links=[self._link(each) for each in (origins[1:] if context else origins)],
            start_time=(begin if first.attempt == 1 else end) * _NS,
        )
        if first.attempt == 1:
            span.add_event("fired", timestamp=min(end, first.fired_at_ms) * _NS)
        span.end(end * _NS)
        return span

    def _origins(self, messages: Iterable[Message]) -> "list[Context]":
        """Return the contexts in the headers of messages, each once, LINKS_MAX at most."""
        found: dict[tuple[int, int], Context] = {}
        for each in messages:
            headers = each.headers
            if TRACEPARENT not in headers or len(found) >= LINKS_MAX:
                continue
            context = self._propagator.extract(headers)
            origin = self._trace.get_current_span(context).get_span_context()
            if origin.is_valid and origin.is_remote:
                found.setdefault((origin.trace_id, origin.span_id), context)
        return [*found.values()]

    def _link(self, context: "Context") -> "Link":
        return self._trace.Link(self._trace.get_current_span(context).get_span_context())

    # ---- clients

    def instrument(self, client: Any) -> None:
        """Trace the schedules of an AsyncTimerClient. The client calls this."""
        client.schedule = self._trace_method(client.schedule, _in_headers)
        client.schedule_batch = self._trace_method(client.schedule_batch, _in_headers)
        client.schedule_all = self._trace_method(client.schedule_all, _in_timers)

    def instrument_submissions(self, client: Any) -> None:
        """Trace `submit` and `submit_batch` of a TimerClient. The client calls this."""
        client.submit = self._trace_submission(client.submit)
        client.submit_batch = self._trace_submission(client.submit_batch)

    def _trace_method(self, method: Callable[..., Any], carry: Carry) -> Callable[..., Any]:
        @functools.wraps(method)
        async def call(*args: Any, **options: Any) -> Any:
            with self._tracer.start_as_current_span(**self._span_arguments(args, options)) as span:
                args, options = carry(args, options, self._carrier(options))
                result = await method(*args, **options)
                _set_outcome(span, result)
                return result

        return call

    def _trace_submission(
        self, method: "Callable[..., Future[Any]]"
    ) -> "Callable[..., Future[Any]]":
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> "Future[Any]":
            span = self._tracer.start_span(**self._span_arguments(args, options))
            try:
                with self._trace.use_span(span):
                    args, options = _in_headers(args, options, self._carrier(options))
                    future = method(*args, **options)
            except BaseException:
                span.end()
                raise
            future.add_done_callback(functools.partial(self._end_span, span))
            return future

        return call

    def _end_span(self, span: "Span", future: "Future[Any]") -> None:
        """End the span of a submission."""
        if not future.cancelled():
            error = future.exception()
            if error is None:
                _set_outcome(span, future.result())
            else:
                self._end_failed_span(span, error)
        span.end()

    def _end_failed_span(self, span: "Span", error: BaseException) -> None:
        span.record_exception(error)
        span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")

    def _span_arguments(self, args: Args, options: Options) -> dict[str, Any]:
        """Return the arguments of the span of a schedule."""
        topic = options.get("topic", args[0] if args else None)
        attributes = _messaging_attributes("schedule", "send")
        if not isinstance(topic, str):
            topic = ""
        else:
            attributes["messaging.destination.name"] = topic
        kind = self._trace.SpanKind.PRODUCER
        return {"name": f"schedule {topic}".strip(), "kind": kind, "attributes": attributes}

    def _carrier(self, options: Options) -> dict[str, str]:
        """Return the headers with the present context; none if there is no context.

        There are none for a call with a `request_id` either: if another process repeats the call,
        it must be the same request.
        """
        carrier: dict[str, str] = {}
        if options.get("request_id") is None:
            self._propagator.inject(carrier)
        if len(carrier.get(TRACESTATE, "")) > TRACESTATE_MAX:
            del carrier[TRACESTATE]
        return carrier


def _in_headers(args: Args, options: Options, carrier: Mapping[str, str]) -> tuple[Args, Options]:
    """Return the arguments of `schedule` or `schedule_batch` with a context in the headers."""
    if not carrier:
        return args, options
    headers = options.get("headers")
    if headers is None or isinstance(headers, Mapping):
        headers = _headers_with(headers, carrier)
    elif isinstance(headers, Iterable) and not isinstance(headers, str | bytes):
        headers = [_headers_with(each, carrier) for each in headers]
    return args, {**options, "headers": headers}


def _in_timers(args: Args, options: Options, carrier: Mapping[str, str]) -> tuple[Args, Options]:
    """Return the arguments of `schedule_all` with a context in the headers of each timer."""
    timers = args[0] if args else options.get("timers")
    if not carrier or not isinstance(timers, Iterable):
        return args, options
    timers = [  # the call rejects an element of another type
        replace(each, headers=_headers_with(each.headers, carrier))
        if isinstance(each, NewTimer)
        else each
        for each in timers
    ]
    others = {name: value for name, value in options.items() if name != "timers"}
    return (timers, *args[1:]), others


def _headers_with(headers: Any, carrier: Mapping[str, str]) -> Any:
    """Return the headers of a message with a context; headers that have one keep it.

    A value of another type stays as it is: the call rejects it.
    """
    if headers is None:
        return carrier
    if not isinstance(headers, Mapping) or TRACEPARENT in headers:
        return headers
    return {**headers, **carrier}


def _messaging_attributes(work: str, kind: str) -> dict[str, Any]:
    """Return the attributes of a span that OpenTelemetry's conventions for messaging ask for."""
    return {
        "messaging.system": "timer-cluster",
        "messaging.operation.name": work,
        "messaging.operation.type": kind,
    }


def _attributes(topic: str, work: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the attributes of a span of a consumer."""
    first = messages[0]
    attributes = _messaging_attributes(work, "process" if work == "process" else "receive")
    attributes["messaging.destination.name"] = topic
    if len(messages) > 1:
        return attributes | {"messaging.batch.message_count": len(messages)}
    return attributes | {
        "messaging.message.id": first.id,
        "timer.attempt": first.attempt,
        "timer.queue_offset": first.queue_offset,
    }


def _set_outcome(span: "Span", result: Any) -> None:
    """Record the id of a scheduled timer, or the number of several."""
    if isinstance(result, Timer):
        span.set_attribute("messaging.message.id", result.id)
    else:
        span.set_attribute("messaging.batch.message_count", len(result))
