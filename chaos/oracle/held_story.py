"""Timers that paused topics hold, by the log; a part of the story.

    POLICY    `paused` of the narrowest scope that sets it: topic, namespace, cluster. A resumed
              topic releases its held timers. Timers that were scheduled before the resume and are
              due by the entry's time are overdue.
    FIRE      Timers that become due in a paused or releasing topic are held, in (due, seq) order.
              So are timers that are scheduled there with a due time in the past. Then a sweep over
              the held timers of the releasing topics continues from its last place: SWEEP_ROWS
              rows, or as many as the FIRE's limits allow. From feature level 2 on, they are of at
              most half of `topics_max` topics. At the sweep's end, each FIRE fires the last overdue
              timers of as many. The rows fire, except overdue ones by their topic's `catch_up`:
              `drop` drops them; `latest` drops all but the last, which fires when later ones fire
              or when the sweep ends. If more than SEARCH_ROWS_MAX rows, or SEARCH_BYTES_MAX of
              payloads, are held in all, rows of other topics count towards the sweep and stay.
    A topic releases until a sweep has ended, firing has passed the entry's time, and the topic
    holds no timer. A topic that held none takes part at once; with `all` it does not release. A
    resume begins a sweep. Another sweep follows while topics wait for one, or timers scheduled
    behind the sweep are held. The next SWEEP_TOPICS of the waiting topics, by the time of their
    resume, take part in a sweep that begins; if many timers are held, all of them.

Held timers are in memory, some hundred bytes each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge
from typing import Any, Final, NamedTuple

import numpy as np
from sortedcontainers import SortedDict

from chaos.oracle.pending_rows import I64, ROW, Rows
from chaos.oracle.policy_story import ScopeFields

RELEASE_MS: Final = 60_000
"""The longest time, on the log's clock, that a topic may take to release millions of timers."""
SWEEP_ROWS: Final = 4_096
SWEEP_TOPICS: Final = 16
SEARCH_ROWS_MAX: Final = 1 << 18
SEARCH_BYTES_MAX: Final = 64 << 20
Place = tuple[int, int]
"""(due, seq)."""
_LAST: Final = (1 << 48) - 1
"""The greatest seq."""
_BEGIN: Final = (-1, _LAST)


@dataclass(slots=True)
class ReleaseStory:
    """The release of one topic."""

    catch_up: str
    until_ms: int
    seq_end: int
    last: Place | None = None
    """The last overdue timer so far, if only that one is to fire."""
    waits: bool = True
    """The topic waits for a sweep to begin."""


class ReleasedRows(NamedTuple):
    """Rows that are no longer held, in the order of their release."""

    fired: bool
    rows: Rows


@dataclass(slots=True)
class HeldStory:
    """See the module. `name_of` returns a topic's name, `policy_fields` those in force."""

    name_of: Callable[[int], str]
    policy_fields: ScopeFields
    rows: SortedDict = field(default_factory=SortedDict)
    """(due, seq) -> its row: pending ones at or before `position`."""
    topics: dict[int, SortedDict] = field(default_factory=dict)
    """Topic -> the same for its own rows."""
    size: int = 0
    """Bytes of the payloads."""
    position: Place = (0, _LAST)
    """All timers up to here have become due."""
    paused: set[int] = field(default_factory=set)
    releases: dict[int, ReleaseStory] = field(default_factory=dict)
    """Topics that resumed, until they hold no timer any more."""
    sweep_rows: int = field(default_factory=lambda: SWEEP_ROWS)
    sweep_topics: int = field(default_factory=lambda: SWEEP_TOPICS)
    search_rows_max: int = field(default_factory=lambda: SEARCH_ROWS_MAX)
    _swept: Place | None = None

    # ---- policies

    def policy(self, time_ms: int, topics: list[int], read_ms: int, next_seq: int) -> None:
        """Pause and resume by the policies of an entry of `time_ms`; `topics`: all that exist."""
        for topic in topics:
            paused, catch_up = self._pause_of(topic)
            if paused == (topic in self.paused):
                continue
            self.releases.pop(topic, None)
            if paused:
                self.paused.add(topic)
                continue
            self.paused.remove(topic)
            holds = bool(self.topics.get(topic))
            if holds or catch_up != "all":
                until_ms = max(time_ms, read_ms)
                self.releases[topic] = ReleaseStory(catch_up, until_ms, next_seq, waits=holds)
        self._begin()

    def _begin(self) -> None:
        """Begin a sweep, unless one is under way that no topic waits behind."""
        taken = len(self.releases) - len(self._waiting())
        if self._swept in (None, _BEGIN) or not taken:
            self._swept = _BEGIN if self.releases else None
            self._admit(self.sweep_topics - taken)

    def _waiting(self) -> list[int]:
        return [topic for topic, release in self.releases.items() if release.waits]

    def _admit(self, count: int) -> None:
        """Let the next waiting topics take part in a sweep that begins."""
        turns = sorted(self._waiting(), key=lambda topic: (self.releases[topic].until_ms, topic))
        for topic in turns[: max(count, 0)] if self._sweeps_own_rows else turns:
            self.releases[topic].waits = False

    @property
    def _sweeps_own_rows(self) -> bool:
        """Return whether a sweep visits only the rows of its own topics."""
        return len(self.rows) <= self.search_rows_max and self.size <= SEARCH_BYTES_MAX

    def add_topic(self, topic: int) -> None:
        """Add a topic."""
        if self._pause_of(topic)[0]:
            self.paused.add(topic)

    def delete_topic(self, topic: int) -> Rows:
        """Remove a deleted topic; return the rows that it held."""
        self.paused.discard(topic)
        self.releases.pop(topic, None)
        rows = _table([self._pop(place) for place in [*self.topics.get(topic, ())]])
        self._begin()
        return rows

    def _pause_of(self, topic: int) -> tuple[bool, str]:
        return self.policy_fields.pause_of(topic, self.name_of(topic))

    # ---- rows

    def holds(self, topics: Any) -> Any:
        """Return for each topic whether it holds due timers (n, bool)."""
        return np.isin(topics, [*self.paused, *self.releases])

    def is_past(self, rows: Rows) -> Any:
        """Return for each row whether it lies at or before `position` (n, bool)."""
        due, seq = rows["due_ms"], rows["seq"]
        return (due < self.position[0]) | ((due == self.position[0]) & (seq <= self.position[1]))

    def add(self, rows: Rows) -> None:
        """Hold rows."""
        for row in rows:
            place = int(row["due_ms"]), int(row["seq"])
            self.rows[place] = own = row.copy()
            self.topics.setdefault(int(row["topic"]), SortedDict())[place] = own
            self.size += int(row["payload_size"])

    def _pop(self, place: Place) -> Any:
        row = self.rows.pop(place)
        self.size -= int(row["payload_size"])
        del self.topics[int(row["topic"])][place]
        return row

    def rows_of(self, topic: int) -> list[Rows]:
        """Return the held rows of a topic, one in an array."""
        return [_table([row]) for row in self.topics.get(topic, {}).values()]

    def late_rows(self, now_ms: int) -> Rows:
        """Return the held rows of topics that resumed more than RELEASE_MS ago."""
        releases = self.releases.items()
        done = [topic for topic, how in releases if how.until_ms <= now_ms - RELEASE_MS]
        return _table([row for topic in done for row in self.topics.get(topic, {}).values()])

    def remaining_rows(self, now_ms: int) -> tuple[Rows, Rows]:
        """Return the held rows, and those of `late`, apart."""
        rows, late = _table([*self.rows.values()]), self.late_rows(now_ms)
        return rows[~np.isin(rows["seq"], late["seq"])], late

    def split(self, due_ms: I64, seq: I64) -> tuple[Rows, Any]:
        """Remove and return the held ones of n timers, and a mask of the others (n, bool)."""
        found, others = [], np.ones(len(seq), np.bool_)
        for at, place in enumerate(zip(due_ms.tolist(), seq.tolist(), strict=True)):
            if place in self.rows:
                found.append(self._pop(place))
                others[at] = False
        return _table(found), others

    # ---- releasing

    def sweep(self, rows_max: int, bytes_max: int, topics_max: int) -> list[ReleasedRows]:
        """Continue the sweep after a FIRE's own rows; return the freed rows."""
        if not self.releases:
            return []
        seen = self._swept or _BEGIN
        portion: list[Place] = []
        more, size, topics = False, 0, set[int]()
        swept = {topic for topic, release in self.releases.items() if not release.waits}
        own = [self.topics[topic] for topic in swept if topic in self.topics]
        mine = own if self._sweeps_own_rows else [self.rows]
        for place in merge(*(each.irange(seen, inclusive=(False, True)) for each in mine)):
            size += int(self.rows[place]["size"])
            topics |= {int(self.rows[place]["topic"])} & swept
            full = len(portion) == min(rows_max, self.sweep_rows) or (portion and size > bytes_max)
            if more := bool(full or len(topics) > topics_max):
                break
            portion.append(place)
        freed: list[ReleasedRows] = []
        of_topic: dict[int, list[Place]] = {}
        for place in portion:
            of_topic.setdefault(int(self.rows[place]["topic"]), []).append(place)
        for topic, places in sorted(of_topic.items()):
            if topic in swept:
                self._release(self.releases[topic], places, freed)
        self._swept = seen = portion[-1] if portion else seen
        if not more:
            self._end_pass(seen, freed, topics_max)
        return freed

    def _release(
        self, release: ReleaseStory, places: list[Place], freed: list[ReleasedRows]
    ) -> None:
        for place in places:
            overdue = place[0] <= release.until_ms and place[1] < release.seq_end
            if overdue and release.catch_up == "drop":
                freed.append(ReleasedRows(fired=False, rows=_table([self._pop(place)])))
            elif overdue and release.catch_up == "latest":
                if release.last is not None and release.last < place and release.last in self.rows:
                    freed.append(ReleasedRows(fired=False, rows=_table([self._pop(release.last)])))
                release.last = place
            else:
                if place[0] > release.until_ms:
                    self._decide(release, freed)
                freed.append(ReleasedRows(fired=True, rows=_table([self._pop(place)])))

    def _decide(self, release: ReleaseStory, freed: list[ReleasedRows]) -> None:
        last, release.last = release.last, None
        if last is not None and last in self.rows:
            freed.append(ReleasedRows(fired=True, rows=_table([self._pop(last)])))

    def _end_pass(self, seen: Place, freed: list[ReleasedRows], topics_max: int) -> None:
        """Note that the sweep has passed all held rows."""
        swept = [(topic, each) for topic, each in sorted(self.releases.items()) if not each.waits]
        ready = [(t, each) for t, each in swept if self.position >= (each.until_ms, _LAST)]
        lasts = [each for _, each in ready if each.last is not None]
        for release in lasts[:topics_max]:
            self._decide(release, freed)
        if len(lasts) > topics_max:
            return
        again = len(swept) < len(self.releases) or any(self.topics.get(topic) for topic, _ in ready)
        for topic in [topic for topic, _ in ready if not self.topics.get(topic)]:
            del self.releases[topic]
        self._swept = _BEGIN if again else seen if len(ready) < len(swept) else None
        if again:
            self._admit(self.sweep_topics)
        self._begin()


def _table(rows: list[Any]) -> Rows:
    return np.array(rows, ROW)
