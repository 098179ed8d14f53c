"""The application of a simulated node: it applies the committed entries.

`CountingApp` is the smallest application. It stores only a manifest, and answers a client when the
client's entry is committed. The timer machine (chaos/sim/timers/timers.py) is attached in the same
way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from chaos.sim.world.paths import STATE_PATH
from replication.core.quorum import Voters
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import decode_epoch
from timer.files.disk import Disk
from timer.model.timer_errors import NotLeaderError, OverloadedError
from timer.model.units import Epoch, LogIndex, UnixMs
from timer.recovery import manifest

if TYPE_CHECKING:
    from chaos.sim.world.sim_node import SimNode

MANIFEST_PATH: Final = STATE_PATH / manifest.NAME


class App(Protocol):
    """An application, created at every start of its node from the files on the node's disk."""

    @property
    def applied_index(self) -> LogIndex:
        """Last applied index; at start, the manifest's. Later entries come through `on_commit`."""

    @property
    def voters(self) -> Voters | None:
        """The voter set in force at applied_index. None: there is no manifest."""

    @property
    def state_time_ms(self) -> UnixMs:
        """Time of the manifest's last entry, on the log's clock. 0: there is no manifest."""

    @property
    def level(self) -> int:
        """The feature level of the state; 0: no epoch was applied."""

    def check_entry(self, entry: Entry) -> None:
        """Raise ValueError if the entry can't be applied."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Apply committed entries, in the log's order."""

    def on_lead(self, epoch: Epoch) -> None:
        """Begin to serve; all entries up to the EPOCH entry were applied."""

    def on_drain(self) -> bool:
        """Append last entries of the epoch. Return whether more are left."""

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving."""

    def drain(self, done: Callable[[], None]) -> None:
        """Reject new requests, answer the accepted ones, then call `done`."""

    def on_stop(self) -> None:
        """Note that the process ended; this object is not used again."""

    def flush(self) -> None:
        """Begin to write a manifest, if there are newer entries."""

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """Raise CorruptFileError if no process could start from the state in `directory`."""


MakeApp: TypeAlias = "Callable[[SimNode], App]"


class CountingApp:
    """Saves the index of the last committed entry, and answers a client once its entry commits."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self.applied_index = LogIndex(0)
        self.voters: Voters | None = None
        self.state_time_ms = UnixMs(0)
        """Always 0: this app uses no times of entries."""
        self.level = 0
        self._saved = 0
        self._epoch = Epoch(0)
        self._pending: dict[LogIndex, tuple[Epoch, bytes]] = {}
        node.disk.make_dir(STATE_PATH)
        state = manifest.read(node.disk, STATE_PATH)
        if state is not None:
            self.applied_index = LogIndex(state["index"])
            self._saved = state["index"]
            self.voters = frozenset(state["voters"])
            self.level = state.get("level", 1)

    def check_entry(self, entry: Entry) -> None:
        """Accept every entry; this app does not decode payloads."""

    def on_commit(self, entries: Sequence[Entry]) -> None:
        """Answer clients; now and then save a manifest and drop the log below it."""
        hasty = self._node.world.options.hasty
        for entry in entries:
            if entry.kind is EntryKind.EPOCH:
                if hasty:
                    self._save()
                start = decode_epoch(entry.payload)
                self.voters, self.level = frozenset(start.voters), start.level
            pending = self._pending.pop(entry.index, None)
            if pending is not None and pending == (entry.epoch, bytes(entry.payload)):
                self._node.world.referee.on_ack(self._node, entry.index, pending[1])
            self.applied_index, self._epoch = entry.index, entry.epoch
        if hasty:
            self._node.drop_before(LogIndex(self._saved + 1), keep=False)
        if self.applied_index >= self._saved + self._node.world.options.manifest_every:
            self.flush()

    def flush(self) -> None:
        """Write the manifest, if the log is durable up to its index; drop the log below it."""
        if self._save():
            self._node.drop_before(LogIndex(self._saved + 1))

    def _save(self) -> bool:
        due = self._node.log.durable_index >= self.applied_index > self._saved
        if due:
            self._saved = self.applied_index
            state: manifest.State = {"index": self._saved, "epoch": self._epoch}
            state |= {"voters": sorted(self.voters or ()), "runs": [], "topics": []}
            state |= {"level": self.level}
            manifest.write(self._node.disk, STATE_PATH, state)
        return due

    def on_lead(self, epoch: Epoch) -> None:
        """Do nothing; there is nothing to load."""

    def on_drain(self) -> bool:
        """Do nothing; this app appends no last entries."""
        return False

    def on_stepdown(self, epoch: Epoch) -> None:
        """Drop the open proposals without an answer, because their outcome is unknown."""
        self._pending.clear()

    def drain(self, done: Callable[[], None]) -> None:
        """Call `done` at once; this app has no accepted work except proposed entries."""
        done()

    def on_stop(self) -> None:
        """Do nothing; there is nothing to save."""

    @staticmethod
    def check(disk: Disk, directory: Path) -> None:
        """Raise CorruptFileError if the manifest, the only file of this app, is damaged."""
        manifest.read(disk, directory)

    def propose(self, payload: bytes) -> bool:
        """Propose `payload` and answer when it is committed; return whether it was accepted."""
        node = self._node
        try:
            index = node.driver.propose(EntryKind.SCHEDULE, [payload], node.driver.last_time_ms)
        except (NotLeaderError, OverloadedError):
            return False
        self._pending[index] = (node.core.epoch, payload)
        return True
