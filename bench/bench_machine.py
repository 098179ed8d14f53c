"""The origin of figures: machine, versions, commit. Figures of one origin can be compared."""

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""The tree's root."""
PACKAGES: Final = ("grpcio", "protobuf", "numpy", "pyarrow", "uvloop", "pysyncobj")
_SYNCS: Final = 50
_SYNC_SIZE: Final = 4096


def describe(directory: Path) -> dict[str, object]:
    """Return the facts that figures depend on. `directory`: place of the nodes' data."""
    memory_kb = _field(Path("/proc/meminfo").read_text(), "MemTotal").split()[0]
    return {
        "cpu": _field(Path("/proc/cpuinfo").read_text(), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": int(memory_kb) // 1024,
        "kernel": platform.release(),
        "filesystem": filesystem(Path("/proc/mounts").read_text(), directory.resolve()),
        "fdatasync_ms": round(fdatasync_ms(directory), 3),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def commit(root: Path = ROOT) -> str:
    """Return the short commit of a tree, with "-dirty" appended if files have changed since."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def filesystem(mounts: str, path: Path) -> str:
    """Return the filesystem type of an absolute path, from a /proc/mounts."""
    found, depth = "unknown", -1
    for line in mounts.splitlines():
        _, mount, kind, *_ = line.split()
        at = Path(mount)
        # Of two mounts at the same place, the later hides the earlier.
        if path.is_relative_to(at) and len(at.parts) >= depth:
            found, depth = kind, len(at.parts)
    return found


def fdatasync_ms(directory: Path) -> float:
    """Return the median ms to sync 4 KiB appended to a file: the least latency of any answer."""
    path, times_s = directory / "fdatasync.probe", []
    with path.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_SYNC_SIZE))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times_s.append(time.perf_counter() - began)
    path.unlink()
    return statistics.median(times_s) * 1000


def _field(text: str, name: str) -> str:
    """Return the value of the first `name: value` line of a file in /proc."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"
