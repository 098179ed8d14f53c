"""The kinds of workload: what each asks for, and how its consumers behave.

Chance is aimed at edges: the same millisecond, the due time itself, the first and last instant
that a timer can have. Each function asks for timers beat by beat until it has to stop.
"""

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Final

from chaos.workloads import lives, topic_changes
from chaos.workloads.workload_clients import CLOSE_S, WorkloadClients, WorkloadKind, WorkloadReader
from chaos.workloads.workload_consumer import Habit
from chaos.workloads.workload_producer import now_ms
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
"""A racing cancel is sent within so long of the due time."""
RACES_PER_BEAT_MAX: Final = 5
"""Of cancels one by one; the others go by lists, lest they queue up behind each other."""
SLOW_LEASE: Final = timedelta(seconds=3)
DEATH_S: Final = 3.0
"""A dying consumer lives for so long."""
PATIENCE_S: Final = 0.25
IMPATIENT_BEATS: Final = 12
"""Of an impatient producer, from one dropped connection to the next."""
BURST_S: Final = 5.0
UPSERT: Final = 20
"""Timers of one keyed request."""
KEYS: Final = 20
"""Keys of either of two beginnings."""
PREFIXES: Final = 4
"""Of the keys of timers that are moved: what a filter may ask for."""
FILTER_BEATS: Final = 4
LARGE_SIZE: Final = 4096
PIECE: Final = 50


def uniform(clients: WorkloadClients) -> None:
    """Delays spread evenly."""
    _evenly(clients, UNIFORM_MS)


def evenly_short(clients: WorkloadClients) -> None:
    """Short delays: what is of interest happens at the consumers."""
    _evenly(clients, SHORT_MS)


def _evenly(clients: WorkloadClients, delay_ms_max: int) -> None:
    for count in clients.beats(BEAT_S):
        now = now_ms()
        delays = [clients.chance.uniform(0, delay_ms_max) for _ in range(count)]
        clients.producer.batch(clients.marks(count), [clients.within(now + d) for d in delays])


def herd(clients: WorkloadClients) -> None:
    """All timers of ten seconds are due in one; half of them in one and the same millisecond."""
    for count in clients.beats(2 * BEAT_S):
        meeting = (now_ms() // HERD_MS + 1) * HERD_MS
        late = [clients.chance.choice((0, clients.chance.randrange(1000))) for _ in range(count)]
        clients.producer.batch(clients.marks(count), [clients.within(meeting + ms) for ms in late])


def longtail(clients: WorkloadClients) -> None:
    """Most within a second or two, some up to the run's end, some days beyond it."""
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
    """Half go one by one, each at its due time; half by one list, due in a few milliseconds."""
    chance = clients.chance
    for count in clients.beats(BEAT_S):
        now = now_ms()
        single = min(count // 2, RACES_PER_BEAT_MAX)
        together = now + chance.uniform(300, 3000)
        due_ms = [int(now + chance.uniform(300, 3000)) for _ in range(single)]
        due_ms += [int(together + chance.randint(-5, 5)) for _ in range(count - single)]
        due_ms = [clients.within(due) for due in due_ms]
        marks = clients.marks(count)
        ids = clients.producer.batch(marks, due_ms)
        if not ids:
            continue
        for at in range(single):
            _race(clients, ids[at : at + 1], marks[at : at + 1], due_ms[at])
        _race(clients, ids[single:], marks[single:], due_ms[-1])


def _race(clients: WorkloadClients, ids: list[str], marks: list[int], due_ms: int) -> None:
    """Cancel around the due time, a few at once; perhaps some twice, or again after a while."""
    chance = clients.chance
    delay_s = (due_ms + chance.uniform(-RACE_MS, RACE_MS) - now_ms()) / 1000
    if chance.random() < 0.2:
        delay_s = 0.0
    chosen = [at for at in range(len(ids)) if chance.random() < 0.8]
    if not chosen:
        return
    if len(chosen) > 1 and chance.random() < 0.5:
        chosen.append(chance.choice(chosen))
    work = partial(
        clients.producer.cancel, [ids[at] for at in chosen], [marks[at] for at in chosen]
    )
    clients.cancels.after(delay_s, work)
    if chance.random() < 0.3:
        clients.cancels.after(delay_s + chance.choice((0.0, chance.uniform(0, 2))), work)


_MODES: Final[tuple[OnConflict, ...]] = ("reject", "replace", "replace", "update", "keep")


def keyed(clients: WorkloadClients) -> None:
    """Upserts of few keys in all modes, some at once; cancels and reschedules of the same keys."""
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
                later(0.0, work)  # it races with the next
        some = sorted({_key(chance) for _ in range(3)})
        if chance.random() < 0.5:
            later(chance.uniform(0, 1), partial(clients.changer.cancel_keys, some))
        else:
            to = [clients.within(now + chance.uniform(-100, 4000)) for _ in some]
            clients.producer.will_be_due(max(to))
            later(chance.uniform(0, 1), partial(clients.changer.reschedule_keys, some, to))


def _key(chance: random.Random) -> str:
    """Return one of few keys, so that most are taken."""
    return f"{chance.choice('ab')}/{chance.randrange(KEYS)}"


def moved(clients: WorkloadClients) -> None:
    """Reschedules around the due time, again under the new ids; now and then all of a range."""
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
    """Reschedule around the due time; the new timers again, and sometimes cancel old ones."""
    chance = random.Random(clients.chance.random())  # it is used on other threads, too
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
    """Return another due time for a timer: most later, some at once."""
    to = clients.within(due_ms + clients.chance.choice((-3000, 0, 1, 500, 2000)))
    clients.producer.will_be_due(to)
    return to


def _around_s(chance: random.Random, due_ms: float) -> float:
    """Return the seconds until a moment around a due time, or none."""
    if chance.random() < 0.2:
        return 0.0
    return max(0.0, (due_ms + chance.uniform(-RACE_MS, RACE_MS) - now_ms()) / 1000)


def _sweep(clients: WorkloadClients, *, cancels: bool) -> None:
    """Cancel or reschedule all that is due in a range, with keys that begin alike or with any."""
    chance = random.Random(clients.chance.random())  # it is used on another thread

    def work() -> None:
        start = now_ms() + chance.randint(0, 1500)  # of when it is asked for: that may be late
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
    """Due now, a moment ago, long ago, at the epoch; in batches, and by a delay of zero."""
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


def groups(clients: WorkloadClients) -> None:
    """A further group joins after a third of the time, and begins with what is left then."""
    late_ms = clients.start_ms + (clients.end_ms - clients.start_ms) // 3
    late = WorkloadReader(group="late")
    joined = False
    for count in clients.beats(BEAT_S):
        if not joined and now_ms() >= late_ms:
            clients.join(late)
            joined = True
        now = now_ms()
        delays = [clients.chance.uniform(0, SHORT_MS) for _ in range(count)]
        clients.producer.batch(clients.marks(count), [clients.within(now + d) for d in delays])
    if not joined:
        clients.join(late)


def singles(clients: WorkloadClients) -> None:
    """Requests of one, several of them under way at once, a delay, and a batch of the rest."""
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
    """Calls that hardly wait; now and then the connection goes in the middle of some.

    What was not answered is not asked for again: it may have happened, and the client itself
    has repeated it, as the same sequence, for as long as the call took.
    """
    own = clients.connect()
    clients.producer.client = own
    for number, count in enumerate(clients.beats(BEAT_S)):
        now = now_ms()
        due_ms = [clients.within(now + clients.chance.uniform(0, 3000)) for _ in range(count)]
        marks = clients.marks(count)
        if number % IMPATIENT_BEATS < IMPATIENT_BEATS - 1:
            clients.producer.batch(marks, due_ms, timeout_s=PATIENCE_S)
            continue
        for mark, due in zip(marks, due_ms, strict=True):
            clients.producer.submit([mark], [due])
        clients.producer.client = clients.connect()
        clients.drop(own)
        own = clients.producer.client


def named(clients: WorkloadClients) -> None:
    """Requests with an id, asked for again and again by callers that hardly wait."""
    for count in clients.beats(BEAT_S):
        now = now_ms()
        due_ms = [clients.within(now + clients.chance.uniform(0, 3000)) for _ in range(count)]
        marks = clients.marks(count)
        patience_s = clients.chance.choice((0.002, 0.02, PATIENCE_S))
        clients.producer.named(marks, due_ms, f"named-{marks[0]}", patience_s=patience_s)


def overload(clients: WorkloadClients) -> None:
    """Bursts of large payloads, all under way at once; a pause when the cluster asks for one."""
    chance = clients.chance
    for count in clients.beats(BURST_S):
        now, pieces = now_ms(), []
        for start in range(0, count, PIECE):
            n = min(PIECE, count - start)
            due_ms = [clients.within(now + chance.uniform(0, SHORT_MS)) for _ in range(n)]
            piece = clients.producer.submit(clients.marks(n), due_ms, timeout_s=BURST_S)
            if piece is not None:
                pieces.append(piece)
        pause_ms = max(map(_pause_ms, wait(pieces, CLOSE_S).done), default=0)
        time.sleep(pause_ms / 1000)


def _pause_ms(piece: "Future[Timers]") -> int:
    error = piece.exception()
    return error.retry_after_ms if isinstance(error, Overloaded) else 0


# ---- consumers


def slow(clients: WorkloadClients) -> Habit:
    """Return the habit of acking some messages around the end of their lease, or after it."""
    chance = clients.habit_chance

    def habit(ack: Callable[[], None]) -> bool:
        if clients.stopping or chance.random() < 0.7:
            ack()
        else:
            clients.acks.after(SLOW_LEASE.total_seconds() * chance.uniform(0.8, 1.6), ack)
        return True

    return habit


def dying(clients: WorkloadClients) -> Habit:
    """Return the habit of dying every few seconds, with messages and acks in hand."""
    last_s = time.monotonic()

    def habit(ack: Callable[[], None]) -> bool:
        nonlocal last_s
        if clients.stopping or time.monotonic() - last_s < DEATH_S:
            ack()
            return True
        last_s = time.monotonic()
        return False

    return habit


_TWO: Final = (WorkloadReader(), WorkloadReader())
KINDS: Final[Mapping[str, WorkloadKind]] = {
    "uniform": WorkloadKind(
        line="delays spread evenly over some seconds", produce=uniform, readers=_TWO
    ),
    "herd": WorkloadKind(line="all timers of ten seconds due in the same second", produce=herd),
    "longtail": WorkloadKind(
        line="mostly short delays, some up to the horizon, some days beyond the run's end",
        produce=longtail,
    ),
    "cancels": WorkloadKind(
        line="cancels within 50 ms of the due time, repeated, of cancelled ones, by lists",
        produce=cancels,
    ),
    "keyed": WorkloadKind(
        line="upserts of few keys in all four modes, and their cancels and reschedules",
        produce=keyed,
    ),
    "moved": WorkloadKind(
        line="reschedules around the due time, by id, key and filter; cancels by filter",
        produce=moved,
    ),
    "pastdue": WorkloadKind(line="due at once, just now, or long ago", produce=pastdue),
    "groups": WorkloadKind(
        line="several groups on one topic; one of them starts late",
        produce=groups,
        readers=(
            WorkloadReader(group="first"),
            WorkloadReader(group="second"),
            WorkloadReader(group="second"),
        ),
    ),
    "singles": WorkloadKind(
        line="single schedules, pipelined and not, among batches of all sizes", produce=singles
    ),
    "slow": WorkloadKind(
        line="consumers that ack around and after the end of their lease",
        produce=evenly_short,
        readers=(
            WorkloadReader(lease=SLOW_LEASE),
            WorkloadReader(lease=SLOW_LEASE, hold_max=0, habit=slow),
        ),
    ),
    "nacking": WorkloadKind(
        line="consumers that give messages back, to come at once or later, and hold some longer",
        produce=evenly_short,
        readers=(
            WorkloadReader(nacks=0.2),
            WorkloadReader(nacks=0.05),
            WorkloadReader(group="backing-off", nacks=0.3),
        ),
    ),
    "ordered": WorkloadKind(
        line="keyed timers for groups that keep an order; some are given back, a consumer dies",
        produce=keyed,
        readers=(
            WorkloadReader(group="keys", options={"type": "key_shared"}, nacks=0.05),
            WorkloadReader(group="keys", options={"type": "key_shared"}, habit=dying),
            WorkloadReader(group="queue", options={"type": "failover"}, nacks=0.01),
            WorkloadReader(group="queue", options={"type": "failover"}, habit=dying),
            WorkloadReader(group="alone", options={"type": "exclusive"}, nacks=0.01, habit=dying),
        ),
    ),
    "failing": WorkloadKind(
        line="consumers that fail again and again: what becomes a dead letter is looked for there",
        produce=evenly_short,
        readers=(
            WorkloadReader(group="strict", nacks=0.3, options={"max_attempts": 2}),
            WorkloadReader(
                group="strict",
                lease=SLOW_LEASE,
                hold_max=0,
                habit=slow,
                options={"max_attempts": 2},
            ),
            WorkloadReader(),
        ),
    ),
    "redriven": WorkloadKind(
        line="messages die and are redriven, some again and again, until all of them are acked",
        produce=lives.redriven,
        readers=(
            WorkloadReader(
                group=lives.STRICT, nacks=0.3, options={"max_attempts": 2}, redriven=True
            ),
            WorkloadReader(
                group=lives.STRICT,
                lease=SLOW_LEASE,
                habit=slow,
                options={"max_attempts": 2},
                redriven=True,
            ),
            WorkloadReader(),
        ),
        settle=lives.all_home,
    ),
    "sought": WorkloadKind(
        line="groups sought back, ahead and to a time, reset, deleted and made anew",
        produce=lives.sought,
        readers=(
            WorkloadReader(group=lives.SOUGHT, nacks=0.05),
            WorkloadReader(group=lives.SOUGHT, lease=SLOW_LEASE, habit=slow),
            WorkloadReader(group=lives.ANEW),
            WorkloadReader(),
        ),
        settle=lives.all_acked,
    ),
    "dying": WorkloadKind(
        line="consumers that drop their connection holding leases, and come back",
        produce=evenly_short,
        readers=(WorkloadReader(), WorkloadReader(habit=dying)),
    ),
    "impatient": WorkloadKind(
        line="producers that give up early, and drop their connection in mid-request",
        produce=impatient,
    ),
    "named": WorkloadKind(
        line="requests with an id, by callers that hardly wait and ask again", produce=named
    ),
    "paused": WorkloadKind(
        line="pauses and resumes: what was held comes, or the last of it, or nothing; its cancels",
        produce=topic_changes.paused,
        readers=_TWO,
    ),
    "fleeting": WorkloadKind(
        line="times to live that end under a lease, or unseen; retention, and a group that is late",
        produce=topic_changes.fleeting,
        readers=(
            WorkloadReader(nacks=0.1),
            WorkloadReader(
                group="slow", lease=SLOW_LEASE, habit=slow, options={"max_in_flight": 4}
            ),
        ),
        settle=topic_changes.all_expired,
    ),
    "limited": WorkloadKind(
        line="quotas of what is pending and ready, limits of delays and ticks, which all change",
        produce=topic_changes.limited,
        readers=(WorkloadReader(lease=SLOW_LEASE, habit=slow),),
    ),
    "scoped": WorkloadKind(
        line="what topic, namespace and cluster say: quotas, pauses, ticks; the narrower wins",
        produce=topic_changes.scoped,
        readers=(WorkloadReader(lease=SLOW_LEASE, habit=slow), WorkloadReader()),
        apart=True,
    ),
    "doomed": WorkloadKind(
        line="a topic that is deleted with timers pending and messages leased, and made again",
        produce=topic_changes.doomed,
        readers=(*_TWO, WorkloadReader(group="slow", lease=SLOW_LEASE, habit=slow)),
    ),
    "overload": WorkloadKind(
        line="bursts of large payloads, as fast as the cluster takes them",
        produce=overload,
        payload_size=LARGE_SIZE,
    ),
}
"""By name, which is the topic's, too."""
