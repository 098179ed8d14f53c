"""The real disk: whole writes, errors with a reason, names that stay."""

import errno
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from timer.files import disk
from timer.files.disk import Bytes, FreshDisk, RealDisk, create_dir, create_file
from timer.model.timer_errors import CorruptFileError, DiskFailedError, WrongDirectoryError

DISK = RealDisk()


def test_append_writes_buffers_of_all_kinds_and_reopens_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = DISK.open_append(path)
    file.write([b"one", bytearray(b"two"), memoryview(b"three")])
    file.sync()
    file.close()
    again = DISK.open_append(path)
    assert again.size == 11
    again.write([b"!"])
    assert DISK.read(path) == b"onetwothree!"
    again.close()


def test_append_of_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    buffers = [b"%06d" % number for number in range(2_500)]
    file = DISK.open_append(tmp_path / "a")
    file.write(buffers)
    file.close()
    assert DISK.read(tmp_path / "a") == b"".join(buffers)


def test_read_of_what_the_disk_can_not_give_back_is_damage_that_others_can_heal() -> None:
    memory = Path("/proc/self/mem")  # nothing is at 0: EIO
    with pytest.raises(CorruptFileError, match="read failed: EIO") as found:
        DISK.read(memory, 0, 10)
    assert str(memory) in str(found.value)


def test_fresh_read_drops_every_page_that_it_touches(tmp_path: Path) -> None:
    path, page = tmp_path / "a", mmap.PAGESIZE
    path.write_bytes(bytes(3 * page))
    dropped = list[tuple[int, int]]()
    with mock.patch("os.posix_fadvise", lambda _, start, size, how: dropped.append((start, size))):
        FreshDisk().read(path, page + 1, 10)
        FreshDisk().read(path, page - 1, 2)
        FreshDisk().read(path, page, page)
        FreshDisk().read(path)
    assert dropped[::2] == dropped[1::2] == [(page, page), (0, 2 * page), (page, page), (0, 0)]


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7])
def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    def short(fd: int, buffers: list[Bytes]) -> int:
        return os.write(fd, b"".join(buffers)[:step])

    monkeypatch.setattr(os, "writev", short)
    file = DISK.open_append(tmp_path / "a")
    file.write([b"abc", b"", b"defg", b"h"])
    file.close()
    assert file.size == 8
    assert DISK.read(tmp_path / "a") == b"abcdefgh"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    ("call", "action"), [("writev", "write"), ("fdatasync", "fdatasync"), ("ftruncate", "truncate")]
)
def test_after_a_failure_the_file_refuses_all_else_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, action: str, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "planted")

    file = DISK.open_append(tmp_path / "a")
    actions: dict[str, Callable[[], None]] = {
        "writev": lambda: file.write([b"x"]),
        "fdatasync": file.sync,
        "ftruncate": lambda: file.truncate(0),
    }
    with monkeypatch.context() as planted:
        planted.setattr(os, call, fail)
        with pytest.raises(DiskFailedError) as failed:
            actions[call]()
    assert failed.value.errno == number
    assert f"{action} failed: {errno.errorcode[number]}" in str(failed.value)
    for refused in actions.values():
        with pytest.raises(DiskFailedError, match="refused") as second:
            refused()
        assert second.value.errno == number
    file.close()
    assert DISK.read(tmp_path / "a") == b""


@pytest.mark.parametrize("part_size", [3, 1 << 20])
def test_read_of_a_range_ends_where_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_size: int
) -> None:
    monkeypatch.setattr("timer.files.disk._PART_SIZE", part_size)
    (tmp_path / "a").write_bytes(b"0123456789")
    assert DISK.read(tmp_path / "a", 1, 1 << 62) == b"123456789", "no memory is taken for the rest"
    assert DISK.read(tmp_path / "a", 3, 4) == b"3456"
    assert DISK.read(tmp_path / "a", 8, 4) == b"89"
    assert DISK.read(tmp_path / "a", 12, 4) == b""
    assert DISK.read(tmp_path / "a", 4) == b"456789"
    for each in (DISK, FreshDisk()):
        parts = each.read_parts(tmp_path / "a", [(3, 4), (8, 4), (12, 4), (0, 10)])
        assert parts == [b"3456", b"89", b"", b"0123456789"]
    assert DISK.size(tmp_path / "a") == 10


def test_absent_files_are_file_not_found(tmp_path: Path) -> None:
    for call in (DISK.read, DISK.size, DISK.remove, DISK.list_dir):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "absent")
    assert not DISK.exists(tmp_path / "absent")


def test_what_the_system_refuses_is_disk_failed(tmp_path: Path) -> None:
    with pytest.raises(DiskFailedError, match="EISDIR") as failed:
        DISK.open_append(tmp_path)
    assert failed.value.errno == errno.EISDIR


def test_truncate_then_append(tmp_path: Path) -> None:
    file = DISK.open_append(tmp_path / "a")
    file.write([b"0123456789"])
    file.truncate(4)
    file.write([b"x"])
    file.sync()
    file.close()
    file.close()
    assert DISK.read(tmp_path / "a") == b"0123x"


def test_write_atomic_replaces_and_leaves_no_other_name(tmp_path: Path) -> None:
    DISK.write_atomic(tmp_path / "a", b"old and long")
    DISK.write_atomic(tmp_path / "a", b"new")
    assert DISK.read(tmp_path / "a") == b"new"
    assert DISK.list_dir(tmp_path) == ["a"]


def test_write_atomic_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "planted")

    DISK.write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFailedError):
        DISK.write_atomic(tmp_path / "a", b"new")
    assert DISK.read(tmp_path / "a") == b"old"


def test_link_is_a_second_name_of_one_file(tmp_path: Path) -> None:
    DISK.write_atomic(tmp_path / "a", b"old")
    DISK.link(tmp_path / "a", tmp_path / "b")
    DISK.write_atomic(tmp_path / "a", b"new")
    assert DISK.read(tmp_path / "b") == b"old"
    with pytest.raises(DiskFailedError, match="EEXIST"):
        DISK.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        DISK.link(tmp_path / "absent", tmp_path / "c")


def test_mark_overwrites_in_place(tmp_path: Path) -> None:
    mark = DISK.open_mark(tmp_path / "mark")
    mark.put(b"11111111")
    mark.put(b"22222222")
    mark.sync()
    mark.close()
    assert DISK.read(tmp_path / "mark") == b"22222222"


def test_make_dir_makes_parents_and_may_be_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        DISK.make_dir(tmp_path / "a" / "b")
    assert DISK.list_dir(tmp_path / "a") == ["b"]
    assert DISK.free_bytes(tmp_path / "a") > 0


def test_make_dir_needs_no_right_to_read_a_directory_above_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    real, code = os.open, errno.EACCES

    def refused(path: Path | str, flags: int, *words: int, **options: int) -> int:
        if tmp_path == path and not flags & os.O_PATH:
            raise OSError(code, "planted")
        return real(path, flags, *words, **options)

    monkeypatch.setattr(os, "open", refused)
    for _ in range(2):
        DISK.make_dir(tmp_path / "own" / "data")
    assert DISK.exists(tmp_path / "own" / "data")
    with pytest.raises(DiskFailedError, match="EACCES"):
        DISK.make_dir(tmp_path / "new")
    code = errno.EIO
    with pytest.raises(DiskFailedError, match="EIO"):
        DISK.make_dir(tmp_path / "own")


def make_one_of_each(directory: Path) -> None:
    DISK.make_dir(directory / "dir")
    DISK.write_atomic(directory / "atomic", b"new")
    DISK.open_append(directory / "appended").close()
    DISK.open_mark(directory / "mark").close()
    DISK.lock(directory / "LOCK").release()


def test_all_that_root_makes_is_for_the_owner_of_the_directory_and_not_for_others(
    tmp_path: Path, given: dict[str, tuple[int, int]]
) -> None:
    (tmp_path / "atomic.tmp").write_bytes(b"of root, which was killed")
    mask = os.umask(0)
    make_one_of_each(tmp_path)
    os.umask(mask)
    made = {path.name: path for path in tmp_path.iterdir()}
    names = made.keys() - {"atomic"} | {"atomic.tmp"}  # renamed afterwards
    assert given == dict.fromkeys(names, (4242, 4243))
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in made.items()}
    assert modes == dict.fromkeys(made, 0o640) | {"dir": 0o750}
    given.clear()
    make_one_of_each(tmp_path)
    assert given.keys() == {"atomic.tmp"}, "the others were the owner's"


def test_file_or_directory_that_was_there_is_not_given_away(
    tmp_path: Path, given: dict[str, tuple[int, int]]
) -> None:
    names = ("appended", "mark", "LOCK")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "dir").mkdir()
    create_dir(tmp_path / "dir")
    make_one_of_each(tmp_path)
    assert given.keys() == {"atomic.tmp"}
    with pytest.raises(DiskFailedError, match="EEXIST"):
        DISK.make_dir(tmp_path / "mark")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
@pytest.mark.usefixtures("given")
def test_root_makes_files_where_their_owner_can_not_be_changed_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr(os, "chown", mock.Mock(side_effect=OSError(number, "planted")))
    make_one_of_each(tmp_path)
    assert len(DISK.list_dir(tmp_path)) == 5
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: all that root creates there stays root's (")
    assert f"({os.strerror(number)}: CAP_CHOWN is missing" in message
    assert message.endswith("Run on it: chown 4242:4243")


@pytest.mark.parametrize(("user", "owner"), [(0, 0), (1000, 4242)])
def test_owner_stays_in_a_directory_of_root_and_if_another_user_makes_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, tuple[int, int]],
    user: int,
    owner: int,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(disk, "owner_of", lambda _: (owner, owner))
    make_one_of_each(tmp_path)
    assert not given


@pytest.mark.parametrize(
    ("mode", "has_identity", "owner"),
    [(0o2770, True, 4242), (0o2770, False, 0), (0o1777, True, 0)],
)
def test_files_in_a_directory_of_root_are_for_the_owner_of_the_identity_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, has_identity: bool, owner: int
) -> None:
    real = os.fstat, os.stat

    def owned(found: os.stat_result, user: int) -> os.stat_result:
        return os.stat_result((*found[:4], user, 4243, *found[6:]))

    tmp_path.chmod(mode)
    if has_identity:
        (tmp_path / "identity.json").symlink_to("absent")  # the owner of the link itself counts
    monkeypatch.setattr(os, "fstat", lambda fd: owned(real[0](fd), 0))
    monkeypatch.setattr(os, "stat", lambda name, **way: owned(real[1](name, **way), 4242))
    with disk._opened_parent(tmp_path / "a") as (_, found):
        assert found == (owner, 4243)


def _link(name: Path, victim: Path) -> None:
    name.symlink_to(victim)


def _rename(name: Path, victim: Path) -> None:
    victim.rename(name)


@pytest.mark.parametrize("take", [_link, _rename])
def test_directory_that_takes_the_name_of_one_just_made_is_not_given_away(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, tuple[int, int]],
    take: Callable[[Path, Path], None],
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").touch()
    monkeypatch.setattr(os, "mkdir", lambda name, *_, **__: take(tmp_path / name, victim))
    with nullcontext() if take is _rename else pytest.raises(DiskFailedError, match="ENOTDIR"):
        DISK.make_dir(tmp_path / "dir")
    assert not given


def test_all_is_made_in_the_directory_whose_owner_gets_it_if_that_is_moved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, moved, victim = (tmp_path / name for name in ("place", "moved", "victim"))

    def moves(directory: int) -> tuple[int, int]:
        Path(os.readlink(f"/proc/self/fd/{directory}")).rename(moved)
        place.symlink_to(victim)
        return 4242, 4243

    victim.mkdir()
    monkeypatch.setattr(disk, "owner_of", moves)
    monkeypatch.setattr(os, "chown", mock.Mock())
    place.mkdir()
    os.close(create_file(place / "file", os.O_WRONLY))
    place.unlink()
    moved.rename(place)
    create_dir(place / "dir")
    assert {*os.listdir(moved)} == {"file", "dir"}
    assert not os.listdir(victim)


def test_names_are_made_in_a_directory_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Path | str, flags: int, *words: int, **options: Any) -> int:
        if tmp_path == path and not flags & os.O_PATH:
            raise PermissionError(errno.EACCES, "planted")
        return real(path, flags, *words, **options)

    monkeypatch.setattr(os, "open", refused)
    create_dir(tmp_path / "dir")
    os.close(create_file(tmp_path / "file", os.O_WRONLY))
    with pytest.raises(DiskFailedError, match="if root made it or its directory, chown that"):
        DISK.sync_dir(tmp_path)


@pytest.mark.usefixtures("given")
def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    make_one_of_each(tmp_path)
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "mark", os.O_WRONLY)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_file_behind_a_link_at_a_temporary_name_stays_as_it_is(
    tmp_path: Path, given: dict[str, tuple[int, int]], link: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "victim").write_bytes(b"of root")
    link(tmp_path / "victim", tmp_path / "a.tmp")
    DISK.write_atomic(tmp_path / "a", b"new")
    assert (DISK.read(tmp_path / "victim"), DISK.read(tmp_path / "a")) == (b"of root", b"new")
    assert given.keys() == {"a.tmp"}


def test_file_behind_a_symbolic_link_is_not_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"of root")
    (tmp_path / "LOCK").symlink_to(tmp_path / "victim")
    for opened in (DISK.lock, DISK.open_append, DISK.open_mark):
        with pytest.raises(DiskFailedError, match="ELOOP"):
            opened(tmp_path / "LOCK")
    for name in ("LOCK", "victim"):
        with pytest.raises(FileExistsError) as failed:
            create_file(tmp_path / name, os.O_WRONLY)
        assert failed.value.filename == str(tmp_path / name)
    assert DISK.read(tmp_path / "victim") == b"of root"


def test_file_of_a_lock_with_a_second_name_is_not_written_and_a_fifo_has_no_wait(
    tmp_path: Path,
) -> None:
    (tmp_path / "victim").write_bytes(b"of root")
    os.link(tmp_path / "victim", tmp_path / "LOCK")
    lock = DISK.lock(tmp_path / "LOCK")
    with pytest.raises(WrongDirectoryError, match="in use by process"):
        DISK.lock(tmp_path / "LOCK")
    lock.release()
    assert DISK.read(tmp_path / "victim") == b"of root"
    os.mkfifo(tmp_path / "fifo")
    for opened in (DISK.open_append, DISK.open_mark):
        with pytest.raises(DiskFailedError, match="ENXIO"):
            opened(tmp_path / "fifo")


def test_file_that_another_process_makes_meanwhile_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def late(path: Path | str, *words: int, **options: int) -> int:
        try:
            return real(path, *words, **options)
        except FileNotFoundError:
            (tmp_path / path).write_bytes(b"of another")
            raise

    monkeypatch.setattr(os, "open", late)
    file = DISK.open_append(tmp_path / "a")
    monkeypatch.undo()
    assert file.size == len(b"of another")
    file.close()


def test_lock_is_exclusive_names_its_holder_and_ends_with_release(tmp_path: Path) -> None:
    lock = DISK.lock(tmp_path / "LOCK")
    with pytest.raises(WrongDirectoryError, match=f"in use by process {os.getpid()}$"):
        DISK.lock(tmp_path / "LOCK")
    lock.release()
    lock.release()
    DISK.lock(tmp_path / "LOCK").release()


def test_real_disk_syncs_in_the_order_that_makes_its_promises_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(os, name)

        def call(target: Any, *rest: Any) -> Any:
            path = Path(
                os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            )
            calls.append(f"{name} {path.relative_to(tmp_path.parent)}")
            return real(target, *rest)

        return call

    for name in ("write", "writev", "pwrite", "fsync", "fdatasync", "replace", "posix_fadvise"):
        monkeypatch.setattr(os, name, recorded(name))
    root = tmp_path.name

    def done(step: Callable[[], object]) -> list[str]:
        calls.clear()
        step()
        return [call.replace("writev", "write") for call in calls]

    assert done(lambda: DISK.write_atomic(tmp_path / "m", b"new")) == [
        f"write {root}/m.tmp",
        f"fsync {root}/m.tmp",
        f"replace {root}/m.tmp",
        f"fsync {root}",
    ]
    assert done(lambda: DISK.sync_dir(tmp_path)) == [f"fsync {root}"]
    assert done(lambda: DISK.make_dir(tmp_path / "d")) == ["fsync .", f"fsync {root}"]
    # Unsynced writes of an earlier process are synced or dropped before they are read.
    truth = [f"fdatasync {root}/m", f"posix_fadvise {root}/m"]
    assert done(lambda: DISK.open_append(tmp_path / "m").close()) == truth
    assert done(lambda: DISK.open_mark(tmp_path / "m").close()) == truth
    file = DISK.open_append(tmp_path / "new")
    assert done(lambda: file.write([b"a"])) == [f"write {root}/new"]
    assert done(file.sync) == [f"fdatasync {root}/new"]
    file.close()
