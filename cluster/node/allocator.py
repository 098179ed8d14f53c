"""Settings of the memory allocators, so that freed memory returns to the system.

glibc maps large blocks one by one, and returns each when it is freed. With each freed block it
raises its threshold for large ones, up to 32 MB. Entries and buffers of megabytes then lie in the
heap between small objects, and the memory of a flush or of a burst stays with the process: some
90 MB of a leader with a million pending timers. A threshold that was set does not rise.

Other C libraries have no such setting. The functions do nothing there.

Arrow has an allocator of its own by default. It keeps the buffers of a flush: 20 MB of a leader.
"""

import ctypes
from typing import Final

import pyarrow as pa

LARGE_BLOCK: Final = 1 << 20
"""Bytes. Blocks of a flush, of a merge and of a full entry are larger. With a threshold of 256 KB,
intake takes up to a tenth more CPU, and no less memory stays.
"""
HEAP_END: Final = 1 << 20
"""Free bytes that stay at the heap's end."""

_M_TRIM_THRESHOLD: Final = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3


def release_free_pages() -> None:
    """Return free pages of all threads' heaps to the system. It takes a while.

    Each of gRPC's threads has a heap. A large request lies in many small blocks there.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_large_blocks() -> None:
    """Make glibc return each freed block of LARGE_BLOCK bytes or more to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, HEAP_END)


def use_system_memory_for_arrow() -> None:
    """Make Arrow take its buffers from the C library, which returns them."""
    pa.set_memory_pool(pa.system_memory_pool())
