"""Key conflicts inside one entry: its rows are decided one after the other."""

import numpy as np
import pytest

from timer.model.columns import ROW, Binary, OnConflict, RowArray
from timer.state.key_conflicts import Decision, Verdict, decide

SCHEDULED, REPLACED, KEPT, REJECTED, NOT_PENDING = Verdict
UPDATE, REPLACE = OnConflict.UPDATE, OnConflict.REPLACE


def decided(
    *rows: tuple[str, OnConflict], pending: dict[str, int], due: frozenset[int] = frozenset()
) -> Decision:
    """Decide about rows of (key, mode) with the seqs 101, 102, … `pending`: key to seq.

    `due`: seqs of rows that fire at once.
    """
    mine: RowArray = np.zeros(len(rows), ROW)
    mine["seq"] = 101 + np.arange(len(rows))
    mine["due_ms"] = 1_000 + mine["seq"]
    mine["key_size"] = [len(key) for key, _ in rows]
    keys = [key for key, _ in rows if key]
    held: RowArray = np.zeros(len(keys), ROW)
    held["seq"] = [pending.get(key, 0) for key in keys]
    held["due_ms"] = held["seq"]
    return decide(
        mine,
        np.array([mode for _, mode in rows], np.uint32),
        Binary.of([key.encode() for key in keys]),
        np.array([ord(key) for key in keys], np.uint64),
        held,
        ~np.isin(mine["seq"], [*due]),
    )


@pytest.mark.parametrize("before", range(3))
def test_modes_are_those_of_the_rows_though_some_have_no_key(before: int) -> None:
    plain = [("", UPDATE)] * before
    made = decided(*plain, ("a", REPLACE), ("b", UPDATE), pending={})
    assert made.verdicts.verdict.tolist() == [SCHEDULED] * (before + 1) + [NOT_PENDING]


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_decided_as_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    modes = [*OnConflict]
    rows = [
        ("abcdefghij"[rng.integers(10)], modes[rng.integers(len(modes))])
        for _ in range(rng.integers(1, 12))
    ]
    pending = {key: 1 + number for number, key in enumerate("abcde")}
    due = frozenset(101 + number for number in range(len(rows)) if rng.random() < 0.2)
    made = decided(*rows, pending=pending, due=due)

    holders, verdicts, others = {**pending}, list[Verdict](), list[int]()
    ended, undone = list[int](), list[int]()
    for seq, (key, mode) in enumerate(rows, 101):
        holder = holders.get(key, 0)
        if holder and mode in (REPLACE, UPDATE):
            verdicts.append(REPLACED)
            (undone if holder > 100 else ended).append(holder)
        elif holder:
            verdicts.append(KEPT if mode is OnConflict.KEEP else REJECTED)
        else:
            verdicts.append(NOT_PENDING if mode is UPDATE else SCHEDULED)
        others.append(holder)
        if verdicts[-1] in (SCHEDULED, REPLACED):
            holders[key] = 0 if seq in due else seq
    assert made.verdicts.verdict.tolist() == verdicts
    assert made.verdicts.seq.tolist() == others
    assert made.ended["seq"].tolist() == ended
    assert (101 + np.flatnonzero(made.undone)).tolist() == sorted(undone)
