"""Kinds of workload with messages that come back, or groups that begin again.

The audit judges which messages had to arrive. It knows the log, and so the messages that a seek
skipped.
"""

from asyncio import Lock
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chaos.history.history import now_ms
from chaos.workloads.workload_clients import Rest, WorkloadClients, kind
from chaos.workloads.workload_consumer import LATE, ONE, STRICT, WorkloadReader
from timerclient.client.group_calls import Start
from timerclient.values.errors import TimerError

SHORT_MS: Final = 3_000
DEADLY: Final = "strict"
"""Name of the group with dead letters."""
REDRIVE_BEATS: Final = 5
"""Beats from one redrive to the next, and from one seek to the next."""
REDRIVEN: Final = (None, None, 1, 20)
"""The most letters of a redrive; None: all."""
SOUGHT: Final = "sought"
REMADE: Final = "anew"
"""The group that is deleted and created again."""
REMADE_BEATS: Final = 14
RULE_BEATS: Final = 24
"""Beats from one change of the retention to the next."""
KEPT_MS: Final = 60_000
BACK_MAX: Final = 200
"""The most messages that a seek goes back."""


async def redrive_all(clients: WorkloadClients) -> None:
    """Redrive all letters."""
    await clients.requests.redrive(_letters_of(clients), None)


@kind(
    WorkloadReader(group=DEADLY, options=STRICT, nacks=0.3),
    replace(LATE, group=DEADLY, options=STRICT),
    ONE,
    settle=redrive_all,
)
async def redriven(clients: WorkloadClients) -> None:
    """Dead letters are redriven, some repeatedly, until all messages are acked."""
    async for number, count in clients.beats():
        await clients.schedule(count, SHORT_MS)
        if number % REDRIVE_BEATS == REDRIVE_BEATS - 1:
            most = clients.chance.choice(REDRIVEN)
            clients.after(0.0, partial(clients.requests.redrive, _letters_of(clients), most))


def _letters_of(clients: WorkloadClients) -> str:
    return f"{clients.topic}.{DEADLY}.dead"


@kind(
    WorkloadReader(group=SOUGHT, nacks=0.05),
    replace(LATE, group=SOUGHT),
    WorkloadReader(group=REMADE),
    ONE,
)
async def sought(clients: WorkloadClients) -> Rest:
    """Seeks of groups back, ahead and to a time; groups reset, deleted and created again."""
    chance, requests, one_by_one = clients.chance, clients.requests, Lock()
    among = ("retention_ms",)
    async for number, count in clients.beats():
        if number % RULE_BEATS == 0:
            await requests.rule({"retention_ms": KEPT_MS}, among=among)
        elif number % RULE_BEATS == RULE_BEATS * 3 // 4:
            await requests.rule({"retention_ms": chance.choice((0, 1_000))}, among=among)
        await clients.schedule(count, SHORT_MS)
        if number % REDRIVE_BEATS == REDRIVE_BEATS - 1:
            clients.after(0.0, partial(_alone, one_by_one, partial(_seek, clients)))
        if number % REMADE_BEATS == REMADE_BEATS - 1:
            start: Start = "earliest" if chance.random() < 0.5 else "latest"
            work = partial(_remake, clients, start)
            clients.after(0.0, partial(_alone, one_by_one, work))

    async def rest() -> bool:
        """Seek both groups far back at the end."""
        if not await requests.rule({"retention_ms": KEPT_MS}, among=among):
            return False
        return await _back(clients, BACK_MAX) and await _remake(clients, "earliest")

    return rest


async def _alone(lock: Lock, work: Callable[[], Awaitable[object]]) -> None:
    """Do `work` under the lock: the answer to a seek belongs to the last seek."""
    with suppress(TimerError):
        async with lock:
            await work()


async def _seek(clients: WorkloadClients) -> None:
    """Seek to a random place, mostly back."""
    dice = clients.chance
    way = dice.choice(("back", "back", "ahead", "time", "reset", "latest"))
    if way == "back":
        await _back(clients, dice.randint(1, BACK_MAX))
        return
    place: dict[str, Any] = {"start": "earliest" if way == "reset" else way}
    if way == "time":
        place = {"time_ms": now_ms() - dice.randint(0, 4_000)}
    elif way == "ahead":
        _, cursor, unacked = await _place(clients)
        place = {"offset": cursor + dice.randint(0, unacked)}
    await clients.requests.seek(SOUGHT, **place)


async def _back(clients: WorkloadClients, count: int) -> bool:
    """Seek back by `count` messages that the topic retains; return whether it surely was done."""
    kept, cursor, _ = await _place(clients)
    return await clients.requests.seek(SOUGHT, offset=max(kept, cursor - count))


async def _place(clients: WorkloadClients) -> tuple[int, int, int]:
    """Return the first retained offset, and cursor and unacked count of the sought group."""
    topic = await clients.client.describe_topic(clients.topic)
    groups = {group.name: group for group in topic.groups}
    return topic.queue_begin, groups[SOUGHT].cursor, groups[SOUGHT].unacked


async def _remake(clients: WorkloadClients, start: Start) -> bool:
    """Delete a group and create it again; return whether both were done.

    The group exists when its deletion is requested. So only a repeated request can get the answer
    NOT_FOUND. Its consumers may make the group again first.
    """
    await clients.client.create_group(clients.topic, REMADE)
    call = clients.client.delete_group(clients.topic, REMADE)
    done = await clients.requests.change("delete_group", call, group=REMADE)
    await clients.client.create_group(clients.topic, REMADE, start=start)
    return done
