"""Kinds of workload with series, ordering keys, priorities, jitter and rates of delivery.

recurring  series are created, changed, paused and deleted; their occurrences are consumed
sequenced  many timers of each ordering key are pending, for groups that keep their order
urgent     bursts of timers with priorities
smoothed   jitter, and changing rates of topic and groups
"""

import random
from contextlib import suppress
from functools import partial
from typing import Final

from chaos.history.history import payload_of
from chaos.workloads.workload_clients import Rest, WorkloadClients
from chaos.workloads.workload_producer import now_ms
from timerclient.rows.series_fields import Misfire, SeriesOptions
from timerclient.values.errors import TimerError

BEAT_S: Final = 0.25
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
"""Beats whose timers are due in one millisecond."""
JITTER_MS: Final = 700
RULE_BEATS: Final = 48
"""From one change of the rates to the next: an old rate may still be applied for 5 seconds."""
MEETING_MS: Final = 2_000
"""From one burst of `smoothed` to the next."""


def recurring(clients: WorkloadClients) -> Rest:
    """Create series, and change, pause, resume or delete one; cancel or move its occurrence."""
    for number, count in enumerate(clients.beats(BEAT_S)):
        clients.producer.batch(clients.marks(count), clients.soon(count, SOON_MS))
        if number % SERIES_BEATS == 0:
            dice = random.Random(clients.chance.random())  # used on another thread
            clients.cancels.after(0.0, partial(_act, clients, dice, clients.marks(1)[0]))

    def rest() -> bool:
        for each in clients.client.list_series(clients.topic):
            clients.changer.delete_series(each.key)
        return not clients.client.list_series(clients.topic)

    return rest


def _act(clients: WorkloadClients, dice: random.Random, mark: int) -> None:
    changer, known = clients.changer, []
    with suppress(TimerError):
        known = [*clients.client.list_series(clients.topic)]
    if len(known) < SERIES_MAX and (not known or dice.random() < 0.5):
        key = f"series-{mark}"
        clients.books.recurring(mark, key)
        options: SeriesOptions = {"misfire": dice.choice(MISFIRES)}
        if dice.random() < 0.3:
            options["cron"] = dice.choice(CRONS)
        else:
            options["every"] = dice.choice((1.0, 1.3, 3.0))
        if dice.random() < 0.2:
            options["max_count"] = dice.randint(1, 5)
        changer.create_series(key, payload_of(mark, clients.books.payload_size), options)
        return
    one = dice.choice(known)
    ways = ["pause", "alter", "delete", "cancel", "move"]
    match "resume" if one.paused else dice.choice(ways):
        case "alter":
            changer.alter_series(one.key, {"every": dice.choice((1.0, 2.5))})
        case "delete":
            changer.delete_series(one.key)
        case "cancel" | "move" as way if one.timer_id is not None:
            to = clients.within(now_ms() + dice.choice((0, 1500)))
            clients.producer.will_be_due(to)
            ids = [one.timer_id]
            changer.cancel(ids) if way == "cancel" else changer.reschedule(ids, [to])
        case way:
            changer.pause_series(one.key, paused=way != "resume")


def sequenced(clients: WorkloadClients) -> None:
    """Schedule many timers of few ordering keys, some without one."""
    chance = clients.chance
    for count in clients.beats(BEAT_S):
        keys = [chance.choice((None, *range(ORDERS))) for _ in range(count)]
        traits = [(None if key is None else f"order-{key}", 4) for key in keys]
        clients.producer.batch(clients.marks(count), clients.soon(count, SOON_MS), traits=traits)


def urgent(clients: WorkloadClients) -> None:
    """Schedule bursts of timers with priorities, all of a burst due in one millisecond."""
    meeting = 0
    for number, count in enumerate(clients.beats(BEAT_S)):
        if number % HERD_BEATS == 0:
            meeting = clients.within(now_ms() + HERD_BEATS * BEAT_S * 1000)
        traits = [(None, clients.chance.choice(PRIORITIES)) for _ in range(count)]
        due_ms = [meeting] * count
        clients.producer.batch(clients.marks(count), due_ms, traits=traits)


def smoothed(clients: WorkloadClients) -> Rest:
    """Set a jitter, and rates of delivery around the rate of the requests, or none."""
    chance, changer = clients.chance, clients.changer
    among = ("jitter_ms", "topic_rate_max", "group_rate_max")
    for number, count in enumerate(clients.beats(BEAT_S)):
        if number % RULE_BEATS == 0:
            rate = max(2, round(count / BEAT_S))
            of_topic, of_group = chance.choice((1, 3)) * rate, chance.choice((1, 2)) * rate
            said = {"topic_rate_max": of_topic, "group_rate_max": of_group}
            said = {} if number == 2 * RULE_BEATS else said
            changer.rule({"jitter_ms": JITTER_MS} | said, among=among)
        meeting = clients.within((now_ms() // MEETING_MS + 1) * MEETING_MS)
        clients.producer.will_be_due(meeting + JITTER_MS)
        clients.producer.batch(clients.marks(count), [meeting] * count)
    return lambda: changer.rule({}, among=among)
