"""An in-memory cluster for tests of applications: a real node's behaviour on a manual clock.

`FakeCluster` is for threads, `AsyncFakeCluster` for asyncio; `FakeApp` and `AsyncFakeApp` run the
handlers of a TimerApp on one. `TimerAppFixture` and `AsyncTimerAppFixture` are the types of the
fixtures `timer_app` and `async_timer_app`. docs/testing.md shows their use.
Names are loaded when they are first used, because pytest imports this package for its fixtures
(`pytest_plugin.py`).
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from timerfake.cluster import AsyncFakeCluster
    from timerfake.fake_app import AsyncFakeApp, AsyncTimerAppFixture, FakeApp, TimerAppFixture
    from timerfake.thread_cluster import FakeCluster

__all__ = [
    "AsyncFakeApp",
    "AsyncFakeCluster",
    "AsyncTimerAppFixture",
    "FakeApp",
    "FakeCluster",
    "TimerAppFixture",
]

_MODULE_OF: Final = {
    "AsyncFakeApp": "fake_app",
    "AsyncFakeCluster": "cluster",
    "AsyncTimerAppFixture": "fake_app",
    "FakeApp": "fake_app",
    "FakeCluster": "thread_cluster",
    "TimerAppFixture": "fake_app",
}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        try:
            module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        except ModuleNotFoundError as missing:
            from timerclient.cli.missing_modules import why_missing

            text = f"{name} {why_missing(missing, 'testing')}"
            raise ModuleNotFoundError(text, name=missing.name) from missing
        globals()[name] = found = getattr(module, name)
        return found
