"""An app with handlers, for tests of workers."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from timerclient import (
    Backoff,
    TimerApp,
    TimerContext,
)
from timerfake import FakeApp

Run = Callable[..., FakeApp]
MINUTE = timedelta(minutes=1)
LETTERS = "orders.billing.dead"


class Shop:
    """An app with a handler of each kind; `calls` has their arguments."""

    def __init__(self, **options: Any) -> None:
        self.app = TimerApp(**options)
        self.calls: list[Any] = []
        self.contexts: list[TimerContext] = []
        self.fails: BaseException | None = None

        @self.app.timer("orders", group="billing", retry=Backoff(30, max=100, attempts=4))
        async def cancel_unpaid(order_id: int, reason: str = "unpaid") -> None:
            self.calls.append((order_id, reason))
            self.contexts.append(self.app.context)
            if self.fails is not None:
                raise self.fails

        @self.app.timer("mails", group="senders")
        def send_mail(to: str) -> None:
            self.calls.append((to, threading.current_thread()))
            if to == "again":
                send_mail.schedule_sync(to="end", delay=MINUTE)

        self.cancel_unpaid, self.send_mail = cancel_unpaid, send_mail
