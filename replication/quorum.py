"""Majorities of voter sets.

While voters change, two sets (or more, if changes were never committed) are in force at once;
what counts is a majority of each of them.

**Why that is safe.** Voters are what EPOCH entries say; a set is *in force* in a log from the
moment its entry is appended, and the one before it until its successor's entry is committed. Say
that set B follows A, its EPOCH entry e being appended by leader L.

    e commits             L counts majorities of A and B for e, so a majority of A holds e.
    a later candidate     that does not know e counts a majority of A at least. It meets a voter
                          that holds e, whose answer names B (`FenceAnswer.sets`), so it counts a
                          majority of B as well, and has to hold e before it leads. Unless that
                          voter promised it before e came: then it refused L's append of e.
    L, once e commits     drops A. Whoever leads next holds e by the line above, and counts B.
    an entry after e      of the same epoch, in any log, says that e is committed: L takes none
                          before. So a start that has forgotten the commit index drops A, too.
    a voter of B          may not know that it is one, its log ending before e. It promises all
                          the same when a candidate asks it: what makes a promise worth something
                          is that it is durable, and that B counts it.

So at any moment two leaders, or a leader and a candidate, meet in a voter of every set that either
of them counts, which is all that the rest of the proof asks for. Nothing above needs A and B to be
close. They are, by `one_change`, for other reasons: a set with two new members might have no
majority that is up to date, and several changes at once no majority at all.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeAlias

from timer.units import ReplicaId

Voters: TypeAlias = frozenset[ReplicaId]
VOTERS_MAX: Final = 7


def majority(voters: Voters) -> int:
    """Return how many of `voters` are more than half of them."""
    return len(voters) // 2 + 1


def granted(sets: Iterable[Voters], who: Collection[ReplicaId]) -> bool:
    """Return whether `who` holds a majority of every set."""
    return all(len(voters.intersection(who)) >= majority(voters) for voters in sets)


def one_change(before: Voters, after: Voters) -> bool:
    """Return whether `after` is `before` with one voter added, removed or replaced by another."""
    added, removed = after - before, before - after
    return bool(after) and len(added) <= 1 and len(removed) <= 1 and before != after


def reached(sets: Iterable[Voters], values: Mapping[ReplicaId, int]) -> int:
    """Return the greatest value that a majority of every set has reached; absent means 0."""
    # Several times a round, so without a generator for each set: the middle one, or the one below
    # it, is what a majority has reached.
    return min(
        [sorted([values.get(v, 0) for v in voters])[(len(voters) - 1) // 2] for voters in sets]
    )
