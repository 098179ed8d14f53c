"""A client of a simulated cluster that creates, changes and deletes series of recurring timers."""

import random
from typing import TYPE_CHECKING, Any, Final

from chaos.sim.checks.expected_traits import headers_of
from chaos.sim.checks.keybook import TimerName
from chaos.sim.timers.callers import after
from chaos.sim.timers.node_results import ids_of, unanswered
from chaos.sim.timers.operators import SimOperator
from timer.leader.leader import Leader
from timer.model.recurrence import Misfire, SeriesSpec

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from timer.state.series_table import SeriesView

SERIES_MAX: Final = 12
MOVED_MS: Final = 700
"""The delay of a moved occurrence."""


class SimRecurrer(SimOperator):
    """Works on series. All series end: they have a count."""

    share = 0.3
    _made = 0

    def do(self, app: "EngineApp") -> None:
        """Create, change, pause, resume or delete a series, or cancel or move its occurrence."""
        rng = self.rng
        machine = app.engine.machine
        views = machine.series.views(machine.series.ids_of(None, 0, SERIES_MAX))
        if len(views) < SERIES_MAX and (not views or rng.random() < 0.4):
            self._made += 1
            payload = b"series %d" % self._made
            self.town.book.series.add(payload)
            traits = self.town.world.options.traits
            spec = SeriesSpec(
                every_ms=rng.choice((1_000, 1_300, 3_000)),
                max_count=rng.randint(1, 5),
                misfire=rng.choice([*Misfire]),
                payload=payload,
                headers=bytes(headers_of([payload]).blob) if traits else b"",
            )
            topic = machine.topic_by_name.get(rng.choice(self.town.topics))
            if topic is not None:
                self._ask("create", topic.topic_id, b"k%d" % rng.randrange(20), spec)
            return
        if views:  # half of the changes meet the firing of the occurrence
            one = rng.choice(views)
            wait_ms = max(0, int(one.due_ms) - app.clock_ms() - rng.randrange(40))
            wait_us = rng.choice((0, 1_000)) * wait_ms
            self.town.world.timeline.after(wait_us, self._change, one, rng)

    def _change(self, one: "SeriesView", rng: random.Random) -> None:
        match rng.choice(("pause", "resume", "resume", "every", "delete", "cancel", "move")):
            case "pause" if not self.town.closing:
                self._ask("alter", one.series_id, {"paused": True})
            case "resume":
                self._ask("alter", one.series_id, {"paused": False})
            case "every":
                self._ask("alter", one.series_id, {"every_ms": 1_100})
            case "delete":
                self._ask("delete", one.series_id)
            case "cancel" | "move" as kind if one.seq and (app := self.town.leader()) is not None:
                timer, when = ids_of([TimerName(int(one.due_ms), int(one.seq))]), after(MOVED_MS)

                def work(leader: Leader) -> None:
                    if kind == "cancel":
                        leader.cancel(timer.due_ms, timer.seq, unanswered)
                    else:
                        leader.reschedule(timer, None, when, app.now(), unanswered)

                self.ask(app, work)

    def finish(self) -> None:
        """Resume the paused series."""
        app = self.town.leader()
        table = app.engine.machine.series if app is not None else None
        for view in table.views(table.ids_of(None, 0, SERIES_MAX)) if table is not None else ():
            if view.spec.paused:
                self._ask("alter", view.series_id, {"paused": False})

    def _ask(self, method: str, *args: Any) -> None:
        """Let a node call a method of its leader's intake of series."""
        if (app := self.town.leader()) is not None:
            self.ask(
                app, lambda leader: getattr(leader.series, method)(*args, app.now(), unanswered)
            )
