"""Ends of tasks that run until they are cancelled."""

import asyncio
from typing import Any


def failure_of(task: "asyncio.Task[Any]") -> BaseException | None:
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
