"""The options of a world, drawn from its seed: swarm testing.

Every seed draws the kinds of faults and their frequency. Some worlds never lose a message, and
others deliver hardly one. A mix of all faults would hide errors that need a quiet world.

    FAULTS         all faults of a world
    DAMAGE_FAULTS  faults that destroy synced data. Every other world has some, because a world
                   with them may end in waiting for repair (chaos/sim/world/disk_loss.py).
    RARE           faults drawn one by one, most for one moment of the protocol; each exists in
                   every fifth world
    MOMENTS        faults that fall into a moment, such as a write, or into one lease
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

DAMAGE_FAULTS: Final = ("flip", "shorten", "wipe", "forget")
MOMENTS: Final = ("torn_write", "mid_sync", "burst", "slow_link", "stale_return", "usurp", "rival")
RARE: Final = ("late_answer", "overtaken", "terminate")
FAULTS: Final = (
    "power", "power_all", "kill", "pause", "isolate", "one_way", "split", "flap", "clock", "drift",
    "sync_fails", "full_disk", "slow_disk", "lossy", "lying_disk", "handover", "newborn", "ambush",
    *MOMENTS, *RARE, *DAMAGE_FAULTS,
)  # fmt: skip
MISCHIEF: Final = (
    *("transfer", "slow", "leaderless", "double", "forget", "dead", "twice", "spurious", "late"),
)
FAULTS_MIN: Final = 3
RARELY: Final = 0.2
NODES: Final = (3, 5)
NEVER: Final = 1 << 30


def _of_some(share: float) -> Any:
    """Return a field that is true in a share of the worlds."""
    return field(default=False, metadata={"share": share})


def fork(rng: random.Random) -> random.Random:
    """Return a generator seeded by a number that `rng` draws."""
    return random.Random(rng.getrandbits(64))


def aside(rng: random.Random, name: str) -> random.Random:
    """Return a generator seeded by the state of `rng` and a name; `rng` does not advance."""
    words = rng.getstate()[1]
    return random.Random(f"{name} {words[1:3]} {words[-1]}")  # the first word is constant


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """Options of a world, drawn once per seed. The unit of a field is the end of its name."""

    nodes: int
    """Founding voters."""
    learners: int
    """Number of nodes that join later, without a vote."""
    delay_us: int
    """Typical one-way delay of a message."""
    jitter: float
    """Mean of the random part of the delay, as a multiple of `delay_us`."""
    loss: float
    """Share of messages between nodes that are lost, 0 to 1."""
    duplicate: float
    """Share of messages between nodes that arrive twice, 0 to 1."""
    reorder: bool
    """Messages of one link may overtake each other."""
    client_loss: float
    """Share of requests and answers between clients and nodes that are lost, 0 to 1."""
    sync_us: int
    """Typical duration of an fsync."""
    proposals_per_s: float
    payload_bytes: int
    cache_bytes: int
    drift_ppm: int
    """Highest rate error of a node's monotonic clock, fast or slow, in parts per million."""
    segment_bytes: int
    manifest_every: int
    """Entries between two manifests of a node. The node drops the log's prefix after each."""
    log_kept_bytes: int
    """Bytes of the log below its manifest that a node keeps for followers that lack them."""
    faults: tuple[str, ...]
    """Kinds of faults, each one of FAULTS."""
    fault_gap_ms: int
    """Mean time between two faults."""
    member_changes: float
    """Probability of a change of the voters when the control plane reads healthy reports."""
    mischief: tuple[str, ...]
    """Errors of the control plane, each one of MISCHIEF."""
    poll_ms: int
    """Mean time between two readings of the reports by the control plane."""

    # Kinds of worlds.
    policies: bool = _of_some(0.3)  # an operator changes policies all the time
    requests: bool = _of_some(0.3)  # clients without producers give their requests ids
    quotas: bool = _of_some(0.3)  # an operator sets quotas (chaos/sim/checks/quotabook.py)
    types: bool = _of_some(0.3)  # groups are of all types; an operator seeks and deletes them
    expiry: bool = _of_some(0.3)  # an operator changes times to live and retention of messages
    deletions: bool = _of_some(0.3)  # an operator deletes topics while timers are pending
    hasty: bool = _of_some(0.3)
    """Manifests are written just before EPOCH entries, and the log below them is dropped at once
    (chaos/sim/world/app.py)."""
    redrives: bool = _of_some(0.3)
    """An operator redrives dead letters (chaos/sim/checks/fatebook.py). With `types` an operator
    alters groups, too. A group that serves one consumer acknowledges some messages by an ack of all
    messages up to one."""
    again: bool = _of_some(0.3)  # producers resend answered requests, late and to any leader
    sheds: bool = _of_some(0.3)  # consumers return messages unseen and end their credit for a time
    fleeting: bool = _of_some(0.2)  # the cluster forgets an idle producer after 2 seconds
    slow_files: bool = _of_some(0.2)  # results of a thread's work on files are used seconds later
    stalls: bool = _of_some(0.2)  # consumers stop reading for a time, so deliveries wait
    pressed: bool = _of_some(0.2)
    """Replicas flush every few timers, and folding waits while a flush is under way."""
    traits: bool = _of_some(0.2)
    """Timers have ordering keys and priorities. Groups have a rate, and due times a jitter."""
    controller: bool = _of_some(0.125)  # the real controller appoints, in place of the model
    series: bool = _of_some(0.15)  # a client works on series of recurring timers
    crowds: bool = _of_some(0.1)
    """Timers of many topics are due at the same instants, and many of them are cancelled. Entries
    and steps have small limits (chaos/sim/checks/workbook.py)."""

    @classmethod
    def draw(cls, rng: random.Random) -> "WorldOptions":
        """Return randomly drawn options."""
        extras = {name: aside(rng, name).random() < share for name, share in OPTIONAL.items()}
        healing = [fault for fault in FAULTS if fault not in (*DAMAGE_FAULTS, *MOMENTS, *RARE)]
        faults = rng.sample(healing, rng.randint(2, len(healing)))
        faults += rng.sample(DAMAGE_FAULTS, rng.choice((0, 0, 1, len(DAMAGE_FAULTS))))
        moments = aside(rng, "moments")
        faults += moments.sample(MOMENTS, moments.choice((0, 0, 2, len(MOMENTS))))
        faults += [fault for fault in RARE if aside(rng, fault).random() < RARELY]
        return cls(
            nodes=rng.choice((3, 3, 3, 5)),
            learners=rng.choice((0, 1, 1)),
            delay_us=rng.choice((200, 500, 2_000, 10_000)),
            jitter=rng.choice((0.1, 0.5, 2.0)),
            loss=rng.choice((0.0, 0.0, 0.001, 0.02)),
            duplicate=rng.choice((0.0, 0.0, 0.01)),
            reorder=rng.random() < 0.3,
            client_loss=rng.choice((0.0, 0.01, 0.1)),
            sync_us=rng.choice((200, 1_000, 8_000)),
            proposals_per_s=rng.choice((1, 3, 8, 16)),
            payload_bytes=rng.choice((16, 100, 3_000)),
            cache_bytes=rng.choice((1_000, 20_000, 1 << 20)),
            drift_ppm=rng.choice((0, 1_000, 40_000)),
            segment_bytes=rng.choice((2_000, 20_000, 1 << 20)),
            manifest_every=rng.choice((20, 200, NEVER)),
            log_kept_bytes=rng.choice((0, 5_000, 1 << 30)),
            faults=tuple(faults),
            fault_gap_ms=rng.choice((1_500, 4_000, 10_000)),
            member_changes=rng.choice((0.0, 0.0, 0.01, 0.05)),
            mischief=tuple(rng.sample(MISCHIEF, rng.choice((0, 1, 2, 4, len(MISCHIEF))))),
            poll_ms=rng.choice((100, 200)),
            **extras,
        )

    def aim(
        self,
        *,
        nodes: int | None = None,
        faults: Sequence[str] | None = None,
        mischief: Sequence[str] | None = None,
        **others: object,
    ) -> "WorldOptions":
        """Return these options with some of them replaced. None keeps the drawn value.

        Raises:
            ValueError: a fault, a mischief or the number of nodes is unknown.
        """
        if nodes is not None:
            if nodes not in NODES:
                raise ValueError(f"nodes = {nodes}: must be one of {NODES}")
            others["nodes"] = nodes
        if faults is not None:
            _known("fault", faults, FAULTS)
            others["faults"] = tuple(faults)
        if mischief is not None:
            _known("mischief", mischief, MISCHIEF)
            others["mischief"] = tuple(mischief)
        return replace(self, **others)  # type: ignore[arg-type]


OPTIONAL: Final = {
    each.name: each.metadata["share"] for each in fields(WorldOptions) if each.metadata
}
"""Option that not every world has -> share of the worlds that have it."""


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{what} {', '.join(unknown)}: must be one of {', '.join(known)}")
