"""The core with its bytes: steps the core, executes its effects, and notifies the application.

    messages, durability, time          Driver                       Io (a shell)
    --------------------------> inbox -> core.step -> effects -----> persist, write, read,
                                          |     cache of frames      send, wake_at
                                          v
                                       Listener: on_commit, on_role, on_lead, on_stepdown, …

Two shells implement `Io`: asyncio with a writer thread (replication/shell/replica.py), and the
simulator (chaos/sim/). Both therefore run the same code except for the clock, the disk and the
network.

The driver runs on one thread. While a promise is being written no event is processed: arriving
events wait in the inbox.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from replication.core.core import Core
from replication.core.core_events import (
    Appointed,
    Effects,
    Event,
    Loaded,
    Persist,
    Proposed,
    Read,
    Received,
    Role,
    Tick,
)
from replication.core.message_check import epoch_in, epoch_limit, implausible
from replication.core.peer_messages import Append, Entries, FetchAnswer, LogStart, Message
from replication.core.progress import Latency
from replication.core.quorum import Voters
from replication.driver.write_order import Drop, Order, TruncateLog, Write
from timer.entries.entry_frame import HEADER_SIZE, Damage, Entry, EntryKind, encode, frame_at
from timer.entries.payloads import EpochStart, decode_epoch, encode_epoch
from timer.files.disk import Bytes
from timer.model.feature_level import LEVEL_MIN, is_supported
from timer.model.timer_errors import (
    OVERLOAD_RETRY_MS,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
)
from timer.model.units import Epoch, LogIndex, MonoMs, ReplicaId, UnixMs


class BadPeerMessage(ValueError):
    """A peer's message is damaged or can't be applied. It has changed nothing."""


INBOX_MAX: Final = 64
"""Messages that may wait for a promise to be durable. Later ones are dropped, as if the network had
lost them: a disk may hang, and each message may hold a megabyte."""


class FramedEntry(NamedTuple):
    """An entry with its encoded bytes."""

    frame: Bytes
    entry: Entry


class _Arrival(NamedTuple):
    """An event with the bytes that came with it. Both wait while a promise is written."""

    event: Event
    chunk: Sequence[FramedEntry] = ()
    """Entries of a message."""
    read_frames: Sequence[Bytes] = ()
    """Frames that a `Read` returned."""


class Io(Protocol):
    """The shell's operations for the driver. None of them blocks."""

    def mono_ms(self) -> MonoMs:
        """Return CLOCK_BOOTTIME in milliseconds."""

    def persist(self, order: Persist) -> None:
        """Make the promise durable, then call `Driver.on_persisted`."""

    def write(self, order: Order) -> None:
        """Queue for `write_batch`; after its sync, handle `Durable(its version, last index)`."""

    def read(self, order: Read) -> None:
        """Read from the log, then call `Driver.on_read` with the frames."""

    def send(self, to: ReplicaId, message: Message, frames: Sequence[Bytes]) -> None:
        """Queue the message with the present wall clock. The message may get lost."""

    def overtake(self, to: ReplicaId, message: Message) -> None:
        """As `send`, and the message need not wait for those before it."""

    def refuse(self, sender: ReplicaId, why: str) -> None:
        """End the stream of a message of `sender` that no correct peer sends."""

    def wake_at(self, at_ms: MonoMs | None) -> None:
        """Call `Driver.tick` at this time; replaces the previous call. None: no call is needed."""

    def soon(self) -> None:
        """Call `Driver.tick` as soon as the present burst of proposals is over."""


class Listener(Protocol):
    """The application's callbacks. They may propose."""

    def check(self, entry: Entry) -> None:
        """Return if the entry can be applied. Called before the entry is appended.

        Raises:
            ValueError: the entry can't be applied. No replica appends it.
        """

    def on_commit(self, commit_index: LogIndex) -> None:
        """Apply the log up to this index. The leader's own disk may not have all of it yet."""

    def on_role(self, role: Role, epoch: Epoch) -> None:
        """The role or the epoch changed."""

    def on_lead(self, epoch: Epoch) -> None:
        """The EPOCH entry is committed: apply to the commit index, load, and serve."""

    def on_drain(self) -> bool:
        """The leadership is being handed over. Return whether the last entries need another call.

        Each call is a step of its own. Proposals are refused after the last one.
        """

    def on_stepdown(self, epoch: Epoch) -> None:
        """Stop serving `epoch` at once. Requests in flight have an unknown outcome."""

    def on_behind(self) -> None:
        """The leader has dropped entries that this replica needs. Called repeatedly."""

    def on_forgotten(self) -> None:
        """This founder was formatted again: a cluster with entries that it forgot contacts it."""


@dataclass(frozen=True, slots=True)
class LogStatus:
    """A replica's state for the controller."""

    replica: ReplicaId
    role: Role
    epoch: Epoch
    serving: bool
    lease_ok: bool
    last_epoch: Epoch
    last_index: LogIndex
    """End of its log on its own disk. Later entries are no help if that disk hangs."""
    commit_index: LogIndex
    highest_promise: Epoch
    """Highest epoch promised by this replica or by a voter that refused it. Appoint above it."""
    refused_epoch: Epoch
    """Epoch of the promise that refused this leadership; 0: none. At or above `epoch`, a voter
    promised another candidate, and follows again only from the next epoch on. The controller must
    then appoint once more; this replica, if it has no other fault."""
    bid_epoch: Epoch
    """The epoch that this replica bids to lead; 0: none."""
    unsure: bool
    disk_ms: int
    """Milliseconds for an entry to be durable here: the last one or the present one, if longer."""
    commit_ms: int
    """Milliseconds for a majority to have an entry, likewise; 0 if not a leader."""
    stranded: tuple[ReplicaId, ...]
    """Followers that need entries which the leader's log has dropped: `Progress.is_stranded`."""
    sets: tuple[Voters, ...]
    """The voter sets in force in the log: the last one that is known to be committed, then every
    later one. Empty: the log of a new learner knows no voters."""


class Driver:
    """One replica except for its clock, disk and network."""

    def __init__(
        self, core: Core, io: Io, listener: Listener, last_time_ms: UnixMs, level: int = 0
    ) -> None:
        """`level`: the highest feature level of the log's epochs and of the state. 0: no epoch."""
        self.core = core
        self.level = level
        """The highest feature level of an epoch in the log or the state. 0: there is none."""
        self._appointed_level = LEVEL_MIN
        """The highest level in an appointment: that of the next epoch that begins here."""
        self._io = io
        self._listener = listener
        self._cache: list[FramedEntry] = []
        self._cache_first = core.tail.first_index
        self._last_time_ms = last_time_ms
        self._inbox: deque[_Arrival] = deque()
        self._blocked: tuple[Effects, _Arrival] | None = None
        self._pumping = False
        self._soon = False
        self._reported: tuple[Role, Epoch, bool] = (core.role, core.epoch, False)
        self._reported_commit = core.commit_index
        self._disk_latency, self._commit_latency = Latency(), Latency()
        self._version = core.version
        """Number of truncations ordered from the writer. The core may be ahead during `persist`."""
        self._appointed_epoch = Epoch(0)
        """The highest epoch for which the control plane has appointed a leader."""

    # ---------------------------------------------------------------- events

    def receive(
        self, sender: ReplicaId, message: Message, wall_ms: UnixMs, data: memoryview
    ) -> None:
        """Process a message and its frames.

        Raises:
            BadPeerMessage: the frames are damaged, differ from those that the message names, or
                hold an entry that can't be applied.
        """
        if self._blocked is not None and len(self._inbox) >= INBOX_MAX:
            return
        chunk: Sequence[FramedEntry] = ()
        sizes: Sequence[int] = ()
        if isinstance(message, Append | FetchAnswer):
            try:
                chunk = parse(message, data)
                for framed in chunk:
                    self._listener.check(framed.entry)
            except ValueError as error:
                raise BadPeerMessage(str(error)) from None
            sizes = [len(framed.frame) for framed in chunk]
        self.handle(Received(sender, message, wall_ms, sizes), chunk)

    def handle(self, event: Event, chunk: Sequence[FramedEntry] = ()) -> None:
        """Step the core with `event`, now or once a promise is durable."""
        self._take(_Arrival(event, chunk))

    def _take(self, arrival: "_Arrival") -> None:
        self._inbox.append(arrival)
        self._pump()

    def tick(self) -> None:
        """Step the core with the present time."""
        self._soon = False
        if self._blocked is None:
            self.handle(Tick())

    def on_persisted(self) -> None:
        """Continue after `Io.persist`: the promise is durable."""
        assert self._blocked is not None, "nothing was to be persisted"
        effects, arrival = self._blocked
        self._blocked = None
        pumping, self._pumping = self._pumping, True
        self._carry_out(effects, arrival)
        self._pumping = pumping
        self._pump()

    def on_read(self, order: Read, frames: Sequence[Bytes]) -> None:
        """Process the frames that a `Read` returned."""
        assert frames, order
        last = LogIndex(order.first + len(frames) - 1)
        size = sum(map(len, frames))
        event = Loaded(order.version, order.peer, order.first, last, size)
        self._take(_Arrival(event, read_frames=frames))

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        while self._inbox and self._blocked is None:
            arrival = self._inbox.popleft()
            event = arrival.event
            now_ms = self._io.mono_ms()
            if isinstance(event, Received):
                if why := self._implausible(event, arrival.chunk, now_ms):
                    self._io.refuse(event.sender, why)
                    continue
            elif isinstance(event, Appointed):
                self._appointed_epoch = max(self._appointed_epoch, event.epoch)
                if is_supported(event.level):
                    self._appointed_level = max(self._appointed_level, event.level)
            effects = self.core.step(now_ms, event)
            self._measure(now_ms)
            if effects.persist is not None:
                self._blocked = (effects, arrival)
                self._io.persist(effects.persist)
            else:
                self._carry_out(effects, arrival)
        self._pumping = False

    def _measure(self, now_ms: MonoMs) -> None:
        """Record the progress of this disk and, on a leader, of the majority."""
        core = self.core
        self._disk_latency.note(now_ms, core.durable_index, core.shape.last_index)
        if core.role is Role.LEADER:
            self._commit_latency.note(now_ms, core.commit_index, core.timed_index)
        else:
            self._commit_latency = Latency()

    def _implausible(
        self, event: Received, chunk: Sequence[FramedEntry], now_ms: MonoMs
    ) -> str | None:
        core = self.core
        limit = epoch_limit(max(core.highest_met, self._appointed_epoch))
        why = implausible(core, event.sender, event.message, now_ms, limit)
        return why or (self._goes_back(event.message, chunk) if chunk else None)

    def _goes_back(self, message: Message, chunk: Sequence[FramedEntry]) -> str | None:
        """Return the fault if the first new entry is older than the one before it, if known."""
        assert isinstance(message, Append | FetchAnswer), message
        shape, last = self.core.shape, message.last_index
        known = LogIndex(max(message.prev_index, min(self.core.commit_index, last)))
        if not shape.base_index <= known <= shape.last_index:
            return None
        if epoch_in(message, known) != shape.epoch_at(known):
            return None  # the core refuses the message or answers with a conflict
        first = shape.divergence_at(known, message.starts, last) or LogIndex(shape.last_index + 1)
        at = first - message.prev_index - 1
        before_ms = self._time_at(LogIndex(first - 1))
        if at >= len(chunk) or before_ms is None:
            return None
        time_ms = chunk[at].entry.time_ms
        return (
            None if time_ms >= before_ms else f"entry {first}: time {time_ms} is below {before_ms}"
        )

    def _time_at(self, index: LogIndex) -> UnixMs | None:
        """Return the time of an entry. None: it is not in memory any more."""
        at = index - self._cache_first
        if 0 <= at < len(self._cache):
            return self._cache[at].entry.time_ms
        return self._last_time_ms if index == self.core.shape.last_index else None

    # ---------------------------------------------------------------- effects

    def _carry_out(self, effects: Effects, arrival: "_Arrival") -> None:
        core, io, chunk = self.core, self._io, arrival.chunk
        if effects.truncate_after is not None:
            self._truncate_cache(effects.truncate_after)
            self._version = core.version
            io.write(TruncateLog(self._version, effects.truncate_after, core.commit_index))
        if effects.append is not None:
            first, last = effects.append
            new = chunk[first - chunk[0].entry.index :]
            assert new[-1].entry.index == last, (new[-1].entry.index, last)
            self._append(new)
        if effects.start is not None:
            self._append([self._epoch_entry(effects.start)])
            core.set_start_size(len(self._cache[-1].frame))
            self._inbox.appendleft(_Arrival(Tick()))
        for order in effects.read:
            io.read(order)
        for to, message in effects.send:
            io.send(to, message, self._frames(message, arrival.read_frames))
        for to, message in effects.overtake:
            io.overtake(to, message)
        excess = core.tail.first_index - self._cache_first
        if excess > 0:
            del self._cache[:excess]
            self._cache_first = core.tail.first_index
        io.wake_at(core.wake_at_ms)
        self._notify()
        if effects.behind:
            self._listener.on_behind()
        if effects.forgotten:
            self._listener.on_forgotten()

    def _notify(self) -> None:
        """Notify the listener of every change."""
        core, listener = self.core, self._listener
        role, epoch, serving = self._reported
        now = (core.role, core.epoch, core.serving)
        if now != self._reported:
            self._reported = now
            if serving and (not core.serving or core.epoch != epoch):
                listener.on_stepdown(epoch)
            if (role, epoch) != now[:2]:
                listener.on_role(core.role, core.epoch)
        if core.commit_index > self._reported_commit:
            self._reported_commit = core.commit_index
            listener.on_commit(core.commit_index)
        if core.serving and not serving:
            listener.on_lead(core.epoch)
        if core.takes_last_entries:
            if core.serving and listener.on_drain():
                self._io.wake_at(self._io.mono_ms())
                return
            core.end_proposals()
            self._inbox.appendleft(_Arrival(Tick()))

    def _append(self, new: Sequence[FramedEntry]) -> None:
        for framed in new:
            if framed.entry.kind is EntryKind.EPOCH:
                self.level = max(self.level, decode_epoch(framed.entry.payload).level)
        self._cache.extend(new)
        self._last_time_ms = new[-1].entry.time_ms
        self._io.write(Write(self._version, [framed.frame for framed in new]))

    def _truncate_cache(self, after: LogIndex) -> None:
        keep = after - self._cache_first + 1
        if keep >= 0:
            del self._cache[keep:]
        else:
            self._cache.clear()
            self._cache_first = LogIndex(after + 1)

    def _epoch_entry(self, start: LogStart) -> FramedEntry:
        core = self.core
        level = max(self.level, self._appointed_level)
        epoch_start = EpochStart(start.epoch, core.me, tuple(sorted(start.voters)), level)
        # The previous entry's time, not this node's clock: the clock may be wrong.
        framed = _framed_entry(
            EntryKind.EPOCH,
            start.epoch,
            start.index,
            self._last_time_ms,
            [encode_epoch(epoch_start)],
        )
        self._listener.check(framed.entry)
        return framed

    def _frames(self, message: Message, read_frames: Sequence[Bytes]) -> Sequence[Bytes]:
        if (
            not isinstance(message, Append | FetchAnswer)
            or message.last_index == message.prev_index
        ):
            return ()
        first = LogIndex(message.prev_index + 1)
        at = first - self._cache_first
        if at >= 0:
            end = message.last_index - self._cache_first + 1
            return [framed.frame for framed in self._cache[at:end]]
        # An entry outside memory is sent in the step that processes the `Read` which returned it.
        assert len(read_frames) == message.last_index - message.prev_index, (
            len(read_frames),
            message,
        )
        return read_frames

    # ---------------------------------------------------------------- application

    def check_leading(self, size: int) -> None:
        """Return if `size` bytes may be proposed now.

        Raises:
            NotLeaderError: this replica does not lead, or is handing over.
            OverloadedError: too many bytes wait for a majority.
        """
        core = self.core
        if (
            not core.serving
            or (core.draining and not core.takes_last_entries)
            or self._blocked is not None
        ):
            raise NotLeaderError(None)
        if core.uncommitted_bytes + size > core.conf.uncommitted_bytes:
            raise OverloadedError("uncommitted log", retry_after_ms=OVERLOAD_RETRY_MS)

    def propose(self, kind: EntryKind, payload: list[bytes], time_ms: UnixMs) -> LogIndex:
        """Append an entry and return its index. `on_commit` reports the commit.

        Raises:
            NotLeaderError: this replica does not lead, or is handing over.
            OverloadedError: too many bytes wait for a majority.
            InvalidRequestError: the entry can't be applied.
        """
        core = self.core
        self.check_leading(sum(map(len, payload)) + HEADER_SIZE)
        assert time_ms >= self._last_time_ms, f"time goes back: {self._last_time_ms}, {time_ms}"
        index = LogIndex(core.shape.last_index + 1)
        framed = _framed_entry(kind, core.epoch, index, time_ms, payload)
        try:
            self._listener.check(framed.entry)
        except ValueError as error:
            raise InvalidRequestError("entry", kind.name, f"can't be applied: {error}") from None
        core.step(self._io.mono_ms(), Proposed((len(framed.frame),)))
        self._append([framed])
        if not self._soon:
            self._soon = True
            self._io.soon()
        return index

    def drop_before(self, index: LogIndex, beyond: LogIndex = LogIndex(0)) -> None:
        """Drop the log below `index`, which a manifest covers; see `Core.drop_before`."""
        self._io.write(Drop(self._version, self.core.drop_before(index, beyond)))

    @property
    def last_time_ms(self) -> UnixMs:
        """Lowest time of the next entry: that of the last one, in the log or in the state."""
        return self._last_time_ms

    def cached_entries(self, first: LogIndex, last: LogIndex) -> list[Entry] | None:
        """Return the entries [first, last]. None: some are not in memory any more."""
        at = first - self._cache_first
        if at < 0:
            return None
        assert last <= self.core.shape.last_index, (first, last, self.core.shape.last_index)
        return [framed.entry for framed in self._cache[at : last - self._cache_first + 1]]

    def report(self) -> LogStatus:
        """Return the replica's state for the controller."""
        core, now_ms = self.core, self._io.mono_ms()
        sets = core.shape.sets_from(core.commit_index)
        return LogStatus(
            replica=core.me,
            role=core.role,
            epoch=core.epoch,
            serving=core.serving,
            lease_ok=core.holds_lease(now_ms),
            last_epoch=core.shape.epoch_at(core.durable_index),
            last_index=core.durable_index,
            commit_index=core.commit_index,
            highest_promise=core.highest_met,
            refused_epoch=core.refused_epoch,
            bid_epoch=core.bid_epoch,
            unsure=core.unsure,
            disk_ms=self._disk_latency.ms(now_ms),
            commit_ms=self._commit_latency.ms(now_ms),
            stranded=core.stranded,
            sets=tuple(dict.fromkeys(start.voters for start in sets if start.voters)),
        )


def parse(message: Entries, data: memoryview) -> list[FramedEntry]:
    """Return the checked entries of `message`.

    Raises:
        ValueError: the frames are damaged, or differ from those that the message names.
    """
    chunk: list[FramedEntry] = []
    position, epoch, index = 0, message.prev_epoch, message.prev_index
    starts = iter(message.starts)
    start = next(starts, None)
    while (entry := frame_at(data, position)) is not None:
        if isinstance(entry, Damage):
            raise ValueError(f"damaged frame at byte {entry.position}: {entry.why}")
        index = LogIndex(index + 1)
        if start is not None and start.index == index:
            if entry.kind is not EntryKind.EPOCH or start.epoch <= epoch:
                raise ValueError(f"epoch {start.epoch} after {epoch} begins with {entry.kind}")
            payload = decode_epoch(entry.payload)
            if (payload.epoch, frozenset(payload.voters)) != (start.epoch, start.voters):
                raise ValueError(
                    f"epoch {start.epoch} with voters {sorted(start.voters)} begins with {payload}"
                )
            epoch, start = start.epoch, next(starts, None)
        elif entry.kind is EntryKind.EPOCH:
            raise ValueError(f"EPOCH entry {index} is not among the message's starts")
        if (entry.epoch, entry.index) != (epoch, index):
            raise ValueError(f"entry {entry.epoch}:{entry.index} in the place of {epoch}:{index}")
        if chunk and entry.time_ms < chunk[-1].entry.time_ms:
            before_ms = chunk[-1].entry.time_ms
            raise ValueError(f"entry {index}: time {entry.time_ms} is below {before_ms}")
        end = position + HEADER_SIZE + len(entry.payload)
        chunk.append(FramedEntry(data[position:end], entry))
        position = end
    if index != message.last_index or start is not None:
        raise ValueError(f"entries end at {index}; the message says {message.last_index}")
    return chunk


def _framed_entry(
    kind: EntryKind, epoch: Epoch, index: LogIndex, time_ms: UnixMs, payload: list[bytes]
) -> FramedEntry:
    frame = encode(kind, epoch, index, time_ms, payload)
    return FramedEntry(frame, Entry(kind, epoch, index, time_ms, memoryview(frame)[HEADER_SIZE:]))
