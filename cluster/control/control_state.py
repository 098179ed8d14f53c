"""The replicated object of the control plane: the appointed leader and the shared checkpoint.

    cluster id, voters    set by the first `Init`; `Members` sets the voters to those of the log
    epoch, leader         moved by `Appoint`: compare-and-set, the epoch only grows
    feature level         raised by an `Appoint`; never falls
    proposed voters       set by an `Appoint` that changes them, until the next one, or `Members`;
                          with the voters that they were planned from
    shared checkpoint     moved by `CheckpointPage`: (epoch, index) never goes back

Every node applies the same commands in the same order with `apply`. `apply` is total: a malformed
or stale command changes nothing. It is deterministic. Each command is idempotent, because Raft may
report an unknown outcome, and the command is then sent again.

The object is only a hint for liveness. The promises of the timer log decide which node can commit.
An epoch far above the last one is refused: only a broken node proposes it, and no node could
follow it.

A command is a msgpack map of at most COMMAND_SIZE_MAX bytes with the keys `v` (1), `op`, `nonce`
and those of its class. Nodes ignore an unknown version or `op`, so old and new nodes can run
together.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, assert_never

import msgpack

from replication.core.quorum import Voters
from timer.model.units import EPOCH_MAX, Epoch, LogIndex, QueueOffset, ReplicaId, UnixMs

COMMAND_SIZE_MAX: Final = 4_000
NAME_SIZE_MAX: Final = 255
WHY_SIZE_MAX: Final = 200
DIGEST_SIZE_MAX: Final = 128
_PAGE_OVERHEAD: Final = 400  # bytes of a page without its offsets, digest included
_VERSION: Final = 1
_INT_MAX: Final = (1 << 63) - 1
EPOCH_STEP_MAX: Final = 1 << 33
"""Twice the step that a replica accepts from another one, so that any given promise is passed."""


class Offsets(Mapping[str, "QueueOffset | None"]):
    """Immutable queue offsets by topic; `after` shares the unchanged ones.

    A node that starts applies the pages of hours. The cost of a page must not depend on the number
    of topics. The offsets are therefore in layers: a layer has at least twice as many offsets as
    the next newer one, and a page merges the layers that are too small beside it.
    """

    __slots__ = ("_layers",)

    def __init__(self, base: Mapping[str, "QueueOffset | None"]) -> None:
        self._layers: tuple[Mapping[str, QueueOffset | None], ...] = (base,)
        """The oldest first. A newer layer wins; None in it removes a topic."""

    def after(self, page: Mapping[str, "QueueOffset | None"]) -> "Offsets":
        """Return the offsets after a page. None removes a topic."""
        layers, newest = [*self._layers], page
        while layers and len(layers[-1]) < 2 * len(newest):
            newest = {**layers.pop(), **newest}
        if not layers:  # nothing older is left for a None to hide
            newest = {topic: offset for topic, offset in newest.items() if offset is not None}
        after = Offsets(newest)
        after._layers = (*layers, newest)
        return after

    def as_dict(self) -> dict[str, "QueueOffset | None"]:
        """Return all offsets in a new dict."""
        offsets: dict[str, QueueOffset | None] = {}
        for layer in self._layers:
            offsets.update(layer)
        return {topic: offset for topic, offset in offsets.items() if offset is not None}

    def items(self) -> ItemsView[str, "QueueOffset | None"]:
        """Return all offsets as a dict's items; Mapping's own method would look up each topic."""
        return self.as_dict().items()

    def __getitem__(self, topic: str) -> "QueueOffset | None":
        """Return the offset of a topic; KeyError if it has none."""
        for layer in reversed(self._layers):
            if topic in layer:
                if layer[topic] is None:
                    break
                return layer[topic]
        raise KeyError(topic)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the topics."""
        return iter(self.as_dict())

    def __len__(self) -> int:
        """Return the number of topics."""
        return len(self.as_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCheckpoint:
    """How far the leader of `epoch` had read the log; all of that is durable on a majority."""

    epoch: Epoch
    index: LogIndex
    last_read_time_ms: UnixMs
    queue_offsets: Mapping[str, QueueOffset | None]
    """Topic to the next queue offset. In a command, absent topics keep their offsets and None
    removes a topic. In the replicated object no offset is None."""
    digest: str
    """Of the state at `index`, in hex."""
    published_at_ms: UnixMs


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The replicated object after a command; immutable."""

    cluster_id: str | None = None
    voters: Mapping[str, ReplicaId] = field(default_factory=lambda: MappingProxyType({}))
    """Node name to replica id, as published. The name is the id if it is unknown. Only the log's
    own voters count."""
    epoch: Epoch = Epoch(0)
    proposed: Mapping[str, ReplicaId] | None = None
    """Voters for the appointed leader's EPOCH entry. None: no change is proposed."""
    planned_from: tuple[ReplicaId, ...] = ()
    """The log's voters that `proposed` was planned from: it counts only for a log with these.
    Empty: a controller of an earlier release made the proposal."""
    leader: ReplicaId | None = None
    """The replica appointed for `epoch`. None: no leader was ever appointed."""
    unfit: tuple[ReplicaId, ...] = ()
    """Replicas that led poorly, as known to the controller that made this appointment."""
    why: str = ""
    """The controller's reason for this appointment, for operators; empty: unknown."""
    level: int = 0
    """The feature level that all nodes have supported at once: the appointed leaders raise the
    log's level to it. 0: unknown. Only the level of the log counts."""
    checkpoint: SharedCheckpoint | None = None

    def name_of(self, replica_id: ReplicaId | None) -> str | None:
        """Return the voter's name. None: no voter has this id."""
        return next((name for name, voter in self.voters.items() if voter == replica_id), None)

    def change_of(self, log: Voters) -> Voters | None:
        """Return the proposed voters, if they were planned from the voters of this log.

        The log has other voters if its leader committed a change and ended before it published
        them. Otherwise, a node to add could take the vote of one that was just added.
        """
        if self.proposed is None:
            return None
        proposed = frozenset(self.proposed.values())
        planned_from = frozenset(self.planned_from or self.voters.values())
        return proposed if log in (planned_from, proposed) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Found the cluster: set its id and voters."""

    op: ClassVar = "init"
    cluster_id: str
    voters: Mapping[str, ReplicaId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appoint:
    """Appoint `leader` for `epoch`, if the last epoch is still `expected_epoch`."""

    op: ClassVar = "appoint"
    epoch: Epoch
    leader: ReplicaId
    expected_epoch: Epoch
    voters: Mapping[str, ReplicaId] | None = None
    """The voters from this epoch on. None: no change."""
    planned_from: tuple[ReplicaId, ...] = ()
    """The log's voters that `voters` was planned from."""
    unfit: tuple[ReplicaId, ...] = ()
    """Replicas that led poorly of late: see cluster/control/leader_fitness.py."""
    level: int = 0
    """The feature level that all nodes support. 0: no change."""
    why: str = ""
    """The reason, for operators; at most WHY_SIZE_MAX characters are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Set the voters to those of the log, as reported by the leader that serves `epoch`."""

    op: ClassVar = "members"
    epoch: Epoch
    voters: Mapping[str, ReplicaId]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """A part of a shared checkpoint: its head and some of its offsets."""

    op: ClassVar = "checkpoint"
    checkpoint: SharedCheckpoint


Command: TypeAlias = Init | Appoint | Members | CheckpointPage


@dataclass(frozen=True, slots=True)
class AppliedCommand:
    """The result of the command `nonce`."""

    nonce: int
    accepted: bool
    """False: the command was stale or malformed, and changed nothing."""


def apply(state: ControlState, command: bytes) -> tuple[ControlState, AppliedCommand | None]:
    """Return the next state and the result of the command. None: its nonce is unreadable."""
    try:
        fields = msgpack.unpackb(command)
        nonce = _int(fields["nonce"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException):
        return state, None
    try:
        parsed = _parse(fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return state, AppliedCommand(nonce, accepted=False)
    after = _apply(state, parsed)
    return (state if after is None else after), AppliedCommand(nonce, accepted=after is not None)


def encode_command(command: Command, *, nonce: int) -> bytes:
    """Return the command's bytes.

    Raises:
        ValueError: more than COMMAND_SIZE_MAX bytes.
    """
    match command:
        case Init(cluster_id=cluster_id, voters=voters):
            fields: dict[str, Any] = {"cluster_id": cluster_id, "voters": dict(voters)}
        case Appoint(epoch=epoch, leader=leader, expected_epoch=expected_epoch):
            fields = {"epoch": epoch, "leader": leader, "expected_epoch": expected_epoch}
            if command.voters is not None:
                fields["voters"] = dict(command.voters)
                fields["from"] = list(command.planned_from)
            if command.unfit:
                fields["unfit"] = list(command.unfit)
            if command.level:
                fields["level"] = command.level
            if command.why:
                fields["why"] = command.why[:WHY_SIZE_MAX]
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
    """Return the commands that publish `checkpoint`: at least one page.

    The pages hold the offsets that differ from those of `state`, and None for deleted topics. Each
    page fits into one command.

    `moved`: the offsets that differ. None: compare all.
    """
    if moved is None:
        moved = _changed_offsets(state, checkpoint.queue_offsets)
    return [
        CheckpointPage(checkpoint=replace(checkpoint, queue_offsets=dict(part)))
        for part in _parts(moved.items())
    ]


def _changed_offsets(
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
    later: list[object] = [list(state.unfit), state.why]
    if state.level or state.planned_from:
        later += [state.level, list(state.planned_from)]
    data: bytes = msgpack.packb([_VERSION, *known, *later])
    return data


def load(data: bytes) -> ControlState:
    """Return the state that `dump` wrote.

    Raises:
        ValueError: the bytes are malformed or of another version.
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
            unfit=_replicas(later[1]) if len(later) > 1 else (),
            why=_why(later[2]) if len(later) > 2 else "",
            level=_int(later[3]) if len(later) > 3 else 0,
            planned_from=_replicas(later[4]) if len(later) > 4 else (),
            checkpoint=None if checkpoint is None else _parse_checkpoint(checkpoint),
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"malformed control state: {error}") from error


def _apply(state: ControlState, command: Command) -> ControlState | None:
    """Return the state after `command`. None: the command is stale, or its epoch is too high."""
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
                return state  # the same command again
            if state.epoch != expected_epoch or epoch <= state.epoch:
                return None
            if proposed is not None:
                proposed = MappingProxyType(dict(proposed))
            return replace(
                state,
                epoch=epoch,
                leader=leader,
                proposed=proposed,
                planned_from=command.planned_from,
                unfit=unfit,
                level=max(state.level, command.level),
                why=command.why,
            )
        case Members(epoch=epoch, voters=voters):
            if epoch < state.epoch:
                return None
            members = MappingProxyType(dict(voters))
            return replace(state, voters=members, proposed=None, planned_from=())
        case CheckpointPage(checkpoint=page):
            return _apply_page(state, page)


def epoch_of(command: Command) -> int:
    """Return the epoch in a command; 0: it has none."""
    match command:
        case Init():
            return 0
        case CheckpointPage(checkpoint=page):
            return page.epoch
        case Appoint() | Members():
            return command.epoch


def epoch_limit(epoch: Epoch) -> int:
    """Return the highest epoch that may follow; after epoch 0 any may: Raft was founded again."""
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
                planned_from=_replicas(fields.get("from", ())),
                unfit=_replicas(fields.get("unfit", ())),
                level=_int(fields.get("level", 0)),
                why=_why(fields.get("why", "")),
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


def _replicas(packed: Iterable[object]) -> tuple[ReplicaId, ...]:
    return tuple(ReplicaId(_int(each)) for each in packed)


def _int(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _INT_MAX:
        raise ValueError(f"{value!r:.80} is not an integer from 0 to 2^63 - 1")
    return value


def _why(value: object) -> str:
    """Return a reason. Nothing is refused for it, because older programs do not read it."""
    return value[:WHY_SIZE_MAX] if isinstance(value, str) else ""


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_SIZE_MAX:
        raise ValueError(f"{value!r:.80} is not a name of 1 to {NAME_SIZE_MAX} characters")
    return value
