"""The clients of the chaos suite: their requests to the cluster, and the histories that they write.

    Workloads(names) ─► start ─────────► stop_producing ──► waiting? ──► close
                        consumers open,   no new requests   all messages  acks confirmed,
                        then it produces                    arrived       histories closed

Each workload has a topic and groups of its own (topic = its name, or NAME/NAME). It writes its own
histories (chaos/history/history.py) as events happen. The workloads of one run share one counter of
marks, and the cluster's policy, which one of them changes.

All of them run on the event loop that the clients of this process share.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

from chaos.workloads import kinds, lives, series_and_order, topic_changes
from chaos.workloads.workload_clients import Setting, WorkloadClients, WorkloadKind
from timerclient.threads.background import Background

END_S: Final = 60.0
"""For the end of all workloads; longer than any call of a client."""
KINDS: Final[Mapping[str, WorkloadKind]] = {
    name: each
    for module in (kinds, lives, topic_changes, series_and_order)
    for name, each in vars(module).items()
    if isinstance(each, WorkloadKind)
}


def check(names: Sequence[str], *, rate_per_s: float, horizon_s: float) -> None:
    """Return if `Workloads` accepts these arguments.

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


class Workloads:
    """The workloads of one run, for threads."""

    def __init__(self, names: Sequence[str], setting: Setting) -> None:
        """Prepare workloads by name; `check` accepts the arguments."""
        self._setting = replace(setting, rate_per_s=setting.rate_per_s / len(names))
        self._loop = Background().loop
        self._plays: dict[str, Future[None]] = {}
        self.each = [WorkloadClients(name, KINDS[name], self._setting) for name in names]

    def start(self) -> None:
        """Start all of them and return at once. Requests begin when the consumers are open."""
        for each in self.each:
            self._plays[each.name] = asyncio.run_coroutine_threadsafe(each.play(), self._loop)

    def stop_producing(self) -> None:
        """Send no new requests from now on, except those that end the workloads."""
        self._loop.call_soon_threadsafe(self._setting.stopping.set)

    def waiting(self) -> list[str]:
        """Return the names of those that wait for messages; not of those that have failed.

        None waits only after `stop_producing`, and if the cluster serves.
        """
        return [each.name for each in self.each if not (each.over or self._plays[each.name].done())]

    def close(self) -> None:
        """Stop; confirm acks as far as the cluster answers; close clients and histories.

        Raises:
            Exception: the failure of a workload. Rejections and failures of the cluster are not
                raised, because the histories have them.
        """
        self.stop_producing()
        self._loop.call_soon_threadsafe(self._setting.closing.set)
        ended = ((name, play.exception(END_S)) for name, play in self._plays.items())
        if failed := {name: error for name, error in ended if error is not None}:
            raise BaseExceptionGroup(f"failed: {', '.join(failed)}", [*failed.values()])
