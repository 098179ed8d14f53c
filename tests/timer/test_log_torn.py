"""A log that was torn while its machine ran on: nothing that was answered for can be missing."""

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.test_log import ENDS, FIRST, LOG, TAIL, TORN, open_log
from timer.files.disk import RealDisk

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
