"""The short paths for one timer give the same results as the paths for many."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.timer.stores import NOW, batch, timers_of
from timer.entries.entry_frame import Entry, EntryKind
from timer.entries.payloads import Ids, Keys, Reschedule, encode_cancel, encode_reschedule
from timer.files.disk import RealDisk
from timer.model.columns import Binary, OnConflict, Part, encode_schedule
from timer.model.firing_order import Position, after, find
from timer.model.timer_id import mix, mix_one
from timer.model.units import Epoch, LogIndex, ProducerId, UnixMs
from timer.pending.memory.tiers import Tiers
from timer.pending.prefetch import LOOP_PAYLOADS_MAX, PrefetchTargets, is_surely_small
from timer.pending.runs.key_file import ENTRY, KeyFile, encode
from timer.pending.store import Store
from timer.ready.topic_shares import row_sum
from timer.state.apply_results import ALREADY_CANCELLED, NOT_FOUND
from timer.state.cancel_outcomes import Outcomes

EDGES = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def pairs(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted pairs, several due at once."""
    chance = np.random.default_rng(seed)
    due, key = chance.integers(0, 12, 60), chance.integers(0, 9, 60).astype(np.uint64)
    order = np.lexsort((key, due))
    return due[order], key[order]


def test_mix_of_one() -> None:
    values = [*EDGES, *np.random.default_rng(1).integers(0, 1 << 63, 1_000).tolist()]
    assert [mix_one(value) for value in values] == mix(np.array(values, np.uint64)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_place_and_pair_of_one(seed: int) -> None:
    due, key = pairs(seed)
    for keys in (key, key.view(np.int64)):
        want_due, want_key = np.divmod(np.arange(-12, 13 * 12), 12)
        want_key = want_key.astype(keys.dtype)
        among = find(due, keys, want_due, want_key)
        for at in range(len(want_due)):
            one = slice(at, at + 1)
            place = find(due, keys, want_due[one], want_key[one])
            assert place.dtype == among.dtype
            assert (place >= 0) == (among[one] >= 0)
            if place >= 0:
                assert (due[place], keys[place]) == (want_due[at], want_key[at])
    for position in (Position(5, 4), Position(int(due[0]), int(key[0])), Position(99, 0)):
        alone = [after(due[at : at + 1], key[at : at + 1], position)[0] for at in range(len(due))]
        assert after(due, key, position).tolist() == alone


def test_sums_of_one_add_up() -> None:
    rows, _ = batch(1, [NOW + at % 7 for at in range(50)])
    alone = [row_sum(rows[at : at + 1]) for at in range(len(rows))]
    assert sum(alone) % (1 << 64) == row_sum(rows)
    together, apart, seq = Outcomes(), Outcomes(), rows["seq"] * np.uint64(40_000)
    together.add(ALREADY_CANCELLED, seq, rows["due_ms"])
    for at in range(len(rows)):
        apart.add(ALREADY_CANCELLED, seq[at : at + 1], rows["due_ms"][at : at + 1])
    assert (apart.words, apart.pack()) == (together.words, together.pack())
    results = np.full(51, NOT_FOUND, np.uint8)
    apart.fill(np.append(seq, seq[:1] + np.uint64(1)), results)
    assert results.tolist() == [ALREADY_CANCELLED] * 50 + [NOT_FOUND]


@pytest.mark.parametrize("fresh", [0, 1, 5])
def test_tiers_have_one(fresh: int) -> None:
    tiers, due, ref = Tiers(), *pairs(fresh)
    ref = ref.view(np.int64)
    tiers.add(due, ref, int(due.min()))
    tiers.peek((0, -1), 3, 1 << 20)  # some are ready, the others in a tier
    for at in range(fresh):
        tiers.add(due[at : at + 1] + 20, ref[at : at + 1], int(due[at]) + 20)
    want_due, want_ref = np.divmod(np.arange(40 * 10), 10)
    among = tiers.contains(want_due, want_ref).tolist()
    assert [
        tiers.has(*pair) for pair in zip(want_due.tolist(), want_ref.tolist(), strict=True)
    ] == among
    assert 0 < sum(among) < len(among)


@pytest.mark.parametrize("n", [1, 100, 3_000])
def test_filter_of_a_key_file_for_one(tmp_path: Path, n: int) -> None:
    entries = np.zeros(n, ENTRY)
    entries["hash"] = mix(np.arange(n, dtype=np.uint64))
    (tmp_path / "k").write_bytes(b"".join(encode(entries)))
    file = KeyFile(RealDisk(), tmp_path / "k")
    asked = mix(np.arange(4_000, dtype=np.uint64))
    assert [file.may_have_one(each) for each in asked.tolist()] == file.may_have(asked).tolist()
    assert len(file.find(asked[:1])[0]) == 1
    absent = asked[~file.may_have(asked)][:1]
    assert len(absent) == (n < 4_000)
    assert [len(column) for column in file.find(absent)] == [0, 0]


def a_store(path: Path) -> tuple[Store, list[tuple[int, int]]]:
    """Return a store with timers in runs, a frozen memtable and memory, some cancelled, some held.

    Also return all timers that were ever in it.
    """
    store, known, chance = Store(RealDisk(), path), list[tuple[int, int]](), random.Random(3)
    store.fire(UnixMs(NOW), 1, 1)
    for turn in range(4):
        rows, buf = batch(1 + 100 * turn, [NOW + chance.randint(1, 9) for _ in range(40)], gap=1)
        store.insert(rows, buf)
        known += zip(rows["due_ms"].tolist(), rows["seq"].tolist(), strict=True)
        held, buf = batch(5_000 + 100 * turn, [NOW - at for at in range(3)])
        store.hold(held, {0: buf})
        known += zip(held["due_ms"].tolist(), held["seq"].tolist(), strict=True)
        ended = chance.sample(known, 9)
        store.cancel(np.array([d for d, _ in ended]), np.array([s for _, s in ended], np.uint64))
        if turn < 3:
            frozen = store.freeze()
            if turn < 2:
                store.install(frozen, store.write_run(frozen))
    return store, known


def test_cancels_one_by_one_are_those_of_all_at_once(tmp_path: Path) -> None:
    (together, known), (apart, _) = a_store(tmp_path / "a"), a_store(tmp_path / "b")
    asked = [*known, *((due + 1, seq) for due, seq in known), *known[:30]]
    random.Random(5).shuffle(asked)
    due, seq = np.array([d for d, _ in asked]), np.array([s for _, s in asked], np.uint64)
    hit, rows = together.cancel(due, seq)
    found = [apart.find(UnixMs(d), s) is not None for d, s in known]
    alone = [apart.cancel(due[at : at + 1], seq[at : at + 1]) for at in range(len(asked))]
    assert [bool(one[0]) for one, _ in alone] == hit.tolist()
    assert sum(found) == sum(hit.tolist()) > 50
    names = ["due_ms", "seq", "requested_ms", "topic", "payload_size"]
    removed = [row for _, some in alone for row in some[names].tolist()]
    assert sorted(removed) == sorted(rows[names].tolist())
    assert (together.pending, together.held) == (apart.pending, apart.held)
    fired = [store.fire(UnixMs(NOW + 99), 1 << 20, 1 << 30) for store in (together, apart)]
    assert timers_of(fired[0].rows, fired[0].bufs) == timers_of(fired[1].rows, fired[1].bufs)


def test_what_is_surely_little_is_little() -> None:
    def ids(n: int) -> Ids:
        return Ids(np.arange(n), np.arange(n, dtype=np.uint64))

    def entry(kind: EntryKind, payload: list[bytes]) -> Entry:
        return Entry(kind, Epoch(1), LogIndex(1), UnixMs(0), memoryview(b"".join(payload)))

    def part(key: bytes) -> Part:
        return Part(
            producer_id=ProducerId(0),
            sequence=0,
            due_ms=np.arange(1),
            requested_ms=np.arange(1),
            topic=np.ones(1, np.uint32),
            payload=Binary.of([b"p"]),
            key=Binary.of([key]) if key else None,
            on_conflict=OnConflict.REJECT,
        )

    keys = Keys(np.ones(1, np.uint32), Binary.of([b"k"]))
    moves = {n: Reschedule(ids(n), np.arange(n), np.arange(n)) for n in (1, LOOP_PAYLOADS_MAX, 5)}
    entries = [
        *(entry(EntryKind.CANCEL, encode_cancel(targets)) for targets in (ids(1), ids(70), keys)),
        *(entry(EntryKind.RESCHEDULE, encode_reschedule(move)) for move in moves.values()),
        *(entry(EntryKind.SCHEDULE, encode_schedule([part(key)])) for key in (b"", b"key")),
    ]
    little = 0
    for seed in range(300):
        some = random.Random(seed).choices(entries, k=1 + seed % 3)
        for has_keys in (True, False):
            if is_surely_small(some, 0, keys=has_keys):
                little += 1
                asked = PrefetchTargets(some, lambda due, seq: due, keys=has_keys)
                assert not asked.names
                assert asked.is_small([])
    assert little > 100
    assert not is_surely_small([entries[0]], 65, keys=False)
    assert is_surely_small([entries[0]], 64, keys=False)
