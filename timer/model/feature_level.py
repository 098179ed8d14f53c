"""Feature levels: formats and rules that a cluster uses only when all of its nodes know them.

    level   since    at this level
    1       0.1.0    the formats of 0.1.0
    2       0.2.0    a manifest's checksum covers its version (timer/recovery/manifest.py);
                     TOPIC and CREATE name the creator (timer/state/creators.py);
                     recurring timers (timer/entries/series_payloads.py);
                     jitter and rates in policies (timer/entries/policies.py);
                     ordering keys and priorities (timer/model/row_traits.py);
                     a FIRE releases held timers of a bounded number of topics
                     (timer/state/pauses.py)

Each EPOCH entry names the level of its epoch, so all replicas reach a level at the same entry. The
level never falls. A program announces the levels that it supports. The controller proposes a higher
level when all nodes support it (cluster/control/controller.py). Until then a node may go back to an
older program.
"""

from dataclasses import dataclass
from typing import Final

LEVEL_MIN: Final = 1
"""The lowest level that this program supports."""
LEVEL_MAX: Final = 2
"""The highest one."""
LEVEL_OF_CREATORS: Final = 2
"""The level from which on entries have creators; the others likewise."""
LEVEL_OF_SERIES: Final = 2
LEVEL_OF_SMOOTHING: Final = 2
LEVEL_OF_TRAITS: Final = 2
LEVEL_OF_BOUNDED_SWEEPS: Final = 2


@dataclass(frozen=True, slots=True)
class ProgramRelease:
    """A program: its version, and the feature levels that it supports, both ends inclusive."""

    program: str
    level_min: int
    level_max: int

    def supports(self, level: int) -> bool:
        """Return whether the program can run in a cluster at this level."""
        return self.level_min <= level <= self.level_max

    def __str__(self) -> str:
        return (
            f"version {self.program} supports feature levels {self.level_min} to {self.level_max}"
        )


FIRST_RELEASE: Final = ProgramRelease("0.1", 1, 1)
"""A node that announces nothing. Announcements began with 0.2.0."""


def is_supported(level: int) -> bool:
    """Return whether this program supports a level."""
    return LEVEL_MIN <= level <= LEVEL_MAX
