"""The simulator's speed. The more seeds it plays, the more of the protocol is searched.

The same seeds are played each time, in one process, as by `make sim`. The work of a seed changes
with the simulator's random draws and with the code under test. Compare figures of nearby commits.
"""

import json
import subprocess
import sys
from typing import Any, Final

from bench.measure import Form, Measure, Series, check, rate

FIRST_SEED: Final = 1
SEEDS: Final = {Form.SHORT: 6, Form.FULL: 40}
TIMEOUT_S: Final = 600


def sim(form: Form) -> Series:
    """Play the protocol alone, then the whole state plane."""
    ledger, timers = (_play(app, SEEDS[form]) for app in ("ledger", "timers"))
    took_s = ledger["took_s"] + timers["took_s"]
    return {
        "protocol_events": [ledger["events"] / ledger["took_s"]],
        "store_rows": [timers["rows"] / timers["took_s"]],
        "timer_events": [timers["events"] / timers["took_s"]],
        "seeds": [(ledger["seeds"] + timers["seeds"]) / took_s],
    }


def _play(app: str, seeds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "chaos.sim", "--json", "--jobs", "1", "--app", app]
    command += ["--start", str(FIRST_SEED), "--seeds", str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    check(done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2_000:]}{done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


SIM: Final = Measure(
    name="sim",
    title="the simulator, one process",
    alone=sim,
    figures=(
        rate("protocol alone", "protocol_events", "events/s"),
        rate("timers fired, scheduled, acked", "store_rows", "rows/s"),
        rate("  events of those worlds", "timer_events", "events/s"),
        rate("  both", "seeds", "seeds/s"),
    ),
    runs={Form.SHORT: 1, Form.FULL: 3},
)
