"""Planted bugs in the storage: proof that its model tests can fail.

Each bug breaks one rule of merging, reading ahead, manifests or queues, as a plausible mistake
would. The model tests must find it within a stated number of random programs.
"""

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.timer.mailroom import make_tight, run_mailroom
from tests.timer.stores import Comparison, make_small, run_program
from timer.model.columns import Buffers, RowArray
from timer.model.firing_order import START, Position
from timer.pending.memory.memtable import Memtable
from timer.pending.runs import run_set
from timer.pending.runs.merge import Merge, merged_rows
from timer.pending.runs.read_window import ReadWindow, Slice
from timer.pending.runs.run import RunMeta, is_tombstone
from timer.pending.runs.run_set import PrefetchedTimers, Runs
from timer.pending.runs.run_writer import row_sizes, write_parts
from timer.pending.store import Store
from timer.ready import spill as spill_module
from timer.ready.page_cache import Block, BlockRows, Pages
from timer.ready.queue import Queue
from timer.recovery import manifest

Chunks = Iterable[tuple[RowArray, Buffers]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug."""

    name: str
    seeds: int
    """Number of programs within which the bug must be found."""
    target: object
    attribute: str
    wrong: Any

    def plant(self) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(self.target, self.attribute, self.wrong)


# ---- of the store

_merged = merged_rows


def _without_tombstones(merge: Merge) -> Iterator[tuple[RowArray, Buffers]]:
    """Drop tombstones of targets in other runs from a merge."""
    for rows, bufs in _merged(merge):
        yield rows[~is_tombstone(rows)], bufs


def _skips_at_the_cut(
    disk: Any, directory: Path, numbers: Iterator[int], chunks: Chunks, size: int, pace: Any
) -> list[RunMeta]:
    """Leave the row after a part's last one out of all parts."""

    def lossy() -> Iterator[tuple[RowArray, Buffers]]:
        room = size
        for rows, bufs in chunks:
            keep = np.ones(len(rows), np.bool_)
            for place, each in enumerate(row_sizes(rows).tolist()):
                keep[place] = room > 0
                room = room - each if room > 0 else size
            yield rows[keep], bufs

    return write_parts(disk, directory, numbers, lossy(), size, pace)


def _retire_early(self: Runs, position: Position) -> None:
    """Drop a run shortly before its last row fires."""
    past = [w for w in self._windows if w.run.meta.last.due_ms < position.due_ms + 1_000]
    self._retire(past)


_recover = Store.recover


def _recover_from_the_start(
    disk: Any, directory: Path, metas: Any, position: Position, pending: int
) -> Store:
    """Recover a store from the start of its runs, not from the firing position."""
    del position
    return _recover(disk, directory, metas, START, pending)


_take = ReadWindow.take


def _take_all_but_the_last(self: ReadWindow, slices: Iterable[Slice], cursor: Any) -> None:
    """Leave the row at the window's edge out of the rows that are read ahead."""
    pieces = [*slices]
    if len(pieces[-1].rows) > 1:
        pieces[-1] = Slice(pieces[-1].rows[:-1].copy(), pieces[-1].data)
    _take(self, pieces, cursor)


_begin_merge = Runs.begin_merge


def _merge_from_later(self: Runs, position: Position) -> Merge | None:
    """Leave rows that are due soon out of a merge, beside the fired ones."""
    return _begin_merge(self, Position(position.due_ms + 1_000, 0))


def _bury_nothing(self: Memtable, due_ms: Any, seq: Any) -> None:
    """Forget the cancel of a flushed row."""


_end_merge = Runs.end_merge


def _end_merge_and_remove(self: Runs, merge: Merge, windows: Any, position: Position) -> None:
    """Remove merged runs before a manifest without them is written."""
    _end_merge(self, merge, windows, position)
    self.remove([run.meta for run in merge.runs])


_answer = PrefetchedTimers.answer


def _answer_for_another(self: PrefetchedTimers, run: Any, due_ms: Any, seq: Any) -> Any:
    """Use what was prefetched from one run for another run."""
    del run
    return _answer(self, self._runs[0], due_ms, seq)


_use = Runs.use


def _use_without_the_last(self: Runs, windows: Iterable[ReadWindow], position: Position) -> None:
    """Forget the last part of a merge or flush."""
    every = [*windows]
    _use(self, every[:-1] if len(every) > 1 else every, position)


OF_THE_STORE = (
    Mutation("merge_forgets_tombstones", 3, run_set, "merged_rows", _without_tombstones),
    Mutation("row_between_two_parts_is_lost", 3, run_set, "write_parts", _skips_at_the_cut),
    Mutation("run_with_a_pending_last_row_is_dropped", 3, Runs, "retire_past", _retire_early),
    Mutation("cursor_is_not_persisted", 3, Store, "recover", _recover_from_the_start),
    Mutation("read_ahead_skips_the_edge", 3, ReadWindow, "take", _take_all_but_the_last),
    Mutation("merge_leaves_out_what_is_due_soon", 3, Runs, "begin_merge", _merge_from_later),
    Mutation("cancel_of_a_flushed_row_is_lost", 2, Memtable, "add_tombstones", _bury_nothing),
    Mutation("merged_runs_are_removed_at_once", 3, Runs, "end_merge", _end_merge_and_remove),
    Mutation(
        "prefetch_answers_for_another_run", 3, PrefetchedTimers, "answer", _answer_for_another
    ),
    Mutation("last_part_is_forgotten", 3, Runs, "use", _use_without_the_last),
)


# ---- of the queues

_add_spills = manifest.add_spills


def _add_spills_but_one(state: Any, fresh: list[spill_module.Spill]) -> None:
    """Leave the last spilled block of each queue out of the manifest."""
    kept = [(spill, [*spill.new]) for spill in fresh]
    for spill, new in kept:
        spill.new[:] = new[:-1]
    _add_spills(state, fresh)
    for spill, new in kept:
        spill.new[:] = new


_install = spill_module.PageFetch.install


def _install_mixed_up(self: spill_module.PageFetch, pages: Pages) -> None:
    """Exchange the pages of blocks that are fetched together."""
    found = [page for _, _, page in self._pages]
    self._pages = [(b, ref, p) for (b, ref, _), p in zip(self._pages, found[::-1], strict=True)]
    _install(self, pages)


_drop_below = Queue.drop_below


def _drop_one_more(self: Queue, offset: Any) -> None:
    """Drop a block before its last message is acked."""
    _drop_below(self, offset)
    while self.blocks and self.blocks[0].end <= offset + 1 and self.end > offset + 1:
        self.pages.remove(self.blocks.pop(0))


def _want_nothing(self: Pages, block: Block) -> None:
    """Request no fetch of a missing page."""


def _files_of_one_topic(state: Any) -> set[str]:
    """Remove spill files that only other topics need."""
    return {block[0] for block in state["topics"][-1]["blocks"]}


def _cut_in_any_order(pages: Any) -> Iterator[list[BlockRows]]:
    """Write the parts of spilled pages in another order."""
    for group in _cut(pages):
        yield group[::-1]


_cut = spill_module._page_groups
_at_hand = Queue.count_in_memory


def _one_too_many_at_hand(self: Queue, offsets: Any) -> int:
    """Count a missing message as in memory."""
    return min(_at_hand(self, offsets) + 1, len(offsets))


OF_THE_QUEUES = (
    Mutation("spilled_block_is_lost_at_restart", 3, manifest, "add_spills", _add_spills_but_one),
    Mutation("fetched_pages_are_mixed_up", 3, spill_module.PageFetch, "install", _install_mixed_up),
    Mutation("block_leaves_one_message_early", 3, Queue, "drop_below", _drop_one_more),
    Mutation("nobody_fetches", 2, Pages, "request", _want_nothing),
    Mutation("spill_file_is_removed_too_early", 3, manifest, "spill_files", _files_of_one_topic),
    Mutation("spilled_messages_change_places", 3, spill_module, "_page_groups", _cut_in_any_order),
    Mutation("missing_message_is_handed_out", 3, Queue, "count_in_memory", _one_too_many_at_hand),
)


def programs_until_found(mutation: Mutation, play: Callable[[int], None]) -> int | None:
    """Return the number of programs until the bug was found. None: it was not found."""
    with mutation.plant():
        for seed in range(mutation.seeds):
            try:
                play(seed)
            except Exception:  # noqa: BLE001 - any failure shows the bug
                return seed + 1
    return None


def play_store(seed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        run_program(Comparison(Path(root)), random.Random(seed), steps=250)


@pytest.mark.parametrize("mutation", OF_THE_STORE, ids=lambda each: each.name)
def test_bug_planted_in_the_store_is_found(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    assert programs_until_found(mutation, play_store) is not None


@pytest.mark.parametrize("mutation", OF_THE_QUEUES, ids=lambda each: each.name)
def test_bug_planted_in_the_queues_is_found(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tight(monkeypatch)
    assert programs_until_found(mutation, run_mailroom) is not None


def test_the_same_programs_pass_without_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    make_tight(monkeypatch)
    play_store(0)
    run_mailroom(0)
