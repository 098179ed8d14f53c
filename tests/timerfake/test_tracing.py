"""Traces: a message carries the context of its schedule; spans arrive at a collector by OTLP."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from timerclient import (
    AsyncTimerClient,
    Backoff,
    InvalidRequest,
    Message,
    NewTimer,
    NotPending,
    TimerApp,
    TimerClient,
    Tracing,
)
from timerclient.worker.target_brake import TargetUnreached
from timerfake import AsyncFakeApp, AsyncFakeCluster, FakeCluster

START = datetime(2030, 1, 1, tzinfo=UTC)
FOREIGN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(otlp_grpc.TraceServiceServicer):
    """A stand-in for a collector: it speaks OTLP over gRPC and keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str) -> Any:
        """Return the only span of a name."""
        [span] = [each for each in self.spans if each.name == name]
        return span


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
    server.start()
    yield collector
    server.stop(None).wait()


@pytest.fixture
def provider(collector: Collector) -> Iterator[TracerProvider]:
    """Makes tracers whose spans the collector has as soon as they end."""
    provider = TracerProvider(shutdown_on_exit=False)
    at = f"127.0.0.1:{collector.port}"  # type: ignore[attr-defined]
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=at, insecure=True)))
    yield provider
    provider.shutdown()


@contextmanager
def world(tracing: Tracing) -> Iterator[tuple[FakeCluster, TimerClient]]:
    with (
        FakeCluster(start=START) as cluster,
        TimerClient(cluster.address, dial=cluster.dial, tracing=tracing) as client,
    ):
        yield cluster, client


def deliveries(cluster: FakeCluster, client: TimerClient, topic: str = "orders") -> list[Message]:
    """Return the next messages of a topic; they are acked."""
    with client.consumer(topic, "g") as consumer:
        cluster.advance(60)
        found = consumer.receive(100, timeout=0)
        for each in found:
            _ = each.ack()
    return found


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


@pytest.mark.parametrize("parent", [False, True])
def test_schedule_delivery_and_work_are_one_story(
    collector: Collector, provider: TracerProvider, parent: bool
) -> None:
    tracing = Tracing(provider, parent=parent)
    with world(tracing) as (cluster, client):
        timer = client.schedule("orders", b"x", delay=60)
        [message] = deliveries(cluster, client)
    with tracing.process(message) as span:
        assert trace.get_current_span() is span
    schedule, deliver, process = map(
        collector.named, ("schedule orders", "deliver orders", "process orders")
    )
    assert process.parent_span_id == deliver.span_id
    if parent:
        assert deliver.parent_span_id == schedule.span_id
        assert deliver.trace_id == process.trace_id == schedule.trace_id
        assert not deliver.links
    else:
        assert not deliver.parent_span_id
        assert deliver.trace_id != schedule.trace_id
        [link] = deliver.links
        assert (link.trace_id, link.span_id) == (schedule.trace_id, schedule.span_id)
    begin_ms = int(START.timestamp() * 1000) + 60_000
    assert deliver.start_time_unix_nano == begin_ms * 1_000_000
    assert deliver.end_time_unix_nano == message.handed_out_ms * 1_000_000
    assert [each.name for each in deliver.events] == ["fired"]
    assert (schedule.kind, process.kind) == (
        schedule.SPAN_KIND_PRODUCER,
        process.SPAN_KIND_CONSUMER,
    )
    for each in (schedule, deliver, process):
        assert attributes(each)["messaging.message.id"] == timer.id
        assert attributes(each)["messaging.destination.name"] == "orders"


def test_each_way_to_schedule_carries_the_context_of_the_caller(
    collector: Collector, provider: TracerProvider
) -> None:
    tracer = provider.get_tracer("application")
    with (
        FakeCluster(start=START) as cluster,
        TimerClient(cluster.address, dial=cluster.dial, tracing=Tracing(provider)) as client,
        tracer.start_as_current_span("request") as request,
    ):
        client.schedule("orders", b"first")
        client.schedule("orders", b"later", headers={"tenant": "a"})
        client.submit("orders", b"submitted").result()
        client.submit_batch("orders", [b"1", b"2"], headers=[None, {"tenant": "b"}]).result()
        client.schedule_batch("orders", [b"3", b"4"], headers={"tenant": "c"})
        client.schedule_all(timers=[NewTimer("orders", b"5"), NewTimer("orders", b"6")])
        client.schedule("orders", b"foreign", headers={"traceparent": FOREIGN})
        client.schedule("orders", b"named", request_id="r")
        found = {each.payload: each.headers for each in deliveries(cluster, client)}
    trace_id = f"{request.get_span_context().trace_id:032x}"
    foreign, named = found.pop(b"foreign"), found.pop(b"named")
    assert foreign["traceparent"] == FOREIGN
    assert named == {}, "its repetition must be the same request"
    assert len(found) == 9
    assert {each["traceparent"][3:35] for each in found.values()} == {trace_id}
    assert [found[payload]["tenant"] for payload in (b"later", b"2", b"3", b"4")] == [*"abcc"]
    spans = [each for each in collector.spans if each.name.startswith("schedule")]
    assert len(spans) == 8
    assert {each.parent_span_id for each in spans} == {collector.named("request").span_id}
    sent = {each["traceparent"][36:52] for each in found.values()}
    assert sent <= {each.span_id.hex() for each in spans}


def test_failed_calls_and_failed_work_are_errors(
    collector: Collector, provider: TracerProvider
) -> None:
    tracing = Tracing(provider)
    with world(tracing) as (cluster, client):
        client.create_topic("t")
        for schedule in (client.schedule, lambda *a, **k: client.submit(*a, **k).result()):
            with pytest.raises(NotPending):
                schedule("t", b"x", key="k", on_conflict="update")
        with pytest.raises(InvalidRequest):
            client.submit("t", b"x", delay=-1)
        client.schedule("orders", b"x")
        [message] = deliveries(cluster, client)
    with pytest.raises(ZeroDivisionError), tracing.process(message):
        1 / 0  # noqa: B018
    failed = [each for each in collector.spans if each.status.code == each.status.STATUS_CODE_ERROR]
    assert [each.name for each in failed] == [*["schedule t"] * 3, "process orders"]
    assert all(each.events[-1].name == "exception" for each in failed)


def test_a_batch_has_a_link_to_each_schedule_and_headers_without_a_context_have_none(
    collector: Collector, provider: TracerProvider
) -> None:
    tracing = Tracing(provider)
    bad = ("", "00-0-0-00", "zz" + FOREIGN[2:], "00-" + "0" * 32 + FOREIGN[35:], FOREIGN * 99)
    with FakeCluster(start=START) as cluster, cluster.client() as client:
        for value in (FOREIGN, FOREIGN, FOREIGN.replace("b7ad", "b7ae"), *bad):
            client.schedule("orders", b"x", headers={"traceparent": value})
        client.schedule("orders", b"x")
        found = deliveries(cluster, client)
    assert len(found) == 9
    with tracing.process(found):
        pass
    links = collector.named("deliver orders").links
    assert [each.span_id.hex() for each in links] == ["b7ad6b7169203331", "b7ae6b7169203331"]
    assert attributes(collector.named("process orders"))["messaging.batch.message_count"] == 9
    with pytest.raises(InvalidRequest, match="at least one"), tracing.process([]):
        pass


async def test_client_for_asyncio_is_traced(collector: Collector, provider: TracerProvider) -> None:
    async with (
        AsyncFakeCluster(start=START) as cluster,
        AsyncTimerClient(cluster.address, dial=cluster.dial, tracing=Tracing(provider)) as client,
    ):
        await client.schedule("orders", b"x")
        async with client.consumer("orders", "g") as consumer:
            await cluster.advance(1)
            [message] = await consumer.receive(timeout=0)
    sent = message.headers["traceparent"]
    assert sent[36:52] == collector.named("schedule orders").span_id.hex()


async def test_worker_runs_each_handler_within_a_span_of_its_delivery(
    collector: Collector, provider: TracerProvider, async_timer_app: type[AsyncFakeApp]
) -> None:
    app, current = TimerApp(tracing=Tracing(provider)), dict[str, bytes]()

    def note(name: str) -> None:
        current[name] = trace.get_current_span().get_span_context().span_id.to_bytes(8, "big")

    @app.timer("loop", group="g")
    async def on_the_loop() -> None:
        note("loop")

    @app.timer("thread", group="g", retry=Backoff(1, attempts=1))
    def in_a_thread() -> None:
        note("thread")
        raise ValueError("bad luck")

    async with async_timer_app(app) as timers:
        await on_the_loop.schedule()
        await in_a_thread.schedule()
        await timers.settle()
    for name, failed in (("loop", False), ("thread", True)):
        process = collector.named(f"process {name}")
        assert process.parent_span_id == collector.named(f"deliver {name}").span_id
        assert current[name] == process.span_id
        assert (process.status.code == process.status.STATUS_CODE_ERROR) is failed


async def test_work_that_is_cancelled_is_an_error(
    collector: Collector, provider: TracerProvider
) -> None:
    tracing = Tracing(provider)
    with world(tracing) as (cluster, client):
        client.schedule("orders", b"x")
        [message] = deliveries(cluster, client)
    with pytest.raises(asyncio.CancelledError), tracing.process(message):
        raise asyncio.CancelledError
    process = collector.named("process orders")
    assert process.status.code == process.status.STATUS_CODE_ERROR
    assert [each.name for each in process.events] == ["exception"]


def test_work_in_a_generator_that_is_closed_is_no_error(
    collector: Collector, provider: TracerProvider
) -> None:
    tracing = Tracing(provider)
    with world(tracing) as (cluster, client):
        client.schedule("orders", b"x")
        [message] = deliveries(cluster, client)

    def work() -> Iterator[Message]:
        with tracing.process(message):
            yield message

    for _ in work():
        break
    process = collector.named("process orders")
    assert process.status.code == process.status.STATUS_CODE_UNSET
    assert not process.events


@pytest.mark.parametrize("is_unreached", [True, False])
async def test_call_whose_message_returns_at_once_is_an_error(
    collector: Collector, provider: TracerProvider, is_unreached: bool
) -> None:
    app, begun = TimerApp(tracing=Tracing(provider)), list[int]()

    @app.timer("orders", group="g")
    async def call() -> None:
        begun.append(app.context.failures)
        if len(begun) == 1 and is_unreached:
            raise TargetUnreached
        if len(begun) == 1:
            await asyncio.Event().wait()

    async with AsyncFakeApp(app) as timers:
        timers.cluster.works.clear()  # a call runs until the drain ends it
        await call.schedule()
        await timers.settle()
        if not is_unreached:
            assert timers._worker is not None
            timers._worker.runners[0].cancel_calls()
            await timers.settle()
    statuses = [each.status for each in collector.spans if each.name == "process orders"]
    assert [each.code == each.STATUS_CODE_ERROR for each in statuses] == [True, False]


async def test_call_that_is_cut_off_is_an_error_and_its_outcome_is_within_the_span(
    collector: Collector, provider: TracerProvider
) -> None:
    current = list[int]()

    def note(*_: object) -> None:
        current.append(trace.get_current_span().get_span_context().span_id)

    app = TimerApp(tracing=Tracing(provider), on_error=note)

    @app.timer("orders", group="g", hold_max=20, lease=10, retry=Backoff(1, attempts=1))
    async def hang() -> None:
        await asyncio.Event().wait()

    async with AsyncFakeApp(app) as timers:
        timers.cluster.works.clear()  # time passes while the handler runs
        await hang.schedule()
        await timers.advance(60)
    process = collector.named("process orders")
    assert process.status.code == process.status.STATUS_CODE_ERROR
    text = "TimeoutError: the handler ran for longer than hold_max (20 s)"
    assert process.status.message == text
    assert [each.to_bytes(8, "big") for each in current] == [process.span_id]


@pytest.mark.parametrize("fails", ["on_start", "on_end"])
async def test_error_of_the_tracing_fails_no_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def fail(_: SpanProcessor, span: Any, **_more: object) -> None:
        if span.name == "process orders":
            raise RuntimeError("no exporter")

    monkeypatch.setattr(SpanProcessor, fails, fail)
    provider, runs = TracerProvider(shutdown_on_exit=False), list[int]()
    provider.add_span_processor(SpanProcessor())
    app = TimerApp(tracing=Tracing(provider))

    @app.timer("orders", group="g", retry=Backoff(1, attempts=3))
    async def bill() -> None:
        runs.append(app.context.failures)
        if len(runs) == 1:
            raise ValueError("bad luck")

    async with AsyncFakeApp(app) as timers:
        await bill.schedule()
        await timers.advance(60)
        assert runs == [0, 1]
        assert [str(each) for each in timers.errors] == ["bad luck"]
    assert caplog.text.count("tracing failed: handler=") == 2


def test_client_without_tracing_needs_no_opentelemetry_and_has_no_code_of_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "import timerclient\n"
        "client = timerclient.AsyncTimerClient('127.0.0.1:1')\n"
        "assert 'schedule' not in vars(client)\n"
        "try:\n"
        "    timerclient.Tracing()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "tracing needs opentelemetry-api: pip install opentelemetry-api\n"
