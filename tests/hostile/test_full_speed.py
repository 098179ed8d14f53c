"""A hostile client at full speed: timers fire on time, and the leader leads on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.cluster.running import now_ms, take
from tests.hostile.conftest import MIB, Victim
from timerclient import Message, TimerClient

pytestmark = pytest.mark.slow

COUNT: Final = 150
EVERY_MS: Final = 20
KEPT: Final = 64 * MIB
"""The memtable's size at a flush: so long the flood's own timers, deleted by now, may lie there."""


def test_timers_fire_on_time_during_a_flood(
    town: Victim, client: TimerClient, figures: Callable[[str], None]
) -> None:
    """The flood ends only after all timers have fired, so a timer that it delays never fires."""
    leader, highest = town.wait_for_leader(), 0
    program = [sys.executable, "-m", "tests.hostile.flood", town.node(leader).grpc]
    with (
        client.consumer("on-time", group="watch") as consumer,
        subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as flood,
    ):
        assert flood.stdin is not None
        assert flood.stdout is not None
        try:
            assert flood.stdout.readline() == "begun\n"
            begin_ms = now_ms() + 1_000
            due_ms = [begin_ms + n * EVERY_MS for n in range(COUNT)]
            client.schedule_batch("on-time", [b"x"] * COUNT, due_ms=due_ms)
            messages: list[Message] = []
            while len(messages) < COUNT:
                messages += take(consumer, min(10, COUNT - len(messages)))
                highest = max(highest, town.rss(leader))
            assert flood.poll() is None, "the flood ended before the last timer fired"
        finally:
            flood.stdin.close()
        asked, batch_ms = flood.stdout.read().splitlines()
    late_ms = np.array([message.fired_at_ms - message.due_ms for message in messages])
    p50, p90, p99 = np.percentile(late_ms, [50, 90, 99])
    figures(
        f"flood: late p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, max {late_ms.max()} ms; a batch"
        f" takes {float(batch_ms):.0f} ms; memory {highest / MIB:.0f} MiB at most; {asked}"
    )
    assert highest < 700 * MIB
    assert p50 < float(batch_ms), "both share the leader and the machine, however busy it is"
    client.delete_topic("flood")
