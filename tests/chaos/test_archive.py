"""The archive holds all that a log ever held and did not take back."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from chaos.history import archive
from chaos.history.archive import Archive, follow, run_archive
from chaos.history.history import OWNER, RunFolder
from tests.chaos.world import Log, write_log
from timer.files.data_directory import IDENTITY_NAME
from timer.model.units import LogIndex
from timerspark.log.segment_files import Piece, Segment, entries_of, lives, segments

STOPPED = SimpleNamespace(
    SIGINT=2,
    SIGTERM=15,
    SIG_BLOCK=0,
    pthread_sigmask=lambda *_: None,
    sigtimedwait=lambda *_: object(),
)
"""A signal comes at once."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "data/log"


def put(log: Path, first: int, text: str = "") -> Path:
    log.mkdir(parents=True, exist_ok=True)
    path = log / f"{first:016x}.log"
    path.write_text(text or f"from {first}")
    return path


def texts(kept: Path, life: int = 0) -> list[str]:
    return [path.read_text() for path in sorted(lives(kept)[life].iterdir())]


def test_dropped_beginning_stays(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = put(log, 1)
    put(log, 10)
    (log / "mark").write_text("no segment")
    follow(log, kept)
    first.unlink()
    put(log, 20)
    follow(log, kept)
    assert texts(kept) == ["from 1", "from 10", "from 20"]


def test_what_is_appended_and_cut_is_the_same_file(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    path = put(log, 1)
    follow(log, kept)
    path.write_text("from 1, longer")
    assert texts(kept) == ["from 1, longer"]


def test_truncated_segment_goes_and_the_new_one_of_its_name_comes(
    log: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    put(log, 1)
    put(log, 10)
    put(log, 20).unlink()
    put(log, 30)
    follow(log, kept)
    (log / f"{10:016x}.log").unlink()
    (log / f"{30:016x}.log").unlink()
    put(log, 10, "of another leader")
    follow(log, kept)
    assert texts(kept) == ["from 1", "of another leader"]


def test_segment_that_is_damaged_while_it_grows_is_kept_as_it_was(
    log: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    put(log, 1)
    archive = Archive({"n1": (log, kept)})
    with archive.sealed("n1"):
        put(log, 1, "damaged")
        archive.update()
        assert [texts(kept, life) for life in range(2)] == [["from 1"], []]
        put(log, 1).rename(log / f"{9:016x}.log")
    archive.close()
    assert [texts(kept, life) for life in range(2)] == [["from 1"], ["from 1"]]


def test_log_that_is_gone_for_a_moment_takes_nothing_with_it(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    put(log, 1).rename(tmp_path / "moved")
    (tmp_path / "moved").rename(log / f"{1:016x}.log")
    archive = Archive({"n1": (log, kept)})
    archive.update()
    for path in log.iterdir():
        path.unlink()
    archive.update()
    log.rmdir()
    archive.update()
    archive.close()
    assert texts(kept) == ["from 1"]


def test_sealed_archive_keeps_what_was_there_before_the_damage(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    put(log, 1)
    path = put(log, 10)
    archive = Archive({"n1": (log, kept)})
    archive.seal("n1")
    with path.open("r+") as file:
        file.write("FLIP")
    put(log, 20)
    archive.close()
    assert texts(kept) == ["from 1", "from 10"]
    assert texts(kept, 1) == ["from 1", "FLIP 10", "from 20"]


def test_log_that_begins_anew_has_another_life(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    old = [put(log, 1), put(log, 10), put(log, 20)]
    follow(log, kept)
    for path in old:
        path.unlink()
    follow(log, kept)  # there is nothing just now
    put(log, 15, "after a snapshot")
    follow(log, kept)
    put(log, 30)
    follow(log, kept)
    shutil.rmtree(log)
    log.mkdir()
    put(log, 15, "of another disk")
    follow(log, kept)
    assert texts(kept) == ["from 1", "from 10", "from 20"]
    assert texts(kept, 1) == ["after a snapshot", "from 30"]
    assert texts(kept, 2) == ["of another disk"]
    assert lives(kept) == [kept / "000", kept / "001", kept / "002"]


def test_audit_reads_the_archive_where_there_is_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "cluster.json").write_text(
        '{"nodes": [{"name": "n1", "data": "nodes/n1/data"}, {"name": "n2", "data": "n2"}]}'
    )
    for life, firsts in (("000", (1, 10)), ("001", (15,))):
        (run.archive_of("n1") / life).mkdir(parents=True)
        for first in firsts:
            put(run.archive_of("n1") / life, first)
    put(tmp_path / "n2/log", 1)
    found = {n: [[each.first for each in life] for life in all_] for n, all_ in run.logs().items()}
    assert found == {"n1": [[1, 10], [15]], "n2": [[1]]}
    assert run.nodes() == {"n1": tmp_path / "nodes/n1/kept", "n2": tmp_path / "n2/log"}


def test_archive_that_ended_before_its_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"nodes": [{"name": "n1", "data": "n1"}]}')
    run = RunFolder(tmp_path)
    put(tmp_path / "n1/log", 1)
    follow(tmp_path / "n1/log", run.archive_of("n1"))
    put(tmp_path / "n1/log", 10)
    with pytest.raises(ValueError, match=r"lacks 0+a\.log .* ended before its node"):
        run.logs()
    follow(tmp_path / "n1/log", run.archive_of("n1"))
    (tmp_path / f"n1/log/{1:016x}.log").unlink()
    (life,) = run.logs()["n1"]
    assert [part.first for part in life] == [1, 10]


def test_archive_that_has_linked_nothing_is_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    put(tmp_path / "n1/log", 1)
    with archive._locked(tmp_path / "n1/log", run.archive_of("n1")):
        assert run.nodes() == {"n1": tmp_path / "n1/log"}
        ((part,),) = run.logs()["n1"]
    assert part.first == 1


def test_other_folders_of_an_archive_are_no_lives(tmp_path: Path) -> None:
    for name in ("lost+found", "001", "000", "000.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "002").write_text("a file")
    assert lives(tmp_path) == [tmp_path / "000", tmp_path / "001"]


def test_command_keeps_a_nodes_log_until_it_is_stopped(tmp_path: Path) -> None:
    data, kept = tmp_path / "machine/n1", tmp_path / "run/n1/log"
    log = Log()
    for number in range(1, 9):
        log.epoch(number)
    write_log(data / "log", log.frames[:4], frames_per_segment=2)
    with subprocess.Popen(
        [sys.executable, "-c", "from timerclient.cli.timerctl import main; exit(main())",
         "archive", "--data", data, "--into", kept], stdout=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        assert "is kept in" in command.stdout.readline()
        assert command.stdout.readline() == "n1: 000 begins at entry 1\n"
        (data / f"log/{1:016x}.log").unlink()
        write_log(data / "log", log.frames, first=5, frames_per_segment=2)
        command.terminate()
        assert (command.stdout.read(), command.wait()) == ("", 0)
    (life,) = RunFolder(tmp_path / "run").logs()["n1"]
    read = entries_of(Piece(life, LogIndex(1), LogIndex(100)))
    assert [item.epoch for item in read] == [*range(1, 9)]


def test_command_says_where_an_archive_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.history.archive.signal", STOPPED)
    put(tmp_path / "nodes/n1/data/log", 7)
    put(tmp_path / "nodes/n2/data/log", 1)
    nodes = ",".join(f'{{"name": "{n}", "data": "nodes/{n}/data"}}' for n in ("n1", "n2"))
    (tmp_path / "cluster.json").write_text(f'{{"nodes": [{nodes}]}}')
    assert run_archive(tmp_path, None, None) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("n1: 000 begins at entry 7; earlier entries are not archived")
    assert second == "n2: 000 begins at entry 1"
    assert texts(RunFolder(tmp_path).archive_of("n1")) == ["from 7"]


def test_command_says_what_it_can_not_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.history.archive.signal", STOPPED)
    (tmp_path / "n1").mkdir()
    assert run_archive(None, tmp_path / "n1", tmp_path / "kept") == 2
    put(tmp_path / "n1/log", 1)

    def forbidden(*_: object) -> None:
        raise PermissionError("nobody may link it")

    monkeypatch.setattr(Path, "hardlink_to", forbidden)
    assert run_archive(None, tmp_path / "n1", tmp_path / "kept") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in first
    assert second == "n1: nobody may link it; trying again"


def test_archive_that_can_not_be_read_does_not_end_those_of_other_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.history.archive.signal", STOPPED)
    nodes = ",".join(f'{{"name": "{n}", "data": "nodes/{n}/data"}}' for n in ("n1", "n2"))
    (tmp_path / "cluster.json").write_text(f'{{"nodes": [{nodes}]}}')
    for name in ("n1", "n2"):
        put(tmp_path / f"nodes/{name}/data/log", 1)
    told = segments

    def unreadable(life: Path) -> list[Segment]:
        if "n1" in life.parts:
            raise PermissionError("nobody may read it")
        return told(life)

    monkeypatch.setattr("chaos.history.archive.segments", unreadable)
    assert run_archive(tmp_path, None, None) == 2
    out, err = capsys.readouterr()
    assert err == "n1: nobody may read it; trying again\n"
    assert out.endswith("n2: 000 begins at entry 1\n")


@pytest.mark.parametrize(
    ("folder", "data", "into", "told"),
    [
        ("run", "data", "kept", "not be given with --data and --into"),
        (None, "data", None, "--data, --into: must both be given"),
        (None, None, None, "--data, --into: must both be given"),
        (None, "gone", "kept", "no such folder"),
        (None, "data", "data/log/kept", "must be outside of a node's folder"),
        (None, "data", "other", "must be outside of a node's folder"),
        (None, "data", "other/log/kept", "must be outside of a node's folder"),
        (None, "data", "segments", "must not have segments of a log"),
        (None, "data", "/dev/kept/n1", "must be on the disk of"),
        ("run", None, None, "neither cluster.json nor <node>/log"),
    ],
)
def test_archive_that_can_not_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    folder: str | None, data: str | None, into: str | None, told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "chaos.history.archive.signal", STOPPED
    )  # who is not refused ends all the same
    if into and into.startswith("/dev") and Path("/dev").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no other disk here")
    (tmp_path / "data/log").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / IDENTITY_NAME).touch()
    put(tmp_path / "segments", 1)
    paths = [None if each is None else tmp_path / each for each in (folder, data, into)]
    assert run_archive(*paths) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
    assert not Path("/dev/kept").exists()


def test_archive_is_of_one_log_and_made_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos.history.archive.signal", STOPPED)
    for node in ("n1", "n2"):
        put(tmp_path / node / "log", 1)
    kept = tmp_path / "kept"
    for _ in range(2):  # it may be started again
        assert run_archive(None, tmp_path / "n1", kept) == 0
    assert run_archive(None, tmp_path / "n2", kept) == 2
    with archive._locked(tmp_path / "n1/log", kept):
        assert run_archive(None, tmp_path / "n1", kept) == 2
    another, busy = capsys.readouterr().err.splitlines()
    assert "is the archive of" in another
    assert f"{kept} is in use by process" in busy
    with mock.patch("timer.files.disk._write_all", side_effect=OSError(errno.ENOSPC, "full")):
        assert run_archive(None, tmp_path / "n1", tmp_path / "cut") == 2
    assert "SOURCE: write failed: ENOSPC" in capsys.readouterr().err
    assert run_archive(None, tmp_path / "n1", tmp_path / "cut") == 0
    (tmp_path / OWNER).touch()
    assert run_archive(tmp_path, None, None) == 2
    assert "keeps an archive itself" in capsys.readouterr().err
    assert texts(kept) == ["from 1"]
