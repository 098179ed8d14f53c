"""Workloads that change the rules of their topic while its timers are pending.

Each function returns a `Rest`, which ends the rules of the topic.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from chaos.history.history import now_ms
from chaos.workloads.history_books import GROUP, PAYLOAD_SIZE
from chaos.workloads.recorded_requests import CLUSTER, NAMESPACE, TOPIC
from chaos.workloads.workload_clients import BEAT_S, Rest, WorkloadClients, kind
from chaos.workloads.workload_consumer import LATE, ONE, WorkloadReader
from timerclient.values.policy_names import CatchUp

SOON_MS: Final = 3_000
PAUSE_BEATS: Final = 8
"""From one pause to the next. A pause lasts half as long."""
CATCH_UPS: Final[Sequence[CatchUp]] = ("drop", "latest", "all")
SETTLED_MS: Final = 500
"""From a timer's due time to its cancel. The release of held timers has ended by then."""
RULE_BEATS: Final = 6
"""From one change of the rules to the next."""
PIECES: Final = 4
"""Requests of a beat that compete for room."""
LIFE_BEATS: Final = 10
"""From the creation of a topic to its deletion."""
LAST_TIMERS: Final = 50
"""In the last topic, which is not deleted."""

TTLS_MS: Final = (300, 1_000, 4_000)
RETENTIONS_MS: Final = (0, 2_000, 60_000)

SCOPE_BEATS: Final = 2
"""From one change of a scope's rules to the next."""
MUCH: Final = 1_000_000

_SCOPES: Final[Mapping[str, Mapping[str, Callable[[int], Sequence[int]]]]] = {
    TOPIC: {
        "pending_max": lambda count: (0, count, MUCH),
        "pending_bytes_max": lambda count: (count * PAYLOAD_SIZE, MUCH),
        "ready_max": lambda _: (0, MUCH),
        "paused": lambda _: (False,),
        "tick_ms": lambda _: (10,),
    },
    NAMESPACE: {
        "pending_max": lambda count: (0, count, 4 * count),
        "pending_bytes_max": lambda count: (0, 2 * count * PAYLOAD_SIZE),
        "ready_max": lambda count: (0, count),
        "paused": lambda _: (True,),
        "tick_ms": lambda _: (250,),
    },
    CLUSTER: {
        "pending_max": lambda _: (MUCH,),
        "ready_bytes_max": lambda _: (1 << 40,),
        "retention_ms": lambda _: (0, 2_000),
        "tick_ms": lambda _: (20, 50),
    },
}
"""Scope -> field -> its possible values, given the number of timers in a beat."""
_QUOTAS: Final = ("pending_max", "pending_bytes_max", "ready_max", "ready_bytes_max")
_RULES: Final = (*_QUOTAS, "tick_ms", "delay_ms_min", "delay_ms_max")

RequestedTimer = tuple[int, str]
"""A timer: due time, id."""


@kind(ONE, ONE)
async def paused(clients: WorkloadClients) -> Rest:
    """Pauses; resumes that fire all held timers, the last one or none; cancels of them.

    A resume that drops timers does not name them. So all doubtful timers are cancelled later, and
    each answer shows whether the timer was dropped.
    """
    chance, requests = clients.chance, clients.requests
    asked: list[RequestedTimer] = []
    doubtful: list[RequestedTimer] = []
    async for number, count in clients.beats():
        due_ms = _soon(clients, count)
        ids = (await clients.requests.batch(clients.marks(count), due_ms)).ids
        asked += zip(due_ms, ids, strict=False)  # no ids: refused or unknown
        cycle, beat = divmod(number, PAUSE_BEATS)
        if beat == 0:
            await requests.pause()
        elif beat == PAUSE_BEATS // 2:
            catch_up = CATCH_UPS[cycle % len(CATCH_UPS)]
            if some := chance.sample(asked, min(len(asked), 2)):
                clients.after(0.0, partial(_cancel, clients, some))  # during the release
            await requests.resume(catch_up)
            if catch_up != "all":
                doubtful, asked = doubtful + asked, []
        elif beat > PAUSE_BEATS // 2:
            over_ms = now_ms() - SETTLED_MS
            over = [timer for timer in doubtful if timer[0] <= over_ms]
            if over and await _cancel(clients, over):
                doubtful = [timer for timer in doubtful if timer[0] > over_ms]

    async def rest() -> bool:
        if not await requests.resume("all"):
            return False
        return await _fires(clients) and (not doubtful or await _cancel(clients, doubtful))

    return rest


async def _fires(clients: WorkloadClients) -> bool:
    """Return whether no timer of the topic is held."""
    topic = await clients.client.describe_topic(clients.topic)
    return not (topic.paused or topic.held or topic.releasing)


async def _cancel(clients: WorkloadClients, timers: Sequence[RequestedTimer]) -> bool:
    return await clients.requests.cancel([id_ for _, id_ in timers])


@kind(
    WorkloadReader(nacks=0.1),
    replace(LATE, group="slow", options={"max_in_flight": 4}),
    WorkloadReader(group="late", late=True),
)
async def fleeting(clients: WorkloadClients) -> Rest:
    """Times to live end during a lease or before a delivery; retention; a late group."""
    chance, requests, among = clients.chance, clients.requests, ("ttl_ms", "retention_ms")
    async for number, count in clients.beats():
        if number % RULE_BEATS == 0:
            said = {"ttl_ms": chance.choice(TTLS_MS), "retention_ms": chance.choice(RETENTIONS_MS)}
            await requests.rule(_some(chance, said), among=among)
            due_ms = now_ms() - chance.choice((200, 2_000, 9_000))
            await clients.requests.batch(clients.marks(1), [due_ms])
        await clients.requests.batch(clients.marks(count), _soon(clients, count))
    return lambda: requests.rule({}, among=among)


@kind(LATE)
async def limited(clients: WorkloadClients) -> Rest:
    """Changing quotas of pending and ready timers, changing bounds of delays and ticks."""
    chance, requests = clients.chance, clients.requests
    async for number, count in clients.beats():
        if number % RULE_BEATS == 0:
            rows = {"pending_max": (0, count, 4 * count), "ready_max": (0, count, 4 * count)}
            said = {name: chance.choice(values) for name, values in rows.items()}
            said |= {f"{n[:-4]}_bytes_max": v * PAYLOAD_SIZE for n, v in said.items()}
            said |= {"tick_ms": 250, "delay_ms_min": 200, "delay_ms_max": SOON_MS // 2}
            await requests.rule(_some(chance, said), among=_RULES)
        _compete(clients, count)
    return lambda: requests.rule({}, among=_RULES)


@kind(LATE, ONE, in_own_namespace=True)
async def scoped(clients: WorkloadClients) -> Rest:
    """Quotas, pauses and ticks of topic, namespace and cluster; the narrower scope wins.

    The cluster's policy applies to all workloads, so it gets only values that do not restrict the
    others.
    """
    chance, requests = clients.chance, clients.requests
    async for number, count in clients.beats():
        if number % SCOPE_BEATS == 0:
            scope = chance.choice((*_SCOPES, NAMESPACE))  # twice: its values restrict most
            may = {name: chance.choice(of(count)) for name, of in _SCOPES[scope].items()}
            await requests.rule(_some(chance, may), among=_SCOPES[scope], scope=scope)
        _compete(clients, count)

    async def rest() -> bool:
        scopes = _SCOPES.items()
        done = [await requests.rule({}, among=fields, scope=each) for each, fields in scopes]
        return all(done) and await _fires(clients)

    return rest


@kind(ONE, ONE, replace(LATE, group="slow"))
async def doomed(clients: WorkloadClients) -> Rest:
    """A topic is deleted with timers pending and messages leased, and made again."""
    requests = clients.requests
    async for number, count in clients.beats():
        marks, due_ms = clients.marks(count), _soon(clients, count)
        half = count // 2
        if count > half:
            clients.after(0.0, partial(requests.batch, marks[half:], due_ms[half:]))
        if number % LIFE_BEATS == LIFE_BEATS - 1:
            await requests.delete()
        elif half:
            ids = (await requests.batch(marks[:half], due_ms[:half])).ids
            if ids and number % LIFE_BEATS == LIFE_BEATS - 2:
                delay_s = clients.chance.uniform(0, 2 * BEAT_S)
                clients.after(delay_s, partial(requests.cancel, ids))

    async def rest() -> bool:
        if not await requests.delete():
            return False
        for group in (GROUP, "slow"):  # each begins with the first timer
            await clients.client.create_group(clients.topic, group)
        marks = clients.marks(LAST_TIMERS)
        return bool((await requests.batch(marks, _soon(clients, LAST_TIMERS))).ids)

    return rest


def _compete(clients: WorkloadClients, count: int) -> None:
    """Send the timers of a beat in several requests at once: the first ones get the room."""
    piece = -(-count // PIECES)
    for start in range(0, count, piece):
        n = min(piece, count - start)
        clients.after(0.0, partial(clients.requests.batch, clients.marks(n), _soon(clients, n)))


def _soon(clients: WorkloadClients, count: int) -> list[int]:
    """Return due times: most in the next seconds, some now or a moment ago."""
    now, chance = now_ms(), clients.chance
    return [
        clients.within(now + chance.choice((0, -20, *[chance.uniform(0, SOON_MS)] * 6)))
        for _ in range(count)
    ]


def _some(chance: random.Random, values: Mapping[str, int]) -> dict[str, int]:
    """Return one to three of the fields."""
    names = chance.sample(sorted(values), chance.randint(1, min(3, len(values))))
    return {name: values[name] for name in names}
