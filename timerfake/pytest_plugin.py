"""Fixtures for tests of handlers, which pytest finds through the entry point `timerfake`.

def test_unpaid_order_is_cancelled(timer_app):
    timers = timer_app(app)
    cancel_unpaid.schedule_sync(order_id=4711, delay=1800)
    timers.advance(1800)
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # numpy and gRPC are loaded by the tests that use a fixture
    from timerclient import TimerApp
    from timerfake.fake_app import AsyncTimerAppFixture, FakeApp, TimerAppFixture


@pytest.fixture
def timer_app() -> "Iterator[TimerAppFixture]":
    """A function that runs a TimerApp on an in-memory cluster until the end of the test."""
    from timerfake import FakeApp

    with ExitStack() as opened:

        def run(app: "TimerApp", **options: Any) -> "FakeApp":
            return opened.enter_context(FakeApp(app, **options))

        yield run


@pytest.fixture
def async_timer_app() -> "AsyncTimerAppFixture":
    """The same on the test's event loop: `async with async_timer_app(app) as timers`."""
    from timerfake import AsyncFakeApp

    return AsyncFakeApp
