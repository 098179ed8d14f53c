"""The simulated disk loses data that a real disk may lose, and no other data."""

import errno
import random
from pathlib import Path

import pytest

from chaos.sim.world.simdisk import PAGE_SIZE, SimDisk
from timer.files.disk import Disk
from timer.model.timer_errors import CorruptFileError, DiskFailedError, WrongDirectoryError

ROOT = Path("/data")
PATH = ROOT / "file"
SEEDS = range(300)


def fresh() -> SimDisk:
    disk = SimDisk()
    disk.make_dir(ROOT)
    return disk


def test_it_is_a_disk() -> None:
    disk: Disk = SimDisk()  # the type checker's test
    assert not disk.exists(PATH)


def test_synced_bytes_and_names_survive_every_crash() -> None:
    for seed in SEEDS:
        disk = fresh()
        file = disk.open_append(PATH)
        file.write([b"x" * 1_000])
        file.sync()
        disk.sync_dir(ROOT)
        file.write([b"y" * 2_000])
        disk.crash(random.Random(seed))
        data = disk.read(PATH)
        assert data[:1_000] == b"x" * 1_000
        assert len(data) <= 3_000


def test_unsynced_bytes_are_lost_wholly_partly_in_pages_or_not_at_all() -> None:
    kinds = set[str]()
    for seed in SEEDS:
        disk = fresh()
        file = disk.open_append(PATH)
        file.sync()
        disk.sync_dir(ROOT)
        file.write([b"y" * 5 * PAGE_SIZE])
        disk.crash(random.Random(seed))
        data = disk.read(PATH)
        assert set(data) <= {0, ord("y")}
        holes = 0 in data
        kinds.add("holes" if holes else {0: "none", 5 * PAGE_SIZE: "all"}.get(len(data), "prefix"))
    assert kinds == {"none", "all", "prefix", "holes"}


def test_names_that_were_not_synced_may_be_undone_each_by_itself() -> None:
    found = set[tuple[str, ...]]()
    for seed in SEEDS:
        disk = fresh()
        disk.write_atomic(ROOT / "old", b"")
        disk.open_append(ROOT / "new").close()
        disk.remove(ROOT / "old")
        disk.crash(random.Random(seed))
        found.add(tuple(disk.list_dir(ROOT)))
    assert found == {(), ("old",), ("new",), ("new", "old")}


def test_link_is_a_second_name_that_is_durable_only_when_synced() -> None:
    found = set[tuple[str, ...]]()
    for seed in SEEDS:
        disk = fresh()
        disk.write_atomic(ROOT / "a", b"abc")
        disk.link(ROOT / "a", ROOT / "b")
        assert disk.used_bytes() == 3
        disk.crash(random.Random(seed))
        found.add(tuple(disk.list_dir(ROOT)))
        assert {disk.read(ROOT / name) for name in disk.list_dir(ROOT)} == {b"abc"}
    assert found == {("a",), ("a", "b")}


def test_synced_names_survive() -> None:
    for seed in SEEDS:
        disk = fresh()
        disk.open_append(ROOT / "a").close()
        disk.open_append(ROOT / "b").close()
        disk.remove(ROOT / "a")
        disk.sync_dir(ROOT)
        disk.crash(random.Random(seed))
        assert disk.list_dir(ROOT) == ["b"]


def test_write_atomic_leaves_the_old_or_the_new_and_is_durable() -> None:
    for seed in SEEDS:
        disk = fresh()
        disk.write_atomic(PATH, b"old")
        disk.fail_sync(random.Random(seed))
        with pytest.raises(DiskFailedError):
            disk.write_atomic(PATH, b"new" * 1_000)
        disk.crash(random.Random(seed))
        assert disk.read(PATH) == b"old"
        disk.write_atomic(PATH, b"new")
        disk.crash(random.Random(seed))
        assert disk.read(PATH) == b"new"


def test_unsynced_truncation_happens_or_not() -> None:
    found = set[bytes]()
    for seed in SEEDS:
        disk = fresh()
        file = disk.open_append(PATH)
        file.write([b"abcdef"])
        file.sync()
        disk.sync_dir(ROOT)
        file.truncate(2)
        file.write([b"XY"])
        disk.crash(random.Random(seed))
        found.add(disk.read(PATH))
    assert {b"abcdef", b"ab", b"abXY", b"abX"} <= found
    assert found <= {b"abcdef", b"ab", b"abX", b"abXY", b"ab\0", b"ab\0\0"}


def test_mark_is_old_or_new_after_a_crash() -> None:
    found = set[bytes]()
    for seed in SEEDS:
        disk = fresh()
        mark = disk.open_mark(PATH)
        mark.put(b"old!")
        mark.sync()
        disk.sync_dir(ROOT)
        mark.put(b"new!")
        disk.crash(random.Random(seed))
        found.add(disk.read(PATH))
    assert found == {b"old!", b"new!"}


def test_failed_sync_is_seen_until_the_file_is_opened_again() -> None:
    disk = fresh()
    lost = 0
    for seed in SEEDS:
        path = ROOT / str(seed)
        file = disk.open_append(path)
        file.write([b"good"])
        file.sync()
        file.write([b"bad!"])
        disk.fail_sync(random.Random(seed))
        with pytest.raises(DiskFailedError, match="EIO"):
            file.sync()
        with pytest.raises(DiskFailedError, match="refused"):
            file.write([b"more"])
        disk.die()
        assert disk.read(path) == b"goodbad!"
        disk.open_append(path)
        assert disk.read(path).startswith(b"good")
        lost += disk.read(path) != b"goodbad!"
    assert 100 < lost < 300


def test_sync_fails_after_as_many_as_asked() -> None:
    disk = fresh()
    file = disk.open_append(PATH)
    disk.fail_sync(random.Random(1), after=2)
    file.sync()
    file.sync()
    with pytest.raises(DiskFailedError):
        file.sync()


def test_mended_disk_syncs() -> None:
    disk = fresh()
    disk.fail_sync(random.Random(1))
    disk.mend()
    disk.write_atomic(PATH, b"new")
    disk.crash(random.Random(1))
    assert disk.read(PATH) == b"new"


def test_full_disk_takes_what_fits_and_fails_with_enospc() -> None:
    disk = SimDisk(capacity_bytes=10)
    disk.make_dir(ROOT)
    file = disk.open_append(PATH)
    file.write([b"12345"])
    assert disk.free_bytes(ROOT) == 5
    with pytest.raises(DiskFailedError) as failed:
        file.write([b"678", b"9abc"])
    assert failed.value.errno == errno.ENOSPC
    assert disk.read(PATH) == b"123456789a"


def test_flipped_bit_is_seen_now_and_after_a_crash() -> None:
    disk = fresh()
    disk.write_atomic(PATH, bytes(100))
    found = disk.synced_byte(random.Random(1), ROOT)
    assert found is not None
    path, position = found
    assert path == PATH
    disk.flip(path, position, mask=8)
    damaged = disk.read(PATH)
    assert damaged[position].bit_count() == 1
    assert sum(damaged) == damaged[position]
    disk.crash(random.Random(1))
    assert disk.read(PATH) == damaged
    assert disk.synced_byte(random.Random(1), Path("/other")) is None


def test_page_that_is_spoilt_is_not_read_until_it_is_written_again() -> None:
    disk = fresh()
    disk.write_atomic(PATH, bytes(3 * PAGE_SIZE))
    page = 1
    disk.spoil(PATH, PAGE_SIZE + 7)
    disk.crash(random.Random(1))
    for n in range(3):
        if n == page:
            with pytest.raises(CorruptFileError, match="bad sector"):
                disk.read(PATH, n * PAGE_SIZE + 1, 1)
        else:
            assert disk.read(PATH, n * PAGE_SIZE, PAGE_SIZE) == bytes(PAGE_SIZE)
    with pytest.raises(CorruptFileError):
        disk.read(PATH)
    file = disk.open_append(PATH)
    for half in (page * PAGE_SIZE + 1, (page + 1) * PAGE_SIZE - 1):
        with pytest.raises(DiskFailedError, match="EIO"):
            disk.open_append(PATH).truncate(half)
    file.truncate(page * PAGE_SIZE)
    file.write([b"1" * (3 - page) * PAGE_SIZE])
    assert disk.read(PATH) == bytes(page * PAGE_SIZE) + b"1" * (3 - page) * PAGE_SIZE


def test_mark_on_a_bad_sector_is_written_only_as_a_whole_page() -> None:
    disk = fresh()
    disk.write_atomic(PATH, bytes(PAGE_SIZE))
    disk.spoil(PATH, 0)
    with pytest.raises(DiskFailedError, match="EIO"):
        disk.open_mark(PATH).put(b"1" * (PAGE_SIZE - 1))
    disk.open_mark(PATH).put(b"1" * PAGE_SIZE)
    assert disk.read(PATH) == b"1" * PAGE_SIZE


def test_handle_from_before_a_crash_is_refused() -> None:
    disk = fresh()
    file, mark = disk.open_append(PATH), disk.open_mark(ROOT / "mark")
    disk.crash(random.Random(1))
    with pytest.raises(AssertionError, match="before the crash"):
        file.write([b"x"])
    with pytest.raises(AssertionError, match="before the crash"):
        mark.put(b"x")
    file.close()


def test_lock_ends_with_the_process() -> None:
    disk = fresh()
    lock = disk.lock(ROOT / "LOCK")
    with pytest.raises(WrongDirectoryError, match="in use by process"):
        disk.lock(ROOT / "LOCK")
    disk.die()
    second = disk.lock(ROOT / "LOCK")
    lock.release()  # of a dead process: frees nothing
    with pytest.raises(WrongDirectoryError):
        disk.lock(ROOT / "LOCK")
    second.release()
    disk.lock(ROOT / "LOCK")


def test_same_seed_same_crash() -> None:
    def run(seed: int) -> bytes:
        disk = fresh()
        file = disk.open_append(PATH)
        disk.sync_dir(ROOT)
        file.write([bytes(range(256)) * 20])
        disk.crash(random.Random(seed))
        return disk.read(PATH)

    assert [run(seed) for seed in range(50)] == [run(seed) for seed in range(50)]


def test_wiped_disk_is_empty() -> None:
    disk = fresh()
    disk.write_atomic(PATH, b"x")
    disk.wipe()
    assert not disk.exists(ROOT)
    assert disk.used_bytes() == 0
