"""The clients of the chaos suite: their requests to the cluster, and the histories that they write.

    make(names) ─► start ─────────► stop_producing ──► drained? ──► close
                   consumers open,   no new requests   all messages  acks confirmed,
                   then it produces                    arrived       histories closed

Each workload has a topic and groups of its own (topic = its name, or NAME/NAME). It writes its own
histories (chaos/history/history.py) as events happen. The workloads of one run share one counter of
marks, and the cluster's policy, which one of them changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from chaos.workloads import kinds, lives, series_and_order, topic_changes
from chaos.workloads.workload_clients import Setting, WorkloadClients, WorkloadKind

KINDS: Final[Mapping[str, WorkloadKind]] = {
    name: each
    for module in (kinds, lives, topic_changes, series_and_order)
    for name, each in vars(module).items()
    if isinstance(each, WorkloadKind)
}


def check(names: Sequence[str], *, rate_per_s: float, horizon_s: float) -> None:
    """Return if `make` accepts these arguments.

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


def make(names: Sequence[str], setting: Setting) -> list[WorkloadClients]:
    """Return workloads by name, each once, not started yet.

    Raises:
        ValueError: as `check`.
    """
    check(names, rate_per_s=setting.rate_per_s, horizon_s=setting.horizon_s)
    each = replace(setting, rate_per_s=setting.rate_per_s / len(names))
    return [WorkloadClients(name, KINDS[name], each) for name in names]
