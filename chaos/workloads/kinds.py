"""The kinds of workload: the requests of each one's producer, and the habits of its consumers.

Random values are often at edges: the same millisecond, the due time itself, the first and the last
instant that a timer can have. Each producing function sends requests beat by beat until it has to
stop.
"""

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, Final

from chaos.workloads import lives, series_and_order, topic_changes
from chaos.workloads.workload_clients import (
    CLOSE_S,
    Rest,
    WorkloadClients,
    WorkloadKind,
)
from chaos.workloads.workload_consumer import Habit, WorkloadReader
from chaos.workloads.workload_producer import now_ms
from timerclient.client.group_calls import GroupOptions
from timerclient.rows.pending_timers import Where
from timerclient.rows.rows import OnConflict
from timerclient.rows.scheduled_timers import Timers
from timerclient.values.errors import Overloaded

BEAT_S: Final = 0.25
UNIFORM_MS: Final = 20_000
SHORT_MS: Final = 5_000
HERD_MS: Final = 10_000
"""From one herd to the next."""
DAY_MS: Final = 86_400_000
RACE_MS: Final = 50
"""A racing cancel is sent at most this long before or after the due time."""
RACES_PER_BEAT_MAX: Final = 5
"""Cancels sent singly. Further ones are sent as a list, so that none waits behind another."""
SLOW_LEASE: Final = timedelta(seconds=3)
DEATH_S: Final = 3.0
"""Lifetime of a dying consumer."""
PATIENCE_S: Final = 0.25
"""Timeout of an impatient producer's calls."""
IMPATIENT_BEATS: Final = 12
"""From one dropped connection of an impatient producer to the next."""
BURST_S: Final = 5.0
UPSERT: Final = 20
"""Timers of one keyed request."""
KEYS: Final = 20
"""Keys for each of two prefixes."""
PREFIXES: Final = 4
"""Prefixes of the keys of `moved`, for filters."""
FILTER_BEATS: Final = 4
"""From one request by filter to the next."""
LARGE_SIZE: Final = 4096
PIECE: Final = 50
"""Timers of one request of `overload`."""


def uniform(clients: WorkloadClients) -> None:
    """Schedule timers with evenly distributed delays."""
    _evenly(clients, UNIFORM_MS)


def evenly_short(clients: WorkloadClients) -> None:
    """Schedule timers with short delays, for kinds that differ in their consumers only."""
    _evenly(clients, SHORT_MS)


def _evenly(clients: WorkloadClients, delay_ms_max: int) -> None:
    for count in clients.beats(BEAT_S):
        clients.producer.batch(clients.marks(count), clients.soon(count, delay_ms_max))


def herd(clients: WorkloadClients) -> None:
    """Schedule the timers of ten seconds to be due in one, half of them in one millisecond."""
    for count in clients.beats(2 * BEAT_S):
        meeting = (now_ms() // HERD_MS + 1) * HERD_MS
        late = [clients.chance.choice((0, clients.chance.randrange(1000))) for _ in range(count)]
        clients.producer.batch(clients.marks(count), [clients.within(meeting + ms) for ms in late])


def longtail(clients: WorkloadClients) -> None:
    """Schedule most timers within a second or two, some up to the run's end, some days beyond."""
    chance = clients.chance
    for count in clients.beats(2 * BEAT_S):
        now = now_ms()
        beyond = chance.randint(0, count // 10 + 1)
        far = [clients.end_ms + int(DAY_MS * chance.uniform(1, 4000)) for _ in range(beyond)]
        near = []
        for _ in range(count - beyond):
            if chance.random() < 0.8:
                near.append(now + chance.expovariate(1 / 500))
            else:
                near.append(chance.uniform(now, max(now, clients.end_ms)))
        if near:
            due_ms = [clients.within(due) for due in near]
            clients.producer.batch(clients.marks(len(near)), due_ms)
        if far:
            clients.producer.batch(clients.marks(len(far)), far, expected=False)


def cancels(clients: WorkloadClients) -> None:
    """Cancel timers around their due time: some singly, the rest as a list due within 10 ms."""
    chance = clients.chance
    for count in clients.beats(BEAT_S):
        now = now_ms()
        single = min(count // 2, RACES_PER_BEAT_MAX)
        together = now + chance.uniform(300, 3000)
        due_ms = [int(now + chance.uniform(300, 3000)) for _ in range(single)]
        due_ms += [int(together + chance.randint(-5, 5)) for _ in range(count - single)]
        due_ms = [clients.within(due) for due in due_ms]
        ids = clients.producer.batch(clients.marks(count), due_ms)
        if not ids:
            continue
        for at in range(single):
            _race(clients, ids[at : at + 1], due_ms[at])
        _race(clients, ids[single:], due_ms[-1])


def _race(clients: WorkloadClients, ids: list[str], due_ms: int) -> None:
    """Cancel most of the timers around their due time, perhaps one twice, perhaps all again."""
    chance = clients.chance
    delay_s = _around_s(chance, due_ms)
    chosen = [at for at in range(len(ids)) if chance.random() < 0.8]
    if not chosen:
        return
    if len(chosen) > 1 and chance.random() < 0.5:
        chosen.append(chance.choice(chosen))
    work = partial(clients.producer.cancel, [ids[at] for at in chosen])
    clients.cancels.after(delay_s, work)
    if chance.random() < 0.3:
        clients.cancels.after(delay_s + chance.choice((0.0, chance.uniform(0, 2))), work)


_MODES: Final[tuple[OnConflict, ...]] = ("reject", "replace", "replace", "update", "keep")


def keyed(clients: WorkloadClients) -> None:
    """Upsert few keys in all modes, some requests in parallel; cancel and reschedule the keys."""
    chance, later = clients.chance, clients.cancels.after
    for count in clients.beats(BEAT_S):
        now = now_ms()
        for start in range(0, count, UPSERT):
            n = min(UPSERT, count - start)
            due_ms = [clients.within(now + chance.uniform(-100, 4000)) for _ in range(n)]
            mode: OnConflict = chance.choice(_MODES)
            keyed = 1.0 if mode == "update" else 0.9
            names = [_key(chance) if chance.random() < keyed else None for _ in range(n)]
            work = partial(clients.producer.upsert, clients.marks(n), due_ms, names, mode)
            if chance.random() < 0.5:
                work()
            else:
                later(0.0, work)  # in parallel with the next one
        some = sorted({_key(chance) for _ in range(3)})
        if chance.random() < 0.5:
            later(chance.uniform(0, 1), partial(clients.changer.cancel_keys, some))
        else:
            to = [clients.within(now + chance.uniform(-100, 4000)) for _ in some]
            clients.producer.will_be_due(max(to))
            later(chance.uniform(0, 1), partial(clients.changer.reschedule_keys, some, to))


def _key(chance: random.Random) -> str:
    """Return one of few keys, so that most of them have a pending timer."""
    return f"{chance.choice('ab')}/{chance.randrange(KEYS)}"


def moved(clients: WorkloadClients) -> None:
    """Reschedule around the due time, and again by the new ids; sometimes by a filter."""
    chance = clients.chance
    for number, count in enumerate(clients.beats(BEAT_S)):
        now = now_ms()
        together = now + chance.uniform(300, 2000)
        due_ms = [clients.within(together + chance.randint(-5, 5)) for _ in range(count)]
        marks = clients.marks(count)
        keys = [f"{mark // 2 % PREFIXES}/{mark}" if mark % 2 else None for mark in marks]
        ids = clients.producer.upsert(marks, due_ms, keys, "reject")
        at = [place for place in range(len(ids)) if chance.random() < 0.7]
        if at:
            _move(clients, [ids[place] for place in at], together)
        named = [key for key in keys if key and chance.random() < 0.3]
        if named:
            to = [_new_due(clients, together) for _ in named]
            work = partial(clients.changer.reschedule_keys, named, to)
            clients.cancels.after(_around_s(chance, together), work)
        if number % FILTER_BEATS == 0:
            _sweep(clients, cancels=number % (2 * FILTER_BEATS) == 0)


def _move(clients: WorkloadClients, ids: list[str], due_ms: float) -> None:
    """Reschedule timers around their due time, then the new timers; sometimes cancel old ids."""
    chance = random.Random(clients.chance.random())  # for other threads
    again = chance.random() < 0.3
    to = _new_due(clients, due_ms)

    def work() -> None:
        new = clients.changer.reschedule(ids, [to] * len(ids))
        if again:
            clients.changer.cancel(ids[:3])
        if new and not clients.stopping:
            later_ms = clients.within(to + 500)
            clients.producer.will_be_due(later_ms)
            clients.cancels.after(
                _around_s(chance, to),
                partial(clients.changer.reschedule, new, [later_ms] * len(new)),
            )

    clients.cancels.after(_around_s(chance, due_ms), work)


def _new_due(clients: WorkloadClients, due_ms: float) -> int:
    """Return a new due time for a timer: most are later, some are now."""
    to = clients.within(due_ms + clients.chance.choice((-3000, 0, 1, 500, 2000)))
    clients.producer.will_be_due(to)
    return to


def _around_s(chance: random.Random, due_ms: float) -> float:
    """Return the seconds until a moment within RACE_MS of a due time; for one in five, 0."""
    if chance.random() < 0.2:
        return 0.0
    return max(0.0, (due_ms + chance.uniform(-RACE_MS, RACE_MS) - now_ms()) / 1000)


def _sweep(clients: WorkloadClients, *, cancels: bool) -> None:
    """Cancel or reschedule all timers that are due in a range, with one prefix of keys or any."""
    chance = random.Random(clients.chance.random())  # for another thread

    def work() -> None:
        start = now_ms() + chance.randint(0, 1500)  # from now, as the thread may start late
        where: Where = {"due_from": start, "due_to": start + chance.choice((50, 300, 2000))}
        if chance.random() < 0.7:
            where["key_prefix"] = f"{chance.randrange(PREFIXES)}/"
        if cancels:
            clients.changer.cancel_where(where)
        elif not clients.stopping:
            to = clients.within(start + 500)
            clients.producer.will_be_due(to)
            clients.changer.reschedule_where(where, to)

    clients.cancels.after(0.0, work)


def pastdue(clients: WorkloadClients) -> None:
    """Schedule timers due now, just before, long ago and at the Unix epoch, and by a delay of 0."""
    chance = clients.chance
    for count in clients.beats(BEAT_S):
        now = now_ms()
        edges = (0, 1, now, now - 1, now + 1, now - 10, now - DAY_MS)
        due_ms = [
            chance.choice((chance.choice(edges), now - chance.randrange(5000)))
            for _ in range(count)
        ]
        clients.producer.batch(clients.marks(count), due_ms)
        clients.producer.single(clients.marks(1)[0], 0.0)


def singles(clients: WorkloadClients) -> None:
    """Send single timers in parallel, one timer by its delay, and the rest as a batch."""
    chance = clients.chance
    for count in clients.beats(BEAT_S):
        now = now_ms()
        alone = chance.randint(0, min(count, 20))
        for mark in clients.marks(alone):
            clients.producer.submit([mark], [clients.within(now + chance.uniform(-100, 3000))])
        clients.producer.single(clients.marks(1)[0], chance.uniform(0, 1))
        rest = count - alone - 1
        if rest > 0:
            due_ms = [clients.within(now + chance.uniform(-100, 3000)) for _ in range(rest)]
            clients.producer.batch(clients.marks(rest), due_ms)


def impatient(clients: WorkloadClients) -> None:
    """Send requests with a short timeout; sometimes close the connection while some are sent.

    An unanswered request is not sent again. It may have taken effect, and the client itself has
    retried it with the same sequence number until the timeout.
    """
    own = clients.connect()
    clients.producer.client = own
    for number, count in enumerate(clients.beats(BEAT_S)):
        marks, due_ms = clients.marks(count), clients.soon(count, 3000)
        if number % IMPATIENT_BEATS < IMPATIENT_BEATS - 1:
            clients.producer.batch(marks, due_ms, timeout_s=PATIENCE_S)
            continue
        for mark, due in zip(marks, due_ms, strict=True):
            clients.producer.submit([mark], [due])
        clients.producer.client = clients.connect()
        clients.drop(own)
        own = clients.producer.client


def named(clients: WorkloadClients) -> None:
    """Send requests with an id, and retry each with a short timeout."""
    for count in clients.beats(BEAT_S):
        marks, due_ms = clients.marks(count), clients.soon(count, 3000)
        patience_s = clients.chance.choice((0.002, 0.02, PATIENCE_S))
        clients.producer.named(marks, due_ms, f"named-{marks[0]}", patience_s=patience_s)


def overload(clients: WorkloadClients) -> None:
    """Send bursts of large payloads in parallel; pause for as long as an OVERLOADED answer says."""
    for count in clients.beats(BURST_S):
        pieces = []
        for start in range(0, count, PIECE):
            n = min(PIECE, count - start)
            due_ms = clients.soon(n, SHORT_MS)
            pieces.append(clients.producer.submit(clients.marks(n), due_ms, timeout_s=BURST_S))
        pause_ms = max(map(_pause_ms, wait(pieces, CLOSE_S).done), default=0)
        time.sleep(pause_ms / 1000)


def _pause_ms(piece: "Future[Timers]") -> int:
    error = piece.exception()
    return error.retry_after_ms if isinstance(error, Overloaded) else 0


# ---- consumers


def slow(clients: WorkloadClients) -> Habit:
    """Return a habit that acks 30 % of batches around the end of their lease, or after it."""
    chance = clients.habit_chance

    def habit(ack: Callable[[], None]) -> bool:
        if clients.stopping or chance.random() < 0.7:
            ack()
        else:
            clients.acks.after(SLOW_LEASE.total_seconds() * chance.uniform(0.8, 1.6), ack)
        return True

    return habit


def dying(clients: WorkloadClients) -> Habit:
    """Return a habit that dies every few seconds, with leased messages and unconfirmed acks."""
    last_s = time.monotonic()

    def habit(ack: Callable[[], None]) -> bool:
        nonlocal last_s
        if clients.stopping or time.monotonic() - last_s < DEATH_S:
            ack()
            return True
        last_s = time.monotonic()
        return False

    return habit


def _kind(
    line: str,
    produce: Callable[[WorkloadClients], Rest | None],
    *readers: WorkloadReader,
    **more: Any,
) -> WorkloadKind:
    """Return a kind with these consumers; without any, with a plain one."""
    own = readers or (WorkloadReader(),)
    return WorkloadKind(line=line, produce=produce, readers=own, **more)


_ONE: Final = WorkloadReader()
_LATE: Final = WorkloadReader(lease=SLOW_LEASE, habit=slow)
_STRICT: Final[GroupOptions] = {"max_attempts": 2}
_BY_KEY: Final[GroupOptions] = {"type": "key_shared"}
_FAILOVER: Final[GroupOptions] = {"type": "failover"}
KINDS: Final[Mapping[str, WorkloadKind]] = {
    "uniform": _kind("delays spread evenly over some seconds", uniform, _ONE, _ONE),
    "herd": _kind("all timers of ten seconds due in the same second", herd),
    "longtail": _kind(
        "mostly short delays, some up to the horizon, some days beyond the run's end", longtail
    ),
    "cancels": _kind(
        "cancels within 50 ms of the due time, singly and by lists, some repeated", cancels
    ),
    "keyed": _kind(
        "upserts of few keys in all four modes, and their cancels and reschedules", keyed
    ),
    "moved": _kind(
        "reschedules around the due time, by id, key and filter; cancels by filter", moved
    ),
    "pastdue": _kind("due at once, just now, or long ago", pastdue),
    "groups": _kind(
        "several groups on one topic; one of them starts late",
        evenly_short,
        WorkloadReader(group="first"),
        WorkloadReader(group="second"),
        WorkloadReader(group="second"),
        WorkloadReader(group="late", late=True),
    ),
    "singles": _kind("single timers, pipelined or not, among batches of all sizes", singles),
    "slow": _kind(
        "consumers that ack around and after the end of their lease",
        evenly_short,
        WorkloadReader(lease=SLOW_LEASE),
        WorkloadReader(lease=SLOW_LEASE, hold_max=0, habit=slow),
    ),
    "nacking": _kind(
        "consumers that nack messages, with and without a delay, and extend some leases",
        evenly_short,
        WorkloadReader(nacks=0.2),
        WorkloadReader(nacks=0.05),
        WorkloadReader(group="backing-off", nacks=0.3),
    ),
    "ordered": _kind(
        "keyed timers for groups that keep an order; some are nacked, consumers die",
        keyed,
        WorkloadReader(group="keys", options=_BY_KEY, nacks=0.05),
        WorkloadReader(group="keys", options=_BY_KEY, habit=dying),
        WorkloadReader(group="queue", options=_FAILOVER, nacks=0.01),
        WorkloadReader(group="queue", options=_FAILOVER, habit=dying),
        WorkloadReader(group="alone", options={"type": "exclusive"}, nacks=0.01, habit=dying),
    ),
    "failing": _kind(
        "consumers that fail repeatedly; dead letters are consumed from their own topic",
        evenly_short,
        WorkloadReader(group="strict", nacks=0.3, options=_STRICT),
        WorkloadReader(group="strict", lease=SLOW_LEASE, hold_max=0, habit=slow, options=_STRICT),
        _ONE,
    ),
    "redriven": _kind(
        "dead letters are redriven, some repeatedly, until all messages are acked",
        lives.redriven,
        WorkloadReader(group=lives.STRICT, nacks=0.3, options=_STRICT, redriven=True),
        WorkloadReader(
            group=lives.STRICT, lease=SLOW_LEASE, habit=slow, options=_STRICT, redriven=True
        ),
        _ONE,
        settle=lives.redrive_all,
    ),
    "sought": _kind(
        "seeks of groups back, ahead and to a time; groups reset, deleted and made anew",
        lives.sought,
        WorkloadReader(group=lives.SOUGHT, nacks=0.05),
        WorkloadReader(group=lives.SOUGHT, lease=SLOW_LEASE, habit=slow),
        WorkloadReader(group=lives.ANEW),
        _ONE,
    ),
    "dying": _kind(
        "consumers that drop their connection while they hold leases, and reconnect",
        evenly_short,
        _ONE,
        WorkloadReader(habit=dying),
    ),
    "impatient": _kind(
        "producers with short timeouts that drop their connection during requests", impatient
    ),
    "named": _kind("requests with an id, retried by callers with short timeouts", named),
    "paused": _kind(
        "pauses; resumes that fire all held timers, the last one or none; cancels of them",
        topic_changes.paused,
        _ONE,
        _ONE,
    ),
    "fleeting": _kind(
        "times to live that end during a lease or before a delivery; retention; a late group",
        topic_changes.fleeting,
        WorkloadReader(nacks=0.1),
        WorkloadReader(group="slow", lease=SLOW_LEASE, habit=slow, options={"max_in_flight": 4}),
        WorkloadReader(group="late", late=True),
    ),
    "limited": _kind(
        "changing quotas of pending and ready timers, changing bounds of delays and ticks",
        topic_changes.limited,
        _LATE,
    ),
    "scoped": _kind(
        "quotas, pauses and ticks of topic, namespace and cluster; the narrower scope wins",
        topic_changes.scoped,
        _LATE,
        _ONE,
        apart=True,
    ),
    "doomed": _kind(
        "a topic that is deleted with timers pending and messages leased, and made again",
        topic_changes.doomed,
        _ONE,
        _ONE,
        WorkloadReader(group="slow", lease=SLOW_LEASE, habit=slow),
    ),
    "recurring": _kind(
        "series by interval and cron, changed, paused and deleted; occurrences moved",
        series_and_order.recurring,
        WorkloadReader(nacks=0.02),
        WorkloadReader(habit=dying),
    ),
    "sequenced": _kind(
        "many timers of each ordering key, for groups that keep an order; consumers die",
        series_and_order.sequenced,
        WorkloadReader(group="keys", options=_BY_KEY, nacks=0.05),
        WorkloadReader(group="keys", options=_BY_KEY, habit=dying),
    ),
    "urgent": _kind(
        "bursts of timers with priorities, for consumers that fall behind",
        series_and_order.urgent,
        WorkloadReader(options={"max_in_flight": 8}),
        WorkloadReader(group="second"),
    ),
    "smoothed": _kind(
        "jitter, and rates of delivery of the topic and its groups",
        series_and_order.smoothed,
        _ONE,
        WorkloadReader(group="second", nacks=0.05),
    ),
    "overload": _kind(
        "bursts of large payloads, as fast as the cluster accepts them",
        overload,
        payload_size=LARGE_SIZE,
    ),
}
"""Name -> kind. The topic has the same name."""
