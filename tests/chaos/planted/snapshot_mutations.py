"""Planted bugs in snapshots (see tests/chaos/planted/planted.py).

The options of the worlds make snapshots frequent, because the usual mix has few of them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

from replication.core.core import Core
from replication.core.core_events import Event
from replication.shell import snapshot_install
from tests.chaos.planted.planted import Mutation, patch
from timer.files import log as timer_log
from timer.files.disk import Disk
from timer.model.units import Epoch, LogIndex, MonoMs
from timer.recovery import snapshot_receiver

DAMAGE: Final[dict[str, Any]] = {"faults": ("flip", "shorten", "power", "isolate"), "mischief": ()}


_begin_anew = timer_log.replace_by_empty


def _one_too_early(disk: Disk, directory: Path, after: LogIndex, epoch: Epoch) -> None:
    """Begin the log with the snapshot's last entry, which is then applied twice."""
    _begin_anew(disk, directory, LogIndex(after - 1), epoch)


def _keep_the_log(disk: Disk, directory: Path, after: LogIndex, epoch: Epoch) -> None:
    """Keep an existing log, even if it does not continue the snapshot."""
    disk.make_dir(directory)
    if not disk.list_dir(directory):
        _begin_anew(disk, directory, after, epoch)


class _DropsTooMuch(Core):
    """Drop the log up to the manifest, and do not report that followers are behind."""

    def drop_before(self, index: LogIndex, beyond: LogIndex = LogIndex(0)) -> LogIndex:
        return super().drop_before(index, max(beyond, index))

    def step(self, now_ms: MonoMs, event: Event) -> Any:
        effects = super().step(now_ms, event)
        effects.behind = False
        return effects


@contextlib.contextmanager
def _plant_core(core: type[Core]) -> Iterator[None]:
    from chaos.sim.world.world import World

    with mock.patch.object(World, "make_core", core):
        yield


MUTATIONS: Final = (
    Mutation(
        "log_overlaps_snapshot",
        "the log after an install begins with an entry that the snapshot holds already",
        frozenset({"agreement", "digest", "storage", "lost", "liveness"}),
        30,
        "a damaged replica",
        patch(snapshot_receiver, "replace_by_empty", _one_too_early),
        aim=DAMAGE,
    ),
    Mutation(
        "old_log_stays",
        "an install keeps the log that was there",
        frozenset({"agreement", "storage", "lost", "liveness"}),
        30,
        "a damaged replica",
        patch(snapshot_receiver, "replace_by_empty", _keep_the_log),
        aim=DAMAGE,
    ),
    Mutation(
        "log_never_stays",
        "an install deletes a log that holds the snapshot's entry and acknowledged entries",
        frozenset({"storage"}),
        30,
        "a damaged replica",
        patch(snapshot_install, "has_entry", lambda *_: False),
        aim=DAMAGE,
    ),
    Mutation(
        "nobody_hears_that_it_is_behind",
        "the log is dropped below the manifest, and a replica that lacks it waits forever",
        frozenset({"liveness", "lost"}),
        30,
        "a replica that lags by a manifest",
        lambda: _plant_core(_DropsTooMuch),
        aim={"faults": ("isolate", "kill"), "mischief": (), "manifest_every": 20},
    ),
)
"""The list; tests/chaos/test_sim_planted.py hunts each of them."""
