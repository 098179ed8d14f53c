"""Found: key files and spill files that are garbage, or hold something else than run and log."""

import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chaos.audit.rules.file_rules import in_queues
from chaos.history.history import RunFolder
from chaos.spark import state_files
from chaos.spark.state_files import check_keys
from chaos.spark.timerstate import ManifestState, node_states
from tests.chaos.audit_files import DISK, FAR_MS, judged, tell
from tests.timer.machines import START_MS, Log, catch_up, engine_on, flush, part_of
from timer.entries.payloads import Op
from timer.model.timer_errors import CorruptFileError
from timer.pending.runs import key_file
from timer.pending.runs.run import RunMeta
from timer.recovery import manifest

FIRED, PENDING, ACKED = 150, 200, 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One node, flushed with keyed timers pending and messages unacked; some are acked later."""
    run, log = RunFolder(tmp_path_factory.mktemp("queues")), Log()
    engine = engine_on(DISK, run.root / "n1" / "state")
    log.begin_epoch()
    log.topic("t")
    log.create_group(1, "g")
    dues = [START_MS + at for at in range(FIRED)] + [FAR_MS + at for at in range(PENDING)]
    keys = [b"key %d" % at for at in range(len(dues))]
    log.schedule(part_of([(1, due, b"%8d" % due) for due in dues], keys=keys))
    log.schedule(part_of([(1, FAR_MS + PENDING, b"no key")]))
    log.fire(START_MS + FIRED)
    log.op(Op.RESERVE, 1, 1, [ACKED])
    catch_up(engine, log)
    flush(engine)
    log.op(Op.ACK, 1, 1, range(ACKED))
    tell(run, log, ["n1"])
    return run


Keyed = tuple[Path, RunMeta, bytes]
"""Arguments of check_keys."""


def of_keys(run: RunFolder) -> Keyed:
    """Return the one run, its manifest's description, and the secret."""
    (state,) = node_states(run)
    (meta,) = state.runs
    return state.folder / meta.name, meta, state.secret


@pytest.fixture
def keyed(run: RunFolder, tmp_path: Path) -> tuple[Keyed, Path]:
    """A copy of the run, and its key file."""
    path, meta, secret = of_keys(run)
    for name in meta.names:
        shutil.copy(path.with_name(name), tmp_path)
    return (tmp_path / path.name, meta, secret), tmp_path / meta.keys_name


def told_anew(keyed: tuple[Keyed, Path], data: bytes) -> Keyed:
    """Write a key file whose manifest says so."""
    (run, meta, secret), path = keyed
    path.write_bytes(data)
    return run, replace(meta, keys_size=len(data), keys_crc32=zlib.crc32(data)), secret


def test_key_file_with_the_keys_of_its_run_is_sound(run: RunFolder) -> None:
    path, meta, secret = of_keys(run)
    assert meta.keys_size
    check_keys(path, meta, secret)


def test_each_flipped_byte_of_a_key_file_is_told(keyed: tuple[Keyed, Path]) -> None:
    run, path = keyed
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 97):
        data[at] ^= 1
        path.write_bytes(data)
        data[at] ^= 1
        with pytest.raises(CorruptFileError, match="the manifest says"):
            check_keys(*run)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        check_keys(*run)


@pytest.mark.parametrize("field", [*(key_file.ENTRY.names or ())])
def test_key_file_with_right_checksums_and_another_entry_is_told(
    keyed: tuple[Keyed, Path], field: str
) -> None:
    entries = _entries(keyed[1])
    entries[field][7] += 1
    told = told_anew(keyed, b"".join(key_file.encode(entries)))
    with pytest.raises(
        CorruptFileError, match=f"{PENDING} keys differ from the {PENDING} keys of its run"
    ):
        check_keys(*told)


def test_key_file_that_lacks_a_key_is_told_and_one_that_is_not_there(
    keyed: tuple[Keyed, Path],
) -> None:
    told = told_anew(keyed, b"".join(key_file.encode(_entries(keyed[1])[1:])))
    with pytest.raises(CorruptFileError, match=f"{PENDING - 1} keys differ from the {PENDING}"):
        check_keys(*told)
    run, meta, secret = told
    with pytest.raises(CorruptFileError, match="and there is no key file"):
        check_keys(run, replace(meta, keys_size=0), secret)


def test_key_file_whose_filter_denies_a_key_is_told(keyed: tuple[Keyed, Path]) -> None:
    data = bytearray(keyed[1].read_bytes())
    _, blocks, pages = struct.unpack_from("<QII", data, 16)
    data[32 : 32 + 64] = bytes(64)  # of the filter's first block
    crc32 = zlib.crc32(data[32 : 32 + 64 * blocks + 8 * pages], zlib.crc32(data[16:32]))
    struct.pack_into("<I", data, 12, crc32)
    told = told_anew(keyed, bytes(data))
    with pytest.raises(CorruptFileError, match=r"look-ups miss \d+ of 200 hashes"):
        check_keys(*told)


def _entries(path: Path) -> np.ndarray:
    found = key_file.KeyFile(DISK, path)
    pages = range(-(-found.entries // key_file.PAGE_ENTRIES))
    return np.frombuffer(bytearray(b"".join(found._read(pages))), key_file.ENTRY)


def garbage_keys(state: Path) -> None:
    (path,) = (state / manifest.RUN_DIRECTORY).glob("*.keys")
    path.write_bytes(b"garbage" * 100)


def garbage_queue(state: Path) -> None:
    (path,) = (state / manifest.SPILL_DIRECTORY).iterdir()
    path.write_bytes(path.read_bytes()[:16] + b"garbage" * 1_000)


def queue_removed(state: Path) -> None:
    (path,) = (state / manifest.SPILL_DIRECTORY).iterdir()
    path.unlink()


def queue_moved(state: Path) -> None:
    """Let the manifest name the block's rows one place further on."""
    said = manifest.read(DISK, state)
    assert said is not None
    ((topic,), (block,)) = said["topics"], said["topics"][0]["blocks"]
    moved = [*block[:3], block[3] + 1, block[4] + 1, *block[5:]]
    manifest.write(DISK, state, said | {"topics": [topic | {"blocks": [moved]}]})


def queue_forgotten(state: Path) -> None:
    """Let the manifest name no block at all."""
    said = manifest.read(DISK, state)
    assert said is not None
    (topic,) = said["topics"]
    manifest.write(DISK, state, said | {"topics": [topic | {"blocks": []}]})


def block_short(state: Path) -> None:
    """Let the manifest say that the block has a row more."""
    said = manifest.read(DISK, state)
    assert said is not None
    ((topic,), (block,)) = said["topics"], said["topics"][0]["blocks"]
    longer = [*block[:4], block[4] + 1, *block[5:]]
    manifest.write(DISK, state, said | {"topics": [topic | {"blocks": [longer]}]})


def keys_untold(state: Path) -> None:
    """Let the manifest name no key file."""
    said = manifest.read(DISK, state)
    assert said is not None
    (fields,) = said["runs"]
    meta = replace(RunMeta.unpack(fields), keys_size=0, keys_crc32=0)
    manifest.write(DISK, state, said | {"runs": [meta.pack()]})


LIES: dict[Callable[[Path], None], str] = {
    garbage_keys: "damaged_files",
    keys_untold: "damaged_files",
    garbage_queue: "damaged_files",
    queue_removed: "damaged_files",
    block_short: "damaged_files",
    queue_moved: "untrue_in_queues",
    queue_forgotten: "missing_in_queues",
}


@pytest.mark.long  # the files of a run are audited twice
@pytest.mark.spark
def test_each_lie_of_key_and_spill_files_has_its_name(
    spark: SparkSession, run: RunFolder, tmp_path: Path
) -> None:
    false = RunFolder(tmp_path / "run")
    shutil.copytree(run.root, false.root)
    assert not judged(spark, false)[1].violations
    for lie in LIES:
        shutil.copytree(run.root / "n1", false.root / lie.__name__)
        lie(false.root / lie.__name__ / "state")
    _, findings = judged(spark, false, most=FIRED + ACKED)
    assert findings.violations == {
        "damaged_files": 5, "untrue_in_queues": FIRED, "missing_in_queues": ACKED
    }  # fmt: skip
    named = {row["node"]: row["verdict"] for row in findings.offenders}
    assert named == {lie.__name__: name for lie, name in LIES.items()}


@pytest.mark.spark
def test_each_column_of_a_spilled_message_is_compared_with_the_log(spark: SparkSession) -> None:
    fates = spark.createDataFrame(
        [("fired", seq, "t", seq, 10, 20, 5) for seq in range(6)]
        + [("fired", 6, "t", 6, 10, 20, 9)],
        "end STRING, seq LONG, topic STRING, queue_offset LONG, due_ms LONG, ended_at_ms LONG,"
        " end_index LONG",
    )
    acks = spark.createDataFrame(
        [], "topic STRING, group STRING, queue_offset LONG, count LONG, ack_index LONG"
    )
    story = {"fates": fates, "carried": fates.limit(0), "acks": acks}
    rows = [
        ("n1", "t", 0, 0, 10, 20, None),
        ("n1", "u", 1, 1, 10, 20, None),
        ("n1", "t", 9, 2, 10, 20, None),
        ("n1", "t", 3, 3, 11, 20, None),
        ("n1", "t", 4, 4, 10, 21, None),
        ("n1", "t", 5, 77, 10, 20, None),  # no such timer
        ("n1", "t", 6, 6, 10, 20, None),  # it fired after the manifest
    ]
    held = spark.createDataFrame(rows, from_arrow_schema(state_files.QUEUED))
    untrue, missing = in_queues(story, held, [ManifestState("n1", 8)]).values()
    assert sorted(row["seq"] for row in untrue.collect()) == [1, 2, 3, 4, 6, 77]
    assert not missing.head(1)
