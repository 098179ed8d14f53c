"""Keys are found by hash, in memory and in key files, as a plain table would find them."""

import os
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timer.files.disk import RealDisk
from timer.model.columns import I64, U64, Binary
from timer.model.timer_errors import CorruptFileError, UnknownVersionError
from timer.model.timer_id import mix, mix_one
from timer.pending.memory.key_index import MERGED_MAX, PLAIN_HASHER, KeyHasher, KeyTiers
from timer.pending.runs.key_file import ENTRY, PAGE_ENTRIES, KeyFile, encode

TOPIC = 7


def hashes_of(keys: list[bytes], topic: int = TOPIC) -> U64:
    return PLAIN_HASHER(np.full(len(keys), topic, np.uint32), Binary.of(keys))


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_hash_is_the_keys_own_whatever_lies_beside_it(keys: list[bytes]) -> None:
    together = hashes_of(keys)
    for key, hashed in zip(keys, together.tolist(), strict=True):
        assert hashes_of([key]).tolist() == [hashed]
    assert len(set(together.tolist())) == len(set(keys))


def test_hash_tells_topics_and_zero_bytes_apart() -> None:
    assert hashes_of([b"k"], 1) != hashes_of([b"k"], 2)
    several = [b"", b"\0", b"\0\0", b"\0" * 8, b"\0" * 9]
    assert len(set(hashes_of(several).tolist())) == len(several)


def unmixed(value: int) -> int:
    """Return the value that `mix` maps to this one."""
    every = (1 << 64) - 1
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        whole = value
        for _ in range(64 // shift):
            whole = value ^ whole >> shift
        value = whole * pow(factor, -1, 1 << 64) & every
    return (value - 0x9E3779B97F4A7C15) & every


def test_mixing_without_a_secret_can_be_undone_but_a_hasher_is_not_met_by_it() -> None:
    assert unmixed(mix_one(12_345)) == 12_345
    head, goal = mix_one(TOPIC | 16 << 32), unmixed(0x1234567890ABCDEF)
    keys = []
    for number in range(300):  # each word undoes what the one before it has changed
        word = number.to_bytes(8, "little")
        middle = mix_one(head ^ int.from_bytes(word, "little"))
        keys.append(word + (middle ^ goal).to_bytes(8, "little"))
        assert mix_one(middle ^ middle ^ goal) == 0x1234567890ABCDEF
    for hasher in (PLAIN_HASHER, KeyHasher(b"a secret")):
        hashes = hasher(np.full(len(keys), TOPIC, np.uint32), Binary.of(keys))
        assert len(np.unique(hashes)) == len(keys)


def test_hashes_of_a_hasher_are_those_of_its_secret_for_keys_of_any_length() -> None:
    keys = Binary.of([b"k" * size for size in (0, 1, 7, 8, 9, 127, 128, 129, 1024, 65_536)])
    topics = np.full(len(keys.sizes), TOPIC, np.uint32)
    one, other = KeyHasher(b"one"), KeyHasher(b"other")
    hashes = one(topics, keys)
    assert len(np.unique(np.concatenate([hashes, other(topics, keys)]))) == 2 * len(topics)
    assert (one(topics, keys) == hashes).all(), "longer keys made more factors"
    assert (KeyHasher(b"one")(topics, keys) == hashes).all()


@pytest.mark.parametrize("seed", range(5))
def test_tiers_find_the_live_rows_of_a_hash(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tiers, alive = KeyTiers(), np.zeros(5_000, np.bool_)
    model: dict[int, set[int]] = {}
    count = 0
    for _ in range(60):
        n = int(rng.integers(1, 80))
        hashes = mix(rng.integers(0, 300, n).astype(np.uint64))
        places = np.arange(count, count + n)
        count += n
        alive[places] = True
        tiers.add(hashes, places)
        for hashed, place in zip(hashes.tolist(), places.tolist(), strict=True):
            model.setdefault(hashed, set()).add(place)
        alive[rng.integers(0, count, 20)] = False
        wanted = mix(rng.integers(0, 320, 10).astype(np.uint64))
        which, found = tiers.find(wanted, alive.take)
        for number, hashed in enumerate(wanted.tolist()):
            live = {place for place in model.get(hashed, ()) if alive[place]}
            assert sorted(found[which == number].tolist()) == sorted(live)


def test_key_replaced_again_and_again_does_not_gather() -> None:
    tiers, alive = KeyTiers(), np.ones(10_000, np.bool_)
    hashed = hashes_of([b"the same"])
    for place in range(10_000):
        tiers.add(hashed, np.array([place]))
        _, found = tiers.find(hashed, alive.take)
        alive[found[found != place]] = False
    assert sum(len(hashes) for hashes, _ in tiers._tiers) < 10


def test_search_merges_a_bounded_number_of_rows() -> None:
    # P9: a memtable has hundreds of thousands of keys, and a search may merge them.
    tiers, merged = KeyTiers(), list[int]()

    def live(places: I64) -> npt.NDArray[np.bool_]:
        merged.append(len(places))
        return np.ones(len(places), np.bool_)

    for start in range(0, 6 * MERGED_MAX, 1_024):
        places = np.arange(start, start + 1_024)
        tiers.add(mix(places.astype(np.uint64)), places)
        tiers.find(mix(places[:1].astype(np.uint64)), live)
    assert max(merged) <= MERGED_MAX
    assert len(tiers._tiers) < 20
    wanted = mix(np.arange(0, 6 * MERGED_MAX, 777, dtype=np.uint64))
    which, found = tiers.find(wanted, live)
    assert sorted(found.tolist()) == list(range(0, 6 * MERGED_MAX, 777))
    assert (found == 777 * which).all()


def written(path: Path, hashes: U64) -> KeyFile:
    entries = np.zeros(len(hashes), ENTRY)
    entries["hash"], entries["seq"] = hashes, np.arange(len(hashes))
    entries["due_ms"] = 3 * np.arange(len(hashes))
    path.write_bytes(b"".join(encode(entries)))
    return KeyFile(RealDisk(), path)


@pytest.mark.parametrize("n", [1, PAGE_ENTRIES - 1, PAGE_ENTRIES, PAGE_ENTRIES + 1, 3_000])
@pytest.mark.parametrize("distinct", [1, 40, 1 << 40])
def test_file_finds_every_row_of_a_hash(tmp_path: Path, n: int, distinct: int) -> None:
    rng = np.random.default_rng(n)
    hashes = mix(rng.integers(0, distinct, n).astype(np.uint64))
    file = written(tmp_path / "k", hashes)
    assert file.entries == n
    absent = mix(np.arange(1 << 50, (1 << 50) + 50, dtype=np.uint64))
    wanted = np.unique(np.concatenate([hashes[:: max(1, n // 50)], absent]))
    which, found = file.find(wanted)
    for number, hashed in enumerate(wanted.tolist()):
        rows = np.flatnonzero(hashes == hashed)
        assert sorted(found["seq"][which == number].tolist()) == rows.tolist()
        assert sorted(found["due_ms"][which == number].tolist()) == (3 * rows).tolist()


def test_many_keys_are_found_with_one_open_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An open takes longer than the read of a page, and a batch may have a thousand keys.
    hashes = mix(np.arange(20 * PAGE_ENTRIES, dtype=np.uint64))
    file, opens = written(tmp_path / "k", hashes), Mock(wraps=os.open)
    monkeypatch.setattr(os, "open", opens)
    which, _ = file.find(hashes)
    assert (len(which), opens.call_count) == (len(hashes), 1)


def test_filter_passes_few_that_are_not_there(tmp_path: Path) -> None:
    file = written(tmp_path / "k", mix(np.arange(20_000, dtype=np.uint64)))
    absent = mix(np.arange(1 << 40, (1 << 40) + 100_000).astype(np.uint64))
    assert file.may_have(absent).mean() < 0.003
    assert file.may_have(mix(np.arange(20_000, dtype=np.uint64))).all()


@pytest.mark.parametrize("n", [1, PAGE_ENTRIES, PAGE_ENTRIES + 1])
def test_file_of_other_entries_has_another_checksum(n: int) -> None:
    # Replicas name their runs alike, so a snapshot can continue from another source.
    entries = np.zeros(n, ENTRY)
    entries["hash"] = mix(np.arange(n, dtype=np.uint64))
    entries["key_at"] = 1304 + np.arange(n)
    moved = entries.copy()
    moved["key_at"] += 48
    sums = {zlib.crc32(b"".join(encode(each))) for each in (entries, moved)}
    assert len(sums) == 2


def test_damage_anywhere_is_found_and_never_hides_a_row(tmp_path: Path) -> None:
    path = tmp_path / "k"
    hashes = mix(np.arange(PAGE_ENTRIES + 9, dtype=np.uint64))
    written(path, hashes)
    data = path.read_bytes()
    for position in (*range(32), *range(32, len(data), 7)):  # of the head each: it has sizes
        damaged = bytearray(data)
        damaged[position] ^= 0x80
        path.write_bytes(damaged)
        with pytest.raises((CorruptFileError, UnknownVersionError)):
            KeyFile(RealDisk(), path).find(hashes)
    for size in (0, 10, 31, 100, len(data) - 1, len(data) - ENTRY.itemsize * 20):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptFileError):
            KeyFile(RealDisk(), path).find(hashes)
