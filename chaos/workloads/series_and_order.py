"""Kinds of workload with series, ordering keys, priorities, jitter and rates of delivery."""

from contextlib import suppress
from functools import partial
from typing import Final

from chaos.history.history import now_ms, payload_of
from chaos.workloads.workload_clients import BEAT_S, Rest, WorkloadClients, kind
from chaos.workloads.workload_consumer import BY_KEY, ONE, WorkloadReader
from timerclient.rows.series_fields import Misfire, SeriesOptions
from timerclient.values.errors import TimerError

SOON_MS: Final = 3_000
SERIES_MAX: Final = 8
SERIES_BEATS: Final = 3
"""From one change of a series to the next."""
MISFIRES: Final[tuple[Misfire, ...]] = ("fire_once", "fire_all", "skip")
CRONS: Final = ("* * * * * *", "*/2 * * * * *", "*/15 * * * * *")
ORDERS: Final = 6
"""Ordering keys."""
PRIORITIES: Final = (9, 9, 9, 5, 4, 0)
HERD_BEATS: Final = 8
"""Beats with timers that are due in one millisecond."""
JITTER_MS: Final = 700
RULE_BEATS: Final = 48
"""From one change of the rates to the next: an old rate may still be applied for 5 seconds."""
MEETING_MS: Final = 2_000
"""From one burst of `smoothed` to the next."""


@kind(WorkloadReader(nacks=0.02), WorkloadReader(dies=True))
async def recurring(clients: WorkloadClients) -> Rest:
    """Series by interval and cron, changed, paused and deleted; occurrences moved."""
    async for number, count in clients.beats():
        await clients.schedule(count, SOON_MS)
        if number % SERIES_BEATS == 0:
            clients.after(0.0, partial(_act, clients, clients.marks(1)[0]))

    async def rest() -> bool:
        for each in await clients.client.list_series(clients.topic):
            await _delete(clients, each.key)
        return not await clients.client.list_series(clients.topic)

    return rest


async def _act(clients: WorkloadClients, mark: int) -> None:
    requests, client, topic = clients.requests, clients.client, clients.topic
    dice, known = clients.chance, []
    with suppress(TimerError):
        known = [*await client.list_series(topic)]
    if len(known) < SERIES_MAX and (not known or dice.random() < 0.5):
        key = f"series-{mark}"
        clients.books.expect([mark], series=[key])
        options: SeriesOptions = {"misfire": dice.choice(MISFIRES)}
        if dice.random() < 0.3:
            options["cron"] = dice.choice(CRONS)
        else:
            options["every"] = dice.choice((1.0, 1.3, 3.0))
        if dice.random() < 0.2:
            options["max_count"] = dice.randint(1, 5)
        payload = payload_of(mark, clients.books.payload_size)
        call = client.create_series(topic, key, payload, **options)
        await requests.change("create_series", call, key=key, said=options)
        return
    one = dice.choice(known)
    ways = ["pause", "alter", "delete", "cancel", "move"]
    match "resume" if one.paused else dice.choice(ways):
        case "alter":
            more: SeriesOptions = {"every": dice.choice((1.0, 2.5))}
            call = client.alter_series(topic, one.key, **more)
            await requests.change("alter_series", call, key=one.key, said=more)
        case "delete":
            await _delete(clients, one.key)
        case "cancel" | "move" as way if one.timer_id is not None:
            to = clients.within(now_ms() + dice.choice((0, 1500)))
            clients.requests.will_be_due(to)
            ids = [one.timer_id]
            await (requests.cancel(ids) if way == "cancel" else requests.reschedule(ids, [to]))
        case way:
            change = client.resume_series if way == "resume" else client.pause_series
            said = {"paused": way != "resume"}
            await requests.change("alter_series", change(topic, one.key), key=one.key, said=said)


async def _delete(clients: WorkloadClients, key: str) -> None:
    call = clients.client.delete_series(clients.topic, key)
    await clients.requests.change("delete_series", call, key=key)


@kind(
    WorkloadReader(group="keys", options=BY_KEY, nacks=0.05),
    WorkloadReader(group="keys", options=BY_KEY, dies=True),
)
async def sequenced(clients: WorkloadClients) -> None:
    """Many timers of each ordering key, for groups that keep an order; consumers die."""
    chance = clients.chance
    async for _, count in clients.beats():
        keys = [chance.choice((None, *range(ORDERS))) for _ in range(count)]
        names = [None if key is None else f"order-{key}" for key in keys]
        due_ms = clients.soon(count, SOON_MS)
        await clients.requests.batch(clients.marks(count), due_ms, ordering_keys=names)


@kind(WorkloadReader(options={"max_in_flight": 8}), WorkloadReader(group="second"))
async def urgent(clients: WorkloadClients) -> None:
    """Bursts of timers with priorities, for consumers that fall behind."""
    meeting = 0
    async for number, count in clients.beats():
        if number % HERD_BEATS == 0:
            meeting = clients.within(now_ms() + HERD_BEATS * BEAT_S * 1000)
        some = clients.chance.choices(PRIORITIES, k=count)
        await clients.requests.batch(clients.marks(count), [meeting] * count, priorities=some)


@kind(ONE, WorkloadReader(group="second", nacks=0.05))
async def smoothed(clients: WorkloadClients) -> Rest:
    """Jitter, and rates of delivery of the topic and its groups."""
    chance, requests = clients.chance, clients.requests
    among = ("jitter_ms", "topic_rate_max", "group_rate_max")
    async for number, count in clients.beats():
        if number % RULE_BEATS == 0:
            rate = max(2, round(count / BEAT_S))
            of_topic, of_group = chance.choice((1, 3)) * rate, chance.choice((1, 2)) * rate
            said = {"topic_rate_max": of_topic, "group_rate_max": of_group}
            said = {} if number == 2 * RULE_BEATS else said
            await requests.rule({"jitter_ms": JITTER_MS} | said, among=among)
        meeting = clients.within((now_ms() // MEETING_MS + 1) * MEETING_MS)
        clients.requests.will_be_due(meeting + JITTER_MS)
        await clients.requests.batch(clients.marks(count), [meeting] * count)
    return lambda: requests.rule({}, among=among)
