"""The application of a simulated node: what the committed entries are for.

`CountingApp` is the smallest one: it keeps nothing but a manifest, and answers clients when what
they proposed is committed. A state machine with more to lose is attached in the same way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from chaos.sim.world.paths import STATE_PATH
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import decode_epoch
from timer.files.disk import Disk
from timer.model.timer_errors import NotLeaderError, OverloadedError
from timer.model.units import Epoch, LogIndex, ReplicaId, UnixMs
from timer.recovery import manifest

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

MANIFEST_PATH: Final = STATE_PATH / manifest.NAME


class App(Protocol):
    """Made anew at every start of its node, from what is on the node's disk."""

    @property
    def applied_index(self) -> LogIndex:
        """Of the manifest at start: what comes after it comes through `on_commit`."""

    @property
    def voters(self) -> frozenset[ReplicaId] | None:
        """The voter set in force at applied_index. None: there is no manifest."""

    @property
    def state_time_ms(self) -> UnixMs:
        """Time of the manifest's last entry, on the log's clock; 0: there is none."""

    def check_entry(self, entry: Entry) -> None:
        """Raise ValueError if the entry can't be applied."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Apply committed entries, in the log's order."""

    def on_lead(self, epoch: Epoch) -> None:
        """Serve: everything up to the EPOCH entry was applied."""

    def on_drain(self) -> None:
        """Append the last entries of the epoch."""

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving."""

    def drain(self, done: Callable[[], None]) -> None:
        """Take nothing new and finish what was taken, then call `done`."""

    def on_stop(self) -> None:
        """The process is gone; so is this object."""

    def flush(self) -> None:
        """Begin to write a manifest, if there is something new."""

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """Raise CorruptFile if no process could start from the state in `directory`."""


MakeApp: TypeAlias = "Callable[[SimNode], App]"


class CountingApp:
    """Counts what is committed, saves how far, and tells clients what became of theirs."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self.applied_index = LogIndex(0)
        self.voters: frozenset[ReplicaId] | None = None
        self.state_time_ms = UnixMs(0)
        """of this app no entry's time counts."""
        self._saved = 0
        self._epoch = Epoch(0)
        self._pending: dict[LogIndex, tuple[Epoch, bytes]] = {}
        node.disk.make_dir(STATE_PATH)
        state = manifest.read(node.disk, STATE_PATH)
        if state is not None:
            self.applied_index = LogIndex(state["index"])
            self._saved = state["index"]
            self.voters = frozenset(state["voters"])

    def check_entry(self, entry: Entry) -> None:
        """Take any: it looks into none."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Answer clients; save a manifest and drop the log below it now and then."""
        hasty = self._node.world.options.hasty
        for entry in entries:
            if entry.kind is EntryKind.EPOCH:
                if hasty:
                    self._save()
                self.voters = frozenset(decode_epoch(entry.payload).voters)
            pending = self._pending.pop(entry.index, None)
            if pending is not None and pending == (entry.epoch, bytes(entry.payload)):
                self._node.world.referee.on_ack(self._node, entry.index, pending[1])
            self.applied_index, self._epoch = entry.index, entry.epoch
        if hasty:
            self._node.drop_before(LogIndex(self._saved + 1), keep=False)
        if self.applied_index >= self._saved + self._node.world.options.manifest_every:
            self.flush()

    def flush(self) -> None:
        """Write the manifest, if the log beside it goes as far; drop the log below it."""
        if self._save():
            self._node.drop_before(LogIndex(self._saved + 1))

    def _save(self) -> bool:
        due = self._node.log.durable_index >= self.applied_index > self._saved
        if due:
            self._saved = self.applied_index
            state: manifest.State = {"index": self._saved, "epoch": self._epoch}
            state |= {"voters": sorted(self.voters or ()), "runs": [], "topics": []}
            manifest.write(self._node.disk, STATE_PATH, state)
        return due

    def on_lead(self, epoch: Epoch) -> None:
        """Nothing to load."""

    def on_drain(self) -> None:
        """Nothing to say."""

    def on_stepdown(self, epoch: Epoch) -> None:
        """Their outcome is unknown; nobody is told anything."""
        self._pending.clear()

    def drain(self, done: Callable[[], None]) -> None:
        """Clients wait for nothing but entries."""
        done()

    def on_stop(self) -> None:
        """Nothing to save."""

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """A manifest is all there is."""
        manifest.read(disk, directory)

    def propose(self, payload: bytes) -> bool:
        """Propose `payload` and answer when it is committed; return whether it was taken."""
        node = self._node
        try:
            index = node.driver.propose(EntryKind.SCHEDULE, [payload], node.driver.last_time_ms)
        except (NotLeaderError, OverloadedError):
            return False
        self._pending[index] = (node.core.epoch, payload)
        return True
