"""How much memory the process has, and may have."""

import os
from pathlib import Path
from typing import Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Return the process's resident memory."""
    return int(_STATM.read_bytes().split()[1]) * _PAGE
