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
from cluster.node.allocator import release_large_blocks

def resident():
    fields = dict(l.split(":", 1) for l in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10

if sys.argv[1] == "set":
    release_large_blocks()
for _ in range(2):
    large = b"x" * {BLOCK}
    del large  # from here on glibc takes such a block for a small one, unless it was told
before = resident()
blocks, small = [], []
for _ in range({BLOCKS}):
    blocks.append(bytearray(b"x") * {BLOCK})
    small.append(bytearray(b"x") * 50_000)  # more than the free places before the blocks
del blocks
print(resident() - before)
"""


def kept(how: str, program: str = PROGRAM) -> int:
    """Return how many bytes a process keeps after it has freed BLOCKS blocks."""
    command = [sys.executable, "-c", program, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_blocks_among_small_ones_go_back_and_would_stay_without_the_setting() -> None:
    assert kept("unset") > BLOCKS * BLOCK // 2
    assert kept("set") < BLOCKS * BLOCK // 10


ARROW_PROGRAM = f"""
import sys, threading
from pathlib import Path
import pyarrow as pa
from cluster.node.allocator import (
    release_free_pages, release_large_blocks, use_system_memory_for_arrow
)

def resident():
    fields = dict(l.split(":", 1) for l in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10

def flush():
    buffers = [pa.allocate_buffer({BLOCK // 10}) for _ in range({10 * BLOCKS})]
    for buffer in buffers:
        memoryview(buffer).cast("B")[:] = bytes(len(buffer))

def in_thread():
    thread = threading.Thread(target=lambda: (flush(), done.set(), over.wait()))
    thread.start()
    return thread

release_large_blocks()
if sys.argv[1] == "set":
    use_system_memory_for_arrow()
done, over = threading.Event(), threading.Event()
before = resident()
thread = in_thread()
done.wait()
release_free_pages()
print(resident() - before)
over.set()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is of glibc")
def test_buffers_of_arrow_go_back_though_the_thread_lives_on() -> None:
    assert kept("unset", ARROW_PROGRAM) > BLOCKS * BLOCK // 2
    assert kept("set", ARROW_PROGRAM) < BLOCKS * BLOCK // 10
