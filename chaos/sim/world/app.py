"""The application of a simulated node: it applies the committed entries.

`CountingApp` is the smallest application. It stores only a manifest. The timer machine
(chaos/sim/timers/timers.py) is attached in the same way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.sim.world.paths import STATE_PATH
from replication.core.quorum import Voters
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import decode_epoch
from timer.files.disk import Disk
from timer.model.units import Epoch, LogIndex, UnixMs
from timer.recovery import manifest

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

MANIFEST_PATH: Final = STATE_PATH / manifest.NAME


class App:
    """An application, created at every start of its node from the files on the node's disk."""

    voters: Voters | None = None
    """The voter set in force at applied_index. None: there is no manifest."""
    state_time_ms = UnixMs(0)
    """Time of the manifest's last entry, on the log's clock. 0: none, or the app uses no times."""
    level = 0
    """The feature level of the state; 0: no epoch was applied."""

    @property
    def applied_index(self) -> LogIndex:
        """Last applied index; at start, the manifest's. Later entries come through `on_commit`."""
        raise NotImplementedError

    def check_entry(self, entry: Entry) -> None:
        """Raise ValueError if the entry can't be applied."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Apply committed entries, in the log's order."""
        raise NotImplementedError

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
        """Begin to write a manifest, if there are newer entries."""
        raise NotImplementedError

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """Raise CorruptFileError if no process could start from the state in `directory`."""
        manifest.read(disk, directory)


class CountingApp(App):
    """Saves the index of the last committed entry."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
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
        """See App."""
        return self._applied

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Now and then save a manifest and drop the log below it."""
        hasty = self._node.world.options.hasty
        for entry in entries:
            if entry.kind is EntryKind.EPOCH:
                if hasty:
                    self._save()
                start = decode_epoch(entry.payload)
                self.voters, self.level = frozenset(start.voters), start.level
            self._applied, self._epoch = entry.index, entry.epoch
        if hasty:
            self._node.drop_before(LogIndex(self._saved + 1), keep=False)
        if self._applied >= self._saved + self._node.world.options.manifest_every:
            self.flush()

    def flush(self) -> None:
        """Write the manifest, if the log is durable up to its index; drop the log below it."""
        if self._save():
            self._node.drop_before(LogIndex(self._saved + 1))

    def _save(self) -> bool:
        due = self._node.log.durable_index >= self._applied > self._saved
        if due:
            self._saved = self._applied
            state: manifest.State = {"index": self._saved, "epoch": self._epoch}
            state |= {"voters": sorted(self.voters or ()), "runs": [], "topics": []}
            state |= {"level": self.level}
            manifest.write(self._node.disk, STATE_PATH, state)
        return due
