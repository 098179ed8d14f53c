"""S15: a client that schedules and cancels at full speed, beside one that waits for its timers.

The first client is a process of its own (bench/churn_client.py). The other one schedules PER_S
timers a second and consumes them. The measure returns the lateness of its timers, and the leader's
memory: before, at the peak, and REST_S after the end.
"""

import asyncio
import sys
from typing import Final

from bench.delivery import paced_lateness
from bench.footprint import Resident
from bench.measure import Figure, Form, Measure, Series, cost, rate, wait
from bench.rig import BenchError, Rig
from timerclient import AsyncTimerClient

PER_S: Final = 200
CHURN_S: Final = {Form.SHORT: 8.0, Form.FULL: 60.0}
SETTLE_S: Final = 5.0
REST_S: Final = 60.0
SAMPLE_S: Final = 0.25


def churn(rig: Rig, form: Form) -> Series:
    """Return the lateness beside the churn, the rate of the churn and the leader's memory."""
    lasting_s = CHURN_S[form]
    return rig.within(2 * lasting_s + 2 * REST_S + 60, _churn(rig, lasting_s))


async def _churn(rig: Rig, lasting_s: float) -> Series:
    leader = rig.cluster.nodes[rig.cluster.wait_for_leader()]
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, Resident.of(leader.pid).total)
            await asyncio.sleep(SAMPLE_S)

    async with AsyncTimerClient(rig.endpoints) as client:
        calm = await paced_lateness(rig, client, rig.topic("s15"), PER_S, SETTLE_S)
        epoch = (await client.status()).epoch
        before = Resident.of(leader.pid).total
        watcher = asyncio.create_task(watch())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.churn_client", leader.grpc, f"{lasting_s}"),
            stdout=asyncio.subprocess.PIPE,
        )
        late = await paced_lateness(rig, client, rig.topic("s15"), PER_S, lasting_s)
        out, _ = await process.communicate()
        if process.returncode:
            raise BenchError(f"the churning client ended with status {process.returncode}")
        await asyncio.sleep(REST_S)
        watcher.cancel()
        after = Resident.of(leader.pid).total
        changes = (await client.status()).epoch - epoch
    return {
        **calm.series("calm"),
        **late.series("churn"),
        "rate": [int(out) / lasting_s],
        "before": [before / 1e6],
        "peak": [peak / 1e6],
        "after": [after / 1e6],
        "growth": [100 * (after / before - 1)],
        "changes": [float(changes)],
    }


S15: Final = Measure(
    name="s15",
    title="a client that schedules and cancels at full speed",
    run=churn,
    figures=(
        rate("scheduled and cancelled", "rate", "timers/s"),
        wait("fired - due without it, p99", "fired_p99_calm"),
        wait("fired - due beside it, p99", "fired_p99_churn", 100, 50),
        Figure(name="changes of leader", series="changes", unit="", must=0, aim=0),
        cost("leader's memory: before", "before", "MB"),
        cost("  at the peak", "peak", "MB"),
        cost(f"  {REST_S:g} s after the end", "after", "MB"),
        cost("  growth", "growth", "%", 20, 10),
    ),
    runs={Form.SHORT: 1, Form.FULL: 1},
    fresh=True,
)
