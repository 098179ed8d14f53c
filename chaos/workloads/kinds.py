"""Kinds of workload: the requests of each one's producer, and its consumers.

Random values are often at edges: the same millisecond, the due time itself, the first and the last
instant that a timer can have. Each producing function sends requests beat by beat until it has to
stop. Its docstring is the line of the kind in `timerctl chaos list`, and its topic has its name.
"""

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Final

from chaos.history.history import now_ms
from chaos.workloads.workload_clients import BEAT_S, WorkloadClients, kind
from chaos.workloads.workload_consumer import BY_KEY, LATE, LETTERS, ONE, STRICT, WorkloadReader
from timerclient.rows.pending_timers import Where
from timerclient.values.errors import Overloaded

UNIFORM_MS: Final = 20_000
SHORT_MS: Final = 5_000
HERD_MS: Final = 10_000
"""From one herd to the next."""
DAY_MS: Final = 86_400_000
RACE_MS: Final = 50
"""A racing cancel is sent at most this long before or after the due time."""
RACES_PER_BEAT_MAX: Final = 5
"""Cancels sent singly. Further ones are sent as a list, so that none waits behind another."""
PATIENCE_S: Final = 0.25
"""Timeout of an impatient producer's calls."""
DROP_S: Final = 0.02
"""The longest time from its last requests to the drop of a connection."""
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


@kind(ONE, ONE)
async def uniform(clients: WorkloadClients) -> None:
    """Delays are spread evenly over some seconds."""
    await _evenly(clients, UNIFORM_MS)


async def _evenly(clients: WorkloadClients, delay_ms_max: int = SHORT_MS) -> None:
    async for _, count in clients.beats():
        await clients.schedule(count, delay_ms_max)


@kind()
async def herd(clients: WorkloadClients) -> None:
    """All timers of ten seconds are due in the same second, half of them in one millisecond."""
    async for _, count in clients.beats(2 * BEAT_S):
        meeting = (now_ms() // HERD_MS + 1) * HERD_MS
        late = [clients.chance.choice((0, clients.chance.randrange(1000))) for _ in range(count)]
        due_ms = [clients.within(meeting + ms) for ms in late]
        await clients.requests.batch(clients.marks(count), due_ms)


@kind()
async def longtail(clients: WorkloadClients) -> None:
    """Delays are mostly short, some up to the run's end, some days beyond it."""
    chance = clients.chance
    async for _, count in clients.beats(2 * BEAT_S):
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
            await clients.requests.batch(clients.marks(len(near)), due_ms)
        if far:
            await clients.requests.batch(clients.marks(len(far)), far, expected=False)


@kind()
async def cancels(clients: WorkloadClients) -> None:
    """Cancels within 50 ms of the due time, singly and by lists, some repeated."""
    chance = clients.chance
    async for _, count in clients.beats():
        now = now_ms()
        single = min(count // 2, RACES_PER_BEAT_MAX)
        together = now + chance.uniform(300, 3000)
        due_ms = [int(now + chance.uniform(300, 3000)) for _ in range(single)]
        due_ms += [int(together + chance.randint(-5, 5)) for _ in range(count - single)]
        due_ms = [clients.within(due) for due in due_ms]
        ids = (await clients.requests.batch(clients.marks(count), due_ms)).ids
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
    work = partial(clients.requests.cancel, [ids[at] for at in chosen])
    clients.after(delay_s, work)
    if chance.random() < 0.3:
        clients.after(delay_s + chance.choice((0.0, chance.uniform(0, 2))), work)


_MODES: Final = ("reject", "replace", "replace", "update", "keep")


@kind()
async def keyed(clients: WorkloadClients) -> None:
    """Upserts of few keys in all four modes, and their cancels and reschedules."""
    chance, later = clients.chance, clients.after
    async for _, count in clients.beats():
        now = now_ms()
        for start in range(0, count, UPSERT):
            n = min(UPSERT, count - start)
            due_ms = [clients.within(now + chance.uniform(-100, 4000)) for _ in range(n)]
            mode = chance.choice(_MODES)
            keyed = 1.0 if mode == "update" else 0.9
            names = [_key(chance) if chance.random() < keyed else None for _ in range(n)]
            batch = partial(clients.requests.batch, clients.marks(n), due_ms)
            work = partial(batch, keys=names, on_conflict=mode)
            if chance.random() < 0.5:
                await work()
            else:
                later(0.0, work)  # in parallel with the next one
        some = sorted({_key(chance) for _ in range(3)})
        if chance.random() < 0.5:
            later(chance.uniform(0, 1), partial(clients.requests.cancel_keys, some))
        else:
            to = [clients.within(now + chance.uniform(-100, 4000)) for _ in some]
            clients.requests.will_be_due(max(to))
            later(chance.uniform(0, 1), partial(clients.requests.reschedule_keys, some, to))


def _key(chance: random.Random) -> str:
    """Return one of few keys, so that most of them have a pending timer."""
    return f"{chance.choice('ab')}/{chance.randrange(KEYS)}"


@kind()
async def moved(clients: WorkloadClients) -> None:
    """Reschedules around the due time, by id, key and filter; cancels by filter."""
    chance = clients.chance
    async for number, count in clients.beats():
        now = now_ms()
        together = now + chance.uniform(300, 2000)
        due_ms = [clients.within(together + chance.randint(-5, 5)) for _ in range(count)]
        marks = clients.marks(count)
        keys = [f"{mark // 2 % PREFIXES}/{mark}" if mark % 2 else None for mark in marks]
        done = await clients.requests.batch(marks, due_ms, keys=keys, on_conflict="reject")
        ids = done.ids
        at = [place for place in range(len(ids)) if chance.random() < 0.7]
        if at:
            _move(clients, [ids[place] for place in at], together)
        named = [key for key in keys if key and chance.random() < 0.3]
        if named:
            to = [_new_due(clients, together) for _ in named]
            work = partial(clients.requests.reschedule_keys, named, to)
            clients.after(_around_s(chance, together), work)
        if number % FILTER_BEATS == 0:
            _sweep(clients, cancels=number % (2 * FILTER_BEATS) == 0)


def _move(clients: WorkloadClients, ids: list[str], due_ms: float) -> None:
    """Reschedule timers around their due time, then the new timers; sometimes cancel old ids."""
    chance, to = clients.chance, _new_due(clients, due_ms)

    async def work() -> None:
        new = await clients.requests.reschedule(ids, [to] * len(ids))
        if chance.random() < 0.3:
            await clients.requests.cancel(ids[:3])
        if new and not clients.stopping:
            later_ms = clients.within(to + 500)
            clients.requests.will_be_due(later_ms)
            again = partial(clients.requests.reschedule, new, [later_ms] * len(new))
            clients.after(_around_s(chance, to), again)

    clients.after(_around_s(chance, due_ms), work)


def _new_due(clients: WorkloadClients, due_ms: float) -> int:
    """Return a new due time for a timer: most are later, some are now."""
    to = clients.within(due_ms + clients.chance.choice((-3000, 0, 1, 500, 2000)))
    clients.requests.will_be_due(to)
    return to


def _around_s(chance: random.Random, due_ms: float) -> float:
    """Return the seconds until a moment within RACE_MS of a due time; for one in five, 0."""
    if chance.random() < 0.2:
        return 0.0
    return max(0.0, (due_ms + chance.uniform(-RACE_MS, RACE_MS) - now_ms()) / 1000)


def _sweep(clients: WorkloadClients, *, cancels: bool) -> None:
    """Cancel or reschedule all timers that are due in a range, with one prefix of keys or any."""
    chance = clients.chance

    async def work() -> None:
        start = now_ms() + chance.randint(0, 1500)
        where: Where = {"due_from": start, "due_to": start + chance.choice((50, 300, 2000))}
        if chance.random() < 0.7:
            where["key_prefix"] = f"{chance.randrange(PREFIXES)}/"
        if cancels:
            await clients.requests.cancel_where(where)
        elif not clients.stopping:
            to = clients.within(start + 500)
            clients.requests.will_be_due(to)
            await clients.requests.reschedule_where(where, to)

    clients.after(0.0, work)


@kind()
async def pastdue(clients: WorkloadClients) -> None:
    """Timers are due at once, just now, or long ago."""
    chance = clients.chance
    async for _, count in clients.beats():
        now = now_ms()
        edges = (0, 1, now, now - 1, now + 1, now - 10, now - DAY_MS)
        past = ((chance.choice(edges), now - chance.randrange(5000)) for _ in range(count))
        due_ms = [*map(chance.choice, past)]
        await clients.requests.batch(clients.marks(count), due_ms)
        await clients.requests.single(clients.marks(1)[0], 0.0)


@kind()
async def singles(clients: WorkloadClients) -> None:
    """Single timers, pipelined or not, among batches of all sizes."""
    chance = clients.chance
    async for _, count in clients.beats():
        now = now_ms()
        alone = chance.randint(0, min(count, 20))
        for mark in clients.marks(alone):
            due_ms = [clients.within(now + chance.uniform(-100, 3000))]
            clients.after(0.0, partial(clients.requests.batch, [mark], due_ms))
        await clients.requests.single(clients.marks(1)[0], chance.uniform(0, 1))
        rest = count - alone - 1
        if rest > 0:
            due_ms = [clients.within(now + chance.uniform(-100, 3000)) for _ in range(rest)]
            await clients.requests.batch(clients.marks(rest), due_ms)


@kind()
async def impatient(clients: WorkloadClients) -> None:
    """Producers with short timeouts drop their connection during requests.

    An unanswered request is not sent again. It may have taken effect, and the client itself has
    retried it with the same sequence number until the timeout.
    """
    own = clients.connect()
    clients.requests.client = own
    async for number, count in clients.beats():
        marks, due_ms = clients.marks(count), clients.soon(count, 3000)
        if number % IMPATIENT_BEATS < IMPATIENT_BEATS - 1:
            await clients.requests.batch(marks, due_ms, timeout_s=PATIENCE_S)
            continue
        for mark, due in zip(marks, due_ms, strict=True):
            clients.after(0.0, partial(clients.requests.batch, [mark], [due]))
        await asyncio.sleep(clients.chance.uniform(0, DROP_S))
        clients.requests.client = clients.connect()
        await clients.drop(own)
        own = clients.requests.client


@kind()
async def named(clients: WorkloadClients) -> None:
    """Requests with an id are retried by callers with short timeouts."""
    async for _, count in clients.beats():
        marks, due_ms = clients.marks(count), clients.soon(count, 3000)
        patience_s = clients.chance.choice((0.002, 0.02, PATIENCE_S))
        await clients.requests.send_named(marks, due_ms, f"named-{marks[0]}", patience_s=patience_s)


@kind(payload_size=LARGE_SIZE)
async def overload(clients: WorkloadClients) -> None:
    """Bursts of large payloads, as fast as the cluster accepts them."""
    async for _, count in clients.beats(BURST_S):
        pieces = []
        for start in range(0, count, PIECE):
            n = min(PIECE, count - start)
            due_ms = clients.soon(n, SHORT_MS)
            pieces.append(clients.requests.batch(clients.marks(n), due_ms, timeout_s=BURST_S))
        errors = [ended.error for ended in await asyncio.gather(*pieces)]
        waits_ms = [each.retry_after_ms for each in errors if isinstance(each, Overloaded)]
        await asyncio.sleep(max(waits_ms, default=0) / 1000)


# ---- kinds that differ in their consumers only


@kind(
    WorkloadReader(group="first"),
    WorkloadReader(group="second"),
    WorkloadReader(group="second"),
    WorkloadReader(group="late", late=True),
)
async def groups(clients: WorkloadClients) -> None:
    """Several groups on one topic; one of them starts late."""
    await _evenly(clients)


@kind(WorkloadReader(lease=LATE.lease), replace(LATE, hold_max=0))
async def slow(clients: WorkloadClients) -> None:
    """Consumers ack around and after the end of their lease."""
    await _evenly(clients)


@kind(
    WorkloadReader(nacks=0.2),
    WorkloadReader(nacks=0.05),
    WorkloadReader(group="backing-off", nacks=0.3),
)
async def nacking(clients: WorkloadClients) -> None:
    """Consumers nack messages, with and without a delay, and extend some leases."""
    await _evenly(clients)


@kind(
    WorkloadReader(group="keys", options=BY_KEY, nacks=0.05),
    WorkloadReader(group="keys", options=BY_KEY, dies=True),
    WorkloadReader(group="queue", options={"type": "failover"}, nacks=0.01),
    WorkloadReader(group="queue", options={"type": "failover"}, dies=True),
    WorkloadReader(group="alone", options={"type": "exclusive"}, nacks=0.01, dies=True),
)
async def ordered(clients: WorkloadClients) -> None:
    """Keyed timers for groups that keep an order; some are nacked, consumers die."""
    await keyed.produce(clients)


@kind(
    WorkloadReader(group=LETTERS, dead_of="strict"),
    WorkloadReader(group="strict", options=STRICT, nacks=0.3),
    replace(LATE, group="strict", options=STRICT, hold_max=0),
    ONE,
)
async def failing(clients: WorkloadClients) -> None:
    """Consumers fail repeatedly; dead letters are consumed from their own topic."""
    await _evenly(clients)


@kind(ONE, WorkloadReader(dies=True))
async def dying(clients: WorkloadClients) -> None:
    """Consumers drop their connection while they hold leases, and reconnect."""
    await _evenly(clients)
