"""P9: the CPU time of the event loop's longest steps when much work comes at once.

Each crowd runs on an engine of its own (bench/loop.py).

    crowd       10,000 topics, each with a timer due at one instant; a group each leases and acks
    cancelled   500,000 cancelled timers reach their due time: in memory, and in files
    deleted     a deleted topic's million pending timers reach their due time
    resumed     a paused topic with 500,000 overdue timers is resumed

bench/crowds.py has more crowds.
"""

import functools
import gc
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from bench import crowds
from bench.loop import START_MS, TOPICS, Loop, read_ahead
from bench.measure import Form, Measure, Series, check, cost
from timer.entries.policies import Scope, ScopePolicy

MUST_MS: Final = 20.0
"""The limit of P9, milliseconds of CPU."""
SCALE: Final = {Form.SHORT: 5, Form.FULL: 1}
"""Divisor of the number of timers. The number of topics stays."""
SECOND_MS: Final = 1_000


def crowd(loop: Loop, scale: int) -> None:
    """10,000 topics with a group each: a timer of each is due at once, is leased and acked."""
    del scale
    topics = loop.topics(TOPICS)
    machine, got = loop.engine.machine, crowds.add_groups(loop, topics)
    loop.forget()
    loop.schedule(topics, np.full(TOPICS, 60_000))
    loop.wait(60_001)
    loop.settle()
    loop.checkpoint()
    check(machine.counts.fired == TOPICS, f"{machine.counts.fired} of {TOPICS} fired")
    check(len(got) == TOPICS, f"{len(got)} of {TOPICS} were delivered")
    for each in got:
        loop.leader.groups.ack(
            each.group, each.epoch, each.lease.lease_id, each.lease.offsets, lambda _: None
        )
    loop.settle()
    loop.checkpoint()
    loop.flush()


def cancelled(loop: Loop, scale: int, *, in_files: bool) -> None:
    """500,000 cancelled timers reach their due time."""
    [topic] = loop.topics(1)
    due_ms = 600_000 + np.arange(500_000 // scale) % SECOND_MS
    first_seq = loop.engine.machine.next_seq
    loop.schedule([topic], due_ms)
    if in_files:
        loop.flush()
    loop.cancel(due_ms, first_seq)
    loop.schedule([topic], np.array([601_000]))
    loop.forget()
    read_ahead(loop.engine.machine.store, START_MS + 600_000)
    loop.wait(601_001)
    loop.settle()
    loop.checkpoint()
    check(loop.engine.machine.counts.fired == 1, "not exactly one timer fired")


def deleted(loop: Loop, scale: int) -> None:
    """A topic with a million pending timers is deleted, and they reach their due time."""
    topic, other = loop.topics(2)
    due_ms = 600_000 + np.arange(1_000_000 // scale) % SECOND_MS
    loop.schedule([topic], due_ms[: len(due_ms) // 2])
    loop.flush()
    loop.schedule([topic], due_ms[len(due_ms) // 2 :])
    loop.schedule([other], np.array([601_000]))
    loop.forget()
    loop.leader.delete_topic(topic, loop.now, lambda _: None)
    loop.settle()
    loop.wait(601_001)
    loop.settle()
    loop.checkpoint()
    check(loop.engine.machine.counts.fired == 1, "not exactly one timer fired")


def resumed(loop: Loop, scale: int) -> None:
    """A paused topic with 500,000 overdue timers, in memory and in files, is resumed."""
    [topic] = loop.topics(1)
    count = 500_000 // scale
    scope = Scope("", topic)
    loop.alter(scope, ScopePolicy(paused=True))
    loop.settle()
    due_ms = 60_000 + np.arange(count) % SECOND_MS
    loop.schedule([topic], due_ms[: count // 2])
    loop.wait(70_000)
    loop.settle()
    loop.flush()
    loop.schedule([topic], due_ms[count // 2 :] + 20_000)
    loop.forget()
    loop.wait(90_000)
    loop.settle()
    loop.alter(scope, ScopePolicy(paused=False))
    loop.settle()
    loop.checkpoint()
    fired = loop.engine.machine.counts.fired
    check(fired == count, f"{fired} of {count} fired")


CROWDS: Final[dict[str, Callable[[Loop, int], None]]] = {
    "crowd": crowd,
    "cancelled": functools.partial(cancelled, in_files=False),
    "cancelled_in_files": functools.partial(cancelled, in_files=True),
    "deleted": deleted,
    "resumed": resumed,
    "leases": crowds.leases,
    "transfer": crowds.transfer,
    "policies": crowds.policies,
    "one_ms": crowds.one_ms,
    "grown": crowds.grown,
    "producers": crowds.producers,
}


def steps(form: Form) -> Series:
    """Return the longest step of each crowd, in milliseconds of CPU."""
    series: Series = {}
    enabled = gc.isenabled()
    gc.disable()  # as a node does (cluster/node/python_garbage.py)
    try:
        for name, play in CROWDS.items():
            directory = Path(tempfile.mkdtemp(prefix="bench-steps-"))
            try:
                loop = Loop(directory)
                play(loop, SCALE[form])
            finally:
                shutil.rmtree(directory)
            print(f"   {name}: {loop.longest} {loop.longest_ms:.1f} ms", flush=True)
            series[name] = [loop.longest_ms]
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
    return series


P9: Final = Measure(
    name="p9",
    title="longest step of the event loop, by CPU",
    alone=steps,
    figures=(
        cost("10,000 topics due at once", "crowd", "ms", MUST_MS, 10),
        cost("500,000 cancelled, in memory", "cancelled", "ms", MUST_MS, 10),
        cost("  in files", "cancelled_in_files", "ms", MUST_MS, 10),
        cost("a topic deleted with 1,000,000", "deleted", "ms", MUST_MS, 10),
        cost("a topic resumed with 500,000", "resumed", "ms", MUST_MS, 10),
        cost("10,000 groups' leases end", "leases", "ms", MUST_MS, 10),
        cost("  a transfer of 10,000 groups", "transfer", "ms", MUST_MS, 10),
        cost("a policy of 10,000 topics", "policies", "ms", MUST_MS, 10),
        cost("1,000,000 at one millisecond", "one_ms", "ms", MUST_MS, 10),
        cost("2,000,000 scheduled, no flush", "grown", "ms", MUST_MS, 10),
        cost("100,000 producers", "producers", "ms", MUST_MS, 10),
    ),
    runs={Form.SHORT: 1, Form.FULL: 3},
)
