"""How memory goes back to the system once it is free.

glibc takes large blocks from the system one by one, and gives each back when it is freed; but with
each such block that is freed it raises what it calls large, up to 32 MB. Then entries and buffers
of megabytes lie in the heap between small things, and what a flush or a burst of intake took stays
with the process: some 90 MB of a leader's, with a million pending. A threshold that was set stays.

Other C libraries have no such setting; there this does nothing.

Arrow has an allocator of its own by default. It keeps the buffers of a flush: 20 MB of a leader's.
"""

import ctypes
from typing import Final

import pyarrow as pa

LARGE_BLOCK: Final = 1 << 20
"""Bytes. What a flush, a merge and a full entry of many timers need is larger; with a threshold of
256 KB intake takes up to a tenth more CPU, and no less memory stays."""
HEAP_END: Final = 1 << 20
"""So much that is free at the heap's end stays."""

_M_TRIM_THRESHOLD: Final = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD: Final = -3


def give_back_free_pages() -> None:
    """Let free pages go back to the system, whichever thread's heap they are in. It takes a while.

    Each of gRPC's threads has a heap, in which a large request lies in many small blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_large_blocks() -> None:
    """Let every block of LARGE_BLOCK bytes or more go back to the system when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, HEAP_END)


def use_system_memory_for_arrow() -> None:
    """Let Arrow's buffers come from the C library, which gives them back."""
    pa.set_memory_pool(pa.system_memory_pool())
