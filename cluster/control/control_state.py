"""The replicated object of the control plane: who should lead, and how far the log was read.

    cluster id, voters    set by the first `Init`; the voters again by `Members`, as the log says
    epoch, leader         moved by `Appoint`: compare-and-set, the epoch only grows
    proposed voters       set by an `Appoint` that changes them, until the next one, or `Members`
    shared checkpoint     moved by `CheckpointPage`: (epoch, index) never goes back

Every node applies the same commands in the same order with `apply`. It is total: what it does
not understand, and what is stale, changes nothing. It is deterministic, and each command is
idempotent, because Raft may tell us that the outcome of one is unknown.

All of it is a hint for liveness. Who can commit is decided by the promises of the timer log.
An epoch far above the last one is refused: only a broken node proposes it, and none could follow.

A command is a msgpack map of at most COMMAND_SIZE_MAX bytes with the keys `v` (1), `op`,
`nonce` and those of its class; an unknown version or `op` is ignored, so that old nodes live
beside newer ones.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, assert_never

import msgpack

from timer.model.units import EPOCH_MAX, Epoch, LogIndex, QueueOffset, ReplicaId, UnixMs

COMMAND_SIZE_MAX: Final = 4_000
NAME_SIZE_MAX: Final = 255
DIGEST_SIZE_MAX: Final = 128
CHANGED_MAX: Final = 512
"""Offsets that pages have changed before they are all put together anew."""
_PAGE_OVERHEAD: Final = 400  # bytes of a page without its offsets, digest included
_VERSION: Final = 1
_INT_MAX: Final = (1 << 63) - 1
EPOCH_STEP_MAX: Final = 1 << 33
"""Twice what a replica takes at once from another: a promise that one gave is always passed."""


class Offsets(Mapping[str, "QueueOffset | None"]):
    """Queue offsets by topic that never change; `after` shares what it leaves as it is.

    A node that starts applies the pages of hours: none may cost as much as there are topics.
    """

    __slots__ = ("_base", "_changed")

    def __init__(self, base: Mapping[str, "QueueOffset | None"]) -> None:
        self._base: Mapping[str, QueueOffset | None] = base
        self._changed: dict[str, QueueOffset | None] = {}

    def after(self, page: Mapping[str, "QueueOffset | None"]) -> "Offsets":
        """Return what they are after a page; None removes."""
        after = Offsets(self._base)
        after._changed = {**self._changed, **page}
        return after if len(after._changed) <= CHANGED_MAX else Offsets(after.whole())

    def whole(self) -> dict[str, "QueueOffset | None"]:
        """Return all, in a dict of its own."""
        offsets = {**self._base, **self._changed}
        return {topic: offset for topic, offset in offsets.items() if offset is not None}

    def items(self) -> ItemsView[str, "QueueOffset | None"]:
        """Return all, as a dict's: the Mapping's own would look up each."""
        return self.whole().items()

    def __getitem__(self, topic: str) -> "QueueOffset | None":
        """Return the offset of a topic that is there."""
        offset = self._changed[topic] if topic in self._changed else self._base[topic]
        if offset is None:
            raise KeyError(topic)
        return offset

    def __iter__(self) -> Iterator[str]:
        """Iterate over the topics."""
        return iter(self.whole())

    def __len__(self) -> int:
        """Return how many topics there are."""
        return len(self.whole())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheckpoint:
    """How far the leader of `epoch` had read the timer log, all of it durable on a majority."""

    epoch: Epoch
    index: LogIndex
    last_read_time_ms: UnixMs
    queue_offsets: Mapping[str, QueueOffset | None]
    """Topic to the next queue offset. In a published one, topics that are absent stay as they
    were and None removes; in the replicated one nothing is None."""
    digest: str
    """Of the state at `index`, in hex."""
    published_at_ms: UnixMs


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The replicated object after some command; immutable."""

    cluster_id: str | None = None
    voters: Mapping[str, ReplicaId] = field(default_factory=lambda: MappingProxyType({}))
    """Node name to replica id, as proposed; the log's own voters are what counts."""
    epoch: Epoch = Epoch(0)
    proposed: Mapping[str, ReplicaId] | None = None
    """Voters that the appointed leader should write into its EPOCH entry. None: no others."""
    leader: ReplicaId | None = None
    """Appointed for `epoch`. None: nobody ever was."""
    unfit: tuple[ReplicaId, ...] = ()
    """Those that led poorly, as the controller that made this appointment knew."""
    checkpoint: SharedCheckpoint | None = None

    def name_of(self, replica_id: ReplicaId | None) -> str | None:
        """Return the voter's name. None: no voter has this id."""
        return next((name for name, voter in self.voters.items() if voter == replica_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Found the cluster."""

    op: ClassVar = "init"
    cluster_id: str
    voters: Mapping[str, ReplicaId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appoint:
    """Let `leader` lead `epoch`, if the epoch is still `expected_epoch`."""

    op: ClassVar = "appoint"
    epoch: Epoch
    leader: ReplicaId
    expected_epoch: Epoch
    voters: Mapping[str, ReplicaId] | None = None
    """Who should vote from then on. None: who does already."""
    unfit: tuple[ReplicaId, ...] = ()
    """Those that led poorly lately: see cluster/control/leader_fitness.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The log's voters, as the leader that serves `epoch` has them."""

    op: ClassVar = "members"
    epoch: Epoch
    voters: Mapping[str, ReplicaId]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """Part of a shared checkpoint: its head and some of its offsets."""

    op: ClassVar = "checkpoint"
    checkpoint: SharedCheckpoint


Command: TypeAlias = Init | Appoint | Members | CheckpointPage


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of the command `nonce`."""

    nonce: int
    accepted: bool
    """False: it was stale or malformed, and changed nothing."""


def apply(state: ControlState, command: bytes) -> tuple[ControlState, Applied | None]:
    """Return the next state, and what became of the command. None: not even its nonce reads."""
    try:
        fields = msgpack.unpackb(command)
        nonce = _int(fields["nonce"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        return state, None
    try:
        parsed = _parse(fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return state, Applied(nonce, accepted=False)
    after = _apply(state, parsed)
    return (state if after is None else after), Applied(nonce, accepted=after is not None)


def encode_command(command: Command, *, nonce: int) -> bytes:
    """Return the command's bytes.

    Raises:
        ValueError: they are too many.
    """
    match command:
        case Init(cluster_id=cluster_id, voters=voters):
            fields: dict[str, Any] = {"cluster_id": cluster_id, "voters": dict(voters)}
        case Appoint(epoch=epoch, leader=leader, expected_epoch=expected_epoch):
            fields = {"epoch": epoch, "leader": leader, "expected_epoch": expected_epoch}
            if command.voters is not None:
                fields["voters"] = dict(command.voters)
            if command.unfit:
                fields["unfit"] = list(command.unfit)
        case Members(epoch=epoch, voters=voters):
            fields = {"epoch": epoch, "voters": dict(voters)}
        case CheckpointPage(checkpoint=checkpoint):
            fields = {"checkpoint": _pack_checkpoint(checkpoint)}
        case _:
            assert_never(command)
    data: bytes = msgpack.packb({"v": _VERSION, "op": command.op, "nonce": nonce, **fields})
    if len(data) > COMMAND_SIZE_MAX:
        raise ValueError(f"command {command.op} of {len(data)} bytes; at most {COMMAND_SIZE_MAX}")
    return data


def pages(
    state: ControlState,
    checkpoint: SharedCheckpoint,
    moved: Mapping[str, QueueOffset | None] | None = None,
) -> list[CheckpointPage]:
    """Return the commands that publish `checkpoint`: only offsets that `state` lacks, and topics
    that are gone; at least one page, each small enough for one command.

    `moved`: these are known to be them; None: all have to be compared.
    """
    if moved is None:
        moved = _differing(state, checkpoint.queue_offsets)
    return [
        CheckpointPage(checkpoint=replace(checkpoint, queue_offsets=dict(part)))
        for part in _parts(moved.items())
    ]


def _differing(
    state: ControlState, there: Mapping[str, QueueOffset | None]
) -> dict[str, QueueOffset | None]:
    known = dict(state.checkpoint.queue_offsets.items()) if state.checkpoint else {}
    changed = {topic: offset for topic, offset in there.items() if known.get(topic) != offset}
    return changed | dict.fromkeys(known.keys() - there.keys())


def dump(state: ControlState) -> bytes:
    """Return the state's bytes, for a snapshot."""
    checkpoint = None if state.checkpoint is None else _pack_checkpoint(state.checkpoint)
    proposed = None if state.proposed is None else dict(state.proposed)
    known = [state.cluster_id, dict(state.voters), state.epoch, state.leader, checkpoint, proposed]
    data: bytes = msgpack.packb([_VERSION, *known, list(state.unfit)])
    return data


def load(data: bytes) -> ControlState:
    """Return the state that `dump` wrote.

    Raises:
        ValueError: another program wrote it.
    """
    try:
        version, cluster_id, voters, epoch, leader, checkpoint, *later = msgpack.unpackb(data)
        if version != _VERSION:
            raise ValueError(f"control state version {version}; this program knows {_VERSION}")
        proposed = later[0] if later else None
        return ControlState(
            cluster_id=None if cluster_id is None else _name(cluster_id),
            voters=MappingProxyType(_voters(voters)),
            epoch=Epoch(min(_int(epoch), EPOCH_MAX)),
            proposed=None if proposed is None else MappingProxyType(_voters(proposed)),
            leader=None if leader is None else ReplicaId(_int(leader)),
            unfit=tuple(ReplicaId(_int(each)) for each in later[1]) if len(later) > 1 else (),
            checkpoint=None if checkpoint is None else _parse_checkpoint(checkpoint),
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no control state: {error}") from error


def _apply(state: ControlState, command: Command) -> ControlState | None:
    """Return the state after `command`. None: it is stale, or of an epoch far above."""
    if epoch_of(command) > epoch_limit(state.epoch):
        return None
    match command:
        case Init(cluster_id=cluster_id, voters=voters):
            if state.cluster_id is not None:
                return None
            return replace(state, cluster_id=cluster_id, voters=MappingProxyType(dict(voters)))
        case Appoint(epoch=epoch, leader=leader, expected_epoch=expected_epoch, unfit=unfit):
            proposed = command.voters
            if (state.epoch, state.leader) == (epoch, leader):
                return state  # the same command once more
            if state.epoch != expected_epoch or epoch <= state.epoch:
                return None
            if proposed is not None:
                proposed = MappingProxyType(dict(proposed))
            return replace(state, epoch=epoch, leader=leader, proposed=proposed, unfit=unfit)
        case Members(epoch=epoch, voters=voters):
            if epoch < state.epoch:
                return None
            return replace(state, voters=MappingProxyType(dict(voters)), proposed=None)
        case CheckpointPage(checkpoint=page):
            return _apply_page(state, page)


def epoch_of(command: Command) -> int:
    """Return the epoch that a command names; 0: none."""
    match command:
        case Init():
            return 0
        case CheckpointPage(checkpoint=page):
            return page.epoch
        case Appoint() | Members():
            return command.epoch


def epoch_limit(epoch: Epoch) -> int:
    """Return the highest epoch that may follow. After none any may: Raft was founded anew."""
    return min(epoch + EPOCH_STEP_MAX, EPOCH_MAX) if epoch else EPOCH_MAX


def _apply_page(state: ControlState, page: SharedCheckpoint) -> ControlState | None:
    last = state.checkpoint
    if page.epoch < state.epoch:
        return None
    if last is not None and (page.epoch, page.index) < (last.epoch, last.index):
        return None
    offsets = last.queue_offsets if last else {}
    known = offsets if isinstance(offsets, Offsets) else Offsets(offsets)
    return replace(state, checkpoint=replace(page, queue_offsets=known.after(page.queue_offsets)))


def _parts(
    items: Iterable[tuple[str, QueueOffset | None]],
) -> list[list[tuple[str, QueueOffset | None]]]:
    parts: list[list[tuple[str, QueueOffset | None]]] = [[]]
    size = _PAGE_OVERHEAD
    for item in items:
        item_size = len(msgpack.packb(item))
        if size + item_size > COMMAND_SIZE_MAX:
            parts.append([])
            size = _PAGE_OVERHEAD
        parts[-1].append(item)
        size += item_size
    return parts


def _parse(fields: dict[str, Any]) -> Command:
    if fields["v"] != _VERSION:
        raise ValueError(f"version {fields['v']!r}")
    match fields["op"]:
        case Init.op:
            voters = _voters(fields["voters"])
            return Init(cluster_id=_name(fields["cluster_id"]), voters=voters)
        case Appoint.op:
            return Appoint(
                epoch=Epoch(_int(fields["epoch"])),
                leader=ReplicaId(_int(fields["leader"])),
                expected_epoch=Epoch(_int(fields["expected_epoch"])),
                voters=_voters(fields["voters"]) if "voters" in fields else None,
                unfit=tuple(ReplicaId(_int(replica)) for replica in fields.get("unfit", ())),
            )
        case Members.op:
            epoch = Epoch(_int(fields["epoch"]))
            return Members(epoch=epoch, voters=_voters(fields["voters"]))
        case CheckpointPage.op:
            return CheckpointPage(checkpoint=_parse_checkpoint(fields["checkpoint"]))
        case op:
            raise ValueError(f"unknown command {op!r}")


def _pack_checkpoint(checkpoint: SharedCheckpoint) -> list[Any]:
    return [
        checkpoint.epoch,
        checkpoint.index,
        checkpoint.last_read_time_ms,
        dict(checkpoint.queue_offsets.items()),
        checkpoint.digest,
        checkpoint.published_at_ms,
    ]


def _parse_checkpoint(packed: list[Any]) -> SharedCheckpoint:
    epoch, index, last_read_time_ms, queue_offsets, digest, published_at_ms = packed
    if not isinstance(digest, str) or len(digest) > DIGEST_SIZE_MAX:
        raise ValueError(f"digest {digest!r:.80}")
    return SharedCheckpoint(
        epoch=Epoch(_int(epoch)),
        index=LogIndex(_int(index)),
        last_read_time_ms=UnixMs(_int(last_read_time_ms)),
        queue_offsets=MappingProxyType(
            {
                _name(topic): None if offset is None else QueueOffset(_int(offset))
                for topic, offset in queue_offsets.items()
            }
        ),
        digest=digest,
        published_at_ms=UnixMs(_int(published_at_ms)),
    )


def _voters(packed: dict[object, object]) -> dict[str, ReplicaId]:
    return {_name(name): ReplicaId(_int(voter)) for name, voter in packed.items()}


def _int(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _INT_MAX:
        raise ValueError(f"{value!r:.80} is no number of ours")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_SIZE_MAX:
        raise ValueError(f"{value!r:.80} is no name")
    return value
