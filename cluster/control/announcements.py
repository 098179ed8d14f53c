"""The releases that the nodes announce, and when the feature level rises. Part of the controller.

all nodes support a higher level --next appointment--> raised
                                 --none for a while--> the leader is appointed again: raised
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from timer.model.feature_level import FIRST_RELEASE, ProgramRelease
from timer.model.units import MonoMs


@dataclass(slots=True)
class Announcements:
    """The last announcement of each node."""

    name: str
    release: ProgramRelease
    """This node's program, with the highest level that its settings allow."""
    _others: dict[str, ProgramRelease] = field(default_factory=dict)
    _since_ms: MonoMs | None = None
    """Time since which the leader has served, and all nodes have supported a higher level."""

    def note(self, name: str, release: ProgramRelease) -> None:
        """Take note of an announcement."""
        self._others[name] = release

    def higher(self, level: int, voters: Collection[str], linked: Collection[str]) -> int:
        """Return the highest level above `level` that all nodes support; 0: there is none.

        A voter without a link may come back with an older program, so every voter must be linked.
        Learners count while they are linked.
        """
        present = {*linked, self.name}
        if not present.issuperset(voters):
            return 0
        known = self._others | {self.name: self.release}
        releases = [known.get(name, FIRST_RELEASE) for name in present]
        highest = min(release.level_max for release in releases)
        supported = all(release.supports(highest) for release in releases)
        return highest if supported and highest > max(level, 1) else 0

    def is_due(self, now_ms: MonoMs, after_ms: int, *, possible: bool) -> bool:
        """Return whether a higher level has been possible for `after_ms`."""
        if not possible:
            self._since_ms = None
        elif self._since_ms is None:
            self._since_ms = now_ms
        return self._since_ms is not None and now_ms - self._since_ms >= after_ms
