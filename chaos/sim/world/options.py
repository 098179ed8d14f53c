"""The options of a world, drawn from its seed: swarm testing.

Every seed draws the kinds of faults and their frequency. Some worlds never lose a message, and
others deliver hardly one. A mix of all faults would hide errors that need a quiet world.

    FAULTS         all faults of a world
    DAMAGE_FAULTS  faults that destroy synced data. Every other world has some, because a world
                   with them may end in waiting for repair (chaos/sim/world/disk_loss.py).
    RARE           faults drawn one by one, most for one moment of the protocol; each exists in
                   every fifth world
    MOMENTS        faults that fall into a moment, such as a write
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

DAMAGE_FAULTS: Final = ("flip", "shorten", "wipe", "forget")
MOMENTS: Final = ("torn_write", "mid_sync", "slow_link", "stale_return", "usurp", "rival")
RARE: Final = ("late_answer", "overtaken", "terminate")
FAULTS: Final = (
    "power", "power_all", "kill", "pause", "isolate", "one_way", "split", "clock",
    "sync_fails", "full_disk", "slow_disk", "lying_disk", "handover", "newborn", "ambush",
    *MOMENTS, *RARE, *DAMAGE_FAULTS,
)  # fmt: skip
MISCHIEF: Final = ("transfer", "slow", "leaderless", "forget", "blind", "spurious", "late")
FAULTS_MIN: Final = 3
RARELY: Final = 0.2
NODES: Final = (3, 5)
NEVER: Final = 1 << 30


def _of_some(share: float) -> Any:
    """Return a field that is true in a share of the worlds."""
    return field(default=False, metadata={"share": share})


def _one_of(values: Sequence[object]) -> Any:
    """Return a field that has one of these values, each as often as it is named."""
    return field(metadata={"values": values})


def fork(rng: random.Random) -> random.Random:
    """Return a generator seeded by a number that `rng` draws."""
    return random.Random(rng.getrandbits(64))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """Options of a world, drawn once per seed. The unit of a field is the end of its name."""

    nodes: int = _one_of((3, 3, 3, 5))
    """Founding voters."""
    learners: int = _one_of((0, 1, 1))
    """Number of nodes that join later, without a vote."""
    delay_us: int = _one_of((200, 500, 2_000, 10_000))
    """Typical one-way delay of a message."""
    jitter: float = _one_of((0.1, 0.5, 2.0))
    """Mean of the random part of the delay, as a multiple of `delay_us`."""
    loss: float = _one_of((0.0, 0.0, 0.001, 0.02))
    """Share of messages between nodes that are lost, 0 to 1."""
    duplicate: float = _one_of((0.0, 0.0, 0.01))
    """Share of messages between nodes that arrive twice, 0 to 1."""
    reorder: bool = _one_of((True, False, False))
    """Messages of one link may overtake each other."""
    client_loss: float = _one_of((0.0, 0.01, 0.1))
    """Share of requests and answers between clients and nodes that are lost, 0 to 1."""
    sync_us: int = _one_of((200, 1_000, 8_000))
    """Typical duration of an fsync."""
    proposals_per_s: float = _one_of((1, 3, 8, 16))
    payload_bytes: int = _one_of((16, 100, 3_000))
    cache_bytes: int = _one_of((1_000, 20_000, 1 << 20))
    drift_ppm: int = _one_of((0, 1_000, 40_000))
    """Highest rate error of a node's monotonic clock, fast or slow, in parts per million."""
    segment_bytes: int = _one_of((2_000, 20_000, 1 << 20))
    manifest_every: int = _one_of((20, 200, NEVER))
    """Entries between two manifests of a node. The node drops the log's prefix after each."""
    log_kept_bytes: int = _one_of((0, 5_000, 1 << 30))
    """Bytes of the log below its manifest that a node keeps for followers that lack them."""
    faults: tuple[str, ...]
    """Kinds of faults, each one of FAULTS."""
    fault_gap_ms: int = _one_of((1_500, 4_000, 10_000))
    """Mean time between two faults."""
    member_changes: float = _one_of((0.0, 0.0, 0.01, 0.05))
    """Probability of a change of the voters in 150 ms."""
    mischief: tuple[str, ...]
    """Errors of the control plane, each one of MISCHIEF."""

    # Kinds of worlds.
    policies: bool = _of_some(0.3)  # an operator changes policies all the time
    requests: bool = _of_some(0.3)  # clients without producers give their requests ids
    quotas: bool = _of_some(0.3)  # an operator sets quotas (chaos/sim/checks/policybook.py)
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
    series: bool = _of_some(0.15)  # a client works on series of recurring timers
    crowds: bool = _of_some(0.1)
    """Timers of many topics are due at the same instants, and many of them are cancelled. Entries
    and steps have small limits (chaos/sim/checks/workbook.py)."""

    @classmethod
    def draw(cls, rng: random.Random) -> "WorldOptions":
        """Return randomly drawn options."""
        healing = [fault for fault in FAULTS if fault not in (*DAMAGE_FAULTS, *MOMENTS, *RARE)]
        faults = rng.sample(healing, rng.randint(2, len(healing)))
        faults += rng.sample(DAMAGE_FAULTS, rng.choice((0, 0, 1, len(DAMAGE_FAULTS))))
        faults += rng.sample(MOMENTS, rng.choice((0, 0, 2, len(MOMENTS))))
        faults += [fault for fault in RARE if rng.random() < RARELY]
        extras = {name: rng.random() < share for name, share in OPTIONAL.items()}
        drawn = {name: rng.choice(values) for name, values in DRAWN.items()}
        mischief = rng.sample(MISCHIEF, rng.choice((0, 1, 2, 4, len(MISCHIEF))))
        return cls(faults=tuple(faults), mischief=tuple(mischief), **drawn, **extras)

    def aim(self, **chosen: Any) -> "WorldOptions":
        """Return these options with some of them replaced. None keeps the drawn value.

        Raises:
            ValueError: a fault, a mischief or the number of nodes is unknown.
        """
        chosen = {name: value for name, value in chosen.items() if value is not None}
        for name, known in (("faults", FAULTS), ("mischief", MISCHIEF)):
            if name in chosen:
                chosen[name] = tuple(chosen[name])
                if unknown := [each for each in chosen[name] if each not in known]:
                    wrong, right = ", ".join(unknown), ", ".join(known)
                    raise ValueError(f"{name} {wrong}: must be one of {right}")
        if chosen.get("nodes", self.nodes) not in NODES:
            raise ValueError(f"nodes = {chosen['nodes']}: must be one of {NODES}")
        return replace(self, **chosen)


DRAWN: Final[dict[str, Sequence[Any]]] = {
    each.name: each.metadata["values"] for each in fields(WorldOptions) if "values" in each.metadata
}
"""Option -> values, one of which is drawn."""
OPTIONAL: Final[dict[str, float]] = {
    each.name: each.metadata["share"] for each in fields(WorldOptions) if "share" in each.metadata
}
"""Option that not every world has -> share of the worlds that have it."""
