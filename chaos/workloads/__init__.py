"""The clients of the chaos suite: what they ask of the cluster, and the histories that they keep.

    make(names) ─► start ─────────► stop_producing ──► drained? ──► close
                   consumers open,   nothing new is     everything    acks confirmed,
                   then it produces  asked for          came          histories closed

Each workload has a topic and groups of its own (topic = its name, or NAME/NAME) and writes
histories (chaos/history/history.py) of its own, as things happen. All of one run share one counter
of marks, and what the cluster says, which one of them changes.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from chaos.history.history import RunFolder
from chaos.workloads.kinds import KINDS
from chaos.workloads.workload_clients import Setting, WorkloadClients

NAMES: Final[Mapping[str, str]] = {name: kind.line for name, kind in KINDS.items()}
"""Name -> what it does, in one line."""


class Workload(Protocol):
    """Clients with one habit."""

    name: str

    def start(self) -> None:
        """Start its threads and return at once; it produces as soon as its consumers are open."""

    def stop_producing(self) -> None:
        """Ask for nothing new from now on but what its end takes. Returns at once."""

    def drained(self) -> bool:
        """Return whether all that was asked for is accounted for: acked by every group, or over.

        Never before `stop_producing`; needs a cluster that serves. What is due beyond the run's
        end is not waited for. Cheap: poll it.

        Raises:
            Exception: whatever a thread of this workload failed with; no refusal or failure of
                the cluster's is one, those are in the histories.
        """

    def close(self) -> None:
        """Stop; confirm acks as far as the cluster answers; close clients and histories."""


def check(names: Sequence[str], *, rate_per_s: int, horizon_s: float) -> None:
    """Return if `make` takes these.

    Raises:
        ValueError: a name is unknown or given twice, or a number is not positive.
    """
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"workload = {unknown[0]!r}: must be one of {', '.join(KINDS)}")
    if len({*names}) < len(names):
        raise ValueError(f"workloads = {', '.join(names)}: each at most once")
    for argument, value in (("rate_per_s", rate_per_s), ("horizon_s", horizon_s)):
        if value <= 0:
            raise ValueError(f"{argument} = {value}: must be positive")


def make(
    names: Sequence[str],
    *,
    run: RunFolder,
    endpoints: Callable[[], Sequence[str]],
    seed: int,
    rate_per_s: int,
    horizon_s: float,
) -> list[Workload]:
    """Return workloads by name, not started yet. Once per run: marks start at 1.

    Args:
        names: of NAMES, each once.
        run: the folder that the histories go to.
        endpoints: gives the nodes' addresses, whenever a client is made.
        seed: of all chance: delays, payload sizes, who is cancelled.
        rate_per_s: timers a second over all workloads together, on average.
        horizon_s: seconds from `start` within which everything expected is due: what is asked
            for later than that is due within a second. Give it the time until `stop_producing`
            or a little more: `drained` can't come much before it.

    Raises:
        ValueError: as `check`.
    """
    check(names, rate_per_s=rate_per_s, horizon_s=horizon_s)
    setting = Setting(
        run=run, endpoints=endpoints, seed=seed, marks=itertools.count(1),
        rate_per_s=rate_per_s / len(names), horizon_s=horizon_s,
    )  # fmt: skip
    return [WorkloadClients(name, KINDS[name], setting) for name in names]
