"""The end of workers: the client and the consumers that they close."""

import asyncio

import pytest

from tests.timerfake.shop import Shop
from timerclient import Worker
from timerfake import AsyncFakeCluster


async def test_last_worker_of_an_event_loop_closes_the_client_that_they_share() -> None:
    async with AsyncFakeCluster() as cluster:
        shop = Shop(url=cluster.address, dial=cluster.dial)
        workers = [Worker(shop.app, handlers=[each]) for each in shop.app.handlers]
        runs = [asyncio.create_task(each.run()) for each in workers]
        while not all(each.is_ready for each in workers):
            await cluster.settle()
        client = shop.app.client
        for worker, run, closed in zip(workers, runs, (False, True), strict=True):
            worker.stop()
            await run
            assert repr(client).endswith(", closed)") == closed


async def test_worker_whose_drain_is_cancelled_closes_its_consumers() -> None:
    async with AsyncFakeCluster() as cluster:
        shop, tasks = Shop(url=cluster.address, dial=cluster.dial), asyncio.all_tasks()
        running, ended = asyncio.Event(), asyncio.Event()

        @shop.app.timer("orders", group="slow")
        async def wait() -> None:
            running.set()
            await ended.wait()

        worker = Worker(shop.app, handlers=[wait])
        run = asyncio.create_task(worker.run())
        await wait.schedule(delay=0)
        await running.wait()
        run.cancel()
        await cluster.settle()
        assert worker.is_stopping
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        ended.set()
        await cluster.settle()
        assert asyncio.all_tasks() == tasks
