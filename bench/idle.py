"""S12: the CPU use of an idle cluster."""

import time
from typing import Final

from bench.measure import Form, Measure, Series, cost
from bench.rig import Rig

SETTLE_S: Final = 5.0
"""Seconds after a start until its remaining work is done."""
LASTING_S: Final = {Form.SHORT: 10.0, Form.FULL: 30.0}


def idle(rig: Rig, form: Form) -> Series:
    """Return the CPU use of a cluster without requests; percent of one core."""
    time.sleep(SETTLE_S)
    with rig.cpu_use() as use:
        time.sleep(LASTING_S[form])
    return {
        "percent": [100 * (use.leader + use.followers)],
        "percent_leader": [100 * use.leader],
    }


S12: Final = Measure(
    name="s12",
    title="idle cluster, CPU",
    run=idle,
    figures=(
        cost("three nodes together", "percent", "% of a core", 8, 3),
        cost("  the leader alone", "percent_leader", "% of a core"),
    ),
    runs={Form.SHORT: 1, Form.FULL: 5},
)
