"""Freed memory goes back to the system, as the system tells it."""

import platform
import subprocess
import sys

import pytest

BLOCKS = 64
BLOCK = 2 << 20

PROGRAM = f"""
import sys
from pathlib import Path
from cluster.allocator import give_back_large_blocks

def resident():
    fields = dict(l.split(":", 1) for l in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10

if sys.argv[1] == "set":
    give_back_large_blocks()
for _ in range(2):
    large = b"x" * {BLOCK}
    del large  # from here on glibc takes such a block for a small one, unless it was told
before = resident()
blocks, small = [], []
for _ in range({BLOCKS}):
    blocks.append(bytearray(b"x") * {BLOCK})
    small.append(bytearray(b"x") * 1_000)
del blocks
print(resident() - before)
"""


def kept(how: str) -> int:
    """Return how many bytes a process keeps after it has freed BLOCKS blocks among small ones."""
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_blocks_among_small_ones_go_back_and_would_stay_without_the_setting() -> None:
    assert kept("unset") > BLOCKS * BLOCK // 2
    assert kept("set") < BLOCKS * BLOCK // 10
