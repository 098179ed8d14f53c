"""What kind of world a seed makes: swarm testing.

Every seed draws which faults exist at all and how often, so that some worlds never lose a
message and others hardly deliver one; a mix of everything would hide what needs quiet.
"""

import random
from dataclasses import dataclass
from typing import Final

FAULTS: Final = (
    "power", "power_all", "kill", "pause", "isolate", "one_way", "split", "flap", "clock",
    "sync_fails", "slow_disk", "lossy", "lying_disk", "handover", "newborn", "ambush",
)  # fmt: skip
MISCHIEF: Final = ("slow", "leaderless", "double", "forget", "dead", "twice", "spurious", "late")
FAULTS_MIN: Final = 3
NEVER: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Drawn once per seed. Times in microseconds unless the name says otherwise."""

    nodes: int
    delay_us: int
    """Typical one-way delay of a message."""
    jitter: float
    """Spread of the delay; links keep the order of messages unless `reorder`."""
    loss: float
    duplicate: float
    reorder: bool
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
    faults: tuple[str, ...]
    fault_gap_ms: int
    """Mean time between two faults."""
    mischief: tuple[str, ...]
    poll_ms: int
    """How often the control plane looks."""

    @classmethod
    def draw(cls, rng: random.Random) -> "Options":
        """Return one kind of world."""
        faults = tuple(rng.sample(FAULTS, rng.randint(2, len(FAULTS))))
        # What a disk loses after every voter had it and dropped it, only a snapshot brings back.
        manifest_every = NEVER if "lying_disk" in faults else rng.choice((20, 200, NEVER))
        return cls(
            nodes=rng.choice((3, 3, 3, 5)),
            delay_us=rng.choice((200, 500, 2_000, 10_000)),
            jitter=rng.choice((0.1, 0.5, 2.0)),
            loss=rng.choice((0.0, 0.0, 0.001, 0.02)),
            duplicate=rng.choice((0.0, 0.0, 0.01)),
            reorder=rng.random() < 0.3,
            sync_us=rng.choice((200, 1_000, 8_000)),
            proposals_per_s=rng.choice((1, 5, 15, 30)),
            payload_bytes=rng.choice((16, 100, 3_000)),
            cache_bytes=rng.choice((1_000, 20_000, 1 << 20)),
            drift_ppm=rng.choice((0, 1_000, 40_000)),
            segment_bytes=rng.choice((2_000, 20_000, 1 << 20)),
            manifest_every=manifest_every,
            faults=faults,
            fault_gap_ms=rng.choice((1_500, 4_000, 10_000)),
            mischief=tuple(rng.sample(MISCHIEF, rng.choice((0, 1, 2, 4, len(MISCHIEF))))),
            poll_ms=rng.choice((100, 200)),
        )
