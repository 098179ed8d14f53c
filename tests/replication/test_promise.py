"""The promise file never forgets and never falls."""

import random
from pathlib import Path

import pytest

from chaos.sim.world.simdisk import SimDisk
from replication.core.promise import NEVER_GIVEN, NO_PROMISE, SIZE, Promise, PromiseFile
from tests.replication.promises import matched
from timer.files.disk import RealDisk
from timer.model.timer_errors import (
    CorruptFileError,
    DiskFailedError,
    PromiseLostError,
    UnknownVersionError,
)
from timer.model.units import Epoch, Nonce, ReplicaId

PATH = Path("/data/promise")
BIG = (1 << 63) - 1


def promise(epoch: int, leader: int = 7, nonce: int = 9) -> Promise:
    return Promise(Epoch(epoch), ReplicaId(leader), Nonce(nonce))


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk()
    disk.make_dir(PATH.parent)
    return disk


def test_absent_file_is_a_promise_that_was_lost(disk: SimDisk) -> None:
    with pytest.raises(PromiseLostError, match="/data/promise is missing") as lost:
        PromiseFile.load(disk, PATH)
    assert "init" not in str(lost.value), "the node waits: one command replaces it"


def test_formatted_replica_never_promised_and_is_unsure(disk: SimDisk) -> None:
    disk.write_atomic(PATH, NEVER_GIVEN)
    file = PromiseFile.load(disk, PATH)
    assert file.promise == NO_PROMISE
    assert file.unsure


def test_what_was_given_is_loaded(tmp_path: Path) -> None:
    disk = RealDisk()
    file = matched(disk, tmp_path / "promise")
    file.give(promise(3, BIG, BIG))
    file.set_unsure(unsure=True)
    again = PromiseFile.load(disk, tmp_path / "promise")
    assert again.promise == file.promise == promise(3, BIG, BIG)
    assert again.unsure
    again.set_unsure(unsure=False)
    assert not PromiseFile.load(disk, tmp_path / "promise").unsure


def test_given_promise_survives_any_crash(disk: SimDisk) -> None:
    rng = random.Random(1)
    for epoch in range(1, 200):
        file = matched(disk, PATH)
        file.give(promise(epoch))
        file.set_unsure(unsure=epoch % 2 == 0)
        disk.crash(rng)
        again = PromiseFile.load(disk, PATH)
        assert again.promise == promise(epoch)
        assert again.unsure == (epoch % 2 == 0)


def test_repeated_promise_writes_nothing(disk: SimDisk) -> None:
    file = matched(disk, PATH)
    file.give(promise(3))
    disk.fail_sync(random.Random(1))
    file.give(promise(3))
    file.set_unsure(unsure=False)
    with pytest.raises(DiskFailedError):
        file.give(promise(4))  # the first sync since


@pytest.mark.parametrize(
    "lower", [promise(2), promise(3, leader=8), promise(3, nonce=8), NO_PROMISE]
)
def test_promise_never_falls_nor_changes_within_an_epoch(disk: SimDisk, lower: Promise) -> None:
    file = matched(disk, PATH)
    file.give(promise(3))
    with pytest.raises(AssertionError):
        file.give(lower)
    assert PromiseFile.load(disk, PATH).promise == promise(3)


def test_promise_that_could_not_be_stored_is_not_shown(disk: SimDisk) -> None:
    file = matched(disk, PATH)
    file.give(promise(3))
    disk.fail_sync(random.Random(1))
    with pytest.raises(DiskFailedError):
        file.give(promise(4))
    assert file.promise == promise(3)
    assert PromiseFile.load(disk, PATH).promise == promise(3)


def test_promise_older_than_the_log_was_lost(disk: SimDisk) -> None:
    matched(disk, PATH)
    with pytest.raises(CorruptFileError, match="epoch 0, the log of epoch 1"):
        PromiseFile.load(disk, PATH, last_epoch=Epoch(1))
    matched(disk, PATH).give(promise(3))
    assert PromiseFile.load(disk, PATH, last_epoch=Epoch(3)).promise == promise(3)
    with pytest.raises(CorruptFileError):
        PromiseFile.load(disk, PATH, last_epoch=Epoch(4))


def test_every_damaged_byte_and_every_truncation_is_corrupt(disk: SimDisk) -> None:
    matched(disk, PATH).give(promise(3))
    good = disk.read(PATH)
    assert len(good) == SIZE
    for position in range(SIZE):
        bad = bytearray(good)
        bad[position] ^= 0x10
        for data in (bad, good[:position]):
            disk.write_atomic(PATH, data)
            with pytest.raises(CorruptFileError):
                PromiseFile.load(disk, PATH)


def test_another_version_is_unknown(disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    file = matched(disk, PATH)
    with monkeypatch.context() as later:
        later.setattr("replication.core.promise.VERSION", 2)
        file.give(promise(3))
    with pytest.raises(UnknownVersionError):
        PromiseFile.load(disk, PATH)
