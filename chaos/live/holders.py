"""Who has which key, as far as the entries of a log tell without firing them.

    sure        one timer has the key, and the log has not fired up to its due time; or nobody has
    a race      the log has fired up to its due time, perhaps not all: it may be pending still
    unknown     the export began after the log: somebody of before may have the key

A topic that is paused fires nothing: what came due meanwhile has its key still. When it goes on, it
is a race until all that it held has left.

A key has candidates. While they don't say for sure who has it, what a request by that key did
remains open: its timers are told as RACED, which excuses both outcomes, until one of the requests
settles the key whatever was before: a `replace`, or a cancel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from timer.model.columns import OnConflict

RACE_MS: Final = 60_000
"""What was due so long before the log's read time has fired."""
SWEEP_MIN: Final = 1024
NEVER: Final = 1 << 62


class Stand(NamedTuple):
    """How far a topic has fired that is paused, or lets go of what it held."""

    gone_ms: int
    """The log's read time when it was paused: what was due long before that has fired."""
    held_ms: int
    """The same, of the last pause: what is due later is held while it lasts."""
    over_ms: int
    """The log's time at which all that was held has left. NEVER: it is paused."""


class KeyHolder(NamedTuple):
    """One that may have a key."""

    due_ms: int
    seq: int
    topic: int
    size: int
    """Of its payload."""
    sure: bool
    """It became a timer, and was pending when it did."""
    place_ms: int = 0
    """Where it stands as topics fire: `Holders.place_ms`."""


SOMEBODY: Final = KeyHolder(NEVER, 0, 0, 0, sure=False, place_ms=NEVER)
"""Scheduled before the export began, or nobody."""


@dataclass(slots=True)
class Ended:
    """What became of timers that had a key, as (due_ms, seq)."""

    cancelled: list[tuple[int, int]] = field(default_factory=list)
    raced: list[tuple[int, int]] = field(default_factory=list)

    def race(self, timers: Iterable[KeyHolder]) -> None:
        """Excuse both outcomes of some."""
        self.raced += [(each.due_ms, each.seq) for each in timers if each.seq]


@dataclass(slots=True)
class Holders:
    """Candidates per key, a 63-bit hash of topic and key."""

    whole: bool
    """The export began with the log: whoever has a key is known."""
    read_ms: int = 0
    """As the log has fired; the caller keeps it up to date."""
    stands: dict[int, Stand] = field(default_factory=dict)
    """Of topics that are paused, or were; the caller's."""
    _candidates: dict[int, tuple[KeyHolder, ...]] = field(default_factory=dict)
    _key_of: dict[int, int] = field(default_factory=dict)
    """Seq -> key, of the candidates."""
    _sweep_at: int = SWEEP_MIN

    def holder(self, key: int) -> KeyHolder | None:
        """Return who has a key for sure; None: nobody. Ask `is_sure` first."""
        found = self._found(key)
        return found[0] if found else None

    def is_sure(self, key: int) -> bool:
        """Whether it is known who has a key, or that nobody has."""
        found = self._found(key)
        return not found or (len(found) == 1 and self._waits(found[0]))

    def place_ms(self, topic: int, due_ms: int) -> int:
        """Return where a new timer stands: what is due already is held, or may be, by some topics.

        That is its due time; or when it could have fired, at the earliest, if that is later.
        """
        stand = self.stands.get(topic)
        if stand is None:
            return due_ms
        return max(due_ms, 1 + (stand.held_ms if stand.over_ms == NEVER else stand.gone_ms))

    def waits(self, due_ms: int, seq: int) -> bool:
        """Whether a timer is pending for sure, by what is known of its key and topic."""
        key = self._key_of.get(seq)
        return key is not None and any(
            (each.due_ms, each.seq) == (due_ms, seq) and self._waits(each)
            for each in self._found(key)
        )

    def forget(self, topic: int) -> None:
        """A topic is gone, with its timers."""
        for key, found in [*self._candidates.items()]:
            if any(each.topic == topic for each in found):
                self._set(key, tuple(each for each in found if each.topic != topic))

    def key_of(self, seq: int) -> int | None:
        """Return the key that a timer may have; None: it has none, or ended."""
        return self._key_of.get(seq)

    def scheduled(self, key: int, timer: KeyHolder, mode: int, ended: Ended) -> bool:
        """A row with a key comes in; return whether it may become a timer.

        Where that is open, it is told as RACED.
        """
        found = self._found(key)
        if mode == OnConflict.UPDATE:
            return self._updated(key, timer, ended)
        if mode == OnConflict.REPLACE:
            self._settle(key, ended)
        elif not self.is_sure(key):
            ended.race([timer])
            self._set(key, (*found, timer._replace(sure=False)))
            return True
        elif found:
            return False
        self._set(key, (timer,))
        return True

    def _updated(self, key: int, timer: KeyHolder, ended: Ended) -> bool:
        found, sure = self._found(key), self.is_sure(key)
        if sure and not found:
            return False
        self.moved(key, timer, sure=sure, ended=ended)
        return True

    def cancelled(self, key: int, ended: Ended) -> None:
        """Whoever has the key is cancelled."""
        self._settle(key, ended)
        self._set(key, ())

    def gone(self, due_ms: int, seq: int) -> None:
        """A timer was cancelled by its id, before its time."""
        key = self._key_of.get(seq)
        if key is not None:
            left = (each for each in self._found(key) if (each.due_ms, each.seq) != (due_ms, seq))
            self._set(key, tuple(left))

    def moved(self, key: int, timer: KeyHolder, *, sure: bool, ended: Ended) -> None:
        """Whoever has the key goes on as `timer`; not `sure`: perhaps it stays as it was."""
        found = self._found(key)
        sure = sure and self.is_sure(key)
        if sure:
            self._settle(key, ended)
            self._set(key, (timer,))
        else:
            ended.race([*found, timer])
            self._set(key, tuple(each._replace(sure=False) for each in (*found, timer)))

    def dumps(self) -> list[tuple[int, list[KeyHolder]]]:
        """Return the candidates, for JSON."""
        return [(key, [*found]) for key, found in self._candidates.items()]

    def loads(self, dumped: Iterable[tuple[int, list[Any]]]) -> None:
        """Take what `dumps` returned, perhaps read from JSON."""
        for key, found in dumped:
            self._set(key, tuple(KeyHolder(*each) for each in found))

    # ---- inside

    def _found(self, key: int) -> tuple[KeyHolder, ...]:
        """Return who may have a key now."""
        found = self._candidates.get(key)
        if found is None:
            return () if self.whole else (SOMEBODY,)
        return tuple(each for each in found if each.place_ms > self._gone_ms(each.topic))

    def _gone_ms(self, topic: int) -> int:
        """Return up to which place all has left a topic."""
        stand = self.stands.get(topic)
        return (self.read_ms if stand is None else stand.gone_ms) - RACE_MS

    def _waits(self, timer: KeyHolder) -> bool:
        stand = self.stands.get(timer.topic)
        if stand is not None and stand.over_ms == NEVER:
            return timer.sure and timer.place_ms > stand.held_ms
        return timer.sure and timer.due_ms > self.read_ms

    def _settle(self, key: int, ended: Ended) -> None:
        """Whoever has the key has it no more."""
        found = self._found(key)
        if self.is_sure(key):
            ended.cancelled += [(each.due_ms, each.seq) for each in found]
        else:
            ended.race(found)

    def _set(self, key: int, found: tuple[KeyHolder, ...]) -> None:
        for each in self._candidates.get(key, ()):
            self._key_of.pop(each.seq, None)
        self._candidates[key] = found
        self._key_of.update((each.seq, key) for each in found if each.seq)
        if len(self._candidates) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Forget the keys of which nothing is left; of a late export that nobody has them, too."""
        for key in [*self._candidates]:
            if not self._found(key):
                for each in self._candidates.pop(key):
                    self._key_of.pop(each.seq, None)
        self._sweep_at = max(SWEEP_MIN, 2 * len(self._candidates))
