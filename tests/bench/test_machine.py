"""/proc, read from its text; and this very machine."""

import os
from pathlib import Path

import pytest

from bench import bench_machine, cpu

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
/dev/vdb /srv/data xfs rw 0 0
/dev/vdc /srv/data btrfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/opt/x", "ext4"),
        ("/run/bench", "tmpfs"),
        ("/runner", "ext4"),
        ("/srv/data/x", "btrfs"),
        ("/srv", "ext4"),
    ],
)
def test_a_path_lies_on_the_deepest_mount_above_it(path: str, kind: str) -> None:
    assert bench_machine.filesystem(MOUNTS, Path(path)) == kind


def test_cpu_of_a_process_whose_name_looks_like_fields() -> None:
    stat = "7 (a) S 1 (b) R 1 7 7 0 -1 4194304 9 0 0 0 250 50 9 9 20 0 1 0 100 1 1"
    assert cpu.parse_process(stat) == 300 / cpu.TICKS_PER_S


def test_busy_cpu_of_the_machine_leaves_out_idle_and_iowait() -> None:
    stat = "cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    assert cpu.parse_machine(stat) == 63 / cpu.TICKS_PER_S


def test_a_process_that_is_gone_uses_nothing() -> None:
    assert cpu.of_process(2**22 + 1) == 0
    assert cpu.of_process(os.getpid()) > 0


def test_this_machine_is_described(tmp_path: Path) -> None:
    described = bench_machine.describe(tmp_path)
    assert described["cores"] == len(os.sched_getaffinity(0))
    assert isinstance(described["memory_mb"], int)
    assert described["memory_mb"] > 0
    assert isinstance(described["packages"], dict)
    assert {"grpcio", "protobuf", "numpy", "pyarrow"} <= described["packages"].keys()
    assert [*tmp_path.iterdir()] == []


def test_the_commit_of_no_repository_is_unknown(tmp_path: Path) -> None:
    assert bench_machine.commit(tmp_path) == "unknown"
