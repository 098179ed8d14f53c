"""Arguments of handlers: the values that schedule, bind and the worker accept."""

from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from inspect import signature
from typing import Any, Literal, NewType, dataclass_transform
from uuid import UUID

import pytest

from tests.timerfake.shop import MINUTE, Run, Shop
from timerclient import AsyncTimerClient, Backoff, InvalidRequest, TimerApp, Worker
from timerclient.client.aio import ClientOptions
from timerclient.values.codecs import Codec, JsonCodec
from timerclient.worker import handler_arguments


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "order_id: Shop.__init__.<locals>.cancel_unpaid needs this argument"),
        ({"order_id": "1"}, "order_id = str: Shop.__init__.<locals>.cancel_unpaid takes int"),
        ({"order_id": True}, "order_id = bool: "),
        ({"order_id": 1, "dealy": 3}, "dealy: .* it has: order_id, reason"),
        ({"order_id": 1, "delay": -1}, "delay = -1: must be 0 to"),
    ],
)
def test_wrong_arguments_are_rejected_when_they_are_scheduled(
    given: dict[str, Any], text: str, timer_app: Run
) -> None:
    shop = Shop()
    timer_app(shop.app)
    with pytest.raises(InvalidRequest, match=text):
        shop.cancel_unpaid.schedule_sync(**given)


def test_bound_handler_is_scheduled_alone_and_in_a_batch(timer_app: Run) -> None:
    shop = Shop(timeout=20)
    timers = timer_app(shop.app)
    shop.cancel_unpaid.bind(1).schedule_sync(delay=MINUTE, key="order-1")
    batch = [
        shop.cancel_unpaid.bind(each, reason="late").new_timer(delay=MINUTE, key=f"order-{each}")
        for each in (1, 2)
    ]
    shop.app.thread_client.schedule_all(batch, on_conflict="keep")
    timers.advance(MINUTE)
    assert sorted(shop.calls) == [(1, "unpaid"), (2, "late")]
    for given, text in (
        ({"oder_id": 5}, "arguments: .*cancel_unpaid: missing a required argument: 'order_id'"),
        ({"order_id": "5"}, "order_id = str: .*cancel_unpaid takes int"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            shop.cancel_unpaid.bind(**given)
    with pytest.raises(
        InvalidRequest, match=r"arguments: .* by name, or call `bind\(…\)\.schedule"
    ):
        shop.cancel_unpaid.schedule_sync(1)  # type: ignore[arg-type]
    assert {*ClientOptions.__annotations__} == {*signature(AsyncTimerClient).parameters} - {
        "cluster"
    }
    with pytest.raises(TypeError, match="unexpected option 'setings'"):
        Shop(setings=3)


def test_bound_arguments_are_those_of_the_call_of_bind(timer_app: Run) -> None:
    app, rows = TimerApp(), list[dict[str, int]]()

    @app.timer("orders", group="billing")
    async def bill(row: dict[str, int]) -> None:
        rows.append(row)

    timers = timer_app(app)
    row, bound = dict[str, int](), []
    for order in range(3):
        row["id"] = order
        bound.append(bill.bind(row))
    app.thread_client.schedule_all([each.new_timer() for each in bound])
    timers.settle()
    assert [each["id"] for each in rows] == [0, 1, 2]
    assert len({*bound, bill.bind(row)}) == 3


@pytest.mark.parametrize(
    ("value", "wanted", "fits"),
    [
        (1, float, True),
        (1.0, int, False),
        (None, int | None, True),
        ([1, None], list[int | None], True),
        ([1, "a"], list[int], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({"a": 1}, dict[str, str], False),
        ("a", Literal["a", "b"], True),
        (1, Literal[True], False),
        (object(), Any, True),
        (True, bool, True),
        (True, int, False),
        (True, Codec, True),
        (1, Codec, True),
        ([1], list[Codec], True),
    ],
)
def test_value_fits_its_annotation(value: object, wanted: Any, fits: bool) -> None:
    assert (handler_arguments.fit(value, wanted) is not handler_arguments.NO_FIT) is fits


class Colour(StrEnum):
    """An argument that JSON has as text."""

    RED = "red"


def test_schedule_accepts_the_arguments_that_the_worker_accepts(timer_app: Run) -> None:
    app, calls = TimerApp(), list[Any]()

    @app.timer("orders", group="billing")
    async def bill(
        pair: tuple[int, str],
        pairs: list[tuple[int, ...]] | None = None,
        colours: dict[Colour, tuple] = {},  # type: ignore[type-arg]  # noqa: B006
        names: dict[int, str] | None = None,
    ) -> None:
        calls.append((pair, pairs, colours))

    timers = timer_app(app)
    good = {"pair": (1, "a"), "pairs": [(1,), (2, 3)], "colours": {Colour.RED: (4,)}}
    bill.schedule_sync(**good)
    timers.settle()
    assert calls == [(*good.values(),)]
    assert type(next(iter(calls[0][2]))) is Colour
    for pair in ((1,), (1, 2), (1, "a", "b")):
        with pytest.raises(InvalidRequest, match=r"pair = tuple: .* takes tuple\[int, str\]$"):
            bill.schedule_sync(pair=pair)
    with pytest.raises(InvalidRequest, match=r"names = dict: .*, which application/json does not"):
        bill.schedule_sync(pair=(1, "a"), names={1: "a"})
    assert timers.errors == []


@dataclass
class Item:
    """An argument that JSON does not have."""

    number: int


class UpperMeta(type):
    """Of classes with an instance check of their own."""

    def __instancecheck__(cls, value: Any) -> bool:
        return value.isupper()  # type: ignore[no-any-return]


class Upper(str, metaclass=UpperMeta):
    """A text in upper case."""

    __slots__ = ()


@dataclass_transform()
class ModelMeta(ABCMeta):
    """As that of pydantic: its instance check finds instances faster."""

    def __instancecheck__(cls, value: object) -> bool:
        return super().__instancecheck__(value)


class Model(metaclass=ModelMeta):
    """An argument that JSON does not have."""

    number: int


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        *[(each, True) for each in (Upper, Upper | None, list[Upper])],
        (Model, False),
        *[(each, False) for each in (datetime, Decimal, UUID, Item, bytes, set[int], Item | UUID)],
        *[(each, True) for each in (Any, object, float, Colour, Literal["a"], Item | None)],
        *[(each, True) for each in (tuple[int, str], list[Item], dict[str, int], Mapping, Codec)],
        *[(each, True) for each in ("Missing", NewType("OrderId", int))],
    ],
)
def test_handler_with_an_argument_that_json_does_not_have_is_refused(
    wanted: Any, fits: bool
) -> None:
    def bill(order: Any, paid: Any = None) -> None: ...

    bill.__annotations__ |= {"order": wanted, "paid": datetime}
    decorate = TimerApp().timer("t", group="g")
    if fits:
        decorate(bill)
        return
    with pytest.raises(InvalidRequest, match=r"bill = 'order': no JSON value is .*; annotate it"):
        decorate(bill)
    TimerApp(codec=JsonCodec()).timer("t", group="g")(bill)  # another codec


def test_argument_that_json_does_not_have_is_named_when_it_is_scheduled(timer_app: Run) -> None:
    app = TimerApp()

    @app.timer("orders", group="billing")
    def bill(order: int, paid: datetime | None = None) -> None: ...

    timer_app(app)
    with pytest.raises(InvalidRequest, match=r"^paid = datetime: must have a form as .*json: Type"):
        bill.bind(1, datetime.now(UTC))


def test_handler_that_can_not_be_called_by_names_is_refused() -> None:
    app = TimerApp()

    def options(key: str) -> None: ...
    def many(*args: int) -> None: ...
    def fine() -> None: ...

    for function, text in ((options, "options: rename its parameter 'key'"), (many, "args")):
        with pytest.raises(InvalidRequest, match=text):
            app.timer("t", group="g")(function)
    app.timer("t", group="g")(fine)
    for same in ("t", "default/t"):
        with pytest.raises(InvalidRequest, match=rf"'g': handler .*fine already .*topic '{same}'"):
            app.timer(same, group="g")(fine)
    numbers = [("concurrency", 0), ("lease", 0), ("hold_max", -1)]
    for name, wrong in [*numbers, ("group", ""), ("start", "now"), ("retry", 30)]:
        with pytest.raises(InvalidRequest, match=f"^{name} = "):
            app.timer("t", **{"group": "h", name: wrong})  # type: ignore[arg-type]
    for topic, group in (("bad topic", "g"), ("t/", "g"), ("t", "a/b")):
        with pytest.raises(InvalidRequest, match="must be 1 to 255 of A-Z a-z 0-9"):
            app.timer(topic, group=group)
    for first, more in ((0, {}), (2, {"max": 1}), (1, {"attempts": 1001}), ("1", {})):
        with pytest.raises(InvalidRequest):
            Backoff(first, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no handler"):
        Worker(TimerApp())
    with pytest.raises(RuntimeError, match=r"in other threads use app\.thread_client"):
        _ = Shop().app.client
    with pytest.raises(RuntimeError, match=r"app\.context is for a handler"):
        app.context  # noqa: B018
