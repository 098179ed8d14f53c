"""Keys in runs whose hashes are equal: the key itself decides, and a damaged one is found."""

from pathlib import Path

import numpy as np
import pytest

from timer.files.disk import RealDisk
from timer.model.columns import ROW, U32, U64, Binary
from timer.model.timer_errors import CorruptFileError
from timer.pending.memory.key_index import KeyHasher
from timer.pending.runs import row_reader
from timer.pending.runs.run import Run
from timer.pending.runs.run_writer import RunWriter

KEYS = (b"a", b"b", b"longer")


class OneHash(KeyHasher):
    """Returns one hash for all keys of the run, and another for other bytes."""

    def __call__(self, topic: U32, keys: Binary) -> U64:
        del topic
        texts = np.split(np.frombuffer(keys.blob, np.uint8), np.cumsum(keys.sizes)[:-1])
        return np.array([7 if bytes(each) in KEYS else 8 for each in texts], np.uint64)


def binary(*keys: bytes) -> Binary:
    return Binary(sizes=np.array([len(key) for key in keys], np.uint32), blob=b"".join(keys))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a, b and longer in topic 1, and a in topic 2."""
    rows = np.zeros(4, ROW)
    rows["due_ms"], rows["seq"], rows["topic"] = 1_000, (1, 2, 3, 4), (1, 1, 1, 2)
    rows["key_start"], rows["key_size"] = (0, 1, 2, 0), (1, 1, 6, 1)
    writer = RunWriter(RealDisk(), tmp_path, 1, hasher=OneHash())
    writer.add(rows, {0: b"".join(KEYS)})
    meta = writer.finish()
    writer.close()
    return Run(RealDisk(), tmp_path, meta, OneHash())


def found(run: Run, topic: int, *keys: bytes) -> list[tuple[bytes, int]]:
    n = len(keys)
    hashes, topics = np.full(n, 7, np.uint64), np.full(n, topic, np.uint32)
    number, rows = row_reader.find_in_run(run, hashes, topics, binary(*keys))
    return sorted((keys[at], seq) for at, seq in zip(number, rows["seq"].tolist(), strict=True))


def test_timers_of_other_keys_and_topics_with_the_same_hash_are_not_found(run: Run) -> None:
    assert found(run, 1, b"a", b"longer", b"c", b"b") == [(b"a", 1), (b"b", 2), (b"longer", 3)]
    assert found(run, 2, b"longer", b"a") == [(b"a", 4)]
    assert found(run, 3, b"a") == []


def test_damaged_key_is_an_error_and_no_other_key(run: Run) -> None:
    data = bytearray(run.path.read_bytes())
    data[data.index(b"longer")] ^= 1
    run.path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="the key does not match its hash"):
        found(run, 1, b"longer")
    run.path.write_bytes(data[: data.index(b"onger")])
    with pytest.raises(CorruptFileError, match="are left of 6 that were written"):
        found(run, 1, b"longer")
