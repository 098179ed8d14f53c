"""The scrub finds and names a flip of every byte of every file; replaced files are no damage."""

import errno
from collections.abc import Iterable
from pathlib import Path

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.machines import START_MS, STATE, catch_up, engine_on, flush, part_of
from tests.timer.node_files import LOG, SEGMENT, frame_of, stored
from timer.files import log as timer_log
from timer.files import segment
from timer.files.disk import disk_failed
from timer.model.timer_errors import CorruptFileError, DiskFailedError
from timer.model.units import LogIndex
from timer.recovery import manifest, scrub
from timer.recovery.scrub import FileCheck


def found(disk: SimDisk) -> list[FileCheck]:
    return [*scrub.scrub(disk, state=STATE, log=LOG)]


def damaged(checked: list[FileCheck]) -> list[FileCheck]:
    return [each for each in checked if each.damage is not None]


def test_everything_that_a_manifest_needs_and_every_sealed_segment_is_read() -> None:
    disk, _ = stored()
    said = manifest.read(disk, STATE)
    assert said is not None
    needed = {STATE / path for path, _, _ in manifest.files(said)} | {STATE / manifest.NAME}
    kinds = {path.suffix for path in needed}
    assert kinds == {"", ".arrow", ".keys", ".spill"}
    segments = [LOG / name for name in disk.list_dir(LOG) if name.endswith(".log")]
    assert len(segments) >= 3
    checked = found(disk)
    assert {each.path for each in checked} == needed | {*segments[:-1]}
    assert not damaged(checked)
    assert all(each.size == disk.size(each.path) for each in checked)
    verified = [*scrub.verify(disk, state=STATE, log=LOG)]
    assert {each.path for each in verified} == needed | {*segments} | {LOG / timer_log.MARK_NAME}
    assert not damaged(verified)


def test_flipped_bit_anywhere_is_found_by_file_and_place() -> None:
    disk, _ = stored()
    for path in [each.path for each in found(disk)]:
        size = disk.size(path)
        for at in range(0, size, max(1, size // 50)):
            if path.suffix == ".spill" and 12 <= at < 16:
                continue  # reserved, and of no meaning
            disk.flip(path, at)
            first = damaged(found(disk))
            assert first, (path, at)
            error = first[0].damage
            if isinstance(error, CorruptFileError):  # else it looks like another version's
                assert error.position <= max(at, 32), (path, at, error)  # its header covers it
                assert str(path) in str(error)
            disk.flip(path, at)
    assert not damaged(found(disk))


@pytest.mark.parametrize("suffix", [".arrow", ".keys", ".spill"])
def test_file_that_is_missing_or_cut_is_found(suffix: str) -> None:
    for cut in (0, 1):
        disk, _ = stored()
        path = next(each.path for each in found(disk) if each.path.suffix == suffix)
        if cut:
            file = disk.open_append(path)
            file.truncate(disk.size(path) - 1)
            file.close()
        else:
            disk.remove(path)
        assert path in [each.path for each in damaged(found(disk))]


class Refusing(SimDisk):
    """A disk that opens one file not."""

    refused: Path | None = None

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        self._check(path)
        return super().read(path, start, size)

    def read_parts(self, path: Path, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        self._check(path)
        return super().read_parts(path, parts)

    def list_dir(self, path: Path) -> list[str]:
        self._check(path)
        return super().list_dir(path)

    def _check(self, path: Path) -> None:
        if path == self.refused:
            raise disk_failed(path, "read", errno.EACCES)


def test_verify_reports_a_file_that_cannot_be_opened_and_reads_the_others() -> None:
    disk, _ = stored()
    disk.__class__ = Refusing
    assert isinstance(disk, Refusing)
    whole = {each.path for each in scrub.verify(disk, state=STATE, log=LOG)}
    for path in [*whole, LOG]:
        disk.refused = path
        checked = [*scrub.verify(disk, state=STATE, log=LOG)]
        assert [each.path for each in damaged(checked)] == [path]
        assert [str(each.damage) for each in damaged(checked)] == [
            str(disk_failed(path, "read", errno.EACCES))
        ]
        needs_manifest = {each for each in whole if each.parent.parent == STATE}
        unread = needs_manifest if path == STATE / manifest.NAME else set[Path]()
        unread = {each for each in whole if each.parent == LOG} if path == LOG else unread
        assert {each.path for each in checked} >= whole - unread
    disk.refused = next(each for each in whole if each.suffix == ".arrow")
    with pytest.raises(DiskFailedError):  # a running node ends
        found(disk)


def test_manifest_that_is_missing_is_found_where_the_log_does_not_hold_all() -> None:
    disk, _ = stored()
    disk.remove(STATE / manifest.NAME)
    assert not damaged(found(disk)), "the log holds all of it"
    kept = timer_log.Log.open(disk, LOG, segment_size=SEGMENT)
    kept.drop_before(kept.last_index)
    kept.close()
    for checked in (found(disk), [*scrub.verify(disk, state=STATE, log=LOG)]):
        (first,) = damaged(checked)
        assert first.path == STATE / manifest.NAME
        assert "missing" in str(first.damage)


def test_first_segment_that_is_missing_is_found_where_the_manifest_does_not_reach() -> None:
    disk, log = stored()
    flushed = len(log.entries)
    for _ in range(20):
        log.schedule(part_of([(1, START_MS + 10**8, b"after the manifest")]))

    def kept_from(index: int) -> int:
        kept = timer_log.Log.open(disk, LOG, segment_size=SEGMENT)
        more = range(kept.last_index, len(log.entries))
        kept.append([frame_of(log, at) for at in more])
        kept.drop_before(LogIndex(index))
        kept.close()
        return kept.first_index

    assert 1 < kept_from(flushed + 1) <= flushed + 1
    assert not damaged(found(disk))
    assert kept_from(len(log.entries)) > flushed + 1
    (missed,) = damaged(found(disk))
    assert "missing" in str(missed.damage)


def test_what_a_newer_manifest_replaced_meanwhile_is_no_damage() -> None:
    disk, log = stored()
    engine = engine_on(disk)
    passing = scrub.scrub(disk, state=STATE, log=LOG)
    first = next(passing)
    assert first.path == STATE / manifest.NAME
    merge = engine.machine.store.begin_merge()
    assert merge is None, "few runs: their time passes instead"
    log.fire(START_MS + 10**9)
    catch_up(engine, log)
    flush(engine)
    log.fire(START_MS + 10**9 + 1)
    catch_up(engine, log)
    flush(engine)
    said = manifest.read(disk, STATE)
    assert said is not None
    assert said["runs"] == []
    kept = timer_log.Log.open(disk, LOG, segment_size=SEGMENT)
    kept.drop_before(kept.last_index)
    kept.close()
    rest = [*passing]
    assert not damaged(rest)
    assert not [each for each in rest if each.path.suffix in (".arrow", ".keys")]


def test_damage_in_the_last_segment_counts_up_to_what_was_durable() -> None:
    disk, log = stored()
    last = LOG / [name for name in disk.list_dir(LOG) if name.endswith(".log")][-1]
    file = disk.open_append(last)
    file.write([frame_of(log, len(log.entries) - 1)[:20]])
    file.close()
    assert not damaged([*scrub.verify(disk, state=STATE, log=LOG)]), "a torn tail"
    disk.flip(last, 60)
    (found_,) = damaged([*scrub.verify(disk, state=STATE, log=LOG)])
    assert found_.path == last
    assert "was durable" in str(found_.damage)


@pytest.mark.parametrize("named_by", ["mark", "manifest"])
def test_log_that_ends_below_what_was_durable_or_applied_is_found(named_by: str) -> None:
    disk, log = stored()
    removed = {"mark": STATE / manifest.NAME, "manifest": LOG / timer_log.MARK_NAME}
    assert (said := manifest.read(disk, STATE)) is not None
    assert said["index"] == len(log.entries)
    disk.remove(removed[named_by])
    absent = [LOG / timer_log.MARK_NAME] if named_by == "manifest" else []
    assert [each.path for each in damaged([*scrub.verify(disk, state=STATE, log=LOG)])] == absent
    segments = [LOG / name for name in disk.list_dir(LOG) if name.endswith(".log")]
    while segments:
        disk.remove(segments.pop())
        missed = damaged([*scrub.verify(disk, state=STATE, log=LOG)])[-1]
        assert missed.path == (segments[-1] if segments else LOG)
        assert f"entry {len(log.entries)} was durable" in str(missed.damage)
        with pytest.raises(CorruptFileError):
            timer_log.Log.open(
                disk, LOG, segment_size=SEGMENT,
                committed_floor=LogIndex(len(log.entries) if named_by == "manifest" else 0),
            )  # fmt: skip


def test_log_that_was_never_written_is_no_damage() -> None:
    disk = SimDisk()
    disk.make_dir(STATE)
    disk.make_dir(LOG)
    assert [*scrub.verify(disk, state=STATE, log=LOG)] == []


@pytest.mark.parametrize("born", ["nothing", "half a header", "a damaged header"])
def test_last_segment_that_a_crash_left_unborn_is_no_damage(born: str) -> None:
    disk, log = stored()
    last = segment.path_of(LOG, LogIndex(len(log.entries) + 1))
    file = disk.open_append(last)
    header = bytes(segment.HEADER_SIZE)
    file.write([{"nothing": b"", "half a header": header[:10]}.get(born, header)])
    file.close()
    assert not damaged([*scrub.verify(disk, state=STATE, log=LOG)])
    timer_log.Log.open(disk, LOG, committed_floor=LogIndex(len(log.entries))).close()
    assert not disk.exists(last), "a start removes it"


def test_pace_hears_of_what_is_read_and_may_end_it() -> None:
    disk, _ = stored()
    steps = list[int]()
    whole = sum(each.size for each in scrub.scrub(disk, state=STATE, log=LOG, pace=steps.append))
    assert sum(steps) >= whole / 2

    def enough(_: int) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        _ = [*scrub.scrub(disk, state=STATE, log=LOG, pace=enough)]
