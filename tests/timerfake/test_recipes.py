"""The recipes of the documentation, with the frameworks that they are for: `make recipes`."""

import sqlite3
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.timerfake.doc_examples import examples
from timerfake import AsyncFakeApp, FakeApp

HALF_HOUR = timedelta(minutes=30)
pytestmark = pytest.mark.filterwarnings("default")  # of the frameworks


def recipe(at: int) -> dict[str, Any]:
    """Return the names of an example."""
    module = ModuleType(f"recipe_{at}")
    exec(examples("docs/recipes.md")[at], vars(module))
    return vars(module)


async def test_fastapi(async_timer_app: type[AsyncFakeApp]) -> None:
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    names = recipe(0)
    async with async_timer_app(names["timers"]) as timers:
        transport = httpx.ASGITransport(names["web"])
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as web:
            answers = [(await web.post(f"/orders/{number}")).json() for number in (1, 1, 2)]
        assert len({each["timer"] for each in answers}) == 2  # a repeated request has its timer
        names["orders"][2] = "paid"
        await timers.advance(HALF_HOUR)
        assert names["orders"] == {1: "cancelled", 2: "paid"}
        async with names["lifespan"](names["web"]):
            pass


def test_django(timer_app: Callable[..., FakeApp]) -> None:
    django = pytest.importorskip("django")
    settings = pytest.importorskip("django.conf").settings
    connection = pytest.importorskip("django.db").connection
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[])
    django.setup()
    names = recipe(1)
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
    names = recipe(2)
    names["celery"].conf.task_always_eager = True
    timers = timer_app(names["timers"])
    names["place"](4711)
    timers.advance(timedelta(minutes=29))
    assert names["cancelled"] == []
    timers.advance(timedelta(minutes=1))
    assert (timers.errors, names["cancelled"]) == ([], [4711])


def test_outbox(
    timer_app: Callable[..., FakeApp], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = recipe(3)
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
