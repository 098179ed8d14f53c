"""The exporter: every committed entry once, however often it is stopped."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chaos.history.archive import follow
from chaos.history.history import RunFolder
from chaos.live import export, exported_events
from chaos.live.export import Exporter
from chaos.live.exported_events import EventColumns, EventKind
from chaos.live.follow import LogGone
from tests.chaos import world
from timer.entries.entry_frame import EntryKind


def a_log(entries: int = 12) -> world.Log:
    log = world.Log()
    log.epoch(1)
    while len(log.frames) < entries:
        log.entry(EntryKind.CHECKPOINT, b"", at_ms=len(log.frames))
    return log


def exported(into: Path) -> pa.Table:
    """Return all events, in the order of the files."""
    files = sorted(into.glob("*.parquet"))
    return pa.concat_tables([pq.read_table(path, schema=exported_events.ARROW) for path in files])


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, Path]:
    """Three nodes with the same log."""
    logs = {name: tmp_path / name / "log" for name in ("n1", "n2", "n3")}
    for log in logs.values():
        world.write_log(log, a_log().frames, frames_per_segment=4)
    return logs


def test_entries_are_those_of_the_log(tmp_path: Path, logs: dict[str, Path]) -> None:
    into = tmp_path / "out"
    exporter = Exporter(logs, into)
    assert exporter.step()
    assert not exporter.step()
    assert exported(into)["frame"].to_pylist() == a_log().frames
    assert exported(into)["index"].to_pylist() == [*range(1, 13)]
    assert (into / export.ALIVE).exists()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_entry_is_exported_once_whenever_the_exporter_is_killed(
    tmp_path: Path, every: int
) -> None:
    frames = a_log().frames
    into, log = tmp_path / "out", tmp_path / "n1/log"
    world.write_log(log, frames[:1])
    exporter = Exporter({"n1": log}, into)
    for written, frame in enumerate(frames[1:]):
        exporter.step()
        with (log / f"{1:016x}.log").open("ab") as file:
            file.write(frame)
        if written % every == 0:  # killed: its memory is gone
            exporter = Exporter({"n1": log}, into)
    exporter.step()
    assert exported(into)["frame"].to_pylist() == frames


def test_node_that_differs_is_reported(tmp_path: Path, logs: dict[str, Path]) -> None:
    other = a_log(11)
    other.entry(EntryKind.CHECKPOINT, b"", at_ms=77)
    for path in logs["n3"].iterdir():
        path.unlink()
    world.write_log(logs["n3"], other.frames)
    exporter = Exporter(logs, tmp_path / "out")
    exporter.step()
    rows = exported(tmp_path / "out").to_pylist()
    assert [(r["node"], r["index"]) for r in rows if r["kind"] == EventKind.DIVERGED] == [
        ("n3", 12)
    ]


def test_log_without_its_beginning_needs_its_archive(tmp_path: Path, logs: dict[str, Path]) -> None:
    run = RunFolder(tmp_path)
    kept = {name: (log, run.archive_of(name)) for name, log in logs.items()}
    for log, archive in kept.values():
        follow(log, archive)
        (log / f"{1:016x}.log").unlink()
    with pytest.raises(LogGone, match="begins with entry 5, not 1"):
        Exporter(logs, tmp_path / "none").step()
    for name, found in (
        ("run", export.logs_of_run(run)),
        ("words", export.logs_of([f"{name}={archive}" for name, (_, archive) in kept.items()])),
    ):
        Exporter(found, tmp_path / name).step()
        assert exported(tmp_path / name)["index"].to_pylist() == [*range(1, 13)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["n1"], "must be NODE=DIR"), (["n1=a", "n1=b"], "another node"),
        (["n1=a", "n2=a"], "another directory"), (["n1=none"], "no such directory"),
    ],
)  # fmt: skip
def test_data_that_can_not_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises((ValueError, NotADirectoryError), match=error):
        export.logs_of(words)


def test_events_are_columns_of_one_schema() -> None:
    told = [
        EventColumns(EventKind.GIVEN, 2, {"seq": [1, 2], "topic": "t"}),
        EventColumns(EventKind.ENTRY, 1, {"index": [7], "frame": [b"x"]}),
    ]
    table = exported_events.table(told)
    assert table.schema == exported_events.ARROW
    assert table["seq"].to_pylist() == [1, 2, 0]
    assert table["topic"].to_pylist() == ["t", "t", ""]
    assert table["frame"].to_pylist() == [b"", b"", b"x"]
