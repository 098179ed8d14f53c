"""Memory of processes, from /proc, and disk space of directories."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BLOCK: Final = 512
"""The unit of st_blocks, on every file system."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of a process in bytes."""

    total: int
    """VmRSS, which includes pages of mapped files."""
    anonymous: int

    @classmethod
    def of(cls, pid: int) -> "Resident":
        """Read the values from /proc. Both are 0 if the process has ended."""
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return cls(0, 0)
        fields = dict(line.split(":", 1) for line in lines)
        # A process that ends right now still has its status, without memory.
        return cls(*(int(fields.get(n, "0").split()[0]) << 10 for n in ("VmRSS", "RssAnon")))


def disk_bytes(directory: Path) -> int:
    """Return the bytes that the files below `directory` occupy; holes do not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK
            except FileNotFoundError:  # the file was deleted meanwhile
                continue
    return total
