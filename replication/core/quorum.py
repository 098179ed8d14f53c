"""Majorities of voter sets.

While the voters change, two sets are in force at once; more, if changes were never committed. A
decision needs a majority of each set.

**Why this is safe.** EPOCH entries name the voters. A set is *in force* in a log from the append of
its EPOCH entry until the next set's EPOCH entry is committed. Let set B follow set A. Leader L
appends the EPOCH entry e, which names B.

    e commits             L counts majorities of A and B for e. A majority of A therefore holds e.
    a later candidate     A candidate without e counts at least a majority of A. It meets a voter
                          that holds e, and the voter's answer names B (`FenceAnswer.sets`). The
                          candidate then counts a majority of B too, and needs e before it leads.
                          Exception: the voter promised before e arrived. It then refused e.
    L after e commits     L drops A. Every later leader holds e, by the line above, and counts B.
    an entry after e      An entry after e of the same epoch proves that e is committed: L appends
                          none before. A replica that restarts without its commit index drops A too.
    a voter of B          Its log may end before e, so that it does not know of its vote. It still
                          promises to a candidate. The promise counts because it is durable and
                          because B counts it.

Two leaders, or a leader and a candidate, therefore meet in a voter of every set that either of them
counts. The rest of the proof needs no more. A and B may therefore differ in any way. `one_change`
still allows only small changes, for other reasons. A set with two new members might have no
majority that is up to date. Several changes at once might leave no majority at all.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeAlias

from timer.model.units import ReplicaId

Voters: TypeAlias = frozenset[ReplicaId]
VOTERS_MAX: Final = 7


def majority(voters: Voters) -> int:
    """Return the size of the smallest majority of `voters`."""
    return len(voters) // 2 + 1


def is_granted(sets: Iterable[Voters], promised: Collection[ReplicaId]) -> bool:
    """Return whether `who` includes a majority of every set."""
    return all(len(voters.intersection(promised)) >= majority(voters) for voters in sets)


def one_change(before: Voters, after: Voters) -> bool:
    """Return whether `after` is `before` with one voter added, removed or replaced by another."""
    added, removed = after - before, before - after
    return bool(after) and len(added) <= 1 and len(removed) <= 1 and before != after


def majority_value(sets: Iterable[Voters], values: Mapping[ReplicaId, int]) -> int:
    """Return the greatest value that a majority of every set has reached. Absent means 0."""
    # Runs several times a round, hence lists and no generators. A majority has reached the middle
    # value of a sorted set, or the lower of the two middle ones.
    return min(
        [sorted([values.get(v, 0) for v in voters])[(len(voters) - 1) // 2] for voters in sets]
    )
