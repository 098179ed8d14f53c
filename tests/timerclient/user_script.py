"""A user's script, only for type checkers: schedule, consume, policies, errors, callbacks."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta

from timerclient import (
    AckResult,
    AlreadyExists,
    AsyncTimerClient,
    Batch,
    CancelResult,
    ClientSettings,
    Event,
    LeaseLost,
    LeasesLost,
    Message,
    NewTimer,
    NotPending,
    OutcomeUnknown,
    PolicyFields,
    Rescheduled,
    ScheduleResult,
    Timer,
    TimerClient,
    TimerError,
    TimerInfo,
    Timers,
)


def told(event: Event) -> None:
    if isinstance(event, LeasesLost):
        print(event.topic, event.group, len(event.offsets))


def acked(future: Future[AckResult]) -> None:
    if future.exception() is None:
        print(future.result().name)


def schedule(client: TimerClient) -> Timer | None:
    timer = client.schedule("orders", b"x", delay=timedelta(minutes=1), key="k", headers={"a": "b"})
    due: datetime = timer.due
    client.schedule("orders", b"x", due=due + timedelta(seconds=1), on_conflict="update", key="k")
    batch: Timers = client.schedule_batch("orders", [b"1", b"2"], keys=["a", None], delay=[1, 2.5])
    results: list[ScheduleResult] = batch.results
    print(results, batch.existing, batch[0].id)
    client.schedule_all([NewTimer("a", b"", due=datetime.now(UTC)), NewTimer("b", b"", delay=1)])
    answer: Future[Timer] = client.submit("orders", b"later", delay_level=2)
    print(answer.result(timeout=5).due_ms)
    try:
        return client.reschedule(timer, delay=60)
    except NotPending as error:
        replaced_by: str | None = error.replaced_by
        print(error.result.name, replaced_by)
    except AlreadyExists as error:
        print(error.existing)
    except OutcomeUnknown as error:
        print(error.outcome_known, error.retry_after_ms)
    except TimerError as error:
        print(error.retryable)
    return None


def look(client: TimerClient, timer: Timer) -> None:
    info: TimerInfo = client.get_timer(timer)
    if info.replaced_by is not None and client.cancel(info.replaced_by) is CancelResult.CANCELLED:
        print("cancelled")
    moved: list[Rescheduled] = client.reschedule_batch([timer], delay=3)
    print([one.replaced_by for one in moved], client.cancel_where("orders", key_prefix="k").exact)
    for each in client.list_timers("orders", due_from=datetime.now(UTC)):
        print(each.key, each.payload)
    within = client.count_timers("orders").within
    print(within[timedelta(seconds=5)])


def consume(client: TimerClient) -> None:
    policy: PolicyFields = {"ttl_ms": 1, "paused": True, "catch_up": "latest"}
    client.alter_policies(policy, topic="orders")
    client.create_group("orders", "g", type="key_shared", max_attempts=3, backoff_min=1)
    with client.consumer(
        "orders", group="g", start="latest", lease=timedelta(seconds=5)
    ) as consumer:
        messages: Sequence[Message] = consumer.receive(10, timeout=1)
        for message in messages:
            try:
                message.ack().add_done_callback(acked)
            except LeaseLost as error:
                print(error.offsets)
        for message in consumer:
            message.nack(delay=timedelta(minutes=1)).result()
            _ = message.extend(5)
            _ = message.give_back()
            break
        batch: Batch
        for batch in consumer.batches():
            print(len(batch.payloads), batch.due_ms[0])
            _ = batch.ack()
            break


async def coroutine() -> None:
    async with AsyncTimerClient(
        ["h:1"], timeout=5, settings=ClientSettings(), on_event=told
    ) as client:
        timer = await client.schedule("orders", b"x", delay=1)
        print(await client.cancel(timer))
        async with client.consumer("orders", group="g") as consumer:
            async for message in consumer:
                print(await message.ack())
                break
            async for batch in consumer.batches():
                await batch.ack()
        async for info in client.list_timers("orders"):
            print(info.due)


def main() -> None:
    with TimerClient("127.0.0.1:7401", on_event=told) as client:
        timer = schedule(client)
        if timer is not None:
            look(client, timer)
        consume(client)
    asyncio.run(coroutine())


if __name__ == "__main__":
    main()
