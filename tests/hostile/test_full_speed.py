"""A hostile client at full speed: timers fire on time, and the leader leads on."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.cluster.running import now_ms, take
from tests.hostile.conftest import MIB, Victim
from timerclient import TimerClient

pytestmark = pytest.mark.slow

SECONDS: Final = 8
PER_SECOND: Final = 50
KEPT: Final = 64 * MIB
"""The memtable's size at a flush: so long the flood's own timers, deleted by now, may lie there."""


def test_timers_fire_on_time_during_a_flood(
    town: Victim, client: TimerClient, figures: Callable[[str], None]
) -> None:
    leader, count = town.wait_for_leader(), SECONDS * PER_SECOND
    begin_ms = now_ms() + 3_000
    due_ms = [begin_ms + n * 1_000 // PER_SECOND for n in range(count)]
    client.schedule_batch("on-time", [b"x"] * count, due_ms=due_ms)
    program = [sys.executable, "-m", "tests.hostile.flood", town.node(leader).grpc]
    with subprocess.Popen(
        [*program, str(SECONDS + 3)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as flood:
        highest = 0
        while flood.poll() is None:
            highest = max(highest, town.rss(leader))
            time.sleep(0.1)
        assert flood.stdout is not None
        asked = flood.stdout.read().strip()
    with client.consumer("on-time", group="watch") as consumer:
        messages = take(consumer, count)
    late_ms = np.array([message.fired_at_ms - message.due_ms for message in messages])
    p50, p99 = np.percentile(late_ms, [50, 99])
    figures(
        f"flood of {SECONDS} s: late p50 {p50:.0f}, p99 {p99:.0f}, max {late_ms.max()} ms;"
        f" memory {highest / MIB:.0f} MiB at most; {asked}"
    )
    assert highest < 700 * MIB
    assert p99 < 1_000, "on a machine that the flood and the three nodes share"
    client.delete_topic("flood")
