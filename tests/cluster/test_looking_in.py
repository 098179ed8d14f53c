"""Reads of timers have their own threads, and damage that they meet is passed on."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chaos.sim.world.simdisk import SimDisk
from cluster.api.message_peek import peek
from cluster.api.public_services import services_of
from cluster.api.queue_reads import read_messages
from cluster.api.timer_queries import QUERIES_MAX, QUERIES_WAITING_MAX, TimerQueries
from cluster.rpc.rpc_caller import CALLER
from cluster.settings.config import NodeConfig
from tests.cluster.hosted import Hosted
from tests.timer.lookups import FAR, PLACES, filled, flip
from tests.timer.machines import STATE, ids_of
from tests.waiting import settled
from timer.model import timer_id
from timer.model.timer_errors import (
    CorruptFileError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from timer.model.units import UnixMs
from timer.pending.read_view import ReadView
from timer.pending.runs.run import Run
from timer.recovery.engine import Engine
from timerclient.proto import timer_pb2 as pb

SALT = 5
DEADLINE_S = 120


class Leading:
    """A host with a leading engine."""

    def __init__(self, engine: Engine) -> None:
        self._leader = SimpleNamespace(machine=engine.machine)
        self.failures: list[BaseException] = []
        self.on_read_error = self.failures.append

    def require_lease(self) -> Any:
        return self._leader

    def now(self) -> Any:
        return SimpleNamespace(clock_ms=UnixMs(FAR - 1))


def looking(engine: Engine) -> tuple[TimerQueries, Leading]:
    host: Any = Leading(engine)
    return TimerQueries(host, salt=SALT, key_bytes_max=100), host


def by_id(number: int) -> pb.GetTimerRequest:
    due_ms, seq = np.array([FAR + number - 1], np.int64), np.array([number], np.uint64)
    return pb.GetTimerRequest(timer_id=timer_id.encode(due_ms, seq, SALT))


def by_key(key: str) -> pb.GetTimerRequest:
    return pb.GetTimerRequest(topic="t", key=key)


def damage(engine: Engine, disk: SimDisk, at: bytes) -> None:
    """Flip a bit of a run where it holds these bytes."""
    [meta] = engine.machine.store.runs
    path = STATE / "runs" / meta.name
    flip(disk, path, disk.read(path).index(at))


@pytest.mark.parametrize("where", PLACES)
async def test_timer_is_got_by_id_and_by_key_wherever_it_lies(where: str) -> None:
    _, _, engine = filled(where)
    look, host = looking(engine)
    for request in (by_id(2), by_key("b")):
        answer = await look.get(request)
        assert (answer.state, answer.topic) == (pb.TIMER_STATE_PENDING, "t")
        assert (answer.timer.payloads, answer.timer.keys) == (b"p1", b"b")
    for nobody in (by_id(4), by_key("z")):
        with pytest.raises(NotFoundError):
            await look.get(nobody)
    assert not host.failures


ASKED: list[Callable[[TimerQueries], Any]] = [
    lambda look: look.get(by_id(2)),
    lambda look: look.get(by_key("b")),
    lambda look: look.list(pb.ListTimersRequest(filter=pb.TimerFilter(topic="t"))),
]


@pytest.mark.parametrize("ask", ASKED)
async def test_damage_that_a_look_meets_is_passed_on(ask: Callable[[TimerQueries], Any]) -> None:
    _, disk, engine = filled("run")
    look, host = looking(engine)
    damage(engine, disk, b"p0p1p2")
    with pytest.raises(CorruptFileError) as met:
        await ask(look)
    assert host.failures == [met.value]


@pytest.mark.parametrize("ask", ASKED)
async def test_batch_is_verified_in_a_thread(
    ask: Callable[[TimerQueries], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = filled("restarted")
    look, _ = looking(engine)
    verify, verified = Run.verify, list[bool]()

    def noted(run: Run, batch: int) -> None:
        if batch not in run._verified:
            verified.append(threading.current_thread() is threading.main_thread())
        verify(run, batch)

    monkeypatch.setattr(Run, "verify", noted)
    await ask(look)
    assert verified == [False]


async def test_look_leaves_what_was_asked_for_entries_that_are_half_folded() -> None:
    _, _, engine = filled("run")
    look, _ = looking(engine)
    store = engine.machine.store
    asked = store.prefetch_of(ids_of([(FAR, 1)]))
    assert asked is not None
    asked.read()
    store.use_prefetch(asked)
    await look.get(by_id(2))
    assert (store._prefetch, store._runs._prefetched) == (asked, asked.timers)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


async def given_up(look: TimerQueries, work: Callable[[ReadView], None]) -> None:
    """Look, and lose patience as soon as it goes on elsewhere."""
    task = asyncio.create_task(look._with_view(work))
    await settled()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_looks_that_were_given_up_keep_no_thread_of_others(gate: threading.Event) -> None:
    _, _, engine = filled("memtable")
    look, _ = looking(engine)
    begun = threading.Semaphore(0)

    def stuck(cut: ReadView) -> None:
        del cut
        begun.release()
        gate.wait(DEADLINE_S)

    for _ in range(50):
        await given_up(look, stuck)
    others = asyncio.to_thread(lambda: None)
    await asyncio.wait_for(others, DEADLINE_S / 2)
    assert not gate.is_set()
    assert all(begun.acquire(timeout=DEADLINE_S) for _ in range(QUERIES_MAX))
    assert not begun.acquire(blocking=False)


def as_caller(name: str, look: TimerQueries, work: Callable[[], None]) -> asyncio.Task[None]:
    """Begin a query of a caller."""
    token = CALLER.set(SimpleNamespace(identity=f"client/{name}"))  # type: ignore[arg-type]
    try:
        return asyncio.create_task(look.in_thread(work))
    finally:
        CALLER.reset(token)


async def test_caller_with_many_queries_leaves_places_and_turns_to_others(
    gate: threading.Event,
) -> None:
    _, _, engine = filled("memtable")
    look, _ = looking(engine)
    done: list[str] = []

    def work(name: str) -> None:
        gate.wait(DEADLINE_S)
        done.append(name)

    many = [as_caller("many", look, partial(work, "many")) for _ in range(QUERIES_WAITING_MAX)]
    await settled()
    few = [as_caller("few", look, partial(work, "few")) for _ in range(3)]
    await settled()
    gate.set()
    results = await asyncio.gather(*many, return_exceptions=True)
    assert sum(isinstance(each, OverloadedError) for each in results) == QUERIES_WAITING_MAX // 2
    await asyncio.gather(*few)
    last = len(done) - 1 - done[::-1].index("few")
    assert last <= 3 * QUERIES_MAX + len(few), done


async def test_changes_by_id_wait_for_no_list_or_count_and_pages_of_a_filter_do() -> None:
    host: Any = Hosted()
    config = NodeConfig(name="n1", cluster_id="c", data=Path("d"), peers={"n1": "127.0.0.1:1"})
    timers = services_of(host, host, host, config).timers
    timers.queries.places.add(None, QUERIES_WAITING_MAX)
    with pytest.raises(OverloadedError):
        await timers.queries.in_thread(list)
    assert await timers._changes._look_ups.in_thread(list) == []
    context: Any = SimpleNamespace(time_remaining=lambda: 60.0)
    request = pb.CancelRequest(filter=pb.TimerFilter(topic="t"))
    request.page_token = (await timers._changes.cancel(request, context)).next_page_token
    with pytest.raises(OverloadedError, match="queue of queries"):
        await timers._changes.cancel(request, context)


async def test_damage_is_told_though_nobody_waits_for_the_look(gate: threading.Event) -> None:
    _, _, engine = filled("memtable")
    look, host = looking(engine)
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    host.on_read_error = told.set_result
    damage = CorruptFileError("a run", 7, "why")

    def meet(cut: ReadView) -> None:
        del cut
        gate.wait(DEADLINE_S)
        raise damage

    await given_up(look, meet)
    gate.set()
    assert await asyncio.wait_for(told, DEADLINE_S) is damage


async def test_messages_are_not_shown_by_a_leader_without_a_lease() -> None:
    def no_lease() -> Any:
        raise NotReadyError("this leader holds no lease at the moment")

    host: Any = SimpleNamespace(require_lease=no_lease)
    for request in (
        read_messages(host, pb.ReadMessagesRequest(topic="t"), SALT),
        peek(host, pb.PeekRequest(topic="t"), SALT),
    ):
        with pytest.raises(NotReadyError, match="no lease"):
            await request
