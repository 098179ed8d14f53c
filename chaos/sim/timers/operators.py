"""Operators of a simulated timer cluster. They know it only by the state of a node that serves.

An operator acts now and then while the clients act, and gets no answer. At the end of a world it
ends those of its effects that would delay the last timers.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from chaos.sim.checks.keybook import TimerName
from chaos.sim.checks.orderbook import headers_of
from chaos.sim.timers.node_results import ids_of, ignore
from timer.entries.payloads import AlterGroup
from timer.entries.policies import CATCH_UPS, CLUSTER, Scope, ScopePolicy
from timer.leader.groups import dead_letters
from timer.leader.groups.group_delivery import Delivery
from timer.leader.groups.lease_table import ConsumerStream
from timer.leader.intake.admission import WantedTimes
from timer.leader.leader import Leader
from timer.model.recurrence import Misfire, SeriesSpec
from timer.model.timer_errors import EngineError
from timer.model.units import QueueOffset, UnixMs
from timer.ready.group import Group

if TYPE_CHECKING:
    from chaos.sim.timers.timers import EngineApp
    from chaos.sim.timers.town import Town
    from timer.state.series_table import SeriesView

POLICIES: Final[dict[str, tuple[Any, ...]]] = {
    "delayed_delivery": (True, True, False),
    "tick_ms": (1, 7, 100, 1_000),
    "delay_ms_min": (0, 50, 1_000),
    "delay_ms_max": (0, 200, 5_000),
    "fixed_delay_ms": (0, 40, 2_000),
    "payload_bytes_max": (20, 5_000),
    "delay_levels_ms": ((300,), (2_000, 100), (10, 20, 30, 40)),
}
AGES: Final[dict[str, tuple[Any, ...]]] = {
    "ttl_ms": (0, 300, 1_000, 3_000, 20_000),
    "retention_ms": (0, 500, 4_000, 60_000),
}
QUOTAS: Final[dict[str, tuple[Any, ...]]] = {
    "pending_max": (0, 3, 8, 8, 20),
    "pending_bytes_max": (30, 100, 10_000),
    "ready_max": (3, 10, 30),
    "ready_bytes_max": (30, 100, 10_000),
}
PAUSES: Final[dict[str, tuple[Any, ...]]] = {"paused": (True, True, False), "catch_up": CATCH_UPS}
ALTERED: Final[dict[str, tuple[int, ...]]] = {
    "lease_ms": (500, 2_000),
    "max_attempts": (0, 1, 3),
    "backoff_ms_min": (0, 50),
    "max_in_flight": (0, 3),
}
"""Settings of a group that change, with their values."""
REDRIVE_WAIT_US: Final = 2_000_000
"""Time after which a redrive ends."""
REDRIVE_LEASE_MS: Final = 2_000
SEEK_MS: Final = 10_000
"""Longest time by which a seek goes back."""
SERIES_MAX: Final = 12
MOVED_MS: Final = 700
"""The delay of a moved occurrence."""
GROUPS: Final = ("g", "h")
RATES: Final = (8, 20)
JITTER_MS: Final = 40


def after(delay_ms: int) -> WantedTimes:
    """Return a delay as a leader takes it."""
    return WantedTimes("delay_ms", np.array([delay_ms], np.int64))


class SimOperator:
    """One operator. A subclass has `do`."""

    share: ClassVar[float]
    """Probability that it acts at each action of the clients."""

    def __init__(self, town: "Town", name: str, rng: random.Random) -> None:
        self.town, self.name, self.rng = town, name, rng

    def act(self) -> None:
        """Act now and then."""
        app = self.town.leader()
        if app is not None and not self.town.closing and self.rng.random() <= self.share:
            self.do(app)

    def do(self, app: "EngineApp") -> None:
        """Do one thing."""

    def finish(self) -> None:
        """End the effects that would delay the last timers. Called again and again."""

    def ask(self, app: "EngineApp", work: Callable[[Leader], object]) -> None:
        """Let a node do some work with its leader."""
        self.town.line.ask(app, app.take, work)

    def alter(self, app: "EngineApp", name: str, unset: list[str], **said: Any) -> None:
        """Change the policy of the cluster (""), a namespace ("ns/") or a topic."""

        def work(leader: Leader) -> None:
            wide = not name or name.endswith("/")
            scope = Scope(name.rstrip("/")) if wide else Scope("", app.topic(name).topic_id)
            leader.set_policy(scope, ScopePolicy(**said), unset, app.now(), ignore)

        self.ask(app, work)


class SimRuler(SimOperator):
    """Sets and unsets policies of all scopes, some fields at a time."""

    share = 0.2
    values: ClassVar[dict[str, tuple[Any, ...]]] = POLICIES
    counts: ClassVar[tuple[int, ...]] = (1, 2, 4)
    ending: ClassVar[tuple[str, ...]] = ()
    """Fields that are unset at the end."""

    def do(self, app: "EngineApp") -> None:
        rng = self.rng
        scope = rng.choice(("", "n/", "default/", *2 * self.town.topics))
        count = min(rng.choice(self.counts), len(self.values))
        names = rng.sample(sorted(self.values), count)
        unset = names if rng.random() < 0.4 else names[2:]
        said = {name: rng.choice(self.values[name]) for name in names if name not in unset}
        self.alter(app, scope, unset, **said)

    def finish(self) -> None:
        if (app := self.town.leader()) is not None:
            for scope, said in scopes(app):
                if unset := [name for name in self.ending if name in said.pack()]:
                    self.alter(app, scope, unset)


class SimAger(SimRuler):
    """Changes the times to live and the retention of messages."""

    values = AGES


class SimPauser(SimRuler):
    """Pauses and resumes scopes."""

    values = PAUSES
    ending = ("paused",)


class SimWarden(SimRuler):
    """Sets quotas."""

    values = QUOTAS
    counts = (1, 1, 2)
    ending = tuple(QUOTAS)


class SimKeeper(SimOperator):
    """Seeks, deletes and, with `redrives`, alters groups. Consumers create deleted groups again."""

    share = 0.1

    def do(self, app: "EngineApp") -> None:
        rng = self.rng
        place = rng.choice(self.town.topics), rng.choice(GROUPS)
        if rng.random() < 0.2:
            self.ask(app, lambda leader: leader.groups.delete(app.group(*place), ignore))
        elif self.town.world.options.redrives and rng.random() < 0.2:
            name = rng.choice(sorted(ALTERED))
            changes = {name: rng.choice(ALTERED[name])}

            def alter(leader: Leader) -> None:
                group = app.group(*place)
                leader.groups.alter(AlterGroup(group.topic, group.group_id, changes), ignore)

            self.ask(app, alter)
        else:
            by, where = rng.choice(("offset", "time")), rng.random()

            def seek(leader: Leader) -> None:
                group, now_ms = app.group(*place), app.clock_ms()
                queue = leader.machine.topics[group.topic].queue
                offset = queue.begin + round(where * (queue.end - queue.begin))
                if by == "offset":
                    leader.groups.seek(group, QueueOffset(offset), ignore)
                else:
                    time_ms = UnixMs(now_ms - int(where * SEEK_MS))
                    leader.groups.seek_time(group, time_ms, ignore)

            self.ask(app, seek)


class SimRemover(SimOperator):
    """Deletes topics. Producers and consumers create them again."""

    share = 0.03

    def do(self, app: "EngineApp") -> None:
        name = self.rng.choice(self.town.topics)

        def delete(leader: Leader) -> None:
            leader.delete_topic(app.topic(name).topic_id, app.now(), ignore)

        self.ask(app, delete)


class SimRedriver(SimOperator):
    """Redrives dead letters to their first topics, as cluster/api/group_admin.py does."""

    share = 0.1

    def do(self, app: "EngineApp") -> None:
        """Redrive 1, 3 or up to 256 dead letters of a random group."""
        consumer = self.rng.choice(self.town.consumers)
        letters = f"{consumer.topic}.{consumer.group}.dead"
        most = self.rng.choice((1, 3, 256))

        def redrive(leader: Leader) -> None:
            group = app.group(letters, dead_letters.GROUP)
            if most == 1:
                _redrive_youngest(leader, group)
            _redrive(app, leader, group, most)

        self.ask(app, redrive)


def _redrive_youngest(leader: Leader, group: Group) -> None:
    """Redrive the youngest letter by its offset, if it is free and in memory."""
    queue = leader.machine.topics[group.topic].queue
    last = np.array([queue.end - 1]).astype(np.uint64)
    free = group.unacked_count(queue.end) and leader.groups.states(group, last).free[0]
    if free and not group.is_acked(last)[0] and queue.count_in_memory(last):
        with suppress(EngineError):
            leader.groups.redrive(group, last, ignore)


def _redrive(app: "EngineApp", leader: Leader, group: Group, most: int) -> None:
    """Redrive at most `most` letters: lease them as a consumer does, and move what comes."""
    took: list[Delivery] = []

    def take(delivery: Delivery) -> None:
        took.append(delivery)
        with suppress(EngineError):
            leader.groups.redrive(group, delivery.lease.offsets, ignore)

    def over() -> None:
        if app.engine.leader is leader:
            (leader.groups.retire if took else leader.groups.give_up)(group, consumer)
            app.plane.kick()

    consumer = ConsumerStream("redrive", REDRIVE_LEASE_MS, take, most, ignore)
    consumer.withdraw, consumer.single_lease = lambda lease_id: [lease_id], True
    leader.groups.join(group, consumer)
    app.node.later(REDRIVE_WAIT_US, over)


class SimPacer(SimOperator):
    """Sets one rate of delivery and one jitter of the cluster, at once and again if unset."""

    def __init__(self, town: "Town", name: str, rng: random.Random) -> None:
        super().__init__(town, name, rng)
        self.rate = rng.choice(RATES)

    def act(self) -> None:
        """Set the fields; in a healed world, end the rate: a backlog would delay its rest."""
        app, heals = self.town.leader(), self.town.world.heals
        if app is None:
            return
        rate = app.engine.machine.policies.of(CLUSTER).group_rate_max
        if rate is None and not heals:
            self.alter(app, "", [], group_rate_max=self.rate, jitter_ms=JITTER_MS)
        elif rate is not None and heals:
            self.alter(app, "", ["group_rate_max"])


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
                        leader.cancel(timer.due_ms, timer.seq, ignore)
                    else:
                        leader.reschedule(timer, None, when, app.now(), ignore)

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
            self.ask(app, lambda leader: getattr(leader.series, method)(*args, app.now(), ignore))


def scopes(app: "EngineApp") -> list[tuple[str, ScopePolicy]]:
    """Return the scopes with policies, by their names in `EngineApp.alter`."""
    topics, found = app.engine.machine.topics, []
    for scope, said in app.engine.machine.policies:
        name = topics[scope.topic].name if scope.topic in topics else scope.namespace
        found.append((name + "/" * bool(scope.namespace), said))
    return found
