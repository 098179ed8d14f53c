"""A data directory belongs to one node, and to one process at a time."""

import json
from pathlib import Path

import pytest

from chaos.sim.world.simdisk import SimDisk
from tests.timer.stores import CLUSTER, PROMISE, VOTERS, format_a
from timer.files.data_directory import (
    REPLICA_ID_MAX,
    DataDirectory,
    format_directory,
    founding_replica_id,
    open_directory,
    read_identity,
)
from timer.files.disk import Disk, RealDisk
from timer.model.feature_level import LEVEL_MAX, LEVEL_MIN
from timer.model.timer_errors import (
    CorruptFileError,
    UnknownVersionError,
    UnsupportedLevelError,
    WrongDirectoryError,
)
from timer.model.units import ReplicaId


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return RealDisk() if request.param == "real" else SimDisk()


@pytest.fixture
def path(tmp_path: Path, disk: Disk) -> Path:
    disk.make_dir(tmp_path)
    return tmp_path / "node-a"


def test_founding_ids_are_fixed_distinct_and_in_range() -> None:
    # On disk in every founder's log: this value can never change.
    assert founding_replica_id("c-1", "a") == 0x6FAD948AB05D1325
    ids = {founding_replica_id(c, n) for c in ("", "a", "ab") for n in ("", "b", "bc", "abc")}
    assert len(ids) == 12
    assert all(1 <= each <= REPLICA_ID_MAX for each in ids)


def test_formatted_directory_opens_with_its_identity_and_subdirectories(
    disk: Disk, path: Path
) -> None:
    made = format_a(disk, path)
    directory = open_directory(disk, path, cluster_id=CLUSTER, name="a")
    assert directory.identity == made == read_identity(disk, path)
    assert directory.identity.founding_voters == VOTERS
    assert directory.promise == path / "promise"
    directory.close()
    assert disk.list_dir(path) == ["LOCK", "identity.json", "log", "promise", "raft", "state"]
    open_directory(disk, path, cluster_id=CLUSTER, name="a").close()


def test_learner_brings_its_own_id(disk: Disk, path: Path) -> None:
    learner = format_directory(
        disk,
        path,
        cluster_id=CLUSTER,
        name="d",
        replica_id=ReplicaId(REPLICA_ID_MAX),
        founding_voters=VOTERS,
        promise=PROMISE,
    )
    assert read_identity(disk, path) == learner
    assert learner.replica_id == REPLICA_ID_MAX


def test_founder_with_another_id_is_our_bug(disk: Disk, path: Path) -> None:
    with pytest.raises(AssertionError):
        format_directory(
            disk,
            path,
            cluster_id=CLUSTER,
            name="a",
            replica_id=ReplicaId(7),
            founding_voters=VOTERS,
            promise=PROMISE,
        )


def test_absent_and_empty_say_init(disk: Disk, path: Path) -> None:
    for _ in range(2):
        with pytest.raises(WrongDirectoryError, match="`timerd init`"):
            open_directory(disk, path, cluster_id=CLUSTER, name="a")
        disk.make_dir(path)
    assert disk.list_dir(path) == []


def test_directory_that_is_not_ours_is_neither_opened_nor_formatted(disk: Disk, path: Path) -> None:
    disk.make_dir(path)
    disk.write_atomic(path / "thesis.tex", b"")
    with pytest.raises(WrongDirectoryError, match=r"no identity\.json"):
        open_directory(disk, path, cluster_id=CLUSTER, name="a")
    with pytest.raises(WrongDirectoryError, match=r"not empty \(thesis\.tex\)"):
        format_a(disk, path)
    assert disk.list_dir(path) == ["thesis.tex"]


def test_format_twice_is_refused(disk: Disk, path: Path) -> None:
    format_a(disk, path)
    with pytest.raises(WrongDirectoryError, match="not empty"):
        format_a(disk, path)


def test_format_after_one_that_was_cut_short_or_on_a_fresh_file_system(
    disk: Disk, path: Path
) -> None:
    disk.make_dir(path / "lost+found")
    disk.open_append(path / "identity.json.tmp").close()
    made = format_a(disk, path)
    assert read_identity(disk, path) == made


def test_other_cluster_and_other_name_are_refused_and_leave_no_lock(disk: Disk, path: Path) -> None:
    format_a(disk, path)
    with pytest.raises(WrongDirectoryError, match=r"cluster_id = c-2: .* belongs to cluster c-1"):
        open_directory(disk, path, cluster_id="c-2", name="a")
    with pytest.raises(WrongDirectoryError, match=r"name = b: .* belongs to node a"):
        open_directory(disk, path, cluster_id=CLUSTER, name="b")
    open_directory(disk, path, cluster_id=CLUSTER, name="a").close()


def test_directory_in_use_is_refused(disk: Disk, path: Path) -> None:
    format_a(disk, path)
    directory = open_directory(disk, path, cluster_id=CLUSTER, name="a")
    with pytest.raises(WrongDirectoryError, match="in use by process"):
        open_directory(disk, path, cluster_id=CLUSTER, name="a")
    directory.close()


def test_any_damaged_byte_of_the_identity_is_noticed(disk: Disk, path: Path) -> None:
    made = format_a(disk, path)
    good = disk.read(path / "identity.json")
    noticed = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        disk.write_atomic(path / "identity.json", bad)
        try:
            # White space may change without a change of the content.
            assert read_identity(disk, path) == made
            assert good[position : position + 1].isspace()
        except CorruptFileError:
            noticed += 1
    assert noticed > len(good) / 2


def test_every_truncation_of_the_identity_is_noticed(disk: Disk, path: Path) -> None:
    format_a(disk, path)
    good = disk.read(path / "identity.json").rstrip()
    for size in range(len(good)):
        disk.write_atomic(path / "identity.json", good[:size])
        with pytest.raises(CorruptFileError):
            read_identity(disk, path)


def test_identity_of_another_format_is_unknown_version(
    disk: Disk, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("timer.files.data_directory.FORMAT_OF_LEVEL_1", 3)
        format_a(disk, path)
    assert json.loads(disk.read(path / "identity.json"))["format"] == 3
    with pytest.raises(UnknownVersionError, match="version 3; this program knows 2"):
        open_directory(disk, path, cluster_id=CLUSTER, name="a")


def test_directory_of_a_newer_level_is_refused_before_any_change(disk: Disk, path: Path) -> None:
    identity = format_a(disk, path)
    written = json.loads(disk.read(path / "identity.json"))
    assert written["format"] == 1, "version 0.1.0 can still open it"
    assert "level" not in written
    directory = DataDirectory(disk, path, identity, disk.lock(path / "LOCK"))
    directory.raise_level(LEVEL_MAX + 1)
    directory.close()
    written = json.loads(disk.read(path / "identity.json"))
    assert (written["format"], written["level"]) == (2, LEVEL_MAX + 1)
    refusal = f"feature level {LEVEL_MAX + 1}; this program supports {LEVEL_MIN} to {LEVEL_MAX}:"
    with pytest.raises(UnsupportedLevelError, match=f"{refusal} start a newer release"):
        open_directory(disk, path, cluster_id=CLUSTER, name="a")
    assert not disk.exists(path / "log")


def test_level_of_a_directory_rises_and_never_falls(disk: Disk, path: Path) -> None:
    format_a(disk, path)
    directory = open_directory(disk, path, cluster_id=CLUSTER, name="a")
    for level, after in ((1, 1), (2, 2), (0, 2), (1, 2)):
        directory.raise_level(level)
        assert read_identity(disk, path).level == directory.identity.level == after
    directory.close()
    open_directory(disk, path, cluster_id=CLUSTER, name="a").close()


def test_format_that_was_cut_short_is_repeated_and_a_promise_is_never_replaced(
    disk: Disk, path: Path
) -> None:
    disk.make_dir(path)
    disk.write_atomic(path / "promise", b"given")
    with pytest.raises(WrongDirectoryError, match=r"not empty \(promise\)"):
        format_a(disk, path)
    disk.write_atomic(path / "promise", PROMISE)
    format_a(disk, path)
    open_directory(disk, path, cluster_id=CLUSTER, name="a").close()
