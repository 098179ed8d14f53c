"""What paused topics hold back, as the log says it: a part of the story.

    POLICY    `paused` of the narrowest scope that says it: topic, namespace, cluster. A topic that
              goes on releases: what was scheduled before and is due by this entry's time is overdue
    FIRE      what comes due in a topic that is paused or releases is held, in (due, seq) order, and
              so is what is scheduled as due there. Then a sweep goes on over all that is held, from
              where it was: SWEEP_ROWS rows, or as many as the FIRE's limits allow. Of a topic that
              releases they fire, but overdue ones by its `catch_up`: `drop` drops them, `latest`
              all but the last, which fires when later ones do, or the sweep is through.
    A topic releases until a sweep is through, firing has passed the entry's time, and it holds
    nothing. A sweep begins with a resume; and behind it another one, for topics that were resumed
    while it was under way, and wait, and while what was scheduled behind it is held.

What is held is in memory, some hundred bytes a timer: fewer than all that is pending, as a rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from sortedcontainers import SortedDict

from chaos.replay.pending import I64, ROW, Rows
from chaos.replay.said import Said

SWEEP_ROWS: Final = 4_096
Place = tuple[int, int]
"""(due, seq)."""
_LAST: Final = (1 << 48) - 1
"""The greatest seq."""
_BEGIN: Final = (-1, _LAST)


@dataclass(slots=True)
class Release:
    """How a topic goes on."""

    catch_up: str
    until_ms: int
    seq_end: int
    last: Place | None = None
    """The last of what is overdue that was met, if only that is to fire."""
    waits: bool = True
    """For a sweep to begin."""


class Gone(NamedTuple):
    """Rows that are held no more, in the order in which they go."""

    fired: bool
    rows: Rows


@dataclass(slots=True)
class Held:
    """See the module. `name_of` tells a topic's name, `said` what policies say by now."""

    name_of: Callable[[int], str]
    said: Said
    rows: SortedDict = field(default_factory=SortedDict)
    """(due, seq) -> its row: pending ones at or before `position`."""
    position: Place = (0, _LAST)
    """Up to here all has come due."""
    _paused: set[int] = field(default_factory=set)
    _releases: dict[int, Release] = field(default_factory=dict)
    _swept: Place | None = None

    # ---- policies

    def policy(self, time_ms: int, topics: list[int], read_ms: int, next_seq: int) -> None:
        """Pause and resume by what is said from an entry of `time_ms` on; `topics`: all there."""
        for topic in topics:
            paused, catch_up = self._firing(topic)
            if paused == (topic in self._paused):
                continue
            self._releases.pop(topic, None)
            if paused:
                self._paused.add(topic)
                continue
            self._paused.remove(topic)
            self._releases[topic] = Release(catch_up, max(time_ms, read_ms), next_seq)
        self._begin()

    def _begin(self) -> None:
        """Begin a sweep, unless one is under way that some topic does not wait for."""
        waiting = [each for each in self._releases.values() if each.waits]
        if self._swept in (None, _BEGIN) or len(waiting) == len(self._releases):
            self._swept = _BEGIN if self._releases else None
            for release in waiting:
                release.waits = False

    def made(self, topic: int) -> None:
        """A topic is there from here on."""
        if self._firing(topic)[0]:
            self._paused.add(topic)

    def gone(self, topic: int) -> Rows:
        """A topic is there no more: let go of what it holds."""
        self._paused.discard(topic)
        self._releases.pop(topic, None)
        self._begin()
        places = [place for place, row in self.rows.items() if int(row["topic"]) == topic]
        return _table([self.rows.pop(place) for place in places])

    def _firing(self, topic: int) -> tuple[bool, str]:
        return self.said.firing(topic, self.name_of(topic))

    # ---- rows

    def holds(self, topics: Any) -> Any:
        """Return which of the topics hold what is due (n, bool)."""
        return np.isin(topics, [*self._paused, *self._releases])

    def holds_one(self, topic: int) -> bool:
        """Return whether this one does."""
        return topic in self._paused or topic in self._releases

    def past(self, rows: Rows) -> Any:
        """Return which rows lie at or before `position` (n, bool)."""
        due, seq = rows["due_ms"], rows["seq"]
        return (due < self.position[0]) | ((due == self.position[0]) & (seq <= self.position[1]))

    def add(self, rows: Rows) -> None:
        """Hold rows."""
        for row in rows:
            self.rows[int(row["due_ms"]), int(row["seq"])] = row.copy()

    def split(self, due_ms: I64, seq: I64) -> tuple[Rows, Any]:
        """Let go of the held ones of n timers; return them, and which are others (n, bool)."""
        found, others = [], np.ones(len(seq), np.bool_)
        for at, place in enumerate(zip(due_ms.tolist(), seq.tolist(), strict=True)):
            if place in self.rows:
                found.append(self.rows.pop(place))
                others[at] = False
        return _table(found), others

    # ---- releasing

    def sweep(self, rows_max: int, bytes_max: int) -> list[Gone]:
        """Go on with the sweep, behind a FIRE's own rows; return what is held no more."""
        if not self._releases:
            return []
        seen = self._swept or _BEGIN
        portion: list[Place] = []
        more, size = False, 0
        for place in self.rows.irange(minimum=seen, inclusive=(False, True)):
            size += int(self.rows[place]["size"])
            full = len(portion) == min(rows_max, SWEEP_ROWS) or (portion and size > bytes_max)
            if full:
                more = True
                break
            portion.append(place)
        gone: list[Gone] = []
        of_topic: dict[int, list[Place]] = {}
        for place in portion:
            of_topic.setdefault(int(self.rows[place]["topic"]), []).append(place)
        for topic, places in sorted(of_topic.items()):
            if topic in self._releases and not self._releases[topic].waits:
                self._release(self._releases[topic], places, gone)
        self._swept = seen = portion[-1] if portion else seen
        if not more:
            self._through(seen, gone)
        return gone

    def _release(self, release: Release, places: list[Place], gone: list[Gone]) -> None:
        for place in places:
            overdue = place[0] <= release.until_ms and place[1] < release.seq_end
            if overdue and release.catch_up == "drop":
                gone.append(Gone(fired=False, rows=_table([self.rows.pop(place)])))
            elif overdue and release.catch_up == "latest":
                if release.last is not None and release.last < place and release.last in self.rows:
                    gone.append(Gone(fired=False, rows=_table([self.rows.pop(release.last)])))
                release.last = place
            else:
                if place[0] > release.until_ms:
                    self._decide(release, gone)
                gone.append(Gone(fired=True, rows=_table([self.rows.pop(place)])))

    def _decide(self, release: Release, gone: list[Gone]) -> None:
        last, release.last = release.last, None
        if last is not None and last in self.rows:
            gone.append(Gone(fired=True, rows=_table([self.rows.pop(last)])))

    def _through(self, seen: Place, gone: list[Gone]) -> None:
        """The sweep has passed all that is held."""
        again = early = False
        left = {int(row["topic"]) for row in self.rows.values()}
        for topic, release in sorted(self._releases.items()):
            if release.waits:
                again = True
                continue
            if self.position < (release.until_ms, _LAST):
                early = True
                continue
            alone = release.last is not None
            self._decide(release, gone)
            if alone:
                left = {int(row["topic"]) for row in self.rows.values()}
            if topic in left:
                again = True
            else:
                del self._releases[topic]
        self._swept = _BEGIN if again else seen if early else None
        self._begin()


def _table(rows: list[Any]) -> Rows:
    table = np.zeros(len(rows), ROW)
    for at, row in enumerate(rows):
        table[at] = row
    return table
