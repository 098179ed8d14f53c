"""A log that was torn while its machine ran on, or that lost a file under a running process."""

from pathlib import Path

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.log_files import ENDS, FIRST, LOG, TAIL, TORN, frame, frames, open_log
from timer.files import segment
from timer.files.disk import Disk, RealDisk
from timer.model.timer_errors import CorruptFileError
from timer.model.units import LogIndex

WHOLE = TORN[FIRST] + b"".join(TAIL)


def torn(size: int) -> SimDisk:
    """Return a disk whose log was cut to so many bytes, in the run of the machine that wrote it."""
    disk = SimDisk()
    disk.make_dir(LOG)
    for path, data in {**TORN, FIRST: WHOLE[:size]}.items():
        disk.write_atomic(path, data)
    return disk


def test_tail_torn_by_the_death_of_a_process_is_cut_without_a_doubt() -> None:
    for size in range(ENDS[3], ENDS[6] + 1):
        log = open_log(torn(size))
        assert not log.tail_was_cut
        kept = sum(end <= size for end in ENDS) - 1
        assert (log.last_index, log.torn_bytes) == (kept, size - ENDS[kept])


@pytest.mark.parametrize("boot", [bytes(16), b"another machine."])
def test_tail_torn_in_another_run_of_the_machine_or_an_unknown_one_is_in_doubt(
    boot: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = torn(ENDS[6] - 1)
    monkeypatch.setattr(disk, "boot_id", lambda: boot)
    assert open_log(disk).tail_was_cut


def test_real_machine_names_its_run() -> None:
    assert RealDisk().boot_id() == RealDisk().boot_id() != bytes(16)


@pytest.mark.parametrize("disk", [RealDisk(), SimDisk()], ids=["real", "simulated"])
def test_segment_that_is_gone_already_is_dropped(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(disk, path)
    log.append(frames(1, 14))
    disk.remove(segment.path_of(path, LogIndex(4)))
    log.drop_before(LogIndex(10))
    log.append([frame(15)])
    log.sync()
    assert (log.first_index, log.durable_index) == (10, 15)


@pytest.mark.parametrize("left", [None, 0, 60])
def test_active_segment_that_another_program_removes_or_cuts_is_found(
    tmp_path: Path, left: int | None
) -> None:
    log = open_log(RealDisk(), tmp_path)
    for index in range(1, 12):
        log.append([frame(index)])
        log.check_active()
    *sealed, path = segment.paths(RealDisk(), tmp_path)
    sealed[-1].unlink()  # the scrub finds it: it waits until the others can go on without the node
    log.check_active()
    whole = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(whole[:left])
    with pytest.raises(CorruptFileError, match=f"{path}.* missing or cut"):
        log.check_active()
    log.close()


@pytest.mark.parametrize("kept", [range(1, 8), range(1, 11), range(8, 12)])
def test_active_segment_that_the_writer_shortens_meanwhile_is_no_damage(
    kept: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append(frames(1, 11))

    def size(path: Path) -> int:
        monkeypatch.undo()
        log.drop_before(LogIndex(kept[0]))
        log.truncate_after(LogIndex(kept[-1]))
        return disk.size(path)

    monkeypatch.setattr(disk, "size", size)
    log.check_active()
    assert log.last_index == kept[-1]
    log.append(frames(kept[-1] + 1, 30))
    log.check_active()


def test_active_segment_that_grows_meanwhile_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    log = open_log(disk)
    log.append(frames(1, 2))

    def size(path: Path) -> int:
        monkeypatch.undo()
        found = disk.size(path)
        log.append([frame(3)])
        return found

    monkeypatch.setattr(disk, "size", size)
    log.check_active()
    assert log.last_index == 3
