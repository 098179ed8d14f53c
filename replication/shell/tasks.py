"""Tasks that run until they are cancelled, and the errors that end them before."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any


class TaskSet:
    """Tasks of one owner. `on_error` gets the error that ends one of them."""

    def __init__(self, on_error: Callable[[BaseException], object]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """Cancel all tasks, and wait until they are over."""
        await cancel_and_wait(list(self._tasks))

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if (error := failure_of(task)) is not None:
            self._on_error(error)


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error that ended a task. None: it returned, or it was asked to end.

    A CancelledError that no `Task.cancel` caused is an error. gRPC raises one in a task that waits
    for a call if another task has cancelled the call.
    """
    if task.cancelled() and task.cancelling():
        return None
    try:
        task.result()
    except BaseException as error:  # noqa: BLE001 - the caller's to process
        return error
    return None
