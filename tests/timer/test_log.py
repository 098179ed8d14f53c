"""The log on disk: synced entries are never lost, and a torn end differs from damage."""

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.log_files import (
    ENDS,
    FIRST,
    LOG,
    TAIL,
    TINY,
    TORN,
    frame,
    frames,
    image,
    open_log,
    written,
)
from timer.files import segment
from timer.files.disk import AppendFile, Disk, RealDisk
from timer.files.log import MARK_NAME, SEGMENT_SIZE, Log
from timer.model.timer_errors import CorruptFileError, DiskFailedError, UnknownVersionError
from timer.model.units import Epoch, LogIndex

MARK = LOG / MARK_NAME


def read_all(log: Log, max_bytes: int = 1_000) -> list[bytes]:
    out: list[bytes] = []
    at = log.first_index
    while found := log.read(at, max_bytes):
        out += map(bytes, found)
        at = LogIndex(at + len(found))
    assert at == log.last_index + 1
    return out


def disk_of(files: dict[Path, bytes]) -> SimDisk:
    """Return a disk with these files; its machine went down since they were written."""
    disk = SimDisk()
    disk.make_dir(LOG)
    for path, data in files.items():
        disk.write_atomic(path, data)
    disk.crash(random.Random(1))
    return disk


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return RealDisk() if request.param == "real" else SimDisk()


# ---- append, read, restart


def test_new_log_is_empty(disk: Disk, tmp_path: Path) -> None:
    for _ in range(2):
        log = open_log(disk, tmp_path / "log")
        assert (log.first_index, log.last_index, log.durable_index) == (1, 0, 0)
        assert log.end == (0, 0)
        assert log.epoch_at(LogIndex(0)) == 0
        assert log.epoch_at(LogIndex(1)) is None
        assert log.read(LogIndex(1), 1_000) == []
        assert log.read(LogIndex(0), 1_000) == []
        assert not log.tail_was_cut
        log.close()


def test_segments_roll_and_everything_is_there_after_restart(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(disk, path)
    expected: list[bytes] = []
    for batch in range(10):
        new = frames(5 * batch + 1, 5 * batch + 5, epoch=1 + batch // 4, size=batch * 20)
        log.append(new)
        expected += new
    assert log.durable_index >= 45 - 5  # sealing syncs
    log.close()
    names = [name for name in disk.list_dir(path) if name != MARK_NAME]
    assert len(names) > 10
    assert all(disk.size(path / name) <= TINY for name in names)
    again = open_log(disk, path)
    assert read_all(again) == expected
    assert again.end == (3, 50)
    assert again.durable_index == 50
    assert [again.epoch_at(LogIndex(i)) for i in (0, 1, 20, 21, 40, 41, 50, 51)] == [
        *(0, 1, 1, 2, 2, 3, 3),
        None,
    ]
    assert not again.tail_was_cut
    again.append(frames(51, 52, epoch=3))
    assert read_all(again) == expected + frames(51, 52, epoch=3)
    again.close()


def test_frame_larger_than_a_segment_has_one_of_its_own(disk: Disk, tmp_path: Path) -> None:
    log = open_log(disk, tmp_path / "log")
    expected = [frame(1), frame(2, size=5_000), frame(3)]
    log.append(expected)
    assert read_all(log, max_bytes=1) == expected
    log.close()
    assert len(disk.list_dir(tmp_path / "log")) == 1 + 3
    again = open_log(disk, tmp_path / "log")
    assert read_all(again) == expected
    again.close()


@pytest.mark.parametrize("max_bytes", [0, 1, 91, 92, 182, 183, 300, 10_000])
def test_read_from_every_index_gives_as_much_as_fits(max_bytes: int) -> None:
    log = open_log(SimDisk(), segment_size=10_000)
    log.append(frames(1, 9))
    size = len(frame(1))
    assert size == 91
    for first in range(1, 10):
        found = [bytes(each) for each in log.read(LogIndex(first), max_bytes)]
        count = min(10 - first, max(1, max_bytes // size))
        assert found == frames(first, first + count - 1)


def test_read_far_into_a_segment_does_not_start_at_its_start() -> None:
    disk = CountingDisk()
    log = open_log(disk, segment_size=SEGMENT_SIZE)
    log.append(frames(1, 200, size=20_000))
    for at in (1, 57, 200):
        disk.read_bytes = 0
        found = log.read(LogIndex(at), 30_000)
        assert bytes(found[0]) == frame(at, size=20_000)
        assert disk.read_bytes <= 30_000 + segment.STEP_SIZE + 20_100


class CountingDisk(SimDisk):
    """A disk that counts the bytes of reads."""

    read_bytes = 0

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        data = super().read(path, start, size)
        self.read_bytes += len(data)
        return data


@pytest.mark.parametrize(
    "bad", [frame(4), frame(2), frame(3, epoch=1), frame(3, epoch=2)[:-1], frame(3, epoch=2) + b"x"]
)
def test_append_of_a_wrong_frame_is_our_bug_and_writes_nothing(bad: bytes) -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append([frame(1), frame(2, epoch=2)])
    before = image(disk)
    with pytest.raises(AssertionError):
        log.append([bad])
    assert image(disk) == before
    log.append([frame(3, epoch=2)])


# ---- damage


def recover(files: dict[Path, bytes], floor: int | None = None) -> Log:
    return open_log(disk_of(files), floor=floor, segment_size=10_000)


@pytest.mark.parametrize("floor", [0, 3, 5])
def test_cut_at_every_byte(floor: int) -> None:
    whole = TORN[FIRST] + b"".join(TAIL)
    for size in range(len(whole) + 1):
        files = {**TORN, FIRST: whole[:size]}
        kept = sum(end <= size for end in ENDS) - 1
        if kept < max(3, floor):
            with pytest.raises(CorruptFileError):
                recover(files, floor)
            continue
        log = recover(files, floor)
        assert log.end == (1, kept)
        assert log.durable_index == kept
        assert log.tail_was_cut == (size not in ENDS)
        assert read_all(log) == frames(1, kept)


@pytest.mark.parametrize("floor", [0, 3, 5])
@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_flip_of_every_byte(floor: int, mask: int) -> None:
    whole = TORN[FIRST] + b"".join(TAIL)
    for position in range(len(whole)):
        bad = bytearray(whole)
        bad[position] ^= mask
        files = {**TORN, FIRST: bytes(bad)}
        intact = sum(end <= position for end in ENDS) - 1
        if intact < max(3, floor):
            with pytest.raises(CorruptFileError):
                recover(files, floor)
            continue
        log = recover(files, floor)
        assert log.tail_was_cut
        assert read_all(log) == frames(1, intact)
        log.append(frames(intact + 1, intact + 2, epoch=2))
        assert log.end == (2, intact + 2)


def test_cut_and_flip_of_every_byte_on_a_real_disk(tmp_path: Path) -> None:
    disk = RealDisk()
    path = tmp_path / "log"
    disk.make_dir(path)
    whole = TORN[FIRST] + b"".join(TAIL)
    for position in range(ENDS[3], len(whole), 3):
        bad = bytearray(whole)
        bad[position] ^= 0x10
        for data in (whole[:position], bytes(bad)):
            (path / FIRST.name).write_bytes(data)
            (path / MARK_NAME).write_bytes(TORN[MARK])
            log = open_log(disk, path, segment_size=10_000)
            kept = sum(end <= position for end in ENDS) - 1
            assert read_all(log) == frames(1, kept)
            log.close()
            assert disk.size(path / FIRST.name) == ENDS[kept]


def test_clean_end_below_the_durable_index_or_the_floor_is_corrupt() -> None:
    with pytest.raises(CorruptFileError, match="the log ends here; entry 3 was durable"):
        recover({**TORN, FIRST: TORN[FIRST][: ENDS[2]]})
    with pytest.raises(CorruptFileError, match="entry 4 was durable"):
        recover(TORN, floor=4)
    with pytest.raises(CorruptFileError, match="the log has no segments; entry 3 was durable"):
        recover({MARK: TORN[MARK]})


def test_cut_is_remembered_until_it_is_noted() -> None:
    disk = disk_of({**TORN, FIRST: TORN[FIRST] + TAIL[0][:-1]})
    rng = random.Random(1)
    for _ in range(3):
        log = open_log(disk)
        assert log.tail_was_cut
        log.append([frame(log.last_index + 1)])
        log.sync()
        disk.crash(rng)
    log = open_log(disk)
    log.clear_tail_was_cut()
    assert not log.tail_was_cut
    disk.crash(rng)
    assert not open_log(disk).tail_was_cut


def test_cut_is_remembered_though_the_power_fails_while_it_is_made() -> None:
    outcomes = set[bool]()
    for seed in range(200):
        disk = CutDisk()
        disk.make_dir(LOG)
        for path, data in {**TORN, FIRST: TORN[FIRST] + TAIL[0][:-1]}.items():
            disk.write_atomic(path, data)
        disk.crash(random.Random(seed))
        disk.changes_left = seed % 12
        with contextlib.suppress(PowerCut):
            open_log(disk)
        disk.changes_left = None
        disk.crash(random.Random(seed))
        outcomes.add(disk.size(FIRST) == ENDS[3])
        assert open_log(disk).tail_was_cut
    assert outcomes == {True, False}


def test_damaged_or_absent_mark_counts_as_a_cut() -> None:
    for position in range(len(TORN[MARK])):
        bad = bytearray(TORN[MARK])
        bad[position] ^= 4
        log = recover({**TORN, MARK: bytes(bad)})
        assert log.tail_was_cut
        assert read_all(log) == frames(1, 3)
    assert recover({FIRST: TORN[FIRST]}).tail_was_cut


SEALED = written(frames(1, 3), frames(4, 7, epoch=2), frames(8, 12, epoch=2), frames(13, 14, 3))
SEGMENTS = sorted(path for path in SEALED if path != MARK)


def test_flip_of_every_byte_in_sealed_segments_is_corrupt() -> None:
    assert [segment.first_of(path.name) for path in SEGMENTS] == [1, 4, 7, 10, 13]
    for path in SEGMENTS[:-1]:
        for position in range(len(SEALED[path])):
            bad = bytearray(SEALED[path])
            bad[position] ^= 2
            # Without the mark, because a sealed segment was durable in any case.
            files = {each: data for each, data in SEALED.items() if each != MARK}
            with pytest.raises(CorruptFileError):
                recover({**files, path: bytes(bad)})


def test_cut_of_every_size_in_sealed_segments_is_corrupt() -> None:
    for path in SEGMENTS[:-1]:
        for size in range(len(SEALED[path])):
            with pytest.raises(CorruptFileError):
                recover({**SEALED, path: SEALED[path][:size]})


@pytest.mark.parametrize("missing", SEGMENTS[1:-1])
def test_missing_segment_in_the_middle_is_corrupt(missing: Path) -> None:
    files = {path: data for path, data in SEALED.items() if path != missing}
    for floor in (0, 14):
        with pytest.raises(CorruptFileError, match="before it is missing"):
            recover(files, floor)


@pytest.mark.parametrize("floor", [None, 3, 4, 14])
def test_missing_first_segment_was_dropped(floor: int | None) -> None:
    log = recover({path: data for path, data in SEALED.items() if path != SEGMENTS[0]}, floor)
    assert (log.first_index, log.last_index) == (4, 14)
    assert [log.epoch_at(LogIndex(i)) for i in (2, 3, 4, 14)] == [None, 1, 2, 3]


@pytest.mark.parametrize("floor", [0, 2])
def test_missing_first_segment_that_restart_needs_is_corrupt(floor: int) -> None:
    files = {path: data for path, data in SEALED.items() if path != SEGMENTS[0]}
    with pytest.raises(CorruptFileError, match=f"entry {floor + 1} is missing"):
        recover(files, floor)


def test_segment_under_another_name_is_corrupt() -> None:
    files = {**SEALED, segment.path_of(LOG, LogIndex(15)): SEALED[SEGMENTS[1]]}
    with pytest.raises(CorruptFileError, match=r"the header is that of the segment 0+\w+\.log"):
        recover(files)


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ([frame(5)], "entry 5 follows entry 3"),
        ([frame(3)], "entry 3 follows entry 3"),
        ([frame(4, epoch=2), frame(5, epoch=1)], "epoch 1 follows the higher epoch 2"),
    ],
)
def test_whole_frame_out_of_order_is_corrupt_even_in_the_tail(tail: list[bytes], why: str) -> None:
    with pytest.raises(CorruptFileError, match=why):
        recover({**TORN, FIRST: TORN[FIRST] + b"".join(tail)})


def test_other_versions_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (
        "timer.files.segment.VERSION",
        "timer.entries.entry_frame.VERSION",
        "timer.files.log.MARK_VERSION",
    ):
        with monkeypatch.context() as later:
            later.setattr(where, 9)
            files = written(frames(1, 3))
        with pytest.raises(UnknownVersionError, match="version 9; this program knows"):
            recover(files)


def test_segment_that_a_crash_left_unborn_is_removed() -> None:
    unborn = segment.path_of(LOG, LogIndex(15))
    header = segment.Header(LogIndex(15), Epoch(3), LogIndex(13)).encode()
    for size in range(len(header) + 1):
        for data in (header[:size], bytes(size)):
            disk = disk_of({**SEALED, unborn: data})
            log = open_log(disk)
            assert log.end == (3, 14)
            assert disk.exists(unborn) == (data == header)
            assert not log.tail_was_cut
            log.append([frame(15, epoch=3), frame(16, epoch=4)])
            log.close()
            assert len(read_all(open_log(disk))) == 16


def test_damaged_header_of_the_last_segment_with_frames_is_corrupt() -> None:
    bad = b"x" + SEALED[SEGMENTS[-1]][1:]
    with pytest.raises(CorruptFileError, match="mismatch of the segment header"):
        recover({path: data for path, data in SEALED.items() if path != MARK} | {SEGMENTS[-1]: bad})


def test_segments_below_the_floor_are_checked_when_they_are_read() -> None:
    files = written(frames(1, 3), frames(4, 30))
    path = sorted(files)[3]
    first = segment.first_of(path.name)
    assert first is not None
    bad = bytearray(files[path])
    bad[-1] ^= 1
    with pytest.raises(CorruptFileError):
        recover({**files, path: bytes(bad)})
    log = recover({**files, path: bytes(bad)}, floor=30)
    assert log.epoch_at(first) == 1
    assert [bytes(each) for each in log.read(LogIndex(first - 1), 1)] == [frame(first - 1)]
    with pytest.raises(CorruptFileError, match="checksum"):
        log.read(first, 1)
    intact = CountingDisk()
    intact.make_dir(LOG)
    for each, data in files.items():
        intact.write_atomic(each, data)
    again = open_log(intact, floor=30)
    assert intact.read_bytes < sum(map(len, files.values())) / 2
    assert read_all(again) == frames(1, 30)


def test_damage_met_by_read_is_corrupt() -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append(frames(1, 3))
    disk.flip(FIRST, ENDS[1] + 60)
    assert bytes(log.read(LogIndex(1), 1)[0]) == frame(1)
    with pytest.raises(CorruptFileError, match="checksum"):
        log.read(LogIndex(2), 1)
    log.append(frames(4, 30))
    disk.remove(segment.path_of(LOG, LogIndex(7)))
    with pytest.raises(CorruptFileError, match="the segment is missing"):
        log.read(LogIndex(7), 1)


def test_failed_sync_poisons_and_the_next_process_sees_what_is_on_the_disk() -> None:
    kept = set[int]()
    for seed in range(60):
        disk = SimDisk()
        log = open_log(disk)
        log.append(frames(1, 2))
        log.sync()
        log.append([frame(3)])
        disk.fail_sync(random.Random(seed))
        for _ in range(2):
            with pytest.raises(DiskFailedError, match="EIO"):
                log.sync()
        with pytest.raises(DiskFailedError, match="refused"):
            log.append([frame(4)])
        with pytest.raises(DiskFailedError, match="refused"):
            log.truncate_after(LogIndex(1))
        assert log.durable_index == 2
        with pytest.raises(DiskFailedError):
            log.close()
        disk.die()
        again = open_log(disk)
        kept.add(again.last_index)
        assert read_all(again) == frames(1, again.last_index)
    assert kept == {2, 3}


def test_full_disk_fails_and_nothing_durable_is_lost() -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append(frames(1, 9))
    log.sync()
    disk.capacity_bytes = disk.used_bytes() + 100
    with pytest.raises(DiskFailedError, match="ENOSPC"):
        log.append(frames(10, 19))
    with pytest.raises(DiskFailedError, match="refused"):
        log.append(frames(log.last_index + 1, 19))
    assert log.durable_index >= 9
    disk.crash(random.Random(1))
    disk.capacity_bytes = None
    again = open_log(disk)
    assert read_all(again)[:9] == frames(1, 9)


# ---- truncate, drop


@pytest.mark.parametrize("after", range(15))
def test_truncate_after_every_index(disk: Disk, tmp_path: Path, after: int) -> None:
    path = tmp_path / "log"
    log = open_log(disk, path)
    old = frames(1, 5) + frames(6, 14, epoch=2)
    log.append(old)
    log.truncate_after(LogIndex(after))
    assert log.end == (0 if after == 0 else 1 if after < 6 else 2, after)
    assert log.durable_index == after or after == 14
    assert read_all(log) == old[:after]
    assert log.epoch_at(LogIndex(after + 1)) is None
    new = old[:after] + frames(after + 1, after + 6, epoch=3)
    log.append(new[after:])
    assert read_all(log) == new
    assert [log.epoch_at(LogIndex(i)) for i in range(1, after + 7)] == [
        segment.peek(each)[0] for each in new
    ]
    log.close()
    again = open_log(disk, path)
    assert read_all(again) == new
    assert not again.tail_was_cut
    again.close()


def test_truncate_below_the_committed_floor_is_our_bug() -> None:
    log = open_log(SimDisk())
    log.append(frames(1, 9))
    log.raise_committed_floor(LogIndex(5))
    log.raise_committed_floor(LogIndex(3))
    with pytest.raises(AssertionError):
        log.truncate_after(LogIndex(4))
    assert log.last_index == 9
    log.truncate_after(LogIndex(5))
    assert log.last_index == 5


@pytest.mark.parametrize("before", range(1, 18))
def test_drop_before_removes_whole_segments_below(disk: Disk, tmp_path: Path, before: int) -> None:
    path = tmp_path / "log"
    log = open_log(disk, path)
    everything = frames(1, 5) + frames(6, 9, epoch=2) + frames(10, 14, epoch=4)
    log.append(everything)
    log.drop_before(LogIndex(before))
    first = log.first_index
    assert first == min(13, (before - 1) // 3 * 3 + 1)  # three to a segment; never the active one
    for _ in range(2):
        assert read_all(log) == everything[first - 1 :]
        assert log.read(LogIndex(first - 1), 100) == []
        for index in range(first - 1, 15):
            expected = segment.peek(everything[index - 1])[0] if index else 0
            assert log.epoch_at(LogIndex(index)) == expected
        assert log.epoch_at(LogIndex(first - 2)) is None
        log.close()
        log = open_log(disk, path)
    with pytest.raises(AssertionError):
        log.truncate_after(LogIndex(first - 2))
    log.truncate_after(LogIndex(first - 1))
    assert log.end == (segment.peek(everything[first - 2])[0] if first > 1 else 0, first - 1)
    log.close()


# ---- threads


class HookDisk(SimDisk):
    """A disk that lets the writer act once inside a read, before the bytes are copied."""

    hook: Callable[[], None] | None = None

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        hook, self.hook = self.hook, None
        if hook:
            hook()
        return super().read(path, start, size)


def test_read_from_which_the_writer_takes_the_bytes_starts_again() -> None:
    for first in range(1, 15):
        for after in range(15):
            disk = HookDisk()
            log = open_log(disk)
            log.append(frames(1, 14))

            def rewrite(log: Log = log, after: int = after) -> None:
                log.truncate_after(LogIndex(after))
                log.append(frames(after + 1, after + 2, epoch=2))

            disk.hook = rewrite
            found = [bytes(each) for each in log.read(LogIndex(first), 1_000)]
            now = frames(1, after) + frames(after + 1, after + 2, epoch=2)
            if first > after + 2:
                assert found == []
            else:
                assert found
                assert found == now[first - 1 :][: len(found)]


def test_read_of_what_the_writer_drops_meanwhile_is_empty() -> None:
    disk = HookDisk()
    log = open_log(disk)
    log.append(frames(1, 14))
    disk.hook = lambda: log.drop_before(LogIndex(14))
    assert log.read(LogIndex(2), 1_000) == []


def test_read_stops_at_what_is_not_yet_published() -> None:
    disk = HookDisk()
    log = open_log(disk, segment_size=10_000)
    log.append(frames(1, 3))

    def write() -> None:
        file = disk.open_append(FIRST)
        file.write([frame(4), frame(5)[:50]])

    disk.hook = write
    assert [bytes(each) for each in log.read(LogIndex(1), 1_000)] == frames(1, 3)


def test_readers_in_other_threads_see_a_whole_log_while_it_changes(tmp_path: Path) -> None:
    """Entry i of epoch e has one content, so a reader can check every entry."""
    log = open_log(RealDisk(), tmp_path / "log", segment_size=20_000)
    log.append(frames(1, 50))
    stop, failures, reads = threading.Event(), list[BaseException](), [0, 0]

    def reader(number: int) -> None:
        rng = random.Random(number)
        try:
            while not stop.is_set():
                first = LogIndex(rng.randint(log.first_index, max(1, log.last_index)))
                for index, found in enumerate(log.read(first, 5_000), first):
                    epoch, at = segment.peek(found)
                    assert at == index
                    assert bytes(found) == frame(index, epoch)
                    reads[number] += 1
                last_epoch, last = log.end
                assert (log.epoch_at(last) or 0) <= max(last_epoch, log.last_epoch)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    threads = [threading.Thread(target=reader, args=[number]) for number in range(2)]
    for each in threads:
        each.start()
    rng = random.Random(7)
    epoch = 1
    while min(reads) < 3_000 and not failures:
        last = log.last_index
        log.append(frames(last + 1, last + rng.randint(1, 60), epoch))
        if rng.random() < 0.5:
            epoch += 1
            log.truncate_after(LogIndex(max(log.first_index, log.last_index - rng.randint(0, 300))))
        if rng.random() < 0.1:
            log.drop_before(LogIndex(log.last_index - 100))
    stop.set()
    for each in threads:
        each.join()
    log.close()
    assert failures == []


# ---- random model


class PowerCut(BaseException):
    """Raised inside a disk operation of the log."""


class CutDisk(SimDisk):
    """A disk that cuts the power at its n-th change from now."""

    changes_left: int | None = None

    def _count(self) -> None:
        if self.changes_left is not None:
            self.changes_left -= 1
            if self.changes_left < 0:
                raise PowerCut

    def _change(self, *args: Any) -> None:
        self._count()
        super()._change(*args)

    def _write(self, *args: Any) -> None:
        self._count()
        super()._write(*args)

    def _sync(self, *args: Any) -> None:
        self._count()
        super()._sync(*args)

    def sync_dir(self, path: Path) -> None:
        self._count()
        super().sync_dir(path)

    def open_append(self, path: Path) -> AppendFile:
        self._count()
        return super().open_append(path)


@dataclass
class Model:
    """The entries that must be in the log (`durable`), and those that may be (`written`)."""

    written: list[bytes] = field(default_factory=list[bytes])
    """Frames of all indexes from 1 on, dropped ones included."""
    durable: int = 0
    floor: int = 0
    first_min: int = 1
    first_max: int = 1
    epoch: int = 1

    def check(self, log: Log) -> None:
        assert self.first_min <= log.first_index <= self.first_max
        assert self.durable <= log.last_index <= len(self.written)
        assert read_all(log) == self.written[log.first_index - 1 : log.last_index]
        for index in range(log.first_index - 1, log.last_index + 1):
            expected = segment.peek(self.written[index - 1])[0] if index else 0
            assert log.epoch_at(LogIndex(index)) == expected

    def adopt(self, log: Log) -> None:
        """Set the model to the log that a restart found."""
        del self.written[log.last_index :]
        self.durable = len(self.written)
        self.first_min = self.first_max = log.first_index


def act(rng: random.Random, log: Log, model: Model, disk: CutDisk) -> None:
    """Do one random step on log and model. The model allows a power cut at any moment of it."""
    last = log.last_index
    match rng.choice(["append", "append", "append", "sync", "sync", "truncate", "drop", "floor"]):
        case "append":
            model.epoch += rng.random() < 0.2
            batch = [
                frame(last + 1 + n, model.epoch, rng.choice([0, 1, 50, 300, 600, 1_500]))
                for n in range(rng.randint(0, 5))
            ]
            model.written += batch
            log.append(batch)
        case "sync":
            log.sync()
            model.durable = len(model.written)
        case "truncate":
            index = rng.randint(max(model.floor, log.first_index - 1), last)
            model.durable = min(model.durable, index)
            model.epoch += 1
            log.truncate_after(LogIndex(index))
            if index < last:
                del model.written[index:]
                model.durable = index
        case "drop":
            index = rng.randint(1, log.durable_index + 1)
            model.floor = max(model.floor, index - 1)  # a manifest covers the dropped entries
            log.raise_committed_floor(LogIndex(model.floor))
            model.first_max = max(model.first_max, min(index, last + 1))
            log.drop_before(LogIndex(index))
            model.first_min = model.first_max = log.first_index
        case _:
            model.floor = rng.randint(model.floor, max(model.floor, log.durable_index))
            log.raise_committed_floor(LogIndex(model.floor))


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_random_life_with_crashes_keeps_what_was_synced(first: int) -> None:
    for seed in range(first, first + 15):
        live(seed)


def live(seed: int) -> None:
    rng = random.Random(seed)
    disk, model = CutDisk(), Model()
    segment_size = rng.choice([300, 1_000, 4_000])
    ends: list[Callable[[], None]] = [disk.die, lambda: disk.crash(rng), lambda: disk.crash(rng)]
    for _ in range(12):
        disk.changes_left = rng.choice([None, rng.randint(0, 15), rng.randint(0, 200)])
        try:
            log = open_log(disk, floor=model.floor, segment_size=segment_size)
            model.check(log)
            model.adopt(log)
            if rng.random() < 0.2:
                disk.fail_sync(rng, after=rng.randint(0, 10))
            for _ in range(rng.randint(1, 25)):
                act(rng, log, model, disk)
                model.check(log)
            if rng.random() < 0.3:
                log.close()
                model.durable = len(model.written)
        except (PowerCut, DiskFailedError):
            pass
        disk.changes_left = None
        rng.choice(ends)()
    log = open_log(disk, floor=model.floor, segment_size=segment_size)
    model.check(log)
