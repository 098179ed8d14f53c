"""The stacks of all threads and tasks of the process, bounded in size.

Tasks with the same stack are counted together, so that ten thousand idle streams take one line. A
frame is a function with its file and line. No values are shown, so a dump has no data of clients.
"""

import asyncio
import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

TASKS_MAX: Final = 10_000
"""Tasks whose stack is read, at most."""
STACKS_MAX: Final = 500
"""Different stacks of tasks in a dump, at most: the most frequent ones."""
FRAMES_MAX: Final = 16
"""Frames of each stack, at most: the innermost ones."""
TASKS_AT_ONCE: Final = 256
"""Tasks that are read without a pause: about a millisecond."""
_NAME_MAX: Final = 128

_FRAMES: Final = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED: Final = ("cr_await", "gi_yieldfrom", "ag_await")
_WRAPPERS: Final = frozenset({"async_generator_asend", "anext_awaitable", "coroutine_wrapper"})

Frames = tuple[str, ...]
"""The innermost frame first, each as `function file.py:line`."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread, or of `count` tasks."""

    name: str
    """Of the thread, or of the tasks' coroutine."""
    count: int
    frames: Frames


@dataclass(frozen=True, slots=True)
class StackDump:
    """A dump of the process."""

    threads: tuple[Stack, ...]
    tasks: tuple[Stack, ...]
    """The most frequent first."""
    task_count: int
    """All tasks of the loop."""
    left_out: int
    """Tasks that are in no stack of the dump."""


async def dump_stacks() -> StackDump:
    """Return the stacks. The work pauses, so that the loop serves others meanwhile."""
    tasks = [*asyncio.all_tasks()]
    found: Counter[tuple[str, Frames]] = Counter()
    for number, each in enumerate(_stacks(tasks), 1):
        found[each] += 1
        if not number % TASKS_AT_ONCE:
            await asyncio.sleep(0)
    return _dump(found, len(tasks))


def dump_stacks_now() -> StackDump:
    """Return the stacks without a pause, for a signal handler on the loop."""
    tasks = [*asyncio.all_tasks()]
    return _dump(Counter(_stacks(tasks)), len(tasks))


def _dump(found: Counter[tuple[str, Frames]], task_count: int) -> StackDump:
    stacks = tuple(
        Stack(name, count, frames) for (name, frames), count in found.most_common(STACKS_MAX)
    )
    shown = sum(each.count for each in stacks)
    return StackDump((*_threads(),), stacks, task_count, task_count - shown)


def _threads() -> Iterator[Stack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - there is no other way
        frames: list[str] = []
        at: FrameType | None = frame
        while at is not None and len(frames) < FRAMES_MAX:
            frames.append(_text(at.f_code, at.f_lineno))
            at = at.f_back
        yield Stack(names.get(ident, "?")[:_NAME_MAX], 1, tuple(frames))


def _stacks(tasks: Iterable["asyncio.Task[Any]"]) -> Iterator[tuple[str, Frames]]:
    for _, task in zip(range(TASKS_MAX), tasks, strict=False):
        coroutine: Any = task.get_coro()
        name = str(getattr(coroutine, "__qualname__", "?"))[:_NAME_MAX]
        yield name, tuple(_awaited_frames(coroutine))


def _awaited_frames(coroutine: Any) -> list[str]:
    """Return the frames of a coroutine and of those that it awaits, the innermost first.

    gRPC's coroutines have no frames. The `anext` of a generator shows it to the collector only.
    """
    frames: list[str] = []
    while coroutine is not None:
        frame = _first(coroutine, _FRAMES)
        awaited = _first(coroutine, _AWAITED)
        if frame is None and awaited is None and type(coroutine).__name__ in _WRAPPERS:
            inner = gc.get_referents(coroutine)
            awaited = next((each for each in inner if _first(each, _FRAMES) is not None), None)
        elif frame is not None:
            frames.append(_text(frame.f_code, frame.f_lineno))
        else:
            named = getattr(coroutine, "__qualname__", None) or type(coroutine).__name__
            frames.append(str(named)[:_NAME_MAX])
        coroutine = awaited
    return frames[: -FRAMES_MAX - 1 : -1]


def _first(coroutine: Any, names: Iterable[str]) -> Any:
    """Return the first attribute that is not None; None: there is none."""
    return next((f for name in names if (f := getattr(coroutine, name, None)) is not None), None)


def _text(code: CodeType, line: int) -> str:
    file = code.co_filename.rpartition("/")[2]
    return f"{code.co_qualname[:_NAME_MAX]} {file[:_NAME_MAX]}:{line}"
