"""The recipes of the documentation, with the frameworks that they are for: `make recipes`."""

import asyncio
import gc
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.timerfake.doc_examples import examples
from timerclient import NotFound, OutcomeUnknown
from timerfake import AsyncFakeApp, FakeApp

HALF_HOUR = timedelta(minutes=30)
pytestmark = pytest.mark.filterwarnings("default")  # of the frameworks


def recipe(*at: int) -> dict[str, Any]:
    """Return the names of an example, or of several one after the other."""
    module = ModuleType(f"recipe_{at[0]}")
    for each in at:
        exec(examples("docs/recipes.md")[each], vars(module))
    return vars(module)


async def test_fastapi(
    async_timer_app: type[AsyncFakeApp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    names = recipe(0)
    async with async_timer_app(names["timers"]) as timers:
        transport = httpx.ASGITransport(names["web"])
        async with names["lifespan"](names["web"]):
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as web:
                answers = [(await web.post(f"/orders/{number}")).json() for number in (1, 1, 2)]
            assert len({each["timer"] for each in answers}) == 2  # a repeated request has its timer
            names["write"]("UPDATE orders SET state = 'paid' WHERE id = 2")
            await timers.advance(HALF_HOUR)
        with closing(sqlite3.connect("shop.db")) as db:
            states = dict(db.execute("SELECT * FROM orders").fetchall())
        assert (timers.errors, states) == ([], {1: "cancelled", 2: "paid"})


async def test_fastapi_stores_no_order_without_a_timer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    monkeypatch.chdir(tmp_path)
    names = recipe(0)

    async def schedule(**_: object) -> None:
        raise OutcomeUnknown

    monkeypatch.setattr(names["cancel_unpaid"], "schedule", schedule)
    transport = httpx.ASGITransport(names["web"])
    async with (
        names["lifespan"](names["web"]),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as web,
    ):
        assert (await web.post("/orders/1")).status_code == 503
    with closing(sqlite3.connect("shop.db")) as db:
        assert db.execute("SELECT * FROM orders").fetchall() == []


async def test_fastapi_ends_when_its_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    names = recipe(0, 1)
    signals: asyncio.Queue[int] = asyncio.Queue()

    class Ended:
        def __init__(self, _: object) -> None:
            self.stop = lambda: None

        async def run(self) -> None:
            raise NotFound("group deleted")

    names["Worker"] = Ended
    monkeypatch.setattr(signal, "raise_signal", signals.put_nowait)
    with pytest.raises(NotFound):
        async with names["lifespan"](names["web"]):
            assert await signals.get() == signal.SIGTERM


def test_django(timer_app: Callable[..., FakeApp]) -> None:
    django = pytest.importorskip("django")
    settings = pytest.importorskip("django.conf").settings
    connection = pytest.importorskip("django.db").connection
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
    django.setup()
    names = recipe(2)
    order_model = names["Order"]
    with connection.schema_editor() as editor:
        editor.create_model(order_model)
    timers = timer_app(names["timers"])
    unpaid, paid = names["place"](), names["place"]()
    order_model.objects.filter(id=paid.id).update(state="paid")
    timers.advance(HALF_HOUR)
    states = dict(order_model.objects.values_list("id", "state"))
    assert (timers.errors, states) == ([], {unpaid.id: "cancelled", paid.id: "paid"})


def test_celery(timer_app: Callable[..., FakeApp]) -> None:
    pytest.importorskip("celery")
    names = recipe(3)
    names["celery"].conf.task_always_eager = True
    timers = timer_app(names["timers"])
    names["place"](4711)
    timers.advance(timedelta(minutes=29))
    assert names["cancelled"] == []
    timers.advance(timedelta(minutes=1))
    assert (timers.errors, names["cancelled"]) == ([], [4711])


def test_outbox(
    timer_app: Callable[..., FakeApp],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = recipe(4)
    timers = timer_app(names["timers"])
    db = sqlite3.connect("shop.db")
    db.executescript(names["TABLES"])
    for order in (1, 2):
        names["place"](db, order)
    left = db.execute("SELECT * FROM outbox").fetchall()
    assert [names["relay"](db), names["relay"](db)] == [2, 0]
    db.execute("UPDATE orders SET state = 'paid' WHERE id = 2")
    db.executemany("INSERT INTO outbox VALUES (?, ?, ?)", left)  # as if the relay had died
    db.commit()
    assert names["relay"](db) == 2
    assert names["timers"].thread_client.count_timers("orders").pending == 2
    timers.advance(HALF_HOUR + timedelta(minutes=1))
    states = dict(db.execute("SELECT * FROM orders").fetchall())
    assert (timers.errors, states) == ([], {1: "cancelled", 2: "paid"})
    db.close()
    gc.collect()
    assert recwarn.list == []  # Python 3.13 warns of a connection that is not closed
