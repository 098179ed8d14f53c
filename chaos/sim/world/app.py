"""The application of a simulated node: it applies the committed entries.

This one is the smallest. It stores only a manifest. The timer machine extends it
(chaos/sim/timers/timers.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.sim.world.simdisk import STATE_PATH
from replication.core.quorum import Voters
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import decode_epoch
from timer.files.disk import Disk
from timer.model.units import Epoch, LogIndex, UnixMs
from timer.recovery import manifest

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode


class App:
    """Saves the index of the last committed entry.

    An application is created at every start of its node from the files on the node's disk.
    """

    voters: Voters | None = None
    """The voter set in force at applied_index. None: there is no manifest."""
    state_time_ms = UnixMs(0)
    """Time of the manifest's last entry, on the log's clock. 0: none, or the app uses no times."""
    level = 0
    """The feature level of the state; 0: no epoch was applied."""

    def __init__(self, node: "SimNode") -> None:
        self.node = node
        self._applied = self._saved = LogIndex(0)
        self._epoch = Epoch(0)
        node.disk.make_dir(STATE_PATH)
        state = manifest.read(node.disk, STATE_PATH)
        if state is not None:
            self._applied = self._saved = LogIndex(state["index"])
            self.voters = frozenset(state["voters"])
            self.level = state.get("level", 1)

    @property
    def applied_index(self) -> LogIndex:
        """Last applied index; at start, the manifest's. Later entries come through `on_commit`."""
        return self._applied

    def check_entry(self, entry: Entry) -> None:
        """Raise ValueError if the entry can't be applied."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Apply committed entries, in the log's order. Now and then save a manifest."""
        options = self.node.world.options
        for entry in entries:
            if entry.kind is EntryKind.EPOCH:
                if options.hasty:
                    self._save()
                start = decode_epoch(entry.payload)
                self.voters, self.level = frozenset(start.voters), start.level
            self._applied, self._epoch = entry.index, entry.epoch
        if options.hasty:
            self.node.drop_before(LogIndex(self._saved + 1), keep=False)
        if self._applied >= self._saved + options.manifest_every:
            self.flush()

    def on_lead(self, epoch: Epoch) -> None:
        """Begin to serve; all entries up to the EPOCH entry were applied."""

    def on_drain(self) -> bool:
        """Append last entries of the epoch. Return whether more are left."""
        return False

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving."""

    def drain(self, done: Callable[[], None]) -> None:
        """Reject new requests, answer the accepted ones, then call `done`."""
        done()

    def on_stop(self) -> None:
        """Note that the process ended; this object is not used again."""

    def flush(self) -> None:
        """Write a manifest, if the log is durable up to its index; drop the log below it."""
        if self._save():
            self.node.drop_before(LogIndex(self._saved + 1))

    def _save(self) -> bool:
        due = self.node.log.durable_index >= self._applied > self._saved
        if due:
            self._saved = self._applied
            state: manifest.ManifestBody = {"index": self._saved, "epoch": self._epoch}
            state |= {"voters": sorted(self.voters or ()), "runs": [], "topics": []}
            state |= {"level": self.level}
            manifest.write(self.node.disk, STATE_PATH, state)
        return due

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """Raise CorruptFileError if no process could start from the state in `directory`."""
        manifest.read(disk, directory)
