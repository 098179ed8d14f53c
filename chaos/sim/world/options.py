"""What kind of world a seed makes: swarm testing.

Every seed draws which faults exist at all and how often, so that some worlds never lose a
message and others hardly deliver one; a mix of everything would hide what needs quiet.

    FAULTS         what may befall a world
    DAMAGE_FAULTS  those of them that take away for good what was synced: in every other world, as
                   one with them may end waiting for repair (chaos/sim/world/disk_loss.py)
    RARE           those that are drawn apart, most for one moment of the protocol: each in every
                   fifth world
    MOMENTS        those of them that fall into a moment, such as a write, or into one lease
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

DAMAGE_FAULTS: Final = ("flip", "shorten", "wipe", "forget")
MOMENTS: Final = ("torn_write", "mid_sync", "burst", "slow_link", "stale_return", "usurp", "rival")
RARE: Final = ("late_answer", "overtaken", "terminate")
FAULTS: Final = (
    "power", "power_all", "kill", "pause", "isolate", "one_way", "split", "flap", "clock", "drift",
    "sync_fails", "full_disk", "slow_disk", "lossy", "lying_disk", "handover", "newborn", "ambush",
    *MOMENTS, *RARE, *DAMAGE_FAULTS,
)  # fmt: skip
MISCHIEF: Final = (
    "transfer",
    "slow",
    "leaderless",
    "double",
    "forget",
    "dead",
    "twice",
    "spurious",
    "late",
)
FAULTS_MIN: Final = 3
RARELY: Final = 0.2
REQUESTS: Final = 0.3
"""In how many simple clients name their requests."""
NODES: Final = (3, 5)
NEVER: Final = 1 << 30
POLICIES: Final = 0.3
"""In how many policies change."""
QUOTAS: Final = 0.3
"""In how many topics have quotas."""
EXPIRY: Final = 0.3
"""In how many messages expire, and are retained."""
TYPES: Final = 0.3
"""In how many groups are of all types, sought and deleted."""
HASTY: Final = 0.3
"""In how many logs are dropped at once, right before an epoch if there is one."""
DELETIONS: Final = 0.3
"""In how many topics are deleted."""

REDRIVES: Final = 0.3
"""In how many dead letters are redriven."""
AGAIN: Final = 0.3
"""In how many producers ask for answers that they had."""
FLEETING: Final = 0.2
"""In how many producers are forgotten soon."""
CONTROLLER: Final = 0.125
"""In how many the real controller appoints."""
SLOW_FILES: Final = 0.2
"""In how many files are used seconds after they were written or read."""
PRESSED: Final = 0.2
"""In how many a replica flushes every few timers, and folding waits for flushes."""
CROWDS: Final = 0.1
"""In how many timers of many topics are due at one instant."""


def aside(rng: random.Random, name: str) -> random.Random:
    """Return another source of chance, which follows from `rng` and leaves it as it is."""
    words = rng.getstate()[1]
    return random.Random(f"{name} {words[1:3]} {words[-1]}")  # the first word is always the same


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """Drawn once per seed. Times in microseconds unless the name says otherwise."""

    nodes: int
    """Founding voters."""
    learners: int
    """Nodes that join later, without a vote."""
    delay_us: int
    """Typical one-way delay of a message."""
    jitter: float
    """Spread of the delay; links keep the order of messages unless `reorder`."""
    loss: float
    duplicate: float
    reorder: bool
    client_loss: float
    """Of requests and answers between clients and nodes."""
    sync_us: int
    """Typical fsync."""
    proposals_per_s: float
    payload_bytes: int
    cache_bytes: int
    drift_ppm: int
    """Monotonic clocks run up to so much fast or slow."""
    segment_bytes: int
    manifest_every: int
    """Entries between two manifests of a node, after which it drops its log's prefix."""
    log_kept_bytes: int
    """Below its manifest a node keeps so much for followers that lack it."""
    faults: tuple[str, ...]
    fault_gap_ms: int
    """Mean time between two faults."""
    member_changes: float
    """How likely the control plane is to change the voters when it looks and finds all well."""
    mischief: tuple[str, ...]
    poll_ms: int
    """How often the control plane looks."""
    tight: bool = False
    """Disks of most voters are small, and timers large (chaos/sim/timers/timers.py). Never drawn,
    as one
    in some hundred such worlds still fills its reserve; tests and planted bugs aim at it."""
    policies: bool = False
    """Somebody changes policies all the time."""
    requests: bool = False
    """Clients without producers name their requests (chaos/sim/timers/callers.py)."""
    quotas: bool = False
    """Somebody sets quotas (chaos/sim/checks/quotabook.py)."""
    types: bool = False
    """Groups are of all types; somebody seeks and deletes them."""
    expiry: bool = False
    """Somebody changes how long messages live and are kept."""
    deletions: bool = False
    """Somebody deletes topics, while timers are pending and consumers consume."""
    hasty: bool = False
    """Manifests are written right before EPOCH entries, and the log below them goes at once
    (chaos/sim/world/app.py)."""
    redrives: bool = False
    """Somebody sends dead letters back (chaos/sim/checks/letterbook.py). With `types` groups are
    altered,
    too, and where one consumer is served some acks are of all up to a message."""

    fleeting: bool = False
    """Producers are forgotten after seconds."""
    again: bool = False
    """Producers ask again for answers that they had: late, and of another leader."""
    slow_files: bool = False
    """Seconds pass between the end of a thread's work on files and the use of its result."""
    pressed: bool = False
    """Memtables are flushed soon, and folding waits while a flush is under way."""
    controller: bool = False
    """The real controller appoints (chaos/sim/world/appointing.py), not the model of one."""
    crowds: bool = False
    """Timers of many topics are due at the same instants, and many of them are cancelled; entries
    and steps have small limits (chaos/sim/checks/workbook.py)."""

    @classmethod
    def draw(cls, rng: random.Random) -> "WorldOptions":
        """Return one kind of world."""
        shares = {"policies": POLICIES, "requests": REQUESTS, "types": TYPES}
        shares |= {"expiry": EXPIRY, "quotas": QUOTAS, "deletions": DELETIONS}
        shares |= {"redrives": REDRIVES, "crowds": CROWDS, "hasty": HASTY}
        shares |= {"controller": CONTROLLER, "again": AGAIN, "fleeting": FLEETING}
        shares |= {"slow_files": SLOW_FILES, "pressed": PRESSED}
        extras = {name: aside(rng, name).random() < share for name, share in shares.items()}
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
        """Return these options with some of them chosen instead of drawn; None: as drawn.

        Raises:
            ValueError: there is no such fault, mischief or number of nodes.
        """
        if nodes is not None:
            if nodes not in NODES:
                raise ValueError(f"nodes = {nodes}: one of {NODES}")
            others["nodes"] = nodes
        if faults is not None:
            _known("fault", faults, FAULTS)
            others["faults"] = tuple(faults)
        if mischief is not None:
            _known("mischief", mischief, MISCHIEF)
            others["mischief"] = tuple(mischief)
        return replace(self, **others)  # type: ignore[arg-type]


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{what} {', '.join(unknown)}: there are {', '.join(known)}")
